//! Writes the settings that were found as a preset for `--with`: to a file of the user's choice, and to the cache, so that a
//! later `train` of the same recipe on the same machine can mention it. A preset is only applied on request.

use std::fs;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::Report;
use flatout_data::durable;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::{Config, parse};
use flatout_train::device::Device;
use flatout_train::machine::cache_folder;
use flatout_train::refuse;

/// The beginning of every preset that `tune` writes. A file that begins otherwise is not overwritten.
const MARK: &str = "# Written by `flatout tune`";

/// A choice's changes to a config, as overrides.
pub fn settings(config: &Config, choice: &Config) -> Vec<String> {
    changed(config, choice).map(|(key, value)| format!("{key}={}", value.trim_matches('"'))).collect()
}

fn changed(config: &Config, choice: &Config) -> impl Iterator<Item = (String, String)> + use<> {
    let own = config.values();
    choice.values().into_iter().filter(move |(key, value)| own.get(key) != Some(value))
}

/// The preset: the choice's keys that differ from the recipe's own.
pub fn text(report: &Report, config: &Config) -> String {
    let faster = report.found.faster_by.map_or(String::new(), |by| {
        format!(", {:.3} times as fast as its own settings ({:.3} to {:.3})", by.ratio, by.low, by.high)
    });
    let description = format!("{} tuned on {}{faster}.", report.recipe, report.device);
    let mut out = format!("{MARK}: apply it to {} with --with.\n", report.recipe);
    out += &format!("description = {}\n", toml::Value::String(description));
    let mut section = String::new();
    for (key, value) in changed(config, &report.found.config) {
        let (own, name) = key.split_once('.').expect("a key has a section");
        if own != section {
            out += &format!("\n[{own}]\n");
            section = own.to_string();
        }
        out += &format!("{name} = {value}\n");
    }
    out
}

/// The default path of a preset.
pub fn usual_path(report_of: &str, target: &str, ranks: usize) -> PathBuf {
    PathBuf::from(format!("tuned-{}-{}{}.toml", word(report_of), word(target), times(ranks)))
}

/// The number of devices in a file's name, where there are several.
fn times(ranks: usize) -> String {
    if ranks > 1 { format!("-x{ranks}") } else { String::new() }
}

/// A name as part of a file's name.
fn word(name: &str) -> String {
    let kept = |c: char| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    name.chars().map(kept).collect()
}

/// Refuses a path that cannot be written, or that holds something else.
pub fn check(path: &Path) -> Result<(), UserError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        refuse!("there is no folder {} to write {} into", folder.display(), path.display());
    }
    if path.is_dir() {
        refuse!("{} is a folder: give --out the name of a file", path.display());
    }
    match fs::read_to_string(path) {
        Ok(text) if !text.starts_with(MARK) => {
            refuse!("{} exists and is not a preset of `flatout tune`: give another --out", path.display())
        }
        Err(error) if path.exists() => refuse!("{} cannot be read: {error}", path.display()),
        _ => Ok(()),
    }
}

pub fn write(path: &Path, text: &str) -> Result<(), Failure> {
    durable::replace(path, text.as_bytes()).map_err(Failure::io(path.display()))
}

/// Caches the preset for a recipe on this number of devices, or removes it where `text` is `None`. Returns the path where it was
/// written.
pub fn remember(
    config: &Config,
    device: &Device,
    ranks: usize,
    text: Option<&str>,
) -> Result<Option<PathBuf>, Failure> {
    let Some(folder) = cache_folder().map(|folder| folder.join("tune")) else { return Ok(None) };
    let path = folder.join(file_name(config, device, ranks));
    match text {
        Some(text) => {
            fs::create_dir_all(&folder).map_err(Failure::io(folder.display()))?;
            write(&path, text)?;
            Ok(Some(path))
        }
        None if path.exists() => {
            fs::remove_file(&path).map_err(Failure::io(path.display()))?;
            Ok(None)
        }
        None => Ok(None),
    }
}

/// A cached preset.
#[derive(Clone, Debug, PartialEq)]
pub struct Remembered {
    pub path: PathBuf,
    /// Its changes to the config.
    pub settings: Vec<String>,
    pub description: String,
}

/// The cached settings for this recipe on this number of devices, where they would change something.
pub fn remembered(config: &Config, device: &Device, ranks: usize) -> Option<Remembered> {
    let path = cache_folder()?.join("tune").join(file_name(config, device, ranks));
    let text = fs::read_to_string(&path).ok()?;
    let table = parse(&text, &path.display().to_string()).ok()?;
    let description = table.get("description")?.as_str()?.to_string();
    let with = config.with_file(&text, &path.display().to_string()).ok()?;
    let settings = settings(config, &with);
    (!settings.is_empty()).then_some(Remembered { path, settings, description })
}

/// Recipe and device, and a hash of everything that affects times: model, batch, switches that are not tuned, machine, version.
fn file_name(config: &Config, device: &Device, ranks: usize) -> String {
    let decides = |key: &str| {
        let tuned = super::space::Knob::ALL.iter().any(|knob| knob.keys().iter().any(|own| own == key));
        !tuned && (key.starts_with("model.") || key.starts_with("switches.") || key == "train.batch")
    };
    let mut identity = format!("{}\n{}\n", env!("CARGO_PKG_VERSION"), device.sentence());
    for (key, value) in config.values().into_iter().filter(|(key, _)| decides(key)) {
        identity += &format!("{key}={value}\n");
    }
    let target = device.target(&config.switches).name;
    let (recipe, target, hash) = (word(&config.recipe), word(&target), xxh3_64(identity.as_bytes()));
    format!("{recipe}-{target}{}-{hash:016x}.toml", times(ranks))
}
