//! The forms a model's graph is built in: the results it computes, with its static extents.

use crate::objectives::preference::Preference;

/// T tokens of the batch, V vocabulary, S sequences or texts, C classes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// The loss of tokens.
    Loss(LossForm),
    /// Result `logits` [T, V] of rows of `len` tokens.
    Logits { rows: usize, len: usize, seen: Option<ImageExtents> },
    /// Results `logits` [R, V] of R tokens that are `read`, and `drawn` [R, 2], what follows each as the inputs `numbers` and
    /// `shares` say (`flatout_ir::ops::sample`). Given are up to `tokens` new ones of all `sequences`, after those in a cache of
    /// `capacity` a sequence; a plan of as many tokens as sequences adds one to each. Who only goes on from the new tokens reads
    /// the last of each sequence; who scores them reads them all. The plan that reads prompts has `seen`; the one that goes on
    /// from them needs no image again.
    Cached { sequences: usize, tokens: usize, capacity: usize, read: usize, seen: Option<ImageExtents> },
    /// Of a head of classes: results `loss` and `weight`, the weighted sum over texts and the sum of their weights, and
    /// `class_logits` [S, C] where nothing is dropped. S `texts` of at most `longest` tokens lie anywhere among all `tokens`.
    Classes { tokens: usize, texts: usize, longest: usize, dropout: bool },
    /// Of images.
    Images(ImageForm),
}

/// A batch of tokens. Results are `loss`, the weighted sum over all of them, and `weight`, the sum of the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossForm {
    pub rows: usize,
    /// Tokens of a row.
    pub len: usize,
    pub documents: Documents,
    /// The loss is taken at this number of tokens alone, which the input `answers` names; -1 names none.
    pub read: Option<usize>,
    /// Behind its attention the last block of a decoder runs at the rows that are read, and not at every row.
    pub trims_last: bool,
    /// No token sees further than this, whatever the layer: itself and the tokens before it.
    pub window: Option<usize>,
    /// Dropout is applied.
    pub dropout: bool,
    pub seen: Option<ImageExtents>,
    /// The features of the images that are seen are an input: the graph has no tower.
    pub features_given: bool,
    /// Also the results `logp` and `best_logp` of each token that is read: its log-probability, and the largest there is; or,
    /// of answers that are compared, `answer_logp` of each answer.
    pub scored: bool,
    /// The loss compares answers, and does not predict tokens.
    pub preference: Option<Preference>,
}

impl LossForm {
    /// Rows that are one sequence each, with the loss of every token, nothing dropped and no images.
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

/// Images among the tokens, of a decoder that has a tower. A graph without them has no tower. All gradient plans of a run
/// update the same parameters, so one whose tower is trained has it in every plan, if only of one block or image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageExtents {
    /// Of a `qwen3_vl` tower.
    Patches(SeenPatches),
    /// Of a `fovea` tower.
    Frames(SeenFrames),
}

/// Images of any size, cut into patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenPatches {
    /// The most patches, whole merge blocks.
    pub patches: usize,
    /// The most images.
    pub images: usize,
    /// The most patches of an image.
    pub largest: usize,
}

/// Frames of videos, each a row of the text; a still image may be several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenFrames {
    /// The most images that are encoded, each once however many frames it is.
    pub images: usize,
    /// The most frames.
    pub frames: usize,
    /// The most samples that have frames.
    pub videos: usize,
    /// The most frames of a sample.
    pub longest: usize,
    /// The most frames that are one image.
    pub repeats: usize,
}

impl SeenFrames {
    /// The next frame of each sequence, as generation looks at them.
    pub fn next_of(sequences: usize) -> SeenFrames {
        SeenFrames { images: sequences, frames: sequences, videos: sequences, longest: 1, repeats: sequences }
    }
}

/// Whether tokens see earlier documents of their row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Documents {
    /// A row is one sequence.
    Joined,
    /// At most this many documents in the batch, each a segment of its own.
    Apart { most: usize },
    /// At most this many trees of at most `longest` tokens each: examples behind a prefix that they share. The input
    /// `intervals` names the rows that each token sees.
    Trees { most: usize, longest: usize },
}

/// A batch of images. Results are `loss`, the weighted sum over images, `weight`, the sum of their weights,
/// and, where nothing is drawn, `class_logits` [B, C].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageForm {
    /// Images of the batch, B.
    pub images: usize,
    /// Whether random drops are applied: dropout and drop path.
    pub dropout: bool,
    /// The share of a target that is spread over all classes.
    pub smoothing: f64,
    /// Images are mixed with others of the batch: inputs `mix_with`, `mix_share` and `mix_box` say with which and how.
    pub mix: bool,
    /// Extents of a table of images on the device, from which pixels are cut: the input `parts` says which.
    pub table: Option<[usize; 3]>,
}

impl ImageForm {
    /// Images as they are, for evaluation.
    pub fn plain(images: usize) -> ImageForm {
        ImageForm { images, dropout: false, smoothing: 0.0, mix: false, table: None }
    }
}
