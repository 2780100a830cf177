//! Models as other libraries publish them: what a `config.json` says, and where each weight lies among its tensors.
//!
//! Pure: values in, values out. A family leads to its own formats; here is what they have in common.

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
    /// The model, made for as many positions as the file says. One that reads images has no classes where the file is of
    /// a model without a head.
    pub model: Model,
    /// Tokens a text may begin and end with, as far as the file names them.
    pub bos: Vec<u32>,
    pub eos: Vec<u32>,
    /// The names of its classes in the order of its outputs, as far as the file names them.
    pub classes: Vec<String>,
    /// How pixels are made of an image, as far as the file says it.
    pub processor: Processor,
    /// The library's class of a decoder's body without a head, where no embeddings are tied to one either.
    pub headless: Option<&'static str>,
}

/// A model that another library's files can hold.
pub trait Published {
    /// Where every weight lies in the library's checkpoints; `shape` gives the extents of ours.
    fn stored(&self, shape: &dyn Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String>;

    /// Other names that a weight may have in a file: of a base model without its head, or of a part of a larger model.
    fn other_names(&self, name: &str) -> Vec<String>;

    /// Whether a file may be without a tensor, which is drawn then.
    fn may_lack(&self, _name: &str) -> bool {
        false
    }

    /// Whether a tensor of a checkpoint follows from the rest, or is of a part that is not used.
    fn is_redundant(&self, name: &str) -> bool;

    /// The `config.json` of a model whose texts begin and end with these tokens, or the key that keeps it from being one
    /// of the library's.
    fn write(&self, dtype: &str, bos: &[u32], eos: &[u32]) -> Result<Value, String>;

    /// The positions that are written for the model's own images, where the format has no others.
    fn resampled(&self) -> Option<Resampled> {
        None
    }

    /// The fields of `config.json` that name the classes.
    fn label_fields(&self, names: &[String]) -> Map<String, Value> {
        class_heads::label_fields(names)
    }

    /// The `preprocessor_config.json` of a model that reads images which are made so.
    fn processor(&self, _processor: &Processor) -> Option<Value> {
        None
    }

    /// Says the same in the `config.json`, where the format has it there.
    fn describe_processor(&self, _config: &mut Value, _processor: &Processor) {}
}

/// The tokens that end a text as a parsed `generation_config.json` says it; none where it does not.
pub fn generation_ends(config: &Value) -> Result<Vec<u32>, String> {
    let fields = config.as_object().ok_or("it is not a JSON object")?;
    fields::Fields(fields).tokens("eos_token_id")
}

/// Reads a parsed `config.json`, or says in a sentence which field stands in the way. The default kind comes last: it takes
/// whatever no other knows, and says what it misses.
pub fn read(config: &Value) -> Result<Described, String> {
    let kinds = ModelKind::ALL.iter().filter(|kind| **kind != ModelKind::default());
    let others = kinds.into_iter().find_map(|kind| kind.read(config));
    others.or_else(|| ModelKind::default().read(config)).expect("the default kind reads everything")
}
