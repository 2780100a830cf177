//! Recognises the format of a file by its first bytes.

use super::Compression;
use super::fault::{Fault, ReadError, Reason};
use super::window::Window;

/// Number of bytes that are examined.
pub(super) const HEAD_BYTES: usize = 4 << 10;

/// Magic numbers of files that are no text, and the names of their formats.
const BINARY: [(&[u8], &str); 17] = [
    (b"PAR1", "a parquet file"),
    (b"PARE", "an encrypted parquet file"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\0", "xz data"),
    (b"\x04\x22\x4d\x18", "lz4 data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"ARROW1", "an Arrow file"),
    (b"Obj\x01", "an Avro file"),
    (b"ORC", "an ORC file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"SQLite format 3", "an SQLite database"),
    (b"%PDF-", "a PDF document"),
    (b"\x89PNG", "a PNG picture"),
    (b"\x7fELF", "a program"),
];

/// Checks the beginning of a new stream: an error where it is not text. Later damage is left to the format's reader, which
/// returns everything before it.
pub(super) fn check_is_text(window: &mut Window) -> Result<(), ReadError> {
    if let Err(ReadError::Io(error)) = window.at_least(HEAD_BYTES).map_err(ReadError::from) {
        return Err(error.into());
    }
    if let Some(fault) = no_text(&window.bytes()[..window.bytes().len().min(HEAD_BYTES)]) {
        return Err(fault.into());
    }
    window.skip_byte_order_mark();
    Ok(())
}

pub(super) fn compression(head: &[u8]) -> Option<Compression> {
    // Magic numbers from 0x184d2a50 to 0x184d2a5f begin skippable frames of zstd.
    let skippable = head.len() >= 4 && head[0] & 0xf0 == 0x50 && head[1..4] == [0x2a, 0x4d, 0x18];
    match head {
        [0x1f, 0x8b, 0x08, ..] => Some(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
        _ => skippable.then_some(Compression::Zstd),
    }
}

/// The first character of a text after white space and a byte order mark.
pub(super) fn first_character(head: &[u8]) -> Option<u8> {
    head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start().first().copied()
}

/// The reason why a file with this beginning cannot be text.
pub(super) fn no_text(head: &[u8]) -> Option<Fault> {
    let nuls = memchr::memchr_iter(0, head).count();
    let wide = match head {
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => Some("UTF-32"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("UTF-16"),
        // Latin letters in UTF-16 have a NUL byte each.
        _ => (head.len() >= 4 && 5 * nuls >= 2 * head.len()).then_some("UTF-16 or binary data"),
    };
    if let Some(wide) = wide {
        return Some(Fault::file(Reason::NotEightBit, format!("the file is {wide}, not UTF-8 text")));
    }
    if let Some((_, name)) =
        BINARY.iter().find(|(begin, _)| head.starts_with(begin) && !plausible(begin, head))
    {
        return Some(Fault::file(Reason::Binary, format!("the file begins like {name}, not like text")));
    }
    if nuls > 0 && std::str::from_utf8(head).is_err_and(|error| error.error_len().is_some()) {
        return Some(Fault::file(Reason::Binary, "the file is binary data, not text"));
    }
    None
}

/// Whether a magic number made of letters is really one, and not a word surrounded by text.
fn plausible(begin: &[u8], head: &[u8]) -> bool {
    let valid = match std::str::from_utf8(head) {
        Ok(_) => true,
        Err(error) => error.error_len().is_none(),
    };
    begin.is_ascii() && valid && !head.contains(&0) && begin != b"%PDF-"
}
