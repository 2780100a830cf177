//! Towers: the parts with which a decoder sees images. One folder per tower, and its row below.

pub mod fovea;
pub mod qwen3_vl;

pub use fovea::{FoveaConfig, Look};
pub use qwen3_vl::Qwen3VlConfig;

use flatout_ir::{Builder, DType, SlotId, Tensor};
use flatout_settings::{Key, Section, Setting, ValueKind, choice};
use serde::{Deserialize, Serialize};

use crate::form::{ImageExtents, SeenFrames, SeenPatches};
use crate::images::CHANNELS;
use crate::layers::Sight;

/// The scope of the tower's parameters.
pub const SCOPE: &str = "vision";

choice! {
    /// The architecture of the tower.
    pub enum Tower { Qwen3Vl = "qwen3_vl", Fovea = "fovea" }
}

/// A tower of one kind, with its dimensions and options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
#[allow(clippy::large_enum_variant, reason = "a decoder has one tower, and nothing holds lists of them")]
pub enum Vision {
    #[serde(rename = "qwen3_vl")]
    Qwen3Vl(Qwen3VlConfig),
    #[serde(rename = "fovea")]
    Fovea(FoveaConfig),
}

impl Tower {
    /// The keys of this tower, without `kind` itself.
    pub fn keys(self) -> Vec<Key> {
        match self {
            Tower::Qwen3Vl => Qwen3VlConfig::keys(),
            Tower::Fovea => FoveaConfig::keys(),
        }
    }
}

impl Setting for Vision {
    fn kind() -> ValueKind {
        ValueKind::Section(Vision::keys())
    }
}

impl Section for Vision {
    /// The keys of all towers, each once: a name means the same in every tower that has it.
    fn keys() -> Vec<Key> {
        let (kind, doc) = (Tower::kind(), "How the tower is built.");
        let mut keys = vec![Key { name: "kind", kind, required: false, optional: false, doc }];
        for key in Tower::ALL.iter().flat_map(|tower| tower.keys()) {
            if !keys.iter().any(|known| known.name == key.name) {
                keys.push(key);
            }
        }
        keys
    }
}

impl Vision {
    pub fn kind(&self) -> Tower {
        match self {
            Vision::Qwen3Vl(_) => Tower::Qwen3Vl,
            Vision::Fovea(_) => Tower::Fovea,
        }
    }

    pub fn as_qwen3_vl(&self) -> Option<&Qwen3VlConfig> {
        match self {
            Vision::Qwen3Vl(tower) => Some(tower),
            Vision::Fovea(_) => None,
        }
    }

    pub fn as_fovea(&self) -> Option<&FoveaConfig> {
        match self {
            Vision::Fovea(tower) => Some(tower),
            Vision::Qwen3Vl(_) => None,
        }
    }

    /// Number of trained values, beside a text model of this width.
    pub fn parameters(&self, text_width: usize) -> u64 {
        match self {
            Vision::Qwen3Vl(tower) => tower.parameters(text_width),
            Vision::Fovea(tower) => tower.parameters(text_width),
        }
    }

    /// Whether such a tower exists beside a text model with these layers and tokens; otherwise one sentence that names the key.
    pub fn validate(&self, text_layers: usize, vocab: usize) -> Result<(), String> {
        match self {
            Vision::Qwen3Vl(tower) => tower.validate(text_layers, vocab),
            Vision::Fovea(tower) => tower.validate(),
        }
    }

    /// The dimensions in words.
    pub fn dimensions(&self) -> String {
        let [layers, width, heads, patch] = match self {
            Vision::Qwen3Vl(v) => [v.layers, v.width, v.heads, v.patch],
            Vision::Fovea(v) => [v.layers, v.width, v.heads, v.patch],
        };
        format!("images by {layers} layers of width {width}, {heads} heads, patches of {patch}")
    }

    /// The mean that is subtracted from pixels, and the deviation that they are divided by.
    pub fn normalisation_mut(&mut self) -> [&mut [f64; CHANNELS]; 2] {
        match self {
            Vision::Qwen3Vl(v) => [&mut v.mean, &mut v.std],
            Vision::Fovea(v) => [&mut v.mean, &mut v.std],
        }
    }

    /// Smallest extents of a graph with all parameters.
    pub fn least(&self) -> ImageExtents {
        match self {
            Vision::Qwen3Vl(v) => {
                ImageExtents::Patches(SeenPatches { patches: v.block(), images: 1, largest: v.block() })
            }
            Vision::Fovea(_) => ImageExtents::Frames(SeenFrames::next_of(1)),
        }
    }
}

/// Features of images: rows that replace tokens, and rows that are added after the first layers of the text model.
pub struct Features<'g> {
    pub main: Tensor<'g>,
    pub deep: Vec<Tensor<'g>>,
    /// The slot of each sequence's last state, f32 [sequences, width of the text], for a tower that builds queries from it.
    pub states: Option<SlotId>,
}

/// The text model beside a tower.
pub struct TextBody<'a, 'g> {
    pub width: usize,
    pub init_std: f64,
    /// The blocks and the final norm over rows [T, width] at positions i32 [1, T].
    pub body: &'a dyn Fn(Tensor<'g>, Tensor<'g>, Sight<'g>) -> Tensor<'g>,
    /// Number of sequences in the cache, if the graph has one.
    pub cached: Option<usize>,
    /// Whether the features are an input, so that the graph has no tower.
    pub features_given: bool,
}

/// The first key of the tower's nodes, far above those of the text model and below those of adapters' dropout.
const TOWER_KEYS: u64 = 1 << 32;

/// The features of images, from a tower with its inputs, and the input `seen`, i32 [T]: the feature row of each token, or -1.
#[track_caller]
pub fn features<'g>(
    b: &'g Builder,
    vision: &Vision,
    beside: &TextBody<'_, 'g>,
    seen: ImageExtents,
    tokens: usize,
) -> (Features<'g>, Tensor<'g>) {
    let rows = || b.input("seen", DType::I32, &[tokens]);
    match (vision, seen) {
        (Vision::Qwen3Vl(v), ImageExtents::Patches(seen)) if beside.features_given => {
            b.counted_from(TOWER_KEYS, || (qwen3_vl::features::given(b, v, seen, beside.width), rows()))
        }
        (Vision::Qwen3Vl(v), ImageExtents::Patches(seen)) => {
            let w = qwen3_vl::weights(b, v, beside.width, beside.init_std);
            b.counted_from(TOWER_KEYS, || {
                let inputs = qwen3_vl::Inputs::new(b, v, seen);
                let rows = rows();
                (qwen3_vl::apply(b, v, &w, &inputs), rows)
            })
        }
        (Vision::Fovea(v), ImageExtents::Frames(seen)) => {
            let w = fovea::weights(b, v, beside.width, beside.init_std);
            b.counted_from(TOWER_KEYS, || {
                let inputs = fovea::Inputs::new(b, v, seen, beside.cached);
                let rows = rows();
                (fovea::apply(b, v, &w, &inputs, beside), rows)
            })
        }
        _ => panic!("{seen:?} is nothing that a tower of kind {} sees", vision.kind()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DecoderConfig;

    #[test]
    fn a_key_means_the_same_in_every_tower_that_has_it() {
        let all = Vision::keys();
        for key in Tower::ALL.iter().flat_map(|tower| tower.keys()) {
            let listed = all.iter().find(|listed| listed.name == key.name).expect("a key");
            assert_eq!((&listed.kind, listed.required), (&key.kind, key.required), "{}", key.name);
        }
        assert_eq!(all.iter().filter(|key| key.name == "width").count(), 1);
    }

    #[test]
    fn a_tower_is_written_with_its_kind_and_reads_back() {
        let fovea = FoveaConfig { width: 12, layers: 2, heads: 3, ffn: 8, ..FoveaConfig::default() };
        let vision = Some(Vision::Fovea(fovea));
        let model = DecoderConfig { width: 8, layers: 1, heads: 2, vision, ..DecoderConfig::default() };
        let text = serde_json::to_string(&model).unwrap();
        assert!(text.contains(r#""vision":{"kind":"fovea","width":12"#), "{text}");
        assert_eq!(serde_json::from_str::<DecoderConfig>(&text).unwrap(), model);
        let of_another = text.replace(r#""mode":"fine""#, r#""merge":2"#);
        assert!(serde_json::from_str::<DecoderConfig>(&of_another).is_err(), "a key of another tower");
    }
}
