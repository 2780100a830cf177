//! Rows of one input in order, with all their fields: lines of JSONL, records of CSV, rows of parquet.
//!
//! A row that cannot be read is an error with its place, or skipped and counted.

use std::path::PathBuf;
use std::sync::Arc;

use super::bytes::Bytes;
use super::content;
use super::fault::{Fault, Reason, Skipped, Trouble};
use super::field::Fields;
use super::find::{Input, STDIN, unreadable};
use super::parquet::Rows as ParquetRows;
use super::place::SourceLocation;
use super::reading::{self, Reading};
use super::window::Window;
use super::{Compression, OnError, ReadOptions, stream};
use crate::error::DataError;

/// Columns of parquet whose bytes are held at once.
const COLUMNS_IN_TURNS: usize = 16;

/// A row and where it was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub fields: Fields,
    pub place: SourceLocation,
}

/// An iterator over the rows of one input. Memory is bounded by the largest record, or row group of parquet. After an
/// error there are no more.
pub struct Records {
    file: Arc<PathBuf>,
    rows: Rows,
    on_error: OnError,
    skipped: Skipped,
    count: u64,
    ended: bool,
}

enum Rows {
    Fresh(Window, &'static Reading, Box<ReadOptions>),
    Entered(Box<dyn reading::Rows>),
    Lost(Option<Fault>),
}

impl Records {
    /// Opens an input. An error here is about the file as a whole, whatever is to be done about wrong rows.
    pub fn open(input: &Input, options: &ReadOptions) -> Result<Self, DataError> {
        let unreadable = |error| unreadable(&input.path, &error);
        let is_stdin = input.path.as_os_str() == STDIN;
        let rows = match input.format.stream() {
            Some(Reading { rows: None, .. }) => Rows::Lost(Some(Fault::file(
                Reason::Schema,
                "plain text has no fields, and a conversation or a label is some: give JSONL, CSV or parquet",
            ))),
            Some(reading) => {
                let bytes = stream::open(input).map_err(unreadable)?;
                let bytes = stream::unpack(bytes, input.compression);
                Rows::Fresh(Window::new(bytes), reading, Box::new(options.clone()))
            }
            None if is_stdin || input.compression != Compression::None => Rows::Lost(Some(Fault::file(
                Reason::Unsupported,
                "parquet is read from its end, so neither from standard input nor packed as a whole",
            ))),
            None => {
                let file = Bytes::open(input, COLUMNS_IN_TURNS).map_err(unreadable)?;
                Rows::Entered(Box::new(ParquetRows::new(file, options)))
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
                Err(Trouble::Wrong(fault)) => {
                    self.ended |= fault.rest_lost;
                    self.note(fault)?;
                }
                Err(Trouble::Failed(error)) => {
                    self.ended = true;
                    let place = SourceLocation { file: self.file.clone(), line: None, row: None, offset: 0 };
                    return Err(DataError::environment(format!("{place} cannot be read: {error}.")));
                }
            }
        }
        Ok(None)
    }

    fn step(&mut self) -> Result<Option<Record>, Trouble> {
        match &mut self.rows {
            Rows::Fresh(window, ..) => {
                content::enter(window)?;
                self.rows = match std::mem::replace(&mut self.rows, Rows::Lost(None)) {
                    Rows::Fresh(window, reading, options) => {
                        Rows::Entered(reading.rows.expect("it has rows")(window, &options))
                    }
                    other => other,
                };
                self.step()
            }
            Rows::Entered(rows) => {
                let Some(reading::Row { fields, line, row, at }) = rows.next()? else { return Ok(None) };
                Ok(Some(Record {
                    fields,
                    place: SourceLocation { file: self.file.clone(), line, row, offset: at },
                }))
            }
            Rows::Lost(fault) => fault.take().map_or(Ok(None), |fault| Err(fault.into())),
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
