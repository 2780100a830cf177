//! Turns samples with frames, videos or still images with a text, from tar shards into examples.
//!
//! ```text
//! sample    the members of a sample, and the formats of its JSON
//!    -> shard     the samples of a shard, rendered and tokenised
//!       -> cache     the examples of shards, cached between runs
//! moving    a generated set: moving shapes, and pairs of answers about them
//! ```
//!
//! The frames of an example are its first rows, one row per frame. Only JSON and headers are read here; frames are read later,
//! from where they are (`vision::FrameStore`).

mod cache;
mod moving;
mod sample;
mod shard;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;

pub use self::shard::MOST_FRAMES;
use self::shard::{Outcome, SampleRow, SampleTokenizer, ShardExamples, each_sample, place, push};
use super::encoder::Encoder;
use super::sets::{ExampleSets, ExampleSpec, ImageCounts, SetDescription, pool, tell, template, unusable};
use super::template::{CHATML_TOKENS, ChatTemplate};
use super::{ExampleTable, Sighting, synthetic};
use crate::error::DataError;
use crate::formats::{Skipped, SourceLocation};
use crate::images::{MAX_PIXELS, Member, OpenArchive, files};
use crate::order::split::Splitter;
use crate::random::{fingerprint, key};
use crate::text::corpus::MixPart;
use crate::text::inspect::LengthSummary;
use crate::text::source::{OpenEvent, SourceKind};
use crate::text::tokenizer::Vocabulary;
use crate::vision::{FrameBytes, FrameStore, ImageStore};

/// Options for reading samples with frames.
#[derive(Debug, Clone)]
pub struct FrameSpec {
    /// Sources with their shares of the drawn samples, in place of one path.
    pub mix: Vec<MixPart>,
    /// Height and width that frames are scaled to.
    pub side: usize,
    /// Number of frames that a still image is repeated as.
    pub still_frames: usize,
    /// The system message before every question.
    pub system: String,
    /// Questions for samples that have none: by prefixes of their source's name, of which the longest match counts.
    pub prompts: Vec<(String, String)>,
    /// Whether samples are pairs of answers, one of which is preferred.
    pub pairs: bool,
    /// Images with more pixels than this are not decoded.
    pub max_pixels: u64,
    /// The folder in which examples of shards are cached.
    pub cache: Option<PathBuf>,
}

impl Default for FrameSpec {
    fn default() -> Self {
        FrameSpec {
            mix: Vec::new(),
            side: 224,
            still_frames: 8,
            system: String::new(),
            prompts: Vec::new(),
            pairs: false,
            max_pixels: MAX_PIXELS,
            cache: None,
        }
    }
}

/// The question for samples that no prompt matches.
const PROMPT: &str = "Describe this.";

impl FrameSpec {
    /// The question for samples of a source that have none.
    fn prompt(&self, source: &str) -> &str {
        let source = source.to_lowercase();
        let fits = |(name, _): &&(String, String)| source.starts_with(&name.to_lowercase());
        let longest = self.prompts.iter().filter(fits).max_by_key(|(name, _)| name.len());
        longest.map_or(PROMPT, |(_, prompt)| prompt)
    }
}

/// A source whose shards were read.
struct Source {
    weight: f64,
    shards: Vec<(Arc<PathBuf>, ShardExamples)>,
}

/// The examples of a specification before the split.
struct FrameSet {
    sources: Vec<Source>,
    held_out: Vec<Source>,
    frames: FrameBytes,
    template: Option<ChatTemplate>,
    schema: String,
}

/// Reads, tokenises and splits. Finds everything that is wrong with samples, except inside frames.
pub(super) fn open(spec: &ExampleSpec, say: &mut dyn FnMut(OpenEvent)) -> Result<ExampleSets, DataError> {
    let whole;
    let spec = match spec.held_out_path.is_empty() {
        true => spec,
        false => {
            whole = ExampleSpec { held_out: 0.0, ..spec.clone() };
            &whole
        }
    };
    let frames = spec.frames.clone().unwrap_or_default();
    let pool = pool(spec.workers)?;
    let paths = paths(spec, &frames)?;
    let given = spec.given_vocabulary()?;
    let template = template(spec, given.as_ref())?;
    let writing = SampleTokenizer { spec, frames: &frames, template: template.as_ref() };
    let vocabulary = match given {
        Some(vocabulary) => vocabulary,
        None => train_vocabulary(&writing, &paths)?,
    };
    vocabulary.fits(spec.vocab)?;
    let encoder = Encoder::new(&vocabulary)?;
    let (sources, held_out, bytes) = match &paths {
        Paths::Made => {
            let generated = generated(&writing, &encoder, vocabulary.size())?;
            let count = spec.rows as u32 * moving::FRAMES_PER_SAMPLE;
            let bytes = FrameBytes::Drawn { count, draw: moving::draw, seed: spec.seed };
            (vec![generated], vec![], bytes)
        }
        Paths::Shards { sources, held_out } => {
            let mark = mark_of(&writing, &vocabulary);
            let read = |(paths, weight): &(Vec<PathBuf>, f64)| -> Result<Source, DataError> {
                let wait = waits::begin("reading samples", Unit::Things("shards"), Some(paths.len() as u64));
                let shards = pool.install(|| {
                    let shard = |path: &PathBuf| shard(&writing, path, &encoder, vocabulary.size(), mark);
                    paths.par_iter().map(shard).inspect(|_| wait.add(1)).collect::<Result<Vec<_>, _>>()
                })?;
                Ok(Source { weight: *weight, shards })
            };
            let sources = sources.iter().map(read).collect::<Result<Vec<_>, _>>()?;
            let held_out = held_out.iter().map(read).collect::<Result<Vec<_>, _>>()?;
            let bytes = frame_bytes(sources.iter().chain(&held_out));
            (sources, held_out, bytes)
        }
    };
    let schema =
        if frames.pairs { "samples with frames and two answers" } else { "samples with frames and a text" };
    let taken = FrameSet { sources, held_out, frames: bytes, template, schema: schema.into() };
    let sets = taken.sets(spec, &frames, vocabulary)?;
    tell(spec, &sets, say);
    Ok(sets)
}

/// Where samples come from.
enum Paths {
    Made,
    Shards { sources: Vec<(Vec<PathBuf>, f64)>, held_out: Vec<(Vec<PathBuf>, f64)> },
}

impl Paths {
    fn shards(&self) -> impl Iterator<Item = &PathBuf> {
        let sources: &[(Vec<PathBuf>, f64)] = match self {
            Paths::Made => &[],
            Paths::Shards { sources, .. } => sources,
        };
        sources.iter().flat_map(|(paths, _)| paths)
    }
}

fn paths(spec: &ExampleSpec, frames: &FrameSpec) -> Result<Paths, DataError> {
    let tars = |words: &[String]| -> Result<Vec<PathBuf>, DataError> {
        let paths = files(words, &["tar"])?;
        match paths.iter().find(|path| path.extension().is_none_or(|ending| ending != "tar")) {
            Some(other) => Err(DataError::input(format!(
                "{} is not a .tar file, and samples with frames are read only from those: give shards as data.path.",
                other.display()
            ))),
            None => Ok(paths),
        }
    };
    let sources = match (spec.path.is_empty(), frames.mix.is_empty()) {
        (true, true) if matches!(spec.source, SourceKind::Auto | SourceKind::Synthetic) => {
            return Ok(Paths::Made);
        }
        (true, true) => {
            return Err(DataError::input(
                "data.path is empty: give .tar shards, a folder of them, or a pattern.",
            ));
        }
        (false, _) => vec![(tars(&spec.path)?, 1.0)],
        (true, false) => {
            let part = |part: &MixPart| Ok((tars(&part.path)?, part.weight));
            frames.mix.iter().map(part).collect::<Result<Vec<_>, DataError>>()?
        }
    };
    let held_out = match spec.held_out_path.as_slice() {
        [] => vec![],
        path => vec![(tars(path)?, 1.0)],
    };
    Ok(Paths::Shards { sources, held_out })
}

/// Bytes of text that a tokeniser is trained on.
const SAMPLE_BYTES: usize = 64 << 20;

fn train_vocabulary(writing: &SampleTokenizer<'_>, paths: &Paths) -> Result<Vocabulary, DataError> {
    let (mut texts, mut bytes): (Vec<String>, usize) = (vec![], 0);
    let mut take = |metadata: &sample::SampleMetadata| -> Result<bool, super::row_error::RowError> {
        for masked in writing.texts(metadata)? {
            // The spelling of special tokens is not learned again as text.
            let bare = CHATML_TOKENS.iter().fold(masked.text, |text, token| text.replace(token, " "));
            bytes += bare.len();
            texts.push(bare);
        }
        Ok(bytes < SAMPLE_BYTES)
    };
    match paths {
        Paths::Made => {
            let spec = writing.spec;
            for row in 0..spec.rows {
                let (metadata, _) = generated_sample(writing, row);
                if !take(&metadata).map_err(|wrong| wrong.error(&synthetic::place(row)))? {
                    break;
                }
            }
        }
        Paths::Shards { .. } => {
            for path in paths.shards() {
                let mut is_full = false;
                let side = writing.frames.side;
                each_sample(path, writing.spec, side, &mut |_, _, _, metadata| {
                    take(&metadata).inspect(|goes_on| is_full = !goes_on)
                })?;
                if is_full {
                    break;
                }
            }
        }
    }
    Vocabulary::train_with(texts.iter().map(String::as_str), writing.spec.vocab, &CHATML_TOKENS)
}

/// Hash of everything but the shards that determines the tokens of samples.
fn mark_of(writing: &SampleTokenizer<'_>, vocabulary: &Vocabulary) -> u64 {
    let (spec, frames) = (writing.spec, writing.frames);
    let template = writing.template.map_or(0, |template| template.fingerprint);
    let words = format!(
        "{:?} {:?} {} {} {:?} {:?} {:?}",
        spec.train_on,
        spec.too_long,
        spec.max_tokens,
        frames.still_frames,
        frames.pairs,
        frames.system,
        frames.prompts
    );
    key(key(vocabulary.fingerprint(), template), fingerprint(words.as_bytes()))
}

/// The examples of a shard, from the cache or read and cached. Errors of writing the cache are ignored.
fn shard(
    writing: &SampleTokenizer<'_>,
    path: &Path,
    encoder: &Encoder,
    vocab: usize,
    mark: u64,
) -> Result<(Arc<PathBuf>, ShardExamples), DataError> {
    let of = writing
        .frames
        .cache
        .as_deref()
        .and_then(|cache| Some((cache, cache::CacheKey::now(path, mark).ok()?)));
    let on_error = writing.spec.read.on_error;
    let cached = of.as_ref().and_then(|(cache, of)| cache::load(cache, of, on_error));
    let shard = match cached {
        Some(cached) => cached,
        None => {
            let read = writing.shard(path, encoder, vocab)?;
            if let Some((cache, of)) = &of {
                let _ = cache::store(cache, of, &read);
            }
            read
        }
    };
    Ok((Arc::new(path.to_path_buf()), shard))
}

/// A generated sample, and its frames.
fn generated_sample(writing: &SampleTokenizer<'_>, row: u64) -> (sample::SampleMetadata, Vec<Sighting>) {
    let sample = if writing.frames.pairs { moving::pairs::pair } else { moving::sample };
    sample(writing.spec.seed, row, writing.frames.still_frames)
}

/// The generated set as one shard.
fn generated(writing: &SampleTokenizer<'_>, encoder: &Encoder, vocab: usize) -> Result<Source, DataError> {
    let spec = writing.spec;
    let mut shard = ShardExamples { samples: spec.rows, ..ShardExamples::default() };
    for row in 0..spec.rows {
        let (metadata, images) = generated_sample(writing, row);
        let outcome = writing.tokenize(&metadata, encoder, vocab);
        match outcome.map_err(|wrong| wrong.error(&synthetic::place(row)))? {
            Outcome::TooLong => shard.too_long += 1,
            Outcome::Texts(texts, is_cut) => {
                shard.cut += u64::from(is_cut);
                for text in &texts {
                    push(&mut shard.examples, &images, text);
                    shard.rows.push(SampleRow { hash: key(0x7368_6170, row), offset: row });
                }
            }
        }
    }
    Ok(Source { weight: 1.0, shards: vec![(Arc::new(PathBuf::from("synthetic")), shard)] })
}

/// The frames of all shards, in the order of their numbers.
fn frame_bytes<'s>(sources: impl Iterator<Item = &'s Source>) -> FrameBytes {
    let (mut archives, mut members) = (vec![], vec![]);
    for (path, shard) in sources.flat_map(|source| &source.shards) {
        let archive = archives.len() as u32;
        archives.push(OpenArchive::new(path.clone(), archives.len()));
        members.extend(shard.frames.iter().map(|[offset, bytes]| Member {
            archive,
            offset: *offset,
            bytes: *bytes,
        }));
    }
    FrameBytes::Archives { archives, members }
}

/// The training or held-out side of a set.
struct Side {
    table: ExampleTable,
    places: Vec<SourceLocation>,
}

impl Side {
    fn of(frames: &FrameSpec) -> Side {
        let table = if frames.pairs { ExampleTable::of_pairs() } else { ExampleTable::default() };
        Side { table, places: vec![] }
    }
}

impl FrameSet {
    fn sets(
        self,
        spec: &ExampleSpec,
        frames: &FrameSpec,
        vocabulary: Vocabulary,
    ) -> Result<ExampleSets, DataError> {
        let (mut train, mut held_out) = (Side::of(frames), Side::of(frames));
        let (mut skipped, mut counts) = (Skipped::default(), [0; 3]);
        let is_made = matches!(self.frames, FrameBytes::Drawn { .. });
        let mut image_base = 0;
        let mut shares = vec![];
        let all = self.sources.iter().map(|source| (source, false));
        for (source, is_apart) in all.chain(self.held_out.iter().map(|source| (source, true))) {
            let held = match is_apart {
                true => None,
                false => Some(source.held(spec)?),
            };
            let (before, mut at) = (train.table.units() as u64, 0);
            for (path, shard) in &source.shards {
                for (example, row) in shard.examples.iter().zip(&shard.rows) {
                    let is_held = held.as_ref().is_none_or(|held| held[at]);
                    let side = if is_held { &mut held_out } else { &mut train };
                    side.table.push_renumbered(example, image_base);
                    side.places.push(match is_made {
                        true => synthetic::place(row.offset),
                        false => place(path, *row),
                    });
                    at += 1;
                }
                image_base += shard.frames.len() as u32;
                skipped.merge(&shard.skipped);
                for (count, more) in counts.iter_mut().zip([shard.samples, shard.cut, shard.too_long]) {
                    *count += more;
                }
            }
            let more = train.table.units() as u64 - before;
            if !is_apart {
                if more == 0 {
                    let left_out = if skipped.total() > 0 { format!(" ({skipped})") } else { String::new() };
                    return Err(DataError::input(format!(
                        "There is no sample to learn from in {}{left_out}: data.path needs some.",
                        source.named()
                    )));
                }
                shares.push((more, source.weight));
            }
        }
        if shares.len() > 1 {
            train.table.mix(&shares);
        }
        let [samples, cut, too_long] = counts;
        let sides = [&train.table, &held_out.table];
        let lengths: Vec<u64> =
            sides.iter().flat_map(|table| table.iter().map(|example| example.tokens.len() as u64)).collect();
        let learned = |table: &&ExampleTable| {
            table.iter().map(|e| e.weights.iter().filter(|weight| **weight > 0.0).count() as u64).sum::<u64>()
        };
        let images = |table: &&ExampleTable| -> (u64, u64) {
            table.iter().fold((0, 0), |(examples, frames), example| {
                (examples + u64::from(!example.images.is_empty()), frames + example.images.len() as u64)
            })
        };
        let (with_frames, frame_tokens) =
            sides.iter().map(images).fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
        let store = FrameStore::new(self.frames, frames.side, frames.max_pixels, spec.read.on_error);
        let shown: u64 = match is_made {
            false => store.count() as u64,
            true => sides.iter().map(|table| table.shown_images()).sum(),
        };
        let shards = || self.sources.iter().chain(&self.held_out).flat_map(|source| &source.shards);
        let description = SetDescription {
            schema: vec![self.schema],
            template: self.template.map(|template| template.shown),
            files: if is_made { 0 } else { shards().count() },
            rows: samples,
            train: train.table.units() as u64,
            held_out: held_out.table.units() as u64,
            tokens: lengths.iter().sum(),
            learned_tokens: sides.iter().map(learned).sum(),
            lengths: LengthSummary::of("tokens", lengths),
            classes: vec![],
            images: Some(ImageCounts {
                images: shown,
                examples: with_frames,
                tokens: frame_tokens,
                broken: skipped
                    .reasons()
                    .filter(|(r, _, _)| r.is_of_image())
                    .map(|(_, count, _)| count)
                    .sum(),
            }),
            cut,
            too_long,
            unusable: unusable(&skipped),
        };
        let mark = sides.iter().fold(vocabulary.fingerprint(), |mark, table| key(mark, table.fingerprint()));
        Ok(ExampleSets {
            vocabulary,
            train: train.table,
            held_out: held_out.table,
            train_places: train.places,
            held_out_places: held_out.places,
            classes: vec![],
            images: ImageStore::default(),
            frames: Arc::new(store),
            description,
            mark: format!("{mark:016x}"),
        })
    }
}

impl Source {
    fn named(&self) -> String {
        match self.shards.as_slice() {
            [] => "no shard".into(),
            [(path, _)] => path.display().to_string(),
            [(path, _), ..] => format!("{} and {} more shards", path.display(), self.shards.len() - 1),
        }
    }

    /// For every example, whether it is held out. Both answers of a pair are on one side.
    fn held(&self, spec: &ExampleSpec) -> Result<Vec<bool>, DataError> {
        let mut splitter = Splitter::new(spec.held_out);
        let hashes = self.shards.iter().flat_map(|(_, shard)| &shard.rows);
        let mut held = vec![false; hashes.clone().count()];
        hashes.for_each(|row| splitter.push(Some(row.hash)));
        if held.is_empty() {
            return Ok(held);
        }
        let split = splitter.finish(&self.named())?;
        (0..split.held_out.count()).for_each(|at| held[split.held_out.at(at) as usize] = true);
        Ok(held)
    }
}

/// The frames of an example in words: their number, and the number of images they show.
pub fn frames_in_words(images: &[Sighting]) -> String {
    let different = images.chunk_by(|a, b| a.image == b.image).count();
    match (images.len(), different) {
        (0, _) => "no frames".into(),
        (frames, 1) if frames > 1 => format!("a still image as {frames} frames"),
        (1, _) => "1 frame".into(),
        (frames, _) => format!("{frames} frames"),
    }
}
