//! Texts that a run's model wrote, a JSON object a line in `samples.jsonl`, for those who look at the run.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

/// Where the samples of a run are.
pub const SAMPLES: &str = "samples.jsonl";

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample<'a> {
    /// The update after which the model wrote it.
    pub step: u64,
    /// Empty where the model began by itself.
    pub prompt: &'a str,
    pub text: &'a str,
}

/// Appends a sample to those of a run.
pub fn append(run: &Path, sample: &Sample<'_>) -> io::Result<()> {
    let line = serde_json::to_string(sample).expect("a sample has a JSON form") + "\n";
    OpenOptions::new().append(true).create(true).open(run.join(SAMPLES))?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_lines() {
        let dir = tempfile::tempdir().unwrap();
        for step in [1, 2] {
            append(dir.path(), &Sample { step, prompt: "", text: "two\nlines \"and\" marks" }).unwrap();
        }
        let text = std::fs::read_to_string(dir.path().join(SAMPLES)).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            (lines.len(), &lines[1]["step"], &lines[1]["text"]),
            (2, &2.into(), &"two\nlines \"and\" marks".into())
        );
    }
}
