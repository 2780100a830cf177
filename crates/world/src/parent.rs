//! The channel between a parent process and a rank that it started: a socket in place of the rank's standard input.
//!
//! Each side writes one JSON value per line. The end of the stream means that the other process is gone.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::message::Account;

/// Messages from parent to rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToRank {
    Address(String),
    Ended(Account),
    /// Another rank of this node ended because it was asked to stop.
    Stopped,
}

/// Messages from rank to parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToParent {
    Address(String),
    /// The rank leaves because of this failure. Rank 0 prints it, unless rank 0 itself was lost.
    Failed {
        sentence: String,
        is_said_by_rank_0: bool,
    },
    /// Rank 0's description of the run, for messages about a failure of rank 0.
    About(String),
}

pub(crate) struct Channel(Mutex<UnixStream>);

impl Channel {
    pub fn new(stream: UnixStream) -> Channel {
        Channel(Mutex::new(stream))
    }

    /// The rank's writing side, and the same stream for reading.
    pub fn of_standard_input() -> io::Result<(Channel, UnixStream)> {
        let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        Ok((Channel::new(stream.try_clone()?), stream))
    }

    /// Sends a message. The other side may be gone, which the reading side reports.
    pub fn tell(&self, message: &impl Serialize) {
        let mut line = serde_json::to_vec(message).expect("messages of the channel are names and numbers");
        line.push(b'\n');
        if let Ok(mut stream) = self.0.lock() {
            let _ = stream.write_all(&line);
        }
    }
}

/// Passes every message to `take`, until the other side is gone or sends something invalid.
pub(crate) fn listen<T: DeserializeOwned>(stream: UnixStream, mut take: impl FnMut(T)) {
    for line in BufReader::new(stream).lines() {
        let Some(message) = line.ok().and_then(|line| serde_json::from_str(&line).ok()) else { return };
        take(message);
    }
}
