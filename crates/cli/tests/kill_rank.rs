//! One rank of several is killed, asked to stop or slowed down at any moment: all end with one sentence, or all stop after the same step,
//! and the run resumes with any number of ranks to the bits of an undisturbed run.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use flatout_train::run::events::{self, Event};

use crate::fixture::{Fixture, checkpoints, wait_until};
use crate::program::execute;
use crate::ranks_train::{TEXT, children, send_to, wait_for, words};

const KILLS: u64 = 20;
const STEPS: u64 = 150;

/// The longest time until all ranks have ended after a kill.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// The command that begins or continues the run, which is saving most of the time.
fn begin(run: &str, ranks: usize, steps: u64) -> Vec<String> {
    let ranks = ranks.to_string();
    let mut all: Vec<String> = words(TEXT, run, &ranks).into_iter().map(String::from).collect();
    let own =
        [&format!("train.steps={steps}"), "schedule.horizon_steps=150", "checkpoint.every=1", "eval.rows=0"];
    all.extend(own.into_iter().chain(["--resume", "auto"]).map(String::from));
    all
}

fn strs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Four random numbers for a kill.
fn drawn(kill: u64) -> [u32; 4] {
    flatout_ir::random::philox([kill as u32, 3, 0, 0], [25, 11])
}

/// The process numbers of a parent's ranks, once all have started.
fn ranks_of(parent: &mut Child, ranks: usize) -> Vec<u32> {
    let id = parent.id();
    wait_until(parent, || children(id).len() == ranks);
    children(id)
}

/// No process gets further than its share of the steps, so that every kill meets a running process.
#[test]
fn kills_of_one_rank_leave_no_trace() {
    let fixture = Fixture::new();
    let unbroken = begin("unbroken", 1, STEPS);
    assert_eq!(execute(fixture.folder.path(), &strs(&unbroken)).code, Some(0));
    let (run, mut before_steps, mut slowest) = (fixture.dir("broken"), 0, Duration::ZERO);
    for kill in 0..KILLS {
        let [victim, moment, step, ranks] = drawn(kill);
        let whole = checkpoints(&run).whole.unwrap_or(0);
        let share = (STEPS - 30).saturating_sub(whole) / (KILLS - kill);
        let furthest = whole + 1 + u64::from(step) % (share + 1);
        // Every third kill comes at the start, the others during the steps.
        let after = Duration::from_micros(u64::from(moment) % 800_000);
        let mut child = fixture.start(&strs(&begin("broken", 4, STEPS)));
        let all = ranks_of(&mut child, 4);
        let born = Instant::now();
        wait_until(&mut child, || {
            (kill % 3 == 0 && born.elapsed() >= after) || checkpoints(&run).whole >= Some(furthest)
        });
        before_steps += u64::from(checkpoints(&run).whole.unwrap_or(0) == whole);
        let killed = Instant::now();
        send_to("-KILL", all[victim as usize % 4]);
        let (code, stderr) = wait_for(child, GONE_WITHIN);
        slowest = slowest.max(killed.elapsed());
        assert_eq!((code, stderr.lines().count()), (Some(1), 1), "kill {kill}: {stderr}");
        assert!(
            stderr.starts_with("flatout: rank ") && stderr.contains("was killed by signal 9 (SIGKILL)"),
            "{stderr}"
        );
        let is_there = |rank: &u32| fs::exists(format!("/proc/{rank}")).unwrap_or(true);
        assert!(!all.iter().any(is_there), "kill {kill}: all are gone");
        if checkpoints(&run).whole.is_some() {
            assert!(stderr.ends_with("; continue with: flatout resume broken --ranks 4\n"), "{stderr}");
        }
        // Some continue with fewer ranks, up to another step.
        if kill % 4 == 3 {
            let steps = checkpoints(&run).whole.unwrap_or(0) + 2;
            let fewer = begin("broken", [1, 2][ranks as usize % 2], steps);
            let result = execute(fixture.folder.path(), &strs(&fewer));
            assert_eq!(result.code, Some(0), "kill {kill}: {}", result.err);
        }
    }
    println!(
        "{KILLS} kills, {before_steps} of them before a step was saved; the slowest end took {slowest:?}"
    );
    let result = execute(fixture.folder.path(), &strs(&begin("broken", 2, STEPS)));
    assert_eq!(result.code, Some(0), "{}", result.err);
    fixture.assert_same("unbroken", "broken", STEPS);
}

/// The parent names the run if rank 0, which made its folder, cannot.
#[test]
fn a_killed_rank_0_of_a_run_without_a_name_leaves_the_command_that_continues() {
    let fixture = Fixture::new();
    let mut all = words(TEXT, "x", "2");
    all.retain(|word| !["--run", "x"].contains(word));
    all.extend(["train.steps=5000", "checkpoint.every=1", "eval.rows=0"]);
    let mut child = fixture.start(&all);
    wait_until(&mut child, || checkpoints(&fixture.dir("runs/tiny-1")).whole.is_some());
    send_to("-KILL", children(child.id())[0]);
    let (code, stderr) = wait_for(child, GONE_WITHIN);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.starts_with("flatout: rank 0 (") && stderr.contains("; the newest whole checkpoint is step "),
        "{stderr}"
    );
    assert!(stderr.ends_with("; continue with: flatout resume runs/tiny-1 --ranks 2\n"), "{stderr}");
}

/// The reference scores answers before the first step, which takes long enough to be stopped in.
#[test]
fn one_rank_that_is_asked_before_the_first_step_stops_all() {
    let fixture = Fixture::new();
    for (round, signal) in ["-TERM", "-USR1"].into_iter().enumerate() {
        let run = format!("run-{round}");
        let answers = "tiny data.task=preference model.context=64 data.synthetic_rows=6000";
        let mut all = words(answers, &run, "4");
        all.retain(|word| *word != "-q");
        let mut child = fixture.start(&all);
        let ranks = ranks_of(&mut child, 4);
        wait_until(&mut child, || fixture.dir(&run).join("lock").exists());
        send_to(signal, ranks[1 + round]);
        let (code, stderr) = wait_for(child, GONE_WITHIN);
        assert_eq!(code, Some(3), "{stderr}");
        let result = format!("SIG{} before the first step: nothing to save", &signal[1..]);
        assert_eq!(stderr.lines().filter(|line| line.starts_with(&result)).count(), 1, "{stderr}");
        assert!(!stderr.contains("flatout: "), "{stderr}");
        let kept = checkpoints(&fixture.dir(&run));
        assert!(kept.whole.is_none() && !kept.partial, "nothing is saved before the first step");
    }
}

/// A rank that is stopped and continued repeatedly computes slower than the others.
#[test]
fn a_rank_that_stays_behind_is_named_once() {
    let fixture = Fixture::new();
    let mut all = words(TEXT, "run", "2");
    all.extend([
        "model.width=64",
        "train.batch=64",
        "train.steps=100000",
        "checkpoint.every=0",
        "eval.rows=0",
    ]);
    let mut child = fixture.start(&all);
    let slowed = ranks_of(&mut child, 2)[1];
    wait_until(&mut child, || events::steps(&fixture.events("run")).len() >= 5);
    // It runs for much less than a step at a time, with pauses as long as a step.
    let steps = events::steps(&fixture.events("run"));
    let fastest = steps.iter().map(|step| step.step_ms).fold(f64::INFINITY, f64::min);
    let step = Duration::from_secs_f64(fastest / 1e3);
    let warnings = || {
        let events = fixture.events("run").into_iter();
        let warned = events.filter_map(|event| match event {
            Event::Warning { message } if message.contains("is slow: ") => Some(message),
            _ => None,
        });
        warned.collect::<Vec<String>>()
    };
    let last_step = || events::steps(&fixture.events("run")).last().map_or(0, |step| step.step);
    // It stays slow for as many steps again as a warning takes, and is not named again.
    let (began, mut until) = (Instant::now(), None);
    while until.is_none_or(|until| last_step() < until) {
        assert!(began.elapsed() < Duration::from_secs(150), "no rank is reported as slow");
        for _ in 0..10 {
            send_to("-STOP", slowed);
            std::thread::sleep(step);
            send_to("-CONT", slowed);
            std::thread::sleep(step / 5);
        }
        until = until.or_else(|| (!warnings().is_empty()).then(|| last_step() + 25));
    }
    send_to("-TERM", slowed);
    let (code, result) = wait_for(child, Duration::from_secs(20));
    assert_eq!(code, Some(3), "{result}");
    let named = warnings();
    assert_eq!(named.len(), 1, "{named:?}");
    assert!(named[0].starts_with("rank 1 (") && named[0].contains(&format!("process {slowed}")), "{named:?}");
    let steps = events::steps(&fixture.events("run"));
    let times = steps.last().and_then(|step| step.ranks.clone()).expect("times of ranks");
    assert!(times.step.is_some() && times.data_wait_ms.is_some() && times.wire_ms.is_some(), "{times:?}");
}
