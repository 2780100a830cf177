//! A page of a parquet column: its header, its decompressed bytes, its values.

use std::io::{Cursor, Read};
use std::ops::Range;

use super::delta;
use super::footer::Codec;
use super::levels;
use super::thrift::{FALSE, I32, STRUCT, TRUE, Thrift, ThriftError};
use crate::formats::fault::{Fault, Reason};
use crate::formats::{Compression, stream};

/// Limits on the decompressed bytes and the values of a page. Writers make pages of about a megabyte; one with a thousand books
/// is still below the limit.
pub(super) const MOST_BYTES: usize = 1 << 30;
const MOST_ROWS: usize = 1 << 22;

#[derive(Debug, Default)]
pub(super) struct Header {
    pub kind: PageKind,
    pub compressed_bytes: usize,
    pub bytes: usize,
    crc: Option<u32>,
    pub values: usize,
    pub encoding: i64,
    pub level_encoding: i64,
    /// Of data pages V2: the length of the definition levels, and whether the values are compressed.
    pub level_bytes: usize,
    pub repetition_bytes: usize,
    pub is_compressed: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageKind {
    #[default]
    Data,
    DataV2,
    Dictionary,
    /// An index page, which has no values.
    Index,
}

pub(super) const PLAIN: i64 = 0;
pub(super) const PLAIN_DICTIONARY: i64 = 2;
pub(super) const RLE: i64 = 3;
const DELTA_LENGTH_BYTE_ARRAY: i64 = 6;
const DELTA_BYTE_ARRAY: i64 = 7;
pub(super) const RLE_DICTIONARY: i64 = 8;

/// The rows of a page, as ranges of its bytes; `None` where a row is null.
#[derive(Debug, Default)]
pub(in crate::formats) struct Page {
    bytes: Vec<u8>,
    rows: Vec<Option<Range<u32>>>,
}

impl Page {
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    pub fn row(&self, at: usize) -> Option<&[u8]> {
        self.rows[at].as_ref().map(|range| &self.bytes[range.start as usize..range.end as usize])
    }

    /// Memory it takes.
    pub fn size(&self) -> usize {
        self.bytes.capacity() + self.rows.capacity() * size_of::<Option<Range<u32>>>()
    }
}

/// Parses the header at the beginning of `bytes` and returns its length; `None` where it continues after them.
pub(super) fn header(bytes: &[u8]) -> Result<Option<(Header, usize)>, Fault> {
    let mut header = Header { is_compressed: true, ..Header::default() };
    let mut kind = -1;
    let (mut bytes_stated, mut compressed_stated, mut values) = (0, 0, 0);
    let (mut level_bytes, mut repetition_bytes) = (0, 0);
    let mut thrift = Thrift::new(bytes);
    let parsed = thrift.structure(|thrift, id, field| {
        match (id, field) {
            (1, I32) => kind = thrift.integer()?,
            (2, I32) => bytes_stated = thrift.integer()?,
            (3, I32) => compressed_stated = thrift.integer()?,
            (4, I32) => header.crc = Some(thrift.integer()? as u32),
            // The headers of a data page, a dictionary page, and a data page V2, whose fields differ.
            (5 | 7, STRUCT) => thrift.structure(|thrift, id, field| {
                match (id, field) {
                    (1, I32) => values = thrift.integer()?,
                    (2, I32) => header.encoding = thrift.integer()?,
                    (3, I32) => header.level_encoding = thrift.integer()?,
                    _ => return Ok(false),
                }
                Ok(true)
            })?,
            (8, STRUCT) => thrift.structure(|thrift, id, field| {
                match (id, field) {
                    (1, I32) => values = thrift.integer()?,
                    (4, I32) => header.encoding = thrift.integer()?,
                    (5, I32) => level_bytes = thrift.integer()?,
                    (6, I32) => repetition_bytes = thrift.integer()?,
                    (7, TRUE) => header.is_compressed = true,
                    (7, FALSE) => header.is_compressed = false,
                    _ => return Ok(false),
                }
                Ok(true)
            })?,
            _ => return Ok(false),
        }
        Ok(true)
    });
    match parsed {
        Ok(()) => {}
        Err(ThriftError::UnexpectedEnd) => return Ok(None),
        Err(ThriftError::Invalid(message)) => {
            return Err(damaged(format!("a page's header is damaged ({message})")));
        }
    }
    header.kind = match kind {
        0 => PageKind::Data,
        1 => PageKind::Index,
        2 => PageKind::Dictionary,
        3 => PageKind::DataV2,
        _ => return Err(damaged("a page has a kind that does not exist")),
    };
    let size = |stated: i64, most: usize| usize::try_from(stated).ok().filter(|stated| *stated <= most);
    for (place, stated, most) in [
        (&mut header.bytes, bytes_stated, MOST_BYTES),
        (&mut header.compressed_bytes, compressed_stated, MOST_BYTES),
        (&mut header.values, values, MOST_ROWS),
        (&mut header.level_bytes, level_bytes, MOST_BYTES),
        (&mut header.repetition_bytes, repetition_bytes, MOST_BYTES),
    ] {
        *place = match size(stated, most) {
            Some(size) => size,
            None if stated < 0 => return Err(damaged("a page states a negative size")),
            None => {
                let message = format!("a page states a size of {stated}; at most {most} is read");
                return Err(Fault::file(Reason::Unsupported, message));
            }
        };
    }
    Ok(Some((header, thrift.at())))
}

/// The values of a dictionary page.
pub(super) fn dictionary(header: &Header, compressed: Vec<u8>, codec: Codec) -> Result<Page, Fault> {
    check(header, &compressed)?;
    if header.encoding != PLAIN && header.encoding != PLAIN_DICTIONARY {
        return Err(unsupported_encoding(header.encoding));
    }
    let bytes = decompress(compressed, codec, header.bytes)?;
    let rows = plain(&bytes, 0, header.values)?.into_iter().map(Some).collect();
    Ok(Page { bytes, rows })
}

/// Whether the values of a page are indices into the dictionary.
pub(super) fn needs_dictionary(header: &Header) -> bool {
    matches!(header.encoding, PLAIN_DICTIONARY | RLE_DICTIONARY)
}

/// The rows of a data page.
pub(super) fn data(
    header: &Header,
    compressed: Vec<u8>,
    codec: Codec,
    optional: bool,
    dictionary: Option<&Page>,
) -> Result<Page, Fault> {
    check(header, &compressed)?;
    let (bytes, levels, values_at) = match header.kind {
        PageKind::DataV2 => {
            let before = header.level_bytes + header.repetition_bytes;
            if before > compressed.len() || before > header.bytes {
                return Err(damaged("a page's levels are longer than the page"));
            }
            let levels = compressed[header.repetition_bytes..before].to_vec();
            let values = compressed[before..].to_vec();
            let codec = if header.is_compressed { codec } else { Codec::None };
            (decompress(values, codec, header.bytes - before)?, optional.then_some(levels), 0)
        }
        _ => {
            let bytes = decompress(compressed, codec, header.bytes)?;
            if !optional {
                (bytes, None, 0)
            } else if header.level_encoding != RLE {
                return Err(unsupported_encoding(header.level_encoding));
            } else {
                let len = bytes.first_chunk().map(|len| u32::from_le_bytes(*len) as usize);
                let levels = len.and_then(|len| bytes.get(4..4usize.checked_add(len)?));
                let levels =
                    levels.ok_or_else(|| damaged("a page's levels are longer than the page"))?.to_vec();
                let values_at = 4 + levels.len();
                (bytes, Some(levels), values_at)
            }
        }
    };
    let present = match &levels {
        None => None,
        Some(levels) => {
            let mut present = Vec::new();
            levels::decode(levels, 1, header.values, |level| present.push(level != 0))
                .ok_or_else(|| damaged("a page's levels end too early"))?;
            Some(present)
        }
    };
    let count = match &present {
        None => header.values,
        Some(present) => present.iter().filter(|present| **present).count(),
    };
    let (bytes, values) = values(header, bytes, values_at, count, dictionary)?;
    let mut values = values.into_iter();
    let rows = match present {
        None => values.map(Some).collect(),
        Some(present) => {
            present.into_iter().map(|present| if present { values.next() } else { None }).collect()
        }
    };
    Ok(Page { bytes, rows })
}

pub(super) type Values = (Vec<u8>, Vec<Range<u32>>);

/// Decodes `count` values that begin at `at` of `bytes`; returns their bytes and ranges.
pub(super) fn values(
    header: &Header,
    bytes: Vec<u8>,
    at: usize,
    count: usize,
    dictionary: Option<&Page>,
) -> Result<Values, Fault> {
    match header.encoding {
        PLAIN => {
            let values = plain(&bytes, at, count)?;
            Ok((bytes, values))
        }
        PLAIN_DICTIONARY | RLE_DICTIONARY => {
            let dictionary =
                dictionary.ok_or_else(|| damaged("a page needs a dictionary, which is missing"))?;
            indexed(&bytes[at..], count, dictionary)
        }
        DELTA_LENGTH_BYTE_ARRAY => {
            let values = delta::lengths(&bytes, at, count);
            let values = values.ok_or_else(|| damaged("a page's lengths are wrong"))?;
            Ok((bytes, values))
        }
        DELTA_BYTE_ARRAY => delta::prefixed(&bytes, at, count, MOST_BYTES)
            .ok_or_else(|| damaged("a page's lengths are wrong")),
        other => Err(unsupported_encoding(other)),
    }
}

fn plain(bytes: &[u8], at: usize, count: usize) -> Result<Vec<Range<u32>>, Fault> {
    let mut values = Vec::new();
    let mut at = at;
    for _ in 0..count {
        let value = (|| {
            let len: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
            let end = (at + 4).checked_add(u32::from_le_bytes(len) as usize)?;
            (end <= bytes.len()).then_some(at + 4..end)
        })();
        let value = value.ok_or_else(|| damaged("a value is longer than its page"))?;
        at = value.end;
        values.push(value.start as u32..value.end as u32);
    }
    Ok(values)
}

/// The values that some indices refer to. Copies only those values of the dictionary.
fn indexed(bytes: &[u8], count: usize, dictionary: &Page) -> Result<Values, Fault> {
    let mut indices = Vec::new();
    if count > 0 {
        let decoded = bytes.split_first().and_then(|(width, rest)| {
            levels::decode(rest, u32::from(*width), count, |index| indices.push(index as usize))
        });
        decoded.ok_or_else(|| damaged("a page's indices end too early"))?;
    }
    let mut places: Vec<Option<Range<u32>>> = vec![None; dictionary.rows()];
    let mut kept = Vec::new();
    let mut values = Vec::with_capacity(count);
    for index in indices {
        let place = places.get_mut(index).ok_or_else(|| damaged("an index is beyond the dictionary"))?;
        let place = place.get_or_insert_with(|| {
            let start = kept.len() as u32;
            kept.extend_from_slice(dictionary.row(index).unwrap_or_default());
            start..kept.len() as u32
        });
        values.push(place.clone());
    }
    Ok((kept, values))
}

pub(super) fn check(header: &Header, compressed: &[u8]) -> Result<(), Fault> {
    let Some(stated) = header.crc else { return Ok(()) };
    let mut crc = flate2::Crc::new();
    crc.update(compressed);
    if crc.sum() != stated {
        return Err(damaged("the checksum of a page is wrong"));
    }
    Ok(())
}

pub(super) fn decompress(compressed: Vec<u8>, codec: Codec, size: usize) -> Result<Vec<u8>, Fault> {
    let wrong = || damaged("a page decompresses to another size than it states");
    let through = |compression, compressed: Vec<u8>| {
        // The stated size is allocated only as far as the compressed size makes it plausible.
        let mut out = Vec::with_capacity(size.min(32 * compressed.len()) + 1);
        let stream = stream::decompress(Box::new(Cursor::new(compressed)), compression);
        match stream.take(size as u64 + 1).read_to_end(&mut out) {
            Ok(_) => Ok(out),
            Err(error) => Err(damaged(format!("a page cannot be decompressed: {error}"))),
        }
    };
    let bytes = match codec {
        Codec::None => compressed,
        Codec::Gzip => through(Compression::Gzip, compressed)?,
        Codec::Zstd if size == 0 && compressed.is_empty() => Vec::new(),
        Codec::Zstd => through(Compression::Zstd, compressed)?,
        Codec::Snappy if size == 0 && compressed.is_empty() => Vec::new(),
        Codec::Snappy => {
            // The size that snappy states is checked before it is allocated: three bytes give at most 64.
            let stated = snap::raw::decompress_len(&compressed).map_err(|_| wrong())?;
            if stated != size || stated / 22 > compressed.len() {
                return Err(wrong());
            }
            let decompressed = snap::raw::Decoder::new().decompress_vec(&compressed);
            decompressed.map_err(|error| damaged(format!("a page cannot be decompressed: {error}")))?
        }
    };
    if bytes.len() != size {
        return Err(wrong());
    }
    Ok(bytes)
}

pub(super) fn damaged(message: impl Into<String>) -> Fault {
    Fault::file(Reason::Damaged, message)
}

pub(super) fn unsupported_encoding(encoding: i64) -> Fault {
    let names = [(4, "BIT_PACKED"), (5, "DELTA_BINARY_PACKED"), (9, "BYTE_STREAM_SPLIT")];
    let name = names.iter().find(|(number, _)| *number == encoding).map_or("unknown", |(_, name)| name);
    Fault::file(Reason::Unsupported, format!("the encoding {name} ({encoding}) is not supported for text"))
}
