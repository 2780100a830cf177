//! Weights in and out: initial values, checkpoints of other libraries, adapters, exports.

pub mod export;
pub mod initial;
pub mod peft;
pub mod pretrained;
