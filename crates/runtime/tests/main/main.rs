//! The runtime's integration tests in one binary: sessions on the CPU, and on a GPU where there is one.

mod collectives;
mod lanes;
mod merge;
mod order;
