//! `data prepare` tokenises text into shards; `data inspect` shows what data or the rows of a recipe hold.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use flatout_data::examples::{
    ExampleKind, ExampleSpec, FrameSpec, VisionSpec, open as open_examples, shows_images,
};
use flatout_data::formats::{OnError, ReadOptions};
use flatout_data::inspect::{Inspection, LengthSummary, inspect as look, spans};
use flatout_data::prepare::{Preparation, Prepared, Progress, Tokenizer, prepare as write_shards};
use flatout_data::remote::is_remote;
use flatout_data::{LoaderOptions, OpenEvent, SourceKind, Spec};
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::{Prompts, SYSTEM, Task};
use flatout_train::machine;
use flatout_train::recipes;
use flatout_train::tasks::examples::example_sets;
use flatout_train::tasks::text::corpus_saying;
use serde_json::json;

use crate::args::{Data, DataCommand, InputFormat, Inspect, Prepare, recipe_and_overrides};
use crate::examples;
use crate::images;
use crate::screen::{Screen, bytes, count, duration};

/// Time between lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Characters of a sample that are shown.
const SHOWN: usize = 400;

pub fn data(args: &Data, screen: &Screen) -> Result<ExitCode, Failure> {
    match &args.command {
        DataCommand::Prepare(args) => prepare(args, screen),
        DataCommand::Inspect(args) => inspect(args, screen),
    }
}

fn read_options(input: &InputFormat, on_error: OnError) -> ReadOptions {
    ReadOptions {
        format: input.format.of_text(),
        field: input.field.clone(),
        on_error,
        ..ReadOptions::default()
    }
}

fn prepare(args: &Prepare, screen: &Screen) -> Result<ExitCode, Failure> {
    if args.input.format.is_tokens() {
        return Err(Failure::User(UserError(format!(
            "--format {} is for token files, which need no preparation: give them to train as data.path",
            args.input.format
        ))));
    }
    if args.shard_tokens == 0 {
        return Err(Failure::User(UserError("--shard-tokens is 0 and must be at least 1".into())));
    }
    let preparation = Preparation {
        sources: args.sources.clone(),
        out: args.out.clone(),
        tokenizer: match &args.tokenizer {
            Some(path) => Tokenizer::File(path.clone()),
            None => Tokenizer::Train(args.vocab),
        },
        read: read_options(&args.input, args.on_error),
        shard_tokens: args.shard_tokens,
        workers: args.workers.map_or_else(machine::threads, usize::from),
        restart: args.restart,
        is_cache: false,
    };
    let began = Instant::now();
    let mut log = ProgressLog::new(*screen);
    let prepared = write_shards(&preparation, &mut |progress| log.update(progress));
    let prepared = prepared?;
    if screen.json {
        screen.object(&as_json(&prepared, &args.out));
        return Ok(ExitCode::SUCCESS);
    }
    let totals = &prepared.manifest.totals;
    let size: u64 = prepared.manifest.shards.iter().map(|shard| shard.bytes).sum();
    match &prepared.done {
        None => screen.result(format!("{} is complete already: nothing was done", args.out.display())),
        Some(progress) => {
            if prepared.kept_shards > 0 {
                screen.result(format!("{} shards were complete already and were kept", prepared.kept_shards));
            }
            screen.result(format!("{} in {}", line(progress), duration(began.elapsed().as_secs_f64())));
        }
    }
    screen.result(format!(
        "shards   {} of {} in {}",
        prepared.manifest.shards.len(),
        bytes(size),
        args.out.display()
    ));
    screen.result(format!(
        "tokens   {} in {} documents; vocabulary {}",
        count(totals.tokens),
        count(totals.documents),
        count(prepared.manifest.tokenizer.vocabulary)
    ));
    if totals.cut > 0 {
        screen.result(format!("cut      {} very long documents were split", count(totals.cut)));
    }
    if !totals.skipped.is_empty() {
        let reasons: Vec<String> =
            totals.skipped.iter().map(|(reason, skipped)| format!("{} {reason}", count(*skipped))).collect();
        screen.result(format!("skipped  {}", reasons.join(", ")));
        for (reason, _, place) in prepared.skipped.reasons() {
            screen.note(format!("         first {reason}: {place}"));
        }
    }
    screen.note(format!(
        "next     flatout train tiny data.path={} model.vocab={}",
        args.out.display(),
        prepared.manifest.tokenizer.vocabulary
    ));
    Ok(ExitCode::SUCCESS)
}

/// Prints a line of progress from time to time where there is no terminal with a status line.
struct ProgressLog {
    screen: Screen,
    last_line: Instant,
}

impl ProgressLog {
    fn new(screen: Screen) -> ProgressLog {
        ProgressLog { screen, last_line: Instant::now() }
    }

    fn update(&mut self, progress: &Progress) {
        if !self.screen.live && self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            self.screen.note(line(progress));
        }
    }
}

fn line(progress: &Progress) -> String {
    format!(
        "input {} of {}: {} tokens, {} tokens/s, {}/s of text",
        progress.input,
        progress.inputs,
        count(progress.tokens),
        count(progress.tokens_per_second() as u64),
        bytes(progress.bytes_per_second() as u64)
    )
}

fn as_json(prepared: &Prepared, out: &Path) -> serde_json::Value {
    let done = prepared.done.as_ref().map(|progress| {
        json!({
            "documents": progress.documents,
            "tokens": progress.tokens,
            "text_bytes": progress.text_bytes,
            "seconds": progress.elapsed.as_secs_f64(),
            "tokens_per_second": progress.tokens_per_second(),
            "bytes_per_second": progress.bytes_per_second(),
        })
    });
    json!({ "out": out, "kept_shards": prepared.kept_shards, "done": done, "manifest": prepared.manifest })
}

fn inspect(args: &Inspect, screen: &Screen) -> Result<ExitCode, Failure> {
    if args.task == Task::Images {
        return images::inspect(args, screen);
    }
    match names_recipe(&args.words) {
        true => inspect_recipe(args, screen),
        false => inspect_files(args, screen),
    }
}

/// Whether the words are a recipe with overrides. They are files if the first one exists, is on a server, is a pattern or is `-`.
fn names_recipe(words: &[String]) -> bool {
    let is_file = |word: &String| {
        let is_recipe_file = word.ends_with(".toml");
        !is_recipe_file
            && (word == "-" || is_remote(word) || word.contains(['*', '?']) || Path::new(word).exists())
    };
    !words.first().is_some_and(is_file)
}

/// Whether a word names a tar shard, a pattern of tar shards, or a folder that contains one.
fn holds_shards(word: &str) -> bool {
    let is_shard = |path: &Path| path.extension().is_some_and(|ending| ending == "tar");
    let entries = std::fs::read_dir(word).into_iter().flatten().flatten();
    is_shard(Path::new(word)) || entries.into_iter().any(|entry| is_shard(&entry.path()))
}

/// The size of the tokeniser that is trained to inspect examples where none is given.
const INSPECTION_VOCABULARY: usize = 8192;

fn inspect_files(args: &Inspect, screen: &Screen) -> Result<ExitCode, Failure> {
    if args.task != Task::Text {
        // Pairs about frames are members of archives.
        let of_frames = args.task == Task::Foveated || args.words.iter().any(|word| holds_shards(word));
        let mut spec = ExampleSpec {
            task: match args.task {
                Task::Classes => ExampleKind::Classes,
                Task::VisualChat => ExampleKind::Visual,
                Task::Preference if of_frames => ExampleKind::Frames,
                Task::Preference => ExampleKind::Pairs,
                Task::Foveated => ExampleKind::Frames,
                _ => ExampleKind::Chat,
            },
            path: args.words.clone(),
            read: read_options(&args.input, OnError::Skip),
            tokenizer: args.tokenizer.clone(),
            template: args.template.clone(),
            vocab: if args.tokenizer.is_some() { usize::MAX } else { INSPECTION_VOCABULARY },
            max_tokens: usize::MAX,
            vision: Some(VisionSpec { root: args.image_root.clone(), ..VisionSpec::default() }),
            frames: Some(FrameSpec {
                system: SYSTEM.into(),
                prompts: Prompts::default().all(),
                pairs: args.task == Task::Preference,
                ..FrameSpec::default()
            }),
            workers: machine::threads(),
            ..ExampleSpec::default()
        };
        // There is no model that says whether texts have images, so the rows decide.
        if spec.task == ExampleKind::Pairs && !shows_images(&spec)? {
            spec.vision = None;
        }
        let opened = match open_examples(&spec) {
            // Rows without pairs may have single answers with a label.
            Err(error) if spec.task == ExampleKind::Pairs => {
                open_examples(&ExampleSpec { task: ExampleKind::Judged, ..spec }).map_err(|_| error)
            }
            opened => opened,
        };
        examples::show(&opened?, args.samples, screen);
        return Ok(ExitCode::SUCCESS);
    }
    let spec = Spec {
        source: SourceKind::Auto.named_by(args.input.format),
        path: args.words.clone(),
        read: read_options(&args.input, OnError::Skip),
        token_bytes: args.input.format.token_bytes(),
        eos: args.eos,
        tokenizer: args.tokenizer.clone(),
        ..Spec::default()
    };
    let inspection = look(&spec, args.samples)?;
    if screen.json {
        screen.object(&inspection);
        return Ok(ExitCode::SUCCESS);
    }
    let Inspection { kind, files, bytes: size, documents, sampled, tokens, lengths, samples, unusable } =
        &inspection;
    let tokens = tokens.map(|tokens| format!(", {} tokens", count(tokens))).unwrap_or_default();
    let documents = match sampled {
        Some(sampled) if sampled != documents => {
            format!("about {} documents by a sample of {}", count(*documents), count(*sampled))
        }
        Some(sampled) => format!("a sample of {} documents", count(*sampled)),
        None => format!("{} documents", count(*documents)),
    };
    let plural = if *files == 1 { "" } else { "s" };
    screen.result(format!(
        "{kind}  {} file{plural}, {}, {documents}{tokens}",
        count(*files as u64),
        bytes(*size)
    ));
    for (reason, unusable, place) in unusable {
        let first = if place.is_empty() { String::new() } else { format!(" (first: {place})") };
        screen.result(format!("unusable  {} {reason}{first}", count(*unusable)));
    }
    show_lengths(lengths, screen);
    for sample in samples {
        let tokens = sample.tokens.map(|tokens| format!(", {} tokens", count(tokens))).unwrap_or_default();
        screen.result(format!("\n{}{tokens}", sample.place));
        screen.result(shortened(&sample.text));
    }
    Ok(ExitCode::SUCCESS)
}

pub fn show_lengths(lengths: &LengthSummary, screen: &Screen) {
    let LengthSummary { unit, least, median, most, mean, histogram } = lengths;
    screen.result(format!(
        "lengths in {unit}: least {}, median {}, mean {}, most {}",
        count(*least),
        count(*median),
        count(*mean as u64),
        count(*most)
    ));
    let largest = histogram.iter().map(|bar| bar.documents).max().unwrap_or(0).max(1);
    for bar in histogram {
        let drawn = "#".repeat((bar.documents * 40).div_ceil(largest) as usize);
        screen.result(format!("{:>12}+  {:<40}  {}", count(bar.from), drawn, count(bar.documents)));
    }
}

pub fn shortened(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN).collect();
    if shown.len() < text.len() {
        shown.push_str(" ...");
    }
    shown
}

/// Shows the first rows that a recipe trains on: tokens in brackets are read but not trained on.
fn inspect_recipe(args: &Inspect, screen: &Screen) -> Result<ExitCode, Failure> {
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let config = recipes::resolve(recipe, &args.with, overrides)?;
    config.validate_for_training()?;
    if config.data.task == Task::Images {
        let sets = flatout_train::tasks::images::sets(&config, &mut |event| {
            let (OpenEvent::Note(note) | OpenEvent::LeftOut(note)) = event;
            screen.note(format!("data     {note}"));
        })?;
        let changes = flatout_train::tasks::augmentation::changes(&config);
        images::show(&sets, args.samples, args.time, changes, screen)?;
        return Ok(ExitCode::SUCCESS);
    }
    if config.data.task != Task::Text {
        let sets = example_sets(&config, None, None, &mut |event| {
            if let OpenEvent::Note(note) = event {
                screen.note(format!("data     {note}"));
            }
        })?;
        examples::show(&sets, args.samples, screen);
        return Ok(ExitCode::SUCCESS);
    }
    let corpus = corpus_saying(&config, None, &mut |event| {
        let (OpenEvent::Note(note) | OpenEvent::LeftOut(note)) = event;
        screen.note(format!("data     {note}"));
    })?;
    let described = corpus.describe();
    let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default())?;
    let rows = loader.next_rows(args.samples)?;
    let seen: Vec<_> = (0..rows.count()).map(|row| spans(corpus.vocabulary(), &rows, row)).collect();
    if screen.json {
        let rows: Vec<_> = seen
            .iter()
            .enumerate()
            .map(|(row, spans)| {
                let trained: f32 = rows.weights[row * rows.context..(row + 1) * rows.context].iter().sum();
                json!({ "row": row, "segments": rows.segments[row].len(), "trained_tokens": trained, "spans": spans })
            })
            .collect();
        screen.object(&json!({
            "documents": described.documents,
            "tokens": described.tokens,
            "is_estimated": described.is_estimated,
            "held_out_documents": described.held_out_documents,
            "held_out_tokens": described.held_out_tokens,
            "vocabulary": corpus.vocabulary().size(),
            "context": config.model.tokens(),
            "rows": rows,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let about = if described.is_estimated { "about " } else { "" };
    let number = |number: Option<u64>| number.map_or("endlessly many".into(), count);
    screen.result(format!(
        "{about}{} tokens in {} documents to train on, {} documents held out; vocabulary {}",
        number(described.tokens),
        number(described.documents),
        number(described.held_out_documents),
        corpus.vocabulary().size()
    ));
    screen.result("rows as the loss sees them; text in [[ ]] is read but not trained on:");
    for (row, spans) in seen.iter().enumerate() {
        let trained: usize = spans.iter().filter(|span| span.is_trained).map(|span| span.tokens).sum();
        screen.result(format!(
            "\nrow {row}: {trained} of {} tokens trained, {} segments",
            config.model.tokens(),
            rows.segments[row].len()
        ));
        let text: String = spans
            .iter()
            .map(|span| if span.is_trained { span.text.clone() } else { format!("[[{}]]", span.text) })
            .collect();
        screen.result(text);
    }
    Ok(ExitCode::SUCCESS)
}
