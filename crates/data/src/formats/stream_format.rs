//! The functions of a format that is read sequentially.

use std::fs::File;

use super::ReadOptions;
use super::fault::ReadError;
use super::field::Fields;
use super::window::Window;

/// The functions of a format that is read sequentially.
pub(super) struct StreamFormat {
    pub documents: fn(Window, &ReadOptions) -> Box<dyn Documents>,
    /// `None` for a format whose rows have no fields.
    pub rows: Option<OpenRows>,
    /// Finds the text of a document in the bytes that a [`RawDocument`] refers to, of an open file.
    pub texts: fn(&File, &ReadOptions) -> Result<TextOf, ReadError>,
}

pub(super) type OpenRows = fn(Window, &ReadOptions) -> Box<dyn Rows>;

/// The text of a document; `None` where the bytes have changed.
pub(super) type TextOf = Box<dyn Fn(Vec<u8>) -> Option<String> + Send + Sync>;

/// A document as a format reads it. [`super::Index`] stores `at` and `len` to find it again: the range of its bytes, or in
/// parquet its page and its row on the page.
pub(super) struct RawDocument {
    pub text: String,
    pub line: Option<u64>,
    pub row: Option<u64>,
    pub at: u64,
    pub len: u32,
}

/// The documents of a file in order.
pub(super) trait Documents: Send {
    fn next(&mut self) -> Result<Option<RawDocument>, ReadError>;

    /// The line and the offset of the next document, where they are known.
    fn position(&self) -> Option<(u64, u64)>;
}

/// A row of a file with all its fields.
pub(super) struct Row {
    pub fields: Fields,
    pub line: Option<u64>,
    pub row: Option<u64>,
    pub at: u64,
}

/// The rows of a file in order.
pub(super) trait Rows: Send {
    fn next(&mut self) -> Result<Option<Row>, ReadError>;
}
