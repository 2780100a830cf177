//! ViT as the `transformers` library describes it: `config.json` to a vision transformer and back, and where its weights lie.
//!
//! timm has the same model with other names, so `model.library` says whose files an export is.

use serde_json::{Value, json};

use super::class_heads;
use super::dinov2::{Names, patches, stored_as};
use super::fields::Fields;
use super::stored::Stored;
use crate::config::{Pooling, VitConfig, VitLibrary};
use crate::images::CHANNELS;

pub const MODEL_TYPE: &str = "vit";
const CLASS: &str = "ViTForImageClassification";
const BASE: &str = "ViTModel";

/// Reads the fields of a `config.json`, and the names of its classes.
pub(crate) fn read(f: &Fields<'_>) -> Result<(VitConfig, Vec<String>), String> {
    let class = f.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    let has_head = match class {
        None | Some(BASE) => false,
        Some(CLASS) => true,
        Some(class) => {
            return Err(format!(
                "its `architectures` says {class}, and of {MODEL_TYPE} models only {BASE} and {CLASS} are read"
            ));
        }
    };
    for (name, only) in
        [("qkv_bias", json!(true)), ("hidden_act", json!("gelu")), ("num_channels", json!(CHANNELS))]
    {
        f.only(name, only.clone(), &only.to_string())?;
    }
    let (patch, image_size) = patches(f, 16)?;
    let classes = if has_head { class_heads::names(f)? } else { vec![] };
    let vit = VitConfig {
        width: f.extent_or("hidden_size", 768)?,
        layers: f.extent_or("num_hidden_layers", 12)?,
        heads: f.extent_or("num_attention_heads", 12)?,
        ffn: Some(f.extent_or("intermediate_size", 3072)?),
        patch,
        image_size,
        grid: Some(image_size / patch),
        classes: has_head.then_some(classes.len()),
        pooling: Pooling::Cls,
        norm_eps: f.number_or("layer_norm_eps", 1e-12)?,
        library: VitLibrary::Transformers,
        ..VitConfig::default()
    };
    Ok((vit, classes))
}

/// Whether a vision transformer is one of these; otherwise the key that is in the way.
fn fits(c: &VitConfig) -> Result<(), String> {
    let asked = [
        ("pooling", c.pooling == Pooling::Cls, "cls"),
        ("layer_scale", c.layer_scale.is_none(), "none"),
        ("swiglu", !c.swiglu, "false"),
        ("registers", c.registers == 0, "0"),
        ("antialias", !c.antialias || [c.grid(); 2] == c.patches(), "false"),
    ];
    match asked.into_iter().find(|(_, fits, _)| !fits) {
        Some((key, _, wanted)) => Err(format!("{CLASS} has another `model.{key}`: {wanted}")),
        None => Ok(()),
    }
}

pub(crate) fn write(c: &VitConfig, dtype: &str) -> Result<Value, String> {
    fits(c)?;
    let mut config = json!({
        "architectures": [if c.classes.is_some() { CLASS } else { BASE }],
        "model_type": MODEL_TYPE,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.ffn(),
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": c.norm_eps,
        "image_size": c.grid() * c.patch,
        "patch_size": c.patch,
        "num_channels": CHANNELS,
        "qkv_bias": true,
        "initializer_range": c.init_std,
        "torch_dtype": dtype,
        "dtype": dtype,
    });
    if let Some(classes) = c.classes {
        let labels = class_heads::label_fields(&class_heads::numbered(classes));
        config.as_object_mut().expect("an object was just made").extend(labels);
    }
    Ok(config)
}

/// Where every weight lies.
pub(crate) fn stored(c: &VitConfig) -> Result<Vec<Stored>, String> {
    fits(c)?;
    let norms = ["layernorm_before", "layernorm_after"];
    Ok(stored_as(c, &Names { base: MODEL_TYPE, norms, ffn: ["intermediate.dense", "output.dense"] }))
}

/// Other names of a weight: those of a file of the base model, without a head.
pub(crate) fn other_names(name: &str) -> Option<String> {
    name.strip_prefix("vit.").map(str::to_string)
}

/// Whether a tensor is of a layer behind the states, which classes are not read from.
pub(crate) fn is_redundant(name: &str) -> bool {
    name.trim_start_matches("vit.").starts_with("pooler.")
}
