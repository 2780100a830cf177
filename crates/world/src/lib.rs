//! The processes of one run, its ranks: which ranks take part, how they agree, how bytes pass between them, and how all of them
//! end.
//!
//! Rank 0 is the hub of a star of sockets over which ranks join, agree and send heartbeats; a second mesh of sockets carries
//! tensors between CPUs. This crate does not depend on graphs, devices or training steps, and it never ends the process: the
//! caller of `join` passes a function that does.
#![forbid(unsafe_code)]

mod beats;
mod calls;
mod failure;
pub mod frame;
pub mod hosts;
mod hub;
mod join;
pub mod launch;
mod member;
pub mod message;
mod parent;
pub mod place;
pub mod program;
pub mod sockets;
pub mod threads;
mod timing;
mod watcher;
pub mod wire;

pub use calls::MOST_CALL_BYTES;
pub use failure::Failure;
pub use join::Joining;
pub use launch::{Launch, launch};
pub use member::{Alarm, Calls, Stopper, World};
pub use message::Status;
pub use place::{Copies, Flags, Meeting, RankPlacement, Start, place};
pub use sockets::Sockets;
pub use threads::Threads;
pub use timing::Timing;
pub use wire::{Wire, WireError};
