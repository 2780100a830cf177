//! The context of a CPU kernel: its tensors in the arena, its workspace, and the threads.

use flatout_ir::types::DType;
use flatout_ir::{Launch, View};
use rayon::prelude::*;

use super::tensor::Tensor;
use crate::ranks::{ALONE, Ranks};

/// Below this much memory traffic a launch stays on the calling thread: waking another takes about as long.
const SERIAL_BYTES: usize = 64 << 10;
/// Minimum traffic worth handing to another thread.
const GRAIN_BYTES: usize = 16 << 10;

pub struct Context<'a> {
    launch: &'a Launch,
    arena: *mut u8,
    pub threads: usize,
    pub ranks: &'a Ranks,
}

// SAFETY: the arena outlives the context, and tensors carry the contract for use from several threads.
unsafe impl Sync for Context<'_> {}

impl<'a> Context<'a> {
    /// # Safety
    /// `arena` holds every view of the launch, which `launch::check` accepted, and nothing else uses it meanwhile.
    pub unsafe fn new(launch: &'a Launch, arena: *mut u8, threads: usize) -> Self {
        Context { launch, arena, threads, ranks: &ALONE }
    }

    /// As `self`, with the wire to other ranks.
    pub fn among(self, ranks: &'a Ranks) -> Self {
        Context { ranks, ..self }
    }

    /// A context for another launch in the same arena, all of whose views lie within views of this one.
    pub fn part<'b>(&self, launch: &'b Launch) -> Context<'b>
    where
        'a: 'b,
    {
        Context { launch, arena: self.arena, threads: self.threads, ranks: self.ranks }
    }

    fn tensor(&self, view: &'a View) -> Tensor<'a> {
        // SAFETY: the view was checked against the arena.
        unsafe { Tensor::new(self.arena, view) }
    }

    pub fn input(&self, i: usize) -> Tensor<'a> {
        self.tensor(&self.launch.ins[i])
    }

    /// `None` if nothing reads the output, so that it need not be computed.
    pub fn output(&self, i: usize) -> Option<Tensor<'a>> {
        self.launch.outs[i].as_ref().map(|view| self.tensor(view))
    }

    /// Whether an output is the same memory as an input, element for element.
    pub fn is_in_place(&self, input: usize, output: usize) -> bool {
        self.launch.outs[output].as_ref().is_some_and(|out| out.offset == self.launch.ins[input].offset)
    }

    /// The launch's workspace as f32, 64-byte aligned; empty if the kernel requested none. Its initial content is arbitrary.
    ///
    /// # Safety
    /// May be called only once per launch: the slice is the only access to the workspace.
    #[allow(clippy::mut_from_ref, reason = "the arena's memory, handed out once")]
    pub unsafe fn workspace(&self) -> &'a mut [f32] {
        let Some(view) = &self.launch.workspace else { return &mut [] };
        let bytes = view.elements() * view.dtype.bytes();
        debug_assert!(view.is_dense() && view.offset.is_multiple_of(DType::F32.bytes()));
        // SAFETY: the view was checked against the arena and overlaps no other view of the launch.
        unsafe { std::slice::from_raw_parts_mut(self.arena.add(view.offset).cast(), bytes / 4) }
    }

    /// Runs `task` for 0 to `tasks`, on all threads if the traffic is worth it. Tasks must not depend on each other or on the
    /// thread that runs them: what a task covers depends on the shapes alone, so the bits equal those of a single thread.
    pub fn parallel(&self, tasks: usize, bytes_a_task: usize, task: impl Fn(usize) + Sync + Send) {
        if self.threads == 1 || tasks <= 1 || tasks.saturating_mul(bytes_a_task) < SERIAL_BYTES {
            (0..tasks).for_each(task);
        } else {
            let together = (GRAIN_BYTES / bytes_a_task.max(1)).max(1);
            (0..tasks).into_par_iter().with_min_len(together).for_each(task);
        }
    }
}

/// The range of chunk `i` if `count` items are cut into chunks of `size`.
pub fn chunk(i: usize, size: usize, count: usize) -> std::ops::Range<usize> {
    i * size..((i + 1) * size).min(count)
}
