//! Training: what a run is made from, where it lives, and how it stops and continues.
//!
//! This crate does not print, exit or read arguments (the command line does), holds no kernel and no device call
//! (the runtime does), builds no model (models does) and parses no data file (data does). It alone knows steps,
//! epochs and ranks.

#![forbid(unsafe_code)]

pub mod ablate;
pub mod active;
pub mod adapters;
pub mod arranged;
pub mod calibrate;
pub mod checkpoint;
pub mod claims;
pub mod class_weights;
pub mod classify;
pub mod compile;
pub mod config;
pub mod corpus;
pub mod device;
mod diagnosis;
pub mod evaluate;
pub mod events;
pub mod example_sets;
pub mod export;
mod failure;
mod feed;
pub mod fit;
pub mod folds;
pub mod forecast;
pub mod fp8_layers;
pub mod generate;
pub mod goal;
pub mod groups;
pub mod history;
pub mod image_table;
pub mod images;
pub mod initial;
pub mod kernels;
pub mod logits;
pub mod material;
pub mod measure;
pub mod metrics;
mod mixing;
mod moments;
mod opening;
pub mod peft;
pub mod plot;
pub mod prediction;
pub mod predictions;
pub mod pretrained;
pub mod profile;
pub mod recipes;
mod recompute_layers;
pub mod report;
pub mod resume;
pub mod run;
pub mod sampling;
pub mod schedule;
pub mod settle;
pub mod signal;
mod spike;
mod state;
pub mod statistics;
pub mod supply;
pub mod sweep;
pub mod switches;
mod tensorboard;
pub mod trainer;
pub mod tune;
pub mod update;
mod user_error;
mod watch;
pub mod words;
mod writer;

use flatout_data::durable;

pub use config::Config;
pub use failure::Failure;
pub use user_error::UserError;
