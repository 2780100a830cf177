//! Reductions along one axis on the CPU.

pub mod reduce;
