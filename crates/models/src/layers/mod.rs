//! Layers that models share: weights are declared once and applied as often as a model needs.
//!
//! A layer's struct holds slots. Declaring it creates no nodes, so it does not change the keys of nodes, which seed random
//! numbers; `apply` reads the slots where they are used, under the caller's scope.
//!
//! T tokens, D width, H heads, HK key and value heads, K head size.

mod attention;
mod cache;
mod dropout;
mod feed_forward;
mod linear;
mod norm;
pub mod patches;
pub mod pooling;

pub use attention::{Attention, HeadNorm, Heads, Rotation, Sight, bounds};
pub use cache::Cache;
pub use dropout::Draw;
pub use feed_forward::FeedForward;
pub use linear::{Linear, row};
pub use norm::Norm;

use flatout_ir::{Builder, Class, DType, Init, SlotId};

/// Declares a trained parameter of the current scope.
#[track_caller]
pub fn weight(b: &Builder, name: &str, dims: &[usize], init: Init) -> SlotId {
    b.slot(name, Class::Weight, DType::F32, dims, init)
}
