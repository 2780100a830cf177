//! Bicubic resampling of a grid as a fixed matrix: corners not aligned, border values repeated, the cubic of coefficient
//! -0.75. A learned table that is resampled by a product gets its gradient by the product's own rule.

/// The cubic's free coefficient.
const A: f64 = -0.75;

/// The matrix `[to rows * to columns, from rows * from columns]` that resamples a grid, row after row.
pub fn matrix(from: [usize; 2], to: [usize; 2]) -> Vec<f64> {
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
fn line(from: usize, to: usize) -> Vec<f64> {
    let mut weights = vec![0.0; to * from];
    for (i, row) in weights.chunks_exact_mut(from).enumerate() {
        let at = (i as f64 + 0.5) * from as f64 / to as f64 - 0.5;
        let first = at.floor();
        let beyond = at - first;
        // Distances of the four neighbours: two before, two after.
        for (k, distance) in [1.0 + beyond, beyond, 1.0 - beyond, 2.0 - beyond].into_iter().enumerate() {
            let place = (first as i64 - 1 + k as i64).clamp(0, from as i64 - 1);
            row[place as usize] += cubic(distance);
        }
    }
    weights
}

fn cubic(x: f64) -> f64 {
    if x <= 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_sum_to_one_and_an_equal_grid_stays() {
        for (from, to) in [([5, 5], [3, 3]), ([3, 4], [7, 5]), ([37, 37], [16, 16])] {
            let width = from[0] * from[1];
            for row in matrix(from, to).chunks_exact(width) {
                assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            }
        }
        let same = matrix([3, 2], [3, 2]);
        assert!(same.iter().enumerate().all(|(i, x)| *x == if i % 7 == 0 { 1.0 } else { 0.0 }));
    }

    /// Half as many points lie midway between two, with weights (a, 1/2 - a, 1/2 - a, a), a = -3/32.
    #[test]
    fn halving_weighs_four_neighbours() {
        let a = -3.0 / 32.0;
        assert_eq!(line(8, 4)[8..16], [0.0, a, 0.5 - a, 0.5 - a, a, 0.0, 0.0, 0.0]);
        // At the border the first value stands for what lies before it.
        assert_eq!(line(8, 4)[..3], [0.5, 0.5 - a, a]);
    }
}
