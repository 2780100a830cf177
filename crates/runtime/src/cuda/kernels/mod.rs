//! The kernels of the CUDA backend, in a folder per group of operations, and the table of all kernels.

mod address;
pub mod ahead;
pub mod attention;
pub mod collective;
pub mod linear_attention;
pub(crate) mod stage;
mod timing;

pub mod elementwise {
    //! Elementwise functions, alone, in fused regions and fused with other operations.

    pub mod bundle;
    pub mod dequantize;
    pub mod dropout;
    pub mod gated;
    pub mod map;
    pub mod quantize;
    pub mod region_sums;
    pub mod requantize;
}

pub mod movement {
    //! Data movement on the GPU: copies, indexed rows, image crops.

    pub mod copy;
    pub mod index;
    pub mod resample;
}

pub mod norms {
    //! Norms and rotary positions on the GPU, alone and fused.

    pub mod cached_qk_norm_rope;
    pub mod double_norm;
    pub mod low_rank_norm;
    pub mod norm;
    pub mod qk_norm_rope;
    pub mod rope;
}

pub mod optimizers {
    //! Optimizer updates on the GPU.

    pub mod adamw;
    pub mod adamw8;
}

pub mod products {
    //! Matrix products on the GPU: cuBLASLt and our kernels, epilogues, adapters, and the fused output head and loss.

    pub mod activated_product;
    mod call;
    pub mod choice;
    mod epilogue;
    pub mod gated_codes;
    pub mod gated_product;
    pub mod head_loss;
    mod hopper;
    pub mod lt;
    mod mma;
    pub mod product;
    pub mod thin_product;
}

pub mod reductions {
    //! Reductions along one axis on the GPU, sums of partial sums, and sampling of tokens from logits.

    pub mod partial_sums;
    pub mod reduce;
    pub mod sample;
}

use super::context::Kernel;

/// All kernels of this backend, by file. Of two rows for one operation and type the first is used.
pub const KERNELS: &[&[Kernel]] = &[
    optimizers::adamw::KERNELS,
    optimizers::adamw8::KERNELS,
    attention::KERNELS,
    elementwise::bundle::KERNELS,
    collective::KERNELS,
    movement::copy::KERNELS,
    norms::cached_qk_norm_rope::KERNELS,
    norms::double_norm::KERNELS,
    elementwise::dequantize::KERNELS,
    elementwise::requantize::KERNELS,
    elementwise::dropout::KERNELS,
    elementwise::map::KERNELS,
    elementwise::gated::KERNELS,
    products::gated_codes::KERNELS,
    products::gated_product::KERNELS,
    products::activated_product::KERNELS,
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
    reductions::sample::KERNELS,
    products::thin_product::KERNELS,
];

pub fn kernel(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().copied().flatten().find(|k| k.row.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Plans compile for either backend: a GPU supports every operation and type that the CPU supports.
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
