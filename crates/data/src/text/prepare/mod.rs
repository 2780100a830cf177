//! Text to a folder of token shards: read in order, tokenised by many threads, written in order.
//!
//! The bytes written do not depend on how many threads there are, nor on how often the work was interrupted.
//!
//! ```text
//! reader   batches of documents, in the order of the inputs   (one thread)
//!    -> workers   batches of tokens, in any order
//!    -> writer    takes the batches in the reader's order, cuts shards by tokens
//! ```
//!
//! `unfinished.json` is replaced after every shard and says which are whole and where the next one begins. The manifest
//! takes its place at the end.

pub(crate) mod folder;
mod pipeline;

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use flatout_waits::{self as waits, Unit};
use serde::{Deserialize, Serialize};

use self::folder::Folder;
use self::pipeline::{Counts, Reading, tokenize};
use crate::error::DataError;
use crate::formats::{self, Document, Input, ReadOptions, Skipped};
use crate::order::split::threshold;
use crate::random::fingerprint;
use crate::text::shards::manifest::{
    Manifest, Options, ShardEntry, SourceEntry, TokenizerEntry, Totals, hexadecimal,
};
use crate::text::tokenizer::Vocabulary;
use crate::text::tokenizer::sample;

/// The share of documents a tokeniser is not shown, so that holding out as many is holding out.
const UNSEEN_BY_TOKENIZER: f64 = 0.05;
const TOKENIZER: &str = "tokenizer.json";
const STDIN: &str = "-";
/// The reason under which documents are counted whose text gives no token.
const NO_TOKENS: &str = "no tokens";
/// A shard of 200 MB where tokens have 2 bytes.
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
    /// Whether to begin again where something else, or something unfinished, is there.
    pub restart: bool,
    /// Whether the folder is one of a cache, whose name stands for all this: a process that is preparing it is waited for,
    /// and sources may be known by other paths.
    pub is_cache: bool,
}

#[derive(Debug, Clone)]
pub enum Tokenizer {
    /// A `tokenizer.json`.
    File(PathBuf),
    /// Of this many tokens, trained on a sample of the text.
    Train(usize),
    /// One that is open already.
    Open(Box<Vocabulary>),
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Done by this process, since it began to tokenise.
    pub documents: u64,
    pub tokens: u64,
    pub text_bytes: u64,
    pub elapsed: Duration,
    /// Inputs begun, of how many.
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

/// The result of a preparation.
#[derive(Debug, Clone)]
pub struct Prepared {
    pub manifest: Manifest,
    /// Shards that were whole already.
    pub kept_shards: usize,
    /// The work of this process; `None` where everything was there already.
    pub done: Option<Progress>,
    /// Documents that were left out of what this process read, with the first place of each reason.
    pub skipped: Skipped,
}

/// Everything that decides the bytes of the shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Plan {
    sources: Vec<SourceEntry>,
    options: Options,
    tokenizer: TokenizerEntry,
}

/// The shards that are complete, and where the rest begins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Unfinished {
    plan: Plan,
    shards: Vec<ShardEntry>,
    next: Position,
    /// Left out of the inputs before that of `next`.
    skipped_before: Counts,
    /// Of the shards that are whole.
    totals: Totals,
}

/// A document: the input's number, and how many documents of that input come before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Position {
    input: usize,
    document: u64,
}

/// Prepares a folder of shards, or completes one. `see` is told from time to time how far it is.
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
        // Nothing is lost by beginning again.
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
        Reading { inputs: &job.inputs, options: &job.read, from, skipped_before, first: reader, head };
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

/// A preparation whose files are known to be there, and a tokeniser that is given is open.
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
    /// The first input where it is open already, and what was taken out of it.
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

    /// Whether it would give the same shards.
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

    /// The beginning, with a tokeniser that is now in the folder.
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
                // It can be read only once: what the tokeniser has seen is kept for the shards.
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
            (None, ..) => unreachable!("a tokeniser that is not given is trained"),
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
        // The version that the server names stands for the time of a file.
        let version = fingerprint(object.tag().unwrap_or_default().as_bytes());
        return Ok(SourceEntry { path, bytes: input.bytes, modified_ns: version });
    }
    let modified = std::fs::metadata(&input.path).and_then(|metadata| metadata.modified());
    let modified = modified.map_err(|error| DataError::input(format!("{path} cannot be read: {error}.")))?;
    let modified_ns = modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    Ok(SourceEntry { path, bytes: input.bytes, modified_ns })
}
