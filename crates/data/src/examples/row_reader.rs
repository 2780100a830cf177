//! Reads, renders and tokenises rows, in order and on several threads.

use std::sync::{Arc, OnceLock};

use flatout_waits::{self as waits, Unit};
use rayon::ThreadPool;
use rayon::prelude::*;

use super::conversation::{Dialogue, Schema, joined};
use super::encoder::{Encoder, Framed};
use super::labelled::{Columns, LabelCounts, Labelled};
use super::marks;
use super::mask::{Masked, TrainOn, masked, weights};
use super::preference::{Judged, JudgedSchema, Pair, PairSchema};
use super::row_error::RowError;
use super::sets::{ExampleKind, ExampleSpec, Inputs, TooLong};
use super::shapes;
use super::sides::sides;
use super::synthetic;
use super::template::{CHATML_TOKENS, ChatTemplate};
use super::visual::{
    Expanded, ImageSpan, MAX_IMAGE_BYTES, VISION_TOKENS, VisualChat, VisualReader, VisualSchema, expand,
};
use crate::error::DataError;
use crate::formats::{Field, Fields, OnError, ReadOptions, Reason, Record, Records, Skipped, SourceLocation};
use crate::order::split::threshold;
use crate::random::{fingerprint, key};
use crate::text::tokenizer::Vocabulary;
use crate::text::tokenizer::guarded::Unencodable;

/// Rows per batch: enough for every thread, few enough for memory, and fewer where rows contain images.
const BATCH_ROWS: usize = 2048;
const BATCH_BYTES: usize = 256 << 20;
/// Bytes of text that a tokeniser is trained on.
const SAMPLE_BYTES: usize = 64 << 20;

/// The form of the rows of a file.
#[derive(Clone)]
enum RowForm {
    Chat(Schema),
    Classes(Columns),
    Visual(VisualSchema),
    Pairs(PairSchema),
    Judged(JudgedSchema),
}

impl RowForm {
    /// The form in words.
    fn named(&self) -> String {
        match self {
            RowForm::Chat(schema) => schema.to_string(),
            RowForm::Classes(columns) => columns.to_string(),
            RowForm::Visual(schema) => schema.to_string(),
            RowForm::Pairs(schema) => schema.to_string(),
            RowForm::Judged(schema) => schema.to_string(),
        }
    }
}

enum Row {
    Labelled(Labelled),
    /// A conversation, or several about the same images.
    Chats(Vec<Exchange>),
    /// A prompt with the chosen and with the rejected answer.
    Pair([Exchange; 2]),
    /// A prompt with an answer, and whether it is wanted.
    Judged(Exchange, bool),
}

/// A conversation, with images where the model sees them.
enum Exchange {
    Text(Dialogue),
    Visual(VisualChat),
}

impl Exchange {
    /// Hash of the content, independent of how it was written.
    fn hash(&self) -> u64 {
        match self {
            Exchange::Text(dialogue) => dialogue.hash(),
            Exchange::Visual(chat) => chat.hash(),
        }
    }
}

impl Row {
    /// Hash of the content, independent of how it was written.
    fn hash(&self) -> u64 {
        match self {
            Row::Labelled(labelled) => labelled.hash(),
            Row::Chats(chats) => match chats.as_slice() {
                [chat] => chat.hash(),
                chats => chats.iter().fold(0, |hash, chat| key(hash, chat.hash())),
            },
            Row::Pair([chosen, rejected]) => key(chosen.hash(), rejected.hash()),
            Row::Judged(chat, is_wanted) => key(chat.hash(), u64::from(*is_wanted)),
        }
    }

    /// Its conversations; none for a labelled text.
    fn exchanges(&self) -> &[Exchange] {
        match self {
            Row::Labelled(_) => &[],
            Row::Chats(chats) => chats,
            Row::Pair(pair) => pair,
            Row::Judged(chat, _) => std::slice::from_ref(chat),
        }
    }

    /// The hashes of its images.
    fn images(&self) -> Arc<[u128]> {
        // Both answers of a pair have the same images.
        let shown = if matches!(self, Row::Pair(_)) { &self.exchanges()[..1] } else { self.exchanges() };
        let hashes = |exchange: &Exchange| match exchange {
            Exchange::Text(_) => vec![],
            Exchange::Visual(chat) => chat.hashes().collect::<Vec<u128>>(),
        };
        shown.iter().flat_map(hashes).collect()
    }
}

/// A tokenised text of a row, before images and classes are numbered.
pub(super) struct Draft {
    pub tokens: Vec<u32>,
    pub weights: Vec<f32>,
    /// The first token of the second text of a pair, where the tokeniser gives it another type.
    pub second: Option<u32>,
    pub label: Option<String>,
    pub class: Option<u32>,
    /// Images among the tokens, in order.
    pub images: Vec<ImageSpan>,
    pub hash: u64,
    /// The hashes of all images of its row.
    pub row_images: Arc<[u128]>,
    pub place: SourceLocation,
}

/// The row that all its examples come from.
struct Origin<'r> {
    hash: u64,
    images: &'r Arc<[u128]>,
    place: &'r SourceLocation,
}

/// The examples of a row, the number that were cut, and the number that were skipped as too long.
#[derive(Default)]
struct RowDrafts {
    drafts: Vec<Draft>,
    cut: u64,
    too_long: u64,
}

/// The texts of a row that a tokeniser may be trained on, and what decides the row's side.
struct TextRow {
    hash: u64,
    images: Arc<[u128]>,
    texts: Vec<String>,
}

/// The outcome of reading a row.
enum Outcome {
    Drafts(Vec<Draft>, u64),
    TooLong,
    Refused(RowError),
}

pub(super) struct RowReader<'s> {
    pub spec: &'s ExampleSpec,
    pub template: Option<&'s ChatTemplate>,
    pub pool: &'s ThreadPool,
    /// Reads rows with images, where there are some.
    pub visual: Option<VisualReader<'s>>,
    /// The fatal error that ended reading, and its place: a template or a tokeniser that fails on every row.
    pub fatal: OnceLock<(RowError, SourceLocation)>,
}

/// Receives a batch of rows of one form. Returns whether to continue.
type VisitBatch<'b> = dyn FnMut(Vec<Record>, &RowForm, &mut Skipped) -> Result<bool, DataError> + 'b;

/// Rows of one input in batches.
enum Stream {
    File(Box<Records>),
    Generated { next: u64, end: u64, seed: u64, make: fn(u64, u64) -> Record },
}

impl Stream {
    fn batch(&mut self) -> Result<Vec<Record>, DataError> {
        match self {
            Stream::File(records) => {
                let (mut batch, mut bytes) = (Vec::new(), 0);
                while batch.len() < BATCH_ROWS && bytes < BATCH_BYTES {
                    let Some(record) = records.next().transpose()? else { break };
                    bytes += record.fields.held_bytes();
                    batch.push(record);
                }
                Ok(batch)
            }
            Stream::Generated { next, end, seed, make } => {
                let from = *next;
                *next = (from + BATCH_ROWS as u64).min(*end);
                Ok((from..*next).map(|row| make(*seed, row)).collect())
            }
        }
    }
}

/// The tokenised rows of a set, in order.
pub(super) struct DraftSet {
    pub drafts: Vec<Draft>,
    pub schema: Vec<String>,
    pub rows: u64,
    pub cut: u64,
    pub too_long: u64,
    pub skipped: Skipped,
    pub on_error: OnError,
}

impl RowReader<'_> {
    fn streams(&self, inputs: &Inputs) -> Result<Vec<Stream>, DataError> {
        match inputs {
            Inputs::Generated => Ok(vec![Stream::Generated {
                next: 0,
                end: self.spec.rows,
                seed: self.spec.seed,
                make: match self.spec.task {
                    ExampleKind::Chat => synthetic::exercise,
                    ExampleKind::Classes => synthetic::pair,
                    ExampleKind::Visual => shapes::question,
                    ExampleKind::Pairs if self.visual.is_some() => shapes::preference,
                    ExampleKind::Pairs => synthetic::preference,
                    ExampleKind::Judged if self.visual.is_some() => shapes::judgement,
                    ExampleKind::Judged => synthetic::judgement,
                    ExampleKind::Frames => unreachable!("samples with frames are opened by their own module"),
                },
            }]),
            Inputs::Files(files) => {
                let max_image_bytes = if self.visual.is_some() { MAX_IMAGE_BYTES } else { 0 };
                let options = ReadOptions { max_image_bytes, ..self.spec.read.clone() };
                files.iter().map(|file| Ok(Stream::File(Box::new(Records::open(file, &options)?)))).collect()
            }
        }
    }

    /// Calls `visit` with every batch of rows and the form of its file, found in the file's first valid row.
    fn each_batch(
        &self,
        inputs: &Inputs,
        skipped: &mut Skipped,
        visit: &mut VisitBatch<'_>,
    ) -> Result<(), DataError> {
        let wait = waits::begin("reading examples", Unit::Things("examples"), None);
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
                let rows = batch.len() as u64;
                if !visit(batch, form, skipped)? {
                    return Ok(());
                }
                wait.add(rows);
            }
            if let Stream::File(records) = &stream {
                skipped.merge(records.skipped());
            }
        }
        Ok(())
    }

    fn form(&self, fields: &Fields) -> Result<RowForm, RowError> {
        let spec = self.spec;
        match spec.task {
            ExampleKind::Chat => Schema::of(fields).map(RowForm::Chat),
            ExampleKind::Classes => {
                let given = [spec.text_a.as_deref(), spec.text_b.as_deref(), spec.label.as_deref()];
                Columns::of(fields, given, !spec.unlabelled).map(RowForm::Classes)
            }
            ExampleKind::Visual => VisualSchema::of(fields).map(RowForm::Visual),
            ExampleKind::Pairs => PairSchema::of(fields).map(RowForm::Pairs),
            ExampleKind::Judged => JudgedSchema::of(fields).map(RowForm::Judged),
            ExampleKind::Frames => unreachable!("samples with frames are opened by their own module"),
        }
    }

    /// Runs `work` on a row, unless an earlier row met a fatal error.
    fn unless_failed<T>(
        &self,
        record: &Record,
        work: impl FnOnce() -> Result<T, RowError>,
    ) -> Result<T, RowError> {
        if let Some((wrong, _)) = self.fatal.get() {
            return Err(wrong.clone());
        }
        let done = work();
        if let Some(wrong) = done.as_ref().err().filter(|wrong| wrong.is_fatal) {
            // Where several threads meet an error at once, one of them records its place.
            let _ = self.fatal.set((wrong.clone(), record.place.clone()));
        }
        done
    }

    fn leave_out(
        &self,
        wrong: &RowError,
        place: SourceLocation,
        skipped: &mut Skipped,
    ) -> Result<(), DataError> {
        if let Some((wrong, place)) = self.fatal.get() {
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

    fn row(&self, form: &RowForm, Record { fields, place }: &Record) -> Result<(Row, u64), RowError> {
        let row = match (form, &self.visual) {
            (RowForm::Chat(schema), _) => Row::Chats(vec![Exchange::Text(schema.read(fields, joined)?)]),
            (RowForm::Classes(columns), _) => Row::Labelled(columns.read(fields)?),
            (RowForm::Visual(schema), visual) => {
                let visual = visual.as_ref().expect("a set with images is opened with a vision");
                Row::Chats(visual.chats(schema, fields, place)?.into_iter().map(Exchange::Visual).collect())
            }
            (RowForm::Pairs(schema), Some(visual)) => {
                Row::Pair(visual.pair(schema, fields, place)?.map(Exchange::Visual))
            }
            (RowForm::Pairs(schema), None) => {
                let Pair { chosen, rejected } = schema.read(fields, joined)?;
                Row::Pair([chosen, rejected].map(Exchange::Text))
            }
            (RowForm::Judged(schema), Some(visual)) => {
                let (chat, is_wanted) = visual.judged(schema, fields, place)?;
                Row::Judged(Exchange::Visual(chat), is_wanted)
            }
            (RowForm::Judged(schema), None) => {
                let Judged { dialogue, is_wanted } = schema.read(fields, joined)?;
                Row::Judged(Exchange::Text(dialogue), is_wanted)
            }
        };
        let hash = match &self.spec.group {
            Some(group) => group_hash(fields, group)?,
            None => row.hash(),
        };
        Ok((row, hash))
    }

    /// The texts of a conversation with images, with their learned parts.
    fn visual_texts(&self, chat: &VisualChat) -> Result<Vec<Masked>, RowError> {
        let template = self.template.ok_or_else(no_template)?;
        let texts = masked(template, &chat.chat, self.spec.train_on)?;
        match self.visual.as_ref().and_then(|visual| visual.spec.answer_marks.as_ref()) {
            Some(marks) => texts.into_iter().map(|masked| marks::between(masked, marks)).collect(),
            None => Ok(texts),
        }
    }

    /// The texts of a conversation with their learned parts.
    fn texts(&self, exchange: &Exchange) -> Result<Vec<Masked>, RowError> {
        match exchange {
            Exchange::Visual(chat) => self.visual_texts(chat),
            Exchange::Text(Dialogue::Chat(chat)) => {
                let template = self.template.ok_or_else(no_template)?;
                masked(template, chat, self.spec.train_on)
            }
            Exchange::Text(Dialogue::Plain { prompt, completion }) => {
                let text = format!("{prompt}{completion}");
                let from = if self.spec.train_on == TrainOn::All { 0 } else { prompt.len() };
                // The range ends one past the text, because the end token is learned too.
                let learned = from..text.len() + 1;
                Ok(vec![Masked { text, learned: Vec::from([learned]), is_exact: true, turns: 0 }])
            }
        }
    }

    pub fn train_vocabulary(&self, inputs: &Inputs) -> Result<Vocabulary, DataError> {
        let (mut rows, mut bytes): (Vec<TextRow>, _) = (Vec::new(), 0);
        // The side of a row with images is known once all rows are read.
        let reads_all = self.visual.is_some();
        self.each_batch(inputs, &mut Skipped::default(), &mut |batch, form, skipped| {
            let read = |record: &Record| -> Result<TextRow, RowError> {
                self.unless_failed(record, || {
                    let (row, hash) = self.row(form, record)?;
                    let images = row.images();
                    let spelled = |masked: Vec<Masked>| masked.into_iter().map(|masked| masked.text);
                    let texts = match row {
                        _ if images.is_empty() && is_held_out(self.spec, hash) => Vec::new(),
                        Row::Labelled(Labelled { a, b, .. }) => [Some(a), b].into_iter().flatten().collect(),
                        row => {
                            let texts = row.exchanges().iter().map(|exchange| self.texts(exchange));
                            texts.collect::<Result<Vec<_>, _>>()?.into_iter().flat_map(spelled).collect()
                        }
                    };
                    Ok(TextRow { hash, images, texts })
                })
            };
            let read: Vec<_> = self.pool.install(|| batch.par_iter().map(read).collect());
            for (read, record) in read.into_iter().zip(batch) {
                match read {
                    Ok(mut read) => {
                        if reads_all && bytes >= SAMPLE_BYTES {
                            read.texts.clear();
                        }
                        bytes += read.texts.iter().map(String::len).sum::<usize>();
                        rows.push(read);
                    }
                    Err(wrong) => self.leave_out(&wrong, record.place, skipped)?,
                }
            }
            Ok(bytes < SAMPLE_BYTES || reads_all)
        })?;
        let side_hashes = self.side_hashes(rows.iter().map(|row| (row.hash, &row.images)));
        let texts = rows.into_iter().zip(side_hashes).filter(|(_, hash)| !is_held_out(self.spec, *hash));
        let texts: Vec<String> = texts.flat_map(|(row, _)| row.texts).collect();
        let all = [CHATML_TOKENS.as_slice(), &VISION_TOKENS].concat();
        let more = match (self.template, &self.visual) {
            (None, _) => &[],
            (Some(_), Some(_)) => all.as_slice(),
            (Some(_), None) => &CHATML_TOKENS,
        };
        // The spelling of special tokens is not learned again as text.
        let bare = |text: &String| more.iter().fold(text.clone(), |text, token| text.replace(token, " "));
        let texts: Vec<String> = texts.iter().map(bare).collect();
        Vocabulary::train_with(texts.iter().map(String::as_str), self.spec.vocab, more)
    }

    /// The hash that decides the side of each row. Rows that share an image have the same one, unless groups are given.
    pub fn side_hashes<'r>(&self, rows: impl Iterator<Item = (u64, &'r Arc<[u128]>)>) -> Vec<u64> {
        match self.spec.group {
            Some(_) => rows.map(|(hash, _)| hash).collect(),
            None => sides(rows.map(|(hash, images)| (hash, &**images))),
        }
    }

    /// The labels of all rows, without their texts.
    pub fn labels(&self, inputs: &Inputs) -> Result<LabelCounts, DataError> {
        let mut collected = LabelCounts::default();
        self.each_batch(inputs, &mut Skipped::default(), &mut |batch, form, skipped| {
            for record in batch {
                match self.row(form, &record) {
                    Ok((Row::Labelled(Labelled { label: Some(label), .. }), _)) => {
                        collected.add(&label, &record.place);
                    }
                    Ok(_) => {}
                    Err(wrong) => self.leave_out(&wrong, record.place, skipped)?,
                }
            }
            Ok(true)
        })?;
        Ok(collected)
    }

    pub fn drafts(&self, inputs: &Inputs, encoder: &Encoder) -> Result<DraftSet, DataError> {
        let mut set = DraftSet {
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
            let named = form.named();
            if set.schema.last() != Some(&named) {
                set.schema.push(named);
            }
            set.rows += batch.len() as u64;
            let outcomes: Vec<Outcome> = self
                .pool
                .install(|| batch.par_iter().map(|record| self.outcome(form, record, encoder)).collect());
            for (outcome, record) in outcomes.into_iter().zip(batch) {
                match outcome {
                    Outcome::Drafts(drafts, cut) => {
                        set.drafts.extend(drafts);
                        set.cut += cut;
                    }
                    Outcome::TooLong => set.too_long += 1,
                    Outcome::Refused(wrong) => self.leave_out(&wrong, record.place, skipped)?,
                }
            }
            Ok(true)
        })?;
        set.skipped = skipped;
        Ok(set)
    }

    fn outcome(&self, form: &RowForm, record: &Record, encoder: &Encoder) -> Outcome {
        let drafted = self.unless_failed(record, || {
            let (row, hash) = self.row(form, record)?;
            let images = row.images();
            let origin = Origin { hash, images: &images, place: &record.place };
            let mut drafted = RowDrafts::default();
            match row {
                Row::Labelled(labelled) => return self.labelled(labelled, &origin, encoder),
                Row::Pair(pair) => return self.pair(&pair, &origin, encoder),
                Row::Judged(chat, is_wanted) => {
                    self.exchange(&chat, &origin, encoder, &mut drafted)?;
                    drafted.drafts.iter_mut().for_each(|draft| draft.class = Some(u32::from(is_wanted)));
                }
                Row::Chats(chats) => {
                    for chat in &chats {
                        self.exchange(chat, &origin, encoder, &mut drafted)?;
                    }
                }
            }
            let RowDrafts { drafts, cut, too_long } = drafted;
            match drafts.is_empty() && too_long > 0 {
                true => Ok(Outcome::TooLong),
                false => Ok(Outcome::Drafts(drafts, cut)),
            }
        });
        drafted.unwrap_or_else(Outcome::Refused)
    }

    /// Makes an example of every text of a conversation.
    fn exchange(
        &self,
        exchange: &Exchange,
        origin: &Origin<'_>,
        encoder: &Encoder,
        drafted: &mut RowDrafts,
    ) -> Result<(), RowError> {
        let (is_document, chat) = match exchange {
            Exchange::Text(dialogue) => (matches!(dialogue, Dialogue::Plain { .. }), None),
            Exchange::Visual(chat) => (false, Some(chat)),
        };
        for masked in self.texts(exchange)? {
            self.draft(&masked, is_document, chat, origin, encoder, drafted)?;
        }
        Ok(())
    }

    /// Makes two examples, or skips both: the prompt is never cut, and answers are cut at their ends.
    fn pair(
        &self,
        pair: &[Exchange; 2],
        origin: &Origin<'_>,
        encoder: &Encoder,
    ) -> Result<Outcome, RowError> {
        let mut drafted = RowDrafts::default();
        for exchange in pair {
            self.exchange(exchange, origin, encoder, &mut drafted)?;
        }
        let RowDrafts { drafts, cut, too_long } = drafted;
        if too_long > 0 {
            return Ok(Outcome::TooLong);
        }
        let [chosen, rejected] = &drafts[..] else { unreachable!("an answer is one text") };
        match chosen.tokens == rejected.tokens {
            // The part in which they differ was cut off.
            true if cut > 0 => Ok(Outcome::TooLong),
            true => Err(RowError::new(Reason::Pair, SAME_TOKENS)),
            false => Ok(Outcome::Drafts(drafts, cut)),
        }
    }

    /// Makes an example of a text, unless it is too long.
    fn draft(
        &self,
        masked: &Masked,
        is_document: bool,
        chat: Option<&VisualChat>,
        origin: &Origin<'_>,
        encoder: &Encoder,
        drafted: &mut RowDrafts,
    ) -> Result<(), RowError> {
        let most = self.spec.max_tokens;
        let pieces = if is_document { encoder.document(&masked.text) } else { encoder.pieces(&masked.text) };
        let pieces = pieces.map_err(unencodable)?;
        let weights = weights(masked, &pieces);
        let expanded = match chat {
            None => Expanded {
                tokens: pieces.into_iter().map(|piece| piece.token).collect(),
                weights,
                images: Vec::new(),
            },
            Some(chat) => {
                let visual = self.visual.as_ref().expect("only a visual reader gives chats with images");
                let token = *visual.token.get().expect("the image token is known before rows are read");
                let shown = chat.images.iter().filter(|(turn, _)| *turn < masked.turns);
                let shown = shown.map(|(_, image)| image);
                expand(&pieces, &weights, token, &visual.spec.patching, shown)?
            }
        };
        let Expanded { mut tokens, mut weights, images } = expanded;
        let is_learned = |weights: &[f32]| weights.iter().any(|weight| *weight > 0.0);
        if !is_learned(&weights) {
            return Err(RowError::new(
                Reason::NothingToLearn,
                "no token of the row is learned; give it an answer, or choose what is learned with data.train_on",
            ));
        }
        if tokens.len() > most {
            // No image is cut in two or cut off: the answer may be about it.
            let cuts_image = images.last().is_some_and(|last: &ImageSpan| last.start + last.tokens > most);
            match self.spec.too_long {
                TooLong::Fail => return Err(too_many(tokens.len(), most)),
                TooLong::Cut if !cuts_image && is_learned(&weights[..most]) => {
                    tokens.truncate(most);
                    weights.truncate(most);
                    drafted.cut += 1;
                }
                TooLong::Skip | TooLong::Cut => {
                    drafted.too_long += 1;
                    return Ok(());
                }
            }
        }
        drafted.drafts.push(Draft {
            tokens,
            weights,
            second: None,
            label: None,
            class: None,
            images,
            hash: origin.hash,
            row_images: origin.images.clone(),
            place: origin.place.clone(),
        });
        Ok(())
    }

    fn labelled(&self, row: Labelled, origin: &Origin<'_>, encoder: &Encoder) -> Result<Outcome, RowError> {
        let most = self.spec.max_tokens;
        let Framed { tokens, second, is_cut } =
            encoder.framed(&row.a, row.b.as_deref(), most).map_err(unencodable)?;
        match self.spec.too_long {
            TooLong::Fail if is_cut => {
                let whole = encoder.framed(&row.a, row.b.as_deref(), usize::MAX).map_err(unencodable)?;
                return Err(too_many(whole.tokens.len(), most));
            }
            TooLong::Skip if is_cut => return Ok(Outcome::TooLong),
            _ => {}
        }
        if tokens.is_empty() {
            return Err(RowError::new(Reason::Empty, "the tokeniser makes no token of the text; correct it"));
        }
        let weights = vec![0.0; tokens.len()];
        let draft = Draft {
            tokens,
            weights,
            second: second.map(|at| at as u32),
            label: row.label,
            class: None,
            images: Vec::new(),
            hash: origin.hash,
            row_images: origin.images.clone(),
            place: origin.place.clone(),
        };
        Ok(Outcome::Drafts(vec![draft], u64::from(is_cut)))
    }
}

/// The error for a pair whose texts differ but whose tokens do not.
pub(super) const SAME_TOKENS: &str =
    "both answers are the same tokens, so there is nothing to prefer; correct one of them";

pub(super) fn too_many(tokens: usize, most: usize) -> RowError {
    let message = format!(
        "the row has {tokens} tokens and data.max_tokens is {most}; raise it, or give data.too_long=cut or skip"
    );
    RowError::new(Reason::TooManyTokens, message)
}

pub(super) fn unencodable(error: Unencodable) -> RowError {
    match error {
        Unencodable::Text(message) => RowError::new(
            Reason::Unsupported,
            format!("the tokeniser cannot encode the text ({message}); correct it"),
        ),
        Unencodable::Tokenizer(message) => {
            RowError::fatal(Reason::Unsupported, format!("{message}; give another with data.tokenizer"))
        }
    }
}

pub(super) fn no_template() -> RowError {
    RowError::new(
        Reason::Template,
        "the row is a conversation, and there is no chat template beside the tokeniser; give one with data.template: a \
         file, or chatml where the tokeniser has <|im_start|> and <|im_end|>",
    )
}

fn group_hash(fields: &Fields, group: &str) -> Result<u64, RowError> {
    let named = match fields.get(group) {
        Some(Field::Text(text)) if !text.is_empty() => text.clone(),
        Some(Field::Whole(number)) => number.to_string(),
        Some(other) => {
            let what = if other.text().is_some() { "empty" } else { other.kind() };
            let message = format!("the group `{group}` is {what}, not a name or a number; correct it");
            return Err(RowError::new(Reason::MissingField, message));
        }
        None => {
            let message = format!(
                "the row has no field `{group}`, which data.group names, only {}; give it one",
                fields.names()
            );
            return Err(RowError::new(Reason::MissingField, message));
        }
    };
    Ok(key(0x6772_6f75, fingerprint(named.as_bytes())))
}

/// Mixed into the hash for folds, so that the first fold differs from the rows that a share holds out.
const FOLD: u64 = 0x666f_6c64;

pub(super) fn is_held_out(spec: &ExampleSpec, hash: u64) -> bool {
    match spec.fold {
        Some((part, parts)) => key(FOLD, hash) % parts as u64 == part as u64,
        None => hash < threshold(spec.held_out),
    }
}
