//! Llama as the `transformers` library describes it, and what later architectures share with it: fields, and the names of
//! weights.

use serde_json::{Map, Value, json};

use super::architecture::{Architecture, Shape};
use super::fields::Fields;
use super::layer_kinds::object;
use super::rope;
use super::stored::Stored;
use crate::config::{Bias, DecoderConfig, Head, Positions};
use crate::decoder::{HEAD, SCORE, biased};

pub(crate) const LLAMA: Architecture = Architecture {
    model_type: "llama",
    class: "LlamaForCausalLM",
    bodies: &["LlamaModel"],
    class_of_classes: Some("LlamaForSequenceClassification"),
    read,
    write,
    stored: stored_whole,
    scales_embeddings: false,
};

/// The library's defaults for fields that a file may omit; they differ by architecture.
pub(crate) struct Defaults {
    /// As many as heads if not given.
    pub kv_heads: Option<usize>,
    /// Width / heads if not given.
    pub head_size: Option<usize>,
    pub context: usize,
    pub norm_eps: f64,
    pub rope_theta: f64,
    pub tied: bool,
}

pub(crate) const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_size: None, context: 2048, norm_eps: 1e-6, rope_theta: 1e4, tied: false };

pub(crate) fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let model = DecoderConfig { bias: bias(f)?, ..dimensions(f, &DEFAULTS)? };
    f.rope(model)
}

/// A Llama with the dimensions, whose fields all architectures share.
pub(crate) fn dimensions(f: &Fields<'_>, defaults: &Defaults) -> Result<DecoderConfig, String> {
    f.only("hidden_act", json!("silu"), "silu for this architecture")?;
    let (width, heads) = (f.extent("hidden_size")?, f.extent("num_attention_heads")?);
    let head_size = defaults.head_size.unwrap_or(width.checked_div(heads).unwrap_or(0));
    // An absent field is the library's default, and null says that there are as many as heads.
    let kv_heads = match f.0.get("num_key_value_heads") {
        Some(Value::Null) => heads,
        _ => defaults.kv_heads.unwrap_or(heads),
    };
    Ok(DecoderConfig {
        width,
        layers: f.layers("num_hidden_layers", None)?,
        heads,
        kv_heads: Some(f.extent_or("num_key_value_heads", kv_heads)?),
        head_size: Some(f.extent_or("head_dim", head_size)?),
        ffn: f.extent("intermediate_size")?,
        vocab: f.extent("vocab_size")?,
        context: f.extent_or("max_position_embeddings", defaults.context)?,
        norm_eps: f.number_or("rms_norm_eps", defaults.norm_eps)?,
        rope_theta: defaults.rope_theta,
        tied: f.flag_or("tie_word_embeddings", defaults.tied)?,
        ..DecoderConfig::default()
    })
}

/// Biases of attention and of the feed-forward.
pub(crate) fn bias(f: &Fields<'_>) -> Result<Bias, String> {
    Ok(match (f.flag("attention_bias")?, f.flag("mlp_bias")?) {
        (false, false) => Bias::None,
        (true, false) => Bias::Attention,
        (true, true) => Bias::All,
        (false, true) => Bias::Ffn,
    })
}

/// Biases of an architecture that has them only in attention.
pub(crate) fn attention_bias(f: &Fields<'_>) -> Result<Bias, String> {
    f.only("mlp_bias", json!(false), "a feed-forward without biases for this architecture")?;
    Ok(if f.flag("attention_bias")? { Bias::Attention } else { Bias::None })
}

pub(crate) fn write(model: &DecoderConfig) -> Map<String, Value> {
    let mut fields = write_dimensions(model);
    let [_, attention, ffn] = biased(model);
    fields.insert("attention_bias".into(), json!(attention));
    fields.insert("mlp_bias".into(), json!(ffn));
    fields
}

/// The fields that all have in common.
pub(crate) fn write_dimensions(model: &DecoderConfig) -> Map<String, Value> {
    let (scaling, parameters) = rope::write(model);
    object(json!({
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads(),
        "head_dim": model.head_size(),
        "intermediate_size": model.ffn,
        "max_position_embeddings": rope::most_positions(model),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        // Versions before 5 read the first two, later ones the third.
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }))
}

/// Locations of weights that are separate tensors.
pub(crate) fn stored_whole(c: &DecoderConfig, shape: Shape<'_>) -> Vec<Stored> {
    let whole = |(ours, theirs): (String, String)| {
        let dims = shape(&ours);
        Stored::whole(ours, theirs, dims)
    };
    weight_names(c).into_iter().map(whole).collect()
}

/// Our path and the library's name of every weight, for Llama and the architectures that share its names.
pub fn weight_names(c: &DecoderConfig) -> Vec<(String, String)> {
    let mut names = vec![("embed.weight".to_string(), "model.embed_tokens.weight".to_string())];
    if c.positions == Positions::Learned {
        names.push(("positions.weight".into(), "model.embed_positions.weight".into()));
    }
    for i in 0..c.layers {
        let mut add = |ours: &str, theirs: &str, bias: bool| {
            let (ours, theirs) = (format!("layers.{i}.{ours}"), format!("model.layers.{i}.{theirs}"));
            names.push((ours.clone(), format!("{theirs}.weight")));
            names.extend(bias.then(|| (bias_of(&ours), format!("{theirs}.bias"))));
        };
        let [qkv, output, ffn] = biased(c);
        if c.pre_norms {
            add("attn_norm", "input_layernorm", c.norm_bias);
        }
        add("attn.wq", "self_attn.q_proj", qkv);
        add("attn.wk", "self_attn.k_proj", qkv);
        add("attn.wv", "self_attn.v_proj", qkv);
        if c.qk_norm {
            add("attn.q_norm", "self_attn.q_norm", false);
            add("attn.k_norm", "self_attn.k_norm", false);
        }
        add("attn.wo", "self_attn.o_proj", output);
        // The library names the norm between the halves by position, and the name depends on whether there are two.
        let ffn_norm = match c.post_norms {
            true => {
                add("attn_post_norm", "post_attention_layernorm", c.norm_bias);
                "pre_feedforward_layernorm"
            }
            false => "post_attention_layernorm",
        };
        if c.pre_norms {
            add("ffn_norm", ffn_norm, c.norm_bias);
        }
        if c.activation.gated() {
            add("ffn.gate", "mlp.gate_proj", ffn);
        }
        add("ffn.up", "mlp.up_proj", ffn);
        add("ffn.down", "mlp.down_proj", ffn);
        if c.post_norms {
            add("ffn_post_norm", "post_feedforward_layernorm", c.norm_bias);
        }
    }
    names.push(("norm".into(), "model.norm.weight".into()));
    names.extend(c.norm_bias.then(|| (bias_of("norm"), "model.norm.bias".into())));
    match c.head {
        Head::Tokens if c.tied => {}
        Head::Tokens => names.push((HEAD.into(), "lm_head.weight".into())),
        Head::Classes => names.push((SCORE.into(), SCORE.into())),
    }
    names
}

/// The path of the bias of a weight.
fn bias_of(weight: &str) -> String {
    format!("{weight}_bias")
}
