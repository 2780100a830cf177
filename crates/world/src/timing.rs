//! The timeouts and intervals of the protocol between ranks.

use std::time::Duration;

/// All durations of the protocol. The default is meant for clusters; tests use shorter ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Timeout for all ranks to join.
    pub join: Duration,
    /// Interval between lines that list the ranks that are still missing.
    pub say_every: Duration,
    pub beat_every: Duration,
    /// Time without a heartbeat after which a rank or the hub counts as lost.
    pub silent_after: Duration,
    /// Time without progress on any rank after which the run counts as stuck; at least `STILL_STEPS` median steps.
    pub still_after: Duration,
    /// Time without progress before the first step, while plans are compiled and data is prepared.
    pub still_at_start: Duration,
    /// Time that the parent process has to report how a rank ended whose connection closed.
    pub account: Duration,
}

/// A run counts as stuck after this number of median steps without progress.
pub const STILL_STEPS: u32 = 20;

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            join: Duration::from_secs(600),
            say_every: Duration::from_secs(10),
            beat_every: Duration::from_secs(2),
            silent_after: Duration::from_secs(30),
            still_after: Duration::from_secs(120),
            still_at_start: Duration::from_secs(30 * 60),
            account: Duration::from_millis(500),
        }
    }
}
