//! The CUDA backend: one file a kernel family, and the table of what they run.
//!
//! The build needs no CUDA: `library` finds and opens NVIDIA's libraries at run time. A `Session` resolves every launch
//! of its plans once (`context::Kernel::prepare`), captures each plan as a CUDA graph and replays it.

pub mod adamw;
mod adamw8;
mod address;
mod argument;
pub mod attention;
pub mod bundle;
pub mod cache;
pub mod context;
pub mod copy;
pub mod device;
pub mod double_norm;
pub mod driver;
pub mod dropout;
pub mod elementwise;
pub mod environment;
mod epilogue;
pub mod gated;
pub mod gpus;
pub mod head_loss;
pub mod index;
mod landing;
pub mod library;
pub mod linear_attention;
pub mod low_rank_norm;
pub mod lt;
pub mod noise;
pub mod norm;
pub mod nvml;
pub mod nvrtc;
pub mod partial_sums;
pub mod product;
pub mod qk_norm_rope;
pub mod quantize;
pub mod reduce;
pub mod region_sums;
pub mod resample;
pub mod rope;
pub mod session;
pub mod snapshot;
pub mod spin;
mod stage;
pub mod staging;
pub mod store;
pub mod tensor_map;
pub mod thin_product;
mod timing;
mod traffic;
pub mod tuned;

use flatout_ir::OpKind;
use flatout_ir::target::{KernelRow, Layout, no_workspace};
use flatout_ir::types::DType;

pub use argument::{Block, launch_blocks};
pub use attention::choice::AttentionKernel;
pub use context::{Arg, CudaError, Facts, Function, Kernel, Prepare, Source, Stream, Work, launch, sequence};
pub use device::{Device, Gpu, Identity, probe, target};
pub use session::{Autotune, Options};

/// For what moves or casts elements. The 8-bit floats are the target's where the device converts them: sm_89 and later.
const EVERY_TYPE: &[DType] = &[DType::F32, DType::BF16, DType::E4M3, DType::E5M2, DType::I32, DType::U8];

/// A row of kernels over rows of floats, to which a file adds its own name, operation and places.
const ROWS_OF_FLOATS: KernelRow = KernelRow {
    name: "",
    op: OpKind::Map,
    dtypes: &[DType::F32, DType::BF16],
    ins: Layout::Rows,
    outs: Layout::Rows,
    in_place: &[],
    workspace: no_workspace,
    deterministic: true,
};

/// Every kernel of this backend, by file. Of two rows for one operation and type the first is taken.
pub const KERNELS: &[&[Kernel]] = &[
    adamw::KERNELS,
    adamw8::KERNELS,
    attention::KERNELS,
    bundle::KERNELS,
    copy::KERNELS,
    double_norm::KERNELS,
    dropout::KERNELS,
    elementwise::KERNELS,
    gated::KERNELS,
    head_loss::KERNELS,
    index::KERNELS,
    linear_attention::KERNELS,
    low_rank_norm::KERNELS,
    norm::KERNELS,
    product::KERNELS,
    qk_norm_rope::KERNELS,
    quantize::KERNELS,
    reduce::KERNELS,
    resample::KERNELS,
    rope::KERNELS,
    thin_product::KERNELS,
];

/// The kernel of a name.
pub fn kernel(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().copied().flatten().find(|k| k.row.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Plans compile for either backend: what the CPU runs, in every type, a GPU runs too.
    #[test]
    fn every_operation_and_type_of_the_cpu_has_a_kernel() {
        let rows = || KERNELS.iter().copied().flatten().map(|k| &k.row);
        for cpu in crate::cpu::target(1).kernels {
            for dtype in cpu.dtypes {
                let has = rows().any(|row| row.op == cpu.op && row.dtypes.contains(dtype));
                assert!(has, "no CUDA kernel runs {} in {}", cpu.op.name(), dtype.name());
            }
        }
        let names: Vec<&str> = rows().map(|row| row.name).collect();
        assert!(names.iter().all(|name| name.starts_with("cuda.")), "{names:?}");
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{names:?}");
    }
}
