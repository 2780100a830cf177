//! A weighted sum in f32 arithmetic, for f32 and for bf16 of odd sizes; the kernel is `plain.cu`.

use flatout_ir::View;
use flatout_ir::ops::linear_attention::Accumulate;

use super::{At, Problem, Step, count, numbers, strides};
use crate::cuda::context::{Arg, Source};
use crate::cuda::kernels::stage::c_type;
use crate::weighted_sum::{Owner, WeightedSum};

const TILE: usize = 64;

/// The longest segments on the owned and on the opposite side.
pub(super) fn sides(p: &Problem, owner: Owner) -> (usize, usize) {
    match owner {
        Owner::Keys => (p.k_longest(), p.q_longest()),
        Owner::Queries | Owner::Both => (p.q_longest(), p.k_longest()),
    }
}

/// The arguments shared by both kernels for a sum: tensors, segments, strides, extents, heads, scale.
pub(super) fn args(at: &At<'_>, sum: &WeightedSum, out: &View, tiles: usize) -> Vec<Arg> {
    let p = &at.problem;
    let tensors = [sum.left, sum.right, sum.rows].map(|i| &at.launch.ins[i]);
    let all = || tensors.into_iter().chain([out]);
    let mut args: Vec<Arg> = all().map(|view| at.pointer(Some(view))).collect();
    args.extend(at.bounds().into_iter().flatten());
    args.extend(all().flat_map(|view| strides(Some(view))));
    args.extend([p.tq, p.tk, p.q_longest(), p.k_longest(), tiles, p.heads].map(count));
    args.extend(all().map(|view| count(view.dims[1])));
    args.push(Arg::F32(p.attend.scale));
    args
}

pub(super) fn step(at: &At<'_>, sum: &WeightedSum, out: &View) -> Step {
    let p = &at.problem;
    let (own, _) = sides(p, sum.owner);
    let (inner, width) = (at.launch.ins[sum.left].dims[2], out.dims[2]);
    // 16 registers per thread for every 64 columns.
    let slice = 64 * width.div_ceil(64).clamp(1, 4);
    let owner = match sum.owner {
        Owner::Queries => 0,
        Owner::Keys => 1,
        Owner::Both => 2,
    };
    let mut defines = p.defines();
    defines.extend(numbers(&[("OWNER", owner), ("SLICE", slice)]));
    defines.push(("T_X".into(), c_type(out.dtype).into()));
    let rotation = at.rotation();
    // Only queries are rotated: input 0, and output 0 for their gradient.
    let is_turned = |i: usize| (rotation.is_some() && i == 0) as usize;
    defines.extend(numbers(&[
        ("TURNED", rotation.is_some() as usize),
        ("A_TURNED", is_turned(sum.left)),
        ("B_TURNED", is_turned(sum.right)),
        ("X_TURNED", is_turned(sum.rows)),
        ("OUT_TURNED", if p.is_grad { is_turned(sum.out) } else { 0 }),
        ("ONTO", at.accumulate(sum) as usize),
    ]));
    let body = concat!(include_str!("segment.cuh"), include_str!("plain.cu"));
    let code = at.code(body, 1, 1, &mut defines);
    let (tiles, slices) = (own.div_ceil(TILE), width.div_ceil(slice));
    let mut args = args(at, sum, out, tiles);
    args.extend([inner, width, slices].map(count));
    args.extend(at.rotation_args());
    if at.accumulate(sum) != Accumulate::Nothing {
        let read = [at.base(), Some(&at.launch.ins[0])];
        args.extend(read.map(|view| at.pointer(view)));
        args.extend(read.into_iter().flat_map(strides));
    }
    Step {
        source: Source { name: "linear_attention/plain.cu", code, defines },
        entry: "plain_sum",
        grid: [tiles * p.segments(), out.dims[1] * slices],
        threads: 256,
        shared_bytes: 0,
        args,
    }
}
