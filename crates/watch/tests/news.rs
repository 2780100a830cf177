//! Updates that pages receive: new steps, a crash, a resumption, folders that appear and disappear.

use std::fs::{self, File};

use flatout_watch::live::MOST_PAGES;
use serde_json::{Value, json};

use crate::client::{Fixture, append, start, step};

/// Curves as a page builds them from updates.
#[derive(Default)]
struct Curve {
    steps: Vec<u64>,
    losses: Vec<f64>,
}

impl Curve {
    fn take(&mut self, run: &Value) {
        let news = &run["steps"];
        let from = news["from"].as_u64().unwrap() as usize;
        self.steps.truncate(from);
        self.losses.truncate(from);
        self.steps.extend(news["step"].as_array().unwrap().iter().filter_map(Value::as_u64));
        let losses = news["curves"]["loss"]["mean"].as_array().cloned().unwrap_or_default();
        self.losses.extend(losses.iter().filter_map(Value::as_f64));
    }
}

#[test]
fn a_run_is_followed_through_a_crash_and_its_resumption() {
    let fixture = Fixture::new();
    let run = fixture.run("tiny-1");
    let lock = File::create(run.join("lock")).unwrap();
    lock.lock().unwrap();
    append(&run, &[start(6), step(1, 5.0)]);
    let (mut live, mut curve) = (fixture.live(&["tiny-1"]), Curve::default());
    live.until("runs", |list| list["runs"][0]["state"] == "running" && list["runs"][0]["step"] == 1);
    let mut reach = |live: &mut crate::client::News, steps: &[u64], losses: &[f64]| {
        live.until("run", |run| {
            curve.take(run);
            curve.steps == steps
        });
        assert_eq!(curve.losses, losses);
    };
    reach(&mut live, &[1], &[5.0]);
    append(&run, &[step(2, 4.0), json!({ "event": "saved", "step": 2, "path": "x" }), step(3, 9.0)]);
    reach(&mut live, &[1, 2, 3], &[5.0, 4.0, 9.0]);
    // It crashes within a line.
    let mut log = fs::OpenOptions::new().append(true).open(run.join("events.jsonl")).unwrap();
    std::io::Write::write_all(&mut log, b"{\"event\":\"step\",\"st").unwrap();
    drop(lock);
    live.until("runs", |list| list["runs"][0]["state"] == "crashed");
    // It resumes from its checkpoint: the partial line is removed, and the third step is made again.
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap();
    let whole = text.rfind('\n').unwrap() + 1;
    log.set_len(whole as u64).unwrap();
    let lock = File::open(run.join("lock")).unwrap();
    lock.lock().unwrap();
    append(&run, &[start(6), json!({ "event": "resume", "step": 2 }), step(3, 3.0), step(4, 2.0)]);
    reach(&mut live, &[1, 2, 3, 4], &[5.0, 4.0, 3.0, 2.0]);
    append(
        &run,
        &[json!({ "event": "end", "status": "done", "steps": 4, "loss": 2.0, "tokens_per_second": 1.0 })],
    );
    drop(lock);
    live.until("runs", |list| list["runs"][0]["state"] == "done");
    // A page that is opened now has the same.
    let mut late = Curve::default();
    late.take(&fixture.live(&["tiny-1"]).until("run", |_| true));
    assert_eq!(late.losses, [5.0, 4.0, 3.0, 2.0]);
}

#[test]
fn folders_appear_and_disappear() {
    let fixture = Fixture::new();
    let mut live = fixture.live(&["b"]);
    live.until("runs", |list| list["runs"].as_array().unwrap().is_empty());
    append(&fixture.run("a"), &[start(5), step(1, 2.5)]);
    let b = fixture.run("b");
    append(&b, &[start(5), step(1, 1.5)]);
    live.until("run", |run| run["id"] == "b");
    fs::create_dir(fixture.runs().join("swept")).unwrap();
    fs::write(fixture.runs().join("swept/sweep.json"), "{\"goal\":\"loss\",\"runs\":[]}").unwrap();
    append(&fixture.run("swept/lr=1"), &[start(5)]);
    live.until("runs", |list| list["sweeps"] == json!(["swept"]));
    assert_eq!(fixture.get("/api/sweep?id=swept").0, 200);
    fs::remove_dir_all(&b).unwrap();
    let list = live.until("runs", |list| list["all"] == true && list["runs"].as_array().unwrap().len() == 2);
    assert_eq!(list["runs"][1]["id"], "swept/lr=1");
    assert_eq!(fixture.get("/api/run?id=b").0, 404);
    // Another run of the same name is another run.
    append(&fixture.run("b"), &[start(5), step(1, 8.5), step(2, 7.5)]);
    let mut curve = Curve::default();
    live.until("run", |run| {
        curve.take(run);
        curve.losses == [8.5, 7.5]
    });
    fs::remove_dir_all(fixture.runs()).unwrap();
    live.until("runs", |list| list["all"] == true && list["runs"].as_array().unwrap().is_empty());
    assert_eq!(fixture.get("/").0, 200, "the page is still there");
}

#[test]
fn the_rest_of_a_folder_is_shown() {
    let fixture = Fixture::new();
    let run = fixture.run("tiny-1");
    let config = flatout_train::recipes::resolve("tiny", &[], &["lr=0.0123".into()]).unwrap();
    fs::write(run.join("config.toml"), config.to_toml()).unwrap();
    append(&run, &[start(5), step(1, 2.5)]);
    let write = |path: std::path::PathBuf, value: Value| fs::write(path, value.to_string()).unwrap();
    write(run.join("plan.json"), json!({ "arena_bytes": 7 }));
    write(fixture.runs().join("ablate.json"), json!({ "recipe": "tiny", "rows": [] }));
    write(fixture.runs().join("profile.json"), json!({ "recipe": "other", "kernels": [] }));
    write(run.join("samples.jsonl"), json!({ "step": 3, "text": "once" }));
    let mut live = fixture.live(&["tiny-1"]);
    live.until("run", |_| true);
    let response: Value = serde_json::from_str(&fixture.get("/api/run?id=tiny-1").1).unwrap();
    assert_eq!(response["config"]["optimizer.lr"], "0.0123");
    assert_eq!(response["plan"]["arena_bytes"], 7);
    assert_eq!(response["ablation"]["recipe"], "tiny", "a shared file applies to the runs of its recipe");
    assert_eq!(response["profile"], Value::Null, "and not to those of another recipe");
    assert_eq!(response["samples"][0]["text"], "once");
    assert_eq!(response["record"]["starts"], 1);
    assert_eq!(response["problems"], json!([]));
}

#[test]
fn samples_are_sent_with_their_run() {
    let fixture = Fixture::new();
    let run = fixture.run("a");
    let sample =
        |step: u64, text: &str| json!({ "event": "sample", "step": step, "prompt": "once", "text": text });
    append(&run, &[start(9), step(1, 2.5), sample(1, "first"), step(2, 2.0), sample(2, "second")]);
    fs::write(run.join("samples.jsonl"), "{\"step\":9,\"prompt\":\"\",\"text\":\"last\"}\n").unwrap();
    fixture.live(&["a"]).until("run", |run| run["id"] == "a" && run["read"] == 1.0);
    let response: Value = serde_json::from_str(&fixture.get("/api/run?id=a").1).unwrap();
    let texts: Vec<&str> = response["samples"]
        .as_array()
        .unwrap()
        .iter()
        .map(|sample| sample["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["first", "second", "last"]);
}

#[test]
fn the_folder_of_a_sweep_shows_the_sweep() {
    let fixture =
        Fixture::of(|runs| fs::write(runs.join("sweep.json"), "{\"recipe\":\"tiny\",\"runs\":[]}").unwrap());
    append(&fixture.run("lr=1"), &[start(9), step(1, 2.5)]);
    let list = fixture.live(&[]).until("runs", |list| list["runs"].as_array().unwrap().len() == 1);
    assert_eq!((&list["sweeps"], &list["runs"][0]["id"]), (&json!(["."]), &json!("lr=1")));
    assert_eq!(fixture.get("/api/sweep?id=.").0, 200);
}

#[test]
fn the_oldest_of_too_many_pages_is_disconnected() {
    let fixture = Fixture::new();
    append(&fixture.run("a"), &[start(9), step(1, 2.5)]);
    let mut first = fixture.live(&["a"]);
    first.until("runs", |_| true);
    let mut others: Vec<_> = (0..MOST_PAGES).map(|_| fixture.live(&["a"])).collect();
    assert_eq!(first.until("full", |_| true), json!({ "most_pages": MOST_PAGES }));
    for other in &mut others {
        other.until("runs", |list| list["runs"].as_array().unwrap().len() == 1);
    }
}
