//! A session's state to a checkpoint and back: every trained weight, moment and counter under the model's own names,
//! whatever was merged or laid out in regions.

use std::path::Path;

use flatout_ir::plan::PlacedSlot;
use flatout_ir::{Class, DType, Role};
use flatout_runtime::Session;

use crate::checkpoint::{self, Dtype, State, Tensor, TensorFile};
use crate::failure::Failure;
use crate::initial::leaves;
use crate::{UserError, refuse};

/// A copy of the state, taken between steps, that can be written while training goes on.
pub struct Snapshot {
    tensors: Vec<(PlacedSlot, Vec<u8>)>,
    pub state: State,
}

impl Snapshot {
    pub fn take(session: &mut Session, state: State) -> Result<Snapshot, Failure> {
        let mut tensors = vec![];
        for slot in leaves(session.plans(), Class::is_saved) {
            let bytes = session.read_slot(&slot.path)?;
            tensors.push((slot, bytes));
        }
        Ok(Snapshot { tensors, state })
    }

    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Writes the checkpoint; returns its folder.
    pub fn save(&self, checkpoints: &Path, keep: usize) -> std::io::Result<std::path::PathBuf> {
        let tensors: Vec<Tensor<'_>> = self
            .tensors
            .iter()
            .map(|(slot, bytes)| Tensor { name: &slot.path, dtype: dtype(slot), shape: &slot.ty.dims, bytes })
            .collect();
        checkpoint::save(checkpoints, &self.state, &tensors, keep)
    }
}

fn dtype(slot: &PlacedSlot) -> Dtype {
    match slot.ty.dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::Bf16,
        DType::I32 => Dtype::I32,
        other => unreachable!("no state is kept in {}", other.name()),
    }
}

/// Reads a checkpoint into a session: every slot that `wanted` names must be there with its shape.
pub fn load(
    session: &mut Session,
    file: &mut TensorFile,
    wanted: impl Fn(Class) -> bool,
) -> Result<(), Failure> {
    for slot in leaves(session.plans(), wanted) {
        fits(file, &slot)?;
        let mut bytes = vec![0; slot.ty.bytes()];
        file.read_into(&slot.path, &mut bytes).map_err(Failure::io(&slot.path))?;
        session.write_slot(&slot.path, &bytes)?;
    }
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive)?;
    }
    Ok(())
}

fn fits(file: &TensorFile, slot: &PlacedSlot) -> Result<(), UserError> {
    let Some(entry) = file.entries().get(&slot.path) else {
        refuse!("the checkpoint has no `{}`: it is of another model or version", slot.path)
    };
    if entry.shape != slot.ty.dims || entry.dtype != dtype(slot) {
        refuse!(
            "the checkpoint's `{}` has shape {:?} and the model's {:?}",
            slot.path,
            entry.shape,
            slot.ty.dims
        )
    }
    Ok(())
}
