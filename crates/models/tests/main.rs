//! All integration tests of the crate, in one binary.

mod adapters;
mod fovea;
mod parts;
mod plans;
mod ranks;
mod small;
