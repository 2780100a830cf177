//! Gemma-3 as the `transformers` library describes it: its fields, its names, and the text part of the models that see
//! images as well.
//!
//! Norms multiply by 1 + w and stand before and behind each half of a block. Five layers of six see a window, with
//! frequencies of their own. The embedding's rows are multiplied by the root of the width, rounded to the type of the
//! weights, as the library does it.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::rope;
use crate::config::{
    Activation, Attention, Bias, DecoderConfig, Norm, NormWeights, Positions, RopePairs, RopeScaling,
};

/// The library's own defaults: a file leaves out what equals them, and the files of the 4B do.
const DEFAULTS: Defaults = Defaults {
    vocab: 262_208,
    width: 2304,
    ffn: 9216,
    layers: 26,
    heads: 8,
    kv_heads: 4,
    head_size: 256,
    context: 131_072,
    window: 4096,
    global_every: 6,
    score_size: 256,
};

struct Defaults {
    vocab: usize,
    width: usize,
    ffn: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    context: usize,
    window: usize,
    global_every: usize,
    score_size: usize,
}

/// Where the text part's names begin in files of models that see images: as published, and as newer versions write it.
const TEXT_PARTS: [&str; 2] = ["language_model.model.", "model.language_model."];

/// Other names a weight of the text part may have in a file.
pub(crate) fn other_names(name: &str) -> Vec<String> {
    let Some(rest) = name.strip_prefix("model.") else { return vec![] };
    TEXT_PARTS.iter().map(|part| format!("{part}{rest}")).collect()
}

/// Whether a tensor belongs to the part of a model that sees images, which is not read.
pub fn is_of_images(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    ["vision_tower.", "multi_modal_projector."].iter().any(|part| name.starts_with(part))
}

/// The factor on embeddings of a model whose weights have this type.
pub fn embed_scale(width: usize, dtype: &str) -> f64 {
    let root = (width as f64).sqrt() as f32 as f64;
    match dtype {
        "float32" => root,
        "float16" => rounded(root, 11),
        _ => rounded(root, 8),
    }
}

/// A number of so many binary digits, to nearest even.
fn rounded(x: f64, digits: i32) -> f64 {
    let last = 2f64.powi(x.log2().floor() as i32 + 1 - digits);
    (x / last).round_ties_even() * last
}

/// Whether a decoder is a Gemma-3 whose weights have this type; otherwise the key that is in the way.
pub(crate) fn fits(c: &DecoderConfig) -> Result<(), String> {
    let asked = [
        ("norm", c.norm == Norm::Rms, "rms"),
        ("norm_bias", !c.norm_bias, "false"),
        ("norm_weight", c.norm_weight == NormWeights::OnePlus, "one_plus"),
        ("post_norms", c.post_norms, "true"),
        ("bias", matches!(c.bias, Bias::None | Bias::Attention), "none or attention"),
        ("activation", c.activation == Activation::Geglu, "geglu"),
        ("positions", c.positions == Positions::Rope, "rope"),
        ("rope_pairs", c.rope_pairs == RopePairs::Half, "half"),
        ("qk_norm", c.qk_norm, "true"),
        ("window", c.window.is_some(), "given"),
    ];
    match asked.into_iter().find(|(_, fits, _)| !fits) {
        Some((key, _, wanted)) => Err(format!("Gemma-3 has another `model.{key}`: {wanted}")),
        None => Ok(()),
    }
}

/// The fields of the text part, with those beside it where there are any.
pub(crate) fn read(f: &Fields<'_>, dtype: Option<&str>) -> Result<DecoderConfig, String> {
    let d = DEFAULTS;
    for (name, value) in [
        ("attn_logit_softcapping", f.get("attn_logit_softcapping")),
        ("final_logit_softcapping", f.get("final_logit_softcapping")),
    ] {
        if let Some(value) = value {
            return Err(format!("its `{name}` is {value}, and here logits and scores are not capped"));
        }
    }
    for name in ["hidden_activation", "hidden_act"] {
        if let Some(value) = f.get(name).filter(|value| *value != "gelu_pytorch_tanh") {
            return Err(format!("its `{name}` is {value}, and here there is only gelu_pytorch_tanh"));
        }
    }
    let width = f.extent_or("hidden_size", d.width)?;
    let layers = f.extent_or("num_hidden_layers", d.layers)?;
    let head_size = f.extent_or("head_dim", d.head_size)?;
    let score_size = f.extent_or("query_pre_attn_scalar", d.score_size)?;
    let model = DecoderConfig {
        width,
        layers,
        heads: f.extent_or("num_attention_heads", d.heads)?,
        kv_heads: Some(f.extent_or("num_key_value_heads", d.kv_heads)?),
        head_size: Some(head_size),
        ffn: f.extent_or("intermediate_size", d.ffn)?,
        vocab: f.extent_or("vocab_size", d.vocab)?,
        context: f.extent_or("max_position_embeddings", d.context)?,
        norm_eps: f.number_or("rms_norm_eps", 1e-6)?,
        norm_weight: NormWeights::OnePlus,
        post_norms: true,
        bias: if f.flag("attention_bias")? { Bias::Attention } else { Bias::None },
        activation: Activation::Geglu,
        attention: match f.flag("use_bidirectional_attention")? {
            true => Attention::Bidirectional,
            false => Attention::Causal,
        },
        window: Some(f.extent_or("sliding_window", d.window)?),
        global_every: global_every(f, layers)?,
        score_size: (score_size != head_size).then_some(score_size),
        qk_norm: true,
        tied: f.get("tie_word_embeddings").is_none() || f.flag("tie_word_embeddings")?,
        embed_scale: embed_scale(width, dtype.unwrap_or("bfloat16")),
        ..DecoderConfig::default()
    };
    rotations(f, model)
}

/// Which layers see everything: a list by layer, or the older period.
fn global_every(f: &Fields<'_>, layers: usize) -> Result<Option<usize>, String> {
    let Some(kinds) = f.get("layer_types") else {
        return Ok(Some(f.extent_or("sliding_window_pattern", DEFAULTS.global_every)?));
    };
    let kinds: Option<Vec<&str>> = kinds.as_array().map(|all| all.iter().filter_map(Value::as_str).collect());
    let Some(kinds) = kinds.filter(|kinds| kinds.len() == layers) else {
        return Err(format!("its `layer_types` is not a list of {layers} names, one a layer"));
    };
    if let Some(other) = kinds.iter().find(|kind| !["sliding_attention", "full_attention"].contains(kind)) {
        return Err(format!(
            "its `layer_types` has {other:?}, and here there is sliding_attention and full_attention"
        ));
    }
    let follows = |every: usize| {
        kinds.iter().enumerate().all(|(i, kind)| (*kind == "full_attention") == (i + 1).is_multiple_of(every))
    };
    match (1..=layers).find(|every| follows(*every)) {
        Some(every) => Ok(Some(every)),
        None if kinds.iter().all(|kind| *kind == "sliding_attention") => Ok(None),
        None => Err("its `layer_types` follow no period, and here every so-many-th layer is global".into()),
    }
}

/// Frequencies of global and local layers: one object a kind, or the older fields.
fn rotations(f: &Fields<'_>, model: DecoderConfig) -> Result<DecoderConfig, String> {
    let within = |fields: &Map<String, Value>, kind: &str, model: DecoderConfig| {
        Fields(fields).scaling(model).map_err(|why| format!("in its rotations of {kind} layers: {why}"))
    };
    let object = |value: &Value, name: &str| {
        let found = value.as_object().cloned();
        found.ok_or_else(|| format!("its `{name}` is {value}, and wants to be an object"))
    };
    let (global_theta, local_theta) =
        (f.number_or("rope_theta", 1e6)?, f.number_or("rope_local_base_freq", 1e4)?);
    let model = DecoderConfig { rope_theta: global_theta, ..model };
    let (global, local) = match (f.get("rope_parameters"), f.get("rope_scaling")) {
        (Some(both), _) => {
            let both = object(both, "rope_parameters")?;
            let part = |kind: &str| both.get(kind).filter(|value| !value.is_null());
            let global = part("full_attention").map(|value| object(value, "full_attention")).transpose()?;
            let local =
                part("sliding_attention").map(|value| object(value, "sliding_attention")).transpose()?;
            (global, local)
        }
        (None, Some(scaling)) => (Some(object(scaling, "rope_scaling")?), None),
        (None, None) => (None, None),
    };
    let model = match &global {
        Some(fields) => within(fields, "global", model)?,
        None => model,
    };
    let plain = DecoderConfig { rope_theta: local_theta, ..DecoderConfig::default() };
    let local = match &local {
        Some(fields) => within(fields, "local", plain)?,
        None => plain,
    };
    if local.rope_scaling != RopeScaling::None {
        return Err(format!(
            "its rotations of local layers are stretched ({}), and here only those of global ones are",
            local.rope_scaling
        ));
    }
    Ok(DecoderConfig { rope_local_theta: Some(local.rope_theta), ..model })
}

/// The fields of a decoder that fits, with weights of this type.
pub(crate) fn write(c: &DecoderConfig, dtype: &str) -> Result<Value, String> {
    let factor = embed_scale(c.width, dtype);
    // It is multiplied as f32, whatever digits behind those a config has.
    if c.embed_scale as f32 != factor as f32 {
        let other = if dtype == "float32" { "bf16" } else { "f32" };
        return Err(format!(
            "its embeddings are multiplied by {}, and in {dtype} a Gemma-3 of this width multiplies them by {factor}: \
             --dtype {other} may be what it was trained with",
            c.embed_scale
        ));
    }
    let (scaling, global) = rope::write(c);
    let local_theta = c.rope_local_theta.unwrap_or(c.rope_theta);
    if c.rope_local_theta.is_none() && c.rope_scaling != RopeScaling::None {
        return Err("local layers are stretched as global ones are, and Gemma-3's are not: give model.rope_local_theta".into());
    }
    let kinds: Vec<&str> = (0..c.layers)
        .map(|layer| if c.is_local(layer) { "sliding_attention" } else { "full_attention" })
        .collect();
    Ok(json!({
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads(),
        "head_dim": c.head_size(),
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.context,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": c.norm_eps,
        "attention_bias": c.bias != Bias::None,
        "attention_dropout": 0.0,
        "query_pre_attn_scalar": c.score_size.unwrap_or(c.head_size()),
        "sliding_window": c.window,
        "sliding_window_pattern": c.global_every.unwrap_or(c.layers + 1),
        "layer_types": kinds,
        "use_bidirectional_attention": c.attention == Attention::Bidirectional,
        "attn_logit_softcapping": Value::Null,
        "final_logit_softcapping": Value::Null,
        // Versions before 5 read the first three, later ones the fourth.
        "rope_theta": c.rope_theta,
        "rope_local_base_freq": local_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "full_attention": global,
            "sliding_attention": { "rope_type": "default", "rope_theta": local_theta },
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Head, Pooling};
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
    fn what_is_written_reads_back() {
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
        // The root with all digits that f64 has is the same factor.
        let root = DecoderConfig { embed_scale: 1152f64.sqrt(), ..model };
        assert!(huggingface::write(&root, "float32", &[2], &[1]).is_ok());
    }

    #[test]
    fn what_would_change_numbers_is_refused_by_name() {
        let refused = |name: &str, value: Value| {
            let mut config = one_b();
            config[name] = value;
            huggingface::read(&config).unwrap_err()
        };
        assert!(
            refused("final_logit_softcapping", json!(30.0)).contains("`final_logit_softcapping` is 30.0")
        );
        assert!(refused("hidden_activation", json!("silu")).contains("only gelu_pytorch_tanh"));
        assert!(refused("layer_types", json!(["full_attention"])).contains("list of 26 names"));
        let mut kinds = vec!["sliding_attention"; 26];
        kinds[3] = "full_attention";
        assert!(refused("layer_types", json!(kinds)).contains("follow no period"));
        kinds[3] = "chunked_attention";
        assert!(refused("layer_types", json!(kinds)).contains("\"chunked_attention\""));
        let stretched =
            json!({ "sliding_attention": { "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4 } });
        assert!(refused("rope_parameters", stretched).contains("local layers are stretched (linear)"));
        assert!(refused("rope_scaling", json!("twice")).contains("wants to be an object"));
        assert!(
            refused("architectures", json!(["Gemma3ForTokenClassification"]))
                .contains("and of gemma3_text models")
        );
        assert!(
            huggingface::read(&json!({ "model_type": "gemma3" })).unwrap_err().contains("no `text_config`")
        );
        let plain = DecoderConfig {
            window: None,
            global_every: None,
            rope_local_theta: None,
            ..huggingface::read(&one_b()).unwrap().model
        };
        let refused = huggingface::write(&plain, "bfloat16", &[], &[]).unwrap_err();
        assert_eq!(refused, "Gemma-3 has another `model.window`: given");
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
