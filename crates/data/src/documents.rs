//! What packing needs to know of a source: numbered documents, as tokens.

use crate::error::DataError;

/// One side (training or held-out) of a source. A new source is one file that gives two of these.
pub(crate) trait Documents: Send + Sync {
    /// How many there are; `None` for a source without end, whose documents are all alike and need no shuffling.
    fn count(&self) -> Option<u64>;

    /// Tokens of all documents together, without their frames; `None` for a source without end.
    fn tokens(&self) -> Option<u64>;

    /// Appends the tokens of document `index`: at least one, no `<bos>`, no `<eos>`. Always the same ones.
    fn append(&self, index: u64, out: &mut Vec<u32>) -> Result<(), DataError>;
}

/// Tokens that packing adds to every document: `<bos>` before, `<eos>` after.
pub(crate) const FRAME_TOKENS: u64 = 2;

/// Tokenised documents in memory, two bytes a token where the vocabulary allows it.
pub(crate) struct TokenTable {
    tokens: Tokens,
    /// Where each document ends in `tokens`.
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

    fn tokens(&self) -> Option<u64> {
        Some(self.ends.last().copied().unwrap_or(0) as u64)
    }

    fn append(&self, index: u64, out: &mut Vec<u32>) -> Result<(), DataError> {
        let index = index as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        match &self.tokens {
            Tokens::Narrow(tokens) => {
                out.extend(tokens[start..self.ends[index]].iter().map(|token| u32::from(*token)))
            }
            Tokens::Wide(tokens) => out.extend(&tokens[start..self.ends[index]]),
        }
        Ok(())
    }
}
