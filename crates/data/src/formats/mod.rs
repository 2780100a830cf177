//! Documents out of files: plain text, JSONL, CSV and parquet, packed with gzip or zstd or not at all.
//!
//! ```text
//! find      paths, folders and globs to inputs, their format and compression settled
//!    -> stream    the bytes of an input, unpacked
//!    -> window    a bounded view that moves over a stream
//!    -> text, jsonl, csv, parquet    one file a format, and its row below: the next document, or what is wrong with it
//!    -> reader    documents in order; what is wrong is an error, or skipped and counted
//!    -> records   rows with all their fields instead of documents   (field: what one holds)
//!    -> index     document i at once, where a file can be read from the middle
//!    -> blocks    parts of files that can be read each by itself, known from sizes alone
//! bytes     what is read at any place: a file of this machine, or one on a server
//! ```
//!
//! Nothing here trusts a file: sizes that it states are compared with what is there before anything is allocated, and no
//! record larger than [`ReadOptions::max_document_bytes`] is held.

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
mod reading;
mod records;
mod stream;
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
use reading::Reading;

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

/// A row of the table of formats.
struct Row {
    format: Format,
    name: &'static str,
    /// The endings by which files are known; only files with one are taken from a folder.
    endings: &'static [&'static str],
    /// Whether unpacked bytes begin like it, where the name of a file does not tell.
    begins: fn(&[u8]) -> bool,
    /// `None` for parquet, which is read from its end.
    stream: Option<Reading>,
}

/// One row a format.
static TABLE: [Row; 5] = [
    Row {
        format: Format::Text,
        name: "text",
        endings: &["txt", "md", "text"],
        begins: |_| false,
        stream: Some(text::READING),
    },
    Row {
        format: Format::Jsonl,
        name: "jsonl",
        endings: &["jsonl", "ndjson"],
        begins: |head| content::first_character(head) == Some(b'{'),
        stream: Some(jsonl::READING),
    },
    // Separated values look like any text: only their name gives them away.
    Row {
        format: Format::Csv,
        name: "csv",
        endings: &["csv"],
        begins: |_| false,
        stream: Some(csv::READING),
    },
    Row {
        format: Format::Tsv,
        name: "tsv",
        endings: &["tsv"],
        begins: |_| false,
        stream: Some(csv::READING_TABS),
    },
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

    /// How it is read from the beginning to the end; `None` for parquet.
    fn stream(self) -> Option<&'static Reading> {
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
        Format::named(self.name())
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

/// Images of the largest size that a row may hold. Of smaller ones it may hold more.
const IMAGES_OF_A_ROW: usize = 4;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOptions {
    /// The format of every input; without it each file's name decides, then its content.
    pub format: Option<Format>,
    /// The JSON key or the column that holds the text. `#2` is the second column of a CSV file without a header.
    pub field: String,
    pub on_error: OnError,
    /// The largest record (a line of JSONL, a record of CSV, a value of parquet) that is taken into memory.
    pub max_document_bytes: usize,
    /// The largest image that a row may hold, on top of the record. With 0 rows hold none: columns of bytes are not read.
    pub max_image_bytes: usize,
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
            max_image_bytes: 0,
            text_document_bytes: text::DOCUMENT_BYTES,
        }
    }
}

impl ReadOptions {
    /// The largest record that is taken into memory: places of documents are kept with 4 bytes for their lengths.
    fn most_bytes(&self) -> usize {
        self.max_document_bytes.min(u32::MAX as usize)
    }

    /// The same for a row with all its fields, which may hold images.
    fn most_row_bytes(&self) -> usize {
        let images = self.max_image_bytes.saturating_mul(IMAGES_OF_A_ROW);
        self.max_document_bytes.saturating_add(images).min(u32::MAX as usize)
    }
}
