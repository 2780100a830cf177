//! Parquet, as far as texts, conversations, labels and images in rows need it.
//!
//! Supports data pages V1 and V2, the codecs snappy, gzip, zstd and none, and the encodings PLAIN, dictionary and DELTA.
//!
//! ```text
//! thrift    the compact protocol of the metadata
//! footer    the schema, and the column chunks
//! page      a page's header, bytes and rows   (levels, delta: encodings of integers)
//! rows      rows assembled from all columns, lists and structures included   (leaf: the values of one column)
//! ```
//!
//! A page is the unit of reading: the largest one bounds the memory, and a row is found again by its page.

mod delta;
mod footer;
mod leaf;
mod levels;
mod page;
mod rows;
mod thrift;

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::ReadOptions;
use super::bytes::Bytes;
use super::fault::{Fault, ReadError, Reason};
use super::stream_format::{Documents, RawDocument};
use footer::Chunk;
use page::{Header, PageKind};

pub(super) use page::Page;
pub(super) use rows::Rows;

const MAGIC: &[u8] = b"PAR1";
/// Largest footer that is read. Real ones have some kilobytes per row group.
const MOST_FOOTER_BYTES: u64 = 256 << 20;
/// Initial read for a page header, whose statistics may make it longer.
const FIRST_HEADER_BYTES: u64 = 1 << 10;
const MOST_HEADER_BYTES: u64 = 16 << 20;

/// A column of an open file.
pub(super) struct Column {
    file: Arc<Bytes>,
    chunks: Vec<Chunk>,
}

/// The column chunks of a column, by row group in order. The metadata of a file is read once for all of them.
#[derive(Clone)]
pub(super) struct RowGroups {
    chunks: Arc<Vec<Chunk>>,
}

impl RowGroups {
    pub fn read(file: Bytes, field: &str) -> Result<Self, ReadError> {
        Ok(Self { chunks: Arc::new(Column::open(file, field)?.chunks) })
    }

    /// Number of rows in all of them.
    pub fn rows(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.rows).sum()
    }

    /// Number of byte ranges of this size in which row groups begin.
    pub fn ranges(&self, bytes: u64) -> u64 {
        self.chunks.iter().map(|chunk| chunk.start / bytes).collect::<BTreeSet<u64>>().len() as u64
    }
}

/// The rows of a column in order.
pub(super) struct Parquet {
    /// Set until the first `next` opens it.
    file: Option<Bytes>,
    field: String,
    max_document_bytes: usize,
    column: Option<Column>,
    chunk: usize,
    /// Offset of the next page of the chunk.
    at: u64,
    dictionary: Option<Page>,
    page: Page,
    /// Offset of the page, and the next row on it.
    page_at: u64,
    next: usize,
    /// Rows before the page, in the file and in the chunk.
    rows_before: u64,
    chunk_rows_before: u64,
}

impl Documents for Parquet {
    fn next(&mut self) -> Result<Option<RawDocument>, ReadError> {
        if let Some(file) = self.file.take() {
            let column = Column::open(file, &self.field)?;
            self.at = column.chunks.first().map_or(0, |chunk| chunk.start);
            self.column = Some(column);
        }
        while self.next == self.page.rows() {
            self.rows_before += self.page.rows() as u64;
            self.chunk_rows_before += self.page.rows() as u64;
            (self.page, self.next) = (Page::default(), 0);
            if !self.next_page()? {
                return Ok(None);
            }
        }
        let (row, at, on_page) = (self.rows_before + self.next as u64 + 1, self.page_at, self.next);
        self.next += 1;
        let fault = |reason, message: &str| Err(Fault::at_row(reason, row, at, message).into());
        let Some(bytes) = self.page.row(on_page) else {
            return fault(Reason::Null, &format!("the column `{}` is null", self.field));
        };
        if bytes.len() > self.max_document_bytes {
            let message = format!("the document is longer than {} bytes", self.max_document_bytes);
            return fault(Reason::TooLong, &message);
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Some(RawDocument {
                text: text.into(),
                line: None,
                row: Some(row),
                at,
                len: on_page as u32,
            })),
            Err(error) => {
                let message = format!("byte {} of the document is not UTF-8", error.valid_up_to());
                fault(Reason::NotUtf8, &message)
            }
        }
    }

    /// Faults have their row already.
    fn position(&self) -> Option<(u64, u64)> {
        None
    }
}

impl Parquet {
    pub fn new(file: Bytes, options: &ReadOptions) -> Self {
        Self { file: Some(file), ..Self::empty(options) }
    }

    fn empty(options: &ReadOptions) -> Self {
        Self {
            file: None,
            field: options.field.clone(),
            max_document_bytes: options.max_document_bytes,
            column: None,
            chunk: 0,
            at: 0,
            dictionary: None,
            page: Page::default(),
            page_at: 0,
            next: 0,
            rows_before: 0,
            chunk_rows_before: 0,
        }
    }

    /// The rows of the row groups whose column chunk begins within `extent`.
    pub fn within(file: Bytes, groups: &RowGroups, extent: Range<u64>, options: &ReadOptions) -> Self {
        let chunks = groups.chunks.iter();
        let rows_before =
            chunks.clone().filter(|chunk| chunk.start < extent.start).map(|chunk| chunk.rows).sum();
        let chunks: Vec<Chunk> = chunks.filter(|chunk| extent.contains(&chunk.start)).cloned().collect();
        let at = chunks.first().map_or(0, |chunk| chunk.start);
        let column = Some(Column { file: Arc::new(file), chunks });
        Self { file: None, column, at, rows_before, ..Self::empty(options) }
    }

    /// Decodes the next page with rows; false at the end of the file. Damage is reported with the row it precedes.
    fn next_page(&mut self) -> Result<bool, ReadError> {
        let (row, at) = (self.rows_before + 1, self.at);
        self.decode_page().map_err(|error| match error {
            ReadError::Invalid(mut fault) => {
                fault.row = Some(row);
                ReadError::Invalid(fault.at_byte(at))
            }
            failed => failed,
        })
    }

    fn decode_page(&mut self) -> Result<bool, ReadError> {
        let Some(column) = &self.column else { return Ok(false) };
        loop {
            let Some(chunk) = column.chunks.get(self.chunk) else { return Ok(false) };
            if self.at >= chunk.end {
                if self.chunk_rows_before != chunk.rows {
                    let (found, stated) = (self.chunk_rows_before, chunk.rows);
                    let message = format!("a row group has {found} rows instead of the {stated} it states");
                    return Err(Fault::file(Reason::Damaged, message).into());
                }
                self.chunk += 1;
                self.chunk_rows_before = 0;
                self.dictionary = None;
                self.at = column.chunks.get(self.chunk).map_or(0, |chunk| chunk.start);
                continue;
            }
            let (header, body) = column.header(chunk, self.at)?;
            self.page_at = self.at;
            self.at = body + header.compressed_bytes as u64;
            match header.kind {
                PageKind::Index => continue,
                // Random access to a page takes the dictionary from the beginning of the chunk, so it is allowed only there.
                PageKind::Dictionary if self.page_at != chunk.start => {
                    let message = "a dictionary does not come first in its row group";
                    return Err(Fault::file(Reason::Damaged, message).into());
                }
                PageKind::Dictionary => {
                    let compressed = column.read(body, header.compressed_bytes)?;
                    self.dictionary = Some(page::dictionary(&header, compressed, chunk.codec)?);
                }
                PageKind::Data | PageKind::DataV2 => {
                    let compressed = column.read(body, header.compressed_bytes)?;
                    let dictionary = self.dictionary.as_ref();
                    self.page = page::data(&header, compressed, chunk.codec, chunk.optional, dictionary)?;
                    if self.page.rows() > 0 {
                        return Ok(true);
                    }
                }
            }
        }
    }
}

impl Column {
    /// Reads the footer and finds the column.
    pub fn open(file: Bytes, field: &str) -> Result<Self, ReadError> {
        let mut column = Self { file: Arc::new(file), chunks: Vec::new() };
        if let Some((footer, data_end)) = column.footer()? {
            column.chunks = footer::chunks(&footer, field, data_end)?;
        }
        Ok(column)
    }

    /// The footer and its offset; `None` in an empty file.
    fn footer(&self) -> Result<Option<(Vec<u8>, u64)>, ReadError> {
        let damaged = |message: &str| Fault::file(Reason::Damaged, message);
        let size = self.file.len()?;
        if size == 0 {
            return Ok(None);
        }
        if size < 12 {
            return Err(damaged("the file is too short to be parquet").into());
        }
        let tail = self.read(size - 8, 8)?;
        if &tail[4..] == b"PARE" {
            return Err(Fault::file(Reason::Unsupported, "the parquet file is encrypted").into());
        }
        if &tail[4..] != MAGIC {
            let begins = self.read(0, 4)? == MAGIC;
            return Err(match begins {
                true => damaged("the parquet file ends too early: its footer is missing"),
                false => damaged("the file is not parquet: it neither begins nor ends with PAR1"),
            }
            .into());
        }
        let len = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
        if len + 12 > size || len > MOST_FOOTER_BYTES {
            return Err(damaged("the footer of the parquet file states a wrong length").into());
        }
        let data_end = size - 8 - len;
        Ok(Some((self.read(data_end, len as usize)?, data_end)))
    }

    /// The page whose header is at `at`, decoded with the dictionary it may need.
    pub fn page(&self, at: u64) -> Result<Page, ReadError> {
        let chunk = self.chunks.iter().find(|chunk| (chunk.start..chunk.end).contains(&at));
        let chunk = chunk.ok_or_else(|| Fault::file(Reason::Damaged, "the page no longer exists"))?;
        let (header, body) = self.header(chunk, at)?;
        let dictionary = match page::needs_dictionary(&header) {
            false => None,
            true => {
                let (header, body) = self.header(chunk, chunk.start)?;
                (header.kind == PageKind::Dictionary)
                    .then(|| {
                        let compressed = self.read(body, header.compressed_bytes)?;
                        page::dictionary(&header, compressed, chunk.codec).map_err(ReadError::from)
                    })
                    .transpose()?
            }
        };
        let compressed = self.read(body, header.compressed_bytes)?;
        Ok(page::data(&header, compressed, chunk.codec, chunk.optional, dictionary.as_ref())?)
    }

    /// The header at `at`, and the offset of the page's bytes.
    fn header(&self, chunk: &Chunk, at: u64) -> Result<(Header, u64), ReadError> {
        let left = chunk.end - at;
        let mut wanted = FIRST_HEADER_BYTES;
        loop {
            let bytes = self.read(at, wanted.min(left) as usize)?;
            if let Some((header, len)) = page::header(&bytes)? {
                let body = at + len as u64;
                if header.compressed_bytes as u64 > chunk.end - body {
                    let message = "a page states more bytes than its column has";
                    return Err(Fault::file(Reason::Damaged, message).into());
                }
                return Ok((header, body));
            }
            if wanted >= left.min(MOST_HEADER_BYTES) {
                return Err(Fault::file(Reason::Damaged, "a page's header ends too early").into());
            }
            wanted *= 8;
        }
    }

    fn read(&self, at: u64, len: usize) -> Result<Vec<u8>, ReadError> {
        let mut bytes = vec![0; len];
        // The pages of a row group are read sequentially.
        let chunk = self.chunks.iter().find(|chunk| (chunk.start..chunk.end).contains(&at));
        let until = chunk.map_or(at + len as u64, |chunk| chunk.end);
        match self.file.read_exact_at(&mut bytes, at, until) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(Fault::file(Reason::Damaged, "the parquet file ends too early").into())
            }
            Err(error) => Err(error.into()),
        }
    }
}
