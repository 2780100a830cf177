//! Splits inputs into blocks that can be read independently, derived from file sizes alone.
//!
//! A block of a file is what begins in a range of its bytes: lines of JSONL, or row groups of parquet. Files that can only be
//! read from their beginning, compressed ones and those whose records may span lines, are one block each. Counting blocks
//! therefore reads nothing, and a block is found without reading what precedes it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::bytes::Bytes;
use super::fault::ReadError;
use super::find::{Input, unreadable};
use super::parquet::RowGroups;
use super::reader::Reader;
use super::{Compression, Format, OnError, ReadOptions};
use crate::error::DataError;

/// Smallest and largest size of a block.
const LEAST_BYTES: u64 = 16 << 10;
const MOST_BYTES: u64 = 8 << 20;
/// Target number of blocks, large enough that their order is a shuffle.
const TARGET_BLOCKS: u64 = 512;
/// Number of cached parquet footers; each takes some 50 bytes per row group.
const CACHED_FOOTERS: usize = 256;

pub(crate) struct Blocks {
    inputs: Vec<Input>,
    options: ReadOptions,
    block_bytes: u64,
    /// Number of each input's first block, followed by the total.
    firsts: Vec<u64>,
    /// Footers of the files read last, the latest first.
    footers: Mutex<VecDeque<(usize, RowGroups)>>,
    /// Documents and bytes seen so far: those of the lines that were read, or of the parquet files whose footers were read.
    seen: [AtomicU64; 2],
}

impl Blocks {
    pub fn new(inputs: Vec<Input>, options: ReadOptions) -> Self {
        let total: u64 = inputs.iter().map(|input| input.bytes).sum();
        let block_bytes = (total / TARGET_BLOCKS).clamp(LEAST_BYTES, MOST_BYTES);
        let mut firsts = vec![0];
        for input in &inputs {
            let count = if is_divisible(input) { input.bytes.div_ceil(block_bytes).max(1) } else { 1 };
            firsts.push(firsts[firsts.len() - 1] + count);
        }
        let (footers, seen) = (Mutex::default(), Default::default());
        Self { inputs, options, block_bytes, firsts, footers, seen }
    }

    pub fn count(&self) -> u64 {
        self.firsts[self.inputs.len()]
    }

    /// Number of blocks with documents, counted up to `enough`. Reads footers of parquet files where it has to.
    pub fn filled(&self, enough: u64) -> u64 {
        let mut filled = 0;
        for (number, input) in self.inputs.iter().enumerate() {
            // Every remaining file has at least one.
            if filled + (self.inputs.len() - number) as u64 >= enough {
                return enough;
            }
            filled += match input.format == Format::Parquet && is_divisible(input) {
                true => self.row_groups(number).map_or(1, |groups| groups.ranges(self.block_bytes)),
                false => self.firsts[number + 1] - self.firsts[number],
            };
        }
        filled.min(enough)
    }

    /// Forgets the statistics, so that an estimate uses only what is read from now on.
    pub fn forget(&self) {
        self.footers.lock().expect("no reader panics").clear();
        self.seen.iter().for_each(|seen| seen.store(0, Ordering::Relaxed));
    }

    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// The documents of a block in order.
    pub fn read(&self, block: u64) -> Result<Reader, DataError> {
        let number = self.firsts.partition_point(|first| *first <= block) - 1;
        let input = &self.inputs[number];
        if !is_divisible(input) {
            return Reader::whole(input, &self.options);
        }
        let unreadable = |error| unreadable(&input.path, &error);
        let nth = block - self.firsts[number];
        let extent = self.extent(number, nth);
        if input.format != Format::Parquet {
            return Reader::lines(input, &self.options, extent).map_err(unreadable);
        }
        match self.row_groups(number) {
            Ok(groups) => Reader::row_groups(input, &self.options, &groups, extent).map_err(unreadable),
            Err(ReadError::Invalid(fault)) => {
                // Counts a skipped file once, with its first block.
                let is_reported = nth == 0 || self.options.on_error == OnError::Fail;
                Ok(Reader::lost(input, &self.options, is_reported.then_some(fault)))
            }
            Err(ReadError::Io(error)) => {
                let shown = input.path.display();
                Err(DataError::environment(format!("{shown} cannot be read: {error}.")))
            }
        }
    }

    fn extent(&self, number: usize, nth: u64) -> Range<u64> {
        let start = nth * self.block_bytes;
        let is_last = self.firsts[number] + nth + 1 == self.firsts[number + 1];
        start..if is_last { u64::MAX } else { start + self.block_bytes }
    }

    fn row_groups(&self, number: usize) -> Result<RowGroups, ReadError> {
        let cached = |footers: &mut VecDeque<(usize, RowGroups)>| {
            let found = footers.iter().position(|(of, _)| *of == number)?;
            let footer = footers.remove(found)?;
            footers.push_front(footer.clone());
            Some(footer.1)
        };
        if let Some(groups) = cached(&mut self.footers.lock().expect("no reader panics")) {
            return Ok(groups);
        }
        let input = &self.inputs[number];
        let groups = RowGroups::read(Bytes::open(input, 1)?, &self.options.field)?;
        let mut footers = self.footers.lock().expect("no reader panics");
        if cached(&mut footers).is_none() {
            footers.push_front((number, groups.clone()));
            footers.truncate(CACHED_FOOTERS);
            self.record(groups.rows(), input.bytes);
        }
        Ok(groups)
    }

    fn record(&self, documents: u64, bytes: u64) {
        self.seen[0].fetch_add(documents, Ordering::Relaxed);
        self.seen[1].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records that a document was read from a line of this many bytes.
    pub fn record_line(&self, bytes: u64) {
        if self.inputs.iter().all(|input| input.format == Format::Jsonl) {
            self.record(1, bytes);
        }
    }

    /// The number of all documents, estimated from those seen so far; `None` where the files do not allow it.
    pub fn estimated_documents(&self) -> Option<u64> {
        if !self.inputs.iter().all(is_divisible) {
            return None;
        }
        let total: u64 = self.inputs.iter().map(|input| input.bytes).sum();
        let [documents, bytes] = self.seen.each_ref().map(|seen| seen.load(Ordering::Relaxed) as f64);
        (bytes > 0.0).then(|| (total as f64 * documents / bytes) as u64)
    }
}

/// Whether a file can be read in several blocks.
fn is_divisible(input: &Input) -> bool {
    input.compression == Compression::None && matches!(input.format, Format::Jsonl | Format::Parquet)
}
