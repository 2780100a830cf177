//! A model for inference: a run or a folder with its config, weights and vocabulary.

use std::path::{Path, PathBuf};

use flatout_data::Vocabulary;
use flatout_models::config::Model;

use crate::UserError;
use crate::config::{Config, Layers, Task, keys_of};
use crate::run::{self, BESIDE};
use crate::switches::Auto;
use crate::switches::memory::Base;
use crate::weights::pretrained::{
    Pretrained, Source, Weights, class_names, folder, lay_area, lay_processor, open,
};

/// A model as inference commands use it.
pub struct Loaded {
    /// A run's own config, or one made for a folder, with overrides.
    pub config: Config,
    /// The largest number of positions the model was made for.
    pub positions: usize,
    pub weights: Weights,
    pub vocabulary: Option<Vocabulary>,
    /// Tokens that end a text.
    pub stops: Vec<u32>,
    /// Whether documents began with a BOS token in training, as they do in runs of flatout.
    pub is_run: bool,
    /// The checkpoint or the folder that holds the weights.
    pub place: PathBuf,
    /// Updates made; present for a run.
    pub step: Option<u64>,
    /// The run or the folder.
    pub dir: PathBuf,
}

/// Placeholders for the training keys of a folder, which has none.
const NO_TRAINING: &str = "[train]\nsteps = 1\nbatch = 1\n[optimizer]\nlr = 1.0\n";

impl Loaded {
    /// Opens a run or a folder. Overrides may change everything except the model: data, eval, loader, switches and preference.
    /// `train.ema=0` reads the trained weights of a run instead of their average.
    pub fn open(named: &Path, overrides: &[String]) -> Result<Loaded, UserError> {
        let source = Source::local(named)?;
        let Pretrained { description, mut weights, checkpoint } = open(&source, &mut |_| {})?;
        // Adapters are applied at run time, as in training: merging them into bf16 weights would lose digits.
        weights.keep_apart(true);
        let mut layers = Layers::default();
        let (dir, is_run) = match &source {
            Source::Run { dir, .. } => {
                // The window schedule of training does not affect inference.
                let mut own = run::config(dir)?;
                own.schedule.windows.clear();
                if let (Auto::Auto, Some(codes)) =
                    (own.switches.memory.base, run::resolved(dir)?.base_codes())
                {
                    own.switches.memory.base = Auto::Given(Base::of(codes));
                }
                layers.file(&own.to_toml(), "config.toml")?;
                (dir.clone(), true)
            }
            _ => {
                layers.file(
                    &format!("{NO_TRAINING}[data]\ntask = \"{}\"\n", task_of(&description.model)),
                    "",
                )?;
                layers.model(&description.model, named.to_string_lossy().as_ref())?;
                (description.folder.clone(), false)
            }
        };
        let mut allowed = vec!["data.", "eval.", "loader.", "switches.", "train.ema", "preference."];
        // Learned positions are resampled for other image sizes.
        let has_grid = matches!(description.model, Model::Vit(_));
        allowed.extend(has_grid.then_some("model.image_size"));
        // A model with two looks may be evaluated with the first look alone.
        allowed.extend(description.model.as_fovea().map(|_| "model.vision.mode"));
        layers.overrides_of(overrides, &allowed, "when a model is used")?;
        let mut config = layers.finish()?;
        description.check_head(&config.model, &named.display().to_string())?;
        // Stored features belong to the training images: for inference a model runs its tower.
        if keys_of(overrides)?.iter().any(|key| key == "data.vision_cache") {
            crate::refuse!("`data.vision_cache` is for training, and inference runs the tower: leave it out");
        }
        config.data.vision_cache = None;
        if let (Model::Vit(vit), Model::Vit(own)) = (&mut config.model, &description.model) {
            vit.grid = Some(own.grid());
        }
        if config.model.image_size().is_some() {
            lay_processor(&mut config, &description.processor, overrides, !is_run)?;
        }
        if !is_run {
            lay_area(&mut config, &description.processor, overrides)?;
        }
        if config.model.classes().is_some() {
            let origin = named.display().to_string();
            config.data.classes = class_names(&config.data.classes, &description.classes, &origin)?;
        }
        if config.train.ema > 0.0 && !weights.are_averages() {
            crate::refuse!("{} kept no average of its weights: leave train.ema out", named.display());
        }
        weights.read_averages(config.train.ema > 0.0);
        let positions = description.model.tokens();
        let vocabulary = match &description.tokenizer {
            Some(path) => Some(Vocabulary::load(path).map_err(|error| UserError(error.sentence))?),
            None => None,
        };
        if let Some(vocabulary) = &vocabulary {
            belongs(vocabulary, &description.model, &description.eos, &dir)?;
        }
        let mut stops = match (&vocabulary, is_run) {
            (Some(vocabulary), true) => ends_of_source(&dir.join(BESIDE), vocabulary)?,
            _ => description.eos,
        };
        stops.extend(vocabulary.as_ref().map(Vocabulary::eos));
        Ok(Loaded {
            config,
            positions,
            weights,
            vocabulary,
            stops,
            is_run,
            step: checkpoint.as_ref().map(|whole| whole.step),
            place: checkpoint.map_or(description.folder, |whole| whole.path),
            dir,
        })
    }
}

/// The task of the data section for a model that comes without data.
fn task_of(model: &Model) -> Task {
    match (model.image_size(), model.classes()) {
        (Some(_), _) => Task::Images,
        (None, Some(_)) => Task::Classes,
        (None, None) => Task::Text,
    }
}

/// Tokens that end a text of the model a run began from, if the run uses that model's tokens.
fn ends_of_source(beside: &Path, vocabulary: &Vocabulary) -> Result<Vec<u32>, UserError> {
    if !beside.join(folder::CONFIG).is_file() || added_to(beside, vocabulary).is_none() {
        return Ok(vec![]);
    }
    folder::ends(beside, &folder::describe(beside)?)
}

/// The tokens that a vocabulary adds to the tokeniser in a folder; `None` if the two differ otherwise.
pub fn added_to(folder: &Path, vocabulary: &Vocabulary) -> Option<Vec<String>> {
    let kept = Vocabulary::load(&folder.join("tokenizer.json")).ok()?;
    let beyond = kept.size()..vocabulary.size();
    let added: Vec<String> = beyond.map(|id| vocabulary.token(id as u32)).collect::<Option<_>>()?;
    let kept = kept.with_tokens(&added).ok()?;
    kept.gives_the_same_tokens(vocabulary).then_some(added)
}

/// Whether a vocabulary can belong to the model: every token has a row in the embedding, and the model's end tokens are in the
/// vocabulary.
pub fn belongs(vocabulary: &Vocabulary, model: &Model, eos: &[u32], folder: &Path) -> Result<(), UserError> {
    let size = vocabulary.size();
    let Some(vocab) = model.vocab() else {
        crate::refuse!("{} has a tokenizer.json, and its model reads no text", folder.display());
    };
    if size > vocab {
        crate::refuse!(
            "the tokenizer.json in {} has {size} tokens and the model {vocab}: it belongs to another model",
            folder.display()
        );
    }
    if let Some(token) = eos.iter().find(|token| **token as usize >= size) {
        crate::refuse!(
            "the model in {} ends texts with token {token}, and its tokenizer.json has only {size}: it belongs to another \
             model",
            folder.display()
        );
    }
    Ok(())
}
