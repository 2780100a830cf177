//! Damaged inputs for the parsers of this crate. It is a test binary of its own: each parser has a limit on the memory of
//! the whole process, and tests that train in the same process would go over it.

mod checkpoint;
mod config;
mod pretrained;
