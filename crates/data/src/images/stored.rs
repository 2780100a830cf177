//! The interface of a source of images: numbered images, as pixels or encoded bytes, with classes.

use super::flaw::Flaw;
use crate::error::DataError;
use crate::formats::SourceLocation;

/// Numbered images.
pub(crate) trait Images: Send + Sync {
    fn count(&self) -> u64;

    /// The class of image `index`; `None` where it has none.
    fn class(&self, index: u64) -> Option<u32>;

    /// Image `index` as it is stored, always the same. Bytes that have to be read or drawn first lie in `buffer`.
    fn stored<'a>(&'a self, index: u64, buffer: &'a mut Vec<u8>) -> Result<Stored<'a>, Trouble>;

    fn place(&self, index: u64) -> SourceLocation;

    /// Another one where files have other sizes or times; 0 where images are not read from files as they are needed.
    fn version(&self) -> u64 {
        0
    }

    /// Rows and columns of every image, where all lie decoded and are of one size.
    fn size(&self) -> Option<[usize; 2]> {
        None
    }
}

#[derive(Debug)]
pub(crate) enum Stored<'a> {
    Pixels(Picture<'a>),
    /// The bytes of a JPEG, PNG or WebP file, or what pretends to be one.
    Encoded(&'a [u8]),
}

/// Pixels, row by row from the top, red, green and blue of each together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Picture<'a> {
    pub width: usize,
    pub height: usize,
    pub rgb: &'a [u8],
}

/// Why there is no image.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The image is wrong.
    Wrong(Flaw),
    /// The machine could not read it.
    Failed(DataError),
}

impl From<Flaw> for Trouble {
    fn from(flaw: Flaw) -> Self {
        Trouble::Wrong(flaw)
    }
}
