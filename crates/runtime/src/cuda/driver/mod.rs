//! The driver: its entry points, and owners of what it hands out.

pub mod cache;
pub mod device;
pub mod environment;
pub mod gpus;
pub mod library;
pub mod nvml;
pub mod nvrtc;
pub mod store;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use super::argument::Block;
use super::context::{CudaError, Function, Source, Stream};
use super::tensor_map;
use library::Library;

type Handle = *mut c_void;

/// Declares the entry points once: field, symbol, signature. All return `CUresult`.
macro_rules! entries {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// Entry points of libcuda, by the names and versions of the header they were written against (CUDA 12.8).
        pub struct Driver {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Driver {
            /// Resolves every entry point; a driver without one of them is too old.
            pub fn open(library: &'static Library) -> Result<Driver, CudaError> {
                Ok(Driver {
                    // SAFETY: the signature is the header's for this symbol.
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

const CU_STREAM_NON_BLOCKING: c_uint = 1;
const CU_EVENT_DEFAULT: c_uint = 0;
const CU_EVENT_DISABLE_TIMING: c_uint = 2;
const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
const CUDA_ERROR_INVALID_VALUE: c_int = 1;
const CUDA_ERROR_NOT_READY: c_int = 600;
const CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: c_int = 9;
const CU_TENSOR_MAP_INTERLEAVE_NONE: c_int = 0;
const CU_TENSOR_MAP_L2_PROMOTION_L2_128B: c_int = 2;
/// Zeros, not NaN, beyond the tensor.
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
    /// A status with the name of the call and the driver's own words.
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
        // SAFETY: writes at most 256 bytes, ended by zero.
        self.ok(unsafe { (self.device_name)(name.as_mut_ptr(), 256, device) }, "cuDeviceGetName")?;
        Ok(text(&name))
    }

    /// `0000:1b:00.0`.
    pub fn pci_address(&self, device: c_int) -> Result<String, CudaError> {
        let mut address = [0 as c_char; 32];
        // SAFETY: writes at most 32 bytes, ended by zero.
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
        // 32 pointers cover every kernel without touching the heap.
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
        // SAFETY: each pointer leads to eight readable bytes, the widest argument.
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
        // SAFETY: the arguments were made to be as large as the kernel's parameters, which `argument` checked.
        unsafe { self.launch_at(function, grid, block, shared, &mut pointers, stream) }
    }

    /// # Safety
    /// There is a pointer for every parameter of the function, to as many readable bytes as the parameter has.
    unsafe fn launch_at(
        &self,
        function: &Function,
        [x, y, z]: [u32; 3],
        block: u32,
        shared: u32,
        pointers: &mut [*mut c_void],
        stream: Stream,
    ) -> Result<(), CudaError> {
        // SAFETY: the function's module is loaded; the caller's promise about arguments.
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

    /// The bulk-copy unit's description of a tensor.
    pub fn tensor_map(&self, of: &tensor_map::Tensor) -> Result<Block, CudaError> {
        of.check()?;
        #[repr(C, align(64))]
        struct Map(tensor_map::Opaque);
        let mut map = Map([0; 16]);
        let steps = of.step_bytes();
        let ones = vec![1; of.dims.len()];
        // SAFETY: writes 128 bytes at a multiple of 64; reads as many extents as there are axes, one step less.
        let status = unsafe {
            (self.tensor_map)(
                map.0.as_mut_ptr().cast(),
                CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
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

    /// Lets blocks of a function ask for more than 48 KiB of shared memory. A function keeps the most it was allowed:
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

    /// Sets bytes of device memory, in the stream's order.
    ///
    /// # Safety
    /// The range lies in memory of this device that stays allocated until the stream reaches the call.
    pub unsafe fn memset(&self, at: u64, byte: u8, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.ok(unsafe { (self.memset)(at, byte, bytes, stream.0) }, "cuMemsetD8Async")
    }

    /// Copies device memory to device memory, in the stream's order.
    ///
    /// # Safety
    /// Both ranges lie in memory of this device that stays allocated until the stream reaches the call.
    pub unsafe fn copy(&self, from: u64, to: u64, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.ok(unsafe { (self.copy_across)(to, from, bytes, stream.0) }, "cuMemcpyDtoDAsync")
    }

    pub fn synchronize(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: a stream is only handed out by its owner.
        self.ok(unsafe { (self.stream_synchronize)(stream.0) }, "cuStreamSynchronize")
    }

    /// Waits for all work of the current context; fails for good once a kernel has broken it.
    pub fn synchronize_context(&self) -> Result<(), CudaError> {
        // SAFETY: takes nothing.
        self.ok(unsafe { (self.context_synchronize)() }, "cuCtxSynchronize")
    }

    /// Milliseconds a call of `work` takes on the device: three calls to warm up, then `calls` timed together.
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

/// A device's primary context, kept as long as anything on the device.
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
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`. A status here has nobody to go to.
        unsafe { (self.driver.primary_release)(self.device) };
    }
}

// SAFETY: the driver's calls are thread-safe, and a context may be current on several threads.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A stream that does not wait for the default stream.
pub struct OwnedStream {
    driver: &'static Driver,
    raw: Handle,
}

impl OwnedStream {
    pub fn new(driver: &'static Driver) -> Result<OwnedStream, CudaError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        driver.ok(unsafe { (driver.stream_create)(&mut raw, CU_STREAM_NON_BLOCKING) }, "cuStreamCreate")?;
        Ok(OwnedStream { driver, raw })
    }

    pub fn get(&self) -> Stream {
        Stream(self.raw)
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.driver.synchronize(self.get())
    }

    /// Records what `enqueue` puts on the stream instead of running it.
    pub fn capture(&self, enqueue: impl FnOnce(Stream) -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let driver = self.driver;
        let mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and, being ours alone, not capturing.
        driver.ok(unsafe { (driver.capture_begin)(self.raw, mode) }, "cuStreamBeginCapture")?;
        let enqueued = enqueue(self.get());
        let mut graph = null_mut();
        // SAFETY: writes one handle; the capture began above and must end even when enqueuing failed.
        let ended = driver.ok(unsafe { (driver.capture_end)(self.raw, &mut graph) }, "cuStreamEndCapture");
        let captured = enqueued.and(ended);
        let mut exec = null_mut();
        let made = captured.and_then(|()| {
            // SAFETY: the graph was captured; writes one handle.
            let status = unsafe { (driver.graph_instantiate)(&mut exec, graph, 0) };
            driver.ok(status, "cuGraphInstantiateWithFlags")
        });
        if !graph.is_null() {
            // SAFETY: the executable graph keeps nothing of its template.
            unsafe { (driver.graph_destroy)(graph) };
        }
        made?;
        let graph = Graph { driver, exec };
        // SAFETY: both are alive. Uploading now keeps the first launch from allocating.
        driver.ok(unsafe { (driver.graph_upload)(graph.exec, self.raw) }, "cuGraphUpload")?;
        Ok(graph)
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: created in `new`; work still on it finishes first.
        unsafe { (self.driver.stream_destroy)(self.raw) };
    }
}

/// An instantiated graph.
pub struct Graph {
    driver: &'static Driver,
    exec: Handle,
}

impl Graph {
    pub fn launch(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the graph is alive, and so is what it was captured from: the session owns both.
        self.driver.ok(unsafe { (self.driver.graph_launch)(self.exec, stream.0) }, "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated in `capture`.
        unsafe { (self.driver.graph_exec_destroy)(self.exec) };
    }
}

/// A point in a stream.
pub struct Event {
    driver: &'static Driver,
    raw: Handle,
}

// SAFETY: the driver's calls are thread-safe, and an event is a handle any thread may pass to them where its context
// is current.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event with a time.
    pub fn new(driver: &'static Driver) -> Result<Event, CudaError> {
        Event::with_flags(driver, CU_EVENT_DEFAULT)
    }

    /// An event that only orders, which costs the streams less.
    pub fn untimed(driver: &'static Driver) -> Result<Event, CudaError> {
        Event::with_flags(driver, CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(driver: &'static Driver, flags: c_uint) -> Result<Event, CudaError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        driver.ok(unsafe { (driver.event_create)(&mut raw, flags) }, "cuEventCreate")?;
        Ok(Event { driver, raw })
    }

    /// What is put on `stream` after this waits, on the device, for what was recorded last; for nothing where nothing
    /// was. Recording again later does not move a wait that is enqueued already.
    pub fn hold(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive; the flags are the header's default.
        self.driver.ok(unsafe { (self.driver.stream_wait)(stream.0, self.raw, 0) }, "cuStreamWaitEvent")
    }

    pub fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        self.driver.ok(unsafe { (self.driver.event_record)(self.raw, stream.0) }, "cuEventRecord")
    }

    /// Waits until what was recorded is done; at once where nothing was.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: alive.
        self.driver.ok(unsafe { (self.driver.event_synchronize)(self.raw) }, "cuEventSynchronize")
    }

    /// Whether what was recorded is done, without waiting.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        // SAFETY: alive.
        match unsafe { (self.driver.event_query)(self.raw) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            status => self.driver.ok(status, "cuEventQuery").map(|()| true),
        }
    }

    /// Waits for `end` and gives the time between.
    pub fn elapsed_ms(&self, end: &Event) -> Result<f64, CudaError> {
        end.synchronize()?;
        let mut ms = 0.0;
        // SAFETY: writes one float; both events were recorded.
        let status = unsafe { (self.driver.event_elapsed)(&mut ms, self.raw, end.raw) };
        self.driver.ok(status, "cuEventElapsedTime")?;
        Ok(ms as f64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`.
        unsafe { (self.driver.event_destroy)(self.raw) };
    }
}

/// Memory of the device.
pub struct DeviceMemory {
    driver: &'static Driver,
    at: u64,
    bytes: usize,
}

impl DeviceMemory {
    pub fn new(driver: &'static Driver, bytes: usize) -> Result<DeviceMemory, CudaError> {
        let mut at = 0;
        let bytes = bytes.max(256);
        // SAFETY: writes one address.
        driver.ok(unsafe { (driver.mem_alloc)(&mut at, bytes) }, &format!("cuMemAlloc of {bytes} bytes"))?;
        Ok(DeviceMemory { driver, at, bytes })
    }

    pub fn address(&self) -> u64 {
        self.at
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets every byte, in the stream's order.
    pub fn fill(&self, byte: u8, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the whole allocation, alive.
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

    /// Copies from a place in pinned memory, in the stream's order. The source must not change before.
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
        // SAFETY: both ranges were checked; pinned memory stays where it is.
        let status = unsafe {
            let source = from.at.cast::<u8>().add(at).cast();
            (self.driver.copy_in)(self.at + offset as u64, source, bytes, stream.0)
        };
        self.driver.ok(status, "cuMemcpyHtoDAsync")
    }

    /// Copies to a place in pinned memory, in the stream's order.
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
        // SAFETY: both ranges were checked; pinned memory stays where it is.
        let status = unsafe {
            let place = to.at.cast::<u8>().add(at).cast();
            (self.driver.copy_out)(place, self.at + offset as u64, bytes, stream.0)
        };
        self.driver.ok(status, "cuMemcpyDtoHAsync")
    }

    /// Copies within the allocation, in the stream's order; the ranges must not overlap.
    pub fn copy_within(&self, from: usize, to: usize, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        self.covers(from, bytes)?;
        self.covers(to, bytes)?;
        if from < to + bytes && to < from + bytes {
            return Err(CudaError::new(format!("{bytes} bytes from {from} to {to} overlap")));
        }
        // SAFETY: both ranges were checked, and the allocation outlives its streams' work.
        unsafe { self.driver.copy(self.at + from as u64, self.at + to as u64, bytes, stream) }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; freeing waits for the device.
        unsafe { (self.driver.mem_free)(self.at) };
    }
}

/// Host memory the device copies from and to without a detour.
pub struct PinnedMemory {
    driver: &'static Driver,
    at: Handle,
    bytes: usize,
}

// SAFETY: the memory is the process's own, and nothing about it belongs to a thread.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    pub fn new(driver: &'static Driver, bytes: usize) -> Result<PinnedMemory, CudaError> {
        let mut at = null_mut();
        let bytes = bytes.max(256);
        // SAFETY: writes one address.
        let status = unsafe { (driver.host_alloc)(&mut at, bytes, 0) };
        driver.ok(status, &format!("cuMemHostAlloc of {bytes} bytes"))?;
        // SAFETY: the allocation is ours and this large; pinned memory comes with anything in it.
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
    /// No copy that writes this memory is under way.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated and zeroed in `new`.
        unsafe { std::slice::from_raw_parts(self.at.cast(), self.bytes) }
    }

    /// # Safety
    /// No copy that reads or writes this memory is under way.
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

/// A loaded cubin.
pub struct Module {
    driver: &'static Driver,
    raw: Handle,
}

impl Module {
    pub fn load(driver: &'static Driver, cubin: &[u8]) -> Result<Module, CudaError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle; the cubin is whole, from the compiler or from the cache by its checksum.
        let status = unsafe { (driver.module_load)(&mut raw, cubin.as_ptr().cast()) };
        driver.ok(status, "cuModuleLoadData")?;
        Ok(Module { driver, raw })
    }

    pub fn function(self: &Arc<Self>, entry: &str) -> Result<Function, CudaError> {
        let name = CString::new(entry).map_err(|_| CudaError::new("an entry's name holds a zero byte"))?;
        let mut raw = null_mut();
        // SAFETY: writes one handle; the module is loaded.
        let status = unsafe { (self.driver.module_function)(&mut raw, self.raw, name.as_ptr()) };
        self.driver.ok(status, &format!("cuModuleGetFunction of `{entry}`"))?;
        Ok(Function { raw, driver: self.driver, _module: Arc::clone(self) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`; functions keep their module alive.
        unsafe { (self.driver.module_unload)(self.raw) };
    }
}

// SAFETY: a module is a handle the driver takes on any thread where its context is current.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// The modules of a session by source.
#[derive(Default)]
pub struct Modules(HashMap<Source, Arc<Module>>);

impl Modules {
    pub fn insert(&mut self, source: Source, module: Module) {
        self.0.insert(source, Arc::new(module));
    }

    pub fn function(&self, source: &Source, entry: &str) -> Result<Function, CudaError> {
        let module = self.0.get(source);
        let module = module.ok_or_else(|| {
            CudaError::new(format!("{} with {:?} was not listed as a source", source.name, source.defines))
        })?;
        module.function(entry).map_err(|e| CudaError::status(format!("{}: {}", source.name, e.what), e.code))
    }
}
