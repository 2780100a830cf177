//! DistilBERT as the `transformers` library describes it: BERT without token types and without a pooler, with a head of classes
//! after a product and ReLU.

use serde_json::{Map, Value, json};

use super::architecture::{Architecture, Shape};
use super::bert::{self, Names};
use super::encoder::Encoder;
use super::fields::Fields;
use super::layer_kinds::object;
use super::stored::Stored;
use crate::config::{ClassLayer, DecoderConfig, Pooling};

pub(crate) const DISTILBERT: Architecture = Architecture {
    model_type: "distilbert",
    class: "DistilBertForMaskedLM",
    bodies: &["DistilBertModel"],
    class_of_classes: Some("DistilBertForSequenceClassification"),
    read,
    write,
    stored,
    scales_embeddings: false,
};

pub(crate) const ENCODER: Encoder = Encoder {
    architecture: &DISTILBERT,
    base: "distilbert",
    unread: &["vocab_transform.", "vocab_layer_norm.", "vocab_projector."],
    never_read: &[],
    brought: &[],
    poolings: &[Pooling::Cls],
};

/// A constant in the library, without a field.
const NORM_EPS: f64 = 1e-12;

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let (width, heads) = (f.extent_or("dim", 768)?, f.extent_or("n_heads", 12)?);
    Ok(DecoderConfig {
        layers: f.layers("n_layers", Some(6))?,
        ffn: f.extent_or("hidden_dim", 3072)?,
        vocab: f.extent_or("vocab_size", 30522)?,
        context: f.extent_or("max_position_embeddings", 512)?,
        norm_eps: NORM_EPS,
        activation: bert::activation(f, "activation")?,
        class_layer: ClassLayer::Relu,
        ..bert::post_norm([width, heads])
    })
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    object(json!({
        "dim": c.width,
        "n_layers": c.layers,
        "n_heads": c.heads,
        "hidden_dim": c.ffn,
        "max_position_embeddings": c.context,
        "activation": bert::activation_name(c),
        "dropout": c.dropout,
        "attention_dropout": 0.0,
        "seq_classif_dropout": c.head_dropout,
        // Files contain the positions, whether learned or sinusoidal.
        "sinusoidal_pos_embds": false,
    }))
}

/// Our weights of a block with the library's names below `transformer.layer.N`.
const BLOCK: [(&str, &str); 8] = [
    ("attn.wq", "attention.q_lin"),
    ("attn.wk", "attention.k_lin"),
    ("attn.wv", "attention.v_lin"),
    ("attn.wo", "attention.out_lin"),
    ("attn_residual_norm", "sa_layer_norm"),
    ("ffn.up", "ffn.lin1"),
    ("ffn.down", "ffn.lin2"),
    ("ffn_residual_norm", "output_layer_norm"),
];

fn stored(c: &DecoderConfig, shape: Shape<'_>) -> Vec<Stored> {
    let names = Names {
        base: "distilbert",
        layers: "transformer.layer",
        block: &BLOCK,
        first_position: 0,
        dense: "pre_classifier",
        classes: "classifier",
    };
    bert::stored_as(c, shape, &names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::{encoder, huggingface};

    /// The published file of distilbert-base-uncased, reduced to the fields that are read.
    #[test]
    fn the_published_file_reads_and_is_written_back() {
        let mut config = json!({
            "architectures": ["DistilBertForMaskedLM"], "model_type": "distilbert", "activation": "gelu", "dim": 768,
            "hidden_dim": 3072, "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6, "pad_token_id": 0,
            "sinusoidal_pos_embds": false, "tie_weights_": true, "vocab_size": 30522,
        });
        let body = huggingface::read(&config).unwrap().model;
        assert_eq!((body.parameters(), body.token_types), (66_362_880, 0));
        assert!(encoder::is_redundant(&body, "vocab_projector.bias"));
        config["architectures"] = json!(["DistilBertForSequenceClassification"]);
        let described = huggingface::read(&config).unwrap();
        assert_eq!(described.model.parameters(), 66_955_010);
        let written = huggingface::write(&described.model, "float32", &[], &[]).unwrap();
        assert_eq!(written["model_type"], "distilbert");
        assert_eq!(huggingface::read(&written).unwrap(), described);
        let norm = DecoderConfig { norm_eps: 1e-5, ..described.model };
        let refused = huggingface::write(&norm, "float32", &[], &[]).unwrap_err();
        assert!(
            refused.contains("model.norm_eps") && refused.contains("DistilBertForMaskedLM, the nearest"),
            "{refused}"
        );
    }
}
