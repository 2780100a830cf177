//! A folder of images with one folder per class.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::encoded::Storage;
use super::found::{FoundImages, Labels};
use super::paths::{entries, files, has_ending};
use crate::error::DataError;
use crate::formats::{OnError, Reason, SourceLocation, unreadable};
use crate::images::flaw::{Flaw, Ledger};
use crate::random::fingerprint;
use crate::text::source::OpenEvent;
use flatout_waits::{self as waits, Unit};

/// Endings of supported image formats, and of others.
pub(crate) const ENDINGS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];
pub(crate) const OTHER_ENDINGS: [&str; 8] = ["gif", "bmp", "tif", "tiff", "avif", "heic", "jxl", "jp2"];
/// Names of folders that are splits of a set, not classes.
const PARTS: [&str; 6] = ["train", "training", "val", "valid", "validation", "test"];
/// Maximum depth of folders below that of a class.
const DEEPEST: usize = 32;

/// The images of a folder: those in each of its folders have the class of that name.
pub(in crate::images) fn folder(
    root: &Path,
    on_error: OnError,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<FoundImages, DataError> {
    let shown = root.display();
    let folders: Vec<PathBuf> = entries(root)?.into_iter().filter(|path| path.is_dir()).collect();
    if folders.is_empty() {
        return Err(DataError::input(format!(
            "{shown} has no folders, but the class of an image is its folder: give a folder with one folder per class."
        )));
    }
    let names: Vec<String> = folders.iter().map(|folder| name_of(folder)).collect::<Result<_, _>>()?;
    if names.iter().all(|name| PARTS.contains(&name.as_str())) {
        let held_out = names.iter().find(|name| !name.starts_with("train")).unwrap_or(&names[0]);
        let train = names.iter().find(|name| name.starts_with("train")).unwrap_or(&names[0]);
        return Err(DataError::input(format!(
            "The folders of {shown} ({}) are parts of a set, not classes: give data.path={shown}/{train} and \
             data.held_out_path={shown}/{held_out}.",
            names.join(", ")
        )));
    }
    let wait = waits::begin("looking for images", Unit::Things("images"), None);
    let mut ledger = Ledger::new(on_error);
    let (mut paths, mut labels, mut hashes, mut empty) =
        (Vec::new(), Labels::default(), Vec::new(), Vec::new());
    for (folder, name) in folders.iter().zip(&names) {
        let before = paths.len();
        below(folder, &mut HashSet::new(), 0, &mut ledger, &mut paths)?;
        wait.set(paths.len() as u64);
        for path in &paths[before..] {
            labels.push(name, || at(path));
            let relative = path.strip_prefix(root).expect("it was found below");
            hashes.push(fingerprint(relative.as_os_str().as_encoded_bytes()));
        }
        if paths.len() == before {
            empty.push(name.as_str());
        }
    }
    if paths.is_empty() {
        return Err(DataError::input(format!(
            "There is no .{} file in the folders of {shown}: check data.path.",
            ENDINGS.join(", .")
        )));
    }
    if !empty.is_empty() {
        say(OpenEvent::Note(format!("folders without images are not classes: {}", empty.join(", "))));
    }
    let holder = Storage::Files(paths);
    let (files, names) = (hashes.len(), vec![]);
    Ok(FoundImages { kind: "folder", files, holder, labels, names, hashes, skipped: ledger.skipped })
}

/// All images of files and of folders at any depth, without classes.
pub(in crate::images) fn unlabelled(words: &[String], on_error: OnError) -> Result<FoundImages, DataError> {
    let mut ledger = Ledger::new(on_error);
    let mut paths: Vec<Box<Path>> = Vec::new();
    for word in words {
        if Path::new(word).is_dir() {
            below(Path::new(word), &mut HashSet::new(), 0, &mut ledger, &mut paths)?;
        } else {
            paths.extend(files(std::slice::from_ref(word), &ENDINGS)?.into_iter().map(Into::into));
        }
    }
    if paths.is_empty() {
        return Err(DataError::input(format!(
            "There is no .{} file in {}: name images, or a folder with some.",
            ENDINGS.join(", ."),
            words.join(", ")
        )));
    }
    let hashes: Vec<u64> =
        paths.iter().map(|path| fingerprint(path.as_os_str().as_encoded_bytes())).collect();
    let (files, labels, names) = (hashes.len(), Labels::default(), vec![]);
    let holder = Storage::Files(paths);
    Ok(FoundImages { kind: "files", files, holder, labels, names, hashes, skipped: ledger.skipped })
}

fn at(path: &Path) -> SourceLocation {
    SourceLocation { file: Arc::new(path.into()), line: None, row: None, offset: 0 }
}

fn name_of(folder: &Path) -> Result<String, DataError> {
    let name = folder.file_name().and_then(|name| name.to_str());
    name.map(String::from).ok_or_else(|| {
        DataError::input(format!(
            "The name of the folder {} is not UTF-8, and it is a class: rename it.",
            folder.display()
        ))
    })
}

/// Collects the images of a folder recursively. A folder that links reach twice is read once.
fn below(
    folder: &Path,
    seen: &mut HashSet<PathBuf>,
    depth: usize,
    ledger: &mut Ledger,
    paths: &mut Vec<Box<Path>>,
) -> Result<(), DataError> {
    let same = folder.canonicalize().map_err(|error| unreadable(folder, &error))?;
    if !seen.insert(same) || depth > DEEPEST {
        return Ok(());
    }
    for path in entries(folder)? {
        if path.is_dir() {
            below(&path, seen, depth + 1, ledger, paths)?;
        } else if has_ending(&path, &ENDINGS) {
            // A broken link or a socket is no file to read.
            match path.is_file() {
                true => paths.push(path.into()),
                false => ledger
                    .note(&Flaw::new(Reason::NoFile, "it is not a file, or a broken link"), at(&path))?,
            }
        } else if has_ending(&path, &OTHER_ENDINGS) {
            ledger.note(
                &Flaw::new(Reason::NotAnImage, "its ending is of another kind than JPEG, PNG and WebP"),
                at(&path),
            )?;
        }
    }
    Ok(())
}
