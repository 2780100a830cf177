//! Downloads models by their name on the Hugging Face hub, through the cache that all of its tools share and in that cache's
//! layout.
//!
//! `models--ORG--NAME/` has `refs/REVISION` (a commit), `snapshots/COMMIT/FILE` (links), `blobs/ETAG` (contents) and
//! `.no_exist/COMMIT/FILE` (files that a commit is known to lack). A file appears atomically: contents are renamed into place
//! once they are complete and their hash is right, then linked; the ref is written last.

mod transfer;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use self::transfer::Transfer;
use super::folder::{self, INDEX, SINGLE};
use crate::UserError;
use crate::refuse;
use flatout_data::durable;
use flatout_data::remote::access::{Access, variable};
use flatout_data::remote::location::is_commit;

/// Files beside the weights, each of which a model may lack.
pub const SMALL: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// `ORG/NAME`, and optionally a branch, tag or commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub repo: String,
    pub revision: Option<String>,
}

impl Name {
    /// Parses `ORG/NAME[@revision]`; `None` if it cannot be one.
    pub fn parse(text: &str) -> Option<Name> {
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
        let plain = |part: &str, also: &str| {
            !part.is_empty()
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c) || also.contains(c))
                && part.split('/').all(|name| !name.is_empty() && !name.starts_with('.'))
                && !part.contains("..")
        };
        let (organisation, name) = repo.split_once('/')?;
        let whole = plain(organisation, "") && plain(name, "") && revision.is_none_or(|r| plain(r, "/"));
        whole.then(|| Name { repo: repo.to_string(), revision: revision.map(String::from) })
    }

    fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.repo)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))
    }
}

/// The part of a model to download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The files that describe it, without weights.
    Description,
    Everything,
}

/// Progress of downloading a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Fetching<'a> {
    pub file: &'a str,
    pub done_bytes: u64,
    pub total_bytes: Option<u64>,
}

/// Called when a file begins, from time to time during the transfer, and when it is complete.
pub type Watch<'a> = &'a mut dyn FnMut(&Fetching<'_>);

/// One commit of a model in the cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    pub folder: PathBuf,
    pub commit: String,
}

/// Access to the hub for this user.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Its URL; `HF_ENDPOINT`.
    pub endpoint: String,
    /// The cache folder; `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
    pub cache: PathBuf,
    /// The user's token; `HF_TOKEN`, or the file `token` in `HF_HOME`.
    pub token: Option<String>,
    /// Whether only the cache may be used; `HF_HUB_OFFLINE`.
    pub offline: bool,
}

impl Hub {
    /// Reads the environment variables that all tools of the hub use.
    pub fn from_environment() -> Result<Hub, UserError> {
        let Access { endpoint, token, offline, home } = Access::from_environment();
        let Some(home) = home else {
            refuse!("there is no folder for downloaded models: set HF_HOME to one");
        };
        let cache = variable("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from);
        Ok(Hub { endpoint, cache, token, offline })
    }

    /// A folder with the requested part of a model: from the cache if it is there, otherwise downloaded.
    pub fn snapshot(&self, name: &Name, want: Want, watch: Watch<'_>) -> Result<Snapshot, UserError> {
        let cached = Cached { folder: self.cache.join(format!("models--{}", name.repo.replace('/', "--"))) };
        let held = cached.commit(name.revision());
        if let Some(commit) = &held
            && cached.has(commit, want)
        {
            return Ok(Snapshot { folder: cached.snapshot(commit), commit: commit.clone() });
        }
        if self.offline {
            match held.filter(|commit| cached.snapshot(commit).join("config.json").is_file()) {
                // The folder shows which other files exist; the reader reports a missing file.
                Some(commit) => return Ok(Snapshot { folder: cached.snapshot(&commit), commit }),
                None => refuse!(
                    "{name} is not in the cache {}, and HF_HUB_OFFLINE forbids to download it",
                    self.cache.display()
                ),
            }
        }
        self.download(name, want, &cached, watch)
    }

    fn download(
        &self,
        name: &Name,
        want: Want,
        cached: &Cached,
        watch: Watch<'_>,
    ) -> Result<Snapshot, UserError> {
        let transfer = Transfer::new(self, name, &cached.folder)?;
        let (commit, files) = transfer.listing()?;
        let has = |file: &str| files.iter().any(|listed| listed == file);
        if !has("config.json") {
            refuse!(
                "{name} on {} has no config.json: it is not a model in the Hugging Face layout",
                self.endpoint
            );
        }
        let snapshot = cached.snapshot(&commit);
        let mut get = |file: &str| {
            let place = snapshot.join(file);
            if place.is_file() { Ok(()) } else { transfer.fetch(&commit, file, &place, watch) }
        };
        for file in SMALL {
            if has(file) {
                get(file)?;
            } else {
                cached.note_absent(&commit, file).map_err(|error| cannot_write(&cached.folder, error))?;
            }
        }
        if want == Want::Everything {
            if has(SINGLE) {
                get(SINGLE)?;
            } else if has(INDEX) {
                get(INDEX)?;
                for shard in folder::shards(&snapshot.join(INDEX))? {
                    get(&shard)?;
                }
            } else {
                let listed: Vec<&str> = files.iter().map(String::as_str).collect();
                refuse!("{name} on {} {}", self.endpoint, folder::without_weights(&listed));
            }
        }
        if name.revision() != commit {
            let place = cached.folder.join("refs").join(name.revision());
            let written = fs::create_dir_all(place.parent().expect("a ref lies in a folder"))
                .and_then(|()| durable::replace_among(&place, commit.as_bytes()));
            written.map_err(|error| cannot_write(&place, error))?;
        }
        Ok(Snapshot { folder: snapshot, commit })
    }
}

fn cannot_write(place: &Path, error: std::io::Error) -> UserError {
    UserError(format!("{} cannot be written: {error}; HF_HOME names another place", place.display()))
}

/// A model's folder in the cache.
struct Cached {
    folder: PathBuf,
}

impl Cached {
    fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The commit of a revision when it was last resolved.
    fn commit(&self, revision: &str) -> Option<String> {
        let named = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        let named = named.map(|commit| commit.trim().to_string()).filter(|commit| is_commit(commit));
        named.or_else(|| {
            (is_commit(revision) && self.snapshot(revision).is_dir()).then(|| revision.to_string())
        })
    }

    fn has(&self, commit: &str, want: Want) -> bool {
        let snapshot = self.snapshot(commit);
        let known = |file: &str| snapshot.join(file).is_file() || self.absence(commit, file).is_file();
        let weights = || {
            snapshot.join(SINGLE).is_file()
                || folder::shards(&snapshot.join(INDEX))
                    .is_ok_and(|shards| shards.iter().all(|shard| snapshot.join(shard).is_file()))
        };
        // Other tools download only what they need: the small optional files may be missing, the required ones may not.
        let described = snapshot.join("config.json").is_file() && known("tokenizer.json");
        described && (want == Want::Description || weights())
    }

    fn absence(&self, commit: &str, file: &str) -> PathBuf {
        self.folder.join(".no_exist").join(commit).join(file)
    }

    fn note_absent(&self, commit: &str, file: &str) -> std::io::Result<()> {
        let place = self.absence(commit, file);
        fs::create_dir_all(place.parent().expect("a marker lies in a folder"))?;
        fs::write(place, "")
    }
}

/// The commit and the files in the hub's answer to a listing request.
fn parse_listing(text: &str) -> Option<(String, Vec<String>)> {
    let listing: Value = serde_json::from_str(text).ok()?;
    let commit = listing["sha"].as_str().filter(|sha| is_commit(sha))?;
    let names =
        listing["siblings"].as_array()?.iter().map(|file| Some(file["rfilename"].as_str()?.to_string()));
    Some((commit.to_string(), names.collect::<Option<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinguished_from_paths() {
        let name = Name::parse("Qwen/Qwen3-0.6B@refs/pr/3").unwrap();
        assert_eq!((name.repo.as_str(), name.revision()), ("Qwen/Qwen3-0.6B", "refs/pr/3"));
        assert_eq!(name.to_string(), "Qwen/Qwen3-0.6B@refs/pr/3");
        assert_eq!(Name::parse("a/b").unwrap().revision(), "main");
        for no in
            ["a", "/a/b", "a/b/c", "../b", "a/..", "a/b@", "a/b@../x", "a/b@/x", "a b/c", "a/b@x@y", ".a/b"]
        {
            assert_eq!(Name::parse(no), None, "{no}");
        }
    }

    #[test]
    fn listings_that_lie_are_not_read() {
        let sha = "0123456789abcdef0123456789abcdef01234567";
        let listing = format!(r#"{{"sha":"{sha}","siblings":[{{"rfilename":"config.json"}}]}}"#);
        assert_eq!(parse_listing(&listing), Some((sha.to_string(), vec!["config.json".to_string()])));
        for wrong in ["", "[]", r#"{"sha":"../../x","siblings":[]}"#, &listing.replace("rfilename", "name")] {
            assert_eq!(parse_listing(wrong), None, "{wrong}");
        }
    }
}
