//! A model's predictions for texts, as a file: one row a text, JSONL or CSV by the file's name.

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

/// Whether a file of this name can be written; asked before any work.
pub fn check(out: &Path) -> Result<(), UserError> {
    format_of(out).map(|_| ())
}

fn format_of(out: &Path) -> Result<PredictionFormat, UserError> {
    match out.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl") => Ok(PredictionFormat::Jsonl),
        Some("csv") => Ok(PredictionFormat::Csv),
        _ => refuse!("--out {} wants to end in .jsonl or .csv", out.display()),
    }
}

/// Writes predictions of texts that were found at these places, for classes of these names. The file is there whole or
/// not at all.
pub fn write(
    out: &Path,
    predictions: &[Prediction],
    places: &[String],
    classes: &[String],
) -> Result<(), Failure> {
    let rows = predictions.iter().zip(places);
    let text = match format_of(out)? {
        PredictionFormat::Jsonl => rows.map(|(said, place)| line(said, place, classes)).collect(),
        PredictionFormat::Csv => table(rows, classes),
    };
    durable::replace(out, text.as_bytes()).map_err(Failure::io(out.display()))
}

fn line(said: &Prediction, place: &str, classes: &[String]) -> String {
    let probabilities: serde_json::Map<String, serde_json::Value> =
        classes.iter().cloned().zip(said.probabilities.iter().map(|p| json!(p))).collect();
    let row = json!({ "row": place, "class": classes[said.class], "probabilities": probabilities });
    format!("{row}\n")
}

fn table<'a>(rows: impl Iterator<Item = (&'a Prediction, &'a String)>, classes: &[String]) -> String {
    let mut out = String::from("row,class");
    classes.iter().for_each(|class| out += &format!(",{}", cell(class)));
    out.push('\n');
    for (said, place) in rows {
        let _ = write!(out, "{},{}", cell(place), cell(&classes[said.class]));
        for probability in &said.probabilities {
            let _ = write!(out, ",{probability}");
        }
        out.push('\n');
    }
    out
}

/// Quoted where a reader would take it for something else.
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
        let said = [
            Prediction { class: 1, probabilities: vec![0.25, 0.75] },
            Prediction { class: 0, probabilities: vec![1.0, 0.0] },
        ];
        let places = ["a.csv:2".to_string(), "a, b.csv:3".to_string()];
        let classes = ["no".to_string(), "yes, \"sure\"".to_string()];
        let written = |name: &str| {
            let path = folder.path().join(name);
            write(&path, &said, &places, &classes).unwrap();
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
        assert!(refused.contains("wants to end in .jsonl or .csv"), "{refused}");
    }
}
