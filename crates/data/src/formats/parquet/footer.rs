//! The footer of a parquet file: its schema, and the column chunks of the requested column.

use super::thrift::{BINARY, I32, I64, LIST, STRUCT, Thrift, ThriftError};
use crate::formats::fault::{Fault, Reason};

/// A column chunk: a column's part of a row group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Start and end of its pages in the file.
    pub start: u64,
    pub end: u64,
    pub rows: u64,
    pub codec: Codec,
    /// Whether values may be null, so that pages have definition levels.
    pub optional: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codec {
    None,
    Snappy,
    Gzip,
    Zstd,
}

/// Names of codecs by their number in the format, and the supported ones.
const CODECS: [(&str, Option<Codec>); 8] = [
    ("none", Some(Codec::None)),
    ("snappy", Some(Codec::Snappy)),
    ("gzip", Some(Codec::Gzip)),
    ("lzo", None),
    ("brotli", None),
    ("lz4", None),
    ("zstd", Some(Codec::Zstd)),
    ("lz4_raw", None),
];

const TYPES: [&str; 8] =
    ["BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"];
pub(super) const BYTE_ARRAY: i64 = 6;
pub(super) const REPEATED: i64 = 2;
pub(super) const OPTIONAL: i64 = 1;

#[derive(Default)]
pub(super) struct Element {
    pub name: String,
    pub kind: Option<i64>,
    pub repetition: i64,
    pub children: i64,
    pub converted: Option<i64>,
    /// The field id in the union of logical types.
    pub logical: Option<i16>,
}

impl Element {
    /// Its kind, for messages.
    fn described(&self) -> String {
        match self.kind.and_then(|kind| TYPES.get(usize::try_from(kind).ok()?)) {
            Some(kind) => kind.to_string(),
            None => "a group of columns".into(),
        }
    }

    /// Strings, enumerations, JSON, and byte arrays without annotation.
    pub fn is_text(&self) -> bool {
        self.kind == Some(BYTE_ARRAY)
            && matches!(self.converted, None | Some(0 | 4 | 19))
            && matches!(self.logical, None | Some(1 | 4 | 12))
    }

    /// Byte arrays without annotation: a text, or binary data such as images.
    pub fn may_be_bytes(&self) -> bool {
        self.kind == Some(BYTE_ARRAY) && self.converted.is_none() && self.logical.is_none()
    }
}

#[derive(Default)]
pub(super) struct Group {
    pub rows: i64,
    columns: Vec<Column>,
}

#[derive(Default)]
struct Column {
    elsewhere: bool,
    encrypted: bool,
    kind: i64,
    path: Vec<String>,
    codec: i64,
    compressed_bytes: i64,
    data_offset: i64,
    dictionary_offset: i64,
}

/// The chunks of `field` in order, checked not to overlap. `bytes` is the footer, `data_end` its offset in the file.
pub(super) fn chunks(bytes: &[u8], field: &str, data_end: u64) -> Result<Vec<Chunk>, Fault> {
    let (schema, groups) = schema_and_groups(bytes)?;
    let element = column(&schema, field)?;
    column_chunks(
        &groups,
        std::slice::from_ref(&element.name),
        BYTE_ARRAY,
        element.repetition == OPTIONAL,
        data_end,
    )
}

/// The elements of the schema in order, and the row groups.
pub(super) fn schema_and_groups(bytes: &[u8]) -> Result<(Vec<Element>, Vec<Group>), Fault> {
    parse(bytes).map_err(|bad| match bad {
        ThriftError::UnexpectedEnd => {
            Fault::file(Reason::Damaged, "the footer of the parquet file ends too early")
        }
        ThriftError::Invalid(message) => {
            Fault::file(Reason::Damaged, format!("the footer of the parquet file is damaged ({message})"))
        }
    })
}

/// The chunks of the column at a path of the schema, one per row group with rows, checked not to overlap.
pub(super) fn column_chunks(
    groups: &[Group],
    path: &[String],
    kind: i64,
    optional: bool,
    data_end: u64,
) -> Result<Vec<Chunk>, Fault> {
    // A row group without rows has no pages and states no offsets.
    let groups = groups.iter().enumerate().filter(|(_, group)| group.rows != 0);
    let chunks: Vec<Chunk> = groups
        .map(|(at, group)| chunk(at, group, path, kind, optional, data_end))
        .collect::<Result<_, _>>()?;
    let mut places: Vec<(u64, u64)> = chunks.iter().map(|chunk| (chunk.start, chunk.end)).collect();
    places.sort_unstable();
    if places.windows(2).any(|two| two[1].0 < two[0].1) {
        return Err(Fault::file(Reason::Damaged, "two row groups of the parquet file overlap"));
    }
    Ok(chunks)
}

/// The top-level column with this name, if it holds text.
fn column<'s>(schema: &'s [Element], field: &str) -> Result<&'s Element, Fault> {
    let damaged =
        |message: &str| Fault::file(Reason::Damaged, format!("the schema of the parquet file {message}"));
    let root = schema.first().ok_or_else(|| damaged("is empty"))?;
    let mut top = Vec::new();
    let mut at = 1;
    for _ in 0..root.children {
        top.push(schema.get(at).ok_or_else(|| damaged("ends too early"))?);
        at = subtree_end(schema, at).ok_or_else(|| damaged("ends too early"))?;
    }
    let texts: Vec<String> = top
        .iter()
        .filter(|e| e.is_text() && e.repetition != REPEATED)
        .take(12)
        .map(|e| format!("`{}`", e.name))
        .collect();
    let others = match texts.len() {
        0 => "no column of it holds text".to_string(),
        _ => format!("columns with text are {}", texts.join(", ")),
    };
    let wrong = |message: String| Err(Fault::file(Reason::Schema, format!("{message}; {others}")));
    let Some(element) = top.iter().find(|element| element.name == field) else {
        return wrong(format!("there is no column `{field}`"));
    };
    if element.repetition == REPEATED {
        return wrong(format!("the column `{field}` is a list"));
    }
    if !element.is_text() {
        let message = match element.kind {
            Some(BYTE_ARRAY) => "of bytes that are not text".into(),
            _ => element.described(),
        };
        return wrong(format!("the column `{field}` is {message}, not a string"));
    }
    Ok(element)
}

/// Index after the element at `at` and all its descendants.
pub(super) fn subtree_end(schema: &[Element], at: usize) -> Option<usize> {
    let mut open: i64 = 1;
    for (index, element) in schema.iter().enumerate().skip(at) {
        open = open.checked_add(element.children.max(0))? - 1;
        if open == 0 {
            return Some(index + 1);
        }
    }
    None
}

fn chunk(
    at: usize,
    group: &Group,
    path: &[String],
    kind: i64,
    optional: bool,
    data_end: u64,
) -> Result<Chunk, Fault> {
    let fault = |reason, message: String| Fault::file(reason, format!("row group {}: {message}", at + 1));
    let damaged = |message: &str| fault(Reason::Damaged, message.into());
    let column = group
        .columns
        .iter()
        .find(|column| column.path == path)
        .ok_or_else(|| damaged("the column is missing"))?;
    if column.encrypted {
        return Err(fault(Reason::Unsupported, "the column is encrypted".into()));
    }
    if column.elsewhere {
        return Err(fault(Reason::Unsupported, "the column is in another file".into()));
    }
    if column.kind != kind {
        return Err(damaged("the column has another type than in the schema"));
    }
    let known = usize::try_from(column.codec).ok().and_then(|number| CODECS.get(number));
    let codec = match known {
        Some((_, Some(codec))) => *codec,
        Some((name, None)) => {
            let message = format!("the codec {name} is not supported, only snappy, gzip, zstd and none");
            return Err(fault(Reason::Unsupported, message));
        }
        None => return Err(damaged("the codec does not exist")),
    };
    let dictionary = column.dictionary_offset;
    let first =
        if dictionary > 0 && dictionary < column.data_offset { dictionary } else { column.data_offset };
    let extent = || {
        let start = u64::try_from(first).ok().filter(|start| *start >= 4)?;
        let end = start.checked_add(u64::try_from(column.compressed_bytes).ok()?)?;
        Some((start, end, u64::try_from(group.rows).ok()?)).filter(|_| end <= data_end)
    };
    let (start, end, rows) = extent().ok_or_else(|| damaged("the column is outside the file"))?;
    Ok(Chunk { start, end, rows, codec, optional })
}

fn parse(bytes: &[u8]) -> Result<(Vec<Element>, Vec<Group>), ThriftError> {
    let (mut schema, mut groups) = (Vec::new(), Vec::new());
    Thrift::new(bytes).structure(|thrift, id, kind| {
        match (id, kind) {
            (2, LIST) => thrift.list(STRUCT, |thrift| {
                schema.push(schema_element(thrift)?);
                Ok(())
            })?,
            (4, LIST) => thrift.list(STRUCT, |thrift| {
                groups.push(row_group(thrift)?);
                Ok(())
            })?,
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    Ok((schema, groups))
}

fn schema_element(thrift: &mut Thrift) -> Result<Element, ThriftError> {
    let mut element = Element::default();
    thrift.structure(|thrift, id, kind| {
        match (id, kind) {
            (1, I32) => element.kind = Some(thrift.integer()?),
            (3, I32) => element.repetition = thrift.integer()?,
            (4, BINARY) => element.name = text(thrift)?,
            (5, I32) => element.children = thrift.integer()?,
            (6, I32) => element.converted = Some(thrift.integer()?),
            (10, STRUCT) => thrift.structure(|_, id, _| {
                element.logical = Some(id);
                Ok(false)
            })?,
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    Ok(element)
}

fn row_group(thrift: &mut Thrift) -> Result<Group, ThriftError> {
    let mut group = Group::default();
    thrift.structure(|thrift, id, kind| {
        match (id, kind) {
            (1, LIST) => thrift.list(STRUCT, |thrift| {
                group.columns.push(column_chunk(thrift)?);
                Ok(())
            })?,
            (3, I64) => group.rows = thrift.integer()?,
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    Ok(group)
}

fn column_chunk(thrift: &mut Thrift) -> Result<Column, ThriftError> {
    let mut column = Column::default();
    thrift.structure(|thrift, id, kind| {
        match (id, kind) {
            (1, BINARY) => column.elsewhere = !thrift.binary()?.is_empty(),
            (3, STRUCT) => thrift.structure(|thrift, id, kind| {
                match (id, kind) {
                    (1, I32) => column.kind = thrift.integer()?,
                    (3, LIST) => thrift.list(BINARY, |thrift| {
                        column.path.push(text(thrift)?);
                        Ok(())
                    })?,
                    (4, I32) => column.codec = thrift.integer()?,
                    (7, I64) => column.compressed_bytes = thrift.integer()?,
                    (9, I64) => column.data_offset = thrift.integer()?,
                    (11, I64) => column.dictionary_offset = thrift.integer()?,
                    _ => return Ok(false),
                }
                Ok(true)
            })?,
            (8 | 9, _) => {
                column.encrypted = true;
                return Ok(false);
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    Ok(column)
}

fn text(thrift: &mut Thrift) -> Result<String, ThriftError> {
    let bytes = thrift.binary()?;
    String::from_utf8(bytes.to_vec()).map_err(|_| ThriftError::Invalid("a name is not UTF-8"))
}
