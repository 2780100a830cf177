//! Passes over a model's forward graph, before gradients are taken.

pub mod adapter;
pub mod adapters;
pub mod folded_scales;
pub mod joint_heads;
pub mod merge;
pub mod patterns;
pub mod rope_table;
pub mod rotated_scores;
