//! The inputs of a prefill plan's tower: the patches of the images that a run reads, each once.

use flatout_data::ImageRoom;
use flatout_data::vision::TowerInputs;
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
        let blocks = tokens * 100 / pictures.shown_percent.max(1);
        let largest = pictures.grids.all.iter().map(|grid| grid.patches()).max().unwrap_or(0);
        let (patches, images) = (all.min(blocks * vision.block()), pictures.grids.all.len().min(tokens));
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
        let Seen { patches, images, largest } = self.seen;
        let grids = showing.pictures.iter().map(|picture| self.pictures.grids.all[*picture]);
        let room = ImageRoom { patches, images, largest };
        let TowerInputs { places, taps, tap_weights, image_start, image_len } =
            TowerInputs::new(grids, room, self.pictures.grids.merge, self.positions);
        let own = showing.pictures.iter().map(|picture| &self.pictures.patches[*picture]);
        let mut bytes: Vec<u8> = own.flatten().copied().collect();
        bytes.resize(patches * self.patch_values, 0);
        session.write_u8(&input_path(role, "patches"), &bytes)?;
        session.write_f32(&input_path(role, "tap_weights"), &tap_weights)?;
        for (name, values) in
            [("patch_places", places), ("taps", taps), ("image_start", image_start), ("image_len", image_len)]
        {
            session.write_i32(&input_path(role, name), &values)?;
        }
        self.shown = Some(showing.pictures);
        Ok(())
    }
}
