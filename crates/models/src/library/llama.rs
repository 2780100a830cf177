//! Llama and Qwen3 as the `transformers` library describes them: their fields, and the names of their weights, which
//! Gemma-3 shares.

use serde_json::{Value, json};

use super::fields::Fields;
use super::rope;
use crate::config::{Activation, Bias, DecoderConfig, Head, Norm, Positions, RopePairs};
use crate::decoder::{SCORE, biased};

/// Reads a Llama or, with norms of queries and keys, a Qwen3.
pub(crate) fn read(f: &Fields<'_>, is_qwen3: bool) -> Result<DecoderConfig, String> {
    let (width, heads) = (f.extent("hidden_size")?, f.extent("num_attention_heads")?);
    // The library's own defaults, by architecture: a file may leave out what equals them.
    let (kv_heads, head_size, positions) = match is_qwen3 {
        true => (32, 128, 32768),
        false => (heads, width.checked_div(heads).unwrap_or(0), 2048),
    };
    let bias = match (f.flag("attention_bias")?, f.flag("mlp_bias")?) {
        (false, false) => Bias::None,
        (true, false) => Bias::Attention,
        (true, true) if !is_qwen3 => Bias::All,
        _ => return Err("its `mlp_bias` is true, and here only with `attention_bias`".into()),
    };
    let model = DecoderConfig {
        width,
        layers: f.extent("num_hidden_layers")?,
        heads,
        kv_heads: Some(f.extent_or("num_key_value_heads", kv_heads)?),
        head_size: Some(f.extent_or("head_dim", head_size)?),
        ffn: f.extent("intermediate_size")?,
        vocab: f.extent("vocab_size")?,
        context: f.extent_or("max_position_embeddings", positions)?,
        norm: Norm::Rms,
        norm_eps: f.number_or("rms_norm_eps", 1e-6)?,
        bias,
        activation: Activation::Swiglu,
        positions: Positions::Rope,
        rope_pairs: RopePairs::Half,
        qk_norm: is_qwen3,
        tied: f.flag("tie_word_embeddings")?,
        ..DecoderConfig::default()
    };
    f.rope(model)
}

/// The fields of either.
pub(crate) fn write(model: &DecoderConfig) -> Value {
    let (scaling, parameters) = rope::write(model);
    json!({
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads(),
        "head_dim": model.head_size(),
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.bias != Bias::None,
        "attention_dropout": 0.0,
        // Versions before 5 read the first two, later ones the third.
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    })
}

/// Our path and the Hugging Face name of every weight, Llama, Qwen3 and Gemma-3 alike.
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
        add("attn_norm", "input_layernorm", c.norm_bias);
        add("attn.wq", "self_attn.q_proj", qkv);
        add("attn.wk", "self_attn.k_proj", qkv);
        add("attn.wv", "self_attn.v_proj", qkv);
        if c.qk_norm {
            add("attn.q_norm", "self_attn.q_norm", false);
            add("attn.k_norm", "self_attn.k_norm", false);
        }
        add("attn.wo", "self_attn.o_proj", output);
        // Their name says where the first of two norms between the halves stands, whether it is the only one or not.
        let ffn_norm = match c.post_norms {
            true => {
                add("attn_post_norm", "post_attention_layernorm", c.norm_bias);
                "pre_feedforward_layernorm"
            }
            false => "post_attention_layernorm",
        };
        add("ffn_norm", ffn_norm, c.norm_bias);
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
        Head::Tokens => names.push(("head.weight".into(), "lm_head.weight".into())),
        Head::Classes => names.push((SCORE.into(), SCORE.into())),
    }
    names
}

/// The path of what is added after a weight.
fn bias_of(weight: &str) -> String {
    format!("{weight}_bias")
}
