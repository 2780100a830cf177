//! Scales of axes: positions of values, and ticks.

/// A linear or logarithmic axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    low: f64,
    high: f64,
    log: bool,
}

impl Scale {
    /// An axis over the finite values among these, with a free `margin`, as a share of the span, at both ends. On a logarithmic
    /// axis only positive values count. `None` where there are none.
    pub fn over(values: impl IntoIterator<Item = f64>, log: bool, margin: f64) -> Option<Scale> {
        let counted = values.into_iter().filter(|v| v.is_finite() && (!log || *v > 0.0));
        let (low, high) = counted.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)));
        if low > high {
            return None;
        }
        let (mut from, mut to) = if log { (low.log10(), high.log10()) } else { (low, high) };
        if to - from < 1e-12 * from.abs().max(to.abs()).max(1e-300) {
            // A single value is centred.
            let half = if log || from == 0.0 { 0.5 } else { 0.1 * from.abs() };
            (from, to) = (from - half, to + half);
        } else {
            let free = margin * (to - from);
            (from, to) = (from - free, to + free);
        }
        Some(Scale { low: from, high: to, log })
    }

    /// The position of a value: 0 at the low end, 1 at the high end; `None` where it is not finite, or not positive on a
    /// logarithmic axis.
    pub fn place(&self, value: f64) -> Option<f64> {
        let at = if self.log { value.log10() } else { value };
        at.is_finite().then(|| (at - self.low) / (self.high - self.low))
    }

    /// About `count` round values and their labels, all in one unit on a linear axis.
    pub fn ticks(&self, count: usize) -> Vec<(f64, String)> {
        if !self.log {
            return even(self.low, self.high, count);
        }
        if self.high - self.low < 1.0 {
            return even(10f64.powf(self.low), 10f64.powf(self.high), count);
        }
        let decades = (self.high - self.low).ceil() as i32;
        // Where there are many decades, only some have a tick; where there are few, their multiples by 2 and 5 have one too.
        let every = (decades as usize).div_ceil(count.max(1)).max(1) as i32;
        let between: &[f64] = if decades as usize * 3 <= count { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let (mut ticks, is_large) = (vec![], self.high >= 4.0 - 1e-9);
        for decade in self.low.floor() as i32..=self.high.ceil() as i32 {
            for factor in between.iter().filter(|_| decade.rem_euclid(every) == 0) {
                let value = factor * 10f64.powi(decade);
                if (self.low - 1e-9..=self.high + 1e-9).contains(&value.log10()) {
                    ticks.push((value, label(value, value, if is_large { value } else { 0.0 })));
                }
            }
        }
        ticks
    }
}

/// Ticks at multiples of 1, 2 or 5 times a power of ten.
fn even(low: f64, high: f64, count: usize) -> Vec<(f64, String)> {
    let rough = (high - low) / count.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((low / step).ceil() as i64, (high / step).floor() as i64);
    let most = (first.abs().max(last.abs()) as f64 * step).max(step);
    let unit_of = if most >= 1e4 { most } else { 0.0 };
    (first..=last).map(|n| (n as f64 * step, label(n as f64 * step, step, unit_of))).collect()
}

/// A value with enough digits to tell it from its neighbours a `step` away, in the unit for values of the size `unit_of`.
fn label(value: f64, step: f64, unit_of: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let size = value.abs().max(step);
    let (unit, suffix) = match unit_of {
        s if s >= 1e12 => (1e12, "T"),
        s if s >= 1e9 => (1e9, "B"),
        s if s >= 1e6 => (1e6, "M"),
        s if s >= 1e3 => (1e3, "K"),
        _ => (1.0, ""),
    };
    let places = (-(step / unit).log10() - 1e-9).ceil().max(0.0);
    if places > 5.0 {
        let digits = (size.log10().floor() - step.log10().floor()).clamp(0.0, 6.0) as usize;
        return format!("{value:.digits$e}");
    }
    let text = format!("{:.*}", places as usize, value / unit);
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(low: f64, high: f64, log: bool, count: usize) -> Vec<String> {
        let scale = Scale::over([low, high], log, 0.0).unwrap();
        scale.ticks(count).into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round_and_distinct() {
        assert_eq!(labels(0.0, 800.0, false, 5), ["0", "200", "400", "600", "800"]);
        assert_eq!(labels(1.38, 6.6, false, 5), ["2", "4", "6"]);
        assert_eq!(labels(1.41, 1.44, false, 5), ["1.41", "1.42", "1.43", "1.44"]);
        assert_eq!(labels(0.0, 0.005, false, 5), ["0", "0.001", "0.002", "0.003", "0.004", "0.005"]);
        assert_eq!(labels(0.0, 3e-6, false, 3), ["0", "1e-6", "2e-6", "3e-6"]);
        assert_eq!(labels(0.0, 2.5e9, false, 5), ["0", "0.5B", "1B", "1.5B", "2B", "2.5B"]);
        assert_eq!(labels(0.0, 40_000.0, false, 4), ["0", "10K", "20K", "30K", "40K"]);
        assert_eq!(labels(0.0, 10_000.0, false, 4), ["0", "5K", "10K"], "one unit along the axis");
        assert_eq!(labels(0.0, 8_000.0, false, 4), ["0", "2000", "4000", "6000", "8000"]);
        assert_eq!(labels(-2.0, 2.0, false, 4), ["-2", "-1", "0", "1", "2"]);
    }

    #[test]
    fn logarithmic_ticks_are_powers_of_ten() {
        assert_eq!(labels(1.0, 1000.0, true, 5), ["1", "10", "100", "1000"]);
        assert_eq!(labels(10.0, 1e5, true, 5), ["10", "100", "1K", "10K", "100K"]);
        assert_eq!(labels(1.0, 100.0, true, 8), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(labels(1e-8, 1.0, true, 4), ["1e-8", "1e-6", "0.0001", "0.01", "1"]);
        assert_eq!(labels(2.0, 6.0, true, 4), ["2", "3", "4", "5", "6"], "within a decade they are even");
    }

    #[test]
    fn places_run_from_end_to_end() {
        let scale = Scale::over([f64::NAN, 10.0, 30.0, f64::INFINITY], false, 0.0).unwrap();
        assert_eq!([10.0, 20.0, 30.0].map(|v| scale.place(v)), [Some(0.0), Some(0.5), Some(1.0)]);
        assert_eq!(scale.place(f64::NAN), None);
        let scale = Scale::over([0.0, 1.0, 100.0], true, 0.0).unwrap();
        assert_eq!((scale.place(10.0), scale.place(0.0)), (Some(0.5), None));
        for value in [0.0, 7.0, -1e-9] {
            let scale = Scale::over([value], false, 0.1).unwrap();
            assert!((scale.place(value).unwrap() - 0.5).abs() < 1e-9, "a single value is centred");
            assert!(!scale.ticks(5).is_empty());
        }
        assert_eq!(Scale::over([f64::NAN], false, 0.0), None);
        assert_eq!(Scale::over([-1.0, 0.0], true, 0.0), None);
    }
}
