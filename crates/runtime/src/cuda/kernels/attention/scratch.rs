//! A bump allocator over a launch's workspace.

use flatout_ir::Launch;

use crate::cuda::context::{CudaError, Prepare};

/// Alignment of every allocation.
pub(super) const ALIGN: usize = 256;

pub(super) struct Scratch {
    at: u64,
    end: u64,
}

impl Scratch {
    pub fn of(launch: &Launch, p: &Prepare<'_>) -> Self {
        let (at, bytes) = launch.workspace.as_ref().map_or((0, 0), |w| (p.address(w), w.span_bytes()));
        Scratch { at, end: at + bytes as u64 }
    }

    pub fn take(&mut self, bytes: usize) -> Result<u64, CudaError> {
        let (at, end) = (self.at, self.at + bytes.next_multiple_of(ALIGN) as u64);
        if end > self.end {
            let more = end - self.end;
            return Err(CudaError::new(format!("attention wants {more} bytes more scratch than planned")));
        }
        self.at = end;
        Ok(at)
    }
}
