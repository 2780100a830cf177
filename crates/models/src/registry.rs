//! The trait that each model family implements in its own file, and the macro that builds the table of families in `lib.rs`.

use flatout_ir::Graph;
use flatout_settings::{Key, Leaf, Setting, leaves};
use serde_json::Value;

use crate::form::Form;
use crate::library::{Described, Published};
pub use crate::{Model, ModelKind};

/// The section `model` of a run that starts from an existing model.
pub struct ModelSection<'a> {
    /// Location of that model, for error messages.
    pub origin: &'a str,
    /// The value of a key, and whether it is set in the layer of `model.from` or in a later one.
    pub value: &'a dyn Fn(&str) -> Option<(Value, bool)>,
}

/// The interface of a model family.
pub trait Family {
    /// The size of its vocabulary, if it reads text.
    fn vocab(&self) -> Option<usize>;

    /// The size of the images it reads: rows and columns.
    fn image_sides(&self) -> Option<[usize; 2]>;

    /// The width of the images it reads, if any.
    fn image_size(&self) -> Option<usize> {
        self.image_sides().map(|[_, width]| width)
    }

    /// The mean and the deviation that images are normalised by, for values from 0 to 1.
    fn normalisation(&self) -> Option<[[f64; 3]; 2]> {
        None
    }

    /// The source of the initial weights.
    fn from(&self) -> Option<&String>;

    #[allow(clippy::wrong_self_convention, reason = "the key is named `from`")]
    fn from_mut(&mut self) -> &mut Option<String>;

    /// Number of classes that it distinguishes, if any.
    fn classes(&self) -> Option<usize>;

    /// The scope of the head of classes, if it has one.
    fn class_head(&self) -> Option<&'static str>;

    /// Number of tokens of a row of text or of an image.
    fn tokens(&self) -> usize;

    /// Makes room for `tokens` tokens per row, where positions are not weights of the model.
    fn set_context(&mut self, tokens: usize);

    /// Whether it has rotary positions.
    fn rotates(&self) -> bool;

    /// Number of trained values.
    fn parameters(&self) -> u64;

    /// Whether such a model exists; otherwise one sentence that names the key.
    fn validate(&self) -> Result<(), String>;

    /// The graph in one of the model's forms.
    fn build(&self, form: Form) -> Graph;

    /// The form of the smallest graph that has all parameters.
    fn least(&self) -> Form;

    /// The model in another library's format, or a sentence that says that there is none.
    fn published(&self) -> Result<&dyn Published, String>;

    /// The dimensions in words.
    fn dimensions(&self) -> String;

    /// Whether a run that starts from its weights also takes its head of classes.
    fn brings_head(&self) -> bool {
        false
    }

    /// Whether the pooling belongs to the model, because its library's head has no other: the recipe's setting is then ignored.
    fn brings_pooling(&self) -> bool {
        self.brings_head()
    }

    /// The input sizes of a run that starts from this model: keys with their values, `None` for a key without one.
    fn input_sizes(&self, asked: &ModelSection<'_>) -> Result<Vec<(&'static str, Option<usize>)>, String>;

    /// Takes over the means and deviations of a `preprocessor_config.json`.
    fn normalise(&mut self, _processor: &Value) -> Result<(), String> {
        Ok(())
    }

    /// Reads a parsed `config.json`, if it describes a model of this family.
    fn read(_config: &Value) -> Option<Result<Described, String>>
    where
        Self: Sized,
    {
        None
    }
}

/// Defines the kinds and the models of the table. A model is written with its kind as `kind` beside its keys.
macro_rules! models {
    ($($name:ident($config:ty) = $text:literal),* $(,)?) => {
        flatout_settings::choice! {
            /// The model families.
            pub enum ModelKind { $($name = $text),* }
        }

        /// One of the families with its dimensions and options.
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(tag = "kind")]
        #[allow(clippy::large_enum_variant, reason = "a run has one model, and nothing holds lists of them")]
        pub enum Model {
            $(#[serde(rename = $text)] $name($config),)*
        }

        impl ModelKind {
            /// The keys of this kind, without `kind` itself.
            pub fn keys(self) -> Vec<flatout_settings::Key> {
                match self {
                    $(ModelKind::$name => <$config as flatout_settings::Section>::keys(),)*
                }
            }

            /// A model of this kind with default values.
            pub fn model(self) -> Model {
                match self {
                    $(ModelKind::$name => Model::$name(<$config>::default()),)*
                }
            }

            /// Reads another library's parsed `config.json`, if it describes a model of this kind.
            pub fn read(self, config: &serde_json::Value) -> Option<Result<library::Described, String>> {
                match self {
                    $(ModelKind::$name => <$config as registry::Family>::read(config),)*
                }
            }
        }

        impl Model {
            pub fn kind(&self) -> ModelKind {
                match self {
                    $(Model::$name(_) => ModelKind::$name,)*
                }
            }
        }

        /// A model implements its family's trait.
        impl std::ops::Deref for Model {
            type Target = dyn registry::Family;
            fn deref(&self) -> &Self::Target {
                match self {
                    $(Model::$name(config) => config,)*
                }
            }
        }

        impl std::ops::DerefMut for Model {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $(Model::$name(config) => config,)*
                }
            }
        }

        $(impl From<$config> for Model {
            fn from(config: $config) -> Self {
                Model::$name(config)
            }
        })*
    };
}
pub(crate) use models;

impl Default for Model {
    fn default() -> Self {
        ModelKind::default().model()
    }
}

impl ModelKind {
    /// The kinds with a key for which `is_wanted` holds.
    pub fn with(is_wanted: impl Fn(&Leaf) -> bool) -> Vec<ModelKind> {
        let has = |kind: &ModelKind| leaves(kind.keys()).iter().any(&is_wanted);
        ModelKind::ALL.iter().copied().filter(has).collect()
    }
}

impl Model {
    /// The keys of all kinds, each once; a name with several meanings appears once per meaning.
    pub fn keys() -> Vec<Key> {
        let mut keys = vec![Key {
            name: "kind",
            kind: ModelKind::kind(),
            required: false,
            optional: false,
            doc: "The model family.",
        }];
        for key in ModelKind::ALL.iter().flat_map(|kind| kind.keys()) {
            if !keys.iter().any(|known| (known.name, &known.kind) == (key.name, &key.kind)) {
                keys.push(key);
            }
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::VitConfig;

    #[test]
    fn a_model_is_written_with_its_kind_and_reads_back() {
        let vit = Model::Vit(VitConfig { width: 12, layers: 2, heads: 3, ..VitConfig::default() });
        for model in [Model::default(), vit, ModelKind::Bdh.model()] {
            let text = serde_json::to_string(&model).unwrap();
            assert!(text.starts_with(&format!("{{\"kind\":\"{}\"", model.kind())), "{text}");
            assert_eq!(serde_json::from_str::<Model>(&text).unwrap(), model);
        }
        let of_another = r#"{"kind": "vit", "vocab": 3}"#;
        assert!(serde_json::from_str::<Model>(of_another).is_err(), "a key of another kind");
    }

    #[test]
    fn keys_are_listed_once() {
        let keys = leaves(Model::keys());
        for key in &keys[1..] {
            let is_same = |leaf: &Leaf| leaf.name() == key.name() && leaf.key.kind == key.key.kind;
            assert!(!ModelKind::with(is_same).is_empty(), "{}", key.name());
            assert_eq!(keys.iter().filter(|other| is_same(other)).count(), 1, "{}", key.name());
        }
        assert_eq!(ModelKind::with(|leaf| leaf.key.name == "vocab"), [ModelKind::Decoder, ModelKind::Bdh]);
        assert_eq!(ModelKind::with(|leaf| leaf.key.name == "width"), ModelKind::ALL);
    }
}
