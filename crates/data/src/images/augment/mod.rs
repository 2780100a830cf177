//! Random changes to training images after cropping, scaling and mirroring: RandAugment, then random erasing.
//!
//! Random numbers depend on the key of a sample alone and have streams separate from the one that draws the crop. Threads,
//! ranks and resumed runs therefore do not change results, and neither do these operations where they are disabled.

mod canvas;
mod colours;
mod erasing;
mod geometry;
mod rand_augment;
#[cfg(test)]
mod tests;

pub use erasing::{ErasedWith, Erasing};
pub use rand_augment::RandAugment;

use canvas::Canvas;

use super::filter::Filter;
use crate::random::{Uniform, key};

/// The changes that training makes to an image.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Changes {
    pub rand_augment: Option<RandAugment>,
    pub erasing: Option<Erasing>,
}

/// Numbers of the random streams of a sample. The stream of its crop has none.
const OPERATIONS: u64 = 1;
const ERASED: u64 = 2;

impl Changes {
    pub const NONE: Self = Self { rand_augment: None, erasing: None };

    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }

    /// Changes pixels in rows of `width`. `spare` is scratch memory.
    pub(super) fn apply(
        &self,
        sample: u64,
        filter: Filter,
        width: usize,
        pixels: &mut [u8],
        spare: &mut Vec<u8>,
    ) {
        if let Some(rand_augment) = &self.rand_augment {
            let mut canvas = Canvas { width, pixels, spare, filter, fill: rand_augment.fill };
            rand_augment.apply(&mut canvas, key(sample, OPERATIONS));
        }
        if let Some(erasing) = &self.erasing {
            erasing.apply(pixels, width, key(sample, ERASED));
        }
    }
}

/// A standard normal number.
fn normal(uniform: &mut Uniform) -> f64 {
    let (radius, angle) = (1.0 - uniform.draw(), uniform.draw());
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}
