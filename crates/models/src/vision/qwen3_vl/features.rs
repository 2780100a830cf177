//! The features of images: computed by a tower for a text in the same graph, computed in a graph of the tower alone, or read
//! from an input that an earlier run of that graph computed.

use flatout_ir::{Builder, DType, Graph, Tensor};

use super::{Inputs, Qwen3VlConfig, apply, weights};
use crate::decoder::DecoderConfig;
use crate::form::SeenPatches;
use crate::vision::{Features, Vision};

/// The input of a text with given features, and the result of a tower alone: [1 + L, P / M, W], with L levels of DeepStack.
pub const FEATURES: &str = "features";
/// The input of a tower alone that selects rows of its features, i32 [P / M]; -1 gives zeros.
pub const ROWS: &str = "rows";

/// Features that the host writes; the graph has no tower.
pub fn given<'g>(b: &'g Builder, v: &Qwen3VlConfig, seen: SeenPatches, text_width: usize) -> Features<'g> {
    let rows = seen.patches / v.block();
    let all = b.input(FEATURES, DType::F32, &[v.feature_levels(), rows, text_width]);
    let level = |level: usize| all.slice(0, level, 1).reshape(&[rows, text_width]);
    Features { main: level(0), deep: (1..v.feature_levels()).map(level).collect(), states: None }
}

/// A tower without a text, whose result is the features of its images. They are gathered by row, as a text gathers them, so a
/// text reads the same bits.
pub fn build(c: &DecoderConfig, seen: SeenPatches) -> Graph {
    let v = c.vision.as_ref().and_then(Vision::as_qwen3_vl).expect("only this tower's features are kept");
    let b = Builder::new();
    let w = weights(&b, v, c.width, c.init_std);
    let inputs = Inputs::new(&b, v, seen);
    let rows = seen.patches / v.block();
    let wanted = b.input(ROWS, DType::I32, &[rows]);
    let Features { main, deep, .. } = apply(&b, v, &w, &inputs);
    let levels: Vec<Tensor<'_>> =
        [main].into_iter().chain(deep).map(|x| x.gather(wanted).reshape(&[1, rows, c.width])).collect();
    b.result(FEATURES, b.concat(&levels, 0));
    b.finish()
}
