//! The configuration of a decoder: every dimension and option of the Llama-class decoder as a value, with the sums that
//! follow from them. Nothing here says how it is computed.

use crate::config::bounds::{self, MAX_EXTENT, MAX_LAYERS};
use crate::config::{Activation, Head, Pooling};
use crate::vision::Vision;
use flatout_settings::{choice, section};

choice! {
    /// Products with a bias: none, those to q, k and v, all of attention's, all except the head, or the feed-forward's.
    pub enum Bias { None = "none", Qkv = "qkv", Attention = "attention", All = "all", Ffn = "ffn" }
}

choice! {
    /// Normalisation over the width.
    pub enum Norm { Rms = "rms", Layer = "layer" }
}

choice! {
    /// Whether norms multiply by their learned weights (plain), or by 1 plus these (one_plus).
    pub enum NormWeights { Plain = "plain", OnePlus = "one_plus" }
}

choice! {
    /// The elements that the norm of queries and keys is taken over: those of each head, or of all heads of a token together.
    pub enum QkNormOver { Head = "head", Heads = "heads" }
}

choice! {
    /// The tokens of its text that a token sees: those up to itself, or all.
    pub enum Attention { Causal = "causal", Bidirectional = "bidirectional" }
}

choice! {
    /// The layer between the pooled state of a text and its classes: none; a product, the exact GELU and a norm; or a product
    /// with a bias and tanh or ReLU.
    pub enum ClassLayer { None = "none", Gelu = "gelu", Tanh = "tanh", Relu = "relu" }
}

choice! {
    /// The kind of position embeddings.
    pub enum Positions { Rope = "rope", Learned = "learned", None = "none" }
}

choice! {
    /// The pairs of elements of a head that rotate together: i with i + half, or 2i with 2i + 1.
    pub enum RopePairs { Half = "half", Interleaved = "interleaved" }
}

choice! {
    /// The scaling of rotary frequencies for contexts longer than the model was trained with.
    pub enum RopeScaling {
        None = "none",
        Linear = "linear",
        Llama3 = "llama3",
        Yarn = "yarn",
        Dynamic = "dynamic",
        Longrope = "longrope",
    }
}

section! {
    /// The pre-norm decoder: embedding, blocks of attention and feed-forward, final norm, head.
    pub struct DecoderConfig {
        /// Size of the residual stream.
        pub width: usize,
        /// Number of blocks.
        pub layers: usize,
        /// Query heads.
        pub heads: usize,
        /// Key and value heads, shared by groups of query heads; as many as heads where not given.
        pub kv_heads: Option<usize>,
        /// Size of a head; width / heads where not given.
        pub head_size: Option<usize>,
        /// Inner size of the feed-forward.
        pub ffn: usize,
        /// Number of tokens in the vocabulary.
        pub vocab: usize,
        /// Tokens in a training row.
        pub context: usize,
        /// Normalisation before each half of a block and before the head.
        pub norm: Norm = Norm::Rms,
        /// The norms over the width have a bias.
        pub norm_bias: bool = false,
        /// Added to the variance in every norm.
        pub norm_eps: f64 = 1e-6,
        /// Whether norms multiply by their learned weights (plain), or by 1 plus these (one_plus).
        pub norm_weight: NormWeights = NormWeights::Plain,
        /// Norm of the embedded tokens, before the first block.
        pub embed_norm: bool = false,
        /// The first block has a norm before its attention; a norm after the embedding makes it redundant.
        pub first_norm: bool = true,
        /// Norms before each half block; without them a block only has `post_norms`.
        pub pre_norms: bool = true,
        /// Norms of each half block's output too, before it is added to the residual stream.
        pub post_norms: bool = false,
        /// Norms of the residual stream after each addition, as in the original transformer; `pre_norms` must then be false.
        pub residual_norms: bool = false,
        /// Products with a bias: none, those to q, k and v, all of attention's, all except the head, or the feed-forward's.
        pub bias: Bias = Bias::None,
        /// The feed-forward's non-linearity; swiglu, geglu and geglu_exact are gated, geglu with the tanh form of GELU.
        pub activation: Activation = Activation::Swiglu,
        /// Value embeddings: this many first and last layers add a learned vector of each token to the values of attention.
        pub value_embeddings: usize = 0,
        /// The tokens of its text that a token sees: those up to itself, or all.
        pub attention: Attention = Attention::Causal,
        /// Tokens that a token of a local layer sees, itself included, or half of them to either side; unlimited if not given.
        pub window: Option<usize>,
        /// With a window: every n-th layer ignores the window, counted from 1; no layer does if not given.
        pub global_every: Option<usize>,
        /// With a window: the layers that ignore it, counted from 0, where they follow no period.
        pub global_layers: Option<Vec<usize>>,
        /// Scores are divided by the square root of this; the head size where not given.
        pub score_size: Option<usize>,
        /// The factor on scores, if it is not such a square root.
        pub score_scale: Option<f64>,
        /// Scores s become cap tanh(s / cap), which stays within the cap; unchanged if not given.
        pub score_cap: Option<f64>,
        /// The kind of position embeddings.
        pub positions: Positions = Positions::Rope,
        /// Number of token types, each with a learned vector that is added to the embedding; the second text of a pair has type 1.
        pub token_types: usize = 0,
        /// Base of the rotary frequencies.
        pub rope_theta: f64 = 1e4,
        /// Base of the rotary frequencies in local layers, which are not scaled; as in global layers if not given.
        pub rope_local_theta: Option<f64>,
        /// With a tower: the numbers of pairs of a head for time, height and width, which are interleaved.
        pub rope_sections: Option<[usize; 3]>,
        /// Elements of a head that rotate, the first ones; all where not given.
        pub rope_size: Option<usize>,
        /// Layers without rotation, by number from 0.
        pub unrotated_layers: Option<Vec<usize>>,
        /// The pairs of elements of a head that rotate together.
        pub rope_pairs: RopePairs = RopePairs::Half,
        /// The scaling of rotary frequencies for longer contexts.
        pub rope_scaling: RopeScaling = RopeScaling::None,
        /// The factor by which the context is longer; required by every scaling.
        pub rope_factor: Option<f64>,
        /// The context before scaling; required by every scaling except linear.
        pub rope_original_context: Option<usize>,
        /// llama3: pairs that turn less often than this in the original context are scaled.
        pub rope_low_freq_factor: f64 = 1.0,
        /// llama3: pairs that turn more often than this in the original context are kept.
        pub rope_high_freq_factor: f64 = 4.0,
        /// yarn: pairs that turn more often than this in the original context are kept.
        pub rope_beta_fast: f64 = 32.0,
        /// yarn: pairs that turn less often than this in the original context are scaled.
        pub rope_beta_slow: f64 = 1.0,
        /// yarn and longrope: factor on cosines and sines; the papers' function of rope_factor if not given.
        pub rope_attention_factor: Option<f64>,
        /// longrope: the divisor of each frequency in rows no longer than rope_original_context.
        pub rope_short_factors: Option<Vec<f64>>,
        /// longrope: the divisor of each frequency in longer rows.
        pub rope_long_factors: Option<Vec<f64>>,
        /// RMS norm of queries and keys, with a learned weight, before the rotation.
        pub qk_norm: bool = false,
        /// That norm is over each head, or over all heads of a token together.
        pub qk_norm_over: QkNormOver = QkNormOver::Head,
        /// The head shares the embedding's weights.
        pub tied: bool = true,
        /// The head on the last hidden states: logits of the next token, or of the class of the whole text.
        pub head: Head = Head::Tokens,
        /// Head of classes: the number of classes.
        pub classes: Option<usize>,
        /// Head of classes: the pooling of a text's hidden states.
        pub pooling: Pooling = Pooling::Mean,
        /// Head of classes: the layer between the pooled state and the classes.
        pub class_layer: ClassLayer = ClassLayer::None,
        /// Head of classes: the head has a bias.
        pub class_bias: bool = false,
        /// The model predicts no next token: only a head of classes can be put on it.
        pub encoder: bool = false,
        /// Head of classes: probability of dropping an element of the pooled state.
        pub head_dropout: f64 = 0.0,
        /// Factor on the embedding's rows at the input of the first block; not applied by a tied head.
        pub embed_scale: f64 = 1.0,
        /// Factor on each half block's output as it is added to the residual stream.
        pub residual_scale: f64 = 1.0,
        /// Logits of tokens are divided by it.
        pub logit_divisor: f64 = 1.0,
        /// Logits of tokens z become cap tanh(z / cap), which stays within the cap; unchanged if not given.
        pub logit_cap: Option<f64>,
        /// Probability of dropping an element of each half block's output.
        pub dropout: f64 = 0.0,
        /// Standard deviation of the initial weights.
        pub init_std: f64 = 0.02,
        /// Factor on init_std for the two products of a block that write to the residual stream; with 0 a block adds nothing at first.
        pub init_residual: f64 = 1.0,
        /// Factor on init_std for a head of its own; with 0 all tokens, or classes, are equally likely at first.
        pub init_head: f64 = 1.0,
        /// The family to export it as (`phi3`, `mistral`), where several have such a model; the first of them if not given.
        pub family: Option<String>,
        /// The vision tower; none if not given.
        pub vision: Option<Vision>,
        /// Initial weights, and the rest of this section: a Hugging Face folder, ORG/NAME[@revision] or RUN[@step].
        pub from: Option<String>,
    }
}

/// Texts have one type or two; published files have no more than a few.
const MAX_TYPES: usize = 1 << 10;

impl DecoderConfig {
    pub fn kv_heads(&self) -> usize {
        self.kv_heads.unwrap_or(self.heads)
    }

    pub fn head_size(&self) -> usize {
        self.head_size.unwrap_or_else(|| self.width / self.heads)
    }

    pub fn classes(&self) -> usize {
        self.classes.unwrap_or(0)
    }

    /// Positions of a token: one, or time, height and width where it may be an image's.
    pub fn position_axes(&self) -> usize {
        if self.rope_sections.is_some() { 3 } else { 1 }
    }

    /// Number of trained values. A tied head counts once.
    pub fn parameters(&self) -> u64 {
        let wide = |n: usize| n as u64;
        let (width, head_size) = (wide(self.width), wide(self.head_size()));
        let attention = width * head_size * (2 * wide(self.heads) + 2 * wide(self.kv_heads()));
        let ups = if self.activation.gated() { 2 } else { 1 };
        let feed_forward = width * wide(self.ffn) * (ups + 1);
        let qkv = head_size * (wide(self.heads) + 2 * wide(self.kv_heads()));
        let biases = match self.bias {
            Bias::None => 0,
            Bias::Qkv => qkv,
            Bias::Attention => qkv + width,
            Bias::All => qkv + width + ups * wide(self.ffn) + width,
            Bias::Ffn => ups * wide(self.ffn) + width,
        };
        let norm = if self.norm_bias { 2 * width } else { width };
        let around = [self.pre_norms, self.post_norms, self.residual_norms];
        let norms = 2 * norm * around.into_iter().map(u64::from).sum::<u64>();
        let of_embedding = norm * u64::from(self.embed_norm);
        let idle = norm * u64::from(self.pre_norms && !self.first_norm);
        let normed_heads = match self.qk_norm_over {
            QkNormOver::Head => 2,
            QkNormOver::Heads => wide(self.heads) + wide(self.kv_heads()),
        };
        let norms = norms + if self.qk_norm { normed_heads * head_size } else { 0 };
        let embedding = wide(self.vocab) * width;
        let head = match self.head {
            Head::Tokens if self.tied => 0,
            Head::Tokens => embedding,
            Head::Classes => {
                let layer = match self.class_layer {
                    ClassLayer::None => 0,
                    ClassLayer::Gelu => width * width + norm,
                    ClassLayer::Tanh | ClassLayer::Relu => width * width + width,
                };
                wide(self.classes()) * (width + u64::from(self.class_bias)) + layer
            }
        };
        let values = wide(self.value_embeddings) * (wide(self.vocab) + 2) * wide(self.kv_heads()) * head_size;
        let positions = if self.positions == Positions::Learned { wide(self.context) * width } else { 0 };
        let types = wide(self.token_types) * width;
        let last = norm * u64::from(!self.residual_norms);
        let vision = self.vision.as_ref().map_or(0, |vision| vision.parameters(self.width));
        let text = wide(self.layers) * (attention + feed_forward + biases + norms);
        text + last + of_embedding - idle + embedding + head + values + positions + types + vision
    }

    /// Whether a model of these dimensions exists; otherwise one sentence that names the key.
    pub fn validate(&self) -> Result<(), String> {
        bounds::extents(&[
            ("width", self.width, MAX_EXTENT),
            ("layers", self.layers, MAX_LAYERS),
            ("heads", self.heads, MAX_EXTENT),
            ("kv_heads", self.kv_heads(), MAX_EXTENT),
            ("head_size", self.head_size.unwrap_or(1), MAX_EXTENT),
            ("ffn", self.ffn, MAX_EXTENT),
            ("vocab", self.vocab, MAX_EXTENT),
            ("context", self.context, MAX_EXTENT),
        ])?;
        let Self { width, heads, .. } = *self;
        if self.head_size.is_none() && !width.is_multiple_of(heads) {
            return Err(format!(
                "`model.heads` = {heads} does not divide `model.width` = {width}: change one of them or give \
                 `model.head_size`"
            ));
        }
        let kv_heads = self.kv_heads();
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "`model.kv_heads` = {kv_heads} does not divide `model.heads` = {heads}: every key and value head \
                 serves the same number of query heads"
            ));
        }
        if heads.saturating_mul(self.head_size()) > MAX_EXTENT {
            let size = self.head_size();
            return Err(format!(
                "`model.heads` = {heads} of `model.head_size` = {size} are {} together, and {MAX_EXTENT} is the most",
                heads.saturating_mul(size)
            ));
        }
        let head_size = self.head_size();
        if self.positions == Positions::Rope && self.rope_size.is_none() && !head_size.is_multiple_of(2) {
            return Err(format!(
                "`model.head_size` is {head_size}, and rotary positions turn pairs, so it must be even"
            ));
        }
        if !self.pre_norms && !self.post_norms && !self.residual_norms {
            return Err(
                "`model.pre_norms` is false, and without `model.post_norms` or `model.residual_norms` no layer has a \
                 norm: set one of them"
                    .into(),
            );
        }
        if self.residual_norms && (self.pre_norms || self.post_norms) {
            return Err(
                "`model.residual_norms` are the only norms of a block: give `model.pre_norms`=false and no \
                        `model.post_norms` with them"
                    .into(),
            );
        }
        if self.token_types > MAX_TYPES {
            return Err(format!(
                "`model.token_types` is {} and may be {MAX_TYPES} at most",
                self.token_types
            ));
        }
        if self.qk_norm_over != QkNormOver::Head && !self.qk_norm {
            return Err(format!(
                "`model.qk_norm_over` is {} and `model.qk_norm` is false, which norms nothing",
                self.qk_norm_over
            ));
        }
        bounds::positive(&[
            ("norm_eps", self.norm_eps),
            ("rope_theta", self.rope_theta),
            ("embed_scale", self.embed_scale),
            ("residual_scale", self.residual_scale),
            ("logit_divisor", self.logit_divisor),
            ("logit_cap", self.logit_cap.unwrap_or(1.0)),
            ("score_cap", self.score_cap.unwrap_or(1.0)),
            ("init_std", self.init_std),
        ])?;
        for (key, factor) in [("init_residual", self.init_residual), ("init_head", self.init_head)] {
            if !(factor.is_finite() && factor >= 0.0) {
                return Err(format!("`model.{key}` is {factor} and must be a number of 0 or more"));
            }
        }
        if self.init_head != 1.0 && self.head == Head::Tokens && self.tied {
            return Err(
                "`model.init_head` is given and `model.tied` is true: the head is the embedding, so leave one of them out"
                    .into(),
            );
        }
        self.validate_value_embeddings()?;
        self.validate_rope()?;
        self.validate_window()?;
        self.validate_vision()?;
        if self.encoder && self.head == Head::Tokens {
            return Err(
                "`model.head` is tokens, and this model is an encoder, which predicts no next token: give \
                        model.head=classes"
                    .into(),
            );
        }
        let of_classes = [
            ("class_layer", self.class_layer != ClassLayer::None),
            ("class_bias", self.class_bias),
            ("token_types", self.token_types > 0),
        ];
        if let Some((key, _)) =
            of_classes.into_iter().find(|(_, given)| *given && !self.encoder && self.head == Head::Tokens)
        {
            return Err(format!("`model.{key}` has no use while `model.head` is tokens"));
        }
        if !self.first_norm && !self.pre_norms {
            return Err("`model.first_norm` has no use while `model.pre_norms` is false".into());
        }
        bounds::head(self.head, self.classes)?;
        if self.pooling == Pooling::ClsMean {
            return Err(
                "`model.pooling` is cls_mean, which only images have: mean, cls, last and max are a text's"
                    .into(),
            );
        }
        bounds::dropped(&[("dropout", self.dropout), ("head_dropout", self.head_dropout)])
    }
}

impl DecoderConfig {
    /// The table of learned values that a layer, counted from 0, reads: the first layers read the tables in order, and so do the
    /// last.
    pub fn value_table(&self, layer: usize) -> Option<usize> {
        let tables = self.value_embeddings;
        let last = self.layers - tables;
        if layer < tables { Some(layer) } else { layer.checked_sub(last) }
    }

    fn validate_value_embeddings(&self) -> Result<(), String> {
        let most = self.layers / 2;
        if self.value_embeddings > most {
            return Err(format!(
                "`model.value_embeddings` is {} and may be {most} at most with {} layers: every table serves one of the first \
                 layers and one of the last",
                self.value_embeddings, self.layers
            ));
        }
        if self.value_embeddings > 0 && self.vision.is_some() {
            return Err(
                "`model.value_embeddings` has no use with `model.vision`: tokens of images have no rows in its tables".into(),
            );
        }
        Ok(())
    }

    /// Whether a tower and the positions of a text with images go together; otherwise one sentence that names the key.
    fn validate_vision(&self) -> Result<(), String> {
        let Some(vision) = &self.vision else {
            return match self.rope_sections {
                None => Ok(()),
                Some(_) => {
                    Err("`model.rope_sections` has no use without `model.vision`: text has one position"
                        .into())
                }
            };
        };
        let sections = match (vision, self.rope_sections) {
            (Vision::Fovea(_), None) => None,
            (Vision::Fovea(_), Some(_)) => {
                return Err("`model.rope_sections` has no use with model.vision.kind=fovea: a frame is one \
                            token, and has one position"
                    .into());
            }
            (Vision::Qwen3Vl(_), None) => {
                return Err(
                    "`model.rope_sections` is missing: tokens of images have a time, a height and a width"
                        .into(),
                );
            }
            (Vision::Qwen3Vl(_), Some(sections)) => Some(sections),
        };
        vision.validate(self.layers, self.vocab)?;
        if vision.as_fovea().is_some_and(|tower| tower.from.is_some()) && self.from.is_none() {
            return Err(
                "`model.vision.from` is given without `model.from`: a tower that begins from a model stands \
                        beside a text that does"
                    .into(),
            );
        }
        let asked = [
            ("head", self.head == Head::Tokens, "tokens", self.head.to_string()),
            ("positions", self.positions == Positions::Rope, "rope", self.positions.to_string()),
            ("attention", self.attention == Attention::Causal, "causal", self.attention.to_string()),
        ];
        if let Some((key, _, wanted, value)) = asked.into_iter().find(|(_, fits, ..)| !fits) {
            return Err(format!("`model.{key}` is {value}, and with `model.vision` there is only {wanted}"));
        }
        let Some(sections) = sections else {
            return match self.dropout == 0.0 {
                true => Ok(()),
                false => Err(format!(
                    "`model.dropout` is {}, and with model.vision.kind=fovea nothing is dropped: leave it out",
                    self.dropout
                )),
            };
        };
        let half = self.head_size() / 2;
        if sections.contains(&0) || sections.iter().sum::<usize>() != half {
            return Err(format!(
                "`model.rope_sections` is {sections:?}, and must be three numbers above 0 whose sum is {half}, half of \
                 a head"
            ));
        }
        if let Some(long) = sections[1..].iter().find(|section| 3 * **section > half) {
            return Err(format!(
                "`model.rope_sections` has {long} for height or width, and of {half} pairs in threes they may have {} at most",
                half / 3
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_settings::{Section, ValueKind};

    fn pretrain() -> DecoderConfig {
        DecoderConfig {
            width: 768,
            layers: 32,
            heads: 12,
            kv_heads: Some(4),
            head_size: Some(64),
            ffn: 2048,
            vocab: 32768,
            context: 2048,
            qk_norm: true,
            ..DecoderConfig::default()
        }
    }

    #[test]
    fn the_226m_decoder_has_its_parameters() {
        assert_eq!(pretrain().parameters(), 226_546_432);
        assert_eq!(DecoderConfig { tied: false, ..pretrain() }.parameters(), 226_546_432 + 32768 * 768);
        let learned = DecoderConfig { positions: Positions::Learned, ..pretrain() };
        assert_eq!(learned.parameters(), 226_546_432 + 2048 * 768);
        let ungated = DecoderConfig { activation: Activation::GeluTanh, ..pretrain() };
        assert_eq!(ungated.parameters(), 226_546_432 - 32 * 768 * 2048);
    }

    /// GPT-2's own count: 124,439,808.
    #[test]
    fn gpt2_has_its_parameters() {
        let gpt2 = DecoderConfig {
            width: 768,
            layers: 12,
            heads: 12,
            ffn: 3072,
            vocab: 50257,
            context: 1024,
            norm: Norm::Layer,
            norm_bias: true,
            bias: Bias::All,
            activation: Activation::GeluTanh,
            positions: Positions::Learned,
            ..DecoderConfig::default()
        };
        assert_eq!(gpt2.validate(), Ok(()));
        assert_eq!(gpt2.parameters(), 124_439_808);
        let qkv = DecoderConfig { bias: Bias::Qkv, ..gpt2.clone() };
        assert_eq!(gpt2.parameters() - qkv.parameters(), 12 * (768 + 3072 + 768));
        let attention = DecoderConfig { bias: Bias::Attention, ..gpt2 };
        assert_eq!(attention.parameters() - qkv.parameters(), 12 * 768);
    }

    /// Gemma-3-1B's own count: 999,885,952; with a head of two classes the embedding serves once all the same.
    #[test]
    fn gemma3_1b_has_its_parameters() {
        let gemma = DecoderConfig {
            width: 1152,
            layers: 26,
            heads: 4,
            kv_heads: Some(1),
            head_size: Some(256),
            ffn: 6912,
            vocab: 262144,
            context: 512,
            norm_weight: NormWeights::OnePlus,
            post_norms: true,
            qk_norm: true,
            activation: Activation::Geglu,
            window: Some(512),
            global_every: Some(6),
            rope_local_theta: Some(1e4),
            rope_theta: 1e6,
            ..DecoderConfig::default()
        };
        assert_eq!(gemma.validate(), Ok(()));
        assert_eq!(gemma.parameters(), 999_885_952);
        let pairs = DecoderConfig { head: Head::Classes, classes: Some(2), ..gemma };
        assert_eq!(pairs.validate(), Ok(()));
        assert_eq!(pairs.parameters(), 999_885_952 + 2 * 1152);
    }

    /// Two tables of 12 layers, each read by one of the first two and one of the last two, with gains of 256 values.
    #[test]
    fn value_tables_serve_the_first_and_last_layers() {
        let with = DecoderConfig { layers: 12, value_embeddings: 2, ..pretrain() };
        assert_eq!(with.validate(), Ok(()));
        let tables: Vec<Option<usize>> = (0..12).map(|layer| with.value_table(layer)).collect();
        let none = [None; 8];
        assert_eq!(tables, [&[Some(0), Some(1)][..], &none, &[Some(0), Some(1)]].concat());
        let without = DecoderConfig { value_embeddings: 0, ..with.clone() };
        assert!((0..12).all(|layer| without.value_table(layer).is_none()));
        assert_eq!(with.parameters() - without.parameters(), 2 * 32768 * 256 + 4 * 256);
    }

    #[test]
    fn absent_head_counts_follow_from_the_others() {
        let config = DecoderConfig { kv_heads: None, head_size: None, ..pretrain() };
        assert_eq!((config.kv_heads(), config.head_size()), (12, 64));
        assert_eq!(config.validate(), Ok(()));
    }

    #[test]
    fn impossible_models_are_named_in_a_sentence() {
        let refused = |change: fn(&mut DecoderConfig), words: &str| {
            let mut config = pretrain();
            change(&mut config);
            let sentence = config.validate().expect_err(words);
            assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        };
        refused(|c| c.kv_heads = Some(5), "`model.kv_heads` = 5 does not divide `model.heads` = 12");
        refused(|c| (c.head_size, c.heads, c.kv_heads) = (None, 7, None), "give `model.head_size`");
        refused(|c| c.head_size = Some(63), "must be even");
        refused(|c| c.width = 0, "`model.width` is 0");
        refused(|c| c.heads = 0, "`model.heads` is 0");
        refused(|c| c.head_size = Some(0), "`model.head_size` is 0");
        refused(|c| c.layers = 1_000_000, "may be 4096 at most");
        refused(|c| (c.heads, c.head_size) = (1 << 20, Some(1 << 20)), "are 1099511627776 together");
        refused(|c| c.norm_eps = f64::NAN, "`model.norm_eps` is NaN");
        refused(|c| c.rope_theta = -1.0, "`model.rope_theta` is -1");
        refused(|c| c.init_std = 0.0, "`model.init_std` is 0");
        refused(|c| c.init_residual = -1.0, "`model.init_residual` is -1");
        refused(|c| (c.tied, c.init_head) = (false, f64::NAN), "`model.init_head` is NaN");
        refused(|c| c.init_head = 0.0, "`model.tied` is true");
        refused(|c| c.value_embeddings = 17, "may be 16 at most with 32 layers");
        refused(|c| c.dropout = 1.0, "`model.dropout` is 1");
        refused(|c| c.dropout = f64::NAN, "`model.dropout` is NaN");
        refused(|c| c.head_dropout = 1.5, "`model.head_dropout` is 1.5");
        refused(|c| c.classes = Some(2), "give model.head=classes");
        refused(|c| c.head = Head::Classes, "`model.classes` is missing");
        refused(|c| (c.head, c.classes) = (Head::Classes, Some(1)), "must be from 2 to 4096");
        refused(|c| c.residual_norms = true, "give `model.pre_norms`=false");
        refused(|c| c.pre_norms = false, "`model.residual_norms` no layer has a norm");
        refused(|c| c.token_types = 2, "`model.token_types` has no use while `model.head` is tokens");
        refused(|c| c.token_types = 5000, "`model.token_types` is 5000");
        let odd = DecoderConfig { head_size: Some(63), positions: Positions::None, ..pretrain() };
        assert_eq!(odd.validate(), Ok(()), "only rotary positions need pairs");
    }

    #[test]
    fn the_declaration_gives_keys_and_choices() {
        let keys = DecoderConfig::keys();
        let key = |name: &str| keys.iter().find(|key| key.name == name).unwrap().clone();
        assert!(key("width").required && !key("width").optional);
        assert!(key("kv_heads").optional && !key("kv_heads").required);
        assert!(!key("norm").required);
        assert_eq!(key("norm").kind, ValueKind::Choice(&["rms", "layer"]));
        assert_eq!(key("ffn").doc, "Inner size of the feed-forward.");
        assert_eq!("relu2".parse(), Ok(Activation::Relu2));
        assert_eq!(Activation::Relu2.to_string(), "relu2");
        assert_eq!(
            "tanh".parse::<Activation>(),
            Err("`tanh` is not one of swiglu, geglu, gelu_tanh, gelu_exact, relu2, geglu_exact, quick_gelu"
                .into())
        );
    }
}
