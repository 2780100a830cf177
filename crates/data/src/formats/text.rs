//! Plain text, split into documents at line breaks.

use super::fault::{Fault, ReadError, Reason};
use super::stream_format::{Documents, RawDocument, StreamFormat};
use super::window::Window;

pub(super) const TEXT: StreamFormat = StreamFormat {
    documents: |window, options| Box::new(Text::new(window, options.text_document_bytes)),
    rows: None,
    texts: |_, _| Ok(Box::new(|bytes| String::from_utf8(bytes).ok())),
};

/// A document ends at the first line break after this many bytes.
pub(super) const DOCUMENT_BYTES: usize = 16 << 10;
/// Smaller texts are split into about this many documents, so that some can be held out.
const DOCUMENTS_WANTED: u64 = 64;
const SMALLEST_DOCUMENT_BYTES: u64 = 64;

/// The size at which a text of `total_bytes` is split: 16 KiB, and less where that would give few documents.
pub fn document_bytes(total_bytes: u64) -> usize {
    (total_bytes / DOCUMENTS_WANTED).clamp(SMALLEST_DOCUMENT_BYTES, DOCUMENT_BYTES as u64) as usize
}

/// The length of the document at the beginning of `bytes`: it ends with the first line that reaches `document_bytes`. A longer
/// line is split at its last space, or else between characters, before twice that size. `bytes` must be all that is left, or at
/// least [`enough`].
pub(crate) fn end(bytes: &[u8], document_bytes: usize) -> usize {
    let character_start = |at: usize| {
        let at = at.min(bytes.len());
        let inside = bytes[at..].iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
        at + inside
    };
    let soft = character_start(document_bytes.saturating_sub(1));
    let hard = character_start(2 * document_bytes.max(1));
    let line = &bytes[soft..hard];
    match memchr::memchr(b'\n', line) {
        Some(at) => soft + at + 1,
        None if hard == bytes.len() => hard,
        None => memchr::memrchr(b' ', line).map_or(hard, |at| soft + at + 1),
    }
}

/// Number of bytes for which the result of [`end`] does not depend on what follows.
fn enough(document_bytes: usize) -> usize {
    2 * document_bytes.max(1) + 4
}

struct Text {
    window: Window,
    document_bytes: usize,
    /// Line where the next document begins, from 1.
    line: u64,
}

impl Text {
    fn new(window: Window, document_bytes: usize) -> Self {
        Self { window, document_bytes, line: 1 }
    }
}

impl Documents for Text {
    /// Skips pieces of white space, which are not documents and not errors.
    fn next(&mut self) -> Result<Option<RawDocument>, ReadError> {
        loop {
            self.window.at_least(enough(self.document_bytes))?;
            let (bytes, at, line) = (self.window.bytes(), self.window.offset(), self.line);
            if bytes.is_empty() {
                return Ok(None);
            }
            let piece = &bytes[..end(bytes, self.document_bytes)];
            let len = piece.len();
            self.line += newlines(piece);
            let text = std::str::from_utf8(piece).map(str::to_string).map_err(|error| {
                let valid = error.valid_up_to();
                let offset = at + valid as u64;
                let line = line + newlines(&piece[..valid]);
                Fault::at_line(Reason::NotUtf8, line, offset, format!("byte {offset} is not UTF-8 text"))
            });
            self.window.consume(len);
            let text = text?;
            if !text.trim().is_empty() {
                return Ok(Some(RawDocument { text, line: Some(line), row: None, at, len: len as u32 }));
            }
        }
    }

    fn position(&self) -> Option<(u64, u64)> {
        Some((self.line, self.window.offset()))
    }
}

pub(super) fn newlines(bytes: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', bytes).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str, document_bytes: usize) -> Vec<String> {
        let stream = Box::new(std::io::Cursor::new(text.to_string().into_bytes()));
        let mut reader = Text::new(Window::new(stream), document_bytes);
        std::iter::from_fn(|| reader.next().unwrap()).map(|piece| piece.text).collect()
    }

    #[test]
    fn cuts_cover_the_text_and_fall_on_line_ends() {
        let text: String =
            (0..5000).map(|line| format!("line {line} of a text that tells nothing\n")).collect();
        let documents = cut(&text, 1000);
        assert_eq!(documents.concat(), text);
        for document in &documents[..documents.len() - 1] {
            assert!(document.ends_with('\n'));
            assert!((1000..1060).contains(&document.len()), "{}", document.len());
        }
    }

    #[test]
    fn long_lines_are_cut_at_spaces_and_otherwise_between_characters() {
        let spaced = "word ".repeat(1000);
        let solid = "ß東🦊".repeat(1000);
        for text in [&spaced, &solid] {
            for document_bytes in [1, 2, 7, 100] {
                let documents = cut(text, document_bytes);
                assert!(documents.iter().all(|document| document.len() <= 2 * document_bytes + 3));
                if document_bytes > 5 {
                    assert_eq!(documents.concat(), **text);
                }
            }
        }
        assert!(cut(&spaced, 100).iter().all(|document| document.ends_with(' ')));
        assert_eq!(cut("short", 100), ["short"]);
    }
}
