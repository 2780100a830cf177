//! Full disks, limits on file sizes, folders that cannot be written and damaged checkpoints: the run reports them, continues if it can,
//! loses nothing, and once it can ends like an undisturbed run.
//!
//! A full disk is a small tmpfs in a user namespace. If the system does not allow that, the test prints it; the limit on file sizes
//! exercises the same code everywhere.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use flatout_train::run::events::Event;

use crate::fixture::{self, Fixture, checkpoints};
use crate::program::{CommandOutput, execute, small_train};

/// Runs a shell script in a folder; `$FLATOUT` is the program. With `disk`, that folder is a disk of that many KiB, visible only to the
/// script.
fn shell(fixture: &Fixture, disk: Option<(&str, u32)>, script: &str) -> CommandOutput {
    let mut command = match disk {
        Some(_) => Command::new("unshare"),
        None => Command::new("sh"),
    };
    let script = match disk {
        Some((dir, kib)) => {
            command.args(["--user", "--map-root-user", "--mount", "sh"]);
            format!("mount -t tmpfs -o size={kib}k tmpfs {dir} || exit 99\n{script}")
        }
        None => script.to_string(),
    };
    let output = command
        .args(["-c", &script])
        .env("FLATOUT", env!("CARGO_BIN_EXE_flatout"))
        .current_dir(fixture.folder.path())
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Whether a small disk can be mounted here; prints a line if not.
fn has_small_disks(fixture: &Fixture) -> bool {
    fs::create_dir_all(fixture.dir("probe")).expect("a folder");
    let tried = Command::new("unshare").arg("--version").output().is_ok()
        && shell(fixture, Some(("probe", 64)), "true").code == Some(0);
    if !tried {
        eprintln!("SKIPPED: this system does not let users mount a small disk (unshare, tmpfs)");
    }
    tried
}

/// The warnings in a log.
fn warnings(log: &str) -> Vec<String> {
    fixture::warnings(log.lines().map(|line| serde_json::from_str::<Event>(line).expect("an event a line")))
}

/// The arguments of a run that takes some seconds.
fn long_run(run: &str) -> String {
    let words = ["eval.rows=0", "train.steps=2000", "checkpoint.every=20", "--run", run, "--json"];
    small_train(&words).join(" ")
}

#[test]
fn a_full_disk_is_a_warning_and_the_next_save_tries_again() {
    let fixture = Fixture::new();
    if !has_small_disks(&fixture) {
        return;
    }
    fs::create_dir(fixture.dir("disk")).expect("a folder");
    // At first there is room for the log and one checkpoint of 0.4 MB, then for nothing, then for everything.
    let script = format!(
        "dd if=/dev/zero of=disk/ballast bs=1k count=7000 2>&-
         $FLATOUT {words} > out 2> err &
         seen() {{ until grep -q \"$1\" out; do kill -0 $! || exit 98; sleep 0.01; done; }}
         seen 'could not be saved'
         dd if=/dev/zero of=disk/more bs=1k 2>&-
         seen 'events.jsonl: '
         rm disk/ballast disk/more
         wait $!; code=$?
         cp -r disk/run run; exit $code",
        words = long_run("disk/run"),
    );
    let result = shell(&fixture, Some(("disk", 8192)), &script);
    let out = fs::read_to_string(fixture.dir("out")).expect("what it said");
    let err = fs::read_to_string(fixture.dir("err")).expect("what it said");
    assert_eq!(result.code, Some(0), "{result:?}\n{err}\n{}", warnings(&out).join("\n"));
    let warned = warnings(&out);
    let full = "No space left on device";
    assert!(warned.iter().any(|w| w.contains("could not be saved") && w.contains(full)), "{warned:?}");
    assert!(warned.iter().any(|w| w.starts_with("events.jsonl: ") && w.contains(full)), "{warned:?}");
    let log = fs::read_to_string(fixture.dir("run/events.jsonl")).expect("a log");
    assert_eq!(log, out, "lines that waited for room are all there, in order");
    undisturbed(&fixture);
    fixture.assert_same("undisturbed", "run", 2000);
}

#[test]
fn a_failed_last_save_ends_the_run_and_keeps_older_checkpoints() {
    let fixture = Fixture::new();
    if !has_small_disks(&fixture) {
        return;
    }
    fs::create_dir(fixture.dir("disk")).expect("a folder");
    let script = format!(
        "dd if=/dev/zero of=disk/ballast bs=1k count=7000 2>&-
         $FLATOUT {words} > out 2> err
         test $? = 1 || exit 97
         cp -r disk/run failed
         rm disk/ballast
         $FLATOUT resume disk/run -q > /dev/null || exit 96
         cp -r disk/run run",
        words = long_run("disk/run"),
    );
    let result = shell(&fixture, Some(("disk", 8192)), &script);
    let err = fs::read_to_string(fixture.dir("err")).expect("what it said");
    assert_eq!(result.code, Some(0), "{result:?}\n{err}");
    let whole = checkpoints(&fixture.dir("failed")).whole.expect("the checkpoints there was room for");
    let sentence = format!("the newest whole checkpoint is that of step {whole}");
    assert!(err.starts_with("flatout: step 2000 could not be saved") && err.contains(&sentence), "{err}");
    assert!(!checkpoints(&fixture.dir("failed")).partial, "a failed save leaves no rubbish");
    undisturbed(&fixture);
    fixture.assert_same("undisturbed", "run", 2000);
}

fn undisturbed(fixture: &Fixture) {
    let words = long_run("undisturbed") + " checkpoint.every=0";
    let result = execute(fixture.folder.path(), &words.split(' ').collect::<Vec<_>>());
    assert_eq!(result.code, Some(0), "{}", result.err);
}

/// `ulimit -f` counts 512 bytes; the state is 390 kB.
#[test]
fn a_limit_on_the_size_of_files_is_a_write_error_like_others() {
    let fixture = Fixture::new();
    let words = ["eval.rows=0", "checkpoint.every=2", "--run", "run", "--json"];
    let words = small_train(&words).join(" ");
    let result = shell(&fixture, None, &format!("ulimit -f 500; exec $FLATOUT {words}"));
    assert_eq!(result.code, Some(1), "{result:?}");
    let warned = warnings(&result.out);
    assert_eq!(warned.len(), 3, "{warned:?}");
    assert!(warned.iter().all(|w| w.contains("state.safetensors: File too large")), "{warned:?}");
    assert!(
        result.err.contains("step 6 could not be saved") && result.err.contains("there is no checkpoint")
    );
    assert!(
        result.out.lines().last().is_some_and(|line| line.contains(r#""status":"failed""#)),
        "{}",
        result.out
    );
    let again = execute(fixture.folder.path(), &["resume", "run", "-q"]);
    assert_eq!(again.code, Some(0), "{}", again.err);
    assert_eq!(checkpoints(&fixture.dir("run")).whole, Some(6));
}

#[test]
fn a_folder_that_cannot_be_written_is_one_sentence() {
    let fixture = Fixture::new();
    let result = execute(fixture.folder.path(), &small_train(&["--run", "run", "-q"]));
    assert_eq!(result.code, Some(0), "{}", result.err);
    if has_small_disks(&fixture) {
        fs::create_dir(fixture.dir("disk")).expect("a folder");
        let script = format!(
            "cp -r run disk/run; mount -o remount,ro disk
             $FLATOUT {}; echo $? >> codes
             $FLATOUT resume disk/run train.steps=8 --json; echo $? >> codes
             $FLATOUT generate disk/run -q --max-tokens 4 > /dev/null; echo $? >> codes",
            small_train(&["--run", "disk/new", "--json"]).join(" ")
        );
        let result = shell(&fixture, Some(("disk", 8192)), &script);
        assert_eq!(fs::read_to_string(fixture.dir("codes")).expect("codes"), "2\n2\n0\n", "{result:?}");
        let lines: Vec<&str> = result.err.lines().collect();
        assert!(lines.len() == 2 && result.out.is_empty(), "{result:?}");
        assert!(lines[0].contains("disk/new cannot be created: Read-only file system"), "{}", lines[0]);
        assert!(lines[1].contains("disk/run cannot be written: Read-only file system"), "{}", lines[1]);
    }
    // There is a file in the place of the folder of checkpoints.
    fs::remove_dir_all(fixture.dir("run/checkpoints")).expect("checkpoints");
    fs::write(fixture.dir("run/checkpoints"), "").expect("a file");
    let result = execute(fixture.folder.path(), &["resume", "run", "train.steps=8"]);
    result.assert_refused(&["run/checkpoints cannot be read: Not a directory"]);
}

#[test]
fn a_damaged_log_is_named_by_line() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    assert_eq!(execute(dir, &small_train(&["--run", "run", "-q"])).code, Some(0));
    let path = fixture.dir("run/events.jsonl");
    let log = fs::read_to_string(&path).expect("a log");
    fs::write(&path, log.replacen("\"loss\"", "\"los", 1)).expect("a log");
    let result = execute(dir, &["resume", "run", "train.steps=8"]);
    result.assert_refused(&["run/events.jsonl line 2 is no event"]);
    fs::remove_file(&path).expect("a log");
    assert_eq!(execute(dir, &["resume", "run", "train.steps=8", "-q"]).code, Some(0));
}

type Damage = fn(&Path);

/// Kinds of damage to a file.
const DAMAGES: [(&str, Damage); 4] = [
    ("truncated", |path| {
        let bytes = fs::read(path).expect("a file");
        fs::write(path, &bytes[..bytes.len() / 2]).expect("a file");
    }),
    ("emptied", |path| fs::write(path, "").expect("a file")),
    ("bit-flipped", |path| {
        let mut bytes = fs::read(path).expect("a file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        fs::write(path, bytes).expect("a file");
    }),
    ("missing", |path| fs::remove_file(path).expect("a file")),
];

#[test]
fn damaged_checkpoints_are_named_and_skipped() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    let words = |run, steps| {
        let words =
            ["eval.rows=0", "schedule.horizon_steps=8", "checkpoint.every=2", steps, "--run", run, "-q"];
        small_train(&words)
    };
    assert_eq!(execute(dir, &words("unbroken", "train.steps=8")).code, Some(0));
    assert_eq!(execute(dir, &words("start", "train.steps=6")).code, Some(0));
    for (n, file) in ["state.safetensors", "state.json", "complete"].into_iter().enumerate() {
        for (m, (what, damage)) in DAMAGES.into_iter().enumerate() {
            let run = format!("run-{n}{m}");
            let copied = Command::new("cp").args(["-r", "start", &run]).current_dir(dir).status();
            assert!(copied.expect("cp").success());
            damage(&fixture.dir(&run).join("checkpoints/step-6").join(file));
            let result = execute(dir, &["resume", &run, "train.steps=8", "--json"]);
            assert_eq!(result.code, Some(0), "{what} {file}: {}", result.err);
            let warned = warnings(&result.out);
            let named = format!("{run}/checkpoints/step-6 is not used: ");
            assert!(warned.len() == 1 && warned[0].starts_with(&named), "{what} {file}: {warned:?}");
            fixture.assert_same("unbroken", &run, 8);
        }
    }
    // If the older one is damaged as well, nothing can be resumed, and the run is not silently started again.
    for step in ["step-4", "step-6"] {
        (DAMAGES[2].1)(&fixture.dir("start/checkpoints").join(step).join("state.safetensors"));
    }
    let result = execute(dir, &["resume", "start", "train.steps=8"]);
    result.assert_refused(&["no checkpoint of this run is whole"]);
}

/// The files of a run that every command needs are written once: a process that cannot write, or is killed at its start, loses nothing.
#[test]
fn a_process_that_cannot_write_keeps_the_tokeniser() {
    let fixture = Fixture::new();
    let line = |i: u64| format!("line {} of the book has {} words.\n", i * 7919 % 10_007, i % 13);
    fs::write(fixture.dir("book.txt"), (0..500).map(line).collect::<String>()).expect("a text");
    let words = ["data.path=book.txt", "model.vocab=400", "eval.rows=0", "--run", "run"];
    assert_eq!(execute(fixture.folder.path(), &small_train(&words)).code, Some(0));
    let kept = ["tokenizer.json", "config.toml", "resolved.toml"];
    let read = || kept.map(|file| fs::read(fixture.dir("run").join(file)).expect("a file of the run"));
    let before = read();
    assert!(before[0].len() > 8 << 10, "{} bytes are more than any of the limits", before[0].len());
    // Files are limited to some KiB: checkpoints cannot be written, and nothing else is lost.
    for blocks in [1, 4, 8] {
        let script = format!("ulimit -f {blocks}; exec $FLATOUT resume run train.steps=20 -q");
        let result = shell(&fixture, None, &script);
        assert!(matches!(result.code, Some(1 | 2)), "{result:?}");
        assert!(read()[0] == before[0], "ulimit -f {blocks} changed the tokeniser");
        let lost: Vec<_> = fs::read_dir(fixture.dir("run")).expect("a run").flatten().collect();
        assert!(lost.iter().all(|entry| !entry.path().to_string_lossy().ends_with(".partial")), "{lost:?}");
    }
    assert_eq!(execute(fixture.folder.path(), &["generate", "run", "--max-tokens", "3"]).code, Some(0));
    assert_eq!(execute(fixture.folder.path(), &["resume", "run", "train.steps=20", "-q"]).code, Some(0));
    assert!(read()[0] == before[0]);
    // A tokeniser that was replaced is detected and kept.
    let changed = String::from_utf8(before[0].clone()).expect("JSON").replace("\"Ġthe\"", "\"Ġeht\"");
    fs::write(fixture.dir("run/tokenizer.json"), &changed).expect("another tokeniser");
    let result = execute(fixture.folder.path(), &["resume", "run", "train.steps=25", "-q"]);
    assert_eq!(result.code, Some(2), "{result:?}");
    assert_eq!(fs::read_to_string(fixture.dir("run/tokenizer.json")).expect("a tokeniser"), changed);
}

/// A kill between a save and the removal of older checkpoints leaves one too many, which the next process removes.
#[test]
fn checkpoints_that_a_killed_process_left_are_removed() {
    let fixture = Fixture::new();
    let words = ["checkpoint.every=2", "checkpoint.keep=9", "eval.rows=0", "--run", "run"];
    assert_eq!(execute(fixture.folder.path(), &small_train(&words)).code, Some(0));
    let steps = || {
        let names = fs::read_dir(fixture.dir("run/checkpoints")).expect("checkpoints").flatten();
        let mut names: Vec<_> = names.map(|entry| entry.file_name().into_string().expect("a name")).collect();
        names.sort();
        names
    };
    assert_eq!(steps(), ["step-2", "step-4", "step-6"]);
    assert_eq!(execute(fixture.folder.path(), &["resume", "run", "checkpoint.keep=2", "-q"]).code, Some(0));
    assert_eq!(steps(), ["step-4", "step-6"], "the run was at its end, and saved nothing");
}

/// Of several processes that start in the same directory at the same time, one gets it.
#[test]
fn one_of_many_writers_gets_the_run() {
    let fixture = Fixture::new();
    let words = small_train(&["train.steps=1000000", "--run", "run", "--resume", "auto", "--json"]);
    let mut children: Vec<_> = (0..6).map(|_| Some(fixture.start(&words))).collect();
    let mut refused = 0;
    while refused < 5 {
        for slot in &mut children {
            if slot.as_mut().is_some_and(|child| child.try_wait().expect("a child").is_some()) {
                let output = slot.take().expect("one that ended").wait_with_output().expect("an end");
                let result = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(output.status.code(), Some(2), "{result}");
                assert!(result.contains("the run in run is still running"), "{result}");
                refused += 1;
            }
        }
        std::thread::yield_now();
    }
    let mut last = children.into_iter().flatten().next().expect("the one that trains");
    fixture::wait_until(&mut last, || !fixture.events("run").is_empty());
    last.kill().expect("a living process");
    last.wait().expect("an end");
    let starts = fixture.events("run").iter().filter(|event| matches!(event, Event::Start(_))).count();
    assert_eq!(starts, 1, "no other process wrote into it");
}
