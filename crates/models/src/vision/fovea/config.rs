//! The dimensions and options of a foveated tower.

use flatout_settings::{choice, section};

use crate::config::VitConfig;
use crate::config::bounds::{self, MAX_EXTENT};
use crate::images::CHANNELS;

choice! {
    /// The look at a frame that the text reads: fine, with a query from the text model, or coarse, with the same query for
    /// every frame.
    pub enum Look { Fine = "fine", Coarse = "coarse" }
}

section! {
    /// The tower of a decoder that looks at frames of videos, one token per frame: a DINOv2, and queries to it.
    pub struct FoveaConfig {
        /// Size of the tower's residual stream.
        pub width: usize,
        /// Number of the tower's blocks.
        pub layers: usize,
        /// Heads of the tower, width / heads each.
        pub heads: usize,
        /// Inner size of the tower's feed-forward.
        pub ffn: usize,
        /// Side of a patch in pixels.
        pub patch: usize = 14,
        /// Side of a frame in pixels.
        pub image_size: usize = 224,
        /// Side of the grid of learned positions, which are resampled to the patches of a frame.
        pub positions: usize = 37,
        /// Added to the variance in the tower's norms.
        pub norm_eps: f64 = 1e-6,
        /// First value of the learned factors on what each half block adds.
        pub layer_scale: f64 = 1.0,
        /// Size of the queries built from the text model's states.
        pub query: usize = 384,
        /// Factor on the tokens of frames.
        pub visual_scale: f64 = 0.14,
        /// The look at a frame that the text reads.
        pub mode: Look = Look::Fine,
        /// Subtracted from red, green and blue (0 to 1).
        pub mean: [f64; CHANNELS] = [0.485, 0.456, 0.406],
        /// Red, green and blue are divided by this.
        pub std: [f64; CHANNELS] = [0.229, 0.224, 0.225],
        /// Initial weights of the blocks, and their dimensions: a DINOv2 folder or ORG/NAME[@revision].
        pub from: Option<String>,
    }
}

impl FoveaConfig {
    /// The vision transformer of the tower, without a head.
    pub fn vit(&self) -> VitConfig {
        VitConfig {
            width: self.width,
            layers: self.layers,
            heads: self.heads,
            ffn: Some(self.ffn),
            patch: self.patch,
            image_size: self.image_size,
            grid: Some(self.positions),
            norm_eps: self.norm_eps,
            layer_scale: Some(self.layer_scale),
            mean: self.mean,
            std: self.std,
            ..VitConfig::default()
        }
    }

    /// Bytes of a frame as the host writes it: rows, columns and channels.
    pub fn frame_bytes(&self) -> usize {
        self.image_size * self.image_size * CHANNELS
    }

    /// Number of trained values, with a text of this width.
    pub fn parameters(&self, text_width: usize) -> u64 {
        let [d, q, e] = [self.width, self.query, text_width].map(|n| n as u64);
        let connector = d * q + (d * d + d) + (e * d + e) + (q * e + q) + 2 * q;
        self.vit().parameters() + connector
    }

    /// Whether such a tower exists; otherwise one sentence that names the key.
    pub fn validate(&self) -> Result<(), String> {
        // Every other key has its meaning in a vision transformer.
        let beside = |sentence: String| {
            sentence.replace("`model.grid`", "`model.positions`").replace("`model.", "`model.vision.")
        };
        bounds::extents(&[("ffn", self.ffn, MAX_EXTENT), ("positions", self.positions, MAX_EXTENT)])
            .and_then(|()| self.vit().validate_body())
            .map_err(beside)?;
        bounds::extents(&[("vision.query", self.query, MAX_EXTENT)])?;
        bounds::positive(&[("vision.visual_scale", self.visual_scale)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_configs_are_refused_by_key() {
        let small = FoveaConfig { width: 384, layers: 12, heads: 6, ffn: 1536, ..FoveaConfig::default() };
        assert_eq!(small.validate(), Ok(()));
        assert_eq!((small.vit().tokens(), small.frame_bytes()), (257, 224 * 224 * 3));
        let refused = |change: fn(&mut FoveaConfig), words: &str| {
            let mut config = small.clone();
            change(&mut config);
            let sentence = config.validate().expect_err(words);
            assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        };
        refused(|c| c.width = 0, "`model.vision.width` is 0");
        refused(|c| c.heads = 5, "`model.vision.heads` = 5 does not divide `model.vision.width` = 384");
        refused(|c| c.ffn = 0, "`model.vision.ffn` is 0");
        refused(|c| c.positions = 0, "`model.vision.positions` is 0");
        refused(|c| c.positions = 1 << 15, "`model.vision.positions` is 32768");
        refused(|c| c.image_size = 220, "210 and 224 are the nearest");
        refused(|c| c.query = 0, "`model.vision.query` is 0");
        refused(|c| c.visual_scale = 0.0, "`model.vision.visual_scale` is 0");
        refused(|c| c.norm_eps = -1.0, "`model.vision.norm_eps` is -1");
        refused(|c| c.layer_scale = f64::NAN, "`model.vision.layer_scale`");
        refused(|c| c.std = [1.0, 0.0, 1.0], "`model.vision.std`");
    }
}
