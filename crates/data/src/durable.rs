//! Writes that survive a crash of the machine: a file's bytes reach the disk before its name does.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Writes a file and waits until it is on disk.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Waits until the names in a folder are on disk: those created, renamed and removed.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// The same for the folder a path lies in.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => sync_folder(folder),
        _ => sync_folder(Path::new(".")),
    }
}

/// Puts `bytes` in place of the file's content, at once: whoever opens it finds the old content or the new.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    write(partial, bytes)?;
    fs::rename(partial, path)?;
    sync_parent(path)
}

/// Says which file an error is about.
pub fn about(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
