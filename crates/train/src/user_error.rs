//! Errors that the user can correct: one sentence that says what is wrong, where, and what to do.

/// Bad input, found before any device work. The command line prints it and exits with code 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserError(pub String);

impl std::fmt::Display for UserError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        flatout_data::one_line(&self.0, f)
    }
}

impl std::error::Error for UserError {}

impl From<String> for UserError {
    fn from(sentence: String) -> Self {
        UserError(sentence)
    }
}

/// Returns early with a [`UserError`] made as by `format!`.
#[macro_export]
macro_rules! refuse {
    ($($sentence:tt)*) => { return Err($crate::UserError(format!($($sentence)*))) };
}
