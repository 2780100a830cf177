//! Device memory and pinned host memory, and copies between them.

use std::ptr::null_mut;

use super::nccl::WindowCalls;
use super::{Driver, Handle};
use crate::cuda::context::{CudaError, Stream};

pub struct DeviceMemory {
    driver: &'static Driver,
    at: u64,
    bytes: usize,
    /// Set if NCCL allocated it, so that it can be a window of its communicators.
    of_nccl: Option<WindowCalls>,
}

impl DeviceMemory {
    pub fn new(driver: &'static Driver, bytes: usize) -> Result<DeviceMemory, CudaError> {
        let mut at = 0;
        let bytes = bytes.max(256);
        // SAFETY: writes one address.
        driver.ok(unsafe { (driver.mem_alloc)(&mut at, bytes) }, &format!("cuMemAlloc of {bytes} bytes"))?;
        Ok(DeviceMemory { driver, at, bytes, of_nccl: None })
    }

    /// Allocates memory of the current device through NCCL.
    pub fn of_nccl(
        driver: &'static Driver,
        calls: WindowCalls,
        bytes: usize,
    ) -> Result<DeviceMemory, CudaError> {
        let bytes = bytes.max(256);
        Ok(DeviceMemory { driver, at: calls.allocate(bytes)?, bytes, of_nccl: Some(calls) })
    }

    pub fn address(&self) -> u64 {
        self.at
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets every byte, in stream order.
    pub fn fill(&self, byte: u8, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the range is the whole allocation, which is alive.
        unsafe { self.driver.memset(self.at, byte, self.bytes, stream) }
    }

    fn covers(&self, offset: usize, bytes: usize) -> Result<(), CudaError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(CudaError::new(format!(
                "{bytes} bytes at {offset} lie outside an allocation of {}",
                self.bytes
            ))),
        }
    }

    /// Copies from an offset in pinned memory, in stream order. The source must not change until then.
    pub fn copy_in(
        &self,
        offset: usize,
        from: &PinnedMemory,
        at: usize,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), CudaError> {
        self.covers(offset, bytes)?;
        from.covers(at, bytes)?;
        // SAFETY: both ranges were checked; pinned memory does not move.
        let status = unsafe {
            let source = from.at.cast::<u8>().add(at).cast();
            (self.driver.copy_in)(self.at + offset as u64, source, bytes, stream.0)
        };
        self.driver.ok(status, "cuMemcpyHtoDAsync")
    }

    /// Copies to an offset in pinned memory, in stream order.
    pub fn copy_out(
        &self,
        offset: usize,
        to: &PinnedMemory,
        at: usize,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), CudaError> {
        self.covers(offset, bytes)?;
        to.covers(at, bytes)?;
        // SAFETY: both ranges were checked; pinned memory does not move.
        let status = unsafe {
            let place = to.at.cast::<u8>().add(at).cast();
            (self.driver.copy_out)(place, self.at + offset as u64, bytes, stream.0)
        };
        self.driver.ok(status, "cuMemcpyDtoHAsync")
    }

    /// Copies within the allocation, in stream order; the ranges must not overlap.
    pub fn copy_within(&self, from: usize, to: usize, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        self.covers(from, bytes)?;
        self.covers(to, bytes)?;
        if from < to + bytes && to < from + bytes {
            return Err(CudaError::new(format!("{bytes} bytes from {from} to {to} overlap")));
        }
        // SAFETY: both ranges were checked, and the allocation outlives the work on its streams.
        unsafe { self.driver.copy(self.at + from as u64, self.at + to as u64, bytes, stream) }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        match self.of_nccl {
            Some(calls) => {
                let _ = self.driver.synchronize_context();
                // SAFETY: allocated in `of_nccl`, and no device work uses it any more.
                unsafe { calls.free(self.at) };
            }
            // SAFETY: allocated in `new`; freeing waits for the device.
            None => drop(unsafe { (self.driver.mem_free)(self.at) }),
        }
    }
}

/// Page-locked host memory, which the device accesses by DMA.
pub struct PinnedMemory {
    driver: &'static Driver,
    at: Handle,
    bytes: usize,
}

// SAFETY: the memory belongs to the process, and nothing about it is bound to a thread.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    pub fn new(driver: &'static Driver, bytes: usize) -> Result<PinnedMemory, CudaError> {
        let mut at = null_mut();
        let bytes = bytes.max(256);
        // SAFETY: writes one address.
        let status = unsafe { (driver.host_alloc)(&mut at, bytes, 0) };
        driver.ok(status, &format!("cuMemHostAlloc of {bytes} bytes"))?;
        // SAFETY: the allocation is exclusive and has this size; pinned memory starts uninitialised.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        Ok(PinnedMemory { driver, at, bytes })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn covers(&self, at: usize, bytes: usize) -> Result<(), CudaError> {
        match at.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(CudaError::new(format!("{bytes} bytes at {at} lie outside {} of staging", self.bytes))),
        }
    }

    /// # Safety
    /// No copy that writes this memory is pending.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated and zeroed in `new`.
        unsafe { std::slice::from_raw_parts(self.at.cast(), self.bytes) }
    }

    /// # Safety
    /// No copy that reads or writes this memory is pending.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: allocated and zeroed in `new`.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`.
        unsafe { (self.driver.host_free)(self.at) };
    }
}
