//! The training or held-out side of a source of images.

use std::fmt;
use std::sync::Arc;

use super::decode::MAX_PIXELS;
use super::stored::Images;
use crate::formats::{OnError, SourceLocation};

/// Numbered images with classes, in memory, in files or generated.
#[derive(Clone)]
pub struct ImageSet {
    pub(super) images: Arc<dyn Images>,
    /// The images of the source that are on this side, in ascending order; `None` for all.
    pub(super) selection: Option<Arc<Vec<u64>>>,
    /// Hash that changes with images, classes and split.
    pub(super) mark: u64,
    /// The policy for images that cannot be decoded.
    pub(super) on_error: OnError,
    /// Larger images are not decoded.
    pub(super) max_pixels: u64,
}

impl ImageSet {
    /// All images of a source.
    pub(super) fn whole(images: Arc<dyn Images>, mark: u64) -> Self {
        Self { images, selection: None, mark, on_error: OnError::Fail, max_pixels: MAX_PIXELS }
    }

    pub fn count(&self) -> u64 {
        self.selection.as_ref().map_or_else(|| self.images.count(), |selection| selection.len() as u64)
    }

    /// The class of image `index`; `None` where it has none.
    pub fn class(&self, index: u64) -> Option<u32> {
        self.images.class(self.at(index))
    }

    pub fn place(&self, index: u64) -> SourceLocation {
        self.images.place(self.at(index))
    }

    /// Number of images of each of `classes` classes.
    pub fn balance(&self, classes: usize) -> Vec<u64> {
        let mut counts = vec![0; classes];
        (0..self.count()).filter_map(|index| self.class(index)).for_each(|class| counts[class as usize] += 1);
        counts
    }

    /// Changes with the sizes and times of the files that images are read from.
    pub fn version(&self) -> u64 {
        self.images.version()
    }

    /// The index in the source.
    pub(super) fn at(&self, index: u64) -> u64 {
        self.selection.as_ref().map_or(index, |selection| selection[index as usize])
    }
}

impl fmt::Debug for ImageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} images", self.count())
    }
}
