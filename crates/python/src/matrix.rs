//! Rows of numbers that numpy reads where they are.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A matrix of f32. `numpy.asarray` makes a read-only array of it without a copy, which keeps the matrix alive.
#[pyclass(frozen, module = "iec._iec")]
pub struct Matrix {
    values: Vec<f32>,
    columns: usize,
}

impl Matrix {
    /// Takes the numbers of a matrix.
    pub fn of(matrix: engine::Matrix) -> Matrix {
        Matrix { columns: matrix.columns(), values: matrix.into_values() }
    }

    /// Takes the numbers of a vector as a matrix of one row.
    pub fn of_vector(values: Vec<f32>) -> Matrix {
        Matrix { columns: values.len(), values }
    }
}

#[pymethods]
impl Matrix {
    /// Describes the memory, in version 3 of numpy's protocol.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.values.len() / self.columns.max(1), self.columns))?;
        interface.set_item("typestr", if cfg!(target_endian = "little") { "<f4" } else { ">f4" })?;
        interface.set_item("data", (self.values.as_ptr() as usize, true))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }
}
