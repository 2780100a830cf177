//! Selects the merge blocks of an image that a text sees where it does not see all: the most salient ones, by pixels alone.
//!
//! The deviation of a block is the variance within it plus the mean squared distance of its mean colour from those of its four
//! neighbours, so a flat block among similar ones has the lowest. Sums are integers, so the selection is the same on every
//! machine.

use super::grid::Grid;
use super::patching::Patching;
use crate::images::CHANNELS;

/// The indices of the `count` merge blocks with the largest deviation, in ascending order; among equal ones the first.
/// `patches` are those of the whole image.
pub(super) fn most_salient(patches: &[u8], grid: Grid, patching: &Patching, count: usize) -> Vec<u32> {
    let deviations = deviations(patches, grid, patching);
    let mut order: Vec<u32> = (0..deviations.len() as u32).collect();
    order.sort_by(|a, b| deviations[*b as usize].total_cmp(&deviations[*a as usize]));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// The deviation of every block.
fn deviations(patches: &[u8], grid: Grid, patching: &Patching) -> Vec<f64> {
    let [rows, columns] = grid.merged(patching.merge);
    let line = patching.patch * CHANNELS;
    let block_bytes = patches.len() / (rows * columns);
    let mut sums = vec![0_u32; line];
    let mut squares = vec![0_u32; line];
    let colours: Vec<Colour> =
        patches.chunks_exact(block_bytes).map(|block| Colour::of(block, &mut sums, &mut squares)).collect();
    let deviation = |(at, own): (usize, &Colour)| {
        let (row, column) = (at / columns, at % columns);
        let beside = [
            (row > 0).then(|| at - columns),
            (row + 1 < rows).then(|| at + columns),
            (column > 0).then(|| at - 1),
            (column + 1 < columns).then(|| at + 1),
        ];
        let beside = || beside.iter().flatten().map(|other| own.distance(&colours[*other]));
        own.variance + beside().sum::<f64>() / beside().count().max(1) as f64
    };
    colours.iter().enumerate().map(deviation).collect()
}

/// Colour statistics of a block.
struct Colour {
    mean: [f64; CHANNELS],
    /// Sum over all channels.
    variance: f64,
}

impl Colour {
    /// From rows of pixels. `sums` and `squares` are scratch memory of the length of a row.
    fn of(block: &[u8], sums: &mut [u32], squares: &mut [u32]) -> Colour {
        sums.fill(0);
        squares.fill(0);
        for line in block.chunks_exact(sums.len()) {
            for ((byte, sum), square) in line.iter().zip(&mut *sums).zip(&mut *squares) {
                let value = u32::from(*byte);
                *sum += value;
                *square += value * value;
            }
        }
        let count = (block.len() / CHANNELS) as f64;
        let of_channel = |all: &[u32], channel: usize| {
            all.iter().skip(channel).step_by(CHANNELS).map(|sum| u64::from(*sum)).sum::<u64>() as f64 / count
        };
        let mean = std::array::from_fn(|channel| of_channel(sums, channel));
        let variance =
            (0..CHANNELS).map(|channel| of_channel(squares, channel) - mean[channel] * mean[channel]);
        Colour { mean, variance: variance.sum() }
    }

    fn distance(&self, other: &Colour) -> f64 {
        self.mean.iter().zip(&other.mean).map(|(a, b)| (a - b) * (a - b)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of three blocks of four pixels. All blocks have a uniform grey, except one with a different pixel.
    #[test]
    fn blocks_that_stand_out_are_kept() {
        let patching = Patching { patch: 1, merge: 2, ..Patching::default() };
        let grid = Grid { rows: 4, columns: 6 };
        let image = |greys: [[u8; 4]; 6]| -> Vec<u8> {
            greys.iter().flatten().flat_map(|grey| [*grey; CHANNELS]).collect()
        };
        let kept = |greys, count| most_salient(&image(greys), grid, &patching, count);
        // The fifth block is brighter than those around it, and differs from all of its neighbours.
        let spot = [[10; 4], [10; 4], [10; 4], [10; 4], [90; 4], [10; 4]];
        assert_eq!(kept(spot, 1), [4]);
        // Next come its neighbours: the difference counts a third for blocks with three neighbours, and a half for those with
        // two.
        assert_eq!(kept(spot, 3), [3, 4, 5]);
        assert_eq!(kept(spot, 4), [1, 3, 4, 5]);
        // Variation within a block counts more than variation around it.
        let mut varied = spot;
        varied[0] = [0, 255, 0, 255];
        assert_eq!(kept(varied, 1), [0]);
        // Without salient blocks, the first ones are selected.
        assert_eq!(kept([[7; 4]; 6], 2), [0, 1]);
        assert_eq!(kept(varied, 6), [0, 1, 2, 3, 4, 5]);
    }

    /// Per pixel, 2, 4 and 6 have mean 4 and variance 8 / 3, in each of three channels.
    #[test]
    fn a_deviation_is_written_out() {
        let patching = Patching { patch: 3, merge: 1, ..Patching::default() };
        let lines: Vec<u8> = [2, 4, 6].repeat(3).iter().flat_map(|value| [*value; CHANNELS]).collect();
        let found = deviations(&lines, Grid { rows: 1, columns: 1 }, &patching);
        assert!(found.len() == 1 && (found[0] - 8.0).abs() < 1e-12, "{found:?}");
        let two: Vec<u8> = lines.iter().copied().chain([5; 9 * CHANNELS]).collect();
        let found = deviations(&two, Grid { rows: 1, columns: 2 }, &patching);
        assert!((found[0] - 11.0).abs() < 1e-12 && (found[1] - 3.0).abs() < 1e-12, "{found:?}");
    }
}
