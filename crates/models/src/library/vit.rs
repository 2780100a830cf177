//! ViT and DeiT as the `transformers` library describes them: reads and writes `config.json`, and locates the weights.
//!
//! timm has the same ViT under other names, so `model.library` selects the format of an export. DeiT's distillation token is a
//! register with a position: its classifier reads the class token. The two heads of a distilled model are not read: such a file
//! is a body that gets a new head.

use serde_json::{Value, json};

use super::class_heads;
use super::dinov2::{Names, patches, stored_as};
use super::fields::Fields;
use super::processor::Processor;
use super::stored::Stored;
use super::vision::{Files, VitDescription, of_its_images};
use crate::config::{Activation, FinalNorm, Pooling, VitConfig, VitLibrary};
use crate::images::CHANNELS;

pub(crate) const VIT: Files = Files {
    model_types: &[OF_VIT.model_type],
    read: |f| read(f, &OF_VIT),
    holds: |c| c.library == VitLibrary::Transformers,
    write: |c, dtype| write(c, dtype, &OF_VIT),
    stored: |c| stored(c, &OF_VIT),
    bases: &[OF_VIT.model_type],
    is_redundant: |name| name.starts_with("pooler."),
    resampled: |c| of_its_images(c, "vit.embeddings.position_embeddings"),
    label_fields: class_heads::label_fields,
};

pub(crate) const DEIT: Files = Files {
    model_types: &[OF_DEIT.model_type],
    read: |f| read(f, &OF_DEIT),
    holds: |c| c.library == VitLibrary::Transformers && c.registers == 1 && c.prefix_positions() == 2,
    write: |c, dtype| write(c, dtype, &OF_DEIT),
    stored: |c| stored(c, &OF_DEIT),
    bases: &[OF_DEIT.model_type],
    is_redundant: |name| {
        let unread = ["pooler.", "cls_classifier.", "distillation_classifier.", "embeddings.mask_token"];
        unread.iter().any(|part| name.starts_with(part))
    },
    resampled: |c| of_its_images(c, "deit.embeddings.position_embeddings"),
    ..VIT
};

/// The names in which the two differ.
struct VitVariant {
    model_type: &'static str,
    class: &'static str,
    bodies: &'static [&'static str],
    /// Number of tokens beside the class token, all with a position.
    registers: usize,
}

const OF_VIT: VitVariant =
    VitVariant { model_type: "vit", class: "ViTForImageClassification", bodies: &["ViTModel"], registers: 0 };

const OF_DEIT: VitVariant = VitVariant {
    model_type: "deit",
    class: "DeiTForImageClassification",
    bodies: &["DeiTModel", "DeiTForImageClassificationWithTeacher"],
    registers: 1,
};

/// Reads the fields of a `config.json`, and the names of its classes.
fn read(f: &Fields<'_>, kind: &VitVariant) -> Result<VitDescription, String> {
    let has_head = class_heads::is_there(f, kind.model_type, kind.class, kind.bodies)?;
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
        registers: kind.registers,
        prefix_positions: (kind.registers > 0).then_some(1 + kind.registers),
        library: VitLibrary::Transformers,
        ..VitConfig::default()
    };
    // Where no file beside the model says how pixels are made: DeiT's published models were trained with ImageNet's.
    let vit = match kind.registers {
        0 => VitConfig { mean: [0.5; 3], std: [0.5; 3], ..vit },
        _ => vit,
    };
    Ok((vit, classes, Processor::default()))
}

/// Whether a vision transformer is one of these; otherwise the key that prevents it.
fn fits(c: &VitConfig, kind: &VitVariant) -> Result<(), String> {
    let asked = [
        ("pooling", c.pooling == Pooling::Cls, "cls"),
        ("layer_scale", c.layer_scale.is_none(), "none"),
        ("swiglu", !c.swiglu, "false"),
        ("registers", c.registers == kind.registers, "0"),
        ("class_token", c.class_token, "true"),
        ("prefix_positions", c.prefix_positions() == c.prefix(), "all"),
        ("input_norm", !c.input_norm, "false"),
        ("final_norm", c.final_norm == FinalNorm::Tokens, "tokens"),
        ("activation", c.activation == Activation::GeluExact, "gelu_exact"),
        ("antialias", !c.antialias || [c.grid(); 2] == c.patches(), "false"),
    ];
    match asked.into_iter().find(|(_, fits, _)| !fits) {
        Some((key, _, wanted)) => Err(format!("{} has another `model.{key}`: {wanted}", kind.class)),
        None => Ok(()),
    }
}

fn write(c: &VitConfig, dtype: &str, kind: &VitVariant) -> Result<Value, String> {
    fits(c, kind)?;
    let mut config = json!({
        "architectures": [if c.classes.is_some() { kind.class } else { kind.bodies[0] }],
        "model_type": kind.model_type,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.ffn(),
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": c.norm_eps,
        "image_size": c.image_size,
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

/// Location of every weight.
fn stored(c: &VitConfig, kind: &VitVariant) -> Result<Vec<Stored>, String> {
    fits(c, kind)?;
    let names = Names {
        base: kind.model_type,
        registers: "distillation_token",
        norms: ["layernorm_before", "layernorm_after"],
        ffn: ["intermediate.dense", "output.dense"],
    };
    Ok(stored_as(c, &names))
}
