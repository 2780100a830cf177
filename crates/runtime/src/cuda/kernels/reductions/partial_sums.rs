//! Sums of the partial rows that other kernels leave in the workspace; the kernel is `partial_sums.cu`.

use flatout_ir::View;

use crate::cuda::kernels::address::Walk;
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, at, blocks, count32};

/// Vectors summed per launch.
const TOGETHER: usize = 3;

/// Adds partial rows into vectors of `width`: `rows` rows of the first vector at byte `from`, followed by those of the next.
pub fn partial_sums(from: usize, rows: usize, width: usize, to: &[&View]) -> Stages {
    if width == 0 {
        return Ok(vec![]);
    }
    let stage = |(i, to): (usize, &[&View])| {
        let mut draft = Draft::new("partial_sums.cu").define("D", width);
        for v in 0..TOGETHER {
            let walk = to.get(v).map_or(Walk::new(&[], &[]), |to| Walk::of(to));
            draft = draft.text(&walk.function(&format!("to_y{v}"), "u32"));
        }
        let mut args = vec![Value::At(from + i * TOGETHER * rows * width * 4)];
        args.extend((0..TOGETHER).map(|v| to.get(v).map_or(Value::Nothing, |to| at(to))));
        args.push(count32("partial rows", rows)?);
        let source = draft.source(include_str!("partial_sums.cu"));
        let grid = [blocks(width, 32)?, to.len() as u32];
        Ok(Stage { source, entry: "partial_sums", grid, block: 1024, args })
    };
    to.chunks(TOGETHER).enumerate().map(stage).collect()
}
