//! The processes of one run, its ranks, and how bytes pass between them.
//!
//! This crate knows no graph, no device and no step of training.
#![forbid(unsafe_code)]

pub mod threads;
pub mod wire;

pub use threads::Threads;
pub use wire::{Wire, WireError};
