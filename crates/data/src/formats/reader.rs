//! Documents of one input in order. A bad one is an error with its place, or is skipped and counted.

use std::io::{self, Read};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::bytes::Bytes;
use super::content;
use super::fault::{Fault, Reason, Skipped, Trouble, unusable};
use super::find::{Input, STDIN};
use super::parquet::{Parquet, RowGroups};
use super::place::{Document, SourceLocation};
use super::reading::{Documents, RawDocument, Reading};
use super::window::Window;
use super::{Compression, OnError, ReadOptions, stream};
use crate::error::DataError;

/// An iterator over the documents of one input. Memory is bounded by the largest record, or page of parquet. After an
/// error there are no more.
pub struct Reader {
    file: Arc<PathBuf>,
    rows: Rows,
    on_error: OnError,
    skipped: Skipped,
    documents: u64,
    ended: bool,
    /// Where the input is read from a block of it on.
    block: Option<Block>,
}

/// A part of an input: what begins before `end`, in bytes from `start`, where its reading began.
struct Block {
    start: u64,
    end: u64,
}

enum Rows {
    /// Nothing is known of the content yet.
    Fresh(Window, &'static Reading, Box<ReadOptions>),
    Entered(Box<dyn Documents>),
    /// A file of which nothing can be read.
    Lost(Option<Fault>),
}

/// Opens an input. An error here is about the file as a whole, whatever is to be done about wrong documents.
pub fn read(input: &Input, options: &ReadOptions) -> Result<Reader, DataError> {
    let unreadable = |error: io::Error| super::find::unreadable(&input.path, &error);
    if input.format.stream().is_some() {
        return Ok(Reader::over(stream::open(input).map_err(unreadable)?, input, options));
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
        let file = Bytes::open(input, 1).map_err(unreadable)?;
        Rows::Entered(Box::new(Parquet::new(file, options)))
    };
    Ok(Reader::new(input, options, rows))
}

impl Reader {
    /// Reads bytes of any origin as the content of `input`, which is not parquet.
    pub fn over(bytes: Box<dyn Read + Send>, input: &Input, options: &ReadOptions) -> Self {
        let reading = input.format.stream().expect("parquet is not read as a stream");
        let bytes = stream::unpack(bytes, input.compression);
        let fresh = Rows::Fresh(Window::new(bytes), reading, Box::new(options.clone()));
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

    /// Reads the lines of an input that begin in `extent`, of a format whose documents are lines.
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
        Ok(Self { block, ..Self::new(input, options, Rows::Entered(Box::new(documents))) })
    }

    /// Reads nothing of an input, and says why.
    pub(super) fn lost(input: &Input, options: &ReadOptions, why: Option<Fault>) -> Self {
        let block = Some(Block { start: 0, end: u64::MAX });
        Self { block, ..Self::new(input, options, Rows::Lost(why)) }
    }

    /// Reads a whole input as the one block that it is.
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

    /// The next document, and the bytes it was read from where it is a line.
    pub(crate) fn next_with_bytes(&mut self) -> Result<Option<(u64, Document)>, DataError> {
        let Some(piece) = self.next_piece()? else { return Ok(None) };
        let place = self.place(piece.line, piece.row, piece.at);
        Ok(Some((u64::from(piece.len), Document { place, text: piece.text })))
    }

    pub(super) fn place(&self, line: Option<u64>, row: Option<u64>, offset: u64) -> SourceLocation {
        let start = self.block.as_ref().map_or(0, |block| block.start);
        // Lines are counted from the beginning of the file only.
        let line = line.filter(|_| start == 0);
        SourceLocation { file: self.file.clone(), line, row, offset: start + offset }
    }

    pub(super) fn next_piece(&mut self) -> Result<Option<RawDocument>, DataError> {
        while !self.ended {
            match self.step() {
                Ok(Some(piece)) if self.is_behind(piece.at) => self.ended = true,
                Ok(Some(piece)) => {
                    self.documents += 1;
                    return Ok(Some(piece));
                }
                Err(Trouble::Wrong(fault)) if self.is_behind(fault.offset) => self.ended = true,
                Ok(None) => {
                    self.ended = true;
                    // A part of a file may be without a document.
                    if self.block.is_none() && self.documents == 0 && self.skipped.total() == 0 {
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

    /// Whether something at an offset is of another block.
    fn is_behind(&self, offset: u64) -> bool {
        self.block.as_ref().is_some_and(|block| block.start + offset >= block.end)
    }

    fn step(&mut self) -> Result<Option<RawDocument>, Trouble> {
        let piece = match &mut self.rows {
            Rows::Fresh(window, ..) => {
                content::enter(window)?;
                self.rows = match std::mem::replace(&mut self.rows, Rows::Lost(None)) {
                    Rows::Fresh(window, reading, options) => {
                        Rows::Entered((reading.documents)(window, &options))
                    }
                    other => other,
                };
                return self.step();
            }
            Rows::Entered(documents) => documents.next(),
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
        if let Rows::Entered(documents) = &self.rows
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
