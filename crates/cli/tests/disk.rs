//! Disks that are full, files that may not grow, folders that cannot be written, checkpoints that were damaged: the run
//! says so, goes on where it can, loses nothing, and ends as an undisturbed one once it can.
//!
//! A full disk is a small one of its own (a tmpfs in a user namespace). Where the system does not allow that, the test says
//! so; the limit on the size of files meets the same code everywhere.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use flatout_train::run::events::Event;

use crate::program::{CommandOutput, say, small_train};
use crate::scene::{self, Scene, checkpoints};

/// Runs a shell script in a folder; `$FLATOUT` is the program. With `disk`, that folder is a disk of that many KiB which
/// only the script sees.
fn shell(scene: &Scene, disk: Option<(&str, u32)>, script: &str) -> CommandOutput {
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
        .current_dir(scene.folder.path())
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Whether a disk of one's own can be had here. Where not, it is said.
fn has_small_disks(scene: &Scene) -> bool {
    fs::create_dir_all(scene.dir("probe")).expect("a folder");
    let tried = Command::new("unshare").arg("--version").output().is_ok()
        && shell(scene, Some(("probe", 64)), "true").code == Some(0);
    if !tried {
        eprintln!("SKIPPED: this system lets nobody mount a small disk of his own (unshare, tmpfs)");
    }
    tried
}

/// The warnings in a log.
fn warnings(log: &str) -> Vec<String> {
    scene::warnings(log.lines().map(|line| serde_json::from_str::<Event>(line).expect("an event a line")))
}

/// Words of a run of some seconds.
fn long_run(run: &str) -> String {
    let words = ["eval.rows=0", "train.steps=2000", "checkpoint.every=20", "--run", run, "--json"];
    small_train(&words).join(" ")
}

#[test]
fn a_full_disk_is_a_warning_and_the_next_save_tries_again() {
    let scene = Scene::new();
    if !has_small_disks(&scene) {
        return;
    }
    fs::create_dir(scene.dir("disk")).expect("a folder");
    // Room for the log and one checkpoint of 0.4 MB at first; then for nothing at all; then for everything.
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
    let said = shell(&scene, Some(("disk", 8192)), &script);
    let out = fs::read_to_string(scene.dir("out")).expect("what it said");
    let err = fs::read_to_string(scene.dir("err")).expect("what it said");
    assert_eq!(said.code, Some(0), "{said:?}\n{err}\n{}", warnings(&out).join("\n"));
    let warned = warnings(&out);
    let full = "No space left on device";
    assert!(warned.iter().any(|w| w.contains("could not be saved") && w.contains(full)), "{warned:?}");
    assert!(warned.iter().any(|w| w.starts_with("events.jsonl: ") && w.contains(full)), "{warned:?}");
    let log = fs::read_to_string(scene.dir("run/events.jsonl")).expect("a log");
    assert_eq!(log, out, "lines that waited for room are all there, in order");
    undisturbed(&scene);
    scene.assert_same("undisturbed", "run", 2000);
}

#[test]
fn a_last_save_that_fails_is_the_end_and_nothing_older_is_lost() {
    let scene = Scene::new();
    if !has_small_disks(&scene) {
        return;
    }
    fs::create_dir(scene.dir("disk")).expect("a folder");
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
    let said = shell(&scene, Some(("disk", 8192)), &script);
    let err = fs::read_to_string(scene.dir("err")).expect("what it said");
    assert_eq!(said.code, Some(0), "{said:?}\n{err}");
    let whole = checkpoints(&scene.dir("failed")).whole.expect("the checkpoints there was room for");
    let sentence = format!("the newest whole checkpoint is that of step {whole}");
    assert!(err.starts_with("flatout: step 2000 could not be saved") && err.contains(&sentence), "{err}");
    assert!(!checkpoints(&scene.dir("failed")).partial, "a failed save leaves no rubbish");
    undisturbed(&scene);
    scene.assert_same("undisturbed", "run", 2000);
}

fn undisturbed(scene: &Scene) {
    let words = long_run("undisturbed") + " checkpoint.every=0";
    let said = say(scene.folder.path(), &words.split(' ').collect::<Vec<_>>());
    assert_eq!(said.code, Some(0), "{}", said.err);
}

/// `ulimit -f` counts 512 bytes; the state is 390 kB.
#[test]
fn a_limit_on_the_size_of_files_is_a_write_error_like_others() {
    let scene = Scene::new();
    let words = ["eval.rows=0", "checkpoint.every=2", "--run", "run", "--json"];
    let words = small_train(&words).join(" ");
    let said = shell(&scene, None, &format!("ulimit -f 500; exec $FLATOUT {words}"));
    assert_eq!(said.code, Some(1), "{said:?}");
    let warned = warnings(&said.out);
    assert_eq!(warned.len(), 3, "{warned:?}");
    assert!(warned.iter().all(|w| w.contains("state.safetensors: File too large")), "{warned:?}");
    assert!(said.err.contains("step 6 could not be saved") && said.err.contains("there is no checkpoint"));
    assert!(
        said.out.lines().last().is_some_and(|line| line.contains(r#""status":"failed""#)),
        "{}",
        said.out
    );
    let again = say(scene.folder.path(), &["resume", "run", "-q"]);
    assert_eq!(again.code, Some(0), "{}", again.err);
    assert_eq!(checkpoints(&scene.dir("run")).whole, Some(6));
}

#[test]
fn a_folder_that_cannot_be_written_is_one_sentence() {
    let scene = Scene::new();
    let said = say(scene.folder.path(), &small_train(&["--run", "run", "-q"]));
    assert_eq!(said.code, Some(0), "{}", said.err);
    if has_small_disks(&scene) {
        fs::create_dir(scene.dir("disk")).expect("a folder");
        let script = format!(
            "cp -r run disk/run; mount -o remount,ro disk
             $FLATOUT {}; echo $? >> codes
             $FLATOUT resume disk/run train.steps=8 --json; echo $? >> codes
             $FLATOUT generate disk/run -q --max-tokens 4 > /dev/null; echo $? >> codes",
            small_train(&["--run", "disk/new", "--json"]).join(" ")
        );
        let said = shell(&scene, Some(("disk", 8192)), &script);
        assert_eq!(fs::read_to_string(scene.dir("codes")).expect("codes"), "2\n2\n0\n", "{said:?}");
        let lines: Vec<&str> = said.err.lines().collect();
        assert!(lines.len() == 2 && said.out.is_empty(), "{said:?}");
        assert!(lines[0].contains("disk/new cannot be created: Read-only file system"), "{}", lines[0]);
        assert!(lines[1].contains("disk/run cannot be written: Read-only file system"), "{}", lines[1]);
    }
    // A file where the folder of checkpoints should be.
    fs::remove_dir_all(scene.dir("run/checkpoints")).expect("checkpoints");
    fs::write(scene.dir("run/checkpoints"), "").expect("a file");
    let said = say(scene.folder.path(), &["resume", "run", "train.steps=8"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.err.contains("run/checkpoints cannot be read: Not a directory"), "{}", said.err);
}

#[test]
fn a_damaged_log_is_named_by_line() {
    let scene = Scene::new();
    let dir = scene.folder.path();
    assert_eq!(say(dir, &small_train(&["--run", "run", "-q"])).code, Some(0));
    let path = scene.dir("run/events.jsonl");
    let log = fs::read_to_string(&path).expect("a log");
    fs::write(&path, log.replacen("\"loss\"", "\"los", 1)).expect("a log");
    let said = say(dir, &["resume", "run", "train.steps=8"]);
    assert_eq!((said.code, said.err.lines().count()), (Some(2), 1), "{}", said.err);
    assert!(said.err.contains("run/events.jsonl line 2 is no event"), "{}", said.err);
    fs::remove_file(&path).expect("a log");
    assert_eq!(say(dir, &["resume", "run", "train.steps=8", "-q"]).code, Some(0));
}

type Damage = fn(&Path);

/// Ways in which a file can be damaged.
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
fn damaged_checkpoints_are_named_and_passed_over() {
    let scene = Scene::new();
    let dir = scene.folder.path();
    let words = |run, steps| {
        let words =
            ["eval.rows=0", "schedule.horizon_steps=8", "checkpoint.every=2", steps, "--run", run, "-q"];
        small_train(&words)
    };
    assert_eq!(say(dir, &words("unbroken", "train.steps=8")).code, Some(0));
    assert_eq!(say(dir, &words("start", "train.steps=6")).code, Some(0));
    for (n, file) in ["state.safetensors", "state.json", "complete"].into_iter().enumerate() {
        for (m, (what, damage)) in DAMAGES.into_iter().enumerate() {
            let run = format!("run-{n}{m}");
            let copied = Command::new("cp").args(["-r", "start", &run]).current_dir(dir).status();
            assert!(copied.expect("cp").success());
            damage(&scene.dir(&run).join("checkpoints/step-6").join(file));
            let said = say(dir, &["resume", &run, "train.steps=8", "--json"]);
            assert_eq!(said.code, Some(0), "{what} {file}: {}", said.err);
            let warned = warnings(&said.out);
            let named = format!("{run}/checkpoints/step-6 is not used: ");
            assert!(warned.len() == 1 && warned[0].starts_with(&named), "{what} {file}: {warned:?}");
            scene.assert_same("unbroken", &run, 8);
        }
    }
    // With the older one damaged as well there is nothing to go on from, and the run is not silently begun again.
    for step in ["step-4", "step-6"] {
        (DAMAGES[2].1)(&scene.dir("start/checkpoints").join(step).join("state.safetensors"));
    }
    let said = say(dir, &["resume", "start", "train.steps=8"]);
    assert_eq!((said.code, said.err.lines().count()), (Some(2), 1), "{}", said.err);
    assert!(said.err.contains("no checkpoint of this run is whole"), "{}", said.err);
}

/// The files that every command needs of a run are written once: a life that cannot write them,
/// or is killed as it starts, loses nothing.
#[test]
fn a_life_that_cannot_write_leaves_the_tokeniser_alone() {
    let scene = Scene::new();
    let line = |i: u64| format!("line {} of the book has {} words.\n", i * 7919 % 10_007, i % 13);
    fs::write(scene.dir("book.txt"), (0..500).map(line).collect::<String>()).expect("a text");
    let words = ["data.path=book.txt", "model.vocab=400", "eval.rows=0", "--run", "run"];
    assert_eq!(say(scene.folder.path(), &small_train(&words)).code, Some(0));
    let kept = ["tokenizer.json", "config.toml", "resolved.toml"];
    let read = || kept.map(|file| fs::read(scene.dir("run").join(file)).expect("a file of the run"));
    let before = read();
    assert!(before[0].len() > 8 << 10, "{} bytes are more than any of the limits", before[0].len());
    // Files may not grow beyond some KiB: checkpoints cannot be written, and nothing else is lost.
    for blocks in [1, 4, 8] {
        let script = format!("ulimit -f {blocks}; exec $FLATOUT resume run train.steps=20 -q");
        let said = shell(&scene, None, &script);
        assert!(matches!(said.code, Some(1 | 2)), "{said:?}");
        assert!(read()[0] == before[0], "ulimit -f {blocks} changed the tokeniser");
        let lost: Vec<_> = fs::read_dir(scene.dir("run")).expect("a run").flatten().collect();
        assert!(lost.iter().all(|entry| !entry.path().to_string_lossy().ends_with(".partial")), "{lost:?}");
    }
    assert_eq!(say(scene.folder.path(), &["generate", "run", "--max-tokens", "3"]).code, Some(0));
    assert_eq!(say(scene.folder.path(), &["resume", "run", "train.steps=20", "-q"]).code, Some(0));
    assert!(read()[0] == before[0]);
    // A tokeniser that was put there instead is noticed, and left.
    let changed = String::from_utf8(before[0].clone()).expect("JSON").replace("\"Ġthe\"", "\"Ġeht\"");
    fs::write(scene.dir("run/tokenizer.json"), &changed).expect("another tokeniser");
    let said = say(scene.folder.path(), &["resume", "run", "train.steps=25", "-q"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert_eq!(fs::read_to_string(scene.dir("run/tokenizer.json")).expect("a tokeniser"), changed);
}

/// A kill between a save and the removal of older checkpoints leaves one too many, until the next life begins.
#[test]
fn checkpoints_that_a_killed_life_should_have_removed_are_removed() {
    let scene = Scene::new();
    let words = ["checkpoint.every=2", "checkpoint.keep=9", "eval.rows=0", "--run", "run"];
    assert_eq!(say(scene.folder.path(), &small_train(&words)).code, Some(0));
    let steps = || {
        let names = fs::read_dir(scene.dir("run/checkpoints")).expect("checkpoints").flatten();
        let mut names: Vec<_> = names.map(|entry| entry.file_name().into_string().expect("a name")).collect();
        names.sort();
        names
    };
    assert_eq!(steps(), ["step-2", "step-4", "step-6"]);
    assert_eq!(say(scene.folder.path(), &["resume", "run", "checkpoint.keep=2", "-q"]).code, Some(0));
    assert_eq!(steps(), ["step-4", "step-6"], "the run was at its end, and saved nothing");
}

/// Several processes that want the same directory at the same moment: one gets it.
#[test]
fn one_of_many_writers_gets_the_run() {
    let scene = Scene::new();
    let words = small_train(&["train.steps=1000000", "--run", "run", "--resume", "auto", "--json"]);
    let mut children: Vec<_> = (0..6).map(|_| Some(scene.start(&words))).collect();
    let mut refused = 0;
    while refused < 5 {
        for slot in &mut children {
            if slot.as_mut().is_some_and(|child| child.try_wait().expect("a child").is_some()) {
                let output = slot.take().expect("one that ended").wait_with_output().expect("an end");
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(output.status.code(), Some(2), "{said}");
                assert!(said.contains("the run in run is still running"), "{said}");
                refused += 1;
            }
        }
        std::thread::yield_now();
    }
    let mut last = children.into_iter().flatten().next().expect("the one that trains");
    scene::wait_until(&mut last, || !scene.events("run").is_empty());
    last.kill().expect("a living process");
    last.wait().expect("an end");
    let starts = scene.events("run").iter().filter(|event| matches!(event, Event::Start(_))).count();
    assert_eq!(starts, 1, "nobody else wrote into it");
}
