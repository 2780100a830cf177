//! The rows of a parquet file, with lists and structures assembled from the levels of their columns.
//!
//! For each value, a column stores how many optional and repeated levels are defined (its definition level) and the list that
//! it continues (its repetition level). Reading walks the schema once per row: every node consumes its entries from all leaves
//! below it.

use std::sync::Arc;

use super::Column;
use super::footer::{self, BYTE_ARRAY, Element, OPTIONAL, REPEATED};
use super::leaf::{BOOLEAN, DOUBLE, FLOAT, INT32, INT64, Leaf};
use crate::formats::ReadOptions;
use crate::formats::bytes::Bytes;
use crate::formats::fault::{Fault, ReadError, Reason};
use crate::formats::field::{Field, Fields};
use crate::formats::stream_format::{self, Row};

/// Maximum nesting of a schema.
const DEEPEST: usize = 24;
/// Most values of a row.
const MOST_VALUES: usize = 1 << 20;
/// Annotations of groups: the converted type and the logical type.
const LIST: (i64, i16) = (3, 3);
const MAP: (i64, i16) = (1, 2);

/// How a value is assembled from the columns below.
enum NodeForm {
    /// The index of the leaf.
    Value(usize),
    Structure(Vec<(String, Node)>),
    List(Repeated),
    /// Repeated keys and values.
    Map(Repeated),
}

/// A repeated value: the repetition level at which a list continues, and the definition level at which an element exists.
struct Repeated {
    element: Box<Node>,
    repeated: u8,
    defined: u8,
}

struct Node {
    form: NodeForm,
    /// The definition level of a present value, where it is optional.
    optional: Option<u8>,
    /// The range of leaves below it.
    leaves: (usize, usize),
}

/// The rows of a file in order.
pub(in crate::formats) struct Rows {
    /// Set until the first `next` opens it.
    file: Option<Bytes>,
    max_row_bytes: usize,
    max_image_bytes: usize,
    most_bytes: usize,
    top: Vec<(String, Node)>,
    leaves: Vec<Leaf>,
    /// Number of rows of each row group.
    groups: Vec<u64>,
    group: usize,
    left: u64,
    row: u64,
}

impl stream_format::Rows for Rows {
    fn next(&mut self) -> Result<Option<Row>, ReadError> {
        if let Some(file) = self.file.take() {
            self.open(file)?;
        }
        if self.left == 0 {
            if self.group > 0
                && self.leaves.iter_mut().map(Leaf::is_done).any(|done| !matches!(done, Ok(true)))
            {
                return Err(
                    Fault::file(Reason::Damaged, "a column has more values than its row group").into()
                );
            }
            let Some(rows) = self.groups.get(self.group) else { return Ok(None) };
            self.left = *rows;
            self.leaves.iter_mut().try_for_each(|leaf| leaf.begin(self.group))?;
            self.group += 1;
        }
        self.left -= 1;
        self.row += 1;
        let row = self.row;
        let mut taken = RowUsage::default();
        let fields = self.fields(&mut taken).map_err(|error| match error {
            ReadError::Invalid(mut fault) => {
                fault.row = Some(row);
                ReadError::Invalid(fault)
            }
            failed => failed,
        })?;
        if taken.not_utf8 {
            return Err(Fault::at_row(Reason::NotUtf8, row, 0, "a text of the row is not UTF-8").into());
        }
        if taken.bytes > self.max_row_bytes {
            let message = format!("the row is longer than {} bytes", self.max_row_bytes);
            return Err(Fault::at_row(Reason::TooLong, row, 0, message).into());
        }
        if taken.largest_image > self.max_image_bytes || taken.bytes + taken.image_bytes > self.most_bytes {
            let message = format!(
                "the row has an image of {} bytes and {} bytes of images, more than {} and {}",
                taken.largest_image, taken.image_bytes, self.max_image_bytes, self.most_bytes
            );
            return Err(Fault::at_row(Reason::LargeImage, row, 0, message).into());
        }
        Ok(Some(Row { fields, line: None, row: Some(row), at: 0 }))
    }
}

impl Rows {
    pub fn new(file: Bytes, options: &ReadOptions) -> Self {
        Self {
            file: Some(file),
            max_row_bytes: options.max_document_bytes,
            max_image_bytes: options.max_image_bytes,
            most_bytes: options.most_row_bytes(),
            top: Vec::new(),
            leaves: Vec::new(),
            groups: Vec::new(),
            group: 0,
            left: 0,
            row: 0,
        }
    }

    fn fields(&mut self, taken: &mut RowUsage) -> Result<Fields, ReadError> {
        let mut fields = Fields::default();
        for (name, node) in &self.top {
            fields.0.push((name.clone(), node.read(&mut self.leaves, taken)?));
        }
        Ok(fields)
    }

    fn open(&mut self, file: Bytes) -> Result<(), ReadError> {
        let file = Column { file: Arc::new(file), chunks: Vec::new() };
        let Some((footer, data_end)) = file.footer()? else { return Ok(()) };
        let (schema, groups) = footer::schema_and_groups(&footer)?;
        let ends = || Fault::file(Reason::Damaged, "the schema of the parquet file ends too early");
        let mut builder =
            Builder { schema: &schema, reads_bytes: self.max_image_bytes > 0, found: Vec::new() };
        let mut at = 1;
        for _ in 0..schema.first().ok_or_else(ends)?.children {
            let element = schema.get(at).ok_or_else(ends)?;
            if let Some(node) = builder.node(at, &mut vec![], (0, 0))? {
                self.top.push((element.name.clone(), node));
            }
            at = footer::subtree_end(&schema, at).ok_or_else(ends)?;
        }
        for LeafColumn { path, kind, has_bytes, repeated, defined } in builder.found {
            let chunks = footer::column_chunks(&groups, &path, kind, defined > 0, data_end)?;
            let column = Column { file: file.file.clone(), chunks };
            self.leaves.push(Leaf::new(column, kind, has_bytes, repeated, defined));
        }
        if self.top.is_empty() {
            return Err(Fault::file(Reason::Schema, "no column of the parquet file can be read").into());
        }
        let stated = groups.iter().filter(|group| group.rows != 0).map(|group| u64::try_from(group.rows));
        self.groups = stated
            .collect::<Result<_, _>>()
            .map_err(|_| Fault::file(Reason::Damaged, "a row group states a negative number of rows"))?;
        Ok(())
    }
}

/// Bytes and values of a row so far.
#[derive(Default)]
struct RowUsage {
    values: usize,
    /// Bytes of texts.
    bytes: usize,
    image_bytes: usize,
    largest_image: usize,
    not_utf8: bool,
}

impl Node {
    fn read(&self, leaves: &mut [Leaf], taken: &mut RowUsage) -> Result<Field, ReadError> {
        let (_, defined) = leaves[self.leaves.0].levels()?;
        if self.optional.is_some_and(|needed| defined < needed) {
            return self.absent(leaves, Field::Null);
        }
        match &self.form {
            NodeForm::Value(leaf) => Ok(self.value(leaves[*leaf].take()?, taken)),
            NodeForm::Structure(fields) => {
                let mut read = Fields::default();
                for (name, node) in fields {
                    // Files with a single schema write missing keys of an object as null.
                    match node.read(leaves, taken)? {
                        Field::Null => {}
                        field => read.0.push((name.clone(), field)),
                    }
                }
                Ok(Field::Object(read))
            }
            NodeForm::List(list) => Ok(Field::List(self.elements(list, leaves, taken)?)),
            NodeForm::Map(entries) => {
                let mut fields = Fields::default();
                for entry in self.elements(entries, leaves, taken)? {
                    let Field::Object(Fields(pair)) = entry else { continue };
                    let mut pair = pair.into_iter().map(|(_, field)| field);
                    if let Some(Field::Text(key)) = pair.next() {
                        fields.0.push((key, pair.next().unwrap_or_default()));
                    }
                }
                Ok(Field::Object(fields))
            }
        }
    }

    fn elements(
        &self,
        list: &Repeated,
        leaves: &mut [Leaf],
        taken: &mut RowUsage,
    ) -> Result<Vec<Field>, ReadError> {
        let first = self.leaves.0;
        if leaves[first].levels()?.1 < list.defined {
            self.absent(leaves, Field::Null)?;
            return Ok(Vec::new());
        }
        let mut elements = Vec::new();
        loop {
            taken.values += 1;
            if taken.values > MOST_VALUES {
                let message = format!("a row has more than {MOST_VALUES} values");
                return Err(Fault::file(Reason::TooLong, message).into());
            }
            elements.push(list.element.read(leaves, taken)?);
            if leaves[first].is_done()? || leaves[first].levels()?.0 < list.repeated {
                return Ok(elements);
            }
        }
    }

    fn value(&self, value: Option<Option<Field>>, taken: &mut RowUsage) -> Field {
        match value {
            None => Field::Null,
            Some(None) => {
                taken.not_utf8 = true;
                Field::Null
            }
            Some(Some(Field::Bytes(bytes))) => {
                taken.image_bytes += bytes.len();
                taken.largest_image = taken.largest_image.max(bytes.len());
                Field::Bytes(bytes)
            }
            Some(Some(field)) => {
                taken.bytes += field.text().map_or(8, str::len);
                field
            }
        }
    }

    /// Consumes the single entry that every leaf below has for an absent value.
    fn absent(&self, leaves: &mut [Leaf], field: Field) -> Result<Field, ReadError> {
        for leaf in &mut leaves[self.leaves.0..self.leaves.1] {
            leaf.take()?;
        }
        Ok(field)
    }
}

struct LeafColumn {
    path: Vec<String>,
    kind: i64,
    /// Whether it may contain binary data.
    has_bytes: bool,
    repeated: u8,
    defined: u8,
}

struct Builder<'s> {
    schema: &'s [Element],
    /// Whether binary data is read.
    reads_bytes: bool,
    found: Vec<LeafColumn>,
}

impl Builder<'_> {
    /// The node at `at` below a path with these maximum repetition and definition levels; `None` where nothing below it can be
    /// read.
    fn node(&mut self, at: usize, path: &mut Vec<String>, levels: (u8, u8)) -> Result<Option<Node>, Fault> {
        let element = &self.schema[at];
        if path.len() >= DEEPEST {
            return Err(Fault::file(Reason::Unsupported, "the schema of the parquet file nests too deeply"));
        }
        path.push(element.name.clone());
        let (mut repeated, mut defined) = levels;
        let optional = (element.repetition == OPTIONAL).then(|| {
            defined += 1;
            defined
        });
        let is_repeated = element.repetition == REPEATED;
        if is_repeated {
            (repeated, defined) = (repeated + 1, defined + 1);
        }
        let first = self.found.len();
        let form = self.form(at, path, (repeated, defined))?;
        path.pop();
        let leaves = (first, self.found.len());
        let Some(form) = form else { return Ok(None) };
        if !is_repeated {
            return Ok(Some(Node { form, optional, leaves }));
        }
        let element = Box::new(Node { form, optional: None, leaves });
        Ok(Some(Node {
            form: NodeForm::List(Repeated { element, repeated, defined }),
            optional: None,
            leaves,
        }))
    }

    fn form(
        &mut self,
        at: usize,
        path: &mut Vec<String>,
        levels: (u8, u8),
    ) -> Result<Option<NodeForm>, Fault> {
        let element = &self.schema[at];
        if let Some(kind) = element.kind {
            let is_read = match kind {
                BYTE_ARRAY => element.is_text(),
                kind => [BOOLEAN, INT32, INT64, FLOAT, DOUBLE].contains(&kind),
            };
            return Ok(is_read.then(|| {
                self.found.push(LeafColumn {
                    path: path.clone(),
                    kind,
                    has_bytes: self.reads_bytes && element.may_be_bytes(),
                    repeated: levels.0,
                    defined: levels.1,
                });
                NodeForm::Value(self.found.len() - 1)
            }));
        }
        let ends = || Fault::file(Reason::Damaged, "the schema of the parquet file ends too early");
        let mut fields = Vec::new();
        let mut child = at + 1;
        for _ in 0..element.children {
            let name = self.schema.get(child).ok_or_else(ends)?.name.clone();
            if let Some(node) = self.node(child, path, levels)? {
                fields.push((name, node));
            }
            child = footer::subtree_end(self.schema, child).ok_or_else(ends)?;
        }
        if fields.is_empty() {
            return Ok(None);
        }
        let is = |(old, new)| element.converted == Some(old) || element.logical == Some(new);
        let is_only_list = matches!(fields.as_slice(), [(_, Node { form: NodeForm::List(_), .. })]);
        if is_only_list && (is(LIST) || is(MAP)) {
            // The group around the repeated one stands for the list itself.
            let (_, list) = fields.remove(0);
            let NodeForm::List(list) = list.form else { unreachable!("it is a list") };
            return Ok(Some(match is(MAP) {
                true => NodeForm::Map(list),
                false => NodeForm::List(Repeated { element: Box::new(unwrapped(*list.element)), ..list }),
            }));
        }
        Ok(Some(NodeForm::Structure(fields)))
    }
}

/// Unwraps the repeated group of a list where it has only one field, the element.
fn unwrapped(mut entry: Node) -> Node {
    match &mut entry.form {
        NodeForm::Structure(fields) if fields.len() == 1 && fields[0].0 != "array" => fields.remove(0).1,
        _ => entry,
    }
}
