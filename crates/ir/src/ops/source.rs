//! Constants and indices: operations without inputs.

use super::arity;
use crate::ops::Op;
use crate::types::TensorType;

pub fn infer(op: &Op, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 0)?;
    match op {
        Op::Fill { dtype, dims, .. } => Ok(vec![TensorType::new(*dtype, dims.clone())]),
        Op::Iota { dtype, dims, axis } if *axis < dims.len() => {
            Ok(vec![TensorType::new(*dtype, dims.clone())])
        }
        _ => Err("the axis is out of range".into()),
    }
}
