//! The typed config of a run: one struct per section, resolved once and saved with the run.
//!
//! Values come in through `layers`, which checks every key against `schema` first, so that deserialising cannot fail because of user
//! input.

mod adapter;
mod check;
pub mod class_weights;
mod classes;
mod foreign;
mod groups;
mod layers;
mod nearest;
mod optimizer;
pub mod pattern;
mod places;
mod preference;
mod prompts;
pub mod resolved;
mod samples;
mod schema;
mod task;
mod text;
mod value;

pub use adapter::{Adapter, AdapterGroup, AdapterGroups, AdapterKind, DEFAULT_ADAPTER};
pub use groups::{Group, Groups, Rate};
pub(crate) use layers::{Layers, may_change};
pub use layers::{answer, keys_of, option_as_key, parse, parse_override};
pub use nearest::{nearest, suggestion};
pub use optimizer::{Optimizer, Word};
pub use preference::Preference;
pub use prompts::{Prompt, Prompts, SYSTEM};
pub use samples::Samples;
pub use schema::{SchemaKey, schema};
pub use task::{Sight, Task, Unit};

pub use flatout_data::examples::{TooLong, TrainOn};
pub use flatout_data::formats::{FileFormat, OnError};
pub use flatout_data::images::{ErasedWith, Filter};
pub use flatout_data::{DocumentOrder, SourceKind};
use flatout_models::config::Model;
use flatout_settings::{Section, Setting, ValueKind};
use flatout_settings::{choice, section};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::class_weights::ClassWeights;
use crate::metrics::goal::Metric;
use crate::switches::Switches;

/// The config of a run: everything that decides its result.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the recipe that the run was started from.
    #[serde(default)]
    pub recipe: String,
    /// One sentence for lists of recipes.
    #[serde(default)]
    pub description: String,
    pub model: Model,
    pub data: Data,
    pub train: Train,
    #[serde(default)]
    pub mesh: Mesh,
    #[serde(default)]
    pub preference: Preference,
    #[serde(default)]
    pub adapter: Adapter,
    pub eval: Eval,
    pub optimizer: Optimizer,
    pub schedule: Schedule,
    pub checkpoint: Checkpoint,
    pub loader: Loader,
    pub log: Log,
    #[serde(default)]
    pub samples: Samples,
    #[serde(default)]
    pub track: Track,
    pub switches: Switches,
}

/// One or several paths, written as a text or a list of texts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Paths(pub Vec<String>);

impl Setting for Paths {
    fn kind() -> ValueKind {
        ValueKind::List(Box::new(ValueKind::Text), None)
    }
}

impl std::fmt::Display for Paths {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

section! {
    /// A part of a mixture.
    pub struct MixPart {
        /// Files, folders or patterns, as for data.path.
        pub path: Paths,
        /// Share of the training tokens, or of the samples where samples have frames, relative to the sum of all weights.
        pub weight: f64 = 1.0,
    }
}

/// A mixture is written as a list of tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mix(pub Vec<MixPart>);

impl Setting for Mix {
    fn kind() -> ValueKind {
        ValueKind::Tables(MixPart::keys())
    }
}

section! {
    /// The training data.
    pub struct Data {
        /// Source of the rows; auto goes by data.path, and without a path takes the synthetic grammar.
        pub source: SourceKind = SourceKind::Auto,
        /// Files, folders or patterns such as data/*.jsonl.zst, a folder of token shards, a data set on the Hugging Face Hub as hf://owner/set@revision/config:split, https:// addresses, or - for standard input.
        pub path: Option<Paths>,
        /// Several sources instead of path, each with a weight: its share of the training tokens, or of the samples where samples have frames.
        pub mix: Mix = Mix::default(),
        /// How documents of text are shuffled: shuffled finds all of them first and shuffles the whole set, streamed shuffles block by block and reads nothing beforehand; auto streams data that lies on a server.
        pub order: DocumentOrder = DocumentOrder::Auto,
        /// Gigabytes of streamed files that may be kept on disk, in the cache folder; 0 keeps none.
        pub stream_cache_gb: f64 = 0.0,
        /// The JSON key or the column that holds the text.
        pub field: String = "text".into(),
        /// Format of the files; auto decides by name and content. u16 and u32 are token ids without a header.
        pub format: FileFormat = FileFormat::Auto,
        /// Handling of a document that cannot be used: end the run (fail), or leave the document out and count it (skip).
        pub on_error: OnError = OnError::Fail,
        /// The most bytes that a document may have; a longer one cannot be used (see on_error).
        pub max_document_bytes: usize = 16 << 20,
        /// Token that separates documents in token files; defaults to the end-of-text token of the tokeniser, if one is given.
        pub eos: Option<u64>,
        /// A tokenizer.json to use; defaults to the one of the shards, or else to one of model.vocab tokens that is trained on the text.
        pub tokenizer: Option<String>,
        /// Tokens to add to the tokeniser of a model; embedding and head grow to hold them.
        pub new_tokens: Vec<String> = Vec::new(),
        /// Share of the documents that is kept for evaluation and never trained on.
        pub held_out: f64 = 0.05,
        /// Separate files to evaluate on, written as in data.path; all of data.path is then trained on.
        pub held_out_path: Option<Paths>,
        /// Tokens attend only to tokens of their own document.
        pub document_mask: bool = false,
        /// Mean length in tokens of synthetic examples, each trained on by itself; lengths are lognormal, up to model.context.
        pub mean_tokens: Option<usize>,
        /// Lengths of the examples in tokens, shortest first, each for an equal share of them; by default measured from the data.
        pub lengths: Vec<usize> = Vec::new(),
        /// Tokens of these examples that are trained on, a number for each of lengths; by default measured from the data.
        pub learned: Vec<usize> = Vec::new(),
        /// Groups of examples that share a prefix, as four numbers for each equal share of them: examples, tokens of the prefix, tokens after it, and those of these that are trained on; by default measured from the data.
        pub trees: Vec<usize> = Vec::new(),
        /// Images in these examples, a number for each of lengths; frames that repeat an image count once. By default measured from the data.
        pub images: Vec<usize> = Vec::new(),
        /// Patches of these images, or frames, a number for each of lengths; by default measured from the data.
        pub patches: Vec<usize> = Vec::new(),
        /// Images of data.trees, as four numbers for each: images and patches of the prefix, images and patches after it; by default measured from the data.
        pub tree_images: Vec<usize> = Vec::new(),
        /// Patches of the largest image, or frames of the longest video; by default measured from the data.
        pub largest_image: Option<usize>,
        /// Content of the files: documents (text), conversations (chat), texts with a class (classes), images with a class (images), conversations about images (visual_chat), preferred and rejected answers (preference), or videos with a text (foveated).
        pub task: Task = Task::Text,
        /// Chat template: a file, the template itself, or chatml; defaults to the one beside the tokeniser.
        pub template: Option<String>,
        /// Date for chat templates that ask for today's, such as 2025-01-31.
        pub date: Option<String>,
        /// Turns that are trained on: all of the assistant's (assistant), its last (last), each of them in an example of its own (each), or everything (all).
        pub train_on: TrainOn = TrainOn::Assistant,
        /// The most tokens of an example; defaults to model.context.
        pub max_tokens: Option<usize>,
        /// Handling of an example of more tokens: cut its end off (cut), leave it out (skip), or end the run (fail).
        pub too_long: TooLong = TooLong::Cut,
        /// Names of the classes in the order of the model's outputs; by default the labels of the data, sorted.
        pub classes: Vec<String> = Vec::new(),
        /// Column with the text, or with the first text of a pair; by default found by its name.
        pub text_a: Option<String>,
        /// Column with the second text of a pair.
        pub text_b: Option<String>,
        /// Column with the class, by name or number.
        pub label: Option<String>,
        /// Column, such as a document's id, whose equal values stay together: rows that share one are all trained on or all held out.
        pub group: Option<String>,
        /// Rows of a synthetic set of conversations, pairs, images, questions about images, preferences or videos.
        pub synthetic_rows: u64 = 4000,
        /// Column or field with the images, or with the names of their files; by default found by its name.
        pub image: Option<String>,
        /// Folder that names of image files are relative to; defaults to that of the table.
        pub image_root: Option<String>,
        /// Fewest and most tokens of an image beside a text, which is scaled to fit; defaults to those of the checkpoint, or else to [64, 16384].
        pub image_tokens: Option<[usize; 2]>,
        /// Folder that keeps the output of a frozen vision tower for every image: the tower runs once before the first step, and training leaves it out.
        pub vision_cache: Option<String>,
        /// Two texts that enclose the part of an answer that is trained on, such as ["<ANS>", "</ANS>"]; the marks stay in the text and are not trained on.
        pub answer_marks: Option<[String; 2]>,
        /// System message before every question to a sample with frames; defaults to one of flatout's.
        pub system: Option<String>,
        /// Questions to samples with frames that have none, by their source; other sources get one of flatout's.
        pub prompts: Prompts = Prompts::default(),
        /// Number of frames that a still image counts as among samples with frames.
        pub still_frames: usize = 8,
        /// An image whose header gives more pixels than this is not decoded.
        pub max_pixels: u64 = flatout_data::images::MAX_PIXELS,
        /// Number, rows and columns of the training images where they are stored decoded; by default found from the data.
        pub decoded: Vec<usize> = Vec::new(),
        /// Random crop of training images: least and largest share of the area.
        pub crop_scale: [f64; 2] = [0.8, 1.0],
        /// Random crop of training images: least and largest ratio of width to height, relative to that of the model's images.
        pub crop_ratio: [f64; 2] = [0.75, 1.3333333333333333],
        /// Probability that a training image is mirrored.
        pub flip: f64 = 0.5,
        /// Augmentation of training images after the crop: none, or randaugment with timm's operations and strengths.
        pub augment: Augmentation = Augmentation::None,
        /// RandAugment: operations per image, applied one after another.
        pub augment_ops: usize = 2,
        /// RandAugment: mean magnitude, from 0 to 10.
        pub augment_magnitude: f64 = 9.0,
        /// RandAugment: standard deviation of the magnitude, which is drawn anew for every operation.
        pub augment_noise: f64 = 0.5,
        /// RandAugment: probability that a drawn operation is applied.
        pub augment_probability: f64 = 0.5,
        /// Random erasing: probability that a rectangle of a training image is erased.
        pub erase: f64 = 0.0,
        /// Random erasing: least and largest share of the image's area.
        pub erase_area: [f64; 2] = [0.02, 0.3333333333333333],
        /// Random erasing: least and largest ratio of height to width.
        pub erase_ratio: [f64; 2] = [0.3, 3.3333333333333335],
        /// Random erasing: what fills the rectangle: the mean that images are normalised by, a colour around it, or noise around it.
        pub erase_with: ErasedWith = ErasedWith::Mean,
        /// Evaluation: share of both sides of an image that the crop from its middle keeps.
        pub centre_crop: f64 = 1.0,
        /// Evaluation: pixels of the shorter side, or rows and columns, that images are scaled to before the centre crop; replaces centre_crop.
        pub resize: Vec<usize> = Vec::new(),
        /// Filter that images are scaled with, always antialiased.
        pub filter: Filter = Filter::Bilinear,
    }
}

choice! {
    /// Operations that change training images.
    pub enum Augmentation { None = "none", RandAugment = "randaugment" }
}

/// The default of the fewest and the most tokens of an image beside a text, for checkpoints without such bounds: as published with
/// Qwen3-VL.
pub const IMAGE_TOKENS: [usize; 2] = [64, 16384];

impl Data {
    /// The source with `auto` resolved as far as the config alone decides; never `SourceKind::Auto`. `text` also stands for files whose
    /// kind is found when they are opened.
    pub fn source(&self) -> SourceKind {
        match self.source {
            SourceKind::Auto if self.has_files() => SourceKind::Text,
            SourceKind::Auto => SourceKind::Synthetic,
            given => given,
        }
    }

    /// Every path or pattern of data to read.
    pub fn words_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let paths = self.path.iter_mut().chain(&mut self.held_out_path);
        paths.chain(self.mix.0.iter_mut().map(|part| &mut part.path)).flat_map(|paths| &mut paths.0)
    }

    /// A readable name of the data.
    pub fn named(&self) -> String {
        let part = |part: &MixPart| format!("{} ({})", part.path, part.weight);
        match &self.path {
            Some(path) => path.to_string(),
            None if !self.mix.0.is_empty() => self.mix.0.iter().map(part).collect::<Vec<_>>().join(" + "),
            None => self.source().to_string(),
        }
    }

    /// Whether the data is separate examples and not rows that text is cut into.
    pub fn has_examples(&self) -> bool {
        self.task.unit() == Unit::Examples || self.mean_tokens.is_some() || !self.lengths.is_empty()
    }

    pub fn has_files(&self) -> bool {
        self.path.is_some() || !self.mix.0.is_empty()
    }
}

/// A count, or `auto` for one that flatout chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Count {
    #[default]
    Auto,
    Given(usize),
}

impl Count {
    pub fn given(self) -> Option<usize> {
        match self {
            Count::Auto => None,
            Count::Given(n) => Some(n),
        }
    }
}

impl Setting for Count {
    fn kind() -> ValueKind {
        ValueKind::WholeOrAuto
    }
}

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Count::Auto => serializer.serialize_str("auto"),
            Count::Given(n) => serializer.serialize_u64(*n as u64),
        }
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(usize),
            Word(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(n) => Ok(Count::Given(n)),
            Written::Word(word) if word == "auto" => Ok(Count::Auto),
            Written::Word(word) => {
                Err(serde::de::Error::custom(format!("`{word}` is neither auto nor a number")))
            }
        }
    }
}

section! {
    /// Length of the run, batches, and how updates are computed.
    pub struct Train {
        /// Number of updates; give this or epochs.
        pub steps: Option<u64>,
        /// Passes over the data; give this or steps.
        pub epochs: Option<u64>,
        /// Rows per update; with data.task=preference pairs of answers, or with preference.loss=kto labelled answers.
        pub batch: usize,
        /// Rows computed at once; the update is the same for every split of the batch.
        pub micro_batch: Count = Count::Auto,
        /// Micro-batches per update, instead of micro_batch; given beside it, their product is batch.
        pub accumulate: Option<usize>,
        /// Groups of rows whose gradients are summed separately, a power of two: every number of ranks that divides it gives the same bits. auto is the number of ranks.
        pub lanes: Count = Count::Auto,
        /// Seed of initial weights, data order and dropout.
        pub seed: u64 = 0,
        /// Patterns of the paths of parameters that are not trained.
        pub freeze: Vec<String> = Vec::new(),
        /// Parameters with a learning rate or weight decay of their own.
        pub groups: Groups = Groups::default(),
        /// Number of layers, from the first, that recompute=full computes again: all (auto) or this many, while the others keep more.
        pub recompute_layers: Count = Count::Auto,
        /// Layers whose products run in fp8: those that are faster for it on this machine (auto), all, or names such as ffn.down.
        pub fp8_layers: Vec<String> = vec!["auto".into()],
        /// Reaction to max_skipped non-finite updates in a row: go back to the last checkpoint (rollback), stop, or keep skipping them (skip).
        pub on_nonfinite: OnNonfinite = OnNonfinite::Rollback,
        /// Non-finite updates in a row after which on_nonfinite applies; until then each is skipped.
        pub max_skipped: u64 = 10,
        /// Weights of the classes in the loss of texts: none (1 each), balanced (every class counts alike), or a number per class.
        pub class_weights: ClassWeights = ClassWeights::None,
        /// Label smoothing of images: share of the target that is spread over all classes.
        pub label_smoothing: f64 = 0.0,
        /// Mixup: blends images by shares drawn from Beta(mixup, mixup); 0 turns it off.
        pub mixup: f64 = 0.0,
        /// CutMix: pastes a part of another image into an image, its area drawn from Beta(cutmix, cutmix); 0 turns it off.
        pub cutmix: f64 = 0.0,
        /// Decay of an exponential moving average of the weights, such as 0.9999; evaluation and export then use the average. 0 turns it off.
        pub ema: f64 = 0.0,
        /// Early stopping: the run ends after this many evaluations without a better eval.metric.
        pub patience: Option<u64>,
        /// Cross-validation: number of runs to train, each of which holds out another part of the labelled texts.
        pub folds: Option<usize>,
        /// The fold that this run is, from 1; by default all are trained, one after another.
        pub fold: Option<usize>,
    }
}

section! {
    /// How ranks are grouped.
    pub struct Mesh {
        /// Ranks in a group that divides weights, moments and gradients among its own; auto is one group of all ranks.
        pub shards: Count = Count::Auto,
    }
}

choice! {
    /// Reaction to too many non-finite updates in a row.
    pub enum OnNonfinite { Rollback = "rollback", Stop = "stop", Skip = "skip" }
}

impl Train {
    /// Rows computed at once, if the config decides it.
    pub fn micro_batch(&self) -> Option<usize> {
        self.micro_batch.given().or_else(|| self.accumulate.map(|parts| self.batch / parts))
    }
}

section! {
    /// Evaluation on held-out data.
    pub struct Eval {
        /// Updates between evaluations; 0 evaluates only at the end.
        pub every: u64 = 500,
        /// Epochs between evaluations, instead of every.
        pub every_epochs: Option<f64>,
        /// Metric that the best checkpoint and train.patience go by: loss, or a metric of classes, answers or preferences.
        pub metric: Metric = Metric::Loss,
        /// Ends the run at the first evaluation whose eval.metric is as good as this.
        pub goal: Option<f64>,
        /// Held-out rows per evaluation; 0 turns evaluation off.
        pub rows: usize = 256,
        /// Rows computed at once in an evaluation.
        pub micro_batch: Count = Count::Auto,
    }
}

choice! {
    /// The shapes of a schedule after warm-up.
    pub enum ScheduleName {
        Cosine = "cosine",
        Linear = "linear",
        Wsd = "wsd",
        Constant = "constant",
        Converge = "converge",
    }
}

section! {
    /// The learning rate over the run.
    pub struct Schedule {
        /// Shape after warm-up: down along a cosine (cosine) or a line (linear), constant and then down (wsd), constant, or every group along a cosine to final_lr (converge).
        pub name: ScheduleName = ScheduleName::Cosine,
        /// Updates over which the learning rate rises to its peak.
        pub warmup_steps: u64 = 0,
        /// Warm-up as a share of the horizon, instead of warmup_steps.
        pub warmup_share: Option<f64>,
        /// Learning rate at the end as a share of the peak.
        pub final_ratio: f64 = 0.1,
        /// Learning rate at the end that converge brings every group to, from above or from below.
        pub final_lr: Option<f64>,
        /// Updates over which wsd decays; defaults to a fifth of the horizon.
        pub decay_steps: Option<u64>,
        /// Attention windows over the run: the most tokens that a token sees in each of equal parts of the horizon, in order. Evaluation and generation use the model's own window.
        pub windows: Vec<usize> = vec![],
        /// Updates that the schedule spans; defaults to the length of the run as it was begun.
        pub horizon_steps: Option<u64>,
    }
}

section! {
    /// Checkpoints during a run.
    pub struct Checkpoint {
        /// Updates between checkpoints; 0 saves only at the end and when stopped.
        pub every: u64 = 500,
        /// Number of newest checkpoints that are kept.
        pub keep: usize = 2,
        /// Checkpoints whose step is divisible by this are never deleted; 0 turns this off.
        pub keep_every: u64 = 0,
        /// Save whenever eval.metric is the best so far, and keep that checkpoint; best.json names it.
        pub best: bool = false,
    }
}

section! {
    /// How batches are prepared while the model trains.
    pub struct Loader {
        /// Threads that read and tokenise; the order of rows is the same for any number.
        pub workers: Count = Count::Auto,
        /// Batches that are prepared ahead.
        pub prefetch: usize = 4,
    }
}

section! {
    /// Trackers that a run is logged to, in addition to its own files.
    pub struct Track {
        /// Address of an MLflow server that the run is logged to, such as http://localhost:5000; without it nothing is sent.
        pub mlflow: Option<String>,
        /// Experiment in MLflow, which is created if it does not exist; defaults to flatout.
        pub experiment_name: Option<String>,
        /// Name of the run in MLflow; defaults to that of its folder.
        pub run_name: Option<String>,
    }
}

section! {
    /// The log of a run.
    pub struct Log {
        /// Updates between step lines.
        pub every: u64 = 1,
        /// A loss that lies this many robust deviations above the median of the last 128 is reported as a spike; 0 reports none.
        pub spike: f64 = 6.0,
    }
}
