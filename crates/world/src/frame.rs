//! Frames on a socket: length, kind, payload.
//!
//! The length is four bytes, little-endian, and counts only the payload; the kind is one byte.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};

/// Maximum payload in bytes: host messages are small, so a larger length is foreign or damaged.
pub const MOST_BYTES: usize = 16 << 20;

/// The maximum payload in bytes before the other side has shown that it belongs to the run.
pub const MOST_GREETING_BYTES: usize = 64 << 10;

const HEAD: usize = 5;

/// Payloads are read in pieces of this size, so that a length alone does not allocate memory.
const PIECE: usize = 64 << 10;

/// The type of a frame's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Hub to every new connection.
    Hello = 1,
    /// Rank to hub: a request to join.
    Join = 2,
    /// Hub to rank: the refusal to join, with a sentence.
    Refused = 3,
    /// Hub to rank: all ranks have joined.
    Welcome = 4,
    /// Rank to hub: its part of a call.
    Call = 5,
    /// Hub to rank: the result of a call.
    Answer = 6,
    /// Either way: a heartbeat.
    Beat = 7,
    /// Rank to hub: a failure of the rank, with a sentence. Hub to rank: the first failure of the run.
    Failure = 8,
    /// Rank to hub: how another process ended, reported by its parent.
    Account = 9,
    /// Rank to hub: the rank leaves because the run is over.
    Bye = 10,
    /// Rank to hub: the rank was asked to stop before the run began, with the reason. Hub to rank: everyone leaves for that
    /// reason.
    Stop = 11,
    /// Rank to hub: a message that rank 0 reads at its convenience. Hub to rank 0: the message, preceded by the sender's rank.
    Post = 12,
}

const KINDS: [FrameKind; 12] = [
    FrameKind::Hello,
    FrameKind::Join,
    FrameKind::Refused,
    FrameKind::Welcome,
    FrameKind::Call,
    FrameKind::Answer,
    FrameKind::Beat,
    FrameKind::Failure,
    FrameKind::Account,
    FrameKind::Bye,
    FrameKind::Stop,
    FrameKind::Post,
];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub kind: FrameKind,
    pub payload: Vec<u8>,
}

/// The reason why no frame was read.
#[derive(Debug)]
pub enum FrameError {
    /// The stream ended between two frames.
    Closed,
    /// The stream ended inside a frame.
    Cut,
    /// Nothing arrived within the socket's timeout.
    Silent,
    TooLong {
        bytes: usize,
        most: usize,
    },
    UnknownKind(u8),
    Io(io::Error),
}

impl fmt::Display for FrameError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::Closed => write!(out, "the connection closed"),
            FrameError::Cut => write!(out, "the connection closed in the middle of a message"),
            FrameError::Silent => write!(out, "nothing came"),
            FrameError::TooLong { bytes, most } => {
                write!(out, "a message of {bytes} bytes is longer than {most}")
            }
            FrameError::UnknownKind(kind) => write!(out, "{kind} is no kind of message"),
            FrameError::Io(error) => write!(out, "{error}"),
        }
    }
}

impl std::error::Error for FrameError {}

/// The bytes of a frame. Callers must keep the payload within `MOST_BYTES`.
pub fn encode(kind: FrameKind, payload: &[u8]) -> Vec<u8> {
    assert!(payload.len() <= MOST_BYTES, "a frame's payload has {} bytes", payload.len());
    let mut bytes = Vec::with_capacity(HEAD + payload.len());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.push(kind as u8);
    bytes.extend(payload);
    bytes
}

/// Writes a frame with one call, so that it travels in one packet if it fits.
pub fn write(out: &mut impl Write, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
    out.write_all(&encode(kind, payload))
}

/// Reads the next frame, with at most `most` bytes of payload.
pub fn read(from: &mut impl Read, most: usize) -> Result<Frame, FrameError> {
    let mut head = [0; HEAD];
    match from.read(&mut head[..1]) {
        Ok(0) => return Err(FrameError::Closed),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Interrupted => return read(from, most),
        Err(error) => return Err(failed(error)),
    }
    from.read_exact(&mut head[1..]).map_err(failed)?;
    let bytes = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
    if bytes > most {
        return Err(FrameError::TooLong { bytes, most });
    }
    let kind =
        KINDS.into_iter().find(|kind| *kind as u8 == head[4]).ok_or(FrameError::UnknownKind(head[4]))?;
    let mut payload = Vec::new();
    while payload.len() < bytes {
        let have = payload.len();
        payload.resize(bytes.min(have + PIECE), 0);
        from.read_exact(&mut payload[have..]).map_err(failed)?;
    }
    Ok(Frame { kind, payload })
}

fn failed(error: io::Error) -> FrameError {
    match error.kind() {
        ErrorKind::UnexpectedEof => FrameError::Cut,
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => FrameError::Closed,
        ErrorKind::WouldBlock | ErrorKind::TimedOut => FrameError::Silent,
        _ => FrameError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_read_back_as_written() {
        let mut bytes = vec![];
        for (number, kind) in KINDS.into_iter().enumerate() {
            write(&mut bytes, kind, &vec![number as u8; number * PIECE / 3]).unwrap();
        }
        let mut from = &bytes[..];
        for (number, kind) in KINDS.into_iter().enumerate() {
            let payload = vec![number as u8; number * PIECE / 3];
            assert_eq!(read(&mut from, MOST_BYTES).unwrap(), Frame { kind, payload });
        }
        assert!(matches!(read(&mut from, MOST_BYTES), Err(FrameError::Closed)));
    }

    #[test]
    fn cut_long_and_foreign_frames_are_distinguished() {
        let bytes = encode(FrameKind::Beat, b"word");
        assert!(matches!(read(&mut &bytes[..7], MOST_BYTES), Err(FrameError::Cut)));
        assert!(matches!(read(&mut &bytes[..3], MOST_BYTES), Err(FrameError::Cut)));
        assert!(matches!(read(&mut &bytes[..], 3), Err(FrameError::TooLong { bytes: 4, most: 3 })));
        assert!(matches!(
            read(&mut &b"GET / HTTP/1.1\r\n\r\n"[..], MOST_BYTES),
            Err(FrameError::TooLong { .. })
        ));
        assert!(matches!(read(&mut &[0, 0, 0, 0, 99][..], MOST_BYTES), Err(FrameError::UnknownKind(99))));
    }
}
