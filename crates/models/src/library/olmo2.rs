//! OLMo-2 as the `transformers` library describes it: norms only after the halves of a block, and norms of queries and keys
//! over all heads together.

use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::fields::Fields;
use super::layer_kinds::no_padding;
use super::llama::{self, DEFAULTS, Defaults};
use crate::config::{Bias, DecoderConfig, QkNormOver};

pub(crate) const OLMO2: Architecture = Architecture {
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    bodies: &["Olmo2Model"],
    class_of_classes: Some("Olmo2ForSequenceClassification"),
    read,
    write,
    stored: llama::stored_whole,
    scales_embeddings: false,
};

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let model = llama::dimensions(f, &Defaults { norm_eps: 1e-5, ..DEFAULTS })?;
    let bias = llama::attention_bias(f)?;
    f.rope(DecoderConfig {
        pre_norms: false,
        post_norms: true,
        qk_norm: true,
        qk_norm_over: QkNormOver::Heads,
        bias,
        ..model
    })
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    let bias = ("attention_bias".to_string(), json!(c.bias == Bias::Attention));
    llama::write_dimensions(c).into_iter().chain([bias, no_padding()]).collect()
}
