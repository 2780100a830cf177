//! Opens the files of a path: text files, compressed text, token shards, or token files of other trainers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flatout_settings::choice;

use super::corpus::{DocumentOrder, Spec};
use super::prepare::folder::is_held;
use super::prepare::{Preparation, SHARD_TOKENS, Tokenizer, prepare};
use super::raw::{self, Raw};
use super::shards::{Shards, folder_of};
use super::streamed::{PieceCache, Streamed};
use super::token_files::{BinOptions, TokenFiles};
use super::tokenizer::Vocabulary;
use super::tokenizer::sample;
use crate::error::DataError;
use crate::formats::{self, FileFormat, Input, is_indexable};
use crate::order::documents::Documents;
use crate::order::mixture::Joined;
use crate::order::split::{Sides, threshold};
use crate::random::{fingerprint, key};
use crate::remote::is_remote;

choice! {
    /// The kinds of sources that rows come from.
    pub enum SourceKind {
        /// By the files that the path names; synthetic where there is no path.
        Auto = "auto",
        Synthetic = "synthetic",
        /// Files: text of any of the formats, or folders of token shards and `.bin` files by their names.
        Text = "text",
        /// Folders that `data prepare` wrote.
        Shards = "shards",
        /// Token files of other trainers.
        Bin = "bin",
    }
}

impl SourceKind {
    /// The kind of source that the name of a format implies where no kind is given.
    pub fn named_by(self, format: FileFormat) -> Self {
        match self {
            SourceKind::Auto | SourceKind::Text if format.is_tokens() => SourceKind::Bin,
            SourceKind::Auto if format != FileFormat::Auto => SourceKind::Text,
            kind => kind,
        }
    }
}

/// An event to report to the user while a source is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenEvent {
    /// Progress of a slow step, or the place where its result is kept.
    Note(String),
    /// Documents that cannot be used were skipped: their number, the reasons, and the first place.
    LeftOut(String),
}

/// Reports that a large amount of text is read, which takes seconds.
pub(crate) fn announce(inputs: &[Input], say: &mut dyn FnMut(OpenEvent)) {
    let bytes: u64 = inputs.iter().map(|input| input.bytes).sum();
    if bytes >= ANNOUNCED_BYTES {
        let files = if inputs.len() == 1 { "1 file".into() } else { format!("{} files", inputs.len()) };
        say(OpenEvent::Note(format!("reading {:.0} MB in {files}", bytes as f64 / 1e6)));
    }
}

/// Text of at least this many bytes takes noticeable time to read.
const ANNOUNCED_BYTES: u64 = 8 << 20;
/// The path that stands for standard input.
const STDIN: &str = "-";
/// Interval between progress reports of a slow opening.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// A source whose files were found and checked, but not tokenised.
pub(crate) enum FoundSource {
    Shards(Vec<Shards>),
    TokenFiles(Vec<PathBuf>),
    Raw(Box<Raw>),
    /// Text that is read block by block during training.
    Streamed(Box<Streamed>),
    /// Text without random access, as compressed files and standard input: it is tokenised once into shards.
    Sequential {
        patterns: Vec<String>,
        inputs: Vec<Input>,
    },
}

/// A source that can be trained on.
pub(crate) struct Opened {
    pub sides: Sides,
    /// Whether documents have no end token, so that a document is not told apart from the next one.
    pub is_endless_text: bool,
}

/// Whether `auto` reads these patterns as text.
pub(crate) fn is_text(patterns: &[String]) -> bool {
    !patterns.iter().any(|pattern| folder_of(Path::new(pattern)).is_some()) && !patterns.iter().all(is_bin)
}

/// Whether the kind of source follows from the names of the paths. Recipes set `text` for everything that is read from files,
/// so only an explicit format makes token files be read as text.
fn is_kind_from_names(spec: &Spec) -> bool {
    spec.source == SourceKind::Auto || (spec.source == SourceKind::Text && spec.read.format.is_none())
}

fn is_bin(pattern: impl AsRef<str>) -> bool {
    pattern.as_ref().ends_with(".bin")
}

/// Finds the files that the patterns name. Calls `say` with skipped documents.
pub(crate) fn find(
    patterns: &[String],
    spec: &Spec,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<FoundSource, DataError> {
    if patterns.is_empty() {
        return Err(DataError::input(
            "data.path is empty: give a file, a folder, a pattern such as data/*.jsonl, or - for standard input.",
        ));
    }
    let from_stdin = patterns.iter().any(|pattern| pattern == STDIN);
    if from_stdin && let Some(spooled) = spec.spool.as_deref().and_then(folder_of) {
        return Ok(FoundSource::Shards(vec![Shards::open(&spooled)?]));
    }
    let folders: Vec<Option<PathBuf>> =
        patterns.iter().map(|pattern| folder_of(Path::new(pattern))).collect();
    let kind = match spec.source {
        given if !is_kind_from_names(spec) => given,
        _ if folders.iter().all(Option::is_some) => SourceKind::Shards,
        _ if folders.iter().any(Option::is_some) => {
            return Err(DataError::input(
                "data.path names token shards together with other files: give them as parts of data.mix.",
            ));
        }
        _ if patterns.iter().all(is_bin) => SourceKind::Bin,
        _ => SourceKind::Text,
    };
    match kind {
        SourceKind::Shards => {
            let open = |(pattern, folder): (&String, Option<PathBuf>)| {
                Shards::open(&folder.unwrap_or_else(|| PathBuf::from(pattern)))
            };
            let shards = patterns.iter().zip(folders).map(open).collect::<Result<_, _>>()?;
            Ok(FoundSource::Shards(shards))
        }
        SourceKind::Bin => {
            let inside = |pattern: &String| match Path::new(pattern).is_dir() {
                true => format!("{pattern}/**/*.bin"),
                false => pattern.clone(),
            };
            if let Some(word) = patterns.iter().find(|word| is_remote(word)) {
                return Err(DataError::input(format!(
                    "{word} names token files, which are read from this machine only: download them, or set \
                     data.source=text and data.format if it is text."
                )));
            }
            let patterns: Vec<String> = patterns.iter().map(inside).collect();
            let inputs = formats::find(&patterns, &spec.read)?;
            Ok(FoundSource::TokenFiles(inputs.into_iter().map(|input| input.path).collect()))
        }
        SourceKind::Text => {
            let inputs = formats::find(patterns, &spec.read)?;
            if is_streamed(&inputs, spec)? {
                let kept = spec.cache.as_deref().filter(|_| spec.stream_cache_bytes > 0);
                let kept = kept.map(|cache| cache.join("stream"));
                let most_bytes = spec.stream_cache_bytes;
                let kept = kept.as_deref().map(|folder| PieceCache { folder, most_bytes });
                let streamed = Streamed::open(inputs, &spec.read, spec.held_out, kept);
                return Ok(FoundSource::Streamed(Box::new(streamed)));
            }
            if !inputs.iter().all(is_indexable) {
                return Ok(FoundSource::Sequential { patterns: patterns.to_vec(), inputs });
            }
            announce(&inputs, say);
            let (held_out, cache) = (spec.held_out, spec.cache.as_deref());
            let raw = Raw::open(&inputs, &spec.read, held_out, cache, spec.in_memory_bytes)?;
            if raw.skipped().total() > 0 {
                say(OpenEvent::LeftOut(format!("{}: {}", raw::shown(&inputs), raw.skipped())));
            }
            Ok(FoundSource::Raw(Box::new(raw)))
        }
        SourceKind::Auto | SourceKind::Synthetic => unreachable!("the synthetic language has no path"),
    }
}

/// Whether files are read block by block, because the user says so or because they are on a server.
fn is_streamed(inputs: &[Input], spec: &Spec) -> Result<bool, DataError> {
    let is_remote = inputs.iter().any(|input| input.remote.is_some());
    match spec.order {
        DocumentOrder::Shuffled if is_remote => Err(DataError::input(format!(
            "data.order=shuffled reads any document at any time, which {} cannot serve fast enough: leave it out, or download the \
             files.",
            raw::shown(inputs)
        ))),
        DocumentOrder::Streamed if inputs.iter().any(|input| input.path.as_os_str() == STDIN) => {
            Err(DataError::input(
                "data.order=streamed needs random access, which standard input does not allow: leave it out.",
            ))
        }
        DocumentOrder::Streamed => Ok(true),
        DocumentOrder::Auto | DocumentOrder::Shuffled => Ok(is_remote),
    }
}

/// The tokeniser of all sources: the given one, that of the shards, or one trained on a sample of the text. Token files alone
/// need none: their tokens are spelled as numbers.
pub(crate) fn vocabulary(
    spec: &Spec,
    found: &[FoundSource],
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Vocabulary, DataError> {
    let shards = || {
        found
            .iter()
            .filter_map(|found| if let FoundSource::Shards(shards) = found { Some(shards) } else { None })
    };
    let (vocabulary, shown) = match (&spec.tokenizer, shards().flatten().next()) {
        (Some(path), _) => {
            (Vocabulary::load(path)?.with_tokens(&spec.new_tokens)?, path.display().to_string())
        }
        (None, Some(first)) => (first.vocabulary()?, "that of the other shards".into()),
        (None, None) => {
            let texts = || found.iter().filter(|found| !matches!(found, FoundSource::TokenFiles(_)));
            if texts().next().is_none() {
                let last = spec.vocab.saturating_sub(1) as u32;
                let end = spec.eos.unwrap_or(last);
                if end > last {
                    return Err(DataError::input(format!(
                        "data.eos={end} is outside the vocabulary of {} tokens: raise model.vocab.",
                        spec.vocab
                    )));
                }
                return Ok(Vocabulary::from_numbers(spec.vocab, end));
            }
            let bytes: u64 = texts().map(FoundSource::bytes).sum::<u64>().max(1);
            if bytes >= ANNOUNCED_BYTES {
                say(OpenEvent::Note(format!(
                    "training a tokeniser of {} tokens on a sample of it",
                    spec.vocab
                )));
            }
            let mut sample = Vec::new();
            for found in texts() {
                let share = sample::SAMPLE_BYTES as f64 * found.bytes() as f64 / bytes as f64;
                sample.extend(found.sample(spec, share as u64)?);
            }
            (Vocabulary::train(sample.iter().map(String::as_str), spec.vocab)?, String::new())
        }
    };
    shards().flatten().try_for_each(|shards| shards.made_with(&vocabulary, &shown))?;
    vocabulary.fits(spec.vocab)?;
    Ok(vocabulary)
}

impl FoundSource {
    fn bytes(&self) -> u64 {
        match self {
            FoundSource::Raw(raw) => raw.bytes(),
            FoundSource::Streamed(streamed) => streamed.bytes(),
            FoundSource::Sequential { inputs, .. } => inputs.iter().map(|input| input.bytes).sum(),
            FoundSource::Shards(_) | FoundSource::TokenFiles(_) => 0,
        }
    }

    /// An error where the tokens were made with another tokeniser.
    pub(crate) fn made_with(&self, vocabulary: &Vocabulary) -> Result<(), DataError> {
        match self {
            FoundSource::Shards(shards) => {
                shards.iter().try_for_each(|shards| shards.made_with(vocabulary, "that of the training data"))
            }
            _ => Ok(()),
        }
    }

    fn sample(&self, spec: &Spec, budget: u64) -> Result<Vec<String>, DataError> {
        match self {
            FoundSource::Raw(raw) => raw.sample(budget),
            FoundSource::Streamed(streamed) => streamed.sample(budget),
            FoundSource::Sequential { patterns, .. } if patterns.iter().any(|pattern| pattern == STDIN) => {
                Err(DataError::input(
                    "Standard input can be read only once, so no tokeniser can be trained on it first: give \
                     data.tokenizer, or prepare it with `flatout data prepare -`.",
                ))
            }
            FoundSource::Sequential { inputs, .. } => {
                sample::of_inputs(inputs, &spec.read, threshold(spec.held_out), budget)
            }
            FoundSource::Shards(_) | FoundSource::TokenFiles(_) => Ok(Vec::new()),
        }
    }

    pub(crate) fn open(
        self,
        spec: &Spec,
        vocabulary: &Vocabulary,
        say: &mut dyn FnMut(OpenEvent),
    ) -> Result<Opened, DataError> {
        let mut is_endless_text = false;
        let sides = match self {
            FoundSource::Raw(raw) => raw.tokenized(vocabulary, spec.in_memory_bytes)?,
            FoundSource::Streamed(streamed) => streamed.tokenized(vocabulary)?,
            FoundSource::Shards(shards) => joined(shards, spec)?,
            FoundSource::Sequential { patterns, inputs } => {
                let folder = spool(spec, vocabulary, &patterns, &inputs, say)?;
                joined(vec![Shards::open(&folder)?], spec)?
            }
            FoundSource::TokenFiles(paths) => {
                let eos = spec.eos.or_else(|| spec.tokenizer.is_some().then(|| vocabulary.eos()));
                is_endless_text = eos.is_none();
                let options =
                    BinOptions { token_bytes: spec.token_bytes, eos, vocabulary: vocabulary.size() as u64 };
                TokenFiles::open(&paths, options, spec.held_out)?
            }
        };
        Ok(Opened { sides, is_endless_text })
    }
}

/// Several folders of shards, concatenated.
fn joined(shards: Vec<Shards>, spec: &Spec) -> Result<Sides, DataError> {
    let sides =
        shards.into_iter().map(|shards| shards.split(spec.held_out)).collect::<Result<Vec<_>, _>>()?;
    let join = |of: fn(&Sides) -> &Arc<dyn Documents>| -> Arc<dyn Documents> {
        Arc::new(Joined::new(sides.iter().map(|sides| of(sides).clone()).collect()))
    };
    Ok(Sides {
        train: join(|sides| &sides.train),
        held_out: join(|sides| &sides.held_out),
        content: sides.iter().fold(0, |content, sides| key(content, sides.content)),
    })
}

/// Tokenises text without random access into shards: standard input in the folder of the run, files in the cache. Uses complete
/// shards of an earlier run and finishes interrupted ones.
fn spool(
    spec: &Spec,
    vocabulary: &Vocabulary,
    patterns: &[String],
    inputs: &[Input],
    say: &mut dyn FnMut(OpenEvent),
) -> Result<PathBuf, DataError> {
    let from_stdin = patterns.iter().any(|pattern| pattern == STDIN);
    let kept = if from_stdin { None } else { spec.cache.as_deref() };
    let out = match (kept, &spec.spool) {
        (Some(cache), _) => cache.join("corpora").join(spool_name(spec, vocabulary, inputs)),
        (None, Some(spool)) => spool.clone(),
        (None, None) => {
            return Err(DataError::input(format!(
                "{} cannot be read from the middle, and there is no folder to keep its tokens in: prepare it with \
                 `flatout data prepare`.",
                raw::shown(inputs)
            )));
        }
    };
    let preparation = Preparation {
        sources: patterns.to_vec(),
        out: out.clone(),
        tokenizer: Tokenizer::Open(Box::new(vocabulary.clone())),
        read: spec.read.clone(),
        shard_tokens: SHARD_TOKENS,
        workers: spec.workers,
        // Standard input of an earlier attempt cannot be read again, so its unfinished shards are useless.
        restart: from_stdin,
        is_cache: kept.is_some(),
    };
    if preparation.is_cache && is_held(&out) {
        let shown = raw::shown(inputs);
        say(OpenEvent::Note(format!("another process is tokenising {shown}: waiting for it")));
    }
    let mut last_report = Instant::now();
    let prepared = prepare(&preparation, &mut |progress| {
        if last_report.elapsed() >= REPORT_INTERVAL {
            last_report = Instant::now();
            say(OpenEvent::Note(format!(
                "tokenising input {} of {}: {:.1}M tokens, {:.2}M a second",
                progress.input,
                progress.inputs,
                progress.tokens as f64 / 1e6,
                progress.tokens_per_second() / 1e6
            )));
        }
    })?;
    if prepared.done.is_some() {
        let bytes: u64 = prepared.manifest.shards.iter().map(|shard| shard.bytes).sum();
        say(OpenEvent::Note(format!(
            "{} cannot be read from the middle: its {} tokens are kept in {} ({:.1} MB)",
            raw::shown(inputs),
            prepared.manifest.totals.tokens,
            out.display(),
            bytes as f64 / 1e6
        )));
        if prepared.skipped.total() > 0 {
            say(OpenEvent::LeftOut(format!("{}: {}", raw::shown(inputs), prepared.skipped)));
        }
    }
    Ok(out)
}

/// The name of a folder in the cache, which differs for other files, other versions of them, other options or another
/// tokeniser.
fn spool_name(spec: &Spec, vocabulary: &Vocabulary, inputs: &[Input]) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    let mut hash = key(vocabulary.fingerprint(), fingerprint(format!("{:?}", spec.read).as_bytes()));
    for input in inputs {
        let modified = std::fs::metadata(&input.path).and_then(|metadata| metadata.modified());
        let version = format!("{} {} {modified:?}", here.join(&input.path).display(), input.bytes);
        hash = key(hash, fingerprint(version.as_bytes()));
    }
    format!("{hash:016x}")
}
