//! Opens a specification of examples: rows are read, rendered by the template, tokenised and split.

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use flatout_settings::choice;
use serde::Serialize;

use super::encoder::Encoder;
use super::frames::{self, FrameSpec};
use super::labelled::{Classes, LabelCounts, singleton_label};
use super::mask::TrainOn;
use super::row_reader::{Draft, DraftSet, RowReader, is_held_out};
use super::template::{CHATML_TOKENS, ChatTemplate, Date, model_files};
use super::visual::{self, ImageSpan, MAX_IMAGE_BYTES, VisionSpec, VisualReader, image_token};
use super::{Example, ExampleTable, Sighting};
use crate::error::DataError;
use crate::formats::{self, Format, OnError, ReadOptions, Reason, Records, Skipped, SourceLocation};
use crate::order::split::Splitter;
use crate::random::{fingerprint, key};
use crate::text::inspect::LengthSummary;
use crate::text::raw::shown;
use crate::text::source::{OpenEvent, SourceKind, announce};
use crate::text::tokenizer::Vocabulary;
use crate::vision::{FrameStore, ImageStore};

/// The kind of example that rows hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ExampleKind {
    /// Conversations, or prompts and their completions.
    #[default]
    Chat,
    /// Texts or pairs of texts with a class.
    Classes,
    /// Conversations about images, and questions about them.
    Visual,
    /// Two answers to each prompt, of which the first is preferred.
    Pairs,
    /// Answers that are wanted or not.
    Judged,
    /// Videos and still images with a text, from tar shards.
    Frames,
}

choice! {
    /// The policy for examples with more tokens than `max_tokens`.
    pub enum TooLong {
        /// Cuts the end off; an example of which nothing learned remains is skipped.
        Cut = "cut",
        Skip = "skip",
        Fail = "fail",
    }
}

/// A specification of examples: the files to read, and how.
#[derive(Debug, Clone)]
pub struct ExampleSpec {
    pub task: ExampleKind,
    /// [`SourceKind::Synthetic`], or files.
    pub source: SourceKind,
    /// Files, folders and globs; `-` is standard input.
    pub path: Vec<String>,
    /// Options for reading files; `field` is ignored.
    pub read: ReadOptions,
    /// A `tokenizer.json`; without one, a tokeniser of `vocab` tokens is trained.
    pub tokenizer: Option<PathBuf>,
    /// Tokens added to the tokeniser.
    pub new_tokens: Vec<String>,
    /// Size of the model's vocabulary, which the tokeniser must not exceed.
    pub vocab: usize,
    /// `chatml`, a file, or the text of a template, which takes precedence over `template_folders`.
    pub template: Option<String>,
    /// Folders that are searched for a tokeniser's files.
    pub template_folders: Vec<PathBuf>,
    /// The date for templates that ask for it.
    pub date: Option<Date>,
    pub train_on: TrainOn,
    /// Most tokens of an example.
    pub max_tokens: usize,
    pub too_long: TooLong,
    /// Options for images, where rows have some.
    pub vision: Option<VisionSpec>,
    /// Options for samples with frames.
    pub frames: Option<FrameSpec>,
    /// Classes in order; collected from the rows where the list is empty.
    pub classes: Vec<String>,
    pub text_a: Option<String>,
    pub text_b: Option<String>,
    pub label: Option<String>,
    /// Whether rows may lack labels, because these are to be predicted.
    pub unlabelled: bool,
    /// The column that groups rows: all rows of a group are on the same side.
    pub group: Option<String>,
    /// Share of rows that is held out from training.
    pub held_out: f64,
    /// Files to evaluate on in place of a share, given as in `path`.
    pub held_out_path: Vec<String>,
    /// Cross-validation in place of a share: the fold to hold out, and the number of folds.
    pub fold: Option<(usize, usize)>,
    /// Rows of a generated set, and its seed.
    pub rows: u64,
    pub seed: u64,
    /// Threads that render and tokenise. Examples are the same for any number.
    pub workers: usize,
}

impl ExampleSpec {
    /// The given tokeniser, with the added tokens.
    pub(super) fn given_vocabulary(&self) -> Result<Option<Vocabulary>, DataError> {
        let load = |path: &PathBuf| Vocabulary::load(path)?.with_tokens(&self.new_tokens);
        self.tokenizer.as_ref().map(load).transpose()
    }
}

impl Default for ExampleSpec {
    fn default() -> Self {
        Self {
            task: ExampleKind::Chat,
            source: SourceKind::Auto,
            path: Vec::new(),
            read: ReadOptions::default(),
            tokenizer: None,
            new_tokens: Vec::new(),
            vocab: 512,
            template: None,
            template_folders: Vec::new(),
            date: None,
            train_on: TrainOn::Assistant,
            max_tokens: 1024,
            too_long: TooLong::Cut,
            vision: None,
            frames: None,
            classes: Vec::new(),
            text_a: None,
            text_b: None,
            label: None,
            unlabelled: false,
            group: None,
            held_out: 0.05,
            held_out_path: Vec::new(),
            fold: None,
            rows: 2000,
            seed: 0,
            workers: 1,
        }
    }
}

/// Training and held-out examples, with the vocabulary of their tokens.
#[derive(Debug, Clone)]
pub struct ExampleSets {
    pub vocabulary: Vocabulary,
    pub train: ExampleTable,
    pub held_out: ExampleTable,
    /// The place of each example; a pair has its place twice.
    pub train_places: Vec<SourceLocation>,
    pub held_out_places: Vec<SourceLocation>,
    /// Class names in order, where classes are learned.
    pub classes: Vec<String>,
    /// The images of both sides, without duplicates.
    pub images: ImageStore,
    /// The frames of both sides.
    pub frames: Arc<FrameStore>,
    pub description: SetDescription,
    /// Hash that differs where examples, tokeniser or split differ.
    pub mark: String,
}

/// Statistics of an opened set.
#[derive(Debug, Clone, Serialize)]
pub struct SetDescription {
    /// The form of the rows, listed again for each file whose form differs from the file before it.
    pub schema: Vec<String>,
    /// Where the chat template came from, where one was used.
    pub template: Option<String>,
    pub files: usize,
    pub rows: u64,
    /// Examples or pairs of each side.
    pub train: u64,
    pub held_out: u64,
    /// Tokens of both sides.
    pub tokens: u64,
    pub learned_tokens: u64,
    pub lengths: LengthSummary,
    pub classes: Vec<ClassCount>,
    /// The images among the tokens, where rows may have some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<ImageCounts>,
    /// Examples that were cut, and examples that were skipped as too long.
    pub cut: u64,
    pub too_long: u64,
    /// Unusable rows by reason: the reason, their number, and the place of the first.
    pub unusable: Vec<(String, u64, String)>,
}

/// The images of a set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageCounts {
    /// Distinct images.
    pub images: u64,
    /// Examples that show at least one image.
    pub examples: u64,
    /// Tokens that stand for images, in all examples.
    pub tokens: u64,
    /// Rows that were skipped because one of their images cannot be read.
    pub broken: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClassCount {
    pub name: String,
    pub train: u64,
    pub held_out: u64,
}

impl fmt::Display for SetDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let examples = self.train + self.held_out;
        write!(f, "{} from {} rows of {}", plural(examples, "example"), self.rows, self.schema.join("; "))?;
        if let Some(ImageCounts { images, tokens, .. }) = self.images {
            write!(f, "; {} in {} tokens", plural(images, "image"), tokens)?;
        }
        if self.cut + self.too_long > 0 {
            write!(f, "; too long: {} cut, {} left out", self.cut, self.too_long)?;
        }
        Ok(())
    }
}

fn plural(count: u64, word: &str) -> String {
    if count == 1 { format!("1 {word}") } else { format!("{count} {word}s") }
}

/// The token ids of the built-in template in tokenisers that are trained here.
pub(super) const CHATML_IDS: [(&str, u32); 2] = [(CHATML_TOKENS[0], 2), (CHATML_TOKENS[1], 3)];

/// Reads, tokenises and splits. Finds everything that is wrong with the rows.
pub fn open(spec: &ExampleSpec) -> Result<ExampleSets, DataError> {
    open_reporting(spec, &mut |_| {})
}

/// The names of the classes in the rows. Reads only their labels.
pub fn class_names(spec: &ExampleSpec) -> Result<Vec<String>, DataError> {
    let inputs = inputs(spec, &spec.path)?;
    let row_reader =
        RowReader { spec, template: None, pool: &pool(1)?, visual: None, fatal: OnceLock::new() };
    Ok(row_reader.labels(&inputs)?.classes(&inputs.names(), allows_singletons(spec))?.names)
}

/// Whether a label may occur once: with separate rows to evaluate on, a single row can be learned.
fn allows_singletons(spec: &ExampleSpec) -> bool {
    !spec.held_out_path.is_empty()
}

pub(super) fn pool(threads: usize) -> Result<rayon::ThreadPool, DataError> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
    pool.map_err(|error| DataError::environment(format!("No threads can be started: {error}.")))
}

/// As [`open`], and reports skipped rows.
pub fn open_reporting(spec: &ExampleSpec, say: &mut dyn FnMut(OpenEvent)) -> Result<ExampleSets, DataError> {
    check(spec)?;
    if spec.task == ExampleKind::Frames {
        return frames::open(spec, say);
    }
    let whole;
    let spec = match spec.held_out_path.is_empty() {
        true => spec,
        false => {
            whole = ExampleSpec { held_out: 0.0, ..spec.clone() };
            &whole
        }
    };
    let inputs = inputs(spec, &spec.path)?;
    let separate = match spec.held_out_path.as_slice() {
        [] => None,
        path => Some(self::inputs(spec, path)?),
    };
    let names = inputs.names();
    for read in [Some(&inputs), separate.as_ref()].into_iter().flatten() {
        if let Inputs::Files(files) = read {
            announce(files, say);
        }
    }
    let pool = pool(spec.workers)?;
    let given = spec.given_vocabulary()?;
    let template = match spec.task {
        ExampleKind::Classes => None,
        _ => template(spec, given.as_ref())?,
    };
    let vision = vision(spec);
    let visual = vision.as_ref().map(VisualReader::new);
    let row_reader =
        RowReader { spec, template: template.as_ref(), pool: &pool, visual, fatal: OnceLock::new() };
    let is_trained_here = given.is_none();
    let vocabulary = match given {
        Some(vocabulary) => vocabulary,
        None => row_reader.train_vocabulary(&inputs)?,
    };
    vocabulary.fits(spec.vocab)?;
    let encoder = Encoder::new(&vocabulary)?;
    if let Some(visual) = &row_reader.visual {
        let token = image_token(visual.spec, &vocabulary, &encoder, is_trained_here)?;
        visual.token.set(token).expect("it is set once");
    }
    if spec.task == ExampleKind::Classes && encoder.frame_tokens(true) >= spec.max_tokens {
        return Err(DataError::input(format!(
            "data.max_tokens={} leaves no room for a text: the tokeniser alone puts {} tokens around a pair.",
            spec.max_tokens,
            encoder.frame_tokens(true)
        )));
    }
    let mut taken = row_reader.drafts(&inputs, &encoder)?;
    let classes = taken.classes(spec, &names)?;
    if taken.drafts.is_empty() {
        let left_out = taken.left_out(spec);
        return Err(DataError::input(format!(
            "There is no example to learn from in {names}{left_out}: data.path needs some."
        )));
    }
    let mut files = inputs.count();
    let held = match &separate {
        None => {
            let rows = taken.drafts.iter().map(|draft| (draft.hash, &draft.row_images));
            taken.held(spec, &row_reader.side_hashes(rows), &names)?
        }
        Some(separate) => {
            files += separate.count();
            let train = taken.drafts.len();
            taken.append(row_reader.drafts(separate, &encoder)?, spec, &classes, &separate.names(), say)?;
            (0..taken.drafts.len()).map(|at| at >= train).collect()
        }
    };
    let sets = taken.sets(spec, vocabulary, classes, template.as_ref(), files, held);
    tell(spec, &sets, say);
    Ok(sets)
}

fn check(spec: &ExampleSpec) -> Result<(), DataError> {
    if spec.max_tokens < 2 {
        return Err(DataError::input(format!(
            "data.max_tokens={} leaves nothing to predict: give 2 or more.",
            spec.max_tokens
        )));
    }
    if !(0.0..1.0).contains(&spec.held_out) {
        return Err(DataError::input(format!(
            "data.held_out={} is not a share: give 0 or more, below 1.",
            spec.held_out
        )));
    }
    if let Some((part, parts)) = spec.fold.filter(|(part, parts)| *parts < 2 || part >= parts) {
        return Err(DataError::input(format!(
            "There is no fold {part} of {parts}: folds are numbered from 0 to one less than their number."
        )));
    }
    let is_compared = matches!(spec.task, ExampleKind::Pairs | ExampleKind::Judged);
    if is_compared && spec.train_on == TrainOn::Each {
        return Err(DataError::input(
            "data.train_on=each makes an example of every turn, and answers are compared whole: give assistant, last or \
             all.",
        ));
    }
    if spec.task != ExampleKind::Classes && !spec.classes.is_empty() {
        let task = match spec.task {
            ExampleKind::Visual => "visual_chat",
            ExampleKind::Frames => "foveated",
            ExampleKind::Pairs | ExampleKind::Judged => "preference",
            _ => "chat",
        };
        return Err(DataError::input(format!(
            "data.classes is given, and data.task={task} has none: give data.task=classes."
        )));
    }
    Ok(())
}

/// Unusable rows by reason: the reason, their number, and the place of the first.
pub(super) fn unusable(skipped: &Skipped) -> Vec<(String, u64, String)> {
    let words = |(reason, count, place): (Reason, u64, &SourceLocation)| {
        (reason.words().into(), count, place.to_string())
    };
    skipped.reasons().map(words).collect()
}

pub(super) fn tell(spec: &ExampleSpec, sets: &ExampleSets, say: &mut dyn FnMut(OpenEvent)) {
    let described = &sets.description;
    if !described.unusable.is_empty() {
        let total: u64 = described.unusable.iter().map(|(_, count, _)| count).sum();
        let reasons: Vec<String> = described
            .unusable
            .iter()
            .map(|(reason, count, first)| format!("{count} {reason} (first: {first})"))
            .collect();
        say(OpenEvent::LeftOut(format!("{total} rows left out: {}", reasons.join(", "))));
    }
    if described.cut + described.too_long > 0 {
        say(OpenEvent::LeftOut(format!(
            "of examples longer than data.max_tokens={}, {} were cut and {} left out",
            spec.max_tokens, described.cut, described.too_long
        )));
    }
    let unseen: Vec<&str> =
        described.classes.iter().filter(|class| class.train == 0).map(|class| class.name.as_str()).collect();
    if !unseen.is_empty() && !spec.unlabelled {
        say(OpenEvent::Note(format!("no example to train on has the class {}", unseen.join(", "))));
    }
}

/// The source of rows.
pub(super) enum Inputs {
    Files(Vec<formats::Input>),
    Generated,
}

impl Inputs {
    /// Names of the inputs, for messages.
    fn names(&self) -> String {
        match self {
            Inputs::Files(files) => shown(files),
            Inputs::Generated => "the synthetic set".into(),
        }
    }

    fn count(&self) -> usize {
        match self {
            Inputs::Files(files) => files.len(),
            Inputs::Generated => 0,
        }
    }
}

fn inputs(spec: &ExampleSpec, path: &[String]) -> Result<Inputs, DataError> {
    match (spec.source, path.is_empty()) {
        (SourceKind::Synthetic, true) | (SourceKind::Auto, true) => Ok(Inputs::Generated),
        (SourceKind::Synthetic, false) => Err(DataError::input(
            "The synthetic set has no use for data.path: leave it out, or set data.source=text.",
        )),
        (SourceKind::Shards | SourceKind::Bin, _) => Err(DataError::input(
            "Shards and token files hold text for data.task=text only: give JSONL, CSV or parquet as data.path.",
        )),
        (_, true) => Err(DataError::input(
            "data.path is empty: give a file, a folder or a pattern such as data/*.jsonl.",
        )),
        (_, false) => {
            let files = formats::find(path, &spec.read)?;
            if spec.tokenizer.is_none() && files.iter().any(|file| file.path.as_os_str() == "-") {
                return Err(DataError::input(
                    "Standard input can be read only once, so no tokeniser can be trained on it first: give \
                     data.tokenizer.",
                ));
            }
            if let Some(text) = files.iter().find(|file| file.format == Format::Text) {
                return Err(DataError::input(format!(
                    "{} is plain text, which has neither turns nor labels: give JSONL, CSV or parquet, or name the \
                     format with data.format.",
                    text.path.display()
                )));
            }
            Ok(Inputs::Files(files))
        }
    }
}

/// Options for images, where rows may have some: always for conversations about images, and for compared answers where the
/// specification says so.
fn vision(spec: &ExampleSpec) -> Option<VisionSpec> {
    match spec.task {
        ExampleKind::Visual => Some(spec.vision.clone().unwrap_or_default()),
        ExampleKind::Pairs | ExampleKind::Judged => spec.vision.clone(),
        ExampleKind::Chat | ExampleKind::Classes | ExampleKind::Frames => None,
    }
}

/// Whether the first row of the files has images. Needs no model that sees them.
pub fn shows_images(spec: &ExampleSpec) -> Result<bool, DataError> {
    let Inputs::Files(files) = inputs(spec, &spec.path)? else { return Ok(false) };
    let options = ReadOptions { max_image_bytes: MAX_IMAGE_BYTES, ..spec.read.clone() };
    let Some(file) = files.first().filter(|file| file.path.as_os_str() != "-") else { return Ok(false) };
    let first = Records::open(file, &options)?.next().transpose()?;
    Ok(first.is_some_and(|row| visual::shows_images(&row.fields)))
}

/// The template that renders conversations. A tokeniser that is trained here learns the tokens of the built-in one.
pub(super) fn template(
    spec: &ExampleSpec,
    vocabulary: Option<&Vocabulary>,
) -> Result<Option<ChatTemplate>, DataError> {
    let mut folders = spec.template_folders.clone();
    folders.extend(spec.tokenizer.as_ref().and_then(|path| path.parent()).map(PathBuf::from));
    let spelled = |token: u32| vocabulary.and_then(|vocabulary| vocabulary.token(token)).unwrap_or_default();
    let fallback = match vocabulary {
        Some(vocabulary) => {
            vec![("bos_token", spelled(vocabulary.bos())), ("eos_token", spelled(vocabulary.eos()))]
        }
        None => vec![
            ("bos_token", crate::text::synthetic::grammar::BOS.into()),
            ("eos_token", crate::text::synthetic::grammar::EOS.into()),
        ],
    };
    let found = model_files::find(spec.template.as_deref(), &folders, &fallback, spec.date)?;
    // A resumed run has the tokeniser that was trained for it.
    let is_ours = |vocabulary: &Vocabulary| {
        CHATML_IDS.iter().all(|(name, token)| vocabulary.token(*token).as_deref() == Some(name))
    };
    match found.is_none() && vocabulary.is_none_or(is_ours) {
        true => model_files::find(Some(model_files::CHATML_NAME), &folders, &fallback, spec.date),
        false => Ok(found),
    }
}

impl DraftSet {
    /// The classes; sets the class number of each example.
    fn classes(&mut self, spec: &ExampleSpec, names: &str) -> Result<Vec<String>, DataError> {
        if spec.task != ExampleKind::Classes {
            return Ok(Vec::new());
        }
        let classes = match spec.classes.is_empty() {
            false => Some(Classes::given(&spec.classes)?),
            true => {
                let mut collected = LabelCounts::default();
                for draft in &self.drafts {
                    draft.label.iter().for_each(|label| collected.add(label, &draft.place));
                }
                let allows_singletons = allows_singletons(spec);
                if let Some((label, place)) = collected.first_singleton().filter(|_| !allows_singletons) {
                    if self.on_error == OnError::Fail {
                        return Err(singleton_label(label).error(place));
                    }
                    let is_singleton = |draft: &Draft| {
                        draft.label.as_deref().is_some_and(|label| collected.is_singleton(label))
                    };
                    for draft in self.drafts.iter().filter(|draft| is_singleton(draft)) {
                        self.skipped.note(Reason::Label, draft.place.clone());
                    }
                    self.drafts.retain(|draft| !is_singleton(draft));
                }
                let is_labelled = self.drafts.iter().any(|draft| draft.label.is_some());
                (is_labelled || !spec.unlabelled)
                    .then(|| collected.classes(names, allows_singletons))
                    .transpose()?
            }
        };
        let Some(classes) = classes else { return Ok(Vec::new()) };
        self.number(&classes)?;
        Ok(classes.names)
    }

    /// Sets the class number of every draft.
    fn number(&mut self, classes: &Classes) -> Result<(), DataError> {
        let mut kept = Vec::with_capacity(self.drafts.len());
        for mut draft in std::mem::take(&mut self.drafts) {
            match draft.label.as_deref().map(|label| classes.number(label)).transpose() {
                Ok(class) => {
                    draft.class = class;
                    kept.push(draft);
                }
                Err(wrong) if self.on_error == OnError::Fail => return Err(wrong.error(&draft.place)),
                Err(wrong) => self.skipped.note(wrong.reason, draft.place),
            }
        }
        self.drafts = kept;
        Ok(())
    }

    /// The skipped rows, in brackets.
    fn left_out(&self, spec: &ExampleSpec) -> String {
        match (self.skipped.total(), self.too_long) {
            (0, 0) => String::new(),
            (0, long) => format!(" ({long} are longer than data.max_tokens={})", spec.max_tokens),
            _ => format!(" ({})", self.skipped),
        }
    }

    /// Adds the examples to evaluate on, whose classes are those of the training rows.
    fn append(
        &mut self,
        mut separate: DraftSet,
        spec: &ExampleSpec,
        classes: &[String],
        names: &str,
        say: &mut dyn FnMut(OpenEvent),
    ) -> Result<(), DataError> {
        if !classes.is_empty() {
            separate.number(&Classes::given(classes)?)?;
        }
        if separate.drafts.is_empty() {
            let left_out = separate.left_out(spec);
            return Err(DataError::input(format!(
                "There is no example to evaluate on in {names}{left_out}: data.held_out_path needs some."
            )));
        }
        let trained: HashSet<u64> = self.drafts.iter().map(|draft| draft.hash).collect();
        let seen = separate.drafts.iter().filter(|draft| trained.contains(&draft.hash)).count();
        if seen > 0 {
            say(OpenEvent::Note(format!(
                "{seen} of {} examples in {names} are trained on too, so the evaluation does not test on new data",
                separate.drafts.len()
            )));
        }
        let shown: HashSet<u128> =
            self.drafts.iter().flat_map(|draft| draft.row_images.iter().copied()).collect();
        let shows_one = |draft: &&Draft| draft.row_images.iter().any(|image| shown.contains(image));
        let again = separate.drafts.iter().filter(shows_one).count();
        if again > 0 {
            say(OpenEvent::Note(format!(
                "{again} of {} examples in {names} show an image that is trained on too",
                separate.drafts.len()
            )));
        }
        self.rows += separate.rows;
        self.cut += separate.cut;
        self.too_long += separate.too_long;
        self.skipped.merge(&separate.skipped);
        for schema in separate.schema {
            if self.schema.last() != Some(&schema) {
                self.schema.push(schema);
            }
        }
        self.drafts.extend(separate.drafts);
        Ok(())
    }

    /// For every draft, whether it is held out, by the fold or the share; the hashes decide.
    fn held(&self, spec: &ExampleSpec, hashes: &[u64], names: &str) -> Result<Vec<bool>, DataError> {
        if let Some((part, parts)) = spec.fold {
            let held: Vec<bool> = hashes.iter().map(|hash| is_held_out(spec, *hash)).collect();
            if held.iter().all(|held| *held) || !held.contains(&true) {
                return Err(DataError::input(format!(
                    "Fold {part} of {parts} of {names} has nothing to evaluate on or nothing to train on: give more \
                     rows, or fewer folds."
                )));
            }
            return Ok(held);
        }
        let mut splitter = Splitter::new(spec.held_out);
        hashes.iter().for_each(|hash| splitter.push(Some(*hash)));
        let split = splitter.finish(names)?;
        let mut held = vec![false; self.drafts.len()];
        (0..split.held_out.count()).for_each(|at| held[split.held_out.at(at) as usize] = true);
        Ok(held)
    }

    fn sets(
        self,
        spec: &ExampleSpec,
        vocabulary: Vocabulary,
        classes: Vec<String>,
        template: Option<&ChatTemplate>,
        files: usize,
        held: Vec<bool>,
    ) -> ExampleSets {
        let mut counts: Vec<ClassCount> =
            classes.iter().map(|name| ClassCount { name: name.clone(), train: 0, held_out: 0 }).collect();
        let table = || match spec.task {
            ExampleKind::Pairs => ExampleTable::of_pairs(),
            _ => ExampleTable::default(),
        };
        let mut sides = [table(), table()];
        let mut places = [Vec::new(), Vec::new()];
        let mut lengths = Vec::with_capacity(self.drafts.len());
        let mut learned = 0;
        let images = vision(spec).map(|vision| ImageStore::new(vision.patching, vision.max_pixels));
        let has_images = images.is_some();
        let merge = vision(spec).map_or(1, |vision| vision.patching.merge);
        let mut images = images.unwrap_or_default();
        let (mut image_examples, mut image_tokens) = (0, 0);
        let kind = match spec.task {
            ExampleKind::Classes => 0,
            ExampleKind::Chat => 1,
            ExampleKind::Visual => 2,
            ExampleKind::Pairs => 3,
            ExampleKind::Judged => 4,
            ExampleKind::Frames => unreachable!("samples with frames are opened by their own module"),
        };
        let mut mark = key(vocabulary.fingerprint(), kind);
        for (draft, is_held) in self.drafts.into_iter().zip(held) {
            let bytes = |values: &mut dyn Iterator<Item = u32>| {
                values.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
            };
            mark = key(mark, fingerprint(&bytes(&mut draft.tokens.iter().copied())));
            mark = key(mark, fingerprint(&bytes(&mut draft.weights.iter().map(|weight| weight.to_bits()))));
            mark = key(mark, key(u64::from(is_held), draft.class.map_or(u64::MAX, u64::from)));
            let sighting = |seen: &ImageSpan| Sighting {
                start: seen.start as u32,
                image: images.number(&seen.image),
                grid: seen.image.grid,
                merge,
                tokens: seen.tokens as u32,
                hash: seen.image.hash as u64,
            };
            let sightings: Vec<Sighting> = draft.images.iter().map(sighting).collect();
            for seen in &draft.images {
                let hash = seen.image.hash;
                mark = key(mark, key(seen.start as u64, key(hash as u64, (hash >> 64) as u64)));
                image_tokens += seen.tokens as u64;
            }
            image_examples += u64::from(!sightings.is_empty());
            lengths.push(draft.tokens.len() as u64);
            learned += draft.weights.iter().filter(|weight| **weight > 0.0).count() as u64;
            if let Some(count) = draft.class.and_then(|class| counts.get_mut(class as usize)) {
                if is_held { count.held_out += 1 } else { count.train += 1 }
            }
            let side = usize::from(is_held);
            sides[side].push(Example {
                tokens: &draft.tokens,
                weights: &draft.weights,
                label: draft.class,
                images: &sightings,
            });
            sides[side].set_second(draft.second);
            places[side].push(draft.place);
        }
        let [train, held_out] = sides;
        let [train_places, held_out_places] = places;
        let broken = self.skipped.reasons().filter(|(reason, _, _)| reason.is_of_image());
        let image_counts = has_images.then(|| ImageCounts {
            images: images.count() as u64,
            examples: image_examples,
            tokens: image_tokens,
            broken: broken.map(|(_, count, _)| count).sum(),
        });
        let description = SetDescription {
            schema: self.schema,
            template: template.map(|template| template.shown.clone()),
            files,
            rows: self.rows,
            train: train.units() as u64,
            held_out: held_out.units() as u64,
            tokens: lengths.iter().sum(),
            learned_tokens: learned,
            lengths: LengthSummary::of("tokens", lengths),
            classes: counts,
            images: image_counts,
            cut: self.cut,
            too_long: self.too_long,
            unusable: unusable(&self.skipped),
        };
        ExampleSets {
            vocabulary,
            train,
            held_out,
            train_places,
            held_out_places,
            classes,
            images,
            frames: Arc::default(),
            description,
            mark: format!("{mark:016x}"),
        }
    }
}
