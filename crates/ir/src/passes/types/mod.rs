//! Element types: bf16, tf32 and 8-bit floats, and who writes the copies of weights they are read from.

pub mod adapter_norms;
pub mod copies;
pub mod fp8;
pub mod fp8_choice;
pub mod fp8_copies;
pub mod precision;
pub mod quantize_sources;
pub mod tf32;
