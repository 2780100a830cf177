//! Vision transformers as timm publishes them: a `config.json` whose `architecture` determines the dimensions and `model_args`
//! change them, and tensors with q, k and v in one. The variants of DINOv2, CLIP and SigLIP and those with registers are part
//! of the name.

use serde_json::{Map, Value, json};

use super::class_heads;
use super::clip::OF_CLIP;
use super::fields::Fields;
use super::processor;
use super::stored::{Stored, Within};
use super::vision::{Files, VitDescription, of_its_images};
use crate::config::{Activation, FinalNorm, Pooling, VitConfig};
use crate::images::CHANNELS;

pub(crate) const TIMM: Files = Files {
    model_types: &[],
    read,
    holds: |_| true,
    write: |c, _| write(c),
    stored,
    bases: &[],
    is_redundant: |_| false,
    resampled: |c| of_its_images(c, POSITIONS),
    label_fields,
};

/// Sizes in names: width, layers, heads.
const SIZES: [(&str, usize, usize, usize); 4] =
    [("tiny", 192, 12, 3), ("small", 384, 12, 6), ("base", 768, 12, 12), ("large", 1024, 24, 16)];

/// Sizes that only names of further variants have, with the ratio of the feed-forward to the width.
const MORE_SIZES: [(&str, usize, usize, usize, f64); 8] = [
    ("xsmall", 256, 10, 4, 4.0),
    ("wee", 256, 14, 4, 5.0),
    ("little", 320, 14, 5, 5.6),
    ("medium", 512, 12, 8, 4.0),
    ("mediumd", 512, 20, 8, 4.0),
    ("betwixt", 640, 12, 10, 4.0),
    ("so400m", 1152, 27, 16, 3.7362),
    ("huge", 1280, 32, 16, 4.0),
];

/// The library's names of non-linearities.
const ACTIVATIONS: [(&str, Activation); 3] = [
    ("gelu", Activation::GeluExact),
    ("gelu_tanh", Activation::GeluTanh),
    ("quick_gelu", Activation::QuickGelu),
];

/// The tensor of positions.
const POSITIONS: &str = "pos_embed";

/// The field with the names of classes.
const LABELS: &str = "label_names";

/// Whether a `config.json` is timm's.
pub(crate) fn is_ours(f: &Fields<'_>) -> bool {
    f.get("architecture").is_some() && f.get("model_type").is_none()
}

/// Reads the fields of a `config.json`, the names of its classes if listed, and the preprocessing of its images.
fn read(f: &Fields<'_>) -> Result<VitDescription, String> {
    let name = f.get("architecture").and_then(Value::as_str).unwrap_or_default();
    let ParsedName { vit: named, pool, norms_pooled } = parse_name(name).ok_or_else(|| {
        format!(
            "its `architecture` is {name:?}, and of timm's those are read that are named as vit_small_patch16_224, \
             vit_base_patch14_dinov2, vit_medium_patch16_reg4_gap_256, vit_base_patch32_clip_224 or \
             vit_base_patch16_siglip_gap_224"
        )
    })?;
    let none = serde_json::Map::new();
    let object = |name: &str| f.get(name).and_then(Value::as_object).unwrap_or(&none);
    let (args, cfg) = (Fields(object("model_args")), Fields(object("pretrained_cfg")));
    let only = [
        ("qkv_bias", json!(true)),
        ("qk_norm", json!(false)),
        ("in_chans", json!(CHANNELS)),
        // The tokens before the patches would be part of the mean.
        ("pool_include_prefix", json!(false)),
    ];
    for (name, only) in only {
        if let Some(value) = args.get(name).filter(|value| **value != only) {
            return Err(format!("its `model_args` have `{name}` = {value}, and here there is only {only}"));
        }
    }
    let pool = args.get("global_pool").or(f.get("global_pool")).and_then(Value::as_str).unwrap_or(pool);
    // By default the library norms after mean pooling, and before other poolings.
    let norms_pooled = args.get("fc_norm").and_then(Value::as_bool).or(norms_pooled);
    let norms_pooled = norms_pooled.unwrap_or(pool != "token");
    let pooling = match pool {
        "token" if norms_pooled => {
            return Err("its `global_pool` is \"token\" with the norm behind it (`fc_norm`), and here it is before it".into());
        }
        "token" => Pooling::Cls,
        "avg" => Pooling::Mean,
        _ => return Err(format!("its `global_pool` is {pool:?}, and here there is only token and avg")),
    };
    let width = args.extent_or("embed_dim", named.width)?;
    let patch = side(&args, "patch_size", named.patch)?;
    let image_size = side(&args, "img_size", named.image_size)?;
    if patch == 0 || !image_size.is_multiple_of(patch) {
        return Err(format!("its patches of {patch} do not divide its images of {image_size}"));
    }
    let ratio = args.number_or("mlp_ratio", named.ffn() as f64 / named.width as f64)?;
    let class_token = args.flag_or("class_token", named.class_token)?;
    let registers = match args.get("reg_tokens") {
        None => named.registers,
        Some(count) => count.as_u64().ok_or("its `reg_tokens` is no number")? as usize,
    };
    // Either every token before the patches has a position, or none has.
    let placed = match args.flag_or("no_embed_class", named.prefix_positions == Some(0))? {
        true => 0,
        false => usize::from(class_token).saturating_add(registers),
    };
    let input_norm = args.flag_or("pre_norm", named.input_norm)?;
    let activation = match args.get("act_layer") {
        None => named.activation,
        Some(said) => {
            let known = ACTIVATIONS.iter().find(|(name, _)| said == name);
            known.map(|(_, activation)| *activation).ok_or_else(|| {
                format!("its `act_layer` is {said}, and here there is gelu, gelu_tanh and quick_gelu")
            })?
        }
    };
    let classes = match args.get("num_classes").or(f.get("num_classes")) {
        Some(count) => count.as_u64().ok_or("its `num_classes` is no number")? as usize,
        None => 0,
    };
    let three = |name: &str, fallback: [f64; 3]| match cfg.get(name).and_then(Value::as_array) {
        None => Ok(fallback),
        Some(values) => {
            let values: Vec<f64> = values.iter().filter_map(Value::as_f64).collect();
            values.try_into().map_err(|_| format!("its `{name}` must be three numbers"))
        }
    };
    let vit = VitConfig {
        width,
        layers: args.extent_or("depth", named.layers)?,
        heads: args.extent_or("num_heads", named.heads)?,
        ffn: Some((width as f64 * ratio) as usize),
        activation,
        patch,
        image_size,
        grid: Some(image_size / patch),
        antialias: true,
        class_token,
        registers,
        prefix_positions: (placed != usize::from(class_token)).then_some(placed),
        input_norm,
        final_norm: if norms_pooled { FinalNorm::Pooled } else { FinalNorm::Tokens },
        norm_eps: named.norm_eps,
        classes: (classes > 0).then_some(classes),
        pooling,
        layer_scale: args.get("init_values").map_or(Ok(named.layer_scale), |value| {
            value.as_f64().map(Some).ok_or("its `init_values` is no number".to_string())
        })?,
        mean: three("mean", named.mean)?,
        std: three("std", named.std)?,
        ..VitConfig::default()
    };
    let names = if classes > 0 { label_names(f, &cfg, classes)? } else { vec![] };
    Ok((vit, names, processor::read_timm(&cfg, image_size)?))
}

/// A side in pixels: one number, or equal rows and columns.
fn side(args: &Fields<'_>, name: &str, default: usize) -> Result<usize, String> {
    let Some(Value::Array(both)) = args.get(name) else { return args.extent_or(name, default) };
    match &both[..] {
        [height, width] if height == width => {
            Fields(&Map::from_iter([(name.to_string(), height.clone())])).extent(name)
        }
        _ => Err(format!(
            "its `{name}` is {}, and here images and patches are square",
            Value::from(both.clone())
        )),
    }
}

/// The names of the classes, from the list that the library keeps beside the model or with its pretrained weights.
fn label_names(f: &Fields<'_>, cfg: &Fields<'_>, classes: usize) -> Result<Vec<String>, String> {
    let Some(listed) = f.get(LABELS).or(cfg.get(LABELS)) else {
        // Earlier exports of ours have them in the other library's format.
        return if f.get("id2label").is_some() { class_heads::names(f) } else { Ok(vec![]) };
    };
    let names: Option<Vec<String>> =
        listed.as_array().and_then(|names| names.iter().map(class_heads::text).collect());
    match names.filter(|names| names.len() == classes) {
        Some(names) => Ok(class_heads::make_unique(names)),
        None => Err(format!("its `{LABELS}` must be a list of {classes} names, one a class")),
    }
}

/// The list of names in a `config.json`.
fn label_fields(names: &[String]) -> Map<String, Value> {
    Map::from_iter([(LABELS.to_string(), json!(names))])
}

/// The variant of a name, its pooling, and whether it norms the pooled value, if the library defines that for the name.
struct ParsedName {
    vit: VitConfig,
    pool: &'static str,
    norms_pooled: Option<bool>,
}

/// Whether the library's SigLIP of this size, patch and image size uses the tanh form of GELU.
fn has_tanh(size: &str, patch: usize, image_size: usize) -> bool {
    patch == 32 || (size, patch) == ("so400m", 16) || (size, image_size) == ("large", 512)
}

/// The parts of a name such as vit_tiny_patch16_224: size, patch, variant and image size.
fn parse_name(name: &str) -> Option<ParsedName> {
    let rest = name.split('.').next()?.strip_prefix("vit_")?;
    let (size, rest) = rest.split_once("_patch")?;
    let plain = SIZES.iter().map(|&(known, width, layers, heads)| (known, width, layers, heads, 4.0));
    let (_, width, layers, heads, ratio) = plain.chain(MORE_SIZES).find(|(known, ..)| *known == size)?;
    let (patch, tail) = rest.split_once('_')?;
    let (form, image_size) = match tail.rsplit_once('_') {
        _ if tail.ends_with("dinov2") => (tail, 518),
        Some((form, size)) => (form, size.parse().ok()?),
        None => ("", tail.parse().ok()?),
    };
    let patch = patch.parse().ok()?;
    let d = VitConfig::default();
    let vit = VitConfig {
        width,
        layers,
        heads,
        ffn: Some((width as f64 * ratio) as usize),
        patch,
        image_size,
        mean: [0.5; 3],
        std: [0.5; 3],
        ..d.clone()
    };
    let dinov2 = VitConfig { layer_scale: Some(1e-5), mean: d.mean, std: d.std, ..vit.clone() };
    let clip =
        VitConfig { input_norm: true, norm_eps: 1e-5, mean: OF_CLIP.mean, std: OF_CLIP.std, ..vit.clone() };
    let registers =
        |count: usize, vit: VitConfig| VitConfig { registers: count, prefix_positions: Some(0), ..vit };
    let token = |vit: VitConfig| ParsedName { vit, pool: "token", norms_pooled: None };
    let mean = |vit: VitConfig, norms_pooled: Option<bool>| ParsedName {
        vit: VitConfig { class_token: false, ..vit },
        pool: "avg",
        norms_pooled,
    };
    let is_plain = SIZES.iter().any(|(known, ..)| *known == size);
    Some(match form {
        "" if is_plain => token(vit),
        "dinov2" if is_plain => token(dinov2),
        "reg4_dinov2" if is_plain => token(registers(4, dinov2)),
        "reg1_gap" | "reg4_gap" if size != "so400m" => {
            let layer_scale = (size != "base").then_some(1e-5);
            let count = if form == "reg1_gap" { 1 } else { 4 };
            mean(VitConfig { layer_scale, ..registers(count, vit) }, None)
        }
        "clip" => token(clip),
        "clip_quickgelu" => token(VitConfig { activation: Activation::QuickGelu, ..clip }),
        "siglip_gap" => {
            let is_tanh = has_tanh(size, patch, image_size);
            let activation = if is_tanh { Activation::GeluTanh } else { Activation::GeluExact };
            mean(VitConfig { activation, ..vit }, Some(false))
        }
        _ => return None,
    })
}

/// Whether timm has such a vision transformer; otherwise the key that prevents it.
fn fits(c: &VitConfig) -> Result<(), String> {
    let pools = matches!(c.pooling, Pooling::Cls | Pooling::Mean);
    let places = [0, c.prefix()].contains(&c.prefix_positions());
    let asked = [
        ("pooling", pools, "cls or mean"),
        ("prefix_positions", places, "none or all"),
        ("final_norm", c.final_norm != FinalNorm::None, "tokens or pooled"),
    ];
    match asked.into_iter().find(|(_, fits, _)| !fits) {
        Some((key, _, wanted)) => Err(format!("timm's ViT has another `model.{key}`: {wanted}")),
        None => Ok(()),
    }
}

fn write(c: &VitConfig) -> Result<Value, String> {
    fits(c)?;
    let norm_eps = if c.input_norm { 1e-5 } else { 1e-6 };
    if c.norm_eps != norm_eps {
        return Err(format!("timm's ViT has another `model.norm_eps`: {norm_eps:e}"));
    }
    let side = c.image_size;
    let nearest = SIZES.iter().rev().find(|(_, width, ..)| *width <= c.width).unwrap_or(&SIZES[0]);
    let classes = c.classes.unwrap_or(0);
    let pool = if c.pooling == Pooling::Mean { "avg" } else { "token" };
    // The name selects timm's class and the epsilon of its norms; every dimension is given explicitly.
    let architecture = match c.input_norm {
        true => "vit_base_patch16_clip_224".to_string(),
        false => format!("vit_{}_patch16_224", nearest.0),
    };
    let mut config = json!({
        "architecture": architecture,
        "architectures": ["VisionTransformer"],
        "num_classes": classes,
        "num_features": c.width,
        "global_pool": pool,
        "model_args": {
            "global_pool": pool,
            "fc_norm": c.final_norm == FinalNorm::Pooled,
            "img_size": side,
            "patch_size": c.patch,
            "embed_dim": c.width,
            "depth": c.layers,
            "num_heads": c.heads,
            "mlp_ratio": c.ffn() as f64 / c.width as f64,
            "init_values": c.layer_scale,
            "num_classes": classes,
        },
        "pretrained_cfg": {
            "input_size": [CHANNELS, side, side],
            "fixed_input_size": true,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": c.mean,
            "std": c.std,
            "num_classes": classes,
            "pool_size": null,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    });
    let args = config["model_args"].as_object_mut().expect("an object was just made");
    let named = ACTIVATIONS.iter().find(|(_, activation)| *activation == c.activation).map(|(name, _)| *name);
    let more = [
        ("class_token", !c.class_token, json!(false)),
        ("reg_tokens", c.registers > 0, json!(c.registers)),
        ("no_embed_class", c.prefix_positions() < c.prefix(), json!(true)),
        ("pre_norm", c.input_norm, json!(true)),
        ("act_layer", c.activation != Activation::GeluExact, json!(named)),
    ];
    args.extend(
        more.into_iter().filter(|(_, is_said, _)| *is_said).map(|(name, _, value)| (name.to_string(), value)),
    );
    Ok(config)
}

/// Location of every weight.
fn stored(c: &VitConfig) -> Result<Vec<Stored>, String> {
    fits(c)?;
    let (d, f, grid) = (c.width, c.ffn(), c.grid());
    let norm = if c.final_norm == FinalNorm::Pooled { "fc_norm" } else { "norm" };
    let mut all = vec![
        Stored::whole("positions.weight", POSITIONS, vec![1, c.prefix_positions() + grid * grid, d]),
        Stored::whole("norm", format!("{norm}.weight"), vec![d]),
        Stored::whole("norm_bias", format!("{norm}.bias"), vec![d]),
        Stored {
            within: Within::ChannelsLast,
            ..Stored::whole("patch.weight", "patch_embed.proj.weight", vec![d, CHANNELS, c.patch, c.patch])
        },
    ];
    let some = [
        (c.class_token, "cls", "cls_token", vec![1, 1, d]),
        (c.registers > 0, "registers", "reg_token", vec![1, c.registers, d]),
        (!c.input_norm, "patch.bias", "patch_embed.proj.bias", vec![d]),
        (c.input_norm, "input_norm", "norm_pre.weight", vec![d]),
        (c.input_norm, "input_norm_bias", "norm_pre.bias", vec![d]),
    ];
    all.extend(
        some.into_iter()
            .filter(|(is_there, ..)| *is_there)
            .map(|(_, ours, theirs, dims)| Stored::whole(ours, theirs, dims)),
    );
    let mut add = |ours: &str, theirs: &str, i: usize, dims: &[usize], within: Within| {
        let (ours, theirs) = (format!("layers.{i}.{ours}"), format!("blocks.{i}.{theirs}"));
        all.push(Stored { ours, theirs, dims: dims.to_vec(), within });
    };
    for i in 0..c.layers {
        for (ours, theirs) in [("attn_norm", "norm1"), ("ffn_norm", "norm2")] {
            add(ours, &format!("{theirs}.weight"), i, &[d], Within::Whole);
            add(&format!("{ours}_bias"), &format!("{theirs}.bias"), i, &[d], Within::Whole);
        }
        if c.layer_scale.is_some() {
            add("attn_scale", "ls1.gamma", i, &[d], Within::Whole);
            add("ffn_scale", "ls2.gamma", i, &[d], Within::Whole);
        }
        for (part, name) in ["wq", "wk", "wv"].into_iter().enumerate() {
            let rows = Within::Rows(part * d..(part + 1) * d);
            add(&format!("attn.{name}"), "attn.qkv.weight", i, &[3 * d, d], rows.clone());
            add(&format!("attn.{name}_bias"), "attn.qkv.bias", i, &[3 * d], rows);
        }
        for (ours, theirs, out, into) in
            [("attn.wo", "attn.proj", d, d), ("ffn.up", "mlp.fc1", f, d), ("ffn.down", "mlp.fc2", d, f)]
        {
            add(ours, &format!("{theirs}.weight"), i, &[out, into], Within::Whole);
            add(&format!("{ours}_bias"), &format!("{theirs}.bias"), i, &[out], Within::Whole);
        }
    }
    if let Some(classes) = c.classes {
        all.push(Stored::whole("head.weight", "head.weight", vec![classes, d]));
        all.push(Stored::whole("head.bias", "head.bias", vec![classes]));
    }
    Ok(all)
}
