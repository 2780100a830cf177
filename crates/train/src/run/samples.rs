//! Samples of a run: texts that its model generated and classes that it predicted, for people to look at.
//!
//! Samples of evaluations are events of the log; texts generated at the end are in `samples.jsonl`, one object per line.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The file of the samples taken at the end of a run.
pub const SAMPLES: &str = "samples.jsonl";
/// The folder in a run that holds the images of samples.
pub const IMAGES: &str = "samples";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The update after which it was taken.
    pub step: u64,
    /// The prompt; empty where the model began a text without one, and for images.
    #[serde(default)]
    pub prompt: String,
    /// The text that the model generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The file of a held-out image, in the folder of samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Present for a model of classes.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
}

/// The class that a model predicts for a text or an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    pub predicted: String,
    pub probability: f64,
    /// Its true class; absent where it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truth: Option<String>,
    pub is_right: bool,
}

/// Appends a sample to those of the run's end.
pub fn append(run: &Path, sample: &Sample) -> io::Result<()> {
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
            let text = Some("two\nlines \"and\" marks".into());
            append(dir.path(), &Sample { step, prompt: String::new(), text, image: None, prediction: None })
                .unwrap();
        }
        let text = std::fs::read_to_string(dir.path().join(SAMPLES)).unwrap();
        assert_eq!(text.lines().next(), Some(r#"{"step":1,"prompt":"","text":"two\nlines \"and\" marks"}"#));
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            (lines.len(), &lines[1]["step"], &lines[1]["text"]),
            (2, &2.into(), &"two\nlines \"and\" marks".into())
        );
    }

    #[test]
    fn predictions_lie_beside_the_other_fields() {
        let prediction = Prediction {
            predicted: "cat".into(),
            probability: 0.75,
            truth: Some("dog".into()),
            is_right: false,
        };
        let sample = Sample {
            step: 3,
            prompt: String::new(),
            text: None,
            image: Some("7.png".into()),
            prediction: Some(prediction),
        };
        let json = serde_json::to_string(&sample).unwrap();
        assert_eq!(
            json,
            r#"{"step":3,"prompt":"","image":"7.png","predicted":"cat","probability":0.75,"truth":"dog","is_right":false}"#
        );
        assert_eq!(serde_json::from_str::<Sample>(&json).unwrap(), sample);
    }
}
