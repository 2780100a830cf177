//! From a graph to launches: kernels, views, lifetimes, offsets.

pub mod lower;
pub mod memory;
pub mod slots;
pub mod views;
