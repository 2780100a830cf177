//! Vision transformers as timm publishes them: `config.json` with an `architecture` whose name has the dimensions and
//! `model_args` that change them, and tensors with q, k and v in one.

use serde_json::{Map, Value, json};

use super::class_heads;
use super::fields::Fields;
use super::processor::{self, Processor};
use super::stored::{Resampled, Stored, Within};
use crate::config::{Pooling, VitConfig};
use crate::images::CHANNELS;

/// Sizes that names have: width, layers, heads.
const SIZES: [(&str, usize, usize, usize); 4] =
    [("tiny", 192, 12, 3), ("small", 384, 12, 6), ("base", 768, 12, 12), ("large", 1024, 24, 16)];

/// The tensor of positions.
const POSITIONS: &str = "pos_embed";

/// Where the names of classes are.
const LABELS: &str = "label_names";

/// Whether a `config.json` is timm's.
pub(crate) fn is_ours(f: &Fields<'_>) -> bool {
    f.get("architecture").is_some() && f.get("model_type").is_none()
}

/// Reads the fields of a `config.json`, the names of its classes where it has a list of them, and how its
/// images are made.
pub(crate) fn read(f: &Fields<'_>) -> Result<(VitConfig, Vec<String>, Processor), String> {
    let name = f.get("architecture").and_then(Value::as_str).unwrap_or_default();
    let named = named(name).ok_or_else(|| {
        format!(
            "its `architecture` is {name:?}, and of timm's those are read that are named as vit_small_patch16_224 or \
             vit_base_patch14_dinov2"
        )
    })?;
    let none = serde_json::Map::new();
    let object = |name: &str| f.get(name).and_then(Value::as_object).unwrap_or(&none);
    let (args, cfg) = (Fields(object("model_args")), Fields(object("pretrained_cfg")));
    for (name, only) in [
        ("qkv_bias", json!(true)),
        ("qk_norm", json!(false)),
        ("class_token", json!(true)),
        ("no_embed_class", json!(false)),
        ("pre_norm", json!(false)),
        ("reg_tokens", json!(0)),
        ("in_chans", json!(CHANNELS)),
    ] {
        if let Some(value) = args.get(name).filter(|value| **value != only) {
            return Err(format!("its `model_args` have `{name}` = {value}, and here there is only {only}"));
        }
    }
    let pool = args.get("global_pool").or(f.get("global_pool")).and_then(Value::as_str).unwrap_or("token");
    // The library norms what was pooled unless it is told not to, and tokens before they are pooled otherwise.
    let norms_last = args.get("fc_norm").and_then(Value::as_bool).unwrap_or(pool != "token");
    let pooling = match pool {
        _ if norms_last => {
            return Err(format!(
                "its `global_pool` is {pool:?} with the norm behind it (`fc_norm`), and here it is before it"
            ));
        }
        "token" => Pooling::Cls,
        "avg" => Pooling::Mean,
        _ => return Err(format!("its `global_pool` is {pool:?}, and here there is only token and avg")),
    };
    let width = args.extent_or("embed_dim", named.width)?;
    let patch = args.extent_or("patch_size", named.patch)?;
    let image_size = args.extent_or("img_size", named.image_size)?;
    if patch == 0 || !image_size.is_multiple_of(patch) {
        return Err(format!("its patches of {patch} do not divide its images of {image_size}"));
    }
    let ratio = args.number_or("mlp_ratio", 4.0)?;
    let classes = match args.get("num_classes").or(f.get("num_classes")) {
        Some(count) => count.as_u64().ok_or("its `num_classes` is no number")? as usize,
        None => 0,
    };
    let three = |name: &str, fallback: [f64; 3]| match cfg.get(name).and_then(Value::as_array) {
        None => Ok(fallback),
        Some(values) => {
            let values: Vec<f64> = values.iter().filter_map(Value::as_f64).collect();
            values.try_into().map_err(|_| format!("its `{name}` wants to be three numbers"))
        }
    };
    let vit = VitConfig {
        width,
        layers: args.extent_or("depth", named.layers)?,
        heads: args.extent_or("num_heads", named.heads)?,
        ffn: Some((width as f64 * ratio) as usize),
        patch,
        image_size,
        grid: Some(image_size / patch),
        antialias: true,
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

/// The names of the classes, of the list that the library keeps beside the model or with its first weights.
fn label_names(f: &Fields<'_>, cfg: &Fields<'_>, classes: usize) -> Result<Vec<String>, String> {
    let Some(listed) = f.get(LABELS).or(cfg.get(LABELS)) else {
        // Exports of ours had them as the other library does.
        return if f.get("id2label").is_some() { class_heads::names(f) } else { Ok(vec![]) };
    };
    let names: Option<Vec<String>> =
        listed.as_array().and_then(|names| names.iter().map(class_heads::text).collect());
    match names.filter(|names| names.len() == classes) {
        Some(names) => Ok(class_heads::told_apart(names)),
        None => Err(format!("its `{LABELS}` wants to be a list of {classes} names, one a class")),
    }
}

/// The list of names in a `config.json`.
pub(crate) fn label_fields(names: &[String]) -> Map<String, Value> {
    Map::from_iter([(LABELS.to_string(), json!(names))])
}

/// What a name such as vit_tiny_patch16_224 says.
fn named(name: &str) -> Option<VitConfig> {
    let rest = name.split('.').next()?.strip_prefix("vit_")?;
    let (size, rest) = rest.split_once("_patch")?;
    let &(_, width, layers, heads) = SIZES.iter().find(|(known, ..)| *known == size)?;
    let (patch, tail) = rest.split_once('_')?;
    let (image_size, layer_scale, mean, std) = match tail {
        "dinov2" => (518, Some(1e-5), VitConfig::default().mean, VitConfig::default().std),
        size => (size.parse().ok()?, None, [0.5; 3], [0.5; 3]),
    };
    let patch = patch.parse().ok()?;
    Some(VitConfig {
        width,
        layers,
        heads,
        patch,
        image_size,
        layer_scale,
        mean,
        std,
        ..VitConfig::default()
    })
}

/// Whether timm has such a vision transformer; otherwise the key that is in the way.
pub(crate) fn fits(c: &VitConfig) -> Result<(), String> {
    let pools = matches!(c.pooling, Pooling::Cls | Pooling::Mean);
    let asked = [("pooling", pools, "cls or mean"), ("registers", c.registers == 0, "0")];
    match asked.into_iter().find(|(_, fits, _)| !fits) {
        Some((key, _, wanted)) => Err(format!("timm's ViT has another `model.{key}`: {wanted}")),
        None => Ok(()),
    }
}

pub(crate) fn write(c: &VitConfig) -> Result<Value, String> {
    fits(c)?;
    if c.norm_eps != 1e-6 {
        return Err("timm's ViT has another `model.norm_eps`: 1e-6".into());
    }
    let side = c.image_size;
    let nearest = SIZES.iter().rev().find(|(_, width, ..)| *width <= c.width).unwrap_or(&SIZES[0]);
    let classes = c.classes.unwrap_or(0);
    let pool = if c.pooling == Pooling::Mean { "avg" } else { "token" };
    // The name gives timm the class to make; every dimension is said again, so it stands for nothing else.
    Ok(json!({
        "architecture": format!("vit_{}_patch16_224", nearest.0),
        "architectures": ["VisionTransformer"],
        "num_classes": classes,
        "num_features": c.width,
        "global_pool": pool,
        "model_args": {
            "global_pool": pool,
            "fc_norm": false,
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
    }))
}

/// The positions, where they are of another grid than the images: a model of this library has those of its own images, and
/// resamples them when it is made for others.
pub(crate) fn resampled(c: &VitConfig) -> Option<Resampled> {
    let (from, to) = ([c.grid(); 2], c.patches());
    (from != to).then_some(Resampled { theirs: POSITIONS, from, to, antialias: c.antialias })
}

/// Where every weight lies.
pub(crate) fn stored(c: &VitConfig) -> Result<Vec<Stored>, String> {
    fits(c)?;
    let (d, f, grid) = (c.width, c.ffn(), c.grid());
    let mut all = vec![
        Stored::whole("cls", "cls_token", vec![1, 1, d]),
        Stored::whole("positions.weight", POSITIONS, vec![1, 1 + grid * grid, d]),
        Stored::whole("patch.bias", "patch_embed.proj.bias", vec![d]),
        Stored::whole("norm", "norm.weight", vec![d]),
        Stored::whole("norm_bias", "norm.bias", vec![d]),
        Stored {
            within: Within::ChannelsLast,
            ..Stored::whole("patch.weight", "patch_embed.proj.weight", vec![d, CHANNELS, c.patch, c.patch])
        },
    ];
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
