//! Failures that end a command: an error that the user can correct, or an environment that failed.

use flatout_data::DataError;
use flatout_ir::plan::Refusal;
use flatout_runtime::RuntimeError;

use crate::UserError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Bad input: exit code 2.
    User(UserError),
    /// The environment failed: exit code 1.
    Environment(String),
}

impl Failure {
    /// For `map_err` on input and output: the attempted operation, then the system's message.
    pub fn io(what: impl std::fmt::Display) -> impl FnOnce(std::io::Error) -> Failure {
        move |error| Failure::Environment(format!("{what}: {error}"))
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::User(error) => error.fmt(f),
            Failure::Environment(sentence) => f.write_str(sentence),
        }
    }
}

impl std::error::Error for Failure {}

impl From<UserError> for Failure {
    fn from(error: UserError) -> Self {
        Failure::User(error)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Failure::User(UserError(refusal.0))
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        Failure::Environment(error.to_string())
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        if error.is_input() {
            Failure::User(UserError(error.sentence))
        } else {
            Failure::Environment(error.sentence)
        }
    }
}
