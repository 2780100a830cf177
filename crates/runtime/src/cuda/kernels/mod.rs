//! The kernels of the CUDA backend: one folder per group of operations, and the table of every kernel.

mod address;
pub mod attention;
pub mod elementwise;
pub mod linear_attention;
pub mod movement;
pub mod norms;
pub mod optimizers;
pub mod products;
pub mod reductions;
mod stage;

use super::context::Kernel;

/// Every kernel of this backend, by file. Of two rows for one operation and type the first is taken.
pub const KERNELS: &[&[Kernel]] = &[
    optimizers::adamw::KERNELS,
    optimizers::adamw8::KERNELS,
    attention::KERNELS,
    elementwise::bundle::KERNELS,
    movement::copy::KERNELS,
    norms::double_norm::KERNELS,
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
    products::thin_product::KERNELS,
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
