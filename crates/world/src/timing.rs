//! How long ranks wait for one another.

use std::time::Duration;

/// Every duration of the protocol. The default is meant for clusters; tests take shorter ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// For all ranks to join.
    pub join: Duration,
    /// Between two lines that say which ranks are still missing.
    pub say_every: Duration,
    /// Between two heartbeats.
    pub beat_every: Duration,
    /// Without a heartbeat, after which a rank or the hub counts as lost.
    pub silent_after: Duration,
    /// Without progress on any rank, after which the run counts as stuck; at least `STILL_STEPS` median steps.
    pub still_after: Duration,
    /// The same before the first step, while plans are compiled and data is prepared.
    pub still_at_start: Duration,
    /// For the parent process to say how a rank ended whose connection closed.
    pub account: Duration,
}

/// A run is stuck when nothing moved for this number of median steps.
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
