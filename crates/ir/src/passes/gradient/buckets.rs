//! Buckets: the division of a region among the ranks of a shard group.
//!
//! The layout of a region does not depend on the number of ranks: a layer's parameters are a unit, which begins at a multiple
//! of `CHUNK` elements. A bucket is a run of units that is exchanged at once. In the region's slots it ends in padding, so that
//! every rank has equally many chunks of it; a rank's share of the region is the concatenation of its shares of all buckets. So
//! a tensor, which lies in one unit, has one range of elements on a rank, and no chunk and no block of 8-bit moments is
//! divided.
//!
//! Where an update needs whole matrices a rank has whole layers. A bucket is then a run of equal layers, the same number for
//! each rank, padded with missing layers at its end: every rank has the same matrices, at the same offsets of its share.

use std::ops::Range;

use crate::mesh::Axis;
use crate::optimizers::Run;
use crate::passes::gradient::layout::CHUNK;
use crate::passes::options::Options;

#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// Its range in the layout.
    pub layout: Range<usize>,
    /// Index of its first element in the region's slots.
    pub place: usize,
    /// Index of its first element in a rank's share of the region.
    pub at: usize,
    /// Number of its elements on each rank, including padding.
    pub share: usize,
}

impl Bucket {
    /// The same bucket in a slot with one element per block.
    pub fn by(&self, block: usize) -> Bucket {
        let layout = self.layout.start / block..self.layout.end / block;
        Bucket { layout, place: self.place / block, at: self.at / block, share: self.share / block }
    }
}

/// The buckets of a region whose units begin at these elements: at most `most` runs of units of about equal size.
pub(super) fn buckets(units: &[usize], elements: usize, most: usize, o: &Options) -> Vec<Bucket> {
    let ways = o.mesh.ways(Axis::Shard);
    let mut starts = vec![0];
    match most >= units.len() {
        true => starts = units.to_vec(),
        false => {
            for number in 1..most {
                let wanted = elements / most * number;
                let nearest = units.iter().min_by_key(|start| start.abs_diff(wanted)).expect("a unit");
                if *nearest > starts[starts.len() - 1] {
                    starts.push(*nearest);
                }
            }
        }
    }
    let (mut buckets, mut at): (Vec<Bucket>, _) = (vec![], 0);
    for (i, &start) in starts.iter().enumerate() {
        let end = starts.get(i + 1).copied().unwrap_or(elements);
        let share = (end - start).div_ceil(ways).next_multiple_of(CHUNK);
        buckets.push(Bucket { layout: start..end, place: at * ways, at, share });
        at += share;
    }
    buckets
}

/// The buckets of a region whose layers are not divided: about `most`, and at least one per run of equal layers.
pub(super) fn buckets_of_layers(runs: &[Run<'_>], most: usize, o: &Options) -> Vec<Bucket> {
    let ways = o.mesh.ways(Axis::Shard);
    let layers: usize = runs.iter().map(|run| run.count).sum();
    let (mut buckets, mut at): (Vec<Bucket>, _) = (vec![], 0);
    for run in runs {
        let rounds = run.count.div_ceil(ways);
        let wanted = (most.min(layers) * run.count / layers).clamp(1, rounds);
        let most_layers = rounds.div_ceil(wanted) * ways;
        for first in (0..run.count).step_by(most_layers) {
            let count = most_layers.min(run.count - first);
            let start = run.start + first * run.distance;
            let share = count.div_ceil(ways) * run.distance;
            buckets.push(Bucket { layout: start..start + count * run.distance, place: at * ways, at, share });
            at += share;
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;
    use crate::optimizers::Matrix;

    #[test]
    fn every_rank_has_whole_layers_of_every_bucket() {
        let matrices = [Matrix { start: 0, rows: 64, columns: 64 }];
        let [long, short] = [(0, 2, 7), (14, 1, 2)].map(|(start, distance, count)| Run {
            start: start * CHUNK,
            distance: distance * CHUNK,
            count,
            matrices: &matrices,
        });
        for ways in [2, 3, 4] {
            let o = Options { mesh: Mesh::new(1, ways), ..Options::default() };
            for most in [1, 3, usize::MAX] {
                let buckets = buckets_of_layers(&[long, short], most, &o);
                let (mut end, mut place) = (0, 0);
                for bucket in &buckets {
                    assert_eq!((bucket.layout.start, bucket.place), (end, place), "one behind the other");
                    let run = if end < short.start { long } else { short };
                    assert!(bucket.share.is_multiple_of(run.distance) && bucket.at * ways == bucket.place);
                    assert!(bucket.share * ways - bucket.layout.len() < run.distance * ways);
                    (end, place) = (bucket.layout.end, place + bucket.share * ways);
                }
                assert_eq!(end, 16 * CHUNK);
                let most_there_are = 7usize.div_ceil(ways) + 2usize.div_ceil(ways);
                match most {
                    1 => assert_eq!(buckets.len(), 2, "one a run"),
                    usize::MAX => assert_eq!(buckets.len(), most_there_are, "as many layers as ranks each"),
                    most => assert!((2..=most_there_are.max(most)).contains(&buckets.len())),
                }
            }
        }
    }

    #[test]
    fn every_rank_has_whole_chunks_of_every_bucket() {
        let units = [0, 3, 5, 6, 10].map(|chunks| chunks * CHUNK);
        let elements = 11 * CHUNK;
        for ways in [2, 3, 4, 8] {
            let o = Options { mesh: Mesh::new(1, ways), ..Options::default() };
            for (most, count) in [(1, 1), (2, 2), (3, 3), (usize::MAX, 5)] {
                let buckets = buckets(&units, elements, most, &o);
                assert_eq!(buckets.len(), count, "{most} at most");
                let (mut end, mut place) = (0, 0);
                for bucket in &buckets {
                    assert_eq!((bucket.layout.start, bucket.place), (end, place), "one behind the other");
                    assert!(units.contains(&bucket.layout.start), "a bucket is a run of units");
                    assert!(bucket.share.is_multiple_of(CHUNK) && bucket.at * ways == bucket.place);
                    let padding = bucket.share * ways - bucket.layout.len();
                    assert!(padding < CHUNK * ways, "{padding} elements of padding on {ways} ranks");
                    (end, place) = (bucket.layout.end, place + bucket.share * ways);
                }
                assert_eq!(end, elements);
            }
        }
        let one = &buckets(&units, elements, 1, &Options { mesh: Mesh::new(1, 4), ..Options::default() })[0];
        assert_eq!(one.by(256).share, 3 * CHUNK / 256);
    }
}
