//! Curves of any number of steps in bounded memory, by min/max decimation.
//!
//! Steps are stored in buckets, at first one per bucket. When all buckets are used, every two neighbours are merged, and from
//! then on a bucket takes twice as many steps. A bucket keeps the minimum, the maximum and the mean of every number, so that no
//! spike is lost; there are more buckets than a chart has pixels.

use serde_json::{Map, Value, json};

/// The position of a point on each axis that curves can be drawn over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct At {
    pub step: u64,
    pub tokens: f64,
    /// Training time.
    pub seconds: f64,
}

#[derive(Clone, Copy, Debug)]
struct Band {
    least: f32,
    most: f32,
    mean: f32,
}

#[derive(Clone, Debug)]
struct Bucket {
    /// The position of its last step.
    at: At,
    points: u32,
    /// The revision at which it last changed.
    revision: u64,
    bands: Box<[Band]>,
}

#[derive(Clone, Debug)]
pub struct Curves {
    names: Vec<&'static str>,
    most_buckets: usize,
    /// Points per bucket.
    stride: u32,
    buckets: Vec<Bucket>,
    revision: u64,
    /// Whether each number has occurred at all.
    present: Vec<bool>,
}

impl Curves {
    /// Curves of these names in at most `most_buckets`, an even number.
    pub fn new(names: Vec<&'static str>, most_buckets: usize) -> Curves {
        let present = vec![false; names.len()];
        Curves { names, most_buckets, stride: 1, buckets: vec![], revision: 0, present }
    }

    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// The most bytes that the curves take.
    pub fn most_bytes(&self) -> usize {
        self.most_buckets * (size_of::<Bucket>() + self.names.len() * size_of::<Band>())
    }

    /// The last point.
    pub fn last(&self) -> Option<At> {
        self.buckets.last().map(|bucket| bucket.at)
    }

    /// The last point at or before a step.
    pub fn at(&self, step: u64) -> Option<At> {
        let after = self.buckets.partition_point(|bucket| bucket.at.step <= step);
        self.buckets[..after].last().map(|bucket| bucket.at)
    }

    /// The mean of a number in the newest bucket that has it.
    pub fn newest(&self, name: &str) -> Option<f64> {
        let channel = self.names.iter().position(|known| *known == name)?;
        let newest = self.buckets.iter().rev().map(|bucket| bucket.bands[channel].mean);
        newest.take(64).find(|mean| mean.is_finite()).map(f64::from)
    }

    /// Removes all points.
    pub fn clear(&mut self) {
        self.buckets.clear();
        self.stride = 1;
        self.revision += 1;
    }

    pub fn push(&mut self, at: At, values: impl Iterator<Item = Option<f64>>) {
        self.revision += 1;
        let is_full = self.buckets.last().is_none_or(|last| last.points >= self.stride);
        if is_full && self.buckets.len() >= self.most_buckets {
            self.halve();
        }
        let last = self.buckets.last().filter(|last| last.points < self.stride);
        if last.is_none() {
            let none = Band { least: f32::NAN, most: f32::NAN, mean: f32::NAN };
            let bands = vec![none; self.names.len()].into();
            self.buckets.push(Bucket { at, points: 0, revision: 0, bands });
        }
        let bucket = self.buckets.last_mut().expect("one was pushed");
        (bucket.at, bucket.revision) = (at, self.revision);
        bucket.points += 1;
        for (channel, value) in values.enumerate().take(self.names.len()) {
            let Some(value) = value.map(|value| value as f32).filter(|value| value.is_finite()) else {
                continue;
            };
            self.present[channel] = true;
            let one = Band { least: value, most: value, mean: value };
            bucket.bands[channel] = merged((bucket.bands[channel], bucket.points - 1), (one, 1));
        }
    }

    /// Removes everything after a step. A bucket with steps before and after it is removed as well: at most one in `most_buckets`
    /// is missing from a curve, and no undone step remains.
    pub fn keep(&mut self, step: u64) {
        let before = self.buckets.len();
        while self.buckets.last().is_some_and(|last| last.at.step > step) {
            self.buckets.pop();
        }
        if self.buckets.len() < before {
            self.revision += 1;
            // A page that has the removed points is sent the curve from here on.
            if let Some(last) = self.buckets.last_mut() {
                last.revision = self.revision;
                // Following steps begin a new bucket.
                last.points = last.points.max(self.stride);
            }
        }
    }

    fn halve(&mut self) {
        self.stride = self.stride.saturating_mul(2);
        self.revision += 1;
        let mut halved: Vec<Bucket> = Vec::with_capacity(self.most_buckets);
        for pair in self.buckets.chunks(2) {
            let mut one = pair[0].clone();
            if let Some(other) = pair.get(1) {
                let bands = one.bands.iter().zip(&other.bands);
                one.bands = bands.map(|(a, b)| merged((*a, one.points), (*b, other.points))).collect();
                (one.at, one.points) = (other.at, one.points + other.points);
            }
            one.revision = self.revision;
            halved.push(one);
        }
        self.buckets = halved;
    }

    /// Everything that changed after a revision, as columns: a reader truncates its columns to `from` and appends these.
    pub fn since(&self, revision: u64) -> Value {
        let from = self.buckets.iter().position(|b| b.revision > revision).unwrap_or(self.buckets.len());
        let news = &self.buckets[from..];
        let column = |of: &dyn Fn(&Bucket) -> Value| news.iter().map(of).collect::<Value>();
        let mut curves = Map::new();
        for (channel, name) in self.names.iter().enumerate().filter(|(channel, _)| self.present[*channel]) {
            let part = |of: fn(&Band) -> f32| column(&|bucket| number(of(&bucket.bands[channel])));
            let mut curve = json!({ "mean": part(|band| band.mean) });
            if self.stride > 1 {
                curve["least"] = part(|band| band.least);
                curve["most"] = part(|band| band.most);
            }
            curves.insert((*name).into(), curve);
        }
        json!({
            "from": from,
            "stride": self.stride,
            "step": column(&|bucket| json!(bucket.at.step)),
            "tokens": column(&|bucket| json!(bucket.at.tokens)),
            "seconds": column(&|bucket| json!(bucket.at.seconds)),
            "curves": curves,
        })
    }
}

/// A number in its shortest form; `null` where it is not finite.
fn number(value: f32) -> Value {
    // The shortest decimal of the 32-bit float, not that of its conversion to 64 bits.
    value
        .to_string()
        .parse::<f64>()
        .ok()
        .filter(|value| value.is_finite())
        .map_or(Value::Null, |value| json!(value))
}

/// Merges two bands, each with its number of points.
fn merged((a, m): (Band, u32), (b, n): (Band, u32)) -> Band {
    if a.mean.is_nan() || m == 0 {
        return b;
    }
    if b.mean.is_nan() || n == 0 {
        return a;
    }
    let share = f64::from(n) / (f64::from(m) + f64::from(n));
    let mean = f64::from(a.mean) + (f64::from(b.mean) - f64::from(a.mean)) * share;
    Band { least: a.least.min(b.least), most: a.most.max(b.most), mean: mean as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64) -> At {
        At { step, tokens: 10.0 * step as f64, seconds: step as f64 / 4.0 }
    }

    fn filled(steps: u64, most: usize) -> Curves {
        let mut curves = Curves::new(vec!["loss", "never"], most);
        for step in 1..=steps {
            let loss = if step == 777 { 100.0 } else { 1.0 };
            curves.push(at(step), [Some(loss), None].into_iter());
        }
        curves
    }

    #[test]
    fn memory_is_bounded_and_spikes_stay() {
        let curves = filled(100_000, 64);
        assert!(curves.len() <= 64, "{}", curves.len());
        assert_eq!(curves.last(), Some(at(100_000)));
        let columns = curves.since(0);
        assert_eq!(columns["from"], 0);
        let most = columns["curves"]["loss"]["most"].as_array().unwrap();
        assert_eq!(most.iter().filter(|value| **value == 100.0).count(), 1);
        assert!(columns["curves"].get("never").is_none(), "a number that never occurred has no curve");
        let means: f64 =
            columns["curves"]["loss"]["mean"].as_array().unwrap().iter().filter_map(Value::as_f64).sum();
        assert!(means > curves.len() as f64, "the spike is in a mean as well");
    }

    #[test]
    fn a_reader_that_appends_updates_has_the_whole() {
        let (mut curves, mut have, mut seen) = (Curves::new(vec!["loss"], 16), Vec::<u64>::new(), 0);
        let mut check = |curves: &Curves| {
            let news = curves.since(seen);
            seen = curves.revision();
            have.truncate(news["from"].as_u64().unwrap() as usize);
            have.extend(news["step"].as_array().unwrap().iter().filter_map(Value::as_u64));
            let whole = curves.since(0);
            assert_eq!(json!(have), whole["step"]);
        };
        for step in 1..=100 {
            curves.push(at(step), [Some(0.1)].into_iter());
            if step % 3 == 0 {
                check(&curves);
            }
            if step == 50 {
                curves.keep(41);
                check(&curves);
                curves.keep(0);
                assert!(curves.is_empty());
                check(&curves);
            }
        }
        check(&curves);
        assert_eq!(curves.since(curves.revision())["step"], json!([]), "nothing is new");
        assert_eq!(curves.since(0)["curves"]["loss"]["mean"][0], json!(0.1), "as it was written");
    }

    #[test]
    fn no_undone_step_remains() {
        let mut curves = Curves::new(vec!["loss"], 8);
        for step in 1..=40 {
            curves.push(at(step), [Some(if step > 29 { 9.0 } else { 1.0 })].into_iter());
        }
        curves.keep(29);
        let columns = curves.since(0);
        let most = columns["curves"]["loss"]["most"].as_array().unwrap();
        assert!(most.iter().all(|value| *value == 1.0), "{columns}");
        assert!(curves.last().unwrap().step <= 29);
        curves.push(at(30), [Some(2.0)].into_iter());
        assert_eq!(curves.last(), Some(at(30)));
        assert_eq!(curves.at(29).map(|at| at.step <= 29), Some(true));
    }
}
