//! Samples of a run at its evaluations: texts that the model writes after some prompts, or the classes it predicts for some
//! held-out texts or images.
//!
//! Nothing here affects training: tokens are drawn with their own random counters, the plans write to a cache that nothing else
//! reads, and predictions are those that the evaluation made anyway.

use std::fs;
use std::path::Path;

use flatout_data::examples::{Date, Questions};
use flatout_data::images::thumbnail;
use flatout_data::{DataError, Vocabulary, durable};
use flatout_ir::Role;
use flatout_ir::passes::input_path;
use flatout_runtime::Session;
use flatout_waits::{self as waits, Unit};

use crate::config::{Config, Task};
use crate::metrics::probabilities;
use crate::resolve::samples::{SampleSizes, room};
use crate::run::samples::{IMAGES, Prediction, Sample};
use crate::sampling::Sampling;
use crate::tasks::batch::{EvalSet, Shown, ShownAs};
use crate::tasks::dataset::Dataset;
use crate::tasks::examples;
use crate::training::evaluate::EvalResults;
use crate::{Failure, UserError};

/// The most bytes of an example's text that are logged.
const TEXT_BYTES: usize = 1000;
/// The most bytes of a picture that is stored beside the log.
const IMAGE_BYTES: usize = 4096;

/// The samples that a run takes.
#[derive(Default)]
pub struct Samples {
    writer: Option<Writer>,
    examples: Vec<Example>,
    classes: Vec<String>,
    /// Batches of the evaluation seen so far.
    batches: usize,
}

/// A held-out text or image, and its prediction.
struct Example {
    batch: usize,
    at: usize,
    text: String,
    image: Option<String>,
    seen: Option<Prediction>,
}

/// Generates the text samples of a run.
struct Writer {
    prompts: Vec<(String, Vec<u32>)>,
    vocabulary: Vocabulary,
    /// The model's vocabulary, which may be larger than the tokeniser's.
    vocab: usize,
    stops: Vec<u32>,
    /// Prompts are questions that a template wraps, not beginnings of texts.
    is_answer: bool,
    room: SampleSizes,
    position_axes: usize,
    how: Sampling,
}

impl Samples {
    /// Prepares the samples that a config asks for; held-out examples come from batches of the capacity of the plan `eval`.
    /// Pictures are written only where `writes` is set.
    pub fn open(
        config: &Config,
        data: &dyn Dataset,
        held_out: Option<(&dyn EvalSet, usize)>,
        run: &Path,
        writes: bool,
    ) -> Result<Samples, Failure> {
        let classes = config.data.classes.clone();
        let mut samples = Samples { classes, writer: Writer::open(config, data, run)?, ..Samples::default() };
        let Some((set, capacity)) = held_out.filter(|_| config.samples.count > 0) else { return Ok(samples) };
        let count = config.samples.count.min(set.samples());
        for nth in 0..count {
            let number = nth * set.samples() / count;
            let Some(Shown { batch, at, shown }) = set.shown(number, capacity)? else { continue };
            let (text, image) = match shown {
                ShownAs::Tokens(tokens) => {
                    let text = data.vocabulary().map(|vocabulary| vocabulary.decode(&tokens));
                    (shortened(text.unwrap_or_default()), None)
                }
                ShownAs::Pixels { size, rgb } => {
                    let name = format!("{number}.png");
                    if writes {
                        keep_image(run, &name, size, &rgb)?;
                    }
                    (String::new(), Some(name))
                }
            };
            samples.examples.push(Example { batch, at, text, image, seen: None });
        }
        Ok(samples)
    }

    /// Starts an evaluation.
    pub fn begin(&mut self) {
        self.batches = 0;
        self.examples.iter_mut().for_each(|example| example.seen = None);
    }

    /// Takes the next batch of the evaluation.
    pub fn see(&mut self, results: &EvalResults) {
        let (batch, labels) = (self.batches, &results.labels);
        self.batches += 1;
        for example in self.examples.iter_mut().filter(|example| example.batch == batch) {
            let classes = results.class_logits.len() / labels.len().max(1);
            let logits = &results.class_logits[example.at * classes..(example.at + 1) * classes];
            let probabilities = probabilities(logits);
            let likeliest = (0..classes).max_by(|a, b| probabilities[*a].total_cmp(&probabilities[*b]));
            let Some(likeliest) = likeliest else { continue };
            let name = |class: usize| self.classes.get(class).cloned().unwrap_or_else(|| class.to_string());
            let truth = usize::try_from(labels[example.at]).ok();
            example.seen = Some(Prediction {
                predicted: name(likeliest),
                probability: probabilities[likeliest],
                truth: truth.map(name),
                is_right: truth == Some(likeliest),
            });
        }
    }

    /// The samples after update `step`: predictions of the evaluation just made, and texts that the model generates now, unless
    /// `stop` says between two of them that the time is up.
    pub fn take(
        &mut self,
        session: &mut Session,
        step: u64,
        stop: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Vec<Sample>, Failure> {
        let seen = self.examples.iter_mut().filter_map(|example| {
            let prediction = Some(example.seen.take()?);
            let (prompt, image) = (example.text.clone(), example.image.clone());
            Some(Sample { step, prompt, text: None, image, prediction })
        });
        let mut samples: Vec<Sample> = seen.collect();
        let Some(writer) = &self.writer else { return Ok(samples) };
        let wait = waits::begin("writing samples", Unit::Things("tokens"), None);
        for (number, (prompt, tokens)) in writer.prompts.iter().enumerate() {
            if stop(number) {
                break;
            }
            let text = Some(writer.write(session, number, tokens, &mut || wait.add(1))?);
            samples.push(Sample { step, prompt: prompt.clone(), text, image: None, prediction: None });
        }
        Ok(samples)
    }
}

impl Writer {
    /// `None` where no samples of text are asked for.
    fn open(config: &Config, data: &dyn Dataset, run: &Path) -> Result<Option<Writer>, Failure> {
        let Some(room) = room(config) else { return Ok(None) };
        let wanted = &config.samples;
        let Some(vocabulary) = data.vocabulary() else {
            return Err(Failure::User(UserError(
                "`samples.prompts` is given, and the data comes without a tokeniser: give data.tokenizer, or leave it out"
                    .into(),
            )));
        };
        let mut stops = vec![vocabulary.eos()];
        let unreadable = |error: DataError| Failure::User(UserError(format!("`samples.prompts`: {error}")));
        let tokens = |prompt: &String| Ok([vec![vocabulary.bos()], vocabulary.encode(prompt)?].concat());
        let prompts: Result<Vec<Vec<u32>>, DataError> = match config.data.task {
            Task::Text => wanted.prompts.iter().map(tokens).collect(),
            _ => {
                let questions = questions(config, vocabulary, run)?;
                stops.extend(questions.end()?);
                wanted.prompts.iter().map(|prompt| questions.tokens(prompt)).collect()
            }
        };
        let prompts = prompts.map_err(unreadable)?;
        if let Some((prompt, tokens)) =
            wanted.prompts.iter().zip(&prompts).find(|(_, tokens)| tokens.len() >= room.capacity)
        {
            return Err(Failure::User(UserError(format!(
                "the prompt {prompt:?} of `samples.prompts` has {} tokens, and there is room for {} with what follows: shorten it",
                tokens.len(),
                room.capacity
            ))));
        }
        Ok(Some(Writer {
            prompts: wanted.prompts.iter().cloned().zip(prompts).collect(),
            vocab: config.model.vocab().expect("checked: it predicts text"),
            vocabulary: vocabulary.clone(),
            stops,
            is_answer: config.data.task != Task::Text,
            room,
            position_axes: config.model.as_decoder().map_or(1, |decoder| decoder.position_axes()),
            how: Sampling {
                temperature: wanted.temperature,
                top_k: 0,
                top_p: 1.0,
                seed: config.train.seed,
                max_tokens: wanted.max_tokens,
            },
        }))
    }

    /// Generates the text that follows a prompt.
    fn write(
        &self,
        session: &mut Session,
        number: usize,
        prompt: &[u32],
        count: &mut dyn FnMut(),
    ) -> Result<String, Failure> {
        let mut logits = vec![];
        let mut seen = 0;
        for part in prompt.chunks(self.room.chunk) {
            logits = self.read(session, Role::Prefill, seen, part)?;
            seen += part.len();
        }
        let mut written: Vec<u32> = vec![];
        loop {
            let next = self.how.at(number as u32, written.len()).token(&logits[..self.vocabulary.size()]);
            if self.stops.contains(&next) {
                break;
            }
            written.push(next);
            count();
            if written.len() >= self.how.max_tokens || seen >= self.room.capacity {
                break;
            }
            logits = self.read(session, Role::Decode, seen, &[next])?;
            seen += 1;
        }
        if self.is_answer {
            return Ok(self.vocabulary.decode(&written).trim().to_string());
        }
        // How the first pieces of a text are joined may depend on the prompt, so both are decoded together.
        let whole = self.vocabulary.decode(&[prompt, &written].concat());
        let own = whole.strip_prefix(&self.vocabulary.decode(prompt)).map(String::from);
        Ok(own.unwrap_or_else(|| self.vocabulary.decode(&written)))
    }

    /// Feeds tokens after those in the cache, and returns the logits of the next token.
    fn read(
        &self,
        session: &mut Session,
        role: Role,
        seen: usize,
        tokens: &[u32],
    ) -> Result<Vec<f32>, Failure> {
        let (room, count) = (if role == Role::Decode { 1 } else { self.room.chunk }, tokens.len());
        let filled = |values: &mut dyn Iterator<Item = usize>, fill: i32| -> Vec<i32> {
            let values = values.map(|value| value as i32);
            values.chain(std::iter::repeat(fill)).take(room).collect()
        };
        let positions = filled(&mut (seen..seen + count), 0).repeat(self.position_axes);
        let inputs = [
            ("tokens", filled(&mut tokens.iter().map(|token| *token as usize), 0)),
            ("positions", positions),
            ("cache_rows", filled(&mut (seen..seen + count), -1)),
            ("new_start", vec![0]),
            ("new_len", vec![count as i32]),
            ("seen_start", vec![0]),
            ("seen_len", vec![(seen + count) as i32]),
            ("last", vec![count as i32 - 1]),
        ];
        for (name, values) in inputs {
            session.write_i32(&input_path(role, name), &values)?;
        }
        session.run(role)?;
        let mut logits = session.result(role, "logits")?;
        logits.truncate(self.vocab);
        Ok(logits)
    }
}

/// The chat template of the run.
fn questions(config: &Config, vocabulary: &Vocabulary, run: &Path) -> Result<Questions, Failure> {
    let spec = examples::spec(config, Some(run));
    let mut folders = spec.template_folders;
    folders.extend(spec.tokenizer.as_deref().and_then(Path::parent).map(Path::to_path_buf));
    let date = config.data.date.as_deref().and_then(Date::parse);
    Ok(Questions::open(vocabulary, config.data.template.as_deref(), &folders, date)?)
}

/// Stores a small picture of an image beside the log.
fn keep_image(run: &Path, name: &str, [height, width]: [usize; 2], rgb: &[u8]) -> Result<(), Failure> {
    let folder = run.join(IMAGES);
    fs::create_dir_all(&folder).map_err(Failure::io(folder.display()))?;
    let png = thumbnail::png([height, width], rgb, IMAGE_BYTES);
    let path = folder.join(name);
    durable::write(&path, &png).map_err(Failure::io(path.display()))
}

fn shortened(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().find(|(at, _)| *at >= TEXT_BYTES) {
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_examples_are_cut_between_characters() {
        assert_eq!(shortened("short".into()), "short");
        let long = shortened("é".repeat(TEXT_BYTES));
        assert!(long.len() <= TEXT_BYTES + 8 && long.ends_with("é ..."), "{}", long.len());
    }
}
