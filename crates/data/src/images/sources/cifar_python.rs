//! Converts the Python form of CIFAR (`cifar-10-batches-py`, `cifar-100-python`) to records of the binary form.
//!
//! Such a file is a pickled dictionary: `data` is an array of bytes with 3072 per image, and `labels`, or `coarse_labels` and
//! `fine_labels`, are lists. It is read as data only: see `pickle`.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::cifar::IMAGE;
use super::paths::entries;
use super::pickle::{Pickle, Value};
use crate::error::DataError;

/// Names of files with images, without the numbers after them.
const NAMES: [&str; 4] = ["data_batch", "test_batch", "train", "test"];

/// The files with images of this form in a folder.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut found = entries(folder)?;
    found.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let name = name.trim_end_matches(|sign: char| sign.is_ascii_digit()).trim_end_matches('_');
        NAMES.contains(&name) && is_python(path)
    });
    Ok(found)
}

/// Whether a file has this form, by its name and its first bytes.
pub(in crate::images) fn is_python(path: &Path) -> bool {
    use std::io::Read;
    let mut first = [0; 2];
    path.extension().is_none()
        && path.is_file()
        && std::fs::File::open(path).is_ok_and(|mut file| file.read_exact(&mut first).is_ok())
        && Pickle::begins(&first)
}

/// The bytes of the binary form: for every image its labels and its pixels, all red, then all green, then all blue. Bytes that
/// are not a pickle are in that form already.
pub(super) fn records(path: &Path, bytes: Vec<u8>) -> Result<Vec<u8>, DataError> {
    if path.extension().is_some() || !Pickle::begins(&bytes) {
        return Ok(bytes);
    }
    converted(&bytes).map_err(|why| refusal(path, &why))
}

/// The list of names under a key of a file in the folder of the images, where there is such a file.
pub(super) fn names(beside: &Path, key: &str) -> Result<Option<Vec<String>>, DataError> {
    for name in ["batches.meta", "meta"] {
        let path = beside.join(name);
        let Ok(bytes) = std::fs::read(&path) else { continue };
        if !Pickle::begins(&bytes) {
            continue;
        }
        let read = |bytes| {
            let file = Dictionary::read(bytes)?;
            if file.value(key).is_err() {
                return Ok(None);
            }
            let names = file.list(key)?.iter().map(|name| {
                let name = file.pickle.spelled(*name).ok_or("a name in it is not text")?;
                String::from_utf8(name.into_owned()).map_err(|_| "a name in it is not UTF-8".to_string())
            });
            names.collect::<Result<Vec<_>, String>>().map(Some)
        };
        let names = read(&bytes).map_err(|why| refusal(&path, &why))?;
        if names.is_some() {
            return Ok(names);
        }
    }
    Ok(None)
}

fn refusal(path: &Path, why: &str) -> DataError {
    DataError::input(format!(
        "{} is not read as CIFAR in its Python form: {why}; fetch it again, or take the binary form \
         (cifar-10-binary.tar.gz, cifar-100-binary.tar.gz).",
        path.display()
    ))
}

fn converted(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let file = Dictionary::read(bytes)?;
    let labels = match file.labels("labels") {
        Err(_) => vec![file.labels("coarse_labels")?, file.labels("fine_labels")?],
        Ok(only) => vec![only],
    };
    let pixels = file.value("data").and_then(|data| file.pickle.array(data))?;
    let images = pixels.len() / IMAGE;
    if let Some(other) = labels.iter().find(|labels| labels.len() != images) {
        return Err(format!("it has {images} images and {} labels", other.len()));
    }
    let mut records = Vec::with_capacity(images * (labels.len() + IMAGE));
    for (at, image) in pixels.chunks_exact(IMAGE).enumerate() {
        records.extend(labels.iter().map(|labels| labels[at]));
        records.extend_from_slice(image);
    }
    Ok(records)
}

/// A file that consists of one dictionary.
struct Dictionary<'a> {
    pickle: Pickle<'a>,
    pairs: Vec<(usize, usize)>,
}

impl<'a> Dictionary<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, String> {
        let pickle = Pickle::read(bytes)?;
        match pickle.get(pickle.root).clone() {
            Value::Dictionary(pairs) => Ok(Self { pickle, pairs }),
            _ => Err("it is not a dictionary".into()),
        }
    }

    fn value(&self, key: &str) -> Result<usize, String> {
        let found = self
            .pairs
            .iter()
            .find(|(name, _)| self.pickle.spelled(*name).is_some_and(|name| *name == *key.as_bytes()));
        found.map(|(_, value)| *value).ok_or_else(|| format!("it has no `{key}`"))
    }

    fn list(&self, key: &str) -> Result<&[usize], String> {
        self.pickle.items(self.value(key)?).ok_or_else(|| format!("its `{key}` is not a list"))
    }

    fn labels(&self, key: &str) -> Result<Vec<u8>, String> {
        let label = |number: &usize| match self.pickle.get(*number) {
            Value::Whole(label) => u8::try_from(*label).ok(),
            _ => None,
        };
        let labels = self.list(key)?.iter().map(label).collect::<Option<_>>();
        labels.ok_or_else(|| format!("one of its `{key}` is not a number from 0 to 255"))
    }
}

impl<'a> Pickle<'a> {
    /// The bytes of a text or of bytes. For protocol 2, Python 3 writes bytes as a call of `encode` on a text whose characters
    /// are the bytes.
    fn spelled(&self, number: usize) -> Option<Cow<'a, [u8]>> {
        match *self.get(number) {
            Value::Bytes(bytes) => Some(bytes.into()),
            Value::Text(text) => Some(text.as_bytes().into()),
            Value::Call { .. } => {
                let ("_codecs", "encode", &[text, encoding]) = self.call(number)? else { return None };
                let (Value::Text(text), Value::Text("latin1")) = (self.get(text), self.get(encoding)) else {
                    return None;
                };
                text.chars().map(|sign| u8::try_from(sign).ok()).collect::<Option<Vec<u8>>>().map(Cow::from)
            }
            _ => None,
        }
    }

    /// The bytes of an array of image rows, as NumPy writes it: built after `_reconstruct`, or in protocol 5 by `_frombuffer`.
    fn array(&self, number: usize) -> Result<Cow<'a, [u8]>, String> {
        let known = || match *self.get(number) {
            Value::Built { created_by, contents } => {
                let ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct", _) =
                    self.call(created_by)?
                else {
                    return None;
                };
                let &[_, shape, kind, is_turned, bytes] = self.items(contents)? else { return None };
                Some(([shape, kind, bytes], *self.get(is_turned) != Value::Whole(0)))
            }
            _ => {
                let ("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer", with) =
                    self.call(number)?
                else {
                    return None;
                };
                let &[bytes, kind, shape, order] = with else { return None };
                Some(([shape, kind, bytes], *self.get(order) != Value::Text("C")))
            }
        };
        let ([shape, kind, bytes], is_by_columns) =
            known().ok_or("its `data` is not a NumPy array in a known form")?;
        let sides: Vec<usize> = self.items(shape).unwrap_or_default().to_vec();
        let sides: Vec<&Value<'_>> = sides.into_iter().map(|side| self.get(side)).collect();
        let [&Value::Whole(images), &Value::Whole(row)] = sides[..] else {
            return Err("its `data` has no rows and columns".into());
        };
        let bytes = self.spelled(bytes).ok_or("the values of its `data` are not bytes")?;
        let is_whole = row == IMAGE as i64
            && images > 0
            && usize::try_from(images).is_ok_and(|images| images.checked_mul(IMAGE) == Some(bytes.len()));
        if !self.is_of_bytes(kind) || !is_whole {
            return Err(format!("its `data` is not an array of rows of {IMAGE} bytes"));
        }
        if is_by_columns {
            let images = images as usize;
            return Ok((0..images)
                .flat_map(|image| bytes[image..].iter().step_by(images).copied())
                .collect());
        }
        Ok(bytes)
    }

    /// Whether the NumPy type of an array is unsigned bytes.
    fn is_of_bytes(&self, kind: usize) -> bool {
        let created_by = match *self.get(kind) {
            Value::Built { created_by, .. } => created_by,
            _ => kind,
        };
        let Some(("numpy", "dtype", &[name, ..])) = self.call(created_by) else { return false };
        self.spelled(name).is_some_and(|name| *name == *b"u1")
    }
}
