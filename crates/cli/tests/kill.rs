//! Exact resumption after kills: a run that is killed at a hundred moments, many of them inside a save, ends with the losses and weights of
//! an undisturbed run. The same holds for all kinds of runs, killed while they start and while they train.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use flatout_train::run::events::Event;

use crate::fixture::{Fixture, checkpoints, wait_until};
use crate::program::{execute, small_train};

const KILLS: u64 = 100;
const INSIDE_A_SAVE: u64 = 30;
const STEPS: u64 = 200;

/// A run that saves after every step, so that it is saving most of the time.
fn words<'a>(run: &'a str, steps: &'a str) -> Vec<&'a str> {
    let often = ["eval.rows=0", "checkpoint.every=1"];
    small_train(&[&often[..], &[steps, "--run", run, "--resume", "auto", "--json"]].concat())
}

/// When a process is killed.
enum Moment {
    /// This long after its start, or when this step is saved, whichever comes first.
    Any { after: Duration, step: u64 },
    /// Inside the save after this step, this long after the save was first observed.
    Save { step: u64, after: Duration },
}

/// Draws the moment of kill number `kill`, when step `whole` is saved. No process gets further than its share of the steps, so that every
/// kill meets a running process.
fn draw(kill: u64, whole: u64) -> Moment {
    let [a, b, ..] = flatout_ir::random::philox([kill as u32, 0, 0, 0], [25, 11]);
    let micros = |most: u32| Duration::from_micros(u64::from(b % most));
    // A fast machine makes several steps between the observation and the kill. Then the remaining kills share the remaining steps, and come
    // before the first step if none is left.
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
    let fixture = Fixture::new();
    let steps = format!("train.steps={STEPS}");
    let mut unbroken = words("unbroken", &steps);
    unbroken.push("checkpoint.every=0");
    let broken = words("broken", &steps);
    assert_eq!(fixture.start(&unbroken).wait().expect("an end").code(), Some(0));
    let run = fixture.dir("broken");
    let (mut inside, mut resumed) = (0, 0);
    for kill in 0..KILLS {
        let before = fixture.events("broken").len();
        let whole = checkpoints(&run).whole;
        let mut child = fixture.start(&broken);
        live(&run, draw(kill, whole.unwrap_or(0)), &mut child);
        child.kill().expect("a living process");
        assert_eq!(child.wait().expect("an end").signal(), Some(9), "kill {kill} met a living process");

        // A torn last line is removed by the next process, and nothing before it changes.
        let life = fixture.events("broken").split_off(before);
        let went_on = life.iter().find_map(|event| match event {
            Event::Resume { step } => Some(*step),
            _ => None,
        });
        if life.iter().any(|event| matches!(event, Event::Step(_))) {
            assert_eq!(went_on, whole, "kill {kill}: it continues from the newest whole checkpoint");
            resumed += u64::from(went_on.is_some());
        }
        inside += u64::from(checkpoints(&run).partial);
    }
    println!("{KILLS} kills, {inside} of them inside a save, {resumed} lives went on from a checkpoint");
    assert!(inside >= INSIDE_A_SAVE, "{inside} kills fell inside a save");
    assert_eq!(fixture.start(&broken).wait().expect("an end").code(), Some(0));
    fixture.assert_same("unbroken", "broken", STEPS);
    assert!(!checkpoints(&run).partial, "what saves left behind is removed");
}

/// Waits for the moment. The log grows only after the remains of an earlier process were removed, so a partial folder that is seen then
/// belongs to this process.
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
fn a_kill_while_a_run_begins_allows_the_same_command_again() {
    let fixture = Fixture::new();
    let steps = "train.steps=3";
    assert_eq!(fixture.start(&words("unbroken", steps)).wait().expect("an end").code(), Some(0));
    for kill in 0..12 {
        let run = format!("run-{kill}");
        let (dir, words) = (fixture.dir(&run), words(&run, steps));
        let mut child = fixture.start(&words);
        let born = Instant::now();
        let after = Duration::from_micros(u64::from(
            flatout_ir::random::philox([kill, 1, 0, 0], [25, 11])[0] % 60_000,
        ));
        // Every other one is killed as soon as there is anything but its lock.
        let is_begun =
            || fs::read_dir(&dir).into_iter().flatten().flatten().any(|entry| entry.file_name() != "lock");
        while if kill % 2 == 0 { born.elapsed() < after } else { !is_begun() } {
            assert!(born.elapsed() < Duration::from_secs(60), "the run does not begin");
        }
        child.kill().expect("a process that was not waited for");
        child.wait().expect("an end");
        let again = execute(fixture.folder.path(), &words);
        assert_eq!(again.code, Some(0), "kill {kill}: {}", again.err);
        fixture.assert_same("unbroken", &run, 3);
    }
}

/// Kills of every kind of run: at least one in each third of its steps.
const KILLS_OF_A_KIND: u32 = 9;

/// Kills runs that `words` begin and continue, at moments of their first half second, until this number of kills met a running process;
/// then lets them end, and compares the runs in `folders` with those of `unbroken`.
///
/// No process gets further than its share of the steps, so a fast machine has steps left for every kill. A run that nevertheless ended
/// before its kill, because this thread was not woken in time, is begun again.
fn killed_and_compared(fixture: &Fixture, kind: &str, words: &[&str], folders: &[&str], steps: u64) {
    let of = |run: &str| -> Vec<String> {
        let fixed = ["checkpoint.every=1", "--resume", "auto", "--json", "--run"].map(String::from);
        words.iter().map(|word| word.to_string()).chain(fixed).chain([format!("{kind}-{run}")]).collect()
    };
    let start = |run: &str| fixture.start(&of(run).iter().map(String::as_str).collect::<Vec<_>>());
    let ended = start("unbroken").wait_with_output().expect("an end");
    assert_eq!(ended.status.code(), Some(0), "{kind}: {}", String::from_utf8_lossy(&ended.stderr));
    let saved = || -> u64 {
        let runs = folders.iter().map(|folder| fixture.dir(&format!("{kind}-broken{folder}")));
        runs.map(|run| checkpoints(&run).whole.unwrap_or(0)).sum()
    };
    let (mut alive, mut lives) = (0, 0);
    while alive < KILLS_OF_A_KIND {
        lives += 1;
        assert!(lives <= 5 * KILLS_OF_A_KIND, "{kind}: {alive} kills of {lives} lives met a living process");
        let [drawn, ..] = flatout_ir::random::philox([alive, 2, 0, 0], [25, 11]);
        let after = Duration::from_micros(u64::from(alive % 3) * 150_000 + u64::from(drawn) % 150_000);
        let whole = saved();
        let left = (steps * folders.len() as u64).saturating_sub(whole);
        let furthest = whole + (left / u64::from(KILLS_OF_A_KIND - alive + 1)).max(1);
        let (mut child, born) = (start("broken"), Instant::now());
        while born.elapsed() < after && saved() < furthest && child.try_wait().expect("a child").is_none() {
            std::thread::sleep(Duration::from_micros(200));
        }
        child.kill().expect("a process that was not waited for");
        let status = child.wait().expect("an end");
        match status.signal() {
            Some(9) => alive += 1,
            _ => {
                assert_eq!(status.code(), Some(0), "{kind}, life {lives}: {status}");
                fs::remove_dir_all(fixture.dir(&format!("{kind}-broken"))).expect("a run that ended");
            }
        }
    }
    let ended = start("broken").wait_with_output().expect("an end");
    assert_eq!(ended.status.code(), Some(0), "{kind}: {}", String::from_utf8_lossy(&ended.stderr));
    for folder in folders {
        let [unbroken, broken] = ["unbroken", "broken"].map(|run| format!("{kind}-{run}{folder}"));
        fixture.assert_same(&unbroken, &broken, steps);
        let kept = |run: &str, file: &str| fs::read(fixture.dir(run).join(file)).ok();
        for file in ["tokenizer.json", "config.toml", "origin.json", "reference.safetensors"] {
            assert!(kept(&unbroken, file) == kept(&broken, file), "{kind}: {file} of {broken}");
        }
        let left = fs::read_dir(fixture.dir(&broken).join("checkpoints")).expect("checkpoints").flatten();
        let steps = left.filter(|entry| entry.file_name().to_string_lossy().contains("step-")).count();
        assert!(steps <= 3, "{kind}: two of the newest and the best are kept, and {steps} are there");
    }
}

#[test]
fn kills_of_runs_on_text_leave_no_trace() {
    let fixture = Fixture::new();
    let line = |i: u64| format!("line {} of the book has {} words.\n", i * 7919 % 10_007, i % 13);
    fs::write(fixture.dir("book.txt"), (0..400).map(line).collect::<String>()).expect("a text");
    let words = small_train(&["data.path=book.txt", "model.vocab=300", "train.steps=40", "eval.every=20"]);
    killed_and_compared(&fixture, "text", &words, &[""], 40);
    let result = execute(fixture.folder.path(), &["generate", "text-broken", "--max-tokens", "5"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
}

/// Overrides of the recipes for conversations and pairs that make a run short.
const SMALL_TEXTS: [&str; 15] = [
    "model.width=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.head_size=16",
    "model.ffn=48",
    "model.vocab=320",
    "model.context=64",
    "data.synthetic_rows=60",
    "data.held_out=0.3",
    "train.batch=4",
    "train.epochs=none",
    "eval.every_epochs=none",
    "eval.every=10",
    "backend=cpu",
];

#[test]
fn kills_of_runs_on_conversations_leave_no_trace() {
    let own = ["train.steps=30", "eval.rows=4"];
    let words = [&["train", "smollm2-135m-sft"][..], &SMALL_TEXTS, &own].concat();
    killed_and_compared(&Fixture::new(), "chat", &words, &[""], 30);
}

/// There are enough answers for kills during the reference pass, before the first step.
#[test]
fn kills_of_runs_on_preferences_leave_no_trace() {
    let own = ["data.synthetic_rows=1500", "train.steps=40", "eval.rows=4"];
    let words = [&["train", "qwen3-0.6b-dpo"][..], &SMALL_TEXTS, &own].concat();
    killed_and_compared(&Fixture::new(), "preference", &words, &[""], 40);
}

/// Like the test above, with pairs about frames, which are decoded before the reference pass.
#[test]
fn kills_of_runs_on_preferences_about_frames_leave_no_trace() {
    let words = [
        "train",
        "fvlm-135m-dpo",
        "--with",
        "small",
        "model.width=32",
        "model.heads=1",
        "model.kv_heads=1",
        "model.ffn=48",
        "model.vision.layers=1",
        "data.synthetic_rows=600",
        "train.batch=4",
        "train.steps=30",
        "eval.every=10",
        "eval.rows=4",
        "backend=cpu",
    ];
    killed_and_compared(&Fixture::new(), "frames", &words, &[""], 30);
}

#[test]
fn kills_of_runs_on_images_leave_no_trace() {
    let words = [
        "train",
        "vision-tiny",
        "model.width=32",
        "model.layers=1",
        "model.heads=2",
        "data.synthetic_rows=100",
        "train.batch=8",
        "train.steps=200",
        "schedule.warmup_steps=2",
        "eval.rows=8",
        "backend=cpu",
    ];
    killed_and_compared(&Fixture::new(), "images", &words, &[""], 200);
}

#[test]
fn kills_of_runs_on_questions_about_images_leave_no_trace() {
    let words = [
        "train",
        "qwen3-vl-8b-vqa",
        "--with",
        "small",
        "data.synthetic_rows=80",
        "train.batch=8",
        "train.epochs=none",
        "train.steps=30",
        "eval.every_epochs=none",
        "eval.every=10",
        "eval.rows=4",
        "backend=cpu",
    ];
    killed_and_compared(&Fixture::new(), "questions", &words, &[""], 30);
}

#[test]
fn kills_of_runs_with_adapters_leave_no_trace() {
    let fixture = Fixture::new();
    let base = execute(fixture.folder.path(), &small_train(&["eval.rows=0", "--run", "base"]));
    assert_eq!(base.code, Some(0), "{}", base.err);
    let words = [
        "train",
        "tiny",
        "model.from=base",
        "model.context=16",
        "adapter.kind=lora",
        "adapter.dropout=0.1",
        "train.steps=40",
        "train.batch=4",
        "schedule.warmup_steps=2",
        "eval.rows=4",
    ];
    killed_and_compared(&fixture, "adapters", &words, &[""], 40);
}

#[test]
fn kills_of_folds_leave_no_trace() {
    let own =
        ["train.folds=2", "train.steps=12", "train.patience=none", "eval.rows=100", "adapter.kind=none"];
    let words = [&["train", "gemma3-1b-pairs"][..], &SMALL_TEXTS, &own].concat();
    killed_and_compared(&Fixture::new(), "folds", &words, &["/fold-1", "/fold-2"], 12);
}
