//! Reads and writes which layers see a window: `layer_types`, a name per layer, or the older fields.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use crate::config::DecoderConfig;

const LOCAL: &str = "sliding_attention";
const GLOBAL: &str = "full_attention";

/// The decoder with a window in the layers that `layer_types` marks or, if the file has none, for which `is_local` holds.
/// Without a local layer there is no window.
pub(crate) fn read(
    f: &Fields<'_>,
    model: DecoderConfig,
    window: Option<usize>,
    is_local: impl Fn(usize) -> bool,
) -> Result<DecoderConfig, String> {
    let layers = model.layers;
    let local: Vec<bool> = match names(f, layers)? {
        Some(names) => names.iter().map(|name| *name == LOCAL).collect(),
        None => (0..layers).map(|layer| window.is_some() && is_local(layer)).collect(),
    };
    if !local.contains(&true) {
        return Ok(model);
    }
    match window {
        Some(window) => {
            Ok(DecoderConfig { window: Some(window), ..model }.with_global_layers(|layer| !local[layer]))
        }
        None => Err(format!("its `layer_types` has {LOCAL}, and it has no `sliding_window`")),
    }
}

fn names<'a>(f: &Fields<'a>, layers: usize) -> Result<Option<Vec<&'a str>>, String> {
    let Some(kinds) = f.get("layer_types") else { return Ok(None) };
    let kinds: Option<Vec<&str>> = kinds.as_array().map(|all| all.iter().filter_map(Value::as_str).collect());
    let Some(kinds) = kinds.filter(|kinds| kinds.len() == layers) else {
        return Err(format!("its `layer_types` is not a list of {layers} names, one a layer"));
    };
    match kinds.iter().find(|kind| ![LOCAL, GLOBAL].contains(kind)) {
        Some(other) => {
            Err(format!("its `layer_types` has {other:?}, and here there is {LOCAL} and {GLOBAL}"))
        }
        None => Ok(Some(kinds)),
    }
}

/// `layer_types` of a decoder.
pub(crate) fn write(c: &DecoderConfig) -> Value {
    (0..c.layers).map(|layer| if c.is_local(layer) { LOCAL } else { GLOBAL }).collect::<Vec<_>>().into()
}

/// The fields of an architecture with optional windows.
pub(crate) fn write_optional(c: &DecoderConfig) -> Map<String, Value> {
    let fields = [
        ("use_sliding_window", json!(c.window.is_some())),
        ("sliding_window", json!(c.window)),
        ("layer_types", write(c)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// A null padding token, for architectures whose default padding token a model's vocabulary may lack.
pub(crate) fn no_padding() -> (String, Value) {
    ("pad_token_id".into(), Value::Null)
}

/// A file's fields as a map.
pub(crate) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => panic!("{other} is written as an object"),
    }
}
