//! CSV and TSV: records of fields, quoted where they contain separators, line breaks or quotes.

use std::fs::File;

use super::ReadOptions;
use super::fault::{Fault, ReadError, Reason};
use super::field::{Field, Fields};
use super::stream_format::{Documents, RawDocument, Row, Rows, StreamFormat, TextOf};
use super::text::newlines;
use super::window::Window;

pub(super) const CSV: StreamFormat = StreamFormat {
    documents: |window, options| Box::new(Csv::new(window, b',', &options.field, options.most_bytes())),
    rows: Some(|window, options| Box::new(Table::new(window, b',', options))),
    texts: |file, options| texts(file, b',', options),
};

pub(super) const TSV: StreamFormat = StreamFormat {
    documents: |window, options| Box::new(Csv::new(window, b'\t', &options.field, options.most_bytes())),
    rows: Some(|window, options| Box::new(Table::new(window, b'\t', options))),
    texts: |file, options| texts(file, b'\t', options),
};

/// Reads the header to find the requested column.
fn texts(file: &File, delimiter: u8, options: &ReadOptions) -> Result<TextOf, ReadError> {
    let mut window = Window::new(Box::new(file.try_clone()?));
    window.at_least(3)?;
    window.skip_byte_order_mark();
    let shape = Csv::new(window, delimiter, &options.field, options.max_document_bytes).shape()?;
    let wanted = shape.map_or(0, |shape| shape.wanted);
    Ok(Box::new(move |bytes| text_of(&bytes, delimiter, wanted)))
}

struct Csv {
    window: Window,
    delimiter: u8,
    field: String,
    max_record_bytes: usize,
    /// Line where the next record begins, from 1.
    line: u64,
    /// Known after the header, or after the first record where there is none.
    shape: Option<Shape>,
    /// The scan of a record that is too long, whose remainder has to be skipped.
    skipping: Option<Scan>,
}

/// The index of the column with the text, and the number of columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    wanted: usize,
    columns: usize,
}

impl Csv {
    fn new(window: Window, delimiter: u8, field: &str, max_record_bytes: usize) -> Self {
        Self {
            window,
            delimiter,
            field: field.into(),
            max_record_bytes,
            line: 1,
            shape: None,
            skipping: None,
        }
    }

    /// The names of the columns, from the first record. Refuses repeated names.
    fn header(&mut self) -> Result<Option<Vec<String>>, ReadError> {
        let Some((names, header)) = self.names()? else { return Ok(None) };
        match (1..names.len()).find(|at| names[..*at].contains(&names[*at])) {
            Some(at) => Err(header.wrong(format!("the header has the column `{}` twice", names[at])).into()),
            None => Ok(Some(names)),
        }
    }

    /// The first record as column names.
    fn names(&mut self) -> Result<Option<(Vec<String>, Record)>, ReadError> {
        let (cells, header) = self.cells().map_err(|error| match error {
            ReadError::Invalid(fault) => ReadError::Invalid(fault.rest_lost()),
            failed => failed,
        })?;
        let Some(header) = header else { return Ok(None) };
        if let Some(wrong) = header.wrong_quotes {
            return Err(header.wrong(format!("the header cannot be read: {}", wrong.message(None))).into());
        }
        let names = cells.iter().map(|name| String::from_utf8_lossy(name).trim().to_string()).collect();
        Ok(Some((names, header)))
    }

    /// The fields of the next record, as many as the header has `names`, with its line and offset.
    fn next_row(&mut self, names: &[String]) -> Result<Option<(Vec<String>, u64, u64)>, ReadError> {
        let (cells, record) = self.cells()?;
        let Some(Record { line, at, wrong_quotes, .. }) = record else { return Ok(None) };
        let fault = |reason, message: String| Err(Fault::at_line(reason, line, at, message).into());
        if let Some(wrong) = wrong_quotes {
            return fault(Reason::Quotes, wrong.message(names.get(wrong.column)));
        }
        if cells.len() != names.len() {
            let message = format!("the record has {} columns instead of {}", cells.len(), names.len());
            return fault(Reason::Columns, message);
        }
        if let Some(column) = cells.iter().position(|cell| std::str::from_utf8(cell).is_err()) {
            return fault(Reason::NotUtf8, format!("the field in column `{}` is not UTF-8", names[column]));
        }
        let cells = cells.into_iter().map(|cell| String::from_utf8(cell).expect("just checked")).collect();
        Ok(Some((cells, line, at)))
    }

    fn cells(&mut self) -> Result<(Vec<Vec<u8>>, Option<Record>), ReadError> {
        let mut cells = Vec::new();
        let record = self.record(&mut |bytes, cell: Cell| cells.push(cell.unquoted(bytes)))?;
        Ok((cells, record))
    }

    /// Reads the header, or examines the first record where the column was given by its number.
    fn shape(&mut self) -> Result<Option<Shape>, ReadError> {
        if self.shape.is_some() {
            return Ok(self.shape);
        }
        if let Some(number) = self.field.strip_prefix('#') {
            let Some(number) = number.parse::<usize>().ok().filter(|number| *number > 0) else {
                let message = format!("the column `{}` is not `#` and a number from 1", self.field);
                return Err(Fault::file(Reason::Schema, message).into());
            };
            let Some(columns) = self.peek()? else { return Ok(None) };
            if number > columns {
                let message = format!("there is no column {number}: the first record has {columns}");
                return Err(Fault::at_line(Reason::Schema, 1, 0, message).rest_lost().into());
            }
            self.shape = Some(Shape { wanted: number - 1, columns });
            return Ok(self.shape);
        }
        let Some((names, header)) = self.names()? else { return Ok(None) };
        let mut matching = (0..names.len()).filter(|at| names[*at] == self.field);
        let Some(wanted) = matching.next() else {
            let known: Vec<String> = names.iter().take(12).map(|name| format!("`{name}`")).collect();
            let message = format!("there is no column `{}`, only {}", self.field, known.join(", "));
            return Err(header.wrong(message).into());
        };
        if matching.next().is_some() {
            return Err(header.wrong(format!("the header has the column `{}` twice", self.field)).into());
        }
        self.shape = Some(Shape { wanted, columns: names.len() });
        Ok(self.shape)
    }

    /// The number of columns of the next record, without consuming it; `None` where there is none.
    fn peek(&mut self) -> Result<Option<usize>, ReadError> {
        self.skip_blank()?;
        let mut scan = Scan::default();
        while !scan.run(self.window.bytes(), self.window.ended(), self.delimiter, &mut |_, _| {}) {
            if scan.at > self.max_record_bytes {
                return Err(self.too_long().rest_lost().into());
            }
            self.window.more()?;
        }
        Ok((scan.at > 0).then_some(scan.column))
    }

    /// The next record. Calls `take` with each of its fields and the bytes that contain it.
    fn record(&mut self, take: &mut impl FnMut(&[u8], Cell)) -> Result<Option<Record>, ReadError> {
        if let Some(scan) = self.skipping.take() {
            self.skip_record(scan)?;
        }
        self.skip_blank()?;
        let (line, at) = (self.line, self.window.offset());
        let mut scan = Scan::default();
        loop {
            let ended = scan.run(self.window.bytes(), self.window.ended(), self.delimiter, take);
            if scan.at > self.max_record_bytes {
                let fault = self.too_long();
                match ended {
                    true => self.advance(scan.at),
                    false => self.skipping = Some(scan),
                }
                return Err(fault.into());
            }
            if ended {
                break;
            }
            self.window.more()?;
        }
        let (len, columns, wrong_quotes) = (scan.at, scan.column, scan.wrong_quotes);
        self.advance(len);
        Ok((len > 0).then_some(Record { line, at, len, columns, wrong_quotes }))
    }

    /// Skips a record whose beginning `scan` has seen, without buffering it.
    fn skip_record(&mut self, mut scan: Scan) -> Result<(), ReadError> {
        loop {
            self.advance(scan.at);
            scan.at = 0;
            self.window.more()?;
            if scan.run(self.window.bytes(), self.window.ended(), self.delimiter, &mut |_, _| {}) {
                self.advance(scan.at);
                return Ok(());
            }
        }
    }

    fn skip_blank(&mut self) -> Result<(), ReadError> {
        loop {
            let blank = self.window.bytes().iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
            self.advance(blank);
            if !self.window.bytes().is_empty() || !self.window.more()? {
                return Ok(());
            }
        }
    }

    fn advance(&mut self, len: usize) {
        self.line += newlines(&self.window.bytes()[..len]);
        self.window.consume(len);
    }

    fn too_long(&self) -> Fault {
        let message = format!("the record is longer than {} bytes", self.max_record_bytes);
        Fault::at_line(Reason::TooLong, self.line, self.window.offset(), message)
    }
}

impl Documents for Csv {
    /// Skips blank lines, which are not records and not errors.
    fn next(&mut self) -> Result<Option<RawDocument>, ReadError> {
        let Some(shape) = self.shape()? else { return Ok(None) };
        let mut text = None;
        let Some(record) = self.record(&mut |bytes, cell| {
            if cell.column == shape.wanted {
                text = Some(cell.unquoted(bytes));
            }
        })?
        else {
            return Ok(None);
        };
        let fault =
            |reason, message: String| Err(Fault::at_line(reason, record.line, record.at, message).into());
        if let Some(wrong) = record.wrong_quotes {
            return fault(Reason::Quotes, wrong.message(None));
        }
        if record.columns != shape.columns {
            let message = format!("the record has {} columns instead of {}", record.columns, shape.columns);
            return fault(Reason::Columns, message);
        }
        match String::from_utf8(text.expect("the wanted column is below the number of columns")) {
            Err(_) => {
                let column = match self.field.strip_prefix('#') {
                    Some(number) => number.to_string(),
                    None => format!("`{}`", self.field),
                };
                fault(Reason::NotUtf8, format!("the field in column {column} is not UTF-8"))
            }
            Ok(text) => Ok(Some(RawDocument {
                text,
                line: Some(record.line),
                row: None,
                at: record.at,
                len: record.len as u32,
            })),
        }
    }

    fn position(&self) -> Option<(u64, u64)> {
        Some((self.line, self.window.offset()))
    }
}

/// Records with the column names of the header.
struct Table {
    csv: Csv,
    /// Set once the header is read.
    names: Option<Vec<String>>,
}

impl Table {
    fn new(window: Window, delimiter: u8, options: &ReadOptions) -> Self {
        Self { csv: Csv::new(window, delimiter, "", options.most_row_bytes()), names: None }
    }
}

impl Rows for Table {
    fn next(&mut self) -> Result<Option<Row>, ReadError> {
        if self.names.is_none() {
            self.names = self.csv.header()?;
        }
        let Some(names) = &self.names else { return Ok(None) };
        let Some((cells, line, at)) = self.csv.next_row(names)? else { return Ok(None) };
        let fields = names.iter().cloned().zip(cells.into_iter().map(Field::Text)).collect();
        Ok(Some(Row { fields: Fields(fields), line: Some(line), row: None, at }))
    }
}

/// The text of one record read by its offset; `None` where the file has changed.
fn text_of(record: &[u8], delimiter: u8, wanted: usize) -> Option<String> {
    let mut text = None;
    Scan::default().run(record, true, delimiter, &mut |bytes, cell| {
        if cell.column == wanted {
            text = Some(cell.unquoted(bytes));
        }
    });
    String::from_utf8(text?).ok()
}

struct Record {
    line: u64,
    at: u64,
    len: usize,
    columns: usize,
    wrong_quotes: Option<WrongQuotes>,
}

/// The error in the quotes of a field, and the field's column, from 0.
#[derive(Clone, Copy)]
struct WrongQuotes {
    what: &'static str,
    column: usize,
}

impl WrongQuotes {
    /// Names the column by its number if its name is not known.
    fn message(self, name: Option<&String>) -> String {
        let column = name.map_or_else(|| (self.column + 1).to_string(), |name| format!("`{name}`"));
        format!("{} in column {column}", self.what)
    }
}

impl Record {
    /// An error in the header, without which no record can be read.
    fn wrong(&self, message: String) -> Fault {
        Fault::at_line(Reason::Schema, self.line, self.at, message).rest_lost()
    }
}

/// A field of the record being scanned: its range in the record's bytes, without its quotes.
#[derive(Clone, Copy)]
struct Cell {
    column: usize,
    start: usize,
    end: usize,
    /// Whether it contains escaped (doubled) quotes.
    has_escaped_quotes: bool,
}

impl Cell {
    fn unquoted(self, bytes: &[u8]) -> Vec<u8> {
        let raw = &bytes[self.start..self.end];
        if !self.has_escaped_quotes {
            return raw.to_vec();
        }
        let mut out = Vec::with_capacity(raw.len());
        let mut rest = raw;
        while let Some(at) = memchr::memchr(b'"', rest) {
            out.extend_from_slice(&rest[..=at]);
            rest = &rest[(at + 2).min(rest.len())..];
        }
        out.extend_from_slice(rest);
        out
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// At the beginning of a field.
    #[default]
    Start,
    Bare,
    Quoted,
    /// After a quote in a quoted field, which is its end or the first of an escaped pair.
    Closing,
    /// After a carriage return that follows a closing quote.
    ClosingReturn,
}

/// A scan for the end of a record, which resumes when more bytes are available.
#[derive(Default)]
struct Scan {
    state: State,
    at: usize,
    /// Number of complete columns.
    column: usize,
    start: usize,
    /// Offset of the closing quote.
    close: usize,
    has_escaped_quotes: bool,
    wrong_quotes: Option<WrongQuotes>,
}

impl Scan {
    /// Continues the scan; true at the end of the record, whose length is then `at`. `ended` says that no bytes follow.
    fn run(&mut self, bytes: &[u8], ended: bool, delimiter: u8, take: &mut impl FnMut(&[u8], Cell)) -> bool {
        while self.at < bytes.len() {
            let byte = bytes[self.at];
            match self.state {
                State::Start if byte == b'"' => {
                    self.state = State::Quoted;
                    self.start = self.at + 1;
                }
                State::Start | State::Bare => {
                    self.state = State::Bare;
                    let Some(skip) = memchr::memchr2(delimiter, b'\n', &bytes[self.at..]) else {
                        self.at = bytes.len();
                        break;
                    };
                    self.at += skip;
                    if self.end_field(bytes, self.at, delimiter, take) {
                        return true;
                    }
                    continue;
                }
                State::Quoted => {
                    let Some(skip) = memchr::memchr(b'"', &bytes[self.at..]) else {
                        self.at = bytes.len();
                        break;
                    };
                    self.at += skip;
                    self.close = self.at;
                    self.state = State::Closing;
                }
                State::Closing if byte == b'"' => {
                    self.has_escaped_quotes = true;
                    self.state = State::Quoted;
                }
                State::Closing if byte == b'\r' => self.state = State::ClosingReturn,
                State::Closing | State::ClosingReturn if byte == b'\n' || byte == delimiter => {
                    if self.end_field(bytes, self.close, delimiter, take) {
                        return true;
                    }
                    continue;
                }
                State::Closing | State::ClosingReturn => {
                    self.wrong_quotes =
                        Some(WrongQuotes { what: "text follows a closing quote", column: self.column });
                    self.state = State::Bare;
                }
            }
            self.at += 1;
        }
        if !ended {
            return false;
        }
        let end = match self.state {
            State::Closing | State::ClosingReturn => self.close,
            _ => bytes.len(),
        };
        if self.state == State::Quoted {
            self.wrong_quotes =
                Some(WrongQuotes { what: "a quote is opened and never closed", column: self.column });
        }
        if self.at > 0 {
            take(bytes, self.cell(end));
            self.column += 1;
        }
        true
    }

    /// The field that ends at `end`.
    fn cell(&self, end: usize) -> Cell {
        let Scan { column, start, has_escaped_quotes, .. } = *self;
        Cell { column, start: start.min(end), end, has_escaped_quotes }
    }

    /// Ends the field before the separator at `at` and skips the separator; true where this ends the record.
    fn end_field(
        &mut self,
        bytes: &[u8],
        end: usize,
        delimiter: u8,
        take: &mut impl FnMut(&[u8], Cell),
    ) -> bool {
        let last = bytes[self.at] != delimiter;
        let bare = self.state == State::Bare;
        let end = if last && bare && end > self.start && bytes[end - 1] == b'\r' { end - 1 } else { end };
        take(bytes, self.cell(end));
        self.column += 1;
        self.at += 1;
        self.start = self.at;
        self.has_escaped_quotes = false;
        self.state = State::Start;
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(record: &str) -> Vec<String> {
        let mut fields = Vec::new();
        Scan::default().run(record.as_bytes(), true, b',', &mut |bytes, cell| {
            fields.push(String::from_utf8(cell.unquoted(bytes)).unwrap());
        });
        fields
    }

    #[test]
    fn fields_are_what_was_written() {
        assert_eq!(fields("a,b,c\n"), ["a", "b", "c"]);
        assert_eq!(fields("a,,\r\n"), ["a", "", ""]);
        assert_eq!(fields("\"a,\"\"b\"\"\r\n\",\"\",x"), ["a,\"b\"\r\n", "", "x"]);
        assert_eq!(fields("\"\"\"\"\r\n"), ["\""]);
        assert_eq!(fields("a \"b\" c,\"d\""), ["a \"b\" c", "d"]);
        assert_eq!(fields("über,東京"), ["über", "東京"]);
    }

    #[test]
    fn errors_of_a_row_name_its_column() {
        let refused = |row: &[u8]| {
            let bytes = [b"id,text,note\n".as_slice(), row].concat();
            let window = || Window::new(Box::new(std::io::Cursor::new(bytes.clone())));
            let rows = Table::new(window(), b',', &ReadOptions::default()).next().err();
            let texts = Csv::new(window(), b',', "text", 1000).next().err();
            [rows, texts].map(|error| match error {
                Some(ReadError::Invalid(fault)) => fault.message,
                _ => String::new(),
            })
        };
        assert_eq!(refused(b"1,caf\xe9,x\n"), ["the field in column `text` is not UTF-8"; 2]);
        assert_eq!(refused(b"1,one,caf\xe9\n"), ["the field in column `note` is not UTF-8", ""]);
        assert_eq!(
            refused(b"1,\"t\"wo,x\n"),
            ["text follows a closing quote in column `text`", "text follows a closing quote in column 2"]
        );
        assert_eq!(
            refused(b"1,one,\"x\n"),
            [
                "a quote is opened and never closed in column `note`",
                "a quote is opened and never closed in column 3"
            ]
        );
    }

    #[test]
    fn a_scan_that_is_interrupted_anywhere_ends_the_same() {
        let record = "\"a,\"\"b\"\"\r\n\",plain,\"\"\r\nnext,record\n".as_bytes();
        let whole = fields(std::str::from_utf8(record).unwrap());
        assert_eq!(whole, ["a,\"b\"\r\n", "plain", ""]);
        for cut in 0..record.len() {
            let (mut seen, mut scan) = (Vec::new(), Scan::default());
            let mut take =
                |bytes: &[u8], cell: Cell| seen.push(String::from_utf8(cell.unquoted(bytes)).unwrap());
            if !scan.run(&record[..cut], false, b',', &mut take) {
                assert!(scan.run(record, false, b',', &mut take));
            }
            assert_eq!((&seen, scan.at), (&whole, 22), "cut at {cut}");
        }
    }
}
