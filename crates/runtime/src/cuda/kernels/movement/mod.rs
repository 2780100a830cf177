//! Data movement on the GPU: copies, rows by index, parts of images.

pub mod copy;
pub mod index;
pub mod resample;
