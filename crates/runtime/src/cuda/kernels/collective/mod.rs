//! Collectives on the GPU: NCCL moves bytes between ranks, and adds them where their order is free.
//!
//! Where sums have one order, NCCL only exchanges: terms of a block come side by side into scratch, and `tree_sum` adds them by
//! the tree that the CPU and lanes add by, whatever algorithm, ring or environment NCCL has. `all_reduce` adds a block on each
//! rank and then exchanges the blocks, so a rank sends 2 (ways - 1) / ways of its bytes, as over a ring; what is small is
//! gathered whole instead and added by every rank, which is one exchange and not two. Large tensors go a piece at a time, so
//! that scratch does not grow with them. All of it is enqueued and nothing waits, so it is captured like any other work.

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
use crate::cuda::driver::nccl::{Communicator, Passage, Reduction};
use crate::rows::{FLOATS, kernel_row};
use tree_sum::{Places, TOGETHER, TreeSum};

const F32: &[DType] = &[DType::F32];

/// Of two rows for one operation the first is taken; a target that must be deterministic has the second alone.
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
            workspace: before_base,
            deterministic: false,
            ..kernel_row("cuda.reduce_scatter", OpKind::ReduceScatter, F32, Layout::Dense)
        },
        sources: |launch, _| Vec::from_iter(onto_base(launch).map(TreeSum::source)),
        prepare: reduce_scatter,
    },
    Kernel {
        row: KernelRow {
            workspace: of_terms,
            ..kernel_row("cuda.reduce_scatter_tree", OpKind::ReduceScatter, F32, Layout::Dense)
        },
        sources: of_tree,
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
            workspace: of_terms,
            ..kernel_row("cuda.all_reduce_tree", OpKind::AllReduce, F32, Layout::Dense)
        },
        sources: of_tree,
        prepare: all_reduce_tree,
    },
];

/// Elements of all ranks' blocks that are exchanged at once: 64 MiB.
const PIECE: usize = 16 << 20;
/// The most elements of all ranks together that are gathered whole: 256 KiB.
const SMALL: usize = 64 << 10;

/// How the elements of a sum over ranks are exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exchange {
    /// Every rank gets all terms of all elements.
    Whole,
    /// Each rank gets the terms of its own block, of as many elements at most.
    Blocks { longest: usize },
}

impl Exchange {
    /// Of an operation whose input has `elements` elements on each rank.
    fn of(op: &Op, elements: usize) -> Exchange {
        let ways = op.ways().unwrap_or(1);
        match op {
            Op::AllReduce { .. } if elements.saturating_mul(ways) <= SMALL => Exchange::Whole,
            _ => Exchange::Blocks { longest: elements.min(PIECE).div_ceil(ways).next_multiple_of(TOGETHER) },
        }
    }

    /// Elements of one term in scratch, the distance of terms.
    fn stride(self, elements: usize) -> usize {
        match self {
            Exchange::Whole => elements.next_multiple_of(TOGETHER),
            Exchange::Blocks { longest } => longest,
        }
    }
}

/// Scratch for the terms of the elements that are exchanged at once. NCCL needs none for what no order changes.
fn of_terms(shapes: &Shapes<'_>) -> usize {
    let (op, elements) = (&shapes.node.op, shapes.ins[0].elements());
    match op {
        Op::AllReduce { by: Combine::Max, .. } | Op::AllReduce { ways: 1, .. } => 0,
        _ => op.ways().unwrap_or(1) * Exchange::of(op, elements).stride(elements) * DType::F32.bytes(),
    }
}

/// Scratch for NCCL's sum where a base is added to it.
fn before_base(shapes: &Shapes<'_>) -> usize {
    match shapes.node.op {
        Op::ReduceScatter { base: true, .. } => shapes.outs[0].bytes(),
        _ => 0,
    }
}

/// The addition of a base behind a sum that NCCL made.
fn onto_base(launch: &Launch) -> Option<TreeSum> {
    matches!(launch.op, Op::ReduceScatter { base: true, .. }).then(|| TreeSum { ways: 1, ..added(launch) })
}

/// The sum that a launch makes of its terms.
fn added(launch: &Launch) -> TreeSum {
    let has_base = matches!(launch.op, Op::ReduceScatter { base: true, .. });
    let views = launch.ins[1..].iter().chain(launch.outs.iter().flatten());
    let is_aligned = |view: &View| view.offset.is_multiple_of(TOGETHER * DType::F32.bytes());
    TreeSum { ways: launch.op.ways().unwrap_or(1), has_base, is_aligned: views.clone().all(is_aligned) }
}

fn of_tree(launch: &Launch, _: &Facts) -> Vec<Source> {
    match launch.op {
        Op::AllReduce { by: Combine::Max, .. } | Op::AllReduce { ways: 1, .. } => vec![],
        _ => vec![added(launch).source()],
    }
}

/// The parts of a launch that every collective here looks at.
struct Parts<'a, 'b> {
    launch: &'a Launch,
    p: &'a Prepare<'b>,
    axis: Axis,
    ways: usize,
    /// `None` where one rank has nobody to exchange with and no communicator: it copies.
    communicator: Option<&'b Arc<Communicator>>,
    from: u64,
    to: u64,
}

impl<'a, 'b> Parts<'a, 'b> {
    /// `None` where nobody reads the output.
    fn of(launch: &'a Launch, p: &'a Prepare<'b>) -> Result<Option<Parts<'a, 'b>>, CudaError> {
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
        Ok(Some(Parts { launch, p, axis, ways, communicator, from, to }))
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

    /// A call of NCCL; a copy where one rank has no communicator.
    fn call(&self, from: u64, to: u64, call: Call, elements: usize, bytes: usize) -> Box<dyn Work> {
        match self.communicator {
            Some(communicator) => {
                Box::new(Whole { communicator: Arc::clone(communicator), from, to, call, elements })
            }
            None => Box::new(Copy { driver: self.p.driver(), from, to, bytes }),
        }
    }

    /// Passages to and from the ranks of the group.
    fn passages(&self, send: Vec<Passage>, receive: Vec<Passage>) -> Box<dyn Work> {
        match self.communicator {
            Some(communicator) => Box::new(Passing { communicator: Arc::clone(communicator), send, receive }),
            None => {
                let copy = |(from, to): (Passage, Passage)| {
                    let (driver, bytes) = (self.p.driver(), from.elements * DType::F32.bytes());
                    Box::new(Copy { driver, from: from.at, to: to.at, bytes }) as Box<dyn Work>
                };
                sequence(send.into_iter().zip(receive).map(copy).collect())
            }
        }
    }
}

/// The address of an element behind another.
fn behind(at: u64, elements: usize) -> u64 {
    at + (elements * DType::F32.bytes()) as u64
}

fn all_gather(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Some(parts) = Parts::of(launch, p)? else { return Ok(sequence(vec![])) };
    let bytes = parts.elements() * launch.ins[0].dtype.bytes();
    Ok(parts.call(parts.from, parts.to, Call::AllGather, bytes, bytes))
}

/// Refuses to let NCCL choose the order of a sum that has one.
fn is_free(order: Order, ways: usize) -> Result<(), CudaError> {
    match order == Order::Tree && ways > 1 {
        true => Err(CudaError::new("the sum has the order of a tree, which NCCL does not keep")),
        false => Ok(()),
    }
}

fn reduce_scatter(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Op::ReduceScatter { ways, order, .. } = launch.op else {
        unreachable!("the row is for reduce_scatter")
    };
    is_free(order, ways)?;
    let Some(parts) = Parts::of(launch, p)? else { return Ok(sequence(vec![])) };
    let own = parts.elements() / ways;
    let bytes = own * DType::F32.bytes();
    let Some(sum) = onto_base(launch) else {
        return Ok(parts.call(parts.from, parts.to, Call::ReduceScatter, own, bytes));
    };
    let terms = parts.scratch()?;
    let at = Places { terms, stride: own, base: parts.base(), out: parts.to };
    Ok(sequence(vec![parts.call(parts.from, terms, Call::ReduceScatter, own, bytes), sum.work(at, own, p)?]))
}

fn all_reduce(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Op::AllReduce { ways, by, order, .. } = launch.op else { unreachable!("the row is for all_reduce") };
    if by == Combine::Sum {
        is_free(order, ways)?;
    }
    let Some(parts) = Parts::of(launch, p)? else { return Ok(sequence(vec![])) };
    let elements = parts.elements();
    let by = if by == Combine::Sum { Reduction::Sum } else { Reduction::Max };
    Ok(parts.call(parts.from, parts.to, Call::AllReduce(by), elements, elements * DType::F32.bytes()))
}

fn reduce_scatter_tree(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Some(parts) = Parts::of(launch, p)? else { return Ok(sequence(vec![])) };
    let (ways, block) = (parts.ways, parts.elements() / parts.ways);
    let Exchange::Blocks { longest } = Exchange::of(&launch.op, parts.elements()) else {
        unreachable!("blocks are exchanged as blocks")
    };
    let (terms, sum) = (parts.scratch()?, added(launch));
    let mut works = vec![];
    for piece in pieces(block, longest) {
        let elements = piece.len();
        let sent = |rank| Passage { rank, at: behind(parts.from, rank * block + piece.start), elements };
        let received = |rank| Passage { rank, at: behind(terms, rank * longest), elements };
        works.push(parts.passages((0..ways).map(sent).collect(), (0..ways).map(received).collect()));
        let base = parts.base().map(|base| behind(base, piece.start));
        let at = Places { terms, stride: longest, base, out: behind(parts.to, piece.start) };
        works.push(sum.work(at, elements, p)?);
    }
    Ok(sequence(works))
}

fn all_reduce_tree(launch: &Launch, p: &Prepare<'_>) -> Prepared {
    let Op::AllReduce { by, ways, .. } = launch.op else { unreachable!("the row is for all_reduce") };
    // No order changes a maximum, or a sum of one term.
    if by == Combine::Max || ways == 1 {
        return all_reduce(launch, p);
    }
    let Some(parts) = Parts::of(launch, p)? else { return Ok(sequence(vec![])) };
    let (all, here) = (parts.elements(), p.coordinate(parts.axis));
    let (terms, sum) = (parts.scratch()?, added(launch));
    let longest = match Exchange::of(&launch.op, all) {
        Exchange::Blocks { longest } => longest,
        // A term a rank, each where a vector may begin.
        exchange @ Exchange::Whole => {
            let stride = exchange.stride(all);
            let sent = |rank| Passage { rank, at: parts.from, elements: all };
            let received = |rank| Passage { rank, at: behind(terms, rank * stride), elements: all };
            let gather = parts.passages((0..ways).map(sent).collect(), (0..ways).map(received).collect());
            let at = Places { terms, stride, base: None, out: parts.to };
            return Ok(sequence(vec![gather, sum.work(at, all, p)?]));
        }
    };
    let mut works = vec![];
    for piece in pieces(all, longest * ways) {
        let block = |rank: usize| {
            let place = |at: usize| (piece.start + at * longest).min(piece.end);
            place(rank)..place(rank + 1)
        };
        let passage = |rank: usize, at: u64, of: Range<usize>| Passage { rank, at, elements: of.len() };
        let own = block(here);
        let sent = |rank: usize| passage(rank, behind(parts.from, block(rank).start), block(rank));
        let received = |rank: usize| passage(rank, behind(terms, rank * longest), own.clone());
        works.push(parts.passages((0..ways).map(sent).collect(), (0..ways).map(received).collect()));
        let (base, out) = (None, behind(parts.to, own.start));
        if !own.is_empty() {
            works.push(sum.work(Places { terms, stride: longest, base, out }, own.len(), p)?);
        }
        // Each sends what it has added to all others.
        let others = || (0..ways).filter(|rank| *rank != here);
        let sent = |rank: usize| passage(rank, out, own.clone());
        let received = |rank: usize| passage(rank, behind(parts.to, block(rank).start), block(rank));
        works.push(parts.passages(others().map(sent).collect(), others().map(received).collect()));
    }
    Ok(sequence(works))
}

/// Ranges of up to `together` elements that follow one another.
fn pieces(elements: usize, together: usize) -> impl Iterator<Item = Range<usize>> {
    let together = together.max(1);
    (0..elements).step_by(together).map(move |start| start..(start + together).min(elements))
}

/// A call of NCCL over whole tensors.
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
        // SAFETY: both lie in the arena, as `launch::check` found, which outlives its stream's work.
        unsafe {
            match call {
                Call::AllGather => communicator.all_gather(*from, *to, *elements, stream),
                Call::ReduceScatter => communicator.reduce_scatter(*from, *to, *elements, stream),
                Call::AllReduce(by) => communicator.all_reduce(*from, *to, *elements, *by, stream),
            }
        }
    }
}

/// Bytes that move between ranks.
struct Passing {
    communicator: Arc<Communicator>,
    send: Vec<Passage>,
    receive: Vec<Passage>,
}

impl Work for Passing {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: all passages lie in the arena, which outlives its stream's work; those that are received lie in blocks of
        // their own.
        unsafe { self.communicator.exchange(&self.send, &self.receive, stream) }
    }
}

/// The exchange of one rank with itself.
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
        // SAFETY: both lie in the arena, as `launch::check` found, which outlives its stream's work.
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
                // All elements are in some block of some piece, once.
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
