//! Text as tokens: sources of documents, tokenisers, token shards, and a corpus behind `open`.
//!
//! ```text
//! synthetic   a language of our own, with a known floor   (grammar: its words and phrases; chain: its entropies)
//! tokenizer   text to tokens and back   (byte_level: the commonest kind, faster; sample: the text one is trained on)
//!    -> raw         text read and tokenised when it is needed
//!    -> streamed    text read block by block while it is trained on
//!    -> prepare     text tokenised once, into shards   (shards: a folder of them)
//! token_files the token files of other trainers
//!    -> source      a path, opened as one of these
//! corpus      all of it behind `open`, as rows of `order`
//! inspect     how much there is, and how long documents are
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
