//! The kernels of the CPU backend, in a folder per group of operations, and the table of all kernels.

pub mod attention;
pub mod collective;
pub mod linear_attention;

pub mod elementwise {
    //! Elementwise functions, alone, in fused regions and fused with other operations.

    pub mod dequantize;
    pub mod dropout;
    pub mod gated;
    pub mod map;
    pub mod quantize;
    pub mod requantize;
}

pub mod movement {
    //! Data movement on the CPU: copies, indexed rows, image crops.

    pub mod copy;
    pub mod index;
    pub mod resample;
}

pub mod norms {
    //! Norms and rotary positions on the CPU, alone and fused.

    pub mod low_rank_norm;
    pub mod norm;
    pub mod qk_norm_rope;
    pub mod rope;
}

pub mod optimizers {
    //! Optimizer updates on the CPU.

    pub mod adamw;
    pub mod adamw8;
}

pub mod products {
    //! Matrix products on the CPU, their epilogues, and the fused output head and loss.

    mod epilogue;
    pub mod head_loss;
    pub mod product;
}

pub mod reductions {
    //! Reductions along one axis on the CPU, and sampling of tokens from logits.

    pub mod reduce;
    pub mod sample;
}

use super::Kernel;

pub const KERNELS: &[&[Kernel]] = &[
    optimizers::adamw::KERNELS,
    optimizers::adamw8::KERNELS,
    attention::KERNELS,
    collective::KERNELS,
    movement::copy::KERNELS,
    elementwise::dequantize::KERNELS,
    elementwise::requantize::KERNELS,
    elementwise::dropout::KERNELS,
    elementwise::map::KERNELS,
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
    reductions::sample::KERNELS,
];

pub fn kernel(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().copied().flatten().find(|k| k.row.name == name)
}
