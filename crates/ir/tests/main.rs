//! The tests of this crate in one binary: linking one for every file took longer than running them.

mod activations;
mod applied_twice;
mod autodiff;
mod cached_heads;
mod collectives;
mod double_norms;
mod fewer_passes;
mod formulas;
mod fp8;
mod fused_products;
mod ops;
mod passes;
mod shapes;
mod text;
mod verify;
