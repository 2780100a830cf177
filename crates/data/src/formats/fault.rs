//! Reasons why a document or file cannot be used, and counts of skipped documents by reason.

use std::collections::BTreeMap;
use std::{fmt, io};

use super::place::SourceLocation;
use super::stream::Damaged;
use crate::error::DataError;

/// A kind of invalid data, by which skipped documents are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    NotUtf8,
    Nul,
    BrokenJson,
    NotAnObject,
    MissingField,
    NotAString,
    Null,
    Empty,
    TooLong,
    Columns,
    Quotes,
    Binary,
    NotEightBit,
    Schema,
    Unsupported,
    Damaged,
    NoDocuments,
    Conversation,
    Role,
    NothingToLearn,
    Template,
    TooManyTokens,
    Label,
    NotAnImage,
    BrokenImage,
    TooManyPixels,
    NoFile,
    MemberPath,
    MemberKind,
    KeyTwice,
    NoLabel,
    NoImage,
    ImageSides,
    ImagePath,
    ImageCount,
    LargeImage,
    Pair,
    Video,
}

/// For every reason, in the order of [`Reason`]: its words in a count, and the remedy.
const REASONS: [(Reason, &str, &str); 38] = [
    (Reason::NotUtf8, "not UTF-8", "convert it to UTF-8"),
    (Reason::Nul, "NUL character", "remove it"),
    (Reason::BrokenJson, "broken JSON", "correct it"),
    (Reason::NotAnObject, "not a JSON object", "write one object a line"),
    (Reason::MissingField, "field missing", "name the field that holds the text with data.field"),
    (Reason::NotAString, "field not a string", "name the field that holds the text with data.field"),
    (Reason::Null, "field null", "give it a text"),
    (Reason::Empty, "empty", "give it a text"),
    (Reason::TooLong, "too long", "split it or raise data.max_document_bytes"),
    (Reason::Columns, "wrong number of columns", "correct it"),
    (Reason::Quotes, "wrong quotes", "correct it"),
    (Reason::Binary, "not text", "name its format with data.format, or leave the file out"),
    (Reason::NotEightBit, "UTF-16 or UTF-32", "convert the file to UTF-8"),
    (
        Reason::Schema,
        "column missing or of another kind",
        "name the column that holds the text with data.field",
    ),
    (Reason::Unsupported, "form not supported", "write the file again in a supported form"),
    (Reason::Damaged, "damaged file", "fetch or write the file again"),
    (Reason::NoDocuments, "no documents in the file", "leave the file out"),
    (Reason::Conversation, "not a conversation", "correct it"),
    (Reason::Role, "unknown role", "correct it"),
    (Reason::NothingToLearn, "nothing to learn", "give it an answer"),
    (Reason::Template, "refused by the chat template", "correct it"),
    (Reason::TooManyTokens, "too many tokens", "raise data.max_tokens"),
    (Reason::Label, "label that is not a class", "correct it"),
    (Reason::NotAnImage, "neither JPEG, PNG nor WebP", "convert it"),
    (Reason::BrokenImage, "damaged image", "fetch it again"),
    (Reason::TooManyPixels, "too large an image", "make it smaller or raise data.max_pixels"),
    (Reason::NoFile, "missing image file", "correct the path"),
    (Reason::MemberPath, "path that leads out of the archive", "write the archive again with relative names"),
    (Reason::MemberKind, "link, device or sparse file", "write the archive again with plain files"),
    (Reason::KeyTwice, "sample key used twice", "give every sample a name of its own"),
    (Reason::NoLabel, "sample without its label or JSON", "give it a .cls or .json member"),
    (Reason::NoImage, "sample without an image", "give it a .jpg, .png or .webp member"),
    (Reason::ImageSides, "image too long and narrow", "cut it"),
    (Reason::ImagePath, "image path that leads out", "give paths below data.image_root"),
    (Reason::ImageCount, "images and places for them differ in number", "correct it"),
    (Reason::LargeImage, "too many bytes of an image", "make it smaller, or give a path to its file"),
    (Reason::Pair, "answers that cannot be compared", "correct one of them"),
    (Reason::Video, "video that is not cut into frames", "cut it with ffmpeg"),
];

impl Reason {
    /// A few words for lists and counts.
    pub fn words(self) -> &'static str {
        REASONS[self as usize].1
    }

    /// Whether the reason is an image of a row that cannot be read.
    pub(crate) fn is_of_image(self) -> bool {
        use Reason::*;
        let of_image =
            [NotAnImage, BrokenImage, TooManyPixels, NoFile, NoImage, ImageSides, ImagePath, LargeImage];
        of_image.contains(&self)
    }

    pub(crate) fn numbered(number: usize) -> Option<Self> {
        REASONS.get(number).map(|(reason, _, _)| *reason)
    }

    pub(crate) fn remedy(self) -> &'static str {
        REASONS[self as usize].2
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

/// A fault that a format found.
#[derive(Debug)]
pub(super) struct Fault {
    pub reason: Reason,
    pub line: Option<u64>,
    pub row: Option<u64>,
    pub offset: u64,
    /// The middle of a sentence: what is wrong.
    pub message: String,
    /// Whether nothing after it can be read.
    pub rest_lost: bool,
}

impl Fault {
    /// A fault of the whole file, or of everything that follows.
    pub fn file(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, line: None, row: None, offset: 0, message: message.into(), rest_lost: true }
    }

    pub fn at_line(reason: Reason, line: u64, offset: u64, message: impl Into<String>) -> Self {
        Self { reason, line: Some(line), row: None, offset, message: message.into(), rest_lost: false }
    }

    pub fn at_row(reason: Reason, row: u64, offset: u64, message: impl Into<String>) -> Self {
        Self { reason, line: None, row: Some(row), offset, message: message.into(), rest_lost: false }
    }

    pub fn at_byte(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    pub fn rest_lost(mut self) -> Self {
        self.rest_lost = true;
        self
    }

    pub fn error(&self, place: &SourceLocation) -> DataError {
        DataError::input(format!(
            "{place}: {}; {}, or leave such documents out with data.on_error=skip.",
            self.message,
            self.reason.remedy()
        ))
    }
}

/// Why a format cannot return the next document.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The file has invalid content.
    Invalid(Fault),
    /// An I/O error.
    Io(io::Error),
}

impl From<Fault> for ReadError {
    fn from(fault: Fault) -> Self {
        ReadError::Invalid(fault)
    }
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Damaged>()) {
            Some(damaged) => ReadError::Invalid(Fault::file(Reason::Damaged, damaged.0.clone())),
            None => ReadError::Io(error),
        }
    }
}

/// The reason why a text is unusable, independent of its format.
pub(super) fn unusable(text: &str) -> Option<(Reason, &'static str)> {
    if text.trim().is_empty() {
        return Some((Reason::Empty, "the document is empty"));
    }
    (memchr::memchr(0, text.as_bytes()).is_some())
        .then_some((Reason::Nul, "the document contains a NUL character, as binary data does"))
}

/// Counts of skipped documents by reason. Prints as "3 left out: 2 broken JSON (first: a.jsonl, line 7), 1 empty (first: ...)".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skipped {
    reasons: BTreeMap<Reason, (u64, SourceLocation)>,
}

impl Skipped {
    pub fn total(&self) -> u64 {
        self.reasons.values().map(|(count, _)| count).sum()
    }

    /// Every reason that occurred, with its count and the first place.
    pub fn reasons(&self) -> impl Iterator<Item = (Reason, u64, &SourceLocation)> {
        self.reasons.iter().map(|(reason, (count, first))| (*reason, *count, first))
    }

    /// Adds the counts of a later file.
    pub fn merge(&mut self, later: &Skipped) {
        for (reason, count, first) in later.reasons() {
            self.reasons.entry(reason).or_insert_with(|| (0, first.clone())).0 += count;
        }
    }

    pub(crate) fn note(&mut self, reason: Reason, place: SourceLocation) {
        self.note_many(reason, 1, place);
    }

    pub(crate) fn note_many(&mut self, reason: Reason, count: u64, first: SourceLocation) {
        let counted = &mut self.reasons.entry(reason).or_insert((0, first)).0;
        *counted = counted.saturating_add(count);
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} left out", self.total())?;
        for (at, (reason, count, first)) in self.reasons().enumerate() {
            write!(f, "{} {count} {reason} (first: {first})", if at == 0 { ":" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_reasons_is_in_the_order_of_the_reasons() {
        for (at, (reason, _, _)) in REASONS.into_iter().enumerate() {
            assert_eq!(reason as usize, at, "{reason:?}");
        }
    }
}
