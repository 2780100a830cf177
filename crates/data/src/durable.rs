//! Writes that survive a crash of the machine: a file's bytes reach the disk before its name does.

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

/// Puts `bytes` in place of the file's content, at once: whoever opens it finds the old content or the new. For one writer
/// at a time, whose next attempt takes up the temporary file that a crash left.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by_way_of(".partial", path, bytes)
}

/// As [`replace`], where several processes may write the same file.
pub fn replace_among(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let own = format!(".{}.{}.partial", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    replace_by_way_of(&own, path, bytes)
}

fn replace_by_way_of(ending: &str, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(ending);
    let partial = Path::new(&partial);
    let written = write(partial, bytes).and_then(|()| fs::rename(partial, path));
    if written.is_err() {
        let _ = fs::remove_file(partial);
    }
    written.and_then(|()| sync_parent(path))
}

/// Makes a file hold `bytes`: as [`replace`], but a file that holds them already is not touched.
pub fn ensure(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|there| there == bytes) { Ok(()) } else { replace(path, bytes) }
}

/// Gives two names to each other's content: at once where the file system can do that.
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

/// Says which file an error is about.
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
    fn a_file_that_holds_what_it_should_is_not_touched() {
        let folder = Scratch::new("durable-ensure");
        let path = folder.path().join("config.toml");
        ensure(&path, b"one").unwrap();
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("config.toml.partial")).unwrap();
        ensure(&path, b"one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), written);
        // The disk that takes no more: the old content stays, and no temporary file is left.
        assert!(ensure(&path, b"two").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(names(folder.path()), ["config.toml"]);
        ensure(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
    }

    #[test]
    fn writers_of_one_file_do_not_meet() {
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
