//! The images of a set: the places of their bytes, their sizes and hashes.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};

use xxhash_rust::xxh3::xxh3_128;

use super::grid::Grid;
use super::patches::patches;
use super::patching::Patching;
use super::pruning::most_salient;
use crate::error::DataError;
use crate::formats::Reason;
use crate::images::{CHANNELS, Flaw, header};

/// An image as a row gives it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Given<'a> {
    /// A path below the folder of images.
    Path(&'a str),
    /// The bytes of a file.
    Bytes(&'a [u8]),
}

/// An encoded image whose header was read.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedImage {
    held: ByteSource,
    pub height: usize,
    pub width: usize,
    pub grid: Grid,
    /// Hash of its bytes.
    pub hash: u128,
}

/// The place of an image's bytes.
#[derive(Debug, Clone, PartialEq)]
enum ByteSource {
    File(PathBuf),
    Memory(Arc<[u8]>),
}

impl EncodedImage {
    /// Its file, unless it was stored in a row.
    pub fn path(&self) -> Option<&Path> {
        match &self.held {
            ByteSource::File(path) => Some(path),
            ByteSource::Memory(_) => None,
        }
    }
}

/// Reads the headers of images. A file that several rows name is read once, and equal bytes are stored once.
pub struct ImageReader {
    pub patching: Patching,
    /// Most pixels of an image.
    pub max_pixels: u64,
    /// Most bytes of a file.
    pub max_bytes: u64,
    known: Mutex<HashMap<PathBuf, Arc<EncodedImage>>>,
    held: Mutex<HashMap<u128, Arc<EncodedImage>>>,
}

impl ImageReader {
    pub fn new(patching: Patching, max_pixels: u64, max_bytes: u64) -> ImageReader {
        ImageReader { patching, max_pixels, max_bytes, known: Mutex::default(), held: Mutex::default() }
    }

    /// Reads an image; paths are relative to `root` and must not lead out of it.
    pub fn read(&self, given: Given<'_>, root: &Path) -> Result<Arc<EncodedImage>, Flaw> {
        match given {
            Given::Bytes(bytes) => self.held(bytes),
            Given::Path(path) => self.read_file(within(path, root)?),
        }
    }

    /// Reads a file in any folder.
    pub fn read_file(&self, path: PathBuf) -> Result<Arc<EncodedImage>, Flaw> {
        if let Some(known) = self.known.lock().expect("no thread panics with it").get(&path) {
            return Ok(known.clone());
        }
        let image = Arc::new(self.read_header(&self.bytes(&path)?, ByteSource::File(path.clone()))?);
        Ok(self.known.lock().expect("no thread panics with it").entry(path).or_insert(image).clone())
    }

    fn held(&self, bytes: &[u8]) -> Result<Arc<EncodedImage>, Flaw> {
        let hash = xxh3_128(bytes);
        if let Some(held) = self.held.lock().expect("no thread panics with it").get(&hash) {
            return Ok(held.clone());
        }
        let image = Arc::new(self.read_header(bytes, ByteSource::Memory(bytes.into()))?);
        Ok(self.held.lock().expect("no thread panics with it").entry(hash).or_insert(image).clone())
    }

    fn bytes(&self, path: &Path) -> Result<Vec<u8>, Flaw> {
        let wrong = |error: std::io::Error| {
            Flaw::new(Reason::NoFile, format!("the image {} cannot be read ({error})", path.display()))
        };
        let about = fs::metadata(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                Flaw::new(Reason::NoFile, format!("there is no image {}", path.display()))
            }
            _ => wrong(error),
        })?;
        if !about.is_file() {
            return Err(Flaw::new(Reason::NoFile, format!("{} is not an image file", path.display())));
        }
        if about.len() > self.max_bytes {
            return Err(Flaw::new(
                Reason::TooManyPixels,
                format!(
                    "the image {} has {} bytes, more than {}",
                    path.display(),
                    about.len(),
                    self.max_bytes
                ),
            ));
        }
        fs::read(path).map_err(wrong)
    }

    fn read_header(&self, bytes: &[u8], held: ByteSource) -> Result<EncodedImage, Flaw> {
        let named = |flaw: Flaw| match &held {
            ByteSource::File(path) => Flaw::new(flaw.reason, format!("{}: {}", path.display(), flaw.said)),
            ByteSource::Memory(_) => flaw,
        };
        let sides = header(bytes, self.max_pixels).map_err(named)?;
        let grid = self.patching.grid(sides.height, sides.width).map_err(named)?;
        Ok(EncodedImage { height: sides.height, width: sides.width, grid, hash: xxh3_128(bytes), held })
    }
}

/// A path relative to a root, out of which neither it nor a link may lead.
fn within(path: &str, root: &Path) -> Result<PathBuf, Flaw> {
    let out = || {
        Flaw::new(
            Reason::ImagePath,
            format!("the image path `{}` leads out of {}", path.escape_debug(), root.display()),
        )
    };
    let is_below = |component: Component| matches!(component, Component::Normal(_) | Component::CurDir);
    if !Path::new(path).components().all(is_below) {
        return Err(out());
    }
    let joined = root.join(path);
    match (joined.canonicalize(), root.canonicalize()) {
        (Ok(real), Ok(root)) if !real.starts_with(&root) => Err(out()),
        _ => Ok(joined),
    }
}

/// Numbered distinct images of a set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ImageStore {
    patching: Patching,
    max_pixels: u64,
    images: Vec<Arc<EncodedImage>>,
    numbers: HashMap<u128, u32>,
}

impl ImageStore {
    pub fn new(patching: Patching, max_pixels: u64) -> ImageStore {
        ImageStore { patching, max_pixels, images: vec![], numbers: HashMap::new() }
    }

    /// The number of an image; equal bytes have equal numbers.
    pub fn number(&mut self, image: &Arc<EncodedImage>) -> u32 {
        let next = self.images.len() as u32;
        let number = *self.numbers.entry(image.hash).or_insert(next);
        if number == next {
            self.images.push(image.clone());
        }
        number
    }

    pub fn count(&self) -> usize {
        self.images.len()
    }

    pub fn get(&self, number: u32) -> &EncodedImage {
        &self.images[number as usize]
    }

    pub fn patching(&self) -> &Patching {
        &self.patching
    }

    /// Bytes per patch.
    pub fn patch_bytes(&self) -> usize {
        self.patching.patch * self.patching.patch * CHANNELS
    }

    /// The name of an image for messages: its file, unless it was stored in a row.
    fn place(&self, number: u32) -> String {
        self.get(number).path().map_or("an image".into(), |path| path.display().to_string())
    }

    /// The bytes of an image, checked to be unchanged since it was first read.
    pub fn bytes(&self, number: u32) -> Result<Cow<'_, [u8]>, DataError> {
        let image = self.get(number);
        let path = match &image.held {
            ByteSource::Memory(bytes) => return Ok(Cow::Borrowed(bytes)),
            ByteSource::File(path) => path,
        };
        let bytes = fs::read(path).map_err(|error| crate::formats::unreadable(path, &error))?;
        if xxh3_128(&bytes) != image.hash {
            return Err(DataError::input(format!(
                "{} has other bytes than when it was first read: images must not change while they are trained on.",
                path.display()
            )));
        }
        Ok(Cow::Owned(bytes))
    }

    /// The merge blocks of an image that a text sees, selected by its patches; `None` where it sees all.
    pub fn shown(&self, number: u32, patches: &[u8]) -> Option<Vec<u32>> {
        let grid = self.get(number).grid;
        let count = self.patching.tokens(grid);
        (count < grid.tokens(self.patching.merge)).then(|| most_salient(patches, grid, &self.patching, count))
    }

    /// Fills `out` with the patches of an image, [P, patch patch 3] bytes.
    pub fn patches(&self, number: u32, out: &mut [u8]) -> Result<(), DataError> {
        let bytes = self.bytes(number)?;
        patches(&bytes, self.get(number).grid, &self.patching, self.max_pixels, out).map_err(|flaw| {
            let place = self.place(number);
            DataError::input(format!("{place}: {}; {}.", flaw.said, flaw.reason.remedy()))
        })
    }
}
