//! Embedding rows for tokens that a model does not have yet: drawn around the mean of its rows, as transformers'
//! `resize_token_embeddings` does by default.
//!
//! There a new row is normal with the mean of the old rows and 1e-9 times their covariance: an unseen token is as likely as the
//! average token, and no two are quite equal. mean + sqrt(1e-9 / V) sum of z_i (row_i - mean), with normal z_i, has exactly that
//! distribution and needs no covariance matrix. A row depends on the seed, the table, its index and the old rows.

use flatout_ir::Init;
use rayon::prelude::*;

use crate::weights::initial::drawn;

/// The library's factor on the covariance.
const VARIANCE: f64 = 1e-9;
/// Old rows per partial sum. Partial sums are added in order, whatever the number of threads.
const BLOCK: usize = 1024;

/// Adds rows of `width` elements to a table until there are `rows`.
pub fn grow(path: &str, table: &mut Vec<f32>, width: usize, rows: usize, seed: u64) {
    let old = table.len() / width;
    let mean: Vec<f64> = summed(table, width, |_, x| x).iter().map(|sum| sum / old as f64).collect();
    let factor = (VARIANCE / old as f64).sqrt();
    let new: Vec<Vec<f32>> = (old..rows)
        .map(|row| {
            let z = drawn(&format!("{path}.{row}"), &Init::Normal { std: 1.0 }, seed, 0..old);
            // The sum of z_i (row_i - mean) without another table: the sum of z_i row_i, minus the mean times the sum of z_i.
            let all = summed(table, width, |i, x| z[i] as f64 * x);
            let drawn: f64 = z.iter().map(|z| *z as f64).sum();
            let shift = |(mean, sum): (&f64, &f64)| (mean + factor * (sum - mean * drawn)) as f32;
            mean.iter().zip(&all).map(shift).collect()
        })
        .collect();
    table.extend(new.into_iter().flatten());
}

/// The sum over all rows, each element mapped by `taken`.
fn summed(table: &[f32], width: usize, taken: impl Fn(usize, f64) -> f64 + Sync) -> Vec<f64> {
    let add = |mut sum: Vec<f64>, term: &[f64]| {
        sum.iter_mut().zip(term).for_each(|(sum, x)| *sum += x);
        sum
    };
    let blocks: Vec<Vec<f64>> = table
        .par_chunks(BLOCK * width)
        .enumerate()
        .map(|(block, rows)| {
            let mut sum = vec![0.0; width];
            for (row, values) in rows.chunks_exact(width).enumerate() {
                let of_row = |x: f32| taken(block * BLOCK + row, x as f64);
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += of_row(*x));
            }
            sum
        })
        .collect();
    blocks.iter().fold(vec![0.0; width], |sum, term| add(sum, term))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many new rows have the mean of the old ones and 1e-9 times their covariance.
    #[test]
    fn new_rows_have_the_librarys_distribution() {
        let (old, new, width) = (2500, 4000, 3);
        let value = |row: usize, column: usize| {
            let [a, b] = [row * 7919 % 1000, row * 104_729 % 1000].map(|x| x as f64 / 500.0 - 1.0);
            [1.0 + a, 2.0 * a - b, b - 3.0][column] as f32
        };
        let first: Vec<f32> = (0..old * width).map(|i| value(i / width, i % width)).collect();
        let grown = |seed: u64| {
            let mut table = first.clone();
            grow("embed.weight", &mut table, width, old + new, seed);
            table
        };
        let table = grown(5);
        assert_eq!(table[..old * width], first, "old rows are as they were");
        assert_eq!(table, grown(5), "the seed determines all");
        assert_ne!(table, grown(6));
        // Deviations are near 1e-5 of the values, so that f32 rounds them: the bounds leave room for it.
        let moments = |rows: &[f32], scale: f64| {
            let count = rows.len() / width;
            let mean: Vec<f64> = (0..width)
                .map(|c| rows.iter().skip(c).step_by(width).map(|x| *x as f64).sum::<f64>() / count as f64)
                .collect();
            let mut covariance = vec![0.0; width * width];
            for row in rows.chunks(width) {
                for (at, sum) in covariance.iter_mut().enumerate() {
                    let off = |c: usize| row[c] as f64 - mean[c];
                    *sum += off(at / width) * off(at % width) / (count as f64 * scale);
                }
            }
            (mean, covariance)
        };
        let (mean, covariance) = moments(&first, 1.0);
        let (new_mean, new_covariance) = moments(&table[old * width..], VARIANCE);
        for (a, b) in mean.iter().zip(&new_mean) {
            assert!((a - b).abs() < 1e-5, "{mean:?} {new_mean:?}");
        }
        for (a, b) in covariance.iter().zip(&new_covariance) {
            assert!((a - b).abs() < 0.1 * covariance[0].max(1.0), "{covariance:?} {new_covariance:?}");
        }
    }
}
