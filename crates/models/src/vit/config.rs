//! The configuration of a vision transformer: DINOv2's and timm's ViT as values.

use crate::config::bounds::{self, MAX_EXTENT, MAX_LAYERS};
use crate::config::{Activation, Head, Pooling};
use crate::images::CHANNELS;
use flatout_settings::{choice, section};

choice! {
    /// The library whose files a vision transformer is exported in, where both have it: timm, or `transformers`.
    pub enum VitLibrary { Timm = "timm", Transformers = "transformers" }
}

choice! {
    /// The values that the final norm applies to: every token, the pooled one, or none.
    pub enum FinalNorm { Tokens = "tokens", Pooled = "pooled", None = "none" }
}

section! {
    /// The vision transformer: patches, a class token, pre-norm blocks, final norm, a head of classes.
    pub struct VitConfig {
        /// Size of the residual stream.
        pub width: usize,
        /// Number of blocks.
        pub layers: usize,
        /// Heads of attention.
        pub heads: usize,
        /// Inner size of the feed-forward; four times the width where not given.
        pub ffn: Option<usize>,
        /// The feed-forward is a gated SwiGLU instead of GELU.
        pub swiglu: bool = false,
        /// The non-linearity of a feed-forward without a gate: gelu_exact, gelu_tanh or quick_gelu.
        pub activation: Activation = Activation::GeluExact,
        /// Side of a patch in pixels.
        pub patch: usize,
        /// Side of the model's input image in pixels.
        pub image_size: usize,
        /// Height of an image in pixels, if it is not square; image_size is then its width.
        pub image_height: Option<usize>,
        /// Side of the grid of learned positions, resampled for images with another grid; the patches per row if not given.
        pub grid: Option<usize>,
        /// Whether positions are resampled with antialiasing, as timm and DINOv2 with registers do it.
        pub antialias: bool = false,
        /// A learned class token before the patches, which the head may read.
        pub class_token: bool = true,
        /// Register tokens: learned tokens beside the class token that all others see.
        pub registers: usize = 0,
        /// Number of tokens before the patches with a learned position: none, the class token, or all; the class token if not given.
        pub prefix_positions: Option<usize>,
        /// Norm of all tokens before the first block, as in CLIP; the patch projection then has no bias.
        pub input_norm: bool = false,
        /// The values that the final norm is of: every token, the pooled one, or none.
        pub final_norm: FinalNorm = FinalNorm::Tokens,
        /// Number of classes.
        pub classes: Option<usize>,
        /// Pooling of the last states for the head: cls, cls_mean (both side by side) or mean.
        pub pooling: Pooling = Pooling::Cls,
        /// Added to the variance in every norm.
        pub norm_eps: f64 = 1e-6,
        /// First value of the learned factors on what each half block adds; none where not given.
        pub layer_scale: Option<f64>,
        /// Means of red, green and blue (0 to 1), which are subtracted.
        pub mean: [f64; 3] = [0.485, 0.456, 0.406],
        /// Deviations of red, green and blue (0 to 1), which pixels are divided by.
        pub std: [f64; 3] = [0.229, 0.224, 0.225],
        /// Probability that an image skips the halves of the last block; earlier blocks have less in proportion.
        pub drop_path: f64 = 0.0,
        /// Probability of dropping an element of the head's input.
        pub head_dropout: f64 = 0.0,
        /// Standard deviation of the initial weights.
        pub init_std: f64 = 0.02,
        /// The format of an export, where both libraries have such a model: timm, or transformers.
        pub library: VitLibrary = VitLibrary::Timm,
        /// Initial weights, and the rest of this section: a folder of a library's model, ORG/NAME[@revision] or RUN[@step].
        pub from: Option<String>,
    }
}

impl VitConfig {
    pub fn ffn(&self) -> usize {
        self.ffn.unwrap_or(self.width.saturating_mul(4))
    }

    pub fn head_size(&self) -> usize {
        self.width / self.heads
    }

    /// Pixels of an image: rows and columns.
    pub fn sides(&self) -> [usize; 2] {
        [self.image_height.unwrap_or(self.image_size), self.image_size]
    }

    /// Patches of an image: rows and columns.
    pub fn patches(&self) -> [usize; 2] {
        self.sides().map(|side| side / self.patch)
    }

    /// Learned positions, a side.
    pub fn grid(&self) -> usize {
        self.grid.unwrap_or_else(|| self.patches()[1])
    }

    /// Tokens of an image.
    pub fn tokens(&self) -> usize {
        self.prefix() + self.patches().iter().product::<usize>()
    }

    /// Number of tokens before the patches.
    pub fn prefix(&self) -> usize {
        usize::from(self.class_token) + self.registers
    }

    /// Number of those tokens, from the first, that have a learned position.
    pub fn prefix_positions(&self) -> usize {
        self.prefix_positions.unwrap_or(usize::from(self.class_token))
    }

    /// Number of elements that the head reads per image.
    pub fn pooled(&self) -> usize {
        if self.pooling == Pooling::ClsMean { 2 * self.width } else { self.width }
    }

    /// Number of trained values.
    pub fn parameters(&self) -> u64 {
        let wide = |n: usize| n as u64;
        let (d, f) = (wide(self.width), wide(self.ffn()));
        let scales = if self.layer_scale.is_some() { 2 * d } else { 0 };
        let ups = if self.swiglu { 2 } else { 1 };
        let block = 4 * d * d + 4 * d + ups * (d * f + f) + f * d + d + 4 * d + scales;
        let patch = wide(CHANNELS * self.patch * self.patch) * d + if self.input_norm { 2 * d } else { d };
        let positions = self.prefix_positions() + self.grid() * self.grid();
        let tokens = d * (wide(self.prefix()) + wide(positions));
        let norm = if self.final_norm == FinalNorm::None { 0 } else { 2 * d };
        wide(self.layers) * block
            + patch
            + tokens
            + norm
            + wide(self.classes.unwrap_or(0)) * (wide(self.pooled()) + 1)
    }

    /// Whether a model of these dimensions exists; otherwise one sentence that names the key.
    pub fn validate(&self) -> Result<(), String> {
        self.validate_body()?;
        bounds::head(Head::Classes, self.classes)
    }

    /// `validate` without the head.
    pub fn validate_body(&self) -> Result<(), String> {
        bounds::extents(&[
            ("width", self.width, MAX_EXTENT),
            ("layers", self.layers, MAX_LAYERS),
            ("heads", self.heads, MAX_EXTENT),
            ("ffn", self.ffn(), MAX_EXTENT),
            ("patch", self.patch, MAX_SIDE),
            ("image_size", self.image_size, MAX_SIDE),
            ("image_height", self.sides()[0], MAX_SIDE),
            ("grid", self.grid.unwrap_or(1), MAX_SIDE),
        ])?;
        let Self { width, heads, patch, .. } = *self;
        if !width.is_multiple_of(heads) {
            return Err(format!("`model.heads` = {heads} does not divide `model.width` = {width}"));
        }
        bounds::cut(patch, self.sides())?;
        if self.registers > MAX_REGISTERS {
            return Err(format!(
                "`model.registers` is {} and may be {MAX_REGISTERS} at most",
                self.registers
            ));
        }
        let placed = self.prefix_positions();
        if ![0, usize::from(self.class_token), self.prefix()].contains(&placed) {
            return Err(format!(
                "`model.prefix_positions` is {placed}, and of {} tokens before the patches none, the class token or all have \
                 a position",
                self.prefix()
            ));
        }
        if !matches!(self.activation, Activation::GeluExact | Activation::GeluTanh | Activation::QuickGelu) {
            return Err(format!(
                "`model.activation` is {}, and of images there is gelu_exact, gelu_tanh and quick_gelu; model.swiglu=true \
                 has a gate",
                self.activation
            ));
        }
        if self.swiglu && self.activation != Activation::GeluExact {
            return Err("`model.activation` has no use while `model.swiglu` is true".into());
        }
        if !self.class_token && self.pooling != Pooling::Mean {
            return Err(format!(
                "`model.pooling` is {}, and `model.class_token` is false: give model.pooling=mean",
                self.pooling
            ));
        }
        if self.final_norm == FinalNorm::Pooled && self.pooling != Pooling::Mean {
            return Err(format!(
                "`model.final_norm` is pooled, and `model.pooling` is {}: only a mean is normed after it is taken, so give \
                 model.pooling=mean",
                self.pooling
            ));
        }
        bounds::positive(&[("norm_eps", self.norm_eps), ("init_std", self.init_std)])?;
        if self.layer_scale.is_some_and(|scale| !scale.is_finite()) {
            return Err("`model.layer_scale` must be a number".into());
        }
        normalisation(&self.mean, &self.std)?;
        if matches!(self.pooling, Pooling::Last | Pooling::Max) {
            return Err(format!(
                "`model.pooling` is {}, and of images there is cls, cls_mean and mean",
                self.pooling
            ));
        }
        bounds::dropped(&[("drop_path", self.drop_path), ("head_dropout", self.head_dropout)])
    }
}

/// Largest side in pixels; products of extents then stay far below 64 bits.
const MAX_SIDE: usize = 1 << 14;
const MAX_REGISTERS: usize = 1 << 10;

/// Whether a mean and a deviation can normalise pixels.
fn normalisation(mean: &[f64; 3], std: &[f64; 3]) -> Result<(), String> {
    if mean.iter().any(|mean| !mean.is_finite()) {
        return Err("`model.mean` must be three numbers".into());
    }
    if std.iter().any(|std| !std.is_finite() || *std <= 0.0) {
        return Err("`model.std` must be three numbers above 0".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vit(width: usize, layers: usize, heads: usize) -> VitConfig {
        VitConfig {
            width,
            layers,
            heads,
            patch: 16,
            image_size: 224,
            classes: Some(1000),
            ..VitConfig::default()
        }
    }

    /// timm's own parameter counts of vit_tiny, vit_small and vit_base_patch16_224.
    #[test]
    fn timms_models_have_their_parameters() {
        let counts = [(192, 3, 5_717_416), (384, 6, 22_050_664), (768, 12, 86_567_656)];
        for (width, heads, parameters) in counts {
            let vit = vit(width, 12, heads);
            assert_eq!(vit.validate(), Ok(()));
            assert_eq!((vit.parameters(), vit.tokens()), (parameters, 197));
        }
    }

    /// The count of the library's Dinov2Model, less `width` for its mask token, plus the head.
    #[test]
    fn dinov2_has_its_parameters() {
        let counts = [(384, 12, 6, 22_056_576), (768, 12, 12, 86_580_480), (1024, 24, 16, 304_368_640)];
        for (width, layers, heads, with_mask) in counts {
            let vit = VitConfig {
                patch: 14,
                grid: Some(37),
                layer_scale: Some(1.0),
                pooling: Pooling::ClsMean,
                ..vit(width, layers, heads)
            };
            assert_eq!(vit.validate(), Ok(()));
            let head = 1000 * (2 * width as u64 + 1);
            assert_eq!(vit.parameters(), with_mask - width as u64 + head);
            assert_eq!(vit.tokens(), 257);
        }
    }

    #[test]
    fn impossible_configs_are_refused_by_key() {
        let refused = |change: fn(&mut VitConfig), words: &str| {
            let mut config = vit(192, 12, 3);
            change(&mut config);
            let sentence = config.validate().expect_err(words);
            assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        };
        refused(|c| c.width = 0, "`model.width` is 0");
        refused(|c| c.heads = 5, "`model.heads` = 5 does not divide");
        refused(|c| c.image_size = 220, "208 and 224 are the nearest");
        refused(|c| c.image_height = Some(30), "`model.image_height` = 30: 16 and 32 are the nearest");
        refused(|c| c.image_height = Some(0), "`model.image_height` is 0");
        refused(|c| c.image_size = 1 << 20, "`model.image_size` is 1048576");
        refused(|c| c.registers = 5000, "`model.registers` is 5000");
        refused(|c| c.classes = None, "`model.classes` is missing");
        refused(|c| c.classes = Some(1), "`model.classes` is 1");
        refused(|c| c.norm_eps = -1.0, "`model.norm_eps` is -1");
        refused(|c| c.layer_scale = Some(f64::NAN), "`model.layer_scale`");
        refused(|c| c.std = [1.0, 0.0, 1.0], "`model.std`");
        refused(|c| c.mean = [f64::INFINITY, 0.0, 1.0], "`model.mean`");
        refused(|c| c.pooling = Pooling::Max, "`model.pooling` is max");
        refused(|c| c.class_token = false, "`model.class_token` is false: give model.pooling=mean");
        refused(
            |c| (c.registers, c.prefix_positions) = (2, Some(2)),
            "`model.prefix_positions` is 2, and of 3",
        );
        refused(|c| c.activation = Activation::Relu2, "`model.activation` is relu2");
        refused(|c| (c.swiglu, c.activation) = (true, Activation::GeluTanh), "`model.swiglu` is true");
        refused(|c| c.final_norm = FinalNorm::Pooled, "`model.final_norm` is pooled");
        refused(|c| c.final_norm = FinalNorm::Pooled, "give model.pooling=mean");
        refused(|c| c.drop_path = 1.0, "`model.drop_path` is 1");
        refused(|c| c.head_dropout = -0.1, "`model.head_dropout` is -0.1");
    }
}
