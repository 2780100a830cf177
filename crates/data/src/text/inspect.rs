//! Inspects data: the number of documents, their lengths, samples of them, and which tokens are trained on.

use std::path::PathBuf;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;
use serde::Serialize;

use super::corpus::Spec;
use super::shards::Shards;
use super::source::{self, FoundSource, SourceKind};
use super::streamed::Streamed;
use super::token_files::{BinOptions, TokenFiles};
use super::tokenizer::Vocabulary;
use crate::error::DataError;
use crate::formats::{self, Input, OnError, ReadOptions, Skipped};
use crate::order::documents::{Documents, Spent};
use crate::order::loader::Rows;
use crate::random::fingerprint;

/// Contents of a source.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// `text`, `shards` or `bin`.
    pub kind: &'static str,
    pub files: usize,
    pub bytes: u64,
    /// Number of documents. Where only a sample was read, an estimate for all files if possible, otherwise that of the sample.
    pub documents: u64,
    /// Documents in the sample, where not all were read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampled: Option<u64>,
    /// Known where the source holds tokens.
    pub tokens: Option<u64>,
    pub lengths: LengthSummary,
    pub samples: Vec<Sample>,
    /// Unusable documents by reason: the reason, their number, and the place of the first.
    pub unusable: Vec<(String, u64, String)>,
}

/// Distribution of document lengths.
#[derive(Debug, Clone, Default, Serialize)]
pub struct LengthSummary {
    /// `bytes` or `tokens`.
    pub unit: &'static str,
    pub least: u64,
    pub median: u64,
    pub most: u64,
    pub mean: f64,
    /// Documents of `from` to `2 * from - 1`, for every power of two between the smallest and the largest length.
    pub histogram: Vec<Bar>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bar {
    pub from: u64,
    pub documents: u64,
}

impl LengthSummary {
    pub(crate) fn of(unit: &'static str, mut lengths: Vec<u64>) -> Self {
        lengths.sort_unstable();
        let (Some(least), Some(most)) = (lengths.first().copied(), lengths.last().copied()) else {
            return Self { unit, ..Self::default() };
        };
        let power = |length: u64| length.max(1).ilog2();
        let bar = |exponent| {
            let from = 1u64 << exponent;
            let begin = lengths.partition_point(|length| power(*length) < exponent);
            let end = lengths.partition_point(|length| power(*length) <= exponent);
            Bar { from, documents: (end - begin) as u64 }
        };
        Self {
            unit,
            least,
            median: lengths[lengths.len() / 2],
            most,
            mean: lengths.iter().sum::<u64>() as f64 / lengths.len() as f64,
            histogram: (power(least)..=power(most)).map(bar).collect(),
        }
    }
}

/// A sample document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Sample {
    pub place: String,
    pub text: String,
    /// Known where the source holds tokens, or a tokeniser was given.
    pub tokens: Option<u64>,
}

/// Inspects the files of a specification; its other fields are ignored. Bad documents are counted, not refused. Returns
/// `samples` documents, the same ones in every call.
pub fn inspect(spec: &Spec, samples: usize) -> Result<Inspection, DataError> {
    let read = ReadOptions { on_error: OnError::Skip, ..spec.read.clone() };
    // Text is read here directly, so compressed files and standard input need no folder.
    let is_text =
        spec.source == SourceKind::Text || (spec.source == SourceKind::Auto && source::is_text(&spec.path));
    if is_text {
        return text(spec, &read, samples);
    }
    match source::find(&spec.path, &Spec { read, ..spec.clone() }, &mut |_| {})? {
        FoundSource::Shards(shards) => self::shards(&shards, samples),
        FoundSource::TokenFiles(paths) => token_files(spec, &paths, samples),
        FoundSource::Raw(_) | FoundSource::Streamed(_) | FoundSource::Sequential { .. } => {
            unreachable!("text is inspected above")
        }
    }
}

fn text(spec: &Spec, read: &ReadOptions, samples: usize) -> Result<Inspection, DataError> {
    let inputs = formats::find(&spec.path, read)?;
    let vocabulary = spec.tokenizer.as_deref().map(Vocabulary::load).transpose()?;
    let (files, bytes) = (inputs.len(), inputs.iter().map(|input| input.bytes).sum());
    let is_remote = inputs.iter().any(|input| input.remote.is_some());
    let (seen, documents) = match is_remote {
        true => sampled(Streamed::open(inputs, read, 0.0, None), samples)?,
        false => {
            let cut = formats::document_bytes(bytes);
            let seen = whole(&inputs, &ReadOptions { text_document_bytes: cut, ..read.clone() }, samples)?;
            (seen, None)
        }
    };
    let DocumentStatistics { lengths, taken, skipped } = seen;
    let sample = |(_, document): (u64, formats::Document)| -> Result<Sample, DataError> {
        let tokens =
            vocabulary.as_ref().map(|vocabulary| vocabulary.encode_document(&document.text)).transpose()?;
        let tokens = tokens.map(|tokens| tokens.len() as u64);
        Ok(Sample { place: document.place.to_string(), text: document.text, tokens })
    };
    Ok(Inspection {
        kind: "text",
        files,
        bytes,
        documents: documents.unwrap_or(lengths.len() as u64),
        sampled: is_remote.then_some(lengths.len() as u64),
        tokens: None,
        lengths: LengthSummary::of("bytes", lengths),
        samples: taken.into_iter().map(sample).collect::<Result<_, _>>()?,
        unusable: skipped
            .reasons()
            .map(|(reason, count, place)| (reason.words().to_string(), count, place.to_string()))
            .collect(),
    })
}

/// Statistics of the documents that were read: lengths, samples, unusable ones.
#[derive(Default)]
struct DocumentStatistics {
    lengths: Vec<u64>,
    /// The samples with the smallest hashes: a random choice that is the same every time.
    taken: Vec<(u64, formats::Document)>,
    skipped: Skipped,
}

impl DocumentStatistics {
    fn take(&mut self, document: formats::Document, samples: usize) {
        self.lengths.push(document.text.len() as u64);
        self.taken.push((fingerprint(document.text.as_bytes()), document));
        if self.taken.len() > 2 * samples + 64 {
            keep_least(&mut self.taken, samples);
        }
    }
}

/// Reads all documents.
fn whole(inputs: &[Input], read: &ReadOptions, samples: usize) -> Result<DocumentStatistics, DataError> {
    let wait = waits::begin("reading text", Unit::Bytes, Some(inputs.iter().map(|input| input.bytes).sum()));
    let scanned = inputs.par_iter().map(|input| {
        let mut reader = formats::read(input, read)?;
        let mut seen = DocumentStatistics::default();
        for document in &mut reader {
            let document = document?;
            wait.add(document.text.len() as u64);
            seen.take(document, samples);
        }
        keep_least(&mut seen.taken, samples);
        Ok(DocumentStatistics { skipped: reader.skipped().clone(), ..seen })
    });
    let scanned: Vec<DocumentStatistics> = scanned.collect::<Result<_, DataError>>()?;
    let mut all = DocumentStatistics::default();
    for seen in scanned {
        all.lengths.extend(seen.lengths);
        all.taken.extend(seen.taken);
        all.skipped.merge(&seen.skipped);
    }
    keep_least(&mut all.taken, samples);
    Ok(all)
}

/// Reads a sample of remote files, and estimates the number of all documents where the files allow it.
fn sampled(streamed: Streamed, samples: usize) -> Result<(DocumentStatistics, Option<u64>), DataError> {
    let mut seen = DocumentStatistics::default();
    let skipped = streamed.visit(|document| {
        seen.take(document, samples);
        let count = seen.lengths.len();
        Ok((count < SAMPLED).then_some(!count.is_multiple_of(SAMPLED / SAMPLED_BLOCKS)))
    })?;
    keep_least(&mut seen.taken, samples);
    Ok((DocumentStatistics { skipped, ..seen }, streamed.estimated_documents()))
}

/// Documents in a sample, and the least number of blocks they come from.
const SAMPLED: usize = 1024;
const SAMPLED_BLOCKS: usize = 8;

fn keep_least(taken: &mut Vec<(u64, formats::Document)>, count: usize) {
    taken.sort_by_key(|(hash, _)| *hash);
    taken.truncate(count);
}

fn shards(folders: &[Shards], samples: usize) -> Result<Inspection, DataError> {
    let (mut lengths, mut shown) = (Vec::new(), Vec::new());
    let all: u64 = folders.iter().map(|shards| shards.manifest.totals.documents).sum::<u64>().max(1);
    for shards in folders {
        shards.verify()?;
        lengths.extend(shards.lengths()?);
        let vocabulary = shards.vocabulary()?;
        let share = samples as u64 * shards.manifest.totals.documents / all;
        let place = |document| format!("{}, document {document}", shards.folder().display());
        shown.extend(spread(shards, share.max(1), &vocabulary, place)?);
    }
    shown.truncate(samples);
    let entries = || folders.iter().flat_map(|shards| &shards.manifest.shards);
    let skipped = folders.iter().flat_map(|shards| &shards.manifest.totals.skipped);
    Ok(Inspection {
        kind: "shards",
        files: entries().count(),
        bytes: entries().map(|shard| shard.bytes).sum(),
        documents: lengths.len() as u64,
        sampled: None,
        tokens: Some(lengths.iter().sum()),
        lengths: LengthSummary::of("tokens", lengths),
        samples: shown,
        unusable: skipped.map(|(reason, count)| (reason.clone(), *count, String::new())).collect(),
    })
}

fn token_files(spec: &Spec, paths: &[PathBuf], samples: usize) -> Result<Inspection, DataError> {
    let vocabulary = match &spec.tokenizer {
        Some(path) => Some(Vocabulary::load(path)?),
        None => None,
    };
    let eos = spec.eos.or(vocabulary.as_ref().map(Vocabulary::eos));
    let size = vocabulary.as_ref().map_or(1 << 32, |vocabulary| vocabulary.size() as u64);
    let options = BinOptions { token_bytes: spec.token_bytes, eos, vocabulary: size };
    let documents = TokenFiles::open(paths, options, 0.0)?.train;
    let count = documents.count().unwrap_or(0);
    let mut lengths = Vec::new();
    let mut tokens = Vec::new();
    let mut most = 0;
    for document in 0..count {
        tokens.clear();
        documents.append(document, &mut tokens, &mut Spent::default())?;
        lengths.push(tokens.len() as u64);
        most = most.max(tokens.iter().copied().max().unwrap_or(0));
    }
    let vocabulary =
        vocabulary.unwrap_or_else(|| Vocabulary::from_numbers(most as usize + 2, eos.unwrap_or(most + 1)));
    let place = |document| format!("document {document}");
    Ok(Inspection {
        kind: "bin",
        files: paths.len(),
        bytes: paths.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum(),
        documents: count,
        sampled: None,
        tokens: Some(lengths.iter().sum()),
        samples: spread(&*documents, samples as u64, &vocabulary, place)?,
        lengths: LengthSummary::of("tokens", lengths),
        unusable: Vec::new(),
    })
}

/// Documents at equal distances, as text.
fn spread(
    documents: &dyn Documents,
    samples: u64,
    vocabulary: &Vocabulary,
    place: impl Fn(u64) -> String,
) -> Result<Vec<Sample>, DataError> {
    let count = documents.count().unwrap_or(0);
    let samples = samples.min(count);
    let sample = |nth: u64| {
        let document = nth * count / samples;
        let mut tokens = Vec::new();
        documents.append(document, &mut tokens, &mut Spent::default())?;
        Ok(Sample {
            place: place(document),
            text: vocabulary.decode(&tokens),
            tokens: Some(tokens.len() as u64),
        })
    };
    (0..samples).map(sample).collect()
}

/// Consecutive tokens of a row, on one line, that all count in the loss or all do not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Span {
    /// Whether these tokens are predicted with a weight above 0.
    pub is_trained: bool,
    pub tokens: usize,
    /// Text with the ends of documents spelled out.
    pub text: String,
}

/// Row `row` as the loss sees it: its tokens and the one after it, each marked as trained or only read. The first token of a
/// row is only read, because the previous row of its stream predicted it.
pub fn spans(vocabulary: &Vocabulary, rows: &Rows, row: usize) -> Vec<Span> {
    let of = row * rows.context..(row + 1) * rows.context;
    let (tokens, targets, weights) = (&rows.tokens[of.clone()], &rows.targets[of.clone()], &rows.weights[of]);
    let last = targets.last().copied().filter(|target| *target >= 0);
    let trained = std::iter::once(false).chain(weights.iter().map(|weight| *weight > 0.0));
    let mut spans: Vec<(bool, Vec<u32>)> = Vec::new();
    for (token, is_trained) in tokens.iter().copied().chain(last).zip(trained) {
        match spans.last_mut() {
            Some((same, tokens)) if *same == is_trained => tokens.push(token as u32),
            _ => spans.push((is_trained, vec![token as u32])),
        }
    }
    let span = |(is_trained, tokens): (bool, Vec<u32>)| Span {
        is_trained,
        tokens: tokens.len(),
        text: vocabulary.spell(&tokens),
    };
    spans.into_iter().map(span).collect()
}
