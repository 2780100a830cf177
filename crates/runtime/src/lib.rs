//! Executes plans: an arena, ordered launches, and the kernel table a device offers to the compiler.
//!
//! This crate sees plans and a `Target`. It knows operations, types and strides, but no model, recipe, configuration key, step
//! or epoch; it prints nothing. It reads the environment to locate libraries and caches, never to decide what is computed.

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
