//! Weights in and out: initial values, checkpoints of other libraries, adapters and exports.

pub mod adapters;
pub mod export;
pub mod gguf;
pub mod grown;
pub mod initial;
pub mod loaded;
pub mod peft;
pub mod pretrained;
pub mod quantized;
