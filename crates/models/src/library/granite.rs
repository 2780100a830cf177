//! Granite as the `transformers` library describes it: a Llama with factors on embeddings, scores, residual additions and
//! logits.

use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::fields::Fields;
use super::layer_kinds::object;
use super::llama::{self, DEFAULTS};
use crate::config::DecoderConfig;

pub(crate) const GRANITE: Architecture = Architecture {
    model_type: "granite",
    class: "GraniteForCausalLM",
    bodies: &["GraniteModel"],
    class_of_classes: None,
    read,
    write,
    stored: llama::stored_whole,
    scales_embeddings: false,
};

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let model = llama::dimensions(f, &DEFAULTS)?;
    f.rope(DecoderConfig {
        bias: llama::bias(f)?,
        embed_scale: f.number_or("embedding_multiplier", 1.0)?,
        score_scale: Some(f.number_or("attention_multiplier", 1.0)?),
        residual_scale: f.number_or("residual_multiplier", 1.0)?,
        logit_divisor: f.number_or("logits_scaling", 1.0)?,
        ..model
    })
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    let own = object(json!({
        "embedding_multiplier": c.embed_scale,
        "attention_multiplier": c.score_scale.unwrap_or(c.score_scale().into()),
        "residual_multiplier": c.residual_scale,
        "logits_scaling": c.logit_divisor,
    }));
    llama::write(c).into_iter().chain(own).collect()
}
