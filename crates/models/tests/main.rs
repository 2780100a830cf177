//! All integration tests of the crate, in one binary.

mod adapters;
mod parts;
mod plans;
mod small;
