//! Lists the runs in a folder and opens their files safely.
//!
//! A run is in the folder, or one level deeper where it is part of a sweep or of folds. Links to folders are followed only if
//! they stay inside the folder; files that are links are never opened.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The most folders that are searched, so that a folder without runs is not read for minutes.
const MOST_FOLDERS: usize = 50_000;
const CONFIG: &str = "config.toml";
const SWEEP: &str = "sweep.json";
/// The id of a sweep that is the folder itself.
const ITSELF: &str = ".";

/// A folder of runs, one run, or the runs of a sweep.
#[derive(Clone, Debug)]
pub struct Folder {
    root: PathBuf,
}

/// A run or a sweep within the folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FolderEntry {
    /// Its path inside the folder, by which pages name it.
    pub id: String,
    pub dir: PathBuf,
}

/// The content of a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FolderListing {
    pub runs: Vec<FolderEntry>,
    pub sweeps: Vec<FolderEntry>,
    /// Reasons why something is left out.
    pub notes: Vec<String>,
}

impl Folder {
    pub fn open(dir: &Path) -> io::Result<Folder> {
        let root = fs::canonicalize(dir)?;
        fs::read_dir(&root)?;
        Ok(Folder { root })
    }

    pub fn path(&self) -> &Path {
        &self.root
    }

    /// Searches for runs and sweeps.
    pub fn look(&self) -> FolderListing {
        let mut search = Search {
            root: &self.root,
            folders: 0,
            outside: 0,
            seen: BTreeSet::new(),
            found: FolderListing::default(),
        };
        match is_file(&self.root.join(CONFIG)) {
            true => search.add_run(&self.root),
            false => {
                if is_file(&self.root.join(SWEEP)) {
                    search.found.sweeps.push(FolderEntry { id: ITSELF.into(), dir: self.root.clone() });
                }
                search.within(&self.root, 0);
            }
        }
        let Search { folders, outside, mut found, .. } = search;
        if outside > 0 {
            found.notes.push(format!("{outside} links that lead out of the folder are left out"));
        }
        if folders >= MOST_FOLDERS {
            found.notes.push(format!("only the first {MOST_FOLDERS} folders were searched"));
        }
        found.runs.sort();
        found.sweeps.sort();
        found
    }

    /// Opens a regular file of a run. Links, pipes, and run folders that have been replaced by a link out of this folder are
    /// refused.
    pub fn file(&self, dir: &Path, name: &str) -> io::Result<File> {
        if !fs::canonicalize(dir)?.starts_with(&self.root) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it leads out of the folder"));
        }
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
        let file = OpenOptions::new().read(true).custom_flags(flags as i32).open(dir.join(name))?;
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
        }
    }

    /// The content of a file of a run; an error where it has more than `most` bytes.
    pub fn text(&self, dir: &Path, name: &str, most: u64) -> io::Result<String> {
        let mut text = String::new();
        let read = self.file(dir, name)?.take(most + 1).read_to_string(&mut text)?;
        match read as u64 <= most {
            true => Ok(text),
            false => {
                Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("{name} has more than {most} bytes")))
            }
        }
    }
}

struct Search<'a> {
    root: &'a Path,
    folders: usize,
    outside: usize,
    seen: BTreeSet<String>,
    found: FolderListing,
}

impl Search<'_> {
    fn within(&mut self, dir: &Path, depth: usize) {
        let Ok(entries) = fs::read_dir(dir) else { return };
        for entry in entries.flatten() {
            let Ok(kind) = entry.file_type() else { continue };
            let path = entry.path();
            if kind.is_symlink() {
                match fs::canonicalize(&path) {
                    Ok(target) if !target.is_dir() => continue,
                    Ok(target) if target.starts_with(self.root) => {}
                    Ok(_) => {
                        self.outside += 1;
                        continue;
                    }
                    Err(_) => continue,
                }
            } else if !kind.is_dir() {
                continue;
            }
            self.folders += 1;
            if self.folders >= MOST_FOLDERS {
                return;
            }
            if is_file(&path.join(CONFIG)) {
                self.add_run(&path);
            } else if depth == 0 {
                if is_file(&path.join(SWEEP)) {
                    let id = self.id(&path);
                    self.found.sweeps.push(FolderEntry { id, dir: path.clone() });
                }
                self.within(&path, 1);
            }
        }
    }

    fn add_run(&mut self, dir: &Path) {
        let id = self.id(dir);
        // Names that are not valid text may look the same: the first counts.
        if self.seen.insert(id.clone()) {
            self.found.runs.push(FolderEntry { id, dir: dir.into() });
        }
    }

    fn id(&self, dir: &Path) -> String {
        let within = dir.strip_prefix(self.root).ok().filter(|path| path.components().next().is_some());
        let path = within.unwrap_or_else(|| dir.file_name().map_or(dir, Path::new));
        path.to_string_lossy().into_owned()
    }
}

/// Whether this is a regular file and not a link.
fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file())
}
