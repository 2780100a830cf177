//! Documents out of files: plain text, JSONL, CSV and parquet, packed with gzip or zstd or not at all.
//!
//! ```text
//! find      paths, folders and globs to inputs, their format and compression settled
//!    -> stream    the bytes of an input, unpacked
//!    -> window    a bounded view that moves over a stream
//!    -> text, jsonl, csv, parquet    one file a format: the next document, or what is wrong with it
//!    -> reader    documents in order; what is wrong is an error, or skipped and counted
//!    -> records   rows with all their fields instead of documents   (field: what one holds)
//!    -> index     document i at once, where a file can be read from the middle
//! ```
//!
//! Nothing here trusts a file: sizes that it states are compared with what is there before anything is allocated, and no
//! record larger than [`ReadOptions::max_document_bytes`] is held.

mod content;
mod csv;
mod fault;
mod field;
mod find;
mod index;
mod jsonl;
mod parquet;
mod place;
mod reader;
mod records;
mod stream;
pub(crate) mod text;
mod window;

pub use fault::{Reason, Skipped};
pub use field::{Field, Fields};
pub(crate) use find::unreadable;
pub use find::{Input, find, is_indexable};
pub use index::Index;
pub(crate) use index::Version;
pub use place::{Document, Place};
pub use reader::{Reader, read};
pub use records::{Record, Records};
pub use text::document_bytes;

use flatout_settings::choice;

/// How documents lie in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Plain text, cut into documents at line ends.
    Text,
    /// A JSON object a line.
    Jsonl,
    /// Comma-separated values.
    Csv,
    /// Tab-separated values, quoted as in CSV.
    Tsv,
    Parquet,
}

impl Format {
    pub const ALL: [Format; 5] = [Format::Text, Format::Jsonl, Format::Csv, Format::Tsv, Format::Parquet];

    /// The format's name, and the ending by which it is known.
    pub fn name(self) -> &'static str {
        match self {
            Format::Text => "text",
            Format::Jsonl => "jsonl",
            Format::Csv => "csv",
            Format::Tsv => "tsv",
            Format::Parquet => "parquet",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

choice! {
    /// The format a user names for the files of a source.
    pub enum FileFormat {
        /// By a file's name, then by its content.
        Auto = "auto",
        Text = "text",
        Jsonl = "jsonl",
        Csv = "csv",
        Tsv = "tsv",
        Parquet = "parquet",
        /// Token files of 2 bytes a token.
        U16 = "u16",
        /// Token files of 4 bytes a token.
        U32 = "u32",
    }
}

impl FileFormat {
    /// The format of files that hold text, where one is named.
    pub fn of_text(self) -> Option<Format> {
        match self {
            FileFormat::Auto | FileFormat::U16 | FileFormat::U32 => None,
            FileFormat::Text => Some(Format::Text),
            FileFormat::Jsonl => Some(Format::Jsonl),
            FileFormat::Csv => Some(Format::Csv),
            FileFormat::Tsv => Some(Format::Tsv),
            FileFormat::Parquet => Some(Format::Parquet),
        }
    }

    pub fn is_tokens(self) -> bool {
        matches!(self, FileFormat::U16 | FileFormat::U32)
    }

    /// Bytes of a token, where files hold tokens.
    pub fn token_bytes(self) -> u32 {
        if self == FileFormat::U32 { 4 } else { 2 }
    }
}

choice! {
    /// The policy for a document that cannot be used.
    pub enum OnError {
        /// It is an error, with its place.
        Fail = "fail",
        /// It is left out and counted. A file that is damaged is left out from the damage on.
        Skip = "skip",
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOptions {
    /// The format of every input; without it each file's name decides, then its content.
    pub format: Option<Format>,
    /// The JSON key or the column that holds the text. `#2` is the second column of a CSV file without a header.
    pub field: String,
    pub on_error: OnError,
    /// The largest record (a line of JSONL, a record of CSV, a value of parquet) that is taken into memory.
    pub max_document_bytes: usize,
    /// Where plain text is cut: at the first line end after this many bytes.
    pub text_document_bytes: usize,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            format: None,
            field: "text".into(),
            on_error: OnError::Fail,
            max_document_bytes: 64 << 20,
            text_document_bytes: text::DOCUMENT_BYTES,
        }
    }
}
