//! Reads the rows of one input in order, with all their fields: lines of JSONL, records of CSV, rows of parquet.
//!
//! An invalid row is an error with its place, or is skipped and counted.

use std::path::PathBuf;
use std::sync::Arc;

use super::bytes::Bytes;
use super::content;
use super::fault::{Fault, ReadError, Reason, Skipped};
use super::field::Fields;
use super::find::{Input, STDIN, unreadable};
use super::parquet::Rows as ParquetRows;
use super::place::SourceLocation;
use super::stream_format::{self, StreamFormat};
use super::window::Window;
use super::{Compression, OnError, ReadOptions, stream};
use crate::error::DataError;

/// Number of parquet columns read in turn, whose bytes are buffered at the same time.
const INTERLEAVED_COLUMNS: usize = 16;

/// A row and its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub fields: Fields,
    pub place: SourceLocation,
}

/// Iterator over the rows of one input. Memory is bounded by the largest record, or row group of parquet. Ends after an error.
pub struct Records {
    file: Arc<PathBuf>,
    rows: Rows,
    on_error: OnError,
    skipped: Skipped,
    count: u64,
    ended: bool,
}

enum Rows {
    Unchecked(Window, &'static StreamFormat, Box<ReadOptions>),
    Open(Box<dyn stream_format::Rows>),
    Unreadable(Option<Fault>),
}

impl Records {
    /// Opens an input. An error is about the whole file and does not depend on the policy for invalid rows.
    pub fn open(input: &Input, options: &ReadOptions) -> Result<Self, DataError> {
        let unreadable = |error| unreadable(&input.path, &error);
        let is_stdin = input.path.as_os_str() == STDIN;
        let rows = match input.format.stream() {
            Some(StreamFormat { rows: None, .. }) => Rows::Unreadable(Some(Fault::file(
                Reason::Schema,
                "plain text has no fields, but conversations and labels need them: give JSONL, CSV or parquet",
            ))),
            Some(stream_format) => {
                let bytes = stream::open(input).map_err(unreadable)?;
                let bytes = stream::decompress(bytes, input.compression);
                Rows::Unchecked(Window::new(bytes), stream_format, Box::new(options.clone()))
            }
            None if is_stdin || input.compression != Compression::None => {
                Rows::Unreadable(Some(Fault::file(
                    Reason::Unsupported,
                    "parquet is read from its end, so neither from standard input nor compressed as a whole",
                )))
            }
            None => {
                let file = Bytes::open(input, INTERLEAVED_COLUMNS).map_err(unreadable)?;
                Rows::Open(Box::new(ParquetRows::new(file, options)))
            }
        };
        Ok(Self {
            file: Arc::new(input.path.clone()),
            rows,
            on_error: options.on_error,
            skipped: Skipped::default(),
            count: 0,
            ended: false,
        })
    }

    /// Rows skipped so far.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    fn next_record(&mut self) -> Result<Option<Record>, DataError> {
        while !self.ended {
            match self.step() {
                Ok(Some(record)) => {
                    self.count += 1;
                    return Ok(Some(record));
                }
                Ok(None) => {
                    self.ended = true;
                    if self.count == 0 && self.skipped.total() == 0 {
                        self.note(Fault::file(Reason::NoDocuments, "there is no row in it"))?;
                    }
                }
                Err(ReadError::Invalid(fault)) => {
                    self.ended |= fault.rest_lost;
                    self.note(fault)?;
                }
                Err(ReadError::Io(error)) => {
                    self.ended = true;
                    let place = SourceLocation { file: self.file.clone(), line: None, row: None, offset: 0 };
                    return Err(DataError::environment(format!("{place} cannot be read: {error}.")));
                }
            }
        }
        Ok(None)
    }

    fn step(&mut self) -> Result<Option<Record>, ReadError> {
        match &mut self.rows {
            Rows::Unchecked(window, ..) => {
                content::check_is_text(window)?;
                self.rows = match std::mem::replace(&mut self.rows, Rows::Unreadable(None)) {
                    Rows::Unchecked(window, stream_format, options) => {
                        Rows::Open(stream_format.rows.expect("formats without rows are refused in open")(
                            window, &options,
                        ))
                    }
                    other => other,
                };
                self.step()
            }
            Rows::Open(rows) => {
                let Some(stream_format::Row { fields, line, row, at }) = rows.next()? else {
                    return Ok(None);
                };
                Ok(Some(Record {
                    fields,
                    place: SourceLocation { file: self.file.clone(), line, row, offset: at },
                }))
            }
            Rows::Unreadable(fault) => fault.take().map_or(Ok(None), |fault| Err(fault.into())),
        }
    }

    fn note(&mut self, fault: Fault) -> Result<(), DataError> {
        let place = SourceLocation {
            file: self.file.clone(),
            line: fault.line,
            row: fault.row,
            offset: fault.offset,
        };
        match self.on_error {
            OnError::Fail => {
                self.ended = true;
                Err(fault.error(&place))
            }
            OnError::Skip => {
                self.skipped.note(fault.reason, place);
                Ok(())
            }
        }
    }
}

impl Iterator for Records {
    type Item = Result<Record, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_record().transpose()
    }
}
