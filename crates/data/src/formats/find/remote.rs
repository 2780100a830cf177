//! Finds remote inputs: files of a data set of the Hugging Face hub, and objects by URL.

use std::path::{Path, PathBuf};

use super::super::content::HEAD_BYTES;
use super::super::{Compression, Format, ReadOptions, content};
use super::{Input, by_content, by_name, of_one_format};
use crate::error::DataError;
use crate::remote::hub;
use crate::remote::location::{SetName, addresses, is_of_hub};
use crate::remote::object::{Client, Object, shown};

/// The inputs that a pattern stands for, in order.
pub(super) fn inputs(word: &str, options: &ReadOptions) -> Result<Vec<Input>, DataError> {
    let client = Client::shared()?;
    if is_of_hub(word) {
        return of_set(&client, &SetName::parse(word)?, options);
    }
    let object = |url: String| {
        let (object, head) = Object::open(client.clone(), &url, HEAD_BYTES)?;
        let path = PathBuf::from(shown(&url));
        let (named, compressed) = named(&path);
        let compression = match object.bytes() {
            0 => Compression::None,
            _ => content::compression(&head).unwrap_or(compressed),
        };
        let format = match options.format.or(named) {
            Some(format) => format,
            None => by_content(&path, head, compression)?,
        };
        Ok(Input { format, compression, bytes: object.bytes(), remote: Some(object), path })
    };
    addresses(word)?.into_iter().map(object).collect()
}

/// The files of a data set. Their formats follow from their names, so that none has to be opened.
pub(super) fn of_set(
    client: &std::sync::Arc<Client>,
    name: &SetName,
    options: &ReadOptions,
) -> Result<Vec<Input>, DataError> {
    let (pinned, files) = hub::files(client, name, |path| is_data(Path::new(path)))?;
    let at = |path: &str| PathBuf::from(format!("hf://{}@{}/{path}", pinned.repo, pinned.revision()));
    let formats = files.iter().filter_map(|file| Some((at(&file.path), named(Path::new(&file.path)).0?)));
    let wanted = of_one_format(Path::new(&name.to_string()), formats.collect(), options)?;
    let input = |file: hub::SetFile| {
        let path = at(&file.path);
        let (format, compression) = named(Path::new(&file.path));
        wanted.contains(&path).then(|| Input {
            path,
            format: format.expect("only such files are listed"),
            compression,
            bytes: file.object.bytes(),
            remote: Some(file.object),
        })
    };
    Ok(files.into_iter().filter_map(input).collect())
}

/// Data sets also use `.json` for lines of JSON.
fn named(path: &Path) -> (Option<Format>, Compression) {
    let (format, compression) = by_name(path);
    let inner = if compression == Compression::None { path.into() } else { path.with_extension("") };
    let is_json = inner.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
    (format.or(is_json.then_some(Format::Jsonl)), compression)
}

/// Whether a file of a data set could be data: cards and notes are not.
fn is_data(path: &Path) -> bool {
    let parts = path.components().map(|part| part.as_os_str().to_string_lossy());
    let is_hidden = parts.into_iter().any(|part| part.starts_with(['.', '_']));
    let is_note = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("md"));
    let names = ["dataset_infos.json", "dataset_info.json", "state.json", "LICENSE.txt"];
    let is_known = path.file_name().is_some_and(|name| names.iter().any(|known| name == *known));
    !is_hidden && !is_note && !is_known && named(path).0.is_some()
}
