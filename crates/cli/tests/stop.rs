//! A run that is asked to stop, by a signal or `--max-time`, saves at the next boundary, ends with code 3, and resumes exactly: in a step,
//! in an evaluation, in a save, before the first step.

use std::fs;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use flatout_train::run::events::{self, Event, Status};

use crate::fixture::{Fixture, checkpoints, send, wait_until};
use crate::program::{execute, flatout, small_train};

/// A run that spends a visible share of its time saving: 5 MB of state, saved after every step.
fn words<'a>(run: &'a str, steps: &'a str) -> Vec<&'a str> {
    let model = ["model.width=128", "model.ffn=344", "train.batch=2", "eval.rows=0", "checkpoint.every=1"];
    small_train(&[&model[..], &[steps, "--run", run, "--resume", "auto", "--json"]].concat())
}

/// The step that a run was stopped after: it saved that step, printed it, and ended with code 3.
fn stopped_after(fixture: &Fixture, run: &str, child: &mut Child) -> u64 {
    assert_eq!(child.wait().expect("an end").code(), Some(3), "{run}");
    let events = fixture.events(run);
    let Some(Event::End(end)) = events.last() else { panic!("{run}: {:?} is last", events.last()) };
    assert_eq!(end.status, Status::Stopped);
    assert_eq!(checkpoints(&fixture.dir(run)).whole, Some(end.steps), "{run}: it saves, then ends");
    assert!(events.iter().any(|event| matches!(event, Event::Saved { step, .. } if *step == end.steps)));
    end.steps
}

#[test]
fn in_a_save() {
    let fixture = Fixture::new();
    let mut unbroken = words("unbroken", "train.steps=60");
    unbroken.push("checkpoint.every=0");
    assert_eq!(fixture.start(&unbroken).wait().expect("an end").code(), Some(0));
    for (n, signal) in ["-TERM", "-INT", "-USR1"].into_iter().enumerate() {
        let run = format!("run-{n}");
        let mut child = fixture.start(&words(&run, "train.steps=60"));
        let seen = || checkpoints(&fixture.dir(&run));
        wait_until(&mut child, || seen().whole >= Some(2) && seen().partial);
        send(signal, &child);
        let step = stopped_after(&fixture, &run, &mut child);
        assert!((2..60).contains(&step), "{signal} at step {step}");
        assert!(!checkpoints(&fixture.dir(&run)).partial, "{signal}: the save under way was finished");
        assert_eq!(
            execute(fixture.folder.path(), &["resume", &run, "checkpoint.every=0", "-q"]).code,
            Some(0)
        );
        fixture.assert_same("unbroken", &run, 60);
    }
}

#[test]
fn in_an_evaluation() {
    let fixture = Fixture::new();
    // Thousands of batches of one row, so that the signal comes before the end.
    let words = |run| {
        let evaluation = ["eval.every=3", "eval.rows=6000", "eval.micro_batch=1", "checkpoint.every=0"];
        small_train(&[&evaluation[..], &["--run", run, "--json"]].concat())
    };
    assert_eq!(fixture.start(&words("unbroken")).wait().expect("an end").code(), Some(0));
    let mut child = fixture.start(&words("run"));
    wait_until(&mut child, || events::steps(&fixture.events("run")).len() == 3);
    send("-TERM", &child);
    assert_eq!(stopped_after(&fixture, "run", &mut child), 3);
    let evals = |run: &str| -> Vec<(u64, u32)> {
        let of = |event: &Event| match event {
            Event::Eval { step, loss, .. } => Some((*step, loss.to_bits())),
            _ => None,
        };
        fixture.events(run).iter().filter_map(of).collect()
    };
    assert_eq!(evals("run"), [], "the evaluation was left in the middle");
    assert_eq!(execute(fixture.folder.path(), &["resume", "run", "-q"]).code, Some(0));
    assert_eq!(evals("run").len(), 2);
    assert_eq!(evals("run"), evals("unbroken"), "and done by the life after");
    fixture.assert_same("unbroken", "run", 6);
}

/// Whether a process handles SIGTERM; before that the signal kills it, like any program.
fn handles_signals(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = u64::from_str_radix(caught.unwrap_or("0").trim(), 16).unwrap_or(0);
    caught & (1 << (15 - 1)) != 0
}

#[test]
fn before_the_first_step() {
    const LIVES: u32 = 12;
    let fixture = Fixture::new();
    fn words(run: &str) -> Vec<&str> {
        small_train(&["eval.rows=0", "checkpoint.every=0", "--run", run, "--resume", "auto"])
    }
    assert_eq!(execute(fixture.folder.path(), &words("unbroken")).code, Some(0));
    let (mut removed, mut resumable) = (0, 0);
    for n in 0..LIVES {
        let run = format!("run-{n}");
        // Every other run exists already and is only resumed.
        let is_there = n % 2 == 1;
        if is_there {
            let cp = ["-r", "unbroken", &run];
            assert!(
                Command::new("cp")
                    .args(cp)
                    .current_dir(fixture.folder.path())
                    .status()
                    .expect("cp")
                    .success()
            );
        }
        let command = if is_there { vec!["resume", &run, "train.steps=6"] } else { words(&run) };
        let mut child = flatout(fixture.folder.path(), &command).spawn().expect("the program starts");
        let pid = child.id();
        wait_until(&mut child, || handles_signals(pid));
        // Existing runs get the signal once they are opened, the others at any moment.
        let drawn = flatout_ir::random::philox([n, 1, 0, 0], [25, 11])[0] % 15_000;
        let (after, seen) = (Duration::from_micros(u64::from(drawn)), Instant::now());
        let holder = || fs::read_to_string(fixture.dir(&run).join("lock")).unwrap_or_default();
        wait_until(&mut child, || match is_there {
            true => holder().trim() == pid.to_string(),
            false => seen.elapsed() >= after,
        });
        send("-TERM", &child);
        let output = child.wait_with_output().expect("an end");
        let result = String::from_utf8(output.stderr).expect("UTF-8");
        if result.contains("SIGTERM before the first step") {
            assert_eq!(output.status.code(), Some(3), "{result}");
            let begun = fixture.dir(&run).join("config.toml").exists();
            assert!(begun || !(is_there || fixture.dir(&run).exists()), "a run that never began is removed");
            // An existing run may not have been opened yet.
            let continues = result.contains(&format!("continue with: flatout resume {run}"));
            assert!(if is_there { begun } else { continues == begun }, "{result}");
            (removed, resumable) = (removed + u32::from(!begun), resumable + u32::from(continues));
        }
        assert!(matches!(output.status.code(), Some(0 | 3)), "{result}");
        let again = execute(fixture.folder.path(), &words(&run));
        assert_eq!(again.code, Some(0), "{}", again.err);
        fixture.assert_same("unbroken", &run, 6);
    }
    println!("of {LIVES} lives {removed} left nothing and {resumable} a run to continue");
    assert!(removed > 0 && resumable > 0, "{removed} and {resumable} were asked in time");
}

#[test]
fn while_a_tokeniser_is_trained() {
    let fixture = Fixture::new();
    let line = |i: u64| format!("{} and {} make {}.\n", i * 7919 % 104_729, i * i % 99_991, i * 31 % 65_537);
    fs::write(fixture.dir("book.txt"), (0..400_000).map(line).collect::<String>()).expect("a text");
    let words = small_train(&["data.path=book.txt", "model.vocab=8192", "--run", "run"]);
    let mut child = flatout(fixture.folder.path(), &words).spawn().expect("the program starts");
    wait_until(&mut child, || fixture.dir("run/lock").exists());
    let asked = Instant::now();
    send("-TERM", &child);
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(3));
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    let result = String::from_utf8_lossy(&output.stderr).into_owned();
    let end = "SIGTERM before the first step: nothing to save, and the run's directory is removed\n";
    let result: String = result.split_inclusive('\n').filter(|line| !line.starts_with("data ")).collect();
    assert_eq!(result, end);
    assert!(!fixture.dir("run").exists(), "nothing is left of it");
}

#[test]
fn when_its_time_is_nearly_up() {
    let fixture = Fixture::new();
    let words = small_train(&["eval.rows=0", "train.steps=1000000", "--run", "run", "--max-time", "7s"]);
    let began = Instant::now();
    let result = execute(fixture.folder.path(), &words);
    assert!(began.elapsed() < Duration::from_secs(7), "{:?}", began.elapsed());
    assert_eq!(result.code, Some(3), "{}", result.err);
    assert!(result.err.contains("--max-time: saving step "), "{}", result.err);
    let step = checkpoints(&fixture.dir("run")).whole.expect("a checkpoint");
    assert!(result.err.ends_with(&format!("stopped after step {step}; continue with: flatout resume run\n")));
    // A process without time for a step keeps what was saved.
    let result = execute(fixture.folder.path(), &["resume", "run", "--max-time", "1s"]);
    assert_eq!(
        (result.code, checkpoints(&fixture.dir("run")).whole),
        (Some(3), Some(step)),
        "{}",
        result.err
    );
    let result = execute(fixture.folder.path(), &small_train(&["--run", "other", "--max-time", "1s"]));
    assert_eq!((result.code, checkpoints(&fixture.dir("other")).whole), (Some(3), None), "{}", result.err);

    for duration in ["90", "0s", "soon"] {
        let result =
            execute(fixture.folder.path(), &small_train(&["--run", "third", "--max-time", duration]));
        assert_eq!(result.code, Some(2));
        assert!(result.err.contains(&format!("`{duration}`")), "{}", result.err);
        assert!(!fixture.dir("third").exists());
    }
}

#[test]
fn in_a_step() {
    let fixture = Fixture::new();
    let mut unbroken = words("unbroken", "train.steps=60");
    unbroken.push("checkpoint.every=0");
    assert_eq!(fixture.start(&unbroken).wait().expect("an end").code(), Some(0));
    for signal in ["-INT", "-TERM", "-USR1"] {
        let run = &signal[1..];
        let mut words = words(run, "train.steps=60");
        words.push("checkpoint.every=0");
        let mut child = fixture.start(&words);
        wait_until(&mut child, || events::steps(&fixture.events(run)).len() >= 3);
        send(signal, &child);
        assert_eq!(child.wait().expect("an end").code(), Some(3), "{signal}");
        let events = fixture.events(run);
        let [Event::Saved { step, .. }, Event::End(end)] = &events[events.len() - 2..] else {
            panic!("{signal}: it saves, then ends")
        };
        assert_eq!((end.steps, checkpoints(&fixture.dir(run)).whole), (*step, Some(*step)));
        assert_eq!(end.status, events::Status::Stopped);
        assert!((3..60).contains(step), "{signal} stopped it on its way, at step {step}");
        let resumed = execute(fixture.folder.path(), &["resume", run, "--json"]);
        assert_eq!(resumed.code, Some(0), "{}", resumed.err);
        assert!(
            resumed.out.starts_with("{\"event\":\"start\"") && resumed.out.contains("\"status\":\"done\"")
        );
        fixture.assert_same("unbroken", run, 60);
    }
}

/// The program started by `env` with a given disposition of SIGHUP, because the test runner may ignore the signal.
fn with_hangup(fixture: &Fixture, how: &str, words: &[&str]) -> Child {
    let program = env!("CARGO_BIN_EXE_flatout");
    let mut command = Command::new("env");
    command.arg(how).arg(program).args(words).current_dir(fixture.folder.path());
    command.stdout(std::process::Stdio::null()).spawn().expect("the program starts")
}

#[test]
fn a_terminal_that_goes_away_stops_a_run_unless_it_is_ignored() {
    let fixture = Fixture::new();
    let mut unbroken = words("unbroken", "train.steps=60");
    unbroken.push("checkpoint.every=0");
    assert_eq!(fixture.start(&unbroken).wait().expect("an end").code(), Some(0));
    let begun = |run: &str| events::steps(&fixture.events(run)).len() >= 3;

    let mut child = with_hangup(&fixture, "--default-signal=HUP", &words("run", "train.steps=60"));
    wait_until(&mut child, || begun("run"));
    send("-HUP", &child);
    let step = stopped_after(&fixture, "run", &mut child);
    assert!((3..60).contains(&step), "stopped at step {step}");
    assert_eq!(execute(fixture.folder.path(), &["resume", "run", "checkpoint.every=0", "-q"]).code, Some(0));
    fixture.assert_same("unbroken", "run", 60);

    // SIGHUP is ignored, as under `nohup`.
    let mut child = with_hangup(&fixture, "--ignore-signal=HUP", &words("other", "train.steps=60"));
    wait_until(&mut child, || begun("other"));
    send("-HUP", &child);
    assert_eq!(child.wait().expect("an end").code(), Some(0));
    fixture.assert_same("unbroken", "other", 60);
}

#[test]
fn a_second_interrupt_leaves_at_once_without_saving() {
    let fixture = Fixture::new();
    // A step of thousands of micro-batches, so that the signal comes before its end.
    let words = ["train", "tiny", "train.batch=65536", "train.micro_batch=8", "--run", "run", "-q"];
    let mut child = fixture.start(&words);
    wait_until(&mut child, || !fixture.events("run").is_empty());
    let asked = Instant::now();
    let status = loop {
        // Equal signals in quick succession may be delivered once, so this one is sent again.
        send("-INT", &child);
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
    };
    assert_eq!(status.code(), Some(1));
    assert!(asked.elapsed() < Duration::from_secs(5));
    assert_eq!(checkpoints(&fixture.dir("run")).whole, None);
    assert!(events::steps(&fixture.events("run")).is_empty(), "the first step was not over");
}
