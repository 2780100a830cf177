//! The backward pass of attention: dq, dk and dv, recomputing probabilities from lse.
//!
//! Inputs are q, k, v, o, lse, do and, if lse is differentiated too, its gradient.
//!
//! With p the probabilities, recomputed from lse, and delta = sum(do o) - dlse per row: ds = p (do v^T - delta), dq = scale ds
//! k, dk = scale ds^T q, dv = p^T do. If scores s are capped, ds is multiplied by the derivative of the cap, 1 - (s / cap)^2.
//!
//! A (segment, key head) unit owns its dk and dv, which are accumulated in f32 over its blocks in order, while each block's dq
//! is finished in one pass over its keys. A long unit is accumulated in parts that take every n-th block, and the parts are
//! added in order. The number of parts depends on the segment alone, so that a segment has the same bits packed as in a
//! separate launch. If there are few units, each part is a task with its own accumulators; otherwise a unit is a task.

use std::ops::Range;

use flatout_ir::target::Shapes;
use flatout_ir::{Launch, Op};

use super::mask::{LANES, Sees};
use super::tile::{Product, Vector, dispatch, exp2};
use super::{
    Block, KEYS, Problem, bytes, extents, fill, key_shape, padded, share, soft_cap, take, tiles, to_lanes,
};
use crate::cpu::context::Context;
use crate::cpu::kernels::reductions::reduce::Shared;
use crate::cpu::math;
use crate::cpu::tensor::{self, Tensor};

/// Below this number of units their parts are tasks: each part costs accumulators of the unit's size.
const UNITS: usize = 16;
/// Minimum blocks per part, whose work outweighs the addition of its accumulators; a unit has at most four parts.
const PART_BLOCKS: usize = 8;
const MOST_PARTS: usize = 4;

/// Number of parts of a unit with `rows` rows.
fn parts(rows: usize) -> usize {
    (rows.div_ceil(LANES) / PART_BLOCKS).clamp(1, MOST_PARTS)
}

/// Floats of scratch per worker: q and do by rows and in lanes, dq, p, ds, and the tiles of k and v.
fn floats(size: usize) -> usize {
    let wide = padded(size);
    5 * LANES * wide + 2 * KEYS * LANES + 2 * KEYS * wide
}

/// Floats of the accumulators of dk and dv of one unit.
fn sums(size: usize, longest: usize) -> usize {
    2 * longest * padded(size)
}

/// Number of accumulators of dk and dv: one per part if parts are tasks; otherwise per worker, two if units have parts.
#[derive(Clone, Copy)]
struct Accumulators {
    /// The maximum parts of a unit if parts are tasks, otherwise 1.
    tasks_a_unit: usize,
    of_tasks: usize,
    of_a_worker: usize,
}

impl Accumulators {
    fn new(units: usize, longest_rows: usize) -> Self {
        match parts(longest_rows) {
            most if most > 1 && units < UNITS => {
                Accumulators { tasks_a_unit: most, of_tasks: units * most, of_a_worker: 0 }
            }
            most => Accumulators { tasks_a_unit: 1, of_tasks: 0, of_a_worker: most.min(2) },
        }
    }
}

pub(super) fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::AttentionGrad { q, k, .. } = shapes.node.op else { unreachable!("listed for its gradient") };
    let (size, tokens, kv_heads) = key_shape(shapes);
    let (longest, units) = extents(k, tokens, kv_heads);
    let queries = &shapes.ins[0].dims;
    let (longest_q, _) = extents(q, queries[0], kv_heads);
    let accumulators = Accumulators::new(units, longest_q * (queries[1] / kv_heads));
    let held = accumulators.of_tasks + shapes.cores * accumulators.of_a_worker;
    bytes(shapes.cores * floats(size) + held * sums(size, longest))
}

struct Backward<'a> {
    problem: Problem<'a>,
    o: Tensor<'a>,
    lse: Tensor<'a>,
    d_o: Tensor<'a>,
    d_lse: Option<Tensor<'a>>,
    dq: Option<Tensor<'a>>,
    dk: Option<Tensor<'a>>,
    dv: Option<Tensor<'a>>,
}

pub(super) fn run(launch: &Launch, ctx: &Context<'_>) -> Result<(), String> {
    let Op::AttentionGrad { q, k, d_lse, .. } = launch.op else { unreachable!("listed for its gradient") };
    let problem = Problem::new(launch, ctx)?;
    let n = problem.inputs;
    let backward = Backward {
        problem,
        o: ctx.input(n),
        lse: ctx.input(n + 1),
        d_o: ctx.input(n + 2),
        d_lse: d_lse.then(|| ctx.input(n + 3)),
        dq: ctx.output(0),
        dk: ctx.output(1),
        dv: ctx.output(2),
    };
    let p = &backward.problem;
    for (to, idle) in
        [(&backward.dq, &p.cut.idle_q), (&backward.dk, &p.cut.idle_k), (&backward.dv, &p.cut.idle_k)]
    {
        if let Some(to) = to {
            fill(idle, to, 0.0);
        }
    }

    let (longest, units) = extents(k, p.k.dims[0], p.kv_heads);
    let (longest_q, _) = extents(q, p.q.dims[0], p.kv_heads);
    let accumulators = Accumulators::new(units, longest_q * p.group);
    let (floats, sums) = (floats(p.size), sums(p.size, longest));
    // SAFETY: this is the only call of this launch.
    let memory = unsafe { ctx.workspace() };
    let of_worker = floats + accumulators.of_a_worker * sums;
    let (of_tasks, of_workers) = memory.split_at_mut(accumulators.of_tasks * sums);
    let workers = p.workers(ctx).min(of_workers.len() / of_worker);
    let (of_tasks, of_workers) = (Shared::new(of_tasks), Shared::new(of_workers));

    let by_part = accumulators.of_tasks > 0;
    let in_a_unit = accumulators.tasks_a_unit;
    share(ctx, workers, units * in_a_unit, |worker, task| {
        let unit = Unit::new(&backward, task / in_a_unit);
        // SAFETY: a worker runs one task at a time, and the ranges of workers are disjoint.
        let mut scratch = unsafe { of_workers.slice(worker * of_worker..(worker + 1) * of_worker) };
        if by_part {
            // SAFETY: the range belongs to this task until all tasks are done.
            let sum = unsafe { of_tasks.slice(task * sums..(task + 1) * sums) };
            if task % in_a_unit < unit.parts {
                unit.add_part(task % in_a_unit, &mut sum[..unit.sums], scratch);
            }
            return;
        }
        let total = &mut take(&mut scratch, sums)[..unit.sums];
        let mut other = (accumulators.of_a_worker > 1).then(|| take(&mut scratch, sums));
        unit.add_part(0, total, scratch);
        for part in 1..unit.parts {
            let other =
                &mut other.as_deref_mut().expect("a unit of parts has room for two sums")[..unit.sums];
            unit.add_part(part, other, scratch);
            add(total, other);
        }
        unit.store(total);
    });
    if by_part {
        share(ctx, workers, units, |_, index| {
            let unit = Unit::new(&backward, index);
            let first = index * in_a_unit;
            // SAFETY: every part is done, and only this task adds up this unit's parts.
            let all = unsafe { of_tasks.slice(first * sums..(first + unit.parts) * sums) };
            let (total, others) = all.split_at_mut(sums);
            let total = &mut total[..unit.sums];
            others.chunks_exact(sums).for_each(|other| add(total, other));
            unit.store(total);
        });
    }
    Ok(())
}

fn add(total: &mut [f32], other: &[f32]) {
    total.iter_mut().zip(other).for_each(|(total, x)| *total += *x);
}

/// A segment and one of the key heads.
struct Unit<'a> {
    backward: &'a Backward<'a>,
    segment: usize,
    kv_head: usize,
    parts: usize,
    /// Floats of its dk and dv.
    sums: usize,
}

impl<'a> Unit<'a> {
    fn new(backward: &'a Backward<'a>, index: usize) -> Self {
        let p = &backward.problem;
        let (segment, kv_head) = (index / p.kv_heads, index % p.kv_heads);
        let rows = &p.cut.segments[segment];
        let parts = parts(rows.q.len() * p.group);
        Unit { backward, segment, kv_head, parts, sums: sums(p.size, rows.k.len()) }
    }

    /// Accumulates dk and dv over a part's blocks, and writes these blocks' dq.
    fn add_part(&self, part: usize, sum: &mut [f32], scratch: &mut [f32]) {
        let p = &self.backward.problem;
        sum.fill(0.0);
        let (dk, dv) = sum.split_at_mut(sum.len() / 2);
        for index in (part..p.blocks(&p.cut.segments[self.segment])).step_by(self.parts) {
            let block = p.block(self.segment, self.kv_head, index);
            // SAFETY: the launch was checked, so tensors match their shapes; blocks share no row of dq.
            unsafe { differentiate(self.backward, &block, dk, dv, scratch) }
        }
    }

    fn store(&self, total: &mut [f32]) {
        let p = &self.backward.problem;
        let keys = &p.cut.segments[self.segment].k;
        let (dk, dv) = total.split_at_mut(total.len() / 2);
        store(&self.backward.dk, keys, self.kv_head, dk, p.scale);
        store(&self.backward.dv, keys, self.kv_head, dv, 1.0);
    }
}

/// Writes a unit's accumulators, scaled by a factor.
fn store(to: &Option<Tensor<'_>>, keys: &Range<usize>, kv_head: usize, from: &mut [f32], factor: f32) {
    let Some(to) = to else { return };
    let size = to.dims[2];
    for (token, row) in keys.clone().zip(from.chunks_exact_mut(padded(size))) {
        row.iter_mut().for_each(|x| *x *= factor);
        let at = to.at(token * to.strides[0] + kv_head * to.strides[1]);
        // SAFETY: token and head lie in the tensor, a row is contiguous, and only its unit writes it.
        unsafe { tensor::store(to.dtype, at, 1, &row[..size]) };
    }
}

dispatch! {
    /// Adds a block's contribution to dk and dv, [keys of the segment, padded], and writes its rows of dq.
    ///
    /// # Safety
    /// The tensors of the problem match their shapes, and nothing else writes the block's rows of dq.
    differentiate = differentiate_with(
        backward: &Backward<'_>,
        block: &Block<'_>,
        dk: &mut [f32],
        dv: &mut [f32],
        scratch: &mut [f32],
    )
}

/// # Safety
/// As for `differentiate`; in addition the machine has V's instructions.
#[inline(always)]
unsafe fn differentiate_with<V: Vector>(
    backward: &Backward<'_>,
    block: &Block<'_>,
    dk: &mut [f32],
    dv: &mut [f32],
    mut scratch: &mut [f32],
) {
    let p = &backward.problem;
    let wide = padded(p.size);
    let mut rows = || take(&mut scratch, LANES * wide);
    let (q_rows, q_lanes, do_rows, do_lanes, dq) = (rows(), rows(), rows(), rows(), rows());
    let probabilities = take(&mut scratch, KEYS * LANES);
    let ds = take(&mut scratch, KEYS * LANES);
    let k_tile = take(&mut scratch, KEYS * wide);
    let v_tile = take(&mut scratch, KEYS * wide);

    block.gather(&p.q, q_rows);
    block.gather(&backward.d_o, do_rows);
    let o_rows = &mut *dq;
    block.gather(&backward.o, o_rows);
    // Loops rather than closures passed to the standard library, which would be compiled without V's instructions.
    let mut delta = backward.d_lse.as_ref().map_or([0.0; LANES], |d_lse| block.gather_scalars(d_lse));
    for (lane, delta) in delta.iter_mut().enumerate() {
        let row = lane * wide..(lane + 1) * wide;
        *delta = math::dot(&o_rows[row.clone()], &do_rows[row]) - *delta;
    }
    // SAFETY: the caller guarantees V's instructions.
    unsafe {
        to_lanes::<V>(q_rows, wide, p.scale * std::f32::consts::LOG2_E, q_lanes);
        to_lanes::<V>(do_rows, wide, 1.0, do_lanes);
    }
    // A row without any key has lse -inf and only masked scores: any finite value gives it probabilities of 0.
    let mut lse = block.gather_scalars(&backward.lse);
    for lse in &mut lse {
        *lse = if *lse == f32::NEG_INFINITY { 0.0 } else { *lse * std::f32::consts::LOG2_E };
    }

    let mut is_first = true;
    for keys in tiles(&block.visible.range) {
        let sees = block.visible.sees(&keys);
        if sees == Sees::Nothing {
            continue;
        }
        let count = keys.len();
        let (k, k_row) = p.tile(&p.k, block, &keys, k_tile);
        let (v, v_row) = p.tile(&p.v, block, &keys, v_tile);
        let of_keys = |a: *const f32, a_row: usize, b: &[f32], c: &mut [f32]| Product {
            m: count,
            n: LANES,
            k: p.size,
            a,
            a_row,
            a_col: 1,
            b: b.as_ptr(),
            b_row: LANES,
            c: c.as_mut_ptr(),
            c_row: LANES,
            add: false,
        };
        // SAFETY: `count` keys of `size`, q and do in `size` lanes, and two tiles of KEYS keys.
        unsafe {
            of_keys(k, k_row, q_lanes, probabilities).run::<V>();
            of_keys(v, v_row, do_lanes, ds).run::<V>();
        }
        if let Some(cap) = p.cap {
            soft_cap(cap, &mut probabilities[..count * LANES]);
        }
        if sees == Sees::Some {
            block.visible.mask_scores(&keys, probabilities);
        }
        // SAFETY: both hold `count` keys; the caller guarantees V's instructions.
        unsafe {
            match p.cap {
                None => slopes::<V>(count, probabilities, ds, &lse, &delta),
                Some(cap) => capped_slopes::<V>(cap, count, probabilities, ds, &lse, &delta),
            }
        };

        let of_rows = |a: &[f32], b: &[f32], sum: &mut [f32]| Product {
            m: count,
            n: wide,
            k: LANES,
            a: a.as_ptr(),
            a_row: LANES,
            a_col: 1,
            b: b.as_ptr(),
            b_row: wide,
            c: sum[keys.start * wide..].as_mut_ptr(),
            c_row: wide,
            add: true,
        };
        let of_dq = Product {
            m: LANES,
            n: wide,
            k: count,
            a: ds.as_ptr(),
            a_row: 1,
            a_col: LANES,
            b: k,
            b_row: k_row,
            c: dq.as_mut_ptr(),
            c_row: wide,
            add: !is_first,
        };
        // SAFETY: tiles of `count` keys by LANES, rows of `wide`, and sums for every key of the segment.
        unsafe {
            if backward.dv.is_some() {
                of_rows(probabilities, do_rows, dv).run::<V>();
            }
            if backward.dk.is_some() {
                of_rows(ds, q_rows, dk).run::<V>();
            }
            if backward.dq.is_some() {
                of_dq.run::<V>();
            }
        }
        is_first = false;
    }
    if let Some(to) = &backward.dq {
        if is_first {
            dq.fill(0.0);
        }
        dq.iter_mut().for_each(|x| *x *= p.scale);
        block.scatter(dq, to);
    }
}

/// Turns scores [keys, LANES] into probabilities p, and do v^T into p (do v^T - delta).
///
/// # Safety
/// Both hold `count` keys, and the machine has V's instructions.
#[inline(always)]
unsafe fn slopes<V: Vector>(
    count: usize,
    scores: &mut [f32],
    ds: &mut [f32],
    lse: &[f32; LANES],
    delta: &[f32; LANES],
) {
    let (scores, ds) = (scores.as_mut_ptr(), ds.as_mut_ptr());
    // SAFETY: offsets stay below count * LANES.
    unsafe {
        for lane in (0..LANES).step_by(V::WIDTH) {
            let (lse, delta) = (V::load(lse.as_ptr().add(lane)), V::load(delta.as_ptr().add(lane)));
            for at in (lane..count * LANES).step_by(LANES) {
                let p = exp2(V::load(scores.add(at)).sub(lse));
                p.store(scores.add(at));
                V::load(ds.add(at)).sub(delta).mul(p).store(ds.add(at));
            }
        }
    }
}

/// As `slopes`, for capped scores, with the derivative of the cap. A masked score has probability 0, and is clamped to -cap,
/// where the derivative is 0 too.
///
/// # Safety
/// As for `slopes`.
#[inline(always)]
unsafe fn capped_slopes<V: Vector>(
    cap: f32,
    count: usize,
    scores: &mut [f32],
    ds: &mut [f32],
    lse: &[f32; LANES],
    delta: &[f32; LANES],
) {
    let (scores, ds) = (scores.as_mut_ptr(), ds.as_mut_ptr());
    // SAFETY: offsets stay below count * LANES.
    unsafe {
        let (least, share, one) = (V::splat(-cap), V::splat(1.0 / cap), V::splat(1.0));
        for lane in (0..LANES).step_by(V::WIDTH) {
            let (lse, delta) = (V::load(lse.as_ptr().add(lane)), V::load(delta.as_ptr().add(lane)));
            for at in (lane..count * LANES).step_by(LANES) {
                let score = V::load(scores.add(at));
                let p = exp2(score.sub(lse));
                p.store(scores.add(at));
                let t = score.max(least).mul(share);
                let slope = one.sub(t.mul(t));
                V::load(ds.add(at)).sub(delta).mul(p).mul(slope).store(ds.add(at));
            }
        }
    }
}
