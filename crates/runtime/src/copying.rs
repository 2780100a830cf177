//! Tensors copied out of a session at one moment, while the session goes on running.

use crate::{RuntimeError, cuda};

/// A copy under way, of what the slots held when it was asked for. It owns all it needs: any thread may finish it, after
/// the session too. Dropping it gives the copy up.
pub struct Copying(State<cuda::session::snapshot::Coming>);

/// A copy that is whole: the slots' elements in row-major order, by the order they were asked in.
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

    /// Whether every byte was here when the copy was asked for: on the CPU, and on a GPU where the system has no pinned
    /// memory for it. Otherwise it comes beside what the session does next.
    pub fn was_waited_for(&self) -> bool {
        matches!(self.0, State::Here(_))
    }

    /// Waits until every byte is here.
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

    /// The bytes of the slot asked for at place `i`.
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
