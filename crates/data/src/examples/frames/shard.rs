//! Turns the samples of a shard into examples: read, rendered by the template, tokenised.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::FrameSpec;
use super::sample::{Content, Parts, SampleMetadata};
use crate::error::DataError;
use crate::examples::conversation::{Conversation, message};
use crate::examples::encoder::Encoder;
use crate::examples::mask::{Masked, TrainOn, masked, weights};
use crate::examples::row_error::RowError;
use crate::examples::row_reader::{SAME_TOKENS, no_template, too_many, unencodable};
use crate::examples::sets::{ExampleSpec, TooLong};
use crate::examples::template::ChatTemplate;
use crate::examples::{Example, ExampleTable, Sighting};
use crate::formats::{OnError, Reason, Skipped, SourceLocation, unreadable};
use crate::images::{Archive, Entry, Flaw, Samples};
use crate::random::{fingerprint, key};
use crate::vision::Grid;

/// Most frames of a sample; later ones are not read.
pub const MOST_FRAMES: usize = 64;

/// Converts samples to tokens.
pub(super) struct SampleTokenizer<'s> {
    pub spec: &'s ExampleSpec,
    pub frames: &'s FrameSpec,
    pub template: Option<&'s ChatTemplate>,
}

/// The examples of a shard.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct ShardExamples {
    /// Their images are indices into `frames`.
    pub examples: ExampleTable,
    /// For each example, the offset of its sample and the hash that decides its side.
    pub rows: Vec<SampleRow>,
    /// First byte and length of every frame.
    pub frames: Vec<[u64; 2]>,
    pub samples: u64,
    pub cut: u64,
    pub too_long: u64,
    pub skipped: Skipped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SampleRow {
    pub hash: u64,
    pub offset: u64,
}

/// Tokens with their weights in the loss.
pub(super) type Weighted = (Vec<u32>, Vec<f32>);

/// The outcome of tokenising a sample.
pub(super) enum Outcome {
    /// One text, or both answers of a pair; and whether one of them was cut.
    Texts(Vec<Weighted>, bool),
    TooLong,
}

/// Receives a sample: its key, its offset, its members and its metadata. Returns whether to continue.
type VisitSample<'s> = dyn FnMut(&str, u64, &Parts, SampleMetadata) -> Result<bool, RowError> + 's;

/// Calls `visit` for every sample of an archive, and skips or refuses unusable ones.
pub(super) fn each_sample(
    path: &Path,
    spec: &ExampleSpec,
    side: usize,
    visit: &mut VisitSample<'_>,
) -> Result<(u64, Skipped), DataError> {
    let failed = |error: std::io::Error| unreadable(path, &error);
    let mut skipped = Skipped::default();
    let leave_out = |skipped: &mut Skipped, wrong: RowError, place: SourceLocation| match spec.read.on_error {
        OnError::Skip if !wrong.is_fatal => {
            skipped.note(wrong.reason, place);
            Ok(())
        }
        _ => Err(wrong.error(&place)),
    };
    let mut samples = Samples::new(Archive::open(Arc::new(path.to_path_buf())).map_err(failed)?);
    let mut count = 0;
    while let Some(sample) =
        samples.next(&mut |flaw: &Flaw, place| leave_out(&mut skipped, flaw.into(), place))?
    {
        // Members after the damage may have been frames of this sample.
        if sample.is_last_of_lost {
            break;
        }
        count += 1;
        let archive = samples.archive();
        let most = spec.read.max_document_bytes as u64;
        let read = match Parts::of(&sample, side) {
            Err(wrong) => Err(wrong),
            Ok(parts) => {
                parts.metadata(&sample.key, archive, most).map_err(failed)?.map(|metadata| (parts, metadata))
            }
        };
        let goes_on = match read {
            Err(wrong) => Err(wrong),
            Ok((parts, metadata)) => visit(&sample.key, sample.first, &parts, metadata),
        };
        match goes_on {
            Ok(true) => {}
            Ok(false) => break,
            Err(wrong) => leave_out(&mut skipped, wrong, archive.place(sample.first))?,
        }
    }
    Ok((count, skipped))
}

impl SampleTokenizer<'_> {
    /// The examples of a shard.
    pub fn shard(&self, path: &Path, encoder: &Encoder, vocab: usize) -> Result<ShardExamples, DataError> {
        let name = path.file_name().map_or(0, |name| fingerprint(name.as_encoded_bytes()));
        let mut shard = ShardExamples::default();
        let side = self.frames.side;
        let (samples, skipped) =
            each_sample(path, self.spec, side, &mut |sample, first, parts, metadata| {
                match self.tokenize(&metadata, encoder, vocab)? {
                    Outcome::TooLong => shard.too_long += 1,
                    Outcome::Texts(texts, is_cut) => {
                        shard.cut += u64::from(is_cut);
                        let row =
                            SampleRow { hash: key(name, fingerprint(sample.as_bytes())), offset: first };
                        shard.add(&texts, &parts.frames, row, self.frames.still_frames);
                    }
                }
                Ok(true)
            })?;
        (shard.samples, shard.skipped) = (samples, skipped);
        Ok(shard)
    }

    /// The texts of a sample with their learned parts; none for a sample that is tokenised already.
    pub fn texts(&self, metadata: &SampleMetadata) -> Result<Vec<Masked>, RowError> {
        self.check_form(&metadata.content)?;
        let (user, answers): (&str, Vec<&String>) = match &metadata.content {
            Content::Tokens { .. } => return Ok(vec![]),
            Content::Caption(caption) => ("", vec![caption]),
            Content::Answer { user, assistant } => (user, vec![assistant]),
            Content::Pair { user, answers } => (user, answers.iter().collect()),
        };
        let template = self.template.ok_or_else(no_template)?;
        let user = if user.trim().is_empty() { self.frames.prompt(&metadata.source) } else { user };
        let mut texts = Vec::new();
        for answer in answers {
            let turns = [("system", &self.frames.system[..]), ("user", user), ("assistant", answer)];
            let chat = Conversation {
                messages: turns.iter().map(|(role, text)| message(role, (*text).into())).collect(),
                learned: vec![false, false, true],
                ..Conversation::default()
            };
            texts.extend(masked(template, &chat, self.spec.train_on)?);
        }
        Ok(texts)
    }

    /// Refuses pairs in sets of answers, and everything else in sets of preferences.
    fn check_form(&self, content: &Content) -> Result<(), RowError> {
        let message = match (matches!(content, Content::Pair { .. }), self.frames.pairs) {
            (true, false) => {
                "the sample is a pair of answers, of which one is preferred; train on it with data.task=preference, or \
                 leave it out"
            }
            (false, true) => {
                "the sample is no pair of answers, and data.task is preference; give it `chosen_assistant` and \
                 `rejected_assistant`, or leave it out"
            }
            _ => return Ok(()),
        };
        Err(RowError::new(Reason::Pair, message))
    }

    pub fn tokenize(
        &self,
        metadata: &SampleMetadata,
        encoder: &Encoder,
        vocab: usize,
    ) -> Result<Outcome, RowError> {
        self.check_form(&metadata.content)?;
        let weighted: Vec<Weighted> = match &metadata.content {
            Content::Tokens { ids, learned } => {
                if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
                    let message = format!(
                        "`token_ids` has {id}, and the vocabulary has {vocab} tokens; give the tokeniser that made them with \
                         data.tokenizer"
                    );
                    return Err(RowError::new(Reason::Unsupported, message));
                }
                let all = vec![1.0; ids.len()];
                let some = |learned: &Vec<bool>| learned.iter().map(|learned| f32::from(*learned)).collect();
                let weights =
                    learned.as_ref().filter(|_| self.spec.train_on != TrainOn::All).map_or(all, some);
                vec![(ids.clone(), weights)]
            }
            _ => {
                let mut all = vec![];
                for masked in self.texts(metadata)? {
                    let pieces = encoder.pieces(&masked.text).map_err(unencodable)?;
                    let weights = weights(&masked, &pieces);
                    all.push((pieces.into_iter().map(|piece| piece.token).collect(), weights));
                }
                all
            }
        };
        let mut is_cut = false;
        let mut fitted = vec![];
        for (mut tokens, mut weights) in weighted {
            // The first token is predicted from nothing, or from a frame, which does not determine it.
            if let Some(first) = weights.first_mut() {
                *first = 0.0;
            }
            let is_learned = |weights: &[f32]| weights.iter().any(|weight| *weight > 0.0);
            if !is_learned(&weights) {
                return Err(RowError::new(
                    Reason::NothingToLearn,
                    "no token of the sample is learned; give it an answer, or choose what is learned with data.train_on",
                ));
            }
            let most = self.spec.max_tokens;
            if tokens.len() > most {
                match self.spec.too_long {
                    TooLong::Fail => return Err(too_many(tokens.len(), most)),
                    TooLong::Cut if is_learned(&weights[..most]) => {
                        tokens.truncate(most);
                        weights.truncate(most);
                        is_cut = true;
                    }
                    TooLong::Skip | TooLong::Cut => return Ok(Outcome::TooLong),
                }
            }
            fitted.push((tokens, weights));
        }
        if let [chosen, rejected] = &fitted[..]
            && chosen.0 == rejected.0
        {
            return match is_cut {
                // The part in which they differ was cut off.
                true => Ok(Outcome::TooLong),
                false => Err(RowError::new(Reason::Pair, SAME_TOKENS)),
            };
        }
        Ok(Outcome::Texts(fitted, is_cut))
    }
}

impl ShardExamples {
    /// Adds a sample: its frames become the first rows of each of its texts.
    fn add(&mut self, texts: &[Weighted], frames: &[Entry], row: SampleRow, still_frames: usize) {
        let first = self.frames.len() as u32;
        let frames = &frames[..frames.len().min(MOST_FRAMES)];
        self.frames.extend(frames.iter().map(|entry| [entry.offset, entry.bytes]));
        let hashes: Vec<u64> =
            frames.iter().map(|entry| key(fingerprint(entry.name.as_bytes()), entry.bytes)).collect();
        let images = frame_rows(&hashes, first, still_frames);
        for text in texts {
            push(&mut self.examples, &images, text);
            self.rows.push(row);
        }
    }
}

/// The frames of a sample as rows: those of a video in order, a still image repeated.
pub(super) fn frame_rows(hashes: &[u64], first: u32, still_frames: usize) -> Vec<Sighting> {
    let repeats = if hashes.len() == 1 { still_frames } else { 1 };
    let rows =
        hashes.iter().zip(first..).flat_map(|(hash, image)| std::iter::repeat_n((*hash, image), repeats));
    let sighting =
        |(start, (hash, image))| Sighting { start, image, grid: Grid::FRAME, merge: 1, tokens: 1, hash };
    (0..).zip(rows).map(sighting).collect()
}

/// Appends an example: frames, of which nothing is learned, and a text.
pub(super) fn push(table: &mut ExampleTable, images: &[Sighting], (tokens, weights): &Weighted) {
    // Rows of frames have no token of their own: layouts put the frame in its place.
    let tokens = [&vec![0; images.len()][..], tokens].concat();
    let weights = [&vec![0.0; images.len()][..], weights].concat();
    table.push(Example { tokens: &tokens, weights: &weights, label: None, images });
}

/// The place of a sample, for messages.
pub(super) fn place(path: &Arc<PathBuf>, row: SampleRow) -> SourceLocation {
    SourceLocation { file: path.clone(), line: None, row: None, offset: row.offset }
}
