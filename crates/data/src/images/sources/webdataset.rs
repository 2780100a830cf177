//! Samples of tar archives as WebDataset writes them.
//!
//! Adjacent members whose names agree up to the first dot of their last component are one sample. A sample has any number of
//! images (`KEY.jpg`, `KEY.000.jpg`, `KEY.left.png`), each used separately with the sample's label: the content of `KEY.cls`,
//! otherwise a field of `KEY.json`, otherwise `KEY.txt`. Archives are scanned once, in parallel, by their headers; of the
//! members only labels are read. The result is cached (`archive_index`).

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;

use super::archive_index::{ArchiveIndex, CacheKey};
use super::encoded::{Archive as Opened, Member, Storage};
use super::folder::{ENDINGS, OTHER_ENDINGS};
use super::found::{FoundImages, LabelChoice, Labels};
use super::samples::Samples;
use super::tar::{Archive, Entry};
use crate::error::DataError;
use crate::examples::label_of;
use crate::formats::{Fields, OnError, Reason, Skipped, unreadable};
use crate::images::flaw::{Flaw, Ledger};
use crate::random::{fingerprint, key};

/// Most bytes of a member with a label.
const MOST_LABEL: u64 = 1 << 20;
/// Fields of JSON that hold labels, where none is named.
const LABELS: [&str; 5] = ["label", "labels", "class", "cls", "target"];

/// The images of archives.
pub(in crate::images) fn webdataset(
    paths: &[PathBuf],
    wanted: LabelChoice<'_>,
    on_error: OnError,
    cache: Option<&Path>,
) -> Result<FoundImages, DataError> {
    if let Some(packed) = paths.iter().find(|path| path.extension().is_some_and(|ending| ending != "tar")) {
        return Err(DataError::input(format!(
            "{} is not a .tar file, and the samples of a compressed one cannot be read in any order: decompress it (for \
             example with gunzip), or leave it out of data.path.",
            packed.display()
        )));
    }
    let wait = waits::begin("indexing archives", Unit::Things("files"), Some(paths.len() as u64));
    let looked = paths
        .par_iter()
        .enumerate()
        .inspect(|_| wait.add(1))
        .map(|(number, path)| indexed(number as u32, path, wanted, on_error, cache));
    let shards: Vec<(ArchiveIndex, Vec<String>)> = looked.collect::<Result<_, _>>()?;
    let opened = |(number, path): (usize, &PathBuf)| Opened::new(Arc::new(path.clone()), number);
    let archives = paths.iter().enumerate().map(opened).collect();
    let (mut members, mut labels, mut hashes) = (Vec::new(), Labels::default(), Vec::new());
    let mut names = Vec::new();
    let mut skipped = Skipped::default();
    for (shard, of_members) in shards {
        members.extend(shard.members);
        labels.extend(shard.labels);
        names.extend(of_members);
        hashes.extend(shard.hashes);
        skipped.merge(&shard.skipped);
    }
    if members.is_empty() {
        let left_out = if skipped.total() > 0 { format!(" ({skipped})") } else { String::new() };
        let what = if matches!(wanted, LabelChoice::Nothing) { "image" } else { "image with a label" };
        return Err(DataError::input(format!(
            "There is no {what} in {}{left_out}: check data.path.",
            paths[0].display()
        )));
    }
    let holder = Storage::Members { archives, members };
    Ok(FoundImages { kind: "WebDataset", files: paths.len(), holder, labels, names, hashes, skipped })
}

/// The index of an archive, from the cache or made and cached. Errors of writing the cache are ignored. Names of members are
/// returned where no labels are read, and are not cached.
fn indexed(
    number: u32,
    path: &Path,
    wanted: LabelChoice<'_>,
    on_error: OnError,
    cache: Option<&Path>,
) -> Result<(ArchiveIndex, Vec<String>), DataError> {
    let of = match (cache, wanted) {
        (Some(cache), LabelChoice::Label(label)) => CacheKey::now(path, label).ok().map(|of| (cache, of)),
        _ => None,
    };
    if let Some(kept) = of.as_ref().and_then(|(cache, of)| ArchiveIndex::load(cache, of, on_error, number)) {
        return Ok((kept, Vec::new()));
    }
    let Shard { members, labels, names, hashes, ledger, .. } = Shard::scan(number, path, wanted, on_error)?;
    let index = ArchiveIndex { members, labels, hashes, skipped: ledger.skipped };
    if let Some((cache, of)) = &of {
        let _ = index.store(cache, of);
    }
    Ok((index, names))
}

/// A scanned archive.
struct Shard {
    path: Arc<PathBuf>,
    number: u32,
    /// Hash of the file's name: equal keys in several archives are different samples.
    name: u64,
    members: Vec<Member>,
    labels: Labels,
    names: Vec<String>,
    hashes: Vec<u64>,
    ledger: Ledger,
}

/// The members of the current sample.
struct Sample {
    key: String,
    first: u64,
    images: Vec<Entry>,
    class: Option<Entry>,
    json: Option<Entry>,
    text: Option<Entry>,
    /// The endings of all members so far.
    endings: HashSet<String>,
}

impl Shard {
    fn scan(number: u32, path: &Path, wanted: LabelChoice<'_>, on_error: OnError) -> Result<Self, DataError> {
        let failed = |error: std::io::Error| unreadable(path, &error);
        let path_name = path.file_name().map(|name| fingerprint(name.as_encoded_bytes())).unwrap_or(0);
        let shared = Arc::new(path.to_path_buf());
        let mut shard = Self {
            path: shared.clone(),
            number,
            name: path_name,
            members: Vec::new(),
            labels: Labels::default(),
            names: Vec::new(),
            hashes: Vec::new(),
            ledger: Ledger::new(on_error),
        };
        let mut samples = Samples::new(Archive::open(shared).map_err(failed)?);
        while let Some(next) = samples.next(&mut |flaw, place| shard.ledger.note(flaw, place))? {
            let mut sample = Sample::new(next.key, next.first);
            for (ending, entry) in next.members {
                let place = samples.archive().place(entry.offset);
                if let Some(flaw) = sample.take(&ending, entry) {
                    shard.ledger.note(&flaw, place)?;
                }
            }
            shard.finish(sample, samples.archive(), wanted)?;
        }
        Ok(shard)
    }

    /// Adds the images of a complete sample.
    fn finish(
        &mut self,
        sample: Sample,
        archive: &Archive,
        wanted: LabelChoice<'_>,
    ) -> Result<(), DataError> {
        let place = archive.place(sample.first);
        let label = match wanted {
            LabelChoice::Nothing => None,
            LabelChoice::Label(field) => {
                match sample.label(archive, field).map_err(|error| unreadable(&self.path, &error))? {
                    Ok(label) => Some(label),
                    Err(flaw) => return self.ledger.note(&flaw, place),
                }
            }
        };
        if sample.images.is_empty() {
            let message = format!("the sample {} has no image", sample.key);
            return self.ledger.note(&Flaw::new(Reason::NoImage, message), place);
        }
        let hash = key(self.name, fingerprint(sample.key.as_bytes()));
        for Entry { name, offset, bytes, .. } in sample.images {
            match &label {
                Some(label) => self.labels.push(label, || place.clone()),
                None => self.names.push(format!("{}/{name}", self.path.display())),
            }
            self.hashes.push(hash);
            self.members.push(Member { archive: self.number, offset, bytes });
        }
        Ok(())
    }
}

impl Sample {
    fn new(key: String, first: u64) -> Self {
        let (images, endings) = (Vec::new(), HashSet::new());
        Self { key, first, images, class: None, json: None, text: None, endings }
    }

    fn take(&mut self, ending: &str, entry: Entry) -> Option<Flaw> {
        if !self.endings.insert(ending.into()) {
            let message = format!("the member {} occurs twice", entry.name);
            return Some(Flaw::new(Reason::KeyTwice, message));
        }
        let last = ending.rsplit('.').next().unwrap_or(ending);
        match ending {
            "cls" => self.class = Some(entry),
            "json" => self.json = Some(entry),
            "txt" => self.text = Some(entry),
            _ if ENDINGS.contains(&last) => self.images.push(entry),
            _ if OTHER_ENDINGS.contains(&last) => {
                let message = format!("the member {} is of another kind than JPEG, PNG and WebP", entry.name);
                return Some(Flaw::new(Reason::NotAnImage, message));
            }
            // Members of other kinds are ignored.
            _ => {}
        }
        None
    }

    /// The label, as it is written.
    fn label(&self, archive: &Archive, field: Option<&str>) -> std::io::Result<Result<String, Flaw>> {
        let key = &self.key;
        let wrong = |reason, message: String| Ok(Err(Flaw::new(reason, message)));
        // A named field is read from the JSON, whatever other members there are.
        let plain = self.class.as_ref().or(if self.json.is_none() { self.text.as_ref() } else { None });
        let source = match (field, plain, &self.json) {
            (None, Some(plain), _) => plain,
            (_, _, Some(json)) => json,
            (Some(_), _, None) => {
                return wrong(Reason::NoLabel, format!("the sample {key} has no {key}.json"));
            }
            (None, None, None) => {
                return wrong(
                    Reason::NoLabel,
                    format!("the sample {key} has neither a .cls nor a .json member"),
                );
            }
        };
        let Some(bytes) = archive.read(source, MOST_LABEL)? else {
            return wrong(Reason::Label, format!("the member {} is too long for a label", source.name));
        };
        if Some(source) != self.json.as_ref() {
            return match std::str::from_utf8(&bytes).map(str::trim) {
                Ok(label) if !label.is_empty() => Ok(Ok(label.into())),
                _ => wrong(Reason::Label, format!("the member {} holds no label", source.name)),
            };
        }
        let fields: Fields = match serde_json::from_slice(&bytes) {
            Ok(fields) => fields,
            Err(error) => {
                return wrong(
                    Reason::BrokenJson,
                    format!("the member {} is not a JSON object ({error})", source.name),
                );
            }
        };
        let Some(name) = field.or_else(|| LABELS.into_iter().find(|name| fields.has(name))) else {
            let message = format!(
                "no field of the member {} is known to hold a label, of {}",
                source.name,
                fields.names()
            );
            return wrong(Reason::Label, format!("{message}, and data.label can name one"));
        };
        Ok(label_of(&fields, name).map_err(|wrong| Flaw::new(wrong.reason, wrong.message)))
    }
}
