//! Prepares text as a folder of token shards: read in order, tokenised by many threads, written in order.
//!
//! The bytes written depend neither on the number of threads nor on interruptions.
//!
//! ```text
//! reader   batches of documents, in the order of the inputs   (one thread)
//!    -> workers   batches of tokens, in any order
//!    -> writer    takes the batches in the reader's order, cuts shards by tokens
//! ```
//!
//! `unfinished.json` is replaced after every shard; it lists the complete shards and the position of the next one. At the end,
//! the manifest takes its place.

pub(crate) mod folder;
mod pipeline;

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use flatout_waits::{self as waits, Unit};
use serde::{Deserialize, Serialize};

use self::folder::Folder;
use self::pipeline::{Counts, ReaderStart, tokenize};
use crate::error::DataError;
use crate::formats::{self, Document, Input, ReadOptions, Skipped};
use crate::order::split::threshold;
use crate::random::fingerprint;
use crate::text::shards::manifest::{
    Manifest, Options, ShardEntry, SourceEntry, TokenizerEntry, Totals, hexadecimal,
};
use crate::text::tokenizer::Vocabulary;
use crate::text::tokenizer::sample;

/// Share of the documents that a tokeniser is not trained on, so that a held-out share of this size is unseen by it.
const UNSEEN_BY_TOKENIZER: f64 = 0.05;
const TOKENIZER: &str = "tokenizer.json";
const STDIN: &str = "-";
/// The reason under which documents are counted whose text gives no tokens.
const NO_TOKENS: &str = "no tokens";
/// About 200 MB per shard where tokens have 2 bytes.
pub const SHARD_TOKENS: u64 = 100_000_000;

/// The text to prepare, and the folder to write to.
#[derive(Debug, Clone)]
pub struct Preparation {
    /// Files, folders, globs, or `-` alone for standard input.
    pub sources: Vec<String>,
    pub out: PathBuf,
    pub tokenizer: Tokenizer,
    pub read: ReadOptions,
    /// A shard ends with the document that reaches this many tokens.
    pub shard_tokens: u64,
    pub workers: usize,
    /// Whether to start over where the folder holds other or unfinished shards.
    pub restart: bool,
    /// Whether the folder belongs to a cache, whose name identifies the contents: a process that is preparing it is waited for,
    /// and the paths of sources may differ.
    pub is_cache: bool,
}

#[derive(Debug, Clone)]
pub enum Tokenizer {
    /// A `tokenizer.json`.
    File(PathBuf),
    /// Trains one of this size on a sample of the text.
    Train(usize),
    /// A tokeniser that is already loaded.
    Open(Box<Vocabulary>),
}

/// Progress of a preparation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Counts of this process since it began to tokenise.
    pub documents: u64,
    pub tokens: u64,
    pub text_bytes: u64,
    pub elapsed: Duration,
    /// Inputs begun, and their number.
    pub input: usize,
    pub inputs: usize,
    pub shards: usize,
}

impl Progress {
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.elapsed.as_secs_f64()
    }

    pub fn bytes_per_second(&self) -> f64 {
        self.text_bytes as f64 / self.elapsed.as_secs_f64()
    }
}

/// Result of a preparation.
#[derive(Debug, Clone)]
pub struct Prepared {
    pub manifest: Manifest,
    /// Number of shards that were complete before.
    pub kept_shards: usize,
    /// Work of this process; `None` where everything was complete before.
    pub done: Option<Progress>,
    /// Documents that this process read and skipped, with the first place of each reason.
    pub skipped: Skipped,
}

/// Everything that determines the bytes of the shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Plan {
    sources: Vec<SourceEntry>,
    options: Options,
    tokenizer: TokenizerEntry,
}

/// State of an unfinished preparation: its complete shards, and the position of the next one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Unfinished {
    plan: Plan,
    shards: Vec<ShardEntry>,
    next: Position,
    /// Documents skipped in the inputs before that of `next`.
    skipped_before: Counts,
    /// Totals of the complete shards.
    totals: Totals,
}

/// Position of a document: the number of its input, and the number of earlier documents in that input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Position {
    input: usize,
    document: u64,
}

/// Prepares a folder of shards, or completes one. Calls `report` with the progress from time to time.
pub fn prepare(spec: &Preparation, see: &mut dyn FnMut(&Progress)) -> Result<Prepared, DataError> {
    let job = Job::new(spec)?;
    let folder = Folder::enter(&spec.out, spec.restart, spec.is_cache)?;
    if let Some(manifest) = folder.complete()? {
        let plan = Plan {
            sources: manifest.sources.clone(),
            options: manifest.options.clone(),
            tokenizer: manifest.tokenizer.clone(),
        };
        if job.is_stdin || !job.is_of(&plan) {
            return Err(folder.occupied("shards of other sources, options or another tokeniser"));
        }
        folder.tidy()?;
        let kept_shards = manifest.shards.len();
        return Ok(Prepared { manifest, kept_shards, done: None, skipped: Skipped::default() });
    }
    let Start { mut state, vocabulary, reader, head } = match folder.unfinished()? {
        // There is no complete shard to lose.
        Some(state) if state.shards.is_empty() => job.begin(&folder, spec)?,
        None => job.begin(&folder, spec)?,
        Some(_) if job.is_stdin => {
            return Err(folder.occupied("unfinished shards, and standard input cannot be read again"));
        }
        Some(state) if !job.is_of(&state.plan) => {
            return Err(folder.occupied("unfinished shards of other sources, options or another tokeniser"));
        }
        Some(state) => {
            folder.check(&state)?;
            let vocabulary = Vocabulary::load(&folder.path.join(TOKENIZER))?;
            Start { state, vocabulary, reader: None, head: Vec::new() }
        }
    };
    let kept_shards = state.shards.len();
    let (from, skipped_before) = (state.next, state.skipped_before.clone());
    let reading =
        ReaderStart { inputs: &job.inputs, options: &job.read, from, skipped_before, first: reader, head };
    let (done, skipped) = tokenize(spec, &folder, &mut state, &vocabulary, reading, see)?;
    if state.totals.documents == 0 {
        let why = if skipped.total() > 0 { format!(" ({skipped})") } else { String::new() };
        let sources = spec.sources.join(", ");
        return Err(DataError::input(format!("There is no text in {sources}: nothing was prepared{why}.")));
    }
    let Unfinished { plan: Plan { sources, options, tokenizer }, shards, totals, .. } = state;
    let manifest = Manifest::new(tokenizer, options, sources, shards, totals);
    folder.finish(&manifest)?;
    Ok(Prepared { manifest, kept_shards, done: Some(done), skipped })
}

/// A preparation whose files were found and whose tokeniser, where one is given, is loaded.
struct Job {
    inputs: Vec<Input>,
    read: ReadOptions,
    sources: Vec<SourceEntry>,
    options: Options,
    given: Option<Vocabulary>,
    is_stdin: bool,
    is_cache: bool,
}

/// Where tokenising begins.
struct Start {
    state: Unfinished,
    vocabulary: Vocabulary,
    /// The first input, where it is already open, and the documents that were already read from it.
    reader: Option<formats::Reader>,
    head: Vec<Document>,
}

impl Job {
    fn new(spec: &Preparation) -> Result<Self, DataError> {
        let is_stdin = spec.sources.iter().any(|source| source == STDIN);
        if is_stdin && spec.sources.len() > 1 {
            return Err(DataError::input(
                "Standard input (-) cannot be prepared together with files: give one or the other.",
            ));
        }
        let inputs = formats::find(&spec.sources, &spec.read)?;
        let mut read = spec.read.clone();
        if !is_stdin {
            read.text_document_bytes = formats::document_bytes(inputs.iter().map(|input| input.bytes).sum());
        }
        let sources = inputs.iter().map(source_entry).collect::<Result<Vec<_>, _>>()?;
        let options = Options {
            field: read.field.clone(),
            format: read.format.map(|format| format.name().to_string()),
            on_error: read.on_error.name().into(),
            max_document_bytes: read.max_document_bytes as u64,
            shard_tokens: spec.shard_tokens,
            trained_vocabulary: match spec.tokenizer {
                Tokenizer::Train(vocab) => Some(vocab as u64),
                Tokenizer::File(_) | Tokenizer::Open(_) => None,
            },
        };
        let given = match &spec.tokenizer {
            Tokenizer::File(path) => Some(Vocabulary::load(path)?),
            Tokenizer::Open(vocabulary) => Some(Vocabulary::clone(vocabulary)),
            Tokenizer::Train(_) => None,
        };
        Ok(Self { inputs, read, sources, options, given, is_stdin, is_cache: spec.is_cache })
    }

    /// Whether it would write the same shards.
    fn is_of(&self, plan: &Plan) -> bool {
        let hash = self.given.as_ref().map(|given| hexadecimal(given.fingerprint()));
        let version = |source: &SourceEntry| (source.bytes, source.modified_ns);
        let is_alike = |(one, other): (&SourceEntry, &SourceEntry)| match self.is_cache {
            true => version(one) == version(other),
            false => one == other,
        };
        plan.sources.len() == self.sources.len()
            && plan.sources.iter().zip(&self.sources).all(is_alike)
            && plan.options == self.options
            && hash.is_none_or(|hash| hash == plan.tokenizer.hash)
    }

    /// Starts from the beginning, once the tokeniser is in the folder.
    fn begin(&self, folder: &Folder, spec: &Preparation) -> Result<Start, DataError> {
        let mut reader = if self.is_stdin { Some(formats::read(&self.inputs[0], &self.read)?) } else { None };
        let mut head = Vec::new();
        let vocabulary = match (&self.given, &spec.tokenizer, &mut reader) {
            (Some(given), ..) => given.clone(),
            (None, Tokenizer::Train(vocab), None) => {
                let unseen = threshold(UNSEEN_BY_TOKENIZER);
                let texts = sample::of_inputs(&self.inputs, &self.read, unseen, sample::SAMPLE_BYTES)?;
                Vocabulary::train(texts.iter().map(String::as_str), *vocab)?
            }
            (None, Tokenizer::Train(vocab), Some(reader)) => {
                // Standard input can be read only once: documents read for the tokeniser are kept for the shards.
                let wait = waits::begin("reading text for a tokeniser", Unit::Bytes, None);
                let mut bytes = 0;
                while bytes < sample::SAMPLE_BYTES {
                    let Some(document) = reader.next().transpose()? else { break };
                    bytes += document.text.len() as u64;
                    wait.set(bytes);
                    head.push(document);
                }
                drop(wait);
                Vocabulary::train(head.iter().map(|document| document.text.as_str()), *vocab)?
            }
            (None, ..) => unreachable!("the tokeniser was given or has just been trained"),
        };
        folder.keep(&vocabulary)?;
        let tokenizer = TokenizerEntry {
            file: TOKENIZER.into(),
            hash: hexadecimal(vocabulary.fingerprint()),
            vocabulary: vocabulary.size() as u64,
        };
        let state = Unfinished {
            plan: Plan { sources: self.sources.clone(), options: self.options.clone(), tokenizer },
            shards: Vec::new(),
            next: Position::default(),
            skipped_before: Counts::new(),
            totals: Totals::default(),
        };
        folder.save(&state)?;
        Ok(Start { state, vocabulary, reader, head })
    }
}

fn source_entry(input: &Input) -> Result<SourceEntry, DataError> {
    let path = input.path.display().to_string();
    if path == STDIN {
        return Ok(SourceEntry { path, bytes: 0, modified_ns: 0 });
    }
    if let Some(object) = &input.remote {
        // The version that the server names takes the place of a file's modification time.
        let version = fingerprint(object.tag().unwrap_or_default().as_bytes());
        return Ok(SourceEntry { path, bytes: input.bytes, modified_ns: version });
    }
    let modified = std::fs::metadata(&input.path).and_then(|metadata| metadata.modified());
    let modified = modified.map_err(|error| DataError::input(format!("{path} cannot be read: {error}.")))?;
    let modified_ns = modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    Ok(SourceEntry { path, bytes: input.bytes, modified_ns })
}
