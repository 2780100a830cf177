//! Images from the config to a plan: sets that are opened, the view training and evaluation have of them, micro-batches
//! and how they are written into a plan's inputs.

mod asked;

pub use asked::{Told, asked, predict};

use std::sync::Arc;

use flatout_data::images::{
    self, Augment, CHANNELS, ImageBatch, ImageLoader, ImageSet, ImageSets, ImageSource, ImageSpec,
    PartLoader, View,
};
use flatout_data::{ExampleCursor, LoaderOptions, OpenEvent};
use flatout_ir::ops::resample::PART;
use flatout_ir::passes::input_path;
use flatout_ir::random::philox;
use flatout_ir::{Program, Role};
use flatout_models::form::{Form, ImageForm};
use flatout_runtime::{RuntimeError, Session};

use crate::Failure;
use crate::UserError;
use crate::config::{Config, OnError, Source, keys_of};
use crate::device::Device;
use crate::infer::classify::Classified;
use crate::infer::evaluate::Share;
use crate::machine::{self, cache_folder};
use crate::metrics::Tally;
use crate::refuse;
use crate::tasks::feed::Draw;
use crate::tasks::image_table;
use crate::tasks::mixing::{Mixed, Mixing};
use crate::weights::pretrained::Loaded;

/// What the config says of images.
fn spec(config: &Config) -> ImageSpec {
    let data = &config.data;
    let [height, width] = config.model.image_sides().expect("validated: a model of images");
    let paths = |paths: &Option<crate::config::Paths>| paths.iter().flat_map(|p| p.0.clone()).collect();
    ImageSpec {
        source: if data.source() == Source::Synthetic { ImageSource::Synthetic } else { ImageSource::Auto },
        path: paths(&data.path),
        held_out_path: paths(&data.held_out_path),
        held_out: data.held_out,
        classes: data.classes.clone(),
        label: data.label.clone(),
        image: data.image.clone(),
        root: data.image_root.as_ref().map(Into::into),
        on_error: match data.on_error {
            OnError::Fail => flatout_data::formats::OnError::Fail,
            OnError::Skip => flatout_data::formats::OnError::Skip,
        },
        max_pixels: data.max_pixels,
        images: data.synthetic_rows,
        width,
        height,
        seed: config.train.seed,
        cache: cache_folder(),
    }
}

pub fn open(config: &Config, say: &mut dyn FnMut(OpenEvent)) -> Result<ImageSets, Failure> {
    Ok(images::open(&spec(config), say)?)
}

/// What training sees of an image, or evaluation.
pub fn view(config: &Config, training: bool) -> View {
    let data = &config.data;
    let [height, width] = config.model.image_sides().expect("validated: a model of images");
    let pair = |[least, most]: [f64; 2]| (least, most);
    let augment = match training {
        true => {
            // Parts of the view's own ratio are not stretched, whatever it is.
            let ratio = data.crop_ratio.map(|ratio| ratio * (width as f64 / height as f64));
            Augment::Train { scale: pair(data.crop_scale), ratio: pair(ratio), flip: data.flip }
        }
        false => Augment::Centre { share: data.centre_crop },
    };
    View { height, width, augment }
}

/// The form of the graph that trains, or that is evaluated.
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

/// Training images from a cursor on, made ahead by as many threads as the config says.
pub fn loader(
    config: &Config,
    set: &Arc<ImageSet>,
    cursor: Option<ExampleCursor>,
) -> Result<ImageLoader, Failure> {
    let (seed, view) = (config.train.seed, view(config, true));
    let threads = config.loader.workers.given().unwrap_or_else(|| (machine::threads() / 2).max(1));
    let batch_bytes = config.train.batch * view.height * view.width * CHANNELS;
    let options =
        LoaderOptions { threads, queue_bytes: config.loader.prefetch * batch_bytes, ..Default::default() };
    let cursor = cursor.unwrap_or_else(|| ImageLoader::start(set, seed));
    Ok(ImageLoader::new(set.clone(), view, seed, cursor, options)?)
}

/// The same of images that lie on the device.
pub fn part_loader(
    config: &Config,
    set: &Arc<ImageSet>,
    cursor: Option<ExampleCursor>,
) -> Result<PartLoader, Failure> {
    let (seed, view) = (config.train.seed, view(config, true));
    let cursor = cursor.unwrap_or_else(|| PartLoader::start(set, seed));
    Ok(PartLoader::new(set.clone(), view, seed, cursor, LoaderOptions::default())?)
}

/// How batches of images become micro-batches of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Feeding {
    /// Images the plan has room for.
    pub capacity: usize,
    /// Tokens of an image.
    pub tokens: usize,
    /// What an image of each class counts.
    pub class_weights: Vec<f32>,
    pub mixing: Option<Mixing>,
}

impl Feeding {
    /// For training, on images of which each class has so many.
    pub fn training(config: &Config, capacity: usize, set: &ImageSet) -> Result<Feeding, Failure> {
        let classes = config.model.classes().expect("a model of images has classes");
        let class_weights = config.train.class_weights.of_counts(&set.balance(classes))?;
        Ok(Feeding { mixing: Mixing::of(config), class_weights, ..Feeding::plain(config, capacity) })
    }

    /// Every image as it is, and each counts 1.
    pub fn plain(config: &Config, capacity: usize) -> Feeding {
        let classes = config.model.classes().unwrap_or(0);
        Feeding { capacity, tokens: config.model.tokens(), class_weights: vec![1.0; classes], mixing: None }
    }

    pub fn part(&self, batch: ImageBatch, seed: u64) -> ImagePart {
        let weight = |label: &i32| usize::try_from(*label).map_or(0.0, |class| self.class_weights[class]);
        ImagePart {
            capacity: self.capacity,
            tokens: self.tokens,
            label_weights: batch.labels.iter().map(weight).collect(),
            mixed: self.mixing.as_ref().map(|mixing| mixing.draw(&batch.samples, seed)),
            batch,
        }
    }
}

/// A micro-batch as it is fed.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePart {
    pub batch: ImageBatch,
    pub capacity: usize,
    pub tokens: usize,
    pub label_weights: Vec<f32>,
    pub mixed: Option<Mixed>,
}

/// Writes a micro-batch into the inputs that the plan has. Images that are missing at its end have weight 0.
pub fn feed_images(
    session: &mut Session,
    role: Role,
    part: &ImagePart,
    draw: Draw,
) -> Result<(), RuntimeError> {
    let (batch, capacity) = (&part.batch, part.capacity);
    let path = |name: &str| input_path(role, name);
    let missing = capacity - batch.count();
    let filled = |values: &[i32], fill: i32, width: usize| -> Vec<i32> {
        values.iter().copied().chain(std::iter::repeat_n(fill, missing * width)).collect()
    };
    if session.plans().slot(&path("parts")).is_some() {
        session.write_i32(&path("parts"), &filled(&batch.parts, -1, PART))?;
    } else if missing == 0 {
        session.write_u8(&path("pixels"), &batch.pixels)?;
    } else {
        let of_one = batch.pixels.len() / batch.count().max(1);
        let mut pixels = batch.pixels.clone();
        pixels.resize(capacity * of_one, 0);
        session.write_u8(&path("pixels"), &pixels)?;
    }
    session.write_i32(&path("labels"), &filled(&batch.labels, -1, 1))?;
    let mut weights = part.label_weights.clone();
    weights.resize(capacity, 0.0);
    session.write_f32(&path("label_weights"), &weights)?;
    if session.plans().slot(&path("rng")).is_some() {
        let rng = [draw.seed as i32, (draw.seed >> 32) as i32, draw.step as i32];
        session.write_i32(&path("rng"), &rng)?;
        let rows: Vec<i32> = batch.samples.iter().flat_map(|sample| [*sample as i32, 0]).collect();
        session.write_i32(&path("rows"), &filled(&rows, 0, 2))?;
    }
    if let Some(mixed) = &part.mixed {
        session.write_i32(&path("mix_with"), &filled(&mixed.with, 0, 1))?;
        let mut share = mixed.share.clone();
        share.resize(capacity, 1.0);
        session.write_f32(&path("mix_share"), &share)?;
        session.write_i32(&path("mix_box"), &filled(&mixed.cut, 0, 4))?;
    }
    Ok(())
}

/// Noise with a class each, for measurements without data.
pub fn drawn(config: &Config, count: usize, part: usize) -> ImagePart {
    let [height, width] = config.model.image_sides().expect("a model of images");
    let classes = config.model.classes().unwrap_or(1) as u32;
    let seed = [config.train.seed as u32, (config.train.seed >> 32) as u32];
    let bytes = count * height * width * CHANNELS;
    let word = |i: usize| philox([i as u32, part as u32, 1, 0], seed);
    let pixels = (0..bytes.div_ceil(16)).flat_map(word).flat_map(u32::to_le_bytes).take(bytes).collect();
    let samples: Vec<u64> = (0..count).map(|image| (part * count + image) as u64).collect();
    let label = |sample: &u64| (philox([*sample as u32, 0, 2, 0], seed)[0] % classes) as i32;
    let labels = samples.iter().map(label).collect();
    let batch = ImageBatch { pixels, labels, samples, ..ImageBatch::default() };
    Feeding { mixing: Mixing::of(config), ..Feeding::plain(config, count) }.part(batch, config.train.seed)
}

/// Held-out images in their order, a part at a time.
pub struct HeldOutImages {
    set: Arc<ImageSet>,
    view: View,
    feeding: Feeding,
    count: u64,
}

impl HeldOutImages {
    /// As many as are asked for and there are.
    pub fn new(
        config: &Config,
        set: &Arc<ImageSet>,
        most: usize,
        capacity: usize,
    ) -> Result<HeldOutImages, UserError> {
        let count = set.count().min(most as u64);
        if count == 0 {
            refuse!("no image is held out to evaluate on: raise data.held_out or give eval.rows=0");
        }
        let feeding = Feeding::plain(config, capacity);
        Ok(HeldOutImages { set: set.clone(), view: view(config, false), feeding, count })
    }

    pub fn parts(&self) -> usize {
        self.count.div_ceil(self.feeding.capacity as u64) as usize
    }

    pub fn part(&self, number: usize) -> Result<ImagePart, Failure> {
        let first = (number * self.feeding.capacity) as u64;
        let range = first..(first + self.feeding.capacity as u64).min(self.count);
        Ok(self.feeding.part(images::ordered(&self.set, &self.view, range)?, 0))
    }
}

/// Images computed at once where eval.micro_batch does not say.
const AT_ONCE: usize = 64;

/// How well a model classifies images: all of a path given on the command line, otherwise what a run held out.
pub fn classify(
    loaded: &mut Loaded,
    device: &Device,
    overrides: &[String],
) -> Result<(Classified, Share), Failure> {
    let keys = keys_of(overrides)?;
    let share = if keys.iter().any(|key| key == "data.path") { Share::All } else { Share::HeldOut };
    if share == Share::All {
        loaded.config.data.held_out = 0.0;
    }
    let sets = open(&loaded.config, &mut |_| {})?;
    let set = if share == Share::All { &sets.train } else { &sets.held_out };
    let most = if keys.iter().any(|key| key == "eval.rows") { loaded.config.eval.rows } else { usize::MAX };
    let at_once = loaded.config.eval.micro_batch.given().unwrap_or(AT_ONCE);
    let held_out = HeldOutImages::new(&loaded.config, set, most, at_once)?;
    let graph = loaded.config.model.build(Form::Images(ImageForm::plain(at_once)));
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    let mut tally = Tally::new(loaded.config.model.classes().unwrap_or(0));
    let (mut loss, mut weight) = (0.0, 0.0);
    for number in 0..held_out.parts() {
        let part = held_out.part(number)?;
        feed_images(&mut session, Role::Eval, &part, Draw { seed: 0, step: 0 })?;
        session.run(Role::Eval)?;
        loss += session.result(Role::Eval, "loss")?[0] as f64;
        weight += session.result(Role::Eval, "weight")?[0] as f64;
        tally.see_all(&session.result(Role::Eval, "class_logits")?, &part.batch.labels);
    }
    let found = Classified { loss: loss / weight, texts: held_out.count, metrics: tally.metrics() };
    Ok((found, share))
}
