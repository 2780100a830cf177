//! Training data on the host: documents in, rows of tokens out, in an order that can be resumed exactly.
//!
//! This crate knows no graphs, devices, training steps or optimisers, and prints nothing.
//!
//! ```text
//! formats    reads documents and rows from text, JSONL, CSV and parquet files
//! text       documents as tokens: tokenisers, token shards, a synthetic language, and a corpus behind `open`
//! order      the order of documents: held-out sides, permutations, mixtures, rows, and the loader
//! examples   examples to fine-tune on: conversations, classes, preferences, kept in memory and laid out in micro-batches
//! images     images with a class: from files to batches of pixels
//! vision     images among the tokens of a text: from files to patches
//! remote     files on servers: data sets of the Hugging Face hub and objects by URL, read by ranges
//! ```
#![forbid(unsafe_code)]

mod characters;
mod contained;
pub mod durable;
mod error;
pub mod examples;
pub mod formats;
pub mod images;
mod order;
pub mod pointer;
mod random;
pub mod remote;
#[cfg(test)]
mod scratch;
mod sealed;
mod text;
pub mod vision;

pub use error::{DataError, ErrorKind, one_line};
pub use examples::arrangement::{Arrangement, BatchLimits, LayoutOptions, arrange, patch_step};
pub use examples::drawn::{DrawnExamples, drawn_examples};
pub use examples::layout::{ImageRoom, Layout, MOST_SHAPES, MicroBatch, Shape};
pub use examples::lengths::{Extent, Lengths, Tree};
pub use examples::updates::{ExampleCursor, ExampleUpdate, UpdateOptions, Updates, once, some};
pub use examples::{Example, ExampleTable};
pub use order::lanes::Lanes;
pub use order::loader::{Cursor, Loader, LoaderOptions, Rows};
pub use order::pack::{STREAMS, Segment, StreamPosition, max_segments};
pub use order::stall::Waited;
pub use text::corpus::{Corpus, Description, DocumentOrder, Floor, MixPart, Spec, open, open_reporting};
pub use text::shards::manifest::{Manifest, ShardEntry};
pub use text::source::{OpenEvent, SourceKind};
pub use text::synthetic::Language;
pub use text::tokenizer::{MIN_TRAINED_VOCAB, PromptEncoder, Vocabulary};
pub use text::{inspect, prepare};
