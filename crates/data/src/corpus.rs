//! A data specification opened: vocabulary, training rows, held-out rows.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::documents::{Documents, FRAME_TOKENS};
use crate::error::DataError;
use crate::loader::{Cursor, Loader, LoaderOptions, Rows};
use crate::order::Order;
use crate::pack::{Packing, STREAMS, Stream, StreamPosition};
use crate::random::key;
use crate::synthetic::{Language, Sampled};
use crate::text::Text;
use crate::tokenizer::Vocabulary;

/// What to read and how to cut it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    pub source: Source,
    /// Text files, and folders searched for `.txt` and `.md`. Not for the synthetic language.
    #[serde(default)]
    pub path: Vec<PathBuf>,
    /// A `tokenizer.json`; without one a tokeniser is trained on the training text. Not for the synthetic language.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
    /// The size of a tokeniser to be trained, and the most tokens any vocabulary may have: the model's.
    pub vocab: usize,
    /// Tokens a row.
    pub context: usize,
    pub seed: u64,
    /// The share of text documents kept from training.
    #[serde(default = "held_out_default")]
    pub held_out: f64,
    /// Whether documents that share a row are kept from seeing each other.
    #[serde(default)]
    pub document_mask: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Synthetic,
    Text,
}

fn held_out_default() -> f64 {
    0.05
}

/// The loss that cannot be beaten, and the loss of the best model that looks back two tokens, in nats a predicted token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Floor {
    pub nats: f64,
    pub trigram_nats: f64,
}

/// What was opened, in numbers. Tokens include the frame of each document; `None` is without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    pub documents: Option<u64>,
    pub tokens: Option<u64>,
    pub held_out_documents: Option<u64>,
    pub held_out_tokens: Option<u64>,
}

pub struct Corpus {
    vocabulary: Vocabulary,
    train: Arc<dyn Documents>,
    held_out: Arc<dyn Documents>,
    floor: Option<Floor>,
    packing: Packing,
    seed: u64,
    mark: String,
}

/// Reads, tokenises and splits. Everything that is wrong with the data is found here.
pub fn open(spec: &Spec) -> Result<Corpus, DataError> {
    if spec.context == 0 {
        return Err(DataError::input("A row of 0 tokens teaches nothing: set model.context to at least 1."));
    }
    if !(0.0..1.0).contains(&spec.held_out) {
        return Err(DataError::input(format!(
            "data.held_out={} is not a share: give 0 or more, below 1.",
            spec.held_out
        )));
    }
    let (vocabulary, train, held_out, floor, content): (_, Arc<dyn Documents>, Arc<dyn Documents>, _, _) =
        match spec.source {
            Source::Synthetic => {
                for (key, given) in
                    [("data.path", !spec.path.is_empty()), ("data.tokenizer", spec.tokenizer.is_some())]
                {
                    if given {
                        return Err(DataError::input(format!(
                            "The synthetic language has no use for {key}: leave it out, or set data.source=text."
                        )));
                    }
                }
                let language = Arc::new(Language::new());
                let vocabulary = Vocabulary::from_words(language.words());
                vocabulary.fits(spec.vocab)?;
                // With the document mask nobody predicts `<bos>`, which cost nothing and made the mean smaller.
                let tokens = language.mean_document_tokens;
                let predicted = if spec.document_mask { tokens - 1.0 } else { tokens };
                let [nats, trigram_nats] =
                    [language.floor_nats, language.trigram_nats].map(|nats| nats * tokens / predicted);
                let floor = Floor { nats, trigram_nats };
                let content = u64::from(language.version());
                let side =
                    |held_out| Arc::new(Sampled { language: language.clone(), seed: spec.seed, held_out });
                (vocabulary, side(false), side(true), Some(floor), content)
            }
            Source::Text => {
                let text = Text::read(&spec.path, spec.held_out)?;
                let vocabulary = match &spec.tokenizer {
                    Some(path) => Vocabulary::load(path)?,
                    None => Vocabulary::train(text.side(false), spec.vocab)?,
                };
                vocabulary.fits(spec.vocab)?;
                let side = |held_out| Ok(Arc::new(text.tokenize(held_out, &vocabulary)?));
                let (train, held_out) = (side(false)?, side(true)?);
                let content = text.fingerprint(false);
                (vocabulary, train, held_out, None, content)
            }
        };
    let packing = Packing {
        context: spec.context,
        document_mask: spec.document_mask,
        bos: vocabulary.bos(),
        eos: vocabulary.eos(),
    };
    let mark = format!("{:016x}", [content, vocabulary.fingerprint(), spec.seed].into_iter().fold(0, key));
    Ok(Corpus { vocabulary, train, held_out, floor, packing, seed: spec.seed, mark })
}

impl Corpus {
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Known for the synthetic language only.
    pub fn floor(&self) -> Option<Floor> {
        self.floor
    }

    pub fn describe(&self) -> Description {
        let framed = |side: &Arc<dyn Documents>| Some(side.tokens()? + FRAME_TOKENS * side.count()?);
        Description {
            documents: self.train.count(),
            tokens: framed(&self.train),
            held_out_documents: self.held_out.count(),
            held_out_tokens: framed(&self.held_out),
        }
    }

    /// The cursor of a run that begins.
    pub fn start(&self) -> Cursor {
        Cursor {
            row: 0,
            streams: [StreamPosition { document: 0, offset: 0 }; STREAMS],
            data: self.mark.clone(),
        }
    }

    /// Training rows from a cursor on. A cursor of other data, another tokeniser or another seed is refused.
    pub fn train_loader(&self, cursor: &Cursor, options: LoaderOptions) -> Result<Loader, DataError> {
        if cursor.data != self.mark {
            return Err(DataError::input(
                "The training data is not what this run began with (text, tokeniser or seed changed), so it cannot go \
                 on exactly: restore the data, or begin a new run.",
            ));
        }
        let order = Order::new(self.train.count(), self.seed);
        Loader::new(self.train.clone(), order, self.packing, cursor.clone(), options)
    }

    /// The first `count` rows of the training side read once, or all there are: with nothing held out, every document.
    pub fn rows_once(&self, count: usize) -> Result<Rows, DataError> {
        self.first_rows(&self.train, count)
    }

    fn first_rows(&self, documents: &Arc<dyn Documents>, count: usize) -> Result<Rows, DataError> {
        let mut rows = Rows { context: self.packing.context, ..Rows::default() };
        if documents.count() != Some(0) {
            let order = Order::new(documents.count(), 0);
            let mut stream = Stream::once(documents.clone(), order, self.packing);
            while rows.count() < count {
                let Some(row) = stream.row()? else { break };
                rows.push(rows.count() as u64, row);
            }
        }
        Ok(rows)
    }

    /// The first `count` rows of the held-out text, or all there are: the same in every call, for every text
    /// source also the same for every seed. The last row may be filled up with tokens of weight 0.
    pub fn held_out_rows(&self, count: usize) -> Result<Rows, DataError> {
        let rows = self.first_rows(&self.held_out, count)?;
        if rows.count() == 0 && count > 0 {
            return Err(DataError::input("No text is held out to evaluate on: set data.held_out above 0."));
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::scratch::Scratch;

    fn synthetic() -> Spec {
        Spec {
            source: Source::Synthetic,
            path: Vec::new(),
            tokenizer: None,
            vocab: 512,
            context: 64,
            seed: 1,
            held_out: 0.05,
            document_mask: false,
        }
    }

    fn text(scratch: &Scratch) -> Spec {
        let lines: String =
            (0..2000).map(|line| format!("Number {line} is followed by {}.\n", line + 1)).collect();
        let path = vec![scratch.write("numbers.txt", lines.as_bytes())];
        Spec { source: Source::Text, path, vocab: 300, held_out: 0.2, ..synthetic() }
    }

    fn refused(spec: &Spec) -> String {
        let error = open(spec).err().expect("the specification is refused");
        assert!(error.is_input());
        error.sentence
    }

    #[test]
    fn the_synthetic_language_opens_without_a_file() {
        let corpus = open(&synthetic()).unwrap();
        let floor = corpus.floor().unwrap();
        assert!(floor.trigram_nats > 1.2 * floor.nats);
        assert_eq!(corpus.describe().tokens, None);
        let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default()).unwrap();
        let rows = loader.next_rows(6).unwrap();
        assert_eq!((rows.count(), rows.tokens.len(), rows.epoch), (6, 6 * 64, 0.0));
        assert!(rows.weights.iter().all(|weight| *weight == 1.0));
        let story: Vec<u32> = rows.tokens[..64].iter().map(|token| *token as u32).collect();
        assert!(corpus.vocabulary().decode(&story).contains(" at the "));
        assert_eq!(corpus.held_out_rows(7).unwrap().count(), 7);
        assert_eq!(corpus.held_out_rows(7).unwrap(), corpus.held_out_rows(7).unwrap());
    }

    #[test]
    fn the_floor_is_that_of_the_tokens_predicted() {
        let language = Language::new();
        for document_mask in [false, true] {
            let corpus = open(&Spec { document_mask, context: 4096, ..synthetic() }).unwrap();
            let rows = corpus.held_out_rows(50).unwrap();
            let tokens: Vec<&i32> = rows.tokens.iter().collect();
            let nats = documents(&tokens).into_iter().map(|document| {
                let document: Vec<u32> = document.into_iter().chain([1]).map(|token| token as u32).collect();
                language.surprise(&document).iter().sum::<f64>()
            });
            let mean = nats.sum::<f64>() / f64::from(rows.weights.iter().sum::<f32>());
            let floor = corpus.floor().unwrap().nats;
            assert!(
                (mean / floor - 1.0).abs() < 0.01,
                "mask {document_mask}: sampled {mean}, computed {floor}"
            );
        }
    }

    #[test]
    fn held_out_documents_are_never_trained_on() {
        let scratch = Scratch::new("held-out");
        for spec in [synthetic(), text(&scratch)] {
            let corpus = open(&spec).unwrap();
            let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default()).unwrap();
            let rows = loader.next_rows(2000).unwrap();
            let streams = (0..STREAMS)
                .map(|lane| rows.tokens.chunks(64).skip(lane).step_by(STREAMS).flatten().collect());
            let trained: HashSet<Vec<i32>> =
                streams.flat_map(|stream: Vec<&i32>| documents(&stream)).collect();
            let held = documents(&corpus.held_out_rows(100).unwrap().tokens.iter().collect::<Vec<_>>());
            let common = held.iter().filter(|document| trained.contains(*document)).count();
            match spec.source {
                // The shortest stories are told twice by chance; what is forbidden is a share of the draws.
                Source::Synthetic => {
                    assert!(common * 10 < held.len(), "{common} of {} documents", held.len())
                }
                Source::Text => assert_eq!((common, held.is_empty()), (0, false)),
            }
        }
    }

    /// Whole documents of a stream of tokens.
    fn documents(stream: &[&i32]) -> Vec<Vec<i32>> {
        let documents = stream.split(|token| **token == 1).filter(|tokens| tokens.first() == Some(&&0));
        documents.map(|tokens| tokens.iter().map(|token| **token).collect()).collect()
    }

    #[test]
    fn text_is_tokenised_split_and_counted() {
        let scratch = Scratch::new("open-text");
        let spec = text(&scratch);
        let corpus = open(&spec).unwrap();
        assert_eq!(corpus.vocabulary().size(), 300);
        let Description { documents, tokens, held_out_documents, held_out_tokens } = corpus.describe();
        assert!(documents.unwrap() > 30 && held_out_documents.unwrap() > 3);
        let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default()).unwrap();
        let rows = loader.next_rows(tokens.unwrap() as usize / 64).unwrap();
        assert!((rows.epoch - 1.0).abs() < 0.01, "{}", rows.epoch);

        let held = corpus.held_out_rows(usize::MAX).unwrap();
        assert_eq!(held.count() as u64, (held_out_tokens.unwrap() - 1).div_ceil(64));
        assert_eq!(held.weights.iter().sum::<f32>() as u64, held_out_tokens.unwrap() - 1);
        assert!(
            held.weights
                .iter()
                .zip(&held.targets)
                .all(|(weight, target)| (*weight == 0.0) == (*target == -1))
        );
        // Another seed reorders training and leaves evaluation alone.
        let other = open(&Spec { seed: 2, ..spec.clone() }).unwrap();
        assert_eq!(other.held_out_rows(5).unwrap(), corpus.held_out_rows(5).unwrap());
        let none = open(&Spec { held_out: 0.0, ..spec }).unwrap();
        assert!(none.held_out_rows(1).unwrap_err().sentence.contains("data.held_out above 0"));
    }

    #[test]
    fn a_saved_tokeniser_opens_the_same_corpus_and_other_data_refuses_the_cursor() {
        let scratch = Scratch::new("reopen");
        let spec = text(&scratch);
        let corpus = open(&spec).unwrap();
        let tokenizer = scratch.path().join("tokenizer.json");
        corpus.vocabulary().save(&tokenizer).unwrap();
        let again = open(&Spec { tokenizer: Some(tokenizer), ..spec.clone() }).unwrap();
        assert_eq!(again.start(), corpus.start());
        assert!(again.train_loader(&corpus.start(), LoaderOptions::default()).is_ok());

        let other_seed = open(&Spec { seed: 2, ..spec.clone() }).unwrap();
        let mut more = std::fs::read(&spec.path[0]).unwrap();
        more.extend_from_slice(&more.clone());
        let longer = open(&Spec { path: vec![scratch.write("longer.txt", &more)], ..spec }).unwrap();
        for corpus_now in [other_seed, longer] {
            let error = corpus_now.train_loader(&corpus.start(), LoaderOptions::default()).err().unwrap();
            assert!(error.is_input() && error.sentence.contains("not what this run began with"), "{error}");
        }
    }

    #[test]
    fn what_cannot_work_is_refused_before_anything_is_read() {
        let scratch = Scratch::new("refused");
        assert!(refused(&Spec { vocab: 100, ..synthetic() }).contains("but the model only 100"));
        assert!(refused(&Spec { context: 0, ..synthetic() }).contains("model.context"));
        assert!(refused(&Spec { held_out: 1.0, ..synthetic() }).contains("data.held_out=1"));
        assert!(refused(&Spec { held_out: f64::NAN, ..synthetic() }).contains("data.held_out=NaN"));
        assert!(refused(&Spec { path: vec!["book.txt".into()], ..synthetic() }).contains("data.source=text"));
        assert!(refused(&Spec { source: Source::Text, ..synthetic() }).contains("data.path is empty"));
        assert!(refused(&Spec { vocab: 256, ..text(&scratch) }).contains("need 258"));
    }

    #[test]
    fn a_specification_has_short_defaults() {
        let spec = r#"{"source": "synthetic", "vocab": 512, "context": 64, "seed": 1}"#;
        assert_eq!(serde_json::from_str::<Spec>(spec).unwrap(), synthetic());
    }
}
