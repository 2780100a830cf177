//! `tune` as users run it: JSON, a preset that `train` takes, and a line in later runs that names it.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{CommandOutput, SMALL, flatout};

/// A command with a small decoder on the CPU and a cache of its own.
fn result(dir: &Path, command: &str, words: &[&str]) -> CommandOutput {
    let words: Vec<&str> =
        [command, "tiny", "backend=cpu"].iter().chain(&SMALL).chain(words).copied().collect();
    let output =
        flatout(dir, &words).env("FLATOUT_CACHE", dir.join("cache")).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Sixty-four micro-batches of one short row: larger micro-batches are faster on every machine.
const CLEAR: [&str; 3] = ["train.batch=64", "model.context=4", "--with"];

#[test]
fn a_preset_is_written_used_and_named_later() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("slow.toml"), "[train]\nmicro_batch = 1\n").expect("a preset");
    let slow = [CLEAR[0], CLEAR[1], CLEAR[2], "slow.toml"];
    let before = result(dir, "train", &slow);
    assert_eq!(before.code, Some(0), "{}", before.err);
    assert!(!before.err.contains("faster settings were measured"), "nothing was tuned yet: {}", before.err);

    let tune = |minutes: &str| {
        let words: Vec<&str> = slow.iter().copied().chain(["--budget", minutes, "--json"]).collect();
        let tuned = result(dir, "tune", &words);
        assert_eq!((tuned.code, tuned.err.as_str()), (Some(0), ""), "{}", tuned.out);
        serde_json::from_str::<Value>(&tuned.out).expect("one object")
    };
    // On a busy machine it takes longer to measure even a factor of three.
    let mut report = tune("0.3");
    for minutes in ["1", "3"] {
        if report["verdict"] != "faster" {
            report = tune(minutes);
        }
    }
    assert_eq!(report["verdict"], "faster", "{report}");
    assert_eq!(report["preset"], "tuned-tiny-cpu.toml");
    assert!(report["faster_by"]["low"].as_f64().expect("a bound") > 1.0, "{report}");
    let rows = report["rows"].as_array().expect("rows");
    for row in rows {
        assert!(!row["why"].as_str().expect("a reason").is_empty() && row["fate"].is_string(), "{row}");
    }
    let fate = |setting: &dyn Fn(&Value) -> bool| {
        rows.iter().filter(|row| setting(&row["setting"])).map(|row| row["fate"].clone()).collect::<Vec<_>>()
    };
    assert!(fate(&|setting| setting["precision"] == "bf16").iter().all(|fate| fate == "not_allowed"));
    assert!(fate(&|setting| setting["precision"] == "tf32").iter().all(|fate| fate == "refused"));
    assert_eq!(report["held"][0]["knob"], "autotune");

    // The preset has the choice, and `train` and the run's config have it too.
    let choice = &report["choice"]["setting"];
    let with = [CLEAR[0], CLEAR[1], "--with", "slow.toml", "--with", "tuned-tiny-cpu.toml", "--run", "tuned"];
    let used = result(dir, "train", &with);
    assert_eq!(used.code, Some(0), "{}", used.err);
    assert!(
        !used.err.contains("faster settings were measured"),
        "what is used is not named again: {}",
        used.err
    );
    let config = fs::read_to_string(dir.join("tuned/config.toml")).expect("a config");
    assert!(config.contains(&format!("micro_batch = {}\n", choice["micro_batch"])), "{config}");
    assert!(config.contains(&format!("recompute = {}\n", choice["recompute"])), "{config}");

    let later = result(dir, "train", &slow);
    assert!(later.err.contains("tuned    faster settings were measured here ("), "{}", later.err);
    let config = fs::read_to_string(dir.join("runs/tiny-2/config.toml")).expect("a config");
    assert!(config.contains("micro_batch = 1\n"), "never applied by itself: {config}");
    let other = result(dir, "train", &["train.batch=32", "model.context=4", "--with", "slow.toml"]);
    assert!(
        !other.err.contains("faster settings were measured"),
        "another batch is another matter: {}",
        other.err
    );
}

#[test]
fn given_keys_are_not_tuned_and_the_table_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let words =
        ["train.micro_batch=4", "recompute=cheap", "workers=1", "--budget", "0.1", "--out", "here.toml"];
    let tuned = result(folder.path(), "tune", &words);
    assert_eq!(tuned.code, Some(0), "{}", tuned.err);
    for line in [
        "micro_batch=4 stays: train.micro_batch is given on the command line",
        "recompute=cheap stays: switches.recompute is given on the command line",
        "loader.workers=1 stays: loader.workers is given on the command line",
        ": statistical against fp32: --allow statistical lets it be tried",
        "choice   the defaults: nothing was faster beyond noise",
    ] {
        assert!(tuned.out.contains(line), "{line}: {}", tuned.out);
    }
    assert!(!folder.path().join("here.toml").exists(), "nothing is proposed, nothing is written");
}
