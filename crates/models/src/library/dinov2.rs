//! DINOv2 as the `transformers` library describes it, with and without registers: reads and writes `config.json`, and locates
//! the weights.
//!
//! Positions are resampled for images with another grid: with antialiasing in the form with registers, without it in the other.
//! The mask token of pretraining is neither read nor written, as `use_mask_token` says.

use serde_json::{Value, json};

use super::class_heads;
use super::fields::Fields;
use super::processor::Processor;
use super::stored::{Stored, Within};
use super::vision::{Files, VitDescription};
use crate::config::{Activation, FinalNorm, Pooling, VitConfig};
use crate::images::CHANNELS;

const PLAIN: &str = "dinov2";
const WITH_REGISTERS: &str = "dinov2_with_registers";

pub(crate) const DINOV2: Files = Files {
    model_types: &[PLAIN, WITH_REGISTERS],
    read,
    // In timm, either all registers have a position or none has.
    holds: |c| {
        let has_registers = c.registers > 0 && c.class_token && c.prefix_positions() == 1;
        c.pooling == Pooling::ClsMean || c.swiglu || has_registers
    },
    write,
    stored,
    bases: &[PLAIN, WITH_REGISTERS],
    // Used only in pretraining.
    is_redundant: |name| name == "embeddings.mask_token",
    resampled: |_| None,
    label_fields: class_heads::label_fields,
};

/// Reads the fields of a `config.json` whose `model_type` is one of the two, and the names of its classes.
fn read(f: &Fields<'_>) -> Result<VitDescription, String> {
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
    let swiglu = f.flag("use_swiglu_ffn")?;
    for (name, only) in
        [("qkv_bias", json!(true)), ("hidden_act", json!("gelu")), ("num_channels", json!(CHANNELS))]
    {
        // A gated feed-forward has its own non-linearity, whatever the field says.
        if !(swiglu && name == "hidden_act") {
            f.only(name, only.clone(), &only.to_string())?;
        }
    }
    let width = f.extent_or("hidden_size", 768)?;
    let (patch, image_size) = patches(f, 14)?;
    let ratio = f.extent_or("mlp_ratio", 4)?;
    let classes = if has_head { class_heads::names(f)? } else { vec![] };
    let vit = VitConfig {
        width,
        layers: f.extent_or("num_hidden_layers", 12)?,
        heads: f.extent_or("num_attention_heads", 12)?,
        ffn: Some(if swiglu { gated(width, ratio) } else { width * ratio }),
        swiglu,
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
    Ok((vit, classes, Processor::default()))
}

/// The sizes in pixels of patches and of the images that positions belong to.
pub(super) fn patches(f: &Fields<'_>, patch: usize) -> Result<(usize, usize), String> {
    let (patch, image_size) = (f.extent_or("patch_size", patch)?, f.extent_or("image_size", 224)?);
    match image_size.is_multiple_of(patch) {
        true => Ok((patch, image_size)),
        false => Err(format!("its `patch_size` {patch} does not divide its `image_size` {image_size}")),
    }
}

/// The inner size of a gated feed-forward: two thirds of an ungated one's, rounded up to a multiple of 8.
fn gated(width: usize, ratio: usize) -> usize {
    (width * ratio * 2 / 3).next_multiple_of(8)
}

/// The `mlp_ratio` from which the library computes the size of the feed-forward.
fn ratio(c: &VitConfig) -> Option<usize> {
    let sizes = |ratio: usize| if c.swiglu { gated(c.width, ratio) } else { c.width * ratio };
    (1..=64).find(|ratio| sizes(*ratio) == c.ffn())
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

/// Whether a vision transformer is a DINOv2; otherwise the key that prevents it.
fn fits(c: &VitConfig) -> Result<(), String> {
    let asked = [
        ("pooling", c.pooling == Pooling::ClsMean, "cls_mean"),
        ("layer_scale", c.layer_scale.is_some(), "a number"),
        ("prefix_positions", c.prefix_positions() == 1, "1"),
        ("input_norm", !c.input_norm, "false"),
        ("final_norm", c.final_norm == FinalNorm::Tokens, "tokens"),
        ("activation", c.activation == Activation::GeluExact, "gelu_exact"),
        ("ffn", ratio(c).is_some(), "a multiple of model.width, or two thirds of one where it is gated"),
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

fn write(c: &VitConfig, dtype: &str) -> Result<Value, String> {
    fits(c)?;
    let model_type = if c.registers > 0 { WITH_REGISTERS } else { PLAIN };
    let mut config = json!({
        "architectures": [class_of(model_type, c.classes.is_some())],
        "model_type": model_type,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "mlp_ratio": ratio(c),
        "hidden_act": "gelu",
        "layer_norm_eps": c.norm_eps,
        "layerscale_value": c.layer_scale,
        "drop_path_rate": 0.0,
        "image_size": c.grid() * c.patch,
        "patch_size": c.patch,
        "num_channels": CHANNELS,
        "qkv_bias": true,
        "use_swiglu_ffn": c.swiglu,
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

/// Location of every weight.
fn stored(c: &VitConfig) -> Result<Vec<Stored>, String> {
    fits(c)?;
    let base = if c.registers > 0 { WITH_REGISTERS } else { PLAIN };
    let ffn = if c.swiglu { ["mlp.weights_in", "mlp.weights_out"] } else { ["mlp.fc1", "mlp.fc2"] };
    Ok(stored_as(c, &Names { base, registers: "register_tokens", norms: ["norm1", "norm2"], ffn }))
}

/// The names in which the library's vision transformers differ.
pub(super) struct Names {
    pub base: &'static str,
    pub registers: &'static str,
    pub norms: [&'static str; 2],
    /// Up (with the rows of the gate first, if there is one), and down.
    pub ffn: [&'static str; 2],
}

/// Location of every weight of a vision transformer with these names.
pub(super) fn stored_as(c: &VitConfig, names: &Names) -> Vec<Stored> {
    let (d, f, grid) = (c.width, c.ffn(), c.grid());
    let Names { base, registers, norms: [first, second], ffn: [up, down] } = *names;
    let mut all = vec![];
    let mut joined = vec![];
    let mut add =
        |ours: String, theirs: String, dims: &[usize]| all.push(Stored::whole(ours, theirs, dims.to_vec()));
    let of = |name: &str| format!("{base}.{name}");
    add("cls".into(), of("embeddings.cls_token"), &[1, 1, d]);
    let positions = c.prefix_positions() + grid * grid;
    add("positions.weight".into(), of("embeddings.position_embeddings"), &[1, positions, d]);
    if c.registers > 0 {
        add("registers".into(), of(&format!("embeddings.{registers}")), &[1, c.registers, d]);
    }
    add("patch.bias".into(), of("embeddings.patch_embeddings.projection.bias"), &[d]);
    for i in 0..c.layers {
        let (ours, theirs) = (
            |name: &str| format!("layers.{i}.{name}"),
            |name: &str| of(&format!("encoder.layer.{i}.{name}")),
        );
        for (name, norm) in [("attn_norm", first), ("ffn_norm", second)] {
            add(ours(name), theirs(&format!("{norm}.weight")), &[d]);
            add(ours(&format!("{name}_bias")), theirs(&format!("{norm}.bias")), &[d]);
        }
        let scales = [("attn_scale", "layer_scale1"), ("ffn_scale", "layer_scale2")];
        for (name, scale) in scales.into_iter().filter(|_| c.layer_scale.is_some()) {
            add(ours(name), theirs(&format!("{scale}.lambda1")), &[d]);
        }
        for (name, product, out, into) in [
            ("attn.wq", "attention.attention.query", d, d),
            ("attn.wk", "attention.attention.key", d, d),
            ("attn.wv", "attention.attention.value", d, d),
            ("attn.wo", "attention.output.dense", d, d),
            ("ffn.down", down, d, f),
        ] {
            add(ours(name), theirs(&format!("{product}.weight")), &[out, into]);
            add(ours(&format!("{name}_bias")), theirs(&format!("{product}.bias")), &[out]);
        }
        let parts = if c.swiglu { vec!["ffn.gate", "ffn.up"] } else { vec!["ffn.up"] };
        let rows = parts.len() * f;
        for (part, name) in parts.into_iter().enumerate() {
            let mut part_of = |ours: String, theirs: String, dims: Vec<usize>| {
                let within = Within::Rows(part * f..(part + 1) * f);
                joined.push(Stored { ours, theirs, dims, within });
            };
            part_of(ours(name), theirs(&format!("{up}.weight")), vec![rows, d]);
            part_of(ours(&format!("{name}_bias")), theirs(&format!("{up}.bias")), vec![rows]);
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
    all.extend(joined);
    all
}
