//! A document and its place in a file.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Contains characters other than white space.
    pub text: String,
    pub place: SourceLocation,
}

/// A place in a file. Prints as "data/a.jsonl, line 7".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceLocation {
    pub file: Arc<PathBuf>,
    /// Line number from 1, in text, JSONL and CSV.
    pub line: Option<u64>,
    /// Row number from 1, in parquet.
    pub row: Option<u64>,
    /// Offset in the decompressed file; in parquet, the offset of the page.
    pub offset: u64,
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.file.as_os_str() == super::find::STDIN {
            f.write_str("standard input")?;
        } else {
            write!(f, "{}", self.file.display())?;
        }
        match (self.row, self.line, self.offset) {
            (Some(row), _, _) => write!(f, ", row {row}"),
            (None, Some(line), _) => write!(f, ", line {line}"),
            (None, None, 0) => Ok(()),
            (None, None, offset) => write!(f, ", byte {offset}"),
        }
    }
}
