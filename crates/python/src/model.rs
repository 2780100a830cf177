//! A model for inference: its own thread holds the device and the plans and processes one request after another.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use flatout_data::Vocabulary;
use flatout_data::examples::{Date, Questions};
use flatout_train::device::Device;
use flatout_train::infer::generate::{Generator, GeneratorCapacity, GrowingText, encode};
use flatout_train::infer::logits::{self, Logits};
use flatout_train::infer::sampling::Sampling;
use flatout_train::run::{self, BESIDE};
use flatout_train::weights::loaded::Loaded;
use flatout_train::{Failure, UserError};
use pyo3::prelude::*;

use crate::array::Array;
use crate::fault::{Error, raised};
use crate::process;
use crate::wait::{Reporter, wait, worker_channel};

/// A request, which runs on the thread of the model.
type Job = Box<dyn FnOnce(&mut Engine) + Send>;

/// The least capacity in tokens of a generator, so that prompts of other lengths fit too.
const LEAST_TOKENS: usize = 256;

/// A run's model or one in the Hugging Face layout.
#[pyclass(frozen, module = "flatout._native")]
pub struct Model {
    jobs: Sender<Job>,
    /// Threads that wait for a result.
    waiting: Mutex<Vec<ThreadId>>,
    facts: Facts,
    vocabulary: Option<Vocabulary>,
}

/// Properties of a model that are known once it is opened.
#[derive(Clone)]
struct Facts {
    checkpoint: PathBuf,
    step: Option<u64>,
    context: usize,
    vocab: Option<usize>,
    device: String,
}

/// The model on its thread.
struct Engine {
    path: PathBuf,
    overrides: Vec<String>,
    loaded: Loaded,
    device: Device,
    logits: Option<Logits>,
    generator: Option<Opened>,
}

/// A generator, with the capacity and the mode it was opened for.
struct Opened {
    generator: Generator,
    room: GeneratorCapacity,
    is_chat: bool,
}

#[pymethods]
impl Model {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, overrides: Vec<String>) -> PyResult<Model> {
        let (reporter, events) = worker_channel::<(), (Facts, Option<Vocabulary>)>();
        let (jobs, requests) = channel::<Job>();
        let work = move || {
            let mut engine = None;
            reporter.run(|_| {
                let (opened, facts, vocabulary) = Engine::open(path, overrides)?;
                engine = Some(opened);
                Ok((facts, vocabulary))
            });
            let Some(mut engine) = engine else { return };
            requests.into_iter().for_each(|job| job(&mut engine));
        };
        let spawned = thread::Builder::new().name("model".into()).stack_size(16 << 20).spawn(work);
        spawned.map_err(|error| raised(Failure::io("the thread of the model")(error)))?;
        let (facts, vocabulary) = wait(py, events, &|| {}, &mut |()| Ok(()))?;
        Ok(Model { jobs, waiting: Mutex::default(), facts, vocabulary })
    }

    /// The path of its weights.
    #[getter]
    fn checkpoint(&self) -> &Path {
        &self.facts.checkpoint
    }

    /// The number of updates, for a run.
    #[getter]
    fn step(&self) -> Option<u64> {
        self.facts.step
    }

    /// The context length of the model.
    #[getter]
    fn context(&self) -> usize {
        self.facts.context
    }

    /// The number of logits per token.
    #[getter]
    fn vocab(&self) -> Option<usize> {
        self.facts.vocab
    }

    /// The device on which it computes.
    #[getter]
    fn device(&self) -> &str {
        &self.facts.device
    }

    /// Its tokeniser, where there is one.
    #[getter]
    fn tokenizer(&self) -> Option<Tokenizer> {
        self.vocabulary.clone().map(Tokenizer)
    }

    /// The logits of rows of one length, as one array [rows, tokens, vocabulary].
    fn logits(&self, py: Python<'_>, rows: Vec<Vec<u32>>) -> PyResult<Array> {
        let shape = (rows.len(), rows.first().map_or(0, Vec::len));
        let stopped = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stopped);
        let (values, vocab) = self.call(
            py,
            move |engine, _: &Reporter<(), _>| engine.logits(&rows, &flag),
            &|| stopped.store(true, Ordering::Relaxed),
            &mut |()| Ok(()),
        )?;
        Ok(Array::of_logits(values, vec![shape.0, shape.1, vocab]))
    }

    /// Continues texts or rows of tokens. Returns the tokens that follow each, and the texts where texts were given. `on_text` is
    /// called with the index of a prompt and each piece of its text as it is generated.
    #[pyo3(signature = (texts, rows, is_chat, max_tokens, temperature, top_k, top_p, seed, at_once, on_text))]
    #[allow(clippy::too_many_arguments)]
    fn generate(
        &self,
        py: Python<'_>,
        texts: Option<Vec<String>>,
        rows: Vec<Vec<u32>>,
        is_chat: bool,
        max_tokens: usize,
        temperature: f64,
        top_k: usize,
        top_p: f64,
        seed: u64,
        at_once: usize,
        on_text: Option<Bound<'_, PyAny>>,
    ) -> PyResult<(Vec<Array>, Option<Vec<String>>)> {
        let sampling = Sampling { temperature, top_k, top_p, seed, max_tokens };
        let stopped = Arc::new(AtomicBool::new(false));
        let request = GenerateRequest {
            texts,
            rows,
            is_chat,
            sampling,
            at_once,
            streams: on_text.is_some(),
            stopped: Arc::clone(&stopped),
        };
        let Written { tokens, texts } = self.call(
            py,
            move |engine, reporter| engine.generate(request, reporter),
            &|| stopped.store(true, Ordering::Relaxed),
            &mut |(prompt, piece): TextChunk| match &on_text {
                Some(on_text) => on_text.call1((prompt, piece)).map(drop),
                None => Ok(()),
            },
        )?;
        Ok((tokens.into_iter().map(Array::of_tokens).collect(), texts))
    }
}

impl Model {
    /// Runs work on the model's thread and waits for it.
    fn call<M: Send + 'static, T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Engine, &Reporter<M, T>) -> Result<T, Failure> + Send + 'static,
        stop: &dyn Fn(),
        take: &mut dyn FnMut(M) -> PyResult<()>,
    ) -> PyResult<T> {
        process::prepare().map_err(raised)?;
        let here = thread::current().id();
        let waiting = || self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // The model waits for the callback that receives its text, so this would be a deadlock.
        if waiting().contains(&here) {
            let sentence = "a model cannot be called from inside its own on_text: open it a second time";
            return Err(raised(UserError(sentence.into()).into()));
        }
        waiting().push(here);
        let answer = self.run_job(py, work, stop, take);
        waiting().retain(|thread| *thread != here);
        answer
    }

    fn run_job<M: Send + 'static, T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Engine, &Reporter<M, T>) -> Result<T, Failure> + Send + 'static,
        stop: &dyn Fn(),
        take: &mut dyn FnMut(M) -> PyResult<()>,
    ) -> PyResult<T> {
        let (reporter, events) = worker_channel();
        let job: Job = Box::new(move |engine| {
            if !reporter.run(|reporter| work(engine, reporter)) {
                // After a panic the state of the plans is unknown: the next request opens new ones.
                (engine.logits, engine.generator) = (None, None);
            }
        });
        self.jobs.send(job).map_err(|_| Error::new_err("the thread of the model is gone: open it again"))?;
        wait(py, events, stop, take)
    }
}

/// The index of a prompt, and a piece of text of its continuation.
type TextChunk = (usize, String);

/// The tokens that follow each prompt, and the texts where texts were given.
struct Written {
    tokens: Vec<Vec<u32>>,
    texts: Option<Vec<String>>,
}

/// A request to continue texts or rows of tokens.
struct GenerateRequest {
    texts: Option<Vec<String>>,
    rows: Vec<Vec<u32>>,
    is_chat: bool,
    sampling: Sampling,
    at_once: usize,
    streams: bool,
    stopped: Arc<AtomicBool>,
}

/// The payload of the unwinding that ends a generation: the callback for its tokens cannot return an error.
struct Stopped;

impl Engine {
    fn open(path: PathBuf, overrides: Vec<String>) -> Result<(Engine, Facts, Option<Vocabulary>), Failure> {
        process::prepare()?;
        let path = run::named(&path);
        let loaded = Loaded::open(&path, &overrides)?;
        let device = Device::open(loaded.config.switches.compute.backend)?;
        let facts = Facts {
            checkpoint: loaded.place.clone(),
            step: loaded.step,
            context: loaded.positions,
            vocab: loaded.config.model.vocab(),
            device: device.target(&loaded.config.switches).name,
        };
        let vocabulary = loaded.vocabulary.clone();
        Ok((Engine { path, overrides, loaded, device, logits: None, generator: None }, facts, vocabulary))
    }

    /// The logits of rows of one length, and the size of the vocabulary.
    fn logits(&mut self, rows: &[Vec<u32>], stopped: &AtomicBool) -> Result<(Vec<f32>, usize), Failure> {
        logits::check(&self.loaded, rows)?;
        let vocab = self.loaded.config.model.vocab().expect("a model that was checked reads tokens");
        let tokens = rows[0].len();
        // Padding rows would cost time, and change results of a model that scales its positions by the context.
        if self.logits.as_ref().is_none_or(|open| open.row_tokens() != tokens) {
            self.logits = None;
            self.logits = Some(Logits::new(&mut self.loaded, &self.device, rows.len(), tokens)?);
        }
        let open = self.logits.as_mut().expect("it was just opened");
        let mut all: Vec<f32> = vec![];
        open.of(rows, &mut |chunk, mut logits| {
            if stopped.load(Ordering::Relaxed) {
                return Err(Failure::Environment("the computation of the logits was interrupted".into()));
            }
            logits.truncate(chunk.len() * tokens * vocab);
            if all.is_empty() {
                all = logits;
            } else {
                all.extend(logits);
            }
            Ok(())
        })?;
        Ok((all, vocab))
    }

    fn generate(
        &mut self,
        request: GenerateRequest,
        reporter: &Reporter<TextChunk, Written>,
    ) -> Result<Written, Failure> {
        let GenerateRequest { texts, rows, is_chat, sampling, at_once, streams, stopped } = request;
        let loaded = &self.loaded;
        let vocabulary = loaded.vocabulary.as_ref();
        let (prompts, end) = match (&texts, vocabulary) {
            (None, _) => (rows, None),
            (Some(_), None) => {
                let sentence = format!("{} has no tokenizer.json: give rows of tokens", self.path.display());
                return Err(UserError(sentence).into());
            }
            (Some(texts), Some(vocabulary)) if is_chat => question_tokens(loaded, vocabulary, texts)?,
            (Some(texts), Some(vocabulary)) => (encode(vocabulary, loaded.is_run, texts)?, None),
        };
        if loaded.config.model.vocab().is_some() {
            logits::check_tokens(loaded, &prompts)?;
        }
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
        let room = GeneratorCapacity {
            sequences: prompts.len().min(at_once),
            tokens: longest.saturating_add(sampling.max_tokens).max(LEAST_TOKENS),
        };
        let fits = |open: &Opened| {
            open.is_chat == is_chat
                && open.room.sequences >= room.sequences
                && open.room.tokens >= room.tokens
        };
        if !self.generator.as_ref().is_some_and(fits) {
            self.generator = None;
            let mut own = Loaded::open(&self.path, &self.overrides)?;
            own.stops.extend(end);
            let generator = Generator::new(own, &self.device, room)?;
            self.generator = Some(Opened { generator, room, is_chat });
        }
        let generator = &mut self.generator.as_mut().expect("it was just opened").generator;
        let mut growing: Vec<GrowingText> = vec![];
        if let Some(vocabulary) = vocabulary.filter(|_| streams) {
            let vocabulary = Arc::new(vocabulary.clone());
            growing.extend(prompts.iter().map(|prompt| GrowingText::new(vocabulary.clone(), prompt)));
        }
        let report = |prompt: usize, piece: String| {
            if !piece.is_empty() {
                reporter.report((prompt, piece));
            }
        };
        let made = generator.continue_all(&prompts, sampling, &mut |prompt, token| {
            if stopped.load(Ordering::Relaxed) {
                resume_unwind(Box::new(Stopped));
            }
            if let Some(piece) = growing.get_mut(prompt).and_then(|text| text.push(token)) {
                report(prompt, piece);
            }
        })?;
        growing.iter_mut().enumerate().for_each(|(prompt, text)| report(prompt, text.finish()));
        let texts = texts.and(vocabulary).map(|vocabulary| {
            let whole = |(prompt, more): (&Vec<u32>, &Vec<u32>)| match is_chat {
                true => vocabulary.decode(more).trim().to_string(),
                false => vocabulary.decode(&[&prompt[..], more].concat()),
            };
            prompts.iter().zip(&made).map(whole).collect()
        });
        Ok(Written { tokens: made, texts })
    }
}

/// The tokens of questions in the model's chat template, and the token that ends an answer there.
fn question_tokens(
    loaded: &Loaded,
    vocabulary: &Vocabulary,
    texts: &[String],
) -> Result<(Vec<Vec<u32>>, Option<u32>), Failure> {
    let folders = [loaded.dir.join(BESIDE), loaded.dir.clone()];
    let data = &loaded.config.data;
    let date = data.date.as_deref().and_then(Date::parse);
    let questions = Questions::open(vocabulary, data.template.as_deref(), &folders, date)?;
    let tokens = texts.iter().map(|text| questions.tokens(text)).collect::<Result<_, _>>()?;
    Ok((tokens, questions.end()?))
}

/// The tokeniser of a model.
#[pyclass(frozen, module = "flatout._native")]
pub struct Tokenizer(Vocabulary);

#[pymethods]
impl Tokenizer {
    /// The tokens of a text, without those that begin and end one.
    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        py.detach(|| self.0.encode(text)).map_err(|error| raised(error.into()))
    }

    /// The text of some tokens; those that begin or end a text are omitted.
    fn decode(&self, py: Python<'_>, tokens: Vec<u32>) -> String {
        py.detach(|| self.0.decode(&tokens))
    }

    /// The size of the vocabulary: one more than the largest token id.
    #[getter]
    fn size(&self) -> usize {
        self.0.size()
    }

    /// The token that begins a text.
    #[getter]
    fn bos(&self) -> u32 {
        self.0.bos()
    }

    /// The token that ends a text.
    #[getter]
    fn eos(&self) -> u32 {
        self.0.eos()
    }
}
