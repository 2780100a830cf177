//! The forms in which a model's graph is built: the results that it computes, with static extents.

use crate::objectives::preference::Preference;

/// T tokens in the batch, V vocabulary, S sequences or texts, C classes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// The loss over tokens.
    Loss(LossForm),
    /// Result `logits` [T, V] for rows of `len` tokens.
    Logits { rows: usize, len: usize, seen: Option<ImageExtents> },
    /// Results `logits` [R, V] for R tokens that are `read`, and `drawn` [R, 2], the token sampled after each by the inputs
    /// `numbers` and `shares` (`flatout_ir::ops::sample`). The inputs are up to `tokens` new tokens of all `sequences`, after
    /// those in a cache of `capacity` per sequence; a plan with as many tokens as sequences adds one to each. Generation reads
    /// the last new token of each sequence; scoring reads all of them. The plan that reads prompts has `seen`; the one that
    /// continues them needs no image again.
    Cached { sequences: usize, tokens: usize, capacity: usize, read: usize, seen: Option<ImageExtents> },
    /// For a head of classes: results `loss` and `weight`, the weighted sum over texts and the sum of their weights, and
    /// `class_logits` [S, C] without dropout. S `texts` of at most `longest` tokens lie anywhere among all `tokens`.
    Classes { tokens: usize, texts: usize, longest: usize, dropout: bool },
    /// For images.
    Images(ImageForm),
}

/// A batch of tokens. Results are `loss`, the weighted sum over all of them, and `weight`, the sum of the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossForm {
    pub rows: usize,
    /// Number of tokens per row.
    pub len: usize,
    pub documents: Documents,
    /// The loss is computed only at this number of tokens, which the input `answers` names; -1 names none.
    pub read: Option<usize>,
    /// Whether the last block of a decoder runs, after its attention, only at the rows that are read.
    pub trims_last: bool,
    /// The most tokens that a token sees in any layer: itself and those before it.
    pub window: Option<usize>,
    pub dropout: bool,
    pub seen: Option<ImageExtents>,
    /// Whether the features of images are an input, so that the graph has no tower.
    pub features_given: bool,
    /// Whether there are also the results `logp` and `best_logp` for each token that is read, its log-probability and the row's
    /// largest; or, for compared answers, `answer_logp` for each answer.
    pub scored: bool,
    /// The loss compares answers instead of predicting tokens.
    pub preference: Option<Preference>,
}

impl LossForm {
    /// Rows of one sequence each, with the loss of every token, without dropout and images.
    pub const fn rows(rows: usize, len: usize) -> LossForm {
        LossForm {
            rows,
            len,
            documents: Documents::Joined,
            read: None,
            trims_last: false,
            window: None,
            dropout: false,
            seen: None,
            features_given: false,
            scored: false,
            preference: None,
        }
    }
}

/// Images among the tokens, for a decoder with a tower; a graph without them has no tower. All gradient plans of a run update
/// the same parameters, so with a trained tower every plan needs it, if only for one block or image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageExtents {
    /// For a `qwen3_vl` tower.
    Patches(SeenPatches),
    /// For a `fovea` tower.
    Frames(SeenFrames),
}

/// Images of any size, divided into patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenPatches {
    /// Maximum number of patches, in whole merge blocks.
    pub patches: usize,
    /// Maximum number of images.
    pub images: usize,
    /// Maximum number of patches per image.
    pub largest: usize,
}

/// Frames of videos, each a row of the text; a still image may be several frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenFrames {
    /// Maximum number of images that are encoded. Each is encoded once, however many frames show it.
    pub images: usize,
    /// Maximum number of frames.
    pub frames: usize,
    /// Maximum number of samples with frames.
    pub videos: usize,
    /// Maximum number of frames per sample.
    pub longest: usize,
    /// Maximum number of frames that show one image.
    pub repeats: usize,
}

impl SeenFrames {
    /// The next frame of each sequence, for generation.
    pub fn next_of(sequences: usize) -> SeenFrames {
        SeenFrames { images: sequences, frames: sequences, videos: sequences, longest: 1, repeats: sequences }
    }
}

/// Whether tokens see earlier documents of their row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Documents {
    /// Each row is one sequence.
    Joined,
    /// At most this many documents in the batch, each its own segment.
    Apart { most: usize },
    /// At most this many trees of at most `longest` tokens each: examples after a shared prefix. The input `intervals` has the
    /// rows that each token sees.
    Trees { most: usize, longest: usize },
}

/// A batch of images. Results are `loss`, the weighted sum over images, `weight`, the sum of their weights, and, without
/// dropout, `class_logits` [B, C].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageForm {
    /// Number of images in the batch, B.
    pub images: usize,
    /// Whether dropout and drop path are applied.
    pub dropout: bool,
    /// Fraction of a target that is spread over all classes.
    pub smoothing: f64,
    /// Whether images are mixed with others of the batch, as the inputs `mix_with`, `mix_share` and `mix_box` say.
    pub mix: bool,
    /// The extents of a table of images on the device from which pixels are cropped, as the input `parts` says.
    pub table: Option<[usize; 3]>,
}

impl ImageForm {
    /// Unmodified images, for evaluation.
    pub fn plain(images: usize) -> ImageForm {
        ImageForm { images, dropout: false, smoothing: 0.0, mix: false, table: None }
    }
}
