//! ModernBERT as the `transformers` library describes it: a bidirectional encoder with a head of classes.
//!
//! Its embeddings are normed, and the first block's attention therefore is not; two of three layers see a window. q, k and v
//! are one tensor, and gate and up another. Files of the masked language model are read without their head.

use serde_json::{Map, Value, json};

use super::architecture::{Architecture, Shape};
use super::encoder::Encoder;
use super::fields::Fields;
use super::layer_kinds::{self, object};
use super::rope;
use super::stored::{Stored, Within};
use crate::config::{Activation, Attention, ClassLayer, DecoderConfig, Head, Norm, Pooling};
use crate::decoder::{SCORE, biased};

pub(crate) const MODERNBERT: Architecture = Architecture {
    model_type: "modernbert",
    class: "ModernBertForMaskedLM",
    bodies: &["ModernBertModel"],
    class_of_classes: Some("ModernBertForSequenceClassification"),
    read,
    write,
    stored,
    scales_embeddings: false,
};

pub(crate) const ENCODER: Encoder = Encoder {
    architecture: &MODERNBERT,
    base: "model",
    unread: &["head.", "decoder."],
    never_read: &[],
    brought: &[],
    poolings: &[Pooling::Cls, Pooling::Mean],
};

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    for name in ["hidden_activation", "classifier_activation"] {
        f.only(name, json!("gelu"), "gelu for this architecture")?;
    }
    f.only("classifier_bias", json!(false), "a head whose inner product has no bias")?;
    let (width, heads) = (f.extent_or("hidden_size", 768)?, f.extent_or("num_attention_heads", 12)?);
    let model = DecoderConfig {
        width,
        layers: f.layers("num_hidden_layers", Some(22))?,
        heads,
        kv_heads: Some(heads),
        head_size: Some(width.checked_div(heads).unwrap_or(0)),
        ffn: f.extent_or("intermediate_size", 1152)?,
        vocab: f.extent_or("vocab_size", 50368)?,
        context: f.extent_or("max_position_embeddings", 8192)?,
        norm: Norm::Layer,
        norm_bias: f.flag("norm_bias")?,
        norm_eps: f.number_or("norm_eps", 1e-5)?,
        embed_norm: true,
        first_norm: false,
        bias: super::llama::bias(f)?,
        activation: Activation::GegluExact,
        attention: Attention::Bidirectional,
        encoder: true,
        class_layer: ClassLayer::Gelu,
        class_bias: true,
        tied: f.flag_or("tie_word_embeddings", true)?,
        ..DecoderConfig::default()
    };
    let every = f.extent_or("global_attn_every_n_layers", 3)?;
    let window = f.extent_or("local_attention", 128)?;
    let model = layer_kinds::read(f, model, Some(window), |layer| !layer.is_multiple_of(every))?;
    let thetas = [f.number_or("global_rope_theta", 160_000.0)?, f.number_or("local_rope_theta", 10_000.0)?];
    rope::by_layer(f, model, thetas)
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    let [_, attention, ffn] = biased(c);
    let (global, local) = rope::write_by_layer(c);
    object(json!({
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.context,
        "pad_token_id": Value::Null,
        "cls_token_id": Value::Null,
        "sep_token_id": Value::Null,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "classifier_bias": false,
        "norm_eps": c.norm_eps,
        "norm_bias": c.norm_bias,
        "attention_bias": attention,
        "mlp_bias": ffn,
        "local_attention": c.window.unwrap_or(128),
        "layer_types": layer_kinds::write(c),
        // Versions before 5 read the first two and only support a period, later ones read the third.
        "global_rope_theta": c.rope_theta,
        "local_rope_theta": c.rope_local_theta.unwrap_or(c.rope_theta),
        "rope_parameters": { "full_attention": global, "sliding_attention": local },
        "global_attn_every_n_layers": (1..=c.layers)
            .find(|every| (0..c.layers).all(|layer| c.is_local(layer) != layer.is_multiple_of(*every))),
    }))
}

fn stored(c: &DecoderConfig, shape: Shape<'_>) -> Vec<Stored> {
    let [qkv, output, ffn] = biased(c);
    let mut all = vec![];
    // Adds one of several weights that share a tensor's rows, with its bias.
    let mut add = |ours: String, theirs: String, bias: Option<bool>, [part, parts]: [usize; 2]| {
        let mut put = |ours: String, theirs: String| {
            let dims = shape(&ours);
            let rows = dims[0];
            let whole = [vec![parts * rows], dims[1..].to_vec()].concat();
            let within =
                if parts == 1 { Within::Whole } else { Within::Rows(part * rows..(part + 1) * rows) };
            all.push(Stored { ours, theirs, dims: whole, within });
        };
        put(ours.clone(), format!("{theirs}.weight"));
        if bias == Some(true) {
            put(format!("{ours}_bias"), format!("{theirs}.bias"));
        }
    };
    const ONE: [usize; 2] = [0, 1];
    let norm = Some(c.norm_bias);
    add("embed.weight".into(), "model.embeddings.tok_embeddings".into(), None, ONE);
    add("embed_norm".into(), "model.embeddings.norm".into(), norm, ONE);
    for i in 0..c.layers {
        let (ours, theirs) =
            (|name: &str| format!("layers.{i}.{name}"), |name: &str| format!("model.layers.{i}.{name}"));
        if i > 0 {
            add(ours("attn_norm"), theirs("attn_norm"), norm, ONE);
        }
        for (part, name) in ["attn.wq", "attn.wk", "attn.wv"].into_iter().enumerate() {
            add(ours(name), theirs("attn.Wqkv"), Some(qkv), [part, 3]);
        }
        add(ours("attn.wo"), theirs("attn.Wo"), Some(output), ONE);
        add(ours("ffn_norm"), theirs("mlp_norm"), norm, ONE);
        for (part, name) in ["ffn.gate", "ffn.up"].into_iter().enumerate() {
            add(ours(name), theirs("mlp.Wi"), Some(ffn), [part, 2]);
        }
        add(ours("ffn.down"), theirs("mlp.Wo"), Some(ffn), ONE);
    }
    add("norm".into(), "model.final_norm".into(), norm, ONE);
    if c.head == Head::Classes {
        add("score.dense".into(), "head.dense".into(), None, ONE);
        add("score.norm".into(), "head.norm".into(), norm, ONE);
        let dims = [c.classes(), c.width];
        all.push(Stored::whole(SCORE, "classifier.weight", dims.to_vec()));
        all.push(Stored::whole("score.bias", "classifier.bias", vec![c.classes()]));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::build;
    use crate::library::encoder::is_redundant;
    use crate::library::huggingface;
    use crate::library::stored::assert_filled;
    use crate::registry::Family;

    /// The published file of the base model, reduced to the fields that are read.
    fn base() -> Value {
        json!({
            "architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert", "attention_bias": false,
            "classifier_activation": "gelu", "classifier_bias": false, "classifier_pooling": "mean", "hidden_size": 768,
            "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_attention": 128,
            "local_rope_theta": 10000.0, "hidden_activation": "gelu", "intermediate_size": 1152, "mlp_bias": false,
            "max_position_embeddings": 8192, "norm_bias": false, "norm_eps": 1e-05, "num_attention_heads": 12,
            "num_hidden_layers": 22, "vocab_size": 50368, "bos_token_id": 50281, "eos_token_id": 50282,
        })
    }

    #[test]
    fn the_published_file_is_an_encoder_without_a_head() {
        let model = huggingface::read(&base()).unwrap().model;
        assert_eq!(
            (model.window, model.rope_theta, model.rope_local_theta),
            (Some(128), 160_000.0, Some(1e4))
        );
        let global: Vec<usize> = (0..22).filter(|layer| !model.is_local(*layer)).collect();
        assert_eq!(global, [0, 3, 6, 9, 12, 15, 18, 21]);
        assert_eq!(model.parameters(), 149_014_272, "the published model but its head of masked tokens");
        assert!(model.validate().unwrap_err().contains("is an encoder, which predicts no next token"));
        assert!(is_redundant(&model, "head.dense.weight") && is_redundant(&model, "decoder.bias"));
        assert!(huggingface::write(&model, "float32", &[], &[]).unwrap_err().contains("no head of classes"));
    }

    #[test]
    fn a_head_of_classes_reads_and_is_written_back() {
        let mut config = base();
        config["architectures"] = json!(["ModernBertForSequenceClassification"]);
        config["id2label"] = json!({ "0": "a", "1": "b", "2": "c" });
        let described = huggingface::read(&config).unwrap();
        let model = &described.model;
        assert_eq!((model.classes, model.pooling), (Some(3), Pooling::Mean));
        assert_eq!(model.parameters(), 149_014_272 + 768 * 769 + 3 * 769);
        let written = huggingface::write(model, "float32", &[50281], &[50282]).unwrap();
        assert_eq!(written["architectures"][0], "ModernBertForSequenceClassification");
        assert_eq!(written["global_attn_every_n_layers"], 3);
        assert_eq!(&huggingface::read(&written).unwrap().model, model);
        let last = DecoderConfig { pooling: Pooling::Last, ..model.clone() };
        assert!(huggingface::write(&last, "float32", &[], &[]).unwrap_err().contains("pools by cls or mean"));
        let small = DecoderConfig {
            width: 12,
            layers: 3,
            heads: 2,
            kv_heads: None,
            head_size: None,
            ffn: 8,
            vocab: 9,
            ..model.clone()
        };
        let small = DecoderConfig { global_layers: Some(vec![0]), ..small };
        let graph = build(&small, small.least());
        let shape =
            |path: &str| graph.slots.iter().find(|slot| slot.path == path).expect(path).ty.dims.to_vec();
        assert_filled(&graph, &stored(&small, &shape));
    }
}
