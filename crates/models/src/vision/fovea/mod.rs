//! The foveated tower: a DINOv2 that encodes every image once, and one query per frame that reads it, so that a frame is one
//! token of the text. A first look has the same query for every frame; from the text model's states for these tokens, the tower
//! then builds the queries with which the following frames are looked at again.
//!
//! U images, F frames of them, N tokens per image (patches and the class token), D width, H heads, K head size, Q query size, E
//! width of the text.

mod config;

pub use config::{FoveaConfig, Look};

use flatout_ir::ops::attention::{Masking, Segments};
use flatout_ir::{Builder, Class, DType, Init, SlotId, Tensor};

use super::{Features, SCOPE, TextBody};
use crate::form::SeenFrames;
use crate::images::CHANNELS;
use crate::layers::patches::patches;
use crate::layers::{Linear, Sight, bounds, row, weight};
use crate::vit::{self, VitConfig};

/// The parameters, declared once.
#[derive(Clone, Debug)]
pub struct Weights {
    vit: vit::Weights,
    /// Projects a query to the width of the blocks, [D, Q].
    look: Linear,
    /// Projects what a query has read, [D, D].
    seen: Linear,
    to_text: Linear,
    /// Projects a state of the text to the next frame's query, [Q, E].
    to_query: Linear,
    /// The query of every first look, [Q].
    q_static: SlotId,
    /// The query of the first frame's second look, [Q].
    q_init: SlotId,
}

/// The inputs that the host writes before a run.
pub struct Inputs<'g> {
    /// u8 [U, rows, columns, 3]
    pixels: Tensor<'g>,
    /// Inputs of the second look; `None` where the text reads the first.
    fine: Option<Fine<'g>>,
}

/// The inputs of the second look at frames, which are ordered by image.
struct Fine<'g> {
    /// The first frame and the number of frames of each image: i32 [U] each.
    looks: (Tensor<'g>, Tensor<'g>),
    /// Maximum number of frames per image.
    repeats: usize,
    /// The row of states that each frame's query is built from; the row after the last for the first query: i32 [F].
    previous: Tensor<'g>,
    states: States<'g>,
}

/// The source of the states that queries are built from.
enum States<'g> {
    /// A pass of the text model over first looks, whose frames are ordered by sample.
    Coarse {
        /// The image of each frame, i32 [F].
        images: Tensor<'g>,
        /// i32 [1, F]
        positions: Tensor<'g>,
        /// The first frame and the number of frames of each sample.
        videos: (Tensor<'g>, Tensor<'g>),
        longest: usize,
    },
    /// The cache, which has the last state of each sequence.
    Kept(usize),
}

/// Keys and values [U N, H, K] of every layer.
type Memory<'g> = Vec<[Tensor<'g>; 2]>;

/// Declares every parameter under the scope `vision`. The weights that connect the two models are initialised like PyTorch's
/// linear layers.
pub fn weights(b: &Builder, v: &FoveaConfig, text_width: usize, init_std: f64) -> Weights {
    let even = |inner: usize| Init::Uniform { bound: 1.0 / (inner as f32).sqrt() };
    let linear = |name: &str, [out, inner]: [usize; 2]| {
        Linear::scoped(b, name, [out, inner], even(inner), even(inner))
    };
    let query = |name: &str| weight(b, name, &[v.query], Init::Normal { std: 1.0 });
    b.scope(SCOPE, || Weights {
        vit: vit::weights(b, &VitConfig { init_std, ..v.vit() }),
        look: b.scope("look", || Linear::named(b, "weight", [v.width, v.query], even(v.query), false)),
        seen: linear("seen", [v.width, v.width]),
        to_text: linear("to_text", [text_width, v.width]),
        to_query: linear("to_query", [v.query, text_width]),
        q_static: query("q_static"),
        q_init: query("q_init"),
    })
}

impl<'g> Inputs<'g> {
    /// The inputs of a graph with a cache of `cached` sequences, or of one with all earlier tokens.
    pub fn new(b: &'g Builder, v: &FoveaConfig, seen: SeenFrames, cached: Option<usize>) -> Inputs<'g> {
        let SeenFrames { images, frames, videos, longest, repeats } = seen;
        let i32s = |name: &str, dims: &[usize]| b.input(name, DType::I32, dims);
        let coarse = || States::Coarse {
            images: i32s("frame_images", &[frames]),
            positions: i32s("frame_positions", &[1, frames]),
            videos: bounds(b, "video", videos),
            longest: longest.min(frames),
        };
        Inputs {
            pixels: b.input("pixels", DType::U8, &[images, v.image_size, v.image_size, CHANNELS]),
            fine: (v.mode == Look::Fine).then(|| Fine {
                looks: bounds(b, "look", images),
                repeats: repeats.min(frames),
                previous: i32s("previous", &[frames]),
                states: cached.map_or_else(coarse, States::Kept),
            }),
        }
    }
}

/// The tokens of frames [F, E], ordered by image; of first looks [U, E]. Frames and images outside samples give rows that
/// nothing reads.
pub fn apply<'g>(
    b: &'g Builder,
    v: &FoveaConfig,
    w: &Weights,
    inputs: &Inputs<'g>,
    beside: &TextBody<'_, 'g>,
) -> Features<'g> {
    let memory = b.scope(SCOPE, || b.scope("patches", || encode_images(b, v, w, inputs.pixels)));
    let tokens = v.vit().tokens();
    let look = |name: &str, queries: Tensor<'g>, sight: &Sight<'g>| {
        b.scope(SCOPE, || b.scope(name, || look(b, v, w, queries, &memory, sight)))
    };
    let coarse = || {
        let images = inputs.pixels.dims()[0];
        let query = b.scope(SCOPE, || row(b.read(w.q_static)).broadcast(&[images, v.query]));
        look("coarse", query, &one_query_per_image(tokens))
    };
    let Some(fine) = &inputs.fine else {
        return Features { main: coarse(), deep: vec![], states: None };
    };
    let (states, kept) = match &fine.states {
        States::Coarse { images, positions, videos, longest } => {
            let rows = coarse().gather(*images);
            let states =
                b.scope("coarse", || (beside.body)(rows, *positions, Sight::ragged(*videos, *longest)));
            (states, None)
        }
        States::Kept(sequences) => {
            let dims = [*sequences, beside.width];
            let slot = b.slot("cache.states", Class::Cache, DType::F32, &dims, Init::Zeros);
            (b.read(slot), Some(slot))
        }
    };
    let queries = b.scope(SCOPE, || {
        let made = b.scope("to_query", || w.to_query.apply(b, states));
        b.concat(&[made, row(b.read(w.q_init))], 0).gather(fine.previous)
    });
    let sight = queries_per_image(fine.looks, fine.repeats, tokens);
    Features { main: look("fine", queries, &sight), deep: vec![], states: kept }
}

fn one_query_per_image<'g>(tokens: usize) -> Sight<'g> {
    Sight { k: Segments::Uniform { len: tokens }, ..Sight::rows(1) }
}

/// Several queries per image, at (start, len) i32 [U].
fn queries_per_image<'g>(looks: (Tensor<'g>, Tensor<'g>), repeats: usize, tokens: usize) -> Sight<'g> {
    Sight {
        q: Segments::Ragged { max_segments: looks.0.dims()[0], max_len: repeats },
        k: Segments::Uniform { len: tokens },
        masking: Masking { q: Some(looks), k: None, intervals: None },
        cache: None,
    }
}

/// Keys and values of every layer, for pixels u8 [U, rows, columns, 3]. The rest of the last layer is not computed.
fn encode_images<'g>(b: &'g Builder, v: &FoveaConfig, w: &Weights, pixels: Tensor<'g>) -> Memory<'g> {
    let c = v.vit();
    let cut = b.scope("patch", || patches(pixels, None, c.patch, &c.mean, &c.std));
    let mut x = vit::embed(b, &c, &w.vit, cut);
    let mut memory = vec![];
    for (i, block) in w.vit.blocks.iter().enumerate() {
        memory.push(b.scope(&format!("layers.{i}"), || {
            if i + 1 == c.layers {
                return block.keys_values(b, x);
            }
            let (next, kept) = block.apply_keeping(b, &c, i, x);
            x = next;
            kept
        }));
    }
    memory
}

/// Turns queries [R, Q] into tokens of the text [R, E]: each reads every layer's keys and values of its image.
fn look<'g>(
    b: &'g Builder,
    v: &FoveaConfig,
    w: &Weights,
    queries: Tensor<'g>,
    memory: &Memory<'g>,
    sight: &Sight<'g>,
) -> Tensor<'g> {
    let c = v.vit();
    let mut x = b.scope("look", || w.look.apply(b, queries));
    for (i, (block, kept)) in w.vit.blocks.iter().zip(memory).enumerate() {
        x = b.scope(&format!("layers.{i}"), || block.look(b, &c, i, x, *kept, sight));
    }
    let norm = w.vit.norm.expect("its tower has a final norm");
    let x = b.scope("norm", || norm.apply(b, x));
    let x = b.scope("seen", || w.seen.apply(b, x));
    b.scope("to_text", || w.to_text.apply(b, x).scale(v.visual_scale))
}

/// Writes the last state of every sequence with new tokens, from states x [T, E], to `slot`, which `apply` reads.
pub fn keep_states<'g>(b: &'g Builder, slot: SlotId, x: Tensor<'g>, (start, len): (Tensor<'g>, Tensor<'g>)) {
    let sequences = start.dims();
    let last = (start + len).offset(-1.0);
    let none = b.fill(-1.0, DType::I32, &sequences);
    let is_new = b.fill(1.0, DType::I32, &sequences).less_equal(len);
    let place = is_new.select(b.iota(DType::I32, &sequences, 0), none);
    let states = x.gather(is_new.select(last, none));
    b.write(slot, b.read(slot).row_scatter(states, place));
}
