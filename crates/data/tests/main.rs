//! All integration tests of this crate, in one program: they link once.

mod archive;
mod bad_data;
mod examples;
mod features;
mod frames;
mod fuzz;
mod hostile;
mod images;
mod index;
mod parquet;
mod patches;
mod preferences;
mod rows;
mod scratch;
mod templates;
mod visual;
mod visual_preferences;
