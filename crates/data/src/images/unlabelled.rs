//! Opens images to classify, of every kind of source, without labels.

use std::path::Path;
use std::sync::Arc;

use super::set::ImageSet;
use super::sets::{ImageSpec, TABLES};
use super::sources::cifar::{self, Cifar, Label};
use super::sources::folder::{ENDINGS, unlabelled};
use super::sources::found::{FoundImages, LabelChoice};
use super::sources::paths::{entries, files, has_ending};
use super::sources::table::{Columns, table};
use super::sources::webdataset::webdataset;
use crate::error::DataError;

/// Images to classify, in the order in which they were found.
pub struct UnlabelledImages {
    /// Every image has class 0; an image that cannot be decoded has none.
    pub set: ImageSet,
    /// Name of each image: the path of a file, of a member after its archive's path, or the number of a record after its file's
    /// path.
    pub names: Vec<String>,
    /// A sentence about images that were skipped, where that is allowed and there are any.
    pub left_out: Option<String>,
}

/// Opens what `spec.path` names: image files, folders with images at any depth, tables that name images, archives, or files of
/// CIFAR. Ignores labels.
pub fn open_unlabelled(spec: &ImageSpec) -> Result<UnlabelledImages, DataError> {
    let words = &spec.path;
    let first = Path::new(words.first().map_or("", String::as_str));
    let holds = |endings: &[&str]| -> Result<bool, DataError> {
        Ok(match first.is_dir() {
            true => entries(first)?.iter().any(|path| has_ending(path, endings)),
            false => has_ending(first, endings),
        })
    };
    if !holds(&["tar"])? && cifar::is_cifar(first)? {
        let images = Cifar::read(&cifar::files(words)?, Label::Fine)?;
        let hash = images.hash;
        return Ok(opened(ImageSet::whole(Arc::new(images), hash), vec![], None, spec));
    }
    let mut found: FoundImages = match (holds(&["tar"])?, !first.is_dir() && holds(&TABLES)?) {
        (true, _) => webdataset(&files(words, &["tar"])?, LabelChoice::Nothing, spec.on_error, None)?,
        (false, true) => {
            let (image, root) = (spec.image.as_deref(), spec.root.as_deref());
            table(words, &Columns { image, wanted: LabelChoice::Nothing, root }, spec.on_error)?
        }
        (false, false) if first.is_dir() || holds(&ENDINGS)? => unlabelled(words, spec.on_error)?,
        (false, false) => {
            return Err(DataError::input(format!(
                "{} holds no images: give .jpg, .png or .webp files, a folder with some, .tar archives, files of CIFAR, or a \
                 .jsonl, .csv or .parquet table that names images.",
                words.join(", ")
            )));
        }
    };
    let left_out = (found.skipped.total() > 0).then(|| found.skipped.to_string());
    let names = std::mem::take(&mut found.names);
    Ok(opened(found.unlabelled(spec.max_pixels), names, left_out, spec))
}

fn opened(
    set: ImageSet,
    mut names: Vec<String>,
    left_out: Option<String>,
    spec: &ImageSpec,
) -> UnlabelledImages {
    if names.is_empty() {
        names = (0..set.count()).map(|index| set.place(index).to_string()).collect();
    }
    let set = ImageSet { on_error: spec.on_error, max_pixels: spec.max_pixels, ..set };
    UnlabelledImages { set, names, left_out }
}
