//! The images that prompts are about: looked into, scaled and cut into patches before anything is computed.

use std::path::PathBuf;

use flatout_data::vision::{ImageReader, ImageStore, Patching};

use super::prompt::{Grids, Placed, Prompt};
use crate::UserError;
use crate::refuse;
use crate::run::BESIDE;
use crate::weights::loaded::Loaded;
use crate::weights::pretrained::folder;

/// Bytes that a file of an image may have.
const MAX_BYTES: u64 = 1 << 30;

/// Images by their numbers. Those of the same bytes are one.
#[derive(Clone, Debug, Default)]
pub struct Pictures {
    pub grids: Grids,
    /// Of every image [P, patch patch 3].
    pub patches: Vec<Vec<u8>>,
    /// Of a hundred merge blocks of an image, how many a text is shown.
    pub shown_percent: usize,
    /// The token whose places images take.
    place: u32,
}

impl Pictures {
    /// Opens files for a model that sees, and gives the number of each.
    pub fn open(loaded: &Loaded, paths: &[PathBuf]) -> Result<(Pictures, Vec<usize>), UserError> {
        let Some(vision) = loaded.config.model.as_decoder().and_then(|decoder| decoder.vision.as_ref())
        else {
            refuse!("{} has no tower and sees no images beside a text: leave them out", loaded.dir.display());
        };
        let beside = loaded.dir.join(BESIDE);
        let beside = if loaded.is_run { &beside } else { &loaded.dir };
        let shown_percent = loaded.config.switches.data.visual_tokens.percent();
        let mut patching =
            Patching { patch: vision.patch, merge: vision.merge, shown_percent, ..Patching::default() };
        // As it was trained, or as the files beside the weights say.
        [patching.least_pixels, patching.most_pixels] = match loaded.config.data.image_tokens {
            Some(tokens) => tokens.map(|tokens| tokens as u64 * patching.token_pixels()),
            None => folder::image_areas(beside)?,
        };
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
            patches: vec![],
            shown_percent,
            place: vision.image_token as u32,
        };
        for number in 0..store.count() {
            let grid = store.get(number as u32).grid;
            let mut patches = vec![0; grid.patches() * vision.patch_values()];
            store.patches(number as u32, &mut patches).map_err(|error| UserError(error.sentence))?;
            pictures.grids.all.push(grid);
            pictures.grids.shown.push(store.shown(number as u32, &patches));
            pictures.patches.push(patches);
        }
        Ok((pictures, numbers))
    }

    /// Puts pictures into the places that a template left for them, each as many tokens as it takes.
    pub fn placed(&self, tokens: &[u32], pictures: &[usize]) -> Result<Prompt, UserError> {
        let places = tokens.iter().filter(|token| **token == self.place).count();
        if places != pictures.len() {
            refuse!(
                "the prompt has {places} places for images as the chat template writes it, and the number of images is {}: leave \
                 the token of a place out of the text, or give a template with data.template that writes one an image",
                pictures.len()
            );
        }
        let mut prompt = Prompt::default();
        let mut next = pictures.iter();
        for token in tokens {
            let mut count = 1;
            if *token == self.place {
                let picture = *next.next().expect("they were counted");
                prompt.images.push(Placed { at: prompt.tokens.len(), picture });
                count = self.grids.tokens(picture);
            }
            prompt.tokens.extend(std::iter::repeat_n(*token, count));
        }
        Ok(prompt)
    }
}
