//! The text form of an index, which is cached between runs.
//!
//! The first line names the version of the form, the last one is a hash of everything before it. Each file has a line with its
//! state when it was indexed, and then one line per document: bytes since the previous one, length, lines since the previous
//! one, hash.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use super::super::fault::Reason;
use super::*;
use crate::formats::OnError;
use crate::sealed::{self, Lines, Sealed, escaped, escaped_path, path, unescaped};

const FORM: &str = "flatout index 1";

impl Index {
    /// The index in `cache`, if it belongs to exactly these files and options; otherwise builds it and caches it. A damaged
    /// cache is rebuilt, and errors of writing it are ignored.
    pub fn cached(cache: &Path, inputs: &[Input], options: &ReadOptions) -> Result<Self, DataError> {
        let kept = fs::File::open(cache).ok().and_then(|file| Self::from_text(file).ok());
        if let Some(index) = kept.filter(|index| index.is_of(inputs, options)) {
            return Ok(index);
        }
        let index = Self::build(inputs, options)?;
        let _ = index.keep(cache);
        Ok(index)
    }

    /// Whether it was made from these files in their present state, with these options.
    pub fn is_of(&self, inputs: &[Input], options: &ReadOptions) -> bool {
        self.options == *options
            && self.files.len() == inputs.len()
            && self.files.iter().zip(inputs).all(|(file, input)| {
                *file.path == input.path
                    && file.format == input.format
                    && fs::metadata(&input.path).is_ok_and(|metadata| Version::of(&metadata) == file.version)
            })
    }

    fn keep(&self, cache: &Path) -> io::Result<()> {
        sealed::keep(cache, |out| self.to_text(out))
    }

    /// Writes the text form.
    pub fn to_text(&self, out: impl Write) -> io::Result<()> {
        let mut out = Sealed::new(out);
        let options = &self.options;
        let [field, format] =
            [options.field.as_str(), options.format.map_or("any", Format::name)].map(escaped);
        let skip = u8::from(options.on_error == OnError::Skip);
        let (most, cut) = (options.max_document_bytes, options.text_document_bytes);
        out.line(FORM)?;
        out.line(&format!("options {format} {field} {skip} {most} {cut}"))?;
        for (reason, count, first) in self.skipped.reasons() {
            let path = escaped_path(&first.file);
            let number = |number: Option<u64>| number.map_or("-".into(), |number| number.to_string());
            let (line, row) = (number(first.line), number(first.row));
            out.line(&format!("skipped {} {count} {line} {row} {} {path}", reason as usize, first.offset))?;
        }
        let mut start = 0;
        let mut line = String::new();
        for file in &self.files {
            let (path, version) = (escaped_path(&file.path), file.version);
            let (name, count) = (file.format.name(), file.end - start);
            out.line(&format!("file {name} {} {} {count} {path}", version.bytes, version.modified))?;
            let (mut at, mut number) = (0, 0);
            for extent in &self.extents[start..file.end] {
                line.clear();
                let (ahead, lines) = (extent.at - at, extent.line - number);
                let _ = write!(line, "{ahead} {} {lines} {:x}", extent.len, extent.hash);
                out.line(&line)?;
                (at, number) = (extent.at, extent.line);
            }
            start = file.end;
        }
        out.end()
    }

    /// Parses the text form.
    pub fn from_text(text: impl Read) -> Result<Self, DataError> {
        let mut lines = Lines::new(text);
        parse(&mut lines).ok_or_else(|| {
            DataError::input(
                "This is not an index of documents, or it is damaged: delete it to build it again.",
            )
        })
    }
}

fn parse(lines: &mut Lines<impl Read>) -> Option<Index> {
    if lines.next()? != FORM {
        return None;
    }
    let mut words = lines.next()?.strip_prefix("options ")?.split(' ');
    let format = match words.next()? {
        "any" => None,
        name => Some(Format::named(name)?),
    };
    let options = ReadOptions {
        format,
        field: String::from_utf8(unescaped(words.next()?)?).ok()?,
        on_error: if words.next()? == "1" { OnError::Skip } else { OnError::Fail },
        max_document_bytes: words.next()?.parse().ok()?,
        text_document_bytes: words.next()?.parse().ok()?,
        ..ReadOptions::default()
    };
    let (mut files, mut extents, mut skipped): (Vec<Indexed>, Vec<Extent>, _) =
        (Vec::new(), Vec::new(), Skipped::default());
    loop {
        let hash = lines.hash();
        let (kind, rest) = lines.next()?.split_once(' ')?;
        let mut words = rest.split(' ');
        match kind {
            "skipped" => {
                let reason = Reason::numbered(words.next()?.parse().ok()?)?;
                let count = words.next()?.parse().ok()?;
                let mut number = || match words.next()? {
                    "-" => Some(None),
                    number => Some(Some(number.parse().ok()?)),
                };
                let (line, row) = (number()?, number()?);
                let offset = words.next()?.parse().ok()?;
                let file = Arc::new(path(words.next()?)?);
                skipped.note_many(reason, count, SourceLocation { file, line, row, offset });
            }
            "file" => {
                let format = Format::named(words.next()?)?;
                let version =
                    Version { bytes: words.next()?.parse().ok()?, modified: words.next()?.parse().ok()? };
                let count: usize = words.next()?.parse().ok()?;
                let path = Arc::new(path(words.next()?)?);
                let (mut at, mut line) = (0u64, 0u32);
                for _ in 0..count {
                    let mut words = lines.next()?.split(' ');
                    at = at.checked_add(words.next()?.parse().ok()?)?;
                    let len = words.next()?.parse().ok()?;
                    line = line.checked_add(words.next()?.parse().ok()?)?;
                    let hash = u64::from_str_radix(words.next()?, 16).ok()?;
                    extents.push(Extent { at, hash, len, line });
                }
                files.push(Indexed { path, format, version, end: extents.len() });
            }
            "end" => {
                return (rest == format!("{hash:x}")).then(|| Index::new(options, files, extents, skipped));
            }
            _ => return None,
        }
    }
}
