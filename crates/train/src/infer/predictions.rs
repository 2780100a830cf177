//! Writes a model's predictions for texts to a file: one row per text, JSONL or CSV by the file's name.

use std::fmt::Write;
use std::path::Path;

use serde_json::json;

use crate::Failure;
use crate::UserError;
use crate::infer::classify::Prediction;
use crate::refuse;
use flatout_data::durable;

/// The formats of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PredictionFormat {
    Jsonl,
    Csv,
}

/// Refuses a file name with another ending, before any work.
pub fn check(out: &Path) -> Result<(), UserError> {
    format_of(out).map(|_| ())
}

fn format_of(out: &Path) -> Result<PredictionFormat, UserError> {
    match out.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl") => Ok(PredictionFormat::Jsonl),
        Some("csv") => Ok(PredictionFormat::Csv),
        _ => refuse!("--out {} must end in .jsonl or .csv", out.display()),
    }
}

/// Writes predictions for texts at these locations, with these names of classes. The file appears atomically.
pub fn write(
    out: &Path,
    predictions: &[Prediction],
    places: &[String],
    classes: &[String],
) -> Result<(), Failure> {
    let rows = predictions.iter().zip(places);
    let text = match format_of(out)? {
        PredictionFormat::Jsonl => rows.map(|(prediction, place)| line(prediction, place, classes)).collect(),
        PredictionFormat::Csv => table(rows, classes),
    };
    durable::replace(out, text.as_bytes()).map_err(Failure::io(out.display()))
}

fn line(prediction: &Prediction, place: &str, classes: &[String]) -> String {
    let probabilities: serde_json::Map<String, serde_json::Value> =
        classes.iter().cloned().zip(prediction.probabilities.iter().map(|p| json!(p))).collect();
    let row = json!({ "row": place, "class": classes[prediction.class], "probabilities": probabilities });
    format!("{row}\n")
}

fn table<'a>(rows: impl Iterator<Item = (&'a Prediction, &'a String)>, classes: &[String]) -> String {
    let mut out = String::from("row,class");
    classes.iter().for_each(|class| out += &format!(",{}", cell(class)));
    out.push('\n');
    for (prediction, place) in rows {
        let _ = write!(out, "{},{}", cell(place), cell(&classes[prediction.class]));
        for probability in &prediction.probabilities {
            let _ = write!(out, ",{probability}");
        }
        out.push('\n');
    }
    out
}

/// Quotes a cell that contains special characters.
fn cell(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_a_text() {
        let folder = tempfile::tempdir().unwrap();
        let predictions = [
            Prediction { class: 1, probabilities: vec![0.25, 0.75] },
            Prediction { class: 0, probabilities: vec![1.0, 0.0] },
        ];
        let places = ["a.csv:2".to_string(), "a, b.csv:3".to_string()];
        let classes = ["no".to_string(), "yes, \"sure\"".to_string()];
        let written = |name: &str| {
            let path = folder.path().join(name);
            write(&path, &predictions, &places, &classes).unwrap();
            std::fs::read_to_string(path).unwrap()
        };
        assert_eq!(
            written("out.csv"),
            "row,class,no,\"yes, \"\"sure\"\"\"\na.csv:2,\"yes, \"\"sure\"\"\",0.25,0.75\n\"a, b.csv:3\",no,1,0\n"
        );
        let lines = written("out.jsonl");
        let first: serde_json::Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
        assert_eq!(first["class"], "yes, \"sure\"");
        assert_eq!(first["probabilities"]["no"], 0.25);
        assert_eq!(lines.lines().count(), 2);
        let refused = check(Path::new("out.txt")).unwrap_err().0;
        assert!(refused.contains("must end in .jsonl or .csv"), "{refused}");
    }
}
