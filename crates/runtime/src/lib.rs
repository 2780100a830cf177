//! Executes plans: one arena, launches in order, and the table of kernels a device offers to the compiler.
//!
//! This crate sees plans and a `Target`. It knows operations, types and strides, but no model, no recipe, no
//! configuration key, no step and no epoch; it prints nothing. The environment is read for where libraries and caches
//! lie, never for what is computed.

mod arena;
pub mod copying;
pub mod cpu;
pub mod cuda;
mod laps;
pub mod launch;
mod ranks;
mod rows;
pub mod session;
pub mod timing;
pub mod verify;
mod weighted_sum;

pub use copying::{Copied, Copying};
pub use laps::Laps;
pub use session::{Mark, Posted, RuntimeError, Session};
pub use timing::LaunchTime;
