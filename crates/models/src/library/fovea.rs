//! The foveated video model in its authors' format: a DINOv2 below `encoder.dino.`, a Llama below `llm.`, and the vectors and
//! linear layers between them. A `config.json` of our own has the dimensions of both; the authors' files have none.

use serde_json::{Map, Value, json};

use super::dinov2::DINOV2;
use super::fields::Fields;
use super::huggingface;
use super::llama::{self, weight_names};
use super::stored::Stored;
use crate::config::{Activation, DecoderConfig, FinalNorm, FoveaConfig, Pooling, Vision, VitConfig};
use crate::vision::SCOPE;

pub(crate) const MODEL_TYPE: &str = "fvlm";
const CLASS: &str = "FoveatedVLM";
const TEXT: &str = "llm";
const TOWER: &str = "encoder.dino";

/// Reads the whole file, or returns a sentence that names the unsupported field.
pub(crate) fn read(outer: &Fields<'_>) -> Result<DecoderConfig, String> {
    let text = outer.part("text_config")?;
    let model = llama::read(&text).map_err(|why| format!("in its `text_config`: {why}"))?;
    let vision = outer.part("vision_config")?;
    let (vit, ..) = (DINOV2.read)(&vision).map_err(|why| format!("in its `vision_config`: {why}"))?;
    let fovea = FoveaConfig {
        query: outer.extent_or("query_dim", FoveaConfig::default().query)?,
        visual_scale: outer.number_or("visual_scale", FoveaConfig::default().visual_scale)?,
        image_size: outer.extent_or("frame_size", FoveaConfig::default().image_size)?,
        ..tower(&vit, &FoveaConfig::default())?
    };
    Ok(DecoderConfig { vision: Some(Vision::Fovea(fovea)), ..model })
}

/// A tower with the blocks of a DINOv2, for frames of its own size.
pub fn tower(vit: &VitConfig, own: &FoveaConfig) -> Result<FoveaConfig, String> {
    if vit.registers > 0 {
        return Err("it has registers, and a foveated tower has none: give a DINOv2 without them".into());
    }
    let is_plain = vit.class_token
        && vit.prefix_positions() == 1
        && !vit.input_norm
        && vit.final_norm == FinalNorm::Tokens
        && vit.activation == Activation::GeluExact;
    if !is_plain {
        return Err("it is no DINOv2: a foveated tower has its class token, its norms and its GELU".into());
    }
    if vit.swiglu {
        return Err(
            "its feed-forward is gated, and a foveated tower's is not: give a DINOv2 with GELU".into()
        );
    }
    Ok(FoveaConfig {
        width: vit.width,
        layers: vit.layers,
        heads: vit.heads,
        ffn: vit.ffn(),
        patch: vit.patch,
        positions: vit.grid(),
        norm_eps: vit.norm_eps,
        layer_scale: vit.layer_scale.unwrap_or(1.0),
        ..own.clone()
    })
}

/// The blocks of a tower as a DINOv2 of the library.
fn published(v: &FoveaConfig) -> VitConfig {
    VitConfig { pooling: Pooling::ClsMean, ..v.vit() }
}

/// Location of every weight in the authors' checkpoints.
pub(crate) fn stored(
    c: &DecoderConfig,
    v: &FoveaConfig,
    shape: impl Fn(&str) -> Vec<usize>,
) -> Result<Vec<Stored>, String> {
    let text = weight_names(c).into_iter().map(|(ours, theirs)| (ours, format!("{TEXT}.{theirs}")));
    let between = [
        ("look.weight", "encoder.query_input_proj.weight"),
        ("seen.weight", "encoder.output_proj.weight"),
        ("seen.bias", "encoder.output_proj.bias"),
        ("to_text.weight", "dino_to_llm.weight"),
        ("to_text.bias", "dino_to_llm.bias"),
        ("to_query.weight", "llm_to_query.weight"),
        ("to_query.bias", "llm_to_query.bias"),
        ("q_static", "q_static"),
        ("q_init", "q_init"),
    ];
    let between = between.map(|(ours, theirs)| (format!("{SCOPE}.{ours}"), theirs.to_string()));
    let whole = |(ours, theirs): (String, String)| {
        let dims = shape(&ours);
        // The authors' queries are matrices of one row.
        let dims = if theirs.starts_with("q_") { [vec![1], dims].concat() } else { dims };
        Stored::whole(ours, theirs, dims)
    };
    // A DINOv2 without a head, whose names lack the model's prefix.
    let bare = |name: &str| DINOV2.bare(name).unwrap_or(name).to_string();
    let below = |at: Stored| Stored {
        ours: format!("{SCOPE}.{}", at.ours),
        theirs: format!("{TOWER}.{}", bare(&at.theirs)),
        ..at
    };
    let blocks = (DINOV2.stored)(&published(v))?.into_iter().map(below);
    Ok(text.chain(between).map(whole).chain(blocks).collect())
}

/// Other names of the text's weights, in a file of the text model alone.
pub(crate) fn other_names(name: &str) -> Vec<String> {
    match name.strip_prefix(&format!("{TEXT}.")) {
        Some(bare) => [vec![bare.to_string()], huggingface::other_names(bare)].concat(),
        None => vec![],
    }
}

/// Whether a tensor is redundant or used only in pretraining.
pub(crate) fn is_redundant(c: &DecoderConfig, name: &str) -> bool {
    let bare = name.strip_prefix(&format!("{TEXT}.")).unwrap_or(name);
    huggingface::is_redundant_text(c, bare) || name.ends_with("embeddings.mask_token")
}

/// The `config.json`; `common` are the fields that all models of the library have.
pub(crate) fn write(c: &DecoderConfig, v: &FoveaConfig, common: Map<String, Value>) -> Result<Value, String> {
    let dtype = common.get("dtype").and_then(Value::as_str).unwrap_or("float32");
    let vision = (DINOV2.write)(&published(v), dtype)?;
    let mut text = Value::Object(common.clone());
    for (name, value) in llama::write(c) {
        text[name] = value;
    }
    let mut config = Value::Object(common);
    config.as_object_mut().expect("it is an object").remove("vocab_size");
    config["architectures"] = json!([CLASS]);
    config["model_type"] = json!(MODEL_TYPE);
    config["text_config"] = text;
    config["vision_config"] = vision;
    config["query_dim"] = json!(v.query);
    config["visual_scale"] = json!(v.visual_scale);
    config["frame_size"] = json!(v.image_size);
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Activation, Bias, Model};
    use crate::library::read;
    use crate::library::stored::assert_filled;

    fn small() -> DecoderConfig {
        let fovea = FoveaConfig {
            width: 12,
            layers: 2,
            heads: 3,
            ffn: 24,
            patch: 2,
            positions: 5,
            image_size: 8,
            query: 6,
            ..FoveaConfig::default()
        };
        DecoderConfig {
            width: 8,
            layers: 2,
            heads: 2,
            kv_heads: Some(1),
            head_size: Some(4),
            ffn: 10,
            vocab: 17,
            context: 32,
            vision: Some(Vision::Fovea(fovea)),
            ..DecoderConfig::default()
        }
    }

    fn write(model: &DecoderConfig) -> Result<Value, String> {
        huggingface::write(model, "float32", &[1], &[2])
    }

    #[test]
    fn it_is_written_and_read_back() {
        let model = small();
        assert_eq!(model.validate(), Ok(()));
        let written = write(&model).unwrap();
        assert_eq!((&written["model_type"], &written["query_dim"]), (&json!("fvlm"), &json!(6)));
        let described = read(&written).unwrap();
        assert_eq!((described.model, described.eos), (Model::from(model), vec![2]));
    }

    #[test]
    fn every_weight_has_one_place() {
        let model = Model::from(small());
        let graph = model.build(model.least());
        let shape = |path: &str| graph.slot(graph.find_slot(path).expect("a weight")).ty.dims.clone();
        let table = model.published().unwrap().stored(&shape).unwrap();
        assert_filled(&graph, &table);
        let place = |ours: &str| table.iter().find(|at| at.ours == ours).expect("a place").clone();
        assert_eq!(
            place("vision.layers.1.attn.wk").theirs,
            "encoder.dino.encoder.layer.1.attention.attention.key.weight"
        );
        assert_eq!(place("layers.0.attn.wq").theirs, "llm.model.layers.0.self_attn.q_proj.weight");
        assert_eq!(
            (place("vision.q_init").theirs, place("vision.q_init").dims),
            ("q_init".into(), vec![1, 6])
        );
        let published = model.published().unwrap();
        assert!(published.is_redundant("llm.lm_head.weight"), "it is tied");
        assert!(published.is_redundant("encoder.dino.embeddings.mask_token"));
        assert!(!published.is_redundant("encoder.output_proj.weight"));
    }

    #[test]
    fn unsupported_keys_are_named() {
        let refused = |model: DecoderConfig, words: &str| {
            let sentence = write(&model).expect_err(words);
            assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        };
        refused(DecoderConfig { qk_norm: true, ..small() }, "beside a llama, and this one is a qwen3");
        refused(DecoderConfig { activation: Activation::Geglu, ..small() }, "model.activation = geglu");
        refused(DecoderConfig { bias: Bias::Qkv, ..small() }, "beside a llama, and this one is a qwen2");
        let mut written = write(&small()).unwrap();
        written["vision_config"]["model_type"] = json!("dinov2_with_registers");
        written["vision_config"]["architectures"] = json!(["Dinov2WithRegistersModel"]);
        assert!(read(&written).unwrap_err().contains("has registers"));
        written.as_object_mut().unwrap().remove("vision_config");
        assert!(read(&written).unwrap_err().contains("it has no `vision_config`"));
    }
}
