//! The inputs of a tower with the positions of patches, derived from the grids of its images.

use super::grid::{Grid, TAPS};
use crate::examples::layout::ImageRoom;

/// The positions of the patches of images, padded to the room of a plan. Padding has no learned position.
#[derive(Debug, Clone, PartialEq)]
pub struct TowerInputs {
    /// Row and column of every patch, [2, P].
    pub places: Vec<i32>,
    /// The learned positions of every patch, [4, P], and their weights.
    pub taps: Vec<i32>,
    pub tap_weights: Vec<f32>,
    /// Start and number of the patches of every image.
    pub image_start: Vec<i32>,
    pub image_len: Vec<i32>,
}

impl TowerInputs {
    /// For consecutive images of a tower with merge size `merge` and `side` x `side` learned positions.
    pub fn new(
        grids: impl IntoIterator<Item = Grid>,
        room: ImageRoom,
        merge: usize,
        side: usize,
    ) -> TowerInputs {
        let ImageRoom { patches, images, .. } = room;
        let mut inputs = TowerInputs {
            places: vec![0; 2 * patches],
            taps: vec![-1; TAPS * patches],
            tap_weights: vec![0.0; TAPS * patches],
            image_start: vec![0; images],
            image_len: vec![0; images],
        };
        let mut first = 0;
        for (number, grid) in grids.into_iter().enumerate() {
            for (at, place) in grid.places(merge).enumerate() {
                for (axis, place) in place.into_iter().enumerate() {
                    inputs.places[axis * patches + first + at] = place as i32;
                }
            }
            for (at, four) in grid.taps(merge, side).enumerate() {
                for (tap, (row, share)) in four.into_iter().enumerate() {
                    inputs.taps[tap * patches + first + at] = row as i32;
                    inputs.tap_weights[tap * patches + first + at] = share;
                }
            }
            (inputs.image_start[number], inputs.image_len[number]) = (first as i32, grid.patches() as i32);
            first += grid.patches();
        }
        inputs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_of_no_image_read_nothing() {
        let room = ImageRoom { patches: 12, images: 3, largest: 8 };
        let grids = [Grid { rows: 2, columns: 2 }, Grid { rows: 2, columns: 2 }];
        let made = TowerInputs::new(grids, room, 2, 5);
        assert_eq!((made.image_start, made.image_len), (vec![0, 4, 0], vec![4, 4, 0]));
        assert_eq!(made.places[..8], [0, 0, 1, 1, 0, 0, 1, 1]);
        assert_eq!(made.places[12..20], [0, 1, 0, 1, 0, 1, 0, 1]);
        for tap in 0..TAPS {
            assert!(made.taps[tap * 12..][..8].iter().all(|row| *row >= 0));
            assert_eq!(made.taps[tap * 12 + 8..][..4], [-1; 4]);
            assert_eq!(made.tap_weights[tap * 12 + 8..][..4], [0.0; 4]);
        }
    }
}
