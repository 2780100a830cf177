//! Norms and rotary positions on the CPU, alone and fused.

pub mod low_rank_norm;
pub mod norm;
pub mod qk_norm_rope;
pub mod rope;
