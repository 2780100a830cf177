//! The reason why a row that could be read cannot be used.

use crate::error::DataError;
use crate::formats::{Reason, SourceLocation};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub reason: Reason,
    /// The middle of a sentence: what is there, and what to do about it.
    pub said: String,
    /// Whether no other row will do better, so that rows are not left out for it.
    pub is_final: bool,
}

impl Wrong {
    pub fn new(reason: Reason, said: impl Into<String>) -> Self {
        Self { reason, said: said.into(), is_final: false }
    }

    /// As [`Wrong::new`], of a template or a tokeniser that fails whatever the row is.
    pub fn at_last(reason: Reason, said: impl Into<String>) -> Self {
        Self { is_final: true, ..Self::new(reason, said) }
    }

    pub fn error(&self, place: &SourceLocation) -> DataError {
        if self.is_final {
            return DataError::input(format!("{place}: {}.", self.said));
        }
        DataError::input(format!("{place}: {}, or leave such rows out with data.on_error=skip.", self.said))
    }
}
