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

/// Images that one run of the tower reads where they come later.
const MOST_IMAGES: usize = 16;

/// The tower of a prefill plan, with the pictures it may be shown.
pub(super) struct Tower {
    pub pictures: Pictures,
    kind: TowerKind,
    /// Bytes of a patch or of a frame.
    bytes: usize,
    /// The pictures that its inputs hold now.
    shown: Option<Vec<usize>>,
}

enum TowerKind {
    Patches {
        seen: SeenPatches,
        /// Learned positions a side.
        positions: usize,
        /// Patches of a token.
        block: usize,
    },
    /// Every sequence looks at one frame in a run, by the state behind what it read before.
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

/// A sequence that looks at a picture.
#[derive(Clone, Copy, Debug)]
struct LookAt {
    picture: usize,
    lane: usize,
    /// Nothing was read before it.
    is_first: bool,
}

impl Tower {
    /// Of a plan that reads `tokens` at a time of `sequences` sequences.
    pub fn new(vision: &Vision, pictures: Pictures, tokens: usize, sequences: usize) -> Tower {
        let (kind, bytes) = match vision {
            Vision::Qwen3Vl(vision) => {
                let all: usize = pictures.grids.all.iter().map(|grid| grid.patches()).sum();
                // Tokens that are read at once are of images that have no more patches than these.
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

    /// Of a plan that reads `tokens` at a time, for pictures that come later.
    pub fn later(vision: &Qwen3VlConfig, reader: &PictureReader, tokens: usize) -> Tower {
        let largest = reader.most_tokens() * vision.block();
        let patches = tokens * 100 / reader.shown_percent().max(1) * vision.block();
        let seen = SeenPatches { patches: patches.max(largest), images: MOST_IMAGES.min(tokens), largest };
        let kind = TowerKind::Patches { seen, positions: vision.positions, block: vision.block() };
        let pictures = Pictures::later(vision.merge, reader.shown_percent());
        Tower { pictures, kind, bytes: vision.patch_values(), shown: None }
    }

    /// Takes a picture that is smaller than the largest for a request, and gives its number.
    pub fn add(&mut self, picture: Picture) -> usize {
        if let Some(number) = self.pictures.share(&picture) {
            return number;
        }
        let number = self.pictures.add(picture);
        // The inputs may hold another one of this number.
        if self.shown.as_ref().is_some_and(|shown| shown.contains(&number)) {
            self.shown = None;
        }
        number
    }

    /// Whether a picture may be shown.
    pub fn fits(&self, picture: &Picture) -> bool {
        matches!(self.kind, TowerKind::Patches { seen, .. } if picture.patches() <= seen.largest)
    }

    pub fn seen(&self) -> ImageExtents {
        match self.kind {
            TowerKind::Patches { seen, .. } => ImageExtents::Patches(seen),
            TowerKind::Frames { seen, .. } => ImageExtents::Frames(seen),
        }
    }

    /// Takes a picture of a sequence that has read `read` tokens among those that a run shows, where there is room for it. A
    /// frame is looked at by the state behind what was read before, so it is the first that a run reads.
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
                // Those at one picture are neighbours.
                let last = showing.looks.iter().rposition(|other| other.picture == picture);
                showing.looks.insert(last.map_or(0, |last| last + 1), look);
                true
            }
        }
    }

    /// The first row of the features of a picture that a run shows a sequence.
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

    /// Writes the inputs. Images of an earlier run stay where the same pictures are shown, or none are.
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

/// Where the looks at each picture lie, and whose state makes the query of each.
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
        // The row behind the sequences' states is the query of a first frame.
        previous[row] = if look.is_first { seen.frames as i32 } else { look.lane as i32 };
    }
    [("look_start", start), ("look_len", len), ("previous", previous)]
}
