//! Stop anywhere, resume exactly: the program killed at a hundred moments, many of them inside a save, ends with the
//! losses and the weights of a run nobody disturbed.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use flatout_train::run::events::Event;

use crate::program::{say, small_train};
use crate::scene::{Scene, checkpoints, wait_until};

const KILLS: u64 = 100;
const INSIDE_A_SAVE: u64 = 30;
const STEPS: u64 = 200;

/// A run that saves after every step: most of its time it is saving.
fn words<'a>(run: &'a str, steps: &'a str) -> Vec<&'a str> {
    let often = ["eval.rows=0", "checkpoint.every=1"];
    small_train(&[&often[..], &[steps, "--run", run, "--resume", "auto", "--json"]].concat())
}

/// When a life ends.
enum Moment {
    /// So long after its start, or when this step is saved, whichever comes first.
    Any { after: Duration, step: u64 },
    /// Inside the save that comes after this step, so long after it was first seen.
    Save { step: u64, after: Duration },
}

/// `kill` of so many, with `whole` the step that is saved. No life gets further than its share of the steps, so that
/// every kill meets a living process.
fn draw(kill: u64, whole: u64) -> Moment {
    let [a, b, ..] = flatout_ir::random::philox([kill as u32, 0, 0, 0], [25, 11]);
    let micros = |most: u32| Duration::from_micros(u64::from(b % most));
    // A fast machine passes several steps between a look at the folder and the kill: then the rest of the kills share
    // what is left, and come before the first step where nothing is.
    let share = (STEPS - 10).saturating_sub(whole) / (KILLS - kill);
    let step = whole + u64::from(a) % (share + 1);
    match (share, kill % 2) {
        (0, 0) => Moment::Any { after: micros(5_000), step: step + 1 },
        (_, 0) => Moment::Any { after: micros(300_000), step: step + 1 },
        _ => Moment::Save { step, after: micros(3_000) },
    }
}

#[test]
fn a_hundred_kills_leave_no_trace() {
    let scene = Scene::new();
    let steps = format!("train.steps={STEPS}");
    let mut unbroken = words("unbroken", &steps);
    unbroken.push("checkpoint.every=0");
    let broken = words("broken", &steps);
    assert_eq!(scene.start(&unbroken).wait().expect("an end").code(), Some(0));
    let run = scene.dir("broken");
    let (mut inside, mut resumed) = (0, 0);
    for kill in 0..KILLS {
        let before = scene.events("broken").len();
        let whole = checkpoints(&run).whole;
        let mut child = scene.start(&broken);
        live(&run, draw(kill, whole.unwrap_or(0)), &mut child);
        child.kill().expect("a living process");
        assert_eq!(child.wait().expect("an end").signal(), Some(9), "kill {kill} met a living process");

        // A torn last line of the life before is removed by the next, so nothing before it moves.
        let life = scene.events("broken").split_off(before);
        let went_on = life.iter().find_map(|event| match event {
            Event::Resume { step } => Some(*step),
            _ => None,
        });
        if life.iter().any(|event| matches!(event, Event::Step(_))) {
            assert_eq!(went_on, whole, "kill {kill}: it goes on from the newest whole checkpoint");
            resumed += u64::from(went_on.is_some());
        }
        inside += u64::from(checkpoints(&run).partial);
    }
    println!("{KILLS} kills, {inside} of them inside a save, {resumed} lives went on from a checkpoint");
    assert!(inside >= INSIDE_A_SAVE, "{inside} kills fell inside a save");
    assert_eq!(scene.start(&broken).wait().expect("an end").code(), Some(0));
    scene.assert_same("unbroken", "broken", STEPS);
    assert!(!checkpoints(&run).partial, "what saves left behind is removed");
}

/// Waits for the moment. The log grows only after what an earlier life left behind was removed, so a partial folder
/// seen then is this life's.
fn live(run: &Path, moment: Moment, child: &mut Child) {
    let log_bytes = || fs::metadata(run.join("events.jsonl")).map_or(0, |log| log.len());
    let (born, old_log) = (Instant::now(), log_bytes());
    match moment {
        Moment::Any { after, step } => {
            wait_until(child, || born.elapsed() >= after || checkpoints(run).whole >= Some(step));
        }
        Moment::Save { step, after } => {
            wait_until(child, || {
                let found = checkpoints(run);
                log_bytes() > old_log && found.whole.unwrap_or(0) >= step && found.partial
            });
            let seen = Instant::now();
            wait_until(child, || seen.elapsed() >= after);
        }
    }
}

#[test]
fn a_kill_while_a_run_begins_leaves_one_that_can_begin_again() {
    let scene = Scene::new();
    let steps = "train.steps=3";
    assert_eq!(scene.start(&words("unbroken", steps)).wait().expect("an end").code(), Some(0));
    for kill in 0..12 {
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
