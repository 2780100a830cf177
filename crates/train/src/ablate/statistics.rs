//! What repeated timings allow to say: a ratio, the range it lies in, and whether it differs from 1.
//!
//! Machines drift, so a variant is never compared with a base of another time: its time in a round is divided by the base's
//! just before and just after it. The rounds' ratios give a median and a range. Two things make the range:
//!
//! - the ranks between which the median of the distribution lies with a probability of at least 90%, whatever the
//!   distribution: lowest and highest for up to seven rounds (with three rounds 75%, with five 94%), closer ranks for more;
//! - what the base shows against itself: visits of the base that follow one another have ratios too, and the range is at
//!   least three of their standard deviations wide to either side, scaled to a median of so many rounds. With twenty rows
//!   in a table the ranks alone would call one of them different by chance.

/// A ratio with the range that was measured.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Estimate {
    /// The median of the rounds.
    pub ratio: f64,
    pub low: f64,
    pub high: f64,
    pub rounds: usize,
}

impl Estimate {
    /// Whether the range holds 1: nothing was shown.
    pub fn is_noise(&self) -> bool {
        self.low <= 1.0 && 1.0 <= self.high
    }
}

/// Least probability with which ranks hold the median.
const COVERAGE: f64 = 0.9;
/// Standard deviations of the base against itself that count as nothing.
const DEVIATIONS: f64 = 3.0;

/// The estimate of ratios, one a round; `noise` is the standard deviation of the logarithm of one ratio.
pub fn estimate(ratios: &[f64], noise: f64) -> Estimate {
    let mut sorted = ratios.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    assert!(n > 0, "an estimate has a round");
    let ratio = median(&sorted);
    let cut = ranks_cut(n);
    // The median of many normal values varies by 1.25 times what their mean does.
    let shrink = if n < 3 { 1.0 } else { 1.2533 / (n as f64).sqrt() };
    let floor = (DEVIATIONS * noise * shrink).exp();
    let (low, high) = (sorted[cut].min(ratio / floor), sorted[n - 1 - cut].max(ratio * floor));
    Estimate { ratio, low, high, rounds: n }
}

/// How many of the lowest and of the highest values may be left out so that the rest holds the median well enough.
fn ranks_cut(n: usize) -> usize {
    let (mut cut, mut tail, mut ways) = (0usize, 0.0, 1.0);
    loop {
        // The probability that at most `cut` of n values lie on one side of the median.
        tail += ways * 0.5f64.powi(n as i32);
        if 1.0 - 2.0 * tail < COVERAGE {
            return cut.saturating_sub(1);
        }
        ways *= (n - cut) as f64 / (cut + 1) as f64;
        cut += 1;
    }
}

/// The standard deviation of the logarithm of a variant's ratio, if the variant were the base: from visits of the base
/// in the order they were made, each list without a break.
pub fn noise(bases: &[Vec<f64>]) -> f64 {
    let pairs = bases.iter().flat_map(|visits| visits.windows(2));
    let mut steps: Vec<f64> = pairs.map(|pair| (pair[1] / pair[0]).ln().abs()).collect();
    steps.sort_by(f64::total_cmp);
    let deviation = match steps.len() {
        0 => return f64::INFINITY,
        // So few say no more than their size.
        1..6 => (steps.iter().map(|step| step * step).sum::<f64>() / steps.len() as f64).sqrt(),
        // Of the median of absolute values, which a few disturbed visits do not move.
        _ => 1.4826 * median(&steps),
    };
    // A step is the difference of two visits, a ratio that of one and the mean of two.
    deviation * 0.75f64.sqrt()
}

/// Of sorted values.
pub fn median(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    match n % 2 {
        _ if n == 0 => f64::NAN,
        1 => sorted[n / 2],
        _ => 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]),
    }
}

/// Of values in any order.
pub fn middle(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    median(&sorted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_hold_the_median_often_enough() {
        assert_eq!([1, 2, 3, 5, 7].map(ranks_cut), [0; 5], "few rounds: from the lowest to the highest");
        // With eight, leaving out one on each side covers 1 - 2 * 9/256 = 93%.
        assert_eq!([8, 10, 11, 20].map(ranks_cut), [1, 1, 2, 5]);
    }

    #[test]
    fn the_range_is_no_closer_than_the_base_to_itself() {
        let quiet = estimate(&[1.1, 1.1, 1.1], 0.0);
        assert_eq!((quiet.ratio, quiet.low, quiet.high, quiet.is_noise()), (1.1, 1.1, 1.1, false));
        let loud = estimate(&[1.1, 1.1, 1.1], 0.1);
        assert!(loud.is_noise() && loud.low < 1.0 && loud.high > 1.2, "{loud:?}");
        let scattered = estimate(&[0.98, 1.1, 1.2], 0.0);
        assert_eq!((scattered.low, scattered.high, scattered.is_noise()), (0.98, 1.2, true));
        assert!(estimate(&[2.0], noise(&[vec![1.0]])).is_noise(), "one visit of the base shows nothing");
    }

    #[test]
    fn noise_is_that_of_neighbours() {
        // Twice as slow after a break is no noise, and neither is one disturbed visit.
        let mut steady: Vec<f64> = (0..40).map(|i| if i % 2 == 0 { 1.0 } else { 1.02 }).collect();
        let calm = noise(&[steady.clone(), steady.iter().map(|x| 2.0 * x).collect()]);
        assert!((calm / (1.4826 * 1.02f64.ln() * 0.75f64.sqrt()) - 1.0).abs() < 1e-9);
        steady[20] = 3.0;
        assert!((noise(&[steady]) / calm - 1.0).abs() < 1e-9);
    }
}
