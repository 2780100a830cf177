//! What the loader needs to know of a source of images.

use crate::error::DataError;
use crate::formats::Place;

/// Numbered images.
pub(crate) trait Images: Send + Sync {
    fn count(&self) -> u64;

    /// The class of image `index`; `None` where it has none.
    fn class(&self, index: u64) -> Option<u32>;

    /// Image `index` as it is stored, always the same. What has to be read or drawn first lies in `buffer`.
    fn stored<'a>(&'a self, index: u64, buffer: &'a mut Vec<u8>) -> Result<Stored<'a>, DataError>;

    fn place(&self, index: u64) -> Place;
}

pub(crate) enum Stored<'a> {
    Pixels(Picture<'a>),
}

/// Pixels, row by row from the top, red, green and blue of each together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Picture<'a> {
    pub width: usize,
    pub height: usize,
    pub rgb: &'a [u8],
}
