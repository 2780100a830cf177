//! The files of a data set on the Hugging Face hub at one commit.
//!
//! The card of a data set may name configurations and the files of their splits. Otherwise files are assigned as the `datasets`
//! library does it: a configuration is a folder, and a split is a word in the names of folders and files.

use std::sync::Arc;

use glob::{MatchOptions, Pattern};
use serde_json::Value;

use super::http;
use super::location::{SetName, is_commit};
use super::object::{Client, Object};
use crate::error::DataError;

/// Limit on the pages of a listing; the hub returns a thousand files per page.
const MOST_PAGES: usize = 10_000;
/// Words that identify splits in names of files and folders.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// A file of a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SetFile {
    /// Path in the repository.
    pub path: String,
    pub object: Object,
}

/// A file in a listing of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ListedFile {
    path: String,
    bytes: u64,
    tag: Option<String>,
}

/// A configuration from the card: patterns of files by split.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Configuration {
    name: String,
    is_default: bool,
    /// Patterns by split.
    files: Vec<(String, Vec<String>)>,
    /// A folder in place of patterns, whose files are assigned to splits by their names.
    folder: Option<String>,
}

/// Pins the name of a data set to the commit of its revision. Other entries of `data.path` stay as they are.
pub fn pinned(word: &str) -> Result<String, DataError> {
    if !super::location::is_of_hub(word) {
        return Ok(word.to_string());
    }
    let name = SetName::parse(word)?;
    if name.commit().is_some() {
        return Ok(name.to_string());
    }
    let client = Client::shared()?;
    Ok(name.at(&card(&client, &name)?.0).to_string())
}

/// The files of a name, in order, at one commit. `is_data` selects files that could be read.
pub(crate) fn files(
    client: &Arc<Client>,
    name: &SetName,
    is_data: impl Fn(&str) -> bool,
) -> Result<(SetName, Vec<SetFile>), DataError> {
    let (commit, configurations) = card(client, name)?;
    let pinned = name.at(&commit);
    let wanted = RequestedFiles::of(name, &configurations)?;
    let listed = tree(client, &pinned, &wanted.folder())?;
    let mut chosen = wanted.choose(name, listed.into_iter().filter(|file| is_data(&file.path)).collect())?;
    // Sorted like the files of a folder, component by component.
    chosen.sort_by(|one, other| one.path.split('/').cmp(other.path.split('/')));
    let endpoint = &client.access.endpoint;
    let file = |ListedFile { path, bytes, tag }: ListedFile| {
        let url = format!("{endpoint}/datasets/{}/resolve/{commit}/{}", name.repo, encoded(&path));
        SetFile { object: Object::of_hub(client.clone(), url, bytes, tag, pinned.clone()), path }
    };
    Ok((pinned.clone(), chosen.into_iter().map(file).collect()))
}

fn refuse_offline(client: &Client, name: &SetName) -> Result<(), DataError> {
    match client.access.offline {
        true => Err(DataError::input(format!(
            "{name} is read over the network, which HF_HUB_OFFLINE forbids: give local files."
        ))),
        false => Ok(()),
    }
}

/// The commit of a revision, and the configurations of the data set's card.
fn card(client: &Client, name: &SetName) -> Result<(String, Vec<Configuration>), DataError> {
    refuse_offline(client, name)?;
    let revision = name.revision().replace('/', "%2F");
    let url = format!("{}/api/datasets/{}/revision/{revision}", client.access.endpoint, name.repo);
    let (info, _) = json(client, &url, name)?;
    let commit = info["sha"].as_str().filter(|sha| is_commit(sha));
    let Some(commit) = commit else { return Err(not_the_hub(client)) };
    if name.commit().is_some_and(|asked| asked != commit) {
        return Err(DataError::input(format!(
            "{} answered with commit {commit} when asked for {name}.",
            client.access.endpoint
        )));
    }
    Ok((commit.to_string(), configurations(&info["cardData"]["configs"])))
}

/// The files below a folder of a data set, from all pages of the listing.
fn tree(client: &Client, name: &SetName, folder: &str) -> Result<Vec<ListedFile>, DataError> {
    let below = if folder.is_empty() { String::new() } else { format!("/{}", encoded(folder)) };
    let (endpoint, commit) = (&client.access.endpoint, name.revision());
    let mut url = format!("{endpoint}/api/datasets/{}/tree/{commit}{below}?recursive=true", name.repo);
    let mut files = Vec::new();
    for _ in 0..MOST_PAGES {
        let (page, next) = json(client, &url, name)?;
        let page = page.as_array().ok_or_else(|| not_the_hub(client))?;
        for entry in page.iter().filter(|entry| entry["type"] == "file") {
            files.push(listed(entry).ok_or_else(|| not_the_hub(client))?);
        }
        match next {
            None => return Ok(files),
            // A mirror may return the hub's own URL: the listing continues on the host on which it began.
            Some(next) => url = format!("{endpoint}{}", &next[http::host(&next).len()..]),
        }
    }
    Err(DataError::input(format!("The listing of {name} has too many pages on {endpoint}.")))
}

fn listed(entry: &Value) -> Option<ListedFile> {
    let path = entry["path"].as_str()?.to_string();
    let is_below = path.split('/').all(|name| !name.is_empty() && name != "." && name != "..");
    let stored = &entry["lfs"];
    let bytes = stored["size"].as_u64().or(entry["size"].as_u64())?;
    let tag = stored["oid"].as_str().or(entry["oid"].as_str());
    is_below.then(|| ListedFile { path, bytes, tag: tag.map(String::from) })
}

fn json(client: &Client, url: &str, name: &SetName) -> Result<(Value, Option<String>), DataError> {
    let answered = client.with_retries(|| {
        let mut answer = client.get(url, &[])?;
        if !answer.response.status().is_success() {
            return Err(client.refusal(&answer.response, Some(name)));
        }
        let next = http::next_page(answer.response.headers());
        let body = answer.response.body_mut().with_config().limit(LISTING_BYTES).read_to_string();
        let text = body.map_err(|error| super::object::Refusal::Later(error.to_string(), None))?;
        Ok((serde_json::from_str(&text).unwrap_or(Value::Null), next))
    });
    answered.map_err(|why| {
        DataError::input(match why.contains(&name.repo) {
            true => format!("{why}."),
            false => format!(
                "{} cannot be reached for {name}: {why}; without a network, give local files.",
                client.access.endpoint
            ),
        })
    })
}

/// Most bytes of a page of a listing.
const LISTING_BYTES: u64 = 64 << 20;

fn not_the_hub(client: &Client) -> DataError {
    DataError::input(format!(
        "{} does not answer like the Hugging Face hub: check HF_ENDPOINT.",
        client.access.endpoint
    ))
}

fn configurations(configs: &Value) -> Vec<Configuration> {
    let strings = |value: &Value| -> Vec<String> {
        match value {
            Value::String(one) => vec![one.clone()],
            Value::Array(all) => all.iter().filter_map(|one| one.as_str().map(String::from)).collect(),
            _ => Vec::new(),
        }
    };
    let files = |value: &Value| -> Vec<(String, Vec<String>)> {
        let entries = value.as_array().map(Vec::as_slice).unwrap_or_default();
        let by_split = entries.iter().filter(|entry| entry.is_object());
        let by_split: Vec<_> = by_split
            .map(|entry| (entry["split"].as_str().unwrap_or("train").to_string(), strings(&entry["path"])))
            .collect();
        // Files without a split are training files.
        if by_split.is_empty() { vec![("train".into(), strings(value))] } else { by_split }
    };
    let configs = configs.as_array().map(Vec::as_slice).unwrap_or_default().iter();
    configs
        .filter_map(|config| {
            let (files, folder) = match &config["data_files"] {
                Value::Null => (vec![], Some(config["data_dir"].as_str()?.trim_matches('/').to_string())),
                given => (files(given), None),
            };
            Some(Configuration {
                name: config["config_name"].as_str()?.to_string(),
                is_default: config["default"] == Value::Bool(true),
                files,
                folder,
            })
        })
        .collect()
}

/// The requested files.
#[derive(Debug, PartialEq)]
enum RequestedFiles {
    /// Files that match a pattern.
    Patterns(Vec<String>),
    /// Files of a split below a folder, by their names.
    Below { folder: String, split: String },
}

impl RequestedFiles {
    fn of(name: &SetName, configurations: &[Configuration]) -> Result<Self, DataError> {
        let split = name.split.as_deref().unwrap_or("train");
        let below = |folder: &str| RequestedFiles::Below { folder: folder.into(), split: split.into() };
        let of_split = |configuration: &Configuration| {
            let found = configuration.files.iter().find(|(named, _)| named == split);
            found.map(|(_, patterns)| RequestedFiles::Patterns(patterns.clone()))
        };
        let of_card = |configuration: &Configuration| match (&configuration.folder, of_split(configuration)) {
            (Some(folder), _) => Ok(below(folder)),
            (None, Some(wanted)) => Ok(wanted),
            (None, None) => {
                let splits: Vec<&str> = configuration.files.iter().map(|(split, _)| split.as_str()).collect();
                Err(DataError::input(format!(
                    "The configuration {} of hf://{} has no split `{split}`: it has {}, which is written after a colon as in \
                     hf://{}/{}:{}.",
                    configuration.name,
                    name.repo,
                    splits.join(", "),
                    name.repo,
                    configuration.name,
                    splits.first().unwrap_or(&"train"),
                )))
            }
        };
        match &name.within {
            Some(within) if within.contains(['*', '[']) => Ok(RequestedFiles::Patterns(vec![within.clone()])),
            Some(within) => match configurations.iter().find(|one| one.name == *within) {
                Some(configuration) => of_card(configuration),
                None => Ok(below(within)),
            },
            None => {
                let named = |name: &str| configurations.iter().find(|one| one.name == name);
                let default = configurations.iter().find(|one| one.is_default).or_else(|| named("default"));
                match (default, configurations) {
                    (Some(default), _) => of_card(default),
                    (None, []) => Ok(below("")),
                    (None, [only]) => of_card(only),
                    (None, [first, ..]) => {
                        let names: Vec<&str> =
                            configurations.iter().take(20).map(|one| one.name.as_str()).collect();
                        Err(DataError::input(format!(
                            "hf://{} has several configurations and no default: choose one, as in hf://{}/{}; there are {}.",
                            name.repo,
                            name.repo,
                            first.name,
                            names.join(", ")
                        )))
                    }
                }
            }
        }
    }

    /// The common folder of the files, so that less of a large data set is listed.
    fn folder(&self) -> String {
        match self {
            // The path may be that of a file, which its folder contains in any case.
            RequestedFiles::Below { folder, .. } => match folder.rsplit_once('/') {
                Some((parent, last)) if last.contains('.') => parent.to_string(),
                None if folder.contains('.') => String::new(),
                _ => folder.clone(),
            },
            RequestedFiles::Patterns(patterns) => {
                let plain = |pattern: &String| {
                    let parts: Vec<&str> = pattern.split('/').collect();
                    let folders = parts[..parts.len() - 1].iter();
                    folders
                        .take_while(|part| !part.contains(['*', '?', '[']))
                        .copied()
                        .collect::<Vec<_>>()
                        .join("/")
                };
                let mut folders = patterns.iter().map(plain);
                let first = folders.next().unwrap_or_default();
                if folders.all(|folder| folder == first) { first } else { String::new() }
            }
        }
    }

    fn choose(&self, name: &SetName, files: Vec<ListedFile>) -> Result<Vec<ListedFile>, DataError> {
        const BY_FOLDERS: MatchOptions = MatchOptions {
            case_sensitive: true,
            require_literal_separator: true,
            require_literal_leading_dot: true,
        };
        let chosen: Vec<ListedFile> = match self {
            RequestedFiles::Patterns(patterns) => {
                let read = |pattern: &String| {
                    Pattern::new(pattern).map_err(|error| {
                        DataError::input(format!(
                            "The pattern {pattern} of {name} cannot be used: {}.",
                            error.msg
                        ))
                    })
                };
                let patterns = patterns.iter().map(read).collect::<Result<Vec<_>, _>>()?;
                let is_wanted =
                    |path: &str| patterns.iter().any(|pattern| pattern.matches_with(path, BY_FOLDERS));
                files.into_iter().filter(|file| is_wanted(&file.path)).collect()
            }
            RequestedFiles::Below { folder, split } => {
                let is_below = |path: &str| {
                    folder.is_empty()
                        || path == folder
                        || path.strip_prefix(folder.as_str()).is_some_and(|rest| rest.starts_with('/'))
                };
                let below: Vec<ListedFile> = files.into_iter().filter(|file| is_below(&file.path)).collect();
                // Only components below the folder count: the data set itself may be called `train`.
                let within = |file: &ListedFile| file.path[folder.len()..].to_string();
                let has_splits = below.iter().any(|file| split_of(&within(file)).is_some());
                let is_wanted = |file: &ListedFile| match split_of(&within(file)) {
                    Some(found) => found == canonical(split),
                    None => !has_splits && canonical(split) == "train",
                };
                let is_file = below.iter().any(|file| file.path == *folder);
                below.into_iter().filter(|file| is_file || is_wanted(file)).collect()
            }
        };
        if chosen.is_empty() {
            return Err(DataError::input(format!(
                "{name} has no files of parquet, JSONL, CSV or text {}: check the configuration and the split \
                 (hf://owner/set/config:split), or name files as in hf://{}/data/*.parquet.",
                match self {
                    RequestedFiles::Patterns(patterns) => format!("that match {}", patterns.join(", ")),
                    RequestedFiles::Below { folder, split } if folder.is_empty() =>
                        format!("of the split {split}"),
                    RequestedFiles::Below { folder, split } => format!("of the split {split} below {folder}"),
                },
                name.repo
            )));
        }
        Ok(chosen)
    }
}

/// The split that a word stands for.
fn canonical(word: &str) -> &str {
    SPLITS.iter().find(|(_, words)| words.contains(&word)).map_or(word, |(split, _)| split)
}

/// The split in the name of a file, or else in that of an enclosing folder.
fn split_of(path: &str) -> Option<&'static str> {
    let of_part = |part: &str| {
        let mut words = part.split(|c: char| !c.is_ascii_alphabetic());
        words.find_map(|word| SPLITS.iter().find(|(_, words)| words.contains(&word)).map(|(split, _)| *split))
    };
    path.rsplit('/').find_map(of_part)
}

/// Percent-encodes a path.
fn encoded(path: &str) -> String {
    let mut out = String::new();
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' | b'=' => {
                out.push(char::from(byte));
            }
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn listing(paths: &[&str]) -> Vec<ListedFile> {
        paths.iter().map(|path| ListedFile { path: path.to_string(), bytes: 1, tag: None }).collect()
    }

    fn chosen(word: &str, configs: &Value, paths: &[&str]) -> Result<Vec<String>, String> {
        let name = SetName::parse(word).unwrap();
        let of = || RequestedFiles::of(&name, &configurations(configs))?.choose(&name, listing(paths));
        let files: Result<Vec<ListedFile>, DataError> = of();
        files.map(|files| files.into_iter().map(|file| file.path).collect()).map_err(|error| error.sentence)
    }

    #[test]
    fn cards_assign_files_to_configurations() {
        let configs = json!([
            { "config_name": "en", "data_files": [
                { "split": "train", "path": ["en/a-*.parquet", "en/b.parquet"] },
                { "split": "test", "path": "en/test.parquet" } ] },
            { "config_name": "all", "default": true, "data_files": "*/*.parquet" },
            { "config_name": "bare", "data_dir": "en" },
        ]);
        let paths = ["en/a-1.parquet", "en/a/x.parquet", "en/b.parquet", "en/test.parquet", "de/c.parquet"];
        assert_eq!(chosen("hf://o/s/en", &configs, &paths).unwrap(), ["en/a-1.parquet", "en/b.parquet"]);
        assert_eq!(chosen("hf://o/s/en:test", &configs, &paths).unwrap(), ["en/test.parquet"]);
        assert_eq!(chosen("hf://o/s", &configs, &paths).unwrap().len(), 4);
        let named = ["en/train-0.parquet", "en/test.parquet", "de/train-0.parquet"];
        assert_eq!(chosen("hf://o/s/bare", &configs, &named).unwrap(), ["en/train-0.parquet"]);
        assert_eq!(chosen("hf://o/s/bare:test", &configs, &named).unwrap(), ["en/test.parquet"]);
        assert_eq!(chosen("hf://o/s/de", &configs, &paths).unwrap(), ["de/c.parquet"]);
        assert_eq!(chosen("hf://o/s/en/*.parquet", &configs, &paths).unwrap().len(), 3);
        assert_eq!(chosen("hf://o/s/en/b.parquet", &configs, &paths).unwrap(), ["en/b.parquet"]);
        assert!(chosen("hf://o/s/en:dev", &configs, &paths).unwrap_err().contains("train, test"));
        assert!(chosen("hf://o/s/fr", &configs, &paths).unwrap_err().contains("below fr"));
        let two =
            json!([{ "config_name": "a", "data_files": "a" }, { "config_name": "b", "data_files": "b" }]);
        assert!(chosen("hf://o/s", &two, &["a", "b"]).unwrap_err().contains("there are a, b"));
    }

    #[test]
    fn names_assign_files_without_a_card() {
        let none = Value::Null;
        let paths = ["data/train-00000-of-00002.parquet", "data/validation-0.parquet", "data/test.parquet"];
        assert_eq!(chosen("hf://o/s", &none, &paths).unwrap(), ["data/train-00000-of-00002.parquet"]);
        assert_eq!(chosen("hf://o/s:dev", &none, &paths).unwrap(), ["data/validation-0.parquet"]);
        assert_eq!(chosen("hf://o/s", &none, &["a.jsonl", "b/c.jsonl"]).unwrap().len(), 2);
        assert_eq!(
            chosen("hf://o/s", &none, &["train/latest.jsonl", "test/a.jsonl"]).unwrap(),
            ["train/latest.jsonl"]
        );
        assert_eq!(
            chosen("hf://o/s/train", &none, &["train/a.jsonl", "test/a.jsonl"]).unwrap(),
            ["train/a.jsonl"]
        );
        assert!(chosen("hf://o/s:test", &none, &["a.jsonl"]).unwrap_err().contains("split test"));
    }

    #[test]
    fn only_the_folder_that_is_wanted_is_listed() {
        let folder = |patterns: &[&str]| {
            RequestedFiles::Patterns(patterns.iter().map(|p| p.to_string()).collect()).folder()
        };
        assert_eq!(folder(&["sample/10BT/*"]), "sample/10BT");
        assert_eq!(folder(&["data/*/a.parquet", "data/*/b.parquet"]), "data");
        assert_eq!(folder(&["a/*", "b/*"]), "");
        assert_eq!(
            RequestedFiles::Below { folder: "data/x.parquet".into(), split: "train".into() }.folder(),
            "data"
        );
    }

    #[test]
    fn false_listings_are_refused() {
        assert!(listed(&json!({ "type": "file", "path": "a/b", "size": 3, "oid": "x" })).is_some());
        for wrong in [json!({ "path": "../a", "size": 3 }), json!({ "path": "a" }), json!({ "size": 3 })] {
            assert_eq!(listed(&wrong), None, "{wrong}");
        }
        assert_eq!(encoded("a b/ü#?.parquet"), "a%20b/%C3%BC%23%3F.parquet");
    }
}
