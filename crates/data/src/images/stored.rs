//! The trait of a source of images: numbered images with classes, as pixels or encoded bytes.

use super::flaw::Flaw;
use crate::error::DataError;
use crate::formats::SourceLocation;

/// Numbered images.
pub(crate) trait Images: Send + Sync {
    fn count(&self) -> u64;

    /// The class of image `index`; `None` where it has none.
    fn class(&self, index: u64) -> Option<u32>;

    /// Image `index` in its stored form, the same in every call. Bytes that are read or generated are in `buffer`.
    fn stored<'a>(&'a self, index: u64, buffer: &'a mut Vec<u8>) -> Result<Stored<'a>, ImageError>;

    fn place(&self, index: u64) -> SourceLocation;

    /// Changes with the sizes and times of files; 0 where images are not read from files on demand.
    fn version(&self) -> u64 {
        0
    }

    /// Height and width of every image, where all are decoded and of one size.
    fn size(&self) -> Option<[usize; 2]> {
        None
    }
}

#[derive(Debug)]
pub(crate) enum Stored<'a> {
    Pixels(Picture<'a>),
    /// The bytes of a JPEG, PNG or WebP file, not validated.
    Encoded(&'a [u8]),
}

/// Pixels in rows from the top, three bytes (red, green, blue) each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Picture<'a> {
    pub width: usize,
    pub height: usize,
    pub rgb: &'a [u8],
}

/// Why an image cannot be returned.
#[derive(Debug)]
pub(crate) enum ImageError {
    /// The image is invalid.
    Invalid(Flaw),
    /// Reading failed.
    Failed(DataError),
}

impl From<Flaw> for ImageError {
    fn from(flaw: Flaw) -> Self {
        ImageError::Invalid(flaw)
    }
}
