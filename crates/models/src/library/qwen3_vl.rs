//! Qwen3-VL as the `transformers` library describes it: a Qwen3 with a vision tower.
//!
//! Its `config.json` has a section for the text and one for the tower. The tower's q, k and v are rows of one tensor, and the
//! product with patches is a convolution over time, rows and columns.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::llama::weight_names;
use super::processor::IMAGE_AREAS;
use super::qwen;
use super::stored::{Stored, Within};
use crate::config::{DecoderConfig, Qwen3VlConfig, Vision};
use crate::images::CHANNELS;

pub(crate) const MODEL_TYPE: &str = "qwen3_vl";
pub(crate) const CLASS: &str = "Qwen3VLForConditionalGeneration";
/// A constant of the tower's norms in the library.
const NORM_EPS: f64 = 1e-6;

/// Prefixes of the `model_type`s of related models, and why they are not supported.
const RELATIVES: [(&str, &str); 7] = [
    ("qwen3_vl_moe", "which is a mixture of experts: of Qwen3-VL the dense sizes are read, 2B to 32B"),
    ("qwen3_omni", "which hears and speaks: of Qwen3 models that see, qwen3_vl is read"),
    ("qwen3_next", "whose text model has gated delta nets, which are not built here"),
    (
        "qwen3_5",
        "whose text model has gated delta nets, which are not built here: of Qwen models that see, qwen3_vl is read",
    ),
    ("qwen3_moe", "which is a mixture of experts: of Qwen3 the dense sizes are read"),
    ("qwen2_5_vl", "whose tower sees windows: of Qwen models that see, qwen3_vl is read"),
    ("qwen2_vl", "whose tower is another: of Qwen models that see, qwen3_vl is read"),
];

/// The reason why a model of this type is not supported, if it is a related one.
pub(crate) fn refused(model_type: &str) -> Option<String> {
    let (_, why) = RELATIVES.into_iter().find(|(start, _)| model_type.starts_with(start))?;
    Some(format!("its `model_type` is {model_type:?}, {why}"))
}

/// Reads the whole file, or returns a sentence that names the unsupported field.
pub(crate) fn read(outer: &Fields<'_>) -> Result<DecoderConfig, String> {
    let class = outer.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    if let Some(class) = class.filter(|class| *class != CLASS) {
        return Err(format!(
            "its `architectures` says {class}, and of {MODEL_TYPE} models only {CLASS} is read"
        ));
    }
    outer.refuse_quantised()?;
    let text = outer.part("text_config")?;
    kind(&text, "text_config", &["qwen3_vl_text"])?;
    text.only("use_sliding_window", json!(false), "attention over the whole text")?;
    let context = text.extent_or("max_position_embeddings", 128_000)?;
    let sections = sections(&text)?;
    let model = qwen::read_qwen3(&text)?;
    let tied = match outer.get("tie_word_embeddings") {
        Some(_) => outer.flag("tie_word_embeddings")?,
        None => model.tied,
    };
    let vision = outer.part("vision_config")?;
    let vision =
        tower(outer, &vision, model.width).map_err(|why| format!("in its `vision_config`: {why}"))?;
    let vision = Some(Vision::Qwen3Vl(vision));
    Ok(DecoderConfig { context, tied, rope_sections: Some(sections), vision, ..model })
}

fn kind(part: &Fields<'_>, name: &str, known: &[&str]) -> Result<(), String> {
    match part.get("model_type").and_then(Value::as_str) {
        Some(found) if !known.contains(&found) => Err(match refused(found) {
            Some(why) => format!("in its `{name}`: {why}"),
            None => format!("its `{name}` is of a {found:?}, and {} is read", known.join(" or ")),
        }),
        _ => Ok(()),
    }
}

/// The numbers of pairs of a head for time, height and width.
fn sections(text: &Fields<'_>) -> Result<[usize; 3], String> {
    let (name, rope) = match (text.get("rope_parameters"), text.get("rope_scaling")) {
        (Some(rope), _) => ("rope_parameters", rope),
        (None, Some(rope)) => ("rope_scaling", rope),
        (None, None) => {
            return Err("its `text_config` has neither `rope_parameters` nor `rope_scaling`".into());
        }
    };
    let rope =
        Fields(rope.as_object().ok_or_else(|| format!("its `{name}` is {rope}, and must be an object"))?);
    if rope.get("rope_theta").is_none() && text.get("rope_theta").is_none() {
        return Err("its `text_config` has no `rope_theta`".into());
    }
    if !rope.flag("mrope_interleaved").map_err(|why| format!("in its `{name}`: {why}"))? {
        return Err(format!(
            "its `{name}` has no true `mrope_interleaved`, and here time, height and width take turns over the frequencies"
        ));
    }
    let sections: Option<Vec<usize>> = rope
        .get("mrope_section")
        .and_then(|value| value.as_array()?.iter().map(|n| usize::try_from(n.as_u64()?).ok()).collect());
    let three = sections.and_then(|sections| sections.try_into().ok());
    three.ok_or_else(|| format!("its `{name}` has no `mrope_section` of three numbers"))
}

fn tower(outer: &Fields<'_>, f: &Fields<'_>, text_width: usize) -> Result<Qwen3VlConfig, String> {
    kind(f, "vision_config", &["qwen3_vl", "qwen3_vl_vision"])?;
    let only = |name: &str, supported: Value| match f.get(name).filter(|value| **value != supported) {
        Some(value) => Err(format!("its `{name}` is {value}, and here there is only {supported}")),
        None => Ok(()),
    };
    only("hidden_act", json!("gelu_pytorch_tanh"))?;
    only("in_channels", json!(CHANNELS))?;
    only("out_hidden_size", json!(text_width))?;
    let learned = f.extent_or("num_position_embeddings", 2304)?;
    let side = learned.isqrt();
    if side * side != learned {
        return Err(format!("its `num_position_embeddings` is {learned}, which is no square"));
    }
    let rope_theta = match f.get("rope_parameters").and_then(Value::as_object).map(Fields) {
        None => 1e4,
        Some(rope) => {
            let kind = rope.get("rope_type").and_then(Value::as_str);
            if let Some(kind) = kind.filter(|kind| !["axial", "default"].contains(kind)) {
                return Err(format!("its rotations are {kind:?}, and here there is only axial"));
            }
            rope.number_or("rope_theta", 1e4)?
        }
    };
    let deepstack = match f.get("deepstack_visual_indexes") {
        None => vec![8, 16, 24],
        Some(said) => {
            let all: Option<Vec<usize>> = said
                .as_array()
                .and_then(|all| all.iter().map(|n| usize::try_from(n.as_u64()?).ok()).collect());
            all.ok_or_else(|| {
                format!("its `deepstack_visual_indexes` is {said}, and must be a list of blocks")
            })?
        }
    };
    let token = |name: &str, default: u32| match outer.tokens(name)?[..] {
        [] => Ok(default as usize),
        [token] => Ok(token as usize),
        _ => Err(format!("its `{name}` must be one token")),
    };
    Ok(Qwen3VlConfig {
        width: f.extent_or("hidden_size", 1152)?,
        layers: f.extent_or("depth", 27)?,
        heads: f.extent_or("num_heads", 16)?,
        ffn: f.extent_or("intermediate_size", 4304)?,
        patch: f.extent_or("patch_size", 16)?,
        time_patch: f.extent_or("temporal_patch_size", 2)?,
        merge: f.extent_or("spatial_merge_size", 2)?,
        positions: side,
        deepstack,
        norm_eps: NORM_EPS,
        rope_theta,
        image_token: token("image_token_id", 151_655)?,
        video_token: token("video_token_id", 151_656)?,
        start_token: token("vision_start_token_id", 151_652)?,
        end_token: token("vision_end_token_id", 151_653)?,
        ..Qwen3VlConfig::default()
    })
}

/// Location of every weight in the library's checkpoints.
pub(crate) fn stored(
    c: &DecoderConfig,
    v: &Qwen3VlConfig,
    shape: impl Fn(&str) -> Vec<usize>,
) -> Vec<Stored> {
    let text = weight_names(c).into_iter().map(|(ours, theirs)| {
        let theirs = match theirs.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => theirs,
        };
        let dims = shape(&ours);
        Stored::whole(ours, theirs, dims)
    });
    text.chain(tower_stored(v, c.width)).collect()
}

fn tower_stored(v: &Qwen3VlConfig, text_width: usize) -> Vec<Stored> {
    let (d, ffn, merged) = (v.width, v.ffn, v.block() * v.width);
    let mut all = vec![];
    let whole = |ours: String, theirs: String, dims: &[usize]| {
        Stored::whole(format!("vision.{ours}"), format!("model.visual.{theirs}"), dims.to_vec())
    };
    let product = |all: &mut Vec<Stored>, ours: String, theirs: String, [out, inner]: [usize; 2]| {
        all.push(whole(ours.clone(), format!("{theirs}.weight"), &[out, inner]));
        all.push(whole(format!("{ours}_bias"), format!("{theirs}.bias"), &[out]));
    };
    let norm = |all: &mut Vec<Stored>, ours: String, theirs: String, size: usize| {
        all.push(whole(ours.clone(), format!("{theirs}.weight"), &[size]));
        all.push(whole(format!("{ours}_bias"), format!("{theirs}.bias"), &[size]));
    };
    let kernel = [d, CHANNELS, v.time_patch, v.patch, v.patch];
    all.push(Stored {
        within: Within::ChannelsLast,
        ..whole("patch.weight".into(), "patch_embed.proj.weight".into(), &kernel)
    });
    all.push(whole("patch.bias".into(), "patch_embed.proj.bias".into(), &[d]));
    let learned = [v.positions * v.positions, d];
    all.push(whole("positions.weight".into(), "pos_embed.weight".into(), &learned));
    for i in 0..v.layers {
        let (ours, theirs) =
            (|name: &str| format!("layers.{i}.{name}"), |name: &str| format!("blocks.{i}.{name}"));
        norm(&mut all, ours("attn_norm"), theirs("norm1"), d);
        for (nth, name) in ["wq", "wk", "wv"].into_iter().enumerate() {
            let within = || Within::Rows(nth * d..(nth + 1) * d);
            let part = |ours: String, theirs: &str, dims: &[usize]| Stored {
                within: within(),
                ..whole(ours, format!("blocks.{i}.attn.qkv.{theirs}"), dims)
            };
            all.push(part(ours(&format!("attn.{name}")), "weight", &[3 * d, d]));
            all.push(part(ours(&format!("attn.{name}_bias")), "bias", &[3 * d]));
        }
        product(&mut all, ours("attn.wo"), theirs("attn.proj"), [d, d]);
        norm(&mut all, ours("ffn_norm"), theirs("norm2"), d);
        product(&mut all, ours("ffn.up"), theirs("mlp.linear_fc1"), [ffn, d]);
        product(&mut all, ours("ffn.down"), theirs("mlp.linear_fc2"), [d, ffn]);
    }
    let mergers = (0..v.deepstack.len())
        .map(|i| (format!("deepstack.{i}"), format!("deepstack_merger_list.{i}"), merged));
    for (ours, theirs, normed) in [("merger".into(), "merger".into(), d)].into_iter().chain(mergers) {
        norm(&mut all, format!("{ours}.norm"), format!("{theirs}.norm"), normed);
        product(&mut all, format!("{ours}.up"), format!("{theirs}.linear_fc1"), [merged, merged]);
        product(&mut all, format!("{ours}.down"), format!("{theirs}.linear_fc2"), [text_width, merged]);
    }
    all
}

/// The `config.json` of a decoder whose text is a Qwen3; `common` are the fields that all models of the library have.
pub(crate) fn write(
    c: &DecoderConfig,
    v: &Qwen3VlConfig,
    common: Map<String, Value>,
) -> Result<Value, String> {
    if v.norm_eps != NORM_EPS {
        return Err(format!("`model.vision.norm_eps` is {}, and {CLASS} has {NORM_EPS}", v.norm_eps));
    }
    let sections = c.rope_sections.expect("validated: a decoder that sees has sections");
    let mut text = Value::Object(qwen::write_text(c));
    // Written even without scaling, because it contains the sections.
    if text["rope_scaling"].is_null() {
        text["rope_scaling"] = json!({ "rope_type": "default" });
    }
    for rope in ["rope_scaling", "rope_parameters"] {
        text[rope]["mrope_section"] = json!(sections);
        text[rope]["mrope_interleaved"] = json!(true);
    }
    text["model_type"] = json!("qwen3_vl_text");
    let beside = [
        "vocab_size",
        "initializer_range",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "torch_dtype",
        "dtype",
    ];
    for (name, value) in common.iter().filter(|(name, _)| beside.contains(&name.as_str())) {
        text[name.as_str()] = value.clone();
    }
    let mut config = Value::Object(common);
    // The vocabulary belongs to the text section.
    config.as_object_mut().expect("it is an object").remove("vocab_size");
    config["architectures"] = json!([CLASS]);
    config["model_type"] = json!(MODEL_TYPE);
    config["text_config"] = text;
    config["vision_config"] = json!({
        "model_type": "qwen3_vl_vision",
        "hidden_size": v.width,
        "depth": v.layers,
        "num_heads": v.heads,
        "intermediate_size": v.ffn,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": CHANNELS,
        "patch_size": v.patch,
        "temporal_patch_size": v.time_patch,
        "spatial_merge_size": v.merge,
        "out_hidden_size": c.width,
        "num_position_embeddings": v.positions * v.positions,
        "deepstack_visual_indexes": v.deepstack,
        "initializer_range": c.init_std,
        "rope_parameters": { "rope_type": "axial", "rope_theta": v.rope_theta },
    });
    for (name, token) in [
        ("image_token_id", v.image_token),
        ("video_token_id", v.video_token),
        ("vision_start_token_id", v.start_token),
        ("vision_end_token_id", v.end_token),
    ] {
        config[name] = json!(token);
    }
    Ok(config)
}

/// The `preprocessor_config.json` of a model with these limits on an image's area, or with the published ones.
pub(crate) fn write_processor(v: &Qwen3VlConfig, area: Option<[u64; 2]>) -> Value {
    let [least, most] = area.unwrap_or(IMAGE_AREAS);
    json!({
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": v.patch,
        "temporal_patch_size": v.time_patch,
        "merge_size": v.merge,
        "image_mean": v.mean,
        "image_std": v.std,
        "size": { "shortest_edge": least, "longest_edge": most },
    })
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::config::Model;
    use crate::library::stored::assert_filled;

    fn tower_of(model: &DecoderConfig) -> Qwen3VlConfig {
        model.vision.as_ref().and_then(Vision::as_qwen3_vl).expect("a tower").clone()
    }
    use crate::library::{self, Published};
    use crate::registry::Family;

    /// The published file of the 8B, reduced to the fields that are read.
    fn eight_b() -> Value {
        json!({
            "architectures": [CLASS], "model_type": "qwen3_vl", "tie_word_embeddings": false,
            "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
            "vision_end_token_id": 151653, "transformers_version": "4.57.0.dev0",
            "text_config": {
                "model_type": "qwen3_vl_text", "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
                "eos_token_id": 151645, "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
                "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 262144,
                "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
                "rope_scaling": { "mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default" },
                "rope_theta": 5000000, "use_cache": true, "vocab_size": 151936,
            },
            "vision_config": {
                "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
                "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
                "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
        })
    }

    fn read(config: &Value) -> Result<DecoderConfig, String> {
        match library::read(config)?.model {
            Model::Decoder(decoder) => Ok(decoder),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_published_8b_is_read_and_written_back() {
        let model = read(&eight_b()).unwrap();
        let vision = tower_of(&model);
        assert_eq!((model.head_size(), model.context, model.rope_theta), (128, 262_144, 5e6));
        assert_eq!((model.rope_sections, model.tied, model.qk_norm), (Some([24, 20, 20]), false, true));
        assert_eq!((vision.head_size(), vision.positions, &vision.deepstack[..]), (72, 48, &[8, 16, 24][..]));
        // 8.767e9 in total: 8.191e9 of text, 0.416e9 of the tower, 0.160e9 of four mergers.
        assert_eq!(model.parameters(), 8_767_123_696);
        assert_eq!(model.parameters() - vision.parameters(4096), 8_190_735_360);
        assert_eq!(library::read(&eight_b()).unwrap().eos, [151_645]);
        let written = model.write("bfloat16", &[151_643], &[151_645]).unwrap();
        assert_eq!(read(&written).unwrap(), model);
        assert_eq!(library::read(&written).unwrap().eos, [151_645]);
    }

    #[test]
    fn either_form_of_rotations_is_read_and_the_outer_wins() {
        let old = read(&eight_b()).unwrap();
        let mut new = eight_b();
        let text = new["text_config"].as_object_mut().unwrap();
        let mut rope = text.remove("rope_scaling").unwrap();
        rope["rope_theta"] = text.remove("rope_theta").unwrap();
        text.insert("rope_parameters".into(), rope);
        text.insert("tie_word_embeddings".into(), json!(true));
        assert_eq!(read(&new).unwrap(), old);
        new.as_object_mut().unwrap().remove("tie_word_embeddings");
        assert!(read(&new).unwrap().tied, "the text's own where nothing stands above");
        new["vision_config"]["deepstack_visual_indexes"] = json!([]);
        assert!(tower_of(&read(&new).unwrap()).deepstack.is_empty());
    }

    #[test]
    fn fields_that_change_results_are_refused_by_name() {
        let changed = |part: &str, name: &str, value: Value| {
            let mut config = eight_b();
            let fields = if part.is_empty() { &mut config } else { &mut config[part] };
            fields[name] = value;
            read(&config).unwrap_err()
        };
        let refused =
            |sentence: String, words: &str| assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        refused(
            changed("", "model_type", json!("qwen3_vl_moe")),
            "\"qwen3_vl_moe\", which is a mixture of experts",
        );
        refused(changed("", "model_type", json!("qwen3_5")), "gated delta nets");
        refused(changed("", "model_type", json!("qwen3_5_moe")), "gated delta nets");
        refused(changed("", "model_type", json!("qwen2_5_vl")), "whose tower sees windows");
        refused(changed("", "architectures", json!(["Qwen3VLModel"])), "says Qwen3VLModel");
        refused(changed("", "quantization_config", json!({ "bits": 4 })), "`quantization_config`");
        refused(changed("", "text_config", json!(3)), "its `text_config` is not an object");
        refused(changed("", "image_token_id", json!(151_936)), "`model.vision.image_token` is 151936");
        refused(changed("text_config", "model_type", json!("qwen3_5_text")), "gated delta nets");
        refused(
            changed("text_config", "model_type", json!("llama")),
            "of a \"llama\", and qwen3_vl_text is read",
        );
        refused(changed("text_config", "rope_scaling", Value::Null), "neither `rope_parameters` nor");
        refused(changed("text_config", "rope_theta", Value::Null), "has no `rope_theta`");
        let chunks = json!({ "mrope_section": [16, 24, 24], "rope_type": "default" });
        refused(changed("text_config", "rope_scaling", chunks), "no true `mrope_interleaved`");
        let short = json!({ "mrope_section": [24, 20, 19], "mrope_interleaved": true });
        refused(changed("text_config", "rope_scaling", short), "whose sum is 64");
        let none = json!({ "mrope_interleaved": true });
        refused(changed("text_config", "rope_scaling", none), "no `mrope_section` of three numbers");
        let long = json!({ "mrope_section": [20, 22, 22], "mrope_interleaved": true });
        refused(changed("text_config", "rope_scaling", long), "they may have 21 at most");
        refused(
            changed("vision_config", "hidden_act", json!("silu")),
            "in its `vision_config`: its `hidden_act`",
        );
        refused(changed("vision_config", "out_hidden_size", json!(3584)), "only 4096");
        refused(changed("vision_config", "num_position_embeddings", json!(2305)), "no square");
        refused(changed("vision_config", "num_heads", json!(5)), "`model.vision.heads` = 5");
        refused(changed("vision_config", "num_heads", json!(64)), "multiple of 4");
        refused(changed("vision_config", "deepstack_visual_indexes", json!([8, 27])), "names block 27");
        refused(
            changed("vision_config", "deepstack_visual_indexes", json!([16, 8])),
            "every block once, in order",
        );
        refused(changed("vision_config", "model_type", json!("qwen3_5_vision")), "`vision_config`");
        let model = read(&eight_b()).unwrap();
        let write = |model: DecoderConfig| model.write("float32", &[], &[]).unwrap_err();
        refused(
            write(DecoderConfig { qk_norm: false, ..model.clone() }),
            "beside a qwen3, and this one is a llama",
        );
        let vision = Vision::Qwen3Vl(Qwen3VlConfig { norm_eps: 1e-5, ..tower_of(&model) });
        refused(write(DecoderConfig { vision: Some(vision), ..model }), "`model.vision.norm_eps` is 0.00001");
    }

    /// Every parameter of the graph has one location of its size, and the locations fill each tensor.
    #[test]
    fn every_weight_has_one_location() {
        let text = DecoderConfig {
            width: 8,
            layers: 2,
            heads: 2,
            kv_heads: Some(1),
            head_size: Some(16),
            ffn: 6,
            vocab: 10,
            context: 8,
            qk_norm: true,
            rope_sections: Some([4, 2, 2]),
            ..DecoderConfig::default()
        };
        let small = Qwen3VlConfig {
            width: 8,
            layers: 3,
            heads: 2,
            ffn: 5,
            patch: 2,
            positions: 3,
            deepstack: vec![0, 2],
            image_token: 1,
            video_token: 2,
            start_token: 3,
            end_token: 4,
            ..Qwen3VlConfig::default()
        };
        for (tied, deepstack) in [(true, vec![0, 2]), (false, vec![])] {
            let vision = Some(Vision::Qwen3Vl(Qwen3VlConfig { deepstack, ..small.clone() }));
            let model = DecoderConfig { tied, vision, ..text.clone() };
            assert_eq!(model.validate(), Ok(()));
            let graph = model.build(model.least());
            let parameters: Vec<_> = graph.slots.iter().filter(|s| s.class.is_parameter()).collect();
            let shape = |path: &str| {
                let slot = parameters.iter().find(|s| s.path == path);
                slot.map_or(vec![], |slot| slot.ty.dims.to_vec())
            };
            let table = Published::stored(&model, &shape).unwrap();
            assert_filled(&graph, &table);
            let elements: usize = parameters.iter().map(|slot| slot.ty.elements()).sum();
            assert_eq!(model.parameters(), elements as u64);
        }
    }
}
