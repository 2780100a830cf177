//! The typed tree that a run is made from: one struct a section, resolved once and saved with the run.
//!
//! Values reach it through `layers`, which checks every key against `schema` first, so that deserialising cannot
//! fail on what a user typed.

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

/// Everything that decides a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the recipe that the run began from.
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

/// One path or several: written as a text or a list of texts.
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
        /// Share of the training tokens, of samples with frames the share of the samples, of whatever the weights sum to.
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
        /// Where rows come from; auto is what the path holds, and without one the synthetic grammar.
        pub source: SourceKind = SourceKind::Auto,
        /// Files, folders, patterns such as data/*.jsonl.zst, a folder of token shards, a data set of the hub as hf://owner/set@revision/config:split, https:// addresses, or - for standard input.
        pub path: Option<Paths>,
        /// Several sources with weights, which are shares of the training tokens, or of the samples with frames, instead of path.
        pub mix: Mix = Mix::default(),
        /// How documents of text are shuffled: among all of them, which are found first, or streamed in shuffled blocks, which reads nothing beforehand; auto streams what lies on a server.
        pub order: DocumentOrder = DocumentOrder::Auto,
        /// Gigabytes of streamed files that may be kept on disk, in the cache folder; 0 keeps none.
        pub stream_cache_gb: f64 = 0.0,
        /// The JSON key or the column that holds the text.
        pub field: String = "text".into(),
        /// How files are read; auto goes by name and content, u16 and u32 are tokens without a header.
        pub format: FileFormat = FileFormat::Auto,
        /// Whether a document that cannot be used ends the run or is skipped and counted.
        pub on_error: OnError = OnError::Fail,
        /// Largest record that is taken as a document.
        pub max_document_bytes: usize = 16 << 20,
        /// Token that separates documents in token files; the tokeniser's where one is given, otherwise none.
        pub eos: Option<u64>,
        /// A tokenizer.json to use; where not given, that of the shards, or one of model.vocab tokens trained on the text.
        pub tokenizer: Option<String>,
        /// Tokens to add to the tokeniser of a model; its embedding and head grow to hold them.
        pub new_tokens: Vec<String> = Vec::new(),
        /// Share of the documents that is kept for evaluation and never trained on.
        pub held_out: f64 = 0.05,
        /// Files to evaluate on that lie by themselves, as for data.path; then nothing of data.path is kept from training.
        pub held_out_path: Option<Paths>,
        /// Tokens attend only to tokens of their own document.
        pub document_mask: bool = false,
        /// Mean tokens of synthetic examples, each trained on by itself; lengths are lognormal, up to model.context.
        pub mean_tokens: Option<usize>,
        /// Tokens of equal shares of the examples, shortest first; measured where not given.
        pub lengths: Vec<usize> = Vec::new(),
        /// Learned tokens of these shares, in the same order; measured where not given.
        pub learned: Vec<usize> = Vec::new(),
        /// Shares of the trees that shared prefixes make, each as examples, prefix, tokens behind it, learned; measured where not given.
        pub trees: Vec<usize> = Vec::new(),
        /// Images among the tokens of these shares, in the same order, one that is several frames once; measured where not given.
        pub images: Vec<usize> = Vec::new(),
        /// Patches of the images of these shares, or frames, in the same order; measured where not given.
        pub patches: Vec<usize> = Vec::new(),
        /// Images of these trees, each as images and patches of the prefix, images and patches behind it; measured where not given.
        pub tree_images: Vec<usize> = Vec::new(),
        /// Patches of the largest image, or frames of the longest video; measured where not given.
        pub largest_image: Option<usize>,
        /// The content of the files: documents, conversations, texts with a class, images with one, conversations about images, preferences, or videos with a text.
        pub task: Task = Task::Text,
        /// A chat template: a file, its text, or chatml; where not given, the one beside the tokeniser.
        pub template: Option<String>,
        /// The day for templates that ask for today's date, as 2025-01-31.
        pub date: Option<String>,
        /// Which turns are learned: the assistant's, its last, each in an example of its own, or everything.
        pub train_on: TrainOn = TrainOn::Assistant,
        /// The most tokens of an example; model.context where not given.
        pub max_tokens: Option<usize>,
        /// Whether an example of more tokens loses its end, is left out, or ends the run.
        pub too_long: TooLong = TooLong::Cut,
        /// The classes in their order; where empty, those of the labels, sorted.
        pub classes: Vec<String> = Vec::new(),
        /// The column with the text, or the first of a pair; where not given, found by the names columns have.
        pub text_a: Option<String>,
        /// The column with the second text of a pair.
        pub text_b: Option<String>,
        /// The column with the class, by name or number.
        pub label: Option<String>,
        /// A column whose equal values are never both trained on and held out, such as a document's id.
        pub group: Option<String>,
        /// Rows of the synthetic sets of conversations, pairs, images, questions about images, preferences and videos.
        pub synthetic_rows: u64 = 4000,
        /// The column or field with the images, or the names of their files; where not given, found by its name.
        pub image: Option<String>,
        /// The folder that names of image files begin in; the table's own where not given.
        pub image_root: Option<String>,
        /// Tokens that an image beside a text has, least and most: it is scaled to fit; the checkpoint's where not given, or [64, 16384].
        pub image_tokens: Option<[usize; 2]>,
        /// A folder that keeps what a frozen tower makes of every image: it runs once before the first step, and training has no tower.
        pub vision_cache: Option<String>,
        /// Two texts around what is learned of an answer, as ["<ANS>", "</ANS>"]; they stay in the text and are not learned.
        pub answer_marks: Option<[String; 2]>,
        /// The message before every question to a sample with frames; one of ours where not given.
        pub system: Option<String>,
        /// Questions to samples with frames that have none, by their source; ours for sources that are not given.
        pub prompts: Prompts = Prompts::default(),
        /// Frames that a still image stands for among samples with frames.
        pub still_frames: usize = 8,
        /// An image whose header says that it has more pixels is not decoded.
        pub max_pixels: u64 = flatout_data::images::MAX_PIXELS,
        /// How many images training has, their rows and columns, where they lie decoded; found where not given.
        pub decoded: Vec<usize> = Vec::new(),
        /// Share of an image's area that training sees a part of, from and to.
        pub crop_scale: [f64; 2] = [0.8, 1.0],
        /// Ratio of width to height of that part, over that of the model's images, from and to.
        pub crop_ratio: [f64; 2] = [0.75, 1.3333333333333333],
        /// Probability that training sees an image mirrored.
        pub flip: f64 = 0.5,
        /// Operations that change training images after they were cut: none, or randaugment, with timm's operations and strengths.
        pub augment: Augmentation = Augmentation::None,
        /// Operations that RandAugment draws for an image, one after another.
        pub augment_ops: usize = 2,
        /// Mean magnitude of these operations, from 0 to 10.
        pub augment_magnitude: f64 = 9.0,
        /// Deviation of the magnitude, which is drawn anew for every operation.
        pub augment_noise: f64 = 0.5,
        /// Probability that an operation that was drawn is applied.
        pub augment_probability: f64 = 0.5,
        /// Probability that a rectangle of a training image is erased.
        pub erase: f64 = 0.0,
        /// Share of an image's area that is erased, from and to.
        pub erase_area: [f64; 2] = [0.02, 0.3333333333333333],
        /// Ratio of height to width of the erased rectangle, from and to.
        pub erase_ratio: [f64; 2] = [0.3, 3.3333333333333335],
        /// The pixels of an erased rectangle: the mean that images are normalised by, a colour around it, or noise around it.
        pub erase_with: ErasedWith = ErasedWith::Mean,
        /// Share of both sides of an image, in its middle, that evaluation sees.
        pub centre_crop: f64 = 1.0,
        /// Pixels of the shorter side, or rows and columns, that evaluation scales to before cutting, instead of centre_crop.
        pub resize: Vec<usize> = Vec::new(),
        /// The filter that images are scaled with, with antialiasing.
        pub filter: Filter = Filter::Bilinear,
    }
}

choice! {
    /// Operations that change training images.
    pub enum Augmentation { None = "none", RandAugment = "randaugment" }
}

/// The least and the most tokens of an image beside a text, where neither a user nor a checkpoint says it: as published
/// with Qwen3-VL.
pub const IMAGE_TOKENS: [usize; 2] = [64, 16384];

impl Data {
    /// The source with `auto` settled as far as the config decides it; never `SourceKind::Auto`. `text` stands for files
    /// whose kind is found when they are opened.
    pub fn source(&self) -> SourceKind {
        match self.source {
            SourceKind::Auto if self.has_files() => SourceKind::Text,
            SourceKind::Auto => SourceKind::Synthetic,
            given => given,
        }
    }

    /// Every word that names something to read.
    pub fn words_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let paths = self.path.iter_mut().chain(&mut self.held_out_path);
        paths.chain(self.mix.0.iter_mut().map(|part| &mut part.path)).flat_map(|paths| &mut paths.0)
    }

    /// The data that is read, for people.
    pub fn named(&self) -> String {
        let part = |part: &MixPart| format!("{} ({})", part.path, part.weight);
        match &self.path {
            Some(path) => path.to_string(),
            None if !self.mix.0.is_empty() => self.mix.0.iter().map(part).collect::<Vec<_>>().join(" + "),
            None => self.source().to_string(),
        }
    }

    /// Whether examples are learned from one by one, and not rows that text is cut into.
    pub fn has_examples(&self) -> bool {
        self.task.unit() == Unit::Examples || self.mean_tokens.is_some() || !self.lengths.is_empty()
    }

    pub fn has_files(&self) -> bool {
        self.path.is_some() || !self.mix.0.is_empty()
    }
}

/// A count that flatout chooses unless it is given.
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
    /// How much is trained, in what portions.
    pub struct Train {
        /// Updates in the run; give this or epochs.
        pub steps: Option<u64>,
        /// Passes over the data; give this or steps.
        pub epochs: Option<u64>,
        /// Rows an update; of preferences pairs, or judged answers.
        pub batch: usize,
        /// Rows computed at once; the update is the same for every split of the batch.
        pub micro_batch: Count = Count::Auto,
        /// Micro-batches an update: instead of micro_batch, or beside it, and then their product is batch.
        pub accumulate: Option<usize>,
        /// Groups of rows whose gradients are summed apart, a power of two: any number of ranks that divides it gives the same bits; the number of ranks (auto).
        pub lanes: Count = Count::Auto,
        /// Seed of initial weights, data order and dropout.
        pub seed: u64 = 0,
        /// Patterns of parameter paths that are not trained.
        pub freeze: Vec<String> = Vec::new(),
        /// Parameters with a learning rate or weight decay of their own.
        pub groups: Groups = Groups::default(),
        /// Layers, from the first, that recompute=full runs again: all (auto), or this many, while the others keep more.
        pub recompute_layers: Count = Count::Auto,
        /// Layers whose products run in fp8: those that gain by it here (auto), all, or names such as ffn.down.
        pub fp8_layers: Vec<String> = vec!["auto".into()],
        /// After max_skipped updates in a row that are not finite: back to the last checkpoint, stop, or leave them out.
        pub on_nonfinite: OnNonfinite = OnNonfinite::Rollback,
        /// Updates in a row that may be left out before on_nonfinite counts.
        pub max_skipped: u64 = 10,
        /// Weights of classes of texts: none (1 each), balanced (every class alike), or a number a class.
        pub class_weights: ClassWeights = ClassWeights::None,
        /// Share of an image's target that is spread over all classes.
        pub label_smoothing: f64 = 0.0,
        /// Blends images by shares drawn from beta(mixup, mixup); 0 for none.
        pub mixup: f64 = 0.0,
        /// Puts a part of another image into images, of an area drawn from beta(cutmix, cutmix); 0 for none.
        pub cutmix: f64 = 0.0,
        /// Decay of a running average of the weights, which is what is evaluated and exported, as 0.9999; 0 for none.
        pub ema: f64 = 0.0,
        /// Evaluations without a better eval.metric after which the run ends.
        pub patience: Option<u64>,
        /// The number of runs to train, each of which holds out another part of the labelled texts.
        pub folds: Option<usize>,
        /// Which of the folds this run is, from 1; all of them, one after another, where not given.
        pub fold: Option<usize>,
    }
}

section! {
    /// How ranks are grouped.
    pub struct Mesh {
        /// Ranks that divide weights, moments and gradients among themselves, where a run has several such groups; all (auto).
        pub shards: Count = Count::Auto,
    }
}

choice! {
    /// The consequence of too many updates that are not finite.
    pub enum OnNonfinite { Rollback = "rollback", Stop = "stop", Skip = "skip" }
}

impl Train {
    /// Rows computed at once, where the config decides it.
    pub fn micro_batch(&self) -> Option<usize> {
        self.micro_batch.given().or_else(|| self.accumulate.map(|parts| self.batch / parts))
    }
}

section! {
    /// Evaluation on held-out data.
    pub struct Eval {
        /// Updates between evaluations; 0 evaluates only at the end.
        pub every: u64 = 500,
        /// Passes over the data between evaluations, instead of every.
        pub every_epochs: Option<f64>,
        /// The metric that the best checkpoint and train.patience follow: loss, or a number of classes, answers or preferences.
        pub metric: Metric = Metric::Loss,
        /// Ends the run at the first evaluation whose eval.metric is as good as this.
        pub goal: Option<f64>,
        /// Held-out rows an evaluation reads; 0 turns evaluation off.
        pub rows: usize = 256,
        /// Rows computed at once.
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
        /// The shape after warm-up: down along a cosine or a line, level and then down (wsd), level, or all groups along a cosine to final_lr (converge).
        pub name: ScheduleName = ScheduleName::Cosine,
        /// Updates over which the learning rate rises to its peak.
        pub warmup_steps: u64 = 0,
        /// Updates of the rise as a share of the horizon, instead of warmup_steps.
        pub warmup_share: Option<f64>,
        /// Learning rate at the end as a share of the peak.
        pub final_ratio: f64 = 0.1,
        /// The learning rate at the end that converge brings every group to, from above or from below.
        pub final_lr: Option<f64>,
        /// Updates of wsd's descent; a fifth of the horizon where not given.
        pub decay_steps: Option<u64>,
        /// Tokens that a token sees at most in equal parts of the horizon, in order; evaluation and generation see as the model says.
        pub windows: Vec<usize> = vec![],
        /// Updates the schedule spans; those of the run as it started where not given.
        pub horizon_steps: Option<u64>,
    }
}

section! {
    /// Checkpoints of a run on its way.
    pub struct Checkpoint {
        /// Updates between checkpoints; 0 saves only at the end and when stopped.
        pub every: u64 = 500,
        /// Newest checkpoints that are kept.
        pub keep: usize = 2,
        /// Checkpoints of steps divisible by this are kept for ever; 0 for none.
        pub keep_every: u64 = 0,
        /// Save whenever eval.metric is the best so far, and keep that checkpoint; best.json names it.
        pub best: bool = false,
    }
}

section! {
    /// How batches are prepared beside the training.
    pub struct Loader {
        /// Threads that read and tokenise; the order of rows is the same for any number.
        pub workers: Count = Count::Auto,
        /// Batches prepared ahead.
        pub prefetch: usize = 4,
    }
}

section! {
    /// Trackers that are told of a run beside its own files.
    pub struct Track {
        /// The address of an MLflow server that follows the run, as http://localhost:5000; none does where not given.
        pub mlflow: Option<String>,
        /// MLflow's experiment, made where the server has none of that name; flatout where not given.
        pub experiment_name: Option<String>,
        /// The name of the run there; that of its folder where not given.
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
