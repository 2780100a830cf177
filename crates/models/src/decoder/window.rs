//! Local and global layers: the attention window of each layer.

use flatout_ir::ops::attention::Mask;

use super::{Attention, DecoderConfig, Positions};
use crate::config::bounds::MAX_EXTENT;

impl DecoderConfig {
    /// Whether the tokens of a layer, counted from 0, see only a window.
    pub fn is_local(&self, layer: usize) -> bool {
        let is_listed = self.global_layers.as_ref().is_some_and(|layers| layers.contains(&layer));
        let is_due = self.global_every.is_some_and(|every| (layer + 1).is_multiple_of(every));
        self.window.is_some() && !is_listed && !is_due
    }

    /// Sets the keys that say which layers ignore the window: a period where there is one, otherwise a list.
    pub(crate) fn with_global_layers(self, is_global: impl Fn(usize) -> bool) -> DecoderConfig {
        let layers = self.layers;
        let follows = |every: &usize| (0..layers).all(|i| is_global(i) == (i + 1).is_multiple_of(*every));
        let global_every = (1..=layers).find(follows);
        let listed: Vec<usize> = (0..layers).filter(|layer| is_global(*layer)).collect();
        let global_layers = Some(listed).filter(|listed| global_every.is_none() && !listed.is_empty());
        DecoderConfig { global_every, global_layers, ..self }
    }

    /// The attention mask of a layer. A window of W reaches W - 1 tokens back, or W / 2 to either side.
    pub fn mask(&self, layer: usize) -> Mask {
        self.mask_within(layer, None)
    }

    /// The attention mask where no layer may see further than a training window.
    pub fn mask_within(&self, layer: usize, window: Option<usize>) -> Mask {
        let own = self.window.filter(|_| self.is_local(layer));
        let window = own.into_iter().chain(window).min();
        match (self.attention, window) {
            (Attention::Causal, None) => Mask::Causal,
            (Attention::Causal, Some(window)) => Mask::Window { back: window - 1, ahead: 0 },
            (Attention::Bidirectional, None) => Mask::Full,
            (Attention::Bidirectional, Some(window)) => Mask::Window { back: window / 2, ahead: window / 2 },
        }
    }

    /// Whether every token sees all earlier ones of its sequence and no later one, in every layer.
    pub fn is_causal(&self) -> bool {
        (0..self.layers).all(|layer| self.mask(layer) == Mask::Causal)
    }

    /// The factor on scores.
    pub fn score_scale(&self) -> f32 {
        let root = || 1.0 / (self.score_size.unwrap_or(self.head_size()) as f32).sqrt();
        self.score_scale.map_or_else(root, |scale| scale as f32)
    }

    /// Whether the keys of windows are consistent; otherwise one sentence that names one of them.
    pub(super) fn validate_window(&self) -> Result<(), String> {
        for (key, value) in
            [("window", self.window), ("global_every", self.global_every), ("score_size", self.score_size)]
        {
            if value.is_some_and(|value| !(1..=MAX_EXTENT).contains(&value)) {
                return Err(format!("`model.{key}` must be from 1 to {}", MAX_EXTENT));
            }
        }
        let of_windows = [
            ("global_every", self.global_every.is_some()),
            ("global_layers", self.global_layers.is_some()),
            ("rope_local_theta", self.rope_local_theta.is_some()),
        ];
        if let Some((key, _)) = of_windows.into_iter().find(|(_, given)| *given && self.window.is_none()) {
            return Err(format!("`model.{key}` has no use without `model.window`: no layer is local"));
        }
        if self.global_every.is_some() && self.global_layers.is_some() {
            return Err("`model.global_every` and `model.global_layers` say the same: leave one out".into());
        }
        for (key, layers) in
            [("global_layers", &self.global_layers), ("unrotated_layers", &self.unrotated_layers)]
        {
            let outside = layers.iter().flatten().find(|layer| **layer >= self.layers);
            if let Some(layer) = outside {
                return Err(format!(
                    "`model.{key}` names layer {layer}, and the last of {} layers is {}",
                    self.layers,
                    self.layers - 1
                ));
            }
        }
        match self.score_scale {
            Some(scale) if !(scale.is_finite() && scale > 0.0) => {
                return Err(format!("`model.score_scale` is {scale} and must be a number above 0"));
            }
            Some(_) if self.score_size.is_some() => {
                return Err(
                    "`model.score_scale` and `model.score_size` both say the factor on scores: leave one out"
                        .into(),
                );
            }
            _ => {}
        }
        if self.unrotated_layers.is_some() && self.positions != Positions::Rope {
            return Err(format!(
                "`model.unrotated_layers` has no use while `model.positions` is {}",
                self.positions
            ));
        }
        match self.rope_local_theta {
            Some(theta) if !(theta.is_finite() && theta > 0.0) => {
                Err(format!("`model.rope_local_theta` is {theta} and must be a number above 0"))
            }
            Some(_) if self.positions != Positions::Rope => Err(format!(
                "`model.rope_local_theta` has no use while `model.positions` is {}",
                self.positions
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local() -> DecoderConfig {
        DecoderConfig {
            width: 8,
            layers: 12,
            heads: 1,
            ffn: 8,
            vocab: 8,
            context: 64,
            window: Some(6),
            global_every: Some(6),
            rope_local_theta: Some(100.0),
            ..DecoderConfig::default()
        }
    }

    #[test]
    fn every_sixth_layer_sees_everything() {
        let model = local();
        assert_eq!(model.validate(), Ok(()));
        let global: Vec<usize> = (0..12).filter(|layer| !model.is_local(*layer)).collect();
        assert_eq!(global, [5, 11]);
        assert_eq!([model.mask(4), model.mask(5)], [Mask::Window { back: 5, ahead: 0 }, Mask::Causal]);
        let both = DecoderConfig { attention: Attention::Bidirectional, ..model.clone() };
        assert_eq!([both.mask(4), both.mask(5)], [Mask::Window { back: 3, ahead: 3 }, Mask::Full]);
        assert_eq!((model.frequencies(4).theta, model.frequencies(5).theta), (100.0, 1e4));
        let within = |layer, window| model.mask_within(layer, Some(window));
        assert_eq!([within(4, 3), within(5, 3)], [Mask::Window { back: 2, ahead: 0 }; 2]);
        assert_eq!(
            [within(4, 9), within(5, 9)].map(|mask| mask == Mask::Window { back: 8, ahead: 0 }),
            [false, true]
        );
        let none = DecoderConfig { global_every: None, ..model };
        assert!((0..12).all(|layer| none.is_local(layer)));
        let plain = DecoderConfig { window: None, global_every: None, rope_local_theta: None, ..none };
        assert!((0..12).all(|layer| plain.mask(layer) == Mask::Causal));
    }

    #[test]
    fn layers_without_a_period_are_listed() {
        let global = |of: fn(usize) -> bool| {
            let c = DecoderConfig { global_every: None, ..local() }.with_global_layers(of);
            assert_eq!(c.validate(), Ok(()));
            assert!((0..12).all(|layer| c.is_local(layer) != of(layer)));
            (c.global_every, c.global_layers)
        };
        assert_eq!(global(|layer| layer % 4 == 3), (Some(4), None));
        assert_eq!(global(|layer| layer < 3), (None, Some(vec![0, 1, 2])));
        assert_eq!(global(|layer| layer == 11), (Some(12), None));
        assert_eq!(global(|_| false), (None, None));
        assert_eq!(global(|_| true), (Some(1), None));
    }

    #[test]
    fn scores_are_divided_by_the_root_of_score_size() {
        assert_eq!(local().score_scale(), 1.0 / 8f32.sqrt());
        assert_eq!(DecoderConfig { score_size: Some(16), ..local() }.score_scale(), 0.25);
        assert_eq!(DecoderConfig { score_scale: Some(0.375), ..local() }.score_scale(), 0.375);
    }

    #[test]
    fn inconsistent_keys_are_refused_by_name() {
        let refused = |change: fn(&mut DecoderConfig), words: &str| {
            let mut config = local();
            change(&mut config);
            let sentence = config.validate().expect_err(words);
            assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        };
        refused(|c| c.window = Some(0), "`model.window` must be from 1 to");
        refused(|c| c.global_every = Some(0), "`model.global_every` must be from 1 to");
        refused(|c| c.score_size = Some(0), "`model.score_size` must be from 1 to");
        refused(|c| c.score_scale = Some(0.0), "`model.score_scale` is 0");
        refused(|c| (c.score_scale, c.score_size) = (Some(0.1), Some(4)), "leave one out");
        refused(|c| c.global_layers = Some(vec![1]), "`model.global_every` and `model.global_layers`");
        refused(|c| c.unrotated_layers = Some(vec![12]), "names layer 12, and the last of 12 layers is 11");
        refused(|c| c.window = None, "`model.global_every` has no use without `model.window`");
        refused(|c| c.rope_local_theta = Some(-1.0), "`model.rope_local_theta` is -1");
        refused(|c| c.positions = Positions::None, "has no use while `model.positions` is none");
    }
}
