//! Follows a log: reads it to its end, and further as it grows.
//!
//! Only whole lines count: the last line may be half written, or left by a crash, and is read again later. A log that became
//! shorter, or is another file, is read from the beginning.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::line::Line;
use crate::part::{LogRange, Marks};
use crate::record::Record;

/// Bytes that are read at once, and the most bytes of a line: longer ones are skipped.
const CHUNK: usize = 1 << 20;
const MOST_LINE: usize = 16 << 20;

/// Counts how often any log was begun.
static GENERATION: AtomicU64 = AtomicU64::new(1);

#[derive(Debug, Default)]
pub struct Follower {
    pub record: Record,
    marks: Marks,
    /// Where the next line begins.
    offset: u64,
    size: u64,
    /// Device and inode of the file.
    identity: (u64, u64),
    /// Whether the offset is inside a line that is too long.
    is_skipping: bool,
    /// Lines that are not events.
    pub unreadable: u64,
    /// Changes when the log is read from the beginning; unique among all followers.
    pub generation: u64,
    buffer: Vec<u8>,
}

impl Follower {
    /// The share of the log that was read.
    pub fn share(&self) -> f64 {
        if self.size == 0 { 1.0 } else { (self.offset as f64 / self.size as f64).min(1.0) }
    }

    /// The range of the log that has the steps from `from` to `to`, where it is worth reading again.
    pub fn part(&self, from: u64, to: u64) -> Option<LogRange> {
        self.marks.part(from, to, self.offset)
    }

    /// Reads about `most` further bytes; returns whether there is more.
    pub fn advance(&mut self, file: &File, most: usize) -> io::Result<bool> {
        let meta = file.metadata()?;
        let identity = (meta.dev(), meta.ino());
        if identity != self.identity || meta.len() < self.offset {
            let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
            *self = Follower {
                identity,
                generation,
                buffer: std::mem::take(&mut self.buffer),
                ..Follower::default()
            };
        }
        self.size = meta.len();
        let mut read = 0;
        let result = loop {
            if read >= most {
                break Ok(true);
            }
            match self.chunk(file) {
                Ok(0) => break Ok(false),
                Ok(bytes) => read += bytes,
                Err(error) => break Err(error),
            }
        };
        // An idle follower keeps no buffer.
        self.buffer = Vec::new();
        result
    }

    /// Processes the whole lines of the next bytes; returns their number of bytes.
    fn chunk(&mut self, file: &File) -> io::Result<usize> {
        self.marks.see(self.offset, &self.record);
        let mut want = CHUNK;
        loop {
            self.buffer.resize(want, 0);
            let have = read_at(file, &mut self.buffer, self.offset)?;
            if have == 0 {
                return Ok(0);
            }
            let bytes = &self.buffer[..have];
            if self.is_skipping {
                let end = bytes.iter().position(|byte| *byte == b'\n');
                self.is_skipping = end.is_none();
                let past = end.map_or(have, |end| end + 1);
                self.offset += past as u64;
                return Ok(past);
            }
            match bytes.iter().rposition(|byte| *byte == b'\n') {
                Some(end) => {
                    let is_end = self.offset + have as u64 >= self.size && end + 1 == have;
                    let taken = self.lines(end + 1, is_end);
                    self.offset += taken as u64;
                    return Ok(taken);
                }
                None if have < want => return Ok(0),
                None if want < MOST_LINE => want = (2 * want).min(MOST_LINE),
                None => {
                    (self.is_skipping, self.unreadable) = (true, self.unreadable + 1);
                }
            }
        }
    }

    /// Processes the lines in the first `bytes` of the buffer; returns their number of bytes. The last line of a log is left for
    /// later where it is not an event: a resumed run removes what a crash left of it.
    fn lines(&mut self, bytes: usize, is_end: bool) -> usize {
        let buffer = std::mem::take(&mut self.buffer);
        let mut taken = 0;
        for line in buffer[..bytes].split_inclusive(|byte| *byte == b'\n') {
            match Line::read(line) {
                Some(read) => {
                    let before = self.record.last_step();
                    self.record.take(&read, line);
                    if self.record.last_step() < before {
                        self.marks.go_back(self.record.last_step());
                    }
                }
                None if is_end && taken + line.len() == bytes => break,
                None => self.unreadable += u64::from(!line.trim_ascii().is_empty()),
            }
            taken += line.len();
        }
        self.buffer = buffer;
        taken
    }
}

/// Reads as many bytes as there are, up to the buffer's length.
pub fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut have = 0;
    while have < buffer.len() {
        match file.read_at(&mut buffer[have..], offset + have as u64) {
            Ok(0) => break,
            Ok(read) => have += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(have)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    struct Log {
        _dir: tempfile::TempDir,
        path: std::path::PathBuf,
        follower: Follower,
    }

    impl Log {
        fn new() -> Log {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("events.jsonl");
            std::fs::write(&path, "").unwrap();
            Log { _dir: dir, path, follower: Follower::default() }
        }

        fn append(&mut self, text: &str) -> Vec<u64> {
            let mut file = std::fs::OpenOptions::new().append(true).open(&self.path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
            self.steps()
        }

        fn steps(&mut self) -> Vec<u64> {
            let file = File::open(&self.path).unwrap();
            while self.follower.advance(&file, 1 << 16).unwrap() {}
            let columns = self.follower.record.steps.since(0);
            columns["step"].as_array().unwrap().iter().filter_map(|step| step.as_u64()).collect()
        }
    }

    fn step(n: u64) -> String {
        format!("{{\"event\":\"step\",\"step\":{n},\"loss\":1.5}}\n")
    }

    #[test]
    fn half_a_line_waits_for_its_end() {
        let mut log = Log::new();
        assert_eq!(log.append(&step(1)), [1]);
        let line = step(2);
        for cut in 1..line.len() {
            assert_eq!(log.append(&line[cut - 1..cut]), [1], "cut at {cut}");
        }
        assert_eq!(log.append("\n"), [1, 2]);
        assert_eq!(log.follower.unreadable, 0);
    }

    #[test]
    fn a_log_that_is_truncated_or_replaced_is_read_again() {
        let mut log = Log::new();
        assert_eq!(log.append(&(step(1) + &step(2) + &step(3))), [1, 2, 3]);
        // A crash of the machine may leave zeros with the end of a line; a resumed run removes them.
        let whole = std::fs::metadata(&log.path).unwrap().len();
        assert_eq!(log.append("\0\0\0\0\n"), [1, 2, 3]);
        std::fs::OpenOptions::new().write(true).open(&log.path).unwrap().set_len(whole).unwrap();
        assert_eq!(log.append(&step(4)), [1, 2, 3, 4]);
        let generation = log.follower.generation;
        assert_eq!(log.follower.unreadable, 0);
        std::fs::write(&log.path, step(1)).unwrap();
        assert_eq!(log.steps(), [1]);
        assert_ne!(log.follower.generation, generation);
        std::fs::remove_file(&log.path).unwrap();
        std::fs::write(&log.path, step(1) + &step(2)).unwrap();
        assert_eq!(log.steps(), [1, 2], "another file of the same name");
    }

    #[test]
    fn lines_that_are_not_events_are_counted_and_long_ones_skipped() {
        let mut log = Log::new();
        log.append("not json\n[]\n{\"event\":7}\n{}\n\n");
        let long = "x".repeat(MOST_LINE + 5);
        assert_eq!(log.append(&(step(1) + &long)), [1]);
        assert_eq!(log.append("more of it\n"), [1]);
        assert_eq!(log.append(&step(2)), [1, 2]);
        assert_eq!(log.follower.unreadable, 5);
        assert_eq!(log.follower.share(), 1.0);
    }
}
