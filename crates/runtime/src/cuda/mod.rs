//! The CUDA backend: driver bindings, sessions, kernels.
//!
//! The build needs no CUDA: `library` finds and opens NVIDIA's libraries at run time. A `Session` prepares every launch of its
//! plans once (`context::Kernel::prepare`), captures each plan as a CUDA graph and replays it.

mod argument;
pub mod context;
pub mod driver;
pub mod kernels;
pub mod session;
pub mod tensor_map;

pub use argument::{Block, launch_blocks};
pub use context::{Arg, CudaError, Facts, Function, Kernel, Prepare, Source, Stream, Work, launch, sequence};
pub use driver::device::{Device, Gpu, Identity, probe, target};
pub use driver::{device, environment, gpus, library, links, nccl, nvml, nvrtc, store, topology};
pub use kernels::attention::choice::AttentionKernel;
pub use kernels::products::choice::ProductKernel;
pub use kernels::{KERNELS, attention, kernel};
pub use session::{Autotune, Options, noise, spin};
