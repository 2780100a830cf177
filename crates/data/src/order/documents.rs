//! The trait of a source of documents: numbered documents, as tokens.

use std::time::Duration;

use super::pack::{Places, StreamPosition};
use crate::error::DataError;

/// Numbered documents: a source, or one side (training or held-out) of it.
pub(crate) trait Documents: Send + Sync {
    /// The documents in blocks, for a source whose documents have no numbers because they were not all read. Such a source is
    /// never indexed by number, and its counts below are estimates.
    fn in_blocks(&self) -> Option<&dyn InBlocks> {
        None
    }

    /// Number of documents; `None` for an endless source, whose documents are all alike and need no shuffling.
    fn count(&self) -> Option<u64>;

    /// Tokens of all documents together, without their frames; `None` for an endless source.
    fn tokens(&self) -> Option<TokenCount>;

    /// Whether documents are tokenised anew each time they are read.
    fn is_tokenised_as_read(&self) -> bool {
        false
    }

    /// Appends the tokens of document `index`, without `<bos>` and `<eos>`: the same in every call, and possibly none. Reserves
    /// exactly their number and one more, so that the buffer of a long document does not double.
    fn append(&self, index: u64, out: &mut Vec<u32>, spent: &mut Spent) -> Result<(), DataError>;
}

/// Documents that come one after another from blocks. A stream reads its blocks in the order it is given.
pub(crate) trait InBlocks {
    /// Number of blocks, some of which may have no documents.
    fn blocks(&self) -> u64;

    /// Whether there are too few blocks with documents to deal blocks to streams: each stream would then read the same blocks
    /// as its neighbours, and complete them at different times. In that case every stream reads all blocks and takes its share
    /// of the documents in each.
    fn are_few(&self) -> bool;

    /// The documents of a stream, from a position on.
    fn walk(&self, places: Places, from: StreamPosition) -> Box<dyn Walk>;

    /// Sentences about documents that were skipped since the last call.
    fn take_left_out(&self) -> Vec<String>;
}

/// The documents of one stream, one after another.
pub(crate) trait Walk: Send {
    /// Appends the tokens of the next document, possibly none, and stores its position in `position`. Returns false after the
    /// last document.
    fn next(
        &mut self,
        position: &mut StreamPosition,
        out: &mut Vec<u32>,
        spent: &mut Spent,
    ) -> Result<bool, DataError>;
}

/// A number of tokens: counted, or estimated from a sample where counting would mean tokenising everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCount {
    pub tokens: u64,
    pub is_exact: bool,
}

impl TokenCount {
    pub(crate) fn exact(tokens: u64) -> Self {
        Self { tokens, is_exact: true }
    }
}

impl std::ops::Add for TokenCount {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { tokens: self.tokens + other.tokens, is_exact: self.is_exact && other.is_exact }
    }
}

/// Time spent on documents or images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    pub reading: Duration,
    pub tokenising: Duration,
    pub decoding: Duration,
}

/// Most tokens of one document, which bounds the memory of a stream. Longer texts are cut into several documents.
pub(crate) const MAX_DOCUMENT_TOKENS: usize = 1 << 20;

/// Tokenised documents in memory, with two bytes per token where the vocabulary allows it.
pub(crate) struct TokenTable {
    tokens: Tokens,
    /// End of each document in `tokens`.
    ends: Vec<usize>,
}

enum Tokens {
    Narrow(Vec<u16>),
    Wide(Vec<u32>),
}

impl TokenTable {
    /// Takes documents in order. All tokens are below `vocabulary`.
    pub(crate) fn new(documents: &[&[u32]], vocabulary: usize) -> Self {
        let mut end = 0;
        let ends = documents.iter().map(|document| {
            end += document.len();
            end
        });
        let ends = ends.collect();
        let all = documents.iter().flat_map(|document| document.iter().copied());
        let tokens = if vocabulary <= 1 << 16 {
            let mut narrow = Vec::with_capacity(end);
            narrow.extend(all.map(|token| token as u16));
            Tokens::Narrow(narrow)
        } else {
            let mut wide = Vec::with_capacity(end);
            wide.extend(all);
            Tokens::Wide(wide)
        };
        Self { tokens, ends }
    }
}

impl Documents for TokenTable {
    fn count(&self) -> Option<u64> {
        Some(self.ends.len() as u64)
    }

    fn tokens(&self) -> Option<TokenCount> {
        Some(TokenCount::exact(self.ends.last().copied().unwrap_or(0) as u64))
    }

    fn append(&self, index: u64, out: &mut Vec<u32>, _: &mut Spent) -> Result<(), DataError> {
        let index = index as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        out.reserve_exact(self.ends[index] - start + 1);
        match &self.tokens {
            Tokens::Narrow(tokens) => {
                out.extend(tokens[start..self.ends[index]].iter().map(|token| u32::from(*token)))
            }
            Tokens::Wide(tokens) => out.extend(&tokens[start..self.ends[index]]),
        }
        Ok(())
    }
}
