//! The threads of a preparation: a reader, workers and a writer. The writer takes results in the order their batches were read.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::folder::Folder;
use super::{NO_TOKENS, Position, Preparation, Progress, Unfinished};
use crate::error::DataError;
use crate::formats::{self, Document, Input, ReadOptions, Skipped};
use crate::order::documents::MAX_DOCUMENT_TOKENS;
use crate::random::fingerprint;
use crate::text::shards::manifest::{ShardEntry, hexadecimal};
use crate::text::shards::shard::ShardWriter;
use crate::text::tokenizer::Vocabulary;
use flatout_waits::{self as waits, Unit};

/// Text per batch. Each worker has one batch, and as many again are queued.
const BATCH_BYTES: usize = 256 << 10;
const BATCH_DOCUMENTS: usize = 1024;
/// Interval between progress reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// Skipped documents by reason.
pub(super) type Counts = BTreeMap<String, u64>;

/// Where the reader begins, and with which state.
pub(super) struct ReaderStart<'a> {
    pub inputs: &'a [Input],
    pub options: &'a ReadOptions,
    pub from: Position,
    /// Documents skipped in the inputs before the first one.
    pub skipped_before: Counts,
    /// The first input, where it is already open, and the documents that were already read from it.
    pub first: Option<formats::Reader>,
    pub head: Vec<Document>,
}

/// Documents of one input, in order.
struct Batch {
    at: Position,
    texts: Vec<String>,
    bytes: usize,
    /// Documents skipped in all inputs before this one.
    skipped_before: Arc<Counts>,
}

/// A tokenised batch: hash, bytes and tokens of each text.
struct Tokenized {
    at: Position,
    documents: Vec<(u64, usize, Vec<u32>)>,
    skipped_before: Arc<Counts>,
}

type Answer = Result<Tokenized, DataError>;

/// Writes the remaining shards. If this fails, the next attempt continues from the last saved state.
pub(super) fn tokenize(
    spec: &Preparation,
    folder: &Folder,
    state: &mut Unfinished,
    vocabulary: &Vocabulary,
    start: ReaderStart<'_>,
    report: &mut dyn FnMut(&Progress),
) -> Result<(Progress, Skipped), DataError> {
    let workers = spec.workers.max(1);
    let inputs = start.inputs.len();
    // Limits the number of batches in flight, which bounds the memory.
    let (order, answers) = sync_channel::<Receiver<Answer>>(2 * workers);
    let (give, work) = sync_channel::<(Batch, SyncSender<Answer>)>(workers);
    let work = Mutex::new(work);
    std::thread::scope(|scope| {
        // On an error, the threads that were started end when their channels are dropped.
        let cannot = |error| DataError::environment(format!("A thread cannot be started: {error}."));
        let builder = || std::thread::Builder::new().name("tokenise".into());
        let reader = builder().spawn_scoped(scope, move || read(start, &order, &give)).map_err(cannot)?;
        for _ in 0..workers {
            // Each worker has its own tokeniser, so that no worker waits for a shared cache of words.
            let (vocabulary, work) = (vocabulary.clone(), &work);
            let tokenise = move || {
                loop {
                    let next = work.lock().expect("no worker panics while it takes work").recv();
                    let Ok((batch, answer)) = next else { return };
                    // Sending fails only where the writer has failed.
                    let _ = answer.send(encode(&vocabulary, batch));
                }
            };
            builder().spawn_scoped(scope, tokenise).map_err(cannot)?;
        }
        let written = Writer::new(spec, folder, state, inputs).run(&answers, report);
        // The reader and then the workers end when their receivers are gone.
        drop(answers);
        let (skipped, counts) = reader.join().expect("the reader does not panic");
        let progress = written?;
        for (reason, count) in counts {
            *state.totals.skipped.entry(reason).or_default() += count;
        }
        Ok((progress, skipped))
    })
}

/// Reads all inputs from the first position on. Returns the skipped documents: those it read, with places, and the counts of
/// all.
fn read(
    start: ReaderStart<'_>,
    order: &SyncSender<Receiver<Answer>>,
    give: &SyncSender<(Batch, SyncSender<Answer>)>,
) -> (Skipped, Counts) {
    let ReaderStart { inputs, options, from, skipped_before, mut first, head } = start;
    let mut all = Skipped::default();
    let mut counts = Arc::new(skipped_before);
    let mut head = Some(head);
    // False when the receiver of batches is gone.
    let send = |answer: Receiver<Answer>, batch: Option<(Batch, SyncSender<Answer>)>| {
        order.send(answer).is_ok() && batch.is_none_or(|batch| give.send(batch).is_ok())
    };
    let fail = |error: DataError| {
        let (tell, answer) = sync_channel(1);
        let _ = tell.send(Err(error));
        send(answer, None);
    };
    for (number, input) in inputs.iter().enumerate().skip(from.input) {
        let mut reader = match first.take().map_or_else(|| formats::read(input, options), Ok) {
            Ok(reader) => reader,
            Err(error) => {
                fail(error);
                return (all, Counts::clone(&counts));
            }
        };
        let passed_over = if number == from.input { from.document } else { 0 };
        let empty = |document| Batch {
            at: Position { input: number, document },
            texts: Vec::new(),
            bytes: 0,
            skipped_before: counts.clone(),
        };
        let mut batch = empty(passed_over);
        let mut document = 0;
        let mut taken = head.take().unwrap_or_default().into_iter();
        loop {
            let next = taken.next().map(Ok).or_else(|| reader.next());
            let full = batch.bytes >= BATCH_BYTES || batch.texts.len() >= BATCH_DOCUMENTS;
            if !batch.texts.is_empty() && (full || !matches!(next, Some(Ok(_)))) {
                let (tell, answer) = sync_channel(1);
                if !send(answer, Some((std::mem::replace(&mut batch, empty(document)), tell))) {
                    return (all, Counts::clone(&counts));
                }
            }
            match next {
                None => break,
                Some(Err(error)) => {
                    fail(error);
                    return (all, Counts::clone(&counts));
                }
                Some(Ok(found)) => {
                    document += 1;
                    if document > passed_over {
                        batch.bytes += found.text.len();
                        batch.texts.push(found.text);
                    }
                }
            }
        }
        all.merge(reader.skipped());
        let mut later = Counts::clone(&counts);
        for (reason, count, _) in reader.skipped().reasons() {
            *later.entry(reason.words().into()).or_default() += count;
        }
        counts = Arc::new(later);
    }
    (all, Counts::clone(&counts))
}

fn encode(vocabulary: &Vocabulary, batch: Batch) -> Answer {
    let document = |text: String| {
        let tokens = vocabulary.encode_document(&text)?;
        Ok((fingerprint(text.as_bytes()), text.len(), tokens))
    };
    let documents = batch.texts.into_iter().map(document).collect::<Result<_, DataError>>()?;
    Ok(Tokenized { at: batch.at, documents, skipped_before: batch.skipped_before })
}

/// Takes tokenised batches in order and writes shards.
struct Writer<'a> {
    folder: &'a Folder,
    state: &'a mut Unfinished,
    shard_tokens: u64,
    shard: Option<ShardWriter>,
    progress: Progress,
    began: Instant,
}

impl<'a> Writer<'a> {
    fn new(spec: &Preparation, folder: &'a Folder, state: &'a mut Unfinished, inputs: usize) -> Self {
        let progress = Progress {
            documents: 0,
            tokens: 0,
            text_bytes: 0,
            elapsed: Duration::ZERO,
            input: state.next.input,
            inputs,
            shards: state.shards.len(),
        };
        let shard_tokens = spec.shard_tokens.max(1);
        Self { folder, state, shard_tokens, shard: None, progress, began: Instant::now() }
    }

    fn run(
        mut self,
        answers: &Receiver<Receiver<Answer>>,
        report: &mut dyn FnMut(&Progress),
    ) -> Result<Progress, DataError> {
        let wait = waits::begin("tokenising", Unit::Things("tokens"), None);
        let mut reported = Instant::now();
        while let Ok(answer) = answers.recv() {
            let batch = answer.recv().expect("every batch is answered")?;
            for (nth, (hash, bytes, tokens)) in batch.documents.into_iter().enumerate() {
                self.push(hash, bytes, &tokens)?;
                if self.shard.as_ref().is_some_and(|shard| shard.tokens() >= self.shard_tokens) {
                    let document = batch.at.document + nth as u64 + 1;
                    self.state.next = Position { input: batch.at.input, document };
                    self.state.skipped_before = Counts::clone(&batch.skipped_before);
                    self.close()?;
                    self.folder.save(self.state)?;
                }
            }
            self.progress.input = batch.at.input + 1;
            wait.set(self.progress.tokens);
            if reported.elapsed() >= REPORT_INTERVAL {
                reported = Instant::now();
                self.progress.elapsed = self.began.elapsed();
                report(&self.progress);
            }
        }
        // The last shard ends where the data does, so only the manifest lists it: after an interruption it is written again.
        self.close()?;
        self.progress.elapsed = self.began.elapsed();
        report(&self.progress);
        Ok(self.progress)
    }

    fn push(&mut self, hash: u64, bytes: usize, tokens: &[u32]) -> Result<(), DataError> {
        let totals = &mut self.state.totals;
        totals.text_bytes += bytes as u64;
        if tokens.is_empty() {
            *totals.skipped.entry(NO_TOKENS.into()).or_default() += 1;
            return Ok(());
        }
        totals.cut += u64::from(tokens.len() > MAX_DOCUMENT_TOKENS);
        totals.documents += tokens.len().div_ceil(MAX_DOCUMENT_TOKENS) as u64;
        totals.tokens += tokens.len() as u64;
        self.progress.documents += 1;
        self.progress.tokens += tokens.len() as u64;
        self.progress.text_bytes += bytes as u64;
        let tokenizer = &self.state.plan.tokenizer;
        let shard = match &mut self.shard {
            Some(shard) => shard,
            none => {
                let path = self.folder.path.join(shard_name(self.state.shards.len()));
                let hash =
                    u64::from_str_radix(&tokenizer.hash, 16).expect("hashes in a manifest are hexadecimal");
                let created = ShardWriter::create(&path, hash, tokenizer.vocabulary);
                none.insert(created.map_err(|error| self.folder.failed(&error))?)
            }
        };
        // Pieces of one document have its hash, so that they are on the same side.
        for piece in tokens.chunks(MAX_DOCUMENT_TOKENS) {
            shard.push(piece, hash).map_err(|error| self.folder.failed(&error))?;
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), DataError> {
        let Some(shard) = self.shard.take() else { return Ok(()) };
        let (header, bytes) = shard.finish().map_err(|error| self.folder.failed(&error))?;
        self.state.shards.push(ShardEntry {
            file: shard_name(self.state.shards.len()),
            bytes,
            documents: header.documents,
            tokens: header.tokens,
            hash: hexadecimal(header.index_hash),
        });
        self.progress.shards = self.state.shards.len();
        Ok(())
    }
}

fn shard_name(number: usize) -> String {
    format!("shard-{number:05}.tokens")
}
