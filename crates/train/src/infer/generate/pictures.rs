//! Images of prompts: decoded, scaled and cut into patches before anything is computed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use flatout_data::images::{self, ImageSpec};
use flatout_data::vision::{Given, Grid, ImageReader, ImageStore, Patching};
use flatout_models::config::{FoveaConfig, Qwen3VlConfig};

use super::prompt::{Grids, Placed, Prompt};
use crate::refuse;
use crate::run::BESIDE;
use crate::tasks::images::frame_view;
use crate::weights::loaded::Loaded;
use crate::weights::pretrained::folder;
use crate::{Failure, UserError};

/// The largest size of an image file.
const MAX_BYTES: u64 = 1 << 30;

/// Images by number. Images with equal bytes share a number.
#[derive(Clone, Debug, Default)]
pub struct Pictures {
    pub grids: Grids,
    /// Indexed by image: patches [P, patch patch 3], or a frame's pixels [rows, columns, 3].
    pub bytes: Vec<Arc<[u8]>>,
    /// For images that arrive with requests, the number of requests that hold each.
    requests: Vec<usize>,
    /// Percentage of an image's merge blocks that the text model sees.
    pub shown_percent: usize,
    /// The placeholder token of images.
    place: u32,
}

impl Pictures {
    /// Opens image files for a model with a tower, and returns the number of each.
    pub fn open(loaded: &Loaded, paths: &[PathBuf]) -> Result<(Pictures, Vec<usize>), UserError> {
        if loaded.config.model.as_fovea().is_some() {
            refuse!("{} looks at frames, one token each: give them with --frames", loaded.dir.display());
        }
        let Some(vision) = loaded.config.model.as_qwen3_vl() else {
            refuse!("{} has no tower and sees no images beside a text: leave them out", loaded.dir.display());
        };
        let patching = patching(loaded, vision)?;
        let shown_percent = patching.shown_percent;
        let max_pixels = loaded.config.data.max_pixels;
        let reader = ImageReader::new(patching, max_pixels, MAX_BYTES);
        let mut store = ImageStore::new(patching, max_pixels);
        let mut numbers = vec![];
        for path in paths {
            let image = reader.read_file(path.clone()).map_err(|flaw| UserError(flaw.sentence()))?;
            numbers.push(store.number(&image) as usize);
        }
        let mut pictures = Pictures {
            grids: Grids { merge: vision.merge, ..Grids::default() },
            shown_percent,
            place: vision.image_token as u32,
            ..Pictures::default()
        };
        for number in 0..store.count() {
            pictures.push(Picture::of(&store, number as u32)?);
        }
        Ok((pictures, numbers))
    }

    /// Opens the frames in a folder, a file or an archive, in order of their names, for a model that reads frames, and returns
    /// the number of each.
    pub fn open_frames(loaded: &Loaded, path: &Path) -> Result<(Pictures, Vec<usize>), Failure> {
        let tower = frame_tower(loaded)?;
        let max_pixels = loaded.config.data.max_pixels;
        let spec = ImageSpec { path: vec![path.display().to_string()], max_pixels, ..ImageSpec::default() };
        let set = images::open_unlabelled(&spec)?.set;
        let batch = images::ordered(&set, &frame_view(&loaded.config, tower), 0..set.count())?;
        if let Some(sentence) = batch.left_out.into_iter().next() {
            return Err(Failure::User(UserError(sentence)));
        }
        Ok(Pictures::of_frames(batch.pixels.chunks_exact(tower.frame_bytes())))
    }

    /// Frames from their pixels [rows, columns, 3], and the number of each: frames with equal bytes are one picture.
    pub fn of_frames<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> (Pictures, Vec<usize>) {
        let mut pictures = Pictures { grids: Grids { merge: 1, ..Grids::default() }, ..Pictures::default() };
        let mut numbers = vec![];
        for frame in frames {
            let known = pictures.bytes.iter().position(|bytes| **bytes == *frame);
            numbers.push(known.unwrap_or_else(|| {
                // A frame is one token.
                pictures.grids.all.push(Grid::FRAME);
                pictures.grids.shown.push(None);
                pictures.bytes.push(frame.into());
                pictures.bytes.len() - 1
            }));
        }
        (pictures, numbers)
    }

    /// A prompt of text after the frames with these numbers.
    pub fn before(frames: &[usize], tokens: &[u32]) -> Prompt {
        // The embedding is not read at the position of a frame.
        let tokens = [&vec![0; frames.len()], tokens].concat();
        let placed = |(at, picture): (usize, &usize)| Placed { at, picture: *picture };
        Prompt { tokens, images: frames.iter().enumerate().map(placed).collect() }
    }

    /// Replaces the placeholders of a template by pictures, each with its number of tokens.
    pub fn placed(&self, tokens: &[u32], pictures: &[usize]) -> Result<Prompt, UserError> {
        let counts: Vec<usize> = pictures.iter().map(|picture| self.grids.tokens(*picture)).collect();
        let mut prompt = placed(tokens, self.place, &counts)?;
        // The placeholders were numbered in order.
        prompt.images.iter_mut().for_each(|placed| placed.picture = pictures[placed.picture]);
        Ok(prompt)
    }

    fn push(&mut self, Picture { grid, bytes, shown }: Picture) {
        self.grids.all.push(grid);
        self.grids.shown.push(shown);
        self.bytes.push(bytes);
    }

    /// An empty set, for a tower whose pictures arrive with requests.
    pub(super) fn later(merge: usize, shown_percent: usize) -> Pictures {
        Pictures { grids: Grids { merge, ..Grids::default() }, shown_percent, ..Pictures::default() }
    }

    /// The number of a picture that another request holds already; counts one more holder.
    pub(super) fn share(&mut self, picture: &Picture) -> Option<usize> {
        let number = self.bytes.iter().position(|bytes| Arc::ptr_eq(bytes, &picture.bytes))?;
        self.requests[number] += 1;
        Some(number)
    }

    /// Adds a picture for a request and returns its number, which may be that of a removed picture.
    pub(super) fn add(&mut self, picture: Picture) -> usize {
        let number = match self.requests.iter().position(|requests| *requests == 0) {
            None => {
                self.push(picture);
                self.requests.push(0);
                self.bytes.len() - 1
            }
            Some(number) => {
                let Picture { grid, bytes, shown } = picture;
                (self.grids.all[number], self.grids.shown[number], self.bytes[number]) = (grid, shown, bytes);
                number
            }
        };
        self.requests[number] = 1;
        number
    }

    /// Releases a request's hold on a picture; its bytes are freed with the last one.
    pub(super) fn remove(&mut self, number: usize) {
        self.requests[number] -= 1;
        if self.requests[number] == 0 {
            self.bytes[number] = Arc::default();
        }
    }
}

/// An image, scaled and cut into patches. Clones share its bytes.
#[derive(Clone, Debug)]
pub struct Picture {
    grid: Grid,
    bytes: Arc<[u8]>,
    /// The merge blocks that the text model sees, if these are not all.
    shown: Option<Vec<u32>>,
}

impl Picture {
    fn of(store: &ImageStore, number: u32) -> Result<Picture, UserError> {
        let grid = store.get(number).grid;
        let mut bytes = vec![0; grid.patches() * store.patch_bytes()];
        store.patches(number, &mut bytes).map_err(|error| UserError(error.sentence))?;
        Ok(Picture { grid, shown: store.shown(number, &bytes), bytes: bytes.into() })
    }

    pub(super) fn patches(&self) -> usize {
        self.grid.patches()
    }

    fn tokens(&self, merge: usize) -> usize {
        self.shown.as_ref().map_or(self.grid.tokens(merge), Vec::len)
    }
}

/// Makes pictures from the bytes of image files, for a tower whose pictures arrive with requests.
#[derive(Clone, Debug)]
pub struct PictureReader {
    patching: Patching,
    max_pixels: u64,
    /// The placeholder token of images.
    place: u32,
}

/// The most tokens of an image that arrives with a request: larger ones are scaled down.
const MOST_TOKENS_LATER: u64 = 1024;

impl PictureReader {
    /// `None` unless the model reads images of any size. An image takes at most half of a context of `capacity` tokens.
    pub fn of(loaded: &Loaded, capacity: usize) -> Result<Option<PictureReader>, UserError> {
        let Some(vision) = loaded.config.model.as_qwen3_vl() else { return Ok(None) };
        let mut patching = patching(loaded, vision)?;
        let most = MOST_TOKENS_LATER.min(capacity as u64 / 2).max(1) * patching.token_pixels();
        patching.most_pixels = patching.most_pixels.min(most);
        patching.least_pixels = patching.least_pixels.min(patching.most_pixels);
        let (max_pixels, place) = (loaded.config.data.max_pixels, vision.image_token as u32);
        Ok(Some(PictureReader { patching, max_pixels, place }))
    }

    pub(super) fn shown_percent(&self) -> usize {
        self.patching.shown_percent
    }

    /// Tokens of the largest image.
    pub(super) fn most_tokens(&self) -> usize {
        (self.patching.most_pixels / self.patching.token_pixels()) as usize
    }

    pub fn read(&self, bytes: &[u8]) -> Result<Picture, UserError> {
        let reader = ImageReader::new(self.patching, self.max_pixels, MAX_BYTES);
        let image = reader.read(Given::Bytes(bytes), Path::new(""));
        let image = image.map_err(|flaw| UserError(flaw.sentence()))?;
        let mut store = ImageStore::new(self.patching, self.max_pixels);
        let number = store.number(&image);
        Picture::of(&store, number)
    }

    /// Replaces the placeholders of a template by pictures, numbered in this order.
    pub fn placed(&self, tokens: &[u32], pictures: &[Picture]) -> Result<Prompt, UserError> {
        let counts: Vec<usize> = pictures.iter().map(|picture| picture.tokens(self.patching.merge)).collect();
        placed(tokens, self.place, &counts)
    }
}

/// How a model's images are scaled and cut: as in its training, or as the files beside the weights say.
fn patching(loaded: &Loaded, vision: &Qwen3VlConfig) -> Result<Patching, UserError> {
    let beside = loaded.dir.join(BESIDE);
    let beside = if loaded.is_run { &beside } else { &loaded.dir };
    let shown_percent = loaded.config.switches.data.visual_tokens.percent();
    let mut patching =
        Patching { patch: vision.patch, merge: vision.merge, shown_percent, ..Patching::default() };
    [patching.least_pixels, patching.most_pixels] = match loaded.config.data.image_tokens {
        Some(tokens) => tokens.map(|tokens| tokens as u64 * patching.token_pixels()),
        None => folder::image_areas(beside)?,
    };
    Ok(patching)
}

/// Replaces the placeholders of a template, in order, by images with these numbers of tokens.
fn placed(tokens: &[u32], place: u32, counts: &[usize]) -> Result<Prompt, UserError> {
    let places = tokens.iter().filter(|token| **token == place).count();
    if places != counts.len() {
        refuse!(
            "the prompt has {places} places for images as the chat template writes it, and the number of images is {}: leave \
             the token of a place out of the text, or give a template with data.template that writes one an image",
            counts.len()
        );
    }
    let mut prompt = Prompt::default();
    let mut next = counts.iter().enumerate();
    for token in tokens {
        let mut count = 1;
        if *token == place {
            let (picture, own) = next.next().expect("they were counted");
            prompt.images.push(Placed { at: prompt.tokens.len(), picture });
            count = *own;
        }
        prompt.tokens.extend(std::iter::repeat_n(*token, count));
    }
    Ok(prompt)
}

/// The tower of a model that reads frames.
fn frame_tower(loaded: &Loaded) -> Result<&FoveaConfig, UserError> {
    let place = loaded.dir.display();
    match (loaded.config.model.as_fovea(), loaded.config.model.has_tower()) {
        (Some(tower), _) => Ok(tower),
        (None, true) => refuse!("{place} sees images of any size and no frames: give them with --image"),
        (None, false) => refuse!("{place} has no tower, so it cannot read frames: leave them out"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(bytes: &[u8]) -> Picture {
        Picture { grid: Grid { rows: 2, columns: 2 }, bytes: bytes.into(), shown: None }
    }

    #[test]
    fn copies_of_a_picture_are_held_once_and_as_long_as_a_request_has_one() {
        let mut pictures = Pictures::later(2, 100);
        let take = |pictures: &mut Pictures, picture: &Picture| {
            pictures.share(picture).unwrap_or_else(|| pictures.add(picture.clone()))
        };
        // The bytes are equal, but were read twice.
        let (first, second) = (picture(&[1, 2]), picture(&[1, 2]));
        let numbers = [&first, &first, &second, &first].map(|picture| take(&mut pictures, picture));
        assert_eq!((numbers, pictures.bytes.len()), ([0, 0, 1, 0], 2));
        assert_eq!(Arc::strong_count(&first.bytes), 2, "its own and one that is held");
        (0..2).for_each(|_| pictures.remove(0));
        assert_eq!((&*pictures.bytes[0], Arc::strong_count(&first.bytes)), (&[1, 2][..], 2));
        pictures.remove(0);
        assert_eq!((pictures.bytes[0].len(), Arc::strong_count(&first.bytes)), (0, 1));
        // The number is reused for the next picture, and the first picture is a new one when it comes again.
        let third = picture(&[3]);
        assert_eq!([&third, &first].map(|picture| take(&mut pictures, picture)), [0, 2]);
        assert_eq!(
            pictures.bytes.iter().map(|bytes| bytes.to_vec()).collect::<Vec<_>>(),
            [vec![3], vec![1, 2], vec![1, 2]]
        );
    }
}
