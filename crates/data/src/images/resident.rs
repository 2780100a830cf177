//! A small set as one table of bytes that stays on the device, with the crops of samples.
//!
//! Six numbers per sample are transferred in place of pixels.

use std::sync::Arc;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;

use super::CHANNELS;
use super::loader::{ImageBatch, check_cursor, mark_of};
use super::set::ImageSet;
use super::stored::{ImageError, Stored};
use super::view::View;
use crate::error::DataError;
use crate::examples::updates::ExampleCursor;
use crate::order::loader::LoaderOptions;
use crate::order::permutation::Order;
use crate::random::key;

/// All images of a set, of one size: `count * height * width * 3` bytes, laid out as in a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByteTable {
    pub height: usize,
    pub width: usize,
    pub pixels: Vec<u8>,
}

impl ByteTable {
    /// Number, height and width of the images in the table; `None` where images are encoded, which may have any size.
    pub fn extents(set: &ImageSet) -> Option<[usize; 3]> {
        let [height, width] = set.images.size()?;
        (set.count() > 0).then_some([set.count() as usize, height, width])
    }

    /// The table of a set, where it has one.
    pub fn of(set: &ImageSet) -> Result<Option<Self>, DataError> {
        let Some([count, height, width]) = Self::extents(set) else { return Ok(None) };
        let image = height * width * CHANNELS;
        let mut pixels = vec![0; count * image];
        let put = |buffer: &mut Vec<u8>, (index, out): (usize, &mut [u8])| match set
            .images
            .stored(set.at(index as u64), buffer)
        {
            Ok(Stored::Pixels(picture)) => {
                out.copy_from_slice(picture.rgb);
                Ok(())
            }
            Err(ImageError::Failed(error)) => Err(error),
            Ok(Stored::Encoded(_)) | Err(ImageError::Invalid(_)) => {
                unreachable!("a source of one size has pixels")
            }
        };
        let wait = waits::begin("decoding images", Unit::Things("images"), Some(count as u64));
        let images = pixels.par_chunks_exact_mut(image).enumerate().inspect(|_| wait.add(1));
        images.map_init(Vec::new, put).collect::<Result<(), _>>()?;
        Ok(Some(Self { height, width, pixels }))
    }
}

/// Endless crops of a table from a cursor on: the same parts of the same images in the same order as a loader of the same set,
/// view and seed; it shares that loader's cursors.
pub struct PartLoader {
    set: Arc<ImageSet>,
    view: View,
    seed: u64,
    /// Height and width of an image.
    size: [usize; 2],
    order: Order,
    cursor: ExampleCursor,
    options: LoaderOptions,
}

impl PartLoader {
    /// For a set that has a table, and a view that changes no pixels. Refuses a cursor of other images or another seed.
    pub fn new(
        set: Arc<ImageSet>,
        view: View,
        seed: u64,
        cursor: ExampleCursor,
        options: LoaderOptions,
    ) -> Result<Self, DataError> {
        check_cursor(&set, seed, &cursor)?;
        assert!(view.changes().is_none(), "parts of a table are seen as they are");
        let [count, height, width] = ByteTable::extents(&set).expect("a set with a table");
        let order = Order::new(Some(count as u64), seed);
        Ok(Self { set, view, seed, size: [height, width], order, cursor, options })
    }

    /// The cursor of a new run.
    pub fn start(set: &ImageSet, seed: u64) -> ExampleCursor {
        ExampleCursor { sample: 0, data: mark_of(set, seed) }
    }

    /// This rank's samples among the next `count` of all ranks: crops without pixels.
    pub fn next_images(&mut self, count: usize) -> ImageBatch {
        let mut batch = ImageBatch::default();
        let (all, lanes) = (self.cursor.sample..self.cursor.sample + count as u64, self.options.lanes);
        for sample in all.filter(|sample| lanes.of_sample(*sample).is_some()) {
            let image = self.order.document(sample);
            let crop = self.view.crop(self.size[1], self.size[0], key(self.seed, sample));
            let numbers = [image as usize, crop.left, crop.top, crop.width, crop.height];
            batch.parts.extend(numbers.map(|number| number as i32));
            batch.parts.push(i32::from(crop.is_flipped));
            batch.labels.push(self.set.class(image).map_or(-1, |class| class as i32));
            batch.samples.push(sample);
        }
        self.cursor.sample += count as u64;
        batch.epoch = self.cursor.sample as f64 / self.set.count() as f64;
        batch
    }

    pub fn cursor(&self) -> &ExampleCursor {
        &self.cursor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::resample::{Region, Scaling, resample};
    use crate::images::stored::Picture;
    use crate::images::{Augment, Changes, Filter, ImageLoader, ImageSpec, open};

    #[test]
    fn parts_of_a_table_match_the_loader() {
        let spec = ImageSpec { images: 40, width: 16, height: 14, ..ImageSpec::default() };
        let set = open(&spec, &mut |_| {}).unwrap().train;
        let table = ByteTable::of(&set).unwrap().unwrap();
        assert_eq!(ByteTable::extents(&set), Some([40, 14, 16]));
        assert_eq!((table.width, table.height, table.pixels.len()), (16, 14, 40 * 16 * 14 * 3));
        let changes = Changes::NONE;
        let augment = Augment::Train { scale: (0.3, 1.0), ratio: (0.75, 4.0 / 3.0), flip: 0.5, changes };
        let view = View { width: 9, height: 11, augment, filter: Filter::Bilinear };
        let lanes = crate::Lanes { first: 1, count: 1, of: 2, together: 1, batch: 30 };
        let options = LoaderOptions { lanes, ..LoaderOptions::default() };
        let cursor = PartLoader::start(&set, 3);
        assert_eq!(cursor, ImageLoader::start(&set, 3));
        let mut loader = ImageLoader::new(set.clone(), view, 3, cursor.clone(), options).unwrap();
        let mut parts = PartLoader::new(set.clone(), view, 3, cursor, options).unwrap();
        for _ in 0..3 {
            let (given, drawn) = (loader.next_images(30).unwrap(), parts.next_images(30));
            assert_eq!(
                (&drawn.labels, &drawn.samples, drawn.epoch),
                (&given.labels, &given.samples, given.epoch)
            );
            assert_eq!(parts.cursor(), loader.cursor());
            for (pixels, part) in given.pixels.chunks(9 * 11 * 3).zip(drawn.parts.chunks(6)) {
                let image = table.width * table.height * 3;
                let rgb = &table.pixels[part[0] as usize * image..][..image];
                let [left, top, width, height] = [1, 2, 3, 4].map(|i| f64::from(part[i]));
                let mut out = vec![0; pixels.len()];
                let part = Region { left, top, width, height, is_flipped: part[5] == 1 };
                let picture = Picture { width: table.width, height: table.height, rgb };
                let scaling = Scaling { filter: Filter::Bilinear, whole: false };
                resample(picture, part, scaling, (9, 11), &mut out);
                assert_eq!(out, pixels);
            }
        }
        let other = ExampleCursor { sample: 0, data: "other".into() };
        assert!(PartLoader::new(set, view, 3, other, options).is_err());
    }
}
