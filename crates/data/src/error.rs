//! The error type of this crate: a sentence for the user, and whether the user or the machine has to change.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataError {
    pub kind: ErrorKind,
    /// A complete sentence: what is wrong, where, and what to do.
    pub sentence: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The user gave something that cannot be used: a missing file, bytes that are not UTF-8, a wrong size.
    Input,
    /// The machine failed: a disk that is full, a file that vanished while it was read.
    Environment,
}

impl DataError {
    pub fn input(sentence: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Input, sentence: sentence.into() }
    }

    pub fn environment(sentence: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Environment, sentence: sentence.into() }
    }

    /// Whether the user, not the machine, has to change something.
    pub fn is_input(&self) -> bool {
        self.kind == ErrorKind::Input
    }
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        one_line(&self.sentence, f)
    }
}

/// A sentence with control characters escaped: what it quotes may come from a damaged or hostile file.
pub fn one_line(sentence: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use fmt::Write;
    sentence.chars().try_for_each(|c| match c.is_control() {
        true => write!(f, "{}", c.escape_default()),
        false => f.write_char(c),
    })
}

impl std::error::Error for DataError {}
