//! Reads documents from files: plain text, JSONL, CSV and parquet, optionally compressed with gzip or zstd.
//!
//! ```text
//! find      finds the files of paths, folders and globs, and their formats
//!    -> stream    the bytes of an input, decompressed
//!    -> window    a bounded buffer that moves over a stream
//!    -> text, jsonl, csv, parquet    the formats, each with a row in the table below: the next document, or a fault
//!    -> reader    documents in order; faults are errors, or skipped and counted
//!    -> records   rows with all their fields   (field: their values)
//!    -> index     random access to documents, where the file allows it
//!    -> blocks    parts of files that can be read independently, derived from sizes alone
//! bytes     random access to the bytes of a file, local or remote
//! ```
//!
//! Files are not trusted: sizes that they state are checked against the actual ones before anything is allocated, and no record
//! larger than [`ReadOptions::max_document_bytes`] is buffered.

mod blocks;
mod bytes;
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
mod stream_format;
pub(crate) mod text;
mod window;

pub(crate) use blocks::Blocks;
pub use fault::{Reason, Skipped};
pub use field::{Field, Fields};
pub(crate) use find::unreadable;
pub use find::{Input, find, is_indexable};
pub use index::Index;
pub(crate) use index::Version;
pub use place::{Document, SourceLocation};
pub use reader::{Reader, read};
pub use records::{Record, Records};
pub use text::document_bytes;

use flatout_settings::choice;
use stream_format::StreamFormat;

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Plain text, split into documents at line breaks.
    Text,
    /// One JSON object per line.
    Jsonl,
    /// Comma-separated values.
    Csv,
    /// Tab-separated values, quoted as in CSV.
    Tsv,
    Parquet,
}

/// A row of the table of formats.
struct Row {
    format: Format,
    name: &'static str,
    /// Endings of the format's files; only files with a known ending are taken from a folder.
    endings: &'static [&'static str],
    /// Whether decompressed bytes begin like this format, for files whose name does not tell.
    begins: fn(&[u8]) -> bool,
    /// `None` for parquet, which is read from its end.
    stream: Option<StreamFormat>,
}

/// One row per format.
static TABLE: [Row; 5] = [
    Row {
        format: Format::Text,
        name: "text",
        endings: &["txt", "md", "text"],
        begins: |_| false,
        stream: Some(text::TEXT),
    },
    Row {
        format: Format::Jsonl,
        name: "jsonl",
        endings: &["jsonl", "ndjson"],
        begins: |head| content::first_character(head) == Some(b'{'),
        stream: Some(jsonl::JSONL),
    },
    // Separated values look like any other text, so only the file name identifies them.
    Row { format: Format::Csv, name: "csv", endings: &["csv"], begins: |_| false, stream: Some(csv::CSV) },
    Row { format: Format::Tsv, name: "tsv", endings: &["tsv"], begins: |_| false, stream: Some(csv::TSV) },
    Row {
        format: Format::Parquet,
        name: "parquet",
        endings: &["parquet", "pq"],
        begins: |head| head.starts_with(b"PAR1"),
        stream: None,
    },
];

impl Format {
    fn row(self) -> &'static Row {
        TABLE.iter().find(|row| row.format == self).expect("every format has a row")
    }

    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The format of a name.
    fn named(name: &str) -> Option<Format> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.format)
    }

    /// Its functions for sequential reading; `None` for parquet.
    fn stream(self) -> Option<&'static StreamFormat> {
        self.row().stream.as_ref()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

choice! {
    /// The format that a user names for the files of a source.
    pub enum FileFormat {
        /// By a file's name, then by its content.
        Auto = "auto",
        Text = "text",
        Jsonl = "jsonl",
        Csv = "csv",
        Tsv = "tsv",
        Parquet = "parquet",
        /// Token files with 2 bytes per token.
        U16 = "u16",
        /// Token files with 4 bytes per token.
        U32 = "u32",
    }
}

impl FileFormat {
    /// The format of text files, where one is named.
    pub fn of_text(self) -> Option<Format> {
        Format::named(self.name())
    }

    pub fn is_tokens(self) -> bool {
        matches!(self, FileFormat::U16 | FileFormat::U32)
    }

    /// Bytes per token of token files.
    pub fn token_bytes(self) -> u32 {
        if self == FileFormat::U32 { 4 } else { 2 }
    }
}

choice! {
    /// The policy for documents that cannot be used.
    pub enum OnError {
        /// Stops with an error that has the place.
        Fail = "fail",
        /// Skips and counts them. A damaged file is skipped from the damage on.
        Skip = "skip",
    }
}

/// Number of images of the largest size that a row may have. It may have more of smaller ones.
const IMAGES_OF_A_ROW: usize = 4;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOptions {
    /// The format of every input; otherwise each file's name decides, then its content.
    pub format: Option<Format>,
    /// The JSON key or the column with the text. `#2` is the second column of a CSV file without a header.
    pub field: String,
    pub on_error: OnError,
    /// Largest record (a line of JSONL, a record of CSV, a value of parquet) that is read into memory.
    pub max_document_bytes: usize,
    /// Largest image in a row, in addition to the record. With 0, columns of bytes are not read.
    pub max_image_bytes: usize,
    /// Plain text is split at the first line break after this many bytes.
    pub text_document_bytes: usize,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            format: None,
            field: "text".into(),
            on_error: OnError::Fail,
            max_document_bytes: 64 << 20,
            max_image_bytes: 0,
            text_document_bytes: text::DOCUMENT_BYTES,
        }
    }
}

impl ReadOptions {
    /// Largest record in memory. The index stores lengths in 4 bytes.
    fn most_bytes(&self) -> usize {
        self.max_document_bytes.min(u32::MAX as usize)
    }

    /// Largest row in memory with all its fields, which may include images.
    fn most_row_bytes(&self) -> usize {
        let images = self.max_image_bytes.saturating_mul(IMAGES_OF_A_ROW);
        self.max_document_bytes.saturating_add(images).min(u32::MAX as usize)
    }
}
