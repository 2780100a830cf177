//! The configuration of a BDH: one layer's weights, applied several times over tokens of an image or of a text.

use crate::config::Head;
use crate::config::bounds::{self, MAX_EXTENT, MAX_LAYERS};
use flatout_settings::{choice, section};

choice! {
    /// The state that an application's result is added to: normed, as in the original model, or unchanged. They differ only in
    /// the first application.
    pub enum BdhResidual { Normed = "normed", Plain = "plain" }
}

choice! {
    /// The bound of the encoders' initial values: soft, the original's, computes it from all heads' latents; wide from those of
    /// one head.
    pub enum BdhInit { Soft = "soft", Wide = "wide" }
}

section! {
    /// The layer of BDH: sparse latents per head, linear attention of the latents with themselves, a gate, and the projection
    /// back.
    pub struct BdhConfig {
        /// Size of the state.
        pub width: usize = 192,
        /// How many times the one layer is applied.
        pub layers: usize = 6,
        /// Heads, each with its own latents.
        pub heads: usize = 6,
        /// Latents of a head; even, because they rotate in pairs.
        pub latent: usize = 1024,
        /// The state that an application's result is added to: normed, or unchanged.
        pub residual: BdhResidual = BdhResidual::Normed,
        /// The bound of the encoders' initial values.
        pub init: BdhInit = BdhInit::Soft,
        /// Base of the rotary frequencies.
        pub rope_theta: f64 = 65536.0,
        /// Added to the variance in every norm.
        pub norm_eps: f64 = 1e-5,
        /// Probability of dropping a gated latent.
        pub dropout: f64 = 0.1,
        /// The output: the class of an image, or logits of the next token of a text.
        pub head: Head = Head::Classes,
        /// Images: the number of classes.
        pub classes: Option<usize>,
        /// Side of a square image in pixels.
        pub image_size: usize = 32,
        /// Height of an image in pixels, if it is not square; image_size is then its width.
        pub image_height: Option<usize>,
        /// Side of a patch in pixels.
        pub patch: usize = 4,
        /// Texts: the number of tokens in the vocabulary; 256 means bytes.
        pub vocab: usize = 256,
        /// Texts: the tokens in a training row.
        pub context: usize = 512,
        /// Initial weights, and the rest of this section: RUN[@step].
        pub from: Option<String>,
    }
}

impl BdhConfig {
    pub fn classes(&self) -> usize {
        self.classes.unwrap_or(0)
    }

    /// Pixels of an image: rows and columns.
    pub fn sides(&self) -> [usize; 2] {
        [self.image_height.unwrap_or(self.image_size), self.image_size]
    }

    /// Number of tokens of an image: its patches, and one for the whole image.
    pub fn image_tokens(&self) -> usize {
        self.sides().iter().map(|side| side / self.patch).product::<usize>() + 1
    }

    /// The bound of the uniform initial values of both encoders.
    pub fn encoder_bound(&self) -> f64 {
        let [d, h, n] = [self.width, self.heads, self.latent].map(|x| x as f64);
        match self.init {
            BdhInit::Soft => (6.0 / (d * n + h * n)).sqrt(),
            BdhInit::Wide => (6.0 / (d + n)).sqrt(),
        }
    }

    pub fn decoder_bound(&self) -> f64 {
        (6.0 / (self.heads * self.latent + self.width) as f64).sqrt()
    }

    /// Number of trained values.
    pub fn parameters(&self) -> u64 {
        let wide = |n: usize| n as u64;
        let layer = 3 * wide(self.heads) * wide(self.latent) * wide(self.width);
        let width = wide(self.width);
        layer
            + match self.head {
                Head::Classes => {
                    let patches = (3 * wide(self.patch) * wide(self.patch) + 1) * width;
                    patches + (wide(self.image_tokens()) + 1) * width + (width + 1) * wide(self.classes())
                }
                Head::Tokens => 2 * wide(self.vocab) * width,
            }
    }

    /// Whether a model of these dimensions exists; otherwise one sentence that names the key.
    pub fn validate(&self) -> Result<(), String> {
        bounds::extents(&[
            ("width", self.width, MAX_EXTENT),
            ("layers", self.layers, MAX_LAYERS),
            ("heads", self.heads, MAX_EXTENT),
            ("latent", self.latent, MAX_EXTENT),
            ("image_size", self.image_size, MAX_EXTENT),
            ("image_height", self.sides()[0], MAX_EXTENT),
            ("patch", self.patch, MAX_EXTENT),
            ("vocab", self.vocab, MAX_EXTENT),
            ("context", self.context, MAX_EXTENT),
        ])?;
        if !self.latent.is_multiple_of(2) {
            return Err(format!("`model.latent` = {} is odd: latents rotate in pairs", self.latent));
        }
        bounds::dropped(&[("dropout", self.dropout)])?;
        bounds::positive(&[("norm_eps", self.norm_eps), ("rope_theta", self.rope_theta)])?;
        bounds::head(self.head, self.classes)?;
        if self.head == Head::Classes {
            bounds::cut(self.patch, self.sides())?;
        }
        Ok(())
    }
}
