//! Finds the checkpoints of a run and verifies that they are intact.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::format::{FORMAT, Unconverted};
use super::index::Index;
use super::{MARKER, MARKER_BYTES, Record, STATE, State, TENSORS, folder_path, hex, record, sum_of};
use crate::ranks::Ranks;
use crate::refuse;
use crate::{Failure, UserError};

/// A checkpoint that was found to be complete.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    pub step: u64,
    pub path: PathBuf,
}

/// The newest complete checkpoint, and the newer ones that are not, with the reason for each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Latest {
    pub whole: Option<Whole>,
    pub skipped: Vec<(PathBuf, String)>,
}

/// Finds the newest complete checkpoint and reads it through to verify its hashes. A checkpoint of a newer format is not skipped
/// but an error: it is intact, only this program cannot read it. A run whose finished checkpoints are all damaged is an error,
/// too: the user decides what to lose.
pub fn latest(checkpoints: &Path) -> Result<Latest, UserError> {
    latest_where(checkpoints, |_| true)
}

/// The same as [`latest`] among the checkpoints whose state is `wanted`.
pub fn latest_where(checkpoints: &Path, wanted: impl Fn(&State) -> bool) -> Result<Latest, UserError> {
    search(checkpoints, wanted, |_, path, record| Ok(check_files(path, record, |_| true)))
}

/// The same on all ranks: rank 0 searches, each file of a checkpoint is read by one rank, and all get the same result.
pub fn latest_among(
    ranks: &Ranks,
    checkpoints: &Path,
    wanted: impl Fn(&State) -> bool,
) -> Result<Latest, Failure> {
    if !ranks.are_many() {
        return Ok(latest_where(checkpoints, wanted)?);
    }
    let is_mine = |file: usize| file % ranks.count() == ranks.rank();
    let together = |found: Result<(), Unusable>| -> Result<Result<(), Unusable>, Failure> {
        let reason = found.err().map(|unusable| unusable.reason());
        let reasons: Vec<Option<String>> = ranks.gather(&reason)?;
        Ok(reasons.into_iter().flatten().next().map_or(Ok(()), |reason| Err(Unusable::Broken(reason))))
    };
    if ranks.is_first() {
        let found = search(checkpoints, wanted, |step, path, record| {
            ranks.of_first(Order::Check(step))?;
            together(check_files(path, record, is_mine))
        })?;
        ranks.of_first(Order::Take(found.whole.as_ref().map(|whole| whole.step)))?;
        return Ok(found);
    }
    loop {
        match ranks.of_first(Order::Take(None))? {
            Order::Check(step) => {
                let path = folder_path(checkpoints, step);
                let found = marked(&path).and_then(|record| check_files(&path, &record, is_mine));
                // Rank 0 says what is wrong.
                let _ = together(found)?;
            }
            Order::Take(step) => {
                let whole = step.map(|step| Whole { step, path: folder_path(checkpoints, step) });
                return Ok(Latest { whole, skipped: vec![] });
            }
        }
    }
}

/// Rank 0's instruction to the others.
#[derive(Serialize, Deserialize)]
enum Order {
    /// Verify their files of the checkpoint of a step.
    Check(u64),
    /// Continue with the checkpoint of a step, or with none.
    Take(Option<u64>),
}

fn search<E: From<UserError>>(
    checkpoints: &Path,
    wanted: impl Fn(&State) -> bool,
    mut check: impl FnMut(u64, &Path, &Record) -> Result<Result<(), Unusable>, E>,
) -> Result<Latest, E> {
    let mut latest = Latest::default();
    let mut damaged = None;
    for (step, path) in numbered(checkpoints)?.into_iter().rev() {
        let checked = match marked(&path) {
            Ok(record) if !wanted(&record.state) => continue,
            Ok(record) => check(step, &path, &record)?,
            Err(unusable) => Err(unusable),
        };
        match checked {
            Ok(()) => {
                latest.whole = Some(Whole { step, path });
                return Ok(latest);
            }
            Err(Unusable::Newer(format)) => {
                return Err(E::from(UserError(format!(
                    "{} has checkpoint format {format} and this version reads formats up to {FORMAT}: continue it \
                     with the version that wrote it",
                    path.display()
                ))));
            }
            Err(Unusable::Unfinished) => latest.skipped.push((path, Unusable::Unfinished.reason())),
            Err(Unusable::Broken(reason)) => {
                damaged = damaged.or_else(|| Some(format!("{}: {reason}", path.display())));
                latest.skipped.push((path, reason));
            }
        }
    }
    match damaged {
        None => Ok(latest),
        Some(damaged) => Err(E::from(UserError(format!(
            "no checkpoint of this run is whole ({damaged}): restore one, or remove {} to begin it again from step 0",
            checkpoints.display()
        )))),
    }
}

/// The step of the newest finished checkpoint. Nothing is verified, because the caller is about to exit.
pub fn newest_finished(checkpoints: &Path) -> Option<u64> {
    let all = numbered(checkpoints).ok()?.into_iter();
    let is_finished = |(step, path): (u64, PathBuf)| path.join(MARKER).is_file().then_some(step);
    all.filter_map(is_finished).max()
}

/// The checkpoint of one step, which must be complete.
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
        Err(unusable) => refuse!("{} cannot be used: {}", path.display(), unusable.reason()),
    }
}

/// The folders `step-N` by step, oldest first.
pub(super) fn numbered(checkpoints: &Path) -> Result<Vec<(u64, PathBuf)>, UserError> {
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

/// A checkpoint that cannot be used.
pub(super) enum Unusable {
    /// A save was interrupted: nothing is lost by skipping it.
    Unfinished,
    Broken(String),
    Newer(u64),
}

impl Unusable {
    /// The reason as the end of a sentence.
    fn reason(self) -> String {
        match self {
            Unusable::Unfinished => "it was not finished".into(),
            Unusable::Broken(reason) => reason,
            Unusable::Newer(format) => format!("it has checkpoint format {format}"),
        }
    }
}

/// Verifies a checkpoint against its hashes.
pub(super) fn verify(folder: &Path) -> Result<Record, Unusable> {
    let record = marked(folder)?;
    check_files(folder, &record, |_| true)?;
    Ok(record)
}

/// The record of a checkpoint that was finished.
fn marked(folder: &Path) -> Result<Record, Unusable> {
    let broken = |reason: String| Unusable::Broken(reason);
    let marker = fs::read(folder.join(MARKER)).map_err(|_| Unusable::Unfinished)?;
    // The marker is created, written and flushed: a crash may leave it empty or short.
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
    let known = |file: &str| match record.files.contains_key(file) {
        true => Ok(()),
        false => Err(broken(format!("{STATE} does not know {file}"))),
    };
    match &record.tensors {
        None => known(TENSORS)?,
        Some(tensors) => {
            let index = Index::of(tensors.clone()).map_err(|why| broken(format!("{STATE}: {why}")))?;
            index.files().iter().try_for_each(|file| known(file))?;
        }
    }
    Ok(record)
}

/// Verifies the files of a checkpoint whose number is wanted.
fn check_files(folder: &Path, record: &Record, wanted: impl Fn(usize) -> bool) -> Result<(), Unusable> {
    let broken = |reason: String| Unusable::Broken(reason);
    for (_, (name, sum)) in record.files.iter().enumerate().filter(|(number, _)| wanted(*number)) {
        let found = sum_of(&folder.join(name)).map_err(|error| broken(format!("{name}: {error}")))?;
        if found.bytes != sum.bytes {
            return Err(broken(format!("{name} has {} bytes and should have {}", found.bytes, sum.bytes)));
        }
        if found.xxh3 != sum.xxh3 {
            return Err(broken(format!("{name} is not what was saved")));
        }
    }
    Ok(())
}
