//! Inspects images: formats, sizes, classes, unusable ones, and how fast one core decodes them.

use std::collections::BTreeMap;
use std::time::Instant;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;
use serde::Serialize;

use super::decode::{self, ImageFormat};
use super::loader::{Bench, make};
use super::set::ImageSet;
use super::sets::{ImageDescription, ImageSets};
use super::stored::{Stored, Trouble};
use super::view::View;
use crate::error::DataError;
use crate::formats::{OnError, Skipped};
use crate::order::permutation::Permutation;
use crate::random::key;
use crate::text::inspect::LengthSummary;

/// Images whose headers are read. More would say the same.
const LOOKED_AT: u64 = 1000;

#[derive(Debug, Clone, Serialize)]
pub struct ImageInspection {
    pub sets: ImageDescription,
    /// Images of both sides that were looked at, the same every time.
    pub looked_at: u64,
    /// `JPEG`, `PNG`, `WebP` or `pixels`, and how many of those that were looked at.
    pub kinds: Vec<(&'static str, u64)>,
    pub widths: LengthSummary,
    pub heights: LengthSummary,
    pub samples: Vec<ImageSample>,
    /// Of those that were looked at, what cannot be used by its header alone: why, how many, and where first.
    pub unusable: Vec<(String, u64, String)>,
}

/// One image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageSample {
    pub place: String,
    pub kind: &'static str,
    pub width: usize,
    pub height: usize,
    pub class: Option<String>,
}

/// Looks into sets that were opened. Broken images are counted, not refused.
pub fn inspect(sets: &ImageSets, samples: usize) -> Result<ImageInspection, DataError> {
    let (train, all) = (sets.train.count(), sets.train.count() + sets.held_out.count());
    let chosen: Vec<u64> = match all {
        0 => Vec::new(),
        _ => (0..all.min(LOOKED_AT)).map(|at| Permutation::new(all, 5).at(at)).collect(),
    };
    let side =
        |index: u64| if index < train { (&sets.train, index) } else { (&sets.held_out, index - train) };
    let wait = waits::begin("reading headers", Unit::Things("images"), Some(chosen.len() as u64));
    let looked = chosen.par_iter().inspect(|_| wait.add(1)).map_init(Vec::new, |buffer, index| {
        let (set, index) = side(*index);
        match header(set, index, buffer) {
            Ok((kind, width, height)) => {
                let class = set.class(index).map(|class| sets.classes[class as usize].clone());
                Ok(Ok(ImageSample { place: set.place(index).to_string(), kind, width, height, class }))
            }
            Err(Trouble::Wrong(flaw)) => Ok(Err((flaw, set.place(index)))),
            Err(Trouble::Failed(error)) => Err(error),
        }
    });
    let looked: Vec<_> = looked.collect::<Result<_, DataError>>()?;
    let (mut good, mut skipped) = (Vec::new(), Skipped::default());
    for one in looked {
        match one {
            Ok(sample) => good.push(sample),
            Err((flaw, place)) => skipped.note(flaw.reason, place),
        }
    }
    let mut kinds: BTreeMap<&'static str, u64> = BTreeMap::new();
    good.iter().for_each(|sample| *kinds.entry(sample.kind).or_default() += 1);
    let of = |side: fn(&ImageSample) -> usize| {
        LengthSummary::of("pixels", good.iter().map(|one| side(one) as u64).collect())
    };
    Ok(ImageInspection {
        sets: sets.description.clone(),
        looked_at: chosen.len() as u64,
        kinds: kinds.into_iter().collect(),
        widths: of(|sample| sample.width),
        heights: of(|sample| sample.height),
        unusable: skipped
            .reasons()
            .map(|(reason, count, place)| (reason.to_string(), count, place.to_string()))
            .collect(),
        samples: good.into_iter().take(samples).collect(),
    })
}

fn header(set: &ImageSet, index: u64, buffer: &mut Vec<u8>) -> Result<(&'static str, usize, usize), Trouble> {
    match set.images.stored(set.at(index), buffer)? {
        Stored::Pixels(picture) => Ok(("pixels", picture.width, picture.height)),
        Stored::Encoded(bytes) => {
            let header = decode::header(bytes, set.max_pixels)?;
            let kind = match header.kind {
                ImageFormat::Jpeg => "JPEG",
                ImageFormat::Png => "PNG",
                ImageFormat::WebP => "WebP",
            };
            Ok((kind, header.width, header.height))
        }
    }
}

/// How fast one core is.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ImageSpeed {
    /// Images a second of one core, read and decoded.
    pub decoded: f64,
    /// The same as a view sees them: cut out, scaled and mirrored as well.
    pub fed: f64,
}

/// Times one core for `seconds` of its time on each. The images are read beforehand, as many as fit into memory and that
/// time, so that a disk is not what is measured. Images that cannot be used are left out.
pub fn time(set: &ImageSet, view: &View, seconds: f64) -> Result<ImageSpeed, DataError> {
    let set = ImageSet { on_error: OnError::Skip, ..set.clone() };
    let count = set.count().min(LOOKED_AT);
    if count == 0 {
        return Err(DataError::input("There is no image to time: check data.path."));
    }
    let mut pixels = Vec::new();
    let mut bytes = Vec::new();
    let mut decode_one = |index: u64| match set.images.stored(set.at(index), &mut bytes) {
        Ok(Stored::Encoded(bytes)) => decode::decode(bytes, set.max_pixels, &mut pixels).is_ok(),
        Ok(Stored::Pixels(_)) => true,
        Err(_) => false,
    };
    let decoded = rate(count, seconds, &mut decode_one);
    let mut bench = Bench::default();
    let fed = rate(count, seconds, |index| {
        make(&set, view, index, key(1, index), &mut bench).is_ok_and(|made| made.label >= 0)
    });
    Ok(ImageSpeed { decoded, fed })
}

/// Calls a second of this thread's time, of those that gave true. The first round warms up.
fn rate(count: u64, seconds: f64, mut one: impl FnMut(u64) -> bool) -> f64 {
    let mut good = 0u64;
    (0..count.min(16)).for_each(|index| {
        one(index);
    });
    let begun = Clock::now();
    let mut index = 0;
    let spent = loop {
        good += u64::from(one(index % count));
        index += 1;
        let spent = begun.elapsed();
        if spent >= seconds {
            break spent;
        }
    };
    good as f64 / spent
}

/// Time that this thread ran, where the system tells it; otherwise time on the wall.
struct Clock {
    on_cpu: Option<f64>,
    wall: Instant,
}

impl Clock {
    fn now() -> Self {
        Self { on_cpu: on_cpu(), wall: Instant::now() }
    }

    fn elapsed(&self) -> f64 {
        match (self.on_cpu, on_cpu()) {
            (Some(before), Some(now)) => now - before,
            _ => self.wall.elapsed().as_secs_f64(),
        }
    }
}

fn on_cpu() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(1e-9 * text.split_whitespace().next()?.parse::<f64>().ok()?)
}
