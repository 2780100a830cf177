//! Training: configs, the data of tasks, the training loop, checkpoints, weights in and out, and inference.
//!
//! This crate does not print, exit or parse arguments (the command line does), contains no kernels or device calls (the runtime
//! does), builds no models (models does) and parses no data files (data does). Only this crate knows steps, epochs and ranks.

#![forbid(unsafe_code)]

pub mod config;
pub mod device;
mod failure;
pub mod infer;
pub mod machine;
pub mod metrics;
pub mod ranks;
pub mod recipes;
pub mod resolve;
pub mod run;
pub mod sampling;
pub mod switches;
pub mod tasks;
pub mod training;
mod user_error;
pub mod weights;

pub use config::Config;
pub use failure::Failure;
pub use user_error::UserError;
