//! A specification of images opened: what lies there found out, classes named, sides drawn.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use super::cifar::{Cifar, Label};
use super::set::ImageSet;
use super::stored::Images;
use super::synthetic::{self, Synthetic};
use crate::error::DataError;
use crate::examples::ClassCount;
use crate::formats::{OnError, unreadable};
use crate::random::{fingerprint, key};
use crate::source::Said;

/// How images lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ImageSource {
    /// By what the path names; the synthetic set where there is none.
    #[default]
    Auto,
    Synthetic,
    /// `.bin` files of CIFAR-10 or CIFAR-100.
    Cifar,
}

/// What to read, and what becomes of it.
#[derive(Debug, Clone)]
pub struct ImageSpec {
    pub source: ImageSource,
    /// Files and folders.
    pub path: Vec<String>,
    /// Images to evaluate on that lie by themselves, of the same kind; then `held_out` has no meaning.
    pub held_out_path: Vec<String>,
    /// The share of images kept from training.
    pub held_out: f64,
    /// Classes in their order; taken from the files where there are none.
    pub classes: Vec<String>,
    /// Which label is the class: `fine` or `coarse` in CIFAR-100, a field's name in JSON.
    pub label: Option<String>,
    pub on_error: OnError,
    /// Images of the synthetic set, its size and what it is drawn with.
    pub images: u64,
    pub width: usize,
    pub height: usize,
    pub seed: u64,
}

impl Default for ImageSpec {
    fn default() -> Self {
        Self {
            source: ImageSource::Auto,
            path: Vec::new(),
            held_out_path: Vec::new(),
            held_out: 0.1,
            classes: Vec::new(),
            label: None,
            on_error: OnError::Fail,
            images: 20_000,
            width: 32,
            height: 32,
            seed: 0,
        }
    }
}

/// Images on their two sides.
#[derive(Debug, Clone)]
pub struct ImageSets {
    pub train: Arc<ImageSet>,
    pub held_out: Arc<ImageSet>,
    /// In their order.
    pub classes: Vec<String>,
    pub description: ImageDescription,
}

/// What was found, in numbers.
#[derive(Debug, Clone, Serialize)]
pub struct ImageDescription {
    /// `synthetic` or `CIFAR`.
    pub kind: &'static str,
    pub files: usize,
    pub train: u64,
    pub held_out: u64,
    pub classes: Vec<ClassCount>,
    /// What cannot be used, by reason: how many, and where first.
    pub unusable: Vec<(String, u64, String)>,
}

impl fmt::Display for ImageDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} images of {} classes to train on, {} held out ({})",
            self.train,
            self.classes.len(),
            self.held_out,
            self.kind
        )
    }
}

/// Opens images, and tells what was left out. Everything that can be found wrong without decoding every image is found
/// here.
pub fn open(spec: &ImageSpec, say: &mut dyn FnMut(Said)) -> Result<ImageSets, DataError> {
    if !(0.0..1.0).contains(&spec.held_out) {
        return Err(DataError::input(format!(
            "data.held_out={} is not a share: give 0 or more, below 1.",
            spec.held_out
        )));
    }
    match (spec.source, spec.path.is_empty()) {
        (ImageSource::Auto | ImageSource::Synthetic, true) => synthetic(spec),
        (ImageSource::Synthetic, false) => Err(DataError::input(
            "The synthetic set has no use for data.path: leave it out, or give another data.source.",
        )),
        (_, true) => Err(DataError::input("data.path is empty: give files or a folder.")),
        (ImageSource::Auto | ImageSource::Cifar, false) => cifar(spec, say),
    }
}

fn synthetic(spec: &ImageSpec) -> Result<ImageSets, DataError> {
    if spec.images == 0 || spec.width == 0 || spec.height == 0 {
        return Err(DataError::input(format!(
            "A synthetic set of {} images of {} x {} pixels is none: give at least 1 of each.",
            spec.images, spec.width, spec.height
        )));
    }
    let names: Vec<String> = synthetic::CLASSES.map(String::from).into();
    let classes = agreed(&spec.classes, names, "the synthetic set")?;
    // The sides are other draws, so that more of one moves nothing of the other.
    let side = |count: u64, number: u64| {
        let seed = key(key(0x5e7, spec.seed), number);
        let images = Synthetic { count, width: spec.width, height: spec.height, seed };
        let mark = [seed, count, spec.width as u64, spec.height as u64].into_iter().fold(0, key);
        ImageSet { images: Arc::new(images), selection: None, mark }
    };
    let held_out =
        if spec.held_out == 0.0 { 0 } else { (spec.images as f64 * spec.held_out).round().max(1.0) as u64 };
    Ok(sets("synthetic", 0, side(spec.images, 0), side(held_out, 1), classes))
}

fn cifar(spec: &ImageSpec, say: &mut dyn FnMut(Said)) -> Result<ImageSets, DataError> {
    let label = match spec.label.as_deref() {
        None | Some("fine") => Label::Fine,
        Some("coarse") => Label::Coarse,
        Some(other) => {
            return Err(DataError::input(format!(
                "data.label={other} is no label of CIFAR: give fine or coarse, or leave it out."
            )));
        }
    };
    let mut paths = bin_files(&spec.path)?;
    let is_test =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"test"));
    // In a folder the test images lie beside the others. Named by themselves, they are what was asked for.
    let is_named = |path: &PathBuf| spec.path.iter().any(|word| Path::new(word) == path);
    let (left, kept) = paths.drain(..).partition(|path| is_test(path) && !is_named(path));
    paths = kept;
    let left: Vec<PathBuf> = left;
    if let (Some(test), true) = (left.first(), spec.held_out_path.is_empty()) {
        say(Said::Note(format!(
            "{} is left alone; data.held_out_path={} evaluates on it",
            test.display(),
            test.display()
        )));
    }
    if paths.is_empty() {
        return Err(DataError::input(format!(
            "There is no .bin file of CIFAR to train on in {}: check data.path.",
            spec.path.join(", ")
        )));
    }
    let images = Cifar::read(&paths, label)?;
    let shown = paths[0].display().to_string();
    let classes = agreed(&spec.classes, images.classes(label)?, &shown)?;
    let (files, hash, count) = (paths.len(), images.hash, images.count());
    if spec.held_out_path.is_empty() {
        let (train, held_out) =
            sides(Arc::new(images), hash, (0..count).map(hash_of_index), spec.held_out, &shown)?;
        return Ok(sets("CIFAR", files, train, held_out, classes));
    }
    let apart = Cifar::read(&bin_files(&spec.held_out_path)?, label)?;
    if usize::from(apart.most) >= classes.len() {
        return Err(DataError::input(format!(
            "{} has an image of class {}, and {shown} has the classes 0 to {}: give images of the same classes.",
            spec.held_out_path.join(", "),
            apart.most,
            classes.len() - 1
        )));
    }
    let whole = |images: Cifar| ImageSet { mark: images.hash, images: Arc::new(images), selection: None };
    Ok(sets("CIFAR", files, whole(images), whole(apart), classes))
}

/// Classes as they were given, or else as they were found: as many as were found, at least.
fn agreed(given: &[String], found: Vec<String>, shown: &str) -> Result<Vec<String>, DataError> {
    if given.is_empty() {
        return Ok(found);
    }
    if given.len() < found.len() {
        return Err(DataError::input(format!(
            "data.classes names {} classes, and {shown} has {}: name all of them, in order.",
            given.len(),
            found.len()
        )));
    }
    Ok(given.to_vec())
}

/// The `.bin` files that paths name: themselves, or those in a folder, sorted.
fn bin_files(words: &[String]) -> Result<Vec<PathBuf>, DataError> {
    let mut paths = Vec::new();
    for word in words {
        let path = Path::new(word);
        if !path.is_dir() {
            paths.push(path.to_path_buf());
            continue;
        }
        let entries = std::fs::read_dir(path).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let entries = entries.map_err(|error| unreadable(path, &error))?;
        let mut inside: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
        inside.retain(|path| path.extension().is_some_and(|ending| ending == "bin"));
        inside.sort();
        if inside.is_empty() {
            return Err(DataError::input(format!("There is no .bin file in {word}: check data.path.")));
        }
        paths.extend(inside);
    }
    Ok(paths)
}

fn hash_of_index(index: u64) -> u64 {
    key(fingerprint(b"held out"), index)
}

/// Both sides of a source: the images with the least hashes are held out, as many as the share says. Images of the same
/// hash are on the same side.
fn sides(
    images: Arc<dyn Images>,
    mark: u64,
    hashes: impl Iterator<Item = u64>,
    share: f64,
    shown: &str,
) -> Result<(ImageSet, ImageSet), DataError> {
    let hashes: Vec<u64> = hashes.collect();
    let side = |selection: Vec<u64>| ImageSet {
        images: images.clone(),
        mark: key(mark, share.to_bits()),
        selection: Some(Arc::new(selection)),
    };
    let all = hashes.len() as u64;
    if share == 0.0 {
        return Ok((side((0..all).collect()), side(Vec::new())));
    }
    let mut sorted = hashes.clone();
    sorted.sort_unstable();
    let wanted = ((all as f64 * share).round() as usize).clamp(1, (sorted.len() - 1).max(1));
    let bound = sorted[wanted - 1];
    let (held_out, train): (Vec<u64>, Vec<u64>) =
        (0..all).partition(|index| hashes[*index as usize] <= bound);
    if train.is_empty() {
        return Err(DataError::input(format!(
            "{shown} has too few images to hold some out for evaluation: give more, or set data.held_out=0 to train on \
             all."
        )));
    }
    Ok((side(train), side(held_out)))
}

fn sets(
    kind: &'static str,
    files: usize,
    train: ImageSet,
    held_out: ImageSet,
    classes: Vec<String>,
) -> ImageSets {
    let counts = train.balance(classes.len()).into_iter().zip(held_out.balance(classes.len()));
    let balance = classes
        .iter()
        .zip(counts)
        .map(|(name, (train, held_out))| ClassCount { name: name.clone(), train, held_out })
        .collect();
    let description = ImageDescription {
        kind,
        files,
        train: train.count(),
        held_out: held_out.count(),
        classes: balance,
        unusable: Vec::new(),
    };
    ImageSets { train: Arc::new(train), held_out: Arc::new(held_out), classes, description }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn cifar_file(labels: &[u8]) -> Vec<u8> {
        labels
            .iter()
            .enumerate()
            .flat_map(|(at, label)| {
                let mut record = vec![*label];
                record.resize(3073, at as u8);
                record
            })
            .collect()
    }

    fn spec(path: &Path) -> ImageSpec {
        ImageSpec { path: vec![path.to_str().unwrap().into()], ..ImageSpec::default() }
    }

    #[test]
    fn sides_are_exact_shares_that_follow_the_index() {
        let scratch = Scratch::new("sets-sides");
        let labels: Vec<u8> = (0..500).map(|at| (at % 10) as u8).collect();
        let path = scratch.write("data_batch_1.bin", &cifar_file(&labels));
        let opened = open(&spec(&path), &mut |_| {}).unwrap();
        assert_eq!((opened.train.count(), opened.held_out.count(), opened.classes.len()), (450, 50, 10));
        let places =
            |set: &ImageSet| (0..set.count()).map(|at| set.place(at).row.unwrap()).collect::<Vec<_>>();
        let mut all = [places(&opened.train), places(&opened.held_out)].concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(1..=500));
        let again = open(&ImageSpec { seed: 9, ..spec(&path) }, &mut |_| {}).unwrap();
        assert_eq!(places(&again.held_out), places(&opened.held_out), "the seed moves no image");
        let other = open(&ImageSpec { held_out: 0.2, ..spec(&path) }, &mut |_| {}).unwrap();
        assert!(places(&opened.held_out).iter().all(|row| places(&other.held_out).contains(row)));
        assert_eq!(
            open(&ImageSpec { held_out: 0.0, ..spec(&path) }, &mut |_| {}).unwrap().held_out.count(),
            0
        );
    }

    #[test]
    fn test_images_of_a_folder_are_left_alone_until_they_are_asked_for() {
        let scratch = Scratch::new("sets-test");
        scratch.write("c/data_batch_1.bin", &cifar_file(&[0, 1, 2]));
        scratch.write("c/data_batch_2.bin", &cifar_file(&[0, 1]));
        let test = scratch.write("c/test_batch.bin", &cifar_file(&[2, 2, 1, 0]));
        let folder = scratch.path().join("c");
        let mut said = Vec::new();
        let opened =
            open(&ImageSpec { held_out: 0.2, ..spec(&folder) }, &mut |line| said.push(line)).unwrap();
        assert_eq!((opened.train.count(), opened.held_out.count(), opened.description.files), (4, 1, 2));
        assert!(matches!(&said[..], [Said::Note(note)] if note.contains("test_batch.bin")), "{said:?}");
        let apart = ImageSpec { held_out_path: vec![test.to_str().unwrap().into()], ..spec(&folder) };
        let apart = open(&apart, &mut |_| panic!("nothing to say")).unwrap();
        assert_eq!((apart.train.count(), apart.held_out.count()), (5, 4));
        assert_eq!(apart.held_out.balance(3), [1, 1, 2]);
        let wrong = scratch.write("other.bin", &cifar_file(&[7]));
        let wrong = ImageSpec { held_out_path: vec![wrong.to_str().unwrap().into()], ..spec(&folder) };
        assert!(open(&wrong, &mut |_| {}).unwrap_err().sentence.contains("an image of class 7"));
    }

    #[test]
    fn what_cannot_be_opened_is_said() {
        let wrong = |spec: ImageSpec| {
            let error = open(&spec, &mut |_| {}).unwrap_err();
            assert!(error.is_input());
            error.sentence
        };
        let default = ImageSpec::default;
        assert!(wrong(ImageSpec { held_out: 1.0, ..default() }).contains("data.held_out=1 is not a share"));
        assert!(wrong(ImageSpec { images: 0, ..default() }).contains("0 images"));
        assert!(wrong(ImageSpec { classes: vec!["a".into()], ..default() }).contains("names 1 classes"));
        let synthetic = ImageSpec { source: ImageSource::Synthetic, path: vec!["x".into()], ..default() };
        assert!(wrong(synthetic).contains("no use for data.path"));
        assert!(wrong(ImageSpec { source: ImageSource::Cifar, ..default() }).contains("data.path is empty"));
        let scratch = Scratch::new("sets-wrong");
        let one = scratch.write("one.bin", &cifar_file(&[3]));
        assert!(wrong(spec(&one)).contains("too few images"));
        assert!(wrong(ImageSpec { label: Some("other".into()), ..spec(&one) }).contains("data.label=other"));
        assert!(wrong(spec(scratch.path().join("none").as_path())).contains("none"));
    }

    #[test]
    fn the_synthetic_set_holds_out_other_draws() {
        let opened = open(&ImageSpec { images: 100, ..ImageSpec::default() }, &mut |_| {}).unwrap();
        assert_eq!((opened.train.count(), opened.held_out.count()), (100, 10));
        assert_eq!(opened.train.balance(10), [10; 10]);
        assert_eq!(opened.held_out.balance(10), [1; 10]);
        assert_ne!(opened.train.mark, opened.held_out.mark);
        assert_eq!(
            opened.description.to_string(),
            "100 images of 10 classes to train on, 10 held out (synthetic)"
        );
    }
}
