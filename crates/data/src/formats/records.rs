//! Rows of one input in order, with all their fields: lines of JSONL, records of CSV, rows of parquet.
//!
//! A row that cannot be read is an error with its place, or skipped and counted.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use super::content;
use super::csv::Csv;
use super::fault::{Fault, Reason, Skipped, Trouble};
use super::field::{Field, Fields};
use super::find::{Input, STDIN, unreadable};
use super::jsonl::Jsonl;
use super::parquet::Rows as ParquetRows;
use super::place::Place;
use super::window::Window;
use super::{Compression, Format, OnError, ReadOptions, stream};
use crate::error::DataError;

/// A row and where it was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub fields: Fields,
    pub place: Place,
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
    Fresh(Window, Box<(Format, ReadOptions)>),
    Jsonl(Jsonl),
    Csv(Csv, Option<Arc<Vec<String>>>),
    Parquet(Box<ParquetRows>),
    Lost(Option<Fault>),
}

impl Records {
    /// Opens an input. An error here is about the file as a whole, whatever is to be done about wrong rows.
    pub fn open(input: &Input, options: &ReadOptions) -> Result<Self, DataError> {
        let unreadable = |error| unreadable(&input.path, &error);
        let is_stdin = input.path.as_os_str() == STDIN;
        let rows = match input.format {
            Format::Text => Rows::Lost(Some(Fault::file(
                Reason::Schema,
                "plain text has no fields, and a conversation or a label is some: give JSONL, CSV or parquet",
            ))),
            Format::Parquet if is_stdin || input.compression != Compression::None => {
                Rows::Lost(Some(Fault::file(
                    Reason::Unsupported,
                    "parquet is read from its end, so neither from standard input nor packed as a whole",
                )))
            }
            Format::Parquet => {
                let file = File::open(&input.path).map_err(unreadable)?;
                Rows::Parquet(Box::new(ParquetRows::new(file, options.max_document_bytes)))
            }
            format => {
                let bytes = stream::open(&input.path).map_err(unreadable)?;
                let bytes = stream::unpack(bytes, input.compression);
                Rows::Fresh(Window::new(bytes), Box::new((format, options.clone())))
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
                    let place = Place { file: self.file.clone(), line: None, row: None, offset: 0 };
                    return Err(DataError::environment(format!("{place} cannot be read: {error}.")));
                }
            }
        }
        Ok(None)
    }

    fn step(&mut self) -> Result<Option<Record>, Trouble> {
        let at = |line, row, offset| Place { file: self.file.clone(), line, row, offset };
        match &mut self.rows {
            Rows::Fresh(window, settled) => {
                content::enter(window)?;
                let (format, most) = (settled.0, settled.1.max_document_bytes.min(u32::MAX as usize));
                let Rows::Fresh(window, _) = std::mem::replace(&mut self.rows, Rows::Lost(None)) else {
                    unreachable!("it was fresh a moment ago")
                };
                self.rows = match format {
                    Format::Jsonl => Rows::Jsonl(Jsonl::new(window, "", most)),
                    Format::Csv => Rows::Csv(Csv::new(window, b',', "", most), None),
                    Format::Tsv => Rows::Csv(Csv::new(window, b'\t', "", most), None),
                    Format::Text | Format::Parquet => unreachable!("neither is read as a stream of rows"),
                };
                self.step()
            }
            Rows::Jsonl(jsonl) => {
                let found = jsonl.next_object()?;
                Ok(found.map(|line| Record { fields: line.found, place: at(Some(line.line), None, line.at) }))
            }
            Rows::Csv(csv, names) => {
                if names.is_none() {
                    *names = csv.header()?.map(Arc::new);
                }
                let Some(names) = names else { return Ok(None) };
                let Some((cells, line, offset)) = csv.next_row(names.len())? else { return Ok(None) };
                let fields = names.iter().cloned().zip(cells.into_iter().map(Field::Text)).collect();
                Ok(Some(Record { fields: Fields(fields), place: at(Some(line), None, offset) }))
            }
            Rows::Parquet(parquet) => {
                let found = parquet.next()?;
                Ok(found.map(|(fields, row)| Record { fields, place: at(None, Some(row), 0) }))
            }
            Rows::Lost(fault) => fault.take().map_or(Ok(None), |fault| Err(fault.into())),
        }
    }

    fn note(&mut self, fault: Fault) -> Result<(), DataError> {
        let place = Place { file: self.file.clone(), line: fault.line, row: fault.row, offset: fault.offset };
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
