//! The patch grid of an image: the order of its patches, their learned positions, and the positions of tokens in a text with
//! images.
//!
//! Patches are ordered by merge blocks, block by block in row-major order and row by row inside a block, so that the patches of
//! a token are contiguous in memory.

/// Learned positions that are interpolated for a patch.
pub const TAPS: usize = 4;

/// Height and width of an image in patches, both multiples of the merge size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub rows: usize,
    pub columns: usize,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// A number of text tokens.
    Text(usize),
    /// The tokens of an image with this grid.
    Image(Grid),
}

impl Grid {
    /// An image that is encoded as a whole (a frame): it is one token, and counts as one patch.
    pub const FRAME: Grid = Grid { rows: 1, columns: 1 };

    pub fn patches(self) -> usize {
        self.rows * self.columns
    }

    /// Rows and columns of merge blocks.
    pub fn merged(self, merge: usize) -> [usize; 2] {
        [self.rows / merge, self.columns / merge]
    }

    /// Number of its tokens in a text.
    pub fn tokens(self, merge: usize) -> usize {
        self.merged(merge).iter().product()
    }

    /// Offset of a merge block from the first one in time, height and width.
    pub fn offset(self, block: usize, merge: usize) -> [i32; 3] {
        let [_, columns] = self.merged(merge);
        [0, (block / columns) as i32, (block % columns) as i32]
    }

    /// Row and column of every patch, in order.
    pub fn places(self, merge: usize) -> impl Iterator<Item = [usize; 2]> {
        let [rows, columns] = self.merged(merge);
        (0..rows * columns).flat_map(move |block| {
            let corner = [block / columns * merge, block % columns * merge];
            (0..merge * merge).map(move |i| [corner[0] + i / merge, corner[1] + i % merge])
        })
    }

    /// For every patch, in order, the entries of a `side` x `side` table of learned positions to interpolate, each with its
    /// weight: bilinear, with corners aligned.
    pub fn taps(self, merge: usize, side: usize) -> impl Iterator<Item = [(usize, f32); TAPS]> {
        let along = move |place: usize, count: usize| {
            let at = (place * (side - 1)) as f64 / (count.max(2) - 1) as f64;
            let first = (at as usize).min(side - 1);
            let share = at - first as f64;
            [(first, 1.0 - share), ((first + 1).min(side - 1), share)]
        };
        self.places(merge).map(move |[row, column]| {
            let (rows, columns) = (along(row, self.rows), along(column, self.columns));
            [0, 1, 2, 3].map(|tap| {
                let ((row, by_row), (column, by_column)) = (rows[tap / 2], columns[tap % 2]);
                (row * side + column, (by_row * by_column) as f32)
            })
        })
    }
}

/// Time, height and width of every token of a text, and the next position. Tokens of an image share a time, and the text after
/// it begins after its longer side.
pub fn positions(text: impl IntoIterator<Item = Stretch>, merge: usize) -> (Vec<[i32; 3]>, i32) {
    let (mut all, mut next) = (vec![], 0);
    for stretch in text {
        match stretch {
            Stretch::Text(tokens) => {
                all.extend((next..).take(tokens).map(|position| [position; 3]));
                next += tokens as i32;
            }
            Stretch::Image(grid) => {
                let place = |block: usize| grid.offset(block, merge).map(|offset| next + offset);
                all.extend((0..grid.tokens(merge)).map(place));
                let [rows, columns] = grid.merged(merge);
                next += rows.max(columns) as i32;
            }
        }
    }
    (all, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of three blocks of two by two patches.
    const SMALL: Grid = Grid { rows: 4, columns: 6 };

    #[test]
    fn patches_come_block_by_block() {
        let places: Vec<[usize; 2]> = SMALL.places(2).collect();
        assert_eq!((places.len(), SMALL.tokens(2)), (24, 6));
        assert_eq!(places[..6], [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]]);
        assert_eq!(places[11..14], [[1, 5], [2, 0], [2, 1]]);
        let plain: Vec<[usize; 2]> = Grid { rows: 2, columns: 3 }.places(1).collect();
        assert_eq!(plain, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
    }

    /// Two rows align with the first and the last of a side of five, three columns with the first, the middle and the last.
    #[test]
    fn corners_are_aligned() {
        let taps: Vec<_> = Grid { rows: 2, columns: 3 }.taps(1, 5).collect();
        let heaviest = |taps: &[(usize, f32); TAPS]| {
            taps.iter().find(|(_, share)| *share == 1.0).expect("a whole one").0
        };
        assert_eq!(taps.iter().map(heaviest).collect::<Vec<_>>(), [0, 2, 4, 20, 22, 24]);
        assert_eq!(taps[5].map(|(at, _)| at), [24; TAPS], "nothing behind the last is read");
    }

    #[test]
    fn between_learned_positions_shares_are_products() {
        // Four columns on a side of three: 0, 2/3, 4/3 and 2; the single row is at the first.
        let taps: Vec<_> = Grid { rows: 1, columns: 4 }.taps(1, 3).collect();
        let (a, b) = (2.0 / 3.0, 1.0 / 3.0);
        assert_eq!(taps[1].map(|(at, _)| at), [0, 1, 3, 4]);
        for (got, want) in taps[1].map(|(_, share)| share).iter().zip([b, a, 0.0, 0.0]) {
            assert!((got - want).abs() < 1e-7, "{got} for {want}");
        }
        for (got, want) in taps[2].map(|(_, share)| share).iter().zip([a, b, 0.0, 0.0]) {
            assert!((got - want).abs() < 1e-7, "{got} for {want}");
        }
        let wide = Grid { rows: 22, columns: 40 };
        for taps in wide.taps(2, 48) {
            let sum: f32 = taps.iter().map(|(_, share)| share).sum();
            assert!((sum - 1.0).abs() < 1e-6 && taps.iter().all(|(at, _)| *at < 48 * 48));
        }
    }

    #[test]
    fn text_continues_after_the_longer_side() {
        let text = [Stretch::Text(2), Stretch::Image(SMALL), Stretch::Text(2)];
        let (all, next) = positions(text, 2);
        assert_eq!(all[..3], [[0; 3], [1; 3], [2, 2, 2]]);
        assert_eq!(all[3..8], [[2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]);
        assert_eq!((&all[8..], next), (&[[5; 3], [6; 3]][..], 7));
        let tall = [Stretch::Image(Grid { rows: 6, columns: 2 })];
        assert_eq!(positions(tall, 2), (vec![[0, 0, 0], [0, 1, 0], [0, 2, 0]], 3));
    }
}
