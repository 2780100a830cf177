//! Updates on their way from the data to the plans, a micro-batch at a time.

use flatout_data::images::{ImageLoader, PartLoader};
use flatout_data::{
    Arrangement, ExampleCursor, ExampleTable, Loader, MicroBatch, Rows, UpdateOptions, Updates, Waited,
};
use flatout_models::images::TABLE;
use serde_json::Value;

use crate::Failure;
use crate::config::Config;
use crate::resolve::compile::Compiled;
use crate::tasks::corpus::train_loader;
use crate::tasks::images::{self, Feeding, ImagePart};
use crate::tasks::material::{Examples, Material};

/// Where a run's updates come from.
pub enum Supply {
    /// Rows of text, so many a micro-batch.
    Rows {
        loader: Box<Loader>,
        micro_batch: usize,
        parts: usize,
    },
    Examples {
        updates: Box<Updates>,
        next: std::vec::IntoIter<MicroBatch>,
        epoch: f64,
        waited: Waited,
    },
    /// Parts of images that lie on the device, so many micro-batches an update.
    Parts {
        loader: Box<PartLoader>,
        feeding: Box<Feeding>,
        seed: u64,
        parts: usize,
    },
    /// Images, so many micro-batches an update.
    Images {
        loader: Box<ImageLoader>,
        feeding: Box<Feeding>,
        seed: u64,
        parts: usize,
    },
}

/// A micro-batch as it is fed, and what there is to say of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    pub batch: Batch,
    /// How many times the data has been read, after this.
    pub epoch: f64,
    pub waited: Waited,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Batch {
    /// Rows for a plan of this many.
    Rows(Rows, usize),
    Examples(MicroBatch),
    Images(ImagePart),
}

impl Batch {
    /// Tokens that are learned from or read; not those that only fill up.
    pub fn real_tokens(&self) -> usize {
        match self {
            Batch::Rows(rows, _) => rows.tokens.len(),
            Batch::Examples(batch) => batch.real_tokens(),
            Batch::Images(part) => part.batch.count() * part.tokens,
        }
    }

    /// Tokens that are computed.
    pub fn computed_tokens(&self) -> usize {
        match self {
            Batch::Rows(rows, capacity) => capacity * rows.context,
            Batch::Examples(batch) => batch.tokens.len(),
            Batch::Images(part) => part.capacity * part.tokens,
        }
    }

    pub fn samples(&self) -> &[u64] {
        match self {
            Batch::Rows(rows, _) => &rows.sample,
            Batch::Examples(batch) => &batch.samples,
            Batch::Images(part) => &part.batch.samples,
        }
    }
}

/// What texts of each class count; nothing where no classes are learned.
fn class_weights(config: &Config, examples: &ExampleTable) -> Result<Vec<f32>, Failure> {
    match config.model.classes() {
        None => Ok(vec![]),
        Some(classes) => Ok(config.train.class_weights.of(examples, classes)?),
    }
}

impl Supply {
    /// From the beginning.
    pub fn begin(config: &Config, compiled: &Compiled, material: &Material) -> Result<Supply, Failure> {
        Supply::new(config, compiled, material, None)
    }

    /// From a cursor that an earlier supply of the same data gave.
    pub fn resume(
        config: &Config,
        compiled: &Compiled,
        material: &Material,
        cursor: Value,
    ) -> Result<Supply, Failure> {
        Supply::new(config, compiled, material, Some(cursor))
    }

    fn new(
        config: &Config,
        compiled: &Compiled,
        material: &Material,
        cursor: Option<Value>,
    ) -> Result<Supply, Failure> {
        let unreadable = |error| Failure::Environment(format!("the data's cursor does not read: {error}"));
        let micro_batch = compiled.micro_batch;
        match (material, &compiled.settled.arrangement) {
            (Material::Text(corpus), _) => {
                let cursor = cursor.map(serde_json::from_value).transpose().map_err(unreadable)?;
                let cursor = cursor.unwrap_or_else(|| corpus.start());
                let loader = Box::new(train_loader(config, corpus, &cursor)?);
                Ok(Supply::Rows { loader, micro_batch, parts: config.train.batch / micro_batch })
            }
            (Material::Examples(Examples { train, .. }), Some(Arrangement { layout, manner, .. })) => {
                let (seed, batch) = (config.train.seed, config.train.batch);
                let reading = UpdateOptions {
                    seed,
                    batch,
                    layout: layout.clone(),
                    is_sorted: manner.is_sorted,
                    class_weights: class_weights(config, train)?,
                };
                let cursor: Option<ExampleCursor> =
                    cursor.map(serde_json::from_value).transpose().map_err(unreadable)?;
                let cursor = cursor.unwrap_or_else(|| Updates::start(train, seed));
                let updates = Box::new(Updates::new(train.clone(), reading, cursor)?);
                let (next, waited) = (vec![].into_iter(), Waited::default());
                Ok(Supply::Examples { updates, next, epoch: 0.0, waited })
            }
            (Material::Examples(_), None) => unreachable!("plans for examples are arranged"),
            (Material::Images(sets), _) => {
                let cursor = cursor.map(serde_json::from_value).transpose().map_err(unreadable)?;
                let feeding = Box::new(Feeding::training(config, micro_batch, &sets.train)?);
                let (seed, parts) = (config.train.seed, config.train.batch / micro_batch);
                if compiled.plans.slot(TABLE).is_some() {
                    let loader = Box::new(images::part_loader(config, &sets.train, cursor)?);
                    return Ok(Supply::Parts { loader, feeding, seed, parts });
                }
                let loader = Box::new(images::loader(config, &sets.train, cursor)?);
                Ok(Supply::Images { loader, feeding, seed, parts })
            }
        }
    }

    /// Begins the next update and tells how many micro-batches it has; each is then asked for.
    pub fn begin_update(&mut self) -> usize {
        match self {
            Supply::Rows { parts, .. } | Supply::Images { parts, .. } | Supply::Parts { parts, .. } => *parts,
            Supply::Examples { updates, next, epoch, waited } => {
                let update = updates.next_update();
                (*next, *epoch, *waited) = (update.parts.into_iter(), update.epoch, update.waited);
                next.len()
            }
        }
    }

    pub fn next_part(&mut self) -> Result<Part, Failure> {
        match self {
            Supply::Rows { loader, micro_batch, .. } => {
                let rows = loader.next_rows(*micro_batch)?;
                Ok(Part { epoch: rows.epoch, waited: rows.waited, batch: Batch::Rows(rows, *micro_batch) })
            }
            Supply::Examples { next, epoch, waited, .. } => {
                let batch = Batch::Examples(next.next().expect("as many as the update has"));
                Ok(Part { batch, epoch: *epoch, waited: std::mem::take(waited) })
            }
            Supply::Parts { loader, feeding, seed, .. } => {
                let images = loader.next_images(feeding.capacity);
                let epoch = images.epoch;
                Ok(Part {
                    batch: Batch::Images(feeding.part(images, *seed)),
                    epoch,
                    waited: Waited::default(),
                })
            }
            Supply::Images { loader, feeding, seed, .. } => {
                let images = loader.next_images(feeding.capacity)?;
                let (epoch, waited) = (images.epoch, images.waited);
                Ok(Part { batch: Batch::Images(feeding.part(images, *seed)), epoch, waited })
            }
        }
    }

    /// Where the update after the last whole one begins, as a checkpoint keeps it.
    pub fn cursor(&self) -> Value {
        let value = match self {
            Supply::Rows { loader, .. } => serde_json::to_value(loader.cursor()),
            Supply::Examples { updates, .. } => serde_json::to_value(updates.cursor()),
            Supply::Parts { loader, .. } => serde_json::to_value(loader.cursor()),
            Supply::Images { loader, .. } => serde_json::to_value(loader.cursor()),
        };
        value.expect("a cursor has a JSON form")
    }

    /// The place of the next row or example in the series of all.
    pub fn sample(&self) -> u64 {
        match self {
            Supply::Rows { loader, .. } => loader.cursor().row,
            Supply::Examples { updates, .. } => updates.cursor().sample,
            Supply::Parts { loader, .. } => loader.cursor().sample,
            Supply::Images { loader, .. } => loader.cursor().sample,
        }
    }

    /// How long updates have waited for their data so far.
    pub fn waited(&self) -> Waited {
        match self {
            Supply::Rows { loader, .. } => loader.waited(),
            Supply::Examples { updates, .. } => updates.waited(),
            Supply::Parts { .. } => Waited::default(),
            Supply::Images { loader, .. } => loader.waited(),
        }
    }
}
