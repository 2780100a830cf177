//! A folder of token shards with its manifest, as one source.

#[cfg(test)]
mod damage;
pub(crate) mod manifest;
pub(crate) mod shard;

use std::path::{Path, PathBuf};
use std::time::Instant;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;

use self::manifest::{Manifest, hexadecimal};
use self::shard::{Shard, wrong};
use crate::error::DataError;
use crate::order::documents::{Documents, Spent, TokenCount};
use crate::order::split::{Sides, Splitter};
use crate::text::tokenizer::Vocabulary;

/// Number of files kept open. Further shards are opened for each document, so that the limit on open files is not exceeded.
const KEPT_OPEN: usize = 256;
/// A folder of at most this many bytes is verified completely when it is opened, which takes a fraction of a second. In a
/// larger one each document is verified when it is read.
const VERIFIED_BYTES: u64 = 64 << 20;

#[derive(Debug)]
pub(crate) struct Shards {
    folder: PathBuf,
    pub manifest: Manifest,
    shards: Vec<Shard>,
    /// Number of the first document of each shard.
    bases: Vec<u64>,
}

/// The folder of shards that a path names, either itself or its manifest.
pub(crate) fn folder_of(path: &Path) -> Option<PathBuf> {
    if path.file_name().is_some_and(|name| name == manifest::FILE_NAME) {
        return path.parent().map(Path::to_path_buf);
    }
    path.join(manifest::FILE_NAME).is_file().then(|| path.to_path_buf())
}

impl Shards {
    /// Opens every shard that the manifest names and checks it against the manifest.
    pub(crate) fn open(folder: &Path) -> Result<Self, DataError> {
        let manifest = Manifest::read(folder)?;
        let mut shards = Vec::new();
        let mut bases = Vec::new();
        let mut documents = 0;
        for (number, entry) in manifest.shards.iter().enumerate() {
            let path = folder.join(&entry.file);
            let shard = Shard::open(&path, number < KEPT_OPEN)?;
            let header = shard.header();
            if hexadecimal(header.tokenizer) != manifest.tokenizer.hash {
                return Err(wrong(&path, "it was made with another tokeniser than its manifest names"));
            }
            let listed = (entry.documents, entry.tokens, entry.hash.as_str(), manifest.tokenizer.vocabulary);
            let index_hash = hexadecimal(header.index_hash);
            if listed != (header.documents, header.tokens, index_hash.as_str(), header.vocabulary) {
                return Err(wrong(&path, "it is not the one its manifest describes"));
            }
            bases.push(documents);
            documents += header.documents;
            shards.push(shard);
        }
        let opened = Self { folder: folder.into(), manifest, shards, bases };
        if opened.manifest.shards.iter().map(|shard| shard.bytes).sum::<u64>() <= VERIFIED_BYTES {
            opened.verify()?;
        }
        Ok(opened)
    }

    /// Reads all shards and verifies them.
    pub(crate) fn verify(&self) -> Result<(), DataError> {
        let shards = self.shards.len() as u64;
        let wait = waits::begin("checking token shards", Unit::Things("shards"), Some(shards));
        self.shards.par_iter().try_for_each(|shard| {
            wait.add(1);
            shard.verify()
        })
    }

    /// The tokeniser the shards were made with.
    pub(crate) fn vocabulary(&self) -> Result<Vocabulary, DataError> {
        let path = self.folder.join(&self.manifest.tokenizer.file);
        let vocabulary = Vocabulary::load(&path)?;
        self.made_with(&vocabulary, &path.display().to_string())?;
        Ok(vocabulary)
    }

    /// An error where the shards were made with another tokeniser than `vocabulary`, which the message calls `shown`.
    pub(crate) fn made_with(&self, vocabulary: &Vocabulary, shown: &str) -> Result<(), DataError> {
        if hexadecimal(vocabulary.fingerprint()) == self.manifest.tokenizer.hash {
            return Ok(());
        }
        Err(DataError::input(format!(
            "The shards in {} were made with another tokeniser than {shown}: use theirs, {}, or prepare the text again.",
            self.folder.display(),
            self.folder.join(&self.manifest.tokenizer.file).display(),
        )))
    }

    /// Both sides, by the hashes of the texts.
    pub(crate) fn split(self, held_out: f64) -> Result<Sides, DataError> {
        let mut splitter = Splitter::new(held_out);
        let mut lengths = Vec::new();
        for shard in &self.shards {
            shard.scan(|hash, tokens| {
                splitter.push(Some(hash));
                lengths.push(tokens as u32);
            })?;
        }
        let split = splitter.finish(&self.folder.display().to_string())?;
        Ok(Sides::counted(self, split, |document| u64::from(lengths[document as usize])))
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Tokens of each document, in order, for inspection.
    pub(crate) fn lengths(&self) -> Result<Vec<u64>, DataError> {
        let mut lengths = Vec::new();
        self.shards.iter().try_for_each(|shard| shard.scan(|_, tokens| lengths.push(tokens)))?;
        Ok(lengths)
    }
}

impl Documents for Shards {
    fn count(&self) -> Option<u64> {
        Some(self.manifest.totals.documents)
    }

    fn tokens(&self) -> Option<TokenCount> {
        Some(TokenCount::exact(self.manifest.totals.tokens))
    }

    fn append(&self, index: u64, out: &mut Vec<u32>, spent: &mut Spent) -> Result<(), DataError> {
        let since = Instant::now();
        // The last shard that begins at or before the document: an empty shard begins where the next one does.
        let shard = self.bases.partition_point(|base| *base <= index) - 1;
        let appended = self.shards[shard].append(index - self.bases[shard], out);
        spent.reading += since.elapsed();
        appended
    }
}
