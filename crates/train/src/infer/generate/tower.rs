//! The inputs of a prefill plan's tower: the images that a run reads, each once.

use flatout_data::ImageRoom;
use flatout_data::vision::TowerInputs;
use flatout_ir::Role;
use flatout_ir::passes::input_path;
use flatout_models::config::{Look, Qwen3VlConfig, Vision};
use flatout_models::form::{ImageExtents, SeenFrames, SeenPatches};
use flatout_runtime::Session;

use super::pictures::{Picture, PictureReader, Pictures};
use super::prompt::Placed;
use crate::Failure;

/// The most images per run of the tower if images arrive with requests.
const MOST_IMAGES: usize = 16;

/// The tower of a prefill plan, with the pictures it may read.
pub(super) struct Tower {
    pub pictures: Pictures,
    kind: TowerKind,
    /// Bytes of a patch or of a frame.
    bytes: usize,
    /// The pictures that its inputs hold at present.
    shown: Option<Vec<usize>>,
}

enum TowerKind {
    Patches {
        seen: SeenPatches,
        /// Learned positions per side.
        positions: usize,
        /// Patches per token.
        block: usize,
    },
    /// Every sequence looks at one frame per run; its state after the tokens read so far is the query.
    Frames { seen: SeenFrames, look: Look },
}

/// The pictures of one run of the plan, in the order of their patches.
#[derive(Clone, Debug, Default)]
pub(super) struct Showing {
    pub pictures: Vec<usize>,
    patches: usize,
    /// The looks at frames, in the order of their pictures.
    looks: Vec<LookAt>,
}

/// A sequence's look at a picture.
#[derive(Clone, Copy, Debug)]
struct LookAt {
    picture: usize,
    lane: usize,
    /// Whether the sequence has read nothing before it.
    is_first: bool,
}

impl Tower {
    /// For a plan that reads `tokens` tokens per run from `sequences` sequences.
    pub fn new(vision: &Vision, pictures: Pictures, tokens: usize, sequences: usize) -> Tower {
        let (kind, bytes) = match vision {
            Vision::Qwen3Vl(vision) => {
                let all: usize = pictures.grids.all.iter().map(|grid| grid.patches()).sum();
                // Limits the images to those of the tokens in one run, and to the size of the largest one.
                let largest = pictures.grids.all.iter().map(|grid| grid.patches()).max().unwrap_or(0);
                let blocks = tokens * 100 / pictures.shown_percent.max(1);
                let (patches, images) =
                    (all.min(blocks * vision.block()), pictures.grids.all.len().min(tokens));
                let seen = SeenPatches { patches, images, largest };
                let kind = TowerKind::Patches { seen, positions: vision.positions, block: vision.block() };
                (kind, vision.patch_values())
            }
            Vision::Fovea(vision) => {
                let kind = TowerKind::Frames { seen: SeenFrames::next_of(sequences), look: vision.mode };
                (kind, vision.frame_bytes())
            }
        };
        Tower { pictures, kind, bytes, shown: None }
    }

    /// For a plan that reads `tokens` tokens per run, and pictures that arrive with requests.
    pub fn later(vision: &Qwen3VlConfig, reader: &PictureReader, tokens: usize) -> Tower {
        let largest = reader.most_tokens() * vision.block();
        let patches = tokens * 100 / reader.shown_percent().max(1) * vision.block();
        let seen = SeenPatches { patches: patches.max(largest), images: MOST_IMAGES.min(tokens), largest };
        let kind = TowerKind::Patches { seen, positions: vision.positions, block: vision.block() };
        let pictures = Pictures::later(vision.merge, reader.shown_percent());
        Tower { pictures, kind, bytes: vision.patch_values(), shown: None }
    }

    /// Adds a picture no larger than the largest for a request, and returns its number.
    pub fn add(&mut self, picture: Picture) -> usize {
        if let Some(number) = self.pictures.share(&picture) {
            return number;
        }
        let number = self.pictures.add(picture);
        // The inputs may hold another picture with this number.
        if self.shown.as_ref().is_some_and(|shown| shown.contains(&number)) {
            self.shown = None;
        }
        number
    }

    /// Whether a picture fits the tower.
    pub fn fits(&self, picture: &Picture) -> bool {
        matches!(self.kind, TowerKind::Patches { seen, .. } if picture.patches() <= seen.largest)
    }

    pub fn seen(&self) -> ImageExtents {
        match self.kind {
            TowerKind::Patches { seen, .. } => ImageExtents::Patches(seen),
            TowerKind::Frames { seen, .. } => ImageExtents::Frames(seen),
        }
    }

    /// Adds a picture of a sequence that has read `read` tokens to those of a run, if there is room. The look at a frame depends
    /// on the state after everything read before, so a frame can only be the first thing that a run reads.
    pub fn take(&self, showing: &mut Showing, placed: Placed, lane: usize, read: usize) -> bool {
        let Placed { at, picture } = placed;
        let is_shown = showing.pictures.contains(&picture);
        match self.kind {
            TowerKind::Patches { .. } if is_shown => true,
            TowerKind::Patches { seen, .. } => {
                let patches = showing.patches + self.pictures.grids.all[picture].patches();
                let fits = patches <= seen.patches && showing.pictures.len() < seen.images;
                if fits {
                    showing.pictures.push(picture);
                    showing.patches = patches;
                }
                fits
            }
            TowerKind::Frames { .. } if at > 0 => false,
            TowerKind::Frames { .. } => {
                let look = LookAt { picture, lane, is_first: read == 0 };
                if !is_shown {
                    showing.pictures.push(picture);
                    showing.looks.push(look);
                    return true;
                }
                // Looks at the same picture are neighbours.
                let last = showing.looks.iter().rposition(|other| other.picture == picture);
                showing.looks.insert(last.map_or(0, |last| last + 1), look);
                true
            }
        }
    }

    /// The first row of the features that a run computes for a sequence's picture.
    pub fn row(&self, showing: &Showing, picture: usize, lane: usize) -> usize {
        let before = showing.pictures.iter().take_while(|other| **other != picture);
        match self.kind {
            TowerKind::Patches { block, .. } => {
                before.map(|other| self.pictures.grids.all[*other].patches()).sum::<usize>() / block
            }
            TowerKind::Frames { look: Look::Coarse, .. } => before.count(),
            TowerKind::Frames { look: Look::Fine, .. } => {
                let own = |look: &LookAt| (look.picture, look.lane) == (picture, lane);
                showing.looks.iter().position(own).expect("a picture that was taken")
            }
        }
    }

    /// Writes the inputs. Images of an earlier run are kept if this run has the same pictures or none.
    pub fn feed(&mut self, session: &mut Session, role: Role, showing: Showing) -> Result<(), Failure> {
        if let TowerKind::Frames { seen, look: Look::Fine } = self.kind {
            for (name, values) in looks(&showing, seen) {
                session.write_i32(&input_path(role, name), &values)?;
            }
        }
        let holds = |shown: &Vec<usize>| *shown == showing.pictures || showing.pictures.is_empty();
        if self.shown.as_ref().is_some_and(holds) {
            return Ok(());
        }
        let own = showing.pictures.iter().map(|picture| &self.pictures.bytes[*picture][..]);
        let mut bytes: Vec<u8> = own.collect::<Vec<_>>().concat();
        match self.kind {
            TowerKind::Patches { seen: SeenPatches { patches, images, largest }, positions, .. } => {
                let grids = showing.pictures.iter().map(|picture| self.pictures.grids.all[*picture]);
                let room = ImageRoom { patches, images, largest };
                let TowerInputs { places, taps, tap_weights, image_start, image_len } =
                    TowerInputs::new(grids, room, self.pictures.grids.merge, positions);
                bytes.resize(patches * self.bytes, 0);
                session.write_u8(&input_path(role, "patches"), &bytes)?;
                session.write_f32(&input_path(role, "tap_weights"), &tap_weights)?;
                for (name, values) in [
                    ("patch_places", places),
                    ("taps", taps),
                    ("image_start", image_start),
                    ("image_len", image_len),
                ] {
                    session.write_i32(&input_path(role, name), &values)?;
                }
            }
            TowerKind::Frames { seen, .. } => {
                bytes.resize(seen.images * self.bytes, 0);
                session.write_u8(&input_path(role, "pixels"), &bytes)?;
            }
        }
        self.shown = Some(showing.pictures);
        Ok(())
    }
}

/// The positions of the looks at each picture, and the state that is the query of each look.
fn looks(showing: &Showing, seen: SeenFrames) -> [(&'static str, Vec<i32>); 3] {
    let (mut start, mut len) = (vec![0; seen.images], vec![0; seen.images]);
    let mut previous = vec![-1; seen.frames];
    for (row, look) in showing.looks.iter().enumerate() {
        let image = showing.pictures.iter().position(|picture| *picture == look.picture);
        let image = image.expect("a picture that was taken");
        if len[image] == 0 {
            start[image] = row as i32;
        }
        len[image] += 1;
        // The row after the sequences' states is the query of a first frame.
        previous[row] = if look.is_first { seen.frames as i32 } else { look.lane as i32 };
    }
    [("look_start", start), ("look_len", len), ("previous", previous)]
}
