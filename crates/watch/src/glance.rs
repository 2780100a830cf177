//! Summarises a log by its first and last lines, which is fast enough for a list of thousands of runs with large logs.

use std::fs::File;
use std::io;

use serde::Serialize;

use crate::follow::read_at;
use crate::line::Line;

/// Bytes read at the beginning of a log and at its end; more at the end where these have no step, up to a bound.
const HEAD: usize = 64 << 10;
const TAIL: u64 = 64 << 10;
const MOST_TAIL: u64 = 4 << 20;

/// A run in a list. Values that are not in the lines that were read are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Glance {
    pub recipe: Option<String>,
    /// Unix times of its first start and of its newest step.
    pub started: Option<f64>,
    pub time: Option<f64>,
    pub step: u64,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    pub loss: Option<f64>,
    pub eval_loss: Option<f64>,
    pub tokens_per_second: Option<f64>,
    pub samples_per_second: Option<f64>,
    /// The status in the `end` line of the newest process, if it wrote one.
    pub status: Option<String>,
}

impl Glance {
    /// Reads a summary of a log. `before` is the previous one of the same log, whose evaluation may be too far back now.
    pub fn at(file: &File, before: Option<&Glance>) -> io::Result<Glance> {
        let size = file.metadata()?.len();
        let mut glance = Glance::default();
        let mut buffer = vec![0; HEAD.min(size as usize)];
        let have = read_at(file, &mut buffer, 0)?;
        let whole = buffer[..have].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in buffer[..whole].split(|byte| *byte == b'\n').filter_map(Line::read) {
            if line.event == "start" {
                glance.started = glance.started.or(line.time);
            }
            glance.take(&line);
        }
        if size <= HEAD as u64 {
            return Ok(glance);
        }
        let mut tail = TAIL;
        loop {
            let begin = size.saturating_sub(tail);
            buffer.resize((size - begin) as usize, 0);
            let have = read_at(file, &mut buffer, begin)?;
            let first = buffer[..have].iter().position(|byte| *byte == b'\n').map_or(have, |end| end + 1);
            let last = buffer[..have].iter().rposition(|byte| *byte == b'\n').map_or(first, |end| end + 1);
            let mut seen = Glance { status: None, ..glance.clone() };
            let mut has_step = false;
            for line in buffer[first..last.max(first)].split(|byte| *byte == b'\n').filter_map(Line::read) {
                has_step |= line.event == "step";
                seen.take(&line);
            }
            if has_step || tail >= MOST_TAIL.min(size) {
                seen.eval_loss = seen.eval_loss.or(before.and_then(|before| before.eval_loss));
                return Ok(seen);
            }
            tail *= 4;
        }
    }

    fn take(&mut self, line: &Line<'_>) {
        match &*line.event {
            "start" => {
                self.recipe = line.recipe.as_deref().map(String::from).or(self.recipe.take());
                self.steps = line.steps.filter(|steps| *steps > 0).or(self.steps);
                self.status = None;
            }
            "step" => {
                self.step = line.step.unwrap_or(0);
                self.loss = line.loss;
                self.tokens_per_second = line.tokens_per_second;
                self.samples_per_second = line.samples_per_second;
                self.time = line.time.or(self.time);
            }
            "resume" => self.step = self.step.min(line.step.unwrap_or(0)),
            "eval" => self.eval_loss = line.loss,
            "end" => self.status = line.status.as_deref().map(String::from),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(text: &str) -> Glance {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        std::fs::write(&path, text).unwrap();
        Glance::at(&File::open(&path).unwrap(), None).unwrap()
    }

    #[test]
    fn the_ends_of_a_long_log_have_the_state_of_a_run() {
        let mut text =
            String::from("{\"event\":\"start\",\"recipe\":\"tiny\",\"steps\":900000,\"time\":5}\n");
        for step in 1..20_000 {
            text += &format!("{{\"event\":\"step\",\"step\":{step},\"loss\":2.5,\"time\":{step}}}\n");
        }
        text += "{\"event\":\"eval\",\"step\":19999,\"loss\":2.25}\n";
        let running = seen(&text);
        assert_eq!((running.step, running.steps, running.status.clone()), (19_999, Some(900_000), None));
        assert_eq!((running.started, running.eval_loss), (Some(5.0), Some(2.25)));
        let ended = seen(&(text.clone() + "{\"event\":\"end\",\"status\":\"stopped\",\"steps\":19999}\n"));
        assert_eq!(ended.status.as_deref(), Some("stopped"));
        // A matrix of many classes may fill the last bytes.
        let large =
            format!("{{\"event\":\"eval\",\"step\":19999,\"loss\":2,\"x\":\"{}\"}}\n", "9".repeat(300_000));
        assert_eq!(seen(&(text + &large)).step, 19_999);
    }

    #[test]
    fn short_and_damaged_logs_are_read() {
        assert_eq!(seen(""), Glance::default());
        assert_eq!(seen("{\"event\":\"sta"), Glance::default());
        assert_eq!(seen("{\"event\":\"step\",\"step\":3}\nrubbish\n{\"event\":\"st").step, 3);
    }
}
