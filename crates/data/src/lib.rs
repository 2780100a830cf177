//! Training data on the host: documents in, rows of tokens out, in an order that can be resumed exactly.
//!
//! This crate sees no graph and no device, knows neither steps nor optimisers, and prints nothing.
//!
//! ```text
//! synthetic  a language of our own, with a known floor   (grammar: its words and phrases; chain: its entropies)
//! formats    documents out of text, JSONL, CSV and parquet files
//!    -> tokenizer   text to tokens and back   (byte_level: the commonest kind, faster; sample: what one is trained on)
//!    -> raw         text read and tokenised when it is needed
//!    -> prepare     text tokenised once, into shards   (shard: a file; manifest, shards: a folder of them)
//! token_files    the token files of other trainers
//!    -> source      what a path names, opened
//!    -> split       training and held-out documents, by the hash of their content
//!    -> documents   what packing needs to know of a source
//!    -> order       a permutation of the documents an epoch, by index   (mixture: of several sources)
//!    -> pack        streams of documents, cut into rows
//!    -> loader      rows in their global order, ahead of time, and the cursor
//! corpus     all of it behind `open`
//! examples   what fine-tuning learns from one by one, in memory
//!    -> lengths      how long they are
//!    -> arrangement  which extents leave little padding
//!    -> layout       examples in micro-batches of these extents
//!    -> updates      examples in their order, an update at a time, and the cursor
//! drawn      examples of the synthetic language, of drawn lengths
//! images     pictures with a class: from files to batches of pixels
//! inspect    a look into all of it
//! ```
#![forbid(unsafe_code)]

mod arrangement;
mod byte_level;
mod chain;
mod contained;
mod corpus;
#[cfg(test)]
mod damage;
mod documents;
mod drawn;
pub mod durable;
mod error;
pub mod examples;
pub mod formats;
mod grammar;
pub mod images;
pub mod inspect;
mod layout;
mod lengths;
mod loader;
mod manifest;
mod mixture;
mod order;
mod pack;
pub mod prepare;
mod random;
mod raw;
mod sample;
#[cfg(test)]
mod scratch;
mod sealed;
mod shard;
mod shards;
mod source;
mod split;
mod stall;
mod synthetic;
mod token_files;
mod tokenizer;
mod updates;

pub use arrangement::{Arrangement, Extents, Manner, arrange};
pub use corpus::{Corpus, Description, Floor, MixPart, Spec, open, open_saying};
pub use drawn::{DrawnExamples, drawn_examples};
pub use error::{DataError, ErrorKind, one_line};
pub use examples::{Example, ExampleTable};
pub use layout::{Layout, MOST_SHAPES, MicroBatch, Shape};
pub use lengths::Lengths;
pub use loader::{Cursor, Loader, LoaderOptions, Rows};
pub use manifest::{Manifest, ShardEntry};
pub use pack::{STREAMS, Segment, StreamPosition, max_segments};
pub use source::{Said, Source};
pub use stall::Waited;
pub use synthetic::Language;
pub use tokenizer::{MIN_TRAINED_VOCAB, Vocabulary};
pub use updates::{ExampleCursor, ExampleUpdate, Reading, Updates, once};
