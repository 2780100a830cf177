//! `profile` as users run it: tables, JSON, a trace, and no work if the trace cannot be written.

use serde_json::Value;

use crate::program::{SMALL, execute};

fn words<'a>(more: &[&'a str]) -> Vec<&'a str> {
    ["profile", "tiny", "backend=cpu", "--steps", "1"].iter().chain(&SMALL).chain(more).copied().collect()
}

#[test]
fn an_update_is_profiled_and_traced() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let result = execute(dir, &words(&["--json", "--trace", "trace.json"]));
    assert_eq!((result.code, result.err.as_str()), (Some(0), ""), "nothing beside the object");
    let report: Value = serde_json::from_str(&result.out).expect("one object");
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    let budget = &report["budget"];
    let parts = ["kernels_ms", "launch_ms", "synchronisation_ms", "copy_ms", "data_ms"];
    let sum: f64 = parts.iter().map(|part| number(&budget[part])).sum();
    assert!((sum / number(&budget["step_ms"]) - 1.0).abs() < 1e-6, "{budget}");
    for table in ["work", "kernels", "places"] {
        let rows = report[table].as_array().expect(table);
        let share: f64 = rows.iter().map(|row| number(&row["share"])).sum();
        let kernels = number(&budget["kernels_ms"]) / number(&budget["step_ms"]);
        assert!((share / kernels - 1.0).abs() < 1e-6, "{table}: {share} of {kernels}");
    }
    let launches: f64 =
        report["timed"].as_array().expect("launches").iter().map(|t| number(&t["times"])).sum();
    assert_eq!(launches, number(&report["launches"]));
    assert!(
        report["sinks"].as_array().is_some_and(|sinks| sinks.len() == 3 && sinks[0]["words"].is_string())
    );
    let trace: Value =
        serde_json::from_slice(&std::fs::read(dir.join("trace.json")).expect("a trace")).expect("JSON");
    let slices = trace["traceEvents"].as_array().expect("events").iter().filter(|e| e["ph"] == "X");
    assert!(slices.count() as f64 > launches);
}

#[test]
fn tables_are_short_without_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = execute(folder.path(), &words(&[]));
    assert_eq!(result.code, Some(0), "{}", result.err);
    for text in [
        "tiny on ",
        "\nwhere an update goes\n",
        "\nby kind of work\n",
        "\nwhere the most is lost\n1. ",
        "more take",
    ] {
        assert!(result.out.contains(text), "{text} in {}", result.out);
    }
    let all = execute(folder.path(), &words(&["--all"]));
    assert!(
        !all.out.contains("more take") && all.out.lines().count() > result.out.lines().count(),
        "{}",
        all.out
    );
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "no run is made");
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_before_any_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = execute(folder.path(), &words(&["--trace", "nowhere/trace.json"]));
    result.assert_refused(&["flatout: nowhere/trace.json cannot be written: ", "give another --trace"]);
}
