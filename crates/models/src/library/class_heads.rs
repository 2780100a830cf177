//! A head of classes as the `transformers` library describes it: `id2label` and, as an extension of ours, the pooling of texts.
//!
//! The names of `id2label` are in the order of the head's outputs. A file without them has the library's own, `LABEL_0` and so
//! on.
//!
//! The library's classes (`LlamaForSequenceClassification` and so on) score the last token that is not padding. They still load
//! a model with other pooling with its weights; `classifier_pooling` records the pooling that it was trained with.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::fields::Fields;
use crate::config::{DecoderConfig, Head, Pooling};

const POOLING: &str = "classifier_pooling";

const ONE_OUTPUT: &str = "its head has one output (num_labels 1), which is a number and no class, and here a head has two classes or more";

/// The model with its head of classes.
pub(crate) fn read(f: &Fields<'_>, model: DecoderConfig) -> Result<DecoderConfig, String> {
    let classes = names(f)?.len();
    let pooling = pooling(f, &model)?;
    Ok(DecoderConfig { head: Head::Classes, classes: Some(classes), pooling, ..model })
}

/// The pooling of the library's head of classes.
pub(crate) fn pooling(f: &Fields<'_>, model: &DecoderConfig) -> Result<Pooling, String> {
    match f.get(POOLING).map(Value::as_str) {
        None if model.encoder => Ok(Pooling::Cls),
        None => Ok(Pooling::Last),
        Some(name) => name.unwrap_or_default().parse().map_err(|why| format!("its `{POOLING}`: {why}")),
    }
}

/// The fields of a head of classes; the classes are named by their numbers.
pub(crate) fn write(model: &DecoderConfig) -> Map<String, Value> {
    let names = numbered(model.classes());
    label_fields(&names).into_iter().chain([(POOLING.to_string(), json!(model.pooling))]).collect()
}

/// The library's names for unnamed classes.
pub(crate) fn numbered(classes: usize) -> Vec<String> {
    (0..classes).map(|class| format!("LABEL_{class}")).collect()
}

/// The names of a head's classes in the order of its outputs, made unique. Multi-label heads and regression heads are refused.
pub(crate) fn names(f: &Fields<'_>) -> Result<Vec<String>, String> {
    if let Some(kind) = f.get("problem_type").filter(|kind| *kind != "single_label_classification") {
        return Err(format!(
            "its `problem_type` is {kind}, and here a head has one class a text or image \
             (single_label_classification)"
        ));
    }
    let Some(named) = f.get("id2label") else {
        let labels = f.extent_or("num_labels", 2)?;
        return if labels == 1 { Err(ONE_OUTPUT.into()) } else { Ok(numbered(labels)) };
    };
    let wrong = || format!("its `id2label` is {named}, and must name every class from 0 on");
    let named = named.as_object().ok_or_else(wrong)?;
    if named.len() == 1 {
        return Err(ONE_OUTPUT.into());
    }
    let name = |class: usize| named.get(&class.to_string()).and_then(text).ok_or_else(wrong);
    Ok(make_unique((0..named.len()).map(name).collect::<Result<_, _>>()?))
}

/// A name as written, or a number as text.
pub(crate) fn text(name: &Value) -> Option<String> {
    match name {
        Value::String(name) => Some(name.trim().to_string()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Appends the class's number to names that several classes share, as some published lists have them.
pub(crate) fn make_unique(names: Vec<String>) -> Vec<String> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    names.iter().for_each(|name| *counts.entry(name).or_default() += 1);
    let one = |(class, name): (usize, &String)| match counts[name.as_str()] {
        1 => name.clone(),
        _ => format!("{name} ({class})"),
    };
    names.iter().enumerate().map(one).collect()
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

/// Whether the library's class of a file is the one with a head of classes; others are bodies without one.
pub(super) fn is_there(
    f: &Fields<'_>,
    model_type: &str,
    class: &str,
    bodies: &[&str],
) -> Result<bool, String> {
    let named = f.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    match named {
        None => Ok(false),
        Some(named) if bodies.contains(&named) => Ok(false),
        Some(named) if named == class => Ok(true),
        Some(named) => Err(format!(
            "its `architectures` says {named}, and of {model_type} models only {} and {class} are read",
            bodies.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_names(config: Value) -> Result<Vec<String>, String> {
        names(&Fields(config.as_object().unwrap()))
    }

    #[test]
    fn names_are_in_the_order_of_the_outputs() {
        let twelve: Map<String, Value> = (0..12).map(|i| (i.to_string(), json!(format!("c{i}")))).collect();
        let read = read_names(json!({ "id2label": twelve })).unwrap();
        assert_eq!(read[10], "c10", "by number and not by the letters of the keys");
        assert_eq!(read_names(json!({ "id2label": { "0": "good", "1": "bad" } })).unwrap(), ["good", "bad"]);
        assert_eq!(read_names(json!({ "id2label": { "0": 7, "1": 3 } })).unwrap(), ["7", "3"]);
        assert_eq!(read_names(json!({ "num_labels": 3 })).unwrap(), ["LABEL_0", "LABEL_1", "LABEL_2"]);
        assert_eq!(read_names(json!({})).unwrap().len(), 2);
        for single in [json!({ "num_labels": 1 }), json!({ "id2label": { "0": "LABEL_0" } })] {
            assert!(read_names(single).unwrap_err().contains("one output (num_labels 1)"));
        }
        let shared = json!({ "id2label": { "0": "crane", "1": "owl", "2": "crane" } });
        assert_eq!(read_names(shared).unwrap(), ["crane (0)", "owl", "crane (2)"]);
    }

    #[test]
    fn lists_with_gaps_and_heads_of_many_labels_are_refused() {
        for wrong in [json!({ "0": "a", "2": "b" }), json!({ "0": "a", "1": null }), json!(["a", "b"])] {
            let refused = read_names(json!({ "id2label": wrong })).unwrap_err();
            assert!(refused.contains("must name every class from 0 on"), "{refused}");
        }
        for kind in ["multi_label_classification", "regression"] {
            let refused = read_names(json!({ "problem_type": kind })).unwrap_err();
            assert!(refused.contains(kind) && refused.contains("`problem_type`"), "{refused}");
        }
        assert!(read_names(json!({ "problem_type": "single_label_classification" })).is_ok());
        assert!(read_names(json!({ "problem_type": null })).is_ok());
    }
}
