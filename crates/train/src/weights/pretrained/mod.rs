//! Sources of pretrained models: a folder in the Hugging Face layout, a name on its hub, or a run of flatout.
//!
//! `model.from` names one, and inference commands take one. Nothing is ever unpickled.

mod bitsandbytes;
mod classes;
pub mod folder;
pub mod hub;
mod origin;
mod pixels;
mod weights;

pub use classes::class_names;
pub use origin::{Origin, begin, beginning, pin, resume};
pub use pixels::{lay_area, lay_processor, processor_of};
pub use weights::{TensorLocation, Weights, narrow, parameters};

use std::path::{Path, PathBuf};

use flatout_data::Vocabulary;
use flatout_ir::passes::{base, fp8_base};
use flatout_ir::{Codes, Precision};
use flatout_models::config::{Model, Positions};
use flatout_models::library::processor::Processor;
use flatout_models::vision;

use self::hub::{Hub, Name, Snapshot, Want, Watch};
use crate::Config;
use crate::UserError;
use crate::refuse;
use crate::run::checkpoint;
use crate::run::{self, BESIDE};
use crate::switches::compute::PRECISION;
use crate::switches::memory::Base;
use crate::weights::adapters;
use crate::weights::peft;
use crate::weights::quantized::StoredBase;

/// Location of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A run, and optionally the step of one of its checkpoints.
    Run {
        dir: PathBuf,
        step: Option<u64>,
    },
    /// A folder with a `config.json`.
    Folder(PathBuf),
    Hub(Name),
}

impl Source {
    /// The source that `model.from` names: something on this machine, otherwise a name on the hub.
    pub fn parse(text: &str) -> Result<Source, UserError> {
        if let Some(found) = Source::here(Path::new(text))? {
            return Ok(found);
        }
        let first = Path::new(text).components().next();
        let looks_local =
            text.starts_with(['.', '/', '~']) || first.is_some_and(|part| Path::new(&part).is_dir());
        match Name::parse(text).filter(|_| !looks_local) {
            Some(name) => Ok(Source::Hub(name)),
            None => refuse!(
                "`model.from` is {text}, and there is no such folder or run; a name on the hub is ORG/NAME or \
                 ORG/NAME@revision"
            ),
        }
    }

    /// An existing run or folder, for inference commands.
    pub fn local(path: &Path) -> Result<Source, UserError> {
        match Source::here(path)? {
            Some(found) => Ok(found),
            None if path.is_file() => refuse!(
                "{} is a file: name a run's directory or a model folder in Hugging Face format",
                path.display()
            ),
            None => refuse!(
                "there is no run in {0}, and no model in the Hugging Face layout: {0} does not exist; {1}",
                path.display(),
                run::other_runs(path)
            ),
        }
    }

    fn here(path: &Path) -> Result<Option<Source>, UserError> {
        if run::is_run(path) {
            return Ok(Some(Source::Run { dir: path.to_path_buf(), step: None }));
        }
        if path.join(folder::CONFIG).is_file() {
            return Ok(Some(Source::Folder(path.to_path_buf())));
        }
        if path.join(peft::CONFIG).is_file() {
            refuse!(
                "{} has an adapter and no model: give the model that it was trained with as model.from, and this folder as \
                 adapter.from",
                path.display()
            );
        }
        if path.is_dir() {
            refuse!(
                "there is no run in {} and no model: it has neither config.toml nor {}",
                path.display(),
                folder::CONFIG
            );
        }
        let text = path.to_string_lossy();
        let Some((dir, step)) = text.rsplit_once('@').filter(|(dir, _)| run::is_run(Path::new(dir))) else {
            return Ok(None);
        };
        if step == "best" {
            let Some(best) = checkpoint::best(&run::checkpoints_dir(Path::new(dir))) else {
                refuse!("{dir} has no best checkpoint: checkpoint.best=true or train.patience keeps one");
            };
            return Ok(Some(Source::Run { dir: dir.into(), step: Some(best.step) }));
        }
        match step.parse() {
            Ok(step) => Ok(Some(Source::Run { dir: dir.into(), step: Some(step) })),
            Err(_) => refuse!("{text} needs a step or `best` after the @, and `{step}` is neither"),
        }
    }

    /// Whether `asked` can mean this source: the same location, and no other step or revision.
    fn is_meant_by(&self, asked: &Source) -> bool {
        let same = |one: &Path, other: &Path| match (one.canonicalize(), other.canonicalize()) {
            (Ok(one), Ok(other)) => one == other,
            _ => one == other,
        };
        match (self, asked) {
            (Source::Run { dir, step }, Source::Run { dir: other, step: wanted }) => {
                same(dir, other) && (wanted.is_none() || wanted == step)
            }
            (Source::Folder(one), Source::Folder(other)) => same(one, other),
            (Source::Hub(one), Source::Hub(other)) => {
                one.repo == other.repo && (other.revision.is_none() || other.revision == one.revision)
            }
            _ => false,
        }
    }
}

/// Whether a command's `asked` means the source `own` that a run began from. Branches move and runs continue, so a run's own
/// config is pinned to a commit or a step.
pub fn same(own: &str, asked: &str) -> bool {
    own == asked
        || matches!((Source::parse(own), Source::parse(asked)), (Ok(own), Ok(asked)) if own.is_meant_by(&asked))
}

/// A source's description of its model, without weights.
#[derive(Clone, Debug)]
pub struct Description {
    /// `context` is the largest number of positions the model was made for.
    pub model: Model,
    /// Tokens that begin and end a text, if they are named.
    pub bos: Vec<u32>,
    pub eos: Vec<u32>,
    /// The names of its classes in the order of its outputs, if they are known.
    pub classes: Vec<String>,
    /// The preprocessing of images, if it is known.
    pub processor: Processor,
    /// The library's class of a decoder body without a head, if no embeddings are tied to a head either.
    pub headless: Option<&'static str>,
    pub tokenizer: Option<PathBuf>,
    /// The value of `model.from` that means this source from anywhere on this machine; for an opened run including its step.
    pub pinned: String,
    /// The folder with the files beside the weights.
    pub folder: PathBuf,
}

impl Description {
    /// Refuses a body without a head for a model that predicts tokens and so needs one.
    pub fn check_head(&self, model: &Model, origin: &str) -> Result<(), UserError> {
        match self.headless {
            Some(class) if model.class_head().is_none() => refuse!(
                "{origin} has a {class}, which has no head, and its embeddings are not tied to one: train it with \
                 model.head=classes, for which a head is drawn, or take a checkpoint with its head of tokens"
            ),
            _ => Ok(()),
        }
    }
}

/// Reads the description of a model. For a name on the hub this downloads its small files.
pub fn describe(source: &Source) -> Result<Description, UserError> {
    match source {
        Source::Run { dir, step } => {
            let config = run::config(dir)?;
            let processor = processor_of(&config);
            let Config { mut model, data, .. } = config;
            *model.from_mut() = None;
            if let Some(tower) = model.as_fovea_mut() {
                tower.from = None;
            }
            // The limit of rotary positions belongs to the original model, not to the rows it was trained on last.
            let beside = dir.join(BESIDE);
            if let Model::Decoder(decoder) = &mut model
                && decoder.positions != Positions::Learned
                && beside.join(folder::CONFIG).is_file()
            {
                decoder.context = decoder.context.max(folder::describe(&beside)?.model.tokens());
            }
            let tokenizer = crate::run::tokenizer_path(dir);
            Ok(Description {
                model,
                bos: vec![],
                eos: vec![],
                classes: data.classes,
                processor,
                headless: None,
                tokenizer: tokenizer.is_file().then_some(tokenizer),
                pinned: pinned(dir, *step),
                folder: dir.clone(),
            })
        }
        Source::Folder(folder) => describe_folder(folder, absolute(folder)),
        Source::Hub(name) => {
            let Snapshot { folder, commit } =
                Hub::from_environment()?.snapshot(name, Want::Description, &mut |_| {})?;
            describe_folder(&folder, format!("{}@{commit}", name.repo))
        }
    }
}

fn describe_folder(folder: &Path, pinned: String) -> Result<Description, UserError> {
    let described = folder::describe(folder)?;
    let eos = folder::ends(folder, &described)?;
    let tokenizer = folder.join("tokenizer.json");
    Ok(Description {
        model: described.model,
        bos: described.bos,
        eos,
        classes: described.classes,
        processor: described.processor,
        headless: described.headless,
        tokenizer: tokenizer.is_file().then_some(tokenizer),
        pinned,
        folder: folder.to_path_buf(),
    })
}

fn pinned(run: &Path, step: Option<u64>) -> String {
    step.map_or(absolute(run), |step| format!("{}@{step}", absolute(run)))
}

fn absolute(path: &Path) -> String {
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf()).display().to_string()
}

/// A model with the locations of all its values: every name, type and shape is checked, and no weight is read yet.
#[derive(Debug)]
pub struct Pretrained {
    pub description: Description,
    pub weights: Weights,
    /// The checkpoint and its step; present for a run.
    pub checkpoint: Option<checkpoint::Whole>,
}

/// Opens a source for its weights, and downloads missing files of a name on the hub.
pub fn open(source: &Source, watch: Watch<'_>) -> Result<Pretrained, UserError> {
    if let Source::Hub(name) = source {
        Hub::from_environment()?.snapshot(name, Want::Everything, watch)?;
    }
    let mut description = describe(source)?;
    match source {
        Source::Run { dir, step } => {
            let whole = checkpoint_of(dir, *step)?;
            description.pinned = pinned(dir, Some(whole.step));
            let weights = run_weights(dir, &whole, &description.model)?;
            Ok(Pretrained { description, weights, checkpoint: Some(whole) })
        }
        Source::Folder(_) | Source::Hub(_) => {
            let is_headless = description.headless.is_some();
            let weights = folder::weights(&description.folder, &description.model, is_headless)?;
            Ok(Pretrained { description, weights, checkpoint: None })
        }
    }
}

/// Opens the source of a model, and that of its tower if it is another one. Only the learned positions that the model has are
/// read; the source may have more.
fn open_for(model: &Model, from: &str, watch: Watch<'_>) -> Result<Pretrained, UserError> {
    let mut pretrained = open(&Source::parse(from)?, &mut *watch)?;
    let instead = "begin from what that run began from, with adapter.from and its exported adapters";
    adapters::check_merge(&pretrained.description.model, pretrained.weights.adapters(), instead)?;
    if let Some(from) = model.as_fovea().and_then(|tower| tower.from.as_ref()) {
        pretrained.weights.insert_scoped(vision::SCOPE, open(&Source::parse(from)?, watch)?.weights);
    }
    if let Some(decoder) = model.as_decoder().filter(|decoder| decoder.positions == Positions::Learned) {
        pretrained.weights.read_first_rows("positions.weight", decoder.context);
    }
    Ok(pretrained)
}

/// Checks everything about the model a config begins from, before any device work: the hub's files are there, every tensor has
/// its type and shape, the tokeniser belongs to the model, and the trained model can be exported if the source can.
pub fn check(config: &Config, watch: Watch<'_>) -> Result<(), UserError> {
    let Some(from) = config.model.from() else { return Ok(()) };
    let opened = open_for(&config.model, from, watch)?;
    if let Some(codes) = config.switches.memory.codes() {
        if let Some(stored) = opened.weights.stored_as_codes() {
            let [its, own] = [stored.codes(), codes].map(|codes| Base::of(codes).name());
            refuse!(
                "`model.from` is {from}, a run that keeps its base in {its}, and base={own} would quantise it again: export it \
                 and begin from the export, or give base=bf16"
            );
        }
        opened.weights.check_packed(codes, &base::linear(&config.model.build(config.model.least())))?;
    }
    // An encoder without a head is meant to get one that the library has.
    let source = &opened.description.model;
    let has_library = source.as_decoder().is_some_and(|text| text.encoder) || exportable(source).is_ok();
    // Non-square images, which prevent an export, are reported where they are configured.
    if let Err(why) = exportable(&config.model)
        && config.model.as_decoder().is_some()
        && has_library
    {
        refuse!("the model of {from} can be exported, but the model of this run could not: {why}");
    }
    if let Some(path) = opened
        .description
        .tokenizer
        .filter(|path| config.data.tokenizer.as_deref().is_some_and(|given| Path::new(given) == path))
    {
        let vocabulary = Vocabulary::load(&path).map_err(|error| UserError(error.sentence))?;
        crate::weights::loaded::belongs(
            &vocabulary,
            &config.model,
            &opened.description.eos,
            &opened.description.folder,
        )?;
    }
    Ok(())
}

/// Whether some library has such a model, in either type of weights; the error names the key that prevents it.
fn exportable(model: &Model) -> Result<(), String> {
    let published = model.published()?;
    let write = |dtype: &str| published.write(dtype, &[], &[]).map(|_| ());
    write("float32").or_else(|_| write("bfloat16"))
}

/// The value of `model.from` that means exactly this source: a commit instead of a branch, a step instead of the newest.
fn exactly(source: &Source) -> Result<String, UserError> {
    match source {
        Source::Run { dir, step } => Ok(pinned(dir, Some(checkpoint_of(dir, *step)?.step))),
        other => Ok(describe(other)?.pinned),
    }
}

/// The checkpoint of a step, or the newest complete one.
fn checkpoint_of(dir: &Path, step: Option<u64>) -> Result<checkpoint::Whole, UserError> {
    let checkpoints = run::checkpoints_dir(dir);
    if let Some(step) = step {
        return checkpoint::at(&checkpoints, step);
    }
    match checkpoint::latest(&checkpoints)?.whole {
        Some(whole) => Ok(whole),
        None => refuse!("the run in {} has no checkpoint yet: let it train until it saves", dir.display()),
    }
}

/// A run's weights: those of a checkpoint on top of those it began with, of which only the frozen ones are still needed.
fn run_weights(dir: &Path, whole: &checkpoint::Whole, model: &Model) -> Result<Weights, UserError> {
    let mut wanted = parameters(model);
    let cannot =
        |error: std::io::Error| UserError(format!("{} cannot be read: {error}", whole.path.display()));
    let (_, file) = checkpoint::open(&whole.path).map_err(cannot)?;
    let all_there = wanted.keys().all(|path| file.entries().contains_key(path));
    let config = run::config(dir)?;
    let graph = config.model.build(config.model.least());
    let adapters = adapters::of(&config, &graph)?;
    wanted.extend(adapters::parameters(&graph, &adapters).into_iter().map(|s| (s.path, (s.ty, s.init))));
    let mut began_from = None;
    let mut weights = match config.model.from() {
        Some(from) if !all_there => {
            let mut base = open_for(&config.model, from, &mut |_| {})?.weights;
            base.draw_rest(&config.model, config.train.seed);
            began_from = base.stored_as_codes().map(StoredBase::codes);
            let mut base = base.into_base();
            base.expect(&Origin::of(dir)?.frozen);
            base
        }
        _ => Weights::drawn(config.train.seed),
    };
    // Trained weights are in the checkpoint; only the others were stored as codes.
    let resolved = run::resolved(dir)?;
    let stored = resolved.base_codes().map(|codes| {
        let mut names = base::linear(&graph);
        names.retain(|name| !file.entries().contains_key(name));
        match codes {
            Codes::Nf4 => {
                let narrow = resolved.switches.get(PRECISION.name).is_some_and(|state| {
                    Precision::ALL.iter().any(|precision| precision.name() == state && precision.is_narrow())
                });
                StoredBase::Nf4 { weights: names, narrow }
            }
            Codes::Fp8 => {
                let known = |name: String| {
                    let slot = graph.slot(graph.find_slot(&name).expect("a weight of the model"));
                    (name, (slot.ty.clone(), slot.init))
                };
                let groups = fp8_base::groups(&graph, &names).into_iter();
                StoredBase::Fp8(groups.map(|group| group.into_iter().map(known).collect()).collect())
            }
        }
    });
    weights.overlay(&whole.path, file, &wanted)?;
    weights.adapt(adapters);
    if let Some(stored) = stored {
        if let Some(codes) = began_from {
            let [its, own] = [codes, stored.codes()].map(|codes| Base::of(codes).name());
            refuse!(
                "the run in {} keeps its base in {own}, and it began from a run that kept its own in {its}: export that one and \
                 begin from the export",
                dir.display()
            );
        }
        weights.read_as_stored(stored);
    }
    Ok(weights)
}
