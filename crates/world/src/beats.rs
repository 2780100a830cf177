//! Evaluates heartbeats: whether a rank is silent, whether the run makes progress, and whether all ranks made the same
//! collective calls.
//!
//! Time is passed in as an argument, so that tests of long stalls take no time.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::calls::Collected;
use crate::failure::{Failure, named};
use crate::message::{Beat, Member, Status};
use crate::timing::{STILL_STEPS, Timing};

/// Number of counts with hashes: the last multiple of 1, 2, 4 and so on. Ranks send heartbeats at different moments, but all
/// have passed some multiple.
const MARKS: usize = 32;
/// Number of hashes that the hub remembers for every rank, from its last heartbeats.
const HASHES: usize = 256;
/// Number of step durations from which the median is computed.
const STEPS: usize = 64;

/// The collective calls of one rank: their number, and a hash of their order.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallHash {
    count: u64,
    hash: u64,
    marks: [(u64, u64); MARKS],
}

impl CallHash {
    pub fn add(&mut self, role: &str) {
        self.count += 1;
        self.hash = xxh3_64_with_seed(role.as_bytes(), self.hash);
        let multiples = (self.count.trailing_zeros() as usize + 1).min(MARKS);
        self.marks[..multiples].fill((self.count, self.hash));
    }

    /// Each mark once, the largest count first.
    pub fn marks(&self) -> Vec<(u64, u64)> {
        let mut marks: Vec<(u64, u64)> = self.marks.into_iter().filter(|(count, _)| *count > 0).collect();
        marks.dedup();
        marks
    }
}

pub(crate) struct Beats {
    timing: Timing,
    ranks: Vec<RankState>,
    moved: Instant,
    /// The hash by number of calls, with the rank that first sent it.
    hashes: HashMap<u64, (u64, usize)>,
    /// The keys of `hashes`, the oldest first.
    counts: VecDeque<u64>,
    step_durations: VecDeque<Duration>,
}

struct RankState {
    at: Instant,
    status: Status,
    calls: u64,
    stepped: Instant,
    has_left: bool,
}

impl Beats {
    pub fn new(ranks: usize, timing: Timing, now: Instant) -> Beats {
        let heard =
            || RankState { at: now, status: Status::default(), calls: 0, stepped: now, has_left: false };
        let ranks = (0..ranks).map(|_| heard()).collect();
        let (counts, step_durations) = (VecDeque::new(), VecDeque::new());
        Beats { timing, ranks, moved: now, hashes: HashMap::new(), counts, step_durations }
    }

    /// The rank has left the run: no more heartbeats are expected of it.
    pub fn leave(&mut self, rank: usize) {
        self.ranks[rank].has_left = true;
    }

    /// Any frame of a rank is a sign of life.
    pub fn hear(&mut self, rank: usize, now: Instant) {
        self.ranks[rank].at = now;
    }

    pub fn step(&self, rank: usize) -> u64 {
        self.ranks[rank].status.step
    }

    /// Handles a heartbeat; fails if its calls differ from those of another rank.
    pub fn take(&mut self, rank: usize, beat: Beat, members: &[Member], now: Instant) -> Result<(), Failure> {
        self.hear(rank, now);
        let calls = beat.marks.first().map_or(0, |(count, _)| *count);
        let heard = &mut self.ranks[rank];
        if heard.status != beat.status || heard.calls != calls {
            self.moved = now;
        }
        if beat.status.step > heard.status.step {
            let steps = (beat.status.step - heard.status.step).min(u64::from(u32::MAX)) as u32;
            if heard.status.step > 0 {
                if self.step_durations.len() == STEPS {
                    self.step_durations.pop_front();
                }
                self.step_durations.push_back(now.duration_since(heard.stepped) / steps);
            }
            heard.stepped = now;
        }
        (heard.status, heard.calls) = (beat.status, calls);
        beat.marks.iter().try_for_each(|(count, hash)| self.compare(rank, *count, *hash, members))
    }

    fn compare(&mut self, rank: usize, count: u64, hash: u64, members: &[Member]) -> Result<(), Failure> {
        let Some((other, first)) = self.hashes.get(&count) else {
            if self.counts.len() == HASHES * self.ranks.len() {
                self.counts.pop_front().map(|oldest| self.hashes.remove(&oldest));
            }
            self.counts.push_back(count);
            self.hashes.insert(count, (hash, rank));
            return Ok(());
        };
        if *other == hash {
            return Ok(());
        }
        let sentence = format!(
            "{} and {} made unequal collective calls among their first {count}: the ranks made unequal decisions",
            members[rank].named(rank),
            members[*first].named(*first)
        );
        Err(Failure::new(Some(rank), sentence))
    }

    /// The failure that missing heartbeats or missing progress mean, if any.
    pub fn judge(&self, calls: &Collected, members: &[Member], now: Instant) -> Option<Failure> {
        let present = || self.ranks.iter().enumerate().filter(|(_, heard)| !heard.has_left);
        let silent = present().find(|(_, heard)| now.duration_since(heard.at) > self.timing.silent_after);
        if let Some((rank, heard)) = silent {
            let sentence = format!(
                "{} has given no sign of life for {} s{}: its host or its network is gone, or the process is stopped",
                members[rank].named(rank),
                now.duration_since(heard.at).as_secs(),
                at_step(heard.status.step)
            );
            return Some(Failure::new(Some(rank), sentence));
        }
        let still = now.duration_since(self.moved);
        if still <= self.patience() || present().next().is_none() {
            return None;
        }
        let position = |heard: &RankState| (heard.status.step, heard.calls);
        let (behind, ahead) =
            (present().map(|(_, heard)| position(heard)).min()?, present().map(|(_, h)| position(h)).max()?);
        let slow: Vec<usize> =
            present().filter(|(_, h)| position(h) == behind).map(|(rank, _)| rank).collect();
        let (status, seconds) = (&self.ranks[slow[0]].status, still.as_secs());
        let doing = if status.doing.is_empty() { String::new() } else { format!(" ({})", status.doing) };
        let mut sentence = if behind == ahead {
            format!("all ranks have stood still{}{doing} for {seconds} s", at_step(status.step))
        } else {
            let names: Vec<String> = slow.iter().map(|rank| members[*rank].named(*rank)).collect();
            let who = if slow.len() <= 4 { names.join(", ") } else { named(&slow) };
            let others: Vec<usize> =
                present().filter(|(_, h)| position(h) != behind).map(|(rank, _)| rank).collect();
            let (has, wait) = (
                if slow.len() == 1 { "has" } else { "have" },
                if others.len() == 1 { "waits" } else { "wait" },
            );
            format!(
                "{who} {has} stood still{}{doing} for {seconds} s, while {} {wait}{}",
                at_step(behind.0),
                named(&others),
                if ahead.0 == behind.0 { String::new() } else { at_step(ahead.0) }
            )
        };
        if let Some(waiting) = calls.waiting() {
            sentence += &format!("; {waiting}");
        }
        Some(Failure::new((slow.len() == 1).then_some(slow[0]), sentence))
    }

    /// How long the run may go without progress.
    fn patience(&self) -> Duration {
        if self.ranks.iter().all(|heard| heard.status.step == 0) {
            return self.timing.still_at_start;
        }
        let mut durations: Vec<Duration> = self.step_durations.iter().copied().collect();
        durations.sort();
        let median = durations.get(durations.len() / 2).copied().unwrap_or_default();
        self.timing.still_after.max(median * STILL_STEPS)
    }
}

/// ` at step 12`, or an empty string before the first step.
pub(crate) fn at_step(step: u64) -> String {
    if step == 0 { String::new() } else { format!(" at step {step}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(ranks: usize) -> Vec<Member> {
        let member = |rank| Member { host: "a".into(), process: 100 + rank as u32, node: None, device: None };
        (0..ranks).map(member).collect()
    }

    fn beat(step: u64, calls: &CallHash) -> Beat {
        Beat { status: Status { step, doing: "training".into(), part: 0 }, marks: calls.marks() }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_silent_rank_is_named_in_the_failure() {
        let now = Instant::now();
        let (all, calls) = (members(2), Collected::new(2));
        let mut beats = Beats::new(2, Timing::default(), now);
        beats.take(0, beat(3, &CallHash::default()), &all, now + seconds(29)).unwrap();
        beats.take(1, beat(4, &CallHash::default()), &all, now + seconds(2)).unwrap();
        assert_eq!(beats.judge(&calls, &all, now + seconds(31)), None);
        let told = beats.judge(&calls, &all, now + seconds(33)).unwrap();
        assert_eq!(told.rank, Some(1));
        assert!(
            told.sentence.starts_with("rank 1 (a, process 101) has given no sign of life for 31 s at step 4")
        );
        beats.leave(1);
        assert_eq!(beats.judge(&calls, &all, now + seconds(33)), None, "who has left is not awaited");
    }

    #[test]
    fn the_slowest_rank_is_named_on_a_stall() {
        let now = Instant::now();
        let (all, calls) = (members(3), Collected::new(3));
        let mut beats = Beats::new(3, Timing::default(), now);
        for second in 0..=130 {
            for rank in 0..3 {
                let step = if rank == 2 { 40 } else { 41 };
                beats.take(rank, beat(step, &CallHash::default()), &all, now + seconds(second)).unwrap();
            }
            let told = beats.judge(&calls, &all, now + seconds(second));
            assert_eq!(told.is_some(), second > 120, "{second}: {told:?}");
        }
        let told = beats.judge(&calls, &all, now + seconds(131)).unwrap();
        let sentence = "rank 2 (a, process 102) has stood still at step 40 (training) for 131 s, while ranks 0-1 wait at step 41";
        assert_eq!((told.rank, told.sentence.as_str()), (Some(2), sentence));
    }

    #[test]
    fn long_steps_and_the_start_get_more_time() {
        let now = Instant::now();
        let (all, calls) = (members(1), Collected::new(1));
        let mut beats = Beats::new(1, Timing::default(), now);
        beats.take(0, beat(0, &CallHash::default()), &all, now + seconds(1000)).unwrap();
        assert_eq!(beats.judge(&calls, &all, now + seconds(1001)), None, "plans may take long to compile");
        for step in 1..=5 {
            beats.take(0, beat(step, &CallHash::default()), &all, now + seconds(1000 + 60 * step)).unwrap();
        }
        for second in 0..1200 {
            beats.hear(0, now + seconds(1300 + second));
            assert_eq!(beats.judge(&calls, &all, now + seconds(1300 + second)), None, "20 steps of 60 s");
        }
        beats.hear(0, now + seconds(2501));
        assert!(beats.judge(&calls, &all, now + seconds(2501)).is_some());
    }

    #[test]
    fn unequal_calls_are_found_at_any_beat_times() {
        let now = Instant::now();
        let all = members(2);
        let roles = |n: u64| if n.is_multiple_of(9) { "apply" } else { "grad" };
        for (divergence, seen) in [(None, false), (Some(5000), true)] {
            let mut beats = Beats::new(2, Timing::default(), now);
            let mut ranks = [CallHash::default(), CallHash::default()];
            let mut told = false;
            // Rank 0 sends a heartbeat after every 700 calls, rank 1 with an offset of 400: their counts never agree.
            for call in 1..=12_000u64 {
                ranks[0].add(roles(call));
                ranks[1].add(if Some(call) == divergence { "eval" } else { roles(call) });
                if call % 700 == 0 {
                    told |= beats.take(0, beat(call, &ranks[0]), &all, now).is_err();
                } else if call % 700 == 400 {
                    told |= beats.take(1, beat(call, &ranks[1]), &all, now).is_err();
                }
                assert!(divergence.is_some_and(|at| call >= at) || !told, "call {call}");
            }
            assert_eq!(told, seen);
        }
    }

    #[test]
    fn calls_in_another_order_differ() {
        let hash = |roles: [&str; 2]| {
            let mut calls = CallHash::default();
            roles.iter().for_each(|role| calls.add(role));
            calls.marks()
        };
        assert_eq!(hash(["a", "b"]), hash(["a", "b"]));
        assert_ne!(hash(["a", "b"])[0], hash(["b", "a"])[0]);
        assert_eq!(hash(["a", "b"]).len(), 1, "after two calls, two is the last multiple of 1 and of 2");
    }
}
