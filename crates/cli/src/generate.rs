//! `generate`: continues prompts, streaming where there is one, and answers questions about images or frames.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use flatout_data::Vocabulary;
use flatout_data::examples::{Date, QuestionPart, Questions};
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::SYSTEM;
use flatout_train::infer::generate::{
    CHUNK_WITH_FRAMES, CHUNK_WITH_IMAGES, Generator, GeneratorCapacity, Pictures, Prompt, encode,
};
use flatout_train::run::BESIDE;
use flatout_train::weights::loaded::Loaded;
use flatout_waits::{self as waits, Unit};
use serde_json::json;

use crate::args::Generate;
use crate::model;
use crate::screen::{Screen, count, duration};

pub fn generate(args: &Generate, screen: &Screen) -> Result<ExitCode, Failure> {
    let refused = |sentence: String| Err(Failure::User(UserError(sentence)));
    args.sampling.check()?;
    if args.at_once == 0 {
        return refused("--at-once is 0 and must be at least 1".into());
    }
    let prompts = prompts(args)?;
    let mut loaded = model::open(&args.model, &args.overrides)?;
    let (pictures, shown) = match (&args.frames, args.image.is_empty()) {
        (Some(frames), _) => Pictures::open_frames(&loaded, frames)?,
        (None, true) => (Pictures::default(), vec![]),
        (None, false) => Pictures::open(&loaded, &args.image)?,
    };
    let Some(vocabulary) = loaded.vocabulary.clone() else {
        return refused(format!(
            "{} has no tokenizer.json, which prompts are tokenised with: add one to the folder",
            args.model.display()
        ));
    };
    let asks = args.chat || !args.image.is_empty() || args.frames.is_some();
    let tokens = match asks {
        true => question_prompts(&mut loaded, &vocabulary, &prompts, (&pictures, &shown))?,
        false => encode(&vocabulary, loaded.is_run, &prompts)?.into_iter().map(Prompt::from).collect(),
    };
    let longest = tokens.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(1);
    if longest > loaded.positions {
        let what = match (shown.is_empty(), &args.frames) {
            (true, _) => "a shorter one",
            (false, None) => "a shorter one, or fewer or smaller images",
            (false, Some(_)) => "a shorter one, or fewer frames",
        };
        return refused(format!(
            "a prompt has {longest} tokens and the model's context has {}: give {what}",
            loaded.positions
        ));
    }
    let device = model::device(&loaded)?;
    let (weights, of_averages) = (loaded.weights.which(), model::of_averages(&loaded));
    let room = GeneratorCapacity {
        sequences: prompts.len().min(args.at_once),
        tokens: longest.saturating_add(args.max_tokens),
    };
    let chunk = if args.frames.is_some() { CHUNK_WITH_FRAMES } else { CHUNK_WITH_IMAGES };
    let mut generator = match shown.is_empty() {
        true => Generator::new(loaded, &device, room)?,
        false => Generator::with_pictures(loaded, &device, room, pictures, chunk)?,
    };
    let sampling = args.sampling.options(args.seed, args.max_tokens);
    let streams = prompts.len() == 1 && !screen.json && !asks;
    let began = Instant::now();
    let texts: Vec<String> = if streams {
        let text = generator.generate(&prompts[0], sampling, |piece| screen.piece(piece))?;
        screen.piece("\n");
        vec![text]
    } else {
        let wait = waits::begin("generating", Unit::Things("tokens"), None);
        let made = generator.continue_prompts(&tokens, sampling, &mut |_, _| wait.add(1))?;
        let whole = |(prompt, more): (&Prompt, &Vec<u32>)| match asks {
            true => vocabulary.decode(more).trim().to_string(),
            false => vocabulary.decode(&[&prompt.tokens[..], more].concat()),
        };
        tokens.iter().zip(&made).map(whole).collect()
    };
    let made = generator.made;
    let seconds = began.elapsed().as_secs_f64();
    let read: usize = tokens.iter().map(|prompt| prompt.tokens.len()).sum();
    if screen.json {
        let checkpoint = generator.checkpoint.display().to_string();
        let images: Vec<String> = args.image.iter().map(|path| path.display().to_string()).collect();
        let mut found = json!({
            "text": texts[0], "prompt": prompts[0], "texts": texts, "prompts": prompts, "images": images, "checkpoint": checkpoint,
            "step": generator.step, "weights": weights, "tokens": made, "prompt_tokens": read, "seconds": seconds,
            "tokens_per_second": made as f64 / seconds,
        });
        if args.frames.is_some() {
            found["frames"] = json!(shown.len());
        }
        screen.object(&found);
    } else if !streams {
        texts.iter().for_each(|text| screen.result(text));
    }
    screen.note(format!(
        "{} tokens after {} in {}: {:.1} tokens/s{of_averages}",
        count(made as u64),
        count(read as u64),
        duration(seconds),
        made as f64 / seconds
    ));
    Ok(ExitCode::SUCCESS)
}

/// The tokens of questions in the model's chat template, about the pictures with the numbers `shown`. The template's end of an
/// answer becomes a stop token.
fn question_prompts(
    loaded: &mut Loaded,
    vocabulary: &Vocabulary,
    prompts: &[String],
    (pictures, shown): (&Pictures, &[usize]),
) -> Result<Vec<Prompt>, Failure> {
    let folders = [loaded.dir.join(BESIDE), loaded.dir.clone()];
    let data = &loaded.config.data;
    let date = data.date.as_deref().and_then(Date::parse);
    let questions = Questions::open(vocabulary, data.template.as_deref(), &folders, date)?;
    loaded.stops.extend(questions.end()?);
    let sees = loaded.config.model.as_qwen3_vl().is_some();
    let looks = loaded.config.model.as_fovea().is_some();
    // Models that see frames are always trained with a system message.
    let questions = match looks {
        true => questions.with_system(loaded.config.data.system.as_deref().unwrap_or(SYSTEM)),
        false => questions,
    };
    let prompt = |prompt: &String| -> Result<Prompt, Failure> {
        if looks {
            return Ok(Pictures::before(shown, &questions.tokens(prompt)?));
        }
        let parts = if sees { QuestionPart::split(prompt, shown.len())? } else { vec![] };
        if shown.is_empty() {
            return Ok(questions.tokens(prompt)?.into());
        }
        Ok(pictures.placed(&questions.tokens_of_parts(&parts)?, shown)?)
    };
    prompts.iter().map(prompt).collect()
}

/// The prompts of --prompt, then those of the file; one empty prompt if there are none.
fn prompts(args: &Generate) -> Result<Vec<String>, UserError> {
    let mut prompts = args.prompt.clone();
    if let Some(path) = &args.prompts {
        prompts.extend(read(path)?);
        if prompts.is_empty() {
            return Err(UserError(format!("{} has no prompts", path.display())));
        }
    }
    Ok(if prompts.is_empty() { vec![String::new()] } else { prompts })
}

fn read(path: &Path) -> Result<Vec<String>, UserError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| UserError(format!("{shown} cannot be read: {error}")))?;
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(&text)
            .map_err(|error| UserError(format!("{shown} is not a JSON list of texts: {error}")));
    }
    Ok(text.lines().map(String::from).collect())
}
