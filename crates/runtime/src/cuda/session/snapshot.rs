//! Snapshots: tensors copied into pinned memory while later plans run.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cuda::context::CudaError;
use crate::cuda::driver::device::Device;
use crate::cuda::driver::{Event, PinnedMemory};

/// A pool of pinned memory for reuse. Allocating pinned memory for a large model takes as long as copying it several times.
pub struct PinnedPool {
    device: Device,
    free: Mutex<Vec<PinnedMemory>>,
}

impl PinnedPool {
    pub fn new(device: &Device) -> Arc<PinnedPool> {
        Arc::new(PinnedPool { device: device.clone(), free: Mutex::default() })
    }

    /// Memory of at least `bytes` bytes.
    pub fn take(&self, bytes: usize) -> Result<PinnedMemory, CudaError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        match free.iter().position(|memory| memory.bytes() >= bytes) {
            Some(i) => Ok(free.swap_remove(i)),
            None => PinnedMemory::new(self.device.driver(), bytes),
        }
    }

    fn give_back(&self, memory: PinnedMemory) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        // The last copy may be dropped on a thread without a current context, and freeing needs one.
        let _ = self.device.bind();
        self.free.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A pending copy. It may be finished on a thread other than the session's.
pub struct PendingCopy {
    memory: Option<PinnedMemory>,
    parts: Vec<Range<usize>>,
    done: Arc<Event>,
    pool: Arc<PinnedPool>,
}

impl PendingCopy {
    /// `done` is recorded after the copies of `parts` into `memory`, which came from `pool`.
    pub(super) fn new(
        memory: PinnedMemory,
        parts: Vec<Range<usize>>,
        done: Arc<Event>,
        pool: Arc<PinnedPool>,
    ) -> PendingCopy {
        PendingCopy { memory: Some(memory), parts, done, pool }
    }

    /// Waits until every byte has arrived.
    pub fn finish(mut self) -> Result<FinishedCopy, CudaError> {
        self.pool.device.bind()?;
        self.done.synchronize()?;
        let memory = self.memory.take();
        Ok(FinishedCopy { memory, parts: std::mem::take(&mut self.parts), pool: Arc::clone(&self.pool) })
    }
}

impl Drop for PendingCopy {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            // The device may still be writing. A failed device writes no more, so errors are ignored.
            let _ = self.pool.device.bind();
            let _ = self.done.synchronize();
            self.pool.give_back(memory);
        }
    }
}

/// A finished copy, whose memory returns to the pool when dropped.
pub struct FinishedCopy {
    /// `None` only during drop.
    memory: Option<PinnedMemory>,
    parts: Vec<Range<usize>>,
    pool: Arc<PinnedPool>,
}

impl FinishedCopy {
    pub fn count(&self) -> usize {
        self.parts.len()
    }

    pub fn tensor(&self, i: usize) -> &[u8] {
        let memory = self.memory.as_ref().expect("given back only when dropped");
        // SAFETY: `PendingCopy::finish` waited for the copies, and none goes to this memory until it is back in the pool.
        unsafe { &memory.as_slice()[self.parts[i].clone()] }
    }
}

impl Drop for FinishedCopy {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give_back(memory);
        }
    }
}

// SAFETY: `tensor` only reads memory that nothing writes while it is borrowed.
unsafe impl Sync for FinishedCopy {}
