//! Gradients, the update they are for, and the part of the forward pass that runs again for them.

pub mod average;
pub mod differentiate;
pub mod held_ratios;
pub mod one_pass_loss;
pub mod recompute;
pub mod rejoin;
pub mod score_gradients;
pub mod update;
