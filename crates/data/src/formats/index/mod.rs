//! An index of the documents of files, which gives random access to them.
//!
//! An entry takes 24 bytes of memory. It has the hash of the document's text, so a document that has changed since it was
//! indexed is an error.

mod cache;

use std::collections::{HashMap, VecDeque};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::UNIX_EPOCH;

use flatout_waits::{self as waits, Unit, Wait};
use rayon::prelude::*;

use super::bytes::Bytes;
use super::fault::{ReadError, Skipped};
use super::find::{Input, is_indexable, unreadable};
use super::parquet::{Column, Page};
use super::place::{Document, SourceLocation};
use super::reader::read;
use super::stream_format::TextOf;
use super::{Format, ReadOptions};
use crate::error::DataError;
use crate::random::{fingerprint, key};

/// Number of files kept open. Others are opened again for each read.
const MOST_OPEN_FILES: usize = 128;
/// Most bytes of decompressed parquet pages that are cached for later reads.
const MOST_PAGE_BYTES: usize = 64 << 20;

pub struct Index {
    options: ReadOptions,
    files: Vec<Indexed>,
    /// The documents of all files, in order.
    extents: Vec<Extent>,
    skipped: Skipped,
    open: Mutex<HashMap<usize, Arc<Open>>>,
    pages: Mutex<VecDeque<(PageKey, Arc<Page>)>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Indexed {
    path: Arc<PathBuf>,
    format: Format,
    version: Version,
    /// End of its documents in `extents`.
    end: usize,
}

/// The state of a file, which changes when the file does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    pub bytes: u64,
    /// Nanoseconds since 1970.
    pub modified: u64,
}

impl Version {
    pub fn of(metadata: &Metadata) -> Self {
        let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Self { bytes: metadata.len(), modified: modified.map_or(0, |time| time.as_nanos() as u64) }
    }
}

/// The place of one document: its bytes in the file, or in parquet its page and its row on the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    at: u64,
    hash: u64,
    len: u32,
    /// The line, or in parquet the row, from 1; saturates at the largest number.
    line: u32,
}

type PageKey = (usize, u64);

enum Open {
    Stream(File, TextOf),
    Parquet(Column),
}

impl Index {
    /// Reads every input once, on all cores. Invalid documents are errors, of which that of the first file is returned, or are
    /// skipped and counted.
    pub fn build(inputs: &[Input], options: &ReadOptions) -> Result<Self, DataError> {
        if let Some(input) = inputs.iter().find(|input| !is_indexable(input)) {
            return Err(DataError::input(format!(
                "{} is compressed or standard input and allows no random access: decompress it to a file first.",
                input.path.display()
            )));
        }
        let wait =
            waits::begin("reading text", Unit::Bytes, Some(inputs.iter().map(|input| input.bytes).sum()));
        // Files after one that failed need not be read; those before it must, as they may fail too and would come first.
        let failed = AtomicUsize::new(usize::MAX);
        let scanned: Vec<Option<Result<Scanned, DataError>>> = inputs
            .par_iter()
            .enumerate()
            .map(|(at, input)| {
                (at <= failed.load(Ordering::Relaxed)).then(|| {
                    let scanned = scan(input, options, &wait);
                    if scanned.is_err() {
                        failed.fetch_min(at, Ordering::Relaxed);
                    }
                    scanned
                })
            })
            .collect();
        let (mut files, mut extents, mut skipped) = (Vec::new(), Vec::new(), Skipped::default());
        for scanned in scanned.into_iter().flatten() {
            let (mut file, found, left_out) = scanned?;
            extents.extend(found);
            file.end = extents.len();
            files.push(file);
            skipped.merge(&left_out);
        }
        extents.shrink_to_fit();
        Ok(Self::new(options.clone(), files, extents, skipped))
    }

    fn new(options: ReadOptions, files: Vec<Indexed>, extents: Vec<Extent>, skipped: Skipped) -> Self {
        let (open, pages) = (Mutex::default(), Mutex::default());
        Self { options, files, extents, skipped, open, pages }
    }

    pub fn count(&self) -> u64 {
        self.extents.len() as u64
    }

    /// Skipped documents of all inputs.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    /// Hash of the text of document `at`, by which it can be split off or found again. Equal texts have equal hashes.
    pub fn hash(&self, at: u64) -> u64 {
        self.extents[at as usize].hash
    }

    /// A number that changes with every text and with their order, but not with names and dates of files.
    pub fn fingerprint(&self) -> u64 {
        self.extents.iter().fold(key(0, self.count()), |hash, extent| key(hash, extent.hash))
    }

    pub fn place(&self, at: u64) -> SourceLocation {
        let (number, extent) = self.extent(at);
        let file = &self.files[number];
        let line = Some(u64::from(extent.line));
        let (line, row) = if file.format == Format::Parquet { (None, line) } else { (line, None) };
        SourceLocation { file: file.path.clone(), line, row, offset: extent.at }
    }

    /// Document `at`, which must be below [`Index::count`]. Threads may read concurrently. A document that has changed since it
    /// was indexed is an error.
    pub fn read(&self, at: u64) -> Result<Document, DataError> {
        let (number, extent) = self.extent(at);
        let place = self.place(at);
        let text = self.text(number, &extent).map_err(|error| match error {
            ReadError::Invalid(_) => changed(&place),
            ReadError::Io(error) if error.kind() == io::ErrorKind::NotFound => {
                DataError::environment(format!("{place}: the file was removed after it was indexed."))
            }
            ReadError::Io(error) => DataError::environment(format!("{place} cannot be read: {error}.")),
        })?;
        match text {
            Some(text) if fingerprint(text.as_bytes()) == extent.hash => Ok(Document { text, place }),
            _ => Err(changed(&place)),
        }
    }

    fn extent(&self, at: u64) -> (usize, Extent) {
        let at = at as usize;
        (self.files.partition_point(|file| file.end <= at), self.extents[at])
    }

    /// The present text of a document; `None` where it is not readable as one.
    fn text(&self, number: usize, extent: &Extent) -> Result<Option<String>, ReadError> {
        let bytes = |file: &File| -> Result<Option<Vec<u8>>, ReadError> {
            let mut bytes = vec![0; extent.len as usize];
            match file.read_exact_at(&mut bytes, extent.at) {
                Ok(()) => Ok(Some(bytes)),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
                Err(error) => Err(error.into()),
            }
        };
        Ok(match &*self.open(number)? {
            Open::Stream(file, text_of) => bytes(file)?.and_then(text_of),
            Open::Parquet(column) => {
                let page = self.page((number, extent.at), column)?;
                let on_page = extent.len as usize;
                let bytes = (on_page < page.rows()).then(|| page.row(on_page)).flatten();
                bytes.and_then(|bytes| String::from_utf8(bytes.to_vec()).ok())
            }
        })
    }

    fn open(&self, number: usize) -> Result<Arc<Open>, ReadError> {
        if let Some(open) = self.open.lock().expect("no reader panics").get(&number) {
            return Ok(open.clone());
        }
        let Indexed { path, format, .. } = &self.files[number];
        let file = File::open(path.as_path())?;
        let open = Arc::new(match format.stream() {
            Some(stream_format) => {
                let text_of = (stream_format.texts)(&file, &self.options)?;
                Open::Stream(file, text_of)
            }
            None => Open::Parquet(Column::open(Bytes::File(file), &self.options.field)?),
        });
        let mut held = self.open.lock().expect("no reader panics");
        if held.len() >= MOST_OPEN_FILES {
            held.clear();
        }
        held.insert(number, open.clone());
        Ok(open)
    }

    fn page(&self, wanted: PageKey, column: &Column) -> Result<Arc<Page>, ReadError> {
        let mut pages = self.pages.lock().expect("no reader panics");
        if let Some(at) = pages.iter().position(|(key, _)| *key == wanted) {
            let found = pages.remove(at).expect("the entry was just found");
            let page = found.1.clone();
            pages.push_front(found);
            return Ok(page);
        }
        drop(pages);
        let page = Arc::new(column.page(wanted.1)?);
        let mut pages = self.pages.lock().expect("no reader panics");
        pages.push_front((wanted, page.clone()));
        while pages.len() > 1 && pages.iter().map(|(_, page)| page.size()).sum::<usize>() > MOST_PAGE_BYTES {
            pages.pop_back();
        }
        Ok(page)
    }
}

type Scanned = (Indexed, Vec<Extent>, Skipped);

fn scan(input: &Input, options: &ReadOptions, wait: &Wait) -> Result<Scanned, DataError> {
    let version = || match std::fs::metadata(&input.path) {
        Ok(metadata) => Ok(Version::of(&metadata)),
        Err(error) => Err(unreadable(&input.path, &error)),
    };
    let before = version()?;
    let mut reader = read(input, options)?;
    let mut extents = Vec::new();
    while let Some(piece) = reader.next_piece()? {
        let line = piece.line.or(piece.row).unwrap_or(0).min(u64::from(u32::MAX)) as u32;
        let hash = fingerprint(piece.text.as_bytes());
        wait.add(piece.text.len() as u64);
        extents.push(Extent { at: piece.at, hash, len: piece.len, line });
    }
    if version()? != before {
        return Err(DataError::environment(format!(
            "{} changed while it was read: start again when it is complete.",
            input.path.display()
        )));
    }
    extents.shrink_to_fit();
    let path = Arc::new(input.path.clone());
    let file = Indexed { path, format: input.format, version: before, end: 0 };
    Ok((file, extents, reader.into_skipped()))
}

fn changed(place: &SourceLocation) -> DataError {
    DataError::environment(format!(
        "{place}: the file changed after it was indexed; put the old one back, or start again with the new one."
    ))
}
