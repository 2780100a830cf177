//! Decodes images to pixels.
//!
//! JPEG: baseline and progressive, greyscale, YCbCr, RGB, and CMYK and YCCK as Adobe writes them (inverted). PNG: every colour
//! type and bit depth; of 16 bits the upper 8 are kept, and of an animation the default image. WebP: lossy and lossless; of an
//! animation the first frame. Transparent pixels are blended onto white. All images are turned upright by their EXIF
//! orientation. Colour profiles are not applied.
//!
//! Common JPEG images are decoded only where a view needs it, at a reduced scale where that suffices ([`Jpeg`]). All other
//! images are decoded completely: other JPEG images by `zune-jpeg`, PNG by `png`, WebP by `image-webp`.
//!
//! Memory for an image is allocated only after its header was checked against the limit.

mod baseline;
mod colours;
mod exif;
mod huffman;
mod inverse;
#[cfg(target_arch = "x86_64")]
mod inverse_avx2;
mod jpeg;
mod png;
mod progressive;
mod webp;

pub(super) use baseline::Plane;

use super::flaw::Flaw;
use super::view::Crop;
use crate::contained::contained;
use crate::formats::Reason;

/// Default limit on the pixels of an image: 8192 x 8192. A decoded image takes 3 bytes per pixel, and up to 9 more during
/// decoding.
pub const MAX_PIXELS: u64 = 1 << 26;

/// Unsupported formats by their first bytes, to name them in the error.
const OTHERS: [(&[u8], usize, &str); 8] = [
    (b"GIF8", 0, "a GIF image"),
    (b"BM", 0, "a BMP image"),
    (b"II*\0", 0, "a TIFF image"),
    (b"MM\0*", 0, "a TIFF image"),
    (b"ftyp", 4, "an AVIF, HEIC or MP4 file"),
    (b"\0\0\0\x0cJXL ", 0, "a JPEG XL image"),
    (b"\0\0\0\x0cjP  ", 0, "a JPEG 2000 image"),
    (b"%PDF", 0, "a PDF document"),
];

/// The header of an encoded image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub kind: ImageFormat,
    /// Size of the upright image.
    pub width: usize,
    pub height: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ImageFormat {
    Jpeg,
    Png,
    WebP,
}

fn kind(bytes: &[u8]) -> Result<ImageFormat, Flaw> {
    if bytes.starts_with(&[0xff, 0xd8]) {
        return Ok(ImageFormat::Jpeg);
    }
    if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        return Ok(ImageFormat::Png);
    }
    if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
        return Ok(ImageFormat::WebP);
    }
    if bytes.is_empty() {
        return Err(Flaw::new(Reason::BrokenImage, "the image has no bytes"));
    }
    let other =
        OTHERS.iter().find(|(mark, at, _)| bytes.get(*at..).is_some_and(|rest| rest.starts_with(mark)));
    Err(match other {
        Some((_, _, name)) => {
            Flaw::new(Reason::NotAnImage, format!("it is {name}, and only JPEG, PNG and WebP are read"))
        }
        None if bytes.iter().take(4096).all(|byte| *byte == 0) => {
            Flaw::new(Reason::BrokenImage, "the image is nothing but zeros")
        }
        None => Flaw::new(Reason::NotAnImage, "its bytes are of no known kind of image"),
    })
}

/// Reads only the header.
pub(crate) fn header(bytes: &[u8], max_pixels: u64) -> Result<Header, Flaw> {
    let kind = kind(bytes)?;
    let read = contained(|| match kind {
        ImageFormat::Jpeg => jpeg::size(bytes, max_pixels),
        ImageFormat::Png => png::size(bytes, max_pixels),
        ImageFormat::WebP => webp::size(bytes, max_pixels),
    });
    let (width, height) = read.unwrap_or_else(|panic| Err(broken(&panic)))?;
    Ok(Header { kind, width, height })
}

/// Decodes into `out`: rows from the top, three bytes (red, green, blue) per pixel. Returns width and height.
pub(crate) fn decode(bytes: &[u8], max_pixels: u64, out: &mut Vec<u8>) -> Result<(usize, usize), Flaw> {
    let kind = kind(bytes)?;
    // A panic of a third-party decoder makes the image a broken one and does not end the run.
    let decoded = contained(|| match kind {
        ImageFormat::Jpeg => jpeg::decode(bytes, max_pixels, out),
        ImageFormat::Png => png::decode(bytes, max_pixels, out),
        ImageFormat::WebP => webp::decode(bytes, max_pixels, out),
    });
    decoded.unwrap_or_else(|panic| Err(broken(&panic)))
}

fn broken(why: &dyn std::fmt::Display) -> Flaw {
    Flaw::new(Reason::BrokenImage, format!("the image is damaged ({why})"))
}

/// Blends a colour onto white.
fn on_white(colour: u8, alpha: u8) -> u8 {
    ((u32::from(colour) * u32::from(alpha) + 255 * (255 - u32::from(alpha)) + 127) / 255) as u8
}

/// Blends RGBA pixels onto white, in place.
fn over_white(pixels: &mut Vec<u8>) {
    let count = pixels.len() / 4;
    for at in 0..count {
        let [red, green, blue, alpha] = *pixels[4 * at..].first_chunk().expect("four bytes a pixel");
        pixels[3 * at..][..3].copy_from_slice(&[red, green, blue].map(|colour| on_white(colour, alpha)));
    }
    pixels.truncate(3 * count);
}

/// A JPEG that can be decoded in part.
pub(super) struct Jpeg<'a> {
    pub width: usize,
    pub height: usize,
    image: baseline::Baseline<'a>,
}

impl<'a> Jpeg<'a> {
    /// `None` for other formats, and for images that are not stored upright.
    pub fn of(bytes: &'a [u8], max_pixels: u64) -> Result<Option<Self>, Flaw> {
        if kind(bytes)? != ImageFormat::Jpeg {
            return Ok(None);
        }
        let Some((width, height)) = jpeg::upright(bytes, max_pixels)? else { return Ok(None) };
        let image = baseline::Baseline::read(bytes).map_err(|why| broken(&why))?;
        Ok(image.map(|image| Self { width, height, image }))
    }

    /// The planes that a view of `width` x `height` needs of a crop.
    pub fn planes(&self, crop: Crop, width: usize, height: usize) -> Result<Vec<Plane>, Flaw> {
        self.image.planes(crop, width, height).map_err(|why| broken(&why))
    }
}

/// Refuses sizes that must not be allocated.
fn check_size(width: usize, height: usize, max_pixels: u64) -> Result<(), Flaw> {
    if width == 0 || height == 0 {
        return Err(Flaw::new(Reason::BrokenImage, format!("the image has {width} x {height} pixels")));
    }
    if width as u128 * height as u128 > u128::from(max_pixels) {
        return Err(Flaw::new(
            Reason::TooManyPixels,
            format!(
                "the header of the image states {width} x {height} pixels, more than data.max_pixels={max_pixels}"
            ),
        ));
    }
    Ok(())
}
