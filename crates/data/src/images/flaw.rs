//! Flaws of an image, a sample or an archive, which are errors, or skipped and counted.

use crate::error::DataError;
use crate::formats::{OnError, Reason, Skipped, SourceLocation};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    pub reason: Reason,
    /// The middle of a sentence: what is wrong.
    pub said: String,
}

impl Flaw {
    pub fn new(reason: Reason, said: impl Into<String>) -> Self {
        Self { reason, said: said.into() }
    }

    /// The flaw and its remedy, as a sentence without a full stop.
    pub fn sentence(&self) -> String {
        format!("{}; {}", self.said, self.reason.remedy())
    }

    pub fn error(&self, place: &SourceLocation) -> DataError {
        DataError::input(format!(
            "{place}: {}; {}, or leave such images out with data.on_error=skip.",
            self.said,
            self.reason.remedy()
        ))
    }
}

/// Counts of skipped items while a source is scanned, where skipping is allowed.
pub(super) struct Ledger {
    on_error: OnError,
    pub skipped: Skipped,
}

impl Ledger {
    pub fn new(on_error: OnError) -> Self {
        Self { on_error, skipped: Skipped::default() }
    }

    /// Counts a flaw, or returns it as an error.
    pub fn note(&mut self, flaw: &Flaw, place: SourceLocation) -> Result<(), DataError> {
        match self.on_error {
            OnError::Fail => Err(flaw.error(&place)),
            OnError::Skip => {
                self.skipped.note(flaw.reason, place);
                Ok(())
            }
        }
    }
}
