//! The vision towers of CLIP and SigLIP as the `transformers` library describes them: alone, as part of a model that also reads
//! text, and with a head of classes.
//!
//! CLIP norms its tokens before the first block, and its classifier reads the mean of the patches after the last block. The
//! norm after the blocks belongs to the embedding that is compared with texts, so it is not read here. SigLIP has no class
//! token, and its classifier reads the mean of all tokens after the norm; its attention pooling is not read.

use serde_json::{Map, Value, json};

use super::class_heads;
use super::dinov2::patches;
use super::fields::Fields;
use super::layer_kinds::object;
use super::processor::Processor;
use super::stored::{Stored, Within};
use super::vision::{Files, VitDescription, of_its_images};
use crate::config::{Activation, FinalNorm, Pooling, VitConfig, VitLibrary};
use crate::images::CHANNELS;

pub(crate) const CLIP: Files = Files {
    model_types: &["clip", "clip_vision_model"],
    read: |f| read(f, &OF_CLIP),
    holds: |c| c.library == VitLibrary::Transformers && c.input_norm,
    write: |c, dtype| write(c, dtype, &OF_CLIP),
    stored: |c| stored(c, &OF_CLIP),
    bases: &["vision_model"],
    is_redundant: |name| {
        of_text(name)
            || ["post_layernorm.", "embeddings.position_ids"].iter().any(|part| name.starts_with(part))
    },
    resampled: |c| of_its_images(c, POSITIONS),
    label_fields: class_heads::label_fields,
};

pub(crate) const SIGLIP: Files = Files {
    model_types: &["siglip", "siglip_vision_model"],
    read: |f| read(f, &OF_SIGLIP),
    holds: |c| c.library == VitLibrary::Transformers && !c.class_token,
    write: |c, dtype| write(c, dtype, &OF_SIGLIP),
    stored: |c| stored(c, &OF_SIGLIP),
    is_redundant: |name| {
        of_text(name) || ["head.", "embeddings.position_ids"].iter().any(|part| name.starts_with(part))
    },
    ..CLIP
};

/// The tensor of positions.
const POSITIONS: &str = "vision_model.embeddings.position_embedding.weight";

/// Whether a tensor belongs to the text part, or to the comparison of the two.
fn of_text(name: &str) -> bool {
    ["text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias"]
        .iter()
        .any(|part| name.starts_with(part))
}

/// The names and properties in which the two differ.
pub(super) struct Tower {
    model_type: &'static str,
    /// The library's class of the tower alone.
    alone: &'static str,
    class: &'static str,
    bodies: &'static [&'static str],
    patch: usize,
    activation: Activation,
    norm_eps: f64,
    pub mean: [f64; 3],
    pub std: [f64; 3],
}

pub(super) const OF_CLIP: Tower = Tower {
    model_type: "clip",
    alone: "clip_vision_model",
    class: "CLIPForImageClassification",
    bodies: &["CLIPVisionModel", "CLIPModel", "CLIPVisionModelWithProjection"],
    patch: 32,
    activation: Activation::QuickGelu,
    norm_eps: 1e-5,
    mean: [0.48145466, 0.4578275, 0.40821073],
    std: [0.26862954, 0.26130258, 0.27577711],
};

const OF_SIGLIP: Tower = Tower {
    model_type: "siglip",
    alone: "siglip_vision_model",
    class: "SiglipForImageClassification",
    bodies: &["SiglipVisionModel", "SiglipModel"],
    patch: 16,
    activation: Activation::GeluTanh,
    norm_eps: 1e-6,
    mean: [0.5; 3],
    std: [0.5; 3],
};

/// The library's names of non-linearities.
const ACTIVATIONS: [(&str, Activation); 4] = [
    ("quick_gelu", Activation::QuickGelu),
    ("gelu", Activation::GeluExact),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_new", Activation::GeluTanh),
];

impl Tower {
    /// The tower's defaults, without dimensions.
    fn plain(&self) -> VitConfig {
        let is_clip = self.model_type == OF_CLIP.model_type;
        VitConfig {
            class_token: is_clip,
            input_norm: is_clip,
            final_norm: if is_clip { FinalNorm::None } else { FinalNorm::Tokens },
            pooling: Pooling::Mean,
            mean: self.mean,
            std: self.std,
            library: VitLibrary::Transformers,
            ..VitConfig::default()
        }
    }
}

fn read(f: &Fields<'_>, tower: &Tower) -> Result<VitDescription, String> {
    let has_head = class_heads::is_there(f, tower.model_type, tower.class, tower.bodies)?;
    let classes = if has_head { class_heads::names(f)? } else { vec![] };
    // In a model that also reads text the tower is a section.
    let nested = f.get("model_type").is_some_and(|kind| kind == tower.model_type);
    let none = Map::new();
    let inner = match f.get("vision_config") {
        _ if !nested => f.0,
        None => &none,
        Some(fields) => fields.as_object().ok_or("its `vision_config` is not an object")?,
    };
    let f = Fields(inner);
    f.only("num_channels", json!(CHANNELS), &CHANNELS.to_string())?;
    let (patch, image_size) = patches(&f, tower.patch)?;
    let activation = match f.get("hidden_act") {
        None => tower.activation,
        Some(said) => {
            let known = ACTIVATIONS.iter().find(|(name, _)| said == name);
            known.map(|(_, activation)| *activation).ok_or_else(|| {
                format!(
                    "its `hidden_act` is {said}, and here there is quick_gelu, gelu and gelu_pytorch_tanh"
                )
            })?
        }
    };
    let vit = VitConfig {
        width: f.extent_or("hidden_size", 768)?,
        layers: f.extent_or("num_hidden_layers", 12)?,
        heads: f.extent_or("num_attention_heads", 12)?,
        ffn: Some(f.extent_or("intermediate_size", 3072)?),
        activation,
        patch,
        image_size,
        grid: Some(image_size / patch),
        classes: has_head.then_some(classes.len()),
        norm_eps: f.number_or("layer_norm_eps", tower.norm_eps)?,
        ..tower.plain()
    };
    Ok((vit, classes, Processor::default()))
}

/// Whether a vision transformer is such a tower; otherwise the key that prevents it.
fn fits(c: &VitConfig, tower: &Tower) -> Result<(), String> {
    let plain = tower.plain();
    let asked = [
        ("pooling", c.pooling == plain.pooling, plain.pooling.to_string()),
        ("final_norm", c.final_norm == plain.final_norm, plain.final_norm.to_string()),
        ("class_token", c.class_token == plain.class_token, plain.class_token.to_string()),
        ("input_norm", c.input_norm == plain.input_norm, plain.input_norm.to_string()),
        (
            "prefix_positions",
            c.prefix_positions() == plain.prefix_positions(),
            plain.prefix_positions().to_string(),
        ),
        ("registers", c.registers == 0, "0".into()),
        ("layer_scale", c.layer_scale.is_none(), "none".into()),
        ("swiglu", !c.swiglu, "false".into()),
        ("antialias", !c.antialias || [c.grid(); 2] == c.patches(), "false".into()),
    ];
    match asked.into_iter().find(|(_, fits, _)| !fits) {
        Some((key, _, wanted)) => Err(format!("{} has another `model.{key}`: {wanted}", tower.class)),
        None => Ok(()),
    }
}

fn write(c: &VitConfig, dtype: &str, tower: &Tower) -> Result<Value, String> {
    fits(c, tower)?;
    let named = ACTIVATIONS.iter().find(|(_, activation)| *activation == c.activation);
    let vision = object(json!({
        "model_type": tower.alone,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.ffn(),
        "hidden_act": named.map(|(name, _)| name),
        "layer_norm_eps": c.norm_eps,
        "attention_dropout": 0.0,
        "image_size": c.image_size,
        "patch_size": c.patch,
        "num_channels": CHANNELS,
        // SigLIP's attention pooling has no tensors here.
        "vision_use_head": false,
    }));
    let common = object(json!({ "torch_dtype": dtype, "dtype": dtype }));
    let Some(classes) = c.classes else {
        let class = object(json!({ "architectures": [tower.bodies[0]] }));
        return Ok(Value::Object([vision, common, class].into_iter().flatten().collect()));
    };
    let whole = object(json!({
        "architectures": [tower.class],
        "model_type": tower.model_type,
        "vision_config": vision,
    }));
    let labels = class_heads::label_fields(&class_heads::numbered(classes));
    Ok(Value::Object([whole, common, labels].into_iter().flatten().collect()))
}

/// Location of every weight.
fn stored(c: &VitConfig, tower: &Tower) -> Result<Vec<Stored>, String> {
    fits(c, tower)?;
    let (d, f) = (c.width, c.ffn());
    let mut all = vec![];
    let mut add = |ours: String, theirs: String, dims: &[usize]| {
        all.push(Stored::whole(ours, format!("vision_model.{theirs}"), dims.to_vec()));
    };
    if c.class_token {
        add("cls".into(), "embeddings.class_embedding".into(), &[d]);
    }
    if !c.input_norm {
        add("patch.bias".into(), "embeddings.patch_embedding.bias".into(), &[d]);
    }
    let mut both = |ours: String, theirs: String, dims: &[usize]| {
        add(ours.clone(), format!("{theirs}.weight"), dims);
        add(format!("{ours}_bias"), format!("{theirs}.bias"), &dims[..1]);
    };
    if c.input_norm {
        // The library's spelling.
        both("input_norm".into(), "pre_layrnorm".into(), &[d]);
    }
    for i in 0..c.layers {
        for (ours, theirs, dims) in [
            ("attn_norm", "layer_norm1", &[d][..]),
            ("attn.wq", "self_attn.q_proj", &[d, d]),
            ("attn.wk", "self_attn.k_proj", &[d, d]),
            ("attn.wv", "self_attn.v_proj", &[d, d]),
            ("attn.wo", "self_attn.out_proj", &[d, d]),
            ("ffn_norm", "layer_norm2", &[d]),
            ("ffn.up", "mlp.fc1", &[f, d]),
            ("ffn.down", "mlp.fc2", &[d, f]),
        ] {
            both(format!("layers.{i}.{ours}"), format!("encoder.layers.{i}.{theirs}"), dims);
        }
    }
    if c.final_norm == FinalNorm::Tokens {
        both("norm".into(), "post_layernorm".into(), &[d]);
    }
    let positions = c.prefix_positions() + c.grid() * c.grid();
    all.push(Stored::whole("positions.weight", POSITIONS, vec![positions, d]));
    let dims = vec![d, CHANNELS, c.patch, c.patch];
    let patch = Stored::whole("patch.weight", "vision_model.embeddings.patch_embedding.weight", dims);
    all.push(Stored { within: Within::ChannelsLast, ..patch });
    if let Some(classes) = c.classes {
        all.push(Stored::whole("head.weight", "classifier.weight", vec![classes, d]));
        all.push(Stored::whole("head.bias", "classifier.bias", vec![classes]));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::Published;
    use crate::library::read as read_any;
    use crate::registry::Model;

    fn tower(config: &Value) -> VitConfig {
        match read_any(config).expect("a model").model {
            Model::Vit(vit) => vit,
            other => panic!("{other:?}"),
        }
    }

    /// The published files of clip-vit-base-patch32 and siglip-base-patch16-224, reduced to the fields that are read.
    #[test]
    fn the_published_files_read_and_are_written_back() {
        let clip = tower(&json!({
            "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 512,
            "text_config": { "hidden_size": 512 }, "vision_config": { "hidden_size": 768, "patch_size": 32 },
        }));
        assert_eq!((clip.activation, clip.mean[0], clip.tokens()), (Activation::QuickGelu, 0.48145466, 50));
        assert_eq!(
            clip.parameters(),
            87_456_000 - 2 * 768,
            "CLIPVisionModel's own count, but for its last norm"
        );
        let siglip = tower(&json!({
            "architectures": ["SiglipModel"], "model_type": "siglip",
            "text_config": {}, "vision_config": { "model_type": "siglip_vision_model" },
        }));
        assert_eq!((siglip.activation, siglip.mean, siglip.tokens()), (Activation::GeluTanh, [0.5; 3], 196));
        assert_eq!(siglip.parameters(), 85_797_120, "SiglipVisionModel's own count without its pooling");
        for (body, class) in [(clip, "CLIPForImageClassification"), (siglip, "SiglipForImageClassification")]
        {
            let written = body.write("float32", &[], &[]).unwrap();
            assert_eq!(tower(&written), body);
            let classes = VitConfig { classes: Some(3), ..body.clone() };
            let written = classes.write("float32", &[], &[]).unwrap();
            assert_eq!(written["architectures"][0], class);
            assert_eq!(tower(&written), classes);
            for unread in
                ["text_model.final_layer_norm.weight", "logit_scale", "vision_model.embeddings.position_ids"]
            {
                assert!(body.is_redundant(unread), "{unread}");
            }
            assert!(!body.is_redundant("vision_model.encoder.layers.12.mlp.fc1.weight"));
            let scaled = VitConfig { layer_scale: Some(1.0), ..body };
            assert!(scaled.write("float32", &[], &[]).unwrap_err().contains("`model.layer_scale`: none"));
        }
    }

    #[test]
    fn fields_that_change_results_are_refused_by_name() {
        let refused = |config: Value| read_any(&config).expect_err("a refusal");
        let vision = |fields: Value| json!({ "model_type": "siglip", "vision_config": fields });
        assert!(refused(vision(json!({ "hidden_act": "relu" }))).contains("`hidden_act` is \"relu\""));
        let odd = vision(json!({ "image_size": 384, "patch_size": 14 }));
        assert!(refused(odd).contains("14 does not divide its `image_size` 384"));
        assert!(refused(vision(json!(7))).contains("`vision_config` is not an object"));
        let text = json!({ "model_type": "clip", "architectures": ["CLIPTextModel"] });
        assert!(refused(text).contains("CLIPTextModel"));
        assert!(refused(json!({ "model_type": "siglip2" })).contains("images of any shape"));
    }
}
