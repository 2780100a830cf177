//! Encoded images with classes, each in its own file or all in archives.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::UNIX_EPOCH;

use rayon::prelude::*;

use crate::error::DataError;
use crate::formats::{Reason, SourceLocation, unreadable};
use crate::images::flaw::Flaw;
use crate::images::stored::{ImageError, Images, Stored};
use crate::random::{fingerprint, key};

/// Where encoded images are stored.
pub(in crate::images) enum Storage {
    Files(Vec<Box<Path>>),
    Members { archives: Vec<Archive>, members: Vec<Member> },
}

/// An archive that members are read from.
pub(crate) struct Archive {
    pub path: Arc<PathBuf>,
    /// Set while the file stays open after the first read: opening it for every image costs more than reading one.
    open: Option<OnceLock<File>>,
}

/// Number of archives kept open. Processes are often limited to 1024 files.
const MOST_OPEN: usize = 256;

impl Archive {
    /// The archive of this number in a set.
    pub fn new(path: Arc<PathBuf>, number: usize) -> Self {
        Self { path, open: (number < MOST_OPEN).then(OnceLock::new) }
    }

    pub fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.open {
            None => File::open(self.path.as_path())?.read_exact_at(buffer, offset),
            Some(open) => {
                if let Some(file) = open.get() {
                    return file.read_exact_at(buffer, offset);
                }
                let file = File::open(self.path.as_path())?;
                open.get_or_init(|| file).read_exact_at(buffer, offset)
            }
        }
    }
}

/// The range of an image in an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Member {
    pub archive: u32,
    pub offset: u64,
    pub bytes: u64,
}

pub(in crate::images) struct Encoded {
    pub holder: Storage,
    /// The class of each image.
    pub classes: Vec<u32>,
    /// Most bytes that are read per image.
    pub max_bytes: u64,
    /// A hash of the bytes of every image that was read; 0 before.
    seen: Vec<AtomicU64>,
}

impl Encoded {
    pub fn new(holder: Storage, classes: Vec<u32>, max_bytes: u64) -> Self {
        let seen = classes.iter().map(|_| AtomicU64::new(0)).collect();
        Self { holder, classes, max_bytes, seen }
    }

    /// Whether an image has the same bytes as when it was first read.
    fn is_as_before(&self, index: u64, bytes: &[u8]) -> bool {
        let hash = fingerprint(bytes).max(1);
        let before =
            self.seen[index as usize].compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed);
        before.is_ok() || before == Err(hash)
    }

    fn read(&self, index: u64, buffer: &mut Vec<u8>) -> Result<io::Result<()>, Flaw> {
        let too_many = |bytes: u64| {
            Flaw::new(
                Reason::TooManyPixels,
                format!("the image has {bytes} bytes, more than one of data.max_pixels can have"),
            )
        };
        match &self.holder {
            Storage::Files(paths) => {
                let read = File::open(&paths[index as usize]).and_then(|file| {
                    let bytes = file.metadata()?.len();
                    buffer.clear();
                    if bytes <= self.max_bytes {
                        buffer.reserve_exact(bytes as usize);
                        file.take(self.max_bytes).read_to_end(buffer)?;
                    }
                    Ok(bytes)
                });
                match read {
                    Ok(bytes) if bytes > self.max_bytes => Err(too_many(bytes)),
                    other => Ok(other.map(|_| ())),
                }
            }
            Storage::Members { archives, members } => {
                let member = members[index as usize];
                if member.bytes > self.max_bytes {
                    return Err(too_many(member.bytes));
                }
                buffer.clear();
                buffer.resize(member.bytes as usize, 0);
                Ok(archives[member.archive as usize].read(buffer, member.offset))
            }
        }
    }
}

impl Images for Encoded {
    fn count(&self) -> u64 {
        self.classes.len() as u64
    }

    fn class(&self, index: u64) -> Option<u32> {
        Some(self.classes[index as usize])
    }

    fn stored<'a>(&'a self, index: u64, buffer: &'a mut Vec<u8>) -> Result<Stored<'a>, ImageError> {
        let place = || self.place(index);
        match self.read(index, buffer)? {
            Ok(()) if self.is_as_before(index, buffer) => Ok(Stored::Encoded(buffer)),
            Ok(()) => Err(ImageError::Failed(DataError::input(format!(
                "{} has other bytes than when it was first read: images must not change while they are trained on.",
                place()
            )))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(ImageError::Failed(DataError::input(format!(
                    "{} is shorter than it was when it was opened: it must not change while it is read.",
                    place().file.display()
                ))))
            }
            Err(error) => Err(ImageError::Failed(unreadable(&place().file, &error))),
        }
    }

    fn version(&self) -> u64 {
        let of = |path: &Path| {
            let metadata = std::fs::metadata(path).ok()?;
            let since = metadata.modified().ok()?.duration_since(UNIX_EPOCH).unwrap_or_default();
            Some(key(metadata.len(), since.as_nanos() as u64))
        };
        let versions: Vec<u64> = match &self.holder {
            Storage::Files(paths) => paths.par_iter().map(|path| of(path).unwrap_or(0)).collect(),
            Storage::Members { archives, .. } => {
                archives.par_iter().map(|archive| of(&archive.path).unwrap_or(0)).collect()
            }
        };
        versions.into_iter().fold(1, key)
    }

    fn place(&self, index: u64) -> SourceLocation {
        match &self.holder {
            Storage::Files(paths) => SourceLocation {
                file: Arc::new(paths[index as usize].to_path_buf()),
                line: None,
                row: None,
                offset: 0,
            },
            Storage::Members { archives, members } => {
                let member = members[index as usize];
                let file = archives[member.archive as usize].path.clone();
                SourceLocation { file, line: None, row: None, offset: member.offset }
            }
        }
    }
}
