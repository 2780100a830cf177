//! A head of classes as the `transformers` library describes it: `id2label` and, of our own, how texts are pooled.
//!
//! The library's classes (`LlamaForSequenceClassification` and so on) score the last token that is not padding. A model
//! that pools otherwise is read by them with its weights all the same; `classifier_pooling` says what it was trained with.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use crate::config::{DecoderConfig, Head, Pooling};

const POOLING: &str = "classifier_pooling";

/// The model with its head of classes.
pub(crate) fn read(f: &Fields<'_>, model: DecoderConfig) -> Result<DecoderConfig, String> {
    let named = f.get("id2label").and_then(Value::as_object).map(Map::len);
    let classes = named.map_or_else(|| f.extent_or("num_labels", 2), Ok)?;
    let pooling = match f.get(POOLING).map(Value::as_str) {
        None => Pooling::Last,
        Some(name) => name.unwrap_or_default().parse().map_err(|why| format!("its `{POOLING}`: {why}"))?,
    };
    Ok(DecoderConfig { head: Head::Classes, classes: Some(classes), pooling, ..model })
}

/// The fields of a head of classes; the classes are named by their numbers.
pub(crate) fn write(model: &DecoderConfig) -> Map<String, Value> {
    let names: Vec<String> = (0..model.classes()).map(|class| format!("LABEL_{class}")).collect();
    label_fields(&names).into_iter().chain([(POOLING.to_string(), json!(model.pooling))]).collect()
}

/// `id2label` and `label2id` of classes with these names.
pub fn label_fields(names: &[String]) -> Map<String, Value> {
    let by_number: Map<String, Value> =
        names.iter().enumerate().map(|(i, name)| (i.to_string(), json!(name))).collect();
    let by_name: Map<String, Value> =
        names.iter().enumerate().map(|(i, name)| (name.clone(), json!(i))).collect();
    Map::from_iter([
        ("id2label".to_string(), Value::Object(by_number)),
        ("label2id".to_string(), Value::Object(by_name)),
    ])
}
