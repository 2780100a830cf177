//! Determines, from the size of an image alone, its resized size and its patches.

use super::grid::Grid;
use crate::formats::Reason;
use crate::images::Flaw;

/// The patches of a vision model, and the limits on an image's area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patching {
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Side, in patches, of the blocks that become one token.
    pub merge: usize,
    /// Images with fewer pixels are enlarged.
    pub least_pixels: u64,
    /// Images with more pixels are shrunk.
    pub most_pixels: u64,
    /// Percentage of an image's merge blocks that a text sees as tokens.
    pub shown_percent: usize,
}

impl Default for Patching {
    /// The values published with Qwen3-VL.
    fn default() -> Self {
        Self { patch: 16, merge: 2, least_pixels: 1 << 16, most_pixels: 1 << 24, shown_percent: 100 }
    }
}

/// Largest aspect ratio.
const MOST_ASPECT: usize = 200;

impl Patching {
    /// Side, in pixels, of the area that becomes one token.
    fn block(&self) -> usize {
        self.patch * self.merge
    }

    /// Pixels per token.
    pub fn token_pixels(&self) -> u64 {
        (self.block() * self.block()) as u64
    }

    /// Number of tokens of an image with these patches: the visible share of its merge blocks, at least one.
    pub fn tokens(&self, grid: Grid) -> usize {
        (grid.tokens(self.merge) * self.shown_percent).div_ceil(100).max(1)
    }

    /// The patches of an image.
    pub fn grid(&self, height: usize, width: usize) -> Result<Grid, Flaw> {
        let [rows, columns] = self.scaled(height, width)?.map(|side| side / self.patch);
        Ok(Grid { rows, columns })
    }

    /// The height and width to which an image is resized: the nearest multiples of a token's side, half to even, within the
    /// limits on the area.
    pub fn scaled(&self, height: usize, width: usize) -> Result<[usize; 2], Flaw> {
        let (long, short) = (height.max(width), height.min(width));
        if long > MOST_ASPECT.saturating_mul(short) {
            return Err(Flaw::new(
                Reason::ImageSides,
                format!(
                    "the image has {width} x {height} pixels, and no side may be more than {MOST_ASPECT} times the other"
                ),
            ));
        }
        let block = self.block() as f64;
        let sides = [height as f64, width as f64];
        let area = height as f64 * width as f64;
        let to_block = |side: f64| side as usize * self.block();
        let nearest = sides.map(|side| to_block((side / block).round_ties_even()));
        let near = nearest[0] as u64 * nearest[1] as u64;
        Ok(if near > self.most_pixels {
            let by = (area / self.most_pixels as f64).sqrt();
            sides.map(|side| to_block((side / by / block).floor()).max(self.block()))
        } else if near < self.least_pixels {
            let by = (self.least_pixels as f64 / area).sqrt();
            sides.map(|side| to_block((side * by / block).ceil()))
        } else {
            nearest
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_those_of_the_published_rule() {
        let published = Patching::default();
        let rows = [
            ([720, 1280], [704, 1280], 880),
            ([1080, 1920], [1088, 1920], 2040),
            ([1072, 1920], [1088, 1920], 2040),
            ([1036, 1288], [1024, 1280], 1280),
            ([576, 720], [576, 704], 396),
            ([448, 448], [448, 448], 196),
            ([240, 320], [256, 320], 80),
            ([100, 100], [256, 256], 64),
            ([33, 900], [64, 1344], 84),
            ([3000, 9000], [2336, 7072], 16133),
            ([5000, 5000], [4096, 4096], 16384),
        ];
        for ([height, width], scaled, tokens) in rows {
            assert_eq!(published.scaled(height, width), Ok(scaled), "{height} x {width}");
            assert_eq!(published.grid(height, width).unwrap().tokens(2), tokens, "{height} x {width}");
        }
        let refused = published.scaled(16, 3201).unwrap_err();
        assert!(refused.said.contains("3201 x 16"), "{}", refused.said);
        assert!(published.scaled(16, 3200).is_ok());
    }

    #[test]
    fn a_share_of_the_blocks_is_known_from_the_sides() {
        let grid = Grid { rows: 6, columns: 6 };
        let tokens = [100, 75, 50, 25, 1]
            .map(|shown_percent| Patching { shown_percent, ..Patching::default() }.tokens(grid));
        assert_eq!(tokens, [9, 7, 5, 3, 1]);
    }
}
