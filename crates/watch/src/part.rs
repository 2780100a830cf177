//! Reads a part of a log again when a chart is zoomed, because curves of few steps are finer than those of all.
//!
//! While a log is read, [`Marks`] keeps the offsets of some of its steps. A part is read from the mark before its first step to
//! the one after its last, and nothing else of the log.

use std::fs::File;
use std::io;

use serde_json::{Value, json};

use crate::follow::read_at;
use crate::line::Line;
use crate::record::{Clock, Record};

/// The most marks that are kept.
const MARKS: usize = 1024;
/// The most bytes of a log that are read again: where there are more between two steps, the present curves are fine enough.
const MOST_BYTES: u64 = 128 << 20;
const CHUNK: usize = 1 << 20;

/// A position in a log.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// The offset of the begin of a line.
    offset: u64,
    /// The smallest step that the log was at between here and the next mark: a run that goes back to a checkpoint has smaller
    /// steps again.
    step: u64,
    clock: Clock,
}

/// Positions in a log, in ascending order.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    marks: Vec<Mark>,
    /// The least number of bytes between two of them.
    apart: u64,
}

impl Marks {
    /// Adds a mark at an offset up to which the log has given `record`.
    pub fn see(&mut self, offset: u64, record: &Record) {
        if self.marks.last().is_some_and(|last| offset < last.offset + self.apart) {
            return;
        }
        if self.marks.len() == MARKS {
            self.apart = (2 * self.apart).max(2 * CHUNK as u64);
            let joined = |pair: &[Mark]| Mark {
                step: pair.iter().map(|mark| mark.step).min().unwrap_or(0),
                ..pair[0]
            };
            self.marks = self.marks.chunks(2).map(joined).collect();
        }
        self.marks.push(Mark { offset, step: record.last_step(), clock: record.clock() });
    }

    /// Notes that the log has gone back to a step.
    pub fn go_back(&mut self, step: u64) {
        if let Some(last) = self.marks.last_mut() {
            last.step = last.step.min(step);
        }
    }

    /// The range of the lines with steps from `from` to `to`, where the log has them last; `None` where it is too large, or there
    /// are no marks.
    pub fn part(&self, from: u64, to: u64, size: u64) -> Option<LogRange> {
        let first = self.marks.iter().rposition(|mark| mark.step < from).unwrap_or(0);
        let begin = *self.marks.get(first)?;
        let last = self.marks.iter().rposition(|mark| mark.step <= to).map_or(first, |last| last.max(first));
        let end = self.marks.get(last + 1).map_or(size, |mark| mark.offset);
        let is_small = end.saturating_sub(begin.offset) <= MOST_BYTES;
        is_small.then_some(LogRange { begin, end, from, to })
    }
}

/// A range of a log to be read.
#[derive(Clone, Copy, Debug)]
pub struct LogRange {
    begin: Mark,
    end: u64,
    from: u64,
    to: u64,
}

impl LogRange {
    /// Reads the curves of its steps, as columns.
    pub fn read(&self, file: &File) -> io::Result<Value> {
        let mut record = Record::at(self.begin.clock);
        let (mut offset, mut buffer, mut want) = (self.begin.offset, vec![], CHUNK);
        while offset < self.end {
            buffer.resize(want.min((self.end - offset) as usize), 0);
            let have = read_at(file, &mut buffer, offset)?;
            let Some(end) = buffer[..have].iter().rposition(|byte| *byte == b'\n') else {
                // A line that is longer than the buffer, or a partial one at the end.
                if have < buffer.len() || want as u64 > MOST_BYTES || offset + have as u64 >= self.end {
                    break;
                }
                want *= 2;
                continue;
            };
            for line in buffer[..=end].split_inclusive(|byte| *byte == b'\n') {
                if let Some(read) = Line::read(line) {
                    self.take(&mut record, &read, line);
                }
            }
            offset += end as u64 + 1;
            want = CHUNK;
        }
        record.steps.keep(self.to);
        let curves = if record.last_step() < self.from { Value::Null } else { record.steps.since(0) };
        Ok(json!({ "from": self.from, "to": self.to, "steps": curves }))
    }

    fn take(&self, record: &mut Record, read: &Line<'_>, line: &[u8]) {
        match (&*read.event, read.step.unwrap_or(0)) {
            ("step", step) if step > self.to => {}
            ("step", step) => {
                // Steps before the range set the clock, and are not kept.
                if step >= self.from && record.last_step() < self.from {
                    record.steps.clear();
                }
                record.take(read, line);
            }
            ("start" | "resume", _) => record.take(read, line),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use crate::follow::Follower;

    /// Reads a log, and one of its parts.
    fn part_of(text: &str, from: u64, to: u64) -> (Follower, Option<Value>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        std::fs::write(&path, text).unwrap();
        let file = File::open(&path).unwrap();
        let mut follower = Follower::default();
        while follower.advance(&file, 1 << 20).unwrap() {}
        let part = follower.part(from, to).map(|part| part.read(&file).unwrap());
        (follower, part)
    }

    fn steps(text: &mut String, steps: std::ops::RangeInclusive<u64>, began: f64) {
        for step in steps {
            let time = began + step as f64;
            writeln!(text, "{{\"event\":\"step\",\"step\":{step},\"loss\":{},\"tokens\":{step},\"time\":{time},\"pad\":\"{:80}\"}}", step % 7, "")
                .unwrap();
        }
    }

    #[test]
    fn a_part_has_every_step() {
        let mut text = String::from("{\"event\":\"start\",\"time\":0,\"steps\":90000}\n");
        steps(&mut text, 1..=90_000, 0.0);
        let (follower, part) = part_of(&text, 60_000, 60_099);
        assert!(follower.record.steps.since(0)["stride"].as_u64().unwrap() >= 32);
        let part = part.unwrap();
        let columns = &part["steps"];
        let wanted: Vec<u64> = (60_000..=60_099).collect();
        assert_eq!((&columns["step"], &columns["stride"]), (&json!(wanted), &json!(1)));
        let losses: Vec<f64> = wanted.iter().map(|step| (step % 7) as f64).collect();
        assert_eq!(columns["curves"]["loss"]["mean"], json!(losses));
        assert_eq!(columns["seconds"][0], json!(60_000.0));
        // A long part is downsampled to the buckets that a chart shows.
        let (_, whole) = part_of(&text, 1, 80_000);
        let whole = whole.unwrap();
        assert!(whole["steps"]["step"].as_array().unwrap().len() <= 2048);
        let (_, none) = part_of(&text, 95_000, 96_000);
        assert_eq!(none.unwrap()["steps"], Value::Null);
    }

    #[test]
    fn the_last_of_repeated_steps_counts() {
        let mut text = String::from("{\"event\":\"start\",\"time\":0,\"steps\":90000}\n");
        steps(&mut text, 1..=30_000, 0.0);
        text +=
            "{\"event\":\"start\",\"time\":100000,\"steps\":90000}\n{\"event\":\"resume\",\"step\":20000}\n";
        steps(&mut text, 20_001..=40_000, 80_000.0);
        for (from, to) in [(19_990, 20_010), (24_990, 25_010), (29_990, 30_010)] {
            let (_, part) = part_of(&text, from, to);
            let columns = part.unwrap()["steps"].clone();
            let wanted: Vec<u64> = (from..=to).collect();
            assert_eq!(columns["step"], json!(wanted));
            let seconds = columns["seconds"].as_array().unwrap();
            let last = seconds.last().unwrap().as_f64().unwrap();
            assert!((last - to as f64).abs() < 2.0, "the clock of {to} is at {last}");
        }
    }
}
