//! Windows: memory that NCCL allocates and that the ranks of a communicator register with each other, for zero-copy exchanges.
//!
//! The arena has the same layout on every rank, so all of it is one symmetric window. Registering is collective: NCCL waits for
//! all ranks. A window is deregistered before its communicator is destroyed, and the memory is freed afterwards.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use super::{Communicator, Communicators, Handle, Nccl};
use crate::cuda::context::CudaError;

/// Every rank registers the same size, and exchanges use the same offsets on each.
const NCCL_WIN_COLL_SYMMETRIC: c_int = 1;

/// The entry points for windows, which some builds of NCCL lack.
#[derive(Clone, Copy)]
pub struct WindowCalls {
    nccl: &'static Nccl,
    alloc: unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int,
    free: unsafe extern "C" fn(*mut c_void) -> c_int,
    register: unsafe extern "C" fn(Handle, *mut c_void, usize, *mut Handle, c_int) -> c_int,
    deregister: unsafe extern "C" fn(Handle, Handle) -> c_int,
}

impl Nccl {
    /// The entry points for windows, or a sentence that says what this NCCL lacks.
    pub fn windows(&'static self) -> Result<WindowCalls, CudaError> {
        let lacks = |why: CudaError| {
            let version = self.version();
            CudaError::new(format!(
                "NCCL {version} has no windows ({why}): leave wire_window out, or install 2.27 or newer"
            ))
        };
        let library = self.library;
        // SAFETY: the signatures are the header's for these symbols.
        unsafe {
            Ok(WindowCalls {
                nccl: self,
                alloc: library.symbol("ncclMemAlloc").map_err(lacks)?,
                free: library.symbol("ncclMemFree").map_err(lacks)?,
                register: library.symbol("ncclCommWindowRegister").map_err(lacks)?,
                deregister: library.symbol("ncclCommWindowDeregister").map_err(lacks)?,
            })
        }
    }
}

impl WindowCalls {
    /// Allocates memory of the current device that can be registered; release it with `free`.
    pub fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        let mut at = null_mut();
        // SAFETY: writes one address.
        let status = unsafe { (self.alloc)(&mut at, bytes) };
        self.nccl.ok(status, null_mut(), &format!("ncclMemAlloc of {bytes} bytes"))?;
        Ok(at as u64)
    }

    /// # Safety
    /// The address came from `allocate`, and nothing uses the memory any more.
    pub unsafe fn free(&self, at: u64) {
        // SAFETY: guaranteed by the caller. An error while freeing cannot be reported.
        unsafe { (self.free)(at as *mut c_void) };
    }
}

/// Registrations of memory with the communicators of a rank, undone on drop.
pub struct Windows {
    calls: WindowCalls,
    registered: Vec<(Arc<Communicator>, Handle)>,
}

impl Windows {
    /// Registers memory from `allocate` with each communicator. Collective: all ranks call this with the same size.
    ///
    /// # Safety
    /// The memory stays allocated until the windows are dropped.
    pub unsafe fn register(
        communicators: &Communicators,
        at: u64,
        bytes: usize,
    ) -> Result<Windows, CudaError> {
        let calls = communicators.nccl.windows()?;
        let mut windows = Windows { calls, registered: vec![] };
        for (_, communicator) in &communicators.by_axis {
            // One communicator may serve several axes.
            if windows.registered.iter().any(|(own, _)| Arc::ptr_eq(own, communicator)) {
                continue;
            }
            let mut window = null_mut();
            let place = at as *mut c_void;
            // SAFETY: the communicator is alive, and the caller guarantees the memory; writes one handle.
            let status = unsafe {
                (calls.register)(communicator.raw, place, bytes, &mut window, NCCL_WIN_COLL_SYMMETRIC)
            };
            communicator.ok(status, "ncclCommWindowRegister")?;
            if window.is_null() {
                return Err(CudaError::new(
                    "NCCL made no window of the arena, as where NCCL_WIN_ENABLE=0 or NCCL_CUMEM_ENABLE=0 is set: leave \
                     wire_window out, or unset them",
                ));
            }
            windows.registered.push((Arc::clone(communicator), window));
        }
        Ok(windows)
    }

    /// Number of communicators that have a window of the memory.
    pub fn count(&self) -> usize {
        self.registered.len()
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        for (communicator, window) in self.registered.drain(..) {
            // A failed communicator is aborted, which also removes its windows.
            if communicator.failure().is_none() {
                // SAFETY: registered once in `register`; the communicator is alive, and no pending work uses the memory.
                unsafe { (self.calls.deregister)(communicator.raw, window) };
            }
        }
    }
}
