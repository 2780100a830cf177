//! Payloads of frames: greetings, heartbeats and failures as JSON, calls as a short JSON head followed by bytes.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Part of every greeting, so that the hub and its ranks recognise each other among other programs that listen or connect.
pub const MAGIC: &str = "flatout world";
/// Incremented with every change of the messages.
pub const PROTOCOL: u32 = 2;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub magic: String,
    /// Distinguishes runs on one host.
    pub label: String,
}

/// A rank's request to join.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Join {
    pub magic: String,
    pub protocol: u32,
    /// The program's version: different programs do not compute alike.
    pub version: String,
    pub rank: usize,
    pub ranks: usize,
    pub secret: Option<String>,
    pub member: Member,
}

/// A rank as the others see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub host: String,
    pub process: u32,
    /// Number of its node, if its launcher provides one.
    pub node: Option<usize>,
    /// The device it computes on, if it is worth naming.
    pub device: Option<String>,
}

impl Member {
    /// `rank 5 (gpu-b, GPU 1, process 4242)`.
    pub fn named(&self, rank: usize) -> String {
        let device = self.device.as_ref().map(|device| format!("{device}, ")).unwrap_or_default();
        format!("rank {rank} ({}, {device}process {})", self.host, self.process)
    }
}

/// The node of every rank, numbered in order of ranks. Nodes are distinguished by the number from their launcher, or by host.
pub(crate) fn nodes(members: &[Member]) -> Vec<usize> {
    let mut seen: Vec<(Option<usize>, &str)> = vec![];
    let mut numbers = vec![];
    for member in members {
        let key = (member.node, if member.node.is_some() { "" } else { member.host.as_str() });
        let number = seen.iter().position(|other| *other == key).unwrap_or(seen.len());
        if number == seen.len() {
            seen.push(key);
        }
        numbers.push(number);
    }
    numbers
}

/// Sent once all ranks have joined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// A number that only the ranks of this run know.
    pub session: u64,
    /// By rank.
    pub members: Vec<Member>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The step it has reached; 0 before the first.
    pub step: u64,
    /// Its activity, as in `training`, `evaluating`, `compiling`.
    pub doing: String,
    /// The progress within that activity, as any count that grows.
    pub part: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Beat {
    pub status: Status,
    /// Hashes of the collective calls after some numbers of calls, the largest number first.
    pub marks: Vec<(u64, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub sentence: String,
    /// Another rank to which the connection was lost: its parent may know more, and its report takes precedence.
    pub about: Option<usize>,
}

/// How another process ended, reported by its parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    pub rank: usize,
    pub process: u32,
    /// `was killed by signal 9`, `ended with code 101`.
    pub how: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    Broadcast,
    Gather,
    Agree,
    Barrier,
}

/// The identity of a call. Calls of one line are counted, and every rank makes the same ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    pub line: String,
    pub count: u64,
    pub op: Op,
    pub name: String,
}

pub fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("messages have names and numbers only")
}

pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

pub fn join_call(head: &Head, bytes: &[u8]) -> Vec<u8> {
    let head = json(head);
    let mut all = Vec::with_capacity(4 + head.len() + bytes.len());
    all.extend((head.len() as u32).to_le_bytes());
    all.extend(head);
    all.extend(bytes);
    all
}

pub fn split_call(payload: &[u8]) -> Option<(Head, &[u8])> {
    let (head, bytes) = split_part(payload)?;
    Some((parse(head)?, bytes))
}

/// The parts of a gather, each preceded by its length.
pub fn join_parts<'a>(parts: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut all = vec![];
    for part in parts {
        all.extend((part.len() as u32).to_le_bytes());
        all.extend(part);
    }
    all
}

pub fn split_parts(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut parts = vec![];
    while !bytes.is_empty() {
        let (part, rest) = split_part(bytes)?;
        parts.push(part.to_vec());
        bytes = rest;
    }
    Some(parts)
}

fn split_part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_distinguished_by_number_or_host() {
        let member = |host: &str, node| Member { host: host.into(), process: 1, node, device: None };
        let by_host = ["a", "b", "a", "c", "b"].map(|host| member(host, None));
        assert_eq!(nodes(&by_host), [0, 1, 0, 2, 1]);
        let by_number = [0, 0, 1, 1].map(|node| member("a", Some(node)));
        assert_eq!(nodes(&by_number), [0, 0, 1, 1]);
    }
}
