//! Training rows in their global order, packed ahead of time by threads.
//!
//! Global row `i` is the next row of stream `i % STREAMS` and goes to the rank that has its lane. Thread `t` of `n` owns every
//! `n`-th stream and packs its rows in global order into a bounded queue of its own. The reader therefore knows which queue
//! holds the next row, and neither order nor contents depend on the number of threads.
//!
//! A rank walks only the streams that hold rows of its lanes. Where other ranks have rows of a stream too, each of them packs
//! every row of the stream and keeps its own. A rank therefore knows the positions of its own streams only; the cursors of all
//! ranks together have every position.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::documents::{Documents, InBlocks, Spent, TokenCount};
use super::lanes::Lanes;
use super::pack::{Packing, Row, STREAMS, Segment, Stream, StreamPosition};
use super::permutation::Order;
use super::stall::{Gauge, Waited};
use crate::error::DataError;

/// State from which training resumes. Restoring reads at most one document per stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The global index of the next row.
    pub row: u64,
    /// Position of each stream; `None` for a stream that only other ranks walk.
    pub streams: [Option<StreamPosition>; STREAMS],
    /// Hash of everything the positions refer to: data, tokeniser and seed. A cursor is refused where the hash differs.
    pub data: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// The lanes of this rank.
    pub lanes: Lanes,
    /// Packing threads. More than the number of streams that hold rows of the lanes are of no use.
    pub threads: usize,
    /// Most bytes of packed rows in all queues together; each queue holds at least one row. Further memory is one row per thread,
    /// one row in the reader, and one document per stream.
    pub queue_bytes: usize,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self { lanes: Lanes::ONE, threads: 2, queue_bytes: 16 << 20 }
    }
}

/// Rows of `context` tokens each, one after another in every vector. Token `t` of row `r` is at `r * context + t`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    pub context: usize,
    pub tokens: Vec<i32>,
    /// Token to predict; -1 where there is none.
    pub targets: Vec<i32>,
    /// Weight of the prediction in the loss: 1, or 0 where there is no target.
    pub weights: Vec<f32>,
    /// Position within the segment.
    pub positions: Vec<i32>,
    /// Segments of each row, in order, covering the row: one per document with the document mask, otherwise a single one.
    pub segments: Vec<Vec<Segment>>,
    /// Global index of each row.
    pub sample: Vec<u64>,
    /// Passes over the training text after these rows; 0 for an endless source. Where tokens are not counted beforehand, it is
    /// estimated from the streams that this rank walks.
    pub epoch: f64,
    /// Time the caller waited for packed rows, by cause.
    pub waited: Waited,
}

impl Rows {
    pub fn count(&self) -> usize {
        self.sample.len()
    }

    /// A subset of these rows, by index.
    pub fn picked(&self, places: &[usize]) -> Rows {
        let context = self.context;
        let of = |values: &[i32]| -> Vec<i32> {
            places.iter().flat_map(|place| &values[place * context..(place + 1) * context]).copied().collect()
        };
        let weights = places.iter().flat_map(|place| &self.weights[place * context..(place + 1) * context]);
        Rows {
            context,
            tokens: of(&self.tokens),
            targets: of(&self.targets),
            weights: weights.copied().collect(),
            positions: of(&self.positions),
            segments: places.iter().map(|place| self.segments[*place].clone()).collect(),
            sample: places.iter().map(|place| self.sample[*place]).collect(),
            epoch: self.epoch,
            waited: Waited::default(),
        }
    }

    pub(crate) fn push(&mut self, sample: u64, row: Row) {
        self.context = row.tokens.len();
        self.weights.extend(row.targets.iter().map(|target| if *target < 0 { 0.0 } else { 1.0 }));
        self.tokens.extend(row.tokens);
        self.targets.extend(row.targets);
        self.positions.extend(row.positions);
        self.segments.push(row.segments);
        self.sample.push(sample);
    }
}

pub struct Loader {
    documents: Arc<dyn Documents>,
    cursor: Cursor,
    context: usize,
    epoch: Epoch,
    gauge: Arc<Gauge>,
    waited: Waited,
    /// One per thread. Dropped first, which ends the threads.
    queues: Vec<Receiver<Result<Packed, DataError>>>,
    /// The queue that has the rows of each stream; `None` for a stream that is not walked here.
    queue_of: [Option<usize>; STREAMS],
    threads: Vec<JoinHandle<()>>,
    failed: Option<DataError>,
}

/// The unit that one pass through the data is measured in.
#[derive(Debug, Clone, Copy)]
enum Epoch {
    /// Tokens, frames included.
    Tokens(u64),
    /// Documents, where tokens are not counted beforehand.
    Documents(u64),
    /// Blocks, where documents are not counted either: as many as all streams read in one pass.
    Blocks(u64),
    Endless,
}

/// A row as a thread sends it.
struct Packed {
    /// `None` where the row belongs to another rank.
    row: Option<Row>,
    /// Position of the stream after the row.
    position: StreamPosition,
    /// Time spent on it.
    spent: Spent,
    packing: Duration,
}

impl Loader {
    pub(crate) fn new(
        documents: Arc<dyn Documents>,
        order: Order,
        packing: Packing,
        mut cursor: Cursor,
        options: LoaderOptions,
    ) -> Result<Self, DataError> {
        let walked = options.lanes.streams();
        assert!(!walked.is_empty(), "an update has rows of every rank");
        let passed =
            |blocks: &dyn InBlocks| blocks.blocks() * if blocks.are_few() { STREAMS as u64 } else { 1 };
        let in_blocks = documents.in_blocks().map(passed);
        let epoch = match (documents.tokens(), documents.count()) {
            _ if in_blocks.is_some() => Epoch::Blocks(in_blocks.unwrap_or_default()),
            (Some(TokenCount { tokens, is_exact: true }), Some(count)) if !order.is_mixed() => {
                Epoch::Tokens(tokens + packing.frame.tokens() * count)
            }
            (_, Some(count)) => Epoch::Documents(count),
            (_, None) => Epoch::Endless,
        };
        let gauge = Arc::new(Gauge::default());
        let thread_count = options.threads.clamp(1, walked.len());
        let queue_rows = (options.queue_bytes / thread_count / Row::bytes(packing.context)).max(1);
        let mut queue_of = [None; STREAMS];
        for (place, stream) in walked.iter().enumerate() {
            queue_of[*stream] = Some(place % thread_count);
            if cursor.streams[*stream].is_none() {
                return Err(DataError::input(format!(
                    "The checkpoint does not say where stream {stream} of the training text goes on: continue from another \
                     checkpoint, or begin a new run."
                )));
            }
        }
        for (position, queue) in cursor.streams.iter_mut().zip(queue_of) {
            *position = position.filter(|_| queue.is_some());
        }
        let mut queues = Vec::new();
        let mut threads = Vec::new();
        for thread in 0..thread_count {
            let stream = |(number, position): (usize, &Option<StreamPosition>)| {
                let position = position.filter(|_| queue_of[number] == Some(thread))?;
                Some(Stream::training(documents.clone(), order.clone(), packing, number, position))
            };
            let streams: Vec<Option<Stream>> = cursor.streams.iter().enumerate().map(stream).collect();
            let (sender, queue) = sync_channel(queue_rows);
            let first_row = cursor.row;
            let name = format!("loader-{thread}");
            let gauge = gauge.clone();
            let work = move || pack(streams, first_row, options, &sender, &gauge);
            threads.push(std::thread::Builder::new().name(name).spawn(work).map_err(|error| {
                DataError::environment(format!("A loader thread cannot be started: {error}."))
            })?);
            queues.push(queue);
        }
        let (context, waited, failed) = (packing.context, Waited::default(), None);
        Ok(Self { documents, cursor, context, epoch, gauge, waited, queues, queue_of, threads, failed })
    }

    /// Tokens per row.
    pub fn context(&self) -> usize {
        self.context
    }

    /// This rank's rows among the next `count` rows of all ranks. An error is final: the cursor stays before the requested
    /// rows, and every later call returns the same error.
    pub fn next_rows(&mut self, count: usize) -> Result<Rows, DataError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let mut rows = Rows { context: self.context, ..Rows::default() };
        let mut cursor = self.cursor.clone();
        for _ in 0..count {
            let stream = (cursor.row % STREAMS as u64) as usize;
            let packed = self.queue_of[stream].map(|queue| self.receive(queue, &mut rows.waited));
            match packed.transpose() {
                Ok(packed) => {
                    if let Some(Packed { row, position, .. }) = packed {
                        row.into_iter().for_each(|row| rows.push(cursor.row, row));
                        cursor.streams[stream] = Some(position);
                    }
                    cursor.row += 1;
                }
                Err(error) => {
                    self.failed = Some(error.clone());
                    return Err(error);
                }
            }
        }
        self.cursor = cursor;
        self.waited += rows.waited;
        rows.epoch = match self.epoch {
            Epoch::Tokens(tokens) => self.cursor.row as f64 * self.context as f64 / tokens as f64,
            Epoch::Documents(count) => self.begun(|stream| stream.document) / count as f64,
            Epoch::Blocks(count) => self.begun(|stream| stream.block) / count as f64,
            Epoch::Endless => 0.0,
        };
        Ok(rows)
    }

    /// Sum over all streams of what each has begun. Streams of other ranks are assumed to be as far as this rank's.
    fn begun(&self, of: impl Fn(&StreamPosition) -> u64) -> f64 {
        let walked = self.cursor.streams.iter().flatten();
        let (begun, streams) =
            walked.fold((0, 0), |(begun, streams), stream| (begun + of(stream), streams + 1));
        begun as f64 * (STREAMS as f64 / streams as f64)
    }

    /// Sentences about documents that were skipped while reading, since the last call.
    pub fn take_left_out(&self) -> Vec<String> {
        self.documents.in_blocks().map(InBlocks::take_left_out).unwrap_or_default()
    }

    /// Position of the row after the last one returned, as far as this rank knows it.
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Total time that `next_rows` has waited, by cause.
    pub fn waited(&self) -> Waited {
        self.waited
    }

    /// Most bytes that rows and documents have taken so far.
    pub fn peak_bytes(&self) -> usize {
        self.gauge.peak()
    }

    fn receive(&self, queue: usize, waited: &mut Waited) -> Result<Packed, DataError> {
        let queue = &self.queues[queue];
        let packed = match queue.try_recv() {
            Ok(packed) => packed?,
            Err(_) => {
                let since = Instant::now();
                let packed = queue.recv();
                let packed = packed.expect("a loader thread packs until its reader is gone")?;
                *waited += Waited::new(since.elapsed(), packed.spent, packed.packing);
                packed
            }
        };
        if packed.row.is_some() {
            self.gauge.remove(Row::bytes(self.context));
        }
        Ok(packed)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.queues.clear();
        for thread in self.threads.drain(..) {
            // A panic in a thread was printed where it happened and reached the reader as a closed queue.
            let _ = thread.join();
        }
    }
}

/// Packs the rows of the given streams in global order until the reader is gone or a document cannot be read.
fn pack(
    mut streams: Vec<Option<Stream>>,
    first_row: u64,
    options: LoaderOptions,
    queue: &SyncSender<Result<Packed, DataError>>,
    gauge: &Gauge,
) {
    for row in first_row.. {
        let Some(stream) = &mut streams[(row % STREAMS as u64) as usize] else { continue };
        let (since, held) = (Instant::now(), stream.held_bytes());
        let packed = stream.row().map(|packed| {
            let packed = packed.expect("a training stream never ends");
            let row = options.lanes.of_sample(row).map(|_| packed);
            row.iter().for_each(|row| gauge.add(Row::bytes(row.tokens.len())));
            let spent = stream.take_spent();
            let packing = since.elapsed().saturating_sub(spent.reading + spent.tokenising);
            Packed { row, position: stream.position(), spent, packing }
        });
        match stream.held_bytes() {
            now if now > held => gauge.add(now - held),
            now => gauge.remove(held - now),
        }
        let failed = packed.is_err();
        if queue.send(packed).is_err() || failed {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::order::documents::TokenTable;
    use crate::order::pack::Frame;

    const CONTEXT: usize = 16;

    /// `count` documents of odd lengths; every token of document `d` is `d + 2`.
    fn documents(count: u32) -> Arc<dyn Documents> {
        let documents: Vec<Vec<u32>> =
            (0..count).map(|index| vec![index + 2; 1 + (index as usize * 7) % 40]).collect();
        let documents: Vec<&[u32]> = documents.iter().map(Vec::as_slice).collect();
        Arc::new(TokenTable::new(&documents, count as usize + 2))
    }

    fn start() -> Cursor {
        let begin = StreamPosition::default();
        Cursor { row: 0, streams: [Some(begin); STREAMS], data: String::new() }
    }

    fn loader_of(
        documents: Arc<dyn Documents>,
        cursor: Cursor,
        options: LoaderOptions,
        document_mask: bool,
    ) -> Loader {
        let order = Order::new(documents.count(), 9);
        let packing = Packing { context: CONTEXT, document_mask, frame: Frame::of(0, 1) };
        Loader::new(documents, order, packing, cursor, options).unwrap()
    }

    fn loader(count: u32, cursor: Cursor, options: LoaderOptions) -> Loader {
        loader_of(documents(count), cursor, options, false)
    }

    fn next(loader: &mut Loader, count: usize) -> Rows {
        Rows { waited: Waited::default(), ..loader.next_rows(count).unwrap() }
    }

    #[test]
    fn one_two_and_seven_threads_give_the_same_rows() {
        for mask in [false, true] {
            let all = [1, 2, 7].map(|threads| {
                // Each queue holds one row, so that threads wait for the reader and the reader for threads.
                let options = LoaderOptions { threads, queue_bytes: 1, ..LoaderOptions::default() };
                let mut loader = loader_of(documents(37), start(), options, mask);
                let rows = (0..40).map(|_| next(&mut loader, 5)).collect::<Vec<_>>();
                (rows, loader.cursor().clone())
            });
            assert_eq!(all[0], all[1]);
            assert_eq!(all[0], all[2]);
        }
    }

    #[test]
    fn every_cursor_leads_to_the_same_rows_again() {
        // 37 documents have about 810 tokens: 400 rows are more than seven epochs.
        let mut unbroken = loader(37, start(), LoaderOptions::default());
        let mut cursors = vec![unbroken.cursor().clone()];
        let mut rows = Vec::new();
        for _ in 0..400 {
            rows.push(next(&mut unbroken, 1));
            cursors.push(unbroken.cursor().clone());
        }
        assert!(rows[399].epoch > 7.0);
        for at in (0..390).step_by(3) {
            let saved = serde_json::to_string(&cursors[at]).unwrap();
            let mut resumed = loader(
                37,
                serde_json::from_str(&saved).unwrap(),
                LoaderOptions { threads: 1, ..LoaderOptions::default() },
            );
            for row in &rows[at..at + 9] {
                assert_eq!(next(&mut resumed, 1), *row);
            }
            assert_eq!(*resumed.cursor(), cursors[at + 9]);
        }
    }

    #[test]
    fn an_epoch_reads_every_document_once() {
        for count in [3u32, 8, 37] {
            let table = documents(count);
            let epoch_tokens = table.tokens().unwrap().tokens + 2 * u64::from(count);
            // Long enough that every stream is well into the fourth epoch.
            let rows_wanted = epoch_tokens as usize * 6 / CONTEXT + 64;
            let mut loader = loader(count, start(), LoaderOptions::default());
            let rows = next(&mut loader, rows_wanted);
            // Joins the rows of each stream and splits them into documents again.
            let mut streams: Vec<Vec<i32>> = vec![Vec::new(); STREAMS];
            for (tokens, row) in rows.tokens.chunks(CONTEXT).zip(&rows.sample) {
                streams[*row as usize % STREAMS].extend(tokens);
            }
            let mut seen: HashMap<(u64, i32), u32> = HashMap::new();
            for (lane, tokens) in streams.iter().enumerate() {
                let documents =
                    tokens.split_inclusive(|token| *token == 1).filter(|tokens| tokens.ends_with(&[1]));
                for (place, document) in documents.enumerate() {
                    let index = document[1] - 2;
                    assert_eq!(document.len(), 3 + (index as usize * 7) % 40, "a document is whole");
                    let epoch = (place * STREAMS + lane) as u64 / u64::from(count);
                    *seen.entry((epoch, index)).or_default() += 1;
                }
            }
            for epoch in 0..3 {
                for index in 0..count as i32 {
                    assert_eq!(
                        seen.get(&(epoch, index)),
                        Some(&1),
                        "document {index} in epoch {epoch} of {count}"
                    );
                }
            }
        }
    }

    /// Every position that some rank knows; ranks that know the same position agree on it.
    fn together(cursors: &[Cursor]) -> Cursor {
        let mut whole = cursors[0].clone();
        for cursor in &cursors[1..] {
            assert_eq!((cursor.row, &cursor.data), (whole.row, &whole.data));
            for (known, other) in whole.streams.iter_mut().zip(cursor.streams) {
                assert!(known.is_none() || other.is_none() || *known == other);
                *known = known.or(other);
            }
        }
        whole
    }

    #[test]
    fn ranks_share_the_rows_and_the_positions() {
        let mut all = loader(37, start(), LoaderOptions::default());
        let whole = next(&mut all, 60);
        for ranks in [2, 3, 4, 8, 16] {
            let mut tokens = vec![Vec::new(); 60];
            let mut cursors = Vec::new();
            for first in 0..ranks {
                let lanes = Lanes { first, count: 1, of: ranks, together: 1, batch: 20 };
                let options = LoaderOptions { lanes, ..LoaderOptions::default() };
                let mut loader = loader(37, start(), options);
                for _ in 0..3 {
                    let rows = next(&mut loader, 20);
                    for (row, sample) in rows.tokens.chunks(CONTEXT).zip(&rows.sample) {
                        assert_eq!(*sample as usize % 20 % ranks, first);
                        assert!(tokens[*sample as usize].is_empty(), "row {sample} was given twice");
                        tokens[*sample as usize] = row.to_vec();
                    }
                }
                cursors.push(loader.cursor().clone());
            }
            assert_eq!(together(&cursors), *all.cursor());
            assert_eq!(tokens.concat(), whole.tokens);
            let refused = |cursor: &Cursor| {
                let packing = Packing { context: CONTEXT, document_mask: false, frame: Frame::of(0, 1) };
                let order = Order::new(Some(37), 9);
                Loader::new(documents(37), order, packing, cursor.clone(), LoaderOptions::default()).err()
            };
            let knows_all = |cursor: &Cursor| cursor.streams.iter().all(Option::is_some);
            for cursor in &cursors {
                let said = refused(cursor).map(|error| error.sentence);
                assert_eq!(said.is_none(), knows_all(cursor), "{said:?}");
                assert!(said.is_none_or(|said| said.starts_with("The checkpoint does not say where stream")));
            }
        }
    }

    /// Packed rows are counted by the documents that are read for them: here a document with its frame is one row.
    #[test]
    fn a_rank_reads_and_packs_only_the_streams_of_its_lanes() {
        const UPDATES: usize = 50;
        for (ranks, lanes, streams, packed_for_one) in [
            (1, 8, 8, 1),
            (2, 8, 4, 1),
            (4, 8, 2, 1),
            (8, 8, 1, 1),
            (4, 4, 2, 1),
            (3, 3, 8, 3),
            (16, 16, 1, 2),
        ] {
            let (count, batch) = (lanes / ranks, 48);
            for rank in 0..ranks {
                let documents = Arc::new(Counted { length: CONTEXT - 2, read: Default::default() });
                let lanes = Lanes { first: rank * count, count, of: lanes, together: 1, batch };
                let options = LoaderOptions { lanes, threads: 2, queue_bytes: 1 };
                let mut loader = loader_of(documents.clone(), start(), options, false);
                let kept: usize = (0..UPDATES).map(|_| next(&mut loader, batch).count()).sum();
                assert_eq!(kept, UPDATES * batch / ranks, "rank {rank} of {ranks}");
                let walked = loader.cursor().streams.iter().flatten().count();
                assert_eq!(walked, streams, "rank {rank} of {ranks}");
                drop(loader);
                let read = documents.read.load(std::sync::atomic::Ordering::Relaxed) as usize;
                // The last target of a row is the first token of the next one. Besides that, each thread is at most two rows
                // ahead.
                let most = kept * packed_for_one + streams + 2 * 2 + 2;
                assert!(
                    (kept * packed_for_one..=most).contains(&read),
                    "rank {rank} of {ranks} read {read} documents for {kept} rows"
                );
            }
        }
    }

    #[test]
    fn epochs_are_measured_by_the_streams_of_a_rank() {
        // Tokens are not counted, so epochs are measured in documents.
        let read = |ranks: usize| {
            let documents = Arc::new(Counted { length: 100, read: Default::default() });
            let lanes = Lanes { first: 0, count: 8 / ranks, of: 8, together: 1, batch: 16 };
            let options = LoaderOptions { lanes, ..LoaderOptions::default() };
            next(&mut loader_of(documents, start(), options, false), 8000).epoch
        };
        let whole = read(1);
        assert_eq!(whole, 8.0 * (1000.0 * CONTEXT as f64 / 102.0).floor() / 5000.0);
        assert!([2, 4, 8].iter().all(|ranks| (read(*ranks) / whole - 1.0).abs() < 0.01));
    }

    /// Documents that count how often they are read.
    struct Counted {
        length: usize,
        read: std::sync::atomic::AtomicU64,
    }

    impl Documents for Counted {
        fn count(&self) -> Option<u64> {
            Some(5000)
        }
        fn tokens(&self) -> Option<TokenCount> {
            Some(TokenCount { tokens: 5000 * self.length as u64, is_exact: false })
        }
        fn append(&self, index: u64, out: &mut Vec<u32>, _: &mut Spent) -> Result<(), DataError> {
            self.read.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            out.reserve_exact(self.length + 1);
            out.extend(std::iter::repeat_n(index as u32 % 99 + 2, self.length));
            Ok(())
        }
    }

    #[test]
    fn memory_stays_under_its_bound_whatever_the_documents() {
        for length in [3, 40, 3000, 100_000] {
            let documents = Arc::new(Counted { length, read: Default::default() });
            let options = LoaderOptions { threads: 3, queue_bytes: 16 << 10, ..LoaderOptions::default() };
            let mut loader = loader_of(documents, start(), options, false);
            let row_bytes = Row::bytes(CONTEXT);
            let longest = 4 * (length + 2).max(8);
            let bound = options.queue_bytes + 4 * row_bytes + STREAMS * longest;
            let mut given = 0;
            while given < 100 * bound.min(1 << 20) {
                // Threads run ahead as far as they can.
                given += 50 * row_bytes;
                loader.next_rows(50).unwrap();
            }
            let peak = loader.peak_bytes();
            assert!(peak <= bound, "{peak} bytes are more than {bound} with documents of {length} tokens");
            assert!(peak > bound / 4, "{peak} of {bound} bytes: the bound says nothing");
        }
    }

    #[test]
    fn resuming_in_the_middle_reads_one_document_per_stream() {
        let counted = |length| Arc::new(Counted { length, read: Default::default() });
        let read = |documents: &Arc<Counted>| documents.read.load(std::sync::atomic::Ordering::Relaxed);
        let (first, again) = (counted(100), counted(100));
        let options = LoaderOptions { threads: 1, queue_bytes: 1, ..LoaderOptions::default() };
        let mut loader = loader_of(first.clone(), start(), options, false);
        loader.next_rows(3000).unwrap();
        let cursor = loader.cursor().clone();
        drop(loader);
        assert!(read(&first) > 400);
        let mut resumed = loader_of(again.clone(), cursor, options, false);
        // As many rows as there are streams: each needs its current document, and perhaps the next one.
        resumed.next_rows(STREAMS).unwrap();
        drop(resumed);
        let read = read(&again);
        assert!((1..=2 * STREAMS as u64 + 2).contains(&read), "{read} documents were read");
    }

    #[test]
    fn waits_are_explained() {
        struct Slow;
        impl Documents for Slow {
            fn count(&self) -> Option<u64> {
                None
            }
            fn tokens(&self) -> Option<TokenCount> {
                None
            }
            fn append(&self, _: u64, out: &mut Vec<u32>, spent: &mut Spent) -> Result<(), DataError> {
                // The durations are reported, not measured: no clock is involved.
                spent.tokenising += Duration::from_secs(3600);
                out.extend([2; CONTEXT]);
                Ok(())
            }
        }
        let options = LoaderOptions { threads: 1, queue_bytes: 1, ..LoaderOptions::default() };
        let mut loader = loader_of(Arc::new(Slow), start(), options, false);
        for _ in 0..2000 {
            loader.next_rows(1).unwrap();
        }
        let waited = loader.waited();
        assert_eq!(
            waited.total,
            waited.reading + waited.tokenising + waited.decoding + waited.packing + waited.scheduling
        );
        assert!(waited.total.is_zero() || waited.cause() == Some("tokenising"), "{waited:?}");
    }

    #[test]
    fn dropping_a_loader_ends_its_threads() {
        let table = documents(5);
        let options = LoaderOptions { threads: 8, ..LoaderOptions::default() };
        let loader = loader_of(table.clone(), start(), options, false);
        assert!(Arc::strong_count(&table) > 1);
        drop(loader);
        assert_eq!(Arc::strong_count(&table), 1, "a thread still holds the documents");
    }

    #[test]
    fn a_document_that_cannot_be_read_is_an_error_at_its_row() {
        struct Broken;
        impl Documents for Broken {
            fn count(&self) -> Option<u64> {
                None
            }
            fn tokens(&self) -> Option<TokenCount> {
                None
            }
            fn append(&self, index: u64, out: &mut Vec<u32>, _: &mut Spent) -> Result<(), DataError> {
                if index == 19 {
                    return Err(DataError::input("Document 19 is broken."));
                }
                out.extend([2; CONTEXT - 2]);
                Ok(())
            }
        }
        let mut loader = loader_of(Arc::new(Broken), start(), LoaderOptions::default(), false);
        // A document is a row here, and row 11 needs the first token of document 19 for its last target.
        assert_eq!(loader.next_rows(11).unwrap().count(), 11);
        assert_eq!(loader.next_rows(1), Err(DataError::input("Document 19 is broken.")));
        assert_eq!(loader.cursor().row, 11);
        assert_eq!(loader.next_rows(1), Err(DataError::input("Document 19 is broken.")));
    }
}
