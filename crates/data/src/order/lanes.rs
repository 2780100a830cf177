//! Lanes: which samples of an update a rank computes, and in which order.
//!
//! The samples of an update are dealt to lanes one after another, and lanes are summed apart. A rank has lanes that follow one
//! another. So the sums of a lane do not depend on how many ranks the lanes lie on.

/// The lanes of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lanes {
    /// The first of this rank, and how many it has.
    pub first: usize,
    pub count: usize,
    /// Of all ranks together.
    pub of: usize,
    /// Samples of an update. Every cursor that training saves is a multiple of it.
    pub batch: usize,
}

impl Lanes {
    /// One lane that has every sample.
    pub const ONE: Lanes = Lanes { first: 0, count: 1, of: 1, batch: 1 };

    /// The number among this rank's lanes of the one that has a unit of an update, by the unit's place; `None` where it is
    /// another rank's.
    pub fn of_unit(&self, place: usize) -> Option<usize> {
        (place % self.of).checked_sub(self.first).filter(|lane| *lane < self.count)
    }

    /// The same of a sample, by its place in the series of all samples.
    pub fn of_sample(&self, sample: u64) -> Option<usize> {
        self.of_unit((sample % self.batch as u64) as usize)
    }

    /// The places of an update's own samples lane by lane, each lane in portions of at most `most` with its number.
    pub fn portions(&self, samples: &[u64], most: usize) -> Vec<(usize, Vec<usize>)> {
        let of_lane = |lane: usize| -> Vec<usize> {
            let is_own = |place: &usize| self.of_sample(samples[*place]) == Some(lane);
            (0..samples.len()).filter(is_own).collect()
        };
        let of_lane = |lane: usize| {
            let places = of_lane(lane);
            places.chunks(most).map(|portion| (lane, portion.to_vec())).collect::<Vec<_>>()
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
        let whole = Lanes { first: 0, count: 4, of: 4, batch: 12 }.portions(&all, 2);
        assert_eq!(whole[..3], [(0, vec![0, 4]), (0, vec![8]), (1, vec![1, 5])]);
        for ranks in [1, 2, 4] {
            let count = 4 / ranks;
            let shared = (0..ranks).flat_map(|rank| {
                let lanes = Lanes { first: rank * count, count, of: 4, batch: 12 };
                let portions = lanes.portions(&all, 2).into_iter();
                portions.map(move |(lane, places)| (rank * count + lane, places))
            });
            assert_eq!(shared.collect::<Vec<_>>(), whole);
        }
        assert_eq!(Lanes::ONE.portions(&all, 12), [(0, (0..12).collect())]);
    }
}
