//! Adds features to a cache, part by part, one process at a time.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_128;

use super::feature_cache::{CachedImage, FeatureCache, LOCK, cannot_write, check_foreign};
use super::feature_index::{ALIGNMENT, Entry, FILE_NAME, FeatureFile, FeatureFormat, part_name};
use crate::durable;
use crate::error::DataError;

const PARTIAL: &str = ".partial";
/// Interval between attempts to lock a folder that another process has locked.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A part is complete with this number of bytes or of images, whichever comes first. A killed process loses what it computed
/// since the last complete part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartSize {
    pub bytes: u64,
    pub images: usize,
}

impl Default for PartSize {
    fn default() -> PartSize {
        PartSize { bytes: 1 << 30, images: 256 }
    }
}

/// A cache locked for writing by this process.
pub struct CacheWriter {
    cache: FeatureCache,
    size: PartSize,
    /// The part that is being written.
    open: Option<(File, FeatureFile)>,
    /// The lock, held while this process writes.
    _lock: File,
}

impl CacheWriter {
    /// Locks a folder, creating it if needed. Where another process has locked it, calls `wait` once and waits; that process's
    /// features are then available.
    pub fn enter(
        folder: &Path,
        format: &FeatureFormat,
        size: PartSize,
        wait: &mut dyn FnMut(),
    ) -> Result<CacheWriter, DataError> {
        check_foreign_or_index(folder)?;
        let failed = |error: io::Error| cannot_write(folder, &error);
        fs::create_dir_all(folder).map_err(failed)?;
        let lock = File::create(folder.join(LOCK)).map_err(failed)?;
        let mut is_told = false;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {
                    if !std::mem::replace(&mut is_told, true) {
                        wait();
                    }
                    std::thread::sleep(RETRY_INTERVAL);
                }
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
        }
        Ok(CacheWriter { cache: FeatureCache::open(folder, format)?, size, open: None, _lock: lock })
    }

    /// The complete part of the cache.
    pub fn cache(&self) -> &FeatureCache {
        &self.cache
    }

    /// An error where the disk has no room for features of this size.
    pub fn check_room(&self, bytes: u64) -> Result<(), DataError> {
        let folder = &self.cache.folder;
        let Ok(disk) = rustix::fs::statvfs(folder) else { return Ok(()) };
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if bytes <= free {
            return Ok(());
        }
        let gb = |bytes: u64| bytes as f64 / 1e9;
        Err(DataError::input(format!(
            "The features take {:.1} GB, and the disk of {} has {:.1} GB free: make room, or give another data.vision_cache.",
            gb(bytes),
            folder.display(),
            gb(free)
        )))
    }

    /// Adds the features of an image, level by level.
    pub fn append(&mut self, image: &CachedImage, features: &[u8]) -> Result<(), DataError> {
        let format = &self.cache.index.format;
        assert_eq!(format.bytes(image.tokens), Some(features.len() as u64), "features of {}", image.named());
        if self.cache.entry(&image.sha256).is_some() {
            return Ok(());
        }
        let written = self.write(image, features);
        written.map_err(|error| self.failed(&error))
    }

    fn write(&mut self, image: &CachedImage, features: &[u8]) -> io::Result<()> {
        if self.open.is_none() {
            let file = part_name(self.cache.index.parts.len());
            let partial = self.cache.folder.join(format!("{file}{PARTIAL}"));
            self.open = Some((File::create(partial)?, FeatureFile { file, bytes: 0, images: vec![] }));
        }
        let (file, part) = self.open.as_mut().expect("the part was opened above");
        let offset = part.bytes.next_multiple_of(ALIGNMENT);
        file.write_all(&vec![0; (offset - part.bytes) as usize])?;
        file.write_all(features)?;
        part.bytes = offset + features.len() as u64;
        part.images.push(Entry {
            sha256: image.sha256.clone(),
            name: image.name.clone(),
            grid: [image.grid.rows, image.grid.columns],
            tokens: image.tokens,
            offset,
            hash: format!("{:032x}", xxh3_128(features)),
        });
        match part.bytes >= self.size.bytes || part.images.len() >= self.size.images {
            true => self.close(),
            false => Ok(()),
        }
    }

    /// Renames the open part into place, and adds it to the index.
    fn close(&mut self) -> io::Result<()> {
        let Some((file, part)) = &self.open else { return Ok(()) };
        let folder = &self.cache.folder;
        file.sync_all()?;
        fs::rename(folder.join(format!("{}{PARTIAL}", part.file)), folder.join(&part.file))?;
        durable::sync_folder(folder)?;
        let mut index = self.cache.index.clone();
        index.parts.push(part.clone());
        durable::replace(&folder.join(FILE_NAME), &index.to_json())?;
        self.open = None;
        self.cache = FeatureCache::of(&self.cache.folder, index);
        Ok(())
    }

    /// Completes the last part and releases the lock.
    pub fn finish(mut self) -> Result<FeatureCache, DataError> {
        match self.close() {
            Ok(()) => Ok(self.cache.clone()),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn failed(&self, error: &io::Error) -> DataError {
        let kept = self.cache.count();
        let remedy = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                "make room, or give another data.vision_cache"
            }
            _ => "put that right, or give another data.vision_cache",
        };
        DataError::environment(format!(
            "Features could not be written to {} ({error}): {remedy}; those of {kept} images are whole and are used again.",
            self.cache.folder.display()
        ))
    }
}

impl Drop for CacheWriter {
    /// Removes an incomplete part.
    fn drop(&mut self) {
        if let Some((_, part)) = &self.open {
            let _ = fs::remove_file(self.cache.folder.join(format!("{}{PARTIAL}", part.file)));
        }
    }
}

/// Accepts a folder that contains a cache, or nothing.
fn check_foreign_or_index(folder: &Path) -> Result<(), DataError> {
    if folder.join(FILE_NAME).exists() { Ok(()) } else { check_foreign(folder) }
}
