//! Opens a specification of images: recognises the kind of source, names the classes, splits training and held-out images.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use super::decode::MAX_PIXELS;
use super::set::ImageSet;
use super::sources::cifar::{self, Cifar, Label};
use super::sources::folder::folder;
use super::sources::found::{self, FoundImages, LabelChoice};
use super::sources::paths::{self, has_ending};
use super::sources::synthetic::{self, Synthetic};
use super::sources::table::{Columns, table};
use super::sources::webdataset::webdataset;
use super::stored::Images;
use crate::error::DataError;
use crate::examples::ClassCount;
use crate::formats::OnError;
use crate::random::{fingerprint, key};
use crate::text::source::OpenEvent;

/// The kind of source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ImageSource {
    /// By the files that the path names; the synthetic set where there is no path.
    #[default]
    Auto,
    Synthetic,
    /// Files of CIFAR-10 or CIFAR-100, binary or in their Python form.
    Cifar,
    /// A folder with one folder per class.
    Folder,
    /// JSONL, CSV or parquet whose rows name images.
    Table,
    /// Tar archives as WebDataset writes them.
    Tar,
}

/// A specification of images: the files to read, and how.
#[derive(Debug, Clone)]
pub struct ImageSpec {
    pub source: ImageSource,
    /// Files and folders.
    pub path: Vec<String>,
    /// Separate images to evaluate on, of the same kind; `held_out` is then ignored.
    pub held_out_path: Vec<String>,
    /// Share of images that is held out from training.
    pub held_out: f64,
    /// Classes in order; taken from the files where the list is empty.
    pub classes: Vec<String>,
    /// The label to use: `fine` or `coarse` in CIFAR-100, the name of a field in tables and JSON.
    pub label: Option<String>,
    /// The field of a table's rows with the path of the image, and the folder that paths are relative to (the table's own by
    /// default).
    pub image: Option<String>,
    pub root: Option<PathBuf>,
    pub on_error: OnError,
    /// Images with more pixels are not decoded.
    pub max_pixels: u64,
    /// Number of images of the synthetic set, their size and seed.
    pub images: u64,
    pub width: usize,
    pub height: usize,
    pub seed: u64,
    /// The folder in which indices of archives are cached.
    pub cache: Option<PathBuf>,
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
            image: None,
            root: None,
            on_error: OnError::Fail,
            max_pixels: MAX_PIXELS,
            images: 20_000,
            width: 32,
            height: 32,
            seed: 0,
            cache: None,
        }
    }
}

/// Training and held-out images.
#[derive(Debug, Clone)]
pub struct ImageSets {
    pub train: Arc<ImageSet>,
    pub held_out: Arc<ImageSet>,
    /// Class names in order.
    pub classes: Vec<String>,
    pub description: ImageDescription,
}

/// Statistics of an opened set.
#[derive(Debug, Clone, Serialize)]
pub struct ImageDescription {
    /// `synthetic`, `CIFAR`, `folder`, `table` or `WebDataset`.
    pub kind: &'static str,
    pub files: usize,
    pub train: u64,
    pub held_out: u64,
    pub classes: Vec<ClassCount>,
    /// Unusable images by reason: the reason, their number, and the place of the first.
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

/// Opens images, and reports skipped ones. Finds everything that can be found wrong without decoding every image.
pub fn open(spec: &ImageSpec, say: &mut dyn FnMut(OpenEvent)) -> Result<ImageSets, DataError> {
    if !(0.0..1.0).contains(&spec.held_out) {
        return Err(DataError::input(format!(
            "data.held_out={} is not a share: give 0 or more, below 1.",
            spec.held_out
        )));
    }
    let mut sets = match (spec.source, spec.path.is_empty()) {
        (ImageSource::Auto | ImageSource::Synthetic, true) => synthetic(spec),
        (ImageSource::Synthetic, false) => {
            Err(DataError::input("The synthetic set has no use for data.path: leave one of them out."))
        }
        (_, true) => Err(DataError::input("data.path is empty: give files or a folder.")),
        (source, false) => match if source == ImageSource::Auto { settled(&spec.path)? } else { source } {
            ImageSource::Cifar => cifar(spec, say),
            source => encoded(spec, source, say),
        },
    }?;
    for set in [&mut sets.train, &mut sets.held_out] {
        let set = Arc::get_mut(set).expect("nobody else has it yet");
        (set.on_error, set.max_pixels) = (spec.on_error, spec.max_pixels);
    }
    Ok(sets)
}

pub(super) const TABLES: [&str; 8] = ["jsonl", "ndjson", "csv", "tsv", "parquet", "pq", "gz", "zst"];

/// Recognises the kind of source that the first entry names.
fn settled(words: &[String]) -> Result<ImageSource, DataError> {
    let path = Path::new(&words[0]);
    if !path.is_dir() {
        if cifar::is_cifar(path)? {
            return Ok(ImageSource::Cifar);
        }
        let source = [(&["tar"][..], ImageSource::Tar), (&TABLES, ImageSource::Table)];
        let found = source.into_iter().find(|(endings, _)| has_ending(path, endings));
        return found.map(|(_, source)| source).ok_or_else(|| {
            DataError::input(format!(
                "{} is not a known source of images: give .tar archives, files of CIFAR, a .jsonl, .csv or .parquet \
                 table that names images, or a folder with one folder per class.",
                words[0]
            ))
        });
    }
    let has_archives = paths::entries(path)?.iter().any(|path| has_ending(path, &["tar"]));
    Ok(match (has_archives, cifar::is_cifar(path)?) {
        (true, _) => ImageSource::Tar,
        (false, true) => ImageSource::Cifar,
        (false, false) => ImageSource::Folder,
    })
}

/// Scans a source of encoded images.
fn scan(
    words: &[String],
    source: ImageSource,
    spec: &ImageSpec,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<FoundImages, DataError> {
    let wanted = LabelChoice::Label(spec.label.as_deref());
    match source {
        ImageSource::Tar => {
            let paths = paths::files(words, &["tar"])?;
            webdataset(&paths, wanted, spec.on_error, spec.cache.as_deref())
        }
        ImageSource::Table => {
            let columns = Columns { image: spec.image.as_deref(), wanted, root: spec.root.as_deref() };
            table(words, &columns, spec.on_error)
        }
        _ => match words {
            [root] if Path::new(root).is_dir() => folder(Path::new(root), spec.on_error, say),
            _ => Err(DataError::input(format!(
                "{} is not a folder: give one with a folder per class.",
                words.join(", ")
            ))),
        },
    }
}

fn encoded(
    spec: &ImageSpec,
    source: ImageSource,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<ImageSets, DataError> {
    let shown = spec.path.join(", ");
    let found = scan(&spec.path, source, spec, say)?;
    let classes = found::classes(&spec.classes, &found, &shown)?;
    let (kind, files, mut skipped) = (found.kind, found.files, found.skipped.clone());
    let (train, held_out) = if spec.held_out_path.is_empty() {
        let hashes = found.hashes.clone();
        sides(found.set(&classes, spec.max_pixels)?, &hashes, spec.held_out, &shown)?
    } else {
        let separate = scan(&spec.held_out_path, source, spec, say)?;
        skipped.merge(&separate.skipped);
        (found.set(&classes, spec.max_pixels)?, separate.set(&classes, spec.max_pixels)?)
    };
    let mut sets = sets(kind, files, train, held_out, classes.names);
    if skipped.total() > 0 {
        say(OpenEvent::LeftOut(skipped.to_string()));
    }
    sets.description.unusable = skipped
        .reasons()
        .map(|(reason, count, place)| (reason.to_string(), count, place.to_string()))
        .collect();
    Ok(sets)
}

fn synthetic(spec: &ImageSpec) -> Result<ImageSets, DataError> {
    if spec.images == 0 || spec.width == 0 || spec.height == 0 {
        return Err(DataError::input(format!(
            "A synthetic set of {} images of {} x {} pixels is empty: give at least 1 of each.",
            spec.images, spec.width, spec.height
        )));
    }
    let names: Vec<String> = synthetic::CLASSES.map(String::from).into();
    let count = names.len() as u32;
    let (classes, numbers) = agreed(&spec.classes, names, "the synthetic set")?;
    if !numbers.into_iter().eq(0..count) {
        return Err(DataError::input(
            "data.classes has the names of the synthetic set in another order: give them as they are, or others.",
        ));
    }
    // The sides are separate draws, so that the size of one does not affect the other.
    let side = |count: u64, number: u64| {
        let seed = key(key(0x5e7, spec.seed), number);
        let images = Synthetic { count, width: spec.width, height: spec.height, seed };
        let mark = [seed, count, spec.width as u64, spec.height as u64].into_iter().fold(0, key);
        ImageSet::whole(Arc::new(images), mark)
    };
    let held_out =
        if spec.held_out == 0.0 { 0 } else { (spec.images as f64 * spec.held_out).round().max(1.0) as u64 };
    Ok(sets("synthetic", 0, side(spec.images, 0), side(held_out, 1), classes))
}

fn cifar(spec: &ImageSpec, say: &mut dyn FnMut(OpenEvent)) -> Result<ImageSets, DataError> {
    let label = match spec.label.as_deref() {
        None | Some("fine") => Label::Fine,
        Some("coarse") => Label::Coarse,
        Some(other) => {
            return Err(DataError::input(format!(
                "data.label={other} is not a label of CIFAR: give fine or coarse, or leave it out."
            )));
        }
    };
    let mut paths = cifar::files(&spec.path)?;
    let is_test =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"test"));
    // In a folder, test images come with the others. Named by themselves, they are the requested images.
    let is_named = |path: &PathBuf| spec.path.iter().any(|word| Path::new(word) == path);
    let (left, kept) = paths.drain(..).partition(|path| is_test(path) && !is_named(path));
    paths = kept;
    let left: Vec<PathBuf> = left;
    if let (Some(test), true) = (left.first(), spec.held_out_path.is_empty()) {
        say(OpenEvent::Note(format!(
            "{} is not used; data.held_out_path={} evaluates on it",
            test.display(),
            test.display()
        )));
    }
    if paths.is_empty() {
        return Err(DataError::input(format!(
            "There is no file of CIFAR to train on in {}: check data.path.",
            spec.path.join(", ")
        )));
    }
    let mut images = Cifar::read(&paths, label)?;
    let shown = paths[0].display().to_string();
    let found = images.classes(label)?;
    let labels = found.len();
    let (classes, numbers) = agreed(&spec.classes, found, &shown)?;
    let numbers = (!numbers.iter().copied().eq(0..labels as u32)).then_some(numbers);
    images.renumber(numbers.clone());
    let (files, hash, count) = (paths.len(), images.hash, images.count());
    if spec.held_out_path.is_empty() {
        let (train, held_out) = sides(
            ImageSet::whole(Arc::new(images), hash),
            &(0..count).map(hash_of_index).collect::<Vec<_>>(),
            spec.held_out,
            &shown,
        )?;
        return Ok(sets("CIFAR", files, train, held_out, classes));
    }
    let mut separate = Cifar::read(&cifar::files(&spec.held_out_path)?, label)?;
    if usize::from(separate.most) >= labels {
        return Err(DataError::input(format!(
            "{} has an image of class {}, and {shown} has the classes 0 to {}: give images of the same classes.",
            spec.held_out_path.join(", "),
            separate.most,
            labels - 1
        )));
    }
    separate.renumber(numbers);
    let whole = |images: Cifar| {
        let hash = images.hash;
        ImageSet::whole(Arc::new(images), hash)
    };
    Ok(sets("CIFAR", files, whole(images), whole(separate), classes))
}

/// The given classes, or the ones found, with the class of every label: the one with its name or, where no name matches, its
/// own number. At least as many must be given as were found.
fn agreed(given: &[String], found: Vec<String>, shown: &str) -> Result<(Vec<String>, Vec<u32>), DataError> {
    let own = (0..found.len() as u32).collect();
    if given.is_empty() {
        return Ok((found, own));
    }
    if given.len() < found.len() {
        return Err(DataError::input(format!(
            "data.classes names {} classes, and {shown} has {}: name all of them, in order.",
            given.len(),
            found.len()
        )));
    }
    let places: Vec<Option<usize>> =
        found.iter().map(|name| given.iter().position(|given| given == name)).collect();
    if let Some(numbers) = places.iter().map(|place| place.map(|place| place as u32)).collect() {
        return Ok((given.to_vec(), numbers));
    }
    match places.iter().enumerate().find(|(at, place)| place.is_some_and(|place| place != *at)) {
        Some((at, _)) => Err(DataError::input(format!(
            "data.classes has `{}` at another position than {shown}, and does not name all of its classes: name all of them.",
            found[at]
        ))),
        None => Ok((given.to_vec(), own)),
    }
}

fn hash_of_index(index: u64) -> u64 {
    key(fingerprint(b"held out"), index)
}

/// The sides of a set: the requested share of images, those with the smallest hashes, is held out. Images with equal hashes are
/// on the same side.
fn sides(
    whole: ImageSet,
    hashes: &[u64],
    share: f64,
    shown: &str,
) -> Result<(ImageSet, ImageSet), DataError> {
    let side = |selection: Vec<u64>| ImageSet {
        mark: key(whole.mark, share.to_bits()),
        selection: Some(Arc::new(selection)),
        ..whole.clone()
    };
    let all = hashes.len() as u64;
    if share == 0.0 {
        return Ok((side((0..all).collect()), side(Vec::new())));
    }
    let mut sorted = hashes.to_vec();
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
    fn test_images_of_a_folder_are_ignored_unless_named() {
        let scratch = Scratch::new("sets-test");
        scratch.write("c/data_batch_1.bin", &cifar_file(&[0, 1, 2]));
        scratch.write("c/data_batch_2.bin", &cifar_file(&[0, 1]));
        let test = scratch.write("c/test_batch.bin", &cifar_file(&[2, 2, 1, 0]));
        let folder = scratch.path().join("c");
        let mut events = Vec::new();
        let opened =
            open(&ImageSpec { held_out: 0.2, ..spec(&folder) }, &mut |line| events.push(line)).unwrap();
        assert_eq!((opened.train.count(), opened.held_out.count(), opened.description.files), (4, 1, 2));
        assert!(
            matches!(&events[..], [OpenEvent::Note(note)] if note.contains("test_batch.bin")),
            "{events:?}"
        );
        let separate = ImageSpec { held_out_path: vec![test.to_str().unwrap().into()], ..spec(&folder) };
        let separate = open(&separate, &mut |_| panic!("nothing to say")).unwrap();
        assert_eq!((separate.train.count(), separate.held_out.count()), (5, 4));
        assert_eq!(separate.held_out.balance(3), [1, 1, 2]);
        let wrong = scratch.write("other.bin", &cifar_file(&[7]));
        let wrong = ImageSpec { held_out_path: vec![wrong.to_str().unwrap().into()], ..spec(&folder) };
        assert!(open(&wrong, &mut |_| {}).unwrap_err().sentence.contains("an image of class 7"));
    }

    #[test]
    fn classes_that_are_given_are_matched_by_name() {
        let scratch = Scratch::new("sets-names");
        scratch.write("c/batches.meta.txt", b"cat\ndog\n\n");
        scratch.write("c/data_batch_1.bin", &cifar_file(&[0, 1, 1, 0]));
        let folder = scratch.path().join("c");
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let classes = |given: &[&str]| {
            let spec = ImageSpec { classes: names(given), held_out: 0.0, ..spec(&folder) };
            open(&spec, &mut |_| {})
                .map(|opened| (0..4).map(|at| opened.train.class(at).unwrap()).collect::<Vec<_>>())
        };
        assert_eq!(classes(&[]).unwrap(), [0, 1, 1, 0]);
        assert_eq!(classes(&["dog", "owl", "cat"]).unwrap(), [2, 0, 0, 2]);
        assert_eq!(classes(&["one", "other"]).unwrap(), [0, 1, 1, 0], "other names for the same numbers");
        let refused = classes(&["dog", "owl"]).unwrap_err().sentence;
        assert!(refused.contains("`dog` at another position"), "{refused}");
    }

    #[test]
    fn unusable_image_sources_are_named() {
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
