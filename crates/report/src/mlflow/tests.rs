//! Sends runs to a server that works, is slow, silent or away, or answers nonsense.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use flatout_train::Config;
use flatout_train::recipes;
use flatout_train::run::events::{End, Event, Start, Status};
use flatout_train::training::trainer::Sink;

use super::client::{Client, Credentials};
use super::follow::Follower;
use super::server::{Behaviour, Server};
use super::{Following, Mlflow, tell};

fn config(server: &str) -> Config {
    let words = [
        format!("track.mlflow={server}"),
        "track.experiment_name=two words".into(),
        "track.run_name=mine".into(),
    ];
    recipes::resolve("tiny", &[], &words).expect("a config")
}

fn append(run: &Path, event: &Event) {
    let log = OpenOptions::new().append(true).create(true).open(run.join("events.jsonl"));
    log.expect("a log").write_all((event.to_json() + "\n").as_bytes()).expect("a line");
}

fn eval(step: u64) -> Event {
    Event::Eval { step, loss: step as f32 / 4.0, metrics: None, averaged: false }
}

fn start() -> Event {
    Event::Start(Start { time: 1e9, device: "a machine".into(), ..Start::default() })
}

fn end(status: Status) -> Event {
    Event::End(End {
        status,
        steps: 3,
        loss: 1.0,
        loss_floor: None,
        tokens_per_second: 1.0,
        skipped: 0,
        time: 2e9,
        data_wait: None,
        early: None,
    })
}

/// The steps of the points that a server has, in order.
fn steps(server: &Server) -> Vec<u64> {
    let mut steps: Vec<u64> =
        server.known().points.values().map(|point| point["step"].as_u64().unwrap()).collect();
    steps.sort_unstable();
    steps
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_run_is_followed_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(Behaviour::Well);
    let mut mlflow = Mlflow::default();
    append(folder.path(), &start());
    mlflow.open(folder.path(), 0, &config(&server.address));
    for step in 1..=3 {
        append(folder.path(), &eval(step));
        assert_eq!(mlflow.record(&eval(step)), None);
    }
    let ended = end(Status::Done);
    append(folder.path(), &ended);
    assert_eq!(mlflow.record(&ended), None);
    let known = server.known();
    assert_eq!(known.experiments, ["two words"]);
    assert_eq!(known.runs.len(), 1);
    assert_eq!(known.runs[0].0["start_time"], 1_000_000_000_000_i64, "the time of the first line");
    assert_eq!((known.runs[0].0["run_name"].as_str(), known.runs[0].1.as_str()), (Some("mine"), "FINISHED"));
    assert_eq!(steps(&server), [1, 2, 3]);
    assert_eq!(known.parameters["model.width"], "128");
    assert_eq!(known.parameters["recipe"], "tiny");
    assert_eq!(known.tags["flatout.device"], "a machine");
    assert!(known.points.values().all(|point| point["timestamp"] == 1_000_000_000_000_i64));

    // When the run is resumed, so is the server's run.
    let mut again = Mlflow::default();
    again.open(folder.path(), 3, &config(&server.address));
    for event in [start(), Event::Resume { step: 3 }, eval(4)] {
        append(folder.path(), &event);
        assert_eq!(again.record(&event), None);
    }
    until("it runs again", || server.known().runs[0].1 == "RUNNING");
    let stopped = end(Status::Stopped);
    append(folder.path(), &stopped);
    assert_eq!(again.record(&stopped), None);
    assert_eq!((steps(&server), server.known().runs.len()), (vec![1, 2, 3, 4], 1));
    assert_eq!(server.known().runs[0].1, "KILLED");
    assert_eq!(
        tell(folder.path(), &config(&server.address)).unwrap().lines,
        0,
        "there is nothing more to send"
    );

    // Another server has received nothing yet.
    let other = Server::start(Behaviour::Well);
    let sent = tell(folder.path(), &config(&other.address)).unwrap();
    assert_eq!((sent.lines, sent.points, steps(&other)), (9, 4, vec![1, 2, 3, 4]));
    assert_eq!(other.known().runs[0].1, "KILLED");
    // The record of the first one is kept, however its address is written.
    assert_eq!(tell(folder.path(), &config(&format!("{}/", server.address))).unwrap().lines, 0);
    assert_eq!(server.known().runs.len(), 1);
}

/// A failing server costs one warning, and receives everything once when it works again.
#[test]
fn a_server_that_was_away_receives_everything_once() {
    let behaviours = [
        Behaviour::Status(503),
        Behaviour::Status(401),
        Behaviour::Status(200),
        Behaviour::BreaksOff,
        Behaviour::Noise,
    ];
    for behaviour in behaviours {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(behaviour);
        let mut mlflow = Mlflow::default();
        append(folder.path(), &start());
        mlflow.open(folder.path(), 0, &config(&server.address));
        append(folder.path(), &eval(1));
        let mut warned = vec![];
        until("it warns", || server.requests.load(std::sync::atomic::Ordering::Relaxed) > 0);
        let began = Instant::now();
        while warned.is_empty() && began.elapsed() < Duration::from_secs(20) {
            warned.extend(mlflow.record(&eval(1)));
            std::thread::sleep(Duration::from_millis(2));
        }
        let [warning] = &warned[..] else { panic!("{behaviour:?}: {warned:?}") };
        assert!(warning.contains("the run goes on") && warning.lines().count() == 1, "{warning}");
        // The server may have accepted requests whose responses were lost: it must not store them twice.
        server.behave(Behaviour::Well);
        append(folder.path(), &eval(2));
        let ended = end(Status::Failed);
        append(folder.path(), &ended);
        let last = mlflow.record(&ended).unwrap_or_default();
        if last.contains("has not received") {
            tell(folder.path(), &config(&server.address)).unwrap();
        }
        assert_eq!(steps(&server), [1, 2], "{behaviour:?}: {last}");
        let known = server.known();
        assert_eq!((known.runs.len(), known.runs[0].1.as_str()), (1, "FAILED"), "{behaviour:?}");
    }
}

/// With a closed port or a silent server, steps do not wait, and the end waits only for a short time.
#[test]
fn no_step_waits_for_a_tracker() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let silent = Server::start(Behaviour::Silent);
    for address in [format!("http://{closed}"), silent.address.clone()] {
        let folder = tempfile::tempdir().unwrap();
        append(folder.path(), &start());
        let following = Following::begin(folder.path(), &config(&address), &address).unwrap();
        let mut mlflow = Mlflow { following: Some(following), trouble: None };
        let began = Instant::now();
        for step in 0..10_000 {
            mlflow.record(&eval(step));
        }
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        append(folder.path(), &eval(1));
        let began = Instant::now();
        let warning = mlflow.following.take().unwrap().finish(Duration::from_millis(300)).unwrap();
        assert!(began.elapsed() < Duration::from_secs(3));
        assert!(
            warning.contains("has not received the last 2 lines") && warning.contains("flatout runs track"),
            "{warning}"
        );
        let failed = match address == silent.address {
            true => continue,
            false => tell(folder.path(), &config(&address)).unwrap_err().0,
        };
        assert!(failed.contains("it does not answer"), "{failed}");
    }
}

#[test]
fn refused_points_are_skipped_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(Behaviour::RefusesPoints);
    [start(), eval(1)].iter().for_each(|event| append(folder.path(), event));
    let sent = tell(folder.path(), &config(&server.address)).unwrap();
    assert_eq!(sent.refused.as_deref(), Some("it says 400 no[31m points here"));
    server.behave(Behaviour::Well);
    append(folder.path(), &eval(2));
    assert_eq!(tell(folder.path(), &config(&server.address)).unwrap().refused, None);
    assert_eq!(steps(&server), [2]);
    // A run that the server has lost ends the sending.
    server.known.lock().unwrap().runs.clear();
    append(folder.path(), &eval(3));
    assert!(tell(folder.path(), &config(&server.address)).unwrap_err().0.contains("there is none"));
}

/// Every batch of a long log is refused for the same reason, which is reported once.
#[test]
fn a_reason_of_refusals_is_reported_once() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(Behaviour::RefusesPoints);
    let text: String = (0..3456).map(|step| eval(step).to_json() + "\n").collect();
    std::fs::write(folder.path().join("events.jsonl"), text).unwrap();
    let following = Following::begin(folder.path(), &config(&server.address), &server.address).unwrap();
    let warning = following.finish(Duration::from_secs(30)).unwrap();
    assert_eq!(warning.matches("refuses some of the data").count(), 1, "{warning}");
    let other = tempfile::tempdir().unwrap();
    std::fs::copy(folder.path().join("events.jsonl"), other.path().join("events.jsonl")).unwrap();
    let sent = tell(other.path(), &config(&server.address)).unwrap();
    assert_eq!((sent.lines, sent.points), (3456, 0));
}

/// After the run is deleted on the server there is one warning and no more requests. Once it is restored, nothing is missing.
#[test]
fn a_deleted_run_ends_the_sending_and_is_completed_later() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(Behaviour::Well);
    let mut mlflow = Mlflow::default();
    [start(), eval(1)].iter().for_each(|event| append(folder.path(), event));
    mlflow.open(folder.path(), 0, &config(&server.address));
    until("it has a point", || !server.known().points.is_empty());
    server.known.lock().unwrap().deleted.insert(0);
    append(folder.path(), &eval(2));
    until("the thread ends", || mlflow.following.as_ref().unwrap().thread.is_finished());
    let requests = server.requests.load(std::sync::atomic::Ordering::Relaxed);
    let mut warned = vec![];
    for step in 3..6 {
        append(folder.path(), &eval(step));
        warned.extend(mlflow.record(&eval(step)));
    }
    let ended = end(Status::Done);
    append(folder.path(), &ended);
    warned.extend(mlflow.record(&ended));
    let [warning] = &warned[..] else { panic!("{warned:?}") };
    assert!(warning.contains("is deleted there") && warning.contains("flatout runs track"), "{warning}");
    assert_eq!(server.requests.load(std::sync::atomic::Ordering::Relaxed), requests);
    let refused = tell(folder.path(), &config(&server.address)).unwrap_err().0;
    assert!(refused.contains("restore it"), "{refused}");
    server.known.lock().unwrap().deleted.clear();
    assert_eq!(tell(folder.path(), &config(&server.address)).unwrap().points, 4);
    assert_eq!((steps(&server), server.known().runs[0].1.as_str()), (vec![1, 2, 3, 4, 5], "FINISHED"));
}

#[test]
fn requests_become_smaller_where_they_are_too_large() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(Behaviour::AtMost(100));
    let text: String = (0..3456).map(|step| eval(step).to_json() + "\n").collect();
    std::fs::write(folder.path().join("events.jsonl"), text).unwrap();
    let sent = tell(folder.path(), &config(&server.address)).unwrap();
    assert_eq!((sent.points, sent.refused, steps(&server).len()), (3456, None, 3456));
    // The size is kept once it is found: a thousand is halved four times to 62.
    assert_eq!(server.known().largest_request, 62);
    assert!(server.requests.load(std::sync::atomic::Ordering::Relaxed) < 90);

    // Where not even one point is small enough, the points are skipped.
    let folder = tempfile::tempdir().unwrap();
    (0..3).for_each(|step| append(folder.path(), &eval(step)));
    let server = Server::start(Behaviour::AtMost(0));
    let sent = tell(folder.path(), &config(&server.address)).unwrap();
    assert_eq!((sent.lines, sent.points, sent.refused.as_deref()), (3, 0, Some("it says 413")));
}

/// The server keeps the first value of a parameter; the other parameters of a refused request are still sent.
#[test]
fn a_refused_parameter_is_named_and_the_others_are_sent() {
    let folder = tempfile::tempdir().unwrap();
    append(folder.path(), &start());
    let whole = Server::start(Behaviour::Well);
    assert_eq!(tell(folder.path(), &config(&whole.address)).unwrap().refused, None);
    let server = Server::start(Behaviour::Well);
    let elsewhere = [("model.width", "another"), ("train.steps", "another")];
    server.known.lock().unwrap().parameters.extend(elsewhere.map(|(key, value)| (key.into(), value.into())));
    let refused = tell(folder.path(), &config(&server.address)).unwrap().refused.unwrap();
    for part in ["changing a parameter is not allowed", "model.width", "train.steps"] {
        assert!(refused.contains(part), "{refused}");
    }
    let mut expected = whole.known().parameters;
    expected.extend(elsewhere.map(|(key, value)| (key.into(), value.into())));
    expected.insert("track.mlflow".into(), format!("{:?}", server.address));
    assert_eq!(server.known().parameters, expected);
}

#[test]
fn long_logs_are_split_into_requests_that_servers_accept() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(Behaviour::Slow(Duration::from_millis(1)));
    let text: String = (0..3456).map(|step| eval(step).to_json() + "\n").collect();
    std::fs::write(folder.path().join("events.jsonl"), text).unwrap();
    let credentials = Credentials { token: Some("secret".into()), ..Credentials::default() };
    let client = Client::new(&server.address, credentials).unwrap();
    let sent =
        Follower::new(folder.path(), &config(&server.address), &server.address, client).send_all().unwrap();
    assert_eq!((sent.points, steps(&server).len()), (3456, 3456));
    let known = server.known();
    assert_eq!(known.largest_request, 1000);
    assert!(known.authorizations.iter().all(|header| header.as_deref() == Some("Bearer secret")));
    let kept = std::fs::read_to_string(folder.path().join("mlflow.json")).unwrap();
    assert!(!kept.contains("secret"), "no secret is kept");
}

/// A line has as many points as the optimiser has groups.
#[test]
fn a_line_with_many_points_is_sent_in_several_requests() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(Behaviour::Well);
    let rates: serde_json::Map<String, serde_json::Value> =
        (0..2500).map(|group| (format!("g{group}"), group.into())).collect();
    let step = serde_json::json!({
        "event": "step", "step": 1, "epoch": 0.5, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "lrs": rates, "tokens": 1, "samples": 1,
        "step_ms": 1.0, "tokens_per_second": 1.0, "samples_per_second": 1.0, "time": 1e9,
    });
    let lines = [eval(0).to_json(), step.to_string(), eval(2).to_json()].map(|line| line + "\n");
    std::fs::write(folder.path().join("events.jsonl"), lines.concat()).unwrap();
    let sent = tell(folder.path(), &config(&server.address)).unwrap();
    let known = server.known();
    assert_eq!((sent.lines, sent.points, known.largest_request), (3, known.points.len(), 1000));
    let rates =
        known.points.values().filter(|point| point["key"].as_str().unwrap().starts_with("train/lr/g"));
    assert_eq!(rates.count(), 2500);
    assert_eq!(steps(&server).last(), Some(&2));
}

#[test]
fn a_run_without_a_tracker_is_sent_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let plain = recipes::resolve("tiny", &[], &[]).unwrap();
    let mut mlflow = Mlflow::default();
    mlflow.open(folder.path(), 0, &plain);
    assert_eq!(mlflow.record(&end(Status::Done)), None);
    assert!(tell(folder.path(), &plain).unwrap_err().0.contains("names no tracker"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
