//! dq, dk and dv from q, k, v, o, lse and do.
//!
//! With p the probabilities, recomputed from lse, and delta the sums of do * o:
//! ds = p (do v^T - delta), dq = scale ds k, dk = scale ds^T q, dv = p^T do.
//!
//! A task is a (segment, key head) unit: it owns the unit's dk and dv, which it sums in f32 over its blocks in order,
//! while each block's dq is finished in one walk over its keys. Where there are few units, each is cut into parts that
//! take every n-th block and keep sums of their own, added up in the order of the parts.

use std::ops::Range;

use flatout_ir::target::Shapes;
use flatout_ir::{Launch, Op};

use super::super::context::Context;
use super::super::math;
use super::super::reduce::Shared;
use super::super::tensor::{self, Tensor};
use super::mask::{LANES, Sees};
use super::tile::{Product, Vector, dispatch, exp2};
use super::{Block, KEYS, Problem, bytes, extents, fill, key_shape, padded, share, take, tiles, to_lanes};

/// Below this many units they are cut into parts, at most four: a part costs sums of the unit's size.
const UNITS: usize = 16;
const MOST_PARTS: usize = 4;

fn parts(units: usize) -> usize {
    (UNITS / units.max(1)).clamp(1, MOST_PARTS)
}

/// Floats of a worker: q and do by rows and in lanes, dq, p, ds, and the tiles of k and v.
fn floats(size: usize) -> usize {
    let wide = padded(size);
    5 * LANES * wide + 2 * KEYS * LANES + 2 * KEYS * wide
}

/// Floats of the sums of dk and dv of one unit.
fn sums(size: usize, longest: usize) -> usize {
    2 * longest * padded(size)
}

/// Sums belong to workers where a unit is one task, else to tasks.
pub(super) fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::AttentionGrad { k, .. } = shapes.node.op else { unreachable!("listed for its gradient") };
    let (size, tokens, kv_heads) = key_shape(shapes);
    let (longest, units) = extents(k, tokens, kv_heads);
    let holders = if parts(units) == 1 { shapes.cores } else { units * parts(units) };
    bytes(shapes.cores * floats(size) + holders * sums(size, longest))
}

struct Backward<'a> {
    problem: Problem<'a>,
    o: Tensor<'a>,
    lse: Tensor<'a>,
    d_o: Tensor<'a>,
    dq: Option<Tensor<'a>>,
    dk: Option<Tensor<'a>>,
    dv: Option<Tensor<'a>>,
}

pub(super) fn run(launch: &Launch, ctx: &Context<'_>) -> Result<(), String> {
    let Op::AttentionGrad { k, .. } = launch.op else { unreachable!("listed for its gradient") };
    let problem = Problem::new(launch, ctx)?;
    let n = problem.inputs;
    let backward = Backward {
        problem,
        o: ctx.input(n),
        lse: ctx.input(n + 1),
        d_o: ctx.input(n + 2),
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
    let parts = parts(units);
    let (floats, sums) = (floats(p.size), sums(p.size, longest));
    // SAFETY: taken once, here.
    let memory = unsafe { ctx.workspace() };
    let holders = if parts == 1 { 0 } else { units * parts };
    let of_worker = if parts == 1 { floats + sums } else { floats };
    let (of_tasks, of_workers) = memory.split_at_mut(holders * sums);
    let workers = p.workers(ctx).min(of_workers.len() / of_worker);
    let (of_tasks, of_workers) = (Shared::new(of_tasks), Shared::new(of_workers));

    share(ctx, workers, units * parts, |worker, task| {
        let p = &backward.problem;
        let (unit, part) = (task / parts, task % parts);
        let (segment, kv_head) = (unit / p.kv_heads, unit % p.kv_heads);
        let rows = &p.cut.segments[segment];
        // SAFETY: a worker runs one task at a time, and the pieces of workers are disjoint.
        let mut scratch = unsafe { of_workers.slice(worker * of_worker..(worker + 1) * of_worker) };
        let sum = if parts == 1 {
            take(&mut scratch, sums)
        } else {
            // SAFETY: the piece belongs to this task until all tasks are done.
            unsafe { of_tasks.slice(task * sums..(task + 1) * sums) }
        };
        let sum = &mut sum[..self::sums(p.size, rows.k.len())];
        sum.fill(0.0);
        let (dk, dv) = sum.split_at_mut(sum.len() / 2);
        for index in (part..p.blocks(rows)).step_by(parts) {
            let block = p.block(segment, kv_head, index);
            // SAFETY: the launch was checked: tensors hold what their shapes say; blocks share no row of dq.
            unsafe { differentiate(&backward, &block, dk, dv, scratch) }
        }
        if parts == 1 {
            store(&backward.dk, &rows.k, kv_head, dk, p.scale);
            store(&backward.dv, &rows.k, kv_head, dv, 1.0);
        }
    });
    if parts == 1 {
        return Ok(());
    }
    share(ctx, workers, units, |_, unit| {
        let p = &backward.problem;
        let (segment, kv_head) = (unit / p.kv_heads, unit % p.kv_heads);
        let keys = &p.cut.segments[segment].k;
        let used = self::sums(p.size, keys.len());
        // SAFETY: every part is done, and this task alone adds up this unit's.
        let all = unsafe { of_tasks.slice(unit * parts * sums..(unit + 1) * parts * sums) };
        let (total, others) = all.split_at_mut(sums);
        let total = &mut total[..used];
        for part in others.chunks_exact(sums) {
            total.iter_mut().zip(part).for_each(|(total, x)| *total += *x);
        }
        let (dk, dv) = total.split_at_mut(used / 2);
        store(&backward.dk, keys, kv_head, dk, p.scale);
        store(&backward.dv, keys, kv_head, dv, 1.0);
    });
    Ok(())
}

/// Writes a unit's sums, times a factor.
fn store(to: &Option<Tensor<'_>>, keys: &Range<usize>, kv_head: usize, from: &mut [f32], factor: f32) {
    let Some(to) = to else { return };
    let size = to.dims[2];
    for (token, row) in keys.clone().zip(from.chunks_exact_mut(padded(size))) {
        row.iter_mut().for_each(|x| *x *= factor);
        let at = to.at(token * to.strides[0] + kv_head * to.strides[1]);
        // SAFETY: token and head lie in the tensor, a row has no gaps, and only its unit writes it.
        unsafe { tensor::store(to.dtype, at, 1, &row[..size]) };
    }
}

dispatch! {
    /// Adds a block's share to dk and dv, [keys of the segment, padded], and writes its rows of dq.
    ///
    /// # Safety
    /// The tensors of the problem hold their shapes, and nobody else writes the block's rows of dq.
    differentiate = differentiate_with(
        backward: &Backward<'_>,
        block: &Block<'_>,
        dk: &mut [f32],
        dv: &mut [f32],
        scratch: &mut [f32],
    )
}

/// # Safety
/// As `differentiate`, and the machine has V's instructions.
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
    // Loops, not closures handed to the standard library: those would be compiled without V's instructions.
    let mut delta = [0.0; LANES];
    for (lane, delta) in delta.iter_mut().enumerate() {
        let row = lane * wide..(lane + 1) * wide;
        *delta = math::dot(&o_rows[row.clone()], &do_rows[row]);
    }
    // SAFETY: the instructions are the caller's.
    unsafe {
        to_lanes::<V>(q_rows, wide, p.scale * std::f32::consts::LOG2_E, q_lanes);
        to_lanes::<V>(do_rows, wide, 1.0, do_lanes);
    }
    // A row that sees nothing has lse -inf and only hidden scores: any finite number gives it probabilities of 0.
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
        if sees == Sees::Some {
            block.visible.hide(&keys, probabilities);
        }
        // SAFETY: both hold `count` keys; the instructions are the caller's.
        unsafe { slopes::<V>(count, probabilities, ds, &lse, &delta) };

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

/// Scores [keys, LANES] become probabilities p, and do v^T becomes p (do v^T - delta).
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
