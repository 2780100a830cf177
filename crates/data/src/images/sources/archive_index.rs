//! A cache of the index of an archive's members and labels between runs.
//!
//! Reading the headers of many large archives takes longer than everything else before the first step. Each archive has one
//! file, named by a hash of its path and of the field that holds labels. The file records the archive's path, size and
//! modification time, then labels, members and skipped ones, and is sealed by a hash (`sealed`). A file that is damaged, or of
//! another archive or an earlier state of it, is replaced.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::encoded::Member;
use super::found::Labels;
use crate::formats::{OnError, Reason, Skipped, SourceLocation, Version};
use crate::random::{fingerprint, key};
use crate::sealed::{self, Lines, Sealed, escaped, escaped_path, path, unescaped};

const FORM: &str = "flatout archive 1";

/// The images of an archive, and the members that were skipped.
#[derive(Debug, Default, Clone, PartialEq)]
pub(in crate::images) struct ArchiveIndex {
    pub members: Vec<Member>,
    pub labels: Labels,
    /// Hash of the name of each image's sample.
    pub hashes: Vec<u64>,
    pub skipped: Skipped,
}

/// The archive and the label field that an index is valid for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::images) struct CacheKey {
    /// The path as given, for messages; the file stores the absolute one.
    named: Arc<PathBuf>,
    archive: PathBuf,
    version: Version,
    label: Option<String>,
}

impl CacheKey {
    /// The key of an archive in its present state, with labels read from a field of JSON where one is named.
    pub fn now(archive: &Path, label: Option<&str>) -> io::Result<Self> {
        let version = Version::of(&fs::metadata(archive)?);
        let (named, archive) = (Arc::new(archive.to_path_buf()), std::path::absolute(archive)?);
        Ok(Self { named, archive, version, label: label.map(String::from) })
    }

    /// The file of its index.
    pub fn file_in(&self, cache: &Path) -> PathBuf {
        let path = fingerprint(self.archive.as_os_str().as_encoded_bytes());
        let label = self.label.as_deref().map_or(0, |label| key(1, fingerprint(label.as_bytes())));
        cache.join("archives").join(format!("{:016x}", key(path, label)))
    }
}

impl ArchiveIndex {
    /// The cached index of archive `number` of a set. Returns `None` where members were skipped and that is not allowed, so
    /// that reading the archive again reports them.
    pub fn load(cache: &Path, of: &CacheKey, on_error: OnError, number: u32) -> Option<Self> {
        let file = File::open(of.file_in(cache)).ok()?;
        let index = Self::from_text(file, of, number)?;
        (on_error == OnError::Skip || index.skipped.total() == 0).then_some(index)
    }

    /// Caches the index, unless the archive has changed since it was read.
    pub fn store(&self, cache: &Path, of: &CacheKey) -> io::Result<()> {
        if CacheKey::now(&of.named, of.label.as_deref())? != *of {
            return Ok(());
        }
        sealed::keep(&of.file_in(cache), |out| self.to_text(out, of))
    }

    fn to_text(&self, out: impl Write, of: &CacheKey) -> io::Result<()> {
        let mut out = Sealed::new(out);
        let Version { bytes, modified } = of.version;
        let label = of.label.as_deref().map_or("-".into(), |label| format!("={}", escaped(label)));
        out.line(FORM)?;
        out.line(&format!("of {bytes} {modified} {label} {}", escaped_path(&of.archive)))?;
        for (reason, count, first) in self.skipped.reasons() {
            out.line(&format!("skipped {} {count} {}", reason as usize, first.offset))?;
        }
        for (label, place) in self.labels.names() {
            out.line(&format!("label {} ={}", place.offset, escaped(label)))?;
        }
        let members = self.members.iter().zip(self.labels.numbers()).zip(&self.hashes);
        for ((Member { offset, bytes, .. }, label), hash) in members {
            out.line(&format!("member {offset} {bytes} {label} {hash:x}"))?;
        }
        out.end()
    }

    /// Parses the text form; `None` where it is damaged or has another key.
    fn from_text(text: impl Read, of: &CacheKey, number: u32) -> Option<Self> {
        let mut lines = Lines::new(text);
        let mut index = Self::default();
        let (mut names, mut is_of): (Vec<(String, SourceLocation)>, bool) = (Vec::new(), false);
        let place = |offset: u64| SourceLocation { file: of.named.clone(), line: None, row: None, offset };
        if lines.next()? != FORM {
            return None;
        }
        loop {
            let hash = lines.hash();
            let (kind, rest) = lines.next()?.split_once(' ')?;
            let mut words = rest.split(' ');
            let mut number_of = |radix| u64::from_str_radix(words.next()?, radix).ok();
            match kind {
                "of" => {
                    let version = Version { bytes: number_of(10)?, modified: number_of(10)? };
                    let label = match words.next()?.strip_prefix('=') {
                        None => None,
                        Some(label) => Some(String::from_utf8(unescaped(label)?).ok()?),
                    };
                    let found =
                        CacheKey { named: of.named.clone(), archive: path(words.next()?)?, version, label };
                    is_of = found == *of;
                }
                "skipped" => {
                    let reason = Reason::numbered(number_of(10)? as usize)?;
                    index.skipped.note_many(reason, number_of(10)?, place(number_of(10)?));
                }
                "label" => {
                    let offset = number_of(10)?;
                    let label = words.next()?.strip_prefix('=')?;
                    names.push((String::from_utf8(unescaped(label)?).ok()?, place(offset)));
                }
                "member" => {
                    let (offset, bytes, label) = (number_of(10)?, number_of(10)?, number_of(10)?);
                    index.hashes.push(number_of(16)?);
                    let (label, place) = names.get(usize::try_from(label).ok()?)?;
                    offset.checked_add(bytes).filter(|end| *end <= of.version.bytes)?;
                    index.labels.push(label, || place.clone());
                    index.members.push(Member { archive: number, offset, bytes });
                }
                "end" => return (is_of && rest == format!("{hash:x}")).then_some(index),
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn index(of: &CacheKey) -> ArchiveIndex {
        let mut index = ArchiveIndex::default();
        let place = |offset| SourceLocation { file: of.named.clone(), line: None, row: None, offset };
        for (at, label) in ["a cat", "dog\n", "a cat", "="].iter().enumerate() {
            let offset = 512 * at as u64;
            index.labels.push(label, || place(offset));
            index.members.push(Member { archive: 3, offset, bytes: 100 + at as u64 });
            index.hashes.push(u64::MAX - at as u64);
        }
        index
    }

    #[test]
    fn an_index_is_valid_for_its_archive_only() {
        let scratch = Scratch::new("archive-index");
        let (cache, archive) = (scratch.path().join("cache"), scratch.write("a.tar", &[0; 4096]));
        let of = CacheKey::now(&archive, Some("class")).unwrap();
        let mut made = index(&of);
        made.store(&cache, &of).unwrap();
        assert_eq!(ArchiveIndex::load(&cache, &of, OnError::Fail, 3), Some(made.clone()));
        assert_eq!(
            ArchiveIndex::load(&cache, &CacheKey::now(&archive, None).unwrap(), OnError::Fail, 3),
            None
        );
        // An index with skipped samples is valid only where skipping is allowed.
        let first = SourceLocation { file: Arc::new(archive.clone()), line: None, row: None, offset: 512 };
        made.skipped.note_many(Reason::Damaged, 2, first);
        made.store(&cache, &of).unwrap();
        assert_eq!(ArchiveIndex::load(&cache, &of, OnError::Fail, 3), None);
        assert_eq!(ArchiveIndex::load(&cache, &of, OnError::Skip, 3), Some(made.clone()));
        // Another size is another archive, and an archive that changes while it is read is not cached.
        scratch.write("a.tar", &[0; 4608]);
        let later = CacheKey::now(&archive, Some("class")).unwrap();
        assert_eq!(ArchiveIndex::load(&cache, &later, OnError::Skip, 3), None);
        fs::remove_file(of.file_in(&cache)).unwrap();
        made.store(&cache, &of).unwrap();
        assert!(!of.file_in(&cache).exists());
    }

    #[test]
    fn a_rewritten_archive_and_a_damaged_index_are_read_again() {
        let scratch = Scratch::new("archive-index-again");
        let (cache, archive) = (scratch.path().join("cache"), scratch.write("a.tar", &[0; 4096]));
        let of = CacheKey::now(&archive, None).unwrap();
        let made = index(&of);
        made.store(&cache, &of).unwrap();
        // As many bytes, written a nanosecond later.
        let modified = fs::metadata(&archive).unwrap().modified().unwrap();
        let file = File::options().append(true).open(&archive).unwrap();
        file.set_modified(modified + std::time::Duration::from_nanos(1)).unwrap();
        let later = CacheKey::now(&archive, None).unwrap();
        assert_eq!((later.version.bytes, later == of), (of.version.bytes, false));
        assert_eq!(ArchiveIndex::load(&cache, &later, OnError::Fail, 3), None);
        fs::write(later.file_in(&cache), "flatout archive 1\nof").unwrap();
        assert_eq!(ArchiveIndex::load(&cache, &later, OnError::Fail, 3), None);
        made.store(&cache, &later).unwrap();
        assert_eq!(ArchiveIndex::load(&cache, &later, OnError::Fail, 3), Some(made));
    }

    #[test]
    fn a_damaged_index_is_none() {
        let scratch = Scratch::new("archive-index-damaged");
        let archive = scratch.write("a.tar", &[0; 4096]);
        let of = CacheKey::now(&archive, None).unwrap();
        let mut text = Vec::new();
        index(&of).to_text(&mut text, &of).unwrap();
        let read = |text: &[u8]| ArchiveIndex::from_text(text, &of, 3);
        assert!(read(&text).is_some());
        for at in 0..text.len() {
            assert!(read(&text[..at]).is_none(), "cut at {at}");
            let mut damaged = text.clone();
            damaged[at] ^= 1;
            assert!(read(&damaged).is_none(), "damaged at {at}");
        }
        // A member beyond the end of the archive, with a valid hash.
        let mut outside = index(&of);
        outside.members[0].bytes = 5000;
        let mut text = Vec::new();
        outside.to_text(&mut text, &of).unwrap();
        assert!(read(&text).is_none());
    }
}
