//! Checkpoints: the complete state after an update, saved atomically.
//!
//! `checkpoints/step-N/` has `state.safetensors` (tensors), `state.json` (step, data cursor, counters, and the size and hash of
//! the tensor file) and `complete` (the hash of `state.json`), written last. The folder is filled under another name, flushed,
//! renamed and flushed again before the marker is written. So at every moment the newest checkpoint with a valid marker is
//! complete, and an older one is removed only after that. Several ranks write a file of tensors each, and `state.json` has an
//! index of them.

mod cursor;
mod format;
mod found;
mod index;
mod parts;
mod retention;
pub(crate) mod tensors;

pub use cursor::merged;
pub use found::{Latest, Whole, at, latest, latest_among, latest_where, newest_finished};
pub use index::{Index, part_name};
pub use parts::{SaveResult, Share, Together, Unsaved};
pub use retention::{Best, Retention, best, forget_after, prune};
pub use tensors::{Dtype, Entry, Tensor, TensorFile, header};

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use flatout_data::durable::{self, about};
use format::{IN_ONE_FILE, IN_PARTS, Unconverted};
use found::verify;
use index::Parted;

const TENSORS: &str = "state.safetensors";
const STATE: &str = "state.json";
const MARKER: &str = "complete";
/// A 128-bit hash in hexadecimal.
const MARKER_BYTES: usize = 32;
/// Bytes per write. Tests stop a save between writes, so theirs are small.
const WRITE_BYTES: usize = if cfg!(test) { 4 << 10 } else { 4 << 20 };

/// The state that is saved in addition to the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Number of updates made.
    pub step: u64,
    /// Position in the data; null in it marks what this rank does not know and another does.
    pub cursor: serde_json::Value,
    /// Integers that the training loop continues from, by name.
    pub counters: BTreeMap<String, u64>,
}

/// `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Record {
    format: u64,
    #[serde(flatten)]
    state: State,
    files: BTreeMap<String, Sum>,
    /// The index of tensors in parts; absent where the header of the single tensor file serves as index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tensors: Option<BTreeMap<String, Parted>>,
}

/// Size and hash of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Sum {
    bytes: u64,
    xxh3: String,
}

/// Called before every file system operation, with its name. An error stops the save at that point, as a crash would: this is how
/// tests visit every point.
pub type Watch<'a> = &'a mut dyn FnMut(&'static str) -> io::Result<()>;

/// A checkpoint that was saved.
#[derive(Debug)]
pub struct Saved {
    pub path: PathBuf,
    /// A failure after it was complete: older ones could not be removed, or the best one not be recorded.
    pub untidy: Option<io::Error>,
}

/// Saves a checkpoint of one rank; `kept` decides which others stay. A step that is complete on disk already is not written
/// again.
pub fn save(
    checkpoints: &Path,
    state: &State,
    tensors: &[Tensor],
    kept: &Retention,
    watch: Watch,
) -> io::Result<Saved> {
    match write(checkpoints, state, tensors, watch) {
        Ok(path) => {
            let untidy = retention::apply(checkpoints, state.step, kept, watch).err();
            Ok(Saved { path, untidy })
        }
        Err(error) => {
            discard(checkpoints, state.step);
            Err(error)
        }
    }
}

fn write(checkpoints: &Path, state: &State, tensors: &[Tensor], watch: Watch) -> io::Result<PathBuf> {
    let folder = folder_path(checkpoints, state.step);
    if verify(&folder).is_ok() {
        return Ok(folder);
    }
    let partial = make_partial(checkpoints, state.step, watch)?;
    let sum = write_tensors(&partial.join(TENSORS), tensors, watch)?;
    let files = BTreeMap::from([(TENSORS.to_string(), sum)]);
    let record = Record { format: IN_ONE_FILE, state: state.clone(), files, tensors: None };
    commit(checkpoints, &record, watch)
}

/// Creates the folder that a checkpoint is written to first.
fn make_partial(checkpoints: &Path, step: u64, watch: Watch) -> io::Result<PathBuf> {
    let partial = partial_path(checkpoints, step);
    watch("make the folder of checkpoints")?;
    fs::create_dir_all(checkpoints).map_err(about(checkpoints))?;
    if partial.exists() {
        watch("remove a partial folder")?;
        fs::remove_dir_all(&partial).map_err(about(&partial))?;
    }
    watch("make the partial folder")?;
    fs::create_dir(&partial).map_err(about(&partial))?;
    Ok(partial)
}

/// Turns the folder whose tensors are on disk into a checkpoint: writes the record, renames the folder, and writes the marker.
fn commit(checkpoints: &Path, record: &Record, watch: Watch) -> io::Result<PathBuf> {
    let step = record.state.step;
    let (folder, partial) = (folder_path(checkpoints, step), partial_path(checkpoints, step));
    let record = serde_json::to_vec_pretty(record)?;
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
    Ok(folder)
}

/// Removes the remains of a save that failed. The disk may be full, even if only the marker did not fit. Remains that cannot be
/// removed now are removed at the next start.
fn discard(checkpoints: &Path, step: u64) {
    let _ = fs::remove_dir_all(partial_path(checkpoints, step));
    let folder = folder_path(checkpoints, step);
    if verify(&folder).is_err() {
        let _ = fs::remove_dir_all(&folder);
    }
}

/// The record in `state.json`, converted to the present format.
fn record(text: &[u8]) -> Result<Record, Unconverted> {
    let broken = |error: serde_json::Error| Unconverted::Broken(error.to_string());
    let value = format::convert(serde_json::from_slice(text).map_err(broken)?)?;
    serde_json::from_value(value).map_err(broken)
}

/// Opens a checkpoint that `latest` found.
pub fn open(path: &Path) -> io::Result<(State, TensorFile)> {
    let text = fs::read(path.join(STATE)).map_err(about(path))?;
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{STATE}: {why}"));
    let record = record(&text).map_err(|unusable| match unusable {
        Unconverted::Newer(format) => invalid(format!("it has format {format}")),
        Unconverted::Broken(why) => invalid(why),
    })?;
    let file = match record.tensors {
        None => TensorFile::open(&path.join(TENSORS))?,
        Some(tensors) => TensorFile::over(path, &Index::of(tensors).map_err(invalid)?)?,
    };
    Ok((record.state, file))
}

/// Removes the remains of an interrupted save or removal. Only the process that holds the run's lock may call it.
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

fn folder_path(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!("step-{step}"))
}

fn partial_path(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!(".step-{step}.partial"))
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

/// Writes and flushes a tensor file and hashes it meanwhile.
fn write_tensors(path: &Path, tensors: &[Tensor], watch: Watch) -> io::Result<Sum> {
    hashed(path, tensors, watch).map_err(about(path))
}

fn hashed(path: &Path, tensors: &[Tensor], watch: Watch) -> io::Result<Sum> {
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
