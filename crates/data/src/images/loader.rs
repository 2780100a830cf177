//! Loads images in their global order, ahead of time, by threads.
//!
//! The series of all samples is a permutation of the set per epoch. A sample goes to the rank that has its lane. Thread `t` of
//! `n` loads every n-th of its rank's samples into a bounded queue of its own. The reader therefore knows which queue holds the
//! next one, and neither order nor pixels depend on the number of threads.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::CHANNELS;
use super::apply_view::apply_view;
use super::flaw::Flaw;
use super::set::ImageSet;
use super::stored::ImageError;
use super::view::View;
use crate::error::DataError;
use crate::examples::updates::ExampleCursor;
use crate::formats::{OnError, Skipped, SourceLocation};
use crate::order::documents::Spent;
use crate::order::loader::LoaderOptions;
use crate::order::permutation::Order;
use crate::order::stall::Waited;
use crate::random::key;

/// A batch of images.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ImageBatch {
    /// `height * width * 3` bytes per image: rows from the top, three bytes (red, green, blue) per pixel.
    pub pixels: Vec<u8>,
    /// In place of pixels, where all images are in a table: six numbers per image, which are its index, the first column and
    /// row of its crop, columns and rows, and 1 where it is mirrored.
    pub parts: Vec<i32>,
    /// Class of each image; -1 where it has none or was skipped.
    pub labels: Vec<i32>,
    /// Index of each image in the series of all samples.
    pub samples: Vec<u64>,
    /// Passes over the set after this batch.
    pub epoch: f64,
    /// Time the caller waited for images, by cause.
    pub waited: Waited,
    /// For every image that could not be decoded, where that is allowed: its place and the reason. Its pixels are grey, and it
    /// has no label.
    pub left_out: Vec<String>,
}

impl ImageBatch {
    /// A subset of these images, by index.
    pub fn picked(&self, places: &[usize]) -> ImageBatch {
        let count = self.count().max(1);
        let of_image = |all: usize, place: usize| place * (all / count)..(place + 1) * (all / count);
        let pixels = places.iter().flat_map(|place| &self.pixels[of_image(self.pixels.len(), *place)]);
        let parts = places.iter().flat_map(|place| &self.parts[of_image(self.parts.len(), *place)]);
        ImageBatch {
            pixels: pixels.copied().collect(),
            parts: parts.copied().collect(),
            labels: places.iter().map(|place| self.labels[*place]).collect(),
            samples: places.iter().map(|place| self.samples[*place]).collect(),
            epoch: self.epoch,
            ..ImageBatch::default()
        }
    }

    pub fn count(&self) -> usize {
        self.labels.len()
    }
}

/// Endless training images from a cursor on.
pub struct ImageLoader {
    cursor: ExampleCursor,
    options: LoaderOptions,
    images: u64,
    waited: Waited,
    /// One per thread. Dropped first, which ends the threads.
    queues: Vec<Receiver<Result<LoadedImage, DataError>>>,
    /// The queue that holds the next image.
    next: usize,
    threads: Vec<JoinHandle<()>>,
    failed: Option<DataError>,
    left_out: Skipped,
    /// Number of consecutive skipped images.
    consecutive_skipped: u64,
}

/// Most consecutive skipped images: nothing is learned where all are skipped.
const MOST_CONSECUTIVE: u64 = 1000;

/// An image as a thread sends it.
pub(super) struct LoadedImage {
    pixels: Vec<u8>,
    pub label: i32,
    spent: Spent,
    flaw: Option<(Flaw, SourceLocation)>,
}

impl ImageLoader {
    /// The cursor of a new run.
    pub fn start(set: &ImageSet, seed: u64) -> ExampleCursor {
        ExampleCursor { sample: 0, data: mark_of(set, seed) }
    }

    /// Refuses a cursor of other images or another seed, and a set without images.
    pub fn new(
        set: Arc<ImageSet>,
        view: View,
        seed: u64,
        cursor: ExampleCursor,
        options: LoaderOptions,
    ) -> Result<Self, DataError> {
        check_cursor(&set, seed, &cursor)?;
        let count = options.threads.max(1);
        let queue_images = (options.queue_bytes / count / (view.height * view.width * CHANNELS)).max(1);
        let (first, lanes) = (cursor.sample, options.lanes);
        let (mut queues, mut threads) = (Vec::new(), Vec::new());
        for thread in 0..count {
            let (sender, queue) = sync_channel(queue_images);
            let series = Series { set: set.clone(), view, seed };
            let own = (first..).filter(move |sample| lanes.of_sample(*sample).is_some());
            let work = move || series.make(own.skip(thread).step_by(count), &sender);
            let name = format!("images-{thread}");
            threads.push(std::thread::Builder::new().name(name).spawn(work).map_err(|error| {
                DataError::environment(format!("A loader thread cannot be started: {error}."))
            })?);
            queues.push(queue);
        }
        let (images, waited, failed) = (set.count(), Waited::default(), None);
        let (left_out, consecutive_skipped) = (Skipped::default(), 0);
        Ok(Self {
            cursor,
            options,
            images,
            waited,
            queues,
            next: 0,
            threads,
            failed,
            left_out,
            consecutive_skipped,
        })
    }

    /// This rank's images among the next `count` of all ranks. An error is final: the cursor stays before the requested images,
    /// and every later call returns the same error.
    pub fn next_images(&mut self, count: usize) -> Result<ImageBatch, DataError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let mut batch = ImageBatch::default();
        let (all, lanes) = (self.cursor.sample..self.cursor.sample + count as u64, self.options.lanes);
        for sample in all.filter(|sample| lanes.of_sample(*sample).is_some()) {
            match self.receive(&mut batch.waited).and_then(|made| self.count_skipped(made)) {
                Ok(made) => {
                    batch.left_out.extend(made.message());
                    if batch.samples.is_empty() {
                        batch.pixels.reserve_exact(count * made.pixels.len());
                    }
                    batch.pixels.extend(&made.pixels);
                    batch.labels.push(made.label);
                    batch.samples.push(sample);
                }
                Err(error) => {
                    self.failed = Some(error.clone());
                    return Err(error);
                }
            }
        }
        self.cursor.sample += count as u64;
        self.waited += batch.waited;
        batch.epoch = self.cursor.sample as f64 / self.images as f64;
        Ok(batch)
    }

    /// Position of the image after the last one returned. Equal on all ranks that have read equally many.
    pub fn cursor(&self) -> &ExampleCursor {
        &self.cursor
    }

    /// Total time that `next_images` has waited, by cause.
    pub fn waited(&self) -> Waited {
        self.waited
    }

    /// Images skipped so far because they could not be decoded.
    pub fn left_out(&self) -> &Skipped {
        &self.left_out
    }

    /// Counts a skipped image, and fails after too many in a row.
    fn count_skipped(&mut self, made: LoadedImage) -> Result<LoadedImage, DataError> {
        let Some((flaw, place)) = &made.flaw else {
            self.consecutive_skipped = 0;
            return Ok(made);
        };
        self.left_out.note(flaw.reason, place.clone());
        self.consecutive_skipped += 1;
        if self.consecutive_skipped >= MOST_CONSECUTIVE.min(self.images) {
            return Err(DataError::input(format!(
                "The last {} images could not be decoded ({}): there is nothing to learn from.",
                self.consecutive_skipped, self.left_out
            )));
        }
        Ok(made)
    }

    fn receive(&mut self, waited: &mut Waited) -> Result<LoadedImage, DataError> {
        let queue = &self.queues[self.next];
        let made = match queue.try_recv() {
            Ok(made) => made?,
            Err(_) => {
                let since = Instant::now();
                let made = queue.recv().expect("a loader thread makes images until its reader is gone")?;
                *waited += Waited::new(since.elapsed(), made.spent, Duration::ZERO);
                made
            }
        };
        self.next = (self.next + 1) % self.queues.len();
        Ok(made)
    }
}

impl Drop for ImageLoader {
    fn drop(&mut self) {
        self.queues.clear();
        for thread in self.threads.drain(..) {
            // A panic in a thread was printed where it happened and reached the reader as a closed queue.
            let _ = thread.join();
        }
    }
}

/// Refuses a set without images, and a cursor of other images or another seed.
pub(super) fn check_cursor(set: &ImageSet, seed: u64, cursor: &ExampleCursor) -> Result<(), DataError> {
    if set.count() == 0 {
        return Err(DataError::input("There is no image to train on: check data.path."));
    }
    if cursor.data != mark_of(set, seed) {
        return Err(DataError::input(
            "The images are not those this run began with (files, classes, sides or seed changed), so it cannot go \
             on exactly: restore the data, or begin a new run.",
        ));
    }
    Ok(())
}

/// The hash by which a cursor identifies its data.
pub(super) fn mark_of(set: &ImageSet, seed: u64) -> String {
    format!("{:016x}", key(key(set.mark, seed), set.count()))
}

/// The samples of a run.
struct Series {
    set: Arc<ImageSet>,
    view: View,
    seed: u64,
}

impl Series {
    /// Loads samples until the reader is gone or one fails.
    fn make(&self, samples: impl Iterator<Item = u64>, queue: &SyncSender<Result<LoadedImage, DataError>>) {
        let order = Order::new(Some(self.set.count()), self.seed);
        let mut buffers = Buffers::default();
        for sample in samples {
            let made =
                make(&self.set, &self.view, order.document(sample), key(self.seed, sample), &mut buffers);
            let failed = made.is_err();
            if queue.send(made).is_err() || failed {
                return;
            }
        }
    }
}

impl LoadedImage {
    fn message(&self) -> Option<String> {
        self.flaw.as_ref().map(|(flaw, place)| format!("{place}: {}", flaw.said))
    }
}

/// The buffers of a thread: bytes of a file, and decoded pixels.
#[derive(Default)]
pub(super) struct Buffers {
    bytes: Vec<u8>,
    pixels: Vec<u8>,
}

/// Grey level of a skipped image.
const GREY: u8 = 128;

/// Loads image `index` of the set through a view; `key` seeds random choices.
pub(super) fn make(
    set: &ImageSet,
    view: &View,
    index: u64,
    key: u64,
    buffers: &mut Buffers,
) -> Result<LoadedImage, DataError> {
    let index = set.at(index);
    let label = set.images.class(index).map_or(-1, |class| class as i32);
    let pixels = vec![0; view.height * view.width * CHANNELS];
    let mut made = LoadedImage { pixels, label, spent: Spent::default(), flaw: None };
    match fill(set, view, index, key, buffers, &mut made) {
        Ok(()) => {}
        Err(ImageError::Failed(error)) => return Err(error),
        Err(ImageError::Invalid(flaw)) if set.on_error == OnError::Fail => {
            return Err(flaw.error(&set.images.place(index)));
        }
        Err(ImageError::Invalid(flaw)) => {
            made.pixels.fill(GREY);
            made.label = -1;
            made.flaw = Some((flaw, set.images.place(index)));
        }
    }
    Ok(made)
}

fn fill(
    set: &ImageSet,
    view: &View,
    index: u64,
    key: u64,
    Buffers { bytes, pixels }: &mut Buffers,
    made: &mut LoadedImage,
) -> Result<(), ImageError> {
    let since = Instant::now();
    let stored = set.images.stored(index, bytes)?;
    made.spent.reading = since.elapsed();
    apply_view(stored, view, key, set.max_pixels, pixels, &mut made.pixels)?;
    made.spent.decoding = since.elapsed() - made.spent.reading;
    Ok(())
}

/// Images of a set in its own order, for evaluation, loaded on all cores.
pub fn ordered(set: &ImageSet, view: &View, range: std::ops::Range<u64>) -> Result<ImageBatch, DataError> {
    assert!(range.end <= set.count(), "{range:?} of {} images", set.count());
    let samples: Vec<u64> = range.collect();
    let made = samples
        .par_iter()
        .map_init(Buffers::default, |buffers, index| make(set, view, *index, key(0, *index), buffers));
    let made: Vec<LoadedImage> = made.collect::<Result<_, _>>()?;
    let mut batch = ImageBatch { samples, ..ImageBatch::default() };
    batch.labels.extend(made.iter().map(|made| made.label));
    batch.left_out.extend(made.iter().filter_map(LoadedImage::message));
    batch.pixels.reserve_exact(made.iter().map(|made| made.pixels.len()).sum());
    made.iter().for_each(|made| batch.pixels.extend(&made.pixels));
    Ok(batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lanes;
    use crate::images::stored::Stored;
    use crate::images::{Augment, Changes, ErasedWith, Erasing, Filter, ImageSpec, RandAugment, open};

    const CHANGES: Changes = Changes {
        rand_augment: Some(RandAugment {
            operations: 2,
            probability: 0.7,
            magnitude: 9.0,
            noise: 0.5,
            fill: [1, 2, 3],
        }),
        erasing: Some(Erasing {
            probability: 0.5,
            area: (0.02, 0.3),
            ratio: (0.3, 3.0),
            with: ErasedWith::Noise,
            mean: [0.5; 3],
            deviation: [0.25; 3],
        }),
    };

    const VIEW: View = View {
        width: 12,
        height: 10,
        augment: Augment::Train { scale: (0.5, 1.0), ratio: (0.75, 4.0 / 3.0), flip: 0.5, changes: CHANGES },
        filter: Filter::Bilinear,
    };

    fn set(images: u64) -> Arc<ImageSet> {
        let spec = ImageSpec { images, width: 16, height: 16, ..ImageSpec::default() };
        open(&spec, &mut |_| {}).unwrap().train
    }

    fn loader(images: u64, cursor: Option<ExampleCursor>, options: LoaderOptions) -> ImageLoader {
        let set = set(images);
        let cursor = cursor.unwrap_or_else(|| ImageLoader::start(&set, 7));
        ImageLoader::new(set, VIEW, 7, cursor, options).unwrap()
    }

    fn next(loader: &mut ImageLoader, count: usize) -> ImageBatch {
        ImageBatch { waited: Waited::default(), ..loader.next_images(count).unwrap() }
    }

    #[test]
    fn one_two_and_seven_threads_give_the_same_images() {
        let all = [1, 2, 7].map(|threads| {
            let options = LoaderOptions { threads, queue_bytes: 1, ..LoaderOptions::default() };
            let mut loader = loader(37, None, options);
            ((0..12).map(|_| next(&mut loader, 5)).collect::<Vec<_>>(), loader.cursor().clone())
        });
        assert_eq!(all[0], all[1]);
        assert_eq!(all[0], all[2]);
    }

    #[test]
    fn every_cursor_leads_to_the_same_images_again() {
        let mut unbroken = loader(23, None, LoaderOptions::default());
        let mut cursors = vec![unbroken.cursor().clone()];
        let mut batches = Vec::new();
        for _ in 0..40 {
            batches.push(next(&mut unbroken, 3));
            cursors.push(unbroken.cursor().clone());
        }
        assert!(batches[39].epoch > 5.0);
        for at in (0..36).step_by(5) {
            let saved = serde_json::to_string(&cursors[at]).unwrap();
            let options = LoaderOptions { threads: 3, ..LoaderOptions::default() };
            let mut resumed = loader(23, Some(serde_json::from_str(&saved).unwrap()), options);
            batches[at..at + 4].iter().for_each(|batch| assert_eq!(next(&mut resumed, 3), *batch));
            assert_eq!(*resumed.cursor(), cursors[at + 4]);
        }
    }

    #[test]
    fn an_epoch_sees_every_image_once_and_the_next_sees_it_otherwise() {
        let mut loader = loader(30, None, LoaderOptions::default());
        let (first, second) = (next(&mut loader, 30), next(&mut loader, 30));
        for epoch in [&first, &second] {
            let mut labels = epoch.labels.clone();
            labels.sort_unstable();
            assert!(labels.iter().copied().eq((0..30).map(|at| at / 3)), "three of each class");
        }
        assert!(first.samples.iter().copied().eq(0..30) && second.samples.iter().copied().eq(30..60));
        assert_ne!(first.labels, second.labels);
        let bytes = VIEW.width * VIEW.height * CHANNELS;
        assert!(
            !second.pixels.chunks(bytes).any(|image| first.pixels.chunks(bytes).any(|other| image == other))
        );
    }

    #[test]
    fn ranks_share_the_images_of_one() {
        let mut alone = loader(31, None, LoaderOptions::default());
        let whole = next(&mut alone, 24);
        let bytes = VIEW.width * VIEW.height * CHANNELS;
        for rank in 0..3 {
            let lanes = Lanes { first: rank, count: 1, of: 3, together: 1, batch: 12 };
            let options = LoaderOptions { lanes, ..LoaderOptions::default() };
            let mut shared = loader(31, None, options);
            let parts = [next(&mut shared, 15), next(&mut shared, 9)];
            assert_eq!(*shared.cursor(), *alone.cursor());
            let samples: Vec<u64> = parts.iter().flat_map(|part| part.samples.clone()).collect();
            assert!(samples.iter().copied().eq((rank as u64..24).step_by(3)));
            let pixels: Vec<u8> = parts.iter().flat_map(|part| part.pixels.clone()).collect();
            for (image, sample) in pixels.chunks(bytes).zip(samples) {
                assert!(image == &whole.pixels[sample as usize * bytes..][..bytes]);
            }
        }
    }

    #[test]
    fn other_images_or_seeds_refuse_the_cursor() {
        let cursor = ImageLoader::start(&set(30), 7);
        let of = |images, seed| {
            ImageLoader::new(set(images), VIEW, seed, cursor.clone(), LoaderOptions::default()).err()
        };
        assert!(of(30, 7).is_none());
        assert!(of(31, 7).unwrap().sentence.starts_with("The images are not those"));
        assert!(of(30, 8).is_some());
    }

    #[test]
    fn evaluation_reads_a_range_in_order() {
        let set = set(50);
        let view =
            View { width: 16, height: 16, augment: Augment::Centre { share: 1.0 }, filter: Filter::Bilinear };
        let batch = ordered(&set, &view, 10..33).unwrap();
        assert!(batch.samples.iter().copied().eq(10..33));
        assert!(batch.labels.iter().copied().eq((10..33).map(|index| index % 10)));
        let mut buffer = Vec::new();
        let Stored::Pixels(picture) = set.images.stored(12, &mut buffer).unwrap() else { panic!("pixels") };
        assert_eq!(&batch.pixels[2 * 768..3 * 768], picture.rgb);
    }

    #[test]
    fn waits_are_explained() {
        let options = LoaderOptions { threads: 1, queue_bytes: 1, ..LoaderOptions::default() };
        let mut loader = loader(37, None, options);
        let batches: Vec<ImageBatch> = (0..40).map(|_| loader.next_images(5).unwrap()).collect();
        let waited = loader.waited();
        assert!(waited.packing < Duration::from_micros(1), "only the remainder of rounding");
        assert_eq!(waited.total, waited.reading + waited.decoding + waited.packing + waited.scheduling);
        assert_eq!(waited.total, batches.iter().map(|batch| batch.waited.total).sum());
        // The reader is faster than a single generating thread, so it waits.
        assert!(!waited.total.is_zero());
    }

    #[test]
    fn dropping_a_loader_ends_its_threads() {
        let set = set(10);
        let options = LoaderOptions { threads: 4, ..LoaderOptions::default() };
        let cursor = ImageLoader::start(&set, 7);
        let loader = ImageLoader::new(set.clone(), VIEW, 7, cursor, options).unwrap();
        assert!(Arc::strong_count(&set) > 1);
        drop(loader);
        assert_eq!(Arc::strong_count(&set), 1, "a thread still holds the images");
    }
}
