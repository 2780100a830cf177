//! The file of an export: written under another name, then renamed at once. Only an earlier export is ever replaced.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flatout_data::durable::{self, about};
use flatout_models::library::gguf::Value;

use super::write::beginning;
use crate::Failure;
use crate::UserError;
use crate::refuse;

/// The first metadata entry of every file, which identifies an export.
pub const WRITTEN_BY: (&str, &str) = ("general.written_by", "flatout");

/// The file to be created.
pub struct Target {
    to: PathBuf,
    partial: PathBuf,
    force: bool,
}

impl Target {
    /// Refuses a path that may not be written.
    pub fn new(to: &Path, force: bool) -> Result<Target, UserError> {
        let Some(name) = to.file_name().map(|name| name.to_string_lossy().into_owned()) else {
            refuse!("--to {} names no file that could be made", to.display());
        };
        if to.is_dir() {
            refuse!("{} is a folder: give --to the name of a file in it, as model.gguf", to.display());
        }
        if to.exists() && !force {
            refuse!("{} is there already: give another --to, or --force to replace it", to.display());
        }
        if to.exists() {
            check_earlier(to)?;
        }
        let partial = to.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        Ok(Target { to: to.to_path_buf(), partial, force })
    }

    /// Writes the file under another name and renames it; removes it on failure.
    pub fn fill(&self, fill: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<(), Failure> {
        let failed = |path: &Path, error: io::Error| Failure::Environment(about(path)(error).to_string());
        if let Some(folder) = self.to.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        }
        let placed = fill(&self.partial).and_then(|()| self.place());
        let _ = fs::remove_file(&self.partial);
        placed.map_err(|failure| match failure {
            Failure::Environment(sentence) => {
                Failure::Environment(format!("the export to {} failed: {sentence}", self.to.display()))
            }
            other => other,
        })
    }

    /// Links the file to its name, which fails if the name exists, so that only one of several processes succeeds.
    fn place(&self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::Environment(about(&self.to)(error).to_string());
        match fs::hard_link(&self.partial, &self.to) {
            Ok(()) => {}
            Err(_) if self.to.exists() && !self.force => {
                return Err(Failure::User(UserError(format!(
                    "{} was made by another process meanwhile: give another --to, or --force to replace it",
                    self.to.display()
                ))));
            }
            // Also taken if the file system has no links.
            Err(_) => {
                if self.to.exists() {
                    check_earlier(&self.to)?;
                }
                fs::rename(&self.partial, &self.to).map_err(failed)?;
            }
        }
        durable::sync_parent(&self.to).map_err(failed)
    }
}

/// Refuses to replace a file that is not marked as an export of flatout.
fn check_earlier(path: &Path) -> Result<(), UserError> {
    let (key, value) = WRITTEN_BY;
    let [before, behind] = beginning(key, &Value::String(value.into()));
    let counts = 16;
    let mut first = vec![0; before.len() + counts + behind.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut first));
    if read.is_ok() && first.starts_with(&before) && first[before.len() + counts..] == behind {
        return Ok(());
    }
    refuse!(
        "{} is no export of flatout's (it does not say so), and --force replaces only those: give another --to",
        path.display()
    );
}
