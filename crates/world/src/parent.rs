//! The line between a parent process and a rank that it started: a socket in place of the rank's standard input.
//!
//! Either side writes a JSON value a line. The end of the line means that the other process is gone.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::message::Account;

/// Parent to rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Down {
    /// Rank 0 listens here.
    Address(String),
    /// Another rank of this node ended.
    Ended(Account),
    /// Another rank of this node ended because it was asked to stop.
    Stopped,
}

/// Rank to parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Up {
    /// Rank 0 listens here.
    Address(String),
    /// The rank leaves because of this failure. Rank 0 says it to the user, unless rank 0 is what was lost.
    Failed { sentence: String, is_said_by_rank_0: bool },
    /// Rank 0 has found out what the run is, for sentences about a failure of its own.
    About(String),
}

/// The writing side.
pub(crate) struct Line(Mutex<UnixStream>);

impl Line {
    pub fn new(stream: UnixStream) -> Line {
        Line(Mutex::new(stream))
    }

    /// The rank's side, and the same stream to read from.
    pub fn of_standard_input() -> io::Result<(Line, UnixStream)> {
        let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        Ok((Line::new(stream.try_clone()?), stream))
    }

    /// Tells the other side, which may be gone: then its own end of the line says so.
    pub fn tell(&self, word: &impl Serialize) {
        let mut line = serde_json::to_vec(word).expect("words of the line are names and numbers");
        line.push(b'\n');
        if let Ok(mut stream) = self.0.lock() {
            let _ = stream.write_all(&line);
        }
    }
}

/// Hands every word that comes to `take`, until the other side is gone or says something else.
pub(crate) fn listen<T: DeserializeOwned>(stream: UnixStream, mut take: impl FnMut(T)) {
    for line in BufReader::new(stream).lines() {
        let Some(word) = line.ok().and_then(|line| serde_json::from_str(&line).ok()) else { return };
        take(word);
    }
}
