//! Copies between host and device while plans run, and the events that order them.
//!
//! Plans run on the compute stream, host writes on a second stream and host reads on a third, so that copies overlap plans.
//! Events order them on the device; the host waits only for what it reads and for room in the ring.
//!
//! * An input is written into its landing area once that area's earlier content has been copied into place. Before the next
//!   plan, the compute stream waits for the inputs that have arrived and copies them into place.
//! * Any other write goes in place: after all work enqueued before it, before all work enqueued later.
//! * A read starts after all work enqueued before it. A plan that writes what is still being read waits for the read; other
//!   plans overlap it.
//!
//! None of this is enqueued during capture: a graph holds only its plan's launches and stays valid.

use std::ops::Range;
use std::sync::Arc;

use flatout_ir::PlanSet;
use flatout_ir::graph::Class;

use super::landing::Landing;
use super::snapshot::{PendingCopy, PinnedPool};
use super::staging::{Mailbox, ReadBuffers, Ring};
use crate::cuda::context::{CudaError, Stream};
use crate::cuda::driver::device::Device;
use crate::cuda::driver::{DeviceMemory, Driver, Event, OwnedStream};

/// The ring holds the inputs of this many steps: a writer that is further ahead waits for the device.
const STEPS_AHEAD: usize = 4;
const RING_BYTES: std::ops::RangeInclusive<usize> = 1 << 20..=64 << 20;
/// Alignment of tensors in the pinned memory they are copied to.
const ALIGN: usize = 256;

/// Fields are dropped in declaration order: whatever uses a stream before the stream.
pub struct Traffic {
    ring: Ring,
    read_buffers: ReadBuffers,
    mailbox: Mailbox,
    landing: Landing,
    /// One event per landing area, recorded when its content has been copied into place.
    landed: Vec<Event>,
    pending_reads: Vec<PendingRead>,
    /// Events of finished reads, for reuse.
    spare: Vec<Arc<Event>>,
    /// The last point of the compute stream that another stream waited for.
    computed: Event,
    /// The last point of the copy-in stream that the compute stream waited for.
    arrived: Event,
    copy_in: OwnedStream,
    copy_out: OwnedStream,
    pool: Arc<PinnedPool>,
    driver: &'static Driver,
}

/// Ranges of the arena that are being copied out.
struct PendingRead {
    ranges: Vec<Range<usize>>,
    done: Arc<Event>,
}

impl Traffic {
    pub fn new(plans: &PlanSet, device: &Device) -> Result<Traffic, CudaError> {
        let driver = device.driver();
        let inputs = plans.slots.iter().filter(|slot| slot.class == Class::Input);
        let input_bytes: usize = inputs.map(|slot| slot.view.span_bytes().next_multiple_of(ALIGN)).sum();
        let ring_bytes = (STEPS_AHEAD * input_bytes).clamp(*RING_BYTES.start(), *RING_BYTES.end());
        let landed = plans.landings.iter().map(|_| Event::untimed(driver)).collect::<Result<_, _>>()?;
        Ok(Traffic {
            ring: Ring::new(driver, ring_bytes)?,
            read_buffers: ReadBuffers::new(driver, plans.arena_bytes)?,
            mailbox: Mailbox::new(driver)?,
            landing: Landing::new(plans.inputs.clone(), plans.landings.clone()),
            landed,
            pending_reads: vec![],
            spare: vec![],
            computed: Event::untimed(driver)?,
            arrived: Event::untimed(driver)?,
            copy_in: OwnedStream::new(driver)?,
            copy_out: OwnedStream::new(driver)?,
            pool: PinnedPool::new(device),
            driver,
        })
    }

    /// Sets bytes of the arena; visible to all work enqueued later.
    pub fn write(
        &mut self,
        arena: &DeviceMemory,
        offset: usize,
        bytes: &[u8],
        compute: Stream,
    ) -> Result<(), CudaError> {
        let range = offset..offset + bytes.len();
        let copy_in = self.copy_in.get();
        if let Some(at) = self.landing.redirect(&range) {
            if self.landing.is_empty() {
                self.landed[self.landing.turn()].hold(copy_in)?;
            }
            self.ring.write(arena, at, bytes, copy_in)?;
            self.landing.add(&range);
            return Ok(());
        }
        self.computed.record(compute)?;
        self.computed.hold(copy_in)?;
        for pending in self.pending_reads.iter().filter(|r| r.overlaps(std::slice::from_ref(&range))) {
            pending.done.hold(copy_in)?;
        }
        self.ring.write(arena, offset, bytes, copy_in)?;
        self.arrived.record(copy_in)?;
        self.arrived.hold(compute)
    }

    /// Prepares the compute stream for a plan that writes these ranges.
    pub fn before(
        &mut self,
        arena: &DeviceMemory,
        written: &[Range<usize>],
        compute: Stream,
    ) -> Result<(), CudaError> {
        self.land(arena, compute)?;
        self.wait_for_reads(written, compute)
    }

    /// Copies the inputs that have arrived into place.
    pub fn land(&mut self, arena: &DeviceMemory, compute: Stream) -> Result<(), CudaError> {
        if self.landing.is_empty() {
            return Ok(());
        }
        self.arrived.record(self.copy_in.get())?;
        self.arrived.hold(compute)?;
        let moves: Vec<(usize, Range<usize>)> = self.landing.moves().collect();
        for (from, to) in &moves {
            self.wait_for_reads(std::slice::from_ref(to), compute)?;
            arena.copy_within(*from, to.start, to.len(), compute)?;
        }
        self.landed[self.landing.turn()].record(compute)?;
        self.landing.advance();
        Ok(())
    }

    fn wait_for_reads(&mut self, written: &[Range<usize>], compute: Stream) -> Result<(), CudaError> {
        let (over, still): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pending_reads)
            .into_iter()
            .partition(|pending| pending.overlaps(written));
        self.pending_reads = still;
        for pending in over {
            pending.done.hold(compute)?;
            // If someone still waits for the copy itself, they keep the event.
            if Arc::strong_count(&pending.done) == 1 {
                self.spare.push(pending.done);
            }
        }
        Ok(())
    }

    /// Reads bytes of the arena after all work enqueued so far, and waits for them.
    pub fn read(
        &mut self,
        arena: &DeviceMemory,
        offset: usize,
        bytes: usize,
        compute: Stream,
    ) -> Result<Vec<u8>, CudaError> {
        let copy_out = self.copy_out_after_compute(arena, compute)?;
        self.read_buffers.read(arena, offset, bytes, copy_out)
    }

    /// Enqueues copies of single values to the host; returns the index to pass to `collect`.
    pub fn post(
        &mut self,
        arena: &DeviceMemory,
        offsets: &[usize],
        compute: Stream,
    ) -> Result<usize, CudaError> {
        let copy_out = self.copy_out_after_compute(arena, compute)?;
        let place = self.mailbox.post(arena, offsets, copy_out)?;
        self.record_read(offsets.iter().map(|at| *at..at + size_of::<f32>()).collect())?;
        Ok(place)
    }

    /// As `post`, from memory outside the arena and ordered by the compute stream: later work may overwrite it.
    pub fn post_from(
        &mut self,
        memory: &DeviceMemory,
        offsets: &[usize],
        compute: Stream,
    ) -> Result<usize, CudaError> {
        self.mailbox.post(memory, offsets, compute)
    }

    /// Waits for posted values and returns them.
    pub fn collect(&self, place: usize, count: usize) -> Result<Vec<f32>, CudaError> {
        self.mailbox.collect(place, count)
    }

    /// Begins to copy ranges of the arena, as they are after all work enqueued so far, to pinned memory. `None` if the system
    /// refuses that much pinned memory.
    pub fn begin_copy(
        &mut self,
        arena: &DeviceMemory,
        ranges: Vec<Range<usize>>,
        compute: Stream,
    ) -> Result<Option<PendingCopy>, CudaError> {
        let mut end = 0;
        let mut parts = Vec::with_capacity(ranges.len());
        for range in &ranges {
            parts.push(end..end + range.len());
            end = (end + range.len()).next_multiple_of(ALIGN);
        }
        let Ok(memory) = self.pool.take(end) else { return Ok(None) };
        let copy_out = self.copy_out_after_compute(arena, compute)?;
        let mut pairs = ranges.iter().zip(&parts).filter(|(range, _)| !range.is_empty());
        let sent = pairs
            .try_for_each(|(range, part)| {
                arena.copy_out(range.start, &memory, part.start, range.len(), copy_out)
            })
            .and_then(|()| self.record_read(ranges));
        match sent {
            Ok(done) => Ok(Some(PendingCopy::new(memory, parts, done, Arc::clone(&self.pool)))),
            Err(why) => {
                // The memory is freed on return, and copies into it may be pending.
                let _ = self.copy_out.synchronize();
                Err(why)
            }
        }
    }

    /// Waits for all pending copies.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.copy_in.synchronize()?;
        self.copy_out.synchronize()
    }

    /// Orders the copy-out stream after all work enqueued so far.
    fn copy_out_after_compute(&mut self, arena: &DeviceMemory, compute: Stream) -> Result<Stream, CudaError> {
        self.land(arena, compute)?;
        self.computed.record(compute)?;
        self.computed.hold(self.copy_out.get())?;
        Ok(self.copy_out.get())
    }

    /// Records that the work just enqueued on the copy-out stream reads these ranges.
    fn record_read(&mut self, ranges: Vec<Range<usize>>) -> Result<Arc<Event>, CudaError> {
        let done = match self.spare.pop() {
            Some(event) => event,
            None => Arc::new(Event::untimed(self.driver)?),
        };
        done.record(self.copy_out.get())?;
        self.pending_reads.push(PendingRead { ranges, done: Arc::clone(&done) });
        Ok(done)
    }
}

impl PendingRead {
    fn overlaps(&self, written: &[Range<usize>]) -> bool {
        self.ranges.iter().any(|r| written.iter().any(|w| r.start < w.end && w.start < r.end))
    }
}

/// The ranges a plan writes: outputs and workspaces of its launches, sorted and merged.
pub fn written(plan: &flatout_ir::Plan) -> Vec<Range<usize>> {
    let views = plan.launches.iter().flat_map(|l| l.outs.iter().flatten().chain(&l.workspace));
    let mut ranges: Vec<Range<usize>> = views
        .filter(|view| view.elements() > 0)
        .map(|view| view.offset..view.offset + view.span_bytes())
        .collect();
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<usize>> = vec![];
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::{DType, Launch, Op, Plan, Role, TensorType, View};

    #[test]
    fn a_plan_writes_its_outputs_and_scratch() {
        let view = |offset: usize, n: usize| View::dense(offset, &TensorType::new(DType::F32, [n]));
        let launch = |out: Option<View>, workspace: Option<View>| Launch {
            kernel: "cuda.copy",
            op: Op::Reshape { dims: vec![] },
            ins: vec![view(0, 1024)],
            outs: vec![out],
            workspace,
            path: String::new(),
            key: 0,
            flops: 0,
            queue: flatout_ir::Queue::Compute,
            joins: None,
        };
        let launches = vec![
            launch(Some(view(4096, 4)), None),
            launch(Some(view(256, 64)), Some(view(512, 2))),
            launch(None, Some(view(8192, 1))),
        ];
        let plan = Plan { role: Role::GRAD, launches, results: vec![] };
        assert_eq!(written(&plan), [256..520, 4096..4112, 8192..8196]);
    }
}
