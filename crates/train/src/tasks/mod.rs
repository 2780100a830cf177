//! What is learned: the data of each task, and how it reaches a plan.

pub mod corpus;
pub mod example_sets;
pub mod feed;
pub mod image_table;
pub mod images;
pub mod material;
mod mixing;
pub mod supply;
