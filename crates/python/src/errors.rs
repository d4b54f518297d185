//! Errors of the library as exceptions of the package.

use pyo3::prelude::*;

/// Converts an error: the module `iec.errors` has the class for its exit code.
pub fn raise(py: Python<'_>, error: &engine::Error) -> PyErr {
    let code = if error.is_interrupt() { 130 } else { i32::from(error.cause().exit_code()) };
    of_parts(py, code, error.cause().kind(), &error.to_string(), error.help_text())
}

/// Builds the exception for an exit code.
pub fn of_parts(py: Python<'_>, code: i32, kind: &str, message: &str, help: Option<&str>) -> PyErr {
    let made = py
        .import("iec.errors")
        .and_then(|module| module.getattr("_error"))
        .and_then(|function| function.call1((code, kind, message, help)));
    made.map_or_else(|e| e, PyErr::from_value)
}
