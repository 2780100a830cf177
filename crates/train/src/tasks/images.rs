//! Images with one class each: the task `images`.

use std::path::Path;
use std::sync::Arc;

use flatout_data::images::{
    self, Augment, ByteTable, CHANNELS, ImageBatch, ImageLoader, ImageSet, ImageSets, ImageSource, ImageSpec,
    PartLoader, Scaled, View,
};
use flatout_data::{Description, ExampleCursor, Lanes, Layout, LoaderOptions, OpenEvent, Waited};
use flatout_ir::Role;
use flatout_ir::ops::resample::PART;
use flatout_ir::random::philox;
use flatout_models::config::FoveaConfig;
use flatout_models::form::ImageForm;
use flatout_models::images::TABLE;
use flatout_runtime::Session;
use serde_json::Value;

use super::augmentation;
use super::batch::{Batch, BatchSource, EvalSet, HostTensor, Inputs, Shown, ShownAs};
use super::dataset::{Dataset, Feeding, Share, loaded_by_threads, loader_threads, read_cursor, updates};
use super::examples::check_names;
use super::image_table;
use super::lane_batches::LaneBatches;
use super::mixing::Mixing;
use crate::config::resolved::Resolved;
use crate::config::{Config, SourceKind};
use crate::machine::cache_folder;
use crate::{Failure, UserError};

/// Opens the data of the task.
pub fn open(
    config: &Config,
    _: Option<&Path>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Box<dyn Dataset>, Failure> {
    Ok(Box::new(sets(config, say)?))
}

/// A fingerprint of the files of both sides.
fn versions(sets: &ImageSets) -> String {
    format!("{:016x} {:016x}", sets.train.version(), sets.held_out.version())
}

/// The images for training and those held out.
pub fn sets(config: &Config, say: &mut dyn FnMut(OpenEvent)) -> Result<ImageSets, Failure> {
    Ok(images::open(&spec(config), say)?)
}

/// Converts the config's data section for the reader of images.
pub fn spec(config: &Config) -> ImageSpec {
    let data = &config.data;
    let [height, width] = config.model.image_sides().expect("validated: a model of images");
    let paths = |paths: &Option<crate::config::Paths>| paths.iter().flat_map(|p| p.0.clone()).collect();
    ImageSpec {
        source: if data.source() == SourceKind::Synthetic {
            ImageSource::Synthetic
        } else {
            ImageSource::Auto
        },
        path: paths(&data.path),
        held_out_path: paths(&data.held_out_path),
        held_out: data.held_out,
        classes: data.classes.clone(),
        label: data.label.clone(),
        image: data.image.clone(),
        root: data.image_root.as_ref().map(Into::into),
        on_error: data.on_error,
        max_pixels: data.max_pixels,
        images: data.synthetic_rows,
        width,
        height,
        seed: config.train.seed,
        cache: cache_folder(),
    }
}

/// The view of an image in training or in evaluation.
pub fn view(config: &Config, training: bool) -> View {
    let data = &config.data;
    let [height, width] = config.model.image_sides().expect("validated: a model of images");
    let pair = |[least, most]: [f64; 2]| (least, most);
    let augment = match training {
        true => {
            // Crops with the view's own aspect ratio are not stretched.
            let ratio = data.crop_ratio.map(|ratio| ratio * (width as f64 / height as f64));
            Augment::Train {
                scale: pair(data.crop_scale),
                ratio: pair(ratio),
                flip: data.flip,
                changes: augmentation::changes(config),
            }
        }
        false => match data.resize[..] {
            [shorter] => Augment::Resized(Scaled::Shorter(shorter)),
            [height, width] => Augment::Resized(Scaled::Both { height, width }),
            _ => Augment::Centre { share: data.centre_crop },
        },
    };
    View { height, width, augment, filter: data.filter }
}

/// The part of a frame that a tower reads: the shorter side is scaled to its size, and the centre is cropped.
pub fn frame_view(config: &Config, tower: &FoveaConfig) -> View {
    let side = tower.image_size;
    let augment = Augment::Resized(Scaled::Shorter(side));
    View { height: side, width: side, augment, filter: config.data.filter }
}

/// The form of the graph for training or for evaluation.
pub fn form(config: &Config, images: usize, training: bool) -> ImageForm {
    match training {
        true => ImageForm {
            images,
            dropout: true,
            smoothing: config.train.label_smoothing,
            mix: Mixing::of(config).is_some(),
            table: image_table::kept(config),
        },
        false => ImageForm::plain(images),
    }
}

/// Training images of some lanes from a cursor on, prefetched by as many threads as the config says.
pub fn loader(
    config: &Config,
    set: &Arc<ImageSet>,
    cursor: Option<ExampleCursor>,
    lanes: Lanes,
) -> Result<ImageLoader, Failure> {
    let (seed, view) = (config.train.seed, view(config, true));
    let threads = loader_threads(config);
    let batch_bytes = config.train.batch * view.height * view.width * CHANNELS;
    let options = LoaderOptions { lanes, threads, queue_bytes: config.loader.prefetch * batch_bytes };
    let cursor = cursor.unwrap_or_else(|| ImageLoader::start(set, seed));
    Ok(ImageLoader::new(set.clone(), view, seed, cursor, options)?)
}

/// The same for images that are stored on the device.
pub fn part_loader(
    config: &Config,
    set: &Arc<ImageSet>,
    cursor: Option<ExampleCursor>,
    lanes: Lanes,
) -> Result<PartLoader, Failure> {
    let (seed, view) = (config.train.seed, view(config, true));
    let cursor = cursor.unwrap_or_else(|| PartLoader::start(set, seed));
    Ok(PartLoader::new(set.clone(), view, seed, cursor, LoaderOptions { lanes, ..LoaderOptions::default() })?)
}

impl Dataset for ImageSets {
    fn describe(&self) -> Description {
        Description {
            documents: Some(self.train.count()),
            tokens: None,
            held_out_documents: Some(self.held_out.count()),
            held_out_tokens: None,
            is_estimated: false,
        }
    }

    fn sentence(&self) -> Option<String> {
        Some(self.description.to_string())
    }

    fn measure(&self, _: &Config, resolved: &mut Resolved) {
        resolved.classes = Some(self.classes.clone());
        resolved.versions = Some(versions(self));
        resolved.decoded = Some(ByteTable::extents(&self.train).map_or(vec![], |extents| extents.to_vec()));
    }

    fn changed(&self, resolved: &Resolved) -> Option<String> {
        let is_other = resolved.versions.as_ref().is_some_and(|began| *began != versions(self));
        let sentence = "the files of the images have other sizes or times than when the run began or last went on: where their \
                        contents changed, losses are not those of the unbroken run";
        is_other.then(|| sentence.to_string())
    }

    fn check_classes(&self, config: &Config) -> Result<(), UserError> {
        config.model.classes().map_or(Ok(()), |classes| check_names(&self.classes, classes))
    }

    fn steps_of_epochs(&self, config: &Config, epochs: u64) -> Result<u64, Failure> {
        Ok(updates(config, epochs, self.train.count()))
    }

    fn loading(&self, config: &Config, feeding: Feeding<'_>) -> String {
        match feeding.plans.slot(TABLE) {
            Some(_) => "all images lie on the device".into(),
            None => match augmentation::words(config) {
                Some(words) => format!("{}, {words}", loaded_by_threads(config)),
                None => loaded_by_threads(config),
            },
        }
    }

    /// Writes the images to their table, if the plans have one.
    fn prepare(&self, session: &mut Session) -> Result<(), Failure> {
        if session.plans().slot(TABLE).is_none() {
            return Ok(());
        }
        let table = ByteTable::of(&self.train)?.expect("plans have a table of images that lie decoded");
        Ok(session.write_u8(TABLE, &table.pixels)?)
    }

    fn source(
        &self,
        config: &Config,
        feeding: Feeding<'_>,
        cursor: Option<Value>,
    ) -> Result<Box<dyn BatchSource>, Failure> {
        let (cursor, lanes) = (read_cursor(cursor)?, feeding.lanes(config.train.batch));
        let loader = match feeding.plans.slot(TABLE) {
            Some(_) => Images::OnDevice(Box::new(part_loader(config, &self.train, cursor, lanes)?)),
            None => Images::Loaded(Box::new(loader(config, &self.train, cursor, lanes)?)),
        };
        Ok(Box::new(ImageBatches {
            loader,
            maker: BatchMaker::training(config, feeding.micro_batch, &self.train, feeding.inputs())?,
            batches: LaneBatches::new(lanes, feeding.micro_batch),
        }))
    }

    fn eval_set(
        &self,
        config: &Config,
        share: Share,
        most: usize,
        _: Option<&Layout>,
    ) -> Result<Box<dyn EvalSet>, Failure> {
        let set = if share == Share::All { &self.train } else { &self.held_out };
        if set.count().min(most as u64) == 0 {
            let sentence = "no image is held out to evaluate on: raise data.held_out or give eval.rows=0";
            return Err(Failure::User(UserError(sentence.into())));
        }
        Ok(Box::new(OrderedImages::new(config, set.clone(), most)))
    }
}

/// Training images, decoded ahead of their update, or crops of images that are stored on the device.
enum Images {
    Loaded(Box<ImageLoader>),
    OnDevice(Box<PartLoader>),
}

struct ImageBatches {
    loader: Images,
    maker: BatchMaker,
    batches: LaneBatches<ImageBatch>,
}

impl Images {
    /// This rank's images among the next `count`.
    fn next_images(&mut self, count: usize) -> Result<ImageBatch, Failure> {
        Ok(match self {
            Images::Loaded(loader) => loader.next_images(count)?,
            Images::OnDevice(loader) => ImageBatch { waited: Waited::default(), ..loader.next_images(count) },
        })
    }
}

impl BatchSource for ImageBatches {
    fn begin_update(&mut self) {
        self.batches.begin_update();
    }

    fn next_batch(&mut self) -> Result<Option<Batch>, Failure> {
        let loader = &mut self.loader;
        let Some((lane, images)) = self.batches.next(|count| loader.next_images(count))? else {
            return Ok(None);
        };
        Ok(Some(Batch { lane, ..self.maker.batch(Role::GRAD, images) }))
    }

    fn of_all_ranks(&self, own: [usize; 2]) -> [usize; 2] {
        self.batches.tokens(self.maker.tokens, own)
    }

    fn cursor(&self) -> Value {
        let cursor = match &self.loader {
            Images::Loaded(loader) => serde_json::to_value(loader.cursor()),
            Images::OnDevice(loader) => serde_json::to_value(loader.cursor()),
        };
        cursor.expect("a cursor has a JSON form")
    }

    fn sample(&self) -> u64 {
        match &self.loader {
            Images::Loaded(loader) => loader.cursor().sample,
            Images::OnDevice(loader) => loader.cursor().sample,
        }
    }

    fn waited(&self) -> Waited {
        match &self.loader {
            Images::Loaded(loader) => loader.waited(),
            Images::OnDevice(_) => Waited::default(),
        }
    }
}

/// Makes batches of images for plans of one capacity.
#[derive(Clone, Debug)]
struct BatchMaker {
    /// Images that the plan has capacity for.
    capacity: usize,
    /// Tokens of an image.
    tokens: usize,
    /// Bytes of an image's pixels.
    image_bytes: usize,
    /// The factor of each class in the loss.
    class_weights: Vec<f32>,
    mixing: Option<Mixing>,
    /// Seed of the mixing.
    seed: u64,
    inputs: Inputs,
}

impl BatchMaker {
    /// For training: with mixing, and with class weights, which may depend on the counts of classes in the set.
    fn training(
        config: &Config,
        capacity: usize,
        set: &ImageSet,
        inputs: Inputs,
    ) -> Result<BatchMaker, Failure> {
        let classes = config.model.classes().expect("a model of images has classes");
        let class_weights = config.train.class_weights.of_counts(&set.balance(classes))?;
        Ok(BatchMaker {
            mixing: Mixing::of(config),
            class_weights,
            ..BatchMaker::plain(config, capacity, inputs)
        })
    }

    /// Unmixed images, each with weight 1.
    fn plain(config: &Config, capacity: usize, inputs: Inputs) -> BatchMaker {
        let classes = config.model.classes().unwrap_or(0);
        BatchMaker {
            capacity,
            tokens: config.model.tokens(),
            image_bytes: config.model.image_sides().map_or(0, |[height, width]| height * width * CHANNELS),
            class_weights: vec![1.0; classes],
            mixing: None,
            seed: config.train.seed,
            inputs,
        }
    }

    /// Images missing at the end of the batch have weight 0.
    fn batch(&self, role: Role, images: ImageBatch) -> Batch {
        let (count, capacity) = (images.count(), self.capacity);
        let ImageBatch { mut pixels, parts, labels, samples, epoch, waited, left_out, .. } = images;
        let filled = |values: Vec<i32>, fill: i32, width: usize| {
            let missing = std::iter::repeat_n(fill, (capacity - count) * width);
            HostTensor::I32(values.into_iter().chain(missing).collect())
        };
        let filled_f32 = |mut values: Vec<f32>, fill: f32| {
            values.resize(capacity, fill);
            HostTensor::F32(values)
        };
        let weight = |label: &i32| usize::try_from(*label).map_or(0.0, |class| self.class_weights[class]);
        let weights: Vec<f32> = labels.iter().map(weight).collect();
        let keys: Vec<i32> = samples.iter().flat_map(|sample| [*sample as i32, 0]).collect();
        let mixed = self.mixing.as_ref().map(|mixing| mixing.draw(&samples, self.seed)).unwrap_or_default();
        let tensors = self.inputs.only([
            ("parts", Box::new(|| filled(parts, -1, PART)) as Box<dyn FnOnce() -> HostTensor>),
            (
                "pixels",
                Box::new(|| {
                    pixels.resize(capacity * self.image_bytes, 0);
                    HostTensor::U8(pixels)
                }),
            ),
            ("labels", Box::new(|| filled(labels, -1, 1))),
            ("label_weights", Box::new(|| filled_f32(weights, 0.0))),
            ("rows", Box::new(|| filled(keys, 0, 2))),
            ("mix_with", Box::new(|| filled(mixed.with, 0, 1))),
            ("mix_share", Box::new(|| filled_f32(mixed.share, 1.0))),
            ("mix_box", Box::new(|| filled(mixed.cut, 0, 4))),
        ]);
        Batch {
            role,
            lane: 0,
            tensors,
            samples,
            answers: vec![],
            unit: "images",
            real_tokens: count * self.tokens,
            computed_tokens: capacity * self.tokens,
            epoch,
            waited,
            left_out,
        }
    }
}

/// Random images with random classes, for measurements without data.
pub fn drawn(config: &Config, count: usize, part: usize, inputs: Inputs) -> Batch {
    let [height, width] = config.model.image_sides().expect("a model of images");
    let classes = config.model.classes().unwrap_or(1) as u32;
    let seed = [config.train.seed as u32, (config.train.seed >> 32) as u32];
    let bytes = count * height * width * CHANNELS;
    let word = |i: usize| philox([i as u32, part as u32, 1, 0], seed);
    let pixels = (0..bytes.div_ceil(16)).flat_map(word).flat_map(u32::to_le_bytes).take(bytes).collect();
    let samples: Vec<u64> = (0..count).map(|image| (part * count + image) as u64).collect();
    let label = |sample: &u64| (philox([*sample as u32, 0, 2, 0], seed)[0] % classes) as i32;
    let labels = samples.iter().map(label).collect();
    let images = ImageBatch { pixels, labels, samples, ..ImageBatch::default() };
    BatchMaker { mixing: Mixing::of(config), ..BatchMaker::plain(config, count, inputs) }
        .batch(Role::GRAD, images)
}

/// Images in order, in the view of evaluation.
pub struct OrderedImages {
    set: Arc<ImageSet>,
    view: View,
    count: u64,
    maker: BatchMaker,
}

impl OrderedImages {
    /// The first images of a set, at most `most`.
    pub fn new(config: &Config, set: Arc<ImageSet>, most: usize) -> OrderedImages {
        let count = set.count().min(most as u64);
        let maker = BatchMaker::plain(config, 0, Inputs::default());
        OrderedImages { set, view: view(config, false), count, maker }
    }
}

impl EvalSet for OrderedImages {
    fn samples(&self) -> usize {
        self.count as usize
    }

    fn batches(&self, capacity: usize) -> usize {
        self.samples().div_ceil(capacity)
    }

    fn batch(&self, number: usize, capacity: usize, inputs: &Inputs) -> Result<Batch, Failure> {
        let first = (number * capacity) as u64;
        let range = first..(first + capacity as u64).min(self.count);
        let images = images::ordered(&self.set, &self.view, range)?;
        let maker = BatchMaker { capacity, inputs: inputs.clone(), ..self.maker.clone() };
        Ok(maker.batch(Role::Eval, images))
    }

    fn shown(&self, number: usize, capacity: usize) -> Result<Option<Shown>, Failure> {
        let images = images::ordered(&self.set, &self.view, number as u64..number as u64 + 1)?;
        let shown = ShownAs::Pixels { size: [self.view.height, self.view.width], rgb: images.pixels };
        Ok(Some(Shown { batch: number / capacity, at: number % capacity, shown }))
    }
}
