//! Gemma-2 and Gemma-3 as the `transformers` library describes them: their fields, their names, and the text part of the models
//! that also see images.
//!
//! Norms multiply by 1 + w and stand before and after each half of a block. Some layers see a window: every other one in
//! Gemma-2, five of six in Gemma-3, with rotary frequencies of their own. As in the library, embeddings are multiplied by the
//! square root of the width, rounded to the type of the weights. Gemma-2 caps scores and logits; Gemma-3 norms queries and keys
//! instead, and may cap logits.

use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::fields::Fields;
use super::layer_kinds::{self, object};
use super::{llama, rope};
use crate::config::{Activation, Attention, Bias, DecoderConfig, NormWeights};

pub(crate) const GEMMA2: Architecture = Architecture {
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    bodies: &["Gemma2Model"],
    class_of_classes: Some("Gemma2ForSequenceClassification"),
    read: read_gemma2,
    write: write_gemma2,
    stored: llama::stored_whole,
    scales_embeddings: true,
};

pub(crate) const GEMMA3: Architecture = Architecture {
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    bodies: &["Gemma3TextModel"],
    class_of_classes: Some("Gemma3TextForSequenceClassification"),
    read: read_gemma3,
    write: write_gemma3,
    stored: llama::stored_whole,
    scales_embeddings: true,
};

/// The library's defaults: a file omits fields that equal them, as the files of the 4B do.
const OF_GEMMA3: Defaults =
    Defaults { vocab: 262_208, context: 131_072, global_every: 6, score_cap: None, logit_cap: None };
const OF_GEMMA2: Defaults =
    Defaults { vocab: 256_000, context: 8192, global_every: 2, score_cap: Some(50.0), logit_cap: Some(30.0) };

struct Defaults {
    vocab: usize,
    context: usize,
    global_every: usize,
    score_cap: Option<f64>,
    logit_cap: Option<f64>,
}

/// The prefixes of the text part's names in files of models that see images: as published, and as newer versions write them.
const TEXT_PARTS: [&str; 2] = ["language_model.model.", "model.language_model."];

/// Other names a weight of the text part may have in a file.
pub(crate) fn other_names(name: &str) -> Vec<String> {
    let Some(rest) = name.strip_prefix("model.") else { return vec![] };
    TEXT_PARTS.iter().map(|part| format!("{part}{rest}")).collect()
}

/// Whether a tensor belongs to the image part of a model, which is not read.
pub fn is_of_images(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    ["vision_tower.", "multi_modal_projector."].iter().any(|part| name.starts_with(part))
}

/// The factor on embeddings for a model whose weights have this type.
pub fn embed_scale(width: usize, dtype: &str) -> f64 {
    let root = (width as f64).sqrt() as f32 as f64;
    match dtype {
        "float32" => root,
        "float16" => rounded(root, 11),
        _ => rounded(root, 8),
    }
}

/// `x` rounded to `digits` binary digits, to nearest even.
fn rounded(x: f64, digits: i32) -> f64 {
    let last = 2f64.powi(x.log2().floor() as i32 + 1 - digits);
    (x / last).round_ties_even() * last
}

/// Reads the fields that both have in common, except rotations.
fn read_common(f: &Fields<'_>, d: &Defaults) -> Result<DecoderConfig, String> {
    for name in ["hidden_activation", "hidden_act"] {
        f.only(name, json!("gelu_pytorch_tanh"), "gelu_pytorch_tanh")?;
    }
    // A null cap means none, and an absent one the library's default.
    let cap = |name: &str, default: Option<f64>| match f.0.get(name) {
        None => Ok(default),
        Some(_) => f.number(name),
    };
    let head_size = f.extent_or("head_dim", 256)?;
    let score_size = f.extent_or("query_pre_attn_scalar", 256)?;
    let model = DecoderConfig {
        width: f.extent_or("hidden_size", 2304)?,
        layers: f.layers("num_hidden_layers", Some(26))?,
        heads: f.extent_or("num_attention_heads", 8)?,
        kv_heads: Some(f.extent_or("num_key_value_heads", 4)?),
        head_size: Some(head_size),
        ffn: f.extent_or("intermediate_size", 9216)?,
        vocab: f.extent_or("vocab_size", d.vocab)?,
        context: f.extent_or("max_position_embeddings", d.context)?,
        norm_eps: f.number_or("rms_norm_eps", 1e-6)?,
        norm_weight: NormWeights::OnePlus,
        post_norms: true,
        bias: llama::attention_bias(f)?,
        activation: Activation::Geglu,
        attention: match f.flag("use_bidirectional_attention")? {
            true => Attention::Bidirectional,
            false => Attention::Causal,
        },
        score_size: (score_size != head_size).then_some(score_size),
        score_cap: cap("attn_logit_softcapping", d.score_cap)?,
        logit_cap: cap("final_logit_softcapping", d.logit_cap)?,
        tied: f.flag_or("tie_word_embeddings", true)?,
        ..DecoderConfig::default()
    };
    // Files before `layer_types` have a period.
    let every = f.extent_or("sliding_window_pattern", d.global_every)?;
    let window = f.extent_or("sliding_window", 4096)?;
    layer_kinds::read(f, model, Some(window), |layer| !(layer + 1).is_multiple_of(every))
}

fn read_gemma2(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    f.rope(read_common(f, &OF_GEMMA2)?)
}

fn read_gemma3(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let model = read_common(f, &OF_GEMMA3)?;
    if let Some(cap) = model.score_cap {
        return Err(format!(
            "its `attn_logit_softcapping` is {cap}, which the library's Gemma-3 reads and never applies: leave the field out \
             to compute what it computes"
        ));
    }
    let thetas = [f.number_or("rope_theta", 1e6)?, f.number_or("rope_local_base_freq", 1e4)?];
    rope::by_layer(f, DecoderConfig { qk_norm: true, ..model }, thetas)
}

/// The fields that both have in common, except rotations of local layers.
fn write_common(c: &DecoderConfig) -> Map<String, Value> {
    let fields = llama::write_dimensions(c).into_iter().filter(|(name, _)| name != "hidden_act");
    let own = object(json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": c.bias == Bias::Attention,
        "query_pre_attn_scalar": c.score_size.unwrap_or(c.head_size()),
        "sliding_window": c.window.unwrap_or(c.context),
        "layer_types": layer_kinds::write(c),
        "use_bidirectional_attention": c.attention == Attention::Bidirectional,
        "attn_logit_softcapping": c.score_cap,
        "final_logit_softcapping": c.logit_cap,
    }));
    fields.chain(own).collect()
}

fn write_gemma2(c: &DecoderConfig) -> Map<String, Value> {
    write_common(c)
}

fn write_gemma3(c: &DecoderConfig) -> Map<String, Value> {
    let (global, local) = rope::write_by_layer(c);
    let local_theta = c.rope_local_theta.unwrap_or(c.rope_theta);
    let mut fields = write_common(c);
    // Versions before 5 read these two, the earliest ones without `rope_scaling`, and later versions the third.
    fields.insert("sliding_window_pattern".into(), json!(c.global_every.unwrap_or(c.layers + 1)));
    fields.insert("rope_local_base_freq".into(), json!(local_theta));
    fields.insert("rope_parameters".into(), json!({ "full_attention": global, "sliding_attention": local }));
    fields
}

/// Whether the factor on embeddings is the library's for weights of this type.
pub(crate) fn check_embed_scale(c: &DecoderConfig, dtype: &str) -> Result<(), String> {
    let factor = embed_scale(c.width, dtype);
    // The factor is applied as f32, so further digits in a config do not matter.
    if c.embed_scale as f32 == factor as f32 {
        return Ok(());
    }
    let other = if dtype == "float32" { "bf16" } else { "f32" };
    Err(format!(
        "its embeddings are multiplied by {}, and in {dtype} a Gemma of this width multiplies them by {factor}: \
         --dtype {other} may be what it was trained with",
        c.embed_scale
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Head, Norm, Pooling, RopeScaling};
    use crate::decoder::build;
    use crate::library::huggingface;
    use crate::library::llama::weight_names;
    use crate::registry::Family;

    /// The published file of the 1B.
    fn one_b() -> Value {
        json!({
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16",
            "attention_bias": false, "attention_dropout": 0.0, "attn_logit_softcapping": null,
            "cache_implementation": "hybrid", "final_logit_softcapping": null, "head_dim": 256, "hidden_size": 1152,
            "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 6912, "max_position_embeddings": 32768,
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
            "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144, "bos_token_id": 2,
            "eos_token_id": [1, 106], "pad_token_id": 0, "initializer_range": 0.02,
        })
    }

    /// The published file of the 4B, which leaves out what equals the library's defaults.
    fn four_b() -> Value {
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
            "eos_token_id": [1, 106], "image_token_index": 262144, "vision_config": { "hidden_size": 1152 },
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024,
            },
        })
    }

    #[test]
    fn the_published_files_are_read() {
        let one = huggingface::read(&one_b()).unwrap();
        assert_eq!((one.bos.as_slice(), one.eos.as_slice()), (&[2][..], &[1, 106][..]));
        let m = one.model;
        assert_eq!((m.window, m.global_every, m.score_size), (Some(512), Some(6), None));
        assert_eq!((m.rope_theta, m.rope_local_theta, m.rope_scaling), (1e6, Some(1e4), RopeScaling::None));
        assert_eq!((m.embed_scale, m.parameters()), (34.0, 999_885_952));
        assert!(m.tied && m.qk_norm && m.attention == Attention::Causal);

        let four = huggingface::read(&four_b()).unwrap();
        assert_eq!(four.eos, [1, 106]);
        let m = four.model;
        assert_eq!((m.width, m.heads, m.kv_heads(), m.head_size(), m.vocab), (2560, 8, 4, 256, 262_208));
        assert_eq!((m.rope_scaling, m.rope_factor, m.window), (RopeScaling::Linear, Some(8.0), Some(1024)));
        assert_eq!((m.context, m.embed_scale), (131_072, 50.5));
        assert_eq!((m.frequencies(4).theta, m.frequencies(5).theta), (1e4, 1e6));
    }

    /// Every parameter of the graph has a name, in the files of both kinds of models.
    #[test]
    fn every_weight_has_its_name() {
        let small = DecoderConfig {
            width: 8,
            layers: 2,
            ffn: 8,
            vocab: 8,
            ..huggingface::read(&one_b()).unwrap().model
        };
        let graph = build(&small, small.least());
        let mut ours: Vec<_> =
            graph.slots.iter().filter(|s| s.class.is_parameter()).map(|s| s.path.clone()).collect();
        let (mut paths, theirs): (Vec<_>, Vec<_>) = weight_names(&small).into_iter().unzip();
        ours.sort();
        paths.sort();
        assert_eq!(ours, paths);
        assert!(theirs.contains(&"model.layers.1.pre_feedforward_layernorm.weight".to_string()));
        let others = huggingface::other_names("model.layers.1.mlp.up_proj.weight");
        assert_eq!(
            others,
            [
                "layers.1.mlp.up_proj.weight",
                "language_model.model.layers.1.mlp.up_proj.weight",
                "model.language_model.layers.1.mlp.up_proj.weight"
            ]
        );
        assert!(
            is_of_images("vision_tower.vision_model.head.probe")
                && is_of_images("model.multi_modal_projector.x")
        );
        assert!(!is_of_images("language_model.model.norm.weight"));
    }

    #[test]
    fn written_configs_read_back() {
        for config in [one_b(), four_b()] {
            let described = huggingface::read(&config).unwrap();
            let mut model = described.model;
            for attention in [Attention::Causal, Attention::Bidirectional] {
                for (score_size, global_every) in [(None, Some(6)), (Some(168), Some(2)), (None, None)] {
                    model = DecoderConfig { attention, score_size, global_every, ..model };
                    let written = huggingface::write(&model, "bfloat16", &[2], &[1, 106]).unwrap();
                    assert_eq!(huggingface::read(&written).unwrap().model, model);
                }
            }
        }
        let model = huggingface::read(&one_b()).unwrap().model;
        let pairs =
            DecoderConfig { head: Head::Classes, classes: Some(3), pooling: Pooling::Max, ..model.clone() };
        let written = huggingface::write(&pairs, "bfloat16", &[2], &[1]).unwrap();
        assert_eq!(written["architectures"], json!(["Gemma3TextForSequenceClassification"]));
        assert_eq!(written["id2label"], json!({ "0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2" }));
        assert_eq!(huggingface::read(&written).unwrap().model, pairs);
        let wide = huggingface::write(&model, "float32", &[2], &[1]).unwrap_err();
        assert!(wide.contains("multiplied by 34, and in float32") && wide.contains("--dtype bf16"), "{wide}");
        // The square root in full f64 precision is the same factor.
        let root = DecoderConfig { embed_scale: 1152f64.sqrt(), ..model };
        assert!(huggingface::write(&root, "float32", &[2], &[1]).is_ok());
    }

    #[test]
    fn fields_that_change_results_are_refused_by_name() {
        let refused = |name: &str, value: Value| {
            let mut config = one_b();
            config[name] = value;
            huggingface::read(&config).unwrap_err()
        };
        assert!(refused("attn_logit_softcapping", json!(20.0)).contains("never applies"));
        assert!(refused("hidden_activation", json!("silu")).contains("only gelu_pytorch_tanh"));
        assert!(refused("layer_types", json!(["full_attention"])).contains("list of 26 names"));
        let mut kinds = vec!["sliding_attention"; 26];
        kinds[3] = "chunked_attention";
        assert!(refused("layer_types", json!(kinds)).contains("\"chunked_attention\""));
        let stretched =
            json!({ "sliding_attention": { "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4 } });
        assert!(refused("rope_parameters", stretched).contains("local layers are stretched (linear)"));
        assert!(refused("rope_scaling", json!("twice")).contains("must be an object"));
        let mut both = one_b();
        both["rope_parameters"] = json!({ "full_attention": { "rope_type": "default", "rope_theta": 1e6 } });
        assert!(huggingface::read(&both).is_ok());
        both["rope_scaling"] = json!({ "rope_type": "linear", "factor": 8.0 });
        assert!(huggingface::read(&both).unwrap_err().contains("say different rotations"));
        assert!(
            refused("architectures", json!(["Gemma3ForTokenClassification"]))
                .contains("and of gemma3_text models")
        );
        assert!(
            huggingface::read(&json!({ "model_type": "gemma3" })).unwrap_err().contains("no `text_config`")
        );
        let centred = DecoderConfig { norm: Norm::Layer, ..huggingface::read(&one_b()).unwrap().model };
        let refused = huggingface::write(&centred, "bfloat16", &[], &[]).unwrap_err();
        assert!(refused.ends_with("Gemma3ForCausalLM, the nearest, has rms"), "{refused}");
        // Gemma-3 does not scale rotations of local layers.
        let stretched =
            DecoderConfig { rope_local_theta: None, ..huggingface::read(&four_b()).unwrap().model };
        let refused = huggingface::write(&stretched, "bfloat16", &[], &[]).unwrap_err();
        assert!(refused.contains("model.rope_local_theta = none"), "{refused}");
    }

    /// Caps and layers without a period are options of the architecture; published Gemma-2 files have both caps.
    #[test]
    fn caps_and_layers_without_a_period_are_read() {
        let mut config = one_b();
        let mut kinds = vec!["sliding_attention"; 26];
        kinds[3] = "full_attention";
        config["layer_types"] = json!(kinds);
        config["final_logit_softcapping"] = json!(20.0);
        let described = huggingface::read(&config).unwrap();
        let model = &described.model;
        assert_eq!((model.global_every, model.global_layers.as_deref()), (None, Some(&[3][..])));
        assert_eq!((model.score_cap, model.logit_cap), (None, Some(20.0)));
        let written = huggingface::write(model, "bfloat16", &[2], &[1, 106]).unwrap();
        assert_eq!(huggingface::read(&written).unwrap(), described);

        let two_b = json!({
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "torch_dtype": "float32",
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_size": 2304,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 9216,
            "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
            "vocab_size": 256000, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        });
        let described = huggingface::read(&two_b).unwrap();
        let model = &described.model;
        assert_eq!((model.score_cap, model.logit_cap), (Some(50.0), Some(30.0)));
        assert_eq!((model.window, model.global_every, model.rope_local_theta), (Some(4096), Some(2), None));
        assert_eq!((model.embed_scale, model.parameters()), (48.0, 2_614_341_888));
        let written = huggingface::write(model, "float32", &[2], &[1]).unwrap();
        assert_eq!(written["architectures"], json!(["Gemma2ForCausalLM"]));
        assert_eq!(huggingface::read(&written).unwrap(), described);
    }

    #[test]
    fn factors_are_rounded_as_the_weights_are() {
        assert_eq!(embed_scale(1152, "bfloat16"), 34.0);
        assert_eq!(embed_scale(2560, "bfloat16"), 50.5);
        assert_eq!(embed_scale(1152, "float16"), 33.9375);
        assert_eq!(embed_scale(1152, "float32"), 1152f64.sqrt() as f32 as f64);
        assert_eq!(embed_scale(256, "bfloat16"), 16.0);
    }
}
