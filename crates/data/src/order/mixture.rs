//! Mixes several sources into one series of documents, in given shares of tokens.
//!
//! Documents are drawn by a table of slots that repeats for ever. A source gets slots in proportion to its share of the tokens
//! divided by the mean length of its documents, and the slots are shuffled once. The shares therefore hold over every `SLOTS`
//! documents, and the document at any position is found in constant time.

use std::sync::Arc;

use super::documents::{Documents, Spent, TokenCount};
use super::permutation::Permutation;
use crate::error::DataError;

/// Number of documents after which the table repeats. Shares are accurate to one part in this number.
const SLOTS: usize = 1 << 16;
/// Seed of the shuffle of slots. It is not the run's seed, because the table is part of the mixture.
const SHUFFLE: u64 = 0x6d69_7874_7572_6573;

/// One source of a mixture: documents `base..base + count` of the joined sources.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MixtureSource {
    pub base: u64,
    pub count: u64,
    /// Share of the training tokens, relative to the sum of all weights.
    pub weight: f64,
    /// Mean tokens per document, frame included.
    pub mean_tokens: f64,
}

#[derive(Debug, PartialEq)]
pub(crate) struct Mixture {
    pub parts: Vec<MixtureSource>,
    /// For each slot, its source and the number of earlier slots of that source.
    slots: Vec<(u16, u32)>,
    /// Number of slots of each source.
    turns: Vec<u32>,
}

impl Mixture {
    /// Requires weights above 0, at most as many parts as slots, and a document in every part.
    pub(crate) fn new(parts: Vec<MixtureSource>) -> Self {
        let rates: Vec<f64> = parts.iter().map(|part| part.weight / part.mean_tokens).collect();
        let turns = apportion(&rates, SLOTS as u32);
        let mut ordered: Vec<u16> = Vec::with_capacity(SLOTS);
        for (source, turns) in turns.iter().enumerate() {
            ordered.resize(ordered.len() + *turns as usize, source as u16);
        }
        let shuffle = Permutation::new(SLOTS as u64, SHUFFLE);
        let mut before = vec![0; parts.len()];
        let slots = (0..SLOTS as u64).map(|slot| {
            let source = ordered[shuffle.at(slot) as usize];
            let before = &mut before[source as usize];
            *before += 1;
            (source, *before - 1)
        });
        let slots = slots.collect();
        Self { parts, slots, turns }
    }

    /// The source at a position, and the number of earlier documents of that source.
    pub(crate) fn place(&self, position: u64) -> (usize, u64) {
        let (round, slot) = (position / SLOTS as u64, (position % SLOTS as u64) as usize);
        let (source, before) = self.slots[slot];
        let source = usize::from(source);
        (source, round * u64::from(self.turns[source]) + u64::from(before))
    }

    /// Share of the documents that are drawn from a source.
    pub(crate) fn share(&self, source: usize) -> f64 {
        f64::from(self.turns[source]) / SLOTS as f64
    }

    /// Mean tokens of a drawn document.
    pub(crate) fn mean_tokens(&self) -> f64 {
        let tokens =
            self.parts.iter().zip(&self.turns).map(|(part, turns)| part.mean_tokens * f64::from(*turns));
        tokens.sum::<f64>() / SLOTS as f64
    }
}

/// Whole numbers in proportion to `rates` that sum to `total`, each at least 1. The largest remainders are rounded up.
fn apportion(rates: &[f64], total: u32) -> Vec<u32> {
    let free = f64::from(total) - rates.len() as f64;
    let sum: f64 = rates.iter().sum();
    let exact: Vec<f64> = rates.iter().map(|rate| 1.0 + free * rate / sum).collect();
    let mut whole: Vec<u32> = exact.iter().map(|share| *share as u32).collect();
    let mut by_remainder: Vec<usize> = (0..rates.len()).collect();
    by_remainder.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
    let missing = total.saturating_sub(whole.iter().sum()) as usize;
    for source in by_remainder.into_iter().cycle().take(missing) {
        whole[source] += 1;
    }
    whole
}

/// Several sources concatenated.
pub(crate) struct Joined {
    sources: Vec<Arc<dyn Documents>>,
    /// Number of the first document of each source.
    bases: Vec<u64>,
    count: u64,
    tokens: TokenCount,
}

impl Joined {
    /// Requires every source to be finite.
    pub(crate) fn new(sources: Vec<Arc<dyn Documents>>) -> Self {
        let mut bases = Vec::new();
        let mut count = 0;
        let mut tokens = TokenCount::exact(0);
        for source in &sources {
            bases.push(count);
            count += source.count().expect("a finite source");
            tokens = tokens + source.tokens().expect("a finite source");
        }
        Self { sources, bases, count, tokens }
    }
}

impl Documents for Joined {
    fn count(&self) -> Option<u64> {
        Some(self.count)
    }

    fn tokens(&self) -> Option<TokenCount> {
        Some(self.tokens)
    }

    fn is_tokenised_as_read(&self) -> bool {
        self.sources.iter().any(|source| source.is_tokenised_as_read())
    }

    fn append(&self, index: u64, out: &mut Vec<u32>, spent: &mut Spent) -> Result<(), DataError> {
        // The last source that begins at or before the index: an empty source begins where the next one does.
        let source = self.bases.partition_point(|base| *base <= index) - 1;
        self.sources[source].append(index - self.bases[source], out, spent)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::order::documents::TokenTable;
    use crate::order::permutation::Order;

    fn mixture(parts: &[(u64, f64, f64)]) -> Mixture {
        let mut base = 0;
        let parts = parts.iter().map(|(count, weight, mean_tokens)| {
            base += count;
            MixtureSource { base: base - count, count: *count, weight: *weight, mean_tokens: *mean_tokens }
        });
        Mixture::new(parts.collect())
    }

    #[test]
    fn shares_are_of_tokens_whatever_the_lengths() {
        let mixture = mixture(&[(1000, 0.7, 20.0), (10, 0.2, 5000.0), (77, 0.1, 333.0)]);
        let mut tokens = [0.0; 3];
        for position in 0..4 * SLOTS as u64 {
            let source = mixture.place(position).0;
            tokens[source] += mixture.parts[source].mean_tokens;
        }
        let all: f64 = tokens.iter().sum();
        for (tokens, weight) in tokens.iter().zip([0.7, 0.2, 0.1]) {
            assert!((tokens / all - weight).abs() < 0.02, "{} for {weight}", tokens / all);
        }
        assert!((all / (4 * SLOTS) as f64 - mixture.mean_tokens()).abs() < 1e-6);
    }

    #[test]
    fn a_source_is_walked_in_order_without_a_gap() {
        let mixture = mixture(&[(5, 1.0, 3.0), (5, 2.0, 3.0), (5, 1e-9, 3.0)]);
        let mut next = [0; 3];
        for position in 0..3 * SLOTS as u64 {
            let (source, place) = mixture.place(position);
            assert_eq!(place, next[source]);
            next[source] += 1;
        }
        assert_eq!(next[2], 3, "the least share has a slot");
    }

    #[test]
    fn every_epoch_of_a_source_names_each_of_its_documents_once() {
        let order = Order::mixed(Arc::new(mixture(&[(40, 1.0, 10.0), (7, 3.0, 10.0)])), 5);
        let mut seen: HashMap<u64, u64> = HashMap::new();
        // 7 documents at three quarters of the tokens: many epochs, in each of which every document is drawn once.
        (0..2000).for_each(|position| *seen.entry(order.document(position)).or_default() += 1);
        for (from, to) in [(0, 40), (40, 47)] {
            let counts: Vec<u64> = (from..to).map(|document| seen[&document]).collect();
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(most - least <= 1 && *least > 5, "{counts:?}");
        }
        assert_eq!(seen.len(), 47);
        // Consecutive documents are spread over the eight streams.
        let streams = (0..8).map(|lane| {
            (0..1000).filter(|place| order.document(place * 8 + lane) < 40).count() as f64 / 1000.0
        });
        for share in streams {
            assert!((share - 0.25).abs() < 0.05, "a stream has {share} of a quarter");
        }
    }

    #[test]
    fn joined_sources_keep_their_documents() {
        let table = |tokens: &[&[u32]]| -> Arc<dyn Documents> { Arc::new(TokenTable::new(tokens, 100)) };
        let joined = Joined::new(vec![table(&[&[1], &[2, 3]]), table(&[]), table(&[&[4, 5, 6]])]);
        let read = |index| {
            let mut out = vec![];
            joined.append(index, &mut out, &mut Spent::default()).unwrap();
            out
        };
        assert_eq!((0..3).map(read).collect::<Vec<_>>(), [vec![1], vec![2, 3], vec![4, 5, 6]]);
        assert_eq!((joined.count(), joined.tokens()), (Some(3), Some(TokenCount::exact(6))));
    }
}
