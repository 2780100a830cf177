//! Random access to a remote file with buffered range requests.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::Mutex;

use super::object::Object;

/// Size of a request where as many bytes will be needed.
const REQUEST_BYTES: u64 = 2 << 20;
/// The end of a file is fetched at once: it has parquet's footer, which is usually smaller than this.
const TAIL_BYTES: u64 = 256 << 10;

/// A remote file with its most recent ranges in memory.
pub(crate) struct Ranged {
    object: Object,
    /// Most recent first.
    held: Mutex<VecDeque<BufferedRange>>,
    most_held: usize,
}

struct BufferedRange {
    at: u64,
    bytes: Vec<u8>,
}

impl BufferedRange {
    fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64
    }
}

impl Ranged {
    /// `most_held` is the number of positions that are read in turn.
    pub fn new(object: Object, most_held: usize) -> Self {
        Self { object, held: Mutex::default(), most_held }
    }

    pub fn len(&self) -> u64 {
        self.object.bytes()
    }

    /// Fills `out` with the bytes at `at`. Hints that bytes up to `until` will be read next.
    pub fn read_exact_at(&self, out: &mut [u8], at: u64, until: u64) -> io::Result<()> {
        let (mut filled, size) = (0, self.len());
        if at + out.len() as u64 > size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut held = self.held.lock().expect("no reader panics");
        while filled < out.len() {
            let next = at + filled as u64;
            if let Some(found) = held.iter().position(|held| (held.at..held.end()).contains(&next)) {
                let part = held.remove(found).expect("the range was just found");
                let from = (next - part.at) as usize;
                let count = (part.bytes.len() - from).min(out.len() - filled);
                out[filled..filled + count].copy_from_slice(&part.bytes[from..from + count]);
                filled += count;
                held.push_front(part);
                continue;
            }
            let needed = at + out.len() as u64;
            let end = needed.max(until.min(next + REQUEST_BYTES)).min(size);
            let start = match needed == size {
                true => next.min(size.saturating_sub(TAIL_BYTES)),
                false => next,
            };
            let bytes = self.object.read(start, (end - start) as usize)?;
            held.push_front(BufferedRange { at: start, bytes });
            held.truncate(self.most_held);
        }
        Ok(())
    }
}

/// Sequential reads of a remote file from an offset on.
pub(crate) struct Sequential {
    ranged: Ranged,
    at: u64,
    /// Expected end of reading, which may be exceeded.
    until: u64,
}

impl Sequential {
    pub fn new(object: Object, at: u64, until: u64) -> Self {
        Self { ranged: Ranged::new(object, 1), at, until }
    }
}

impl Read for Sequential {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.ranged.len().saturating_sub(self.at);
        let count = (out.len() as u64).min(left) as usize;
        if count == 0 {
            return Ok(0);
        }
        // Past the expected end, only the rest of a line is needed.
        let until = if self.at < self.until { self.until } else { self.at };
        let count = if self.at < until { count.min((until - self.at) as usize) } else { count.min(TAIL) };
        self.ranged.read_exact_at(&mut out[..count], self.at, until)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// Size of a request past the expected end.
const TAIL: usize = 64 << 10;
