//! WebP: parses the chunks, so that size, orientation and truncation are known before decoding.

use std::io::Cursor;

use image_webp::WebPDecoder;

use super::exif::Orientation;
use super::{broken, check_size, over_white};
use crate::images::flaw::Flaw;

/// The size of the canvas and the orientation of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunks {
    width: usize,
    height: usize,
    orientation: Orientation,
    /// End of the last chunk; trailing bytes do not belong to the image.
    end: usize,
}

/// Size of a chunk header: FourCC and size. The whole file is a chunk, too.
const CHUNK_HEAD: usize = 8;
/// Size of the file header: `RIFF`, the size of what follows, and `WEBP`.
const HEAD: usize = CHUNK_HEAD + 4;
/// Position, size, duration and flags at the beginning of an ANMF chunk.
const FRAME_HEAD: usize = 16;
const ANIMATED: u8 = 1 << 1;

impl Chunks {
    fn read(bytes: &[u8]) -> Result<Self, Flaw> {
        let length = number(bytes, 4, 4)?;
        let end = CHUNK_HEAD + length;
        let bytes = bytes.get(..end).ok_or_else(cut)?;
        let (first, body) = chunk(bytes, HEAD)?;
        let orientation = Orientation::default();
        if first != b"VP8X" {
            let size = picture_size(first, body)?;
            let (width, height) =
                size.ok_or_else(|| broken(&"it begins with neither a bitstream nor a header"))?;
            return Ok(Self { width, height, orientation, end });
        }
        let canvas = (number(body, 4, 3)? + 1, number(body, 7, 3)? + 1);
        let mut found = Self { width: canvas.0, height: canvas.1, orientation, end };
        let is_animated = body[0] & ANIMATED != 0;
        let (mut at, mut is_complete) = (after(HEAD, body), false);
        while at + CHUNK_HEAD <= bytes.len() {
            let (name, body) = chunk(bytes, at)?;
            match name {
                b"EXIF" => {
                    found.orientation = Orientation::of(body.strip_prefix(b"Exif\0\0").unwrap_or(body))
                }
                // The first frame of an animation is the image.
                b"ANMF" if is_animated && !is_complete => {
                    frame(body)?;
                    is_complete = true;
                }
                _ if is_animated => {}
                // The decoder allocates the size in the bitstream, so it must match the header.
                _ => {
                    if let Some(size) = picture_size(name, body)? {
                        if size != canvas {
                            return Err(broken(&"it states two sizes"));
                        }
                        is_complete = true;
                    }
                }
            }
            at = after(at, body);
        }
        if is_complete { Ok(found) } else { Err(cut()) }
    }
}

/// Checks that the bitstream of a frame has the size of the frame.
fn frame(bytes: &[u8]) -> Result<(), Flaw> {
    let stated = (number(bytes, 6, 3)? + 1, number(bytes, 9, 3)? + 1);
    let mut at = FRAME_HEAD;
    while at < bytes.len() {
        let (name, body) = chunk(bytes, at)?;
        match picture_size(name, body)? {
            Some(size) if size == stated => return Ok(()),
            Some(_) => return Err(broken(&"it states two sizes")),
            None => at = after(at, body),
        }
    }
    Err(cut())
}

/// The FourCC and the payload of the chunk at an offset.
fn chunk(bytes: &[u8], at: usize) -> Result<(&[u8; 4], &[u8]), Flaw> {
    let name = bytes.get(at..).and_then(|rest| rest.first_chunk()).ok_or_else(cut)?;
    let length = number(bytes, at + 4, 4)?;
    let body = at + CHUNK_HEAD;
    Ok((name, bytes.get(body..body + length).ok_or_else(cut)?))
}

/// The offset of the next chunk, which is even.
fn after(at: usize, body: &[u8]) -> usize {
    at + CHUNK_HEAD + body.len() + body.len() % 2
}

/// Width and height in a VP8 or VP8L bitstream; `None` for other chunks.
fn picture_size(name: &[u8; 4], body: &[u8]) -> Result<Option<(usize, usize)>, Flaw> {
    const SIDE: usize = (1 << 14) - 1;
    Ok(match name {
        b"VP8 " => Some((number(body, 6, 2)? & SIDE, number(body, 8, 2)? & SIDE)),
        b"VP8L" => {
            let packed = number(body, 1, 4)?;
            Some(((packed & SIDE) + 1, ((packed >> 14) & SIDE) + 1))
        }
        _ => None,
    })
}

/// An unsigned little-endian number.
fn number(bytes: &[u8], at: usize, count: usize) -> Result<usize, Flaw> {
    let bytes = bytes.get(at..at + count).ok_or_else(cut)?;
    Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
}

fn cut() -> Flaw {
    broken(&"it is cut short")
}

/// Width and height of the upright image.
pub(super) fn size(bytes: &[u8], max_pixels: u64) -> Result<(usize, usize), Flaw> {
    let Chunks { width, height, orientation, .. } = Chunks::read(bytes)?;
    check_size(width, height, max_pixels)?;
    Ok(if orientation.is_turned() { (height, width) } else { (width, height) })
}

pub(super) fn decode(bytes: &[u8], max_pixels: u64, out: &mut Vec<u8>) -> Result<(usize, usize), Flaw> {
    let Chunks { width, height, orientation, end } = Chunks::read(bytes)?;
    check_size(width, height, max_pixels)?;
    let mut decoder = WebPDecoder::new(Cursor::new(&bytes[..end])).map_err(|error| broken(&error))?;
    let size = decoder.output_buffer_size().ok_or_else(|| broken(&"it has no size"))?;
    out.clear();
    out.resize(size, 0);
    decoder.read_image(out).map_err(|error| broken(&error))?;
    if decoder.has_alpha() {
        over_white(out);
    }
    Ok(orientation.upright(width, height, out))
}
