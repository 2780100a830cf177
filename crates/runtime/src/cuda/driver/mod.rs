//! The CUDA driver API: entry points of libcuda and the primary context of a device.
//!
//! The owning types of driver objects (streams, graphs, events, memory, modules), NVIDIA's other libraries, devices and the
//! on-disk caches each have a submodule.

pub mod cache;
pub mod device;
pub mod environment;
pub mod gpus;
pub mod library;
pub mod links;
mod memory;
mod module;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
pub mod store;
mod stream;
pub mod topology;

pub use memory::{DeviceMemory, PinnedMemory};
pub use module::{Module, Modules};
pub use stream::{Event, Graph, OwnedStream};

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use super::argument::Block;
use super::context::{CudaError, Function, Stream};
use super::tensor_map;
use library::Library;

type Handle = *mut c_void;

/// Declares each entry point once: field, symbol, signature. All return `CUresult`.
macro_rules! entries {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// Entry points of libcuda, with the names and versions of the header they were written against (CUDA 12.8).
        pub struct Driver {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Driver {
            /// Resolves every entry point; a driver that lacks one is too old.
            pub fn open(library: &'static Library) -> Result<Driver, CudaError> {
                Ok(Driver {
                    // SAFETY: the signature is that of the header for this symbol.
                    $($field: unsafe { library.symbol($symbol)? },)*
                })
            }
        }
    };
}

entries! {
    init = "cuInit" (c_uint);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    error_name = "cuGetErrorName" (c_int, *mut *const c_char);
    error_string = "cuGetErrorString" (c_int, *mut *const c_char);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, c_int);
    device_pci = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    primary_retain = "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    primary_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    set_current = "cuCtxSetCurrent" (Handle);
    context_synchronize = "cuCtxSynchronize" ();
    mem_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    mem_alloc = "cuMemAlloc_v2" (*mut u64, usize);
    mem_free = "cuMemFree_v2" (u64);
    host_alloc = "cuMemHostAlloc" (*mut Handle, usize, c_uint);
    host_free = "cuMemFreeHost" (Handle);
    copy_in = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle);
    copy_out = "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle);
    copy_across = "cuMemcpyDtoDAsync_v2" (u64, u64, usize, Handle);
    memset = "cuMemsetD8Async" (u64, u8, usize, Handle);
    stream_create = "cuStreamCreate" (*mut Handle, c_uint);
    stream_destroy = "cuStreamDestroy_v2" (Handle);
    stream_synchronize = "cuStreamSynchronize" (Handle);
    stream_wait = "cuStreamWaitEvent" (Handle, Handle, c_uint);
    capture_begin = "cuStreamBeginCapture_v2" (Handle, c_int);
    capture_end = "cuStreamEndCapture" (Handle, *mut Handle);
    graph_instantiate = "cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
    graph_upload = "cuGraphUpload" (Handle, Handle);
    graph_launch = "cuGraphLaunch" (Handle, Handle);
    graph_destroy = "cuGraphDestroy" (Handle);
    graph_exec_destroy = "cuGraphExecDestroy" (Handle);
    event_create = "cuEventCreate" (*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2" (Handle);
    event_record = "cuEventRecord" (Handle, Handle);
    event_query = "cuEventQuery" (Handle);
    event_synchronize = "cuEventSynchronize" (Handle);
    event_elapsed = "cuEventElapsedTime" (*mut f32, Handle, Handle);
    module_load = "cuModuleLoadData" (*mut Handle, *const c_void);
    module_unload = "cuModuleUnload" (Handle);
    module_function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    function_get = "cuFuncGetAttribute" (*mut c_int, c_int, Handle);
    function_set = "cuFuncSetAttribute" (Handle, c_int, c_int);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor" (*mut c_int, Handle, c_int, usize);
    parameter_info = "cuFuncGetParamInfo" (Handle, usize, *mut usize, *mut usize);
    tensor_map = "cuTensorMapEncodeTiled"
        (*mut c_void, c_int, c_uint, u64, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int, c_int, c_int);
    launch_kernel = "cuLaunchKernel"
        (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
}

const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
const CUDA_ERROR_INVALID_VALUE: c_int = 1;
const CU_TENSOR_MAP_INTERLEAVE_NONE: c_int = 0;
const CU_TENSOR_MAP_L2_PROMOTION_L2_128B: c_int = 2;
/// Out-of-bounds elements are zeros, not NaN.
const CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: c_int = 0;

/// `CUdevice_attribute`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Attribute {
    ClockRateKhz = 13,
    Multiprocessors = 16,
    MemoryClockRateKhz = 36,
    MemoryBusBits = 37,
    L2Bytes = 38,
    Major = 75,
    Minor = 76,
    SharedBytesPerBlockOptin = 97,
}

impl Driver {
    /// Turns a status into an error with the name of the call and the driver's message.
    fn ok(&self, status: c_int, call: &str) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let (mut name, mut words) = (std::ptr::null(), std::ptr::null());
        // SAFETY: both calls write a pointer to a static string, or leave null.
        unsafe {
            (self.error_name)(status, &mut name);
            (self.error_string)(status, &mut words);
        }
        let text = |at: *const c_char| {
            // SAFETY: null, or a static string of the driver.
            if at.is_null() { "unknown".into() } else { unsafe { CStr::from_ptr(at) }.to_string_lossy() }
        };
        Err(CudaError::status(format!("{call}: {}, {}", text(name), text(words)), status))
    }

    pub fn init(&self) -> Result<(), CudaError> {
        // SAFETY: takes no pointer.
        self.ok(unsafe { (self.init)(0) }, "cuInit")
    }

    /// The CUDA version the driver supports: 13000 for 13.0. Works before `init`.
    pub fn version(&self) -> Result<u32, CudaError> {
        let mut version = 0;
        // SAFETY: writes one integer.
        self.ok(unsafe { (self.driver_version)(&mut version) }, "cuDriverGetVersion")?;
        Ok(version.max(0) as u32)
    }

    pub fn devices(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: writes one integer.
        self.ok(unsafe { (self.device_count)(&mut count) }, "cuDeviceGetCount")?;
        Ok(count.max(0) as usize)
    }

    /// The `CUdevice` of an ordinal.
    pub fn device(&self, index: usize) -> Result<c_int, CudaError> {
        let mut device = 0;
        // SAFETY: writes one integer.
        self.ok(unsafe { (self.device_get)(&mut device, index as c_int) }, "cuDeviceGet")?;
        Ok(device)
    }

    pub fn device_name(&self, device: c_int) -> Result<String, CudaError> {
        let mut name = [0 as c_char; 256];
        // SAFETY: writes at most 256 bytes, zero-terminated.
        self.ok(unsafe { (self.device_name)(name.as_mut_ptr(), 256, device) }, "cuDeviceGetName")?;
        Ok(text(&name))
    }

    /// `0000:1b:00.0`.
    pub fn pci_address(&self, device: c_int) -> Result<String, CudaError> {
        let mut address = [0 as c_char; 32];
        // SAFETY: writes at most 32 bytes, zero-terminated.
        self.ok(unsafe { (self.device_pci)(address.as_mut_ptr(), 32, device) }, "cuDeviceGetPCIBusId")?;
        Ok(text(&address))
    }

    pub fn attribute(&self, device: c_int, attribute: Attribute) -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one integer.
        let status = unsafe { (self.device_attribute)(&mut value, attribute as c_int, device) };
        self.ok(status, "cuDeviceGetAttribute")?;
        Ok(value.max(0) as u32)
    }

    pub fn total_memory(&self, device: c_int) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: writes one integer.
        self.ok(unsafe { (self.device_memory)(&mut bytes, device) }, "cuDeviceTotalMem")?;
        Ok(bytes as u64)
    }

    /// Free and total bytes of the current context's device.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        self.ok(unsafe { (self.mem_info)(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    /// Enqueues a kernel; the argument values are copied before this returns.
    pub fn launch(
        &self,
        function: &Function,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        args: &[u64],
        stream: Stream,
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        // 32 pointers cover every kernel without a heap allocation.
        let mut few = [null_mut(); 32];
        let mut many;
        let at = |arg: &u64| std::ptr::from_ref(arg).cast_mut().cast::<c_void>();
        let pointers = if args.len() <= few.len() {
            few.iter_mut().zip(args).for_each(|(to, arg)| *to = at(arg));
            &mut few[..]
        } else {
            many = args.iter().map(at).collect::<Vec<_>>();
            &mut many[..]
        };
        // SAFETY: each pointer refers to eight readable bytes, the widest argument.
        unsafe { self.launch_at(function, grid, block, shared, pointers, stream) }
    }

    /// Enqueues a kernel that takes structs; their bytes are copied before this returns.
    pub fn launch_blocks(
        &self,
        function: &Function,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        args: &[Block],
        stream: Stream,
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        let mut pointers: Vec<_> = args.iter().map(|arg| arg.as_ptr().cast_mut().cast()).collect();
        // SAFETY: the arguments have the sizes of the kernel's parameters, which `argument` checked.
        unsafe { self.launch_at(function, grid, block, shared, &mut pointers, stream) }
    }

    /// # Safety
    /// `pointers` has one entry per parameter of the function, each to as many readable bytes as the parameter has.
    unsafe fn launch_at(
        &self,
        function: &Function,
        [x, y, z]: [u32; 3],
        block: u32,
        shared: u32,
        pointers: &mut [*mut c_void],
        stream: Stream,
    ) -> Result<(), CudaError> {
        // SAFETY: the function's module is loaded; the caller guarantees the arguments.
        let status = unsafe {
            (self.launch_kernel)(
                function.raw,
                x,
                y,
                z,
                block,
                1,
                1,
                shared,
                stream.0,
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        if status == 0 {
            return Ok(());
        }
        let what = format!("cuLaunchKernel with grid {:?}, block {block}, {shared} bytes shared", [x, y, z]);
        self.ok(status, &what)
    }

    /// The size of each parameter of a kernel.
    pub fn parameter_bytes(&self, function: &Function) -> Result<Vec<usize>, CudaError> {
        let mut sizes = vec![];
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: writes two integers; the function's module is loaded.
            let status = unsafe { (self.parameter_info)(function.raw, sizes.len(), &mut offset, &mut bytes) };
            if status == CUDA_ERROR_INVALID_VALUE {
                return Ok(sizes);
            }
            self.ok(status, "cuFuncGetParamInfo")?;
            sizes.push(bytes);
        }
    }

    /// Encodes the TMA descriptor of a tensor.
    pub fn tensor_map(&self, of: &tensor_map::Tensor) -> Result<Block, CudaError> {
        of.check()?;
        #[repr(C, align(64))]
        struct Map(tensor_map::Opaque);
        let mut map = Map([0; 16]);
        let steps = of.step_bytes();
        let ones = vec![1; of.dims.len()];
        // SAFETY: writes 128 bytes, 64-byte aligned; reads one extent per axis and one stride fewer.
        let status = unsafe {
            (self.tensor_map)(
                map.0.as_mut_ptr().cast(),
                of.type_code(),
                of.dims.len() as c_uint,
                of.at,
                of.dims.as_ptr(),
                steps.as_ptr(),
                of.box_dims.as_ptr(),
                ones.as_ptr(),
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                of.swizzle.code(),
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        self.ok(status, &format!("cuTensorMapEncodeTiled of {of:?}"))?;
        Ok(tensor_map::block(&map.0))
    }

    /// Lets a function use more than 48 KiB of shared memory. The limit is per function and is only ever raised, because
    /// launches of other sizes share it.
    pub fn allow_shared(&self, function: &Function, bytes: u32) -> Result<(), CudaError> {
        let what = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let mut allowed = 0;
        // SAFETY: writes one integer; the function's module is loaded.
        self.ok(unsafe { (self.function_get)(&mut allowed, what, function.raw) }, "cuFuncGetAttribute")?;
        if allowed >= bytes as c_int {
            return Ok(());
        }
        // SAFETY: the function's module is loaded.
        let status = unsafe { (self.function_set)(function.raw, what, bytes as c_int) };
        self.ok(status, &format!("cuFuncSetAttribute for {bytes} bytes of shared memory"))
    }

    pub fn blocks_per_sm(&self, function: &Function, block: u32, shared: u32) -> Result<u32, CudaError> {
        let mut blocks = 0;
        // SAFETY: writes one integer; the function's module is loaded.
        let status = unsafe { (self.occupancy)(&mut blocks, function.raw, block as c_int, shared as usize) };
        self.ok(status, "cuOccupancyMaxActiveBlocksPerMultiprocessor")?;
        Ok(blocks.max(0) as u32)
    }

    /// Sets bytes of device memory, in stream order.
    ///
    /// # Safety
    /// The range lies in memory of this device that stays allocated until the stream has executed the call.
    pub unsafe fn memset(&self, at: u64, byte: u8, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        self.ok(unsafe { (self.memset)(at, byte, bytes, stream.0) }, "cuMemsetD8Async")
    }

    /// Copies between ranges of device memory, in stream order.
    ///
    /// # Safety
    /// Both ranges lie in memory of this device that stays allocated until the stream has executed the call.
    pub unsafe fn copy(&self, from: u64, to: u64, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: guaranteed by the caller.
        self.ok(unsafe { (self.copy_across)(to, from, bytes, stream.0) }, "cuMemcpyDtoDAsync")
    }

    pub fn synchronize(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: a stream handle is only handed out by its owner.
        self.ok(unsafe { (self.stream_synchronize)(stream.0) }, "cuStreamSynchronize")
    }

    /// Waits for all work of the current context; fails permanently once a kernel has caused a sticky error.
    pub fn synchronize_context(&self) -> Result<(), CudaError> {
        // SAFETY: takes no argument.
        self.ok(unsafe { (self.context_synchronize)() }, "cuCtxSynchronize")
    }

    /// Mean device milliseconds per call of `work`: three warm-up calls, then `calls` timed together.
    pub fn time_ms(
        &'static self,
        stream: Stream,
        calls: usize,
        mut work: impl FnMut() -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        let (begin, end) = (Event::new(self)?, Event::new(self)?);
        for _ in 0..3 {
            work()?;
        }
        begin.record(stream)?;
        for _ in 0..calls.max(1) {
            work()?;
        }
        end.record(stream)?;
        Ok(begin.elapsed_ms(&end)? / calls.max(1) as f64)
    }
}

fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|c| *c as u8).take_while(|b| *b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A device's primary context, kept alive by everything on the device.
pub struct Context {
    driver: &'static Driver,
    device: c_int,
    raw: Handle,
}

impl Context {
    /// Retains the primary context and makes it current on this thread.
    pub fn retain(driver: &'static Driver, device: c_int) -> Result<Context, CudaError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        driver.ok(unsafe { (driver.primary_retain)(&mut raw, device) }, "cuDevicePrimaryCtxRetain")?;
        let context = Context { driver, device, raw };
        context.bind()?;
        Ok(context)
    }

    /// Makes the context current on the calling thread.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        self.driver.ok(unsafe { (self.driver.set_current)(self.raw) }, "cuCtxSetCurrent")
    }

    /// A closure that makes the context current on whichever thread calls it. The context must still be retained then.
    pub fn binder(&self) -> impl Fn() -> Result<(), CudaError> + Send + 'static {
        let (driver, raw) = (self.driver, self.raw as usize);
        // SAFETY: the driver rejects a context that no longer exists.
        move || driver.ok(unsafe { (driver.set_current)(raw as Handle) }, "cuCtxSetCurrent")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`. An error in drop cannot be reported.
        unsafe { (self.driver.primary_release)(self.device) };
    }
}

// SAFETY: the driver's calls are thread-safe, and a context may be current on several threads.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}
