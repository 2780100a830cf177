//! Qwen3-VL's tower, which sees images of any size: patches with interpolated positions, pre-norm blocks in which every patch
//! of an image sees every other, and mergers that turn each block of patches into one row of the text's width.
//!
//! P patches of I images, D width, H heads, K head size, M patches per merge block, W width of the text.

mod config;
pub mod features;
mod merger;

pub use config::Qwen3VlConfig;

use flatout_ir::ops::attention::Mask;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::rope::{Pairs, RopeSpec};
use flatout_ir::{Builder, DType, Init, SlotId, Tensor};

use self::merger::{Merger, Normed};
use super::{Features, SCOPE};
use crate::config::Activation;
use crate::form::SeenPatches;
use crate::images::CHANNELS;
use crate::layers::patches::{PixelNormalisation, project};
use crate::layers::{Attention, FeedForward, Heads, Linear, Norm, Rotation, Sight, bounds, weight};

/// Number of learned positions that bilinear interpolation reads.
pub const TAPS: usize = 4;

/// The parameters, declared once.
#[derive(Clone, Debug)]
pub struct Weights {
    patch: Linear,
    /// Positions of a square grid, row by row: [side side, D].
    positions: SlotId,
    blocks: Vec<Block>,
    merger: Merger,
    deepstack: Vec<Merger>,
}

#[derive(Clone, Debug)]
struct Block {
    attn_norm: Norm,
    attn: Attention,
    ffn_norm: Norm,
    ffn: FeedForward,
}

/// The inputs that the host writes before a run.
pub struct Inputs<'g> {
    /// u8 [P, rows columns 3], ordered by merge block.
    patches: Tensor<'g>,
    /// The row and column of every patch in its image: i32 [2, P].
    places: Tensor<'g>,
    /// The learned positions to interpolate, i32 [4, P], and their weights, f32 [4, P].
    taps: Tensor<'g>,
    tap_weights: Tensor<'g>,
    /// The first patch and the number of patches of each image: i32 [I] each.
    images: (Tensor<'g>, Tensor<'g>),
    /// Maximum number of patches per image.
    largest: usize,
}

/// Declares every parameter under the scope `vision`.
pub fn weights(b: &Builder, v: &Qwen3VlConfig, text_width: usize, init_std: f64) -> Weights {
    let init = Init::Normal { std: init_std as f32 };
    let merger =
        |name: &str, normed: Normed| b.scope(name, || Merger::declare(b, v, normed, text_width, init));
    b.scope(SCOPE, || Weights {
        patch: Linear::scoped(b, "patch", [v.width, v.time_patch * v.patch_values()], init, Init::Zeros),
        positions: b.scope("positions", || weight(b, "weight", &[v.positions * v.positions, v.width], init)),
        blocks: (0..v.layers)
            .map(|i| b.scope(&format!("layers.{i}"), || Block::declare(b, v, init)))
            .collect(),
        merger: merger("merger", Normed::Patches),
        deepstack: (0..v.deepstack.len())
            .map(|i| merger(&format!("deepstack.{i}"), Normed::Blocks))
            .collect(),
    })
}

fn norm_spec(v: &Qwen3VlConfig) -> NormSpec {
    NormSpec { eps: v.norm_eps as f32, center: true, weight: NormWeight::Plain, bias: true }
}

impl<'g> Inputs<'g> {
    pub fn new(b: &'g Builder, v: &Qwen3VlConfig, seen: SeenPatches) -> Inputs<'g> {
        let SeenPatches { patches, images, .. } = seen;
        assert!(patches.is_multiple_of(v.block()), "{patches} patches are not whole blocks of {}", v.block());
        Inputs {
            patches: b.input("patches", DType::U8, &[patches, v.patch_values()]),
            places: b.input("patch_places", DType::I32, &[2, patches]),
            taps: b.input("taps", DType::I32, &[TAPS, patches]),
            tap_weights: b.input("tap_weights", DType::F32, &[TAPS, patches]),
            images: bounds(b, "image", images),
            largest: seen.largest.min(patches),
        }
    }
}

/// The features of images. Patches outside images give rows that nothing reads.
pub fn apply<'g>(b: &'g Builder, v: &Qwen3VlConfig, w: &Weights, inputs: &Inputs<'g>) -> Features<'g> {
    b.scope(SCOPE, || {
        let mut x = embed(b, v, w, inputs);
        let rotation = Rotation {
            positions: inputs.places,
            spec: RopeSpec::grid(v.head_size(), v.rope_theta, Pairs::Half),
        };
        let sight = Sight::ragged(inputs.images, inputs.largest);
        let mut deep = vec![];
        for (i, block) in w.blocks.iter().enumerate() {
            x = b.scope(&format!("layers.{i}"), || block.apply(b, i, x, &rotation, &sight));
            if let Some(nth) = v.deepstack.iter().position(|at| *at == i) {
                deep.push(b.scope(&format!("deepstack.{nth}"), || w.deepstack[nth].apply(b, x)));
            }
        }
        Features { main: b.scope("merger", || w.merger.apply(b, x)), deep, states: None }
    })
}

/// Patches [P, D] with their positions.
fn embed<'g>(b: &'g Builder, v: &Qwen3VlConfig, w: &Weights, inputs: &Inputs<'g>) -> Tensor<'g> {
    let count = inputs.patches.dims()[0];
    let x = b.scope("patch", || {
        let normal = PixelNormalisation::new(b, &v.mean, &v.std);
        let pixels = inputs.patches.reshape(&[count, v.patch * v.patch, CHANNELS]).cast(DType::F32);
        let frame = normal.of(pixels).reshape(&[count, v.patch_values()]);
        // A still image is repeated for every frame of its patches.
        project(b, &w.patch, b.concat(&vec![frame; v.time_patch], 1))
    });
    b.scope("positions", || {
        let table = b.read(w.positions);
        (0..TAPS).fold(x, |sum, tap| {
            let rows = table.gather(inputs.taps.slice(0, tap, 1).reshape(&[count]));
            sum + rows * inputs.tap_weights.slice(0, tap, 1).reshape(&[count, 1])
        })
    })
}

impl Block {
    fn declare(b: &Builder, v: &Qwen3VlConfig, init: Init) -> Block {
        let (d, k) = (v.width, v.head_size());
        let heads = Heads::plain(v.heads, k);
        let norm = |name: &str| Norm::declare(b, name, d, norm_spec(v));
        Block {
            attn_norm: norm("attn_norm"),
            attn: b.scope("attn", || Attention::declare(b, d, heads, None, [true; 2], [init; 2])),
            ffn_norm: norm("ffn_norm"),
            ffn: b
                .scope("ffn", || FeedForward::declare(b, [d, v.ffn], Activation::GeluTanh, true, [init; 2])),
        }
    }

    fn apply<'g>(
        &self,
        b: &'g Builder,
        layer: usize,
        x: Tensor<'g>,
        rotation: &Rotation<'g>,
        sight: &Sight<'g>,
    ) -> Tensor<'g> {
        let norm = |name: &str, norm: &Norm, x: Tensor<'g>| b.scope(name, || norm.apply(b, x));
        let normed = norm("attn_norm", &self.attn_norm, x);
        let x = x + b.scope("attn", || self.attn.apply(b, normed, layer, Some(rotation), sight, Mask::Full));
        let normed = norm("ffn_norm", &self.ffn_norm, x);
        x + b.scope("ffn", || self.ffn.apply(b, normed))
    }
}

#[cfg(test)]
mod tests {
    use flatout_ir::{Graph, Op};

    use super::*;
    use crate::config::DecoderConfig;
    use crate::decoder::build;
    use crate::form::{Form, ImageExtents, LossForm};
    use crate::vision::Vision;

    /// The key of every dropout, by path.
    fn drawn(graph: &Graph) -> Vec<(String, u64)> {
        let draws = graph.nodes.iter().filter(|node| matches!(node.op, Op::Dropout { .. }));
        draws.map(|node| (node.path.clone(), node.key)).collect()
    }

    #[test]
    fn a_text_draws_the_same_beside_images() {
        let vision = Qwen3VlConfig {
            width: 8,
            layers: 2,
            heads: 2,
            ffn: 6,
            patch: 2,
            positions: 3,
            deepstack: vec![0],
            image_token: 1,
            video_token: 2,
            start_token: 3,
            end_token: 4,
            ..Qwen3VlConfig::default()
        };
        let model = DecoderConfig {
            width: 8,
            layers: 2,
            heads: 2,
            head_size: Some(16),
            ffn: 6,
            vocab: 10,
            context: 8,
            dropout: 0.1,
            rope_sections: Some([4, 2, 2]),
            vision: Some(Vision::Qwen3Vl(vision)),
            ..DecoderConfig::default()
        };
        assert_eq!(model.validate(), Ok(()));
        let graph = |seen: Option<ImageExtents>| {
            build(&model, Form::Loss(LossForm { dropout: true, seen, ..LossForm::rows(1, 8) }))
        };
        let seen = ImageExtents::Patches(SeenPatches { patches: 8, images: 2, largest: 8 });
        let (alone, beside) = (graph(None), graph(Some(seen)));
        assert_eq!(drawn(&alone), drawn(&beside));
        assert_eq!(drawn(&alone).len(), 5);
        let keys = |graph: &Graph| graph.nodes.iter().filter(|node| node.path.starts_with(SCOPE)).count();
        assert!(keys(&alone) == 0 && keys(&beside) > 0);
    }
}
