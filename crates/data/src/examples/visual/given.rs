//! Images in the forms in which rows have them: in columns or in parts, as paths, bytes or data URLs.

use std::path::Path;
use std::sync::Arc;

use super::MAX_IMAGE_BYTES;
use super::parts::STORED;
use crate::examples::conversation::wrong;
use crate::examples::row_error::RowError;
use crate::formats::{Field, Fields, Reason};
use crate::images::Flaw;
use crate::vision::{EncodedImage, Given, ImageReader, decode_data_url, is_data_url};

/// Columns of images.
const COLUMNS: [&str; 2] = ["images", "image"];
/// Columns with the file name of an image, in rows with a question.
const FILE_COLUMNS: [&str; 4] = ["image_path", "image_filename", "file_name", "image_id"];
/// Columns of videos, which are not read.
const VIDEO_COLUMNS: [&str; 2] = ["videos", "video"];

/// Longest text that is read as a path.
const MOST_PATH_BYTES: usize = 4096;

/// The images that a row has in a column.
pub(super) struct Column {
    /// Its name, or the usual one where the row has none.
    name: String,
    pub images: Vec<Field>,
}

impl Column {
    /// The images of the column that `given` names, or of a column with a known name. In rows with a question (`asked`) the
    /// column may name a file.
    pub fn of(fields: &Fields, given: Option<&str>, asked: bool) -> Result<Column, RowError> {
        if let Some(given) = given {
            return Ok(Column { name: given.into(), images: images_in(fields, given)? });
        }
        let mut found: Option<Column> = None;
        for name in COLUMNS {
            let images = images_in(fields, name)?;
            match &found {
                Some(other) if !images.is_empty() => {
                    let message = format!(
                        "the row has images in `{}` and in `{name}`; name the column to use with data.image",
                        other.name
                    );
                    return wrong(Reason::ImageCount, message);
                }
                None if !images.is_empty() => found = Some(Column { name: name.into(), images }),
                _ => {}
            }
        }
        for name in FILE_COLUMNS.into_iter().filter(|_| asked) {
            if found.is_none() {
                let images = images_in(fields, name)?;
                found = (!images.is_empty()).then(|| Column { name: name.into(), images });
            }
        }
        Ok(found.unwrap_or(Column { name: COLUMNS[0].into(), images: Vec::new() }))
    }

    /// Fills each image's place with the image of its part, or else with the next image of the column.
    pub fn fill(&self, places: Vec<(usize, Option<Field>)>) -> Result<Vec<(usize, Field)>, RowError> {
        let name = &self.name;
        let empty = places.iter().filter(|(_, held)| held.is_none()).count();
        if empty < places.len() && !self.images.is_empty() {
            let message = format!(
                "the row gives images in its parts and in `{name}` too; give each image once, with its part or in the column"
            );
            return wrong(Reason::ImageCount, message);
        }
        if empty != self.images.len() {
            let count = |count: usize, one: &str, more: &str| match count {
                0 => format!("no {one}"),
                1 => format!("1 {one}"),
                _ => format!("{count} {more}"),
            };
            let message = format!(
                "the row has {} in `{name}` and {} (a part of the type `image`, or `<image>` in a text); give as many of one \
                 as of the other",
                count(self.images.len(), "image", "images"),
                count(empty, "place for one", "places for them"),
            );
            return wrong(Reason::ImageCount, message);
        }
        let mut next = self.images.iter().cloned();
        let held = |held: Option<Field>| held.or_else(|| next.next()).expect("as many as there are places");
        let mut held = held;
        Ok(places.into_iter().map(|(turn, part)| (turn, held(part))).collect())
    }
}

/// The images of a field: one or several, none where it is missing, null or empty.
fn images_in(fields: &Fields, name: &str) -> Result<Vec<Field>, RowError> {
    match fields.get(name) {
        None | Some(Field::Null) => Ok(Vec::new()),
        Some(Field::List(list)) => Ok(list.clone()),
        Some(Field::Text(text)) if text.trim().is_empty() => Ok(Vec::new()),
        // Tables without lists have them as JSON.
        Some(Field::Text(text)) if text.starts_with('[') => match Field::from_json(text) {
            Ok(Field::List(list)) => Ok(list),
            _ => Ok(vec![Field::Text(text.clone())]),
        },
        Some(one @ (Field::Text(_) | Field::Bytes(_) | Field::Object(_))) => Ok(vec![one.clone()]),
        Some(other) => wrong(
            Reason::NoImage,
            format!("the field `{name}` is {}, not an image or a list of images; correct it", other.kind()),
        ),
    }
}

/// Whether a row has images: in a column, or in a part of a message.
pub(in crate::examples) fn shows_images(fields: &Fields) -> bool {
    let is_held = |name: &&str| images_in(fields, name).is_ok_and(|images| !images.is_empty());
    COLUMNS.iter().chain(&FILE_COLUMNS).any(is_held) || fields.0.iter().any(|(_, of)| has_part(of))
}

/// Whether a field contains a part of a message that is an image.
fn has_part(field: &Field) -> bool {
    match field {
        Field::List(list) => list.iter().any(has_part),
        Field::Object(fields) => {
            let kind = fields.get("type").and_then(Field::text);
            kind.is_some_and(|kind| ["image", "image_url"].contains(&kind))
                || fields.0.iter().any(|(_, of)| has_part(of))
        }
        _ => false,
    }
}

/// Refuses rows with columns of videos.
pub(super) fn no_video(fields: &Fields) -> Result<(), RowError> {
    let is_filled = |name: &str| match fields.get(name) {
        None | Some(Field::Null) => false,
        Some(Field::List(list)) => !list.is_empty(),
        Some(Field::Text(text)) => !text.trim().is_empty(),
        Some(_) => true,
    };
    match VIDEO_COLUMNS.into_iter().find(|name| is_filled(name)) {
        None => Ok(()),
        Some(name) => wrong(
            Reason::Unsupported,
            format!("the row has videos in `{name}`, and video is not read; leave the row out"),
        ),
    }
}

/// Reads an image; paths are relative to `root`.
pub(super) fn read_image(
    reader: &ImageReader,
    image: &Field,
    root: &Path,
) -> Result<Arc<EncodedImage>, RowError> {
    let read = |given: Given<'_>| reader.read(given, root).map_err(row_error);
    match image {
        Field::Bytes(bytes) => read(Given::Bytes(bytes)),
        Field::Text(text) if is_data_url(text) => {
            read(Given::Bytes(&decode_data_url(text, MAX_IMAGE_BYTES).map_err(row_error)?))
        }
        Field::Text(text) => read(Given::Path(path_of(text, root)?)),
        Field::Object(fields) => {
            let is_there = |field: &&Field| **field != Field::Null;
            match fields.get(STORED[0]).filter(is_there) {
                Some(Field::Bytes(bytes)) => return read(Given::Bytes(bytes)),
                // Bytes of a table that happen to be valid UTF-8 are passed on as bytes, and the decoder reports that they are
                // no image.
                Some(Field::Text(bytes)) => return read(Given::Bytes(bytes.as_bytes())),
                Some(other) => {
                    let message = format!("the `bytes` of an image are {}; correct it", other.kind());
                    return wrong(Reason::NoImage, message);
                }
                None => {}
            }
            let named = ["path", "url", "image", "image_url"].iter();
            match named.filter_map(|name| fields.get(name).filter(is_there)).next() {
                Some(inner @ (Field::Text(_) | Field::Bytes(_))) => read_image(reader, inner, root),
                _ => wrong(
                    Reason::NoImage,
                    format!(
                        "an image is an object with {}; give it `bytes`, a `path` or a `url`",
                        fields.names()
                    ),
                ),
            }
        }
        other => {
            wrong(Reason::NoImage, format!("an image is {}; give a path, bytes or a data URL", other.kind()))
        }
    }
}

/// Checks the path of an image, relative to the root.
fn path_of<'t>(text: &'t str, root: &Path) -> Result<&'t str, RowError> {
    let start: String = text.chars().take(60).collect();
    if text.trim().is_empty() {
        return wrong(Reason::NoImage, "the path of an image is empty; give one".into());
    }
    if text.len() > MOST_PATH_BYTES {
        let message = format!(
            "an image is a text of {} bytes that is neither a path nor a data URL; write it as data:image/png;base64,...",
            text.len()
        );
        return wrong(Reason::NoImage, message);
    }
    if text.chars().any(char::is_control) {
        let message =
            format!("the image path `{}` has a control character; correct it", start.escape_debug());
        return wrong(Reason::ImagePath, message);
    }
    let path = text.strip_prefix("file://").unwrap_or(text);
    if path.contains("://") {
        let message = format!(
            "the image `{}` is a URL, and images are not downloaded; download it and give its path",
            start.escape_debug()
        );
        return wrong(Reason::ImagePath, message);
    }
    // An absolute path is accepted where it leads into the folder.
    let below = root.to_str().filter(|_| root.is_absolute()).and_then(|root| path.strip_prefix(root));
    Ok(below.and_then(|below| below.strip_prefix('/')).unwrap_or(path))
}

fn row_error(flaw: Flaw) -> RowError {
    RowError::new(flaw.reason, format!("{}; {}", flaw.said, flaw.reason.remedy()))
}
