//! Queries that double as keys, in segments of one tile, in bf16; the kernel is `symmetric.cu`.
//!
//! Scores are computed once, and only half of them are multiplied.

use flatout_ir::View;
use flatout_ir::ops::linear_attention::{Accumulate, Keys, Rotary};
use flatout_ir::types::DType;

use super::{At, Problem, Step, count, in_pieces, numbers, strides};
use crate::cuda::context::{Arg, Facts, Source};

/// Maximum strips of 16 rows per tile: the limit of registers and 99 KiB of shared memory.
const MOST_STRIPS: usize = 8;

/// Pipeline stages of the kernel of dv, one panel each.
const DV_STAGES: usize = 4;

/// Pipeline stages of the other kernels: fewer if more is loaded with each panel.
fn stages(p: &Problem) -> usize {
    match (p.attend.rotary, base_rows(p)) {
        (Rotary::None, _) => 4,
        (_, 0) => 3,
        _ => 2,
    }
}

/// Rows of a base that are loaded with a panel. The largest tile has no room for them and reads them where they are added.
fn base_rows(p: &Problem) -> usize {
    let has_room = p.accumulate != Accumulate::Nothing && strips(p) < MOST_STRIPS;
    if has_room { p.q_longest().next_multiple_of(8) } else { 0 }
}

/// Whether angles may be computed as sums: the table must not have an amplitude.
fn is_summed(p: &Problem) -> bool {
    matches!(p.attend.rotary, Rotary::Table(freq) if freq.amplitude() == 1.0)
}

fn strips(p: &Problem) -> usize {
    p.q_longest().div_ceil(16).max(1)
}

/// The part of `serves` that depends on shapes alone.
fn fits(p: &Problem) -> bool {
    let is_even = |size: usize| size > 0 && size.is_multiple_of(8);
    let is_short = strips(p) <= MOST_STRIPS && is_even(p.inner) && is_even(p.width);
    p.attend.k == Keys::Queries && p.dtype == DType::BF16 && is_short
}

pub(super) fn serves(at: &At<'_>) -> bool {
    // A base may only be added to a gradient that is rotated back, and must have its strides.
    let lies_alike = |base: &View| at.launch.outs[0].as_ref().is_none_or(|dr| dr.strides == base.strides);
    let has_way = at.base().is_none_or(|base| at.problem.attend.rotary != Rotary::None && lies_alike(base));
    fits(&at.problem) && has_way && tensors(at).into_iter().chain([at.base()]).flatten().all(in_pieces)
}

/// r, v and o, or do, dr and dv.
fn tensors<'a>(at: &At<'a>) -> Vec<Option<&'a View>> {
    let (ins, outs) = (&at.launch.ins, &at.launch.outs);
    let ins = ins[..2].iter().chain(ins.get(at.problem.attend.inputs()));
    ins.map(Some).chain(outs.iter().map(Option::as_ref)).collect()
}

/// The weights, from the pass over r to the pass over do: bf16 [T, H, rows of a tile].
pub(super) fn workspace(p: &Problem) -> usize {
    if p.is_grad && fits(p) { 2 * p.tq * p.heads * 16 * strips(p) } else { 0 }
}

fn panel_bytes(strips: usize) -> usize {
    16 * strips * 128
}

/// A ring of panels; a matrix of weights, in whose strips results are staged, 2 KiB per strip; the positions of rows; one bit
/// for each element of two panels; and angles for one panel more than the ring has.
fn shared_bytes(p: &Problem) -> usize {
    let strips = strips(p);
    let bits = if p.accumulate == Accumulate::Relu { 2 * 16 * 8 } else { 0 };
    let angles = if is_summed(p) { (stages(p) + 1) * (strips + 5) * 256 } else { 0 };
    stages(p) * (panel_bytes(strips) + base_rows(p) * 128)
        + strips * ((16 * (32 * strips + 16)).max(2048) + 16 * size_of::<i32>() + bits)
        + angles
}

/// Thread blocks per multiprocessor, for the launch bounds: as many as do not spill. At five strips the backward pass has three
/// only on Hopper: elsewhere shared memory, or (for sm_100, and with computed angles) registers do not suffice.
fn blocks(p: &Problem, facts: &Facts) -> usize {
    match (p.is_grad, strips(p)) {
        (false, ..=5) | (true, ..=4) => 4,
        (true, 5) if facts.major == 9 && !matches!(p.attend.rotary, Rotary::Angles(_)) => 3,
        (true, 5) => 2,
        (false, _) | (true, 6) => 2,
        (true, _) => 1,
    }
}

fn source(at: &At<'_>, facts: &Facts) -> Source {
    let p = &at.problem;
    let mut defines = p.defines();
    defines.extend(numbers(&[
        ("GRAD", p.is_grad as usize),
        ("STRIPS", strips(p)),
        ("STAGES", stages(p)),
        ("ONTO", p.accumulate as usize),
        ("BLOCKS", blocks(p, facts)),
        ("N", p.inner),
        ("D", p.width),
        ("TURNED", (p.attend.rotary != Rotary::None) as usize),
        ("SUMMED", is_summed(p) as usize),
        ("BASE_ROWS", base_rows(p)),
    ]));
    let body =
        concat!(include_str!("segment.cuh"), include_str!("fragments.cuh"), include_str!("symmetric.cu"));
    // A 16-byte piece has four pairs.
    let code = at.code(body, 4, 8, &mut defines);
    Source { name: "linear_attention/symmetric.cu", code, defines }
}

pub(super) fn steps(at: &At<'_>, facts: &Facts) -> Vec<Step> {
    let p = &at.problem;
    let bounds = at.bounds()[0];
    let step =
        |entry, blocks: usize, shared_bytes, read: &[Option<&View>], kept: Option<Arg>, rest: &[Arg]| {
            let mut args: Vec<Arg> = read.iter().map(|view| at.pointer(*view)).collect();
            args.extend(kept.into_iter().chain(bounds));
            args.extend(read.iter().flat_map(|view| strides(*view)));
            args.extend([count(p.tq), count(p.q_longest()), count(p.heads)]);
            args.extend(rest);
            let grid = [p.segments() * blocks, 1];
            Step { source: source(at, facts), entry, grid, threads: 32 * strips(p), shared_bytes, args }
        };
    let shared = shared_bytes(p);
    let mut shares = vec![count(p.heads / p.v_heads), Arg::F32(p.attend.scale)];
    shares.extend(at.rotation_args());
    let tensors = tensors(at);
    if !p.is_grad {
        let forward = |_| step("symmetric_forward", p.heads, shared, &tensors, None, &shares);
        return tensors[2].map(forward).into_iter().collect();
    }
    let (d_o, dr, dv) = (tensors[2], tensors[3], tensors[4]);
    let kept = at.pointer(at.launch.workspace.as_ref().filter(|_| dv.is_some()));
    let mut steps = vec![];
    if dr.is_some() || dv.is_some() {
        if let Some(base) = at.base() {
            shares.push(at.pointer(Some(base)));
        }
        steps.push(step("symmetric_backward", p.heads, shared, &tensors[..4], Some(kept), &shares));
    }
    if dv.is_some() {
        let blocks = p.v_heads * p.width.div_ceil(64);
        let shared = DV_STAGES * panel_bytes(strips(p));
        steps.push(step("symmetric_dv", blocks, shared, &[d_o, dv], Some(kept), &[count(p.v_heads)]));
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::attention::Segments;
    use flatout_ir::ops::linear_attention::{LinearAttend, LinearMask};
    use flatout_ir::types::TensorType;

    /// sm_86, sm_89 and sm_120 have 99 KiB.
    #[test]
    fn tiles_fit_in_the_smallest_shared_memory() {
        for (strips, &accumulate) in
            (1..=MOST_STRIPS).flat_map(|strips| Accumulate::ALL.iter().map(move |o| (strips, o)))
        {
            let attend = LinearAttend {
                scale: 1.0,
                mask: LinearMask::Full,
                q: Segments::Uniform { len: 16 * strips },
                k: Keys::Queries,
                rotary: Rotary::Table(100.0.into()),
            };
            let x = TensorType::new(DType::BF16, [16 * strips, 1, 64]);
            let p = Problem { accumulate, ..Problem::new((attend, true), &x, &x, &x) };
            assert!(shared_bytes(&p) <= 99 << 10, "{strips} strips take {}", shared_bytes(&p));
        }
    }
}
