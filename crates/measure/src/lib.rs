//! Measurements: what a configuration costs here, which one is fastest, and what several runs come to.
//!
//! This crate prints nothing and trains by the same updates as a run (`flatout_train::training::update`), so that what is
//! measured is what trains.

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
