//! The error of a row that could be read but cannot be used.

use crate::error::DataError;
use crate::formats::{Reason, SourceLocation};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowError {
    pub reason: Reason,
    /// The middle of a sentence: what is wrong, and what to do about it.
    pub message: String,
    /// Whether every other row would fail too, so that skipping rows does not help.
    pub is_fatal: bool,
}

impl RowError {
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), is_fatal: false }
    }

    /// As [`RowError::new`], for a template or a tokeniser that fails on every row.
    pub fn fatal(reason: Reason, message: impl Into<String>) -> Self {
        Self { is_fatal: true, ..Self::new(reason, message) }
    }

    pub fn error(&self, place: &SourceLocation) -> DataError {
        if self.is_fatal {
            return DataError::input(format!("{place}: {}.", self.message));
        }
        DataError::input(format!(
            "{place}: {}, or leave such rows out with data.on_error=skip.",
            self.message
        ))
    }
}
