//! A run beside its training and afterwards: its history read back, reports, plots, TensorBoard's files, MLflow.
//!
//! Everything here is a function of the run's directory or of its events: none of it asks the process that trains, and
//! training does not know of it.

#![forbid(unsafe_code)]

pub mod history;
pub mod mlflow;
pub mod plot;
pub mod report;
pub mod scalars;
pub mod sinks;
pub mod tensorboard;
pub mod words;
