//! Writes that survive a crash of the machine: the bytes of a file reach the disk before its name does.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// Writes a file and waits until it is on disk.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Waits until the directory entries of a folder are on disk: files created, renamed and removed.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// As [`sync_folder`], for the folder that contains `path`.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => sync_folder(folder),
        _ => sync_folder(Path::new(".")),
    }
}

/// Replaces the content of a file atomically: a reader finds the old content or the new. Only one writer at a time may call it;
/// its next attempt reuses the temporary file that a crash left behind.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_through(".partial", path, bytes)
}

/// As [`replace`], where several processes may write the same file.
pub fn replace_among(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let own = format!(".{}.{}.partial", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    replace_through(&own, path, bytes)
}

fn replace_through(ending: &str, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(ending);
    let partial = Path::new(&partial);
    let written = write(partial, bytes).and_then(|()| fs::rename(partial, path));
    if written.is_err() {
        let _ = fs::remove_file(partial);
    }
    written.and_then(|()| sync_parent(path))
}

/// Makes a file hold `bytes`, as [`replace`] does, but leaves a file alone that holds them already.
pub fn ensure(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|there| there == bytes) { Ok(()) } else { replace(path, bytes) }
}

/// Exchanges the content of two names, atomically where the file system supports it.
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    match renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            let mut aside = one.as_os_str().to_owned();
            aside.push(".aside");
            fs::rename(other, &aside)?;
            let moved = fs::rename(one, other);
            fs::rename(&aside, if moved.is_ok() { one } else { other })?;
            moved
        }
        exchanged => Ok(exchanged?),
    }
}

/// Names the file in an error about it.
pub fn about(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn names(folder: &Path) -> Vec<String> {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_with_the_right_content_is_not_touched() {
        let folder = Scratch::new("durable-ensure");
        let path = folder.path().join("config.toml");
        ensure(&path, b"one").unwrap();
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("config.toml.partial")).unwrap();
        ensure(&path, b"one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), written);
        // The disk takes no more: the old content stays, and no temporary file is left.
        assert!(ensure(&path, b"two").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(names(folder.path()), ["config.toml"]);
        ensure(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
    }

    #[test]
    fn concurrent_writers_use_different_temporary_files() {
        let folder = Scratch::new("durable-among");
        let path = folder.path().join("main");
        let texts = ["a", "b", "c", "d"].map(|letter| letter.repeat(100_000));
        std::thread::scope(|scope| {
            for text in &texts {
                scope.spawn(|| (0..20).for_each(|_| replace_among(&path, text.as_bytes()).unwrap()));
            }
        });
        let there = fs::read_to_string(&path).unwrap();
        assert!(texts.contains(&there), "{} bytes", there.len());
        assert_eq!(names(folder.path()), ["main"]);
    }
}
