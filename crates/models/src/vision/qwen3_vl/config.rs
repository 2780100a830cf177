//! The dimensions and options of Qwen3-VL's tower, and the tokens that stand for images in a text.

use flatout_settings::section;

use crate::config::bounds::{self, MAX_EXTENT, MAX_LAYERS};
use crate::images::CHANNELS;

section! {
    /// The tower of a decoder that sees images of any size: patches, blocks, and mergers to the width of the text.
    pub struct Qwen3VlConfig {
        /// Size of the tower's residual stream.
        pub width: usize,
        /// Number of the tower's blocks.
        pub layers: usize,
        /// Heads of the tower, width / heads each.
        pub heads: usize,
        /// Inner size of the tower's feed-forward.
        pub ffn: usize,
        /// Side of a patch in pixels.
        pub patch: usize = 16,
        /// Frames per patch; a still image is repeated for each.
        pub time_patch: usize = 2,
        /// Side, in patches, of the blocks that become one token.
        pub merge: usize = 2,
        /// Side of the grid of learned positions, which are interpolated for every image.
        pub positions: usize = 48,
        /// DeepStack: blocks, counted from 0, whose states are also merged and added after the first layers of the text, in order.
        pub deepstack: Vec<usize> = vec![],
        /// Added to the variance in the tower's norms.
        pub norm_eps: f64 = 1e-6,
        /// Base of the rotary frequencies of rows and columns of patches.
        pub rope_theta: f64 = 1e4,
        /// Subtracted from red, green and blue (0 to 1).
        pub mean: [f64; CHANNELS] = [0.5; CHANNELS],
        /// Red, green and blue are divided by this.
        pub std: [f64; CHANNELS] = [0.5; CHANNELS],
        /// The placeholder token of images in a text.
        pub image_token: usize = 151655,
        /// The placeholder token of video, which is not supported.
        pub video_token: usize = 151656,
        /// The token before an image.
        pub start_token: usize = 151652,
        /// The token after an image.
        pub end_token: usize = 151653,
    }
}

impl Qwen3VlConfig {
    pub fn head_size(&self) -> usize {
        self.width / self.heads
    }

    /// Number of patches that become one token.
    pub fn block(&self) -> usize {
        self.merge * self.merge
    }

    /// Number of feature rows per image token: the main one, and those of DeepStack.
    pub fn feature_levels(&self) -> usize {
        1 + self.deepstack.len()
    }

    /// Number of values of a patch as the host writes it: rows, columns and channels.
    pub fn patch_values(&self) -> usize {
        self.patch * self.patch * CHANNELS
    }

    /// Number of trained values, with a text of this width.
    pub fn parameters(&self, text_width: usize) -> u64 {
        let wide = |n: usize| n as u64;
        let (d, ffn, merged) = (wide(self.width), wide(self.ffn), wide(self.width * self.block()));
        let linear = |out: u64, inner: u64| out * inner + out;
        let patch = linear(d, wide(self.time_patch * self.patch_values()));
        let norms = 2 * 2 * d;
        let layer = norms + 4 * linear(d, d) + linear(ffn, d) + linear(d, ffn);
        let products = linear(merged, merged) + linear(wide(text_width), merged);
        let mergers = 2 * d + products + wide(self.deepstack.len()) * (2 * merged + products);
        patch + wide(self.positions * self.positions) * d + wide(self.layers) * layer + mergers
    }

    /// Whether such a tower exists beside a text of these layers and tokens; otherwise one sentence that names the key.
    pub fn validate(&self, text_layers: usize, vocab: usize) -> Result<(), String> {
        bounds::extents(&[
            ("vision.width", self.width, MAX_EXTENT),
            ("vision.layers", self.layers, MAX_LAYERS),
            ("vision.heads", self.heads, MAX_EXTENT),
            ("vision.ffn", self.ffn, MAX_EXTENT),
            ("vision.patch", self.patch, 1 << 10),
            ("vision.time_patch", self.time_patch, 1 << 5),
            ("vision.merge", self.merge, 1 << 5),
            ("vision.positions", self.positions, 1 << 12),
        ])?;
        bounds::positive(&[
            ("vision.norm_eps", self.norm_eps),
            ("vision.rope_theta", self.rope_theta),
            ("vision.std", self.std.iter().copied().fold(f64::INFINITY, f64::min)),
        ])?;
        if self.mean.iter().any(|mean| !mean.is_finite()) {
            return Err("`model.vision.mean` must be three numbers".into());
        }
        let Self { width, heads, .. } = *self;
        if !width.is_multiple_of(heads) {
            return Err(format!(
                "`model.vision.heads` = {heads} does not divide `model.vision.width` = {width}"
            ));
        }
        if !self.head_size().is_multiple_of(4) {
            return Err(format!(
                "heads of `model.vision` have size {}, and rows and columns turn pairs of a half each, so it must be a \
                 multiple of 4",
                self.head_size()
            ));
        }
        if let Some(block) = self.deepstack.iter().find(|block| **block >= self.layers) {
            return Err(format!(
                "`model.vision.deepstack` names block {block}, and the last of {} is {}",
                self.layers,
                self.layers - 1
            ));
        }
        if !self.deepstack.is_sorted_by(|a, b| a < b) {
            return Err("`model.vision.deepstack` wants every block once, in order".into());
        }
        if self.deepstack.len() > text_layers {
            return Err(format!(
                "`model.vision.deepstack` names {} blocks, one for each of the first layers of the text, which has \
                 {text_layers}",
                self.deepstack.len()
            ));
        }
        for (key, token) in [
            ("image_token", self.image_token),
            ("video_token", self.video_token),
            ("start_token", self.start_token),
            ("end_token", self.end_token),
        ] {
            if token >= vocab {
                return Err(format!("`model.vision.{key}` is {token}, and `model.vocab` is {vocab}"));
            }
        }
        Ok(())
    }
}
