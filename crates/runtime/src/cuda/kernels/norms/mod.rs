//! Norms and rotary positions on the GPU, alone and fused.

pub mod double_norm;
pub mod low_rank_norm;
pub mod norm;
pub mod qk_norm_rope;
pub mod rope;
