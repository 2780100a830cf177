//! JPEG: parses the segments, so that size, orientation and truncation are known before decoding.

use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

use super::baseline::Baseline;
use super::exif::Orientation;
use super::{broken, check_size};
use crate::formats::Reason;
use crate::images::flaw::Flaw;

/// The contents of the segments before the first scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segments {
    width: usize,
    height: usize,
    orientation: Orientation,
}

const END: [u8; 2] = [0xff, 0xd9];

impl Segments {
    fn read(bytes: &[u8]) -> Result<Self, Flaw> {
        let cut = || broken(&"it is cut short");
        let mut at = 2;
        let mut frame = None;
        let mut orientation = Orientation::default();
        loop {
            // Any number of fill bytes 0xff may precede a marker.
            let marker = loop {
                match bytes.get(at).ok_or_else(cut)? {
                    0xff => at += 1,
                    marker if at > 2 && bytes[at - 1] == 0xff => break *marker,
                    _ => return Err(broken(&format!("byte {at} is not a marker"))),
                }
            };
            at += 1;
            if matches!(marker, 0x01 | 0xd0..=0xd7) {
                continue;
            }
            if marker == END[1] {
                return Err(broken(&"it ends before its pixels"));
            }
            let length = bytes.get(at..at + 2).ok_or_else(cut)?;
            let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
            let body = bytes.get(at + 2..at + length.max(2)).ok_or_else(cut)?;
            match marker {
                0xc0..=0xc2 => {
                    let [depth, h1, h0, w1, w0, ..] = *body else { return Err(cut()) };
                    if depth != 8 {
                        return Err(Flaw::new(
                            Reason::Unsupported,
                            format!("the JPEG has {depth} bits per sample, and only 8 are supported"),
                        ));
                    }
                    frame = Some((u16::from_be_bytes([w1, w0]), u16::from_be_bytes([h1, h0])));
                }
                // Lossless, hierarchical and arithmetically coded frames, and reserved markers.
                0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => {
                    return Err(Flaw::new(
                        Reason::Unsupported,
                        "the JPEG is lossless, hierarchical or arithmetically coded, which is not supported",
                    ));
                }
                0xe1 => {
                    if let Some(exif) = body.strip_prefix(b"Exif\0\0") {
                        orientation = Orientation::of(exif);
                    }
                }
                0xda => break,
                _ => {}
            }
            at += length.max(2);
        }
        let (width, height) = frame.ok_or_else(|| broken(&"its pixels come before its size"))?;
        // Entropy-coded data never contain an EOI marker, so any EOI after the first scan header is the end.
        if memchr::memmem::rfind(&bytes[at..], &END).is_none() {
            return Err(cut());
        }
        Ok(Self { width: width.into(), height: height.into(), orientation })
    }
}

/// Width and height of the upright image.
pub(super) fn size(bytes: &[u8], max_pixels: u64) -> Result<(usize, usize), Flaw> {
    let Segments { width, height, orientation } = Segments::read(bytes)?;
    check_size(width, height, max_pixels)?;
    Ok(if orientation.is_turned() { (height, width) } else { (width, height) })
}

/// Width and height of an image that is stored upright; `None` for one that has to be rotated or mirrored.
pub(super) fn upright(bytes: &[u8], max_pixels: u64) -> Result<Option<(usize, usize)>, Flaw> {
    let Segments { width, height, orientation } = Segments::read(bytes)?;
    check_size(width, height, max_pixels)?;
    Ok((orientation == Orientation::default()).then_some((width, height)))
}

pub(super) fn decode(bytes: &[u8], max_pixels: u64, out: &mut Vec<u8>) -> Result<(usize, usize), Flaw> {
    let segments = Segments::read(bytes)?;
    let (width, height) = (segments.width, segments.height);
    check_size(width, height, max_pixels)?;
    if let Some(usual) = Baseline::read(bytes).map_err(|why| broken(&why))? {
        if usual.size() != (width, height) {
            return Err(broken(&"it states two sizes"));
        }
        usual.whole(out).map_err(|why| broken(&why))?;
        return Ok(segments.orientation.upright(width, height, out));
    }
    let options = DecoderOptions::default()
        .jpeg_set_out_colorspace(ColorSpace::RGB)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        // Without strict mode, undecodable parts would be grey.
        .set_strict_mode(true);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|error| broken(&error))?;
    let stated = decoder.info().map(|info| (usize::from(info.width), usize::from(info.height)));
    if stated != Some((width, height)) {
        return Err(broken(&"it states two sizes"));
    }
    out.clear();
    out.resize(width * height * 3, 0);
    decoder.decode_into(out).map_err(|error| broken(&error))?;
    Ok(segments.orientation.upright(width, height, out))
}
