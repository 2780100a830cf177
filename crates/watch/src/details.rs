//! Reads the rest of a run's folder: its settings, its plan of memory and kernels, measurements and samples.
//!
//! `plan.json` and `samples.jsonl` are written by `train`, `ablate.json` by `ablate --out`, and `profile.json` is what
//! `profile --json` prints. The last two may also be in the folder of the runs, for all runs of their recipe.

use std::io::{self, Read};
use std::path::Path;

use flatout_train::config::Config;
use flatout_train::config::resolved::Resolved;
use flatout_train::run::samples::{self, IMAGES};
use serde_json::{Map, Value, json};

use crate::folder::Folder;
use crate::follow::read_at;

/// The most bytes of a file that is read whole, and of the end of the samples.
const MOST: u64 = 32 << 20;
const SAMPLES: usize = 128 << 10;
/// The fields of a profile that a page shows.
const PROFILE: [&str; 13] = [
    "recipe",
    "version",
    "device",
    "precision",
    "tokens_per_second",
    "launches",
    "roofline_ms",
    "predicted_ms",
    "budget",
    "work",
    "kernels",
    "exchanges",
    "sinks",
];

/// Everything that a page requests to show a run, which was trained from `recipe`.
pub fn details(folder: &Folder, dir: &Path, recipe: Option<&str>) -> Value {
    let mut problems = vec![];
    let mut all = match config(folder, dir) {
        Ok(config) => json!({ "config": config.shown_values(), "classes": config.data.classes }),
        Err(why) => {
            problems.push(format!("the settings cannot be read: {why}"));
            json!({})
        }
    };
    all["plan"] = read(folder, dir, "plan.json", &mut problems).unwrap_or(Value::Null);
    let mut measured = |name: &str| {
        let own = read(folder, dir, name, &mut problems);
        own.or_else(|| {
            read(folder, folder.path(), name, &mut problems)
                .filter(|shared| recipe.is_some() && shared["recipe"].as_str() == recipe)
        })
    };
    all["ablation"] = measured("ablate.json").unwrap_or(Value::Null);
    all["profile"] = measured("profile.json").map_or(Value::Null, |profile| {
        let kept = PROFILE.iter().filter_map(|name| Some((name.to_string(), profile.get(*name)?.clone())));
        Value::Object(kept.collect::<Map<String, Value>>())
    });
    all["samples"] = json!(newest_samples(folder, dir).unwrap_or_default());
    all["problems"] = json!(problems);
    all
}

/// The resolved settings.
fn config(folder: &Folder, dir: &Path) -> Result<Config, String> {
    let text = |name: &str| folder.text(dir, name, MOST).map_err(|error| format!("{name}: {error}"));
    let requested = Config::parse(&text("config.toml")?, "config.toml").map_err(|error| error.0)?;
    match text("resolved.toml") {
        Err(_) => Ok(requested),
        Ok(text) => Ok(Resolved::parse(&text, "resolved.toml").map_err(|error| error.0)?.over(&requested)),
    }
}

/// Reads a file of JSON; `None` where there is none. One that cannot be read adds a problem.
pub fn read(folder: &Folder, dir: &Path, name: &str, problems: &mut Vec<String>) -> Option<Value> {
    let value = match folder.text(dir, name, MOST) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| error.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => Err(error.to_string()),
    };
    value.map_err(|why| problems.push(format!("{name} cannot be read: {why}"))).ok()
}

/// The most bytes of a sample's picture.
const IMAGE: u64 = 64 << 10;
/// The signature of PNG files.
const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";

/// A picture among the samples of a run: a PNG file in that folder, by a plain file name.
pub fn image(folder: &Folder, dir: &Path, name: &str) -> Option<Vec<u8>> {
    let (stem, ending) = name.split_once('.')?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if ending != "png" || stem.is_empty() || !stem.chars().all(is_plain) {
        return None;
    }
    let mut bytes = vec![];
    let file = folder.file(&dir.join(IMAGES), name).ok()?;
    file.take(IMAGE + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= IMAGE && bytes.starts_with(PNG)).then_some(bytes)
}

/// The newest samples: lines of JSON at the end of `samples.jsonl`.
fn newest_samples(folder: &Folder, dir: &Path) -> io::Result<Vec<Value>> {
    let file = folder.file(dir, samples::SAMPLES)?;
    let size = file.metadata()?.len();
    let begin = size.saturating_sub(SAMPLES as u64);
    let mut buffer = vec![0; (size - begin) as usize];
    let have = read_at(&file, &mut buffer, begin)?;
    let lines = buffer[..have].split_inclusive(|byte| *byte == b'\n').skip(usize::from(begin > 0));
    Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).filter(Value::is_object).collect())
}
