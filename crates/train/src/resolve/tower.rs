//! The vision tower as a plan of its own, which computes image features before the first step if `data.vision_cache` stores them,
//! and the estimate of whether that pays.

use flatout_data::{ImageRoom, patch_step};
use flatout_ir::cost::cost;
use flatout_ir::{DType, PlanSet, Precision, Program, Role, Slot, Target, compile};
use flatout_models::form::SeenPatches;
use flatout_models::vision::qwen3_vl::features;
use flatout_models::vision::{Qwen3VlConfig, SCOPE};

use crate::Failure;
use crate::UserError;
use crate::config::Config;
use crate::config::pattern::matches;
use crate::refuse;
use crate::resolve::arranged::trains_tower;
use crate::resolve::settle::base_of;
use crate::switches::{self, Settled};

/// Patches per run of the plan: enough for products to reach full speed.
const AT_ONCE: usize = 8192;

/// A compiled tower.
pub struct Tower {
    pub plans: PlanSet,
    pub settled: Settled,
    pub target: Target,
    pub room: ImageRoom,
}

/// Refuses to store features if the tower that computes them is trained.
pub fn check(config: &Config) -> Result<(), UserError> {
    if config.data.vision_cache.is_some() && trains_tower(config) {
        refuse!(
            "`data.vision_cache` stores the tower's output for every image, and the tower is trained: freeze it with \
             train.freeze=[{SCOPE}] or adapters on the text alone, or leave the cache out"
        );
    }
    Ok(())
}

/// The tower's parameters if plans do not contain it because image features are stored.
pub fn parameters_apart(config: &Config) -> Vec<Slot> {
    if config.data.vision_cache.is_none() {
        return vec![];
    }
    let slots = config.model.build(config.model.least()).slots.into_iter();
    slots.filter(|slot| slot.class.is_parameter() && matches(SCOPE, &slot.path)).collect()
}

/// Capacities for images with these numbers of patches, several at a time.
pub fn room(patches: impl Iterator<Item = usize> + Clone, block: usize) -> ImageRoom {
    let (largest, all) = (patches.clone().max().unwrap_or(block), patches.clone().sum::<usize>());
    let at_once = largest.max(all.min(AT_ONCE)).next_multiple_of(patch_step(block));
    let mut images = 1;
    let mut open = (0, 0);
    for own in patches {
        open = if open.0 + own <= at_once { (open.0 + own, open.1 + 1) } else { (own, 1) };
        images = images.max(open.1);
    }
    ImageRoom { patches: at_once, images, largest }
}

impl Tower {
    /// Compiles the tower of a config. It computes what a training plan would, with one exception: scales of 8-bit floats follow
    /// the training, which stored features cannot, so they are computed in bf16.
    pub fn compile(config: &Config, target: &Target, room: ImageRoom) -> Result<Tower, Failure> {
        let ImageRoom { patches, images, largest } = room;
        let graph = features::build(config.model.decoder(), SeenPatches { patches, images, largest });
        let mut settled = switches::settle(&config.switches, &config.model, target)?;
        let options = &mut settled.options;
        if options.precision == Precision::FP8 {
            options.precision = Precision::BF16;
        }
        let parameters = graph.slots.iter().filter(|slot| slot.class.is_parameter());
        options.freeze = parameters.map(|slot| slot.path.clone()).collect();
        options.base = base_of(config.switches.memory.codes(), &graph, &options.freeze);
        let plans = compile(&[Program { role: Role::Eval, graph }], target, &settled.options)?;
        Ok(Tower { plans, settled, target: target.clone(), room })
    }

    /// The element type of the features.
    pub fn dtype(&self) -> DType {
        if self.settled.options.precision.is_narrow() { DType::BF16 } else { DType::F32 }
    }

    /// The time of this number of patches in full plans, by timings of the device, or a lower bound if there are none.
    pub fn seconds(&self, patches: usize) -> f64 {
        let plan = self.plans.plan(Role::Eval).expect("the plan of the tower");
        cost(plan, &self.target).predicted_seconds * patches as f64 / self.room.patches as f64
    }
}

/// Bytes of the features of this number of tokens.
pub fn feature_bytes(config: &Config, tokens: usize, dtype: DType) -> u64 {
    let levels = config.model.as_qwen3_vl().map_or(0, Qwen3VlConfig::feature_levels);
    (tokens * levels * config.model.decoder().width * dtype.bytes()) as u64
}

/// The cost of storing features, and the time that it saves.
#[derive(Clone, Debug, PartialEq)]
pub struct Economy {
    /// Images that the tower processes to fill the cache.
    pub images: f64,
    /// Images that the tower would process in training without the cache.
    pub sightings: f64,
    pub epochs: f64,
    /// Whether an image is processed once for all questions about it.
    pub shares_prefixes: bool,
    pub bytes_per_image: f64,
    /// Time of the tower.
    pub seconds_per_image: f64,
    /// Whether the times are lower bounds from the device's rates, because nothing was timed on it.
    pub is_at_best: bool,
}

impl Economy {
    /// Seconds of the tower that are saved; negative if filling the cache processes more images than the training would.
    pub fn saved_seconds(&self) -> f64 {
        (self.sightings - self.images) * self.seconds_per_image
    }

    pub fn pays(&self) -> bool {
        self.sightings > self.images
    }

    /// The epochs in words, and whether each image is processed once per epoch.
    fn span(&self) -> String {
        let epochs = match self.epochs {
            1.0 => "one epoch".to_string(),
            epochs => format!("{} epochs", (10.0 * epochs).round() / 10.0),
        };
        let shared = if self.shares_prefixes { " with shared_prefix=on" } else { "" };
        format!("{epochs}{shared}")
    }

    /// Whether it pays, in a sentence. The user decides.
    pub fn decision(&self) -> String {
        let Economy { images, sightings, .. } = self;
        let pays = if self.pays() { "pays" } else { "does not pay" };
        format!(
            "the cache {pays}: {} would show the tower {sightings:.0} images, and filling it shows {images:.0}",
            self.span()
        )
    }

    /// Sizes and times in words.
    pub fn words(&self) -> String {
        let all = megabytes(self.images * self.bytes_per_image);
        format!("{} an image, {all} in all, {}", megabytes(self.bytes_per_image), self.of_tower())
    }

    fn of_tower(&self) -> String {
        let at_best = if self.is_at_best { ", at best" } else { "" };
        format!("{:.2} ms of the tower an image{at_best}", 1e3 * self.seconds_per_image)
    }
}

fn megabytes(bytes: f64) -> String {
    let digits = if bytes < 1e7 { 3 } else { 0 };
    format!("{:.digits$} MB", bytes / 1e6)
}

/// Whether examples with the same image share its computation.
pub fn shares_prefixes(config: &Config) -> bool {
    config.switches.data.shared_prefix == switches::Choose::On
}

/// A feature cache before any data is open: one image per example, of the largest size that fits the plans.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    pub economy: Economy,
    /// Tokens of the image.
    pub tokens: usize,
    /// Bytes per second that training reads if steps take the predicted time.
    pub read_bytes_per_second: f64,
}

/// Forecasts the cost of `data.vision_cache`; `None` if features are not stored.
pub fn forecast(
    config: &Config,
    target: &Target,
    largest_image: usize,
    step_seconds: f64,
) -> Result<Option<Forecast>, Failure> {
    let vision = config.model.as_qwen3_vl();
    let Some(vision) = vision.filter(|_| config.data.vision_cache.is_some() && largest_image > 0) else {
        return Ok(None);
    };
    let tower = Tower::compile(config, target, room(std::iter::once(largest_image), vision.block()))?;
    let tokens = largest_image / vision.block();
    let bytes_per_image = feature_bytes(config, tokens, tower.dtype()) as f64;
    let epochs = config.train.epochs.unwrap_or(1) as f64;
    let economy = Economy {
        images: 1.0,
        sightings: epochs,
        epochs,
        shares_prefixes: shares_prefixes(config),
        bytes_per_image,
        seconds_per_image: tower.seconds(largest_image),
        is_at_best: !target.timings.knows_kernels(),
    };
    let read_bytes_per_second = config.train.batch as f64 * bytes_per_image / step_seconds;
    Ok(Some(Forecast { economy, tokens, read_bytes_per_second }))
}

impl Forecast {
    /// Two lines for people: sizes and times, then the decision.
    pub fn words(&self) -> [String; 2] {
        let Forecast { economy, tokens, read_bytes_per_second } = self;
        let sizes = format!(
            "{} an image of {tokens} tokens, {}; training reads up to {} a second",
            megabytes(economy.bytes_per_image),
            economy.of_tower(),
            megabytes(*read_bytes_per_second)
        );
        let (span, times) = (economy.span(), economy.sightings);
        let decision = if economy.pays() {
            format!(
                "it pays: {span} would show the tower each image {times:.0} times or more, and filling it shows each once"
            )
        } else if economy.shares_prefixes {
            format!("it does not pay: {span} shows the tower each image once with it and without")
        } else {
            "it pays where an image is asked about more than once, because each question shows it to the tower".into()
        };
        [sizes, decision]
    }
}
