//! The inputs of a prefill plan's tower: the patches of the images that a run reads, each once.

use flatout_data::vision::TAPS;
use flatout_ir::Role;
use flatout_ir::passes::input_path;
use flatout_models::config::Vision;
use flatout_models::form::Seen;
use flatout_runtime::Session;

use super::pictures::Pictures;
use crate::Failure;

/// The tower of a prefill plan, with the pictures it may be shown.
pub(super) struct Tower {
    pub pictures: Pictures,
    pub seen: Seen,
    /// Learned positions a side.
    positions: usize,
    patch_values: usize,
    /// Patches of a token.
    block: usize,
    /// The pictures that its inputs hold now.
    shown: Option<Vec<usize>>,
}

/// The pictures of one run of the plan, in the order of their patches.
#[derive(Clone, Debug, Default)]
pub(super) struct Showing {
    pub pictures: Vec<usize>,
    patches: usize,
}

impl Tower {
    /// Of a plan that reads `tokens` at a time.
    pub fn new(vision: &Vision, pictures: Pictures, tokens: usize) -> Tower {
        let all: usize = pictures.grids.all.iter().map(|grid| grid.patches()).sum();
        // Tokens that are read at once are of images that have no more patches than these.
        let largest = pictures.grids.all.iter().map(|grid| grid.patches()).max().unwrap_or(0);
        let (patches, images) = (all.min(tokens * vision.block()), pictures.grids.all.len().min(tokens));
        let seen = Seen { patches, images, largest };
        Tower {
            pictures,
            seen,
            positions: vision.positions,
            patch_values: vision.patch_values(),
            block: vision.block(),
            shown: None,
        }
    }

    /// Takes a picture among those that a run shows, where there is room for it.
    pub fn take(&self, showing: &mut Showing, picture: usize) -> bool {
        if showing.pictures.contains(&picture) {
            return true;
        }
        let patches = showing.patches + self.pictures.grids.all[picture].patches();
        let fits = patches <= self.seen.patches && showing.pictures.len() < self.seen.images;
        if fits {
            showing.pictures.push(picture);
            showing.patches = patches;
        }
        fits
    }

    /// The first row of the features of a picture that a run shows.
    pub fn row(&self, showing: &Showing, picture: usize) -> usize {
        let before = showing.pictures.iter().take_while(|other| **other != picture);
        before.map(|other| self.pictures.grids.all[*other].patches()).sum::<usize>() / self.block
    }

    /// Writes the inputs. Those of an earlier run stay where the same pictures are shown, or none are.
    pub fn feed(&mut self, session: &mut Session, role: Role, showing: Showing) -> Result<(), Failure> {
        let holds = |shown: &Vec<usize>| *shown == showing.pictures || showing.pictures.is_empty();
        if self.shown.as_ref().is_some_and(holds) {
            return Ok(());
        }
        let Seen { patches, images, .. } = self.seen;
        let (grids, merge) = (&self.pictures.grids, self.pictures.grids.merge);
        let mut bytes = vec![0; patches * self.patch_values];
        let (mut places, mut taps) = (vec![0; 2 * patches], vec![-1; TAPS * patches]);
        let mut tap_weights = vec![0.0; TAPS * patches];
        let (mut starts, mut lens) = (vec![0; images], vec![0; images]);
        let mut first = 0;
        for (nth, picture) in showing.pictures.iter().enumerate() {
            let (grid, own) = (grids.all[*picture], &self.pictures.patches[*picture]);
            bytes[first * self.patch_values..][..own.len()].copy_from_slice(own);
            for (i, place) in grid.places(merge).enumerate() {
                (0..2).for_each(|axis| places[axis * patches + first + i] = place[axis] as i32);
            }
            for (i, read) in grid.taps(merge, self.positions).enumerate() {
                for (tap, (at, share)) in read.into_iter().enumerate() {
                    taps[tap * patches + first + i] = at as i32;
                    tap_weights[tap * patches + first + i] = share;
                }
            }
            (starts[nth], lens[nth]) = (first as i32, grid.patches() as i32);
            first += grid.patches();
        }
        session.write_u8(&input_path(role, "patches"), &bytes)?;
        session.write_f32(&input_path(role, "tap_weights"), &tap_weights)?;
        for (name, values) in
            [("patch_places", places), ("taps", taps), ("image_start", starts), ("image_len", lens)]
        {
            session.write_i32(&input_path(role, name), &values)?;
        }
        self.shown = Some(showing.pictures);
        Ok(())
    }
}
