//! Native part of the Python package `iec`: an engine, streams, matrices and conversions, over the promised names of
//! the library. Requests and options come as JSON texts. The Python files beside this crate are the interface for
//! users.
//!
//! Every wait releases the interpreter and looks for signals, so that Ctrl-C works everywhere.

mod convert;
mod engine;
mod errors;
mod matrix;
mod stream;
mod wait;

use pyo3::prelude::*;

/// Native part of the package `iec`.
#[pymodule(gil_used = false)]
fn _iec(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<engine::NativeEngine>()?;
    module.add_class::<stream::NativeStream>()?;
    module.add_class::<matrix::Matrix>()?;
    module.add_function(wrap_pyfunction!(convert::convert, module)?)?;
    Ok(())
}
