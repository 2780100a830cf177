//! Reductions along one axis on the GPU, and the sums of partial sums.

pub mod partial_sums;
pub mod reduce;
