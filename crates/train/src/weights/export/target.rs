//! The folder of an export: written under another name, then renamed at once. Only an earlier export is ever replaced.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Failure;
use crate::UserError;
use crate::refuse;
use crate::weights::peft;
use crate::weights::pretrained::folder::{INDEX, SINGLE};
use crate::weights::pretrained::hub::SMALL;
use flatout_data::durable::{self, about};

/// Metadata of every tensor file of an export. Other tools read the first entry; the second identifies an export.
pub const METADATA: [(&str, &str); 2] = [("format", "pt"), WRITTEN_BY];
const WRITTEN_BY: (&str, &str) = ("written_by", "flatout");
/// The longest header of a tensor file that is read.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// The folder to be created.
pub struct Target {
    to: PathBuf,
    partial: PathBuf,
    force: bool,
}

impl Target {
    /// Refuses a path that may not be written. `sources` are the folders that the export is made from.
    pub fn new(to: &Path, force: bool, sources: &[&Path]) -> Result<Target, UserError> {
        // A symbolic link to a folder is kept.
        let to = if to.is_symlink() { to.canonicalize().unwrap_or(to.into()) } else { to.to_path_buf() };
        let Some(name) = to.file_name().map(|name| name.to_string_lossy().into_owned()) else {
            refuse!("--to {} names no folder that could be made", to.display());
        };
        if to.exists() && !to.is_dir() {
            refuse!("{} is a file: give --to a folder", to.display());
        }
        let is_empty = fs::read_dir(&to).is_ok_and(|mut entries| entries.next().is_none());
        if to.exists() && !is_empty {
            if let Some(source) = sources.iter().find(|source| is_within(source, &to)) {
                refuse!("{} holds {}, which is exported: give another --to", to.display(), source.display());
            }
            if !force {
                refuse!("{} is there already: give another --to, or --force to replace it", to.display());
            }
            check_earlier(&to)?;
        }
        let partial = to.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        Ok(Target { to, partial, force })
    }

    /// Fills the folder under another name and renames it; removes it on failure.
    pub fn fill<T>(&self, fill: impl FnOnce(&Path) -> Result<T, Failure>) -> Result<T, Failure> {
        let made = fs::create_dir_all(&self.partial).map_err(about(&self.partial));
        let filled =
            made.map_err(|error| Failure::Environment(error.to_string())).and_then(|()| fill(&self.partial));
        let placed = filled.and_then(|filled| self.place().map(|()| filled));
        if placed.is_err() {
            let _ = fs::remove_dir_all(&self.partial);
        }
        placed
    }

    /// Renames the folder, which fails unless the name is free or an empty folder, so that only one of several processes
    /// succeeds.
    fn place(&self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::Environment(about(&self.to)(error).to_string());
        durable::sync_folder(&self.partial).map_err(failed)?;
        match fs::rename(&self.partial, &self.to) {
            Ok(()) => {}
            Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => return Err(failed(error)),
            Err(_) if !self.force => {
                return Err(Failure::User(UserError(format!(
                    "{} was made by another process meanwhile: give another --to, or --force to replace it",
                    self.to.display()
                ))));
            }
            Err(_) => {
                // It may have become another folder meanwhile.
                check_earlier(&self.to)?;
                durable::exchange(&self.partial, &self.to).map_err(failed)?;
                fs::remove_dir_all(&self.partial).map_err(failed)?;
            }
        }
        durable::sync_parent(&self.to).map_err(failed)
    }
}

/// Whether a folder equals another one or lies within it, after resolving links.
fn is_within(inner: &Path, outer: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    real(inner).starts_with(real(outer))
}

/// Refuses to replace a folder that contains anything but an export. Another process may replace it during the check and remove
/// what is being checked: then the check is repeated.
fn check_earlier(folder: &Path) -> Result<(), UserError> {
    let which = || fs::metadata(folder).ok().map(|found| (found.dev(), found.ino()));
    loop {
        let before = which();
        let checked = check_once(folder);
        if checked.is_ok() || which() == before {
            return checked;
        }
    }
}

fn check_once(folder: &Path) -> Result<(), UserError> {
    let mut tensors = vec![];
    let foreign = foreign_entry(folder, true, &mut tensors)
        .map_err(|error| UserError(format!("{} cannot be read: {error}", folder.display())))?;
    if let Some(foreign) = foreign {
        refuse!(
            "{} holds {}, which no export wrote, and --force replaces only exports: give another --to",
            folder.display(),
            foreign.strip_prefix(folder).unwrap_or(&foreign).display()
        );
    }
    if tensors.is_empty() || !tensors.iter().all(|path| is_ours(path)) {
        refuse!(
            "{} is no export of flatout's (its tensor files do not say so), and --force replaces only those: give another \
             --to",
            folder.display()
        );
    }
    Ok(())
}

/// The first entry that does not belong to an export; also collects the tensor files. Adapters are in subfolders of their names.
fn foreign_entry(
    folder: &Path,
    has_folders: bool,
    tensors: &mut Vec<PathBuf>,
) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder)? {
        let (entry, path) = entry.map(|entry| (entry.file_type(), entry.path()))?;
        let kind = entry?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if kind.is_dir() && has_folders {
            if let Some(foreign) = foreign_entry(&path, false, tensors)? {
                return Ok(Some(foreign));
            }
        } else if kind.is_file() && is_tensor_file(&name) {
            tensors.push(path);
        } else if !kind.is_file() || !([INDEX, peft::CONFIG].contains(&&*name) || SMALL.contains(&&*name)) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

fn is_tensor_file(name: &str) -> bool {
    let is_shard = || {
        let numbers = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
        let is_number = |number: &str| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        Some(is_number(numbers.0) && is_number(numbers.1))
    };
    [SINGLE, peft::TENSORS].contains(&name) || is_shard() == Some(true)
}

/// Whether a tensor file is marked as written by flatout.
fn is_ours(path: &Path) -> bool {
    let header = || {
        let mut file = File::open(path).ok()?;
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).ok()?;
        let length = Some(u64::from_le_bytes(bytes)).filter(|length| *length <= MAX_HEADER_BYTES)?;
        serde_json::from_reader::<_, Value>(io::BufReader::new(file.take(length))).ok()
    };
    let (key, value) = WRITTEN_BY;
    header().is_some_and(|header| header["__metadata__"][key] == value)
}
