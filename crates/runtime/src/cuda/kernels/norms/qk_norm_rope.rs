//! RMS norm of each head of q or k fused with its rotation, and their gradient; the kernel is `qk_norm_rope.cu`.

use flatout_ir::ops::qk_norm_rope::weights;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use super::norm::{MOST_PARTIAL, weight_code};
use super::rope::{RegisterBudget, Rotation, head_function, heads_of};
use crate::cuda::context::{Facts, Kernel};
use crate::cuda::kernels::reductions::partial_sums::partial_sums;
use crate::cuda::kernels::stage::{Stage, Stages, Value, at, at_or_nothing, blocks, count32, staged};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    staged!(kernel_row("cuda.qk_norm_rope", OpKind::QkNormRope, FLOATS, Layout::Rows), |l, _| forward(l)),
    staged!(
        KernelRow {
            workspace,
            ..kernel_row("cuda.qk_norm_rope_grad", OpKind::QkNormRopeGrad, FLOATS, Layout::Rows)
        },
        backward
    ),
];

/// The gradient keeps two heads instead of one, plus the sums.
const FORWARD: RegisterBudget = RegisterBudget { words: 32, words_of_all: 48 };
const BACKWARD: RegisterBudget = RegisterBudget { words: 16, words_of_all: 0 };
/// Blocks of 256 threads per multiprocessor.
const RESIDENT: usize = 2;

fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::QkNormRopeGrad { weight, first, .. } = shapes.node.op else {
        unreachable!("the row is for its gradient")
    };
    let x = shapes.ins[0];
    if weight.is_some() { x.rows().min(MOST_PARTIAL) * weights(first) * x.last() * 4 } else { 0 }
}

fn forward(launch: &Launch) -> Stages {
    let Op::QkNormRope { eps, weight, first, freq, ref axis_of_freq, pairs, table } = launch.op else {
        unreachable!("the row is for qk_norm_rope")
    };
    let x = &launch.ins[0];
    let Some(y) = &launch.outs[0] else { return Ok(vec![]) };
    if x.elements() == 0 {
        return Ok(vec![]);
    }
    let has_w = weight.is_some() as usize;
    let w = weight.is_some().then(|| &launch.ins[1]);
    let positions = &launch.ins[1 + has_w];
    let table = table.then(|| &launch.ins[2 + has_w]);
    let rotation = Rotation { freq, axis_of_freq, pairs, positions, table };
    let views: Vec<&View> = [Some(x), Some(y), w].into_iter().flatten().collect();
    let (draft, cover) = rotation.draft("qk_norm_rope.cu", &views, first, FORWARD);
    let source = draft
        .flag("GRAD", false)
        .define("FIRST", first)
        .dtype("T_X", x.dtype)
        .dtype("T_W", w.map_or(DType::F32, |w| w.dtype))
        .define("WEIGHT", weight_code(weight))
        .text(&head_function(x, "head_x"))
        .text(&head_function(y, "head_y"))
        .source(CODE);
    let heads = heads_of(x);
    let count = count32("heads", heads)?;
    Ok(vec![Stage {
        source,
        entry: "qk_norm_rope",
        grid: [blocks(heads, 256 / cover.lanes * cover.chunk)?, 1],
        block: 256,
        args: vec![
            at(x),
            at_or_nothing(w),
            at(positions),
            at_or_nothing(table),
            at(y),
            count,
            rotation.table_rows(),
            Value::F32(eps),
        ],
    }])
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

const CODE: &str =
    concat!(include_str!("rotation.cuh"), include_str!("head_gains.cuh"), include_str!("qk_norm_rope.cu"));

fn backward(launch: &Launch, facts: &Facts) -> Stages {
    let Op::QkNormRopeGrad { eps, weight, first, freq, ref axis_of_freq, pairs, table } = launch.op else {
        unreachable!("the row is for its gradient")
    };
    let (x, dy) = (&launch.ins[0], &launch.ins[launch.ins.len() - 1]);
    let (dx, dw) = (launch.outs[0].as_ref(), launch.outs.get(1).and_then(Option::as_ref));
    if dx.is_none() && dw.is_none() {
        return Ok(vec![]);
    }
    let has_w = weight.is_some() as usize;
    let w = weight.is_some().then(|| &launch.ins[1]);
    let positions = &launch.ins[1 + has_w];
    let table = table.then(|| &launch.ins[2 + has_w]);
    let rotation = Rotation { freq, axis_of_freq, pairs, positions, table };
    let views: Vec<&View> = [Some(x), Some(dy), dx, w].into_iter().flatten().collect();
    let (mut draft, cover) = rotation.draft("qk_norm_rope.cu", &views, first, BACKWARD);
    draft = draft
        .flag("GRAD", true)
        .define("FIRST", first)
        .define("BLOCKS", RESIDENT)
        .dtype("T_X", x.dtype)
        .dtype("T_DY", dy.dtype)
        .dtype("T_W", w.map_or(DType::F32, |w| w.dtype))
        .define("WEIGHT", weight_code(weight))
        .flag("HAS_DX", dx.is_some())
        .flag("HAS_DW", dw.is_some());
    for (name, view) in [("head_x", Some(x)), ("head_dy", Some(dy)), ("head_dx", dx)] {
        draft = draft.text(&view.map_or(String::new(), |v| head_function(v, name)));
    }
    let heads = heads_of(x);
    let a_block = 256 / cover.lanes * cover.chunk;
    let needed = heads.div_ceil(a_block);
    let grid = needed.min(facts.sms.max(1) as usize * RESIDENT).min(MOST_PARTIAL);
    // Grid-stride loops advance by whole tokens, so that a thread processes the same heads, with the same weight.
    let tokens = x.dims[1] / gcd(x.dims[1], a_block);
    let grid = if grid < needed { (grid / tokens).max(1) * tokens } else { grid };
    let mut stages = vec![];
    if grid > 0 {
        let count = count32("heads", heads)?;
        stages.push(Stage {
            source: draft.source(CODE),
            entry: "qk_norm_rope_grad",
            grid: [grid as u32, 1],
            block: 256,
            args: vec![
                at(x),
                at_or_nothing(w),
                at(positions),
                at_or_nothing(table),
                at(dy),
                at_or_nothing(dx),
                at_or_nothing(launch.workspace.as_ref()),
                count,
                rotation.table_rows(),
                Value::F32(eps),
            ],
        });
    }
    if let Some(dw) = dw {
        let scratch = launch.workspace.as_ref().map_or(0, |view| view.offset);
        stages.extend(partial_sums(scratch, grid, weights(first) * 2 * axis_of_freq.len(), &[dw])?);
    }
    Ok(stages)
}
