//! SmolLM3 as the `transformers` library describes it: a Llama of which some layers do not rotate, every fourth unless the file
//! lists them.

use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::fields::Fields;
use super::layer_kinds::{self, no_padding};
use super::llama::{self, DEFAULTS, Defaults};
use crate::config::DecoderConfig;

pub(crate) const SMOLLM3: Architecture = Architecture {
    model_type: "smollm3",
    class: "SmolLM3ForCausalLM",
    bodies: &["SmolLM3Model"],
    class_of_classes: Some("SmolLM3ForSequenceClassification"),
    read,
    write,
    stored: llama::stored_whole,
    scales_embeddings: false,
};

/// The field with a 1 for each layer that rotates.
const ROTATED: &str = "no_rope_layers";

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let defaults = Defaults { kv_heads: Some(4), context: 32768, rope_theta: 2e6, tied: true, ..DEFAULTS };
    let model = DecoderConfig { bias: llama::bias(f)?, ..llama::dimensions(f, &defaults)? };
    let layers = model.layers;
    let rotated: Vec<bool> = match f.numbers(ROTATED)? {
        Some(flags) if flags.len() >= layers => {
            flags.into_iter().take(layers).map(|flag| flag != 0.0).collect()
        }
        Some(flags) => {
            return Err(format!(
                "its `{ROTATED}` has {} numbers, and there are {layers} layers",
                flags.len()
            ));
        }
        None => {
            let every = f.extent_or("no_rope_layer_interval", 4)?;
            (0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect()
        }
    };
    let unrotated: Vec<usize> = (0..layers).filter(|layer| !rotated[*layer]).collect();
    let model = f.rope(DecoderConfig { unrotated_layers: Some(unrotated), ..model })?;
    let window = match f.flag("use_sliding_window")? {
        true => f.get("sliding_window").map(|_| f.extent("sliding_window")).transpose()?,
        false => None,
    };
    layer_kinds::read(f, model, window, |layer| !rotated[layer])
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    let rotated: Vec<u8> = (0..c.layers).map(|layer| c.rotates_in(layer).into()).collect();
    let own = (ROTATED.to_string(), json!(rotated));
    llama::write(c).into_iter().chain(layer_kinds::write_optional(c)).chain([own, no_padding()]).collect()
}
