//! Lanes: the samples of an update that a rank computes, and their order.
//!
//! The samples of an update are dealt to lanes in turn, and each lane has a sum of its own, so a lane's sum does not depend on
//! how many ranks share the lanes. A rank has consecutive lanes. Where several ranks add up their gradients after every
//! micro-batch, they compute neighbouring lanes at the same time, and each runs as many micro-batches as the rank that has
//! most.

use super::pack::STREAMS;

/// The lanes of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lanes {
    /// The first lane of this rank, and the number of its lanes.
    pub first: usize,
    pub count: usize,
    /// Lanes of all ranks together.
    pub of: usize,
    /// Number of ranks that add up their gradients after every micro-batch, which is also the distance between lanes of a rank;
    /// 1 where each rank sums its own gradients.
    pub together: usize,
    /// Samples per update. Every cursor that training saves is a multiple of it.
    pub batch: usize,
}

impl Lanes {
    /// A single lane that has every sample.
    pub const ONE: Lanes = Lanes { first: 0, count: 1, of: 1, together: 1, batch: 1 };

    /// Index, among this rank's lanes, of the lane that unit `place` of an update belongs to; `None` where it belongs to
    /// another rank.
    pub fn of_unit(&self, place: usize) -> Option<usize> {
        let offset = (place % self.of).checked_sub(self.first)?;
        let lane = offset / self.together;
        (offset.is_multiple_of(self.together) && lane < self.count).then_some(lane)
    }

    /// Whether ranks run every micro-batch together, so that each runs as many as the rank that has most.
    pub fn are_in_step(&self) -> bool {
        self.together > 1
    }

    /// The lanes of all ranks that are computed at the same time as lane `lane` of this rank.
    pub fn at_the_time_of(&self, lane: usize) -> impl Iterator<Item = usize> {
        let Lanes { together, count, .. } = *self;
        (0..self.of).filter(move |other| other / together % count == lane)
    }

    /// As [`Self::of_unit`], for a sample given by its global index.
    pub fn of_sample(&self, sample: u64) -> Option<usize> {
        self.of_unit((sample % self.batch as u64) as usize)
    }

    /// The streams of text that hold rows of these lanes, in order. The lanes of rows repeat after a common multiple of the
    /// number of streams and the rows of an update.
    pub fn streams(&self) -> Vec<usize> {
        let mut has_own_rows = [false; STREAMS];
        self.own_rows_of_a_period().for_each(|row| has_own_rows[row % STREAMS] = true);
        (0..STREAMS).filter(|stream| has_own_rows[*stream]).collect()
    }

    /// Rows that those streams pack per row of these lanes: 1 where no stream is shared with another rank.
    pub fn packed_for_one(&self) -> f64 {
        let of_streams = self.period() / STREAMS * self.streams().len();
        of_streams as f64 / self.own_rows_of_a_period().count() as f64
    }

    fn period(&self) -> usize {
        let common =
            (1..=STREAMS).rev().find(|n| STREAMS.is_multiple_of(*n) && self.batch.is_multiple_of(*n));
        STREAMS / common.expect("1 divides everything") * self.batch
    }

    fn own_rows_of_a_period(&self) -> impl Iterator<Item = usize> {
        (0..self.period()).filter(|row| self.of_sample(*row as u64).is_some())
    }

    /// Splits this rank's samples of an update, given by their indices, into portions of at most `most`, lane by lane. Each
    /// portion comes with its lane. Where ranks run in step, a lane with fewer portions than the lanes computed at the same
    /// time ends with empty ones.
    pub fn portions(&self, samples: &[u64], most: usize) -> Vec<(usize, Vec<usize>)> {
        let of_lane = |lane: usize| -> Vec<usize> {
            let is_own = |place: &usize| self.of_sample(samples[*place]) == Some(lane);
            (0..samples.len()).filter(is_own).collect()
        };
        let of_lane = |lane: usize| {
            let places = of_lane(lane);
            let mut portions: Vec<_> = places.chunks(most).map(|portion| (lane, portion.to_vec())).collect();
            if self.are_in_step() {
                let samples = |lane: usize| self.batch.saturating_sub(lane).div_ceil(self.of);
                let longest = self.at_the_time_of(lane).map(samples).max().unwrap_or(0);
                portions.resize(longest.div_ceil(most), (lane, vec![]));
            }
            portions
        };
        (0..self.count).flat_map(of_lane).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_belongs_to_one_lane_however_many_ranks_there_are() {
        let all: Vec<u64> = (24..36).collect();
        let whole = Lanes { first: 0, count: 4, of: 4, together: 1, batch: 12 }.portions(&all, 2);
        assert_eq!(whole[..3], [(0, vec![0, 4]), (0, vec![8]), (1, vec![1, 5])]);
        for ranks in [1, 2, 4] {
            let count = 4 / ranks;
            let shared = (0..ranks).flat_map(|rank| {
                let lanes = Lanes { first: rank * count, count, of: 4, together: 1, batch: 12 };
                let portions = lanes.portions(&all, 2).into_iter();
                portions.map(move |(lane, places)| (rank * count + lane, places))
            });
            assert_eq!(shared.collect::<Vec<_>>(), whole);
        }
        assert_eq!(Lanes::ONE.portions(&all, 12), [(0, (0..12).collect())]);
    }

    /// Eleven samples in eight lanes: three lanes have two of them.
    #[test]
    fn ranks_in_step_have_as_many_portions_of_lanes_side_by_side() {
        let all: Vec<u64> = (0..11).collect();
        let of = |first: usize| Lanes { first, count: 2, of: 8, together: 4, batch: 11 }.portions(&all, 1);
        assert_eq!(of(0), [(0, vec![0]), (0, vec![8]), (1, vec![4])]);
        assert_eq!(of(3), [(0, vec![3]), (0, vec![]), (1, vec![7])]);
        // Two groups of two ranks.
        let second = Lanes { first: 4, count: 2, of: 8, together: 2, batch: 8 };
        assert_eq!([4, 5, 6, 7].map(|lane| second.of_unit(lane)), [Some(0), None, Some(1), None]);
        assert_eq!(second.at_the_time_of(1).collect::<Vec<_>>(), [2, 3, 6, 7]);
    }

    #[test]
    fn ranks_share_streams_only_where_they_do_not_divide_them() {
        let of = |rank: usize, ranks: usize, of: usize, batch: usize| {
            let count = of / ranks;
            let lanes = Lanes { first: rank * count, count, of, together: 1, batch };
            (lanes.streams(), lanes.packed_for_one())
        };
        assert_eq!(of(0, 1, 1, 5), ((0..8).collect(), 1.0));
        assert_eq!(of(0, 1, 8, 16), ((0..8).collect(), 1.0));
        for (ranks, lanes) in [(2, 8), (4, 8), (8, 8), (2, 2), (4, 4)] {
            let streams = |rank| of(rank, ranks, lanes, 16).0;
            let mut all: Vec<usize> = (0..ranks).flat_map(streams).collect();
            all.sort_unstable();
            assert_eq!(all, (0..8).collect::<Vec<_>>(), "{ranks} ranks have each stream once");
            assert!((0..ranks).all(|rank| of(rank, ranks, lanes, 16).1 == 1.0));
        }
        assert_eq!(of(1, 2, 8, 16).0, [4, 5, 6, 7]);
        assert_eq!(of(1, 2, 2, 16).0, [1, 3, 5, 7]);
        assert_eq!(of(1, 3, 3, 12), ((0..8).collect(), 3.0));
        assert_eq!(of(5, 16, 16, 32), (vec![5], 2.0));
        assert_eq!(of(3, 6, 6, 24), (vec![1, 3, 5, 7], 3.0));
        // Updates begin at other streams where they are no multiple of the streams.
        assert_eq!(of(0, 2, 2, 5), ((0..8).collect(), 5.0 / 3.0));
        assert_eq!(of(0, 4, 4, 4), (vec![0, 4], 1.0));
    }
}
