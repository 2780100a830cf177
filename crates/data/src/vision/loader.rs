//! Loads updates of examples with the rows of their images, ahead of time.
//!
//! One thread lays out updates in order, and a pool of threads decodes the images of an update, or reads their features.
//! Neither order nor bytes depend on the number of threads.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::feature_cache::StoredFeatures;
use super::frame_store::FrameStore;
use super::store::ImageStore;
use crate::error::DataError;
use crate::examples::layout::MicroBatch;
use crate::examples::updates::{ExampleCursor, ExampleUpdate, Updates};
use crate::order::documents::Spent;
use crate::order::stall::Waited;

/// An update and, for each of its micro-batches, the rows of its images, padded to the room of the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct SeenUpdate {
    pub update: ExampleUpdate,
    pub rows: Vec<Vec<u8>>,
}

/// The form in which images enter a plan.
#[derive(Debug, Clone)]
pub enum ImageRows {
    /// Patches of images of any size, decoded on demand.
    Patches(Arc<ImageStore>),
    /// Precomputed features of a tower. Each row corresponds to this number of patches.
    Features(Arc<StoredFeatures>, usize),
    /// Whole images of one size, each once.
    Frames(Arc<FrameStore>),
}

impl ImageRows {
    /// The rows of a micro-batch's images in order, padded to the room there is.
    pub fn of(&self, batch: &mut MicroBatch) -> Result<Vec<u8>, DataError> {
        match self {
            ImageRows::Patches(store) => patches(store, batch),
            ImageRows::Features(features, patches_of_a_row) => features.of(batch, *patches_of_a_row),
            ImageRows::Frames(store) => store.rows(batch),
        }
    }
}

/// Endless updates from a cursor on.
pub struct ImageLoader {
    queue: Receiver<Result<LoadedUpdate, DataError>>,
    cursor: ExampleCursor,
    waited: Waited,
}

struct LoadedUpdate {
    seen: SeenUpdate,
    /// Position of the next update.
    cursor: ExampleCursor,
    spent: Duration,
}

/// Number of updates prepared ahead of the current one.
const AHEAD: usize = 2;

impl ImageLoader {
    /// Continues from the position of `updates`, with this many threads for images.
    pub fn new(updates: Updates, rows: ImageRows, threads: usize) -> Result<ImageLoader, DataError> {
        let (sender, queue) = sync_channel(AHEAD);
        let cursor = updates.cursor().clone();
        let failed = |error: &dyn std::fmt::Display| {
            DataError::environment(format!("A loader thread cannot be started: {error}."))
        };
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("patches-{i}"));
        let pool = pool.build().map_err(|error| failed(&error))?;
        let work = move || make(updates, &rows, &pool, &sender);
        std::thread::Builder::new().name("updates".into()).spawn(work).map_err(|error| failed(&error))?;
        Ok(ImageLoader { queue, cursor, waited: Waited::default() })
    }

    /// The next update. An error is final.
    pub fn next_update(&mut self) -> Result<SeenUpdate, DataError> {
        let since = Instant::now();
        let made =
            self.queue.recv().map_err(|_| DataError::environment("The loader thread has ended."))??;
        let LoadedUpdate { mut seen, cursor, spent } = made;
        let waited =
            Waited::new(since.elapsed(), Spent { decoding: spent, ..Spent::default() }, Duration::ZERO);
        self.waited += waited;
        (self.cursor, seen.update.waited) = (cursor, waited);
        Ok(seen)
    }

    /// Position of the update after the last one returned.
    pub fn cursor(&self) -> &ExampleCursor {
        &self.cursor
    }

    /// Total time that `next_update` has taken.
    pub fn waited(&self) -> Waited {
        self.waited
    }
}

/// Prepares updates until the receiver is gone or one fails.
fn make(
    mut updates: Updates,
    rows: &ImageRows,
    pool: &rayon::ThreadPool,
    sender: &SyncSender<Result<LoadedUpdate, DataError>>,
) {
    loop {
        let since = Instant::now();
        let mut update = updates.next_update();
        let made = pool.install(|| update.parts.par_iter_mut().map(|part| rows.of(part)).collect());
        let made: Result<Vec<Vec<u8>>, DataError> = made;
        let (cursor, is_last) = (updates.cursor().clone(), made.is_err());
        let made = made.map(|rows| LoadedUpdate {
            seen: SeenUpdate { update, rows },
            cursor,
            spent: since.elapsed(),
        });
        if sender.send(made).is_err() || is_last {
            return;
        }
    }
}

/// The patches of a micro-batch's images. Where a text sees only a subset of an image's blocks, sets the blocks of its tokens.
fn patches(store: &ImageStore, batch: &mut MicroBatch) -> Result<Vec<u8>, DataError> {
    let bytes = store.patch_bytes();
    let mut out = vec![0; batch.image_room.patches * bytes];
    let mut rest = &mut out[..];
    let mut parts = vec![];
    for image in &batch.images {
        let (own, behind) = rest.split_at_mut(image.grid.patches() * bytes);
        parts.push((image.image, own));
        rest = behind;
    }
    let made = parts.into_par_iter().map(|(image, out)| {
        store.patches(image, out)?;
        Ok(store.shown(image, out))
    });
    let shown: Vec<Option<Vec<u32>>> = made.collect::<Result<_, DataError>>()?;
    for (number, blocks) in shown.iter().enumerate() {
        blocks.iter().for_each(|blocks| batch.show(number, blocks));
    }
    Ok(out)
}
