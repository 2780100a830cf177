//! A run on disk: its directory and lock, events and checkpoints; and the signals that stop it.

pub mod checkpoint;
mod directory;
pub mod events;
mod moments;
pub mod samples;
pub mod signal;
pub(crate) mod state;
pub(crate) mod writer;

pub use directory::*;
