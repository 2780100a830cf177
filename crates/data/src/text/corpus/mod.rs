//! Opens a specification of text as a corpus: vocabulary, training rows, held-out rows.

use std::path::PathBuf;
use std::sync::Arc;

use flatout_settings::choice;

use crate::error::DataError;
use crate::formats::ReadOptions;
use crate::order::documents::{Documents, TokenCount};
use crate::order::loader::{Cursor, Loader, LoaderOptions, Rows};
use crate::order::mixture::{Joined, Mixture, MixtureSource};
use crate::order::pack::{Frame, Packing, STREAMS, Stream, StreamPosition};
use crate::order::permutation::Order;
use crate::random::key;
use crate::text::raw::IN_MEMORY_BYTES;
use crate::text::source::{self, FoundSource, OpenEvent, Opened, SourceKind};
use crate::text::synthetic::{Language, Sampled};
use crate::text::tokenizer::Vocabulary;

/// Specification of a text corpus: the files to read and how to cut them into rows.
#[derive(Debug, Clone)]
pub struct Spec {
    pub source: SourceKind,
    /// Files, folders and globs; `-` is standard input. Not used by the synthetic language.
    pub path: Vec<String>,
    /// Several sources in place of `path`.
    pub mix: Vec<MixPart>,
    /// Options for reading text files.
    pub read: ReadOptions,
    /// Bytes per token of token files without a header: 2 or 4.
    pub token_bytes: u32,
    /// The token between documents of token files.
    pub eos: Option<u32>,
    /// A `tokenizer.json`. Without one, the tokeniser of the shards is used, or one is trained on the training text.
    pub tokenizer: Option<PathBuf>,
    /// Tokens added to the tokeniser.
    pub new_tokens: Vec<String>,
    /// Size of the model's vocabulary: the size of a trained tokeniser, and the limit for any other.
    pub vocab: usize,
    /// Tokens per row.
    pub context: usize,
    pub seed: u64,
    /// Share of the documents that is held out from training.
    pub held_out: f64,
    /// Files to evaluate on in place of a share, given as in `path`.
    pub held_out_path: Vec<String>,
    /// Whether documents that share a row are masked from each other.
    pub document_mask: bool,
    /// Folder for indices of large sources and tokens of sequential ones, kept between runs.
    pub cache: Option<PathBuf>,
    /// Folder for the tokens of standard input, kept for this run.
    pub spool: Option<PathBuf>,
    /// Threads for tokenising at the start.
    pub workers: usize,
    /// Text of at most this many bytes is tokenised at the start and kept in memory.
    pub in_memory_bytes: u64,
    /// The order of documents of text files.
    pub order: DocumentOrder,
    /// Most bytes of remote files that `cache` may hold.
    pub stream_cache_bytes: u64,
}

choice! {
    /// The order in which documents are read.
    pub enum DocumentOrder {
        /// `Streamed` for files on a server, otherwise `Shuffled`.
        Auto = "auto",
        /// All documents are indexed first and shuffled globally.
        Shuffled = "shuffled",
        /// Blocks of files are read in a shuffled order, with shuffling inside each block. Nothing is read before it is trained
        /// on.
        Streamed = "streamed",
    }
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            source: SourceKind::Auto,
            path: Vec::new(),
            mix: Vec::new(),
            read: ReadOptions::default(),
            token_bytes: 2,
            eos: None,
            tokenizer: None,
            new_tokens: Vec::new(),
            vocab: 512,
            context: 128,
            seed: 0,
            held_out: 0.05,
            held_out_path: Vec::new(),
            document_mask: false,
            cache: None,
            spool: None,
            workers: 1,
            in_memory_bytes: IN_MEMORY_BYTES,
            order: DocumentOrder::Auto,
            stream_cache_bytes: 0,
        }
    }
}

/// A source and its share of the training tokens, relative to the sum of all weights.
#[derive(Debug, Clone, PartialEq)]
pub struct MixPart {
    pub path: Vec<String>,
    pub weight: f64,
}

/// The lowest possible loss, and the loss of the best model that sees two previous tokens, in nats per predicted token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Floor {
    pub nats: f64,
    pub trigram_nats: f64,
}

/// Sizes of a corpus. Tokens include the frame of each document; `None` means endless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    pub documents: Option<u64>,
    /// Tokens of one epoch. An epoch of a mixture draws as many documents as its sources have together.
    pub tokens: Option<u64>,
    pub held_out_documents: Option<u64>,
    pub held_out_tokens: Option<u64>,
    /// Whether `tokens` is estimated from a sample, because tokens are counted only as they are read.
    pub is_estimated: bool,
}

pub struct Corpus {
    vocabulary: Vocabulary,
    train: Arc<dyn Documents>,
    held_out: Arc<dyn Documents>,
    /// Mixtures of the training and the held-out side, where there are several sources.
    mixtures: [Option<Arc<Mixture>>; 2],
    floor: Option<Floor>,
    packing: Packing,
    seed: u64,
    mark: String,
}

/// Reads and splits the data, and tokenises it unless it is tokenised as read. Finds everything that is wrong with the data.
pub fn open(spec: &Spec) -> Result<Corpus, DataError> {
    open_reporting(spec, &mut |_| {})
}

/// As [`open`], and reports slow steps and skipped documents.
pub fn open_reporting(spec: &Spec, say: &mut dyn FnMut(OpenEvent)) -> Result<Corpus, DataError> {
    if spec.context == 0 {
        return Err(DataError::input(
            "A row of 0 tokens cannot be trained on: set model.context to at least 1.",
        ));
    }
    if !(0.0..1.0).contains(&spec.held_out) {
        return Err(DataError::input(format!(
            "data.held_out={} is not a share: give 0 or more, below 1.",
            spec.held_out
        )));
    }
    let whole;
    let spec = match spec.held_out_path.is_empty() {
        true => spec,
        false => {
            whole = Spec { held_out: 0.0, ..spec.clone() };
            &whole
        }
    };
    let has_files = !spec.path.is_empty() || !spec.mix.is_empty();
    if spec.source == SourceKind::Synthetic || (spec.source == SourceKind::Auto && !has_files) {
        return synthetic(spec);
    }
    let parts = match (spec.mix.as_slice(), spec.path.as_slice()) {
        ([], path) => vec![MixPart { path: path.to_vec(), weight: 1.0 }],
        (mix, []) => mix.to_vec(),
        (..) => {
            return Err(DataError::input(
                "data.path and data.mix are both given: name every source in data.mix, or give data.path alone.",
            ));
        }
    };
    if let Some(part) = parts.iter().find(|part| !part.weight.is_finite() || part.weight <= 0.0) {
        return Err(DataError::input(format!(
            "data.mix gives {} the weight {}: give a number above 0.",
            part.path.join(", "),
            part.weight
        )));
    }
    let found =
        parts.iter().map(|part| source::find(&part.path, spec, say)).collect::<Result<Vec<_>, _>>()?;
    if parts.len() > 1 && found.iter().any(|found| matches!(found, FoundSource::Streamed(_))) {
        return Err(DataError::input(
            "data.mix has a part that is streamed, whose documents are not counted and so have no share: write it to token shards \
             with `flatout data prepare`, or give it as data.path alone.",
        ));
    }
    let vocabulary = source::vocabulary(spec, &found, say)?;
    let held_out_files = held_out_files(spec, &vocabulary, say)?;
    let opened =
        found.into_iter().map(|found| found.open(spec, &vocabulary, say)).collect::<Result<Vec<_>, _>>()?;
    let frame = match opened.iter().all(|opened| opened.is_endless_text) {
        true => Frame { bos: None, eos: None },
        false => Frame::of(vocabulary.bos(), vocabulary.eos()),
    };
    let content = opened.iter().zip(&parts).fold(parts.len() as u64, |hash, (opened, part)| {
        key(hash, key(opened.sides.content, part.weight.to_bits()))
    });
    let side = |of: fn(&Opened) -> &Arc<dyn Documents>| -> Vec<Arc<dyn Documents>> {
        opened.iter().map(|opened| of(opened).clone()).collect()
    };
    let held_out = held_out_files
        .map_or_else(|| side(|opened| &opened.sides.held_out), |held_out_files| vec![held_out_files]);
    let sides = [side(|opened| &opened.sides.train), held_out];
    let mixtures = sides.each_ref().map(|side| {
        let mixed = side.len() > 1 && side.iter().any(|documents| documents.count() != Some(0));
        mixed.then(|| Arc::new(mixture(side, &parts, frame)))
    });
    let [train, held_out] = sides.map(|mut side| -> Arc<dyn Documents> {
        if side.len() > 1 { Arc::new(Joined::new(side)) } else { side.remove(0) }
    });
    Ok(Corpus::new(spec, vocabulary, [train, held_out], mixtures, None, frame, content))
}

/// The documents of `held_out_path`, where it is set.
fn held_out_files(
    spec: &Spec,
    vocabulary: &Vocabulary,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Option<Arc<dyn Documents>>, DataError> {
    if spec.held_out_path.is_empty() {
        return Ok(None);
    }
    let found = source::find(&spec.held_out_path, spec, say)?;
    found.made_with(vocabulary)?;
    Ok(Some(found.open(spec, vocabulary, say)?.sides.train))
}

/// Converts the parts' shares of tokens to shares of documents.
fn mixture(side: &[Arc<dyn Documents>], parts: &[MixPart], frame: Frame) -> Mixture {
    let mut base = 0;
    let parts = side.iter().zip(parts).filter_map(|(documents, part)| {
        let count = documents.count().expect("files are finite");
        let tokens = documents.tokens().expect("files are finite").tokens;
        base += count;
        (count > 0).then(|| MixtureSource {
            base: base - count,
            count,
            weight: part.weight,
            mean_tokens: (tokens as f64 / count as f64 + frame.tokens() as f64).max(1.0),
        })
    });
    Mixture::new(parts.collect())
}

fn synthetic(spec: &Spec) -> Result<Corpus, DataError> {
    for (key, given) in [
        ("data.path", !spec.path.is_empty()),
        ("data.mix", !spec.mix.is_empty()),
        ("data.held_out_path", !spec.held_out_path.is_empty()),
        ("data.tokenizer", spec.tokenizer.is_some()),
    ] {
        if given {
            return Err(DataError::input(format!(
                "The synthetic language has no use for {key}: leave it out, or set data.source=text."
            )));
        }
    }
    let language = Arc::new(Language::new());
    let vocabulary = Vocabulary::from_words(language.words());
    vocabulary.fits(spec.vocab)?;
    // With the document mask, `<bos>` is not predicted. It cost nothing, so the mean over the remaining tokens is larger.
    let tokens = language.mean_document_tokens;
    let predicted = if spec.document_mask { tokens - 1.0 } else { tokens };
    let [nats, trigram_nats] =
        [language.floor_nats, language.trigram_nats].map(|nats| nats * tokens / predicted);
    let floor = Floor { nats, trigram_nats };
    let content = u64::from(language.version());
    let frame = Frame::of(vocabulary.bos(), vocabulary.eos());
    let sides = [false, true].map(|held_out| -> Arc<dyn Documents> {
        Arc::new(Sampled { language: language.clone(), seed: spec.seed, held_out })
    });
    Ok(Corpus::new(spec, vocabulary, sides, [None, None], Some(floor), frame, content))
}

impl Corpus {
    fn new(
        spec: &Spec,
        vocabulary: Vocabulary,
        [train, held_out]: [Arc<dyn Documents>; 2],
        mixtures: [Option<Arc<Mixture>>; 2],
        floor: Option<Floor>,
        frame: Frame,
        content: u64,
    ) -> Self {
        let packing = Packing { context: spec.context, document_mask: spec.document_mask, frame };
        let mark = [content, vocabulary.fingerprint(), spec.seed].into_iter().fold(0, key);
        let mark = format!("{mark:016x}");
        Self { vocabulary, train, held_out, mixtures, floor, packing, seed: spec.seed, mark }
    }

    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Known for the synthetic language only.
    pub fn floor(&self) -> Option<Floor> {
        self.floor
    }

    pub fn describe(&self) -> Description {
        let frames = self.packing.frame.tokens();
        let framed = |side: &Arc<dyn Documents>, mixture: usize| -> Option<TokenCount> {
            let (tokens, count) = (side.tokens()?, side.count()?);
            Some(match &self.mixtures[mixture] {
                None => tokens + TokenCount::exact(frames * count),
                Some(mixture) => {
                    TokenCount { tokens: (mixture.mean_tokens() * count as f64) as u64, is_exact: false }
                }
            })
        };
        let (tokens, held_out_tokens) = (framed(&self.train, 0), framed(&self.held_out, 1));
        Description {
            documents: self.train.count(),
            tokens: tokens.map(|count| count.tokens),
            held_out_documents: self.held_out.count(),
            held_out_tokens: held_out_tokens.map(|count| count.tokens),
            is_estimated: tokens.is_some_and(|count| !count.is_exact),
        }
    }

    fn order(&self, side: &Arc<dyn Documents>, mixture: usize, seed: u64) -> Order {
        match &self.mixtures[mixture] {
            Some(mixture) => Order::mixed(mixture.clone(), seed),
            None => {
                let blocks = side.in_blocks().map(|blocks| Some(blocks.blocks()));
                Order::new(blocks.unwrap_or_else(|| side.count()), seed)
            }
        }
    }

    /// The cursor of a new run.
    pub fn start(&self) -> Cursor {
        Cursor { row: 0, streams: [Some(StreamPosition::default()); STREAMS], data: self.mark.clone() }
    }

    /// Training rows from a cursor on. Refuses a cursor of other data, another tokeniser or another seed.
    pub fn train_loader(&self, cursor: &Cursor, options: LoaderOptions) -> Result<Loader, DataError> {
        if cursor.data != self.mark {
            return Err(DataError::input(
                "The training data is not what this run began with (text, tokeniser or seed changed), so it cannot go \
                 on exactly: restore the data, or begin a new run.",
            ));
        }
        let order = self.order(&self.train, 0, self.seed);
        Loader::new(self.train.clone(), order, self.packing, cursor.clone(), options)
    }

    /// Whether training text is tokenised anew in every epoch, as it is read.
    pub fn is_tokenised_as_read(&self) -> bool {
        self.train.is_tokenised_as_read()
    }

    /// The first `count` rows of one pass over the training side, or all of them. With nothing held out, they cover every
    /// document.
    pub fn rows_once(&self, count: usize) -> Result<Rows, DataError> {
        self.first_rows(&self.train, 0, count)
    }

    /// `mixture` is 0 for the training side, 1 for the held-out side.
    fn first_rows(
        &self,
        documents: &Arc<dyn Documents>,
        mixture: usize,
        count: usize,
    ) -> Result<Rows, DataError> {
        let mut rows = Rows { context: self.packing.context, ..Rows::default() };
        if documents.count() != Some(0) {
            let order = self.order(documents, mixture, 0);
            let mut stream = Stream::once(documents.clone(), order, self.packing);
            while rows.count() < count {
                let Some(row) = stream.row()? else { break };
                rows.push(rows.count() as u64, row);
            }
        }
        Ok(rows)
    }

    /// The first `count` rows of the held-out text, or all of them: the same in every call, and for text sources also for every
    /// seed. The last row may be padded with tokens of weight 0.
    pub fn held_out_rows(&self, count: usize) -> Result<Rows, DataError> {
        let rows = self.first_rows(&self.held_out, 1, count)?;
        if rows.count() == 0 && count > 0 {
            return Err(DataError::input(
                "No text is held out to evaluate on: set data.held_out above 0, or name files with \
                 data.held_out_path.",
            ));
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests;
