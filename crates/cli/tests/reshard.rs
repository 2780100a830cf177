//! Checkpoints in parts: any number of ranks resumes what any other number saved, every command reads them, and damage to a part is
//! reported.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use flatout_train::run::checkpoint::part_name;

use crate::fixture::{self, Fixture, checkpoints, wait_until};
use crate::program::{CommandOutput, execute};
use crate::ranks_train::{DORA, LORA, TEXT, children, send_to, wait_for, words};

/// Numbers of ranks in a sequence in which every number follows every number, itself too.
const CHAIN: [usize; 17] = [1, 1, 2, 1, 4, 1, 8, 2, 2, 4, 2, 8, 4, 4, 8, 8, 1];

/// The sizes of the files of tensors of a checkpoint, by name.
fn part_sizes(fixture: &Fixture, run: &str, step: u64) -> BTreeMap<String, u64> {
    let entries =
        fs::read_dir(fixture.dir(run).join(format!("checkpoints/step-{step}"))).expect("a checkpoint");
    let size = |entry: fs::DirEntry| {
        (entry.file_name().into_string().expect("a name"), entry.metadata().expect("a file").len())
    };
    entries.flatten().map(size).filter(|(name, _)| name.ends_with(".safetensors")).collect()
}

#[test]
fn every_number_of_ranks_resumes_what_every_other_saved() {
    let fixture = Fixture::new();
    let steps = CHAIN.len() as u64;
    let until = |step: usize| format!("train.steps={step}");
    let mut unbroken = words(TEXT, "unbroken", "1");
    let (whole, every) = (until(CHAIN.len()), "eval.every=4");
    unbroken.extend([whole.as_str(), "schedule.horizon_steps=20", every]);
    assert_eq!(execute(fixture.folder.path(), &unbroken).code, Some(0));
    for (i, ranks) in CHAIN.iter().enumerate() {
        let (steps, ranks) = (until(i + 1), ranks.to_string());
        let mut begin = words(TEXT, "run", &ranks);
        begin.extend([steps.as_str(), "schedule.horizon_steps=20", every]);
        let go_on = ["resume", "run", &steps, "--ranks", &ranks, "-q"];
        let result = execute(fixture.folder.path(), if i == 0 { &begin } else { &go_on });
        assert_eq!(result.code, Some(0), "step {} on {ranks} ranks: {}", i + 1, result.err);
        let names: Vec<String> = part_sizes(&fixture, "run", i as u64 + 1).into_keys().collect();
        match CHAIN[i] {
            1 => assert_eq!(names, ["state.safetensors"]),
            ranks => assert_eq!(names, (0..ranks).map(|rank| part_name(rank, ranks)).collect::<Vec<_>>()),
        }
    }
    fixture.assert_same("unbroken", "run", steps);
}

/// Every level of sharding resumes what another level saved, to the bit.
#[test]
fn every_level_of_sharding_resumes_what_every_other_saved() {
    let fixture = Fixture::new();
    let begin = |run: &'static str, ranks: &'static str, more: [&'static str; 2]| {
        let mut words = words(TEXT, run, ranks);
        words.extend(more.into_iter().chain(["schedule.horizon_steps=20", "eval.every=4"]));
        words
    };
    let unbroken = begin("unbroken", "1", ["train.steps=8", "shard=auto"]);
    assert_eq!(execute(fixture.folder.path(), &unbroken).code, Some(0));
    let first = begin("run", "4", ["train.steps=2", "shard=gradients"]);
    assert_eq!(execute(fixture.folder.path(), &first).code, Some(0));
    for (steps, ranks, level) in [
        (3, "2", "parameters"),
        (4, "2", "none"),
        (5, "8", "gradients"),
        (6, "4", "parameters"),
        (8, "2", "optimizer"),
    ] {
        let (steps, level) = (format!("train.steps={steps}"), format!("shard={level}"));
        let result =
            execute(fixture.folder.path(), &["resume", "run", &steps, &level, "--ranks", ranks, "-q"]);
        assert_eq!(result.code, Some(0), "{level} on {ranks} ranks: {}", result.err);
    }
    fixture.assert_same("unbroken", "run", 8);
}

#[test]
fn adapters_resume_with_every_number_of_ranks() {
    for command in [LORA, DORA] {
        let fixture = Fixture::new();
        let run = |run: &'static str, ranks: &'static str, steps: &'static str| {
            let mut words = words(command, run, ranks);
            words.extend([steps, "schedule.horizon_steps=20", "eval.every=4"]);
            words
        };
        assert_eq!(execute(fixture.folder.path(), &run("unbroken", "1", "train.steps=10")).code, Some(0));
        assert_eq!(execute(fixture.folder.path(), &run("run", "4", "train.steps=2")).code, Some(0));
        assert_eq!(part_sizes(&fixture, "run", 2).len(), 4);
        for (steps, ranks) in [(4, "2"), (5, "1"), (7, "8"), (10, "4")] {
            let steps = format!("train.steps={steps}");
            let result = execute(fixture.folder.path(), &["resume", "run", &steps, "--ranks", ranks, "-q"]);
            assert_eq!(result.code, Some(0), "{ranks}: {}", result.err);
        }
        fixture.assert_same("unbroken", "run", 10);
    }
}

/// The JSON that a command printed.
fn json(result: &CommandOutput) -> serde_json::Value {
    assert_eq!(result.code, Some(0), "{}", result.err);
    serde_json::from_str(&result.out).unwrap_or_else(|error| panic!("{error}: {}", result.out))
}

#[test]
fn commands_read_what_four_ranks_saved() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    // The unchanged recipe, so that a file's header is small compared with its tensors.
    for (run, ranks) in [("one", "1"), ("four", "4")] {
        let small =
            ["train.steps=2", "train.lanes=4", "train.batch=4", "schedule.warmup_steps=1", "eval.rows=4"];
        let more = ["checkpoint.best=true", "train.ema=0.5", "optimizer.state=int8", "backend=cpu", "-q"];
        let all: Vec<&str> =
            ["train", "tiny", "--run", run, "--ranks", ranks].into_iter().chain(small).chain(more).collect();
        let result = execute(dir, &all);
        assert_eq!(result.code, Some(0), "{run}: {}", result.err);
    }
    fixture.assert_same("one", "four", 2);
    let sizes = part_sizes(&fixture, "four", 2);
    let total: u64 = sizes.values().sum();
    assert_eq!(sizes.len(), 4);
    for (name, size) in &sizes {
        assert!((4 * size).abs_diff(total) < total / 100, "{name} has {size} of {total} bytes");
    }
    let each = |words: &dyn Fn(&str) -> Vec<String>| {
        ["one", "four"].map(|run| execute(dir, &words(run).iter().map(String::as_str).collect::<Vec<_>>()))
    };
    let split = |words: String| words.split(' ').map(String::from).collect::<Vec<_>>();
    let outputs = each(&|run| {
        split(format!("generate {run} --prompt once --max-tokens 8 --seed 3 --json backend=cpu"))
    });
    let [one, four] = outputs.each_ref().map(json);
    assert_eq!(one["texts"], four["texts"]);
    let outputs = each(&|run| split(format!("eval {run}@best --json backend=cpu")));
    let [one, four] = outputs.each_ref().map(json);
    assert_eq!((&one["loss"], &one["step"]), (&four["loss"], &four["step"]));
    assert!(one["loss"].is_number(), "{one}");
    each(&|run| split(format!("export {run} --to out-{run}")))
        .iter()
        .for_each(|result| assert_eq!(result.code, Some(0)));
    let exported =
        |run: &str| fs::read(fixture.dir(&format!("out-{run}/model.safetensors"))).expect("weights");
    assert!(exported("one") == exported("four"), "exports differ");
    // A run may start from it.
    let from = each(&|run| {
        split(format!(
            "train tiny model.from={run}@best train.steps=1 train.batch=2 schedule.warmup_steps=0 eval.rows=0 backend=cpu \
             --run from-{run} -q"
        ))
    });
    assert_eq!(from.each_ref().map(|result| result.code), [Some(0); 2], "{}", from[1].err);
    assert_eq!(fixture.losses("from-one"), fixture.losses("from-four"));
}

/// One rank of two, started as by a launcher, with a limit on file sizes.
fn rank_of_two(
    fixture: &Fixture,
    rank: &str,
    port: &str,
    words: &[&str],
    limit: &str,
) -> std::process::Child {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -f {limit}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_flatout")]);
    command.args(words.iter().filter(|word| !["--ranks", "2"].contains(word)));
    command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)]);
    command
        .current_dir(fixture.folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command.spawn().expect("a shell")
}

fn warnings(fixture: &Fixture, run: &str) -> Vec<String> {
    fixture::warnings(fixture.events(run))
}

/// `ulimit -f` counts 512 bytes; a half of the state is some 200 kB.
#[test]
fn a_rank_that_cannot_write_is_named_in_a_warning_and_the_run_continues() {
    let fixture = Fixture::new();
    let run = |run| {
        let mut words = words(TEXT, run, "2");
        words.extend(["train.steps=6", "schedule.horizon_steps=20", "checkpoint.every=2", "eval.every=0"]);
        words
    };
    assert_eq!(execute(fixture.folder.path(), &run("undisturbed")).code, Some(0));
    let agent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port().to_string();
    let words = run("run");
    let ranks = [("0", "unlimited"), ("1", "200")]
        .map(|(rank, limit)| rank_of_two(&fixture, rank, &port, &words, limit));
    let ends = ranks.map(|child| wait_for(child, Duration::from_secs(60)));
    let result = format!("{}{}", ends[0].1, ends[1].1);
    assert_eq!(ends.each_ref().map(|(code, _)| *code), [Some(1); 2], "{result}");
    assert!(
        result.lines().count() == 1 && result.contains("step 6 could not be saved: rank 1 ("),
        "{result}"
    );
    assert!(result.contains("there is no checkpoint"), "{result}");
    let warned = warnings(&fixture, "run");
    assert_eq!(warned.len(), 3, "{warned:?}");
    let part = part_name(1, 2);
    for (step, warning) in [2, 4, 6].into_iter().zip(&warned) {
        assert!(warning.starts_with(&format!("step {step} could not be saved: rank 1 (")), "{warning}");
        assert!(warning.contains(&format!("{part}: File too large")), "{warning}");
    }
    assert_eq!(fixture.losses("run").len(), 6, "the run went on");
    assert_eq!(fs::read_dir(fixture.dir("run/checkpoints")).expect("a folder").count(), 0, "nothing is left");
    let again = execute(fixture.folder.path(), &["resume", "run", "--ranks", "2", "-q"]);
    assert_eq!(again.code, Some(0), "{}", again.err);
    fixture.assert_same("undisturbed", "run", 6);
}

#[test]
fn a_damaged_part_is_named_and_the_checkpoint_skipped() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    let run = |run, steps| {
        let mut words = words(TEXT, run, "4");
        words.extend([steps, "schedule.horizon_steps=20", "checkpoint.every=2", "eval.every=0"]);
        words
    };
    assert_eq!(execute(dir, &run("unbroken", "train.steps=5")).code, Some(0));
    assert_eq!(execute(dir, &run("run", "train.steps=4")).code, Some(0));
    type Damage = fn(&Path);
    let truncated: Damage = |path| {
        let bytes = fs::read(path).expect("a file");
        fs::write(path, &bytes[..bytes.len() - 1]).expect("a file");
    };
    let flipped: Damage = |path| {
        let mut bytes = fs::read(path).expect("a file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        fs::write(path, bytes).expect("a file");
    };
    let missing: Damage = |path| fs::remove_file(path).expect("a file");
    let part = part_name(2, 4);
    for (file, damage, result) in [
        (part.as_str(), truncated, "bytes and should have"),
        (&part, flipped, "is not what was saved"),
        (&part, missing, "No such file"),
        ("state.json", flipped, "is not what was saved"),
        ("state.json", truncated, "is not what was saved"),
    ] {
        let path = fixture.dir("run/checkpoints/step-4").join(file);
        let whole = fs::read(&path).expect("a file");
        damage(&path);
        let output = execute(dir, &["generate", "run@4", "--max-tokens", "1", "backend=cpu"]);
        output.assert_refused(&[file, result]);
        fs::write(&path, whole).expect("a file");
    }
    // Another number of ranks reads it in shares, and finds the damage in one file.
    flipped(&fixture.dir("run/checkpoints/step-4").join(&part));
    let output = execute(dir, &["resume", "run", "train.steps=5", "--ranks", "2", "-q"]);
    assert_eq!(output.code, Some(0), "{}", output.err);
    let warned = warnings(&fixture, "run");
    assert!(warned.len() == 1 && warned[0].ends_with(&format!("{part} is not what was saved")), "{warned:?}");
    fixture.assert_same("unbroken", "run", 5);
    for step in [4, 5] {
        let folder = fixture.dir(&format!("run/checkpoints/step-{step}"));
        part_sizes(&fixture, "run", step).keys().for_each(|name| flipped(&folder.join(name)));
    }
    let output = execute(dir, &["resume", "run", "train.steps=6", "--ranks", "4"]);
    output.assert_refused(&["no checkpoint of this run is whole"]);
}

const PAGE: usize = 4096;

/// Flips a bit in a stopped process's memory wherever it has these bytes; returns the number of places.
fn flip_in_memory(process: u32, bytes: &[u8]) -> io::Result<usize> {
    let memory = fs::OpenOptions::new().read(true).write(true).open(format!("/proc/{process}/mem"))?;
    let maps = fs::read_to_string(format!("/proc/{process}/maps"))?;
    let mut flipped = 0;
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let (start, end) = range.expect("a range of addresses");
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).expect("an address"));
        let mut found = vec![0; (end - start) as usize];
        // Some mappings cannot be read.
        if memory.read_exact_at(&mut found, start).is_err() {
            continue;
        }
        // Tensors begin at multiples of four bytes, and most pages hold nothing.
        let is_used = |page: &usize| found[*page..*page + PAGE] != [0; PAGE];
        let pages = (0..found.len()).step_by(PAGE).filter(is_used);
        for at in pages.flat_map(|page| (page..page + PAGE).step_by(4)) {
            if found[at..].starts_with(bytes) {
                let middle = bytes.len() / 2;
                memory.write_all_at(&[bytes[middle] ^ 1], start + (at + middle) as u64)?;
                flipped += 1;
            }
        }
    }
    Ok(flipped)
}

#[test]
fn corrupted_memory_of_a_rank_ends_the_run_before_it_is_saved() {
    let fixture = Fixture::new();
    let mut words = words(TEXT, "run", "2");
    // Weights that no update changes are in memory as in a checkpoint. A share is on one rank only, so there would be nothing to compare
    // it with.
    words.extend(["optimizer.lr=1e-30", "train.steps=100000", "checkpoint.every=60", "eval.every=0"]);
    words.push("shard=none");
    let mut child = fixture.start(&words);
    let dir = fixture.dir("run");
    wait_until(&mut child, || checkpoints(&dir).whole.is_some());
    let whole = checkpoints(&dir).whole.expect("a checkpoint");
    let (_, tensors) = fixture.state("run", whole);
    let (_, _, _, bytes) = tensors.iter().find(|(name, ..)| name == "embed.weight").expect("the embedding");
    let ranks = children(child.id());
    send_to("-STOP", ranks[1]);
    let flipped = flip_in_memory(ranks[1], &bytes[..256]);
    send_to("-CONT", ranks[1]);
    match flipped {
        Ok(flipped) => assert!(flipped > 0, "the weights are in memory"),
        Err(error) => {
            eprintln!("SKIPPED: this system does not let a process write the memory of a child: {error}");
            ranks.iter().for_each(|rank| send_to("-KILL", *rank));
            wait_for(child, Duration::from_secs(20));
            return;
        }
    }
    let (code, stderr) = wait_for(child, Duration::from_secs(60));
    assert_eq!((code, stderr.lines().count()), (Some(1), 1), "{stderr}");
    // Or of their average, which is equal if the weights do not change.
    assert!(
        stderr.contains("is not saved: ") && stderr.contains("embed.weight` is not the same on rank 0 ("),
        "{stderr}"
    );
    let newest = checkpoints(&dir).whole.expect("a checkpoint");
    assert!(stderr.contains(&format!("the newest whole checkpoint is step {newest};")), "{stderr}");
    assert!(!checkpoints(&dir).partial, "nothing of the corrupted state is left");
    let more = format!("train.steps={}", newest + 1);
    let result = execute(fixture.folder.path(), &["resume", "run", &more, "--ranks", "2", "-q"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
}

#[test]
fn a_rank_killed_in_a_save_leaves_the_newest_checkpoint_complete() {
    let fixture = Fixture::new();
    let run = |run, every| {
        let mut words = words(TEXT, run, "4");
        words.extend(["train.steps=40", every, "eval.every=0"]);
        words
    };
    assert_eq!(execute(fixture.folder.path(), &run("unbroken", "checkpoint.every=0")).code, Some(0));
    let mut child = fixture.start(&run("run", "checkpoint.every=1"));
    let dir = fixture.dir("run");
    wait_until(&mut child, || {
        let found = checkpoints(&dir);
        found.whole >= Some(3) && found.partial
    });
    send_to("-KILL", children(child.id())[2]);
    let (code, stderr) = wait_for(child, Duration::from_secs(5));
    assert_eq!((code, stderr.lines().count()), (Some(1), 1), "{stderr}");
    let newest = checkpoints(&dir).whole.expect("a checkpoint");
    assert!(stderr.contains(&format!("the newest whole checkpoint is step {newest};")), "{stderr}");
    let result = execute(fixture.folder.path(), &["resume", "run", "--ranks", "2", "-q"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    assert!(!checkpoints(&dir).partial, "what the save left is gone");
    fixture.assert_same("unbroken", "run", 40);
}
