//! The bytes of an image's patches: decoded, scaled as a whole, cut.

use super::grid::Grid;
use super::patching::Patching;
use crate::images::{CHANNELS, Filter, Flaw, decode, scale};

/// Fills `out` with the patches of an encoded image in their order, each row by row, red, green and blue of a pixel together.
pub(super) fn patches(
    bytes: &[u8],
    grid: Grid,
    patching: &Patching,
    max_pixels: u64,
    out: &mut [u8],
) -> Result<(), Flaw> {
    let (mut pixels, size) = (vec![], patching.patch);
    let (width, height) = decode(bytes, max_pixels, &mut pixels)?;
    let scaled = scale(&pixels, (width, height), (grid.columns * size, grid.rows * size), Filter::Bicubic);
    let (line, stride) = (size * CHANNELS, grid.columns * size * CHANNELS);
    for ([row, column], patch) in grid.places(patching.merge).zip(out.chunks_exact_mut(size * line)) {
        for (y, part) in patch.chunks_exact_mut(line).enumerate() {
            part.copy_from_slice(&scaled[(row * size + y) * stride + column * line..][..line]);
        }
    }
    Ok(())
}
