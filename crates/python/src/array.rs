//! Numbers that NumPy takes as they lie: an array is a view of memory that this library filled.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Memory for one array, alive as long as a view of it is. NumPy reads its shape, type and place from `__array_interface__`, so that the
/// library needs nothing of NumPy's own.
#[pyclass(frozen, module = "flatout._native")]
pub struct Array {
    /// Never looked at again from here: views may write to it.
    _memory: Memory,
    place: usize,
    shape: Vec<usize>,
    /// NumPy's name of the type.
    kind: &'static str,
}

enum Memory {
    Logits(#[allow(dead_code)] Vec<f32>),
    Tokens(#[allow(dead_code)] Vec<u32>),
}

impl Array {
    pub fn of_logits(mut values: Vec<f32>, shape: Vec<usize>) -> Array {
        assert_eq!(
            values.len(),
            shape.iter().product::<usize>(),
            "an array has as many values as its shape says"
        );
        Array {
            place: values.as_mut_ptr().expose_provenance(),
            _memory: Memory::Logits(values),
            shape,
            kind: "<f4",
        }
    }

    pub fn of_tokens(mut values: Vec<u32>) -> Array {
        let shape = vec![values.len()];
        Array {
            place: values.as_mut_ptr().expose_provenance(),
            _memory: Memory::Tokens(values),
            shape,
            kind: "<u4",
        }
    }
}

#[pymethods]
impl Array {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let told = PyDict::new(py);
        told.set_item("version", 3)?;
        told.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        told.set_item("typestr", self.kind)?;
        let is_read_only = false;
        told.set_item("data", (self.place, is_read_only))?;
        Ok(told)
    }
}
