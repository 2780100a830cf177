//! A checkpoint that several ranks write, a file each, and that is whole at once.
//!
//! Rank 0 makes the folder and says go. Every rank writes and flushes its part and says its size and hash; when all have, rank
//! 0 writes the index, gives the folder its name and marks it. Each rank also says how far it is in the data it reads, and rank 0
//! keeps all of that as one cursor. Whatever fails anywhere fails the save on all ranks alike, and
//! rank 0 removes its remains. The writers' threads do this by calls of their own, beside the loop.
//!
//! State that ranks have alike must be the same bits on all of them. With every save a rank also hashes what another one is
//! about to write, another one each time, and rank 0 compares: every copy has been compared with the one that is written after
//! as many saves as there are other ranks. That copies and hashes as many bytes as a rank writes; hashing all of its state with
//! every save would be as many times that as there are ranks.

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

/// The line of calls that writers of checkpoints make.
const LINE: &str = "checkpoints";

/// A save that did not end in a whole checkpoint.
#[derive(Debug)]
pub enum Unsaved {
    /// It could not be written; the next save may be.
    Failed(io::Error),
    /// Ranks have unequal copies of the state: no save can be right.
    Unequal(String),
}

/// How a save ended.
pub type Written = Result<Saved, Unsaved>;

/// The writers of all ranks, seen from one of them.
pub struct Together {
    calls: Calls,
    rank: usize,
    /// All ranks, as sentences name them.
    names: Vec<String>,
}

/// A rank's share of a save.
pub struct Share<'a> {
    pub state: &'a State,
    /// The tensors of its part, or why they cannot be had.
    pub own: Result<Vec<Tensor<'a>>, String>,
    /// The rank whose tensors it looks at, and these.
    pub seen: (usize, Vec<Tensor<'a>>),
    /// Of rank 0.
    pub index: Option<&'a Index>,
}

/// Rank 0's word at the beginning of a save.
#[derive(Serialize, Deserialize)]
enum Begun {
    Write,
    /// The step is whole on disk already.
    Whole,
    Failed(String),
}

/// A rank's word when its part is written.
#[derive(Serialize, Deserialize)]
struct Told {
    written: Result<Sum, String>,
    own: Hashes,
    /// Of the tensors of another rank as they are here.
    seen: (usize, Hashes),
    /// As far as it knows it.
    cursor: Value,
}

type Hashes = Vec<(String, u64)>;

/// Rank 0's word at the end.
#[derive(Clone, Serialize, Deserialize)]
enum Ended {
    /// It is whole; where other checkpoints are not in order, why.
    Saved(Option<String>),
    Failed(String),
    Unequal(String),
}

impl Together {
    /// The writers of a run of several ranks.
    pub fn of(ranks: &Ranks) -> Option<Together> {
        ranks.are_many().then(|| Together::over(ranks.calls(LINE), ranks.rank(), ranks.names()))
    }

    fn over(calls: Calls, rank: usize, names: Vec<String>) -> Together {
        Together { calls, rank, names }
    }

    /// Saves a checkpoint, of which this rank writes a share. Every rank calls it with the same step.
    pub fn save(&self, checkpoints: &Path, share: &Share, kept: &Retention, watch: Watch) -> Written {
        let step = share.state.step;
        let ended = match self.of_first(|| begin(checkpoints, step, watch))? {
            Begun::Failed(why) => Ended::Failed(self.said(0, &why)),
            Begun::Whole => self.of_first(|| self.tidy(checkpoints, step, kept, watch))?,
            Begun::Write => {
                let told = self.gather(&self.write(checkpoints, share, watch))?;
                self.of_first(|| self.end(checkpoints, share, told, kept, watch))?
            }
        };
        match ended {
            Ended::Saved(untidy) => {
                Ok(Saved { path: folder_path(checkpoints, step), untidy: untidy.map(io::Error::other) })
            }
            Ended::Failed(why) => Err(Unsaved::Failed(io::Error::other(why))),
            Ended::Unequal(why) => Err(Unsaved::Unequal(why)),
        }
    }

    /// Writes this rank's part.
    fn write(&self, checkpoints: &Path, share: &Share, watch: Watch) -> Told {
        let name = part_name(self.rank, self.names.len());
        let path = partial_path(checkpoints, share.state.step).join(name);
        let written = share
            .own
            .as_ref()
            .map_err(String::clone)
            .and_then(|tensors| write_tensors(&path, tensors, watch).map_err(|error| error.to_string()));
        let own = share.own.as_deref().map_or(vec![], hashes);
        let cursor = share.state.cursor.clone();
        Told { written, own, seen: (share.seen.0, hashes(&share.seen.1)), cursor }
    }

    /// Ends a save whose parts are all written, or failed.
    fn end(
        &self,
        checkpoints: &Path,
        share: &Share,
        told: Vec<Told>,
        kept: &Retention,
        watch: Watch,
    ) -> Ended {
        let ended = match self.unequal(&told).map_or_else(|| self.whole_cursor(&told), Err) {
            Err(why) => Ended::Unequal(why),
            Ok(cursor) => match self.commit(checkpoints, share, cursor, told, watch) {
                Ok(()) => return self.tidy(checkpoints, share.state.step, kept, watch),
                Err(why) => Ended::Failed(why),
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
        told: Vec<Told>,
        watch: Watch,
    ) -> Result<(), String> {
        let ranks = self.names.len();
        let mut files = BTreeMap::new();
        for (rank, told) in told.into_iter().enumerate() {
            let sum = told.written.map_err(|why| self.said(rank, &why))?;
            let name = part_name(rank, ranks);
            // A file that a rank wrote elsewhere is not in this checkpoint.
            let path = partial_path(checkpoints, share.state.step).join(&name);
            let found =
                fs::metadata(&path).map_err(|error| self.said(0, &about(&path)(error).to_string()))?;
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
        commit(checkpoints, &record, watch).map(drop).map_err(|error| self.said(0, &error.to_string()))
    }

    /// Lets other checkpoints stay or go, once one is whole.
    fn tidy(&self, checkpoints: &Path, step: u64, kept: &Retention, watch: Watch) -> Ended {
        Ended::Saved(retention::apply(checkpoints, step, kept, watch).err().map(|error| error.to_string()))
    }

    /// A tensor that ranks should have alike and have not.
    fn unequal(&self, told: &[Told]) -> Option<String> {
        for (rank, Told { seen: (owner, seen), .. }) in told.iter().enumerate() {
            let own: HashMap<&str, u64> =
                told[*owner].own.iter().map(|(name, hash)| (name.as_str(), *hash)).collect();
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

    /// Where the data goes on, of what all ranks know of it.
    fn whole_cursor(&self, told: &[Told]) -> Result<Value, String> {
        let known: Vec<Value> = told.iter().map(|told| told.cursor.clone()).collect();
        merged(&known).map_err(|rank| {
            format!(
                "{} is at another place in the data than the ranks before it, and all ranks must be at one: the memory of one of \
                 them was corrupted",
                self.names[rank]
            )
        })
    }

    fn said(&self, rank: usize, why: &str) -> String {
        format!("{}: {why}", self.names[rank])
    }

    /// Rank 0's word, on every rank.
    fn of_first<T: Serialize + DeserializeOwned>(&self, make: impl FnOnce() -> T) -> Result<T, Unsaved> {
        let bytes = if self.rank == 0 { message::write(&make()) } else { vec![] };
        message::read(&self.calls.broadcast(LINE, &bytes).map_err(gone)?).map_err(unread)
    }

    /// Every rank's word, in order of ranks.
    fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>, Unsaved> {
        message::read_all(&self.calls.gather(LINE, &message::write(own)).map_err(gone)?).map_err(unread)
    }
}

/// Makes the folder of a save.
fn begin(checkpoints: &Path, step: u64, watch: Watch) -> Begun {
    if verify(&folder_path(checkpoints, step)).is_ok() {
        return Begun::Whole;
    }
    match make_partial(checkpoints, step, watch) {
        Ok(_) => Begun::Write,
        Err(error) => Begun::Failed(error.to_string()),
    }
}

fn hashes(tensors: &[Tensor]) -> Hashes {
    tensors.iter().map(|tensor| (tensor.name.to_string(), xxh3_64(tensor.bytes))).collect()
}

fn unread(failure: Failure) -> Unsaved {
    Unsaved::Failed(io::Error::other(failure))
}

/// The run has failed, and this process is about to end.
fn gone(failure: flatout_world::Failure) -> Unsaved {
    Unsaved::Failed(io::Error::other(failure.sentence))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::checkpoint::{Dtype, TensorFile, index::Parted, latest, open};
    use flatout_world::{Joining, Meeting, RankPlacement, Timing, World};
    use std::net::TcpListener;
    use std::sync::Arc;

    /// Runs a function on every rank of a world of threads.
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
            let result = run(Together::over(world.calls(LINE), rank, names));
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

    /// A tensor of eight bytes, two of each of four ranks.
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

    /// Saves bytes of which each rank has a copy; it looks at those of the next rank.
    fn saved(checkpoints: &Path, step: u64, copies: impl Fn(usize) -> Vec<u8> + Sync) -> Vec<String> {
        saved_at(checkpoints, step, copies, |_| Value::Null)
    }

    /// The same of ranks that know some of where the data goes on.
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
    fn ranks_write_one_checkpoint_and_end_alike() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let copy = |_| (10..18).collect::<Vec<u8>>();
        assert_eq!(saved(dir, 5, copy), vec!["saved step-5"; 4]);
        let found = latest(dir).unwrap().whole.unwrap();
        let (found_state, file) = open(&found.path).unwrap();
        assert_eq!((found_state, whole(&file)), (state(5), copy(0)));
        assert_eq!(file.entries()["w"].shape, [2, 4]);
        assert_eq!(saved(dir, 5, copy), vec!["saved step-5"; 4], "it is there already");

        // One of them cannot: no rank has saved, and nothing is left.
        assert_eq!(saved(dir, 66, copy), vec!["failed: rank 2: the copy was lost"; 4]);
        fs::write(dir.join("step-7"), "in the way").unwrap();
        let failed = saved(dir, 7, copy);
        assert!(
            failed.iter().all(|said| *said == failed[0] && said.starts_with("failed: rank 0: ")),
            "{failed:?}"
        );
        fs::remove_file(dir.join("step-7")).unwrap();
        let names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["step-5"]);
    }

    /// Each rank knows a position of its own and the row.
    fn known_by(rank: usize, row: u64) -> Value {
        let streams: Vec<_> = (0..4).map(|other| (other == rank).then_some(10 * other)).collect();
        serde_json::json!({ "row": row, "streams": streams })
    }

    #[test]
    fn a_cursor_is_kept_of_what_all_ranks_know() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let copy = |_| (10..18).collect::<Vec<u8>>();
        assert_eq!(saved_at(dir, 5, copy, |rank| known_by(rank, 40)), vec!["saved step-5"; 4]);
        let found = latest(dir).unwrap().whole.unwrap();
        let whole = serde_json::json!({ "row": 40, "streams": [0, 10, 20, 30] });
        assert_eq!(open(&found.path).unwrap().0.cursor, whole);
        let told = saved_at(dir, 6, copy, |rank| known_by(rank, if rank == 2 { 41 } else { 40 }));
        assert!(told.iter().all(|said| *said == told[0]), "{told:?}");
        assert!(told[0].starts_with("unequal: rank 2 is at another place in the data than"), "{told:?}");
        assert_eq!(latest(dir).unwrap().whole, Some(found));
    }

    #[test]
    fn unequal_copies_are_said_by_rank_and_not_saved() {
        let folder = tempfile::tempdir().unwrap();
        let flipped = |rank: usize| {
            let mut copy: Vec<u8> = (10..18).collect();
            copy[5] ^= u8::from(rank == 1);
            copy
        };
        let said = saved(folder.path(), 5, flipped);
        let sentence = "unequal: `w` is not the same on rank 1 and on rank 2, and all ranks must have it alike: the memory of one \
                        of them was corrupted";
        assert_eq!(said, vec![sentence; 4]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
