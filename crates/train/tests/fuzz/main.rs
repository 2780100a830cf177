//! Fuzz tests of this crate's parsers. A test binary of its own: each parser has a limit on the memory of the whole process,
//! which tests that train in the same process would exceed.

mod checkpoint;
mod config;
mod pretrained;
