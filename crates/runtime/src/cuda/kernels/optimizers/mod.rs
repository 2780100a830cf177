//! Optimizer updates on the GPU.

pub mod adamw;
pub mod adamw8;
