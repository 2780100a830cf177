//! The output folder of a preparation: its complete and unfinished shards, and the lock that admits one writer.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{TOKENIZER, Unfinished};
use crate::durable;
use crate::error::DataError;
use crate::text::shards::manifest::{self, Manifest, hexadecimal};
use crate::text::shards::shard::Shard;
use crate::text::tokenizer::{TOKENIZER_CONFIG, Vocabulary};

const UNFINISHED: &str = "unfinished.json";
const LOCK: &str = "lock";

/// Interval between attempts to lock a folder that another process has locked.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Whether some process is preparing a folder at the moment.
pub(crate) fn is_held(path: &Path) -> bool {
    let lock = File::open(path.join(LOCK));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Whether a path still leads to an open file.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |metadata: &std::fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((file.metadata(), std::fs::metadata(path)), (Ok(one), Ok(other)) if identity(&one) == identity(&other))
}

/// The output folder, locked by this process.
pub(super) struct Folder {
    pub path: PathBuf,
    /// The lock, held while this process writes.
    _lock: File,
    /// Whether this process created the folder.
    is_new: bool,
}

impl Drop for Folder {
    /// Removes the lock, and a new folder in which nothing was written.
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path.join(LOCK));
        if self.is_new {
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

impl Folder {
    /// Locks a folder. Where another process has locked it, waits with `waits` and otherwise returns an error.
    pub(super) fn enter(path: &Path, restart: bool, waits: bool) -> Result<Self, DataError> {
        let shown = path.display();
        let failed = |error: std::io::Error| {
            DataError::input(format!("The folder {shown} cannot be written to: {error}; give another --out."))
        };
        let known = |name: &str| {
            [manifest::FILE_NAME, UNFINISHED, LOCK, TOKENIZER, TOKENIZER_CONFIG].contains(&name)
                || [".tokens", ".partial"].iter().any(|ending| name.ends_with(ending))
        };
        if path.exists() {
            for entry in std::fs::read_dir(path).map_err(failed)? {
                let name = entry.map_err(failed)?.file_name();
                if !name.to_str().is_some_and(known) {
                    return Err(DataError::input(format!(
                        "The folder {shown} holds other things than token shards (such as {}): give an empty one.",
                        name.to_string_lossy()
                    )));
                }
            }
        }
        let is_new = !path.exists();
        let lock = loop {
            std::fs::create_dir_all(path).map_err(failed)?;
            let lock = match File::create(path.join(LOCK)) {
                // The process that held the lock found nothing to write and removed the folder.
                Err(error) if waits && error.kind() == std::io::ErrorKind::NotFound => continue,
                opened => opened.map_err(failed)?,
            };
            match lock.try_lock() {
                // A process removes its lock file when it ends; a lock on a removed file excludes nobody.
                Ok(()) if is_at(&lock, &path.join(LOCK)) => break lock,
                Ok(()) => {}
                Err(TryLockError::WouldBlock) if waits => std::thread::sleep(RETRY_INTERVAL),
                Err(_) => {
                    return Err(DataError::input(format!(
                        "Another process is preparing {shown}: wait for it, or give another --out."
                    )));
                }
            }
        };
        if restart {
            for entry in std::fs::read_dir(path).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                if entry.file_name() != LOCK {
                    std::fs::remove_file(entry.path()).map_err(failed)?;
                }
            }
        }
        Ok(Self { path: path.into(), _lock: lock, is_new })
    }

    pub(super) fn occupied(&self, what: &str) -> DataError {
        DataError::input(format!(
            "The folder {} holds {what}: give another --out, or --restart to write it anew.",
            self.path.display()
        ))
    }

    pub(super) fn complete(&self) -> Result<Option<Manifest>, DataError> {
        let there = self.path.join(manifest::FILE_NAME).is_file();
        there.then(|| Manifest::read(&self.path)).transpose()
    }

    pub(super) fn unfinished(&self) -> Result<Option<Unfinished>, DataError> {
        let path = self.path.join(UNFINISHED);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.failed(&error)),
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            DataError::input(format!(
                "{} cannot be read ({error}): give another --out, or --restart to write it anew.",
                path.display()
            ))
        })
    }

    /// Checks that the shards listed as complete are there and unchanged.
    pub(super) fn check(&self, state: &Unfinished) -> Result<(), DataError> {
        for entry in &state.shards {
            let shard = Shard::open(&self.path.join(&entry.file), false)?;
            if hexadecimal(shard.header().index_hash) != entry.hash {
                return Err(self.occupied("a shard that has changed"));
            }
        }
        Ok(())
    }

    /// Writes the tokeniser.
    pub(super) fn keep(&self, vocabulary: &Vocabulary) -> Result<(), DataError> {
        vocabulary.save(&self.path.join(TOKENIZER))
    }

    pub(super) fn save(&self, state: &Unfinished) -> Result<(), DataError> {
        let text = serde_json::to_string_pretty(state).expect("a state has a JSON form");
        durable::replace(&self.path.join(UNFINISHED), text.as_bytes()).map_err(|error| self.failed(&error))
    }

    pub(super) fn finish(self, manifest: &Manifest) -> Result<(), DataError> {
        durable::replace(&self.path.join(manifest::FILE_NAME), manifest.to_json().as_bytes())
            .map_err(|error| self.failed(&error))?;
        self.tidy()
    }

    /// Removes the files that mark a folder as unfinished: an earlier process may have been killed after it wrote the manifest.
    pub(super) fn tidy(&self) -> Result<(), DataError> {
        match std::fs::remove_file(self.path.join(UNFINISHED)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(self.failed(&error)),
            _ => Ok(()),
        }
    }

    pub(super) fn failed(&self, error: &std::io::Error) -> DataError {
        DataError::environment(format!("Writing to {} failed: {error}.", self.path.display()))
    }
}
