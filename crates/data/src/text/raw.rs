//! Text files with random access: documents are indexed once, then read and tokenised on demand.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;

use super::tokenizer::Vocabulary;
use super::tokenizer::sample;
use crate::error::DataError;
use crate::formats::{self, Index, Input, ReadOptions, Skipped};
use crate::order::documents::{Documents, Spent, TokenCount, TokenTable};
use crate::order::split::{Selection, Side, Sides, Split, Splitter};
use crate::random::{fingerprint, key};

/// Sources of at most this many bytes are tokenised at the start, which takes a few seconds, and kept in memory: their tokens
/// are counted exactly, and later epochs need not tokenise them again.
pub(crate) const IN_MEMORY_BYTES: u64 = 16 << 20;
/// Number of documents whose tokens are counted to estimate the total.
const ESTIMATED_BY: u64 = 256;

/// Text files, indexed and split, but not tokenised.
pub(crate) struct Raw {
    index: Index,
    split: Split,
    bytes: u64,
}

impl Raw {
    /// Indexes the documents and finds everything that is wrong with any of them. Indices of sources that are not read into
    /// memory are kept in `cache`.
    pub(crate) fn open(
        inputs: &[Input],
        options: &ReadOptions,
        held_out: f64,
        cache: Option<&Path>,
        in_memory_bytes: u64,
    ) -> Result<Self, DataError> {
        let bytes: u64 = inputs.iter().map(|input| input.bytes).sum();
        let options = ReadOptions { text_document_bytes: formats::document_bytes(bytes), ..options.clone() };
        let index = match cache {
            Some(cache) if bytes > in_memory_bytes => {
                Index::cached(&cache.join("indices").join(cache_name(inputs, &options)), inputs, &options)?
            }
            _ => Index::build(inputs, &options)?,
        };
        let mut splitter = Splitter::new(held_out);
        (0..index.count()).for_each(|document| splitter.push(Some(index.hash(document))));
        let split = splitter.finish(&shown(inputs))?;
        Ok(Self { index, split, bytes })
    }

    pub(crate) fn skipped(&self) -> &Skipped {
        self.index.skipped()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Text to train a tokeniser on: at most `budget` bytes of the training side.
    pub(crate) fn sample(&self, budget: u64) -> Result<Vec<String>, DataError> {
        let share = self.split.train.count() as f64 / self.index.count() as f64;
        let bytes = (self.bytes as f64 * share) as u64;
        sample::of_index(&self.index, &self.split.train, bytes, budget)
    }

    /// Both sides, tokenised in memory or on demand.
    pub(crate) fn tokenized(self, vocabulary: &Vocabulary, in_memory_bytes: u64) -> Result<Sides, DataError> {
        let Self { index, split, bytes } = self;
        if bytes <= in_memory_bytes {
            let side = |selection: &Selection| -> Result<Arc<dyn Documents>, DataError> {
                let wait = waits::begin("tokenising", Unit::Things("documents"), Some(selection.count()));
                let documents: Vec<Vec<u32>> = (0..selection.count())
                    .into_par_iter()
                    .map(|place| vocabulary.encode_document(&index.read(selection.at(place))?.text))
                    .inspect(|_| wait.add(1))
                    .collect::<Result<_, DataError>>()?;
                let documents: Vec<&[u32]> = documents.iter().map(Vec::as_slice).collect();
                Ok(Arc::new(TokenTable::new(&documents, vocabulary.size())))
            };
            let (train, held_out) = (side(&split.train)?, side(&split.held_out)?);
            return Ok(Sides { train, held_out, content: split.content });
        }
        let documents = Arc::new(OnDemand { index, vocabulary: vocabulary.clone() });
        let side = |selection: Selection| -> Result<Arc<dyn Documents>, DataError> {
            let tokens = documents.estimate(&selection)?;
            Ok(Arc::new(Side { documents: documents.clone(), selection, tokens }))
        };
        Ok(Sides { train: side(split.train)?, held_out: side(split.held_out)?, content: split.content })
    }
}

/// Documents that are read and tokenised on every access.
struct OnDemand {
    index: Index,
    vocabulary: Vocabulary,
}

impl OnDemand {
    fn estimate(&self, side: &Selection) -> Result<TokenCount, DataError> {
        let count = side.count();
        let taken = count.min(ESTIMATED_BY);
        let wait = waits::begin("counting the tokens of a sample", Unit::Things("documents"), Some(taken));
        let tokens = (0..taken).into_par_iter().map(|nth| {
            let place = (u128::from(nth) * u128::from(count) / u128::from(taken)) as u64;
            let text = self.index.read(side.at(place))?.text;
            Ok(self.vocabulary.encode_document(&text)?.len() as u64)
        });
        let tokens: Vec<u64> = tokens.inspect(|_| wait.add(1)).collect::<Result<_, DataError>>()?;
        let sum: u64 = tokens.iter().sum();
        match taken == count {
            true => Ok(TokenCount::exact(sum)),
            false => {
                let tokens = (u128::from(sum) * u128::from(count) / u128::from(taken)) as u64;
                Ok(TokenCount { tokens, is_exact: false })
            }
        }
    }
}

impl Documents for OnDemand {
    fn count(&self) -> Option<u64> {
        Some(self.index.count())
    }

    fn tokens(&self) -> Option<TokenCount> {
        None
    }

    fn is_tokenised_as_read(&self) -> bool {
        true
    }

    fn append(&self, index: u64, out: &mut Vec<u32>, spent: &mut Spent) -> Result<(), DataError> {
        let since = Instant::now();
        let document = self.index.read(index);
        let read = Instant::now();
        spent.reading += read - since;
        let document = document?;
        let tokens = self.vocabulary.encode_document(&document.text);
        spent.tokenising += read.elapsed();
        let tokens = tokens
            .map_err(|error| DataError { sentence: format!("{}: {error}", document.place), ..error })?;
        out.reserve_exact(tokens.len() + 1);
        out.extend(tokens);
        Ok(())
    }
}

/// The file name of an index in the cache: a hash of the files' names and of the options that determine the documents. The
/// index itself records the versions of the files.
fn cache_name(inputs: &[Input], options: &ReadOptions) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    let hash = inputs
        .iter()
        .fold(0, |hash, input| key(hash, fingerprint(here.join(&input.path).as_os_str().as_encoded_bytes())));
    format!("{:016x}", key(hash, fingerprint(format!("{options:?}").as_bytes())))
}

pub(crate) fn shown(inputs: &[Input]) -> String {
    let names: Vec<String> = inputs.iter().take(3).map(|input| input.path.display().to_string()).collect();
    let more = if inputs.len() > 3 { format!(" and {} more", inputs.len() - 3) } else { String::new() };
    names.join(", ") + &more
}
