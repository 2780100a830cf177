//! Keeps visits on disk, so that an ablation that was interrupted or ran out of budget continues where it stopped.
//!
//! A file `ablate/HASH.jsonl` in the cache holds a line for every visit, written when the visit ends. The hash covers
//! everything that affects a time: the configuration, the machine, this program's version and the number of updates. The
//! file is removed when the ablation is complete; the same command then measures again.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::bench::Timed;
use flatout_train::Failure;
use flatout_train::UserError;

/// One configuration opened, warmed up and timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Visit {
    /// The configuration visited: [`super::variants::BASE`], a control, or the hash of the plans.
    pub key: String,
    /// The process that made it: visits of one process follow one another without a break.
    pub process: u32,
    pub round: usize,
    #[serde(flatten)]
    pub end: End,
}

/// The outcome of a visit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Timed(Timed),
    Failed(String),
}

/// The visits of an ablation, also on disk where there is a cache folder.
pub struct StoredVisits {
    pub visits: Vec<Visit>,
    file: Option<(File, PathBuf)>,
    /// The index of this process among those that contributed visits.
    pub process: u32,
    /// Why visits are not kept on disk.
    pub trouble: Option<String>,
}

impl StoredVisits {
    /// Keeps visits in memory only; `trouble` is the reason where a file was expected.
    pub fn nowhere(trouble: Option<String>) -> StoredVisits {
        StoredVisits { visits: vec![], file: None, process: 0, trouble }
    }

    /// Opens the results of an ablation that `identity` describes, in a folder. Another process that measures the same
    /// is an error: the two would also disturb each other's times.
    pub fn open(folder: &Path, identity: &str) -> Result<StoredVisits, Failure> {
        let path = folder.join(format!("{:016x}.jsonl", xxh3_64(identity.as_bytes())));
        let failed = || Failure::io(format!("{}: keeping results", path.display()));
        fs::create_dir_all(folder).map_err(failed())?;
        let mut options = OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).open(&path).map_err(failed())?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(UserError(format!(
                    "another process measures the same ({} is locked): wait for it, or end it",
                    path.display()
                ))
                .into());
            }
            Err(TryLockError::Error(error)) => return Err(failed()(error)),
        }
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(failed())?;
        // A truncated last line is a visit that was not written completely.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64).map_err(failed())?;
        let visits: Vec<Visit> =
            text[..whole].lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let process = visits.iter().map(|visit| visit.process + 1).max().unwrap_or(0);
        Ok(StoredVisits { visits, file: Some((file, path)), process, trouble: None })
    }

    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|(_, path)| path.as_path())
    }

    /// Discards all visits.
    pub fn clear(&mut self) -> Result<(), Failure> {
        self.visits.clear();
        self.process = 0;
        let Some((file, path)) = &mut self.file else { return Ok(()) };
        let emptied = file.set_len(0).and_then(|()| file.rewind());
        emptied.map_err(Failure::io(path.display()))
    }

    /// Adds a visit. After a failed write nothing more is kept on disk; the results are still reported at the end.
    pub fn push(&mut self, key: &str, round: usize, end: End) {
        let visit = Visit { key: key.into(), process: self.process, round, end };
        if let Some((file, path)) = &mut self.file {
            let mut line = serde_json::to_string(&visit).expect("a visit has a JSON form");
            line.push('\n');
            if let Err(error) = file.write_all(line.as_bytes()) {
                self.trouble = Some(format!("{}: {error}", path.display()));
                self.file = None;
            }
        }
        self.visits.push(visit);
    }

    /// Removes the file, once the ablation is complete.
    pub fn finish(self) -> Result<(), Failure> {
        match self.file {
            Some((_, path)) => fs::remove_file(&path).map_err(Failure::io(path.display())),
            None => Ok(()),
        }
    }
}

impl Visit {
    pub fn timed(&self) -> Option<&Timed> {
        match &self.end {
            End::Timed(timed) => Some(timed),
            End::Failed(_) => None,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bench::Start;

    /// A typical timed visit.
    pub fn timed() -> Timed {
        Timed {
            step_ms: vec![30.0; 8],
            around_ms: vec![],
            losses: vec![6.5, 6.25],
            start: Start { compile_seconds: 0.5, ..Start::default() },
            arena_bytes: 1 << 40,
            driver_bytes: 0,
            launches: 7,
            parameters: 8,
        }
    }

    fn failed(key: &str) -> End {
        End::Failed(format!("{key} fails"))
    }

    #[test]
    fn visits_are_read_back_and_a_truncated_line_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let timed = Timed { step_ms: vec![1.25, 0.1 + 0.2], losses: vec![6.5, f32::MIN_POSITIVE], ..timed() };
        let mut first = StoredVisits::open(folder.path(), "a").unwrap();
        first.push("base", 0, End::Timed(timed.clone()));
        first.push("x", 0, failed("x"));
        first.push("n", 0, End::Timed(Timed { losses: vec![f32::NAN], ..timed.clone() }));
        assert!(StoredVisits::open(folder.path(), "a").is_err(), "two would disturb each other");
        let path = first.path().unwrap().to_path_buf();
        drop(first);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"key\":\"y\",\"pro").unwrap();

        let mut again = StoredVisits::open(folder.path(), "a").unwrap();
        assert_eq!((again.visits.len(), again.process), (3, 1));
        assert_eq!(again.visits[0].timed(), Some(&timed), "to the bit");
        again.push("z", 1, failed("z"));
        drop(again);
        let third = StoredVisits::open(folder.path(), "a").unwrap();
        assert_eq!((third.visits.len(), third.visits[3].process, third.process), (4, 1, 2));
        assert!(third.visits[2].timed().unwrap().losses[0].is_nan());
        assert!(StoredVisits::open(folder.path(), "b").unwrap().visits.is_empty());
        third.finish().unwrap();
        assert!(!path.exists());
    }
}
