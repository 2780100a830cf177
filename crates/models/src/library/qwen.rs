//! Qwen2, Qwen2.5 and Qwen3 as the `transformers` library describes them: a Llama with biases of queries, keys and values
//! (Qwen2), or norms of queries and keys (Qwen3), and windows in some layers if the file says so.

use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::fields::Fields;
use super::layer_kinds;
use super::llama::{self, DEFAULTS, Defaults};
use crate::config::{Bias, DecoderConfig};

pub(crate) const QWEN2: Architecture = Architecture {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    bodies: &["Qwen2Model"],
    class_of_classes: Some("Qwen2ForSequenceClassification"),
    read: read_qwen2,
    write: write_qwen2,
    stored: llama::stored_whole,
    scales_embeddings: false,
};

pub(crate) const QWEN3: Architecture = Architecture {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    bodies: &["Qwen3Model"],
    class_of_classes: Some("Qwen3ForSequenceClassification"),
    read: read_qwen3,
    write: write_qwen3,
    stored: llama::stored_whole,
    scales_embeddings: false,
};

const OF_QWEN: Defaults = Defaults { kv_heads: Some(32), context: 32768, ..DEFAULTS };

fn read_qwen2(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let model = f.rope(DecoderConfig { bias: Bias::Qkv, ..llama::dimensions(f, &OF_QWEN)? })?;
    windows(f, model)
}

pub(crate) fn read_qwen3(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let defaults = Defaults { head_size: Some(128), ..OF_QWEN };
    let bias = llama::attention_bias(f)?;
    let model = f.rope(DecoderConfig { qk_norm: true, bias, ..llama::dimensions(f, &defaults)? })?;
    windows(f, model)
}

/// Without `use_sliding_window` a window in the file has no effect; with it, layers from `max_window_layers` on have one.
fn windows(f: &Fields<'_>, model: DecoderConfig) -> Result<DecoderConfig, String> {
    let window = match f.flag("use_sliding_window")? {
        true => Some(f.extent_or("sliding_window", 4096)?),
        false => None,
    };
    // A number of layers, which may be 0.
    let first = f.number_or("max_window_layers", 28.0)?;
    layer_kinds::read(f, model, window, |layer| layer as f64 >= first)
}

fn write_qwen2(c: &DecoderConfig) -> Map<String, Value> {
    llama::write_dimensions(c).into_iter().chain(write_windows(c)).collect()
}

fn write_qwen3(c: &DecoderConfig) -> Map<String, Value> {
    write_text(c).into_iter().chain(write_windows(c)).collect()
}

/// The fields of a Qwen3 without windows, which is also the text model beside a tower.
pub(crate) fn write_text(c: &DecoderConfig) -> Map<String, Value> {
    let bias = ("attention_bias".to_string(), json!(c.bias == Bias::Attention));
    llama::write_dimensions(c).into_iter().chain([bias]).collect()
}

/// In a file without `layer_types`, every layer from the first local one on is local; newer versions read `layer_types`.
fn write_windows(c: &DecoderConfig) -> Map<String, Value> {
    let first = (0..c.layers).find(|layer| c.is_local(*layer)).unwrap_or(c.layers);
    let own = ("max_window_layers".to_string(), json!(first));
    layer_kinds::write_optional(c).into_iter().chain([own]).collect()
}
