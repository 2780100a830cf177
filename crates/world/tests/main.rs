//! All integration tests of this crate in one binary, so that they link once.

mod calls;
mod failures;
mod fuzz;
mod joining;
mod launching;
mod nodes;
mod program;
mod proxy;
mod ranks;
mod wires;
