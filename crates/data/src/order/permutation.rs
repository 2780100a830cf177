//! The order of documents: one permutation per epoch, computed by index and never stored.

use std::sync::Arc;

use super::mixture::{Mixture, MixtureSource};
use crate::random::{key, mix};

/// The document at each position of the series of all epochs. Each source has its own epochs, and each of them visits every
/// document of the source once. The order is a function of counts, weights, seed and position only.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    series: Series,
    seed: u64,
}

#[derive(Debug, Clone)]
enum Series {
    /// An endless source, in its own order.
    Endless,
    /// Position `g` belongs to epoch `g / count`.
    One(u64),
    Mixed(Arc<Mixture>),
}

impl Order {
    /// A count of `None` is an endless source, read in its own order.
    pub(crate) fn new(count: Option<u64>, seed: u64) -> Self {
        assert!(count != Some(0), "there is nothing to order");
        Self { series: count.map_or(Series::Endless, Series::One), seed }
    }

    pub(crate) fn mixed(mixture: Arc<Mixture>, seed: u64) -> Self {
        Self { series: Series::Mixed(mixture), seed }
    }

    pub(crate) fn is_mixed(&self) -> bool {
        matches!(self.series, Series::Mixed(_))
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    pub(crate) fn document(&self, position: u64) -> u64 {
        match &self.series {
            Series::Endless => position,
            Series::One(count) => permuted(*count, self.seed, position),
            Series::Mixed(mixture) => {
                let (source, position) = mixture.place(position);
                let MixtureSource { base, count, .. } = mixture.parts[source];
                // Without a key per source, sources of equal size would be read in the same order.
                base + permuted(count, key(self.seed, source as u64 + 1), position)
            }
        }
    }
}

fn permuted(count: u64, seed: u64, position: u64) -> u64 {
    Permutation::new(count, key(seed, position / count)).at(position % count)
}

/// A bijection on `0..count`: a Feistel network over the next even number of bits, iterated until the value is in range (cycle
/// walking). The network covers less than four times `count`, so this takes under four rounds on average.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permutation {
    count: u64,
    half_bits: u32,
    key: u64,
}

const ROUNDS: u64 = 6;

impl Permutation {
    pub(crate) fn new(count: u64, key: u64) -> Self {
        let bits = (u64::BITS - (count - 1).leading_zeros()).max(2);
        Self { count, half_bits: bits.div_ceil(2), key }
    }

    pub(crate) fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.count);
        let mut value = index;
        loop {
            value = self.network(value);
            if value < self.count {
                return value;
            }
        }
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(key(self.key, round) ^ right) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_names_every_document_once() {
        for count in [1, 2, 3, 5, 7, 64, 65, 127, 1000, 4097] {
            let order = Order::new(Some(count), 11);
            for epoch in 0..3 {
                let mut documents: Vec<u64> =
                    (0..count).map(|at| order.document(epoch * count + at)).collect();
                documents.sort_unstable();
                assert!(documents.into_iter().eq(0..count), "{count} documents, epoch {epoch}");
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_are_shuffled() {
        let of = |seed, epoch: u64| -> Vec<u64> {
            let order = Order::new(Some(1000), seed);
            (0..1000).map(|at| order.document(epoch * 1000 + at)).collect()
        };
        let first = of(1, 0);
        assert_eq!(first, of(1, 0));
        for other in [of(1, 1), of(2, 0), (0..1000).collect()] {
            let unmoved = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(unmoved < 10, "{unmoved} documents stand in the same place");
        }
        let neighbours = first.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
        assert!(neighbours < 12, "{neighbours} neighbours stayed neighbours");
    }

    #[test]
    fn the_largest_counts_have_an_order() {
        let order = Order::new(Some(u64::MAX), 5);
        assert_ne!(order.document(0), order.document(1));
    }
}
