//! Converts lines of a log to MLflow's metrics, tags and states, as many as one request takes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;

use flatout_train::run::events::{Event, Status};
use serde_json::{Value, json};

use crate::scalars;

/// The most points in a request.
pub const MOST: usize = 1000;
/// The most characters of a name and of a value that older servers accept.
const NAME: usize = 250;
const VALUE: usize = 500;

/// Some lines of a log, as they are sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub points: Vec<Value>,
    pub tags: Vec<Value>,
    /// The state of the run after these lines, if they change it.
    pub status: Option<&'static str>,
    /// The offset after these lines in the log, and the Unix time of the last of them.
    pub offset: u64,
    pub time: f64,
    pub lines: usize,
    /// Points that the server refused.
    pub refused: usize,
}

/// Reads whole lines from an offset, up to a change of the run's state or as many as a request takes, but at least one, which may
/// have more points than that.
pub fn read(log: &Path, offset: u64, time: f64) -> io::Result<Batch> {
    let mut file = File::open(log)?;
    // A log may have become shorter: a partial last line after a crash is truncated when the run is resumed.
    let offset = offset.min(file.metadata()?.len());
    file.seek(SeekFrom::Start(offset))?;
    let mut lines = BufReader::new(file);
    let mut batch = Batch { offset, time, ..Batch::default() };
    let mut line = vec![];
    while batch.status.is_none() {
        line.clear();
        let bytes = lines.read_until(b'\n', &mut line)?;
        if !line.ends_with(b"\n") {
            break;
        }
        // A line that is not an event has no points.
        let event: Option<Event> = serde_json::from_slice(&line).ok();
        let points = event.as_ref().map_or(vec![], |event| points(event, &mut batch.time));
        if batch.lines > 0 && batch.points.len() + points.len() > MOST {
            break;
        }
        batch.points.extend(points);
        if let Some(event) = &event {
            batch.status = status(event);
            batch.tags.extend(tags(event));
        }
        batch.offset += bytes as u64;
        batch.lines += 1;
    }
    Ok(batch)
}

/// The Unix time of a log's first `start` line.
pub fn first_start(log: &Path) -> Option<f64> {
    let lines = BufReader::new(File::open(log).ok()?).lines().map_while(Result::ok);
    let mut times = lines.filter_map(|line| match serde_json::from_str(&line) {
        Ok(Event::Start(start)) => Some(start.time),
        _ => None,
    });
    times.next().filter(|time| time.is_finite())
}

/// The points of an event. Evaluations have no time and take that of the step before them.
fn points(event: &Event, time: &mut f64) -> Vec<Value> {
    let own = match event {
        Event::Start(start) => start.time,
        Event::Step(step) => step.time,
        Event::End(end) => end.time,
        _ => f64::NAN,
    };
    if own.is_finite() {
        *time = own;
    }
    let Some((step, values)) = scalars::of(event) else { return vec![] };
    let timestamp = (*time * 1e3).round() as i64;
    let point = |(tag, value): (String, f64)| {
        let value = if value.is_finite() { json!(value) } else { json!("NaN") };
        json!({ "key": path(&tag), "value": value, "timestamp": timestamp, "step": step })
    };
    values.into_iter().map(point).collect()
}

fn status(event: &Event) -> Option<&'static str> {
    match event {
        Event::Start(_) => Some("RUNNING"),
        Event::End(end) => Some(match end.status {
            Status::Done => "FINISHED",
            Status::Stopped => "KILLED",
            Status::Failed => "FAILED",
        }),
        _ => None,
    }
}

fn tags(event: &Event) -> Vec<Value> {
    let Event::Start(start) = event else { return vec![] };
    let all = [
        ("flatout.version", start.version.clone()),
        ("flatout.device", start.device.clone()),
        ("flatout.backend", start.backend.clone()),
        ("flatout.parameters", start.parameters.to_string()),
    ];
    all.into_iter().filter(|(_, value)| !value.is_empty()).map(|(key, value)| pair(key, &value)).collect()
}

/// A parameter or a tag.
pub fn pair(key: &str, value: &str) -> Value {
    json!({ "key": name(key), "value": value.chars().take(VALUE).collect::<String>() })
}

/// The name of a metric, whose last part may be a user's name of a parameter group.
fn path(tag: &str) -> String {
    match tag.strip_prefix("train/lr/") {
        Some(group) => format!("train/lr/{}", name(group)).chars().take(NAME).collect(),
        None => tag.to_string(),
    }
}

/// Sanitises a name for MLflow: letters, digits and a few other characters, and never a name that means a folder.
fn name(given: &str) -> String {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "_-. ".contains(letter);
    let name: String =
        given.chars().map(|letter| if allowed(letter) { letter } else { '_' }).take(NAME).collect();
    if name.chars().all(|letter| letter == '.') { "_".repeat(name.len().max(1)) } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_sanitised() {
        assert_eq!(name("optimizer.lr"), "optimizer.lr");
        assert_eq!(name("../../etc/passwd"), ".._.._etc_passwd");
        assert_eq!(name(".."), "__");
        assert_eq!(name(""), "_");
        assert_eq!(name("a\u{1b}[31m\n☃"), "a__31m__");
        assert_eq!(name(&"x".repeat(1000)).len(), NAME);
        assert_eq!(path("train/lr/a/../b"), "train/lr/a_.._b");
        assert_eq!(path("train/loss"), "train/loss");
        assert_eq!(pair("k", &"v".repeat(10_000))["value"].as_str().map(str::len), Some(VALUE));
    }

    /// No request has more points than a server accepts, and no line is split.
    #[test]
    fn lines_are_read_in_batches_from_the_last_offset() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("events.jsonl");
        let eval = |step: u64| {
            let event = Event::Eval {
                step,
                loss: if step == 7 { f32::NAN } else { step as f32 },
                metrics: None,
                averaged: false,
            };
            event.to_json() + "\n"
        };
        let mut text: String = (0..2500).map(eval).collect();
        text += "no event at all\n";
        text += r#"{"event":"eval","step":99"#;
        std::fs::write(&log, &text).unwrap();
        let (mut offset, mut steps, mut sizes) = (0, vec![], vec![]);
        loop {
            let batch = read(&log, offset, 5.5).unwrap();
            if batch.offset == offset {
                break;
            }
            offset = batch.offset;
            sizes.push(batch.points.len());
            steps.extend(batch.points.iter().map(|point| point["step"].as_u64().unwrap()));
        }
        assert_eq!(sizes, [1000, 1000, 500]);
        assert!(steps.into_iter().eq(0..2500));
        assert_eq!(&text[offset as usize..], r#"{"event":"eval","step":99"#);
        let first = read(&log, 0, 5.5).unwrap();
        assert_eq!(
            first.points[7],
            json!({ "key": "eval/loss", "value": "NaN", "timestamp": 5500, "step": 7 })
        );
        assert_eq!(read(&log, 1 << 40, 0.0).unwrap().lines, 0, "a log that is shorter now");
    }
}
