//! The `.bin` token files of other trainers: consecutive numbers of 2 or 4 bytes, with or without a header.
//!
//! A header is 256 numbers of 4 bytes, of which three are used: 20240520, 1 and the number of tokens, before tokens of 2 bytes;
//! 20240801, 7 and the number, before tokens of 4 bytes. Without a header, tokens begin at the first byte.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;

use super::shards::shard::widen;
use crate::error::DataError;
use crate::order::documents::{Documents, MAX_DOCUMENT_TOKENS, Spent, TokenCount};
use crate::order::split::{Sides, Splitter};
use crate::random::fingerprint;

const HEADER_BYTES: u64 = 1024;
/// First number, second number, bytes per token.
const HEADERS: [(u32, u32, u32); 2] = [(20_240_520, 1, 2), (20_240_801, 7, 4)];
/// Size of the chunks in which files are read, a multiple of both token sizes.
const PIECE_BYTES: usize = 4 << 20;
/// Length of the documents that a file without end tokens is cut into.
const CHUNK_TOKENS: u64 = 16 << 10;
/// Number of files kept open; see `shards`.
const KEPT_OPEN: usize = 256;

/// The interpretation of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BinOptions {
    /// Bytes per token of a file without a header.
    pub token_bytes: u32,
    /// The token that separates documents; without one, a file is one long text.
    pub eos: Option<u32>,
    /// Every token must be below this.
    pub vocabulary: u64,
}

/// The layout of a file, derived from its first bytes and its size: where tokens begin, their number and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    start: u64,
    tokens: u64,
    token_bytes: u32,
}

impl Layout {
    /// `head` is the file's first 1024 bytes, or all of a shorter one.
    pub(crate) fn parse(head: &[u8], file_bytes: u64, unmarked_bytes: u32) -> Result<Self, String> {
        let number = |at: usize| {
            head.get(4 * at..4 * at + 4).map(|b| u32::from_le_bytes(b.try_into().expect("four bytes")))
        };
        let known = HEADERS.iter().find(|(magic, ..)| number(0) == Some(*magic));
        let (start, token_bytes, claimed) = match known {
            None => (0, unmarked_bytes, None),
            Some((magic, version, _)) if number(1) != Some(*version) => {
                let found = number(1).map_or("none".into(), |found| found.to_string());
                return Err(format!(
                    "its header begins with {magic} and version {found}, where {version} is known"
                ));
            }
            Some(_) if file_bytes < HEADER_BYTES => {
                return Err(format!("it has {file_bytes} bytes, fewer than its header"));
            }
            Some((.., token_bytes)) => (HEADER_BYTES, *token_bytes, number(2)),
        };
        let rest = file_bytes - start;
        if !rest.is_multiple_of(u64::from(token_bytes)) {
            return Err(format!(
                "its {rest} bytes of tokens are no multiple of {token_bytes}; files of 4 bytes a token need \
                 data.format=u32"
            ));
        }
        let tokens = rest / u64::from(token_bytes);
        if claimed.is_some_and(|claimed| u64::from(claimed) != tokens) {
            return Err(format!("its header states {} tokens and it has {tokens}", claimed.unwrap_or(0)));
        }
        if tokens == 0 {
            return Err("it has no tokens".into());
        }
        Ok(Self { start, tokens, token_bytes })
    }
}

#[derive(Debug)]
struct TokenFile {
    path: PathBuf,
    file: Option<File>,
    layout: Layout,
}

/// Token files as documents.
#[derive(Debug)]
pub(crate) struct TokenFiles {
    files: Vec<TokenFile>,
    documents: Vec<Extent>,
    tokens: u64,
}

/// A document without its separators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    file: u32,
    tokens: u32,
    start: u64,
}

impl TokenFiles {
    /// Opens the files and reads them once, to find the documents and to check that every token is below the vocabulary.
    /// Returns both sides of the split.
    pub(crate) fn open(paths: &[PathBuf], options: BinOptions, held_out: f64) -> Result<Sides, DataError> {
        let mut splitter = Splitter::new(held_out);
        let mut opened = Self { files: Vec::new(), documents: Vec::new(), tokens: 0 };
        let wait = waits::begin("reading token files", Unit::Things("files"), Some(paths.len() as u64));
        let scanned = paths.par_iter().enumerate().map(|(number, path)| scan(path, number, options));
        for scanned in scanned.inspect(|_| wait.add(1)).collect::<Vec<_>>() {
            let (file, documents) = scanned?;
            opened.files.push(file);
            for (extent, hash) in documents {
                splitter.push(Some(hash));
                opened.tokens += u64::from(extent.tokens);
                opened.documents.push(extent);
            }
        }
        let shown = paths.first().map(|path| path.display().to_string()).unwrap_or_default();
        let split = splitter.finish(&shown)?;
        let lengths: Vec<u32> = opened.documents.iter().map(|extent| extent.tokens).collect();
        Ok(Sides::counted(opened, split, |document| u64::from(lengths[document as usize])))
    }
}

/// The documents of a file with their hashes. A file in which the end token does not occur is cut like one without end tokens.
fn scan(
    path: &Path,
    number: usize,
    options: BinOptions,
) -> Result<(TokenFile, Vec<(Extent, u64)>), DataError> {
    let failed = |error: std::io::Error| unreadable(path, &error);
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    let mut head = vec![0; bytes.min(HEADER_BYTES) as usize];
    file.read_exact_at(&mut head, 0).map_err(failed)?;
    let layout = Layout::parse(&head, bytes, options.token_bytes).map_err(|why| wrong(path, &why))?;
    let scanned = TokenFile { path: path.into(), file: Some(file), layout };
    let mut documents = scanned.documents(number as u32, options.eos, options.vocabulary)?;
    if documents.is_none() {
        documents = scanned.documents(number as u32, None, options.vocabulary)?;
    }
    let file = scanned.file.filter(|_| number < KEPT_OPEN);
    Ok((TokenFile { file, ..scanned }, documents.unwrap_or_default()))
}

impl TokenFile {
    /// The documents; `None` where an end token is expected and does not occur.
    fn documents(
        &self,
        number: u32,
        eos: Option<u32>,
        vocabulary: u64,
    ) -> Result<Option<Vec<(Extent, u64)>>, DataError> {
        let Layout { start, tokens: count, token_bytes } = self.layout;
        let mut found = Vec::new();
        let mut has_end = eos.is_none();
        let (mut document, mut begin) = (Vec::new(), 0);
        let mut close = |document: &mut Vec<u32>, begin: u64| {
            if !document.is_empty() {
                let bytes: Vec<u8> = document.iter().flat_map(|token: &u32| token.to_le_bytes()).collect();
                let extent = Extent { file: number, tokens: document.len() as u32, start: begin };
                found.push((extent, fingerprint(&bytes)));
                document.clear();
            }
        };
        let mut piece = vec![0; PIECE_BYTES];
        let mut tokens = Vec::new();
        let (mut at, mut left) = (start, count * u64::from(token_bytes));
        let mut place = 0;
        while left > 0 {
            let bytes = &mut piece[..left.min(PIECE_BYTES as u64) as usize];
            self.read_at(bytes, at)?;
            (at, left) = (at + bytes.len() as u64, left - bytes.len() as u64);
            tokens.clear();
            widen(bytes, token_bytes, &mut tokens);
            for token in &tokens {
                if u64::from(*token) >= vocabulary {
                    return Err(wrong(
                        &self.path,
                        &format!(
                            "its token {place} is {token} and the vocabulary has {vocabulary}; raise model.vocab, or set \
                             data.format=u32 for files of 4 bytes a token"
                        ),
                    ));
                }
                let is_end = eos == Some(*token);
                let is_full = match eos {
                    Some(_) => document.len() == MAX_DOCUMENT_TOKENS,
                    // The last chunk takes the remainder, so that none is too short to predict anything.
                    None => document.len() as u64 == CHUNK_TOKENS && count - place >= CHUNK_TOKENS,
                };
                if is_end || is_full {
                    close(&mut document, begin);
                    begin = place + u64::from(is_end);
                }
                if is_end {
                    has_end = true;
                } else {
                    document.push(*token);
                }
                place += 1;
            }
        }
        close(&mut document, begin);
        Ok(has_end.then_some(found))
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> Result<(), DataError> {
        let read = match &self.file {
            Some(file) => file.read_exact_at(bytes, at),
            None => File::open(&self.path).and_then(|file| file.read_exact_at(bytes, at)),
        };
        read.map_err(|error| unreadable(&self.path, &error))
    }
}

impl Documents for TokenFiles {
    fn count(&self) -> Option<u64> {
        Some(self.documents.len() as u64)
    }

    fn tokens(&self) -> Option<TokenCount> {
        Some(TokenCount::exact(self.tokens))
    }

    fn append(&self, index: u64, out: &mut Vec<u32>, spent: &mut Spent) -> Result<(), DataError> {
        let since = Instant::now();
        let Extent { file, tokens, start } = self.documents[index as usize];
        let file = &self.files[file as usize];
        let width = u64::from(file.layout.token_bytes);
        let mut bytes = vec![0; tokens as usize * width as usize];
        file.read_at(&mut bytes, file.layout.start + start * width)?;
        widen(&bytes, file.layout.token_bytes, out);
        spent.reading += since.elapsed();
        Ok(())
    }
}

fn wrong(path: &Path, why: &str) -> DataError {
    DataError::input(format!("The token file {} cannot be used: {why}.", path.display()))
}

fn unreadable(path: &Path, error: &std::io::Error) -> DataError {
    DataError::input(format!("The token file {} cannot be read: {error}.", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const OPTIONS: BinOptions = BinOptions { token_bytes: 2, eos: Some(9), vocabulary: 1000 };

    fn raw(tokens: &[u32], token_bytes: usize) -> Vec<u8> {
        tokens.iter().flat_map(|token| token.to_le_bytes().into_iter().take(token_bytes)).collect()
    }

    fn headed(magic: u32, version: u32, claimed: u32, tokens: &[u32], token_bytes: usize) -> Vec<u8> {
        let mut numbers = vec![0; 256];
        numbers[..3].copy_from_slice(&[magic, version, claimed]);
        [raw(&numbers, 4), raw(tokens, token_bytes)].concat()
    }

    fn documents(paths: &[PathBuf], options: BinOptions) -> Result<Vec<Vec<u32>>, DataError> {
        let Sides { train, held_out, .. } = TokenFiles::open(paths, options, 0.0)?;
        assert_eq!(held_out.count(), Some(0));
        let document = |index| {
            let mut tokens = vec![];
            train.append(index, &mut tokens, &mut Spent::default()).map(|()| tokens)
        };
        (0..train.count().unwrap()).map(document).collect()
    }

    #[test]
    fn documents_lie_between_their_ends_in_every_layout() {
        let scratch = Scratch::new("bin");
        let tokens = [9, 1, 2, 9, 9, 3, 9, 4, 5, 6];
        let wanted = [vec![1, 2], vec![3], vec![4, 5, 6]];
        for (bytes, token_bytes) in [
            (raw(&tokens, 2), 2),
            (raw(&tokens, 4), 4),
            (headed(20_240_520, 1, 10, &tokens, 2), 2),
            (headed(20_240_801, 7, 10, &tokens, 4), 2),
        ] {
            let path = scratch.write("a.bin", &bytes);
            let options = BinOptions { token_bytes, ..OPTIONS };
            assert_eq!(documents(std::slice::from_ref(&path), options).unwrap(), wanted);
            assert_eq!(documents(&[path.clone(), path], options).unwrap(), [&wanted[..], &wanted].concat());
        }
    }

    #[test]
    fn one_long_text_is_cut_without_loss() {
        let scratch = Scratch::new("bin-long");
        for count in [1, 100, CHUNK_TOKENS as u32, 2 * CHUNK_TOKENS as u32 + 1, 5 * CHUNK_TOKENS as u32 - 1] {
            let tokens: Vec<u32> = (0..count).map(|at| at * 7 % 1000).collect();
            let path = scratch.write("long.bin", &raw(&tokens, 2));
            let documents = documents(&[path], BinOptions { eos: None, ..OPTIONS }).unwrap();
            assert_eq!(documents.concat(), tokens);
            assert!(count < 100 || documents.iter().all(|document| document.len() >= 100), "{count}");
        }
    }

    #[test]
    fn bad_files_are_named() {
        let scratch = Scratch::new("bin-bad");
        let cases: [(&str, Vec<u8>, &str); 8] = [
            ("odd.bin", vec![1, 0, 2], "no multiple of 2"),
            ("empty.bin", vec![], "no tokens"),
            ("headed.bin", headed(20_240_520, 1, 0, &[], 2), "no tokens"),
            ("short.bin", headed(20_240_520, 1, 8, &[1, 2], 2), "states 8 tokens and it has 2"),
            ("version.bin", headed(20_240_520, 2, 2, &[1, 2], 2), "version 2, where 1 is known"),
            ("wide.bin", headed(20_240_801, 1, 2, &[1, 2], 4), "version 1, where 7 is known"),
            ("cut.bin", headed(20_240_520, 1, 2, &[1, 2], 2)[..700].to_vec(), "fewer than its header"),
            ("large.bin", raw(&[1, 2, 1000], 2), "its token 2 is 1000 and the vocabulary has 1000"),
        ];
        for (name, bytes, words) in cases {
            let error = documents(&[scratch.write(name, &bytes)], OPTIONS).unwrap_err();
            assert!(
                error.is_input() && error.sentence.contains(name) && error.sentence.contains(words),
                "{error}"
            );
        }
        let gone = documents(&[scratch.path().join("gone.bin")], OPTIONS).unwrap_err();
        assert!(gone.sentence.contains("gone.bin cannot be read"), "{gone}");
    }
}
