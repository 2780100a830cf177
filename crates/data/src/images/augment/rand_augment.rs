//! RandAugment: applies a few operations drawn from a table, with random magnitudes around a given one.
//!
//! Operations and magnitudes are those of timm's `rand-mM-nN-mstdS-pP-inc1`, with which vision transformers are usually
//! trained. Magnitudes go from 0 to 10; all operations but three, which have a single strength, grow with them.

use super::canvas::Canvas;
use super::{colours, geometry, normal};
use crate::images::CHANNELS;
use crate::random::{Uniform, key};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandAugment {
    /// Number of operations drawn per image, with replacement.
    pub operations: usize,
    /// Probability that a drawn operation is applied.
    pub probability: f64,
    /// Mean and standard deviation of the magnitude, which is clipped to 0 to 10.
    pub magnitude: f64,
    pub noise: f64,
    /// Colour of pixels that operations move in from outside the image.
    pub fill: [u8; CHANNELS],
}

/// The largest magnitude.
const MOST: f64 = 10.0;

/// A row of the table of operations.
pub(super) struct Operation {
    /// The argument of the operation for a level from 0 to 1 and a sign of -1 or 1.
    pub argument: fn(f64, f64) -> f64,
    pub apply: fn(&mut Canvas<'_>, f64),
}

/// In the order of timm's list.
pub(super) const TABLE: [Operation; 15] = [
    Operation { argument: |_, _| 0.0, apply: colours::auto_contrast },
    Operation { argument: |_, _| 0.0, apply: colours::equalize },
    Operation { argument: |_, _| 0.0, apply: colours::invert },
    Operation { argument: |level, sign| sign * level * 30.0, apply: geometry::rotate },
    Operation { argument: |level, _| 4.0 - (level * 4.0).trunc(), apply: colours::posterize },
    Operation { argument: |level, _| 256.0 - (level * 256.0).trunc(), apply: colours::solarize },
    Operation { argument: |level, _| (level * 110.0).trunc(), apply: colours::solarize_add },
    Operation { argument: enhancement, apply: colours::colour },
    Operation { argument: enhancement, apply: colours::contrast },
    Operation { argument: enhancement, apply: colours::brightness },
    Operation { argument: enhancement, apply: colours::sharpness },
    Operation { argument: |level, sign| sign * level * 0.3, apply: geometry::shear_x },
    Operation { argument: |level, sign| sign * level * 0.3, apply: geometry::shear_y },
    Operation { argument: |level, sign| sign * level * 0.45, apply: geometry::translate_x },
    Operation { argument: |level, sign| sign * level * 0.45, apply: geometry::translate_y },
];

/// A factor around 1, which leaves the image unchanged.
fn enhancement(level: f64, sign: f64) -> f64 {
    (1.0 + sign * level * 0.9).max(0.1)
}

impl RandAugment {
    pub(super) fn apply(&self, canvas: &mut Canvas<'_>, drawn: u64) {
        for place in 0..self.operations {
            let mut uniform = Uniform::new(key(drawn, place as u64));
            let operation = &TABLE[(uniform.draw() * TABLE.len() as f64) as usize];
            if uniform.draw() >= self.probability {
                continue;
            }
            let sign = if uniform.draw() < 0.5 { -1.0 } else { 1.0 };
            let magnitude = self.magnitude + self.noise * normal(&mut uniform);
            let level = magnitude.clamp(0.0, MOST) / MOST;
            (operation.apply)(canvas, (operation.argument)(level, sign));
        }
    }
}
