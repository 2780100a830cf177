//! The files of CIFAR-10 and CIFAR-100, binary or in their Python form, read into memory as pixels.
//!
//! A record of the binary form, to which the Python form is converted, is one label byte (or two: coarse and fine) and the 3072
//! bytes of a 32 x 32 image, all red, then all green, then all blue.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::{cifar_python, paths};
use crate::error::DataError;
use crate::formats::{SourceLocation, unreadable};
use crate::images::stored::{ImageError, Images, Picture, Stored};
use crate::random::key;

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
pub(super) const IMAGE: usize = 3 * PLANE;

pub(in crate::images) struct Cifar {
    files: Vec<(Arc<PathBuf>, u64)>,
    label_bytes: usize,
    labels: Vec<u8>,
    pixels: Vec<u8>,
    /// Hash of all bytes.
    pub hash: u64,
    /// The largest label.
    pub most: u8,
    /// The class of every label, where it is not the label itself.
    numbers: Option<Vec<u32>>,
}

/// The label that is the class, of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::images) enum Label {
    Fine,
    Coarse,
}

/// The files that the entries name. Of a folder, the files ending in `.bin`, or those of the Python form.
pub(in crate::images) fn files(words: &[String]) -> Result<Vec<PathBuf>, DataError> {
    let mut found = Vec::new();
    for word in words {
        let folder = Path::new(word);
        if folder.is_dir() && !has_binary(folder)? {
            found.extend(cifar_python::files(folder)?);
        } else {
            found.extend(paths::files(std::slice::from_ref(word), &["bin"])?);
        }
    }
    Ok(found)
}

/// Whether a path is a file of CIFAR, a folder of them, or a pattern whose first match is one.
pub(in crate::images) fn is_cifar(path: &Path) -> Result<bool, DataError> {
    if path.is_dir() {
        return Ok(has_binary(path)? || !cifar_python::files(path)?.is_empty());
    }
    if path.exists() || has_plain_ending(path) {
        return Ok(paths::has_ending(path, &["bin"]) || cifar_python::is_python(path));
    }
    let meant = path.to_str().map(paths::expanded).transpose()?.flatten().unwrap_or_default();
    Ok(meant.first().is_some_and(|first| cifar_python::is_python(first)))
}

/// Whether a name has an ending and no wildcards, which no file of the Python form has.
fn has_plain_ending(path: &Path) -> bool {
    let ending = path.extension().map(|ending| ending.as_encoded_bytes());
    ending.is_some_and(|ending| ending.iter().all(u8::is_ascii_alphanumeric))
}

fn has_binary(folder: &Path) -> Result<bool, DataError> {
    Ok(paths::entries(folder)?.iter().any(|path| paths::has_ending(path, &["bin"])))
}

impl Cifar {
    /// Reads files in order, which must have records of the same form.
    pub fn read(paths: &[PathBuf], label: Label) -> Result<Self, DataError> {
        let contents = paths.iter().map(|path| {
            let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
            cifar_python::records(path, bytes)
        });
        let contents: Vec<Vec<u8>> = contents.collect::<Result<_, _>>()?;
        let label_bytes = label_bytes(paths, &contents)?;
        if label == Label::Coarse && label_bytes == 1 {
            return Err(DataError::input(format!(
                "data.label=coarse is for CIFAR-100, and {} has one label a record: leave it out.",
                paths[0].display()
            )));
        }
        let record = label_bytes + IMAGE;
        let mut hash = Xxh3::new();
        let mut images = Self {
            files: Vec::new(),
            label_bytes,
            labels: Vec::new(),
            pixels: Vec::with_capacity(contents.iter().map(|bytes| bytes.len() / record * IMAGE).sum()),
            hash: 0,
            most: 0,
            numbers: None,
        };
        for (path, bytes) in paths.iter().zip(contents) {
            hash.update(&bytes);
            for record in bytes.chunks_exact(record) {
                let (labels, planes) = record.split_at(label_bytes);
                images.labels.push(if label == Label::Coarse { labels[0] } else { labels[label_bytes - 1] });
                let (red, rest) = planes.split_at(PLANE);
                let (green, blue) = rest.split_at(PLANE);
                for ((red, green), blue) in red.iter().zip(green).zip(blue) {
                    images.pixels.extend([*red, *green, *blue]);
                }
            }
            images.files.push((Arc::new(path.clone()), images.labels.len() as u64));
        }
        images.hash = hash.digest();
        images.most = images.labels.iter().copied().max().unwrap_or(0);
        Ok(images)
    }

    /// Sets the classes of labels, where they are not the labels themselves.
    pub fn renumber(&mut self, numbers: Option<Vec<u32>>) {
        self.hash = numbers.iter().flatten().fold(self.hash, |hash, number| key(hash, u64::from(*number)));
        self.numbers = numbers;
    }

    /// The class names of the set's own list, where it is in the folder of the first file; otherwise numbers.
    pub fn classes(&self, label: Label) -> Result<Vec<String>, DataError> {
        let (list, key) = match (self.label_bytes, label) {
            (1, _) => ("batches.meta.txt", "label_names"),
            (_, Label::Fine) => ("fine_label_names.txt", "fine_label_names"),
            (_, Label::Coarse) => ("coarse_label_names.txt", "coarse_label_names"),
        };
        let folder = self.files[0].0.parent().unwrap_or(Path::new(""));
        if let Some(names) = cifar_python::names(folder, key)? {
            return self.fitting(names, folder);
        }
        let list = folder.join(list);
        let names: Vec<String> = match std::fs::read_to_string(&list) {
            Ok(text) => {
                text.lines().map(str::trim).filter(|name| !name.is_empty()).map(String::from).collect()
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok((0..=self.most).map(|class| class.to_string()).collect());
            }
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                return Err(DataError::input(format!(
                    "{} is not UTF-8: write one class name a line, or remove it.",
                    list.display()
                )));
            }
            Err(error) => return Err(unreadable(&list, &error)),
        };
        self.fitting(names, &list)
    }

    /// The names, if every label has one.
    fn fitting(&self, names: Vec<String>, list: &Path) -> Result<Vec<String>, DataError> {
        match self.labels.iter().position(|label| usize::from(*label) >= names.len()) {
            None => Ok(names),
            Some(record) => Err(DataError::input(format!(
                "{}: label {} is none of the {} classes that {} names (numbered from 0): correct one of them.",
                self.place(record as u64),
                self.labels[record],
                names.len(),
                list.display()
            ))),
        }
    }
}

/// Labels per record, from the sizes of the files or, where they fit both forms, from the labels.
fn label_bytes(paths: &[PathBuf], contents: &[Vec<u8>]) -> Result<usize, DataError> {
    let fits = |label_bytes: usize| {
        let wrong =
            contents.iter().position(|bytes| bytes.is_empty() || bytes.len() % (label_bytes + IMAGE) != 0);
        wrong.map_or(Ok(label_bytes), Err)
    };
    match (fits(1), fits(2)) {
        (Ok(one), Err(_)) => Ok(one),
        (Err(_), Ok(two)) => Ok(two),
        (Ok(one), Ok(two)) => {
            let is_ten =
                contents.iter().flat_map(|bytes| bytes.chunks(1 + IMAGE)).all(|record| record[0] < 10);
            Ok(if is_ten { one } else { two })
        }
        (Err(wrong), Err(_)) => Err(DataError::input(format!(
            "{} has {} bytes, which is not a whole number of CIFAR records (3073 bytes each in CIFAR-10, 3074 in \
             CIFAR-100): fetch it again, or leave it out of data.path.",
            paths[wrong].display(),
            contents[wrong].len()
        ))),
    }
}

impl Images for Cifar {
    fn count(&self) -> u64 {
        self.labels.len() as u64
    }

    fn class(&self, index: u64) -> Option<u32> {
        let label = self.labels[index as usize];
        Some(self.numbers.as_ref().map_or(u32::from(label), |numbers| numbers[usize::from(label)]))
    }

    fn size(&self) -> Option<[usize; 2]> {
        Some([SIDE, SIDE])
    }

    fn stored<'a>(&'a self, index: u64, _: &'a mut Vec<u8>) -> Result<Stored<'a>, ImageError> {
        let rgb = &self.pixels[index as usize * IMAGE..][..IMAGE];
        Ok(Stored::Pixels(Picture { width: SIDE, height: SIDE, rgb }))
    }

    fn place(&self, index: u64) -> SourceLocation {
        let file = self.files.partition_point(|(_, end)| *end <= index);
        let before = if file == 0 { 0 } else { self.files[file - 1].1 };
        let offset = (index - before) * (self.label_bytes + IMAGE) as u64;
        SourceLocation { file: self.files[file].0.clone(), line: None, row: Some(index - before + 1), offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    /// A record whose pixels encode its number.
    fn record(labels: &[u8], number: u8) -> Vec<u8> {
        let mut bytes = labels.to_vec();
        for plane in 0..3 {
            bytes.extend((0..PLANE).map(|at| (at as u8).wrapping_mul(3).wrapping_add(number + 50 * plane)));
        }
        bytes
    }

    #[test]
    fn records_become_pixels_with_their_labels() {
        let scratch = Scratch::new("cifar-read");
        let one = scratch.write("a.bin", &[record(&[3], 1), record(&[9], 2)].concat());
        let two = scratch.write("b.bin", &record(&[0], 3));
        let images = Cifar::read(&[one.clone(), two.clone()], Label::Fine).unwrap();
        assert_eq!((0..3).map(|at| images.class(at).unwrap()).collect::<Vec<_>>(), [3, 9, 0]);
        let mut buffer = Vec::new();
        let Stored::Pixels(picture) = images.stored(1, &mut buffer).unwrap() else { panic!("pixels") };
        assert_eq!(picture.rgb[..6], [2, 52, 102, 5, 55, 105]);
        assert_eq!(images.place(2).to_string(), format!("{}, row 1", two.display()));
        assert_eq!(images.place(1).offset, 3073);
        assert_eq!(images.classes(Label::Fine).unwrap().len(), 10);
        let error = Cifar::read(&[one], Label::Coarse).err().unwrap();
        assert!(error.sentence.contains("data.label=coarse"), "{error}");
    }

    #[test]
    fn two_labels_are_a_coarse_and_a_fine_one() {
        let scratch = Scratch::new("cifar-hundred");
        let path = scratch.write("train.bin", &[record(&[1, 77], 1), record(&[19, 5], 2)].concat());
        let class = |label| {
            let images = Cifar::read(std::slice::from_ref(&path), label).unwrap();
            (0..2).map(|at| images.class(at).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!((class(Label::Fine), class(Label::Coarse)), (vec![77, 5], vec![1, 19]));
    }

    fn python(name: &str) -> Vec<u8> {
        std::fs::read(format!("{}/tests/cifar/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    /// The images of `tests/cifar/make.py` as binary records.
    fn binary(labels: [&[u8]; 2]) -> Vec<u8> {
        let byte = |image: usize, plane: usize, at: usize| (7 * at + 31 * image + 50 * plane) as u8;
        let image = |image: usize| {
            (0..3).flat_map(move |plane| (0..PLANE).map(move |at| byte(image, plane, at))).collect::<Vec<_>>()
        };
        (0..2).flat_map(|at| [labels[at], &image(at)].concat()).collect()
    }

    #[test]
    fn the_python_form_is_the_binary_form_by_every_protocol() {
        let scratch = Scratch::new("cifar-python");
        let binary = [binary([&[3], &[9]]), binary([&[1, 77], &[19, 5]])];
        let forms =
            [("ten-old", 0), ("ten-2", 0), ("ten-4", 0), ("ten-5", 0), ("turned-old", 0), ("hundred-old", 1)];
        for (name, set) in forms {
            let one = Cifar::read(&[scratch.write("data_batch_1", &python(name))], Label::Fine).unwrap();
            let other = Cifar::read(&[scratch.write("data_batch_1.bin", &binary[set])], Label::Fine).unwrap();
            assert!(one.labels == other.labels && one.pixels == other.pixels, "{name}");
            assert_eq!(
                (one.hash, one.most),
                (other.hash, other.most),
                "{name}: a run may go on with the other form"
            );
        }
        let path = scratch.write("train", &python("hundred-old"));
        let coarse = Cifar::read(&[path], Label::Coarse).unwrap();
        assert_eq!(coarse.labels, [1, 19]);
    }

    #[test]
    fn a_folder_of_the_python_form_has_its_names() {
        let scratch = Scratch::new("cifar-python-folder");
        for (name, form) in [("data_batch_1", "ten-old"), ("data_batch_2", "ten-4"), ("test_batch", "ten-5")]
        {
            scratch.write(&format!("c/{name}"), &python(form));
        }
        scratch.write("c/batches.meta", &python("meta-old"));
        scratch.write("c/readme.html", b"<html>");
        let folder = scratch.path().join("c");
        assert!(is_cifar(&folder).unwrap() && is_cifar(&folder.join("test_batch")).unwrap());
        assert!(!is_cifar(&folder.join("readme.html")).unwrap() && !is_cifar(scratch.path()).unwrap());
        let found = files(&[folder.to_str().unwrap().into()]).unwrap();
        let images = Cifar::read(&found, Label::Fine).unwrap();
        assert_eq!((images.count(), found.len()), (6, 3));
        assert_eq!(images.classes(Label::Fine).unwrap()[..4], ["airplane", "automobile", "bird", "cat"]);
        for (pattern, count) in [("data_batch_*", 2), ("data_batch_{1..2}", 2), ("t*_batch", 1)] {
            let pattern = folder.join(pattern);
            assert!(is_cifar(&pattern).unwrap(), "{}", pattern.display());
            assert_eq!(files(&[pattern.to_str().unwrap().into()]).unwrap().len(), count);
        }
        assert!(!is_cifar(&folder.join("read*")).unwrap() && !is_cifar(&folder.join("absent")).unwrap());
        assert!(is_cifar(&folder.join("none*")).unwrap_err().sentence.contains("matches no file"));
        // A folder with both forms is read once.
        scratch.write("c/data_batch_1.bin", &binary([&[3], &[9]]));
        assert_eq!(files(&[folder.to_str().unwrap().into()]).unwrap().len(), 1);
    }

    #[test]
    fn pickles_are_never_executed_and_unknown_shapes_are_refused() {
        let scratch = Scratch::new("cifar-harm");
        let old = python("ten-old");
        let replaced = |from: &[u8], to: &[u8]| {
            let at = old.windows(from.len()).position(|bytes| bytes == from).unwrap();
            [&old[..at], to, &old[at + from.len()..]].concat()
        };
        for (bytes, why) in [
            (python("harm"), "not a NumPy array"),
            (old[..3000].to_vec(), "cut short"),
            (replaced(b"U\x04data", b"U\x04DATA"), "no `data`"),
            (replaced(b"u1", b"i1"), "not an array of rows of 3072 bytes"),
            (replaced(b"labels", b"labelt"), "no `coarse_labels`"),
            (replaced(b"_reconstruct", b"_reconstrucd"), "not a NumPy array"),
            (b"\x80\x02N.".to_vec(), "not a dictionary"),
            (b"\x80\x02}0.".to_vec(), "the instruction 0x30"),
            (b"\x80\x02(.".to_vec(), "stack underflows"),
            (b"\x80\x02h\x07.".to_vec(), "has not stored"),
            (b"\x80\x02K\x01a.".to_vec(), "stack underflows"),
        ] {
            let error = Cifar::read(&[scratch.write("data_batch_1", &bytes)], Label::Fine).err().unwrap();
            assert!(error.is_input() && error.sentence.contains(why), "{why}: {error}");
            assert!(error.sentence.contains("cifar-10-binary.tar.gz"), "{error}");
        }
    }

    #[test]
    fn names_are_read_from_the_folder_of_the_files() {
        let scratch = Scratch::new("cifar-names");
        let path = scratch.write("data_batch_1.bin", &[record(&[1], 1), record(&[2], 2)].concat());
        let images = Cifar::read(std::slice::from_ref(&path), Label::Fine).unwrap();
        scratch.write("batches.meta.txt", b"airplane\nautomobile\r\nbird\n\n");
        assert_eq!(images.classes(Label::Fine).unwrap(), ["airplane", "automobile", "bird"]);
        scratch.write("batches.meta.txt", b"airplane\nautomobile\n");
        let error = images.classes(Label::Fine).unwrap_err();
        assert!(error.sentence.contains("row 2: label 2 is none of the 2 classes"), "{error}");
    }

    #[test]
    fn files_of_other_formats_are_named() {
        let scratch = Scratch::new("cifar-wrong");
        for (name, bytes) in [("cut.bin", record(&[1], 1)[..3000].to_vec()), ("empty.bin", vec![])] {
            let path = scratch.write(name, &bytes);
            let error = Cifar::read(&[path], Label::Fine).err().unwrap();
            assert!(error.is_input() && error.sentence.contains(name), "{error}");
        }
        let mixed =
            [scratch.write("ten.bin", &record(&[1], 1)), scratch.write("hundred.bin", &record(&[1, 2], 1))];
        assert!(Cifar::read(&mixed, Label::Fine).err().unwrap().sentence.contains("hundred.bin"));
        let missing = Cifar::read(&["/nowhere/x.bin".into()], Label::Fine).err().unwrap();
        assert!(missing.is_input(), "{missing}");
    }
}
