//! The functions of a format that is read from the beginning to the end.

use std::fs::File;

use super::ReadOptions;
use super::fault::Trouble;
use super::field::Fields;
use super::window::Window;

/// The functions of a format.
pub(super) struct Reading {
    pub documents: fn(Window, &ReadOptions) -> Box<dyn Documents>,
    /// `None` for a format whose rows have no fields.
    pub rows: Option<OpenRows>,
    /// Finds the text of a document again in the bytes that a [`RawDocument`] names, of a file that is open.
    pub texts: fn(&File, &ReadOptions) -> Result<TextOf, Trouble>,
}

pub(super) type OpenRows = fn(Window, &ReadOptions) -> Box<dyn Rows>;

/// The text of a document; `None` where the bytes are not what they were.
pub(super) type TextOf = Box<dyn Fn(Vec<u8>) -> Option<String> + Send + Sync>;

/// A document as a format found it. `at` and `len` are how [`super::Index`] finds it again: the bytes it came from, or
/// in parquet the page and the place on it.
pub(super) struct RawDocument {
    pub text: String,
    pub line: Option<u64>,
    pub row: Option<u64>,
    pub at: u64,
    pub len: u32,
}

/// The documents of a file in order.
pub(super) trait Documents: Send {
    fn next(&mut self) -> Result<Option<RawDocument>, Trouble>;

    /// The line and the place of what comes next, where they are known.
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
    fn next(&mut self) -> Result<Option<Row>, Trouble>;
}
