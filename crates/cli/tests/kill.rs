//! Stop anywhere, resume exactly: the program killed at fifty moments, many of them inside a save, and asked to stop by
//! signals, ends with the losses and the weights of a run nobody disturbed.

mod program;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use flatout_train::events::{self, Event};
use program::{flatout, say, small_train};

const KILLS: u32 = 50;
const INSIDE_A_SAVE: u32 = 15;
/// More than fifty lives get through, so that every kill meets a living process.
const STEPS: u64 = 320;

/// A model of which a save takes a visible share of the time: 5 MB of state, saved after every step.
fn words<'a>(run: &'a str, steps: &'a str) -> Vec<&'a str> {
    let model = ["model.width=128", "model.ffn=344", "train.batch=2", "eval.rows=0", "checkpoint.every=1"];
    small_train(&[&model[..], &[steps, "--run", run, "--resume", "auto", "--json"]].concat())
}

struct Scene {
    folder: tempfile::TempDir,
}

impl Scene {
    fn new() -> Scene {
        Scene { folder: tempfile::tempdir().expect("a folder") }
    }

    fn start(&self, words: &[&str]) -> Child {
        flatout(self.folder.path(), words).stdout(Stdio::null()).spawn().expect("the program starts")
    }

    fn dir(&self, run: &str) -> PathBuf {
        self.folder.path().join(run)
    }

    fn events(&self, run: &str) -> Vec<Event> {
        events::read(&self.dir(run).join("events.jsonl")).unwrap_or_default()
    }

    /// The bits of every step's loss, where a later line wins.
    fn losses(&self, run: &str) -> Vec<(u64, u32)> {
        events::steps(&self.events(run)).iter().map(|step| (step.step, step.loss.to_bits())).collect()
    }

    /// All state at a step: weights, moments, counters, cursor.
    fn state(&self, run: &str, step: u64) -> [Vec<u8>; 2] {
        let folder = self.dir(run).join(format!("checkpoints/step-{step}"));
        ["state.safetensors", "state.json"]
            .map(|file| fs::read(folder.join(file)).expect("a last checkpoint"))
    }

    fn assert_same(&self, a: &str, b: &str, steps: u64) {
        let losses = self.losses(a);
        assert_eq!(losses.iter().map(|(step, _)| *step).collect::<Vec<_>>(), (1..=steps).collect::<Vec<_>>());
        assert_eq!(losses, self.losses(b));
        assert!(self.state(a, steps) == self.state(b, steps), "the last states differ");
    }
}

/// What lies in the folder of checkpoints, seen from outside.
struct Checkpoints {
    /// The newest with its marker.
    whole: Option<u64>,
    /// A save was under way: a folder under its first name, or one without its marker.
    partial: bool,
}

fn checkpoints(run: &Path) -> Checkpoints {
    let mut found = Checkpoints { whole: None, partial: false };
    for entry in fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let marked = fs::metadata(entry.path().join("complete")).is_ok_and(|marker| marker.len() == 32);
        match name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok()) {
            Some(step) if marked => found.whole = found.whole.max(Some(step)),
            Some(_) => found.partial = true,
            None => found.partial |= name.ends_with(".partial"),
        }
    }
    found
}

/// When a life ends.
enum Moment {
    /// So long after its start, or after so many steps, whichever comes first.
    Any { after: Duration, steps: usize },
    /// Inside its n-th save, so long after the save was first seen.
    Save { saves: usize, after: Duration },
}

fn draw(kill: u32) -> Moment {
    let [a, b, ..] = flatout_ir::random::philox([kill, 0, 0, 0], [25, 11]);
    let micros = |most: u32| Duration::from_micros(u64::from(b % most));
    match kill % 2 {
        0 => Moment::Any { after: micros(600_000), steps: 1 + a as usize % 6 },
        _ => Moment::Save { saves: a as usize % 3, after: micros(4_000) },
    }
}

#[test]
fn fifty_kills_leave_no_trace() {
    let scene = Scene::new();
    let steps = format!("train.steps={STEPS}");
    let (unbroken, broken) = (words("unbroken", &steps), words("broken", &steps));
    assert_eq!(scene.start(&unbroken).wait().expect("an end").code(), Some(0));
    let run = scene.dir("broken");
    let (mut inside, mut resumed) = (0, 0);
    for kill in 0..KILLS {
        let before = scene.events("broken").len();
        let whole = checkpoints(&run).whole;
        let mut child = scene.start(&broken);
        live(&run, draw(kill), &mut child);
        child.kill().expect("a living process");
        assert_eq!(child.wait().expect("an end").signal(), Some(9), "kill {kill} met a living process");

        // A torn last line of the life before is removed by the next, so nothing before it moves.
        let life = scene.events("broken").split_off(before);
        let Some(start) = life.iter().position(|event| matches!(event, Event::Start(_))) else { continue };
        let went_on = life.iter().find_map(|event| match event {
            Event::Resume { step } => Some(*step),
            _ => None,
        });
        if life.len() > start + 1 {
            assert_eq!(went_on, whole, "kill {kill}: it goes on from the newest whole checkpoint");
            resumed += u32::from(went_on.is_some());
        }
        inside += u32::from(checkpoints(&run).partial);
    }
    println!("{KILLS} kills, {inside} of them inside a save, {resumed} lives went on from a checkpoint");
    assert!(inside >= INSIDE_A_SAVE, "{inside} kills fell inside a save");
    assert_eq!(scene.start(&broken).wait().expect("an end").code(), Some(0));
    scene.assert_same("unbroken", "broken", STEPS);
    assert!(!checkpoints(&run).partial, "what saves left behind is removed");
}

#[test]
fn a_kill_while_a_run_begins_leaves_one_that_can_begin_again() {
    let scene = Scene::new();
    let steps = "train.steps=3";
    assert_eq!(scene.start(&words("unbroken", steps)).wait().expect("an end").code(), Some(0));
    for kill in 0..20 {
        let run = format!("run-{kill}");
        let (dir, words) = (scene.dir(&run), words(&run, steps));
        let mut child = scene.start(&words);
        let born = Instant::now();
        let after = Duration::from_micros(u64::from(
            flatout_ir::random::philox([kill, 1, 0, 0], [25, 11])[0] % 60_000,
        ));
        // Every other one dies as soon as anything but its lock is there.
        let is_begun =
            || fs::read_dir(&dir).into_iter().flatten().flatten().any(|entry| entry.file_name() != "lock");
        while if kill % 2 == 0 { born.elapsed() < after } else { !is_begun() } {
            assert!(born.elapsed() < Duration::from_secs(60), "the run does not begin");
        }
        child.kill().expect("a process that was not waited for");
        child.wait().expect("an end");
        let again = say(scene.folder.path(), &words);
        assert_eq!(again.code, Some(0), "kill {kill}: {}", again.err);
        scene.assert_same("unbroken", &run, 3);
    }
}

/// Waits for the moment. The log grows only after what an earlier life left behind was removed, so a partial folder
/// seen then is this life's.
fn live(run: &Path, moment: Moment, child: &mut Child) {
    let log_bytes = || fs::metadata(run.join("events.jsonl")).map_or(0, |log| log.len());
    let (born, old_log) = (Instant::now(), log_bytes());
    let lines = || {
        let text = fs::read(run.join("events.jsonl")).unwrap_or_default();
        text.get(old_log as usize..).unwrap_or_default().split(|byte| *byte == b'\n').count() - 1
    };
    let wait = |child: &mut Child, reached: &mut dyn FnMut() -> bool| {
        while !reached() {
            assert!(child.try_wait().expect("a child").is_none(), "the run ended by itself");
            assert!(born.elapsed() < Duration::from_secs(60), "the run makes no progress");
            std::thread::yield_now();
        }
    };
    match moment {
        Moment::Any { after, steps } => {
            // A step is two lines: its own and that of its checkpoint.
            wait(child, &mut || born.elapsed() >= after || lines() >= 2 * steps + 2);
        }
        Moment::Save { saves, after } => {
            wait(child, &mut || lines() >= 2 * saves + 2);
            wait(child, &mut || checkpoints(run).partial);
            let seen = Instant::now();
            wait(child, &mut || seen.elapsed() >= after);
        }
    }
}

fn send(signal: &str, child: &Child) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
    assert!(sent.success());
}

#[test]
fn signals_save_and_the_run_goes_on_exactly() {
    let scene = Scene::new();
    let mut unbroken = words("unbroken", "train.steps=60");
    unbroken.push("checkpoint.every=0");
    assert_eq!(scene.start(&unbroken).wait().expect("an end").code(), Some(0));
    for signal in ["-INT", "-TERM", "-USR1"] {
        let run = &signal[1..];
        let mut words = words(run, "train.steps=60");
        words.push("checkpoint.every=0");
        let mut child = scene.start(&words);
        while events::steps(&scene.events(run)).len() < 3 {
            assert!(child.try_wait().expect("a child").is_none(), "the run ended by itself");
            std::thread::yield_now();
        }
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

#[test]
fn a_second_interrupt_leaves_at_once_without_saving() {
    let scene = Scene::new();
    // A step of thousands of micro-batches: nobody waits for its end.
    let words = ["train", "tiny", "train.batch=65536", "train.micro_batch=8", "--run", "run", "-q"];
    let mut child = scene.start(&words);
    while scene.events("run").is_empty() {
        assert!(child.try_wait().expect("a child").is_none(), "the run ended by itself");
        std::thread::yield_now();
    }
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
