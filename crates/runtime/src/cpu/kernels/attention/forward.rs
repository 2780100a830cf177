//! The forward pass of attention: o and lse with an online softmax, one pass over the unmasked keys.

use flatout_ir::Launch;
use flatout_ir::target::Shapes;

use super::mask::{LANES, Sees};
use super::tile::{Product, Vector, dispatch, exp2};
use super::{Block, KEYS, Problem, bytes, fill, key_shape, padded, share, soft_cap, take, tiles, to_lanes};
use crate::cpu::context::Context;
use crate::cpu::kernels::reductions::reduce::Shared;
use crate::cpu::math;
use crate::cpu::tensor::Tensor;

/// The reference maximum of a row's exponentials is only raised when it is exceeded by this (in powers of two): sums stay far
/// below overflow, and rescaling is rare.
const SLACK: f32 = 10.0;

/// Floats of scratch per worker: q in lanes, q or o by rows, scores, and the tiles of k and v.
fn floats(size: usize) -> usize {
    let wide = padded(size);
    2 * LANES * wide + KEYS * LANES + 2 * KEYS * wide
}

pub(super) fn workspace(shapes: &Shapes<'_>) -> usize {
    let (size, ..) = key_shape(shapes);
    bytes(shapes.cores * floats(size))
}

struct Forward<'a> {
    problem: Problem<'a>,
    o: Option<Tensor<'a>>,
    lse: Option<Tensor<'a>>,
}

pub(super) fn run(launch: &Launch, ctx: &Context<'_>) -> Result<(), String> {
    let problem = Problem::new(launch, ctx)?;
    let forward = Forward { problem, o: ctx.output(0), lse: ctx.output(1) };
    let p = &forward.problem;
    if let Some(o) = &forward.o {
        fill(&p.cut.idle_q, o, 0.0);
    }
    if let Some(lse) = &forward.lse {
        fill(&p.cut.idle_q, lse, f32::NEG_INFINITY);
    }

    let mut blocks = vec![];
    for (segment, rows) in p.cut.segments.iter().enumerate() {
        for kv_head in 0..p.kv_heads {
            // The last blocks of a causal segment are the longest, so they go first.
            blocks.extend((0..p.blocks(rows)).rev().map(|block| (segment, kv_head, block)));
        }
    }
    // SAFETY: this is the only call of this launch.
    let memory = unsafe { ctx.workspace() };
    let floats = floats(p.size);
    let workers = p.workers(ctx).min(memory.len() / floats);
    let scratch = Shared::new(memory);
    share(ctx, workers, blocks.len(), |worker, task| {
        let (segment, kv_head, index) = blocks[task];
        // SAFETY: a worker runs one task at a time, and the ranges are disjoint.
        let scratch = unsafe { scratch.slice(worker * floats..(worker + 1) * floats) };
        let block = forward.problem.block(segment, kv_head, index);
        // SAFETY: the launch was checked, so tensors match their shapes.
        unsafe { attend(&forward, &block, scratch) }
    });
    Ok(())
}

dispatch! {
    /// # Safety
    /// The tensors of the problem match their shapes, and nothing else writes the block's rows of o and lse.
    attend = attend_with(forward: &Forward<'_>, block: &Block<'_>, scratch: &mut [f32])
}

/// # Safety
/// As for `attend`; in addition the machine has V's instructions.
#[inline(always)]
unsafe fn attend_with<V: Vector>(forward: &Forward<'_>, block: &Block<'_>, mut scratch: &mut [f32]) {
    let p = &forward.problem;
    let wide = padded(p.size);
    let q = take(&mut scratch, LANES * wide);
    let rows = take(&mut scratch, LANES * wide);
    let scores = take(&mut scratch, KEYS * LANES);
    let k_tile = take(&mut scratch, KEYS * wide);
    let v_tile = take(&mut scratch, KEYS * wide);

    // Scores in base-2 units, so that exponentials need no further factor.
    block.gather(&p.q, rows);
    // SAFETY: the caller guarantees V's instructions.
    unsafe { to_lanes::<V>(rows, wide, p.scale * std::f32::consts::LOG2_E, q) };
    let o = rows;

    let mut top = [f32::NEG_INFINITY; LANES];
    let mut total = [0.0_f32; LANES];
    let mut is_first = true;
    for keys in tiles(&block.visible.range) {
        let sees = block.visible.sees(&keys);
        if sees == Sees::Nothing {
            continue;
        }
        let count = keys.len();
        let (k, k_row) = p.tile(&p.k, block, &keys, k_tile);
        let product = Product {
            m: count,
            n: LANES,
            k: p.size,
            a: k,
            a_row: k_row,
            a_col: 1,
            b: q.as_ptr(),
            b_row: LANES,
            c: scores.as_mut_ptr(),
            c_row: LANES,
            add: false,
        };
        // SAFETY: `count` keys of `size`, q in `size` lanes, and scores for KEYS keys.
        unsafe { product.run::<V>() };
        if let Some(cap) = p.cap {
            soft_cap(cap, &mut scores[..count * LANES]);
        }
        if sees == Sees::Some {
            block.visible.mask_scores(&keys, scores);
        }
        // SAFETY: the caller guarantees V's instructions.
        let factor = unsafe { exponentials::<V>(&mut scores[..count * LANES], &mut top, &mut total) };
        if let Some(factor) = factor.filter(|_| !is_first) {
            for (row, factor) in o.chunks_exact_mut(wide).zip(factor) {
                row.iter_mut().for_each(|x| *x *= factor);
            }
        }
        let (v, v_row) = p.tile(&p.v, block, &keys, v_tile);
        let product = Product {
            m: LANES,
            n: wide,
            k: count,
            a: scores.as_ptr(),
            a_row: 1,
            a_col: LANES,
            b: v,
            b_row: v_row,
            c: o.as_mut_ptr(),
            c_row: wide,
            add: !is_first,
        };
        // SAFETY: probabilities of `count` keys, as many rows of v, padded, and o for LANES rows.
        unsafe { product.run::<V>() };
        is_first = false;
    }
    if is_first {
        o.fill(0.0);
    }

    if let Some(to) = &forward.o {
        for (row, total) in o.chunks_exact_mut(wide).zip(total) {
            let share = if total == 0.0 { 0.0 } else { 1.0 / total };
            row.iter_mut().for_each(|x| *x *= share);
        }
        block.scatter(o, to);
    }
    if let Some(to) = &forward.lse {
        let mut lse = [0.0; LANES];
        for lane in 0..LANES {
            let sum = math::log(total[lane]);
            lse[lane] = if total[lane] == 0.0 { sum } else { top[lane].mul_add(std::f32::consts::LN_2, sum) };
        }
        block.scatter_scalars(&lse, to);
    }
}

/// Turns scores [keys, LANES] into 2^(score - top) and updates `top` and `total`. Returns the factor for earlier sums if a
/// `top` changed.
///
/// # Safety
/// The machine has V's instructions.
#[inline(always)]
unsafe fn exponentials<V: Vector>(
    scores: &mut [f32],
    top: &mut [f32; LANES],
    total: &mut [f32; LANES],
) -> Option<[f32; LANES]> {
    let (scores, end) = (scores.as_mut_ptr(), scores.len());
    let mut peak = [f32::NEG_INFINITY; LANES];
    // SAFETY: offsets stay below `end`, a multiple of LANES, and below LANES in the arrays.
    unsafe {
        for lane in (0..LANES).step_by(2 * V::WIDTH) {
            let mut peaks = [V::splat(f32::NEG_INFINITY); 2];
            for at in (lane..end).step_by(LANES) {
                peaks[0] = peaks[0].max(V::load(scores.add(at)));
                peaks[1] = peaks[1].max(V::load(scores.add(at + V::WIDTH)));
            }
            peaks[0].store(peak.as_mut_ptr().add(lane));
            peaks[1].store(peak.as_mut_ptr().add(lane + V::WIDTH));
        }
    }
    let mut moves = false;
    let mut shift = [0.0; LANES];
    let mut factor = [0.0; LANES];
    for lane in 0..LANES {
        let exceeds = peak[lane] > top[lane] + SLACK;
        let next = if exceeds { peak[lane] } else { top[lane] };
        // A row without any key so far has no maximum to subtract.
        shift[lane] = if next == f32::NEG_INFINITY { 0.0 } else { next };
        factor[lane] = top[lane] - shift[lane];
        moves |= exceeds;
        top[lane] = next;
    }
    // SAFETY: as above.
    unsafe {
        for lane in (0..LANES).step_by(V::WIDTH) {
            let minus = V::load(shift.as_ptr().add(lane));
            let mut sum = V::splat(0.0);
            for at in (lane..end).step_by(LANES) {
                let x = exp2(V::load(scores.add(at)).sub(minus));
                x.store(scores.add(at));
                sum = sum.add(x);
            }
            let factor = factor.as_mut_ptr().add(lane);
            exp2(V::load(factor)).store(factor);
            let total = total.as_mut_ptr().add(lane);
            V::load(total).mul_add(V::load(factor), sum).store(total);
        }
    }
    moves.then_some(factor)
}
