//! Conclusions that repeated timings allow: a ratio, the range it lies in, and whether it differs from 1.
//!
//! Machines drift, so a variant is never compared with a base of another time: each of its updates in a round is divided by the
//! base's around it, or, where the two are not open together, its time by the median of the base's two visits before and two
//! after it. The rounds' ratios give a median, and around it a range of three standard
//! deviations of that median to either side. The deviation is the larger of two: that of the rounds among themselves, and
//! that of the base against itself, which many visits tell better than a handful of rounds. All are made of medians, because
//! a neighbour that wakes up for one visit says nothing about a switch. With twenty rows in a table, two deviations would
//! call one of them different by chance.

/// A ratio with the range that was measured.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Estimate {
    /// The median of the rounds.
    pub ratio: f64,
    pub low: f64,
    pub high: f64,
    /// 0 for the base against itself, which is 1 by definition.
    pub rounds: usize,
}

impl Estimate {
    /// Whether the range holds 1: nothing was shown.
    pub fn is_noise(&self) -> bool {
        self.low <= 1.0 && 1.0 <= self.high
    }
}

/// Standard deviations of a median that count as nothing.
const DEVIATIONS: f64 = 3.0;
/// From the median of absolute deviations to the standard deviation of a normal distribution.
const NORMAL: f64 = 1.4826;

/// How much the logarithm of a ratio varies where nothing differs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    pub deviation: f64,
    /// The largest that was seen, disturbed visits included.
    pub worst: f64,
}

impl Noise {
    /// That of a quotient of two ratios.
    pub fn of_two(self) -> Noise {
        Noise { deviation: 2f64.sqrt() * self.deviation, worst: 2f64.sqrt() * self.worst }
    }
}

/// The estimate of ratios, one a round. One or two rounds cannot tell a disturbed visit from another time, so their range
/// is at least as wide as the worst that the base did.
pub fn estimate(ratios: &[f64], noise: Noise) -> Estimate {
    let n = ratios.len();
    assert!(n > 0, "an estimate has a round");
    let ratio = middle(ratios);
    let off: Vec<f64> = ratios.iter().map(|one| (one / ratio).ln().abs()).collect();
    let deviation = noise.deviation.max(NORMAL * middle(&off));
    let factor = match n {
        1 | 2 => (DEVIATIONS * deviation).max(noise.worst).exp(),
        // The median of many normal values varies by 1.25 times what their mean does.
        _ => (DEVIATIONS * deviation * 1.2533 / (n as f64).sqrt()).exp(),
    };
    Estimate { ratio, low: ratio / factor, high: ratio * factor, rounds: n }
}

/// Rounds after which a difference stands out from noise of this deviation.
pub fn rounds_to_tell(difference: f64, deviation: f64) -> usize {
    let rounds = DEVIATIONS * deviation * 1.2533 / (1.0 + difference).ln();
    (rounds * rounds).ceil().max(3.0) as usize
}

/// The ratio of updates to those of the base around them, of which there is one more: the median over the updates.
pub fn beside(step_ms: &[f64], around_ms: &[f64]) -> f64 {
    let around = around_ms.windows(2).map(|two| (two[0] * two[1]).sqrt());
    let ratios: Vec<f64> = step_ms.iter().zip(around).map(|(ms, around)| ms / around).collect();
    middle(&ratios)
}

/// The noise of such ratios, if the variant were the base: of each update of the base against the two of it around, by
/// visit. Those lie twice as far apart, and are fewer by one, so this is rather too much than too little.
pub fn noise_beside<'a>(visits: impl Iterator<Item = &'a [f64]>) -> Noise {
    let of = |around_ms: &[f64]| {
        let bends = around_ms.windows(3).map(|three| three[1] / (three[0] * three[2]).sqrt());
        middle(&bends.collect::<Vec<_>>()).ln().abs()
    };
    let off: Vec<f64> = visits.map(of).filter(|off| off.is_finite()).collect();
    let worst = off.iter().copied().fold(0.0, f64::max);
    match off.len() {
        0 => Noise { deviation: f64::INFINITY, worst: f64::INFINITY },
        1 | 2 => Noise { deviation: worst, worst },
        _ => Noise { deviation: NORMAL * middle(&off), worst },
    }
}

/// How much rounds vary among themselves: what differs from one opening to the next is in it, and the few rounds of one
/// row do not tell it. `rows` has the ratios of each row in the order of its rounds.
pub fn scatter(rows: &[Vec<f64>]) -> f64 {
    // Two that vary equally lie apart by more than one of them varies.
    let apart = rows
        .iter()
        .flat_map(|ratios| ratios.windows(2))
        .map(|two| (two[1] / two[0]).ln().abs() / 2f64.sqrt());
    let apart: Vec<f64> = apart.collect();
    if apart.len() < 3 { 0.0 } else { NORMAL * middle(&apart) }
}

/// The noise of a variant's ratio, if the variant were the base: of each visit of the base against the two around it,
/// which a steady drift does not touch. Visits are in the order they were made, each list without a break.
pub fn noise(bases: &[Vec<f64>]) -> Noise {
    let logs: Vec<Vec<f64>> = bases.iter().map(|visits| visits.iter().map(|ms| ms.ln()).collect()).collect();
    let bends = logs.iter().flat_map(|visits| visits.windows(3));
    let bends: Vec<f64> = bends.map(|three| (three[1] - 0.5 * (three[0] + three[2])).abs()).collect();
    if bends.len() >= 3 {
        let worst = bends.iter().copied().fold(0.0, f64::max);
        return Noise { deviation: NORMAL * middle(&bends), worst };
    }
    // So few say no more than how far they lie apart.
    let steps = logs.iter().flat_map(|visits| visits.windows(2)).map(|two| (two[1] - two[0]).abs());
    let apart = steps.reduce(f64::max).unwrap_or(f64::INFINITY);
    Noise { deviation: apart, worst: apart }
}

/// Visits of the base to either side that say what its time was at a moment.
const NEAREST: usize = 2;

/// The base's time at a moment, by its visits before it, the nearest first, and after it.
pub fn nearest(before: impl Iterator<Item = f64>, after: impl Iterator<Item = f64>) -> Option<f64> {
    let near: Vec<f64> = before.take(NEAREST).chain(after.take(NEAREST)).collect();
    (!near.is_empty()).then(|| middle(&near))
}

/// The median.
pub fn middle(values: &[f64]) -> f64 {
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
    fn the_range_is_no_closer_than_the_base_to_itself() {
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
    fn rounds_to_tell_are_those_after_which_it_is_told() {
        let rounds = rounds_to_tell(0.05, 0.03);
        let told = |n: usize| !estimate(&vec![1.05; n], even(0.03)).is_noise();
        assert_eq!((rounds, told(rounds), told(rounds - 1)), (6, true, false));
    }

    #[test]
    fn beside_each_other_a_drift_is_no_difference() {
        let around: Vec<f64> = (0..9).map(|i| 30.0 * 1.05f64.powi(2 * i)).collect();
        let own: Vec<f64> = (0..8).map(|i| 33.0 * 1.05f64.powi(2 * i + 1)).collect();
        assert!((beside(&own, &around) - 1.1).abs() < 1e-12, "a twentieth slower with every update");
        assert!(noise_beside([&around[..]; 3].into_iter()).deviation < 1e-12);
        let restless = [30.0, 33.0, 30.0, 33.0, 30.0, 33.0, 30.0, 33.0, 30.0];
        let noise = noise_beside([&restless[..]; 3].into_iter());
        assert!((noise.deviation / (NORMAL * 1.1f64.ln()) - 1.0).abs() < 1e-9, "{noise:?}");
        assert_eq!(noise_beside(std::iter::empty()).deviation, f64::INFINITY);
    }

    #[test]
    fn scatter_is_between_rounds_of_a_row_and_not_between_rows() {
        let rows = [vec![1.0, 1.02, 1.0], vec![6.0, 6.12, 6.0]];
        assert!((scatter(&rows) / (NORMAL * 1.02f64.ln() / 2f64.sqrt()) - 1.0).abs() < 1e-9);
        assert_eq!(scatter(&[vec![1.0], vec![2.0]]), 0.0);
    }

    #[test]
    fn noise_is_that_of_neighbours() {
        // Twice as slow after a break is no noise, a steady drift is none, and neither is one disturbed visit.
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
