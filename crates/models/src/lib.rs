//! Models: a config in, a graph and a table of weight names out. One file per model, and its row below.
//!
//! No model mentions precision, recomputation, sharding, fusion or adapters: those are rewrites of its graph. This crate opens
//! no file and knows no device.
#![forbid(unsafe_code)]

pub mod bdh;
pub mod config;
pub mod decoder;
pub mod form;
pub mod images;
pub mod layers;
pub mod library;
pub mod objectives;
pub mod registry;
pub mod vision;
pub mod vit;
pub mod words;

// The first is the default.
registry::models! {
    Decoder(decoder::DecoderConfig) = "decoder",
    Vit(vit::VitConfig) = "vit",
    Bdh(bdh::BdhConfig) = "bdh",
}
