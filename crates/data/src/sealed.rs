//! Text files kept between runs and accepted only whole: lines with a hash at the end, put in place atomically.
//!
//! The last line is `end` and a hash of all lines before it, so that a file that was cut, changed or mixed up with another is
//! rejected. Words of a line contain no blanks: text that may have some is escaped.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::random::{fingerprint, key};

/// Longest line: a path has at most 4096 bytes, each escaped to at most three.
const LONGEST_LINE: u64 = 16 << 10;

/// Writes a temporary file and renames it into place, so that no other process reads half of it.
pub(crate) fn keep(path: &Path, write: impl FnOnce(fs::File) -> io::Result<()>) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}", std::process::id()));
    let written = write(fs::File::create(&partial)?).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Writes lines and hashes them.
pub(crate) struct Sealed<W: Write> {
    inner: BufWriter<W>,
    hash: u64,
}

impl<W: Write> Sealed<W> {
    pub fn new(out: W) -> Self {
        Self { inner: BufWriter::new(out), hash: 0 }
    }

    pub fn line(&mut self, line: &str) -> io::Result<()> {
        self.hash = key(self.hash, fingerprint(line.as_bytes()));
        self.inner.write_all(line.as_bytes())?;
        self.inner.write_all(b"\n")
    }

    pub fn end(mut self) -> io::Result<()> {
        let hash = self.hash;
        self.line(&format!("end {hash:x}"))?;
        self.inner.flush()
    }
}

/// Reads lines that [`Sealed`] wrote. The caller compares what follows `end` with the hash before that line.
pub(crate) struct Lines<R> {
    text: BufReader<R>,
    line: String,
    hash: u64,
}

impl<R: Read> Lines<R> {
    pub fn new(text: R) -> Self {
        Self { text: BufReader::new(text), line: String::new(), hash: 0 }
    }

    /// Hash of all lines so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The next line; `None` at the end, or where it is not UTF-8 or too long.
    pub fn next(&mut self) -> Option<&str> {
        self.line.clear();
        self.text.by_ref().take(LONGEST_LINE).read_line(&mut self.line).ok()?;
        let line = self.line.strip_suffix('\n')?;
        self.hash = key(self.hash, fingerprint(line.as_bytes()));
        Some(line)
    }
}

pub(crate) fn escaped_path(path: &Path) -> String {
    escaped_bytes(path.as_os_str().as_bytes())
}

pub(crate) fn path(escaped: &str) -> Option<PathBuf> {
    Some(PathBuf::from(std::ffi::OsString::from_vec(unescaped(escaped)?)))
}

pub(crate) fn escaped(text: &str) -> String {
    escaped_bytes(text.as_bytes())
}

/// Printable ASCII without `%` stays as it is, so that a word has no spaces and a line no line breaks.
fn escaped_bytes(bytes: &[u8]) -> String {
    let mut out = String::new();
    for byte in bytes {
        match byte {
            b'%' => out.push_str("%25"),
            0x21..0x7f => out.push(*byte as char),
            _ => drop(write!(out, "%{byte:02x}")),
        }
    }
    out
}

pub(crate) fn unescaped(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let mut digit = || (bytes.next()? as char).to_digit(16);
                (digit()? << 4 | digit()?) as u8
            }
            byte => byte,
        });
    }
    Some(out)
}
