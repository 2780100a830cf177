//! Separate examples, laid out by length: the tasks `chat`, `classes`, `visual_chat`, `preference` and `foveated`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use flatout_data::examples::{
    Date, ExampleKind, ExampleSets, ExampleSpec, FrameSpec, MOST_FRAMES, VisionSpec, open_reporting,
};
use flatout_data::vision::{ImageLoader, Patching, SeenUpdate};
use flatout_data::{
    DataError, Description, ExampleCursor, ExampleTable, Extent, ImageRoom, Layout, Lengths, MicroBatch,
    MixPart, OpenEvent, Rows, Segment, Shape, Tree, UpdateOptions, Updates, Vocabulary, Waited,
    drawn_examples, once, patch_step,
};
use flatout_ir::Role;
use flatout_models::vision::Qwen3VlConfig;
use serde_json::Value;

use super::batch::{Batch, BatchSource, EvalSet, HostTensor, Inputs, Shown, ShownAs};
use super::dataset::{Dataset, Feeding, Share, loader_threads, read_cursor, updates};
use super::preference::{AnswerSplit, ComparedAnswers};
use super::seen::{PatchImages, SeenImages};
use super::text;
use crate::config::resolved::Resolved;
use crate::config::{Config, IMAGE_TOKENS, SYSTEM, Sight, SourceKind, Task, Unit};
use crate::machine::cache_folder;
use crate::run::{BESIDE, tokenizer_path};
use crate::switches::Choose;
use crate::{Failure, UserError, refuse};

/// Examples for training and evaluation, with their tokeniser.
pub struct Examples {
    pub train: Arc<ExampleTable>,
    pub held_out: Arc<ExampleTable>,
    pub vocabulary: Vocabulary,
    /// Names of their classes, in order, if classes are named.
    pub classes: Vec<String>,
    /// The images among their tokens, if there are any.
    pub images: Option<SeenImages>,
    /// Their comparisons, if answers are compared.
    pub compared: Option<ComparedAnswers>,
}

/// Number of synthetic examples: enough that few repeat in a measurement.
const DRAWN: usize = 8192;

/// Opens the data of a task of examples.
pub fn open(
    config: &Config,
    run: Option<&Path>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Box<dyn Dataset>, Failure> {
    Ok(Box::new(read(config, run, say)?))
}

/// Reads, tokenises and splits the examples of a config.
pub fn read(
    config: &Config,
    run: Option<&Path>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Examples, Failure> {
    let ExampleSets { train, held_out, vocabulary, classes, images, frames, mark, .. } =
        example_sets(config, run, config.held_out_fold(), say)?;
    let mut images = SeenImages::of(config, images, frames)?;
    let examples = Examples::new(config, [train, held_out], vocabulary, classes);
    if let Some(SeenImages::Patches(images)) = &mut images {
        images.count_sightings(&examples.train, shares_prefixes(config));
    }
    let sides = || [examples.train.clone(), examples.held_out.clone()];
    let is_compared = config.data.task == Task::Preference;
    let compared = is_compared.then(|| ComparedAnswers::new(sides(), images.clone(), mark));
    Ok(Examples { images, compared, ..examples })
}

/// Examples of the synthetic language with lengths drawn from these.
pub fn drawn(config: &Config, lengths: &Lengths) -> Result<Examples, Failure> {
    let counts = [DRAWN, config.eval.rows];
    let drawn = drawn_examples(lengths, counts, config.train.seed, config.model.vocab().unwrap_or(0))?;
    Ok(Examples::new(config, [drawn.train, drawn.held_out], drawn.vocabulary, vec![]))
}

impl Examples {
    /// From the tables of training and evaluation.
    fn new(
        config: &Config,
        mut tables: [ExampleTable; 2],
        vocabulary: Vocabulary,
        classes: Vec<String>,
    ) -> Examples {
        if shares_prefixes(config) {
            tables.iter_mut().for_each(ExampleTable::share_prefixes);
        }
        let [train, held_out] = tables.map(Arc::new);
        Examples { train, held_out, vocabulary, classes, images: None, compared: None }
    }
}

/// Whether examples share the computation of a common prefix. If this is left open, only the answers of a pair share their
/// prompt, which does not change the order of examples.
pub fn shares_prefixes(config: &Config) -> bool {
    let switches = &config.switches.data;
    let is_free = switches.packing != Choose::Off && switches.length_buckets != Choose::On;
    match switches.shared_prefix {
        Choose::On => true,
        Choose::Off => false,
        Choose::Auto => {
            let is_causal = config.model.as_decoder().is_some_and(|decoder| decoder.is_causal());
            config.together() > 1 && is_free && is_causal
        }
    }
}

impl Examples {
    fn side(&self, share: Share) -> &ExampleTable {
        if share == Share::All { &self.train } else { &self.held_out }
    }
}

/// Tokens and examples per batch when examples with images are evaluated by themselves.
const AT_ONCE: usize = 4096;

/// The lengths of the config's examples; `None` if it trains on rows of text, which are equally long.
pub fn lengths(config: &Config) -> Option<Lengths> {
    let data = &config.data;
    let lengths = Lengths::given(&data.lengths, &data.learned, [&data.images, &data.patches])
        .or_else(|| data.mean_tokens.map(|mean| Lengths::drawn(mean, config.model.tokens())))?;
    let trees = Tree::list(&data.trees, &data.tree_images).expect("validated: whole trees");
    Some(lengths.with_trees(trees).with_largest_image(data.largest_image))
}

/// Whether the config names examples whose lengths only their files say.
pub fn has_unread_lengths(config: &Config) -> bool {
    let is_of_examples = config.data.task.unit() == Unit::Examples;
    is_of_examples && config.data.source() != SourceKind::Synthetic && lengths(config).is_none()
}

/// Opens the examples that a config names. Uses the run's own tokeniser if there is one. `fold` holds out one of several folds
/// instead of a share. `say` receives notes about examples that were left out.
pub fn example_sets(
    config: &Config,
    run: Option<&Path>,
    fold: Option<(usize, usize)>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<ExampleSets, Failure> {
    Ok(open_reporting(&ExampleSpec { fold, ..spec(config, run) }, say)?)
}

/// Converts the config's data section for the reader of examples. The task is not `text`.
pub fn spec(config: &Config, run: Option<&Path>) -> ExampleSpec {
    let (data, sight) = (&config.data, config.sight());
    let documents = text::spec(config, run);
    let kept = run.map(tokenizer_path).filter(|path| path.is_file());
    let tokenizer = kept.or_else(|| data.tokenizer.as_ref().map(PathBuf::from));
    // The files beside a model's initial weights are stored in a folder of the run.
    let beside = tokenizer.as_deref().and_then(Path::parent);
    let template_folders = run.into_iter().chain(beside).map(|folder| folder.join(BESIDE)).collect();
    ExampleSpec {
        task: match data.task {
            Task::Classes => ExampleKind::Classes,
            Task::Chat => ExampleKind::Chat,
            Task::VisualChat => ExampleKind::Visual,
            Task::Preference if config.preference.loss.is_judged() => ExampleKind::Judged,
            Task::Preference if sight == Some(Sight::Frames) => ExampleKind::Frames,
            Task::Preference => ExampleKind::Pairs,
            Task::Foveated => ExampleKind::Frames,
            _ => unreachable!("documents are opened as a corpus"),
        },
        source: match data.source() {
            SourceKind::Synthetic => SourceKind::Synthetic,
            _ => documents.source,
        },
        path: documents.path,
        read: documents.read,
        tokenizer,
        new_tokens: documents.new_tokens,
        vocab: config.model.decoder().vocab,
        template: data.template.clone(),
        template_folders,
        date: data.date.as_deref().and_then(Date::parse),
        train_on: data.train_on,
        max_tokens: data.max_tokens.unwrap_or_else(|| match sight {
            Some(Sight::Frames) => config.model.decoder().context - MOST_FRAMES,
            _ => config.model.decoder().context,
        }),
        too_long: data.too_long,
        vision: (sight == Some(Sight::Images)).then(|| vision_spec(config)),
        frames: (sight == Some(Sight::Frames)).then(|| frame_spec(config, documents.mix)),
        classes: data.classes.clone(),
        text_a: data.text_a.clone(),
        text_b: data.text_b.clone(),
        label: data.label.clone(),
        unlabelled: false,
        group: data.group.clone(),
        held_out: data.held_out,
        held_out_path: documents.held_out_path,
        fold: None,
        rows: data.synthetic_rows,
        seed: config.train.seed,
        workers: documents.workers,
    }
}

/// How the frames of the config's samples are read; the model must read frames.
fn frame_spec(config: &Config, mix: Vec<MixPart>) -> FrameSpec {
    let data = &config.data;
    FrameSpec {
        mix,
        side: config.model.as_fovea().expect("validated: a tower that looks at frames").image_size,
        still_frames: data.still_frames,
        system: data.system.clone().unwrap_or_else(|| SYSTEM.into()),
        prompts: data.prompts.all(),
        pairs: config.together() > 1,
        max_pixels: data.max_pixels,
        cache: cache_folder(),
    }
}

/// How the images of the config's rows are read; the model must have a tower.
fn vision_spec(config: &Config) -> VisionSpec {
    let data = &config.data;
    let tower = config.model.as_qwen3_vl().expect("validated: a model that sees images");
    let shown_percent = config.switches.data.visual_tokens.percent();
    let mut patching =
        Patching { patch: tower.patch, merge: tower.merge, shown_percent, ..Patching::default() };
    let [least, most] = data.image_tokens.unwrap_or(IMAGE_TOKENS).map(|tokens| tokens as u64);
    (patching.least_pixels, patching.most_pixels) =
        (least * patching.token_pixels(), most * patching.token_pixels());
    VisionSpec {
        patching,
        max_pixels: data.max_pixels,
        image_token: Some(tower.image_token as u32),
        root: data.image_root.as_ref().map(PathBuf::from),
        column: data.image.clone(),
        answer_marks: data.answer_marks.clone(),
    }
}

/// The factor of each class in the loss; empty if no classes are learned.
fn class_weights(config: &Config, examples: &ExampleTable) -> Result<Vec<f32>, Failure> {
    match config.model.classes() {
        None => Ok(vec![]),
        Some(classes) => Ok(config.train.class_weights.of(examples, classes)?),
    }
}

/// Refuses a number of class names other than the model's number of classes.
pub fn check_names(names: &[String], classes: usize) -> Result<(), UserError> {
    if !names.is_empty() && names.len() != classes {
        let more = if names.len() > 5 { ", ..." } else { "" };
        let some = names[..names.len().min(5)].join(", ") + more;
        let count = names.len();
        refuse!(
            "the labels are of {count} classes ({some}) and `model.classes` is {classes}: give model.classes={count}"
        );
    }
    Ok(())
}

impl Dataset for Examples {
    fn describe(&self) -> Description {
        let tokens =
            |table: &ExampleTable| (0..table.count()).map(|index| table.len_of(index) as u64).sum::<u64>();
        Description {
            documents: Some(self.train.units() as u64),
            tokens: Some(tokens(&self.train)),
            held_out_documents: Some(self.held_out.units() as u64),
            held_out_tokens: Some(tokens(&self.held_out)),
            is_estimated: false,
        }
    }

    fn vocabulary(&self) -> Option<&Vocabulary> {
        Some(&self.vocabulary)
    }

    fn measure(&self, config: &Config, resolved: &mut Resolved) {
        // The name of each output of the model is stored with the run, whatever files come later.
        resolved.classes = Some(self.classes.clone());
        if config.data.mean_tokens.is_some() || !config.data.lengths.is_empty() {
            return;
        }
        let lengths = Lengths::of(&self.train);
        let mut shares = lengths.as_ref().map_or(vec![], |lengths| lengths.shares().to_vec());
        let mut trees: Vec<Tree> = lengths.iter().flat_map(Lengths::trees).copied().collect();
        let has_images = shares.iter().any(|share| share.images > 0);
        let some = |numbers: Vec<usize>| Some(numbers).filter(|numbers| !numbers.is_empty());
        // The held-out examples must fit too.
        if let (Some(last), Some(held_out)) = (shares.last_mut(), Lengths::of(&self.held_out)) {
            *last = last.most(held_out.most());
            if let Some(last) = trees.last_mut().filter(|_| self.train.together() > 1) {
                *last = last
                    .holding(held_out.trees().iter().map(Tree::extent).fold(Extent::default(), Extent::most));
            }
        }
        resolved.trees = some(trees.iter().flat_map(Tree::numbers).collect());
        if has_images {
            resolved.largest_image = Some(self.train.largest_image().max(self.held_out.largest_image()));
            resolved.images = Some(shares.iter().map(|share| share.images).collect());
            resolved.patches = Some(shares.iter().map(|share| share.patches).collect());
            resolved.tree_images = some(trees.iter().flat_map(Tree::image_numbers).collect());
        }
        if config.model.class_head().is_none() {
            resolved.learned = Some(shares.iter().map(|share| share.learned).collect());
        }
        resolved.lengths = Some(shares.iter().map(|share| share.tokens).collect());
    }

    fn loading(&self, config: &Config, _: Feeding<'_>) -> String {
        match &self.images {
            None => "all examples lie in memory, tokenised".into(),
            Some(_) => {
                let threads = loader_threads(config);
                let plural = if threads == 1 { "" } else { "s" };
                let ahead = match &config.data.vision_cache {
                    None => "decode their images ahead",
                    Some(_) => "read the features of their images ahead",
                };
                format!("all examples lie in memory, tokenised; {threads} thread{plural} {ahead}")
            }
        }
    }

    fn check_classes(&self, config: &Config) -> Result<(), UserError> {
        let Some(classes) = config.model.classes() else { return Ok(()) };
        check_names(&self.classes, classes)?;
        for example in [&self.train, &self.held_out].into_iter().flat_map(|table| table.iter()) {
            match example.label {
                Some(label) if (label as usize) < classes => {}
                Some(label) => {
                    refuse!("an example has class {label}, counted from 0, and `model.classes` is {classes}")
                }
                None => refuse!("`model.head` is classes and an example has none"),
            }
        }
        Ok(())
    }

    fn images(&mut self) -> Option<&mut PatchImages> {
        match &mut self.images {
            Some(SeenImages::Patches(images)) => Some(images),
            _ => None,
        }
    }

    fn steps_of_epochs(&self, config: &Config, epochs: u64) -> Result<u64, Failure> {
        Ok(updates(config, epochs, self.train.epoch_examples()))
    }

    fn source(
        &self,
        config: &Config,
        feeding: Feeding<'_>,
        cursor: Option<Value>,
    ) -> Result<Box<dyn BatchSource>, Failure> {
        let arrangement = feeding.arrangement.expect("plans for examples are arranged");
        let seed = config.train.seed;
        let options = UpdateOptions {
            seed,
            batch: config.train.batch,
            layout: arrangement.layout.clone(),
            is_sorted: arrangement.manner.is_sorted,
            class_weights: class_weights(config, &self.train)?,
        };
        let cursor: Option<ExampleCursor> = read_cursor(cursor)?;
        let cursor = cursor.unwrap_or_else(|| Updates::start(&self.train, seed));
        let lanes = feeding.lanes(config.train.batch);
        let updates = Updates::new(self.train.clone(), options, cursor)?.of_lanes(lanes);
        let plans = 0..arrangement.layout.shapes().len();
        let inputs = plans.map(|shape| Inputs::of(feeding.plans, Role::Grad(shape))).collect();
        let loader = match &self.images {
            None => UpdateLoader::Memory(Box::new(updates)),
            Some(images) => {
                let loader = ImageLoader::new(updates, images.rows(), loader_threads(config))?;
                UpdateLoader::Threads(loader, images.clone())
            }
        };
        Ok(Box::new(ExampleSource {
            loader,
            next: vec![].into_iter(),
            numbers: vec![],
            tokens: [0; 2],
            failed: None,
            epoch: 0.0,
            waited: Waited::default(),
            inputs,
            compared: self.compared.clone(),
        }))
    }

    fn compared(&self) -> Option<&ComparedAnswers> {
        self.compared.as_ref()
    }

    fn layout_alone(&self, config: &Config, share: Share, rows: usize) -> Option<Layout> {
        let (lengths, len) = (Lengths::of(self.side(share))?, config.model.tokens());
        let together = self.side(share).together();
        if !lengths.has_images() {
            let rows = rows * together;
            return Some(Layout::new(vec![Shape::Padded { rows, len }]).comparing(together));
        }
        let most: Extent = std::iter::repeat_n(lengths.most(), together).sum();
        let tokens = (rows * len).min(AT_ONCE).max(most.tokens).next_multiple_of(128);
        let block = config.model.as_qwen3_vl().map_or(1, Qwen3VlConfig::block);
        // The mean number of images in this many tokens, and at least those of the largest example.
        let mean = |count: fn(&Extent) -> usize| {
            let of = lengths.shares().iter().map(count).sum::<usize>() * tokens;
            of / lengths.shares().iter().map(|share| share.tokens).sum::<usize>()
        };
        let patches = most.patches.max(mean(|share| share.patches)).next_multiple_of(patch_step(block));
        let images = most.images.max(mean(|share| share.images));
        let shape = Shape::Packed { tokens, segments: AT_ONCE };
        let room = ImageRoom { patches, images, largest: lengths.largest_image() };
        Some(Layout::new(vec![shape]).with_images(Some(vec![room])).comparing(together))
    }

    fn eval_set(
        &self,
        config: &Config,
        share: Share,
        most: usize,
        layout: Option<&Layout>,
    ) -> Result<Box<dyn EvalSet>, Failure> {
        let table = self.side(share);
        match layout {
            Some(_) if table.count() == 0 => Err(Failure::User(UserError(
                "no example is held out to evaluate on: raise data.held_out or give eval.rows=0".into(),
            ))),
            Some(layout) => {
                let (parts, images) = (once(table, most, layout, &[]), self.images.clone());
                let split = if share == Share::All { AnswerSplit::Train } else { AnswerSplit::HeldOut };
                let compared = self.compared.clone().map(|compared| (compared, split));
                Ok(Box::new(LaidOut { parts, images, compared }))
            }
            None => Ok(Box::new(as_rows(table, most, config.model.tokens()))),
        }
    }
}

/// The source of updates: memory, or threads that decode the images of the next updates.
enum UpdateLoader {
    Memory(Box<Updates>),
    Threads(ImageLoader, SeenImages),
}

impl UpdateLoader {
    fn cursor(&self) -> &ExampleCursor {
        match self {
            UpdateLoader::Memory(updates) => updates.cursor(),
            UpdateLoader::Threads(loader, _) => loader.cursor(),
        }
    }
}

/// Updates of examples.
struct ExampleSource {
    loader: UpdateLoader,
    /// Micro-batches with the pixels or features of their images.
    next: std::vec::IntoIter<(MicroBatch, Vec<u8>)>,
    /// Numbers of all examples of the update.
    numbers: Vec<usize>,
    tokens: [usize; 2],
    /// The error that prevents the next update.
    failed: Option<DataError>,
    epoch: f64,
    waited: Waited,
    /// Inputs of the plan of every shape.
    inputs: Vec<Inputs>,
    compared: Option<ComparedAnswers>,
}

impl BatchSource for ExampleSource {
    fn begin_update(&mut self) {
        let seen = match &mut self.loader {
            UpdateLoader::Memory(updates) => {
                let update = updates.next_update();
                let rows = vec![vec![]; update.parts.len()];
                Ok(SeenUpdate { update, rows })
            }
            UpdateLoader::Threads(loader, _) => loader.next_update(),
        };
        match seen {
            Err(error) => self.failed = Some(error),
            Ok(SeenUpdate { update, rows }) => {
                (self.numbers, self.tokens) = (update.numbers, update.tokens);
                let parts: Vec<_> = update.parts.into_iter().zip(rows).collect();
                (self.next, self.epoch, self.waited) = (parts.into_iter(), update.epoch, update.waited);
            }
        }
    }

    fn next_batch(&mut self) -> Result<Option<Batch>, Failure> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        let Some((laid_out, rows)) = self.next.next() else { return Ok(None) };
        let (role, inputs) = (Role::Grad(laid_out.shape), &self.inputs[laid_out.shape]);
        let images = match &self.loader {
            UpdateLoader::Memory(_) => None,
            UpdateLoader::Threads(_, images) => Some((images, rows)),
        };
        let compared = self.compared.as_ref().map(|compared| (compared, AnswerSplit::Train));
        // The wait for the whole update belongs to its first batch.
        let waited = std::mem::take(&mut self.waited);
        let batch = batch(role, laid_out, images, compared, inputs);
        Ok(Some(Batch { epoch: self.epoch, waited, ..batch }))
    }

    fn of_all_ranks(&self, _: [usize; 2]) -> [usize; 2] {
        self.tokens
    }

    fn numbers(&self) -> Vec<usize> {
        self.numbers.clone()
    }

    fn cursor(&self) -> Value {
        serde_json::to_value(self.loader.cursor()).expect("a cursor has a JSON form")
    }

    fn sample(&self) -> u64 {
        self.loader.cursor().sample
    }

    fn waited(&self) -> Waited {
        match &self.loader {
            UpdateLoader::Memory(updates) => updates.waited(),
            UpdateLoader::Threads(loader, _) => loader.waited(),
        }
    }
}

/// Examples laid out for one plan, in order.
pub struct LaidOut {
    pub parts: Vec<MicroBatch>,
    /// The images among their tokens, if there are any.
    pub images: Option<SeenImages>,
    /// Their comparisons and their split, if answers are compared.
    pub compared: Option<(ComparedAnswers, AnswerSplit)>,
}

impl EvalSet for LaidOut {
    fn samples(&self) -> usize {
        let together = self.compared.as_ref().map_or(1, |(compared, _)| compared.together());
        self.parts.iter().map(|batch| batch.samples.len()).sum::<usize>() / together
    }

    fn batches(&self, _: usize) -> usize {
        self.parts.len()
    }

    fn batch(&self, number: usize, _: usize, inputs: &Inputs) -> Result<Batch, Failure> {
        let mut laid_out = self.parts[number].clone();
        let images = match &self.images {
            None => None,
            Some(images) => Some((images, images.rows().of(&mut laid_out)?)),
        };
        let compared = self.compared.as_ref().map(|(compared, split)| (compared, *split));
        Ok(batch(Role::Eval, laid_out, images, compared, inputs))
    }

    fn shown(&self, number: usize, _: usize) -> Result<Option<Shown>, Failure> {
        let mut at = number;
        for (batch, part) in self.parts.iter().enumerate() {
            if at >= part.samples.len() {
                at -= part.samples.len();
                continue;
            }
            // Where examples share a prefix, a segment belongs to several of them.
            let Some(Segment { start, len }) =
                part.segments.get(at).filter(|_| part.segments.len() == part.samples.len())
            else {
                return Ok(None);
            };
            let tokens = &part.tokens[*start as usize..(*start + *len) as usize];
            let tokens = tokens.iter().filter_map(|token| u32::try_from(*token).ok()).collect();
            return Ok(Some(Shown { batch, at, shown: ShownAs::Tokens(tokens) }));
        }
        Ok(None)
    }
}

/// Examples laid out for the plan of a role, with the pixels or features of their images and the inputs of their comparison, if
/// they have any.
pub fn batch(
    role: Role,
    mut laid_out: MicroBatch,
    images: Option<(&SeenImages, Vec<u8>)>,
    compared: Option<(&ComparedAnswers, AnswerSplit)>,
    inputs: &Inputs,
) -> Batch {
    let images = images.map_or(vec![], |(images, rows)| images.tensors(&mut laid_out, rows, inputs));
    let compared = compared.map_or(vec![], |(compared, split)| compared.tensors(split, &laid_out, inputs));
    let (real_tokens, computed_tokens) = (laid_out.real_tokens(), laid_out.tokens.len());
    let keys = if inputs.has("rows") { laid_out.draw_keys() } else { vec![] };
    let intervals = if inputs.has("intervals") { laid_out.intervals() } else { vec![] };
    let read_rows = inputs.has("answers").then(|| laid_out.read_rows());
    let answers = if role == Role::Eval { laid_out.answered(read_rows.is_some()) } else { vec![] };
    let MicroBatch {
        tokens,
        seen,
        targets,
        weights,
        positions,
        types,
        segments,
        samples,
        labels,
        label_weights,
        left_out,
        lane,
        ..
    } = laid_out;
    let (read, targets, weights) = read_rows.unwrap_or((vec![], targets, weights));
    let room = labels.len();
    let segments = |of: fn(&Segment) -> u32| {
        let all = segments.iter().map(|s| of(s) as i32).chain(std::iter::repeat(0));
        HostTensor::I32(all.take(room).collect())
    };
    let mut tensors = inputs.only([
        ("tokens", Box::new(|| HostTensor::I32(tokens)) as Box<dyn FnOnce() -> HostTensor>),
        ("seen", Box::new(|| HostTensor::I32(seen))),
        ("positions", Box::new(|| inputs.positions(&positions))),
        ("types", Box::new(|| HostTensor::I32(types))),
        ("answers", Box::new(|| HostTensor::I32(read))),
        ("targets", Box::new(|| HostTensor::I32(targets))),
        ("labels", Box::new(|| HostTensor::I32(labels))),
        ("segment_start", Box::new(|| segments(|s| s.start))),
        ("segment_len", Box::new(|| segments(|s| s.len))),
        ("intervals", Box::new(|| HostTensor::I32(intervals))),
        ("rows", Box::new(|| HostTensor::I32(keys))),
        ("weights", Box::new(|| HostTensor::F32(weights))),
        ("label_weights", Box::new(|| HostTensor::F32(label_weights))),
    ]);
    tensors.extend(images.into_iter().chain(compared));
    Batch {
        role,
        lane,
        tensors,
        samples,
        answers,
        unit: "examples",
        real_tokens,
        computed_tokens,
        epoch: 0.0,
        waited: Waited::default(),
        left_out,
    }
}

/// Examples as rows of `context` tokens each, padded at the end, for commands that take rows.
pub fn as_rows(table: &ExampleTable, most: usize, context: usize) -> Rows {
    let layout = Layout::new(vec![Shape::Padded { rows: 1, len: context }]);
    let mut rows = Rows { context, ..Rows::default() };
    for row in once(table, most, &layout, &[]) {
        let MicroBatch { tokens, targets, weights, positions, mut segments, samples, .. } = row;
        rows.tokens.extend(tokens);
        rows.targets.extend(targets);
        rows.weights.extend(weights);
        rows.positions.extend(positions.iter().map(|position| position[0]));
        let len = segments[0].len;
        let rest = Segment { start: len, len: context as u32 - len };
        segments.extend((rest.len > 0).then_some(rest));
        rows.segments.push(segments);
        rows.sample.extend(samples);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;

    fn opened(overrides: &str) -> ExampleSets {
        let overrides: Vec<String> = overrides.split(' ').map(String::from).collect();
        let config = resolve("tiny", &[], &overrides).unwrap();
        example_sets(&config, None, None, &mut |_| {}).unwrap()
    }

    #[test]
    fn a_config_without_files_gives_the_synthetic_sets() {
        let chat = opened("data.task=chat model.vocab=400 data.synthetic_rows=200 data.max_tokens=60");
        assert_eq!(chat.description.rows, 200);
        assert!(chat.train.iter().all(|example| example.tokens.len() <= 60 && example.is_supervised()));
        let pairs = opened(
            "data.task=classes model.head=classes model.classes=2 model.vocab=300 data.synthetic_rows=200 data.held_out=0.2",
        );
        assert_eq!(pairs.classes, ["different", "same"]);
        assert!(pairs.held_out.count() > 10);
    }

    #[test]
    fn a_corpus_is_not_made_of_examples() {
        let config = resolve("tiny", &[], &["data.task=chat".into()]).unwrap();
        let Err(Failure::User(error)) = text::corpus(&config, None) else {
            panic!("a corpus of conversations")
        };
        assert!(error.0.contains("`data.task` is chat"), "{}", error.0);
    }
}
