//! Flaws of an image, a sample or an archive: fatal, or skipped and counted.

use crate::error::DataError;
use crate::formats::{OnError, Reason, Skipped, SourceLocation};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    pub reason: Reason,
    /// The middle of a sentence: what is there.
    pub said: String,
}

impl Flaw {
    pub fn new(reason: Reason, said: impl Into<String>) -> Self {
        Self { reason, said: said.into() }
    }

    /// The flaw and the remedy, as a sentence without its end.
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

/// The record of what was skipped while a source was looked through, where skipping is allowed.
pub(super) struct Ledger {
    on_error: OnError,
    pub skipped: Skipped,
}

impl Ledger {
    pub fn new(on_error: OnError) -> Self {
        Self { on_error, skipped: Skipped::default() }
    }

    /// Counts a flaw, or makes an error of it.
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
