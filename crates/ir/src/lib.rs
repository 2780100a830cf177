//! Graphs of tensor operations, their gradients, and the passes that turn them into plans.
//!
//! This crate opens no file, names no device, reads no environment and holds no unsafe code. A device is known to it
//! only as a `Target`: plain data about types, kernels, rates and memory.
#![forbid(unsafe_code)]

pub mod access;
pub mod attr;
pub mod autodiff;
pub mod bicubic;
pub mod block8;
pub mod builder;
pub mod bundle;
pub mod check;
pub mod cost;
pub mod expand;
pub mod fp8;
pub mod graph;
pub mod interpreter;
pub mod links;
pub mod mesh;
pub mod nf4;
pub mod ops;
pub mod optimizers;
pub mod oracle;
pub mod passes;
pub mod pieces;
pub mod plan;
mod plan_text;
pub mod random;
pub mod region;
pub mod replay;
pub mod schedule;
pub mod target;
pub mod text;
pub mod timings;
pub mod types;
pub mod verify;
pub mod work;

pub use builder::{Builder, HeadLosses, Tensor};
pub use graph::{Class, Graph, Init, Node, NodeId, Slot, SlotId, Value};
pub use mesh::{Axis, Mesh};
pub use ops::{Op, OpKind};
pub use passes::base::Codes;
pub use passes::forward::adapter::Adapter;
pub use passes::options::{
    Adjust, Base, Moments, Muon, Options, Precision, Recompute, Rule, Scaling, Shard, Update,
};
pub use passes::{Program, compile};
pub use pieces::TensorRange;
pub use plan::{Launch, Plan, PlanSet, Queue, Role, View};
pub use target::Target;
pub use types::{DType, TensorType};
pub use work::Work;
