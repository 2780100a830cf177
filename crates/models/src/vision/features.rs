//! The features of images: what a tower makes for the text, in the same graph, alone in a graph of its own, or as an input
//! that an earlier run of that graph gave.

use flatout_ir::{Builder, DType, Graph, Tensor};

use super::{Inputs, Vision, apply, weights};
use crate::decoder::DecoderConfig;
use crate::form::Seen;

/// The input of a text whose features are given, and the result of a tower alone: [1 + L, P / M, W], L of DeepStack.
pub const FEATURES: &str = "features";
/// The input of a tower alone that names the rows of its features that are wanted, i32 [P / M]; -1 gives zeros.
pub const ROWS: &str = "rows";

/// Rows [P / M, W] that take the places of tokens, and those that are added behind the first layers of the text.
pub struct Features<'g> {
    pub main: Tensor<'g>,
    pub deep: Vec<Tensor<'g>>,
}

impl<'g> Features<'g> {
    /// Features that the host writes: the graph has no tower.
    pub fn given(b: &'g Builder, v: &Vision, seen: Seen, text_width: usize) -> Features<'g> {
        let rows = seen.patches / v.block();
        let all = b.input(FEATURES, DType::F32, &[v.feature_levels(), rows, text_width]);
        let level = |level: usize| all.slice(0, level, 1).reshape(&[rows, text_width]);
        Features { main: level(0), deep: (1..v.feature_levels()).map(level).collect() }
    }
}

/// A tower without a text: its result is the features of the images it is shown. They are gathered by row, as a text gathers
/// them, so that they are what a text would read, to the bit.
pub fn build(c: &DecoderConfig, seen: Seen) -> Graph {
    let v = c.vision.as_ref().expect("only a decoder with a tower sees images");
    let b = Builder::new();
    let w = weights(&b, v, c.width, c.init_std);
    let inputs = Inputs::new(&b, v, seen);
    let rows = seen.patches / v.block();
    let wanted = b.input(ROWS, DType::I32, &[rows]);
    let Features { main, deep } = apply(&b, v, &w, &inputs);
    let levels: Vec<Tensor<'_>> =
        [main].into_iter().chain(deep).map(|x| x.gather(wanted).reshape(&[1, rows, c.width])).collect();
    b.result(FEATURES, b.concat(&levels, 0));
    b.finish()
}
