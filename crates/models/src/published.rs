//! Models as other libraries publish them: what a `config.json` says, and where each weight lies among its tensors.
//!
//! Pure: values in, values out. Every family has a file of its own; here is which one is asked.

use serde_json::Value;

use crate::config::Model;
use crate::gpt2::Stored;
use crate::huggingface;

/// What a `config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The model, made for as many positions as the file says.
    pub model: Model,
    /// Tokens a text may begin and end with, as far as the file names them.
    pub bos: Vec<u32>,
    pub eos: Vec<u32>,
}

/// Reads a parsed `config.json`, or says in a sentence which field stands in the way.
pub fn read(config: &Value) -> Result<Described, String> {
    let huggingface::Described { model, bos, eos } = huggingface::read(config)?;
    Ok(Described { model: Model::Decoder(model), bos, eos })
}

/// Where every weight lies in the library's checkpoints; `shape` gives the extents of ours.
pub fn stored(model: &Model, shape: impl Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String> {
    match model {
        Model::Decoder(decoder) => huggingface::stored(decoder, shape),
        Model::Vit(_) => Err(OF_IMAGES.into()),
    }
}

/// Whether a tensor of a checkpoint follows from the rest, or is of a part that is not used.
pub fn is_redundant(model: &Model, name: &str) -> bool {
    model.as_decoder().is_some_and(|decoder| huggingface::is_redundant(decoder, name))
}

/// The `config.json` of a model whose texts begin and end with these tokens, or the key that keeps it from being one of
/// the library's.
pub fn write(model: &Model, dtype: &str, bos: &[u32], eos: &[u32]) -> Result<Value, String> {
    match model {
        Model::Decoder(decoder) => huggingface::write(decoder, dtype, bos, eos),
        Model::Vit(_) => Err(OF_IMAGES.into()),
    }
}

const OF_IMAGES: &str = "a model that reads images has no such form";
