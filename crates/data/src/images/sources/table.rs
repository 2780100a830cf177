//! Tables whose rows name images: JSONL, CSV or parquet, with files in a folder.

use std::path::{Path, PathBuf};

use super::encoded::Storage;
use super::found::{FoundImages, LabelChoice, Labels};
use crate::error::DataError;
use crate::examples::label_of;
use crate::formats::{self, Field, OnError, ReadOptions, Reason, Records};
use crate::images::flaw::{Flaw, Ledger};
use crate::random::fingerprint;

/// Known column names of images, where none is given.
const IMAGES: [&str; 5] = ["image", "file_name", "image_path", "path", "file"];
const LABELS: [&str; 4] = ["label", "labels", "class", "target"];

/// The columns of a table's rows.
pub(in crate::images) struct Columns<'a> {
    pub image: Option<&'a str>,
    pub wanted: LabelChoice<'a>,
    /// The folder that paths are relative to; otherwise the table's own.
    pub root: Option<&'a Path>,
}

/// The images that the rows of tables name.
pub(in crate::images) fn table(
    words: &[String],
    columns: &Columns<'_>,
    on_error: OnError,
) -> Result<FoundImages, DataError> {
    let options = ReadOptions { on_error, ..ReadOptions::default() };
    let mut ledger = Ledger::new(on_error);
    let (mut paths, mut labels, mut hashes): (Vec<Box<Path>>, _, _) =
        (Vec::new(), Labels::default(), Vec::new());
    let inputs = formats::find(words, &options)?;
    for input in &inputs {
        let root = columns.root.or_else(|| input.path.parent()).unwrap_or(Path::new(""));
        let mut records = Records::open(input, &options)?;
        for record in records.by_ref() {
            let record = record?;
            let named = |given: Option<&str>, known: &[&str]| {
                given
                    .map(String::from)
                    .or_else(|| known.iter().find(|name| record.fields.has(name)).map(|name| (*name).into()))
            };
            let read = || -> Result<(PathBuf, Option<String>), Flaw> {
                let image = named(columns.image, &IMAGES).ok_or_else(|| {
                    let message = format!(
                        "no field of the row is known to hold an image, of {}",
                        record.fields.names()
                    );
                    Flaw::new(Reason::MissingField, format!("{message}, and data.image can name one"))
                })?;
                let Some(Field::Text(image)) = record.fields.get(&image) else {
                    return Err(Flaw::new(
                        Reason::MissingField,
                        format!("the field `{image}` holds no path of an image"),
                    ));
                };
                let label = match columns.wanted {
                    LabelChoice::Nothing => None,
                    LabelChoice::Label(given) => {
                        let label = named(given, &LABELS).ok_or_else(|| {
                            Flaw::new(
                                Reason::Label,
                                "no field of the row is known to hold a label, and data.label can name one",
                            )
                        })?;
                        let label = label_of(&record.fields, &label);
                        Some(label.map_err(|wrong| Flaw::new(wrong.reason, wrong.message))?)
                    }
                };
                let path = root.join(image);
                match path.is_file() {
                    true => Ok((path, label)),
                    false => Err(Flaw::new(Reason::NoFile, format!("there is no image {}", path.display()))),
                }
            };
            match read() {
                Ok((path, label)) => {
                    if let Some(label) = &label {
                        labels.push(label, || record.place.clone());
                    }
                    let relative = path.strip_prefix(root).unwrap_or(&path);
                    hashes.push(fingerprint(relative.as_os_str().as_encoded_bytes()));
                    paths.push(path.into());
                }
                Err(flaw) => ledger.note(&flaw, record.place)?,
            }
        }
        ledger.skipped.merge(records.skipped());
    }
    if paths.is_empty() {
        return Err(DataError::input(format!(
            "No row of {} names an image that can be used: check data.path.",
            words.join(", ")
        )));
    }
    let holder = Storage::Files(paths);
    let (files, names) = (inputs.len(), vec![]);
    Ok(FoundImages { kind: "table", files, holder, labels, names, hashes, skipped: ledger.skipped })
}
