//! Memory in use on a device before this process has a context there.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use super::context::CudaError;
use super::library::Library;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// Free bytes of the device at a PCI address such as `0000:1b:00.0`.
pub fn free_bytes(library: &'static Library, pci: &str) -> Result<u64, CudaError> {
    type Init = unsafe extern "C" fn() -> c_int;
    type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type Ask = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int;
    let pci = CString::new(pci).map_err(|_| CudaError::new("a PCI address holds a zero byte"))?;
    let ok = |status: c_int, call: &str| {
        if status == 0 { Ok(()) } else { Err(CudaError::status(call, status)) }
    };
    // SAFETY: the signatures are the header's; each call writes what its pointer leads to.
    unsafe {
        let init: Init = library.symbol("nvmlInit_v2")?;
        let find: Find = library.symbol("nvmlDeviceGetHandleByPciBusId_v2")?;
        let ask: Ask = library.symbol("nvmlDeviceGetMemoryInfo")?;
        let shutdown: Init = library.symbol("nvmlShutdown")?;
        ok(init(), "nvmlInit")?;
        let (mut device, mut memory) = (null_mut(), Memory::default());
        let asked = ok(find(pci.as_ptr(), &mut device), "nvmlDeviceGetHandleByPciBusId")
            .and_then(|()| ok(ask(device, &mut memory), "nvmlDeviceGetMemoryInfo"));
        shutdown();
        asked.map(|()| memory.free)
    }
}
