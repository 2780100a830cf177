//! The kernels of the CPU backend: one folder per group of operations, and the table of every kernel.

pub mod attention;
pub mod elementwise;
pub mod linear_attention;
pub mod movement;
pub mod norms;
pub mod optimizers;
pub mod products;
pub mod reductions;

use super::Kernel;

/// Every kernel of this backend, by file.
pub const KERNELS: &[&[Kernel]] = &[
    optimizers::adamw::KERNELS,
    optimizers::adamw8::KERNELS,
    attention::KERNELS,
    movement::copy::KERNELS,
    elementwise::dropout::KERNELS,
    elementwise::KERNELS,
    elementwise::gated::KERNELS,
    products::head_loss::KERNELS,
    movement::index::KERNELS,
    linear_attention::KERNELS,
    norms::low_rank_norm::KERNELS,
    norms::norm::KERNELS,
    products::product::KERNELS,
    norms::qk_norm_rope::KERNELS,
    elementwise::quantize::KERNELS,
    reductions::reduce::KERNELS,
    movement::resample::KERNELS,
    norms::rope::KERNELS,
];

/// The kernel of a name.
pub fn kernel(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().copied().flatten().find(|k| k.row.name == name)
}
