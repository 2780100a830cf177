//! Reads the members of a tar archive by their headers.
//!
//! Supports ustar with its prefix, GNU long names and base-256 numbers, and pax headers (`path` and `size`). Only regular files
//! are members; links, devices and sparse files are flaws. Nothing is extracted, so names never reach the file system; a name
//! that leads out of the archive is still a flaw, because such an archive is not trustworthy.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::formats::{Reason, SourceLocation};
use crate::images::flaw::Flaw;

const BLOCK: u64 = 512;
/// Most bytes of the data of a long name or a pax header.
const MOST_EXTENDED_HEADER: u64 = 1 << 20;

/// A regular file in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Name without leading `./`.
    pub name: String,
    /// Offset of its data.
    pub offset: u64,
    pub bytes: u64,
}

/// The next item of an archive.
pub(crate) enum Next {
    Entry(Entry),
    /// An item that is no member, with the offset of its header.
    Flaw(Flaw, u64),
    /// A fault after which nothing can be read.
    Lost(Flaw, u64),
    End,
}

pub(crate) struct Archive {
    pub path: Arc<PathBuf>,
    file: File,
    length: u64,
    at: u64,
    ended: bool,
}

/// Values for the next member from preceding extended headers.
#[derive(Default)]
struct ExtendedHeader {
    path: Option<String>,
    size: Option<u64>,
    is_sparse: bool,
}

impl Archive {
    pub fn open(path: Arc<PathBuf>) -> io::Result<Self> {
        let file = File::open(path.as_path())?;
        let length = file.metadata()?.len();
        Ok(Self { path, file, length, at: 0, ended: false })
    }

    pub fn place(&self, offset: u64) -> SourceLocation {
        SourceLocation { file: self.path.clone(), line: None, row: None, offset }
    }

    /// The bytes of an entry, if there are at most `most`.
    pub fn read(&self, entry: &Entry, most: u64) -> io::Result<Option<Vec<u8>>> {
        if entry.bytes > most {
            return Ok(None);
        }
        let mut bytes = vec![0; entry.bytes as usize];
        self.file.read_exact_at(&mut bytes, entry.offset)?;
        Ok(Some(bytes))
    }

    pub fn next(&mut self) -> io::Result<Next> {
        if self.ended {
            return Ok(Next::End);
        }
        let mut extra = ExtendedHeader::default();
        loop {
            let at = self.at;
            let lost = |archive: &mut Self, message: &str| {
                archive.ended = true;
                Ok(Next::Lost(Flaw::new(Reason::Damaged, message), at))
            };
            if at + BLOCK > self.length {
                return lost(self, "the archive is cut short: it has no end");
            }
            let mut header = [0; BLOCK as usize];
            self.file.read_exact_at(&mut header, at)?;
            if header.iter().all(|byte| *byte == 0) {
                self.ended = true;
                return Ok(Next::End);
            }
            if !checksum_matches(&header) {
                return lost(self, "a header is missing or damaged");
            }
            let Some(mut bytes) = number(&header[124..136]) else {
                return lost(self, "a header has no size");
            };
            let kind = header[156];
            let is_extra = matches!(kind, b'x' | b'g' | b'L' | b'K');
            if let Some(size) = extra.size.filter(|_| !is_extra) {
                bytes = size;
            }
            let offset = at + BLOCK;
            let end = bytes.checked_next_multiple_of(BLOCK).and_then(|padded| offset.checked_add(padded));
            let Some(end) = end.filter(|_| bytes <= self.length - offset) else {
                return lost(
                    self,
                    "the archive is cut short: its last member is longer than the rest of the file",
                );
            };
            self.at = end;
            if is_extra {
                if bytes > MOST_EXTENDED_HEADER {
                    return lost(self, "a header with a name is too long");
                }
                let mut body = vec![0; bytes as usize];
                self.file.read_exact_at(&mut body, offset)?;
                match kind {
                    b'L' => extra.path = Some(text(&body)),
                    b'x' => match pax(&body) {
                        Some(records) => extra.take(records),
                        None => return lost(self, "a pax header is invalid"),
                    },
                    // Global pax headers (g) name no member, and link targets (K) are not needed.
                    _ => {}
                }
                continue;
            }
            let name = extra.path.take().unwrap_or_else(|| name(&header));
            return Ok(match (kind, extra.is_sparse) {
                (b'5', _) => {
                    extra = ExtendedHeader::default();
                    continue;
                }
                (b'S', _) | (_, true) => Next::Flaw(
                    Flaw::new(Reason::MemberKind, format!("the member {name} is a sparse file")),
                    at,
                ),
                (b'0' | 0 | b'7', false) => match relative_name(&name) {
                    // Old archives store folders as files whose names end with a slash.
                    Some(_) if name.ends_with('/') => {
                        extra = ExtendedHeader::default();
                        continue;
                    }
                    Some(name) => Next::Entry(Entry { name: name.into(), offset, bytes }),
                    None => Next::Flaw(
                        Flaw::new(Reason::MemberPath, format!("the member {name} leads out of the archive")),
                        at,
                    ),
                },
                (b'1' | b'2', _) => {
                    Next::Flaw(Flaw::new(Reason::MemberKind, format!("the member {name} is a link")), at)
                }
                (b'3' | b'4' | b'6', _) => Next::Flaw(
                    Flaw::new(Reason::MemberKind, format!("the member {name} is a device or a pipe")),
                    at,
                ),
                _ => Next::Flaw(
                    Flaw::new(Reason::MemberKind, format!("the member {name} is of an unknown kind")),
                    at,
                ),
            });
        }
    }
}

impl ExtendedHeader {
    fn take(&mut self, records: Vec<(String, String)>) {
        for (key, value) in records {
            match key.as_str() {
                "path" => self.path = Some(value),
                "size" => self.size = value.parse().ok(),
                _ if key.starts_with("GNU.sparse.") => self.is_sparse = true,
                _ => {}
            }
        }
    }
}

/// The name without leading `./`, if no component leads outward.
fn relative_name(name: &str) -> Option<&str> {
    let name = name.trim_start_matches("./");
    let leads_out = name.is_empty() || name.starts_with('/') || name.split('/').any(|part| part == "..");
    (!leads_out && !name.contains('\0')).then_some(name)
}

/// Whether the checksum of a header is right: the sum of its bytes with its own field as blanks. Old programs summed signed
/// bytes.
fn checksum_matches(header: &[u8]) -> bool {
    let Some(stated) = number(&header[148..156]) else { return false };
    let byte = |at: usize, byte: u8| if (148..156).contains(&at) { b' ' } else { byte };
    let bytes = || header.iter().enumerate().map(|(at, value)| byte(at, *value));
    let unsigned: u64 = bytes().map(u64::from).sum();
    let signed: i64 = bytes().map(|byte| i64::from(byte as i8)).sum();
    stated == unsigned || i64::try_from(stated) == Ok(signed)
}

/// An octal number, padded with blanks or zeros, or a base-256 number.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let (first, rest) = field.split_first()?;
        let mut value = u64::from(first & 0x7f);
        for byte in rest {
            value = value.checked_mul(256)?.checked_add(u64::from(*byte))?;
        }
        return Some(value);
    }
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let digits = field[..end].trim_ascii();
    if digits.is_empty() || !digits.iter().all(|digit| (b'0'..=b'7').contains(digit)) {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| value.checked_mul(8)?.checked_add(u64::from(digit - b'0')))
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn name(header: &[u8]) -> String {
    let name = text(&header[..100]);
    // GNU's own header has other fields in place of ustar's prefix.
    let is_ustar = &header[257..263] == b"ustar\0";
    let prefix = if is_ustar { text(&header[345..500]) } else { String::new() };
    if prefix.is_empty() { name } else { format!("{prefix}/{name}") }
}

/// Parses pax records `length key=value
/// `, whose length is that of the whole record.
fn pax(mut body: &[u8]) -> Option<Vec<(String, String)>> {
    let mut records = Vec::new();
    while body.first().is_some_and(|byte| *byte != 0) {
        let blank = body.iter().take(20).position(|byte| *byte == b' ')?;
        let length: usize = std::str::from_utf8(&body[..blank]).ok()?.parse().ok()?;
        let record = body.get(blank + 1..length)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=')?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        records.push((text(&record[..equals]), text(&record[equals + 1..])));
        body = &body[length..];
    }
    Some(records)
}

/// Writes archives for tests.
#[cfg(test)]
#[path = "../../../tests/archive.rs"]
mod written;

#[cfg(test)]
mod tests {
    use super::written::{archive, extra, header, member, padded, record, summed};
    use super::*;
    use crate::scratch::Scratch;

    /// Names with their contents, and flaws in a few words.
    fn listed(name: &str, bytes: &[u8]) -> Vec<String> {
        let scratch = Scratch::new(name);
        let path = Arc::new(scratch.write("a.tar", bytes));
        let mut archive = Archive::open(path).unwrap();
        let mut found = Vec::new();
        loop {
            match archive.next().unwrap() {
                Next::End => return found,
                Next::Entry(entry) => {
                    let bytes = archive.read(&entry, 100).unwrap().unwrap();
                    found.push(format!("{}={}", entry.name, String::from_utf8(bytes).unwrap()));
                }
                Next::Flaw(flaw, at) => found.push(format!("{at} {}", flaw.reason)),
                Next::Lost(flaw, at) => found.push(format!("lost {at} {}", flaw.reason)),
            }
        }
    }

    #[test]
    fn members_have_names_of_every_form() {
        let long = "d/".repeat(80) + "file.jpg";
        let mut prefixed = header("name.jpg", 1, b'0');
        prefixed[345..350].copy_from_slice(b"a/b/c");
        let mut wide = header("wide.jpg", 0, b'0');
        wide[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
        let bytes = archive(&[
            member("./plain.jpg", b"one"),
            header("folder/", 0, b'5'),
            [summed(prefixed), padded(b"2")].concat(),
            [extra(b'L', format!("{long}\0").as_bytes()), member("short", b"three")].concat(),
            [
                extra(b'x', &[record("mtime", "1.5"), record("path", "päx.png")].concat()),
                member("short", b"4"),
            ]
            .concat(),
            [extra(b'x', &record("size", "2")), header("sized.jpg", 0, b'0'), padded(b"55")].concat(),
            extra(b'g', &record("comment", "all")),
            [summed(wide), padded(b"666")].concat(),
            header("empty.txt", 0, 0),
        ]);
        let long = format!("{long}=three");
        let all = [
            "plain.jpg=one",
            "a/b/c/name.jpg=2",
            &long,
            "päx.png=4",
            "sized.jpg=55",
            "wide.jpg=666",
            "empty.txt=",
        ];
        assert_eq!(listed("tar-names", &bytes), all);
    }

    #[test]
    fn members_other_than_regular_files_inside_are_flaws() {
        let bytes = archive(&[
            member("/etc/passwd", b"x"),
            member("a/../../b.jpg", b"x"),
            header("link.jpg", 0, b'2'),
            header("hard.jpg", 0, b'1'),
            header("dev", 0, b'3'),
            [header("sparse.jpg", 3, b'S'), padded(b"abc")].concat(),
            [extra(b'x', &record("GNU.sparse.major", "1")), member("s.jpg", b"x")].concat(),
            header("odd", 0, b'Z'),
            member("good..jpg", b"x"),
        ]);
        let found = listed("tar-flaws", &bytes);
        let count = |words: &str| found.iter().filter(|line| line.ends_with(words)).count();
        assert_eq!(count("path that leads out of the archive"), 2, "{found:?}");
        assert_eq!(count("link, device or sparse file"), 6, "{found:?}");
        assert_eq!(found.last().unwrap(), "good..jpg=x");
        assert!(found[1].starts_with("1024 "));
    }

    #[test]
    fn a_damaged_archive_is_unreadable_from_there_on() {
        let whole = archive(&[member("a.jpg", b"one"), member("b.jpg", &[b'x'; 90])]);
        assert_eq!(listed("tar-whole", &whole).len(), 2);
        for end in (0..whole.len() - 1024).step_by(7) {
            let found = listed("tar-cut", &whole[..end]);
            assert!(found.last().is_some_and(|line| line.starts_with("lost ")), "{end}: {found:?}");
        }
        let mut damaged = whole.clone();
        damaged[1024 + 5] ^= 1;
        assert_eq!(listed("tar-damaged", &damaged), ["a.jpg=one", "lost 1024 damaged file"]);
        let huge = archive(&[extra(b'L', &vec![b'a'; 2 << 20])]);
        assert_eq!(listed("tar-huge", &huge), ["lost 0 damaged file"]);
    }
}
