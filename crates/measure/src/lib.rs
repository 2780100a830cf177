//! Measurements: benchmarks, ablations, profiles, tuning, forecasts, and the evaluation of several runs.
//! This crate prints nothing. Measurements make updates by the code that training uses (`flatout_train::training::update`).

#![forbid(unsafe_code)]

pub mod ablate;
pub mod bench;
pub mod calibrate;
pub mod claims;
pub mod folds;
pub mod forecast;
pub mod plan;
pub mod profile;
pub mod statistics;
pub mod sweep;
pub mod to_loss;
pub mod tune;
