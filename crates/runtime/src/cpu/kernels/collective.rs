//! Collectives on the CPU: the wire moves bytes, and all additions are done here.
//!
//! A sum over ranks gathers the terms of a block in scratch and adds them by `collective::tree`, element by element, so its
//! bits depend only on the terms and their number. `all_reduce` sums one block on each rank and then gathers the blocks, so a
//! rank sends 2 (ways - 1) / ways of its bytes, as over a ring. The last block is shorter if the extent is not divisible. Large
//! tensors are exchanged in pieces, so that scratch does not grow with them.

use std::ops::Range;

use flatout_ir::ops::collective::{Combine, tree};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Axis, Launch, Op, OpKind};

use super::reductions::reduce::{Shared, add_across, max_across};
use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::rows::{FLOATS, kernel_row};

const F32: &[DType] = &[DType::F32];

pub const KERNELS: &[Kernel] = &[
    Kernel { row: kernel_row("rank", OpKind::Rank, &[DType::I32], Layout::Dense), run: rank },
    Kernel { row: kernel_row("all_gather", OpKind::AllGather, FLOATS, Layout::Dense), run: all_gather },
    Kernel {
        row: KernelRow {
            workspace,
            ..kernel_row("reduce_scatter_tree", OpKind::ReduceScatter, F32, Layout::Dense)
        },
        run: reduce_scatter,
    },
    Kernel {
        row: KernelRow { workspace, ..kernel_row("all_reduce_tree", OpKind::AllReduce, F32, Layout::Dense) },
        run: all_reduce,
    },
];

/// Elements added per task.
const TOGETHER: usize = 16 << 10;
/// Elements over all ranks' blocks that are exchanged at once: 4 MiB.
const PIECE: usize = 1 << 20;

/// Bytes for the terms of the longest block of a piece.
fn workspace(shapes: &Shapes<'_>) -> usize {
    match shapes.node.op.ways() {
        None | Some(1) => 0,
        Some(ways) => ways * longest_block(shapes.ins[0].elements(), ways) * DType::F32.bytes(),
    }
}

/// Elements of a rank's block of a piece.
fn longest_block(extent: usize, ways: usize) -> usize {
    extent.min(PIECE).div_ceil(ways)
}

fn rank(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Rank { axis } = launch.op else { unreachable!("the row is for ranks") };
    if let Some(out) = cx.output(0) {
        // SAFETY: the only element of an i32 output.
        unsafe { *out.at(0).cast::<i32>() = cx.ranks.coordinate(axis) as i32 }
    }
    Ok(())
}

fn all_gather(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::AllGather { axis, ways } = launch.op else { unreachable!("the row is for all_gather") };
    let Some(out) = cx.output(0) else { return Ok(()) };
    // SAFETY: the row guarantees dense tensors, and all_gather never runs in place.
    let (own, all) = unsafe { (cx.input(0).bytes(), out.bytes_mut()) };
    match ways {
        _ if own.is_empty() => Ok(()),
        1 => {
            all.copy_from_slice(own);
            Ok(())
        }
        _ => cx.ranks.exchange(axis, &vec![own; ways], all.chunks_exact_mut(own.len()).collect()),
    }
}

fn reduce_scatter(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::ReduceScatter { axis, ways, base, .. } = launch.op else {
        unreachable!("the row is for reduce_scatter")
    };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let block = out.elements();
    // SAFETY: the only call of this launch.
    let scratch = unsafe { cx.workspace() };
    // SAFETY: the row guarantees dense f32; the output may only overlap the base.
    let x = unsafe { cx.input(0).f32s() }.expect("a dense input");
    let store = |from: usize, sums: &[f32]| {
        for (i, sum) in sums.iter().enumerate().map(|(i, sum)| (from + i, *sum)) {
            // SAFETY: element `i` of base and output; the base is read before the output is written.
            unsafe {
                *out.at(i).cast::<f32>() = if base { *cx.input(1).at(i).cast::<f32>() + sum } else { sum };
            }
        }
    };
    if ways == 1 {
        store(0, x);
        return Ok(());
    }
    let together = longest_block(x.len(), ways).max(1);
    for piece in 0..block.div_ceil(together) {
        let part = chunk(piece, together, block);
        let of_rank = |i: usize| i * block + part.start..i * block + part.end;
        gather_terms(axis, x, part.len(), (0..ways).map(of_rank), scratch, cx)?;
        combine(Combine::Sum, ways, part.len(), scratch, cx);
        store(part.start, &scratch[..part.len()]);
    }
    Ok(())
}

fn all_reduce(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::AllReduce { axis, ways, by, .. } = launch.op else { unreachable!("the row is for all_reduce") };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let (extent, here) = (out.elements(), cx.ranks.coordinate(axis));
    if ways == 1 {
        if !cx.is_in_place(0, 0) {
            // SAFETY: the row guarantees dense tensors, and these do not overlap.
            unsafe { out.bytes_mut().copy_from_slice(cx.input(0).bytes()) }
        }
        return Ok(());
    }
    // SAFETY: the only call of this launch.
    let scratch = unsafe { cx.workspace() };
    for piece in (0..extent).step_by(PIECE) {
        let end = (piece + PIECE).min(extent);
        let longest = longest_block(end - piece, ways);
        let block = |i: usize| (piece + i * longest).min(end)..(piece + (i + 1) * longest).min(end);
        let own = block(here).len();
        {
            // SAFETY: the row guarantees dense f32; the slice is dropped before the output, which may overlap it, is written.
            let x = unsafe { cx.input(0).f32s() }.expect("a dense input");
            gather_terms(axis, x, own, (0..ways).map(block), scratch, cx)?;
        }
        combine(by, ways, own, scratch, cx);
        // SAFETY: the row guarantees dense f32; no slice of the input is alive.
        let mut rest = &mut unsafe { out.f32s_mut() }.expect("a dense output")[piece..end];
        let mut receive = vec![];
        for i in 0..ways {
            let (next, behind) = rest.split_at_mut(block(i).len());
            receive.push(bytes_mut(next));
            rest = behind;
        }
        cx.ranks.exchange(axis, &vec![bytes(&scratch[..own]); ways], receive)?;
    }
    Ok(())
}

/// Sends each rank its block of `x`, and gathers all ranks' terms of this rank's block.
fn gather_terms(
    axis: Axis,
    x: &[f32],
    own: usize,
    blocks: impl Iterator<Item = Range<usize>>,
    scratch: &mut [f32],
    cx: &Context<'_>,
) -> Result<(), String> {
    let send: Vec<&[u8]> = blocks.map(|block| bytes(&x[block])).collect();
    let mut rest = &mut scratch[..send.len() * own];
    let mut receive = vec![];
    for _ in &send {
        let (next, behind) = rest.split_at_mut(own);
        receive.push(bytes_mut(next));
        rest = behind;
    }
    cx.ranks.exchange(axis, &send, receive)
}

/// Combines adjacent terms into the first.
fn combine(by: Combine, ways: usize, own: usize, terms: &mut [f32], cx: &Context<'_>) {
    let onto = match by {
        Combine::Sum => add_across,
        Combine::Max => max_across,
    };
    let all = Shared::new(terms);
    cx.parallel(own.div_ceil(TOGETHER), (ways * own.min(TOGETHER) * DType::F32.bytes()).max(1), |task| {
        let part = chunk(task, TOGETHER, own);
        let of = |term: usize| term * own + part.start..term * own + part.end;
        // SAFETY: this task's elements of two different terms.
        tree(ways, |sum, term| unsafe { onto(all.slice(of(term)), all.slice(of(sum))) });
    });
}

fn bytes(values: &[f32]) -> &[u8] {
    // SAFETY: any byte of an f32 may be read, and the length is that of `values` in bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: as above, under an exclusive borrow; any bytes are a valid f32.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
