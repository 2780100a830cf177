//! PNG: decodes every colour type and bit depth to RGB.

use std::io::Cursor;

use png::{ColorType, Decoder, Limits, Reader, Transformations};

use super::exif::Orientation;
use super::{broken, check_size, on_white, over_white};
use crate::images::flaw::Flaw;

/// Limit on memory for other chunks, such as a profile or a palette.
const SPARE_BYTES: usize = 8 << 20;

type Bytes<'a> = Cursor<&'a [u8]>;

fn open(bytes: &[u8], max_pixels: u64) -> Result<(Reader<Bytes<'_>>, usize, usize), Flaw> {
    // Opening an image allocates a row, so its size is checked before.
    let stated = |at: usize| {
        bytes.get(at..at + 4).map(|four| u32::from_be_bytes(four.try_into().expect("four bytes")))
    };
    if let (Some(width), Some(height)) = (stated(16), stated(20)) {
        check_size(width as usize, height as usize, max_pixels)?;
    }
    let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), Limits { bytes: SPARE_BYTES });
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    let reader = decoder.read_info().map_err(|error| broken(&error))?;
    let (width, height) = reader.info().size();
    Ok((reader, width as usize, height as usize))
}

fn orientation(reader: &Reader<Bytes<'_>>) -> Orientation {
    reader.info().exif_metadata.as_ref().map_or_else(Orientation::default, |exif| Orientation::of(exif))
}

pub(super) fn size(bytes: &[u8], max_pixels: u64) -> Result<(usize, usize), Flaw> {
    let (reader, width, height) = open(bytes, max_pixels)?;
    Ok(if orientation(&reader).is_turned() { (height, width) } else { (width, height) })
}

pub(super) fn decode(bytes: &[u8], max_pixels: u64, out: &mut Vec<u8>) -> Result<(usize, usize), Flaw> {
    let (mut reader, width, height) = open(bytes, max_pixels)?;
    let orientation = orientation(&reader);
    let size = reader.output_buffer_size().ok_or_else(|| broken(&"it has no size"))?;
    out.clear();
    out.resize(size, 0);
    let frame = reader.next_frame(out).map_err(|error| broken(&error))?;
    // A frame of an animation may be smaller than the image, but its default image must not.
    if (frame.width as usize, frame.height as usize) != (width, height) {
        return Err(broken(&"its default image has another size"));
    }
    match frame.color_type {
        ColorType::Rgb => out.truncate(width * height * 3),
        ColorType::Grayscale => *out = out.iter().flat_map(|grey| [*grey; 3]).collect(),
        ColorType::GrayscaleAlpha => {
            *out = out.chunks_exact(2).flat_map(|two| [on_white(two[0], two[1]); 3]).collect()
        }
        ColorType::Rgba => over_white(out),
        ColorType::Indexed => unreachable!("palettes are expanded"),
    }
    Ok(orientation.upright(width, height, out))
}
