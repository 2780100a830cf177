//! Small sets as one table of bytes, to stay where they are used, and what every sample sees of it: instead of pixels,
//! six numbers a sample cross the bus.

use super::set::ImageSet;
use super::stored::{Stored, Trouble};
use super::view::View;
use crate::error::DataError;
use crate::order::Order;
use crate::random::key;

/// All images of a set, of one size: `count * height * width * 3` bytes, laid out as in a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByteTable {
    pub height: usize,
    pub width: usize,
    pub pixels: Vec<u8>,
    /// The class of each; -1 where it has none.
    pub labels: Vec<i32>,
}

/// What a sample sees: a part of an image of the table, in pixels. [`super::View`] says what becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    pub image: u64,
    pub left: u32,
    pub top: u32,
    pub width: u32,
    pub height: u32,
    pub is_flipped: bool,
}

impl ByteTable {
    /// The table of a set; `None` where its images lie encoded, are of several sizes, or take more than `most_bytes`.
    pub fn of(set: &ImageSet, most_bytes: usize) -> Result<Option<Self>, DataError> {
        let mut table = Self { height: 0, width: 0, pixels: Vec::new(), labels: Vec::new() };
        let mut buffer = Vec::new();
        for index in 0..set.count() {
            let at = set.at(index);
            let (width, height, rgb) = match set.images.stored(at, &mut buffer) {
                Ok(Stored::Pixels(picture)) => (picture.width, picture.height, picture.rgb),
                Ok(Stored::Encoded(_)) | Err(Trouble::Wrong(_)) => return Ok(None),
                Err(Trouble::Failed(error)) => return Err(error),
            };
            if index == 0 {
                (table.width, table.height) = (width, height);
                let bytes =
                    (set.count() as usize).checked_mul(rgb.len()).filter(|bytes| *bytes <= most_bytes);
                let Some(bytes) = bytes else { return Ok(None) };
                table.pixels.reserve_exact(bytes);
            }
            if (table.width, table.height) != (width, height) {
                return Ok(None);
            }
            table.pixels.extend(rgb);
            table.labels.push(set.images.class(at).map_or(-1, |class| class as i32));
        }
        Ok((set.count() > 0).then_some(table))
    }

    /// What a sample of the series sees: the same that a loader of the same set, view and seed cuts out.
    pub fn draw(&self, view: &View, seed: u64, sample: u64) -> Draw {
        let image = Order::new(Some(self.labels.len() as u64), seed).document(sample);
        let crop = view.crop(self.width, self.height, key(seed, sample));
        let [left, top, width, height] =
            [crop.left, crop.top, crop.width, crop.height].map(|side| side as u32);
        Draw { image, left, top, width, height, is_flipped: crop.is_flipped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::resample::{Part, resample};
    use crate::images::stored::Picture;
    use crate::images::{Augment, ImageLoader, ImageSpec, open};
    use crate::loader::LoaderOptions;

    #[test]
    fn draws_of_a_table_see_what_a_loader_gives() {
        let spec = ImageSpec { images: 40, width: 16, height: 14, ..ImageSpec::default() };
        let set = open(&spec, &mut |_| {}).unwrap().train;
        let table = ByteTable::of(&set, 1 << 20).unwrap().unwrap();
        assert_eq!((table.width, table.height, table.pixels.len()), (16, 14, 40 * 16 * 14 * 3));
        let augment = Augment::Train { scale: (0.3, 1.0), ratio: (0.75, 4.0 / 3.0), flip: 0.5 };
        let view = View { width: 9, height: 11, augment };
        let cursor = ImageLoader::start(&set, 3);
        let mut loader = ImageLoader::new(set.clone(), view, 3, cursor, LoaderOptions::default()).unwrap();
        let batch = loader.next_images(90).unwrap();
        for (pixels, sample) in batch.pixels.chunks(9 * 11 * 3).zip(&batch.samples) {
            let draw = table.draw(&view, 3, *sample);
            let image = table.width * table.height * 3;
            let rgb = &table.pixels[draw.image as usize * image..][..image];
            let [left, top, width, height] = [draw.left, draw.top, draw.width, draw.height].map(f64::from);
            let mut out = vec![0; pixels.len()];
            let part = Part { left, top, width, height, is_flipped: draw.is_flipped };
            resample(Picture { width: table.width, height: table.height, rgb }, part, 9, 11, &mut out);
            assert_eq!(out, pixels);
            assert_eq!(table.labels[draw.image as usize], batch.labels[*sample as usize]);
        }
        assert_eq!(ByteTable::of(&set, 40 * 16 * 14 * 3 - 1).unwrap(), None);
    }
}
