//! Simulation of a plan's two queues launch by launch: the time of a run, and how much of its exchanges compute does not hide.

use std::ops::{AddAssign, Range};

use crate::plan::{Plan, Queue};

/// The simulated time of a run of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SimulatedTime {
    pub seconds: f64,
    /// The time of the compute launches alone.
    pub compute_seconds: f64,
    /// The time of the exchanges alone.
    pub wire_seconds: f64,
}

impl SimulatedTime {
    /// Time that exchanges add to a run: launches wait for them, and run beside them on fewer multiprocessors.
    pub fn exposed_seconds(&self) -> f64 {
        self.seconds - self.compute_seconds
    }

    pub fn times(self, n: f64) -> SimulatedTime {
        SimulatedTime {
            seconds: n * self.seconds,
            compute_seconds: n * self.compute_seconds,
            wire_seconds: n * self.wire_seconds,
        }
    }
}

impl AddAssign for SimulatedTime {
    fn add_assign(&mut self, other: SimulatedTime) {
        self.seconds += other.seconds;
        self.compute_seconds += other.compute_seconds;
        self.wire_seconds += other.wire_seconds;
    }
}

/// Simulates a plan whose launches take the given seconds. While an exchange runs, compute launches have this fraction of the
/// device less.
pub fn play(plan: &Plan, held_part: f64, seconds: impl IntoIterator<Item = f64>) -> SimulatedTime {
    let mut played = SimulatedTime::default();
    let takes: Vec<f64> = seconds.into_iter().collect();
    for (launch, takes) in plan.launches.iter().zip(&takes) {
        match launch.queue {
            Queue::Wire => played.wire_seconds += takes,
            Queue::Compute => played.compute_seconds += takes,
        }
    }
    played.seconds = timeline(plan, held_part, &takes).iter().map(|runs| runs.end).fold(0.0, f64::max);
    played
}

/// The start and end of each launch in such a simulation.
pub fn timeline(plan: &Plan, held_part: f64, seconds: &[f64]) -> Vec<Range<f64>> {
    let (mut now, mut wire_end) = (0.0f64, 0.0f64);
    // The start and end of each exchange, with the index of its launch.
    let mut exchanges: Vec<(usize, Range<f64>)> = vec![];
    let mut all = Vec::with_capacity(seconds.len());
    for (at, (launch, takes)) in plan.launches.iter().zip(seconds).enumerate() {
        all.push(match launch.queue {
            Queue::Wire => {
                let start = now.max(wire_end);
                wire_end = start + takes;
                exchanges.push((at, start..wire_end));
                start..wire_end
            }
            Queue::Compute => {
                if let Some(joined) = launch.joins {
                    let ends = exchanges.iter().filter(|(at, _)| *at <= joined).map(|(_, runs)| runs.end);
                    now = ends.fold(now, f64::max);
                }
                let start = now;
                now = ended(now, *takes, held_part, &exchanges);
                start..now
            }
        });
    }
    all
}

/// The end of a compute launch that begins now and is slowed while exchanges run.
fn ended(mut now: f64, mut left: f64, held_part: f64, exchanges: &[(usize, Range<f64>)]) -> f64 {
    for (_, runs) in exchanges {
        if runs.end <= now {
            continue;
        }
        let before = left.min((runs.start - now).max(0.0));
        (now, left) = (now + before, left - before);
        if left <= 0.0 {
            return now;
        }
        let beside = (runs.end - now).min(left / (1.0 - held_part));
        (now, left) = (now + beside, left - beside * (1.0 - held_part));
    }
    now + left.max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Axis;
    use crate::ops::Op;
    use crate::plan::{Launch, Role};

    /// A plan of launches, given as duration (negative for an exchange) and join.
    fn plan(launches: &[(f64, Option<usize>)]) -> Plan {
        let launch = |(seconds, joins): &(f64, Option<usize>)| {
            let op = match *seconds < 0.0 {
                true => Op::AllGather { axis: Axis::Shard, ways: 2 },
                false => Op::Rank { axis: Axis::Shard },
            };
            Launch {
                kernel: "kernel",
                queue: Queue::of(&op),
                op,
                ins: vec![],
                outs: vec![],
                workspace: None,
                path: String::new(),
                key: 0,
                flops: 0,
                joins: *joins,
            }
        };
        Plan { role: Role::Apply, launches: launches.iter().map(launch).collect(), results: vec![] }
    }

    fn played(held_part: f64, launches: &[(f64, Option<usize>)]) -> (f64, f64) {
        let played = play(&plan(launches), held_part, launches.iter().map(|(seconds, _)| seconds.abs()));
        let sums = launches.iter().fold([0.0; 2], |[c, w], (s, _)| [c + s.max(0.0), w + (-s).max(0.0)]);
        assert!(
            (played.compute_seconds - sums[0]).abs() < 1e-9 && (played.wire_seconds - sums[1]).abs() < 1e-9
        );
        let round = |x: f64| (1e6 * x).round() / 1e6;
        (round(played.seconds), round(played.exposed_seconds()))
    }

    #[test]
    fn exchanges_that_nothing_joins_overlap() {
        assert_eq!(played(0.0, &[(1.0, None), (2.0, None)]), (3.0, 0.0));
        assert_eq!(played(0.0, &[(1.0, None), (-2.0, None), (3.0, Some(1))]), (6.0, 2.0), "joined at once");
        assert_eq!(played(0.0, &[(1.0, None), (-2.0, None), (3.0, None)]), (4.0, 0.0), "hidden");
        assert_eq!(played(0.0, &[(1.0, None), (-2.0, None)]), (3.0, 2.0), "the end joins all");
        // The second exchange begins when the first has ended; the last launch waits for the first alone.
        let two = [(-1.0, None), (-2.0, None), (1.0, Some(0)), (1.0, Some(1))];
        assert_eq!(played(0.0, &two), (4.0, 2.0));
        // An exchange waits for the launches before it.
        assert_eq!(played(0.0, &[(1.0, None), (-1.0, None), (2.0, None), (-1.0, None)]), (4.0, 1.0));
    }

    #[test]
    fn timelines_have_every_launch() {
        let launches = [(1.0, None), (-2.0, None), (1.0, None), (-1.0, None), (1.0, Some(1)), (1.0, Some(3))];
        let seconds = launches.map(|(seconds, _)| f64::abs(seconds));
        let runs = timeline(&plan(&launches), 0.0, &seconds);
        assert_eq!(runs, [0.0..1.0, 1.0..3.0, 1.0..2.0, 3.0..4.0, 3.0..4.0, 4.0..5.0]);
    }

    #[test]
    fn launches_beside_an_exchange_are_slower() {
        // With half of the device for two seconds, one second of work is left over.
        assert_eq!(played(0.5, &[(-2.0, None), (3.0, None)]), (4.0, 1.0));
        assert_eq!(played(0.5, &[(-4.0, None), (1.0, None)]), (4.0, 3.0));
        assert_eq!(played(0.5, &[(-4.0, None), (1.0, None), (1.0, Some(0))]), (5.0, 3.0));
    }
}
