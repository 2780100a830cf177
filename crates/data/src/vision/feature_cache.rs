//! A cache of features: a folder with a tower's output for images, kept between runs.
//!
//! `features-NNNNN.bin` contain the features, those of each image at a multiple of 4096 bytes; `index.json` has their places. A
//! part is written under a temporary name, renamed when complete, and then added to the index, which is replaced atomically.
//! Everything in the index is therefore complete, and a killed process loses at most one part. Only one process writes at a
//! time; any number may read.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::feature_index::{Entry, FILE_NAME, FeatureFormat, FeatureIndex, part_name};
use super::grid::Grid;
use crate::error::DataError;
use crate::examples::layout::MicroBatch;

pub(super) const LOCK: &str = "lock";
/// Limit on the size of an index, which has a few hundred bytes per image.
const MOST_INDEX_BYTES: u64 = 1 << 30;

/// An image whose features are requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedImage {
    /// SHA-256 of its bytes, in hexadecimal digits.
    pub sha256: String,
    /// Its file, unless it is stored in a row.
    pub name: Option<String>,
    pub grid: Grid,
    pub tokens: usize,
}

impl CachedImage {
    pub(super) fn named(&self) -> String {
        self.name.clone().unwrap_or_else(|| format!("the image with SHA-256 {}", self.sha256))
    }
}

/// An open cache.
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureCache {
    pub(super) folder: PathBuf,
    pub(super) index: FeatureIndex,
    /// Part and index of the entry of every image, by SHA-256.
    places: HashMap<String, (usize, usize)>,
}

impl FeatureCache {
    /// Opens the cache in a folder, which may be empty. Refuses features of another format, naming the difference.
    pub fn open(folder: &Path, format: &FeatureFormat) -> Result<FeatureCache, DataError> {
        let path = folder.join(FILE_NAME);
        let again = "give another data.vision_cache, or remove the folder to compute the features again";
        let index = match read_index(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                check_foreign(folder)?;
                FeatureIndex::new(format.clone())
            }
            Err(error) => {
                return Err(DataError::input(format!(
                    "{} cannot be read ({error}): {again}.",
                    path.display()
                )));
            }
            Ok(bytes) => FeatureIndex::parse(&bytes, format)
                .map_err(|wrong| DataError::input(format!("{} {wrong}: {again}.", path.display())))?,
        };
        for part in &index.parts {
            let path = folder.join(&part.file);
            let there = fs::metadata(&path).map_or(0, |about| about.len());
            if there != part.bytes {
                return Err(DataError::input(format!(
                    "{} has {there} bytes, and its index says {}: {again}.",
                    path.display(),
                    part.bytes
                )));
            }
        }
        Ok(FeatureCache::of(folder, index))
    }

    pub(super) fn of(folder: &Path, index: FeatureIndex) -> FeatureCache {
        let mut places = HashMap::new();
        for (number, part) in index.parts.iter().enumerate() {
            let own = part.images.iter().enumerate();
            places.extend(own.map(|(place, entry)| (entry.sha256.clone(), (number, place))));
        }
        FeatureCache { folder: folder.into(), index, places }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Number of images with features.
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// Total size of its parts.
    pub fn bytes(&self) -> u64 {
        self.index.parts.iter().map(|part| part.bytes).sum()
    }

    pub(super) fn entry(&self, sha256: &str) -> Option<(usize, &Entry)> {
        let (part, place) = *self.places.get(sha256)?;
        Some((part, &self.index.parts[part].images[place]))
    }

    /// Indices of the images without features. Refuses files that have changed since their features were computed.
    pub fn missing(&self, images: &[CachedImage]) -> Result<Vec<usize>, DataError> {
        let names = self.index.entries().filter_map(|(_, entry)| entry.name.as_deref());
        let names: HashSet<&str> = names.collect();
        let mut missing = vec![];
        for (number, image) in images.iter().enumerate() {
            match self.entry(&image.sha256) {
                Some((_, entry)) => self.check_grid(image, entry)?,
                None if image.name.as_deref().is_some_and(|name| names.contains(name)) => {
                    return Err(DataError::input(format!(
                        "{} has other bytes than when its features were written to {}: restore the image, give another \
                         data.vision_cache, or remove the folder to compute the features again.",
                        image.named(),
                        self.folder.display()
                    )));
                }
                None => missing.push(number),
            }
        }
        Ok(missing)
    }

    fn check_grid(&self, image: &CachedImage, entry: &Entry) -> Result<(), DataError> {
        let grid = [image.grid.rows, image.grid.columns];
        if (entry.grid, entry.tokens) == (grid, image.tokens) {
            return Ok(());
        }
        Err(DataError::input(format!(
            "{} is cut into {} x {} patches of {} tokens, and its features in {} are of {} x {} and {}: give another \
             data.vision_cache, or remove the folder to compute the features again.",
            image.named(),
            grid[0],
            grid[1],
            image.tokens,
            self.folder.display(),
            entry.grid[0],
            entry.grid[1],
            entry.tokens
        )))
    }

    /// The features of images, by index. All of them must be present.
    pub fn features(&self, images: &[CachedImage]) -> Result<StoredFeatures, DataError> {
        let place = |image: &CachedImage| {
            let found = self.entry(&image.sha256);
            let (part, entry) = found.ok_or_else(|| {
                DataError::environment(format!(
                    "{} has no features of {}.",
                    self.folder.display(),
                    image.named()
                ))
            })?;
            self.check_grid(image, entry)?;
            let hash = u128::from_str_radix(&entry.hash, 16).expect("checked: hexadecimal digits");
            Ok(FeatureLocation {
                part,
                offset: entry.offset,
                tokens: entry.tokens,
                hash,
                name: image.named(),
            })
        };
        Ok(StoredFeatures {
            folder: self.folder.clone(),
            format: self.index.format.clone(),
            places: images.iter().map(place).collect::<Result<_, DataError>>()?,
        })
    }
}

fn read_index(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    File::open(path)?.take(MOST_INDEX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Refuses a folder with other files than features.
pub(super) fn check_foreign(folder: &Path) -> Result<(), DataError> {
    let is_ours = |name: &str| {
        name == LOCK
            || name.starts_with(FILE_NAME)
            || (name.starts_with("features-") && name.contains(".bin"))
    };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| cannot_write(folder, &error))?,
    };
    match entries.flatten().find(|entry| !entry.file_name().to_str().is_some_and(is_ours)) {
        None => Ok(()),
        Some(other) => Err(DataError::input(format!(
            "The folder {} of data.vision_cache holds other things than features (such as {}): give one of its own.",
            folder.display(),
            other.file_name().to_string_lossy()
        ))),
    }
}

pub(super) fn cannot_write(folder: &Path, error: &io::Error) -> DataError {
    DataError::input(format!(
        "The folder {} of data.vision_cache cannot be written to: {error}; give another.",
        folder.display()
    ))
}

/// The place of the features of an image.
#[derive(Debug, Clone, PartialEq)]
struct FeatureLocation {
    part: usize,
    offset: u64,
    tokens: usize,
    hash: u128,
    /// The name of the image, for messages.
    name: String,
}

/// The features of the images of a set, by number, read on demand.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredFeatures {
    folder: PathBuf,
    format: FeatureFormat,
    places: Vec<FeatureLocation>,
}

impl StoredFeatures {
    pub fn format(&self) -> &FeatureFormat {
        &self.format
    }

    /// The features of a micro-batch's images as [levels, rows, row_bytes], padded with zeros to the rows there is room for.
    pub fn of(&self, batch: &MicroBatch, patches_of_a_row: usize) -> Result<Vec<u8>, DataError> {
        let (rows, row) = (batch.image_room.patches / patches_of_a_row, self.format.row_bytes);
        let mut out = vec![0; self.format.levels * rows * row];
        let mut levels: Vec<&mut [u8]> =
            if out.is_empty() { vec![] } else { out.chunks_exact_mut(rows * row).collect() };
        for image in &batch.images {
            let place = &self.places[image.image as usize];
            let bytes = place.tokens * row;
            let mut own = Vec::with_capacity(levels.len());
            levels = levels
                .into_iter()
                .map(|level| {
                    let (first, behind) = level.split_at_mut(bytes);
                    own.push(first);
                    behind
                })
                .collect();
            self.read(place, own)?;
        }
        Ok(out)
    }

    fn read(&self, place: &FeatureLocation, levels: Vec<&mut [u8]>) -> Result<(), DataError> {
        let path = self.folder.join(part_name(place.part));
        let unreadable = |error: io::Error| {
            DataError::environment(format!(
                "The features of {} cannot be read from {} ({error}): a cache must not change while it is trained on.",
                place.name,
                path.display()
            ))
        };
        let file = File::open(&path).map_err(unreadable)?;
        let (mut offset, mut hash) = (place.offset, Xxh3::new());
        for level in levels {
            file.read_exact_at(level, offset).map_err(unreadable)?;
            hash.update(level);
            offset += level.len() as u64;
        }
        if hash.digest128() == place.hash {
            return Ok(());
        }
        Err(DataError::environment(format!(
            "The features of {} in {} are damaged: remove the folder to compute the features again.",
            place.name,
            path.display()
        )))
    }
}
