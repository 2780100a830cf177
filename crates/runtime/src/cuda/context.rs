//! The interface that every CUDA kernel implements: row, sources, `prepare`, and the work that `prepare` returns.
//!
//! No bindings crate is used: handles are opaque pointers, statuses plain integers, and constants carry the names of NVIDIA's
//! headers. Libraries stay loaded for the lifetime of the process, so entry points are `'static`.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use flatout_ir::target::KernelRow;
use flatout_ir::{Axis, Launch, View};

use super::argument::Block;
use super::driver::nccl::{Communicator, Communicators};
use super::driver::{Driver, Modules};
use super::kernels::ahead::NextWeight;
use super::kernels::attention::choice::{AttentionKernel, Chosen};
use super::kernels::attention::cudnn::Cudnn;
use super::kernels::products::choice::ProductKernel;
use super::kernels::products::lt::Lt;
use super::session::tuned::Tuned;
use super::tensor_map;

/// An error of a library or of the run-time compiler, in one sentence; the session adds the launch's path and shapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    pub what: String,
    /// The library's status; 0 if the failure did not come from a library.
    pub code: i32,
}

impl CudaError {
    /// A failure without a status.
    pub fn new(what: impl Into<String>) -> Self {
        CudaError { what: what.into(), code: 0 }
    }

    /// A call that returned an error status.
    pub fn status(what: impl Into<String>, code: i32) -> Self {
        CudaError { what: what.into(), code }
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            0 => f.write_str(&self.what),
            code => write!(f, "{} (status {code})", self.what),
        }
    }
}

impl std::error::Error for CudaError {}

/// A kernel: its capabilities, the sources it compiles, and how a launch becomes work on a stream.
pub struct Kernel {
    /// The name begins with `cuda.`. `deterministic` is set if it always holds; with `Facts::deterministic` it holds for every
    /// kernel.
    pub row: KernelRow,
    /// Sources that a launch needs, compiled in parallel before `prepare`; empty for library calls.
    pub sources: fn(&Launch, &Facts) -> Vec<Source>,
    /// Turns a launch that `launch::check` accepted into work. The arena holds no data yet, so candidates may be timed on it.
    pub prepare: fn(&Launch, &Prepare<'_>) -> Prepared,
}

/// The work of a launch, or why it cannot run.
pub type Prepared = Result<Box<dyn Work>, CudaError>;

/// Properties of the device and the run that kernels may depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Compute capability: 9 and 0 on Hopper.
    pub major: u32,
    pub minor: u32,
    pub sms: u32,
    /// The most shared memory a block may request.
    pub shared_bytes: u32,
    pub l2_bytes: u32,
    /// `cudnnGetVersion`, such as 91900; `None` where cuDNN is missing.
    pub cudnn: Option<u32>,
    /// Whether equal inputs must give equal bits.
    pub deterministic: bool,
    /// Whether `prepare` times candidates; otherwise the library's first choice is taken.
    pub autotune: bool,
    /// The attention kernel requested by the user.
    pub attention: AttentionKernel,
    /// The product kernel requested by the user, for launches it supports.
    pub product: ProductKernel,
}

impl Facts {
    /// Whether the device converts and multiplies 8-bit floats in hardware.
    pub fn has_fp8(&self) -> bool {
        (self.major, self.minor) >= (8, 9)
    }

    /// Properties common to all devices of an architecture such as `sm_86` or `sm_90a`, for compiling without a device.
    pub fn on_paper(arch: &str) -> Facts {
        let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
        let number: u32 = digits.parse().unwrap_or(80);
        let shared_bytes = match number {
            80 | 87 => 163 << 10,
            86 | 89 | 120.. => 99 << 10,
            _ => 227 << 10,
        };
        Facts {
            major: number / 10,
            minor: number % 10,
            sms: 64,
            shared_bytes,
            l2_bytes: 32 << 20,
            cudnn: None,
            deterministic: false,
            autotune: false,
            attention: AttentionKernel::Auto,
            product: ProductKernel::Auto,
        }
    }
}

/// Input of the run-time compiler; equal sources are compiled once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// File name for messages, such as `norm.cu`.
    pub name: &'static str,
    pub code: Cow<'static, str>,
    /// `(name, value)` pairs, in the order they are passed.
    pub defines: Vec<(String, String)>,
}

impl Source {
    /// The value of a define that is a number.
    pub fn number(&self, name: &str) -> Option<usize> {
        self.defines.iter().find(|(n, _)| n == name).and_then(|(_, value)| value.parse().ok())
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let defines: Vec<String> =
            self.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        write!(f, "{} [{}]", self.name, defines.join(" "))
    }
}

/// The context of `prepare`. The arena is allocated, so addresses are final and may be baked into arguments.
#[derive(Clone, Copy)]
pub struct Prepare<'a> {
    pub(super) arena: u64,
    pub(super) facts: &'a Facts,
    pub(super) modules: &'a Modules,
    pub(super) driver: &'static Driver,
    pub(super) lt: &'a Arc<Lt>,
    pub(super) cudnn: Result<&'a Arc<Cudnn>, &'a CudaError>,
    pub(super) tuned: &'a Tuned,
    pub(super) stream: Stream,
    pub(super) notes: &'a RefCell<Vec<String>>,
    pub(super) chosen: &'a RefCell<Vec<Chosen>>,
    pub(super) products: &'a RefCell<BTreeMap<&'static str, usize>>,
    pub(super) communicators: Option<&'a Communicators>,
    /// The launch after the one that is prepared.
    pub(super) next: Option<&'a Launch>,
}

impl<'a> Prepare<'a> {
    /// The device address of the view's first element.
    pub fn address(&self, view: &View) -> u64 {
        self.arena + view.offset as u64
    }

    /// An `extern "C"` entry point of a source that `sources` listed for this launch.
    pub fn function(&self, source: &Source, entry: &str) -> Result<Function, CudaError> {
        self.modules.function(source, entry)
    }

    pub fn facts(&self) -> &'a Facts {
        self.facts
    }

    /// The weight that the next launch multiplies by, for kernels that request it ahead.
    pub fn next_weight(&self) -> NextWeight {
        NextWeight::of(self.next, self.facts, |view| self.address(view))
    }

    /// cuBLASLt; works keep a clone.
    pub fn lt(&self) -> &'a Arc<Lt> {
        self.lt
    }

    /// cuDNN, or why it is unavailable; works keep a clone.
    pub fn cudnn(&self) -> Result<&'a Arc<Cudnn>, CudaError> {
        self.cudnn.map_err(Clone::clone)
    }

    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Encodes a tensor map as a kernel argument; needs sm_90 or later.
    pub fn tensor_map(&self, of: &tensor_map::Tensor) -> Result<Block, CudaError> {
        self.driver.tensor_map(of)
    }

    /// Stored times of products, and the number of candidates to time.
    pub(super) fn tuned(&self) -> &'a Tuned {
        self.tuned
    }

    /// Records a note for the user about a fallback; repeated notes are kept once.
    pub fn note(&self, sentence: String) {
        let mut notes = self.notes.borrow_mut();
        if !notes.contains(&sentence) {
            notes.push(sentence);
        }
    }

    /// Records the kernel that an attention runs on; repeated records are kept once.
    pub(super) fn record_attention(&self, what: Chosen) {
        let mut chosen = self.chosen.borrow_mut();
        if !chosen.contains(&what) {
            chosen.push(what);
        }
    }

    /// Counts a product that runs on the kernel of this name.
    pub(super) fn count_product(&self, kernel: &'static str) {
        *self.products.borrow_mut().entry(kernel).or_default() += 1;
    }

    pub(super) fn product_count(&self) -> usize {
        self.products.borrow().values().sum()
    }

    pub(super) fn product_counts(&self) -> BTreeMap<&'static str, usize> {
        self.products.borrow().clone()
    }

    pub(super) fn set_product_counts(&self, counts: BTreeMap<&'static str, usize>) {
        *self.products.borrow_mut() = counts;
    }

    /// The group of ranks along an axis; `None` if the session has no other ranks.
    pub fn communicator(&self, axis: Axis) -> Option<&'a Arc<Communicator>> {
        self.communicators.and_then(|all| all.along(axis))
    }

    pub fn coordinate(&self, axis: Axis) -> usize {
        self.communicators.map_or(0, |all| all.mesh().coordinate(all.rank(), axis))
    }

    /// The session's own stream, idle during `prepare`, on which candidates may be timed.
    pub fn stream(&self) -> Stream {
        self.stream
    }
}

/// Fully resolved device work of one launch: enqueuing neither allocates nor synchronises, so it can be captured.
pub trait Work {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError>;
}

/// A `CUstream`.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub(super) *mut c_void);

impl Stream {
    /// For libraries that take a `CUstream` or `cudaStream_t`.
    pub fn raw(self) -> *mut c_void {
        self.0
    }
}

/// A `CUfunction`; its module stays loaded as long as this exists.
#[derive(Clone)]
pub struct Function {
    pub(super) raw: *mut c_void,
    pub(super) driver: &'static Driver,
    /// Keeps the module loaded.
    pub(super) _module: Arc<super::driver::Module>,
}

impl Function {
    /// `CUfunction`.
    pub fn raw(&self) -> *mut c_void {
        self.raw
    }

    /// Number of blocks with the given threads and dynamic shared memory that fit on one multiprocessor (occupancy).
    /// Opts in to more than 48 KiB of shared memory where needed, without which none would fit.
    pub fn blocks_per_sm(&self, block: u32, shared: u32) -> Result<u32, CudaError> {
        if shared > DEFAULT_SHARED {
            self.driver.allow_shared(self, shared)?;
        }
        self.driver.blocks_per_sm(self, block, shared)
    }
}

/// A kernel argument, passed by value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    Ptr(u64),
    I32(i32),
    I64(i64),
    F32(f32),
}

/// Dynamic shared memory available to a block without opting in to more.
pub(super) const DEFAULT_SHARED: u32 = 48 << 10;

/// A kernel launch as work. Grid x may reach 2^31 - 1, y and z 65535. Opts in to more than 48 KiB of shared memory where
/// needed; if the device has less, the first enqueue fails with the driver's status.
pub fn launch(function: Function, grid: [u32; 3], block: u32, shared: u32, args: Vec<Arg>) -> Box<dyn Work> {
    let asked =
        if shared > DEFAULT_SHARED { function.driver.allow_shared(&function, shared) } else { Ok(()) };
    let args = args
        .into_iter()
        .map(|arg| match arg {
            Arg::Ptr(x) => x,
            Arg::I64(x) => x as u64,
            Arg::I32(x) => x as u32 as u64,
            Arg::F32(x) => x.to_bits() as u64,
        })
        .collect();
    Box::new(KernelLaunch { function, grid, block, shared, args, asked })
}

struct KernelLaunch {
    function: Function,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    /// Each argument in the low bytes of a word: little-endian, so a 32-bit value occupies the first half.
    args: Vec<u64>,
    asked: Result<(), CudaError>,
}

impl Work for KernelLaunch {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        self.asked.clone()?;
        self.function.driver.launch(&self.function, self.grid, self.block, self.shared, &self.args, stream)
    }
}

/// Several works, enqueued in order.
pub fn sequence(works: Vec<Box<dyn Work>>) -> Box<dyn Work> {
    Box::new(Sequence(works))
}

struct Sequence(Vec<Box<dyn Work>>);

impl Work for Sequence {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        self.0.iter().try_for_each(|work| work.enqueue(stream))
    }
}
