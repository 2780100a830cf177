//! Decodes and resizes an image and cuts it into patches.

use std::cell::RefCell;

use super::grid::Grid;
use super::patching::Patching;
use super::scaling::scale;
use crate::images::{CHANNELS, Flaw, decode};

/// Fills `out` with the patches of an encoded image in order, each by rows of pixels with three bytes (red, green, blue).
pub(super) fn patches(
    bytes: &[u8],
    grid: Grid,
    patching: &Patching,
    max_pixels: u64,
    out: &mut [u8],
) -> Result<(), Flaw> {
    PIXELS.with_borrow_mut(|pixels| {
        let size = decode(bytes, max_pixels, pixels)?;
        cut(pixels, size, grid, patching, out);
        if pixels.capacity() > MOST_BUFFER_BYTES {
            *pixels = vec![];
        }
        Ok(())
    })
}

thread_local! {
    /// A reused pixel buffer: fresh memory has to be touched page by page.
    static PIXELS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Largest buffer that a thread keeps: an image of 4096 x 2048.
const MOST_BUFFER_BYTES: usize = 24 << 20;

/// Bytes of a row of a patch in most models.
const USUAL_ROW_BYTES: usize = 16 * CHANNELS;

/// Fills `out` with the patches of pixels.
fn cut(rgb: &[u8], size: (usize, usize), grid: Grid, patching: &Patching, out: &mut [u8]) {
    let Patching { patch, merge, .. } = *patching;
    let line = patch * CHANNELS;
    assert_eq!(out.len(), grid.patches() * patch * line, "the patches' bytes");
    // Blocks are contiguous along a row of blocks, and so are the rows of patches inside a block.
    let (block, blocks) = (merge * merge * patch * line, grid.columns / merge);
    scale(rgb, size, (grid.columns * patch, grid.rows * patch), |y, row| {
        let (patches, inside) = (y / patch, y % patch);
        let first = patches / merge * blocks * block + patches % merge * merge * patch * line + inside * line;
        for (column, part) in row.chunks_exact(line).enumerate() {
            let at = first + column / merge * block + column % merge * patch * line;
            match (out[at..].first_chunk_mut::<USUAL_ROW_BYTES>(), part.first_chunk::<USUAL_ROW_BYTES>()) {
                // A length known to the compiler.
                (Some(place), Some(usual)) if line == USUAL_ROW_BYTES => *place = *usual,
                _ => out[at..at + line].copy_from_slice(part),
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of three blocks of two by two patches, of two by two pixels each, written out by hand.
    #[test]
    fn patches_come_block_by_block_and_row_by_row() {
        // Pixel (row, column) has red = 16 row + column, and constants for green and blue.
        let (width, height) = (12, 8);
        let pixel = |at: usize| [(16 * (at / width) + at % width) as u8, 200, 201];
        let rgb: Vec<u8> = (0..width * height).flat_map(pixel).collect();
        let patching =
            Patching { patch: 2, merge: 2, least_pixels: 0, most_pixels: 1000, ..Patching::default() };
        let grid = patching.grid(height, width).unwrap();
        assert_eq!((grid, grid.merged(2)), (Grid { rows: 4, columns: 6 }, [2, 3]));
        let mut out = vec![0; rgb.len()];
        cut(&rgb, (width, height), grid, &patching, &mut out);
        let reds: Vec<u8> = out.iter().copied().step_by(3).collect();
        #[rustfmt::skip]
        let wanted = [
            // The first block: its upper patches, then the lower ones.
            0x00, 0x01, 0x10, 0x11,  0x02, 0x03, 0x12, 0x13,  0x20, 0x21, 0x30, 0x31,  0x22, 0x23, 0x32, 0x33,
            0x04, 0x05, 0x14, 0x15,  0x06, 0x07, 0x16, 0x17,  0x24, 0x25, 0x34, 0x35,  0x26, 0x27, 0x36, 0x37,
            0x08, 0x09, 0x18, 0x19,  0x0a, 0x0b, 0x1a, 0x1b,  0x28, 0x29, 0x38, 0x39,  0x2a, 0x2b, 0x3a, 0x3b,
            // The second row of blocks.
            0x40, 0x41, 0x50, 0x51,  0x42, 0x43, 0x52, 0x53,  0x60, 0x61, 0x70, 0x71,  0x62, 0x63, 0x72, 0x73,
            0x44, 0x45, 0x54, 0x55,  0x46, 0x47, 0x56, 0x57,  0x64, 0x65, 0x74, 0x75,  0x66, 0x67, 0x76, 0x77,
            0x48, 0x49, 0x58, 0x59,  0x4a, 0x4b, 0x5a, 0x5b,  0x68, 0x69, 0x78, 0x79,  0x6a, 0x6b, 0x7a, 0x7b,
        ];
        assert_eq!(reds, wanted);
        assert!(out.chunks(3).all(|pixel| pixel[1..] == [200, 201]));
        let places: Vec<u8> = grid.places(2).map(|[row, column]| (32 * row + 2 * column) as u8).collect();
        assert!(reds.chunks(4).map(|patch| patch[0]).eq(places), "as the grid numbers them");
    }
}
