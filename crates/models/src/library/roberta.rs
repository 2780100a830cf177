//! RoBERTa and XLM-RoBERTa as the `transformers` library describes them: BERT whose positions begin after that of padding, with
//! one token type and its own head of classes.

use serde_json::{Map, Value, json};

use super::architecture::{Architecture, Shape};
use super::bert::{self, Names};
use super::encoder::Encoder;
use super::fields::Fields;
use super::stored::Stored;
use crate::config::{DecoderConfig, Pooling};

pub(crate) const ROBERTA: Architecture = Architecture {
    model_type: "roberta",
    class: "RobertaForMaskedLM",
    bodies: &["RobertaModel"],
    class_of_classes: Some("RobertaForSequenceClassification"),
    read,
    write,
    stored,
    scales_embeddings: false,
};

pub(crate) const XLM_ROBERTA: Architecture = Architecture {
    model_type: "xlm-roberta",
    class: "XLMRobertaForMaskedLM",
    bodies: &["XLMRobertaModel"],
    class_of_classes: Some("XLMRobertaForSequenceClassification"),
    ..ROBERTA
};

pub(crate) const ENCODER: Encoder = Encoder {
    architecture: &ROBERTA,
    base: "roberta",
    unread: &["lm_head."],
    never_read: &["pooler."],
    brought: &[],
    poolings: &[Pooling::Cls],
};

pub(crate) const XLM_ENCODER: Encoder = Encoder { architecture: &XLM_ROBERTA, ..ENCODER };

/// The padding token, whose position precedes the first of a text.
const PADDING: usize = 1;
const FIRST_POSITION: usize = PADDING + 1;

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    f.only("pad_token_id", json!(PADDING), "padding by token 1, behind which positions begin")?;
    let positions = f.extent_or("max_position_embeddings", 512)?;
    match positions.checked_sub(FIRST_POSITION) {
        Some(context) => Ok(DecoderConfig { context, ..bert::dimensions(f, 50265)? }),
        None => Err(format!(
            "its `max_position_embeddings` is {positions}, and the first {FIRST_POSITION} are no text's"
        )),
    }
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    let mut fields = bert::write_dimensions(c);
    fields.insert("max_position_embeddings".into(), json!(c.context + FIRST_POSITION));
    fields.insert("pad_token_id".into(), json!(PADDING));
    fields
}

fn stored(c: &DecoderConfig, shape: Shape<'_>) -> Vec<Stored> {
    let names = Names {
        base: "roberta",
        layers: "encoder.layer",
        block: &bert::BLOCK,
        first_position: FIRST_POSITION,
        dense: "classifier.dense",
        classes: "classifier.out_proj",
    };
    bert::stored_as(c, shape, &names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::{encoder, huggingface};

    /// The published files of roberta-base and xlm-roberta-base, reduced to the fields that are read.
    #[test]
    fn the_published_files_are_distinguished() {
        for (model_type, class, vocab, count) in [
            ("roberta", "RobertaForSequenceClassification", 50265, 124_647_170),
            ("xlm-roberta", "XLMRobertaForSequenceClassification", 250_002, 278_045_186),
        ] {
            let config = json!({
                "architectures": [class], "model_type": model_type, "hidden_size": 768, "intermediate_size": 3072,
                "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "num_attention_heads": 12, "pad_token_id": 1,
                "num_hidden_layers": 12, "type_vocab_size": 1, "vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 2,
            });
            let described = huggingface::read(&config).unwrap();
            let model = &described.model;
            assert_eq!((model.context, model.token_types), (512, 1));
            assert_eq!(
                model.parameters(),
                count - 2 * 768,
                "the library's, but for the positions of padding"
            );
            let written = huggingface::write(model, "float32", &[0], &[2]).unwrap();
            assert_eq!(
                (&written["architectures"][0], &written["model_type"]),
                (&json!(class), &json!(model_type))
            );
            assert_eq!(written["max_position_embeddings"], 514);
            assert_eq!(huggingface::read(&written).unwrap(), described);
            // Some classifiers keep the pooler of their base model, which their head does not read.
            let mut body = config.clone();
            body["architectures"] = json!([class.replace("ForSequenceClassification", "Model")]);
            let body = huggingface::read(&body).unwrap().model;
            for (of, is_body) in [(model, false), (&body, true)] {
                for name in ["roberta.pooler.dense.weight", "pooler.dense.bias"] {
                    assert!(encoder::is_redundant(of, name), "{name}");
                }
                assert_eq!(encoder::is_redundant(of, "lm_head.bias"), is_body);
                assert!(!encoder::is_redundant(of, "classifier.dense.weight"));
            }
            let mut padded = config.clone();
            padded["pad_token_id"] = json!(0);
            assert!(huggingface::read(&padded).unwrap_err().contains("`pad_token_id` is 0"));
        }
    }
}
