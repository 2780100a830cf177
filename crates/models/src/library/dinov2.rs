//! DINOv2 as the `transformers` library describes it, with and without registers: `config.json` to a vision
//! transformer and back, and where its weights lie.
//!
//! Its positions are resampled where images have another grid: with antialiasing in the form with registers, without it in
//! the other. The token that stands for masked patches in pretraining is not read, and not written: `use_mask_token` says
//! so.

use serde_json::{Value, json};

use super::class_heads;
use super::fields::Fields;
use super::stored::{Stored, Within};
use crate::config::{Pooling, VitConfig};
use crate::images::CHANNELS;

pub const PLAIN: &str = "dinov2";
pub const WITH_REGISTERS: &str = "dinov2_with_registers";

/// Reads the fields of a `config.json` whose `model_type` is one of the two, and the names of its classes.
pub(crate) fn read(f: &Fields<'_>) -> Result<(VitConfig, Vec<String>), String> {
    let model_type = f.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let class = f.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    let has_head = match class {
        None => false,
        Some(class) if class == class_of(model_type, false) => false,
        Some(class) if class == class_of(model_type, true) => true,
        Some(class) => {
            return Err(format!(
                "its `architectures` says {class}, and of {model_type} models only {} and {} are read",
                class_of(model_type, false),
                class_of(model_type, true)
            ));
        }
    };
    for (name, only) in [
        ("use_swiglu_ffn", json!(false)),
        ("qkv_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("num_channels", json!(CHANNELS)),
    ] {
        if let Some(value) = f.get(name).filter(|value| **value != only) {
            return Err(format!("its `{name}` is {value}, and here there is only {only}"));
        }
    }
    let width = f.extent_or("hidden_size", 768)?;
    let (patch, image_size) = (f.extent_or("patch_size", 14)?, f.extent_or("image_size", 224)?);
    if patch == 0 || !image_size.is_multiple_of(patch) {
        return Err(format!("its `patch_size` {patch} does not divide its `image_size` {image_size}"));
    }
    let classes = if has_head { class_heads::names(f)? } else { vec![] };
    let vit = VitConfig {
        width,
        layers: f.extent_or("num_hidden_layers", 12)?,
        heads: f.extent_or("num_attention_heads", 12)?,
        ffn: Some(width * f.extent_or("mlp_ratio", 4)?),
        patch,
        image_size,
        grid: Some(image_size / patch),
        antialias: model_type == WITH_REGISTERS,
        registers: if model_type == WITH_REGISTERS { f.extent_or("num_register_tokens", 4)? } else { 0 },
        classes: has_head.then_some(classes.len()),
        pooling: Pooling::ClsMean,
        norm_eps: f.number_or("layer_norm_eps", 1e-6)?,
        layer_scale: Some(f.number_or("layerscale_value", 1.0)?),
        ..VitConfig::default()
    };
    Ok((vit, classes))
}

/// The library's class, with a head of classes or without.
fn class_of(model_type: &str, has_head: bool) -> &'static str {
    match (model_type == WITH_REGISTERS, has_head) {
        (false, false) => "Dinov2Model",
        (false, true) => "Dinov2ForImageClassification",
        (true, false) => "Dinov2WithRegistersModel",
        (true, true) => "Dinov2WithRegistersForImageClassification",
    }
}

/// Whether a vision transformer is a DINOv2; otherwise the key that is in the way.
pub(crate) fn fits(c: &VitConfig) -> Result<(), String> {
    let whole_ratio = c.ffn().is_multiple_of(c.width);
    let asked = [
        ("pooling", c.pooling == Pooling::ClsMean, "cls_mean"),
        ("layer_scale", c.layer_scale.is_some(), "a number"),
        ("ffn", whole_ratio, "a multiple of model.width"),
        (
            "antialias",
            c.antialias == (c.registers > 0) || [c.grid(); 2] == c.patches(),
            "true with registers, false without",
        ),
    ];
    match asked.into_iter().find(|(_, fits, _)| !fits) {
        Some((key, _, wanted)) => Err(format!("DINOv2 has another `model.{key}`: {wanted}")),
        None => Ok(()),
    }
}

pub(crate) fn write(c: &VitConfig, dtype: &str) -> Result<Value, String> {
    fits(c)?;
    let model_type = if c.registers > 0 { WITH_REGISTERS } else { PLAIN };
    let mut config = json!({
        "architectures": [class_of(model_type, c.classes.is_some())],
        "model_type": model_type,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "mlp_ratio": c.ffn() / c.width,
        "hidden_act": "gelu",
        "layer_norm_eps": c.norm_eps,
        "layerscale_value": c.layer_scale,
        "drop_path_rate": 0.0,
        "image_size": c.grid() * c.patch,
        "patch_size": c.patch,
        "num_channels": CHANNELS,
        "qkv_bias": true,
        "use_swiglu_ffn": false,
        "use_mask_token": false,
        "initializer_range": c.init_std,
        "torch_dtype": dtype,
        "dtype": dtype,
    });
    let fields = config.as_object_mut().expect("an object was just made");
    if c.registers > 0 {
        fields.insert("num_register_tokens".into(), json!(c.registers));
    }
    if let Some(classes) = c.classes {
        fields.extend(class_heads::label_fields(&class_heads::numbered(classes)));
    }
    Ok(config)
}

/// Where every weight lies.
pub(crate) fn stored(c: &VitConfig) -> Result<Vec<Stored>, String> {
    fits(c)?;
    let (d, f, grid) = (c.width, c.ffn(), c.grid());
    let base = if c.registers > 0 { WITH_REGISTERS } else { PLAIN };
    let mut all = vec![];
    let mut add =
        |ours: String, theirs: String, dims: &[usize]| all.push(Stored::whole(ours, theirs, dims.to_vec()));
    let of = |name: &str| format!("{base}.{name}");
    add("cls".into(), of("embeddings.cls_token"), &[1, 1, d]);
    add("positions.weight".into(), of("embeddings.position_embeddings"), &[1, 1 + grid * grid, d]);
    if c.registers > 0 {
        add("registers".into(), of("embeddings.register_tokens"), &[1, c.registers, d]);
    }
    add("patch.bias".into(), of("embeddings.patch_embeddings.projection.bias"), &[d]);
    for i in 0..c.layers {
        let (ours, theirs) = (
            |name: &str| format!("layers.{i}.{name}"),
            |name: &str| of(&format!("encoder.layer.{i}.{name}")),
        );
        for (name, norm) in [("attn_norm", "norm1"), ("ffn_norm", "norm2")] {
            add(ours(name), theirs(&format!("{norm}.weight")), &[d]);
            add(ours(&format!("{name}_bias")), theirs(&format!("{norm}.bias")), &[d]);
        }
        for (name, scale) in [("attn_scale", "layer_scale1"), ("ffn_scale", "layer_scale2")] {
            add(ours(name), theirs(&format!("{scale}.lambda1")), &[d]);
        }
        for (name, product, out, into) in [
            ("attn.wq", "attention.attention.query", d, d),
            ("attn.wk", "attention.attention.key", d, d),
            ("attn.wv", "attention.attention.value", d, d),
            ("attn.wo", "attention.output.dense", d, d),
            ("ffn.up", "mlp.fc1", f, d),
            ("ffn.down", "mlp.fc2", d, f),
        ] {
            add(ours(name), theirs(&format!("{product}.weight")), &[out, into]);
            add(ours(&format!("{name}_bias")), theirs(&format!("{product}.bias")), &[out]);
        }
    }
    add("norm".into(), of("layernorm.weight"), &[d]);
    add("norm_bias".into(), of("layernorm.bias"), &[d]);
    if let Some(classes) = c.classes {
        add("head.weight".into(), "classifier.weight".into(), &[classes, c.pooled()]);
        add("head.bias".into(), "classifier.bias".into(), &[classes]);
    }
    all.push(Stored {
        within: Within::ChannelsLast,
        ..Stored::whole(
            "patch.weight",
            of("embeddings.patch_embeddings.projection.weight"),
            vec![d, CHANNELS, c.patch, c.patch],
        )
    });
    Ok(all)
}

/// Other names of a weight: those of a file of the base model, without a head.
pub(crate) fn other_names(name: &str) -> Option<String> {
    [PLAIN, WITH_REGISTERS].iter().find_map(|base| name.strip_prefix(&format!("{base}."))).map(str::to_string)
}

/// Whether a tensor is of pretraining alone.
pub(crate) fn is_redundant(name: &str) -> bool {
    name.ends_with("embeddings.mask_token")
}
