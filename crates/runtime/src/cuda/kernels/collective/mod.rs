//! Collectives on the GPU: NCCL moves data between ranks, and reduces it where the order of additions is free.
//!
//! If sums have a fixed order, NCCL only exchanges: the terms of a block are gathered in scratch, and `tree_sum` adds them with
//! the same tree as the CPU and lanes do, whatever algorithm, ring or environment NCCL uses. `all_reduce` sums one block on
//! each rank and then exchanges the blocks, so a rank sends 2 (ways - 1) / ways of its bytes, as over a ring; small tensors are
//! instead gathered whole and summed by every rank, which takes one exchange instead of two. Large tensors are processed in
//! pieces, so that scratch does not grow with them. All work is enqueued without waiting, so it is captured like any other.

mod rank;
pub mod tree_sum;

use std::ops::Range;
use std::sync::Arc;

use flatout_ir::ops::collective::{Combine, Order};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Axis, Launch, Op, OpKind, View};

use crate::cuda::context::{CudaError, Facts, Kernel, Prepare, Prepared, Source, Stream, Work, sequence};
use crate::cuda::driver::Driver;
use crate::cuda::driver::nccl::{Communicator, Reduction, Transfer};
use crate::rows::{FLOATS, kernel_row};
use tree_sum::{Places, TOGETHER, TreeSum};

const F32: &[DType] = &[DType::F32];

/// Of two rows for one operation the first is used; a deterministic target has only the second.
pub const KERNELS: &[Kernel] = &[
    Kernel {
        row: kernel_row("cuda.rank", OpKind::Rank, &[DType::I32], Layout::Dense),
        sources: |_, _| vec![rank::source()],
        prepare: rank::prepare,
    },
    Kernel {
        row: kernel_row("cuda.all_gather", OpKind::AllGather, FLOATS, Layout::Dense),
        sources: |_, _| vec![],
        prepare: all_gather,
    },
    Kernel {
        row: KernelRow {
            workspace: sum_workspace,
            deterministic: false,
            ..kernel_row("cuda.reduce_scatter", OpKind::ReduceScatter, F32, Layout::Dense)
        },
        sources: |launch, _| Vec::from_iter(base_sum(launch).map(TreeSum::source)),
        prepare: reduce_scatter,
    },
    Kernel {
        row: KernelRow {
            workspace: terms_workspace,
            ..kernel_row("cuda.reduce_scatter_tree", OpKind::ReduceScatter, F32, Layout::Dense)
        },
        sources: tree_sources,
        prepare: reduce_scatter_tree,
    },
    Kernel {
        row: KernelRow {
            deterministic: false,
            ..kernel_row("cuda.all_reduce", OpKind::AllReduce, F32, Layout::Dense)
        },
        sources: |_, _| vec![],
        prepare: all_reduce,
    },
    Kernel {
        row: KernelRow {
            workspace: terms_workspace,
            ..kernel_row("cuda.all_reduce_tree", OpKind::AllReduce, F32, Layout::Dense)
        },
        sources: tree_sources,
        prepare: all_reduce_tree,
    },
];

/// Elements over all ranks' blocks that are exchanged at once: 64 MiB.
const PIECE: usize = 16 << 20;
/// Largest number of elements over all ranks that are gathered whole: 256 KiB.
const SMALL: usize = 64 << 10;

/// How the terms of a sum over ranks are exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exchange {
    /// Every rank gets all terms of all elements.
    Whole,
    /// Each rank gets the terms of its own block, of at most this many elements.
    Blocks { longest: usize },
}

impl Exchange {
    /// For an operation whose input has `elements` elements on each rank.
    fn of(op: &Op, elements: usize) -> Exchange {
        let ways = op.ways().unwrap_or(1);
        match op {
            Op::AllReduce { .. } if elements.saturating_mul(ways) <= SMALL => Exchange::Whole,
            _ => Exchange::Blocks { longest: elements.min(PIECE).div_ceil(ways).next_multiple_of(TOGETHER) },
        }
    }

    /// Distance between terms in scratch, in elements.
    fn stride(self, elements: usize) -> usize {
        match self {
            Exchange::Whole => elements.next_multiple_of(TOGETHER),
            Exchange::Blocks { longest } => longest,
        }
    }
}

/// Scratch for the terms that are exchanged at once; 0 for reductions that do not depend on an order, which NCCL does.
fn terms_workspace(shapes: &Shapes<'_>) -> usize {
    let (op, elements) = (&shapes.node.op, shapes.ins[0].elements());
    match op {
        Op::AllReduce { by: Combine::Max, .. } | Op::AllReduce { ways: 1, .. } => 0,
        _ => op.ways().unwrap_or(1) * Exchange::of(op, elements).stride(elements) * DType::F32.bytes(),
    }
}

/// Scratch for NCCL's sum if a base is added to it.
fn sum_workspace(shapes: &Shapes<'_>) -> usize {
    match shapes.node.op {
        Op::ReduceScatter { base: true, .. } => shapes.outs[0].bytes(),
        _ => 0,
    }
}

/// The addition of a base after a sum by NCCL.
fn base_sum(launch: &Launch) -> Option<TreeSum> {
    matches!(launch.op, Op::ReduceScatter { base: true, .. })
        .then(|| TreeSum { ways: 1, ..launch_sum(launch) })
}

/// The sum of a launch's terms.
fn launch_sum(launch: &Launch) -> TreeSum {
    let has_base = matches!(launch.op, Op::ReduceScatter { base: true, .. });
    let views = launch.ins[1..].iter().chain(launch.outs.iter().flatten());
    let is_aligned = |view: &View| view.offset.is_multiple_of(TOGETHER * DType::F32.bytes());
    TreeSum { ways: launch.op.ways().unwrap_or(1), has_base, is_aligned: views.clone().all(is_aligned) }
}

fn tree_sources(launch: &Launch, _: &Facts) -> Vec<Source> {
    match launch.op {
        Op::AllReduce { by: Combine::Max, .. } | Op::AllReduce { ways: 1, .. } => vec![],
        _ => vec![launch_sum(launch).source()],
    }
}

/// The parts of a launch that every collective here needs.
struct Operands<'a, 'b> {
    launch: &'a Launch,
    p: &'a Prepare<'b>,
    axis: Axis,
    ways: usize,
    /// `None` for a single rank without a communicator, which copies.
    communicator: Option<&'b Arc<Communicator>>,
    from: u64,
    to: u64,
}

impl<'a, 'b> Operands<'a, 'b> {
    /// `None` if the output is not read.
    fn of(launch: &'a Launch, p: &'a Prepare<'b>) -> Result<Option<Operands<'a, 'b>>, CudaError> {
        let (Some(axis), Some(ways)) = (launch.op.axis(), launch.op.ways()) else {
            unreachable!("the row is for an exchange")
        };
        let communicator = p.communicator(axis);
        match communicator {
            None if ways > 1 => {
                return Err(CudaError::new(format!(
                    "{ways} ranks exchange along {}, and the session was opened without a communicator",
                    axis.name()
                )));
            }
            Some(communicator) if communicator.ranks() != ways => {
                return Err(CudaError::new(format!(
                    "{ways} ranks exchange along {}, and the communicator has {}",
                    axis.name(),
                    communicator.ranks()
                )));
            }
            _ => {}
        }
        let Some(out) = &launch.outs[0] else { return Ok(None) };
        let (from, to) = (p.address(&launch.ins[0]), p.address(out));
        Ok(Some(Operands { launch, p, axis, ways, communicator, from, to }))
    }

    fn elements(&self) -> usize {
        self.launch.ins[0].elements()
    }

    fn scratch(&self) -> Result<u64, CudaError> {
        let view = self.launch.workspace.as_ref();
        view.map(|view| self.p.address(view)).ok_or_else(|| CudaError::new("the launch has no scratch"))
    }

    fn base(&self) -> Option<u64> {
        self.launch.ins.get(1).map(|view| self.p.address(view))
    }

    /// A call of NCCL, or a copy for a single rank without a communicator.
    fn call(&self, from: u64, to: u64, call: Call, elements: usize, bytes: usize) -> Box<dyn Work> {
        match self.communicator {
            Some(communicator) => {
                Box::new(Whole { communicator: Arc::clone(communicator), from, to, call, elements })
            }
            None => Box::new(Copy { driver: self.p.driver(), from, to, bytes }),
        }
    }

    /// Transfers to and from the ranks of the group.
    fn transfers(&self, send: Vec<Transfer>, receive: Vec<Transfer>) -> Box<dyn Work> {
        match self.communicator {
            Some(communicator) => {
                Box::new(Transfers { communicator: Arc::clone(communicator), send, receive })
            }
            None => {
                let copy = |(from, to): (Transfer, Transfer)| {
                    let (driver, bytes) = (self.p.driver(), from.elements * DType::F32.bytes());
                    Box::new(Copy { driver, from: from.at, to: to.at, bytes }) as Box<dyn Work>
                };
                sequence(send.into_iter().zip(receive).map(copy).collect())
            }
        }
    }
}

/// The address `elements` f32 elements after another.
fn element_address(at: u64, elements: usize) -> u64 {
    at + (elements * DType::F32.bytes()) as u64
}

fn all_gather(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Some(operands) = Operands::of(launch, p)? else { return Ok(sequence(vec![])) };
    let bytes = operands.elements() * launch.ins[0].dtype.bytes();
    Ok(operands.call(operands.from, operands.to, Call::AllGather, bytes, bytes))
}

/// Refuses to let NCCL choose the order of a sum whose order is fixed.
fn check_free_order(order: Order, ways: usize) -> Result<(), CudaError> {
    match order == Order::Tree && ways > 1 {
        true => Err(CudaError::new("the sum has the order of a tree, which NCCL does not keep")),
        false => Ok(()),
    }
}

fn reduce_scatter(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Op::ReduceScatter { ways, order, .. } = launch.op else {
        unreachable!("the row is for reduce_scatter")
    };
    check_free_order(order, ways)?;
    let Some(operands) = Operands::of(launch, p)? else { return Ok(sequence(vec![])) };
    let own = operands.elements() / ways;
    let bytes = own * DType::F32.bytes();
    let Some(sum) = base_sum(launch) else {
        return Ok(operands.call(operands.from, operands.to, Call::ReduceScatter, own, bytes));
    };
    let terms = operands.scratch()?;
    let at = Places { terms, stride: own, base: operands.base(), out: operands.to };
    Ok(sequence(vec![
        operands.call(operands.from, terms, Call::ReduceScatter, own, bytes),
        sum.work(at, own, p)?,
    ]))
}

fn all_reduce(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Op::AllReduce { ways, by, order, .. } = launch.op else { unreachable!("the row is for all_reduce") };
    if by == Combine::Sum {
        check_free_order(order, ways)?;
    }
    let Some(operands) = Operands::of(launch, p)? else { return Ok(sequence(vec![])) };
    let elements = operands.elements();
    let by = if by == Combine::Sum { Reduction::Sum } else { Reduction::Max };
    Ok(operands.call(
        operands.from,
        operands.to,
        Call::AllReduce(by),
        elements,
        elements * DType::F32.bytes(),
    ))
}

fn reduce_scatter_tree(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Some(operands) = Operands::of(launch, p)? else { return Ok(sequence(vec![])) };
    let (ways, block) = (operands.ways, operands.elements() / operands.ways);
    let Exchange::Blocks { longest } = Exchange::of(&launch.op, operands.elements()) else {
        unreachable!("blocks are exchanged as blocks")
    };
    let (terms, sum) = (operands.scratch()?, launch_sum(launch));
    let mut works = vec![];
    for piece in pieces(block, longest) {
        let elements = piece.len();
        let sent = |rank| Transfer {
            rank,
            at: element_address(operands.from, rank * block + piece.start),
            elements,
        };
        let received = |rank| Transfer { rank, at: element_address(terms, rank * longest), elements };
        works.push(operands.transfers((0..ways).map(sent).collect(), (0..ways).map(received).collect()));
        let base = operands.base().map(|base| element_address(base, piece.start));
        let at = Places { terms, stride: longest, base, out: element_address(operands.to, piece.start) };
        works.push(sum.work(at, elements, p)?);
    }
    Ok(sequence(works))
}

fn all_reduce_tree(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Op::AllReduce { by, ways, .. } = launch.op else { unreachable!("the row is for all_reduce") };
    // A maximum, or a sum of one term, does not depend on an order.
    if by == Combine::Max || ways == 1 {
        return all_reduce(launch, p);
    }
    let Some(operands) = Operands::of(launch, p)? else { return Ok(sequence(vec![])) };
    let (all, here) = (operands.elements(), p.coordinate(operands.axis));
    let (terms, sum) = (operands.scratch()?, launch_sum(launch));
    let longest = match Exchange::of(&launch.op, all) {
        Exchange::Blocks { longest } => longest,
        // One term per rank, each aligned for vector accesses.
        exchange @ Exchange::Whole => {
            let stride = exchange.stride(all);
            let sent = |rank| Transfer { rank, at: operands.from, elements: all };
            let received = |rank| Transfer { rank, at: element_address(terms, rank * stride), elements: all };
            let gather = operands.transfers((0..ways).map(sent).collect(), (0..ways).map(received).collect());
            let at = Places { terms, stride, base: None, out: operands.to };
            return Ok(sequence(vec![gather, sum.work(at, all, p)?]));
        }
    };
    let mut works = vec![];
    for piece in pieces(all, longest * ways) {
        let block = |rank: usize| {
            let place = |at: usize| (piece.start + at * longest).min(piece.end);
            place(rank)..place(rank + 1)
        };
        let transfer = |rank: usize, at: u64, of: Range<usize>| Transfer { rank, at, elements: of.len() };
        let own = block(here);
        let sent =
            |rank: usize| transfer(rank, element_address(operands.from, block(rank).start), block(rank));
        let received = |rank: usize| transfer(rank, element_address(terms, rank * longest), own.clone());
        works.push(operands.transfers((0..ways).map(sent).collect(), (0..ways).map(received).collect()));
        let (base, out) = (None, element_address(operands.to, own.start));
        if !own.is_empty() {
            works.push(sum.work(Places { terms, stride: longest, base, out }, own.len(), p)?);
        }
        // Each rank sends its summed block to all others.
        let others = || (0..ways).filter(|rank| *rank != here);
        let sent = |rank: usize| transfer(rank, out, own.clone());
        let received =
            |rank: usize| transfer(rank, element_address(operands.to, block(rank).start), block(rank));
        works.push(operands.transfers(others().map(sent).collect(), others().map(received).collect()));
    }
    Ok(sequence(works))
}

/// Splits into consecutive ranges of up to `together` elements.
fn pieces(elements: usize, together: usize) -> impl Iterator<Item = Range<usize>> {
    let together = together.max(1);
    (0..elements).step_by(together).map(move |start| start..(start + together).min(elements))
}

/// An NCCL call over whole tensors.
#[derive(Clone, Copy, Debug)]
enum Call {
    /// Counted in bytes.
    AllGather,
    ReduceScatter,
    AllReduce(Reduction),
}

struct Whole {
    communicator: Arc<Communicator>,
    from: u64,
    to: u64,
    call: Call,
    elements: usize,
}

impl Work for Whole {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        let Whole { communicator, from, to, call, elements } = self;
        // SAFETY: `launch::check` found both ranges to lie in the arena, which outlives the work on its stream.
        unsafe {
            match call {
                Call::AllGather => communicator.all_gather(*from, *to, *elements, stream),
                Call::ReduceScatter => communicator.reduce_scatter(*from, *to, *elements, stream),
                Call::AllReduce(by) => communicator.all_reduce(*from, *to, *elements, *by, stream),
            }
        }
    }
}

/// Point-to-point transfers between ranks.
struct Transfers {
    communicator: Arc<Communicator>,
    send: Vec<Transfer>,
    receive: Vec<Transfer>,
}

impl Work for Transfers {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: all ranges lie in the arena, which outlives the work on its stream; received ranges are disjoint.
        unsafe { self.communicator.exchange(&self.send, &self.receive, stream) }
    }
}

/// The exchange of a single rank with itself.
struct Copy {
    driver: &'static Driver,
    from: u64,
    to: u64,
    bytes: usize,
}

impl Work for Copy {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        if self.from == self.to || self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: `launch::check` found both ranges to lie in the arena, which outlives the work on its stream.
        unsafe { self.driver.copy(self.from, self.to, self.bytes, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_holds_the_terms_of_a_piece_and_vectors_begin_at_every_term() {
        let (axis, order) = (Axis::Shard, Order::Tree);
        for ways in [1, 2, 3, 4, 8, 16] {
            let sum = Op::AllReduce { axis, ways, by: Combine::Sum, order };
            let scatter = Op::ReduceScatter { axis, ways, order, base: false };
            for elements in [1, 37, 4096, 70_001, PIECE, 3 * PIECE + 5] {
                let exchange = Exchange::of(&sum, elements);
                let stride = exchange.stride(elements);
                assert!(stride.is_multiple_of(TOGETHER), "{elements} among {ways}: {stride}");
                assert_eq!(exchange == Exchange::Whole, elements * ways <= SMALL, "{elements} among {ways}");
                assert!(ways * stride <= SMALL.max(PIECE) + ways * TOGETHER, "{elements} among {ways}");
                // Every element is in exactly one block of one piece.
                if let Exchange::Blocks { longest } = exchange {
                    let covered: usize = pieces(elements, longest * ways).map(|piece| piece.len()).sum();
                    assert_eq!(covered, elements);
                    assert!(pieces(elements, longest * ways).all(|piece| piece.len() <= longest * ways));
                }
                assert_ne!(Exchange::of(&scatter, elements * ways), Exchange::Whole);
            }
        }
    }
}
