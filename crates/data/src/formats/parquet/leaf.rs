//! The values of one leaf column of a parquet file in order, with their repetition and definition levels.

use super::footer::{BYTE_ARRAY, Chunk, Codec};
use super::page::{self, Header, Page, PageKind, damaged, unsupported_encoding};
use super::{Column, delta, levels};
use crate::formats::fault::{Fault, ReadError, Reason};
use crate::formats::field::Field;

pub(super) const BOOLEAN: i64 = 0;
pub(super) const INT32: i64 = 1;
pub(super) const INT64: i64 = 2;
pub(super) const FLOAT: i64 = 4;
pub(super) const DOUBLE: i64 = 5;
const DELTA_BINARY_PACKED: i64 = 5;

/// One value; `None` for bytes that are not UTF-8, in a column of texts.
type Value = Option<Field>;

/// A leaf column, read page by page.
pub(super) struct Leaf {
    column: Column,
    kind: i64,
    /// Whether values that are not UTF-8 are returned as bytes.
    has_bytes: bool,
    /// Maximum repetition and definition level.
    max_repetition_level: u8,
    pub max_definition_level: u8,
    /// Offset of the next page, and the chunk that contains it.
    at: u64,
    chunk: usize,
    dictionary: Option<Dictionary>,
    page: Entries,
    next: usize,
}

enum Dictionary {
    Texts(Page),
    Others(Vec<Field>),
}

/// The levels of a page, and the values of the entries that have one.
#[derive(Default)]
struct Entries {
    repeated: Vec<u8>,
    defined: Vec<u8>,
    values: std::vec::IntoIter<Value>,
}

impl Leaf {
    pub fn new(
        column: Column,
        kind: i64,
        has_bytes: bool,
        max_repetition_level: u8,
        max_definition_level: u8,
    ) -> Self {
        Self {
            column,
            kind,
            has_bytes,
            max_repetition_level,
            max_definition_level,
            at: 0,
            chunk: 0,
            dictionary: None,
            page: Entries::default(),
            next: 0,
        }
    }

    /// Seeks to the beginning of a row group.
    pub fn begin(&mut self, group: usize) -> Result<(), ReadError> {
        let chunk = self.column.chunks.get(group);
        let chunk = chunk.ok_or_else(|| damaged("a column has fewer row groups than another"))?;
        (self.chunk, self.at, self.dictionary) = (group, chunk.start, None);
        (self.page, self.next) = (Entries::default(), 0);
        Ok(())
    }

    /// Whether the row group is exhausted.
    pub fn is_done(&mut self) -> Result<bool, ReadError> {
        Ok(!self.fill()?)
    }

    /// The repetition and the definition level of the next entry.
    pub fn levels(&mut self) -> Result<(u8, u8), ReadError> {
        if !self.fill()? {
            return Err(damaged("a column ends before the others").into());
        }
        Ok((self.page.repeated[self.next], self.page.defined[self.next]))
    }

    /// Takes the next entry, and its value where it has one.
    pub fn take(&mut self) -> Result<Option<Value>, ReadError> {
        let (_, defined) = self.levels()?;
        self.next += 1;
        Ok((defined == self.max_definition_level)
            .then(|| self.page.values.next().expect("a page has a value for each such entry")))
    }

    /// Makes the next entry available; false at the end of the row group.
    fn fill(&mut self) -> Result<bool, ReadError> {
        while self.next == self.page.defined.len() {
            let chunk = &self.column.chunks[self.chunk];
            if self.at >= chunk.end {
                return Ok(false);
            }
            let (header, body) = self.column.header(chunk, self.at)?;
            let is_first = self.at == chunk.start;
            self.at = body + header.compressed_bytes as u64;
            if header.kind == PageKind::Index {
                continue;
            }
            let compressed = self.column.read(body, header.compressed_bytes)?;
            match header.kind {
                PageKind::Dictionary if !is_first => {
                    return Err(damaged("a dictionary does not come first in its row group").into());
                }
                PageKind::Dictionary => {
                    self.dictionary = Some(self.dictionary(&header, compressed, chunk.codec)?)
                }
                _ => {
                    self.page = self.entries(&header, compressed, chunk)?;
                    self.next = 0;
                }
            }
        }
        Ok(true)
    }

    fn dictionary(&self, header: &Header, compressed: Vec<u8>, codec: Codec) -> Result<Dictionary, Fault> {
        if self.kind == BYTE_ARRAY {
            return Ok(Dictionary::Texts(page::dictionary(header, compressed, codec)?));
        }
        page::check(header, &compressed)?;
        let bytes = page::decompress(compressed, codec, header.bytes)?;
        Ok(Dictionary::Others(plain(self.kind, &bytes, header.values)?))
    }

    fn entries(&self, header: &Header, compressed: Vec<u8>, chunk: &Chunk) -> Result<Entries, Fault> {
        page::check(header, &compressed)?;
        let too_long = || damaged("a page's levels are longer than the page");
        let (repeated, defined, bytes, at) = match header.kind {
            PageKind::DataV2 => {
                let before = header.level_bytes + header.repetition_bytes;
                if before > compressed.len() || before > header.bytes {
                    return Err(too_long());
                }
                let repeated = decoded(
                    &compressed[..header.repetition_bytes],
                    self.max_repetition_level,
                    header.values,
                )?;
                let defined = decoded(
                    &compressed[header.repetition_bytes..before],
                    self.max_definition_level,
                    header.values,
                )?;
                let codec = if header.is_compressed { chunk.codec } else { Codec::None };
                let bytes = page::decompress(compressed[before..].to_vec(), codec, header.bytes - before)?;
                (repeated, defined, bytes, 0)
            }
            _ => {
                if self.max_definition_level > 0 && header.level_encoding != page::RLE {
                    return Err(unsupported_encoding(header.level_encoding));
                }
                let bytes = page::decompress(compressed, chunk.codec, header.bytes)?;
                let mut at = 0;
                let mut levels = |most: u8| {
                    if most == 0 {
                        return decoded(&[], 0, header.values);
                    }
                    let len = bytes.get(at..at + 4).and_then(|len| <[u8; 4]>::try_from(len).ok());
                    let len = len.map(|len| u32::from_le_bytes(len) as usize).ok_or_else(too_long)?;
                    let end = (at + 4).checked_add(len).filter(|end| *end <= bytes.len());
                    let end = end.ok_or_else(too_long)?;
                    let levels = decoded(&bytes[at + 4..end], most, header.values)?;
                    at = end;
                    Ok(levels)
                };
                let (repeated, defined) =
                    (levels(self.max_repetition_level)?, levels(self.max_definition_level)?);
                (repeated, defined, bytes, at)
            }
        };
        let count = defined.iter().filter(|level| **level == self.max_definition_level).count();
        let values = self.values(header, bytes, at, count)?.into_iter();
        Ok(Entries { repeated, defined, values })
    }

    fn values(&self, header: &Header, bytes: Vec<u8>, at: usize, count: usize) -> Result<Vec<Value>, Fault> {
        if self.kind == BYTE_ARRAY {
            let texts = match &self.dictionary {
                Some(Dictionary::Texts(texts)) => Some(texts),
                _ => None,
            };
            let (bytes, places) = page::values(header, bytes, at, count, texts)?;
            let text = |place: std::ops::Range<u32>| {
                let bytes = &bytes[place.start as usize..place.end as usize];
                match std::str::from_utf8(bytes) {
                    Ok(text) => Some(Field::from(text)),
                    Err(_) => self.has_bytes.then(|| Field::Bytes(bytes.into())),
                }
            };
            return Ok(places.into_iter().map(text).collect());
        }
        let bytes = &bytes[at..];
        let early = || damaged("a page's values end too early");
        let fields = match header.encoding {
            page::PLAIN => plain(self.kind, bytes, count)?,
            page::PLAIN_DICTIONARY | page::RLE_DICTIONARY if count == 0 => Vec::new(),
            page::PLAIN_DICTIONARY | page::RLE_DICTIONARY => {
                let Some(Dictionary::Others(known)) = &self.dictionary else {
                    return Err(damaged("a page needs a dictionary, which is missing"));
                };
                let (width, rest) = bytes.split_first().ok_or_else(early)?;
                let mut fields = Vec::new();
                let mut is_beyond = false;
                levels::decode(rest, u32::from(*width), count, |index| match known.get(index as usize) {
                    Some(field) => fields.push(field.clone()),
                    None => is_beyond = true,
                })
                .ok_or_else(early)?;
                if is_beyond {
                    return Err(damaged("an index is beyond the dictionary"));
                }
                fields
            }
            page::RLE if self.kind == BOOLEAN => {
                let mut fields = Vec::new();
                let runs = bytes.get(4..).ok_or_else(early)?;
                levels::decode(runs, 1, count, |bit| fields.push(Field::Bool(bit == 1))).ok_or_else(early)?;
                fields
            }
            DELTA_BINARY_PACKED if matches!(self.kind, INT32 | INT64) => {
                let whole = delta::integers(bytes, &mut 0, count).ok_or_else(early)?;
                whole.into_iter().map(|value| Field::Whole(value.into())).collect()
            }
            other => return Err(unsupported_encoding(other)),
        };
        Ok(fields.into_iter().map(Some).collect())
    }
}

/// `count` levels of at most `most`.
fn decoded(bytes: &[u8], most: u8, count: usize) -> Result<Vec<u8>, Fault> {
    if most == 0 {
        return Ok(vec![0; count]);
    }
    let width = 8 - most.leading_zeros();
    let mut levels = Vec::new();
    let mut is_beyond = false;
    levels::decode(bytes, width, count, |level| {
        is_beyond |= level > u32::from(most);
        levels.push(level as u8);
    })
    .ok_or_else(|| damaged("a page's levels end too early"))?;
    if is_beyond {
        return Err(damaged("a page has a level beyond its schema"));
    }
    Ok(levels)
}

/// Decodes `count` PLAIN values of a fixed size.
fn plain(kind: i64, bytes: &[u8], count: usize) -> Result<Vec<Field>, Fault> {
    let size = match kind {
        BOOLEAN => {
            let bit = |at: usize| Some(Field::Bool(bytes.get(at / 8)? >> (at % 8) & 1 == 1));
            let bits: Option<Vec<Field>> = (0..count).map(bit).collect();
            return bits.ok_or_else(|| damaged("a page's values end too early"));
        }
        INT32 | FLOAT => 4,
        INT64 | DOUBLE => 8,
        _ => return Err(Fault::file(Reason::Unsupported, "a column has an unsupported type")),
    };
    if count.checked_mul(size).is_none_or(|wanted| wanted > bytes.len()) {
        return Err(damaged("a page's values end too early"));
    }
    let value = |bytes: &[u8]| match kind {
        INT32 => Field::Whole(i32::from_le_bytes(bytes.try_into().expect("4 bytes")).into()),
        INT64 => Field::Whole(i64::from_le_bytes(bytes.try_into().expect("8 bytes")).into()),
        FLOAT => Field::Number(f32::from_le_bytes(bytes.try_into().expect("4 bytes")).into()),
        _ => Field::Number(f64::from_le_bytes(bytes.try_into().expect("8 bytes"))),
    };
    Ok(bytes.chunks_exact(size).take(count).map(value).collect())
}
