//! Finds the files behind paths, folders and globs, and determines their formats.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern, PatternError};

use super::content::{self, HEAD_BYTES};
use super::{Compression, Format, ReadOptions, TABLE, stream};
use crate::error::DataError;
use crate::remote::{Object, is_remote};

mod remote;

/// The path that stands for standard input.
pub(super) const STDIN: &str = "-";

/// A file to read, with its format and compression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    pub path: PathBuf,
    pub format: Format,
    pub compression: Compression,
    /// Size on disk; 0 for standard input.
    pub bytes: u64,
    /// Set for a remote file; `path` is then its name in messages.
    pub remote: Option<Object>,
}

/// Whether an [`super::Index`] can be made, which needs random access to the file.
pub fn is_indexable(input: &Input) -> bool {
    input.compression == Compression::None && input.path.as_os_str() != STDIN && input.remote.is_none()
}

/// Endings of compressed files; those of formats are in their table.
const COMPRESSED_ENDINGS: [(&str, Compression); 4] = [
    ("gz", Compression::Gzip),
    ("gzip", Compression::Gzip),
    ("zst", Compression::Zstd),
    ("zstd", Compression::Zstd),
];

/// The inputs of some patterns, in the order of the patterns and sorted within each, without duplicates. A pattern is a file, a
/// folder that is searched recursively, a glob, a data set of the Hugging Face hub, a URL, or `-` for standard input. A pattern
/// without files is an error.
pub fn find(patterns: &[String], options: &ReadOptions) -> Result<Vec<Input>, DataError> {
    if patterns.is_empty() {
        return Err(DataError::input(
            "data.path is empty: give a file, a folder, a pattern such as data/*.jsonl, or - for standard input.",
        ));
    }
    let mut inputs = Vec::new();
    let mut seen = HashSet::new();
    for pattern in patterns {
        if pattern == STDIN {
            if seen.insert(PathBuf::from(STDIN)) {
                inputs.push(standard_input(options)?);
            }
            continue;
        }
        if is_remote(pattern) {
            for input in remote::inputs(pattern, options)? {
                // The query of a URL is not part of the shown path, but distinguishes inputs.
                let address = input.remote.as_ref().map(|object| PathBuf::from(object.url()));
                if seen.insert(address.unwrap_or_else(|| input.path.clone())) {
                    inputs.push(input);
                }
            }
            continue;
        }
        for path in files(pattern, options)? {
            let same = path.canonicalize().map_err(|error| unreadable(&path, &error))?;
            if seen.insert(same) {
                inputs.push(input_of(path, options)?);
            }
        }
    }
    Ok(inputs)
}

pub(crate) fn unreadable(path: &Path, error: &io::Error) -> DataError {
    let shown = path.display();
    if path.is_symlink() && std::fs::metadata(path).is_err() {
        return DataError::input(format!(
            "{shown} is a broken link ({error}): correct it, or leave it out of data.path."
        ));
    }
    match error.kind() {
        io::ErrorKind::NotFound => DataError::input(format!(
            "There is no file or folder {shown}: check the path; a relative path starts in the current folder."
        )),
        io::ErrorKind::PermissionDenied => DataError::input(format!(
            "{shown} may not be read: change its permissions, or leave it out of data.path."
        )),
        _ => DataError::environment(format!("{shown} cannot be read: {error}.")),
    }
}

fn files(pattern: &str, options: &ReadOptions) -> Result<Vec<PathBuf>, DataError> {
    let path = Path::new(pattern);
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return folder(path, options),
        Ok(metadata) if metadata.is_file() => return Ok(vec![path.into()]),
        Ok(_) => return Err(not_a_file(path)),
        // An existing name is that file, whatever characters it has; only other names can be globs.
        Err(error) if error.kind() == io::ErrorKind::NotFound && pattern.contains(['*', '?', '[']) => {}
        Err(error) => return Err(unreadable(path, &error)),
    }
    let components = pattern.split('/').filter(|component| !component.is_empty());
    let steps = components.map(Step::new).collect::<Result<Vec<Step>, _>>();
    let steps = steps.map_err(|error| {
        DataError::input(format!("The pattern {pattern} cannot be used: {}; correct data.path.", error.msg))
    })?;
    let root = if pattern.starts_with('/') { "/" } else { "" };
    let mut matches = Vec::new();
    expand(Path::new(root), &steps, &mut matches)?;
    let (mut files, mut folders) = (Vec::new(), 0);
    for path in matches {
        let metadata = std::fs::metadata(&path).map_err(|error| unreadable(&path, &error))?;
        match (metadata.is_file(), metadata.is_dir()) {
            (true, _) => files.push(path),
            (false, true) => folders += 1,
            (false, false) => return Err(not_a_file(&path)),
        }
    }
    if files.is_empty() {
        let but =
            if folders > 0 { ", only folders: name one of them to search it" } else { ": check data.path" };
        return Err(DataError::input(format!("No file matches {pattern}{but}.")));
    }
    files.sort_unstable();
    Ok(files)
}

/// One component of a glob.
enum Step {
    Named(String),
    Like(Pattern),
    /// `**`: any number of folders.
    Anywhere,
}

impl Step {
    fn new(component: &str) -> Result<Self, PatternError> {
        Ok(match component {
            "**" => Step::Anywhere,
            _ if component.contains(['*', '?', '[']) => Step::Like(Pattern::new(component)?),
            _ => Step::Named(component.into()),
        })
    }
}

/// Collects everything under `folder` that the steps match. Names that begin with a dot are matched only by patterns that do,
/// and `**` does not follow links, so that cycles of links end.
fn expand(folder: &Path, steps: &[Step], found: &mut Vec<PathBuf>) -> Result<(), DataError> {
    const DOTS_ARE_HIDDEN: MatchOptions = MatchOptions {
        case_sensitive: true,
        require_literal_separator: true,
        require_literal_leading_dot: true,
    };
    let Some((step, rest)) = steps.split_first() else {
        found.push(folder.into());
        return Ok(());
    };
    let (pattern, anywhere) = match step {
        Step::Named(name) => {
            let path = folder.join(name);
            return if path.exists() { expand(&path, rest, found) } else { Ok(()) };
        }
        Step::Like(pattern) => (Some(pattern), false),
        Step::Anywhere => (None, true),
    };
    if anywhere && !rest.is_empty() {
        expand(folder, rest, found)?;
    }
    for path in entries(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if anywhere {
            if path.is_dir() && !path.is_symlink() && !name.starts_with('.') {
                expand(&path, steps, found)?;
            } else if rest.is_empty() && !name.starts_with('.') {
                found.push(path);
            }
        } else if pattern.is_some_and(|pattern| pattern.matches_with(&name, DOTS_ARE_HIDDEN))
            && (rest.is_empty() || path.is_dir())
        {
            expand(&path, rest, found)?;
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let listed = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let names = std::fs::read_dir(listed).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<io::Result<Vec<_>>>()
    });
    let mut names = names.map_err(|error| unreadable(folder, &error))?;
    names.sort_unstable();
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

fn not_a_file(path: &Path) -> DataError {
    DataError::input(format!(
        "{} is neither a file nor a folder: write it to a file, or pipe it and give - as data.path.",
        path.display()
    ))
}

fn folder(path: &Path, options: &ReadOptions) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    search(path, &mut files)?;
    of_one_format(path, files, options)
}

/// The files of a folder with the requested format, or with the one format that all of them have.
fn of_one_format(
    path: &Path,
    mut files: Vec<(PathBuf, Format)>,
    options: &ReadOptions,
) -> Result<Vec<PathBuf>, DataError> {
    let shown = path.display();
    let mut formats: BTreeMap<&str, &Path> = BTreeMap::new();
    for (file, format) in &files {
        formats.entry(format.name()).or_insert(file);
    }
    if let Some(format) = options.format {
        files.retain(|(_, found)| *found == format);
    } else if formats.len() > 1 {
        let kinds: Vec<String> =
            formats.iter().map(|(name, file)| format!("{name} ({})", file.display())).collect();
        return Err(DataError::input(format!(
            "The folder {shown} has files of several formats: {}; choose one with data.format, or name the files with \
             a pattern such as {}.",
            kinds.join(", "),
            path.join("**/*.jsonl").display()
        )));
    }
    if files.is_empty() {
        let wanted = options.format.map_or("text, JSONL, CSV or parquet", Format::name);
        return Err(DataError::input(format!(
            "The folder {shown} has no {wanted} files: name one that has, or name the files."
        )));
    }
    Ok(files.into_iter().map(|(file, _)| file).collect())
}

/// Files with a known ending, in order. Hidden files and folders are skipped, because tools keep their own data there.
fn search(folder: &Path, files: &mut Vec<(PathBuf, Format)>) -> Result<(), DataError> {
    for path in entries(folder)? {
        if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")) {
            continue;
        }
        let known = by_name(&path).0;
        let metadata = match std::fs::metadata(&path) {
            Ok(metadata) => metadata,
            // A broken link matters only where its name is that of a data file.
            Err(error) if known.is_some() => return Err(unreadable(&path, &error)),
            Err(_) => continue,
        };
        // Links to folders are not followed, so that cycles of links end.
        if metadata.is_dir() && !path.is_symlink() {
            search(&path, files)?;
        } else if let (true, Some(format)) = (metadata.is_file(), known) {
            files.push((path, format));
        }
    }
    Ok(())
}

/// The format by a file's name: `a.jsonl.gz` is JSONL compressed with gzip.
fn by_name(path: &Path) -> (Option<Format>, Compression) {
    let ending = |path: &Path| path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase());
    let mut inner = path.to_path_buf();
    let mut compression = Compression::None;
    if let Some(found) = ending(path)
        && let Some((_, compressed)) = COMPRESSED_ENDINGS.iter().find(|(known, _)| *known == found)
    {
        compression = *compressed;
        inner.set_extension("");
    }
    let of = |ending: String| TABLE.iter().find(|row| row.endings.contains(&ending.as_str()));
    (ending(&inner).and_then(of).map(|row| row.format), compression)
}

fn input_of(path: PathBuf, options: &ReadOptions) -> Result<Input, DataError> {
    let open = || -> io::Result<(u64, Vec<u8>)> {
        let file = File::open(&path)?;
        let bytes = file.metadata()?.len();
        Ok((bytes, head(file)?))
    };
    let (bytes, compressed_head) = open().map_err(|error| unreadable(&path, &error))?;
    let (named, compressed) = by_name(&path);
    let compression = content::compression(&compressed_head).unwrap_or(compressed);
    // An empty file is empty, whatever its name says: it is not compressed.
    let compression = if bytes == 0 { Compression::None } else { compression };
    let format = match options.format.or(named) {
        Some(format) => format,
        None => by_content(&path, compressed_head, compression)?,
    };
    Ok(Input { path, format, compression, bytes, remote: None })
}

fn standard_input(options: &ReadOptions) -> Result<Input, DataError> {
    let path = PathBuf::from(STDIN);
    // Peeking into the buffer of standard input consumes nothing.
    let head = io::stdin().lock().fill_buf().map(<[u8]>::to_vec);
    let head =
        head.map_err(|error| DataError::environment(format!("Standard input cannot be read: {error}.")))?;
    let compression = content::compression(&head).unwrap_or(Compression::None);
    let format = match options.format {
        Some(format) => format,
        None => by_content(&path, head, compression)?,
    };
    Ok(Input { path, format, compression, bytes: 0, remote: None })
}

fn by_content(path: &Path, compressed_head: Vec<u8>, compression: Compression) -> Result<Format, DataError> {
    // The beginning of compressed data is truncated; the part that decompresses is enough.
    let mut decompressed = stream::decompress(Box::new(io::Cursor::new(compressed_head)), compression);
    let mut head = vec![0; HEAD_BYTES];
    let mut filled = 0;
    while let Ok(read @ 1..) = decompressed.read(&mut head[filled..]) {
        filled += read;
    }
    let head = &head[..filled];
    if let Some(row) = TABLE.iter().find(|row| (row.begins)(head)) {
        return Ok(row.format);
    }
    let is_json = path.extension().is_some_and(|ending| ending == "json");
    if is_json && head.trim_ascii_start().first() == Some(&b'[') {
        return Err(DataError::input(format!(
            "{} is one JSON list: write one object a line instead (for example with jq -c '.[]').",
            path.display()
        )));
    }
    Ok(Format::Text)
}

fn head(file: File) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    file.take(HEAD_BYTES as u64).read_to_end(&mut head)?;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn names(found: Vec<Input>) -> Vec<String> {
        found
            .into_iter()
            .map(|input| input.path.file_name().unwrap().to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn names_and_contents_determine_the_format() {
        let scratch = Scratch::new("find-formats");
        let gzip = |bytes: &[u8]| {
            let mut compressed = Vec::new();
            flate2::bufread::GzEncoder::new(bytes, flate2::Compression::fast())
                .read_to_end(&mut compressed)
                .unwrap();
            compressed
        };
        let none = Compression::None;
        for (name, bytes, format, compression) in [
            ("a.txt", b"x".to_vec(), Format::Text, none),
            ("a.md", b"{".to_vec(), Format::Text, none),
            ("a.JSONL", b"x".to_vec(), Format::Jsonl, none),
            ("a.csv", b"{".to_vec(), Format::Csv, none),
            ("a.tsv.zst", b"x".to_vec(), Format::Tsv, Compression::Zstd),
            ("a.parquet", b"x".to_vec(), Format::Parquet, none),
            ("a.jsonl.gz", gzip(b"x"), Format::Jsonl, Compression::Gzip),
            ("packed.jsonl", gzip(b"{}"), Format::Jsonl, Compression::Gzip),
            ("plain", b"some text".to_vec(), Format::Text, none),
            ("lines", b"\xef\xbb\xbf \n{\"text\":1}".to_vec(), Format::Jsonl, none),
            ("one.json", b"{\"text\":1}".to_vec(), Format::Jsonl, none),
            ("columns", b"PAR1...".to_vec(), Format::Parquet, none),
            ("lines.gz", gzip(b"{\"text\":1}"), Format::Jsonl, Compression::Gzip),
        ] {
            let path = scratch.write(name, &bytes);
            let path = path.to_str().unwrap().to_string();
            let found = find(std::slice::from_ref(&path), &ReadOptions::default()).unwrap().remove(0);
            assert_eq!((found.format, found.compression), (format, compression), "{name}");
            assert_eq!(found.bytes, bytes.len() as u64);
            let options = ReadOptions { format: Some(Format::Tsv), ..ReadOptions::default() };
            assert_eq!(find(&[path], &options).unwrap()[0].format, Format::Tsv);
        }
    }

    #[test]
    fn every_file_comes_once_in_a_stable_order() {
        let scratch = Scratch::new("find-order");
        for name in
            ["d/b.jsonl", "d/a.jsonl", "d/deep/c.jsonl.gz", "d/.hidden/x.jsonl", "d/.h.jsonl", "d/notes.bin"]
        {
            scratch.write(name, b"{\"text\":\"x\"}");
        }
        scratch.write("d/odd[1].jsonl", b"{}");
        std::os::unix::fs::symlink(scratch.path().join("d"), scratch.path().join("d/deep/loop")).unwrap();
        std::os::unix::fs::symlink(scratch.path().join("d/a.jsonl"), scratch.path().join("d/z.jsonl"))
            .unwrap();
        let at = |pattern: &str| scratch.path().join(pattern).to_str().unwrap().to_string();
        let found = |patterns: &[&str]| {
            let patterns: Vec<String> = patterns.iter().map(|pattern| at(pattern)).collect();
            names(find(&patterns, &ReadOptions::default()).unwrap())
        };
        let all = ["a.jsonl", "b.jsonl", "c.jsonl.gz", "odd[1].jsonl"];
        assert_eq!(found(&["d"]), all);
        assert_eq!(found(&["d/**/*.jsonl*"]), all);
        assert_eq!(
            found(&["d/b.jsonl", "d", "d/*.jsonl"]),
            ["b.jsonl", "a.jsonl", "c.jsonl.gz", "odd[1].jsonl"]
        );
        assert_eq!(found(&["d/odd[1].jsonl"]), ["odd[1].jsonl"]);
        assert_eq!(found(&["d/?.jsonl"]), ["a.jsonl", "b.jsonl"]);
        assert_eq!(found(&["*/[b-c].jsonl", "d/**/d*p/*"]), ["b.jsonl", "c.jsonl.gz"]);
        assert_eq!(found(&["d/**"]), ["a.jsonl", "b.jsonl", "c.jsonl.gz", "notes.bin", "odd[1].jsonl"]);
    }
}
