//! The two exceptions: bad input, which the caller can correct, and a machine that could not continue.

use flatout_train::Failure;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    flatout,
    UserError,
    PyValueError,
    "Bad input: one sentence that says what is wrong, where, and what to do. Nothing was begun."
);

pyo3::create_exception!(
    flatout,
    Error,
    PyRuntimeError,
    "The machine could not continue: a full disk, a lost GPU, a damaged file."
);

/// Converts a failure to an exception with its sentence.
pub fn raised(failure: Failure) -> PyErr {
    let sentence = failure.to_string();
    match failure {
        Failure::User(_) => UserError::new_err(sentence),
        Failure::Environment(_) => Error::new_err(sentence),
    }
}
