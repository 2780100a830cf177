//! A run that is asked to stop, by a signal or `--max-time`, saves at the next boundary, leaves with code 3, and goes on
//! exactly: in a step, in an evaluation, in a save, before the first step.

use std::fs;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use flatout_train::run::events::{self, Event, Status};

use crate::program::{flatout, say, small_train};
use crate::scene::{Scene, checkpoints, send, wait_until};

/// A model of which a save takes a visible share of the time: 5 MB of state, saved after every step.
fn words<'a>(run: &'a str, steps: &'a str) -> Vec<&'a str> {
    let model = ["model.width=128", "model.ffn=344", "train.batch=2", "eval.rows=0", "checkpoint.every=1"];
    small_train(&[&model[..], &[steps, "--run", run, "--resume", "auto", "--json"]].concat())
}

/// The step a run was stopped after: it saved that, said so, and left with code 3.
fn stopped_after(scene: &Scene, run: &str, child: &mut Child) -> u64 {
    assert_eq!(child.wait().expect("an end").code(), Some(3), "{run}");
    let events = scene.events(run);
    let Some(Event::End(end)) = events.last() else { panic!("{run}: {:?} is last", events.last()) };
    assert_eq!(end.status, Status::Stopped);
    assert_eq!(checkpoints(&scene.dir(run)).whole, Some(end.steps), "{run}: it saves, then ends");
    assert!(events.iter().any(|event| matches!(event, Event::Saved { step, .. } if *step == end.steps)));
    end.steps
}

#[test]
fn in_a_save() {
    let scene = Scene::new();
    let mut unbroken = words("unbroken", "train.steps=60");
    unbroken.push("checkpoint.every=0");
    assert_eq!(scene.start(&unbroken).wait().expect("an end").code(), Some(0));
    for (n, signal) in ["-TERM", "-INT", "-USR1"].into_iter().enumerate() {
        let run = format!("run-{n}");
        let mut child = scene.start(&words(&run, "train.steps=60"));
        let seen = || checkpoints(&scene.dir(&run));
        wait_until(&mut child, || seen().whole >= Some(2) && seen().partial);
        send(signal, &child);
        let step = stopped_after(&scene, &run, &mut child);
        assert!((2..60).contains(&step), "{signal} at step {step}");
        assert!(!checkpoints(&scene.dir(&run)).partial, "{signal}: the save under way was finished");
        assert_eq!(say(scene.folder.path(), &["resume", &run, "checkpoint.every=0", "-q"]).code, Some(0));
        scene.assert_same("unbroken", &run, 60);
    }
}

#[test]
fn in_an_evaluation() {
    let scene = Scene::new();
    // Thousands of batches of one row: nobody waits for the end of it.
    let words = |run| {
        let evaluation = ["eval.every=3", "eval.rows=6000", "eval.micro_batch=1", "checkpoint.every=0"];
        small_train(&[&evaluation[..], &["--run", run, "--json"]].concat())
    };
    assert_eq!(scene.start(&words("unbroken")).wait().expect("an end").code(), Some(0));
    let mut child = scene.start(&words("run"));
    wait_until(&mut child, || events::steps(&scene.events("run")).len() == 3);
    send("-TERM", &child);
    assert_eq!(stopped_after(&scene, "run", &mut child), 3);
    let evals = |run: &str| -> Vec<(u64, u32)> {
        let of = |event: &Event| match event {
            Event::Eval { step, loss, .. } => Some((*step, loss.to_bits())),
            _ => None,
        };
        scene.events(run).iter().filter_map(of).collect()
    };
    assert_eq!(evals("run"), [], "the evaluation was left in the middle");
    assert_eq!(say(scene.folder.path(), &["resume", "run", "-q"]).code, Some(0));
    assert_eq!(evals("run").len(), 2);
    assert_eq!(evals("run"), evals("unbroken"), "and done by the life after");
    scene.assert_same("unbroken", "run", 6);
}

/// Whether a process has taken over SIGTERM: before that it dies of it, as every program does.
fn handles_signals(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = u64::from_str_radix(caught.unwrap_or("0").trim(), 16).unwrap_or(0);
    caught & (1 << (15 - 1)) != 0
}

#[test]
fn before_the_first_step() {
    const LIVES: u32 = 12;
    let scene = Scene::new();
    fn words(run: &str) -> Vec<&str> {
        small_train(&["eval.rows=0", "checkpoint.every=0", "--run", run, "--resume", "auto"])
    }
    assert_eq!(say(scene.folder.path(), &words("unbroken")).code, Some(0));
    let (mut removed, mut resumable) = (0, 0);
    for n in 0..LIVES {
        let run = format!("run-{n}");
        // Every other one is there already and only starts again.
        let is_there = n % 2 == 1;
        if is_there {
            let cp = ["-r", "unbroken", &run];
            assert!(
                Command::new("cp").args(cp).current_dir(scene.folder.path()).status().expect("cp").success()
            );
        }
        let command = if is_there { vec!["resume", &run, "train.steps=6"] } else { words(&run) };
        let mut child = flatout(scene.folder.path(), &command).spawn().expect("the program starts");
        let pid = child.id();
        wait_until(&mut child, || handles_signals(pid));
        // Those that are there are asked once they are taken up, the others at any moment.
        let drawn = flatout_ir::random::philox([n, 1, 0, 0], [25, 11])[0] % 15_000;
        let (after, seen) = (Duration::from_micros(u64::from(drawn)), Instant::now());
        let holder = || fs::read_to_string(scene.dir(&run).join("lock")).unwrap_or_default();
        wait_until(&mut child, || match is_there {
            true => holder().trim() == pid.to_string(),
            false => seen.elapsed() >= after,
        });
        send("-TERM", &child);
        let output = child.wait_with_output().expect("an end");
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        if said.contains("SIGTERM before the first step") {
            assert_eq!(output.status.code(), Some(3), "{said}");
            let begun = scene.dir(&run).join("config.toml").exists();
            assert!(begun || !(is_there || scene.dir(&run).exists()), "a run that never began is removed");
            // One that was there may not have been looked at yet.
            let continues = said.contains(&format!("continue with: flatout resume {run}"));
            assert!(if is_there { begun } else { continues == begun }, "{said}");
            (removed, resumable) = (removed + u32::from(!begun), resumable + u32::from(continues));
        }
        assert!(matches!(output.status.code(), Some(0 | 3)), "{said}");
        let again = say(scene.folder.path(), &words(&run));
        assert_eq!(again.code, Some(0), "{}", again.err);
        scene.assert_same("unbroken", &run, 6);
    }
    println!("of {LIVES} lives {removed} left nothing and {resumable} a run to continue");
    assert!(removed > 0 && resumable > 0, "{removed} and {resumable} were asked in time");
}

#[test]
fn while_a_tokeniser_is_trained() {
    let scene = Scene::new();
    let line = |i: u64| format!("{} and {} make {}.\n", i * 7919 % 104_729, i * i % 99_991, i * 31 % 65_537);
    fs::write(scene.dir("book.txt"), (0..400_000).map(line).collect::<String>()).expect("a text");
    let words = small_train(&["data.path=book.txt", "model.vocab=8192", "--run", "run"]);
    let mut child = flatout(scene.folder.path(), &words).spawn().expect("the program starts");
    wait_until(&mut child, || scene.dir("run/lock").exists());
    let asked = Instant::now();
    send("-TERM", &child);
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(3));
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let end = "SIGTERM before the first step: nothing to save, and the run's directory is removed\n";
    let said: String = said.split_inclusive('\n').filter(|line| !line.starts_with("data ")).collect();
    assert_eq!(said, end);
    assert!(!scene.dir("run").exists(), "nothing is left of it");
}

#[test]
fn when_its_time_is_nearly_up() {
    let scene = Scene::new();
    let words = small_train(&["eval.rows=0", "train.steps=1000000", "--run", "run", "--max-time", "7s"]);
    let began = Instant::now();
    let said = say(scene.folder.path(), &words);
    assert!(began.elapsed() < Duration::from_secs(7), "{:?}", began.elapsed());
    assert_eq!(said.code, Some(3), "{}", said.err);
    assert!(said.err.contains("--max-time: saving step "), "{}", said.err);
    let step = checkpoints(&scene.dir("run")).whole.expect("a checkpoint");
    assert!(said.err.ends_with(&format!("stopped after step {step}; continue with: flatout resume run\n")));
    // A life without time for a step keeps what there is.
    let said = say(scene.folder.path(), &["resume", "run", "--max-time", "1s"]);
    assert_eq!((said.code, checkpoints(&scene.dir("run")).whole), (Some(3), Some(step)), "{}", said.err);
    let said = say(scene.folder.path(), &small_train(&["--run", "other", "--max-time", "1s"]));
    assert_eq!((said.code, checkpoints(&scene.dir("other")).whole), (Some(3), None), "{}", said.err);

    for duration in ["90", "0s", "soon"] {
        let said = say(scene.folder.path(), &small_train(&["--run", "third", "--max-time", duration]));
        assert_eq!(said.code, Some(2));
        assert!(said.err.contains(&format!("`{duration}`")), "{}", said.err);
        assert!(!scene.dir("third").exists());
    }
}

#[test]
fn in_a_step() {
    let scene = Scene::new();
    let mut unbroken = words("unbroken", "train.steps=60");
    unbroken.push("checkpoint.every=0");
    assert_eq!(scene.start(&unbroken).wait().expect("an end").code(), Some(0));
    for signal in ["-INT", "-TERM", "-USR1"] {
        let run = &signal[1..];
        let mut words = words(run, "train.steps=60");
        words.push("checkpoint.every=0");
        let mut child = scene.start(&words);
        wait_until(&mut child, || events::steps(&scene.events(run)).len() >= 3);
        send(signal, &child);
        assert_eq!(child.wait().expect("an end").code(), Some(3), "{signal}");
        let events = scene.events(run);
        let [Event::Saved { step, .. }, Event::End(end)] = &events[events.len() - 2..] else {
            panic!("{signal}: it saves, then ends")
        };
        assert_eq!((end.steps, checkpoints(&scene.dir(run)).whole), (*step, Some(*step)));
        assert_eq!(end.status, events::Status::Stopped);
        assert!((3..60).contains(step), "{signal} stopped it on its way, at step {step}");
        let resumed = say(scene.folder.path(), &["resume", run, "--json"]);
        assert_eq!(resumed.code, Some(0), "{}", resumed.err);
        assert!(
            resumed.out.starts_with("{\"event\":\"start\"") && resumed.out.contains("\"status\":\"done\"")
        );
        scene.assert_same("unbroken", run, 60);
    }
}

/// The program as `env` starts it, which says what becomes of SIGHUP: whoever runs tests may ignore it.
fn with_hangup(scene: &Scene, how: &str, words: &[&str]) -> Child {
    let program = env!("CARGO_BIN_EXE_flatout");
    let mut command = Command::new("env");
    command.arg(how).arg(program).args(words).current_dir(scene.folder.path());
    command.stdout(std::process::Stdio::null()).spawn().expect("the program starts")
}

#[test]
fn a_terminal_that_goes_away_stops_a_run_unless_it_is_ignored() {
    let scene = Scene::new();
    let mut unbroken = words("unbroken", "train.steps=60");
    unbroken.push("checkpoint.every=0");
    assert_eq!(scene.start(&unbroken).wait().expect("an end").code(), Some(0));
    let begun = |run: &str| events::steps(&scene.events(run)).len() >= 3;

    let mut child = with_hangup(&scene, "--default-signal=HUP", &words("run", "train.steps=60"));
    wait_until(&mut child, || begun("run"));
    send("-HUP", &child);
    let step = stopped_after(&scene, "run", &mut child);
    assert!((3..60).contains(&step), "stopped at step {step}");
    assert_eq!(say(scene.folder.path(), &["resume", "run", "checkpoint.every=0", "-q"]).code, Some(0));
    scene.assert_same("unbroken", "run", 60);

    // As under `nohup`.
    let mut child = with_hangup(&scene, "--ignore-signal=HUP", &words("other", "train.steps=60"));
    wait_until(&mut child, || begun("other"));
    send("-HUP", &child);
    assert_eq!(child.wait().expect("an end").code(), Some(0));
    scene.assert_same("unbroken", "other", 60);
}

#[test]
fn a_second_interrupt_leaves_at_once_without_saving() {
    let scene = Scene::new();
    // A step of thousands of micro-batches: nobody waits for its end.
    let words = ["train", "tiny", "train.batch=65536", "train.micro_batch=8", "--run", "run", "-q"];
    let mut child = scene.start(&words);
    wait_until(&mut child, || !scene.events("run").is_empty());
    let asked = Instant::now();
    let status = loop {
        // Signals of one number that come too soon after one another count once, so this one comes again.
        send("-INT", &child);
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
    };
    assert_eq!(status.code(), Some(1));
    assert!(asked.elapsed() < Duration::from_secs(5));
    assert_eq!(checkpoints(&scene.dir("run")).whole, None);
    assert!(events::steps(&scene.events("run")).is_empty(), "the first step was not over");
}
