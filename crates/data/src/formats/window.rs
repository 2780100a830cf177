//! A bounded buffer that moves over a stream: contiguous bytes, read ahead on demand.

use std::io::{self, Read};

use super::stream::{self, Damaged};

const FIRST_BYTES: usize = 256 << 10;
/// Least size of a read, because small reads cost a call each.
const LEAST_READ_BYTES: usize = 64 << 10;

pub(super) struct Window {
    stream: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Offset of the first buffered byte in the stream.
    offset: u64,
    ended: bool,
    /// Damage of the stream after the buffered bytes.
    damage: Option<String>,
}

impl Window {
    pub fn new(stream: Box<dyn Read + Send>) -> Self {
        Self { stream, buffer: vec![0; FIRST_BYTES], start: 0, end: 0, offset: 0, ended: false, damage: None }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Offset of the first buffered byte.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether nothing follows the buffered bytes.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Reads more bytes after the buffered ones; false at the end of the stream. Only this grows the buffer, so a caller that
    /// consumes at some size bounds the memory. The error of a damaged stream repeats, and the bytes before the damage stay
    /// available.
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

    /// Buffers at least `wanted` bytes, or all that are left.
    pub fn at_least(&mut self, wanted: usize) -> io::Result<()> {
        while self.end - self.start < wanted && self.more()? {}
        Ok(())
    }

    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "only buffered bytes are consumed");
        self.start += count;
        self.offset += count as u64;
        // An unusually large record must not hold its memory for the rest of the file.
        if self.start == self.end && self.buffer.len() > 16 * FIRST_BYTES {
            (self.start, self.end) = (0, 0);
            self.buffer = vec![0; FIRST_BYTES];
        }
    }

    /// Skips a UTF-8 byte order mark, if it is buffered.
    pub fn skip_byte_order_mark(&mut self) {
        if self.bytes().starts_with(b"\xef\xbb\xbf") {
            self.consume(3);
        }
    }
}
