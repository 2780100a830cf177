//! Mistral as the `transformers` library describes it: a Llama with a window in every layer, or in none.

use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::fields::Fields;
use super::llama::{self, DEFAULTS, Defaults};
use crate::config::DecoderConfig;

pub(crate) const MISTRAL: Architecture = Architecture {
    model_type: "mistral",
    class: "MistralForCausalLM",
    bodies: &["MistralModel"],
    class_of_classes: Some("MistralForSequenceClassification"),
    read,
    write,
    stored: llama::stored_whole,
    scales_embeddings: false,
};

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    if f.get("layer_types").is_some() {
        return Err("its `layer_types` is given, and a Mistral has the same window in every layer".into());
    }
    let defaults = Defaults { kv_heads: Some(8), context: 131_072, ..DEFAULTS };
    let model = f.rope(llama::dimensions(f, &defaults)?)?;
    // An absent field means the library's default, and null means no window.
    let window = match f.0.get("sliding_window") {
        Some(Value::Null) => None,
        _ => Some(f.extent_or("sliding_window", 4096)?),
    };
    Ok(DecoderConfig { window, ..model })
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    let window = ("sliding_window".to_string(), json!(c.window));
    llama::write_dimensions(c).into_iter().chain([window]).collect()
}
