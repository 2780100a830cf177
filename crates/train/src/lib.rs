//! Training: what a run is made from, where it lives, and how it stops and continues.
//!
//! This crate does not print, exit or read arguments (the command line does), holds no kernel and no device call
//! (the runtime does), builds no model (models does) and parses no data file (data does). It alone knows steps,
//! epochs and ranks.

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
