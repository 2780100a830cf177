//! A session's state to a checkpoint and back: every trained weight, moment and counter under the model's own names,
//! whatever was merged or laid out in regions.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use flatout_ir::plan::PlacedSlot;
use flatout_ir::{Class, DType, PlanSet, Role};
use flatout_runtime::{Copying, Session};

use crate::Failure;
use crate::UserError;
use crate::refuse;
use crate::run::checkpoint::{self, Dtype, Retention, Saved, State, Tensor, TensorFile};
use crate::run::moments::{self, Coded, coded};

/// The state as it was between two steps, copied while training goes on. On a GPU the copy comes out beside the next
/// `grad`, and the next `apply` waits for it on the device.
pub struct Snapshot {
    slots: Vec<PlacedSlot>,
    /// Whose scales were copied behind the slots.
    coded: Vec<Coded>,
    copying: Copying,
    pub state: State,
}

impl Snapshot {
    pub fn begin(session: &mut Session, state: State) -> Result<Snapshot, Failure> {
        let slots = leaves(session.plans(), Class::is_saved);
        let coded = coded(session.plans());
        let paths = slots.iter().map(|slot| slot.path.clone()).chain(coded.iter().map(Coded::scales));
        let copying = session.begin_copy(&paths.collect::<Vec<_>>())?;
        Ok(Snapshot { slots, coded, copying, state })
    }

    /// Waits for the copy and writes the checkpoint. For any thread.
    pub fn save(self, checkpoints: &Path, kept: &Retention) -> io::Result<Saved> {
        let copied = self.copying.finish().map_err(io::Error::other)?;
        let widened = |(i, slot): (usize, &PlacedSlot)| {
            let mut regions = self.coded.iter().enumerate();
            regions.find_map(|(r, region)| {
                region.widened(slot, copied.tensor(i), copied.tensor(self.slots.len() + r))
            })
        };
        let wide: Vec<Option<Vec<u8>>> = self.slots.iter().enumerate().map(widened).collect();
        let tensors = self.slots.iter().zip(&wide).enumerate().map(|(i, (slot, wide))| Tensor {
            name: &slot.path,
            dtype: dtype(slot),
            shape: &slot.ty.dims,
            bytes: wide.as_deref().unwrap_or_else(|| copied.tensor(i)),
        });
        checkpoint::save(checkpoints, &self.state, &tensors.collect::<Vec<_>>(), kept)
    }
}

/// Slots of a class that nothing lies inside.
pub fn leaves(plans: &PlanSet, class: impl Fn(Class) -> bool) -> Vec<PlacedSlot> {
    plans.slots.iter().filter(|s| class(s.class) && !s.is_whole).cloned().collect()
}

/// Bytes of the state that is saved.
pub fn saved_bytes(plans: &PlanSet) -> u64 {
    let saved = plans.slots.iter().filter(|s| s.class.is_saved() && !s.is_whole);
    saved.map(|s| (s.ty.elements() * dtype(s).bytes()) as u64).sum()
}

/// Bytes on the host of a state that is being saved: its slots as they are, and those that are saved in another type in
/// that, too.
pub fn copied_bytes(plans: &PlanSet) -> u64 {
    let copied = |slot: &&PlacedSlot| slot.class.is_saved() && !slot.is_whole;
    let bytes = |slot: &PlacedSlot| {
        let other = moments::code(slot.ty.dtype).map_or(0, |_| slot.ty.elements() * dtype(slot).bytes());
        (slot.ty.bytes() + other) as u64
    };
    plans.slots.iter().filter(copied).map(bytes).sum()
}

/// The type a slot is saved in.
fn dtype(slot: &PlacedSlot) -> Dtype {
    if moments::code(slot.ty.dtype).is_some() {
        return Dtype::Bf16;
    }
    match slot.ty.dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::Bf16,
        DType::I32 => Dtype::I32,
        other => unreachable!("no state is kept in {}", other.name()),
    }
}

/// Reads a checkpoint into a session: every slot that `wanted` names must be there with its type and shape.
pub fn load(
    session: &mut Session,
    file: &mut TensorFile,
    wanted: impl Fn(Class) -> bool,
) -> Result<(), Failure> {
    let slots = leaves(session.plans(), wanted);
    refuse_differences(slots.iter().filter_map(|slot| difference(file, slot)).collect())?;
    for region in coded(session.plans()) {
        region.load(session, file, &slots)?;
    }
    for slot in slots.iter().filter(|slot| moments::code(slot.ty.dtype).is_none()) {
        let mut bytes = vec![0; slot.ty.bytes()];
        file.read_into(&slot.path, &mut bytes).map_err(Failure::io(&slot.path))?;
        session.write_slot(&slot.path, &bytes)?;
    }
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive)?;
    }
    Ok(())
}

/// Whether a checkpoint holds exactly the state of these plans: nothing missing, nothing other, nothing more. Asked
/// before any device work.
pub fn check_schema(plans: &PlanSet, file: &TensorFile) -> Result<(), UserError> {
    let slots = leaves(plans, Class::is_saved);
    let known: BTreeSet<&str> = slots.iter().map(|slot| slot.path.as_str()).collect();
    let unknown = file.entries().iter().filter(|(name, _)| !known.contains(name.as_str()));
    let unknown = unknown.map(|(name, entry)| {
        format!("it has `{name}` {} {:?}, which the plan does not", entry.dtype, entry.shape)
    });
    refuse_differences(slots.iter().filter_map(|slot| difference(file, slot)).chain(unknown).collect())
}

/// Differences a sentence names; the rest are counted.
const NAMED_DIFFERENCES: usize = 3;

fn refuse_differences(differences: Vec<String>) -> Result<(), UserError> {
    if differences.is_empty() {
        return Ok(());
    }
    let named = differences[..differences.len().min(NAMED_DIFFERENCES)].join("; ");
    let more = match differences.len().saturating_sub(NAMED_DIFFERENCES) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    refuse!(
        "the checkpoint's state is not the one this run's plans have: {named}{more}: it is of another model, config or \
         version; continue it with the ones that wrote it"
    )
}

fn difference(file: &TensorFile, slot: &PlacedSlot) -> Option<String> {
    let (path, wanted) = (&slot.path, dtype(slot));
    let Some(entry) = file.entries().get(path) else {
        return Some(format!("it has no `{path}` ({wanted} {:?})", slot.ty.dims));
    };
    if entry.shape == slot.ty.dims && entry.dtype == wanted {
        return None;
    }
    let (found, shape, dims) = (entry.dtype, &entry.shape, &slot.ty.dims);
    Some(format!("its `{path}` is {found} {shape:?} and the plan's {wanted} {dims:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes;
    use crate::resolve::compile;
    use std::collections::BTreeMap;

    fn session(overrides: &[&str]) -> Session {
        let small = ["model.width=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=24"];
        let more = ["model.context=16", "train.batch=2", "eval.rows=0"];
        let words = small.iter().chain(&more).chain(overrides).map(|word| word.to_string());
        let config = recipes::resolve("tiny", &[], &words.collect::<Vec<_>>()).unwrap();
        Session::new(compile::compile(&config, &compile::target()).unwrap().plans, 1).unwrap()
    }

    fn refused(plans: &Session, file: &TensorFile) -> String {
        check_schema(plans.plans(), file).unwrap_err().0
    }

    #[test]
    fn a_state_of_other_plans_is_refused_with_the_first_differences() {
        let folder = tempfile::tempdir().unwrap();
        let state = State { step: 3, cursor: serde_json::Value::Null, counters: BTreeMap::new() };
        let kept = Retention { keep: 1, keep_every: 0, best: None, prune: true };
        let mut own = session(&[]);
        let saved = Snapshot::begin(&mut own, state).unwrap().save(folder.path(), &kept).unwrap();
        let (_, file) = checkpoint::open(&saved.path).unwrap();
        assert_eq!(check_schema(own.plans(), &file), Ok(()));
        assert_eq!(
            check_schema(session(&["fuse.qkv=off"]).plans(), &file),
            Ok(()),
            "names do not depend on fusion"
        );

        let wider = refused(&session(&["model.ffn=32"]), &file);
        assert!(
            wider.contains("its `layers.0.ffn.gate` is F32 [24, 16] and the plan's F32 [32, 16]"),
            "{wider}"
        );
        assert!(wider.contains("; and 6 more"), "{wider}");
        let untied = refused(&session(&["model.tied=false"]), &file);
        assert!(untied.contains("it has no `head.weight` (F32 [512, 16])"), "{untied}");
        let frozen = refused(&session(&["train.freeze=[layers.0.ffn.down]"]), &file);
        assert!(
            frozen.contains("it has `layers.0.ffn.down` F32 [16, 24], which the plan does not"),
            "{frozen}"
        );
    }
}
