//! Documents in rows of one length, trained on end to end: the task `text`.

use std::path::{Path, PathBuf};

use flatout_data::formats::ReadOptions;
use flatout_data::{
    Corpus, Cursor, Description, Floor, Lanes, Layout, Loader, LoaderOptions, MixPart, OpenEvent, Rows,
    STREAMS, Segment, Spec, Vocabulary, Waited, open_reporting,
};
use flatout_ir::Role;
use serde_json::Value;

use super::batch::{Batch, BatchSource, EvalSet, HostTensor, Inputs};
use super::dataset::{Dataset, Feeding, Share, loaded_by_threads, loader_threads, read_cursor};
use super::examples;
use super::lane_batches::LaneBatches;
use crate::config::{Config, SourceKind, Task};
use crate::machine::{self, cache_folder};
use crate::run::tokenizer_path;
use crate::{Failure, UserError, refuse};

/// A token of a row with its target and its weight.
const ROW_TOKEN_BYTES: usize = 4 * 3;

/// Opens the data of the task. If lengths are given, examples of the synthetic language stand for documents.
pub fn open(
    config: &Config,
    run: Option<&Path>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Box<dyn Dataset>, Failure> {
    Ok(match examples::lengths(config) {
        None => Box::new(corpus_saying(config, run, say)?),
        Some(lengths) => Box::new(examples::drawn(config, &lengths)?),
    })
}

/// Opens the documents that a config names. Uses the run's own tokeniser if there is one.
pub fn corpus(config: &Config, run: Option<&Path>) -> Result<Corpus, Failure> {
    corpus_saying(config, run, &mut |_| {})
}

/// The same as [`corpus`]; `say` receives notes about slow work and about documents that were left out.
pub fn corpus_saying(
    config: &Config,
    run: Option<&Path>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Corpus, Failure> {
    if config.data.task != Task::Text {
        return Err(Failure::User(UserError(format!(
            "`data.task` is {}, and this command reads documents only: give data.task=text",
            config.data.task
        ))));
    }
    Ok(open_reporting(&spec(config, run), say)?)
}

/// Converts the config's data section for the reader of data.
pub fn spec(config: &Config, run: Option<&Path>) -> Spec {
    let data = &config.data;
    let kept =
        run.map(tokenizer_path).filter(|path| path.is_file() && data.source() != SourceKind::Synthetic);
    let part = |part: &crate::config::MixPart| MixPart { path: part.path.0.clone(), weight: part.weight };
    Spec {
        source: data.source.named_by(data.format),
        path: data.path.clone().unwrap_or_default().0,
        mix: data.mix.0.iter().map(part).collect(),
        read: ReadOptions {
            format: data.format.of_text(),
            field: data.field.clone(),
            on_error: data.on_error,
            max_document_bytes: data.max_document_bytes,
            ..ReadOptions::default()
        },
        token_bytes: data.format.token_bytes(),
        eos: data.eos.map(|eos| eos as u32),
        // The tokeniser stored with the run contains them already.
        new_tokens: if kept.is_some() { vec![] } else { data.new_tokens.clone() },
        tokenizer: kept.or_else(|| data.tokenizer.as_ref().map(PathBuf::from)),
        vocab: config.model.vocab().unwrap_or(0),
        context: config.model.tokens(),
        seed: config.train.seed,
        held_out: data.held_out,
        held_out_path: data.held_out_path.clone().unwrap_or_default().0,
        document_mask: data.document_mask,
        cache: cache_folder(),
        spool: run.map(|run| run.join("data")),
        workers: machine::threads(),
        order: data.order,
        stream_cache_bytes: (data.stream_cache_gb * 1e9) as u64,
        ..Spec::default()
    }
}

/// Training rows of some lanes from a cursor on, prefetched by as many threads as the config says. Of the prefetched batches, a
/// rank receives the rows of its streams.
pub fn train_loader(
    config: &Config,
    corpus: &Corpus,
    cursor: &Cursor,
    lanes: Lanes,
) -> Result<Loader, Failure> {
    let threads = loader_threads(config);
    let batch_bytes = ROW_TOKEN_BYTES * config.train.batch * config.model.tokens();
    let queue_bytes = config.loader.prefetch * batch_bytes * lanes.streams().len() / STREAMS;
    Ok(corpus.train_loader(cursor, LoaderOptions { lanes, threads, queue_bytes })?)
}

impl Dataset for Corpus {
    fn describe(&self) -> Description {
        self.describe()
    }

    fn vocabulary(&self) -> Option<&Vocabulary> {
        Some(self.vocabulary())
    }

    fn floor(&self) -> Option<Floor> {
        self.floor()
    }

    fn loading(&self, config: &Config, _: Feeding<'_>) -> String {
        loaded_by_threads(config)
    }

    fn cost_of_sharing(&self, config: &Config, feeding: Feeding<'_>) -> Option<String> {
        let packed = feeding.lanes(config.train.batch).packed_for_one();
        (packed > 1.0 && self.is_tokenised_as_read()).then(|| {
            format!(
                "a rank reads and tokenises {packed:.1} rows of text for one that it computes, because other ranks have rows \
                 of the same streams: `flatout data prepare` tokenises the text once for all of them"
            )
        })
    }

    fn check_classes(&self, config: &Config) -> Result<(), UserError> {
        if config.model.classes().is_some() {
            refuse!("`model.head` is classes and the data is text without classes: give data.task=classes");
        }
        Ok(())
    }

    /// If the tokens of an epoch are estimated, so is the number of updates: it is fixed when the run begins, and the epochs that
    /// the run reports are counted in documents.
    fn steps_of_epochs(&self, config: &Config, epochs: u64) -> Result<u64, Failure> {
        let Some(tokens) = self.describe().tokens else {
            return Err(Failure::User(UserError(
                "`train.epochs` cannot be counted: the synthetic language has no end, and packed files that are streamed do not \
                 tell how much they hold; give train.steps instead"
                    .into(),
            )));
        };
        let rows = tokens as f64 * epochs as f64 / config.model.tokens() as f64;
        Ok(((rows / config.train.batch as f64).round() as u64).max(1))
    }

    fn source(
        &self,
        config: &Config,
        feeding: Feeding<'_>,
        cursor: Option<Value>,
    ) -> Result<Box<dyn BatchSource>, Failure> {
        let cursor = read_cursor(cursor)?.unwrap_or_else(|| self.start());
        let (micro_batch, lanes) = (feeding.micro_batch, feeding.lanes(config.train.batch));
        Ok(Box::new(RowSource {
            loader: train_loader(config, self, &cursor, lanes)?,
            micro_batch,
            batches: LaneBatches::new(lanes, micro_batch),
            inputs: feeding.inputs(),
        }))
    }

    fn eval_set(
        &self,
        config: &Config,
        share: Share,
        most: usize,
        _: Option<&Layout>,
    ) -> Result<Box<dyn EvalSet>, Failure> {
        let bytes = (ROW_TOKEN_BYTES * config.model.tokens()).saturating_mul(most) as u64;
        // Finite data is read to its end; the synthetic language has as many rows as requested.
        if self.describe().documents.is_none() && bytes > machine::memory_bytes() {
            return Err(Failure::User(UserError(format!(
                "`eval.rows` is {most}, and so many rows of the synthetic language do not fit this machine's memory: lower it"
            ))));
        }
        Ok(Box::new(match share {
            Share::HeldOut => self.held_out_rows(most)?,
            Share::All => self.rows_once(most)?,
        }))
    }
}

/// Rows that a loader prefetches.
struct RowSource {
    loader: Loader,
    micro_batch: usize,
    batches: LaneBatches<Rows>,
    inputs: Inputs,
}

impl BatchSource for RowSource {
    fn begin_update(&mut self) {
        self.batches.begin_update();
    }

    fn next_batch(&mut self) -> Result<Option<Batch>, Failure> {
        let loader = &mut self.loader;
        let Some((lane, rows)) = self.batches.next(|count| Ok(loader.next_rows(count)?))? else {
            return Ok(None);
        };
        let left_out = loader.take_left_out();
        Ok(Some(Batch { lane, left_out, ..batch(Role::GRAD, &rows, 0, self.micro_batch, &self.inputs) }))
    }

    fn of_all_ranks(&self, own: [usize; 2]) -> [usize; 2] {
        self.batches.tokens(self.loader.context(), own)
    }

    fn cursor(&self) -> Value {
        serde_json::to_value(self.loader.cursor()).expect("a cursor has a JSON form")
    }

    fn sample(&self) -> u64 {
        self.loader.cursor().row
    }

    fn waited(&self) -> Waited {
        self.loader.waited()
    }
}

impl EvalSet for Rows {
    fn samples(&self) -> usize {
        self.count()
    }

    fn batches(&self, capacity: usize) -> usize {
        self.count().div_ceil(capacity)
    }

    fn batch(&self, number: usize, capacity: usize, inputs: &Inputs) -> Result<Batch, Failure> {
        Ok(batch(Role::Eval, self, number * capacity, capacity, inputs))
    }

    fn bytes_per_token(&self, vocabulary: Option<&Vocabulary>) -> Option<f64> {
        let lengths = vocabulary?.byte_lengths()?;
        let predicted =
            self.targets.iter().zip(&self.weights).filter(|(target, weight)| **target >= 0 && **weight > 0.0);
        let (mut tokens, mut bytes) = (0u64, 0u64);
        for (target, _) in predicted {
            tokens += 1;
            bytes += u64::from(*lengths.get(*target as usize).unwrap_or(&0));
        }
        (bytes > 0).then(|| bytes as f64 / tokens as f64)
    }
}

/// Rows from `from` on, for a plan of `capacity` rows. Rows missing at the end get weight 0.
pub fn batch(role: Role, rows: &Rows, from: usize, capacity: usize, inputs: &Inputs) -> Batch {
    let context = rows.context;
    let count = capacity.min(rows.count() - from);
    let tokens = from * context..(from + count) * context;
    let filled = |values: &[i32], fill: i32| {
        let mut values = values[tokens.clone()].to_vec();
        values.resize(capacity * context, fill);
        values
    };
    let padded = |values: &[i32], fill: i32| HostTensor::I32(filled(values, fill));
    let weights = || {
        let mut weights = rows.weights[tokens.clone()].to_vec();
        weights.resize(capacity * context, 0.0);
        HostTensor::F32(weights)
    };
    // Capacity for the most documents that may begin in a row; missing segments have length 0.
    let segments = |of: fn(usize, &Segment) -> usize| {
        let all = rows.segments[from..from + count].iter().enumerate();
        let all = all.flat_map(|(row, segments)| segments.iter().map(move |s| of(row * context, s) as i32));
        let room = capacity * flatout_data::max_segments(context);
        HostTensor::I32(all.chain(std::iter::repeat(0)).take(room).collect())
    };
    let samples = rows.sample[from..from + count].to_vec();
    let keys = || {
        let samples = samples.iter().copied().chain(std::iter::repeat(0)).take(capacity);
        let keys = samples.flat_map(|s| (0..context as i32).flat_map(move |t| [s as i32, t]));
        HostTensor::I32(keys.collect())
    };
    let tensors = inputs.only([
        ("tokens", Box::new(|| padded(&rows.tokens, 0)) as Box<dyn FnOnce() -> HostTensor>),
        ("targets", Box::new(|| padded(&rows.targets, -1))),
        ("positions", Box::new(|| inputs.text_positions(&filled(&rows.positions, 0)))),
        ("weights", Box::new(weights)),
        ("segment_start", Box::new(|| segments(|row, s| row + s.start as usize))),
        ("segment_len", Box::new(|| segments(|_, s| s.len as usize))),
        ("rows", Box::new(keys)),
    ]);
    Batch {
        role,
        lane: 0,
        tensors,
        answers: vec![],
        unit: "rows",
        real_tokens: count * context,
        computed_tokens: capacity * context,
        epoch: rows.epoch,
        waited: rows.waited,
        left_out: vec![],
        samples,
    }
}
