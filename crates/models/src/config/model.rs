//! A model of any kind, as the section `model` of a config says it: `kind` and the keys of that kind.

use flatout_ir::Graph;
use serde::{Deserialize, Serialize};

use super::key::{Key, Section, Setting};
use super::{BdhConfig, DecoderConfig, Head, Positions, VitConfig};
use crate::choice;
use crate::decoder::Documents;
use crate::images::ImageForm;
use crate::{bdh, decoder, vit};

choice! {
    /// The model families.
    pub enum ModelKind { Decoder = "decoder", Vit = "vit", Bdh = "bdh" }
}

/// One of the families with its dimensions and options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Model {
    Decoder(DecoderConfig),
    Vit(VitConfig),
    Bdh(BdhConfig),
}

impl Default for Model {
    fn default() -> Self {
        Model::Decoder(DecoderConfig::default())
    }
}

impl From<DecoderConfig> for Model {
    fn from(decoder: DecoderConfig) -> Self {
        Model::Decoder(decoder)
    }
}

impl ModelKind {
    /// The keys of this kind, without `kind` itself.
    pub fn keys(self) -> Vec<Key> {
        match self {
            ModelKind::Decoder => DecoderConfig::keys(),
            ModelKind::Vit => VitConfig::keys(),
            ModelKind::Bdh => BdhConfig::keys(),
        }
    }

    /// A model of this kind by its defaults.
    pub fn model(self) -> Model {
        match self {
            ModelKind::Decoder => Model::Decoder(DecoderConfig::default()),
            ModelKind::Vit => Model::Vit(VitConfig::default()),
            ModelKind::Bdh => Model::Bdh(BdhConfig::default()),
        }
    }

    /// The kinds that have a key.
    pub fn with(key: &str) -> Vec<ModelKind> {
        ModelKind::ALL.iter().copied().filter(|kind| kind.keys().iter().any(|k| k.name == key)).collect()
    }
}

impl Model {
    /// The keys of all kinds, each once.
    pub fn keys() -> Vec<Key> {
        let mut keys = vec![Key {
            name: "kind",
            kind: ModelKind::kind(),
            required: false,
            optional: false,
            doc: "The model family.",
        }];
        for key in ModelKind::ALL.iter().flat_map(|kind| kind.keys()) {
            if !keys.iter().any(|known| known.name == key.name) {
                keys.push(key);
            }
        }
        keys
    }

    pub fn kind(&self) -> ModelKind {
        match self {
            Model::Decoder(_) => ModelKind::Decoder,
            Model::Vit(_) => ModelKind::Vit,
            Model::Bdh(_) => ModelKind::Bdh,
        }
    }

    /// The decoder, where text is read. What is of another kind is refused before anything asks.
    #[track_caller]
    pub fn decoder(&self) -> &DecoderConfig {
        self.as_decoder().expect("only a decoder reads text")
    }

    #[track_caller]
    pub fn decoder_mut(&mut self) -> &mut DecoderConfig {
        match self {
            Model::Decoder(decoder) => decoder,
            _ => panic!("only a decoder reads text"),
        }
    }

    pub fn as_decoder(&self) -> Option<&DecoderConfig> {
        match self {
            Model::Decoder(decoder) => Some(decoder),
            Model::Vit(_) | Model::Bdh(_) => None,
        }
    }

    /// Tokens of its vocabulary, where it reads text.
    pub fn vocab(&self) -> Option<usize> {
        match self {
            Model::Decoder(decoder) => Some(decoder.vocab),
            Model::Vit(_) => None,
            Model::Bdh(bdh) => (bdh.head == Head::Tokens).then_some(bdh.vocab),
        }
    }

    /// Whether it reads images, and how many pixels they are wide.
    pub fn image_size(&self) -> Option<usize> {
        match self {
            Model::Decoder(_) => None,
            Model::Vit(vit) => Some(vit.image_size),
            Model::Bdh(bdh) => (bdh.head == Head::Classes).then_some(bdh.image_size),
        }
    }

    /// Pixels of the images it reads: rows and columns.
    pub fn image_sides(&self) -> Option<[usize; 2]> {
        match self {
            Model::Decoder(_) => None,
            Model::Vit(vit) => Some(vit.sides()),
            Model::Bdh(bdh) => (bdh.head == Head::Classes).then(|| bdh.sides()),
        }
    }

    /// Initial weights come from there.
    pub fn from(&self) -> Option<&String> {
        match self {
            Model::Decoder(decoder) => decoder.from.as_ref(),
            Model::Vit(vit) => vit.from.as_ref(),
            Model::Bdh(bdh) => bdh.from.as_ref(),
        }
    }

    pub fn from_mut(&mut self) -> &mut Option<String> {
        match self {
            Model::Decoder(decoder) => &mut decoder.from,
            Model::Vit(vit) => &mut vit.from,
            Model::Bdh(bdh) => &mut bdh.from,
        }
    }

    /// How many classes it tells apart, where it does.
    pub fn classes(&self) -> Option<usize> {
        match self {
            Model::Decoder(decoder) => decoder.classes.filter(|_| decoder.head == Head::Classes),
            Model::Vit(vit) => vit.classes,
            Model::Bdh(bdh) => bdh.classes.filter(|_| bdh.head == Head::Classes),
        }
    }

    /// Tokens of a row of text or of an image.
    pub fn tokens(&self) -> usize {
        match self {
            Model::Decoder(decoder) => decoder.context,
            Model::Vit(vit) => vit.tokens(),
            Model::Bdh(bdh) if bdh.head == Head::Classes => bdh.image_tokens(),
            Model::Bdh(bdh) => bdh.context,
        }
    }

    /// Number of trained values.
    pub fn parameters(&self) -> u64 {
        match self {
            Model::Decoder(decoder) => decoder.parameters(),
            Model::Vit(vit) => vit.parameters(),
            Model::Bdh(bdh) => bdh.parameters(),
        }
    }

    /// Whether such a model exists; otherwise one sentence that names the key.
    pub fn validate(&self) -> Result<(), String> {
        match self {
            Model::Decoder(decoder) => decoder.validate(),
            Model::Vit(vit) => vit.validate(),
            Model::Bdh(bdh) => bdh.validate(),
        }
    }

    /// The smallest graph that has all parameters.
    pub fn least(&self) -> Graph {
        match self {
            Model::Decoder(decoder) => decoder::build(decoder, decoder::Form::least(decoder)),
            Model::Vit(vit) => vit::build(vit, ImageForm::plain(1)),
            Model::Bdh(bdh) => bdh::build(bdh, bdh::Form::least(bdh)),
        }
    }

    /// Makes room for so many tokens a row, where positions are no weights of the model.
    pub fn set_context(&mut self, tokens: usize) {
        match self {
            Model::Decoder(decoder) if decoder.positions == Positions::Learned => {}
            Model::Decoder(decoder) => decoder.context = tokens,
            Model::Bdh(bdh) => bdh.context = tokens,
            Model::Vit(_) => {}
        }
    }

    /// The graph over tokens in a decoder's form, of a model that predicts them.
    #[track_caller]
    pub fn of_texts(&self, form: decoder::Form) -> Graph {
        let bdh = match self {
            Model::Decoder(decoder) => return decoder::build(decoder, form),
            Model::Bdh(bdh) => bdh,
            Model::Vit(_) => panic!("a vision transformer reads no texts"),
        };
        let form = match form {
            decoder::Form::Loss { rows, len, documents: Documents::Joined, dropout } => {
                bdh::Form::Loss { rows, len, dropout }
            }
            decoder::Form::Logits { rows, len } => bdh::Form::Logits { rows, len },
            decoder::Form::Cached { sequences, tokens, capacity } => {
                bdh::Form::Cached { sequences, tokens, capacity }
            }
            other => panic!("{other:?} is no form of BDH"),
        };
        bdh::build(bdh, form)
    }

    /// The graph over images, of a model that reads them.
    #[track_caller]
    pub fn of_images(&self, form: ImageForm) -> Graph {
        match self {
            Model::Decoder(_) => panic!("a decoder reads no images"),
            Model::Vit(vit) => vit::build(vit, form),
            Model::Bdh(bdh) => bdh::build(bdh, bdh::Form::Classes(form)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn keys_are_listed_once_and_agree_on_what_they_accept() {
        let keys = Model::keys();
        for key in &keys[1..] {
            let kinds = ModelKind::with(key.name);
            assert!(!kinds.is_empty());
            for kind in kinds {
                let own = kind.keys().into_iter().find(|own| own.name == key.name).unwrap();
                assert_eq!(own.kind, key.kind, "{} of {kind}", key.name);
            }
            assert_eq!(keys.iter().filter(|other| other.name == key.name).count(), 1);
        }
        assert_eq!(ModelKind::with("vocab"), [ModelKind::Decoder, ModelKind::Bdh]);
        assert_eq!(ModelKind::with("width"), ModelKind::ALL);
    }
}
