//! The reason why a row that could be read cannot be used.

use crate::error::DataError;
use crate::formats::{Place, Reason};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub reason: Reason,
    /// The middle of a sentence: what is there, and what to do about it.
    pub said: String,
}

impl Wrong {
    pub fn new(reason: Reason, said: impl Into<String>) -> Self {
        Self { reason, said: said.into() }
    }

    pub fn error(&self, place: &Place) -> DataError {
        DataError::input(format!("{place}: {}, or leave such rows out with data.on_error=skip.", self.said))
    }
}
