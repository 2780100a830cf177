//! Merges blocks of patches to rows of the text's width: four patches side by side, two products with an exact GELU between.

use flatout_ir::ops::gated::Act;
use flatout_ir::{Builder, Init, Tensor};

use super::{Qwen3VlConfig, norm_spec};
use crate::layers::{Linear, Norm};

/// Whether the norm is over patches, before they are concatenated, or over blocks of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normed {
    Patches,
    Blocks,
}

#[derive(Clone, Debug)]
pub struct Merger {
    normed: Normed,
    norm: Norm,
    up: Linear,
    down: Linear,
    /// Number of values of a block.
    merged: usize,
}

impl Merger {
    /// Declares `norm`, `up` and `down` under the current scope.
    pub fn declare(b: &Builder, v: &Qwen3VlConfig, normed: Normed, text_width: usize, init: Init) -> Merger {
        let merged = v.block() * v.width;
        let size = if normed == Normed::Patches { v.width } else { merged };
        Merger {
            normed,
            norm: Norm::declare(b, "norm", size, norm_spec(v)),
            up: Linear::named(b, "up", [merged, merged], init, true),
            down: Linear::named(b, "down", [text_width, merged], init, true),
            merged,
        }
    }

    /// States [P, D] to [P / M, W].
    pub fn apply<'g>(&self, b: &'g Builder, x: Tensor<'g>) -> Tensor<'g> {
        let dims = x.dims();
        let blocks = [dims[0] * dims[1] / self.merged, self.merged];
        let x = match self.normed {
            Normed::Patches => self.norm.apply(b, x).reshape(&blocks),
            Normed::Blocks => self.norm.apply(b, x.reshape(&blocks)),
        };
        self.down.apply(b, self.up.apply(b, x).activate(Act::GeluExact))
    }
}
