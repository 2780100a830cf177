//! Arrays that NumPy reads without a copy: views of memory that this library filled.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The memory of an array, which lives as long as a view of it. NumPy reads its shape, type and address from
/// `__array_interface__`, so the library does not depend on NumPy.
#[pyclass(frozen, module = "flatout._native")]
pub struct Array {
    /// Never accessed again from here, because views may write to it.
    _memory: Memory,
    address: usize,
    shape: Vec<usize>,
    /// NumPy's name of the element type.
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
            address: values.as_mut_ptr().expose_provenance(),
            _memory: Memory::Logits(values),
            shape,
            kind: "<f4",
        }
    }

    pub fn of_tokens(mut values: Vec<u32>) -> Array {
        let shape = vec![values.len()];
        Array {
            address: values.as_mut_ptr().expose_provenance(),
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
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        interface.set_item("typestr", self.kind)?;
        let is_read_only = false;
        interface.set_item("data", (self.address, is_read_only))?;
        Ok(interface)
    }
}
