//! A bounded view that moves over a stream: contiguous bytes, read ahead as asked for.

use std::io::{self, Read};

use super::stream::{self, Damaged};

const FIRST_BYTES: usize = 256 << 10;
/// Less than this is not asked of a stream: small reads cost a call each.
const LEAST_READ_BYTES: usize = 64 << 10;

pub(super) struct Window {
    stream: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Of the first byte in view, in the stream.
    offset: u64,
    ended: bool,
    /// The damage of the stream behind the bytes in view.
    damage: Option<String>,
}

impl Window {
    pub fn new(stream: Box<dyn Read + Send>) -> Self {
        Self { stream, buffer: vec![0; FIRST_BYTES], start: 0, end: 0, offset: 0, ended: false, damage: None }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Of the first byte in view.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether nothing follows the bytes in view.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Brings more into view behind what is there; false at the end of the stream. The view grows only by this, so
    /// whoever consumes at some size bounds the memory. A stream that is damaged stays so: the error comes again, and
    /// what was in view before it still is.
    pub fn more(&mut self) -> io::Result<bool> {
        if let Some(damage) = &self.damage {
            return Err(stream::damaged(damage.clone()));
        }
        if self.ended {
            return Ok(false);
        }
        if self.buffer.len() - self.end < LEAST_READ_BYTES {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            if self.buffer.len() - self.end < LEAST_READ_BYTES {
                self.buffer.resize(self.buffer.len() * 2, 0);
            }
        }
        loop {
            match self.stream.read(&mut self.buffer[self.end..]) {
                Ok(0) => {
                    self.ended = true;
                    return Ok(false);
                }
                Ok(read) => {
                    self.end += read;
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let damage = error.get_ref().and_then(|inner| inner.downcast_ref::<Damaged>());
                    self.damage = damage.map(|damage| damage.0.clone());
                    return Err(error);
                }
            }
        }
    }

    /// Brings at least `wanted` bytes into view, or all there are.
    pub fn at_least(&mut self, wanted: usize) -> io::Result<()> {
        while self.end - self.start < wanted && self.more()? {}
        Ok(())
    }

    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "only bytes in view are consumed");
        self.start += count;
        self.offset += count as u64;
        // A record of unusual size must not hold its memory for the rest of the file.
        if self.start == self.end && self.buffer.len() > 16 * FIRST_BYTES {
            (self.start, self.end) = (0, 0);
            self.buffer = vec![0; FIRST_BYTES];
        }
    }

    /// Steps over the mark some programs write before UTF-8, where it is in view.
    pub fn skip_mark(&mut self) {
        if self.bytes().starts_with(b"\xef\xbb\xbf") {
            self.consume(3);
        }
    }
}
