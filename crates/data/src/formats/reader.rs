//! Reads the documents of one input in order. An invalid one is an error with its place, or is skipped and counted.

use std::io::{self, Read};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::bytes::Bytes;
use super::content;
use super::fault::{Fault, ReadError, Reason, Skipped, unusable};
use super::find::{Input, STDIN};
use super::parquet::{Parquet, RowGroups};
use super::place::{Document, SourceLocation};
use super::stream_format::{Documents, RawDocument, StreamFormat};
use super::window::Window;
use super::{Compression, OnError, ReadOptions, stream};
use crate::error::DataError;

/// Iterator over the documents of one input. Memory is bounded by the largest record, or page of parquet. Ends after an error.
pub struct Reader {
    file: Arc<PathBuf>,
    rows: Rows,
    on_error: OnError,
    skipped: Skipped,
    documents: u64,
    ended: bool,
    /// Set where only a block of the input is read.
    block: Option<Block>,
}

/// A part of an input: documents that begin before `end`, read from `start`.
struct Block {
    start: u64,
    end: u64,
}

enum Rows {
    /// A stream whose beginning was not checked yet.
    Unchecked(Window, &'static StreamFormat, Box<ReadOptions>),
    Open(Box<dyn Documents>),
    /// A file that cannot be read.
    Unreadable(Option<Fault>),
}

/// Opens an input. An error is about the whole file and does not depend on the policy for invalid documents.
pub fn read(input: &Input, options: &ReadOptions) -> Result<Reader, DataError> {
    let unreadable = |error: io::Error| super::find::unreadable(&input.path, &error);
    if input.format.stream().is_some() {
        return Ok(Reader::over(stream::open(input).map_err(unreadable)?, input, options));
    }
    let rows = if input.path.as_os_str() == STDIN {
        Rows::Unreadable(Some(Fault::file(
            Reason::Unsupported,
            "parquet is read from its end, which standard input does not have yet",
        )))
    } else if input.compression != Compression::None {
        Rows::Unreadable(Some(Fault::file(
            Reason::Unsupported,
            "the parquet file is compressed as a whole, but parquet is read from its end",
        )))
    } else {
        let file = Bytes::open(input, 1).map_err(unreadable)?;
        Rows::Open(Box::new(Parquet::new(file, options)))
    };
    Ok(Reader::new(input, options, rows))
}

impl Reader {
    /// Reads bytes of any origin as the content of `input`, which must not be parquet.
    pub fn over(bytes: Box<dyn Read + Send>, input: &Input, options: &ReadOptions) -> Self {
        let stream_format = input.format.stream().expect("parquet is not read as a stream");
        let bytes = stream::decompress(bytes, input.compression);
        let fresh = Rows::Unchecked(Window::new(bytes), stream_format, Box::new(options.clone()));
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
            block: None,
        }
    }

    /// Reads the lines of an input that begin in `extent`, for a format with one document per line.
    pub(super) fn lines(input: &Input, options: &ReadOptions, extent: Range<u64>) -> io::Result<Self> {
        let (bytes, start) = stream::lines_from(input, extent.start, extent.end)?;
        let block = Some(Block { start, end: extent.end });
        Ok(Self { block, ..Self::over(bytes, input, options) })
    }

    /// Reads the rows of a parquet file whose row groups begin in `extent`.
    pub(super) fn row_groups(
        input: &Input,
        options: &ReadOptions,
        groups: &RowGroups,
        extent: Range<u64>,
    ) -> io::Result<Self> {
        let block = Some(Block { start: 0, end: u64::MAX });
        let documents = Parquet::within(Bytes::open(input, 1)?, groups, extent, options);
        Ok(Self { block, ..Self::new(input, options, Rows::Open(Box::new(documents))) })
    }

    /// Reads nothing, and reports the fault.
    pub(super) fn lost(input: &Input, options: &ReadOptions, why: Option<Fault>) -> Self {
        let block = Some(Block { start: 0, end: u64::MAX });
        Self { block, ..Self::new(input, options, Rows::Unreadable(why)) }
    }

    /// Reads a whole input as its only block.
    pub(super) fn whole(input: &Input, options: &ReadOptions) -> Result<Self, DataError> {
        Ok(Self { block: Some(Block { start: 0, end: u64::MAX }), ..read(input, options)? })
    }

    /// Documents skipped so far.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    pub(super) fn into_skipped(self) -> Skipped {
        self.skipped
    }

    /// The next document, and the number of bytes it was read from, where it is a line.
    pub(crate) fn next_with_bytes(&mut self) -> Result<Option<(u64, Document)>, DataError> {
        let Some(piece) = self.next_piece()? else { return Ok(None) };
        let place = self.place(piece.line, piece.row, piece.at);
        Ok(Some((u64::from(piece.len), Document { place, text: piece.text })))
    }

    pub(super) fn place(&self, line: Option<u64>, row: Option<u64>, offset: u64) -> SourceLocation {
        let start = self.block.as_ref().map_or(0, |block| block.start);
        // Line numbers are known only when reading from the beginning.
        let line = line.filter(|_| start == 0);
        SourceLocation { file: self.file.clone(), line, row, offset: start + offset }
    }

    pub(super) fn next_piece(&mut self) -> Result<Option<RawDocument>, DataError> {
        while !self.ended {
            match self.step() {
                Ok(Some(piece)) if self.is_past_block(piece.at) => self.ended = true,
                Ok(Some(piece)) => {
                    self.documents += 1;
                    return Ok(Some(piece));
                }
                Err(ReadError::Invalid(fault)) if self.is_past_block(fault.offset) => self.ended = true,
                Ok(None) => {
                    self.ended = true;
                    // A part of a file may have no document.
                    if self.block.is_none() && self.documents == 0 && self.skipped.total() == 0 {
                        self.note(Fault::file(Reason::NoDocuments, "there is no text in it"))?;
                    }
                }
                Err(ReadError::Invalid(mut fault)) => {
                    if fault.reason == Reason::Damaged && fault.line.is_none() && fault.row.is_none() {
                        fault = self.located(fault);
                    }
                    self.ended |= fault.rest_lost;
                    self.note(fault)?;
                }
                Err(ReadError::Io(error)) => {
                    self.ended = true;
                    let place = self.place(None, None, 0);
                    return Err(DataError::environment(format!("{place} cannot be read: {error}.")));
                }
            }
        }
        Ok(None)
    }

    /// Whether an offset is past the end of the block.
    fn is_past_block(&self, offset: u64) -> bool {
        self.block.as_ref().is_some_and(|block| block.start + offset >= block.end)
    }

    fn step(&mut self) -> Result<Option<RawDocument>, ReadError> {
        let piece = match &mut self.rows {
            Rows::Unchecked(window, ..) => {
                content::check_is_text(window)?;
                self.rows = match std::mem::replace(&mut self.rows, Rows::Unreadable(None)) {
                    Rows::Unchecked(window, stream_format, options) => {
                        Rows::Open((stream_format.documents)(window, &options))
                    }
                    other => other,
                };
                return self.step();
            }
            Rows::Open(documents) => documents.next(),
            Rows::Unreadable(fault) => return fault.take().map_or(Ok(None), |fault| Err(fault.into())),
        }?;
        let Some(piece) = piece else { return Ok(None) };
        match unusable(&piece.text) {
            None => Ok(Some(piece)),
            Some((reason, message)) => {
                let (line, row, offset) = (piece.line, piece.row, piece.at);
                Err(Fault { reason, line, row, offset, message: message.into(), rest_lost: false }.into())
            }
        }
    }

    /// Adds the position of the reader to a fault of the stream.
    fn located(&self, mut fault: Fault) -> Fault {
        if let Rows::Open(documents) = &self.rows
            && let Some((line, offset)) = documents.position()
        {
            fault.line = Some(line);
            fault.offset = offset;
        }
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
