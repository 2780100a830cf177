//! Estimates from repeated timings: a ratio, its interval, and whether it differs from 1.
//!
//! Machines drift, so a variant is only compared with the base at the same time: in a round, each of its updates is divided by
//! the base's updates around it, or, where the two are not interleaved, its time by the median of the base's two visits before
//! and two after it. The estimate is the median of the rounds' ratios, with an interval of three standard errors of that median
//! to either side. The standard deviation is the larger of two: that of the rounds, and that of the base compared with itself,
//! which many visits estimate better than a handful of rounds. All of them are robust statistics from medians, because another
//! process that wakes up during one visit says nothing about a switch. Two standard errors would declare one in twenty rows
//! different by chance.

/// A ratio with its interval.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Estimate {
    /// The median over rounds.
    pub ratio: f64,
    pub low: f64,
    pub high: f64,
    /// 0 for the base compared with itself, whose ratio is 1 by definition.
    pub rounds: usize,
}

impl Estimate {
    /// Whether the interval contains 1, so that no difference was shown.
    pub fn is_noise(&self) -> bool {
        self.low <= 1.0 && 1.0 <= self.high
    }
}

/// Half the width of an interval, in standard errors of the median.
const DEVIATIONS: f64 = 3.0;
/// Factor from the median absolute deviation to the standard deviation of a normal distribution.
const NORMAL: f64 = 1.4826;

/// Noise of the logarithm of a ratio where nothing differs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// Standard deviation.
    pub deviation: f64,
    /// The largest deviation seen, disturbed visits included.
    pub worst: f64,
}

impl Noise {
    /// The noise of a quotient of two ratios.
    pub fn of_two(self) -> Noise {
        Noise { deviation: 2f64.sqrt() * self.deviation, worst: 2f64.sqrt() * self.worst }
    }
}

/// Estimates a ratio from one value per round. One or two rounds cannot tell a disturbed visit from a real difference, so their
/// interval is at least as wide as the base's worst deviation.
pub fn estimate(ratios: &[f64], noise: Noise) -> Estimate {
    let n = ratios.len();
    assert!(n > 0, "an estimate has a round");
    let ratio = median(ratios);
    let off: Vec<f64> = ratios.iter().map(|one| (one / ratio).ln().abs()).collect();
    let deviation = noise.deviation.max(NORMAL * median(&off));
    let factor = match n {
        1 | 2 => (DEVIATIONS * deviation).max(noise.worst).exp(),
        // The standard error of the median of many normal values is 1.2533 times that of their mean.
        _ => (DEVIATIONS * deviation * 1.2533 / (n as f64).sqrt()).exp(),
    };
    Estimate { ratio, low: ratio / factor, high: ratio * factor, rounds: n }
}

/// Rounds needed to resolve a difference at this standard deviation.
pub fn rounds_to_resolve(difference: f64, deviation: f64) -> usize {
    let rounds = DEVIATIONS * deviation * 1.2533 / (1.0 + difference).ln();
    (rounds * rounds).ceil().max(3.0) as usize
}

/// The ratio of updates to the base's updates interleaved with them, of which there is one more: the median over updates of each
/// one's ratio to the geometric mean of its two neighbours.
pub fn paired_ratio(step_ms: &[f64], around_ms: &[f64]) -> f64 {
    let around = around_ms.windows(2).map(|two| (two[0] * two[1]).sqrt());
    let ratios: Vec<f64> = step_ms.iter().zip(around).map(|(ms, around)| ms / around).collect();
    median(&ratios)
}

/// The noise of [`paired_ratio`] if the variant were the base: the base's updates are compared with their two neighbours, visit
/// by visit. These lie twice as far apart and are one fewer, so the noise is overestimated rather than underestimated.
pub fn paired_noise<'a>(visits: impl Iterator<Item = &'a [f64]>) -> Noise {
    let of = |around_ms: &[f64]| {
        let bends = around_ms.windows(3).map(|three| three[1] / (three[0] * three[2]).sqrt());
        median(&bends.collect::<Vec<_>>()).ln().abs()
    };
    let off: Vec<f64> = visits.map(of).filter(|off| off.is_finite()).collect();
    let worst = off.iter().copied().fold(0.0, f64::max);
    match off.len() {
        0 => Noise { deviation: f64::INFINITY, worst: f64::INFINITY },
        1 | 2 => Noise { deviation: worst, worst },
        _ => Noise { deviation: NORMAL * median(&off), worst },
    }
}

/// Standard deviation between rounds, pooled over rows because one row has few rounds; it includes what differs from one opening
/// of a configuration to the next. `rows` has the ratios of each row in the order of its rounds.
pub fn scatter(rows: &[Vec<f64>]) -> f64 {
    // The difference of two values has a standard deviation sqrt(2) times that of one.
    let apart = rows
        .iter()
        .flat_map(|ratios| ratios.windows(2))
        .map(|two| (two[1] / two[0]).ln().abs() / 2f64.sqrt());
    let apart: Vec<f64> = apart.collect();
    if apart.len() < 3 { 0.0 } else { NORMAL * median(&apart) }
}

/// The noise of a variant's ratio if the variant were the base: each visit of the base is compared with the two around it, which
/// cancels a steady drift. Each list has consecutive visits in the order they were made.
pub fn noise(bases: &[Vec<f64>]) -> Noise {
    let logs: Vec<Vec<f64>> = bases.iter().map(|visits| visits.iter().map(|ms| ms.ln()).collect()).collect();
    let bends = logs.iter().flat_map(|visits| visits.windows(3));
    let bends: Vec<f64> = bends.map(|three| (three[1] - 0.5 * (three[0] + three[2])).abs()).collect();
    if bends.len() >= 3 {
        let worst = bends.iter().copied().fold(0.0, f64::max);
        return Noise { deviation: NORMAL * median(&bends), worst };
    }
    // With so few visits, take the largest difference between neighbours.
    let steps = logs.iter().flat_map(|visits| visits.windows(2)).map(|two| (two[1] - two[0]).abs());
    let apart = steps.reduce(f64::max).unwrap_or(f64::INFINITY);
    Noise { deviation: apart, worst: apart }
}

/// Visits of the base on either side from which its time at a moment is estimated.
const NEAREST: usize = 2;

/// The base's time at a moment: the median of its visits just before and just after it, both given nearest first.
pub fn nearest(before: impl Iterator<Item = f64>, after: impl Iterator<Item = f64>) -> Option<f64> {
    let near: Vec<f64> = before.take(NEAREST).chain(after.take(NEAREST)).collect();
    (!near.is_empty()).then(|| median(&near))
}

/// The median; NaN of no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n % 2 {
        _ if n == 0 => f64::NAN,
        1 => sorted[n / 2],
        _ => 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn even(deviation: f64) -> Noise {
        Noise { deviation, worst: deviation }
    }

    #[test]
    fn the_interval_is_no_narrower_than_the_noise_of_the_base() {
        let quiet = estimate(&[1.1, 1.1, 1.1], even(0.0));
        assert_eq!((quiet.ratio, quiet.low, quiet.high, quiet.is_noise()), (1.1, 1.1, 1.1, false));
        let loud = estimate(&[1.1, 1.1, 1.1], even(0.1));
        assert!(loud.is_noise() && loud.low < 1.0 && loud.high > 1.2, "{loud:?}");
        let scattered = estimate(&[1.0, 1.1, 1.2], even(0.0));
        assert!(
            scattered.is_noise() && (scattered.low * scattered.high - 1.21).abs() < 1e-9,
            "{scattered:?}"
        );
        let disturbed = estimate(&[1.1, 1.1, 1.101, 1.099, 1.6], even(0.01));
        assert!(!disturbed.is_noise() && disturbed.high < 1.15, "one round in five: {disturbed:?}");
        assert!(estimate(&[2.0], noise(&[vec![1.0]])).is_noise(), "one visit of the base shows nothing");
    }

    #[test]
    fn rounds_to_resolve_are_enough_and_one_less_is_not() {
        let rounds = rounds_to_resolve(0.05, 0.03);
        let is_resolved = |n: usize| !estimate(&vec![1.05; n], even(0.03)).is_noise();
        assert_eq!((rounds, is_resolved(rounds), is_resolved(rounds - 1)), (6, true, false));
    }

    #[test]
    fn a_drift_cancels_in_interleaved_updates() {
        let around: Vec<f64> = (0..9).map(|i| 30.0 * 1.05f64.powi(2 * i)).collect();
        let own: Vec<f64> = (0..8).map(|i| 33.0 * 1.05f64.powi(2 * i + 1)).collect();
        assert!((paired_ratio(&own, &around) - 1.1).abs() < 1e-12, "a twentieth slower with every update");
        assert!(paired_noise([&around[..]; 3].into_iter()).deviation < 1e-12);
        let restless = [30.0, 33.0, 30.0, 33.0, 30.0, 33.0, 30.0, 33.0, 30.0];
        let noise = paired_noise([&restless[..]; 3].into_iter());
        assert!((noise.deviation / (NORMAL * 1.1f64.ln()) - 1.0).abs() < 1e-9, "{noise:?}");
        assert_eq!(paired_noise(std::iter::empty()).deviation, f64::INFINITY);
    }

    #[test]
    fn scatter_is_between_rounds_of_a_row_and_not_between_rows() {
        let rows = [vec![1.0, 1.02, 1.0], vec![6.0, 6.12, 6.0]];
        assert!((scatter(&rows) / (NORMAL * 1.02f64.ln() / 2f64.sqrt()) - 1.0).abs() < 1e-9);
        assert_eq!(scatter(&[vec![1.0], vec![2.0]]), 0.0);
    }

    #[test]
    fn noise_ignores_breaks_drift_and_a_disturbed_visit() {
        // A factor of two after a break, a steady drift and one disturbed visit do not count as noise.
        let mut visits: Vec<f64> =
            (0..40).map(|i| 1.01f64.powi(i) * if i % 2 == 0 { 1.0 } else { 1.02 }).collect();
        let calm = noise(&[visits.clone(), visits.iter().map(|x| 2.0 * x).collect()]);
        assert!((calm.deviation / (NORMAL * 1.02f64.ln()) - 1.0).abs() < 1e-9);
        visits[20] *= 3.0;
        let disturbed = noise(&[visits]);
        assert!((disturbed.deviation / calm.deviation - 1.0).abs() < 1e-9);
        assert!(disturbed.worst > 1.0 && calm.worst < 0.1);
        assert!(estimate(&[2.0], disturbed).is_noise() && !estimate(&[2.0; 3], disturbed).is_noise());
        assert_eq!(noise(&[vec![1.0], vec![2.0]]).deviation, f64::INFINITY);
        assert!((noise(&[vec![1.0, 1.1]]).worst - 1.1f64.ln()).abs() < 1e-12);
    }
}
