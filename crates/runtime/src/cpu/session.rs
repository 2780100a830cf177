//! A session on the CPU: the arena, and each launch's kernel with the threads it runs on.

use flatout_ir::{Launch, Plan, PlanSet, View};

use std::time::Instant;

use super::Run;
use super::context::Context;
use super::kernels::movement::copy;
use crate::arena::Arena;
use crate::ranks::Ranks;
use crate::timing::Samples;
use crate::{RuntimeError, launch};

pub struct Session {
    arena: Arena,
    /// The kernel of every launch of every plan.
    kernels: Vec<Vec<Run>>,
    pool: rayon::ThreadPool,
    threads: usize,
    ranks: Ranks,
}

impl Session {
    /// Allocates the zeroed arena and validates every launch, so that running needs no further checks.
    pub fn new(plans: &PlanSet, threads: usize, ranks: Ranks) -> Result<Session, RuntimeError> {
        let threads = threads.max(1);
        let admit_all = |plan: &Plan| {
            plan.launches.iter().map(|l| admit(l, plans.arena_bytes, threads)).collect::<Result<Vec<_>, _>>()
        };
        let kernels = plans.plans.iter().map(admit_all).collect::<Result<_, _>>()?;
        let arena = Arena::new(plans.arena_bytes).ok_or_else(|| {
            RuntimeError::Resources(format!("the system has no {} bytes for the arena", plans.arena_bytes))
        })?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("flatout-{i}"))
            .build()
            .map_err(|why| RuntimeError::Resources(format!("{threads} threads cannot be started: {why}")))?;
        Ok(Session { arena, kernels, pool, threads, ranks })
    }

    /// Runs the launches of a plan in order. `plan` is the plan at `index` of the set given to `new`.
    pub fn run(&mut self, index: usize, plan: &Plan) -> Result<(), RuntimeError> {
        self.run_each(index, plan, |_, _| {})
    }

    /// As `run`, with launch `i` repeated `times[i]` times.
    pub fn run_repeated(&mut self, index: usize, plan: &Plan, times: &[usize]) -> Result<(), RuntimeError> {
        self.run_times(index, plan, |launch| times[launch], |_, _| {})
    }

    /// Times every launch of these plans, in passes over all of them.
    pub(crate) fn time(&mut self, plans: &[(usize, &Plan)], passes: usize) -> Result<Samples, RuntimeError> {
        let mut samples = Samples::new(plans.iter().map(|(_, plan)| plan.launches.len()), passes);
        // The first pass warms up memory and caches.
        for (index, plan) in plans {
            self.run(*index, plan)?;
        }
        while !samples.are_enough() {
            for (which, (index, plan)) in plans.iter().enumerate() {
                self.run_each(*index, plan, |launch, seconds| samples.add(which, launch, seconds))?;
            }
        }
        Ok(samples)
    }

    /// Runs the launches of a plan in order and returns the seconds of each.
    fn run_each(
        &mut self,
        index: usize,
        plan: &Plan,
        tell: impl FnMut(usize, f64) + Send,
    ) -> Result<(), RuntimeError> {
        self.run_times(index, plan, |_| 1, tell)
    }

    fn run_times(
        &mut self,
        index: usize,
        plan: &Plan,
        times: impl Fn(usize) -> usize + Sync,
        mut tell: impl FnMut(usize, f64) + Send,
    ) -> Result<(), RuntimeError> {
        let (arena, threads) = (Address(self.arena.start()), self.threads);
        let (kernels, ranks) = (&self.kernels[index], &self.ranks);
        let run = || {
            for (i, (launch, kernel)) in plan.launches.iter().zip(kernels).enumerate() {
                let begun = Instant::now();
                // SAFETY: `new` checked the launch against this arena, and `&mut self` excludes all other access.
                let context = unsafe { Context::new(launch, arena.get(), threads) }.among(ranks);
                for _ in 0..times(i) {
                    kernel(launch, &context).map_err(|why| {
                        RuntimeError::Launch(format!("{}: {why}", launch::describe(launch)))
                    })?;
                }
                tell(i, begun.elapsed().as_secs_f64());
            }
            Ok(())
        };
        self.pool.install(run)
    }

    pub fn write(&mut self, view: &View, bytes: &[u8]) {
        copy::scatter(view, self.arena.bytes(), bytes);
    }

    pub fn read(&self, view: &View) -> Vec<u8> {
        copy::gather(view, self.arena.as_slice())
    }

    pub fn rank(&self) -> usize {
        self.ranks.rank()
    }

    pub fn arena_bytes(&self) -> usize {
        self.arena.as_slice().len()
    }

    pub fn fill(&mut self, byte: u8) {
        self.arena.bytes().fill(byte);
    }
}

/// Validates a launch and finds its kernel.
fn admit(launch: &Launch, arena_bytes: usize, threads: usize) -> Result<Run, RuntimeError> {
    let refuse = |why: String| RuntimeError::Unsound(format!("{}: {why}", launch::describe(launch)));
    let kernel = super::kernel(launch.kernel)
        .ok_or_else(|| refuse(format!("the CPU has no kernel `{}`", launch.kernel)))?;
    launch::check(launch, &kernel.row, arena_bytes, threads).map_err(refuse)?;
    Ok(kernel.run)
}

/// An arena's address, sendable to the thread pool.
#[derive(Clone, Copy)]
struct Address(*mut u8);

impl Address {
    fn get(self) -> *mut u8 {
        self.0
    }
}

// SAFETY: `run` holds the arena exclusively while the pool uses its address.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}
