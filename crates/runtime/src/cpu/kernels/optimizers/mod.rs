//! Optimizer updates on the CPU.

pub mod adamw;
pub mod adamw8;
