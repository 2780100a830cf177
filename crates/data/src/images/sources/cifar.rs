//! The binary files of CIFAR-10 and CIFAR-100, read into memory as pixels.
//!
//! A record is one label byte (or two: coarse and fine) and 3072 bytes of a 32 x 32 image, all red, then all green, then
//! all blue.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::error::DataError;
use crate::formats::{Place, unreadable};
use crate::images::stored::{Images, Picture, Stored, Trouble};
use crate::random::key;

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
const IMAGE: usize = 3 * PLANE;

pub(in crate::images) struct Cifar {
    files: Vec<(Arc<PathBuf>, u64)>,
    label_bytes: usize,
    labels: Vec<u8>,
    pixels: Vec<u8>,
    /// Of all bytes.
    pub hash: u64,
    /// The largest label.
    pub most: u8,
    /// The class of every label, where they are not the labels themselves.
    numbers: Option<Vec<u32>>,
}

/// Which of two labels is the class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::images) enum Label {
    Fine,
    Coarse,
}

impl Cifar {
    /// Reads files, one after another. All hold records of the same form.
    pub fn read(paths: &[PathBuf], label: Label) -> Result<Self, DataError> {
        let contents = paths.iter().map(|path| std::fs::read(path).map_err(|error| unreadable(path, &error)));
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

    /// Gives labels other classes than their own numbers.
    pub fn renumber(&mut self, numbers: Option<Vec<u32>>) {
        self.hash = numbers.iter().flatten().fold(self.hash, |hash, number| key(hash, u64::from(*number)));
        self.numbers = numbers;
    }

    /// The names of classes where the set's own list lies beside the first file; otherwise their numbers.
    pub fn classes(&self, label: Label) -> Result<Vec<String>, DataError> {
        let list = match (self.label_bytes, label) {
            (1, _) => "batches.meta.txt",
            (_, Label::Fine) => "fine_label_names.txt",
            (_, Label::Coarse) => "coarse_label_names.txt",
        };
        let list = self.files[0].0.parent().unwrap_or(Path::new("")).join(list);
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

/// How many labels a record has: the sizes of files say it, or where they fit both forms the labels do.
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

    fn stored<'a>(&'a self, index: u64, _: &'a mut Vec<u8>) -> Result<Stored<'a>, Trouble> {
        let rgb = &self.pixels[index as usize * IMAGE..][..IMAGE];
        Ok(Stored::Pixels(Picture { width: SIDE, height: SIDE, rgb }))
    }

    fn place(&self, index: u64) -> Place {
        let file = self.files.partition_point(|(_, end)| *end <= index);
        let before = if file == 0 { 0 } else { self.files[file - 1].1 };
        let offset = (index - before) * (self.label_bytes + IMAGE) as u64;
        Place { file: self.files[file].0.clone(), line: None, row: Some(index - before + 1), offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    /// A record whose pixels tell its number.
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

    #[test]
    fn names_lie_beside_the_files() {
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
    fn files_that_are_none_are_named() {
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
