//! Checkpoints: all state after an update, on disk whole or not at all.
//!
//! `checkpoints/step-N/` has `state.safetensors` (tensors), `state.json` (step, data cursor, counters, and the
//! size and hash of the tensor file) and `complete` (the hash of `state.json`), written last. The folder is filled
//! under another name, flushed, renamed and flushed again before the marker is written, so at every moment the
//! newest checkpoint with a right marker is whole, and an older one is removed only after that.

mod format;
mod retention;
pub(crate) mod tensors;

pub use retention::{Best, Retention, best, forget_after, prune};
pub use tensors::{Dtype, Entry, Tensor, TensorFile, header};

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::UserError;
use crate::refuse;
use flatout_data::durable::{self, about};
use format::{FORMAT, Unconverted};

const TENSORS: &str = "state.safetensors";
const STATE: &str = "state.json";
const MARKER: &str = "complete";
/// A hash of 128 bits in hexadecimal.
const MARKER_BYTES: usize = 32;
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
    format: u64,
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

/// A checkpoint that was saved.
#[derive(Debug)]
pub struct Saved {
    pub path: PathBuf,
    /// What went wrong after it was whole: others could not be removed, or the best one not be named.
    pub untidy: Option<io::Error>,
}

/// Saves a checkpoint; others stay or go as `kept` says. A step that is already whole on disk is not written again.
pub fn save(checkpoints: &Path, state: &State, tensors: &[Tensor], kept: &Retention) -> io::Result<Saved> {
    let watch: Watch = &mut |_| Ok(());
    match write(checkpoints, state, tensors, watch) {
        Ok(path) => {
            let untidy = retention::apply(checkpoints, state.step, kept, watch).err();
            Ok(Saved { path, untidy })
        }
        Err(error) => {
            // Space may be what was lacking, also for the marker alone. What cannot be removed now is removed at the
            // next start.
            let _ = fs::remove_dir_all(partial_path(checkpoints, state.step));
            let folder = folder_path(checkpoints, state.step);
            if verify(&folder).is_err() {
                let _ = fs::remove_dir_all(&folder);
            }
            Err(error)
        }
    }
}

fn write(checkpoints: &Path, state: &State, tensors: &[Tensor], watch: Watch) -> io::Result<PathBuf> {
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

/// Looks for the newest whole checkpoint, reading it through to check its hashes. One of a newer format is an
/// error and not skipped: it is not broken, only not for this program. So is a run of which every checkpoint was
/// finished and later damaged: what to lose is the user's choice.
pub fn latest(checkpoints: &Path) -> Result<Latest, UserError> {
    latest_where(checkpoints, |_| true)
}

/// As `latest`, of the checkpoints whose state is `wanted`.
pub fn latest_where(checkpoints: &Path, wanted: impl Fn(&State) -> bool) -> Result<Latest, UserError> {
    let mut latest = Latest::default();
    let mut damaged = None;
    for (step, path) in numbered(checkpoints)?.into_iter().rev() {
        match verify(&path) {
            Ok(record) if wanted(&record.state) => {
                latest.whole = Some(Whole { step, path });
                return Ok(latest);
            }
            Ok(_) => {}
            Err(Unusable::Newer(format)) => refuse!(
                "{} has checkpoint format {format} and this version reads formats up to {FORMAT}: continue it with \
                 the version that wrote it",
                path.display()
            ),
            Err(Unusable::Unfinished) => latest.skipped.push((path, "it was not finished".into())),
            Err(Unusable::Broken(reason)) => {
                damaged = damaged.or_else(|| Some(format!("{}: {reason}", path.display())));
                latest.skipped.push((path, reason));
            }
        }
    }
    if let Some(damaged) = damaged {
        refuse!(
            "no checkpoint of this run is whole ({damaged}): restore one, or remove {} to begin it again from step 0",
            checkpoints.display()
        );
    }
    Ok(latest)
}

/// The step of the newest checkpoint that was finished. Nothing of it is read, because whoever asks is leaving.
pub fn newest_finished(checkpoints: &Path) -> Option<u64> {
    let all = numbered(checkpoints).ok()?.into_iter();
    let is_finished = |(step, path): (u64, PathBuf)| path.join(MARKER).is_file().then_some(step);
    all.filter_map(is_finished).max()
}

/// The checkpoint of one step, which must be whole.
pub fn at(checkpoints: &Path, step: u64) -> Result<Whole, UserError> {
    let path = folder_path(checkpoints, step);
    let kept = || -> Result<String, UserError> {
        let steps: Vec<String> = numbered(checkpoints)?.iter().map(|(step, _)| step.to_string()).collect();
        Ok(if steps.is_empty() { "none".into() } else { steps.join(", ") })
    };
    match verify(&path) {
        Ok(_) => Ok(Whole { step, path }),
        Err(_) if !path.is_dir() => {
            refuse!("there is no checkpoint of step {step}: there is {}", kept()?)
        }
        Err(Unusable::Newer(format)) => refuse!(
            "{} has checkpoint format {format} and this version reads formats up to {FORMAT}",
            path.display()
        ),
        Err(Unusable::Unfinished) => refuse!("{} cannot be used: it was not finished", path.display()),
        Err(Unusable::Broken(reason)) => refuse!("{} cannot be used: {reason}", path.display()),
    }
}

/// Opens a checkpoint that `latest` found.
pub fn open(path: &Path) -> io::Result<(State, TensorFile)> {
    let text = fs::read(path.join(STATE)).map_err(about(path))?;
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{STATE}: {why}"));
    let record = record(&text).map_err(|unusable| match unusable {
        Unconverted::Newer(format) => invalid(format!("it has format {format}")),
        Unconverted::Broken(why) => invalid(why),
    })?;
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
    /// A save that was interrupted: nothing is lost with it.
    Unfinished,
    Broken(String),
    Newer(u64),
}

/// What `state.json` says, in this format whichever it was written in.
fn record(text: &[u8]) -> Result<Record, Unconverted> {
    let broken = |error: serde_json::Error| Unconverted::Broken(error.to_string());
    let value = format::convert(serde_json::from_slice(text).map_err(broken)?)?;
    serde_json::from_value(value).map_err(broken)
}

/// Whether everything that was saved is there, to the bit.
fn verify(folder: &Path) -> Result<Record, Unusable> {
    let broken = |reason: String| Unusable::Broken(reason);
    let marker = fs::read(folder.join(MARKER)).map_err(|_| Unusable::Unfinished)?;
    // The marker is made, written and flushed: a crash may leave it empty or short.
    if marker.len() < MARKER_BYTES {
        return Err(Unusable::Unfinished);
    }
    let text = fs::read(folder.join(STATE)).map_err(|error| broken(format!("{STATE}: {error}")))?;
    if marker != hex(xxh3_128(&text)).as_bytes() {
        return Err(broken(format!("{STATE} is not what was saved")));
    }
    let record = record(&text).map_err(|unusable| match unusable {
        Unconverted::Newer(format) => Unusable::Newer(format),
        Unconverted::Broken(why) => broken(format!("{STATE}: {why}")),
    })?;
    if folder != folder_path(folder.parent().unwrap_or(Path::new("")), record.state.step) {
        return Err(broken(format!("it holds step {}", record.state.step)));
    }
    if !record.files.contains_key(TENSORS) {
        return Err(broken(format!("{STATE} does not know {TENSORS}")));
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
