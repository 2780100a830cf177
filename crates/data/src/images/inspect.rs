//! Inspects images: formats, sizes, classes, unusable ones, and the decoding speed of one core.

use std::collections::BTreeMap;
use std::time::Instant;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;
use serde::Serialize;

use super::decode::{self, ImageFormat};
use super::loader::{Buffers, make};
use super::set::ImageSet;
use super::sets::{ImageDescription, ImageSets};
use super::stored::{ImageError, Stored};
use super::view::View;
use crate::error::DataError;
use crate::formats::{OnError, Skipped};
use crate::order::permutation::Permutation;
use crate::random::key;
use crate::text::inspect::LengthSummary;

/// Number of images whose headers are read. More would not change the result noticeably.
const LOOKED_AT: u64 = 1000;

#[derive(Debug, Clone, Serialize)]
pub struct ImageInspection {
    pub sets: ImageDescription,
    /// Number of images of both sides that were examined, the same ones in every call.
    pub looked_at: u64,
    /// `JPEG`, `PNG`, `WebP` or `pixels`, with the number of examined images.
    pub kinds: Vec<(&'static str, u64)>,
    pub widths: LengthSummary,
    pub heights: LengthSummary,
    pub samples: Vec<ImageSample>,
    /// Examined images whose header makes them unusable: the reason, their number, and the place of the first.
    pub unusable: Vec<(String, u64, String)>,
}

/// A sample image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageSample {
    pub place: String,
    pub kind: &'static str,
    pub width: usize,
    pub height: usize,
    pub class: Option<String>,
}

/// Inspects opened sets. Broken images are counted, not refused.
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
            Err(ImageError::Invalid(flaw)) => Ok(Err((flaw, set.place(index)))),
            Err(ImageError::Failed(error)) => Err(error),
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

fn header(
    set: &ImageSet,
    index: u64,
    buffer: &mut Vec<u8>,
) -> Result<(&'static str, usize, usize), ImageError> {
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

/// Speed of one core.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ImageSpeed {
    /// Images per second, read and decoded.
    pub decoded: f64,
    /// Images per second, with cropping, scaling and mirroring as well.
    pub fed: f64,
}

/// Measures one core for `seconds` of CPU time for each figure. Images are read beforehand, as many as fit into memory and that
/// time, so that the disk is not measured. Skips unusable images.
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
    let mut buffers = Buffers::default();
    let fed = rate(count, seconds, |index| {
        make(&set, view, index, key(1, index), &mut buffers).is_ok_and(|made| made.label >= 0)
    });
    Ok(ImageSpeed { decoded, fed })
}

/// Calls per second of this thread's CPU time, counting those that returned true. The first round warms up.
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

/// CPU time of this thread where the system provides it, otherwise wall-clock time.
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
