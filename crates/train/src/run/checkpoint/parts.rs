//! Saves one checkpoint from several ranks: each writes a file, and the checkpoint becomes complete at once.
//!
//! Rank 0 creates the folder and lets the others begin. Every rank writes and flushes its part and reports its size and hash;
//! when all have reported, rank 0 writes the index, renames the folder and writes the marker. Each rank also reports its position
//! in the data it reads, and rank 0 merges these into one cursor. A failure on any rank fails the save on all ranks, and rank 0
//! removes its remains. The writer threads make collective calls of their own, separate from those of the training loop.
//!
//! State that is replicated must have the same bits on all ranks. With every save a rank also hashes what another rank is about
//! to write, a different rank each time, and rank 0 compares the hashes: every replica is checked once in as many saves as there
//! are other ranks. Each check copies and hashes as many bytes as a rank writes; hashing all replicas with every save would cost
//! that times the number of ranks.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::Path;

use flatout_data::durable::about;
use flatout_world::Calls;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::cursor::merged;
use super::found::verify;
use super::{
    IN_PARTS, Index, Record, Retention, Saved, State, Sum, Tensor, Watch, commit, discard, folder_path,
    make_partial, part_name, partial_path, retention, write_tensors,
};
use crate::Failure;
use crate::ranks::{Ranks, message};

/// The channel for the calls of writer threads.
const CHANNEL: &str = "checkpoints";

/// The reason why a save failed.
#[derive(Debug)]
pub enum Unsaved {
    /// It could not be written; the next save may succeed.
    Failed(io::Error),
    /// Replicas of the state differ between ranks: no save can be correct.
    Unequal(String),
}

/// The result of a save.
pub type SaveResult = Result<Saved, Unsaved>;

/// The writers of all ranks, seen from one of them.
pub struct Together {
    calls: Calls,
    rank: usize,
    /// Names of all ranks for messages.
    names: Vec<String>,
}

/// A rank's share of a save.
pub struct Share<'a> {
    pub state: &'a State,
    /// The tensors of its part, or the reason why the copy failed.
    pub own: Result<Vec<Tensor<'a>>, String>,
    /// The rank whose tensors it compares, and its own replicas of them.
    pub seen: (usize, Vec<Tensor<'a>>),
    /// Present on rank 0.
    pub index: Option<&'a Index>,
}

/// Rank 0's message at the beginning of a save.
#[derive(Serialize, Deserialize)]
enum BeginMessage {
    Write,
    /// The step is complete on disk already.
    Whole,
    Failed(String),
}

/// A rank's message once its part is written.
#[derive(Serialize, Deserialize)]
struct PartReport {
    written: Result<Sum, String>,
    own: Hashes,
    /// Hashes of this rank's replicas of another rank's tensors.
    seen: (usize, Hashes),
    /// The data cursor, as far as this rank knows it.
    cursor: Value,
}

type Hashes = Vec<(String, u64)>;

/// Rank 0's message at the end.
#[derive(Clone, Serialize, Deserialize)]
enum EndMessage {
    /// The checkpoint is complete; the text is the error if older checkpoints could not be tidied.
    Saved(Option<String>),
    Failed(String),
    Unequal(String),
}

impl Together {
    /// The writers of a run of several ranks.
    pub fn of(ranks: &Ranks) -> Option<Together> {
        ranks.are_many().then(|| Together::over(ranks.calls(CHANNEL), ranks.rank(), ranks.names()))
    }

    fn over(calls: Calls, rank: usize, names: Vec<String>) -> Together {
        Together { calls, rank, names }
    }

    /// Saves a checkpoint of which this rank writes a share. Every rank calls this with the same step.
    pub fn save(&self, checkpoints: &Path, share: &Share, kept: &Retention, watch: Watch) -> SaveResult {
        let step = share.state.step;
        let ended = match self.of_first(|| begin(checkpoints, step, watch))? {
            BeginMessage::Failed(why) => EndMessage::Failed(self.of_rank(0, &why)),
            BeginMessage::Whole => self.of_first(|| self.tidy(checkpoints, step, kept, watch))?,
            BeginMessage::Write => {
                let reports = self.gather(&self.write(checkpoints, share, watch))?;
                self.of_first(|| self.end(checkpoints, share, reports, kept, watch))?
            }
        };
        match ended {
            EndMessage::Saved(untidy) => {
                Ok(Saved { path: folder_path(checkpoints, step), untidy: untidy.map(io::Error::other) })
            }
            EndMessage::Failed(why) => Err(Unsaved::Failed(io::Error::other(why))),
            EndMessage::Unequal(why) => Err(Unsaved::Unequal(why)),
        }
    }

    /// Writes this rank's part.
    fn write(&self, checkpoints: &Path, share: &Share, watch: Watch) -> PartReport {
        let name = part_name(self.rank, self.names.len());
        let path = partial_path(checkpoints, share.state.step).join(name);
        let written = share
            .own
            .as_ref()
            .map_err(String::clone)
            .and_then(|tensors| write_tensors(&path, tensors, watch).map_err(|error| error.to_string()));
        let own = share.own.as_deref().map_or(vec![], hashes);
        let cursor = share.state.cursor.clone();
        PartReport { written, own, seen: (share.seen.0, hashes(&share.seen.1)), cursor }
    }

    /// Ends a save once every part is written or has failed.
    fn end(
        &self,
        checkpoints: &Path,
        share: &Share,
        reports: Vec<PartReport>,
        kept: &Retention,
        watch: Watch,
    ) -> EndMessage {
        let ended = match self.unequal(&reports).map_or_else(|| self.whole_cursor(&reports), Err) {
            Err(why) => EndMessage::Unequal(why),
            Ok(cursor) => match self.commit(checkpoints, share, cursor, reports, watch) {
                Ok(()) => return self.tidy(checkpoints, share.state.step, kept, watch),
                Err(why) => EndMessage::Failed(why),
            },
        };
        discard(checkpoints, share.state.step);
        ended
    }

    fn commit(
        &self,
        checkpoints: &Path,
        share: &Share,
        cursor: Value,
        reports: Vec<PartReport>,
        watch: Watch,
    ) -> Result<(), String> {
        let ranks = self.names.len();
        let mut files = BTreeMap::new();
        for (rank, report) in reports.into_iter().enumerate() {
            let sum = report.written.map_err(|why| self.of_rank(rank, &why))?;
            let name = part_name(rank, ranks);
            // Detects a rank that wrote its file to another folder.
            let path = partial_path(checkpoints, share.state.step).join(&name);
            let found =
                fs::metadata(&path).map_err(|error| self.of_rank(0, &about(&path)(error).to_string()))?;
            if found.len() != sum.bytes {
                return Err(format!(
                    "{} has {} bytes for rank 0, and {} wrote {}",
                    path.display(),
                    found.len(),
                    self.names[rank],
                    sum.bytes
                ));
            }
            files.insert(name, sum);
        }
        let index = share.index.expect("rank 0 has the index");
        let tensors = Some(index.tensors().clone());
        let state = State { cursor, ..share.state.clone() };
        let record = Record { format: IN_PARTS, state, files, tensors };
        commit(checkpoints, &record, watch).map(drop).map_err(|error| self.of_rank(0, &error.to_string()))
    }

    /// Removes the checkpoints that need not stay, once one is complete.
    fn tidy(&self, checkpoints: &Path, step: u64, kept: &Retention, watch: Watch) -> EndMessage {
        EndMessage::Saved(
            retention::apply(checkpoints, step, kept, watch).err().map(|error| error.to_string()),
        )
    }

    /// Describes a tensor that differs between its replicas, if there is one.
    fn unequal(&self, reports: &[PartReport]) -> Option<String> {
        for (rank, PartReport { seen: (owner, seen), .. }) in reports.iter().enumerate() {
            let own: HashMap<&str, u64> =
                reports[*owner].own.iter().map(|(name, hash)| (name.as_str(), *hash)).collect();
            let other =
                seen.iter().find(|(name, hash)| own.get(name.as_str()).is_some_and(|own| own != hash));
            if let Some((name, _)) = other {
                return Some(format!(
                    "`{name}` is not the same on {} and on {}, and all ranks must have it alike: the memory of one of them was \
                     corrupted",
                    self.names[*owner.min(&rank)],
                    self.names[*owner.max(&rank)]
                ));
            }
        }
        None
    }

    /// Merges the data cursors of all ranks.
    fn whole_cursor(&self, reports: &[PartReport]) -> Result<Value, String> {
        let known: Vec<Value> = reports.iter().map(|report| report.cursor.clone()).collect();
        merged(&known).map_err(|rank| {
            format!(
                "{} is at another position in the data than the ranks before it, and all must be at the same one: the memory of one of \
                 them was corrupted",
                self.names[rank]
            )
        })
    }

    fn of_rank(&self, rank: usize, why: &str) -> String {
        format!("{}: {why}", self.names[rank])
    }

    /// Sends rank 0's message to every rank.
    fn of_first<T: Serialize + DeserializeOwned>(&self, make: impl FnOnce() -> T) -> Result<T, Unsaved> {
        let bytes = if self.rank == 0 { message::write(&make()) } else { vec![] };
        message::read(&self.calls.broadcast(CHANNEL, &bytes).map_err(disconnected)?).map_err(unreadable)
    }

    /// Every rank's message, in order of ranks.
    fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>, Unsaved> {
        message::read_all(&self.calls.gather(CHANNEL, &message::write(own)).map_err(disconnected)?)
            .map_err(unreadable)
    }
}

/// Creates the folder of a save.
fn begin(checkpoints: &Path, step: u64, watch: Watch) -> BeginMessage {
    if verify(&folder_path(checkpoints, step)).is_ok() {
        return BeginMessage::Whole;
    }
    match make_partial(checkpoints, step, watch) {
        Ok(_) => BeginMessage::Write,
        Err(error) => BeginMessage::Failed(error.to_string()),
    }
}

fn hashes(tensors: &[Tensor]) -> Hashes {
    tensors.iter().map(|tensor| (tensor.name.to_string(), xxh3_64(tensor.bytes))).collect()
}

fn unreadable(failure: Failure) -> Unsaved {
    Unsaved::Failed(io::Error::other(failure))
}

/// The run has failed, and this process is about to end.
fn disconnected(failure: flatout_world::Failure) -> Unsaved {
    Unsaved::Failed(io::Error::other(failure.sentence))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::checkpoint::{Dtype, TensorFile, index::Parted, latest, open};
    use flatout_world::{Joining, Meeting, RankPlacement, Timing, World};
    use std::net::TcpListener;
    use std::sync::Arc;

    /// Runs a closure on every rank of a world of threads.
    fn with_ranks<T: Send>(ranks: usize, run: impl Fn(Together) -> T + Sync) -> Vec<T> {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let meeting = Meeting::Address { host: "127.0.0.1".into(), ports: free..free + 1, label: "".into() };
        let join = |rank: usize| {
            let meeting = meeting.clone();
            let place = RankPlacement { rank, ranks, local: None, node: None, has_parent: false, meeting };
            let joining = Joining {
                version: "1.0".into(),
                secret: None,
                device: None,
                folder: None,
                timing: Timing::default(),
                note: Arc::new(|_| {}),
                // A thread cannot end its process.
                leave: Arc::new(|_| {}),
                stop: Arc::new(|_| {}),
                take_stopper: Arc::new(drop),
            };
            let world = World::join(&place, joining).expect("it joins");
            let names = (0..ranks).map(|rank| format!("rank {rank}")).collect();
            let result = run(Together::over(world.calls(CHANNEL), rank, names));
            world.finish().expect("all come to the end");
            result
        };
        std::thread::scope(|scope| {
            let join = &join;
            let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || join(rank))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
        })
    }

    const KEPT: Retention = Retention { keep: 2, keep_every: 0, best: None, prune: true };

    /// The index of an eight-byte tensor: two bytes on each of four ranks.
    fn index() -> Index {
        let part = |rank| crate::run::checkpoint::index::CheckpointPart {
            file: part_name(rank, 4),
            start: 2 * rank,
            len: 2,
        };
        let whole = Parted { dtype: Dtype::U8, shape: vec![2, 4], parts: (0..4).map(part).collect() };
        Index::of(BTreeMap::from([("w".to_string(), whole)])).unwrap()
    }

    fn state(step: u64) -> State {
        State { step, cursor: serde_json::Value::Null, counters: BTreeMap::new() }
    }

    /// Saves bytes that every rank has a replica of; each rank compares those of the next one.
    fn saved(checkpoints: &Path, step: u64, copies: impl Fn(usize) -> Vec<u8> + Sync) -> Vec<String> {
        saved_at(checkpoints, step, copies, |_| Value::Null)
    }

    /// The same with ranks that each know a part of the data cursor.
    fn saved_at(
        checkpoints: &Path,
        step: u64,
        copies: impl Fn(usize) -> Vec<u8> + Sync,
        cursor: impl Fn(usize) -> Value + Sync,
    ) -> Vec<String> {
        let index = index();
        with_ranks(4, |together| {
            let (rank, copy) = (together.rank, copies(together.rank));
            let state = State { cursor: cursor(rank), ..state(step) };
            let part = |rank: usize| Tensor {
                name: "w",
                dtype: Dtype::U8,
                shape: &[2],
                bytes: &copy[2 * rank..2 * rank + 2],
            };
            let other = (rank + 1) % 4;
            let own = match step {
                66 if rank == 2 => Err("the copy was lost".to_string()),
                _ => Ok(vec![part(rank)]),
            };
            let share = Share {
                state: &state,
                own,
                seen: (other, vec![part(other)]),
                index: (rank == 0).then_some(&index),
            };
            match together.save(checkpoints, &share, &KEPT, &mut |_| Ok(())) {
                Ok(saved) => format!("saved {}", saved.path.file_name().unwrap().to_string_lossy()),
                Err(Unsaved::Failed(error)) => format!("failed: {error}"),
                Err(Unsaved::Unequal(why)) => format!("unequal: {why}"),
            }
        })
    }

    fn whole(file: &TensorFile) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        file.read_into("w", &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn ranks_write_one_checkpoint_and_get_the_same_result() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let copy = |_| (10..18).collect::<Vec<u8>>();
        assert_eq!(saved(dir, 5, copy), vec!["saved step-5"; 4]);
        let found = latest(dir).unwrap().whole.unwrap();
        let (found_state, file) = open(&found.path).unwrap();
        assert_eq!((found_state, whole(&file)), (state(5), copy(0)));
        assert_eq!(file.entries()["w"].shape, [2, 4]);
        assert_eq!(saved(dir, 5, copy), vec!["saved step-5"; 4], "it is there already");

        // One of them fails: no rank has saved, and nothing is left.
        assert_eq!(saved(dir, 66, copy), vec!["failed: rank 2: the copy was lost"; 4]);
        fs::write(dir.join("step-7"), "in the way").unwrap();
        let failed = saved(dir, 7, copy);
        assert!(
            failed.iter().all(|outcome| *outcome == failed[0] && outcome.starts_with("failed: rank 0: ")),
            "{failed:?}"
        );
        fs::remove_file(dir.join("step-7")).unwrap();
        let names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["step-5"]);
    }

    /// Each rank knows the row, and the position of one stream.
    fn known_by(rank: usize, row: u64) -> Value {
        let streams: Vec<_> = (0..4).map(|other| (other == rank).then_some(10 * other)).collect();
        serde_json::json!({ "row": row, "streams": streams })
    }

    #[test]
    fn the_cursors_of_all_ranks_are_merged() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let copy = |_| (10..18).collect::<Vec<u8>>();
        assert_eq!(saved_at(dir, 5, copy, |rank| known_by(rank, 40)), vec!["saved step-5"; 4]);
        let found = latest(dir).unwrap().whole.unwrap();
        let whole = serde_json::json!({ "row": 40, "streams": [0, 10, 20, 30] });
        assert_eq!(open(&found.path).unwrap().0.cursor, whole);
        let outcomes = saved_at(dir, 6, copy, |rank| known_by(rank, if rank == 2 { 41 } else { 40 }));
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
        assert!(
            outcomes[0].starts_with("unequal: rank 2 is at another position in the data than"),
            "{outcomes:?}"
        );
        assert_eq!(latest(dir).unwrap().whole, Some(found));
    }

    #[test]
    fn unequal_replicas_are_reported_by_rank_and_not_saved() {
        let folder = tempfile::tempdir().unwrap();
        let flipped = |rank: usize| {
            let mut copy: Vec<u8> = (10..18).collect();
            copy[5] ^= u8::from(rank == 1);
            copy
        };
        let outcomes = saved(folder.path(), 5, flipped);
        let sentence = "unequal: `w` is not the same on rank 1 and on rank 2, and all ranks must have it alike: the memory of one \
                        of them was corrupted";
        assert_eq!(outcomes, vec![sentence; 4]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
