//! Writes TensorBoard's event files into a run's root, with the scalars of events.
//!
//! A process writes one file. When a run is resumed, the new file begins with a restart record at the next step: TensorBoard then
//! drops points of that step and later ones from older files, which a killed process may have written after its last checkpoint.

mod record;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flatout_train::Config;
use flatout_train::run::events::{Event, now};
use flatout_train::training::trainer::Sink;
use record::{Content, Record};

use crate::scalars;

/// The part that the names of all event files have.
const MARK: &str = "tfevents";

/// TensorBoard's file of this process, as a sink of events.
#[derive(Default)]
pub struct Board {
    /// `None` before the run is opened, and where the file could not be made.
    file: Option<File>,
    /// Bytes of complete records: a partial one after them is truncated before the next is written.
    whole_bytes: u64,
    /// Why nothing can be written at the moment, until it is reported.
    trouble: Option<String>,
    is_reported: bool,
}

impl Sink for Board {
    /// Begins this process's file; the config is shown as text.
    fn open(&mut self, run: &Path, step: u64, config: &Config) {
        *self = match begin(run, step, &config.to_toml()) {
            Ok((file, whole_bytes)) => Board { file: Some(file), whole_bytes, ..Board::default() },
            Err(error) => {
                let trouble = Some(format!("there is no file for TensorBoard: {error}"));
                Board { trouble, ..Board::default() }
            }
        };
    }

    /// Writes the record of an event. One that cannot be written, as on a full disk, is left out, and the next one is tried
    /// again. Returns a warning each time that trouble begins.
    fn record(&mut self, event: &Event) -> Option<String> {
        if let (Some(file), Some((step, bytes))) = (&mut self.file, bytes(event)) {
            match file.write_all(&bytes) {
                Ok(()) => {
                    self.whole_bytes += bytes.len() as u64;
                    self.is_reported = false;
                }
                Err(error) => {
                    // Readers would stop at a partial record.
                    let _ = file.set_len(self.whole_bytes);
                    let why = || format!("step {step} is left out of TensorBoard's file: {error}");
                    self.trouble = (!std::mem::replace(&mut self.is_reported, true)).then(why);
                }
            }
        }
        self.trouble.take()
    }
}

/// Creates a file with its first records, and returns it with their number of bytes.
fn begin(run: &Path, step: u64, config: &str) -> io::Result<(File, u64)> {
    let newest = files(run)?.iter().filter_map(|path| seconds(path)).max();
    // Readers take files in the order of their names, so a later file needs a larger number of seconds even if the clock was set
    // back.
    let time = (now() as u64).max(newest.map_or(0, |seconds| seconds + 1));
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "localhost" } else { host.trim() };
    let path = run.join(format!("events.out.{MARK}.{time:010}.{host}.{}", std::process::id()));
    let mut file = OpenOptions::new().append(true).create_new(true).open(path)?;
    let record = |step, content| Record { time: now(), step, content }.to_bytes();
    let mut bytes = record(0, Content::Version);
    if newest.is_some() {
        bytes.extend(record(step + 1, Content::Restart));
    }
    bytes.extend(record(step, Content::Text("config", &format!("```toml\n{config}```"))));
    file.write_all(&bytes)?;
    Ok((file, bytes.len() as u64))
}

/// The event files of a run, oldest first.
fn files(run: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(run)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = paths.collect::<io::Result<Vec<_>>>()?;
    paths.retain(|path| seconds(path).is_some());
    paths.sort();
    Ok(paths)
}

/// The time in a file's name.
fn seconds(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?.strip_prefix("events.out.")?.strip_prefix(MARK)?;
    name.strip_prefix('.')?.split('.').next()?.parse().ok()
}

/// The record of an event, and its step.
fn bytes(event: &Event) -> Option<(u64, Vec<u8>)> {
    let record =
        |step: u64, content: Content<'_>| Some((step, Record { time: now(), step, content }.to_bytes()));
    // Also when a process goes back to its own last checkpoint.
    if let Event::Resume { step } = event {
        return record(step + 1, Content::Restart);
    }
    let (step, scalars) = scalars::of(event)?;
    let values: Vec<(&str, f32)> = scalars.iter().map(|(tag, value)| (tag.as_str(), *value as f32)).collect();
    record(step, Content::Scalars(&values))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(run: &Path) -> Board {
        let mut board = Board::default();
        board.open(run, 0, &Config::default());
        board
    }

    #[test]
    fn a_later_file_has_a_later_name() {
        let folder = tempfile::tempdir().unwrap();
        let future = folder.path().join("events.out.tfevents.4000000000.elsewhere.7");
        fs::write(&future, "").unwrap();
        fs::write(folder.path().join("events.jsonl"), "").unwrap();
        for _ in 0..3 {
            opened(folder.path());
        }
        let files = files(folder.path()).unwrap();
        assert_eq!(files[0], future);
        assert_eq!(
            files.iter().filter_map(|path| seconds(path)).collect::<Vec<_>>(),
            [4_000_000_000, 4_000_000_001, 4_000_000_002, 4_000_000_003]
        );
    }

    #[test]
    fn trouble_is_reported_once_each_time_it_begins() {
        let folder = tempfile::tempdir().unwrap();
        let event = Event::Eval { step: 1, loss: 2.0, metrics: None, averaged: false };
        let mut board = opened(&folder.path().join("none"));
        assert!(board.record(&event).unwrap().contains("there is no file for TensorBoard"));
        assert_eq!(board.record(&event), None);

        let mut board = opened(folder.path());
        let file = board.file.replace(OpenOptions::new().write(true).open("/dev/full").unwrap());
        assert!(board.record(&event).unwrap().contains("step 1 is left out of TensorBoard's file"));
        assert_eq!(board.record(&event), None);
        let full = std::mem::replace(&mut board.file, file);
        assert_eq!(board.record(&event), None, "there is room again");
        let [path] = &files(folder.path()).unwrap()[..] else { panic!("one file") };
        assert_eq!(fs::metadata(path).unwrap().len(), board.whole_bytes);
        board.file = full;
        assert!(board.record(&event).is_some(), "and none again");
    }

    #[test]
    fn numbers_and_restarts_are_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let mut board = opened(folder.path());
        let mut grows = |event: Event| {
            let before = board.whole_bytes;
            assert_eq!(board.record(&event), None);
            board.whole_bytes > before
        };
        assert!(grows(Event::Eval { step: 7, loss: f32::NAN, metrics: None, averaged: false }));
        assert!(grows(Event::Resume { step: 5 }), "content came after step 5 is void");
        assert!(!grows(Event::Warning { message: "a word".into() }));
    }
}
