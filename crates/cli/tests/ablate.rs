//! `ablate` as users run it: a JSON object with rows, a page, and a call that continues an earlier one.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{CommandOutput, SMALL, flatout};

/// `ablate` of a small decoder on the CPU, with a cache of its own.
fn result(dir: &Path, words: &[&str]) -> CommandOutput {
    let words: Vec<&str> =
        ["ablate", "tiny", "backend=cpu"].iter().chain(&SMALL).chain(words).copied().collect();
    let output =
        flatout(dir, &words).env("FLATOUT_CACHE", dir.join("cache")).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Runs `ablate`, which must succeed: its JSON object and standard error, or null and standard output.
fn ablate(dir: &Path, words: &[&str]) -> (Value, String) {
    let CommandOutput { code, out, err } = result(dir, words);
    assert_eq!(code, Some(0), "{err}");
    match words.contains(&"--json") {
        true => (object(&out), err),
        false => (Value::Null, out),
    }
}

/// The JSON object at the end of the output; events of whole runs, one per line, may come before it.
fn object(out: &str) -> Value {
    let object = out.find("\n{\n").map_or(out, |before| &out[before + 1..]);
    serde_json::from_str(object).expect("one object")
}

fn row<'a>(report: &'a Value, name: &str) -> &'a Value {
    let rows = report["rows"].as_array().expect("rows");
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name} in {rows:?}"))
}

fn kept(dir: &Path) -> usize {
    fs::read_dir(dir.join("cache/ablate")).expect("a folder").count()
}

#[test]
fn time_to_a_loss_is_compared_seed_by_seed() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let run = [
        "eval.every=4",
        "eval.rows=8",
        "train.steps=60",
        "--to-loss",
        "6.2",
        "--seeds",
        "2",
        "--run",
        "race",
    ];
    // With a learning rate that learns nothing, the loss is never reached.
    let words = [&run[..], &["--try", "lr=1e-3", "--try", "lr=1e-9 train.steps=8", "--json"]].concat();
    let (report, _) = ablate(dir, &words);
    let of = |name: &str| row(&report, name).clone();
    let base = of("as it is");
    assert_eq!(base["runs"].as_array().expect("runs").len(), 2, "{report:#}");
    for run in base["runs"].as_array().unwrap() {
        let (step, tokens) =
            (run["reached"]["step"].as_f64().unwrap(), run["reached"]["tokens"].as_f64().unwrap());
        assert!(step > 0.0 && step < 60.0 && tokens > 0.0 && run["best"].as_f64().unwrap() <= 6.2, "{run}");
        // The run ended at the goal, and gives the reason.
        let log =
            fs::read_to_string(dir.join(run["path"].as_str().unwrap()).join("events.jsonl")).expect("a log");
        let end = log.lines().last().expect("an end");
        assert!(end.contains("eval.goal"), "{end}");
    }
    let range = &base["seconds"];
    assert!(
        range["least"].as_f64() <= range["mean"].as_f64() && range["mean"].as_f64() <= range["most"].as_f64()
    );
    assert!(base.get("of_base").is_none());
    assert!(of("lr=1e-3")["of_base"]["mean"].as_f64().is_some_and(|ratio| ratio > 0.0), "{report:#}");
    let never = of("lr=1e-9 train.steps=8");
    assert!(never["seconds"].is_null() && never["runs"][0]["reached"].is_null(), "{never}");
    // Runs that are done are not trained again, and the numbers are the same.
    let (again, _) = ablate(dir, &words);
    assert_eq!(again["rows"], report["rows"]);
    let log = fs::read_to_string(dir.join("race/as-it-is_seed=0/events.jsonl")).expect("a log");
    assert_eq!(log.matches("\"event\":\"start\"").count(), 1, "{log}");
    let table = ablate(dir, &words[..words.len() - 1]).1;
    assert!(table.contains("not reached by 2 of 2") && table.contains("time / base"), "{table}");
}

/// Runs of 60 updates of the base to a loss, in a folder.
fn race<'a>(goal: &'a str, words: &[&'a str]) -> Vec<&'a str> {
    let run = ["eval.every=4", "eval.rows=8", "train.steps=60", "--to-loss", goal, "--run", "race"];
    [&run[..], words].concat()
}

#[test]
fn runs_to_a_loss_continue_to_a_better_one_and_refuse_other_settings() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let one = ["--seeds", "1", "--json"];
    let log = || fs::read_to_string(dir.join("race/as-it-is_seed=0/events.jsonl")).expect("a log");
    let starts = || log().matches("\"event\":\"start\"").count();
    let updates = || log().matches("\"event\":\"step\"").count();
    let (easy, _) = ablate(dir, &race("5.5", &one));
    let (at_easy, ended) = (row(&easy, "as it is")["runs"][0]["reached"].clone(), updates());
    assert!(at_easy["step"].is_f64() && ended < 60, "{easy:#}");
    // The run ended at the easier goal, and continues from there.
    let (hard, _) = ablate(dir, &race("5.2", &one));
    let at_hard = &row(&hard, "as it is")["runs"][0]["reached"];
    assert!(at_hard["step"].as_f64() > at_easy["step"].as_f64(), "{hard:#}");
    assert_eq!(starts(), 2, "{}", log());
    assert!(updates() > ended && updates() <= 60, "no update is made twice: {}", log());
    // A run that reached one goal has also reached an easier one, with the figures of that time.
    let (again, _) = ablate(dir, &race("5.5", &one));
    assert_eq!(row(&again, "as it is")["runs"][0]["reached"], at_easy);
    assert_eq!(starts(), 2, "{}", log());
    // A run that never reaches its goal is done after all updates.
    for _ in 0..2 {
        let table = ablate(dir, &race("0.1", &one[..2])).1;
        assert!(table.contains("not reached by 1 of 1"), "{table}");
        assert_eq!((starts(), updates()), (3, 60), "{}", log());
    }
    for (word, part) in [
        ("lr=1e-4", "`optimizer.lr` is 0.0001 now and was"),
        ("train.steps=90", "`train.steps` is 90 now and was 60"),
        ("eval.rows=4", "`eval.rows` is 4 now and was 8"),
    ] {
        let refused = result(dir, &race("5.5", &["--seeds", "1", word]));
        refused.assert_refused(&["race/as-it-is_seed=0: the run that is there was begun"]);
        assert!(refused.err.contains(part) && refused.err.contains("another --run"), "{refused:?}");
        assert_eq!((starts(), updates()), (3, 60), "nothing was trained");
    }
}

#[test]
fn a_variant_that_fails_does_not_end_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let high = "lr=1e30 clip=0 train.on_nonfinite=stop";
    let words = ["--seeds", "2", "--try", high, "--try", "lr=1e-3"];
    let came = result(folder.path(), &race("6.2", &[&words[..], &["--json"]].concat()));
    assert_eq!(came.code, Some(1), "{came:?}");
    let report = object(&came.out);
    let failed = row(&report, high);
    assert!(failed["runs"][1]["why"].as_str().is_some_and(|why| why.contains("not finite")), "{failed}");
    assert!(failed["seconds"].is_null() && failed["runs"][0]["reached"].is_null(), "{failed}");
    assert!(row(&report, "lr=1e-3")["of_base"]["mean"].is_f64(), "{report:#}");
    assert!(row(&report, "as it is")["runs"][0].get("why").is_none(), "{report:#}");
    // The failed run is tried again, and the finished runs are kept.
    let came = result(folder.path(), &race("6.2", &words));
    assert_eq!(came.code, Some(1), "{came:?}");
    assert!(came.err.contains(&format!("to loss  {high}, seed 0 failed: step ")), "{}", came.err);
    assert!(came.out.contains("2 of 2 failed") && came.err.matches(" is done: ").count() == 4, "{came:?}");
}

#[test]
fn rows_have_what_the_contract_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let words = [
        "--repeats",
        "2",
        "--steps",
        "2",
        "--budget",
        "10",
        "--model",
        "--control",
        "--json",
        "--out",
        "page",
    ];
    let (report, result) = ablate(dir, &words);
    assert_eq!(result, "", "nothing beside the object");
    assert_eq!((&report["is_complete"], kept(dir)), (&true.into(), 0), "nothing is left to continue");
    assert_eq!(report["base"]["is_repeatable"], true);
    let base_loss = report["base"]["loss"].as_f64().expect("a loss");
    for (name, group) in [
        ("the base again", "control"),
        ("the base, its times 10% longer", "control"),
        ("fuse.qkv=off", "off"),
        ("fuse.optimizer=off", "off"),
        ("recompute=full", "instead"),
        ("precision=bf16", "instead"),
        ("plain FP32", "ladder"),
        ("norm=layer", "model"),
        ("kv_heads=2", "model"),
    ] {
        let row = row(&report, name);
        assert_eq!((&row["group"], &row["state"]), (&group.into(), &"measured".into()), "{name}");
        let measured = &row["measured"];
        for field in ["step_ms", "arena_bytes", "launches", "start_seconds", "loss", "parameters"] {
            assert!(measured[field].as_f64().expect(field) > 0.0, "{name}: {field}");
        }
        let ratio = &measured["base_is_faster_by"];
        assert_eq!(ratio["rounds"], 2, "{name}");
        let [low, ratio, high] = ["low", "ratio", "high"].map(|field| ratio[field].as_f64().expect(field));
        assert!(low <= ratio && ratio <= high && low > 0.0, "{name}: {low} {ratio} {high}");
        match group {
            "model" => assert_eq!(measured["numbers"], Value::Null, "another model has other losses"),
            _ => assert_eq!(measured["numbers"]["is_kept"], true, "{name}: {measured}"),
        }
    }
    for name in ["fuse.optimizer=off", "the base again", "recompute=full"] {
        assert_eq!(row(&report, name)["measured"]["numbers"]["same_bits"], true, "{name}");
        assert_eq!(row(&report, name)["measured"]["loss"].as_f64(), Some(base_loss), "{name}");
    }
    assert!(row(&report, "memory_plan=off")["measured"]["memory_difference"].as_i64().expect("bytes") > 0);
    assert_eq!(row(&report, "cuda_graphs=on")["state"], "refused");
    assert_eq!(row(&report, "autotune=off")["state"], "same");

    let page = fs::read_to_string(dir.join("page/ablate.md")).expect("a page");
    for text in [
        "## Each switch off alone",
        "| fuse.qkv=off |",
        "![each switch off alone](off.svg)",
        "## Not measured",
    ] {
        assert!(page.contains(text), "{text} in {page}");
    }
    for picture in ["off.svg", "ladder.svg", "models.svg", "instead.svg"] {
        let svg = fs::read_to_string(dir.join("page").join(picture)).expect(picture);
        assert!(svg.contains("<rect class=\"f") && svg.ends_with("</svg>\n"), "{picture}");
    }
    let written: Value =
        serde_json::from_slice(&fs::read(dir.join("page/ablate.json")).unwrap()).expect("an object");
    assert_eq!(written, report);
}

#[test]
fn measurements_continue_after_the_budget_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let words = ["--repeats", "1", "--steps", "1", "--only", "fuse.qkv"];
    // The budget suffices for the base only.
    let (_, result) = ablate(dir, &[&words[..], &["--budget", "0.00001"]].concat());
    assert!(result.contains("fuse.qkv=off: the budget ended first"), "{result}");
    assert_eq!(kept(dir), 1);
    let (_, result) = ablate(dir, &[&words[..], &["--budget", "10"]].concat());
    assert!(result.contains("\nfuse.qkv=off "), "{result}");
    assert_eq!(kept(dir), 0);
}
