//! BERT as the `transformers` library describes it: an encoder with norms after the additions, with learned positions and token
//! types, and a head of classes after the pooler.
//!
//! There the pooler, a product and tanh of the first token's state, is part of the body: files without a head of classes may
//! contain it, and then it is read.

use serde_json::{Map, Value, json};

use super::architecture::{Architecture, Shape};
use super::encoder::Encoder;
use super::fields::Fields;
use super::layer_kinds::object;
use super::stored::{Stored, Within};
use crate::config::{Activation, Attention, Bias, ClassLayer, DecoderConfig, Head, Norm, Pooling, Positions};
use crate::decoder::SCORE;

pub(crate) const BERT: Architecture = Architecture {
    model_type: "bert",
    class: "BertForMaskedLM",
    bodies: &["BertModel", "BertForPreTraining", "BertForNextSentencePrediction"],
    class_of_classes: Some("BertForSequenceClassification"),
    read,
    write,
    stored,
    scales_embeddings: false,
};

pub(crate) const ENCODER: Encoder = Encoder {
    architecture: &BERT,
    base: "bert",
    unread: &["cls."],
    never_read: &[],
    brought: &["bert.pooler."],
    poolings: &[Pooling::Cls],
};

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    Ok(DecoderConfig { context: f.extent_or("max_position_embeddings", 512)?, ..dimensions(f, 30522)? })
}

/// The fields that BERT and RoBERTa share.
pub(super) fn dimensions(f: &Fields<'_>, vocab: usize) -> Result<DecoderConfig, String> {
    f.only("position_embedding_type", json!("absolute"), "absolute positions")?;
    for name in ["is_decoder", "add_cross_attention"] {
        f.only(name, json!(false), "false")?;
    }
    let (width, heads) = (f.extent_or("hidden_size", 768)?, f.extent_or("num_attention_heads", 12)?);
    Ok(DecoderConfig {
        width,
        layers: f.layers("num_hidden_layers", Some(12))?,
        heads,
        ffn: f.extent_or("intermediate_size", 3072)?,
        vocab: f.extent_or("vocab_size", vocab)?,
        norm_eps: f.number_or("layer_norm_eps", 1e-12)?,
        activation: activation(f, "hidden_act")?,
        token_types: f.extent_or("type_vocab_size", 2)?,
        ..post_norm([width, heads])
    })
}

/// An encoder with norms after the additions, learned positions, biases everywhere and a layer before its classes.
pub(super) fn post_norm([width, heads]: [usize; 2]) -> DecoderConfig {
    DecoderConfig {
        width,
        heads,
        norm: Norm::Layer,
        norm_bias: true,
        embed_norm: true,
        pre_norms: false,
        residual_norms: true,
        bias: Bias::All,
        attention: Attention::Bidirectional,
        positions: Positions::Learned,
        class_layer: ClassLayer::Tanh,
        class_bias: true,
        encoder: true,
        ..DecoderConfig::default()
    }
}

pub(super) fn activation(f: &Fields<'_>, name: &str) -> Result<Activation, String> {
    match f.get(name).map_or(Some("gelu"), Value::as_str) {
        Some("gelu") => Ok(Activation::GeluExact),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        _ => Err(format!("its `{name}` is {}, and here there is gelu and gelu_new", f.0[name])),
    }
}

pub(super) fn activation_name(c: &DecoderConfig) -> &'static str {
    if c.activation == Activation::GeluTanh { "gelu_new" } else { "gelu" }
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    let mut fields = write_dimensions(c);
    fields.insert("max_position_embeddings".into(), json!(c.context));
    fields
}

pub(super) fn write_dimensions(c: &DecoderConfig) -> Map<String, Value> {
    object(json!({
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.ffn,
        "hidden_act": activation_name(c),
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": c.head_dropout,
        "layer_norm_eps": c.norm_eps,
        "type_vocab_size": c.token_types,
        "position_embedding_type": "absolute",
    }))
}

/// Our weights of a block with the library's names below `encoder.layer.N`.
pub(super) const BLOCK: [(&str, &str); 8] = [
    ("attn.wq", "attention.self.query"),
    ("attn.wk", "attention.self.key"),
    ("attn.wv", "attention.self.value"),
    ("attn.wo", "attention.output.dense"),
    ("attn_residual_norm", "attention.output.LayerNorm"),
    ("ffn.up", "intermediate.dense"),
    ("ffn.down", "output.dense"),
    ("ffn_residual_norm", "output.LayerNorm"),
];

fn stored(c: &DecoderConfig, shape: Shape<'_>) -> Vec<Stored> {
    let names = Names {
        base: "bert",
        layers: "encoder.layer",
        block: &BLOCK,
        first_position: 0,
        dense: "bert.pooler.dense",
        classes: "classifier",
    };
    let mut all = stored_as(c, shape, &names);
    if c.head == Head::Tokens {
        // The pooler of a body, if it has one.
        all.extend(pair("score.dense", names.dense, [c.width; 2]));
    }
    all
}

/// The names in which encoders of this form differ.
pub(super) struct Names {
    pub base: &'static str,
    /// The prefix before the number of a block.
    pub layers: &'static str,
    pub block: &'static [(&'static str, &'static str)],
    /// Index of the first position in the library's table.
    pub first_position: usize,
    /// The layer before the classes, and the classes.
    pub dense: &'static str,
    pub classes: &'static str,
}

/// A weight [out, in] and its bias.
fn pair(ours: &str, theirs: &str, [out, inner]: [usize; 2]) -> [Stored; 2] {
    [
        Stored::whole(ours, format!("{theirs}.weight"), vec![out, inner]),
        Stored::whole(format!("{ours}_bias"), format!("{theirs}.bias"), vec![out]),
    ]
}

/// Location of every weight of an encoder with these names.
pub(super) fn stored_as(c: &DecoderConfig, shape: Shape<'_>, names: &Names) -> Vec<Stored> {
    let of = |name: &str| format!("{}.embeddings.{name}", names.base);
    let mut all = vec![];
    let mut add = |ours: String, theirs: String| {
        let dims = shape(&ours);
        all.push(Stored::whole(ours, theirs, dims));
    };
    add("embed.weight".into(), of("word_embeddings.weight"));
    if c.token_types > 0 {
        add("types.weight".into(), of("token_type_embeddings.weight"));
    }
    let mut both = |ours: String, theirs: String| {
        add(ours.clone(), format!("{theirs}.weight"));
        add(format!("{ours}_bias"), format!("{theirs}.bias"));
    };
    both("embed_norm".into(), of("LayerNorm"));
    for i in 0..c.layers {
        for (ours, theirs) in names.block {
            both(format!("layers.{i}.{ours}"), format!("{}.{}.{i}.{theirs}", names.base, names.layers));
        }
    }
    let rows = names.first_position..names.first_position + c.context;
    let dims = vec![rows.end, c.width];
    let positions = Stored::whole("positions.weight", of("position_embeddings.weight"), dims);
    all.push(match names.first_position {
        0 => positions,
        _ => Stored { within: Within::Rows(rows), ..positions },
    });
    if c.head == Head::Classes {
        all.extend(pair("score.dense", names.dense, [c.width; 2]));
        let classes = format!("{}.weight", names.classes);
        all.push(Stored::whole(SCORE, classes, vec![c.classes(), c.width]));
        all.push(Stored::whole("score.bias", format!("{}.bias", names.classes), vec![c.classes()]));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::build;
    use crate::library::stored::assert_filled;
    use crate::library::{encoder, huggingface};
    use crate::registry::Family;

    /// The published file of bert-base-uncased, reduced to the fields that are read.
    fn base() -> Value {
        json!({
            "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_act": "gelu", "hidden_size": 768,
            "hidden_dropout_prob": 0.1, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "type_vocab_size": 2,
            "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
            "position_embedding_type": "absolute", "vocab_size": 30522,
        })
    }

    #[test]
    fn the_published_file_is_a_body_that_may_bring_its_pooler() {
        for class in ["BertForMaskedLM", "BertModel", "BertForPreTraining"] {
            let mut config = base();
            config["architectures"] = json!([class]);
            let model = huggingface::read(&config).unwrap().model;
            assert_eq!(
                model.parameters(),
                109_482_240 - 768 * 769,
                "BertModel's own count, but for the pooler"
            );
            assert!(encoder::may_lack(&model, "bert.pooler.dense.bias"));
            assert!(!encoder::may_lack(&model, "bert.embeddings.LayerNorm.bias"));
            let unread =
                ["cls.predictions.bias", "cls.seq_relationship.weight", "bert.embeddings.position_ids"];
            assert!(unread.iter().all(|name| encoder::is_redundant(&model, name)));
            assert!(!encoder::is_redundant(&model, "bert.encoder.layer.12.output.dense.weight"));
        }
        assert_eq!(
            encoder::other_names("bert.embeddings.LayerNorm.weight"),
            ["embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma", "embeddings.LayerNorm.gamma"]
        );
    }

    #[test]
    fn a_head_of_classes_reads_and_is_written_back() {
        let mut config = base();
        config["architectures"] = json!(["BertForSequenceClassification"]);
        config["id2label"] = json!({ "0": "a", "1": "b", "2": "c" });
        let described = huggingface::read(&config).unwrap();
        let model = &described.model;
        assert_eq!((model.classes, model.pooling, model.token_types), (Some(3), Pooling::Cls, 2));
        assert_eq!(model.parameters(), 109_482_240 + 3 * 769);
        assert!(!encoder::is_redundant(model, "bert.pooler.dense.weight"), "its head reads it");
        let written = huggingface::write(model, "float32", &[], &[]).unwrap();
        assert_eq!(written["architectures"][0], "BertForSequenceClassification");
        assert_eq!(&huggingface::read(&written).unwrap().model, model);
        let mean = DecoderConfig { pooling: Pooling::Mean, ..model.clone() };
        assert!(huggingface::write(&mean, "float32", &[], &[]).unwrap_err().contains("pools by cls"));
        let small = DecoderConfig { layers: 2, vocab: 9, context: 7, ..model.clone() };
        let small = DecoderConfig { width: 12, heads: 2, ffn: 8, ..small };
        let graph = build(&small, small.least());
        let shape =
            |path: &str| graph.slots.iter().find(|slot| slot.path == path).expect(path).ty.dims.to_vec();
        assert_filled(&graph, &stored(&small, &shape));
    }

    #[test]
    fn fields_that_change_results_are_refused_by_name() {
        for (name, value, words) in [
            ("hidden_act", json!("relu"), "its `hidden_act` is \"relu\""),
            ("position_embedding_type", json!("relative_key"), "`position_embedding_type`"),
            ("is_decoder", json!(true), "`is_decoder` is true"),
            ("num_attention_heads", json!(7), "`model.heads`"),
            ("architectures", json!(["BertForTokenClassification"]), "BertForTokenClassification"),
        ] {
            let mut config = base();
            config[name] = value;
            let sentence = huggingface::read(&config).unwrap_err();
            assert!(sentence.contains(words), "{name}: {sentence:?} lacks {words:?}");
        }
    }
}
