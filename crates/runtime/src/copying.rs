//! Asynchronous copies of tensors out of a session that keeps running.

use crate::{RuntimeError, cuda};

/// A pending copy of slots as they were when it was requested. It owns all it needs: any thread may finish it, even after the
/// session is dropped. Dropping it cancels the copy.
pub struct Copying(State<cuda::session::snapshot::Coming>);

/// A finished copy: each slot's elements in row-major order, slots in the order requested.
pub struct Copied(State<cuda::session::snapshot::Come>);

enum State<T> {
    Here(Vec<Vec<u8>>),
    Pinned(T),
}

impl Copying {
    pub(crate) fn here(tensors: Vec<Vec<u8>>) -> Copying {
        Copying(State::Here(tensors))
    }

    pub(crate) fn coming(coming: cuda::session::snapshot::Coming) -> Copying {
        Copying(State::Pinned(coming))
    }

    /// Whether the copy was made synchronously when it was requested: on the CPU, and on a GPU if the system has no pinned
    /// memory for it. Otherwise it overlaps the session's next work.
    pub fn was_waited_for(&self) -> bool {
        matches!(self.0, State::Here(_))
    }

    /// Waits until every byte has arrived.
    pub fn finish(self) -> Result<Copied, RuntimeError> {
        Ok(Copied(match self.0 {
            State::Here(tensors) => State::Here(tensors),
            State::Pinned(coming) => State::Pinned(coming.finish().map_err(cuda::session::late)?),
        }))
    }
}

impl Copied {
    pub fn count(&self) -> usize {
        match &self.0 {
            State::Here(tensors) => tensors.len(),
            State::Pinned(come) => come.count(),
        }
    }

    /// The bytes of the `i`-th requested slot.
    pub fn tensor(&self, i: usize) -> &[u8] {
        match &self.0 {
            State::Here(tensors) => &tensors[i],
            State::Pinned(come) => come.tensor(i),
        }
    }

    pub fn bytes(&self) -> u64 {
        (0..self.count()).map(|i| self.tensor(i).len() as u64).sum()
    }
}
