//! Rows read, written out and tokenised, in order and on as many threads as there are.

use std::sync::OnceLock;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::conversation::{Dialogue, Schema};
use super::encoder::Encoder;
use super::labelled::{Collected, Columns, Labelled};
use super::mask::{Masked, TrainOn, masked, weights};
use super::sets::{ExampleKind, ExampleSpec, Inputs, TooLong};
use super::synthetic;
use super::template::{CHATML_TOKENS, ChatTemplate};
use super::wrong::Wrong;
use crate::error::DataError;
use crate::formats::{Field, Fields, OnError, Place, Reason, Record, Records, Skipped};
use crate::order::split::threshold;
use crate::random::{fingerprint, key};
use crate::text::tokenizer::Vocabulary;
use crate::text::tokenizer::guarded::Unencodable;

/// Rows that are taken at once: enough for every thread, few enough to hold.
const BATCH_ROWS: usize = 2048;
/// Text that a tokeniser is trained on.
const SAMPLE_BYTES: usize = 64 << 20;

/// How the rows of a file are read.
#[derive(Clone)]
enum RowForm {
    Chat(Schema),
    Classes(Columns),
}

enum Row {
    Chat(Dialogue),
    Labelled(Labelled),
}

/// A row on its way to an example.
pub(super) struct Draft {
    pub tokens: Vec<u32>,
    pub weights: Vec<f32>,
    pub label: Option<String>,
    pub class: Option<u32>,
    pub hash: u64,
    pub place: Place,
}

/// The outcome of reading a row.
enum Fate {
    Drafts(Vec<Draft>, u64),
    TooLong,
    Wrong(Wrong),
}

pub(super) struct Reading<'s> {
    pub spec: &'s ExampleSpec,
    pub template: Option<&'s ChatTemplate>,
    pub pool: &'s ThreadPool,
    /// The reason why it ended, and where: a template or a tokeniser that no other row can pass.
    pub ended: OnceLock<(Wrong, Place)>,
}

/// Takes a batch of rows of one form, and whether it wants more.
type SeeBatch<'b> = dyn FnMut(Vec<Record>, &RowForm, &mut Skipped) -> Result<bool, DataError> + 'b;

/// Rows of one input in batches.
enum Stream {
    File(Box<Records>),
    Made { next: u64, end: u64, seed: u64, make: fn(u64, u64) -> Record },
}

impl Stream {
    fn batch(&mut self) -> Result<Vec<Record>, DataError> {
        match self {
            Stream::File(records) => records.by_ref().take(BATCH_ROWS).collect(),
            Stream::Made { next, end, seed, make } => {
                let from = *next;
                *next = (from + BATCH_ROWS as u64).min(*end);
                Ok((from..*next).map(|row| make(*seed, row)).collect())
            }
        }
    }
}

/// All examples in the order of their rows.
pub(super) struct Taken {
    pub drafts: Vec<Draft>,
    pub schema: Vec<String>,
    pub rows: u64,
    pub cut: u64,
    pub too_long: u64,
    pub skipped: Skipped,
    pub on_error: OnError,
}

impl Reading<'_> {
    fn streams(&self, inputs: &Inputs) -> Result<Vec<Stream>, DataError> {
        match inputs {
            Inputs::Made => Ok(vec![Stream::Made {
                next: 0,
                end: self.spec.rows,
                seed: self.spec.seed,
                make: match self.spec.task {
                    ExampleKind::Chat => synthetic::exercise,
                    ExampleKind::Classes => synthetic::pair,
                },
            }]),
            Inputs::Files(files) => files
                .iter()
                .map(|file| Ok(Stream::File(Box::new(Records::open(file, &self.spec.read)?))))
                .collect(),
        }
    }

    /// Hands every batch of rows to `see`, with the form that the first row of its file has.
    fn each_batch(
        &self,
        inputs: &Inputs,
        skipped: &mut Skipped,
        see: &mut SeeBatch<'_>,
    ) -> Result<(), DataError> {
        for mut stream in self.streams(inputs)? {
            let mut form: Option<RowForm> = None;
            loop {
                let mut batch = stream.batch()?;
                if batch.is_empty() {
                    break;
                }
                while form.is_none() && !batch.is_empty() {
                    match self.form(&batch[0].fields) {
                        Ok(found) => form = Some(found),
                        Err(wrong) => {
                            let Record { place, .. } = batch.remove(0);
                            self.leave_out(&wrong, place, skipped)?;
                        }
                    }
                }
                let Some(form) = &form else { continue };
                if !see(batch, form, skipped)? {
                    return Ok(());
                }
            }
            if let Stream::File(records) = &stream {
                skipped.merge(records.skipped());
            }
        }
        Ok(())
    }

    fn form(&self, fields: &Fields) -> Result<RowForm, Wrong> {
        let spec = self.spec;
        match spec.task {
            ExampleKind::Chat => Schema::of(fields).map(RowForm::Chat),
            ExampleKind::Classes => {
                let given = [spec.text_a.as_deref(), spec.text_b.as_deref(), spec.label.as_deref()];
                Columns::of(fields, given, !spec.unlabelled).map(RowForm::Classes)
            }
        }
    }

    /// Works on a row, unless an earlier one met what none can pass.
    fn unless_ended<T>(&self, record: &Record, work: impl FnOnce() -> Result<T, Wrong>) -> Result<T, Wrong> {
        if let Some((wrong, _)) = self.ended.get() {
            return Err(wrong.clone());
        }
        let done = work();
        if let Some(wrong) = done.as_ref().err().filter(|wrong| wrong.is_final) {
            // Of several threads that meet it at once, one says where.
            let _ = self.ended.set((wrong.clone(), record.place.clone()));
        }
        done
    }

    fn leave_out(&self, wrong: &Wrong, place: Place, skipped: &mut Skipped) -> Result<(), DataError> {
        if let Some((wrong, place)) = self.ended.get() {
            return Err(wrong.error(place));
        }
        match self.spec.read.on_error {
            OnError::Fail => Err(wrong.error(&place)),
            OnError::Skip => {
                skipped.note(wrong.reason, place);
                Ok(())
            }
        }
    }

    fn row(&self, form: &RowForm, fields: &Fields) -> Result<(Row, u64), Wrong> {
        let row = match form {
            RowForm::Chat(schema) => Row::Chat(schema.read(fields)?),
            RowForm::Classes(columns) => Row::Labelled(columns.read(fields)?),
        };
        let hash = match &self.spec.group {
            Some(group) => group_hash(fields, group)?,
            None => match &row {
                Row::Chat(dialogue) => dialogue.hash(),
                Row::Labelled(labelled) => labelled.hash(),
            },
        };
        Ok((row, hash))
    }

    /// The texts of a row with what is learned of them.
    fn texts(&self, dialogue: &Dialogue) -> Result<Vec<Masked>, Wrong> {
        match dialogue {
            Dialogue::Chat(chat) => {
                let template = self.template.ok_or_else(no_template)?;
                masked(template, chat, self.spec.train_on)
            }
            Dialogue::Plain { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                let from = if self.spec.train_on == TrainOn::All { 0 } else { prompt.len() };
                // One further than the text: the end behind it is learned too.
                let learned = from..text.len() + 1;
                Ok(vec![Masked { text, learned: Vec::from([learned]), is_exact: true }])
            }
        }
    }

    pub fn train_vocabulary(&self, inputs: &Inputs) -> Result<Vocabulary, DataError> {
        let (mut texts, mut bytes) = (Vec::new(), 0);
        self.each_batch(inputs, &mut Skipped::default(), &mut |batch, form, skipped| {
            let read = |record: &Record| -> Result<Vec<String>, Wrong> {
                self.unless_ended(record, || {
                    let (row, hash) = self.row(form, &record.fields)?;
                    Ok(match row {
                        _ if is_held_out(self.spec, hash) => Vec::new(),
                        Row::Chat(dialogue) => {
                            self.texts(&dialogue)?.into_iter().map(|masked| masked.text).collect()
                        }
                        Row::Labelled(Labelled { a, b, .. }) => [Some(a), b].into_iter().flatten().collect(),
                    })
                })
            };
            let read: Vec<_> = self.pool.install(|| batch.par_iter().map(read).collect());
            for (read, record) in read.into_iter().zip(batch) {
                match read {
                    Ok(read) => {
                        bytes += read.iter().map(String::len).sum::<usize>();
                        texts.extend(read);
                    }
                    Err(wrong) => self.leave_out(&wrong, record.place, skipped)?,
                }
            }
            Ok(bytes < SAMPLE_BYTES)
        })?;
        let more: &[&str] = match self.template {
            Some(_) => &CHATML_TOKENS,
            None => &[],
        };
        // The spelling of special tokens is not learned again as text.
        let bare = |text: &String| more.iter().fold(text.clone(), |text, token| text.replace(token, " "));
        let texts: Vec<String> = texts.iter().map(bare).collect();
        Vocabulary::train_with(texts.iter().map(String::as_str), self.spec.vocab, more)
    }

    /// The labels of all rows, without their texts.
    pub fn labels(&self, inputs: &Inputs) -> Result<Collected, DataError> {
        let mut collected = Collected::default();
        self.each_batch(inputs, &mut Skipped::default(), &mut |batch, form, skipped| {
            for record in batch {
                match self.row(form, &record.fields) {
                    Ok((Row::Labelled(Labelled { label: Some(label), .. }), _)) => {
                        collected.see(&label, &record.place);
                    }
                    Ok(_) => {}
                    Err(wrong) => self.leave_out(&wrong, record.place, skipped)?,
                }
            }
            Ok(true)
        })?;
        Ok(collected)
    }

    pub fn take(&self, inputs: &Inputs, encoder: &Encoder) -> Result<Taken, DataError> {
        let mut taken = Taken {
            drafts: Vec::new(),
            schema: Vec::new(),
            rows: 0,
            cut: 0,
            too_long: 0,
            skipped: Skipped::default(),
            on_error: self.spec.read.on_error,
        };
        let mut skipped = Skipped::default();
        self.each_batch(inputs, &mut skipped, &mut |batch, form, skipped| {
            let named = match form {
                RowForm::Chat(schema) => schema.to_string(),
                RowForm::Classes(columns) => columns.to_string(),
            };
            if taken.schema.last() != Some(&named) {
                taken.schema.push(named);
            }
            taken.rows += batch.len() as u64;
            let fates: Vec<Fate> = self
                .pool
                .install(|| batch.par_iter().map(|record| self.fate(form, record, encoder)).collect());
            for (fate, record) in fates.into_iter().zip(batch) {
                match fate {
                    Fate::Drafts(drafts, cut) => {
                        taken.drafts.extend(drafts);
                        taken.cut += cut;
                    }
                    Fate::TooLong => taken.too_long += 1,
                    Fate::Wrong(wrong) => self.leave_out(&wrong, record.place, skipped)?,
                }
            }
            Ok(true)
        })?;
        taken.skipped = skipped;
        Ok(taken)
    }

    fn fate(&self, form: &RowForm, record: &Record, encoder: &Encoder) -> Fate {
        let drafted = self.unless_ended(record, || {
            let (row, hash) = self.row(form, &record.fields)?;
            match row {
                Row::Chat(dialogue) => self.chat(&dialogue, hash, record, encoder),
                Row::Labelled(labelled) => self.labelled(labelled, hash, record, encoder),
            }
        });
        drafted.unwrap_or_else(Fate::Wrong)
    }

    fn chat(
        &self,
        dialogue: &Dialogue,
        hash: u64,
        record: &Record,
        encoder: &Encoder,
    ) -> Result<Fate, Wrong> {
        let (mut drafts, mut cut, mut too_long) = (Vec::new(), 0, 0);
        for masked in self.texts(dialogue)? {
            let pieces = match dialogue {
                Dialogue::Chat(_) => encoder.pieces(&masked.text),
                Dialogue::Plain { .. } => encoder.document(&masked.text),
            };
            let pieces = pieces.map_err(unencodable)?;
            let mut weights = weights(&masked, &pieces);
            let mut tokens: Vec<u32> = pieces.into_iter().map(|piece| piece.token).collect();
            let is_learned = |weights: &[f32]| weights.iter().any(|weight| *weight > 0.0);
            if !is_learned(&weights) {
                return Err(Wrong::new(
                    Reason::NothingToLearn,
                    "no token of the row is learned; give it an answer, or choose what is learned with data.train_on",
                ));
            }
            if tokens.len() > self.spec.max_tokens {
                match self.spec.too_long {
                    TooLong::Fail => return Err(self.too_many(tokens.len())),
                    TooLong::Skip => {
                        too_long += 1;
                        continue;
                    }
                    TooLong::Cut => {
                        tokens.truncate(self.spec.max_tokens);
                        weights.truncate(self.spec.max_tokens);
                        if !is_learned(&weights) {
                            too_long += 1;
                            continue;
                        }
                        cut += 1;
                    }
                }
            }
            drafts.push(Draft {
                tokens,
                weights,
                label: None,
                class: None,
                hash,
                place: record.place.clone(),
            });
        }
        match drafts.is_empty() && too_long > 0 {
            true => Ok(Fate::TooLong),
            false => Ok(Fate::Drafts(drafts, cut)),
        }
    }

    fn labelled(&self, row: Labelled, hash: u64, record: &Record, encoder: &Encoder) -> Result<Fate, Wrong> {
        let most = self.spec.max_tokens;
        let (tokens, is_cut) = encoder.framed(&row.a, row.b.as_deref(), most).map_err(unencodable)?;
        match self.spec.too_long {
            TooLong::Fail if is_cut => {
                let whole = encoder.framed(&row.a, row.b.as_deref(), usize::MAX).map_err(unencodable)?.0;
                return Err(self.too_many(whole.len()));
            }
            TooLong::Skip if is_cut => return Ok(Fate::TooLong),
            _ => {}
        }
        if tokens.is_empty() {
            return Err(Wrong::new(Reason::Empty, "the tokeniser makes no token of the text; correct it"));
        }
        let weights = vec![0.0; tokens.len()];
        let draft =
            Draft { tokens, weights, label: row.label, class: None, hash, place: record.place.clone() };
        Ok(Fate::Drafts(vec![draft], u64::from(is_cut)))
    }

    fn too_many(&self, tokens: usize) -> Wrong {
        Wrong::new(
            Reason::TooManyTokens,
            format!(
                "the row has {tokens} tokens and data.max_tokens is {}; raise it, or give data.too_long=cut or skip",
                self.spec.max_tokens
            ),
        )
    }
}

fn unencodable(error: Unencodable) -> Wrong {
    match error {
        Unencodable::Text(said) => Wrong::new(
            Reason::Unsupported,
            format!("the tokeniser cannot encode the text ({said}); correct it"),
        ),
        Unencodable::Tokenizer(said) => {
            Wrong::at_last(Reason::Unsupported, format!("{said}; give another with data.tokenizer"))
        }
    }
}

fn no_template() -> Wrong {
    Wrong::new(
        Reason::Template,
        "the row is a conversation, and there is no chat template beside the tokeniser; give one with data.template: a \
         file, or chatml where the tokeniser has <|im_start|> and <|im_end|>",
    )
}

fn group_hash(fields: &Fields, group: &str) -> Result<u64, Wrong> {
    let named = match fields.get(group) {
        Some(Field::Text(text)) if !text.is_empty() => text.clone(),
        Some(Field::Whole(number)) => number.to_string(),
        Some(other) => {
            let what = if other.text().is_some() { "empty" } else { other.kind() };
            let said = format!("the group `{group}` is {what}, not a name or a number; correct it");
            return Err(Wrong::new(Reason::MissingField, said));
        }
        None => {
            let said = format!(
                "the row has no field `{group}`, which data.group names, only {}; give it one",
                fields.names()
            );
            return Err(Wrong::new(Reason::MissingField, said));
        }
    };
    Ok(key(0x6772_6f75, fingerprint(named.as_bytes())))
}

/// Mixed into the hash for folds, so that the rows that shares hold out first are not always the first fold.
const FOLD: u64 = 0x666f_6c64;

pub(super) fn is_held_out(spec: &ExampleSpec, hash: u64) -> bool {
    match spec.fold {
        Some((part, parts)) => key(FOLD, hash) % parts as u64 == part as u64,
        None => hash < threshold(spec.held_out),
    }
}
