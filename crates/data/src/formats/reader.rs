//! Documents of one input in order. What is wrong is an error with its place, or skipped and counted.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Arc;

use super::content;
use super::csv::Csv;
use super::fault::{Fault, Reason, Skipped, Trouble, unusable};
use super::find::{Input, STDIN};
use super::jsonl::Jsonl;
use super::parquet::Parquet;
use super::place::{Document, Place};
use super::text::Text;
use super::window::Window;
use super::{Compression, Format, OnError, ReadOptions, stream};
use crate::error::DataError;

/// A document as a format found it. `at` and `len` are how [`super::Index`] finds it again: the bytes it came from, or
/// in parquet the page and the place on it.
pub(super) struct Piece {
    pub text: String,
    pub line: Option<u64>,
    pub row: Option<u64>,
    pub at: u64,
    pub len: u32,
}

/// An iterator over the documents of one input. Memory is bounded by the largest record, or page of parquet. After an
/// error there are no more.
pub struct Reader {
    file: Arc<PathBuf>,
    rows: Rows,
    on_error: OnError,
    skipped: Skipped,
    documents: u64,
    ended: bool,
}

enum Rows {
    /// Nothing is known of the content yet.
    Fresh(Window, Box<(Format, ReadOptions)>),
    Text(Text),
    Jsonl(Jsonl),
    Csv(Csv),
    Parquet(Box<Parquet>),
    /// A file of which nothing can be read.
    Lost(Option<Fault>),
}

/// Opens an input. An error here is about the file as a whole, whatever is to be done about wrong documents.
pub fn read(input: &Input, options: &ReadOptions) -> Result<Reader, DataError> {
    let unreadable = |error: io::Error| super::find::unreadable(&input.path, &error);
    if input.format != Format::Parquet {
        return Ok(Reader::over(stream::open(&input.path).map_err(unreadable)?, input, options));
    }
    let rows = if input.path.as_os_str() == STDIN {
        Rows::Lost(Some(Fault::file(
            Reason::Unsupported,
            "parquet is read from its end, which standard input does not have yet",
        )))
    } else if input.compression != Compression::None {
        Rows::Lost(Some(Fault::file(
            Reason::Unsupported,
            "the parquet file is packed as a whole, and parquet is read from its end",
        )))
    } else {
        let file = File::open(&input.path).map_err(unreadable)?;
        Rows::Parquet(Box::new(Parquet::new(file, options)))
    };
    Ok(Reader::new(input, options, rows))
}

impl Reader {
    /// Reads bytes of any origin as the content of `input`, which is not parquet.
    pub fn over(bytes: Box<dyn Read + Send>, input: &Input, options: &ReadOptions) -> Self {
        assert_ne!(input.format, Format::Parquet, "parquet is not read as a stream");
        let bytes = stream::unpack(bytes, input.compression);
        let fresh = Rows::Fresh(Window::new(bytes), Box::new((input.format, options.clone())));
        Self::new(input, options, fresh)
    }

    fn new(input: &Input, options: &ReadOptions, rows: Rows) -> Self {
        Self {
            file: Arc::new(input.path.clone()),
            rows,
            on_error: options.on_error,
            skipped: Skipped::default(),
            documents: 0,
            ended: false,
        }
    }

    /// Documents skipped so far.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    pub(super) fn into_skipped(self) -> Skipped {
        self.skipped
    }

    pub(super) fn place(&self, line: Option<u64>, row: Option<u64>, offset: u64) -> Place {
        Place { file: self.file.clone(), line, row, offset }
    }

    pub(super) fn next_piece(&mut self) -> Result<Option<Piece>, DataError> {
        while !self.ended {
            match self.step() {
                Ok(Some(piece)) => {
                    self.documents += 1;
                    return Ok(Some(piece));
                }
                Ok(None) => {
                    self.ended = true;
                    if self.documents == 0 && self.skipped.total() == 0 {
                        self.note(Fault::file(Reason::NoDocuments, "there is no text in it"))?;
                    }
                }
                Err(Trouble::Wrong(mut fault)) => {
                    if fault.reason == Reason::Damaged && fault.line.is_none() && fault.row.is_none() {
                        fault = self.located(fault);
                    }
                    self.ended |= fault.rest_lost;
                    self.note(fault)?;
                }
                Err(Trouble::Failed(error)) => {
                    self.ended = true;
                    let place = self.place(None, None, 0);
                    return Err(DataError::environment(format!("{place} cannot be read: {error}.")));
                }
            }
        }
        Ok(None)
    }

    fn step(&mut self) -> Result<Option<Piece>, Trouble> {
        let piece = match &mut self.rows {
            Rows::Fresh(window, _) => {
                content::enter(window)?;
                self.rows = match std::mem::replace(&mut self.rows, Rows::Lost(None)) {
                    Rows::Fresh(window, settled) => begin(window, settled.0, &settled.1),
                    other => other,
                };
                return self.step();
            }
            Rows::Text(text) => text.next(),
            Rows::Jsonl(jsonl) => jsonl.next(),
            Rows::Csv(csv) => csv.next(),
            Rows::Parquet(parquet) => parquet.next(),
            Rows::Lost(fault) => return fault.take().map_or(Ok(None), |fault| Err(fault.into())),
        }?;
        let Some(piece) = piece else { return Ok(None) };
        match unusable(&piece.text) {
            None => Ok(Some(piece)),
            Some((reason, said)) => {
                let (line, row, offset) = (piece.line, piece.row, piece.at);
                Err(Fault { reason, line, row, offset, said: said.into(), rest_lost: false }.into())
            }
        }
    }

    /// A fault of the stream, with how far the reader had come.
    fn located(&self, mut fault: Fault) -> Fault {
        let (line, offset) = match &self.rows {
            Rows::Text(text) => text.position(),
            Rows::Jsonl(jsonl) => jsonl.position(),
            Rows::Csv(csv) => csv.position(),
            Rows::Fresh(..) | Rows::Parquet(_) | Rows::Lost(_) => return fault,
        };
        fault.line = Some(line);
        fault.offset = offset;
        fault
    }

    fn note(&mut self, fault: Fault) -> Result<(), DataError> {
        let place = self.place(fault.line, fault.row, fault.offset);
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

fn begin(window: Window, format: Format, options: &ReadOptions) -> Rows {
    let most = options.max_document_bytes.min(u32::MAX as usize);
    match format {
        Format::Text => Rows::Text(Text::new(window, options.text_document_bytes)),
        Format::Jsonl => Rows::Jsonl(Jsonl::new(window, &options.field, most)),
        Format::Csv => Rows::Csv(Csv::new(window, b',', &options.field, most)),
        Format::Tsv => Rows::Csv(Csv::new(window, b'\t', &options.field, most)),
        Format::Parquet => unreachable!("parquet is not read as a stream"),
    }
}

impl Iterator for Reader {
    type Item = Result<Document, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let piece = self.next_piece().transpose()?;
        Some(
            piece.map(|piece| Document {
                place: self.place(piece.line, piece.row, piece.at),
                text: piece.text,
            }),
        )
    }
}
