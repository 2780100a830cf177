//! Resolves a config for this machine and this data: switches settled, memory fitted, plans compiled.

pub mod arranged;
pub mod buckets;
pub mod compile;
pub mod fit;
pub mod fp8_layers;
pub mod groups;
pub mod lanes;
pub mod mesh;
pub mod prediction;
mod recompute_layers;
pub mod samples;
pub mod settle;
pub mod tower;
pub mod windows;
