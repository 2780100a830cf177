//! The first failure of a run, which every rank is told.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason why all ranks leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that failed, if it was a single one.
    pub rank: Option<usize>,
    /// A complete sentence without its full stop, which names rank, host and process.
    pub sentence: String,
    /// Whether this process prints the sentence: rank 0; or, if rank 0 is gone, the first rank of each node without a parent
    /// process.
    #[serde(skip)]
    pub is_mine_to_say: bool,
}

impl Failure {
    pub(crate) fn new(rank: Option<usize>, sentence: impl Into<String>) -> Failure {
        Failure { rank, sentence: sentence.into(), is_mine_to_say: false }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.sentence)
    }
}

impl std::error::Error for Failure {}

/// Ranks as spans for people: `3, 8-15`.
pub(crate) fn listed(ranks: impl IntoIterator<Item = usize>) -> String {
    let mut spans: Vec<(usize, usize)> = vec![];
    for rank in ranks {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => spans.push((rank, rank)),
        }
    }
    let show = |(first, last): &(usize, usize)| match last - first {
        0 => format!("{first}"),
        _ => format!("{first}-{last}"),
    };
    spans.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// `rank 3` or `ranks 3, 8-15`.
pub(crate) fn named(ranks: &[usize]) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", listed(ranks.iter().copied()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_as_spans() {
        assert_eq!(listed([3, 8, 9, 10, 15]), "3, 8-10, 15");
        assert_eq!(named(&[7]), "rank 7");
        assert_eq!(named(&[1, 2]), "ranks 1-2");
    }
}
