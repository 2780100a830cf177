//! A shard file: tokenised documents with an index and checksums. Numbers are little-endian.
//!
//! ```text
//! header   64 bytes: magic "FLATSHRD", version u32, bytes a token u32 (2 or 4), documents u64, tokens u64, hash of the
//!          tokeniser u64, size of its vocabulary u64, hash of the index u64, hash of the 56 bytes before it u64
//! tokens   one document after another, padded with zeros to a multiple of 8 bytes
//! index    24 bytes per document: its end, counted in tokens, u64; hash of its text u64; hash of its tokens u64
//! ```
//!
//! The header has the hash of the index, and the index the hashes of the tokens, so a changed bit is noticed where it is read,
//! without reading the whole file first. Documents are read by position; nothing of the file stays in memory.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::error::DataError;
use crate::order::documents::MAX_DOCUMENT_TOKENS;

const MAGIC: &[u8; 8] = b"FLATSHRD";
const VERSION: u32 = 1;
const HEADER_BYTES: u64 = 64;
const ENTRY_BYTES: u64 = 24;
/// Size of the chunks in which the index is read, a multiple of the size of an entry.
const PIECE_BYTES: usize = 24 * (16 << 10);

/// The header of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub token_bytes: u32,
    pub documents: u64,
    pub tokens: u64,
    pub tokenizer: u64,
    pub vocabulary: u64,
    pub index_hash: u64,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES as usize] {
        let mut bytes = Vec::with_capacity(HEADER_BYTES as usize);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.token_bytes.to_le_bytes());
        for number in [self.documents, self.tokens, self.tokenizer, self.vocabulary, self.index_hash] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes.try_into().expect("a header has 64 bytes")
    }

    /// Parses the header of a file of `file_bytes`; the error says what is wrong with it.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES as usize], file_bytes: u64) -> Result<Self, String> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64_at(bytes, at);
        if &bytes[..8] != MAGIC {
            return Err("it does not begin as a shard does".into());
        }
        if u32_at(8) != VERSION {
            return Err(format!("it is of version {} and this program reads version {VERSION}", u32_at(8)));
        }
        if xxh3_64(&bytes[..56]) != u64_at(56) {
            return Err("its header is damaged".into());
        }
        let header = Header {
            token_bytes: u32_at(12),
            documents: u64_at(16),
            tokens: u64_at(24),
            tokenizer: u64_at(32),
            vocabulary: u64_at(40),
            index_hash: u64_at(48),
        };
        if ![2, 4].contains(&header.token_bytes) {
            return Err(format!("its tokens have {} bytes and not 2 or 4", header.token_bytes));
        }
        match header.file_bytes() {
            Some(claimed) if claimed == file_bytes => Ok(header),
            claimed => Err(format!(
                "it has {file_bytes} bytes and its header states {}",
                claimed.map_or("more than any file has".into(), |claimed| claimed.to_string())
            )),
        }
    }

    /// Offset of the index; `None` for counts that no file can have.
    fn index_at(&self) -> Option<u64> {
        let tokens = self.tokens.checked_mul(u64::from(self.token_bytes))?.checked_next_multiple_of(8)?;
        tokens.checked_add(HEADER_BYTES)
    }

    fn file_bytes(&self) -> Option<u64> {
        self.documents.checked_mul(ENTRY_BYTES)?.checked_add(self.index_at()?)
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// One entry of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    end: u64,
    text_hash: u64,
    tokens_hash: u64,
}

impl Entry {
    fn parse(bytes: &[u8]) -> Self {
        Self { end: u64_at(bytes, 0), text_hash: u64_at(bytes, 8), tokens_hash: u64_at(bytes, 16) }
    }
}

/// A shard with random access by document.
#[derive(Debug)]
pub(crate) struct Shard {
    path: PathBuf,
    /// `None` where the file is opened for each document, because too many files are open.
    file: Option<File>,
    header: Header,
    index_at: u64,
}

impl Shard {
    /// Checks the header against the file. With `keep_open` the file stays open.
    pub(crate) fn open(path: &Path, keep_open: bool) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|error| unreadable(path, &error))?;
        let metadata = file.metadata().map_err(|error| unreadable(path, &error))?;
        let mut bytes = [0; HEADER_BYTES as usize];
        if metadata.len() < HEADER_BYTES {
            return Err(wrong(path, &format!("it has {} bytes, fewer than its header", metadata.len())));
        }
        file.read_exact_at(&mut bytes, 0).map_err(|error| unreadable(path, &error))?;
        let header = Header::parse(&bytes, metadata.len()).map_err(|why| wrong(path, &why))?;
        let index_at = header.index_at().expect("the header was checked against the file's size");
        Ok(Self { path: path.into(), file: keep_open.then_some(file), header, index_at })
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Reads the whole index: each document's text hash and number of tokens, in order. The values are valid only if it returns
    /// without an error.
    pub(crate) fn scan(&self, mut visit: impl FnMut(u64, u64)) -> Result<(), DataError> {
        self.entries(|entry, tokens| {
            visit(entry.text_hash, tokens);
            Ok(())
        })
    }

    /// Reads the whole file and verifies every document.
    pub(crate) fn verify(&self) -> Result<(), DataError> {
        let failed = |error| unreadable(&self.path, &error);
        let mut file = BufReader::with_capacity(1 << 20, File::open(&self.path).map_err(failed)?);
        file.seek(SeekFrom::Start(HEADER_BYTES)).map_err(failed)?;
        let (mut document, mut bytes) = (0, Vec::new());
        self.entries(|entry, tokens| {
            bytes.resize((tokens * u64::from(self.header.token_bytes)) as usize, 0);
            file.read_exact(&mut bytes).map_err(failed)?;
            if xxh3_64(&bytes) != entry.tokens_hash {
                return Err(self.damaged(document));
            }
            document += 1;
            Ok(())
        })
    }

    fn entries(&self, mut visit: impl FnMut(Entry, u64) -> Result<(), DataError>) -> Result<(), DataError> {
        let damaged = || wrong(&self.path, "its index is damaged");
        let mut hasher = Xxh3::new();
        let mut piece = vec![0; PIECE_BYTES];
        let (mut at, mut left) = (self.index_at, self.header.documents * ENTRY_BYTES);
        let mut before = 0;
        while left > 0 {
            let bytes = &mut piece[..left.min(PIECE_BYTES as u64) as usize];
            self.read_at(bytes, at)?;
            hasher.update(bytes);
            for entry in bytes.chunks_exact(ENTRY_BYTES as usize).map(Entry::parse) {
                let tokens = entry.end.checked_sub(before).ok_or_else(damaged)?;
                if tokens == 0 || tokens > MAX_DOCUMENT_TOKENS as u64 || entry.end > self.header.tokens {
                    return Err(damaged());
                }
                visit(entry, tokens)?;
                before = entry.end;
            }
            (at, left) = (at + bytes.len() as u64, left - bytes.len() as u64);
        }
        if before != self.header.tokens || hasher.digest() != self.header.index_hash {
            return Err(damaged());
        }
        Ok(())
    }

    fn damaged(&self, document: u64) -> DataError {
        wrong(&self.path, &format!("its document {document} is damaged"))
    }

    /// Appends the tokens of a document after verifying them.
    pub(crate) fn append(&self, document: u64, out: &mut Vec<u32>) -> Result<(), DataError> {
        let mut bytes = [0; 2 * ENTRY_BYTES as usize];
        let (start, entry) = if document == 0 {
            self.read_at(&mut bytes[..ENTRY_BYTES as usize], self.index_at)?;
            (0, Entry::parse(&bytes))
        } else {
            self.read_at(&mut bytes, self.index_at + (document - 1) * ENTRY_BYTES)?;
            (Entry::parse(&bytes).end, Entry::parse(&bytes[ENTRY_BYTES as usize..]))
        };
        let damaged = || self.damaged(document);
        if entry.end <= start
            || entry.end - start > MAX_DOCUMENT_TOKENS as u64
            || entry.end > self.header.tokens
        {
            return Err(damaged());
        }
        let width = u64::from(self.header.token_bytes);
        let mut tokens = vec![0; ((entry.end - start) * width) as usize];
        self.read_at(&mut tokens, HEADER_BYTES + start * width)?;
        if xxh3_64(&tokens) != entry.tokens_hash {
            return Err(damaged());
        }
        let before = out.len();
        widen(&tokens, self.header.token_bytes, out);
        if out[before..].iter().any(|token| u64::from(*token) >= self.header.vocabulary) {
            return Err(damaged());
        }
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> Result<(), DataError> {
        let read = match &self.file {
            Some(file) => file.read_exact_at(bytes, at),
            None => File::open(&self.path).and_then(|file| file.read_exact_at(bytes, at)),
        };
        read.map_err(|error| unreadable(&self.path, &error))
    }
}

/// Appends tokens of 2 or 4 bytes each as `u32`. Reserves room for one more token, the end of a document.
pub(crate) fn widen(bytes: &[u8], token_bytes: u32, out: &mut Vec<u32>) {
    out.reserve_exact(bytes.len() / token_bytes as usize + 1);
    match token_bytes {
        2 => out.extend(bytes.chunks_exact(2).map(|two| u32::from(u16::from_le_bytes([two[0], two[1]])))),
        _ => out.extend(
            bytes.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().expect("four bytes"))),
        ),
    }
}

/// Writes a shard under a temporary name; its final name only ever refers to a complete file.
pub(crate) struct ShardWriter {
    path: PathBuf,
    partial: PathBuf,
    file: BufWriter<File>,
    header: Header,
    index: Vec<u8>,
    buffer: Vec<u8>,
}

impl ShardWriter {
    /// For tokens below `vocabulary`, of the tokeniser with this hash.
    pub(crate) fn create(path: &Path, tokenizer: u64, vocabulary: u64) -> io::Result<Self> {
        let partial = path.with_extension("partial");
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&partial)?);
        file.write_all(&[0; HEADER_BYTES as usize])?;
        let token_bytes = if vocabulary <= 1 << 16 { 2 } else { 4 };
        let header = Header { token_bytes, documents: 0, tokens: 0, tokenizer, vocabulary, index_hash: 0 };
        Ok(Self { path: path.into(), partial, file, header, index: Vec::new(), buffer: Vec::new() })
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// Adds a document of 1 to [`MAX_DOCUMENT_TOKENS`] tokens.
    pub(crate) fn push(&mut self, tokens: &[u32], text_hash: u64) -> io::Result<()> {
        assert!((1..=MAX_DOCUMENT_TOKENS).contains(&tokens.len()), "a document of {} tokens", tokens.len());
        self.buffer.clear();
        match self.header.token_bytes {
            2 => self.buffer.extend(tokens.iter().flat_map(|token| (*token as u16).to_le_bytes())),
            _ => self.buffer.extend(tokens.iter().flat_map(|token| token.to_le_bytes())),
        }
        self.file.write_all(&self.buffer)?;
        self.header.tokens += tokens.len() as u64;
        self.header.documents += 1;
        for number in [self.header.tokens, text_hash, xxh3_64(&self.buffer)] {
            self.index.extend(number.to_le_bytes());
        }
        Ok(())
    }

    /// Gives the shard its name once all of it is on disk. Returns its header and size.
    pub(crate) fn finish(mut self) -> io::Result<(Header, u64)> {
        let tokens_bytes = self.header.tokens * u64::from(self.header.token_bytes);
        let padding = tokens_bytes.next_multiple_of(8) - tokens_bytes;
        self.file.write_all(&[0; 8][..padding as usize])?;
        self.file.write_all(&self.index)?;
        self.header.index_hash = xxh3_64(&self.index);
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&self.header.to_bytes())?;
        let file = self.file.into_inner().map_err(|error| error.into_error())?;
        file.sync_all()?;
        std::fs::rename(&self.partial, &self.path)?;
        if let Some(folder) = self.path.parent() {
            File::open(folder)?.sync_all()?;
        }
        Ok((self.header, file.metadata()?.len()))
    }
}

pub(crate) fn wrong(path: &Path, why: &str) -> DataError {
    DataError::input(format!(
        "The shard {} cannot be used: {why}. Restore it, or write it again with `flatout data prepare`.",
        path.display()
    ))
}

fn unreadable(path: &Path, error: &io::Error) -> DataError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => wrong(path, "it became shorter while it was read"),
        _ => DataError::input(format!("The shard {} cannot be read: {error}.", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::mix;
    use crate::scratch::Scratch;

    /// Documents of varied lengths with tokens below a vocabulary.
    fn documents(count: u64, vocabulary: u64) -> Vec<Vec<u32>> {
        let document = |index: u64| {
            (0..1 + mix(index) % 50).map(move |at| (mix(index * 100 + at) % vocabulary) as u32).collect()
        };
        (0..count).map(document).collect()
    }

    fn write(path: &Path, documents: &[Vec<u32>], vocabulary: u64) {
        let mut writer = ShardWriter::create(path, 77, vocabulary).unwrap();
        for (index, tokens) in documents.iter().enumerate() {
            writer.push(tokens, mix(index as u64)).unwrap();
        }
        let (header, bytes) = writer.finish().unwrap();
        assert_eq!(header.documents, documents.len() as u64);
        assert_eq!(bytes, std::fs::metadata(path).unwrap().len());
    }

    fn read(shard: &Shard) -> Result<Vec<Vec<u32>>, DataError> {
        shard.scan(|_, _| {})?;
        let document = |index| {
            let mut tokens = vec![];
            shard.append(index, &mut tokens).map(|()| tokens)
        };
        (0..shard.header().documents).map(document).collect()
    }

    #[test]
    fn documents_round_trip_by_number_in_both_widths() {
        let scratch = Scratch::new("shard");
        let path = scratch.path().join("a.tokens");
        for vocabulary in [1u64 << 16, 1 << 20] {
            for count in [0, 1, 2, 301] {
                let documents = documents(count, vocabulary);
                write(&path, &documents, vocabulary);
                for keep_open in [false, true] {
                    let shard = Shard::open(&path, keep_open).unwrap();
                    assert_eq!(read(&shard).unwrap(), documents);
                    let mut seen = vec![];
                    shard.scan(|hash, tokens| seen.push((hash, tokens as usize))).unwrap();
                    let wanted =
                        documents.iter().enumerate().map(|(i, tokens)| (mix(i as u64), tokens.len()));
                    assert!(seen.into_iter().eq(wanted));
                }
            }
        }
    }

    #[test]
    fn every_changed_bit_and_every_cut_is_noticed() {
        let scratch = Scratch::new("shard-damage");
        let path = scratch.path().join("a.tokens");
        let documents = documents(4, 1000);
        write(&path, &documents, 1000);
        let whole = std::fs::read(&path).unwrap();
        let outcome = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Shard::open(&path, true).and_then(|shard| read(&shard))
        };
        let tokens: usize = documents.iter().map(Vec::len).sum();
        let padding = 64 + 2 * tokens..64 + (2 * tokens).next_multiple_of(8);
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            let noticed = outcome(&changed);
            let verified = Shard::open(&path, false).and_then(|shard| shard.verify());
            assert_eq!(noticed.is_err(), verified.is_err(), "byte {at}: {verified:?}");
            assert!(noticed.is_err() || padding.contains(&at), "byte {at} changed and nobody noticed");
            let cut = outcome(&whole[..at]).unwrap_err();
            assert!(cut.is_input() && cut.sentence.contains("a.tokens"), "{cut}");
        }
        assert!(outcome(&[&whole[..], &[0]].concat()).is_err());
    }

    #[test]
    fn false_headers_are_named() {
        let header =
            Header { token_bytes: 2, documents: 3, tokens: 9, tokenizer: 1, vocabulary: 10, index_hash: 0 };
        let bytes = header.file_bytes().unwrap();
        assert_eq!(Header::parse(&header.to_bytes(), bytes), Ok(header));
        let lie = |lie: Header| Header::parse(&lie.to_bytes(), bytes).unwrap_err();
        assert!(lie(Header { documents: 4, ..header }).contains("its header states"));
        assert!(lie(Header { tokens: u64::MAX, ..header }).contains("more than any file has"));
        assert!(lie(Header { documents: u64::MAX / 3, ..header }).contains("more than any file has"));
        assert!(lie(Header { token_bytes: 3, ..header }).contains("3 bytes"));
        let mut newer = header.to_bytes();
        newer[8] = 2;
        assert!(Header::parse(&newer, bytes).unwrap_err().contains("version 2"));
        assert!(Header::parse(&[0; 64], 64).unwrap_err().contains("begin"));
    }
}
