//! The loop and what it consists of.

mod diagnosis;
pub mod opening;
pub mod resume;
pub mod schedule;
mod spike;
pub mod trainer;
pub mod update;
mod watch;
