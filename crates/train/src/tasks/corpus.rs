//! The data a config names, and how many updates it gives.

use std::path::{Path, PathBuf};

use flatout_data::formats::{Format, OnError as Policy, ReadOptions};
use flatout_data::{
    Corpus, Cursor, Loader, LoaderOptions, MixPart, OpenEvent, SourceKind, Spec, open_reporting,
};

use crate::Failure;
use crate::UserError;
use crate::config::{Config, FileFormat, OnError, Source, Task};
use crate::machine::{self, cache_folder};
use crate::run::tokenizer_path;

/// Opens the data a config names. A run's own tokeniser, where there is one, is used again.
pub fn corpus(config: &Config, run: Option<&Path>) -> Result<Corpus, Failure> {
    corpus_saying(config, run, &mut |_| {})
}

/// As [`corpus`]; `say` is told what takes long and what was left out.
pub fn corpus_saying(
    config: &Config,
    run: Option<&Path>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Corpus, Failure> {
    if config.data.task != Task::Text {
        return Err(Failure::User(UserError(format!(
            "`data.task` is {}, and what is asked for reads documents only: give data.task=text",
            config.data.task
        ))));
    }
    Ok(open_reporting(&spec(config, run), say)?)
}

/// The config's data section as the reader of data takes it.
pub fn spec(config: &Config, run: Option<&Path>) -> Spec {
    let data = &config.data;
    let kept = run.map(tokenizer_path).filter(|path| path.is_file() && data.source() != Source::Synthetic);
    let format = match data.format {
        FileFormat::Auto | FileFormat::U16 | FileFormat::U32 => None,
        FileFormat::Text => Some(Format::Text),
        FileFormat::Jsonl => Some(Format::Jsonl),
        FileFormat::Csv => Some(Format::Csv),
        FileFormat::Tsv => Some(Format::Tsv),
        FileFormat::Parquet => Some(Format::Parquet),
    };
    let source = match (data.source, data.format) {
        // A format of tokens says what the files are, whatever their names.
        (Source::Auto, FileFormat::U16 | FileFormat::U32) => SourceKind::Bin,
        (Source::Auto, _) if format.is_some() => SourceKind::Text,
        (Source::Auto, _) => SourceKind::Auto,
        (Source::Synthetic, _) => SourceKind::Synthetic,
        (Source::Text, _) => SourceKind::Text,
        (Source::Shards, _) => SourceKind::Shards,
        (Source::Bin, _) => SourceKind::Bin,
    };
    let part = |part: &crate::config::MixPart| MixPart { path: part.path.0.clone(), weight: part.weight };
    Spec {
        source,
        path: data.path.clone().unwrap_or_default().0,
        mix: data.mix.0.iter().map(part).collect(),
        read: ReadOptions {
            format,
            field: data.field.clone(),
            on_error: if data.on_error == OnError::Skip { Policy::Skip } else { Policy::Fail },
            max_document_bytes: data.max_document_bytes,
            ..ReadOptions::default()
        },
        token_bytes: if data.format == FileFormat::U32 { 4 } else { 2 },
        eos: data.eos.map(|eos| eos as u32),
        tokenizer: kept.or_else(|| data.tokenizer.as_ref().map(PathBuf::from)),
        vocab: config.model.vocab().unwrap_or(0),
        context: config.model.tokens(),
        seed: config.train.seed,
        held_out: data.held_out,
        document_mask: data.document_mask,
        cache: cache_folder(),
        spool: run.map(|run| run.join("data")),
        workers: machine::threads(),
        ..Spec::default()
    }
}

/// Training rows from a cursor on, made ahead by as many threads as the config says.
pub fn train_loader(config: &Config, corpus: &Corpus, cursor: &Cursor) -> Result<Loader, Failure> {
    let threads = config.loader.workers.given().unwrap_or_else(|| (machine::threads() / 2).max(1));
    let batch_bytes = 4 * 3 * config.train.batch * config.model.tokens();
    let queue_bytes = config.loader.prefetch * batch_bytes;
    Ok(corpus.train_loader(cursor, LoaderOptions { threads, queue_bytes, ..LoaderOptions::default() })?)
}

/// The updates of a whole run. Where the tokens of an epoch are estimated, so is the number of updates: it is fixed when
/// the run begins, and the epochs that the run reports are counted in documents.
pub fn total_steps(config: &Config, corpus: &Corpus) -> Result<u64, Failure> {
    if let Some(steps) = config.train.steps {
        return Ok(steps);
    }
    let epochs = config.train.epochs.expect("validated: steps or epochs");
    let Some(tokens) = corpus.describe().tokens else {
        return Err(Failure::User(UserError(
            "`train.epochs` cannot be counted: the synthetic language has no end; give train.steps instead"
                .into(),
        )));
    };
    let rows = tokens as f64 * epochs as f64 / config.model.tokens() as f64;
    Ok(((rows / config.train.batch as f64).round() as u64).max(1))
}
