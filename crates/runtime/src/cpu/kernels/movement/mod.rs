//! Data movement on the CPU: copies, rows by index, parts of images.

pub mod copy;
pub mod index;
pub mod resample;
