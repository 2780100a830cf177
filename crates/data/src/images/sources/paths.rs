//! Files that entries of `data.path` name: names, folders, patterns with `*`, and numbered shards `a-{000..146}.tar`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::DataError;
use crate::formats::unreadable;

/// Most files of a numbered range.
const MOST_NUMBERED: u64 = 1 << 20;

/// The files that entries name, in the order of the entries and sorted within each. Of a folder, the files at its top level
/// with one of the endings.
pub(crate) fn files(words: &[String], endings: &[&str]) -> Result<Vec<PathBuf>, DataError> {
    let mut found = Vec::new();
    for word in words {
        let path = Path::new(word);
        if path.is_dir() {
            let before = found.len();
            found.extend(
                entries(path)?.into_iter().filter(|path| path.is_file() && has_ending(path, endings)),
            );
            if found.len() == before {
                return Err(DataError::input(format!(
                    "There is no .{} file in {word}: check data.path.",
                    endings.join(" or .")
                )));
            }
        } else if path.exists() {
            found.push(path.into());
        } else if let Some(meant) = expanded(word)? {
            found.extend(meant);
        } else {
            let missing = fs::metadata(path).expect_err("it does not exist");
            return Err(unreadable(path, &missing));
        }
    }
    Ok(found)
}

/// The files of an entry that stands for several, by a pattern or by numbers.
pub(super) fn expanded(word: &str) -> Result<Option<Vec<PathBuf>>, DataError> {
    match numbered(word)? {
        None if word.contains(['*', '?', '[']) => matching(word).map(Some),
        found => Ok(found),
    }
}

/// The entries of a folder, sorted, without hidden names.
pub(in crate::images) fn entries(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let listed = fs::read_dir(folder).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
    let listed = listed.map_err(|error| unreadable(folder, &error))?;
    let is_shown = |entry: &fs::DirEntry| !entry.file_name().as_encoded_bytes().starts_with(b".");
    let mut paths: Vec<PathBuf> = listed.into_iter().filter(is_shown).map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

pub(in crate::images) fn has_ending(path: &Path, endings: &[&str]) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    ending.is_some_and(|ending| endings.iter().any(|known| ending.eq_ignore_ascii_case(known)))
}

fn matching(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let wrong = |said: &str| DataError::input(format!("The pattern {pattern} {said}: correct data.path."));
    let paths = glob::glob(pattern).map_err(|error| wrong(&format!("cannot be used ({})", error.msg)))?;
    let mut found = Vec::new();
    for path in paths {
        let path = path.map_err(|error| unreadable(error.path(), error.error()))?;
        if path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    if found.is_empty() { Err(wrong("matches no file")) } else { Ok(found) }
}

/// Names with a range of numbers in braces; both ends are included, with as many digits as written.
fn numbered(word: &str) -> Result<Option<Vec<PathBuf>>, DataError> {
    let Some((before, rest)) = word.split_once('{') else { return Ok(None) };
    let Some((range, after)) = rest.split_once('}') else { return Ok(None) };
    let Some((first, last)) = range.split_once("..") else { return Ok(None) };
    let number = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten()
    };
    let (Some(from), Some(to)) = (number(first), number(last)) else { return Ok(None) };
    if from > to || to - from >= MOST_NUMBERED {
        return Err(DataError::input(format!(
            "{word} counts from {first} to {last}: give an ascending range of at most {MOST_NUMBERED} files."
        )));
    }
    let paths: Vec<PathBuf> =
        (from..=to).map(|at| format!("{before}{at:0width$}{after}", width = first.len()).into()).collect();
    match paths.iter().find(|path| !path.is_file()) {
        Some(missing) => Err(DataError::input(format!(
            "There is no file {}, which is in the range of {word}: fetch it, or correct data.path.",
            missing.display()
        ))),
        None => Ok(Some(paths)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn words_become_files() {
        let scratch = Scratch::new("image-paths");
        for name in ["s-000.tar", "s-001.TAR", "s-002.tar", "s-002.txt", ".s-003.tar", "deep/s-009.tar"] {
            scratch.write(name, b"x");
        }
        fs::rename(scratch.path().join("s-001.TAR"), scratch.path().join("s-001.tar")).unwrap();
        let of = |word: &str| {
            let word = scratch.path().join(word).to_str().unwrap().to_string();
            let found = files(&[word], &["tar"]).map_err(|error| error.sentence)?;
            let names = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_string());
            Ok::<_, String>(names.collect::<Vec<_>>())
        };
        let all = ["s-000.tar", "s-001.tar", "s-002.tar"];
        assert_eq!(of("").unwrap(), all);
        assert_eq!(of("s-*.tar").unwrap(), all);
        assert_eq!(of("s-{000..002}.tar").unwrap(), all);
        assert_eq!(of("s-002.txt").unwrap(), ["s-002.txt"]);
        assert!(of("s-{000..003}.tar").unwrap_err().contains("There is no file"));
        assert!(of("s-{3..1}.tar").unwrap_err().contains("an ascending range"));
        assert!(of("t-*.tar").unwrap_err().contains("matches no file"));
        assert!(of("s-004.tar").unwrap_err().contains("There is no file or folder"));
        scratch.write("empty/x.txt", b"");
        assert!(of("empty").unwrap_err().contains("no .tar file"));
    }
}
