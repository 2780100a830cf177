//! Models in the formats of other libraries: the `config.json`, and the location of each weight among the tensors.
//!
//! Pure functions on values. Each family has its own formats; this module has what they share.

mod architecture;
mod bert;
pub mod class_heads;
mod clip;
mod dinov2;
mod distilbert;
mod encoder;
mod fields;
pub mod fovea;
pub mod gemma;
pub mod gguf;
pub mod gpt2;
mod granite;
pub mod huggingface;
mod layer_kinds;
pub mod llama;
mod mistral;
mod modernbert;
mod olmo2;
mod phi3;
pub mod processor;
mod qwen;
mod qwen3_vl;
mod roberta;
mod rope;
mod smollm3;
pub mod stored;
mod timm;
pub mod vision;
mod vit;

use serde_json::{Map, Value};

use crate::config::{Model, ModelKind};
use processor::Processor;
use stored::{Resampled, Stored};

/// The description of a model in a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The model, with as many positions as the file says. A model of images has no classes if the file has no head.
    pub model: Model,
    /// The tokens that a text may begin and end with, if the file has them.
    pub bos: Vec<u32>,
    pub eos: Vec<u32>,
    /// The names of its classes in the order of its outputs, if the file has them.
    pub classes: Vec<String>,
    /// The preprocessing of images, as far as the file describes it.
    pub processor: Processor,
    /// The library's class, for a decoder's body without a head and without tied embeddings.
    pub headless: Option<&'static str>,
}

/// A model that another library's files can hold.
pub trait Published {
    /// Location of every weight in the library's checkpoints; `shape` gives the extents of ours.
    fn stored(&self, shape: &dyn Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String>;

    /// Other names that a weight may have in a file: of a base model without its head, or of a part of a larger model.
    fn other_names(&self, name: &str) -> Vec<String>;

    /// Whether a file may lack a tensor, which is then initialised at random.
    fn may_lack(&self, _name: &str) -> bool {
        false
    }

    /// Whether a tensor of a checkpoint is redundant, or belongs to a part that is not used.
    fn is_redundant(&self, name: &str) -> bool;

    /// The `config.json` of a model whose texts begin and end with these tokens, or the key that the library does not support.
    fn write(&self, dtype: &str, bos: &[u32], eos: &[u32]) -> Result<Value, String>;

    /// Positions to resample to the grid of the model's own images, where the format requires it.
    fn resampled(&self) -> Option<Resampled> {
        None
    }

    /// The fields of `config.json` that name the classes.
    fn label_fields(&self, names: &[String]) -> Map<String, Value> {
        class_heads::label_fields(names)
    }

    /// The `preprocessor_config.json` of a model of images with this preprocessing.
    fn processor(&self, _processor: &Processor) -> Option<Value> {
        None
    }

    /// Adds the preprocessing to the `config.json`, where the format has it there.
    fn describe_processor(&self, _config: &mut Value, _processor: &Processor) {}
}

/// The tokens that end a text according to a parsed `generation_config.json`; empty if it has none.
pub fn generation_ends(config: &Value) -> Result<Vec<u32>, String> {
    let fields = config.as_object().ok_or("it is not a JSON object")?;
    fields::Fields(fields).tokens("eos_token_id")
}

/// Reads a parsed `config.json`, or returns a sentence that names the unsupported field. The default kind comes last: it
/// accepts whatever no other kind recognises, and its errors say what is missing.
pub fn read(config: &Value) -> Result<Described, String> {
    let kinds = ModelKind::ALL.iter().filter(|kind| **kind != ModelKind::default());
    let others = kinds.into_iter().find_map(|kind| kind.read(config));
    others.or_else(|| ModelKind::default().read(config)).expect("the default kind reads everything")
}
