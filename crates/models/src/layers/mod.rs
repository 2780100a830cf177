//! Layers that models share: plain functions and structs of a builder, weights and states.

pub mod pooling;
