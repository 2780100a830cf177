//! Bicubic resampling of a grid as a fixed matrix, with corners not aligned. A learned table resampled by a matrix product gets
//! its gradient from the product's rule.
//!
//! Plain resampling weighs the four neighbours along each axis by the cubic of coefficient -0.75 and repeats border values.
//! With antialiasing the coefficient is -0.5, the cubic widens by the factor by which the grid shrinks, and points beyond the
//! border have no weight. Both follow PyTorch's definitions.

/// The cubic's free coefficient, plain and with antialiasing.
const PLAIN: f64 = -0.75;
const SMOOTH: f64 = -0.5;

/// The matrix `[to rows * to columns, from rows * from columns]` that resamples a grid; grids are flattened row by row.
pub fn matrix(from: [usize; 2], to: [usize; 2], antialias: bool) -> Vec<f64> {
    let line = if antialias { smooth_line } else { plain_line };
    let (rows, columns) = (line(from[0], to[0]), line(from[1], to[1]));
    let mut all = Vec::with_capacity(to[0] * to[1] * from[0] * from[1]);
    for row in rows.chunks_exact(from[0]) {
        for column in columns.chunks_exact(from[1]) {
            all.extend(row.iter().flat_map(|r| column.iter().map(move |c| r * c)));
        }
    }
    all
}

/// `[to, from]` weights along one axis.
fn plain_line(from: usize, to: usize) -> Vec<f64> {
    let mut weights = vec![0.0; to * from];
    for (i, row) in weights.chunks_exact_mut(from).enumerate() {
        let at = (i as f64 + 0.5) * from as f64 / to as f64 - 0.5;
        let first = at.floor();
        let beyond = at - first;
        // Distances of the four neighbours: two before, two after.
        for (k, distance) in [1.0 + beyond, beyond, 1.0 - beyond, 2.0 - beyond].into_iter().enumerate() {
            let place = (first as i64 - 1 + k as i64).clamp(0, from as i64 - 1);
            row[place as usize] += cubic(distance, PLAIN);
        }
    }
    weights
}

/// `[to, from]` weights along one axis, with antialiasing.
fn smooth_line(from: usize, to: usize) -> Vec<f64> {
    let mut weights = vec![0.0; to * from];
    let step = from as f64 / to as f64;
    for (i, row) in weights.chunks_exact_mut(from).enumerate() {
        let centre = (i as f64 + 0.5) * step;
        let weight = |place: usize| cubic((place as f64 + 0.5 - centre).abs() / step.max(1.0), SMOOTH);
        let sum: f64 = (0..from).map(weight).sum();
        row.iter_mut().enumerate().for_each(|(place, share)| *share = weight(place) / sum);
    }
    weights
}

fn cubic(x: f64, a: f64) -> f64 {
    match x {
        x if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_sum_to_one_and_an_equal_grid_stays() {
        for antialias in [false, true] {
            for (from, to) in [([5, 5], [3, 3]), ([3, 4], [7, 5]), ([37, 37], [16, 16])] {
                let width = from[0] * from[1];
                for row in matrix(from, to, antialias).chunks_exact(width) {
                    assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
                }
            }
            let same = matrix([3, 2], [3, 2], antialias);
            assert!(same.iter().enumerate().all(|(i, x)| *x == if i % 7 == 0 { 1.0 } else { 0.0 }));
        }
    }

    /// With half as many points, each lies midway between two, with weights (a, 1/2 - a, 1/2 - a, a), a = -3/32.
    #[test]
    fn halving_weighs_four_neighbours() {
        let a = -3.0 / 32.0;
        assert_eq!(plain_line(8, 4)[8..16], [0.0, a, 0.5 - a, 0.5 - a, a, 0.0, 0.0, 0.0]);
        // Before the border the first value is repeated.
        assert_eq!(plain_line(8, 4)[..3], [0.5, 0.5 - a, a]);
    }

    /// `torch.nn.functional.interpolate` of the eight unit vectors to four points, with `antialias=True`.
    #[test]
    fn halving_with_antialiasing_weighs_eight() {
        let inner = [-0.01171875, -0.03515625, 0.11328125, 0.43359375];
        let row = &smooth_line(16, 8)[3 * 16..4 * 16];
        for (i, share) in inner.iter().chain(inner.iter().rev()).enumerate() {
            assert!((row[3 + i] - share).abs() < 1e-12, "{row:?}");
        }
        assert_eq!(row.iter().filter(|share| **share != 0.0).count(), 8);
    }
}
