//! Pretrained models and adapters that a run starts from, as values over a recipe: they replace values of lower layers, and values of
//! the same or higher layers must agree with them.

use flatout_models::config::{FoveaConfig, Model, Tower};
use flatout_models::library::fovea;
use flatout_models::registry::ModelSection;
use toml::Value;

use super::{CLASSES, KIND, LayerValue, Layers, TOWER_FROM, VOCAB};
use crate::UserError;
use crate::config::schema::{self, QualifiedKey};
use crate::config::{Adapter, text};
use crate::refuse;

/// The factor on the initial values of an untied head.
const INIT_HEAD: &str = "model.init_head";

impl Layers {
    /// The value of `model.from`, where it is given.
    pub fn from(&self) -> Option<&str> {
        self.values.get("model.from").and_then(|held| held.value.as_str())
    }

    /// Sets the values of the model of `model.from`: they replace values of lower layers, and values of the same or higher layers must
    /// agree.
    pub fn model(&mut self, model: &Model, origin: &str) -> Result<(), UserError> {
        /// Keys of training, which the description of a pretrained model does not have.
        const TRAINING_KEYS: [&str; 10] = [
            "from",
            "context",
            "dropout",
            "head_dropout",
            "init_std",
            "init_residual",
            "init_head",
            "image_size",
            "image_height",
            "drop_path",
        ];
        /// Keys that any layer may set to another value than the pretrained model has.
        const MAY_DIFFER: [&str; 4] = ["attention", "head", "classes", "pooling"];
        /// Keys that keep the value of any layer.
        const KEPT: [&str; 2] = ["vision.mode", "vision.image_size"];
        let of_source = self.values.get("model.from").map_or(usize::MAX, |held| held.layer);
        let facts = Value::try_from(model).expect("a section has a TOML form");
        // The model keys of a recipe for another kind of model are dropped.
        let kind = self.values.get(KIND).filter(|held| held.layer >= of_source);
        if kind.is_none() && self.kind() != model.kind() {
            let held = std::mem::take(&mut self.values);
            let of_others = |path: &str| path.starts_with("model.") && path != "model.from";
            self.values = held.into_iter().filter(|(p, h)| !of_others(p) || h.layer >= of_source).collect();
        }
        // A text model does not replace the keys of a tower that is added to it.
        let keeps_tower = facts.get("vision").is_none() && self.tower() == Tower::Fovea;
        if !keeps_tower && let Some(held) = self.values.get(TOWER_FROM) {
            if held.layer >= of_source {
                refuse!(
                    "`{TOWER_FROM}` is given and the model of {origin} has a tower of its own, or none: leave it out"
                );
            }
            self.values.remove(TOWER_FROM);
        }
        let has_head = model.brings_head();
        for QualifiedKey { path, name, tables, key, .. } in schema::of_section("model", Model::keys()) {
            if TRAINING_KEYS.contains(&&name[..]) || keeps_tower && tables == ["vision"] {
                continue;
            }
            if KEPT.contains(&&name[..]) && self.values.contains_key(&path) {
                continue;
            }
            // If the model brings a head, or a pooling of its own, values of lower layers are dropped.
            let brings = if name == "pooling" { model.brings_pooling() } else { has_head };
            let is_kept = |held: &LayerValue| !brings || held.layer >= of_source;
            if MAY_DIFFER.contains(&&name[..]) && self.values.get(&path).is_some_and(is_kept) {
                continue;
            }
            let table = tables.iter().try_fold(&facts, |held, table| held.get(table));
            let fact = table.and_then(|table| table.get(key.name));
            let given = self.values.get(&path).filter(|held| held.layer >= of_source);
            match (given, fact) {
                (Some(held), fact) if Some(&held.value) != fact => refuse!(
                    "`{path}` is {} and the model of {origin} has {}: leave it out",
                    text::value(&held.value),
                    fact.map_or("none".into(), text::value)
                ),
                (_, Some(fact)) => self.put(path, fact.clone()),
                (_, None) => drop(self.values.remove(&path)),
            }
        }
        if let (Some(classes), Some(held)) = (model.classes(), self.values.get("model.classes"))
            && held.value.as_integer() != Some(classes as i64)
        {
            refuse!(
                "`model.classes` is {} and the model of {origin} has a head of {classes}: leave it out",
                text::value(&held.value)
            );
        }
        // `model.init_head` is for untied heads: if the source ties its head to the embedding, a recipe's value is dropped.
        let is_tied = model.as_decoder().is_some_and(|decoder| decoder.tied);
        if is_tied && self.values.get(INIT_HEAD).is_some_and(|held| held.layer < of_source) {
            self.values.remove(INIT_HEAD);
        }
        let value = |key: &str| {
            let held = self.values.get(&format!("model.{key}"))?;
            Some((serde_json::to_value(&held.value).ok()?, held.layer >= of_source))
        };
        for (key, size) in model.input_sizes(&ModelSection { origin, value: &value }).map_err(UserError)? {
            let path = format!("model.{key}");
            match size {
                Some(size) => self.put(path, Value::Integer(size as i64)),
                None => drop(self.values.remove(&path)),
            }
        }
        Ok(())
    }

    /// The value of `model.vision.from`, where it is given.
    pub fn tower_from(&self) -> Option<&str> {
        self.values.get(TOWER_FROM).and_then(|held| held.value.as_str())
    }

    /// Sets the tower's dimensions from `model.vision.from`: they replace values of lower layers, and values of the same or higher
    /// layers must agree.
    pub fn set_tower(&mut self, model: &Model, origin: &str) -> Result<(), UserError> {
        let of_source = self.values.get(TOWER_FROM).map_or(usize::MAX, |held| held.layer);
        if self.tower() != Tower::Fovea {
            refuse!(
                "`{TOWER_FROM}` is a key of model.vision.kind=fovea, and `model.vision.kind` is {}: leave it out",
                self.tower()
            );
        }
        let Model::Vit(vit) = model else {
            refuse!("`{TOWER_FROM}` is {origin}, which is a {}: give a DINOv2", model.kind());
        };
        let tower = fovea::tower(vit, &FoveaConfig::default())
            .map_err(|why| UserError(format!("`{TOWER_FROM}` is {origin}: {why}")))?;
        let facts = Value::try_from(&tower).expect("a section has a TOML form");
        for key in ["width", "layers", "heads", "ffn", "patch", "positions", "norm_eps", "layer_scale"] {
            let (path, fact) = (format!("model.vision.{key}"), &facts[key]);
            match self.values.get(&path).filter(|held| held.layer >= of_source && held.value != *fact) {
                Some(held) => refuse!(
                    "`{path}` is {} and the model of {origin} has {}: leave it out",
                    text::value(&held.value),
                    text::value(fact)
                ),
                None => self.put(path, fact.clone()),
            }
        }
        Ok(())
    }

    /// Whether the number of classes comes from the data: no layer sets it, or only one below the layer that names the data.
    pub fn leaves_classes_to_data(&self) -> bool {
        let layer = |path: &str| self.values.get(path).map(|held| held.layer);
        let data = layer("data.path").max(layer("data.classes"));
        layer(CLASSES).is_none_or(|classes| data.is_some_and(|data| classes < data))
    }

    pub fn sets_classes(&self) -> bool {
        self.values.contains_key(CLASSES)
    }

    pub fn set_classes(&mut self, classes: usize) {
        self.put(CLASSES.into(), Value::Integer(classes as i64));
    }

    /// The values of `data.tokenizer`, where it is given, and `data.new_tokens`.
    pub fn tokenizer(&self) -> (Option<&str>, Vec<String>) {
        let value = |key: &str| self.values.get(key).map(|held| &held.value);
        let tokens = value("data.new_tokens").and_then(Value::as_array).into_iter().flatten();
        let tokens = tokens.filter_map(Value::as_str).map(String::from).collect();
        (value("data.tokenizer").and_then(Value::as_str), tokens)
    }

    /// Sets the vocabulary of a model that grows.
    pub fn set_vocab(&mut self, vocab: usize) {
        self.put(VOCAB.into(), Value::Integer(vocab as i64));
    }

    /// Removes the vocabulary if layers set it to this value.
    pub fn remove_vocab(&mut self, vocab: usize) {
        if self.values.get(VOCAB).is_some_and(|held| held.value.as_integer() == Some(vocab as i64)) {
            self.values.remove(VOCAB);
        }
    }

    /// The value of `adapter.from`, where it is given.
    pub fn adapter_from(&self) -> Option<&str> {
        self.values.get("adapter.from").and_then(|held| held.value.as_str())
    }

    /// Sets the values of the adapter of `adapter.from`; values of the same or higher layers must agree. Dropout is not among them,
    /// because it is a setting of training.
    pub fn adapter(&mut self, adapter: &Adapter, origin: &str) -> Result<(), UserError> {
        let of_source = self.values.get("adapter.from").map_or(usize::MAX, |held| held.layer);
        let facts = Value::try_from(adapter).expect("a section has a TOML form");
        for key in ["kind", "rank", "alpha", "paths", "groups"] {
            let path = format!("adapter.{key}");
            let given = self.values.get(&path).filter(|held| held.layer >= of_source);
            let Some(fact) = facts.get(key) else { continue };
            if let Some(held) = given.filter(|held| held.value != *fact) {
                refuse!(
                    "`{path}` is {} and the adapter in {origin} has {}: leave it out",
                    text::value(&held.value),
                    text::value(fact)
                );
            }
            self.put(path, fact.clone());
        }
        Ok(())
    }
}
