//! The training loop and its parts.

pub mod baseline;
mod diagnosis;
pub mod evaluate;
pub mod host;
pub mod opening;
pub mod reference;
pub mod resume;
mod samples;
pub mod schedule;
mod shared_eval;
mod spike;
mod stragglers;
pub mod trainer;
pub mod update;
pub mod vision_cache;
mod watch;
