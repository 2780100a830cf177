//! The interface between collectives and the transport of their bytes.

use std::fmt;

/// Moves bytes between ranks, without computation. All ranks must make matching calls, in the same order.
pub trait Wire: Send + Sync {
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;

    /// Sends `send[i]` to rank i and fills `receive[i]` from rank i; the rank's own slice is copied. Both have an entry
    /// for every rank, and `receive[i]` must have the length that rank i sends. Returns when everything has been
    /// received and handed over for sending.
    fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), WireError>;
}

/// The reason why an exchange failed. The wire cannot be used afterwards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WireError {
    /// The other side of a connection closed.
    Gone { rank: usize },
    /// Another rank sends a different number of bytes than this rank expects.
    Unequal { rank: usize, sent: u64, awaited: u64 },
    /// Another rank is in a different exchange.
    OutOfStep { rank: usize, theirs: u64, ours: u64 },
    /// The run failed while this rank waited; the watcher reports why.
    Failed,
    /// A system call failed.
    System { rank: usize, error: String },
}

impl fmt::Display for WireError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Gone { rank } => write!(out, "rank {rank} closed its connection during an exchange"),
            WireError::Unequal { rank, sent, awaited } => {
                write!(
                    out,
                    "rank {rank} sends {sent} bytes where {awaited} are awaited: the ranks run unequal plans"
                )
            }
            WireError::OutOfStep { rank, theirs, ours } => {
                write!(
                    out,
                    "rank {rank} is in exchange {theirs} while this rank is in {ours}: the ranks made unequal calls"
                )
            }
            WireError::Failed => write!(out, "the run failed on another rank during an exchange"),
            WireError::System { rank, error } => write!(out, "exchanging with rank {rank} failed: {error}"),
        }
    }
}

impl std::error::Error for WireError {}

/// Checks the local part of the contract of `exchange`, and copies the rank's own slice.
pub(crate) fn begin(rank: usize, ranks: usize, send: &[&[u8]], receive: &mut [&mut [u8]]) {
    assert_eq!(send.len(), ranks, "an exchange has a slice to send for every rank");
    assert_eq!(receive.len(), ranks, "an exchange has a slice to fill for every rank");
    assert_eq!(send[rank].len(), receive[rank].len(), "a rank receives from itself as much as it sends");
    receive[rank].copy_from_slice(send[rank]);
}
