//! Views of a run during and after training: its history, reports, plots, TensorBoard's files, MLflow.
//!
//! Everything here is computed from the run's directory or its events, without contact to the process that trains; training does
//! not depend on it.

#![forbid(unsafe_code)]

pub mod history;
pub mod mlflow;
pub mod plot;
pub mod report;
pub mod scalars;
pub mod sinks;
pub mod tensorboard;
pub mod words;
