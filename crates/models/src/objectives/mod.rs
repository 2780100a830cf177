//! Objectives: states or logits in, the results `loss`, `weight` and named others out. They do not depend on a model.

pub mod image_classes;
pub mod next_token;
pub mod preference;
pub mod text_classes;
