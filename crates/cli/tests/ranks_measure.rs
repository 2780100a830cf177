//! `ablate`, `tune` and `profile` on several ranks: started by the program and by launchers, killed, and refused.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::program::{SMALL, flatout};
use crate::ranks_train::{children, send_to};

/// Overrides of a decoder that is large enough for ranks to divide its state.
const WIDER: [&str; 2] = ["model.width=64", "train.lanes=2"];

/// A command on the CPU with a cache of its own.
fn command(dir: &Path, command: &str, words: &[&str]) -> Command {
    let words: Vec<&str> =
        [command, "tiny", "backend=cpu"].iter().chain(&SMALL).chain(&WIDER).chain(words).copied().collect();
    let mut command = flatout(dir, &words);
    command.env("FLATOUT_CACHE", dir.join("cache"));
    command
}

/// The JSON object that a command prints; it must print nothing else.
fn object(dir: &Path, name: &str, words: &[&str]) -> Value {
    let output = command(dir, name, words).arg("--json").output().expect("the program starts");
    let result = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), result.as_str()), (Some(0), ""), "{name}");
    serde_json::from_slice(&output.stdout).expect("one object")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn a_profile_has_exchanges_and_a_process_a_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let report = object(dir, "profile", &["--steps", "1", "--ranks", "2", "--trace", "trace.json"]);
    let budget = &report["budget"];
    let parts = ["kernels_ms", "wire_ms", "launch_ms", "synchronisation_ms", "copy_ms", "data_ms"];
    let sum: f64 = parts.iter().map(|part| number(&budget[part])).sum();
    assert!((sum / number(&budget["step_ms"]) - 1.0).abs() < 1e-6, "{budget}");
    let rows = |table: &str| report[table].as_array().unwrap_or_else(|| panic!("{table}")).clone();
    let sum = |table: &str, field: &str| rows(table).iter().map(|row| number(&row[field])).sum::<f64>();
    assert!((sum("kernels", "ms") - number(&budget["kernels_ms"])).abs() < 1e-6);
    assert!(rows("work").iter().all(|row| row["name"] != "wire"), "exchanges have a table of their own");
    // The CPU runs an exchange in the order of launches.
    assert!((sum("exchanges", "exposed_ms") - number(&budget["wire_ms"])).abs() < 1e-6);
    let named = |name: &str| rows("exchanges").iter().any(|row| row["name"].as_str().unwrap().contains(name));
    assert!(named("reduce_scatter") && named("all_gather"), "{}", report["exchanges"]);
    for row in rows("exchanges") {
        assert!((number(&row["hidden_ms"])).abs() < 1e-6 && number(&row["bytes"]) > 0.0, "{row}");
    }
    let ranks = rows("ranks");
    assert_eq!(ranks.iter().map(|rank| number(&rank["rank"])).collect::<Vec<_>>(), [0.0, 1.0]);
    assert!(ranks.iter().all(|rank| number(&rank["step_ms"]) > 0.0 && number(&rank["kernels_ms"]) > 0.0));

    let trace: Value =
        serde_json::from_slice(&fs::read(dir.join("trace.json")).expect("a trace")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let processes: Vec<&str> = events
        .iter()
        .filter(|event| event["name"] == "process_name")
        .map(|event| event["args"]["name"].as_str().expect("a name"))
        .collect();
    assert!(
        processes.len() == 2 && processes[0].starts_with("rank 0 (") && processes[1].starts_with("rank 1 (")
    );
    for process in [1, 2] {
        let track = |name: &str| {
            let is_it = |event: &&Value| event["pid"] == process && event["args"]["name"] == name;
            events.iter().find(is_it).unwrap_or_else(|| panic!("{name}"))["tid"].clone()
        };
        let on = |track: &Value| {
            let is_on = |e: &&Value| e["ph"] == "X" && e["pid"] == process && e["tid"] == *track;
            events.iter().filter(is_on).collect::<Vec<_>>()
        };
        let (compute, wire) = (on(&track("compute queue")), on(&track("wire queue")));
        assert!(!wire.is_empty() && wire.iter().all(|event| event["cat"] == "wire"), "{wire:?}");
        assert!(compute.len() > wire.len() && compute.iter().all(|event| event["cat"] != "wire"));
        assert_eq!((compute.len() + wire.len()) as f64, number(&report["launches"]));
        assert!(!on(&track("plans")).is_empty() && !on(&track("host: updates as they ran")).is_empty());
    }
}

#[test]
fn ablate_measures_sharding() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let words = ["--repeats", "1", "--steps", "1", "--budget", "10", "--ranks", "2"];
    let of = |only: &str| object(dir, "ablate", &[&words[..], &["--only", only]].concat());
    let row = |report: &Value, name: &str| {
        let rows = report["rows"].as_array().expect("rows");
        rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name} in {rows:?}")).clone()
    };
    let shard = of("shard");
    assert_eq!((&shard["ranks"], &shard["is_complete"]), (&2.into(), &true.into()));
    for name in ["the base again", "shard=none", "shard=gradients"] {
        let row = row(&shard, name);
        assert_eq!(
            (&row["state"], &row["measured"]["numbers"]["is_kept"]),
            (&"measured".into(), &true.into()),
            "{row}"
        );
    }
    assert_eq!(row(&shard, "the base again")["measured"]["numbers"]["same_bits"], true);
    assert_eq!(row(&shard, "shard=none")["measured"]["numbers"]["same_bits"], true);
    let wire = of("wire");
    let nccl = row(&wire, "wire=nccl");
    assert!(
        nccl["state"] == "refused" && nccl["why"].as_str().unwrap().contains("NCCL connects GPUs"),
        "{nccl}"
    );
    assert_eq!(
        fs::read_dir(dir.join("cache/ablate")).expect("a folder").count(),
        0,
        "nothing is left to continue"
    );
}

#[test]
fn ranks_tune_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let words = ["recompute=cheap", "workers=1", "--budget", "0.08", "--ranks", "2"];
    let report = object(folder.path(), "tune", &words);
    assert_eq!(report["ranks"], 2);
    let rows = report["rows"].as_array().expect("rows");
    let measured: Vec<f64> = rows
        .iter()
        .filter(|row| row["step_ms"].is_number())
        .map(|row| number(&row["setting"]["micro_batch"]))
        .collect();
    // Each lane has two of the four rows.
    assert!(measured.contains(&1.0) && measured.iter().all(|rows| *rows <= 2.0), "{report}");
    if report["verdict"] == "faster" {
        assert_eq!(report["preset"], "tuned-tiny-cpu-x2.toml");
    }
}

/// Ranks are started as by torchrun; the second one lacks the data file.
#[test]
fn a_rank_that_cannot_open_its_data_ends_all_with_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let (here, elsewhere) = (folder.path().join("here"), folder.path().join("elsewhere"));
    [&here, &elsewhere].iter().for_each(|dir| fs::create_dir(dir).expect("a folder"));
    fs::write(here.join("book.txt"), "once upon a time there was a small book of words\n".repeat(200))
        .unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: &str, dir: &Path| {
        let variables =
            [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
        let words =
            ["data.path=book.txt", "data.held_out=0", "eval.rows=0", "--steps", "1", "--join-timeout", "30s"];
        command(dir, "profile", &words).envs(variables).spawn().expect("the program starts")
    };
    let ends =
        [start("0", &here), start("1", &elsewhere)].map(|child| child.wait_with_output().expect("an end"));
    let stderr = ends.iter().map(|end| String::from_utf8_lossy(&end.stderr).into_owned()).collect::<String>();
    assert_eq!((ends[0].status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
    assert!(stderr.starts_with("flatout: rank 1 (") && stderr.contains("book.txt"), "{stderr}");
}

#[test]
fn a_sweep_is_one_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let refusal = |command: &mut Command| {
        let output = command.output().expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let sentence = "flatout: `sweep` trains one run after another in one process: leave";
    let flags = refusal(&mut command(folder.path(), "sweep", &["--ranks", "2"]));
    assert_eq!(flags, (Some(2), format!("{sentence} --ranks out\n")));
    let variables =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
    let started = refusal(command(folder.path(), "sweep", &["lr=1e-3,2e-3"]).envs(variables));
    assert_eq!(started, (Some(2), format!("{sentence} 1 of the 2 processes out\n")));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "nothing is made");
}

#[test]
fn a_rank_that_is_killed_ends_the_measurement() {
    let folder = tempfile::tempdir().expect("a folder");
    let words = ["--steps", "100000", "--ranks", "2", "-v"];
    let mut parent = command(folder.path(), "profile", &words).spawn().expect("the program starts");
    let mut lines = BufReader::new(parent.stderr.take().expect("captured")).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.ends_with("round 1 of 8")), "it begins");
    let all = children(parent.id());
    send_to("-9", *all.last().expect("a rank"));
    let lines: Vec<String> = lines.filter(|line| line.starts_with("flatout: ")).collect();
    assert_eq!((parent.wait().expect("an end").code(), lines.len()), (Some(1), 1), "{lines:?}");
    assert!(
        lines[0].starts_with("flatout: rank ") && lines[0].contains("was killed by signal 9 (SIGKILL)"),
        "{lines:?}"
    );
    assert!(children(parent.id()).is_empty() && all.len() == 2);
}
