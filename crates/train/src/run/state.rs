//! Saves and loads a session's state: every trained weight, moment and counter under the model's own names, independent of how
//! tensors were merged or laid out in regions.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::Path;

use flatout_ir::pieces::saved_dtype;
use flatout_ir::plan::PlacedSlot;
use flatout_ir::{Class, DType, PlanSet, Role, TensorRange, TensorType};
use flatout_runtime::{Copied, Copying, Session};
use flatout_waits::{self as waits, Unit};

use crate::Failure;
use crate::UserError;
use crate::refuse;
use crate::run::checkpoint::{
    self, Dtype, Index, Retention, SaveResult, Share, State, Tensor, TensorFile, Together, Unsaved, Watch,
};
use crate::run::moments::{self, CodedPiece, coded_regions};

/// The state between two steps, copied while training continues. On a GPU the copy runs concurrently with the next `grad`, and
/// the next `apply` waits for it on the device. Each of several ranks copies the pieces that it writes, and pieces of another
/// rank to compare.
pub struct Snapshot {
    /// The pieces it writes, then those it compares.
    pieces: Vec<TensorRange>,
    /// Number of pieces that it writes.
    owned: usize,
    /// The rank that writes the compared pieces.
    owner: usize,
    /// Indices of the 8-bit pieces; their scales were copied after all pieces.
    scaled: Vec<(usize, CodedPiece)>,
    /// Present on rank 0, where there are several ranks.
    index: Option<Index>,
    copying: Copying,
    pub state: State,
}

impl Snapshot {
    /// Begins the copy of the `turn`-th save since the process began; the turn selects the rank whose pieces are compared.
    pub fn begin(session: &mut Session, state: State, turn: u64) -> Result<Snapshot, Failure> {
        let (plans, rank) = (session.plans(), session.rank());
        let mut owners = plans.owners();
        let index = (owners.len() > 1 && rank == 0).then(|| Index::of_owners(&owners, dtype));
        let owner = other_rank(rank, owners.len(), turn);
        let compared = if owner == rank { vec![] } else { copies_of(&owners[owner], &plans.at_hand(rank)) };
        let mut pieces = owners.swap_remove(rank);
        let owned = pieces.len();
        pieces.extend(compared);
        let regions = coded_regions(plans);
        let scaled = |(i, piece)| Some((i, CodedPiece::of(&regions, plans, piece)?));
        let scaled: Vec<_> = pieces.iter().enumerate().filter_map(scaled).collect();
        let ranges = pieces.iter().map(|piece| (piece.slot.clone(), piece.within()));
        let ranges: Vec<_> = ranges.chain(scaled.iter().map(|(_, scaled)| scaled.scales.clone())).collect();
        let copying = session.begin_copy(&ranges)?;
        Ok(Snapshot { pieces, owned, owner, scaled, index, copying, state })
    }

    /// Waits for the copy and writes the checkpoint, or this rank's part of it. May be called on any thread.
    pub fn save(
        self,
        checkpoints: &Path,
        kept: &Retention,
        together: Option<&Together>,
        watch: Watch,
    ) -> SaveResult {
        let Snapshot { pieces, owned, owner, scaled, index, copying, state } = self;
        let copied = copying.finish();
        let values = match &copied {
            Ok(copied) => saved_values(&pieces, &scaled, copied),
            Err(_) => vec![],
        };
        let saved = values.iter().zip(&pieces).map(|(bytes, piece)| (piece, bytes.as_ref()));
        let Some(together) = together else {
            copied.as_ref().map_err(|error| Unsaved::Failed(io::Error::other(error.to_string())))?;
            let tensors: Vec<Tensor> =
                saved.map(|(piece, bytes)| tensor(piece, &piece.ty.dims, bytes)).collect();
            return checkpoint::save(checkpoints, &state, &tensors, kept, watch).map_err(Unsaved::Failed);
        };
        // The parts are one-dimensional, since they may begin and end anywhere.
        let shapes: Vec<[usize; 1]> = pieces.iter().map(|piece| [piece.elements()]).collect();
        let tensors = saved.zip(&shapes).map(|((piece, bytes), shape)| tensor(piece, shape, bytes));
        let mut own: Vec<Tensor> = tensors.collect();
        let seen = own.split_off(owned.min(own.len()));
        let own = copied.as_ref().map(|_| own).map_err(|error| error.to_string());
        let share = Share { state: &state, own, seen: (owner, seen), index: index.as_ref() };
        together.save(checkpoints, &share, kept, watch)
    }
}

/// The bytes of every piece in the form in which checkpoints store them.
fn saved_values<'c>(
    pieces: &[TensorRange],
    scaled: &[(usize, CodedPiece)],
    copied: &'c Copied,
) -> Vec<Cow<'c, [u8]>> {
    let mut values: Vec<Cow<[u8]>> = (0..pieces.len()).map(|i| Cow::Borrowed(copied.tensor(i))).collect();
    for (scales, (i, scaled)) in (pieces.len()..).zip(scaled) {
        values[*i] = Cow::Owned(scaled.widened(copied.tensor(*i), copied.tensor(scales)));
    }
    values
}

fn tensor<'t>(piece: &'t TensorRange, shape: &'t [usize], bytes: &'t [u8]) -> Tensor<'t> {
    Tensor { name: &piece.path, dtype: dtype(piece), shape, bytes }
}

/// The rank whose pieces a rank compares in a save: each other rank in turn; itself where there is no other.
fn other_rank(rank: usize, ranks: usize, turn: u64) -> usize {
    match ranks {
        1 => rank,
        _ => (rank + 1 + (turn % (ranks as u64 - 1)) as usize) % ranks,
    }
}

/// The given pieces of another rank that this rank holds, too.
fn copies_of(pieces: &[TensorRange], held: &[TensorRange]) -> Vec<TensorRange> {
    let held: HashMap<&str, &TensorRange> = held.iter().map(|piece| (piece.path.as_str(), piece)).collect();
    let copy = |piece: &TensorRange| held.get(piece.path.as_str())?.covering(&piece.range);
    pieces.iter().filter_map(copy).collect()
}

/// Slots of a class that contain no other slots.
pub fn leaves(plans: &PlanSet, class: impl Fn(Class) -> bool) -> Vec<PlacedSlot> {
    plans.slots.iter().filter(|s| class(s.class) && !s.is_whole).cloned().collect()
}

/// The pieces of parameters and saved tensors of a class that a session holds.
pub fn held(session: &Session, class: impl Fn(Class) -> bool) -> Vec<TensorRange> {
    session.plans().held(session.rank()).into_iter().filter(|piece| class(piece.class)).collect()
}

/// Bytes of the saved state, over all ranks.
pub fn saved_bytes(plans: &PlanSet) -> u64 {
    plans.saved().iter().map(|(_, ty)| ty.with(saved_dtype(ty.dtype)).bytes() as u64).sum()
}

/// Host bytes of a rank while a state is being saved: its pieces as copied, plus their converted copies where they are saved in
/// another type. Each of several ranks copies about as much again, to compare.
pub fn copied_bytes(plans: &PlanSet) -> u64 {
    let bytes = |piece: &TensorRange| {
        let other = moments::code(piece.ty.dtype).map_or(0, |_| piece.saved_bytes());
        (piece.bytes() + other) as u64
    };
    let owners = plans.owners();
    let most = owners.iter().map(|pieces| pieces.iter().map(bytes).sum::<u64>()).max().unwrap_or(0);
    if owners.len() > 1 { 2 * most } else { most }
}

/// The element type in which checkpoints store a piece.
fn dtype(piece: &TensorRange) -> Dtype {
    saved_as(piece.ty.dtype)
}

/// The element type in which checkpoints store a slot.
fn saved_as(dtype: DType) -> Dtype {
    match saved_dtype(dtype) {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::Bf16,
        DType::I32 => Dtype::I32,
        other => unreachable!("no state is kept in {}", other.name()),
    }
}

/// Reads the pieces of a checkpoint that a session holds: every tensor that `wanted` selects must be there with its type and
/// shape.
pub fn load(session: &mut Session, file: &TensorFile, wanted: impl Fn(Class) -> bool) -> Result<(), Failure> {
    let pieces = held(session, wanted);
    let differences = pieces.iter().filter_map(|piece| difference(file, &piece.path, &piece.ty));
    refuse_differences(differences.collect())?;
    for region in coded_regions(session.plans()) {
        region.load(session, file, &pieces)?;
    }
    let bytes: usize = pieces.iter().map(TensorRange::bytes).sum();
    let wait = waits::begin("reading the checkpoint", Unit::Bytes, Some(bytes as u64));
    for piece in pieces.iter().filter(|piece| moments::code(piece.ty.dtype).is_none()) {
        let mut bytes = vec![0; piece.bytes()];
        file.read_range(&piece.path, piece.range.clone(), &mut bytes).map_err(Failure::io(&piece.path))?;
        session.write_range(&piece.slot, piece.at, &bytes)?;
        wait.add(bytes.len() as u64);
    }
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive)?;
    }
    Ok(())
}

/// Checks that a checkpoint holds exactly the state of these plans, whichever rank holds it: nothing missing, different or extra.
/// Runs before any device work.
pub fn check_schema(plans: &PlanSet, file: &TensorFile) -> Result<(), UserError> {
    let saved = plans.saved();
    let known: BTreeSet<&str> = saved.iter().map(|(path, _)| path.as_str()).collect();
    let unknown = file.entries().iter().filter(|(name, _)| !known.contains(name.as_str()));
    let unknown = unknown.map(|(name, entry)| {
        format!("it has `{name}` {} {:?}, which the plan does not", entry.dtype, entry.shape)
    });
    let other = saved.iter().filter_map(|(path, ty)| difference(file, path, ty));
    refuse_differences(other.chain(unknown).collect())
}

/// The most differences that a message names; the rest are counted.
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

fn difference(file: &TensorFile, path: &str, ty: &TensorType) -> Option<String> {
    let (wanted, dims) = (saved_as(ty.dtype), &ty.dims);
    let Some(entry) = file.entries().get(path) else {
        return Some(format!("it has no `{path}` ({wanted} {dims:?})"));
    };
    if entry.shape == *dims && entry.dtype == wanted {
        return None;
    }
    let (found, shape) = (entry.dtype, &entry.shape);
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
        let saved = Snapshot::begin(&mut own, state, 0).unwrap();
        let saved = saved.save(folder.path(), &kept, None, &mut |_| Ok(())).unwrap();
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

    #[test]
    fn ranks_take_turns_in_comparing_one_another() {
        assert_eq!((other_rank(0, 1, 3), other_rank(1, 2, 5)), (0, 0));
        for rank in 0..5 {
            let others: BTreeSet<usize> = (0..4).map(|turn| other_rank(rank, 5, turn)).collect();
            assert!(others.len() == 4 && !others.contains(&rank), "{rank}: {others:?}");
            assert_eq!(other_rank(rank, 5, 4), other_rank(rank, 5, 0));
        }
    }
}
