//! Asynchronous copies of tensors out of a session that keeps running.

use crate::{RuntimeError, cuda};

/// A pending copy of slots as they were when it was requested. It owns all it needs: any thread may finish it, even after the
/// session is dropped. Dropping it cancels the copy.
pub struct Copying(Storage<cuda::session::snapshot::PendingCopy>);

/// A finished copy: each slot's elements in row-major order, slots in the order requested.
pub struct Copied(Storage<cuda::session::snapshot::FinishedCopy>);

enum Storage<T> {
    Host(Vec<Vec<u8>>),
    Pinned(T),
}

impl Copying {
    pub(crate) fn on_host(tensors: Vec<Vec<u8>>) -> Copying {
        Copying(Storage::Host(tensors))
    }

    pub(crate) fn pending(pending: cuda::session::snapshot::PendingCopy) -> Copying {
        Copying(Storage::Pinned(pending))
    }

    /// Whether the copy was made synchronously when it was requested: on the CPU, and on a GPU if the system has no pinned
    /// memory for it. Otherwise it overlaps the session's next work.
    pub fn was_waited_for(&self) -> bool {
        matches!(self.0, Storage::Host(_))
    }

    /// Waits until every byte has arrived.
    pub fn finish(self) -> Result<Copied, RuntimeError> {
        Ok(Copied(match self.0 {
            Storage::Host(tensors) => Storage::Host(tensors),
            Storage::Pinned(pending) => Storage::Pinned(pending.finish().map_err(cuda::session::late)?),
        }))
    }
}

impl Copied {
    pub fn count(&self) -> usize {
        match &self.0 {
            Storage::Host(tensors) => tensors.len(),
            Storage::Pinned(finished) => finished.count(),
        }
    }

    /// The bytes of the `i`-th requested slot.
    pub fn tensor(&self, i: usize) -> &[u8] {
        match &self.0 {
            Storage::Host(tensors) => &tensors[i],
            Storage::Pinned(finished) => finished.tensor(i),
        }
    }

    pub fn bytes(&self) -> u64 {
        (0..self.count()).map(|i| self.tensor(i).len() as u64).sum()
    }
}
