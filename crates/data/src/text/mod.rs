//! Text as tokens: sources of documents, tokenisers, token shards, and a corpus behind `open`.
//!
//! ```text
//! synthetic   a generated language with a known lowest loss   (grammar: its words and phrases; chain: its entropies)
//! tokenizer   text to tokens and back   (byte_level: a faster path for the most common kind; sample: text to train one on)
//!    -> raw         text files that are indexed, then read and tokenised on demand
//!    -> streamed    text files that are read block by block during training
//!    -> prepare     tokenises text once, into shards   (shards: a folder of them)
//! token_files the `.bin` token files of other trainers
//!    -> source      opens a path as one of these
//! corpus      `open`, which puts all of it together as rows of `order`
//! inspect     numbers and lengths of documents
//! ```

pub(crate) mod corpus;
pub mod inspect;
pub mod prepare;
pub(crate) mod raw;
pub(crate) mod shards;
pub(crate) mod source;
mod streamed;
pub(crate) mod synthetic;
mod token_files;
pub(crate) mod tokenizer;
