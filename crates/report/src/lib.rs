//! A run afterwards: its history read back, reports, plots, TensorBoard's files.
//!
//! Everything here is a function of the run's directory or of its events: none of it asks the process that trains, and
//! training does not know of it.

#![forbid(unsafe_code)]

pub mod history;
pub mod plot;
pub mod report;
pub mod sinks;
pub mod tensorboard;
pub mod words;
