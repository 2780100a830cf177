//! The runtime's integration tests in one binary: sessions on the CPU, and on a GPU if there is one.

mod chunks;
mod collectives;
mod lanes;
mod merge;
mod one_run;
mod order;
