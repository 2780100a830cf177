//! `cache`: lists and deletes what is kept between runs because it takes time to make again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::{Parser, Subcommand};
use flatout_train::config::suggestion;
use flatout_train::machine::cache_folder;
use flatout_train::{Failure, UserError};
use serde_json::json;

use crate::screen::{Screen, bytes, count};
use crate::time_limit;

#[derive(Parser)]
pub struct Cache {
    #[command(subcommand)]
    pub what: Option<What>,
}

#[derive(Subcommand)]
pub enum What {
    /// Delete cached files of all parts, or of those that are named. Runs, data and downloaded models are never touched.
    Clean {
        /// Parts to delete, by the names that `flatout cache` shows.
        #[arg(value_name = "PART")]
        parts: Vec<String>,
        /// Only files that were not written for this long, as in 30d or 12h.
        #[arg(long, value_name = "DURATION", value_parser = time_limit::parse)]
        older_than: Option<Duration>,
        /// Say how much would be deleted, and delete nothing.
        #[arg(long)]
        dry_run: bool,
    },
}

/// A folder of the cache, what it holds, and what happens without it.
struct CacheFolder {
    name: &'static str,
    holds: &'static str,
}

const PARTS: [CacheFolder; 10] = [
    CacheFolder {
        name: "ablate",
        holds: "measurements that `ablate` continues from; without them it starts again",
    },
    CacheFolder {
        name: "archives",
        holds: "positions of images in tar archives; without them the archives are scanned again",
    },
    CacheFolder {
        name: "corpora",
        holds: "tokens of compressed text that runs train on; without them it is tokenised again",
    },
    CacheFolder {
        name: "indices",
        holds: "positions of documents in text files; without them the files are scanned again",
    },
    CacheFolder {
        name: "kernels",
        holds: "compiled GPU kernels; without them a first step waits for the compiler",
    },
    CacheFolder {
        name: "products",
        holds: "fastest algorithms of matrix products on GPUs; without them they are timed again",
    },
    CacheFolder {
        name: "samples",
        holds: "tokenised samples with frames; without them shards are read again",
    },
    CacheFolder {
        name: "stream",
        holds: "pieces of files that runs read from servers; without them they are downloaded again",
    },
    CacheFolder {
        name: "timings",
        holds: "kernel times of `doctor --calibrate`, for the predictions of `plan`",
    },
    CacheFolder { name: "tune", holds: "settings that `tune` found, which `train` mentions" },
];

/// An entry of a part.
struct Entry {
    path: PathBuf,
    bytes: u64,
    written: SystemTime,
}

pub fn cache(args: &Cache, screen: &Screen) -> Result<ExitCode, Failure> {
    let Some(folder) = cache_folder() else {
        let sentence = "there is no cache folder: set FLATOUT_CACHE to a folder, or set HOME";
        return Err(UserError(sentence.into()).into());
    };
    match &args.what {
        None => list(&folder, screen)?,
        Some(What::Clean { parts, older_than, dry_run }) => {
            let parts = named_parts(parts)?;
            let before = older_than.and_then(|age| SystemTime::now().checked_sub(age));
            clean(&folder, &parts, before, *dry_run, screen)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn list(folder: &Path, screen: &Screen) -> Result<(), Failure> {
    let rows = PARTS.iter().map(|part| Ok((part, entries(&folder.join(part.name))?)));
    let rows: Vec<(&CacheFolder, Vec<Entry>)> = rows.collect::<Result<_, Failure>>()?;
    let size = |entries: &[Entry]| entries.iter().map(|entry| entry.bytes).sum::<u64>();
    let all: u64 = rows.iter().map(|(_, entries)| size(entries)).sum();
    if screen.json {
        let part = |(part, entries): &(&CacheFolder, Vec<Entry>)| json!({ "part": part.name, "bytes": size(entries), "entries": entries.len(), "holds": part.holds });
        let parts: Vec<_> = rows.iter().map(part).collect();
        screen.object(&json!({ "folder": folder, "bytes": all, "parts": parts }));
        return Ok(());
    }
    screen.result(format!("{} in {}", bytes(all), folder.display()));
    for (part, entries) in &rows {
        let (size, entries) = (bytes(size(entries)), count(entries.len() as u64));
        screen.result(format!("{:9} {size:>10} {entries:>7}  {}", part.name, part.holds));
    }
    screen.result(
        "flatout cache clean [PART] deletes them; downloaded models are in the Hugging Face cache (HF_HOME)",
    );
    Ok(())
}

fn named_parts(names: &[String]) -> Result<Vec<&'static CacheFolder>, UserError> {
    let known = PARTS.map(|part| part.name);
    let part = |name: &String| {
        PARTS.iter().find(|part| part.name == name).ok_or_else(|| {
            let meant = suggestion(name, &known).unwrap_or_else(|| format!("there is {}", known.join(", ")));
            UserError(format!("the cache has no part `{name}`; {meant}"))
        })
    };
    if names.is_empty() { Ok(PARTS.iter().collect()) } else { names.iter().map(part).collect() }
}

fn clean(
    folder: &Path,
    parts: &[&CacheFolder],
    before: Option<SystemTime>,
    is_dry: bool,
    screen: &Screen,
) -> Result<(), Failure> {
    let (mut removed, mut freed) = (0u64, 0u64);
    for part in parts {
        let old = entries(&folder.join(part.name))?;
        for entry in old.into_iter().filter(|entry| before.is_none_or(|before| entry.written < before)) {
            if !is_dry {
                let gone = if entry.path.is_dir() {
                    fs::remove_dir_all(&entry.path)
                } else {
                    fs::remove_file(&entry.path)
                };
                gone.map_err(Failure::io(entry.path.display()))?;
            }
            removed += 1;
            freed += entry.bytes;
        }
    }
    if screen.json {
        screen.object(&json!({ "folder": folder, "removed": removed, "bytes": freed, "dry_run": is_dry }));
        return Ok(());
    }
    let verb = if is_dry { "would be removed" } else { "removed" };
    screen.result(format!("{} in {} entries {verb} from {}", bytes(freed), count(removed), folder.display()));
    Ok(())
}

/// The entries of a part that flatout wrote; empty where there is no such folder, or where it is a symbolic link.
fn entries(folder: &Path) -> Result<Vec<Entry>, Failure> {
    match fs::symlink_metadata(folder) {
        Ok(there) if there.is_dir() => {}
        _ => return Ok(vec![]),
    }
    let mut found = vec![];
    for entry in fs::read_dir(folder).map_err(Failure::io(folder.display()))? {
        let entry = entry.map_err(Failure::io(folder.display()))?;
        // An entry may be removed by its own process at any moment.
        let Ok(metadata) = entry.metadata() else { continue };
        if is_ours(&entry.file_name().to_string_lossy()) && !metadata.is_symlink() {
            let written = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let bytes = if metadata.is_dir() { size_of_folder(&entry.path()) } else { metadata.len() };
            found.push(Entry { path: entry.path(), bytes, written });
        }
    }
    Ok(found)
}

/// Whether flatout gave this name: all its names have a hash of 16 or more hexadecimal digits. So a folder of another program that
/// has the name of a part keeps its files.
fn is_ours(name: &str) -> bool {
    const DIGITS: usize = 16;
    let mut run = 0;
    name.bytes().any(|byte| {
        run = if matches!(byte, b'0'..=b'9' | b'a'..=b'f') { run + 1 } else { 0 };
        run >= DIGITS
    })
}

fn size_of_folder(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => size_of_folder(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.flatten().map(size).sum()
}
