//! Text that is read block by block during training: nothing is indexed or counted beforehand.
//!
//! Blocks are read in a shuffled order, one after another in each stream. Within a block, documents are shuffled in windows of
//! some megabytes. As for every other source, a document's hash determines its side, so the sides are known without reading
//! anything. A stream's position is a block and a document in it; resuming reads that block again and nothing before it.
//!
//! Each stream has a thread that reads, decompresses and shuffles ahead, by two windows at most.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::raw::shown;
use super::tokenizer::Vocabulary;
use crate::error::DataError;
use crate::formats::{self, Blocks, Document, Input, ReadOptions, Reader, Skipped};
use crate::order::documents::{Documents, InBlocks, Spent, TokenCount, Walk};
use crate::order::pack::{Places, STREAMS, StreamPosition};
use crate::order::permutation::{Order, Permutation};
use crate::order::split::{Sides, threshold};
use crate::random::{fingerprint, key};
use crate::remote::cache::Cache;

/// Bytes of text per window of documents that are shuffled together.
const WINDOW_BYTES: usize = 2 << 20;
/// Windows queued between a thread that reads and the one that tokenises. Each thread has one more.
const QUEUED_WINDOWS: usize = 1;
/// Number of documents whose tokens are counted to estimate the total, and the least number of blocks they come from.
const ESTIMATED_BY: u64 = 256;
const ESTIMATED_BLOCKS: u64 = 4;
/// With fewer blocks with documents than this, eight per stream, streams share every block.
const FEW_BLOCKS: u64 = 8 * STREAMS as u64;
/// Number of unusable documents in a row after which a sample ends with what it has found.
const MOST_UNUSABLE: u64 = 10_000;
/// Least number of blocks that the sample for a tokeniser comes from, where there are as many.
const SAMPLED_BLOCKS: u64 = 32;
/// Seed of the shuffle of documents within a block, combined with the run's seed.
const SHUFFLE: u64 = 0x7374_7265_616d_6564;

/// The cache of pieces of remote files: its folder and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PieceCache<'a> {
    pub folder: &'a Path,
    pub most_bytes: u64,
}

/// Text files as blocks, not tokenised.
pub(crate) struct Streamed {
    blocks: Blocks,
    threshold: u64,
    content: u64,
}

impl Streamed {
    /// Reads nothing yet.
    pub(crate) fn open(
        mut inputs: Vec<Input>,
        options: &ReadOptions,
        held_out: f64,
        kept: Option<PieceCache<'_>>,
    ) -> Self {
        if let Some(PieceCache { folder, most_bytes }) = kept {
            let cache = Arc::new(Cache::new(folder, most_bytes));
            for object in inputs.iter_mut().filter_map(|input| input.remote.as_mut()) {
                *object = object.cached_in(cache.clone());
            }
        }
        let bytes = inputs.iter().map(|input| input.bytes).sum();
        let options = ReadOptions { text_document_bytes: formats::document_bytes(bytes), ..options.clone() };
        let threshold = threshold(held_out);
        let content = inputs.iter().fold(key(inputs.len() as u64, threshold), |hash, input| {
            let version = match &input.remote {
                Some(object) => object.tag().unwrap_or_default().to_string(),
                None => input.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            };
            key(key(hash, input.bytes), fingerprint(version.as_bytes()))
        });
        let content = key(content, fingerprint(options.field.as_bytes()));
        Self { blocks: Blocks::new(inputs, options), threshold, content }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.inputs().iter().map(|input| input.bytes).sum()
    }

    /// Calls `take` with documents of the training side, block by block in a fixed order. `take` returns `Some(true)` to
    /// continue, `Some(false)` to go to the next block, and `None` to stop. Also stops after `MOST_UNUSABLE` unusable documents in a
    /// row, so that a source of many terabytes is not read to its end. Returns the skipped documents.
    pub(crate) fn visit(
        &self,
        mut take: impl FnMut(Document) -> Result<Option<bool>, DataError>,
    ) -> Result<Skipped, DataError> {
        let order = Order::new(Some(self.blocks.count()), 0);
        let mut skipped = Skipped::default();
        // Documents that were skipped before the last usable one.
        let mut skipped_before = 0;
        for place in 0..self.blocks.count() {
            let mut reader = self.blocks.read(order.document(place))?;
            let mut goes_on = Some(true);
            while goes_on == Some(true)
                && let Some((bytes, document)) = reader.next_with_bytes()?
            {
                self.blocks.record_line(bytes);
                skipped_before = skipped.total() + reader.skipped().total();
                if fingerprint(document.text.as_bytes()) >= self.threshold {
                    goes_on = take(document)?;
                }
            }
            skipped.merge(reader.skipped());
            if goes_on.is_none() || skipped.total() - skipped_before >= MOST_UNUSABLE {
                break;
            }
        }
        Ok(skipped)
    }

    /// The number of all documents, estimated from those visited so far; `None` where the files do not allow it.
    pub(crate) fn estimated_documents(&self) -> Option<u64> {
        self.blocks.estimated_documents()
    }

    /// Text to train a tokeniser on: at most `budget` bytes of the training side, exceeded by at most one document.
    pub(crate) fn sample(&self, budget: u64) -> Result<Vec<String>, DataError> {
        let of_block = (budget / SAMPLED_BLOCKS.min(self.blocks.count())).max(1);
        let (mut texts, mut bytes) = (Vec::new(), 0);
        let mut of_next = of_block;
        self.visit(|document| {
            bytes += document.text.len() as u64;
            texts.push(document.text);
            let goes_on = bytes < of_next;
            if !goes_on {
                of_next = bytes + of_block;
            }
            Ok((bytes < budget).then_some(goes_on))
        })?;
        Ok(texts)
    }

    /// Both sides, tokenised as they are read.
    pub(crate) fn tokenized(self, vocabulary: &Vocabulary) -> Result<Sides, DataError> {
        // Forgets earlier statistics, so that the estimate is the same after every start of a run, whether or not that start
        // trained the tokeniser.
        self.blocks.forget();
        let (mut documents, mut tokens) = (0, 0);
        self.visit(|document| {
            tokens += encoded(vocabulary, &document)?.len() as u64;
            documents += 1;
            Ok((documents < ESTIMATED_BY).then_some(documents % (ESTIMATED_BY / ESTIMATED_BLOCKS) != 0))
        })?;
        if documents == 0 {
            return Err(DataError::input(format!(
                "There is no text to learn from in {}: check data.path, data.field and data.held_out.",
                shown(self.blocks.inputs())
            )));
        }
        let held_out_share = self.threshold as f64 / 2f64.powi(64);
        let all = self.blocks.estimated_documents();
        let mean = tokens as f64 / documents as f64;
        let content = self.content;
        let are_few = self.blocks.filled(FEW_BLOCKS) < FEW_BLOCKS;
        let shared = Arc::new(Shared {
            are_few,
            threshold: self.threshold,
            blocks: self.blocks,
            vocabulary: vocabulary.clone(),
            left_out: Mutex::default(),
        });
        let side = |is_held_out: bool| -> Arc<dyn Documents> {
            let share = if is_held_out { held_out_share } else { 1.0 - held_out_share };
            let least = u64::from(share > 0.0);
            let count = match share > 0.0 {
                true => all.map(|all| ((all as f64 * share) as u64).max(least)),
                false => Some(0),
            };
            let tokens =
                count.map(|count| TokenCount { tokens: (count as f64 * mean) as u64, is_exact: false });
            Arc::new(Side { shared: shared.clone(), is_held_out, count, tokens })
        };
        Ok(Sides { train: side(false), held_out: side(true), content })
    }
}

fn encoded(vocabulary: &Vocabulary, document: &Document) -> Result<Vec<u32>, DataError> {
    let tokens = vocabulary.encode_document(&document.text);
    tokens.map_err(|error| DataError { sentence: format!("{}: {error}", document.place), ..error })
}

/// State of a source that both of its sides read.
struct Shared {
    blocks: Blocks,
    are_few: bool,
    threshold: u64,
    vocabulary: Vocabulary,
    left_out: Mutex<LeftOut>,
}

/// Skipped documents so far, and the number at the last report.
#[derive(Default)]
struct LeftOut {
    skipped: Skipped,
    reported: u64,
}

struct Side {
    shared: Arc<Shared>,
    is_held_out: bool,
    count: Option<u64>,
    tokens: Option<TokenCount>,
}

impl Documents for Side {
    fn in_blocks(&self) -> Option<&dyn InBlocks> {
        Some(self)
    }

    fn count(&self) -> Option<u64> {
        self.count
    }

    fn tokens(&self) -> Option<TokenCount> {
        self.tokens
    }

    fn is_tokenised_as_read(&self) -> bool {
        true
    }

    fn append(&self, _: u64, _: &mut Vec<u32>, _: &mut Spent) -> Result<(), DataError> {
        unreachable!("documents of blocks have no numbers")
    }
}

impl InBlocks for Side {
    fn blocks(&self) -> u64 {
        self.shared.blocks.count()
    }

    fn are_few(&self) -> bool {
        self.shared.are_few
    }

    fn walk(&self, places: Places, from: StreamPosition) -> Box<dyn Walk> {
        let (sender, windows) = sync_channel(QUEUED_WINDOWS);
        let (shared, is_held_out) = (self.shared.clone(), self.is_held_out);
        let work = move || {
            if let Err(error) = read_ahead(&shared, is_held_out, &places, from, &sender) {
                // Sending fails only where the receiver is gone.
                let _ = sender.send(Err(error));
            }
        };
        // The thread ends when its receiver is gone. It is not joined, because it may be waiting for a server.
        let begun = std::thread::Builder::new().name("stream".into()).spawn(work);
        let windows = match begun {
            Ok(_) => Ok(windows),
            Err(error) => {
                Err(DataError::environment(format!("A thread that reads cannot be started: {error}.")))
            }
        };
        Box::new(BlockWalk { windows, shared: self.shared.clone(), window: Window::default(), next: 0 })
    }

    fn take_left_out(&self) -> Vec<String> {
        let mut left_out = self.shared.left_out.lock().expect("no reader panics");
        // Reports each time the number has doubled.
        if left_out.skipped.total() < (2 * left_out.reported).max(1) {
            return Vec::new();
        }
        left_out.reported = left_out.skipped.total();
        vec![format!("left out of {} so far: {}", shown(self.shared.blocks.inputs()), left_out.skipped)]
    }
}

/// Documents that were shuffled together.
#[derive(Default)]
struct Window {
    /// The place of the block in the stream.
    block: u64,
    /// Each document with the number of earlier documents in the block.
    documents: Vec<(u64, Document)>,
}

/// Sends the windows of a stream from a position on, until the receiver is gone.
fn read_ahead(
    shared: &Shared,
    is_held_out: bool,
    places: &Places,
    from: StreamPosition,
    sender: &SyncSender<Result<Window, DataError>>,
) -> Result<(), DataError> {
    for block in from.block.. {
        if places.is_end(block) {
            break;
        }
        let mut reader = shared.blocks.read(places.at(block))?;
        let shuffle = key(key(places.order.seed(), SHUFFLE), places.position(block));
        let (mut number, mut first) = (0, 0);
        while let Some(read) = window(&mut reader)? {
            let permutation = Permutation::new(read.len() as u64, key(shuffle, number));
            number += 1;
            let mut read: Vec<Option<Document>> = read.into_iter().map(Some).collect();
            let shuffled =
                (0..read.len() as u64).filter_map(|place| read[permutation.at(place) as usize].take());
            let is_of_side = |document: &Document| {
                (fingerprint(document.text.as_bytes()) < shared.threshold) == is_held_out
            };
            let of_side: Vec<(u64, Document)> = (first..).zip(shuffled.filter(is_of_side)).collect();
            first += of_side.len() as u64;
            let begin = if block == from.block { from.document } else { 0 };
            let is_own = |(at, _): &(u64, Document)| *at >= begin && places.takes(block, *at);
            let window = Window { block, documents: of_side.into_iter().filter(is_own).collect() };
            if !window.documents.is_empty() && sender.send(Ok(window)).is_err() {
                return Ok(());
            }
        }
        if reader.skipped().total() > 0 {
            shared.left_out.lock().expect("no reader panics").skipped.merge(reader.skipped());
        }
    }
    Ok(())
}

/// The next documents of a block, up to the bytes of a window; `None` at the end of the block.
fn window(reader: &mut Reader) -> Result<Option<Vec<Document>>, DataError> {
    let (mut documents, mut bytes) = (Vec::new(), 0);
    while bytes < WINDOW_BYTES {
        let Some(document) = reader.next().transpose()? else { break };
        bytes += document.text.len();
        documents.push(document);
    }
    Ok((!documents.is_empty()).then_some(documents))
}

/// The documents of a stream, read ahead by a thread.
struct BlockWalk {
    windows: Result<Receiver<Result<Window, DataError>>, DataError>,
    shared: Arc<Shared>,
    window: Window,
    next: usize,
}

impl Walk for BlockWalk {
    fn next(
        &mut self,
        position: &mut StreamPosition,
        out: &mut Vec<u32>,
        spent: &mut Spent,
    ) -> Result<bool, DataError> {
        let since = Instant::now();
        while self.next == self.window.documents.len() {
            let windows = self.windows.as_ref().map_err(DataError::clone)?;
            let Ok(window) = windows.recv() else { return Ok(false) };
            (self.window, self.next) = (window?, 0);
        }
        let read = Instant::now();
        spent.reading += read - since;
        let (at, document) = &self.window.documents[self.next];
        let tokens = encoded(&self.shared.vocabulary, document)?;
        position.block = self.window.block;
        position.document = *at;
        self.next += 1;
        spent.tokenising += read.elapsed();
        out.reserve_exact(tokens.len() + 1);
        out.extend(tokens);
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
