//! The architectures of the `transformers` library that a decoder can represent, one row each.
//!
//! A row reads the fields of a `config.json` and writes them. A decoder belongs to an architecture if the fields that the row
//! writes for it read back as the same decoder. A key that a row does not write is therefore one that the architecture does not
//! have: there is no list of unsupported keys, and every row refuses a new key until it writes it.

use flatout_settings::Section;
use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::layer_kinds::object;
use super::stored::Stored;
use super::{
    bert, distilbert, gemma, gpt2, granite, llama, mistral, modernbert, olmo2, phi3, qwen, roberta, smollm3,
};
use crate::config::{DecoderConfig, Head, Positions, RopeScaling};

/// The extents of one of our weights, by its path.
pub(crate) type Shape<'a> = &'a dyn Fn(&str) -> Vec<usize>;

pub(crate) struct Architecture {
    pub model_type: &'static str,
    /// The library's class with a head of tokens.
    pub class: &'static str,
    /// The class without a head, whose files have names without the class's prefix, and classes whose heads are not read.
    pub bodies: &'static [&'static str],
    /// The class with a head of classes, if the library has one.
    pub class_of_classes: Option<&'static str>,
    pub read: fn(&Fields<'_>) -> Result<DecoderConfig, String>,
    pub write: fn(&DecoderConfig) -> Map<String, Value>,
    /// Location of every weight in the library's checkpoints.
    pub stored: fn(&DecoderConfig, Shape<'_>) -> Vec<Stored>,
    /// Whether embeddings are multiplied by the square root of the width, rounded to the type of the weights: no field has the
    /// factor, because it follows from that type.
    pub scales_embeddings: bool,
}

/// In the order in which a decoder is compared with them: if several can represent it, the first is written.
const ALL: [&Architecture; 16] = [
    &llama::LLAMA,
    &qwen::QWEN3,
    &gpt2::GPT2,
    &gemma::GEMMA3,
    &gemma::GEMMA2,
    &qwen::QWEN2,
    &mistral::MISTRAL,
    &phi3::PHI3,
    &olmo2::OLMO2,
    &smollm3::SMOLLM3,
    &granite::GRANITE,
    &modernbert::MODERNBERT,
    &bert::BERT,
    &roberta::ROBERTA,
    &roberta::XLM_ROBERTA,
    &distilbert::DISTILBERT,
];

/// A key whose value an architecture cannot represent.
struct Difference {
    key: &'static str,
    ours: Value,
    theirs: Value,
}

impl Architecture {
    /// The architecture of a decoder, or the key that prevents it: that of the family it names, or else the first that fits.
    pub fn of(model: &DecoderConfig) -> Result<&'static Architecture, String> {
        let named = match &model.family {
            Some(family) => Some(Architecture::by_name(family).ok_or_else(|| {
                format!("`model.family` is {family}, which is none of {}", Architecture::names())
            })?),
            None => None,
        };
        let tried: Vec<&'static Architecture> = named.map_or(ALL.to_vec(), |named| vec![named]);
        let mut nearest: Option<(&Architecture, Vec<Difference>)> = None;
        for architecture in tried {
            // Fields that do not read back as a decoder at all are no candidates for the closest match.
            let Some(differences) = architecture.differences(model) else { continue };
            if differences.is_empty() {
                return Ok(architecture);
            }
            if nearest.as_ref().is_none_or(|(_, fewest)| differences.len() < fewest.len()) {
                nearest = Some((architecture, differences));
            }
        }
        let known: Vec<&str> = ALL.iter().map(|known| known.class).collect();
        let known = named.map_or_else(|| known.join(", "), |named| named.class.to_string());
        let Some((nearest, Difference { key, ours, theirs })) =
            nearest.and_then(|(nearest, differences)| Some((nearest, differences.into_iter().next()?)))
        else {
            return Err(format!("such a decoder is none of {known}"));
        };
        let [ours, theirs] = [ours, theirs].map(shown);
        Err(format!(
            "a decoder with model.{key} = {ours} is none of {known}: {}, the nearest, has {theirs}",
            nearest.class
        ))
    }

    /// The decoder with this family's name, if it would otherwise be taken for another family.
    pub fn naming(&self, model: DecoderConfig) -> DecoderConfig {
        let is_first = Architecture::of(&model).is_ok_and(|first| first.model_type == self.model_type);
        DecoderConfig { family: (!is_first).then(|| self.model_type.to_string()), ..model }
    }

    pub fn by_name(model_type: &str) -> Option<&'static Architecture> {
        ALL.into_iter().find(|architecture| architecture.model_type == model_type)
    }

    /// The supported `model_type`s, as a sentence.
    pub fn names() -> String {
        ALL.map(|architecture| architecture.model_type).join(", ")
    }

    /// The library's class with the given head.
    pub fn class(&self, head: Head) -> Result<&'static str, String> {
        match head {
            Head::Tokens => Ok(self.class),
            Head::Classes => self.class_of_classes.ok_or_else(|| {
                format!("the library has no {} with a head of classes, and model.head is classes", self.class)
            }),
        }
    }

    fn differences(&self, model: &DecoderConfig) -> Option<Vec<Difference>> {
        let fields = common_fields(model).into_iter().chain((self.write)(model)).collect();
        let back = (self.read)(&Fields(&fields)).ok()?;
        let [mut ours, mut theirs] = [model, &back].map(|model| comparable(model, self.scales_embeddings));
        // Number of positions is irrelevant unless both sides have them as parameters.
        if [model, &back].iter().any(|model| model.positions != Positions::Learned) {
            for all in [&mut ours, &mut theirs] {
                all["context"].take();
            }
        }
        let differs = |key: flatout_settings::Key| {
            let [ours, theirs] = [&ours, &theirs].map(|all| all[key.name].clone());
            (ours != theirs).then_some(Difference { key: key.name, ours, theirs })
        };
        Some(DecoderConfig::keys().into_iter().filter_map(differs).collect())
    }
}

/// The fields that every architecture has.
pub(crate) fn common_fields(model: &DecoderConfig) -> Map<String, Value> {
    object(json!({
        "vocab_size": model.vocab,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
    }))
}

fn shown(value: Value) -> String {
    match value {
        Value::String(word) => word,
        Value::Null => "none".into(),
        other => other.to_string(),
    }
}

/// The keys of a decoder that the `config.json` of a text model determines, in a canonical form: without heads of classes,
/// towers and training settings.
fn comparable(model: &DecoderConfig, scales_embeddings: bool) -> Value {
    let d = DecoderConfig::default();
    let rotates = model.positions == Positions::Rope;
    let stretched_by = |scaling: RopeScaling| rotates && model.rope_scaling == scaling;
    let (llama3, yarn) = (stretched_by(RopeScaling::Llama3), stretched_by(RopeScaling::Yarn));
    let is_plain = model.rope_scaling == RopeScaling::None;
    let without_scale = DecoderConfig { score_scale: None, ..model.clone() };
    let or = |applies: bool, ours: f64, default: f64| if applies { ours } else { default };
    let own = DecoderConfig {
        kv_heads: Some(model.kv_heads()),
        head_size: Some(model.head_size()),
        score_size: model.score_size.filter(|size| *size != model.head_size()),
        score_scale: model.score_scale.filter(|_| model.score_scale() != without_scale.score_scale()),
        rope_theta: or(rotates, model.rope_theta, d.rope_theta),
        rope_local_theta: model.rope_local_theta.filter(|theta| !(is_plain && *theta == model.rope_theta)),
        rope_low_freq_factor: or(llama3, model.rope_low_freq_factor, d.rope_low_freq_factor),
        rope_high_freq_factor: or(llama3, model.rope_high_freq_factor, d.rope_high_freq_factor),
        rope_beta_fast: or(yarn, model.rope_beta_fast, d.rope_beta_fast),
        rope_beta_slow: or(yarn, model.rope_beta_slow, d.rope_beta_slow),
        embed_scale: or(!scales_embeddings, model.embed_scale, d.embed_scale),
        head: d.head,
        classes: d.classes,
        pooling: d.pooling,
        head_dropout: d.head_dropout,
        dropout: d.dropout,
        init_std: d.init_std,
        init_residual: d.init_residual,
        init_head: d.init_head,
        rope_sections: None,
        family: None,
        vision: None,
        from: None,
        ..model.clone()
    };
    let own = own.with_global_layers(|layer| model.window.is_some() && !model.is_local(layer));
    let unrotated: Vec<usize> =
        (0..model.layers).filter(|layer| rotates && !model.rotates_in(*layer)).collect();
    let own = DecoderConfig { unrotated_layers: Some(unrotated), ..own };
    serde_json::to_value(own).expect("keys have values")
}
