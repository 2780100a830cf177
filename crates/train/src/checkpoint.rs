//! Checkpoints: all state after an update, on disk whole or not at all.
//!
//! `checkpoints/step-N/` has `state.safetensors` (tensors), `state.json` (step, data cursor, counters, and the
//! size and hash of the tensor file) and `complete` (the hash of `state.json`), written last. The folder is filled
//! under another name, flushed, renamed and flushed again before the marker is written, so at every moment the
//! newest checkpoint with a right marker is whole, and an older one is removed only after that.

mod tensors;

pub use tensors::{Dtype, Entry, Tensor, TensorFile};

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::durable::{self, about};
use crate::{UserError, refuse};

/// Version of the layout above and of what the files hold.
pub const FORMAT: u32 = 1;

const TENSORS: &str = "state.safetensors";
const STATE: &str = "state.json";
const MARKER: &str = "complete";
/// Bytes that go to the disk in one write. Tests stop a save between writes, so theirs are small.
const WRITE_BYTES: usize = if cfg!(test) { 4 << 10 } else { 4 << 20 };

/// What is saved beside the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Updates made.
    pub step: u64,
    /// Where the data goes on.
    pub cursor: serde_json::Value,
    /// Whole numbers that the loop continues from, by name.
    pub counters: BTreeMap<String, u64>,
}

/// `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Record {
    format: u32,
    #[serde(flatten)]
    state: State,
    files: BTreeMap<String, Sum>,
}

/// Size and hash of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Sum {
    bytes: u64,
    xxh3: String,
}

/// Called before every operation on the file system, with its name. An error stops the save where it stands, as
/// a crash would: that is how tests visit every moment of it.
type Watch<'a> = &'a mut dyn FnMut(&'static str) -> io::Result<()>;

/// Saves a checkpoint and removes older ones beyond the newest `keep`. Gives its folder. Saving a step that is
/// already whole on disk changes nothing.
pub fn save(checkpoints: &Path, state: &State, tensors: &[Tensor], keep: usize) -> io::Result<PathBuf> {
    let saved = save_watched(checkpoints, state, tensors, keep, &mut |_| Ok(()));
    if saved.is_err() {
        // The space may be what was lacking. What cannot be removed now is removed at the next start.
        let _ = fs::remove_dir_all(partial_path(checkpoints, state.step));
    }
    saved
}

fn save_watched(
    checkpoints: &Path,
    state: &State,
    tensors: &[Tensor],
    keep: usize,
    watch: Watch,
) -> io::Result<PathBuf> {
    let folder = folder_path(checkpoints, state.step);
    if verify(&folder).is_ok() {
        return Ok(folder);
    }
    let partial = partial_path(checkpoints, state.step);
    watch("make the folder of checkpoints")?;
    fs::create_dir_all(checkpoints).map_err(about(checkpoints))?;
    if partial.exists() {
        watch("remove a partial folder")?;
        fs::remove_dir_all(&partial).map_err(about(&partial))?;
    }
    watch("make the partial folder")?;
    fs::create_dir(&partial).map_err(about(&partial))?;

    let path = partial.join(TENSORS);
    let sum = write_tensors(&path, tensors, watch).map_err(about(&path))?;
    let files = BTreeMap::from([(TENSORS.to_string(), sum)]);
    let record = serde_json::to_vec_pretty(&Record { format: FORMAT, state: state.clone(), files })?;
    let path = partial.join(STATE);
    watch("write the state")?;
    durable::write(&path, &record).map_err(about(&path))?;
    watch("flush the partial folder")?;
    durable::sync_folder(&partial).map_err(about(&partial))?;

    if folder.exists() {
        watch("remove a broken checkpoint")?;
        fs::remove_dir_all(&folder).map_err(about(&folder))?;
    }
    watch("rename")?;
    fs::rename(&partial, &folder).map_err(about(&folder))?;
    watch("flush the folder of checkpoints")?;
    durable::sync_folder(checkpoints).map_err(about(checkpoints))?;
    let marker = folder.join(MARKER);
    watch("write the marker")?;
    durable::write(&marker, hex(xxh3_128(&record)).as_bytes()).map_err(about(&marker))?;
    watch("flush the checkpoint")?;
    durable::sync_folder(&folder).map_err(about(&folder))?;

    prune(checkpoints, state.step, keep, watch)?;
    Ok(folder)
}

/// A checkpoint that was found whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    pub step: u64,
    pub path: PathBuf,
}

/// The newest whole checkpoint, and the newer ones that are not, with the reason of each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Latest {
    pub whole: Option<Whole>,
    pub skipped: Vec<(PathBuf, String)>,
}

/// Looks for the newest whole checkpoint, reading it through to check its hashes. One of another format is an
/// error and not skipped: it is not broken, only not for this program.
pub fn latest(checkpoints: &Path) -> Result<Latest, UserError> {
    let mut latest = Latest::default();
    for (step, path) in numbered(checkpoints)?.into_iter().rev() {
        match verify(&path) {
            Ok(_) => {
                latest.whole = Some(Whole { step, path });
                break;
            }
            Err(Unusable::OtherFormat(format)) => refuse!(
                "{} has checkpoint format {format} and this version reads format {FORMAT}: continue it with the \
                 version that wrote it",
                path.display()
            ),
            Err(Unusable::Broken(reason)) => latest.skipped.push((path, reason)),
        }
    }
    Ok(latest)
}

/// Opens a checkpoint that `latest` found.
pub fn open(path: &Path) -> io::Result<(State, TensorFile)> {
    let text = fs::read(path.join(STATE)).map_err(about(path))?;
    let record: Record = serde_json::from_slice(&text)?;
    Ok((record.state, TensorFile::open(&path.join(TENSORS))?))
}

/// Removes what an interrupted save or removal left behind. For the process that holds the run's lock.
pub fn clean(checkpoints: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(checkpoints) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(about(checkpoints)(error)),
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(".step-") && (name.ends_with(".partial") || name.ends_with(".removed")) {
            fs::remove_dir_all(entry.path()).map_err(about(&entry.path()))?;
        }
    }
    Ok(())
}

/// Removes checkpoints older than the one just saved, but for `keep - 1` of them and for those it cannot judge.
/// Newer ones belong to a future that was found broken; they are replaced when it is reached again.
fn prune(checkpoints: &Path, saved: u64, keep: usize, watch: Watch) -> io::Result<()> {
    let older = numbered(checkpoints).map_err(|error| io::Error::other(error.0))?;
    let mut kept = 1;
    for (step, path) in older.into_iter().rev().filter(|(step, _)| *step < saved) {
        if path.join(MARKER).exists() && kept < keep {
            kept += 1;
            continue;
        }
        // Renamed first, so that a crash in the middle leaves nothing that looks like a checkpoint.
        let removed = checkpoints.join(format!(".step-{step}.removed"));
        watch("take an old checkpoint away")?;
        fs::rename(&path, &removed).map_err(about(&path))?;
        watch("remove it")?;
        fs::remove_dir_all(&removed).map_err(about(&removed))?;
    }
    Ok(())
}

fn folder_path(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!("step-{step}"))
}

fn partial_path(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!(".step-{step}.partial"))
}

/// The folders `step-N` by step, oldest first.
fn numbered(checkpoints: &Path) -> Result<Vec<(u64, PathBuf)>, UserError> {
    let entries = match fs::read_dir(checkpoints) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => refuse!("{} cannot be read: {error}", checkpoints.display()),
    };
    let step_of = |name: &str| name.strip_prefix("step-").and_then(|n| n.parse::<u64>().ok());
    let mut found: Vec<_> = entries
        .flatten()
        .filter_map(|entry| Some((step_of(&entry.file_name().to_string_lossy())?, entry.path())))
        .collect();
    found.sort();
    Ok(found)
}

enum Unusable {
    Broken(String),
    OtherFormat(u64),
}

/// Whether everything that was saved is there, to the bit.
fn verify(folder: &Path) -> Result<Record, Unusable> {
    let broken = |reason: String| Unusable::Broken(reason);
    let marker = fs::read_to_string(folder.join(MARKER)).map_err(|_| broken("it was not finished".into()))?;
    let text = fs::read(folder.join(STATE)).map_err(|error| broken(format!("{STATE}: {error}")))?;
    if marker != hex(xxh3_128(&text)) {
        return Err(broken(format!("{STATE} is not what was saved")));
    }
    let value: serde_json::Value =
        serde_json::from_slice(&text).map_err(|e| broken(format!("{STATE}: {e}")))?;
    match value["format"].as_u64() {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => return Err(Unusable::OtherFormat(format)),
        None => return Err(broken(format!("{STATE} has no format"))),
    }
    let record: Record = serde_json::from_value(value).map_err(|e| broken(format!("{STATE}: {e}")))?;
    if folder != folder_path(folder.parent().unwrap_or(Path::new("")), record.state.step) {
        return Err(broken(format!("it holds step {}", record.state.step)));
    }
    for (name, sum) in &record.files {
        let found = sum_of(&folder.join(name)).map_err(|error| broken(format!("{name}: {error}")))?;
        if found.bytes != sum.bytes {
            return Err(broken(format!("{name} has {} bytes and should have {}", found.bytes, sum.bytes)));
        }
        if found.xxh3 != sum.xxh3 {
            return Err(broken(format!("{name} is not what was saved")));
        }
    }
    Ok(record)
}

fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}

fn sum_of(path: &Path) -> io::Result<Sum> {
    let mut file = File::open(path)?;
    let mut hash = Xxh3::new();
    let mut bytes = 0;
    let mut buffer = vec![0; WRITE_BYTES];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(Sum { bytes, xxh3: hex(hash.digest128()) }),
            read => {
                hash.update(&buffer[..read]);
                bytes += read as u64;
            }
        }
    }
}

/// Writes and flushes the tensor file, hashing on the way.
fn write_tensors(path: &Path, tensors: &[Tensor], watch: Watch) -> io::Result<Sum> {
    watch("make the tensor file")?;
    let hashed = Hashed { file: File::create(path)?, hash: Xxh3::new(), bytes: 0, watch };
    let mut buffered = BufWriter::with_capacity(WRITE_BYTES, hashed);
    tensors::write(&mut buffered, tensors)?;
    buffered.flush()?;
    let Hashed { file, hash, bytes, watch } = buffered.into_parts().0;
    watch("flush the tensor file")?;
    file.sync_all()?;
    Ok(Sum { bytes, xxh3: hex(hash.digest128()) })
}

struct Hashed<'a> {
    file: File,
    hash: Xxh3,
    bytes: u64,
    watch: Watch<'a>,
}

impl Write for Hashed<'_> {
    fn write(&mut self, given: &[u8]) -> io::Result<usize> {
        (self.watch)("write tensors")?;
        let written = self.file.write(&given[..given.len().min(WRITE_BYTES)])?;
        self.hash.update(&given[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
