//! Answers that are compared, in the form in which plans take them, with their reference scores: the task `preference`.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use flatout_data::{ExampleTable, Layout, MicroBatch, some};
use flatout_ir::Role;
use flatout_models::objectives::preference::ANSWER_LOGP;
use flatout_runtime::Session;

use super::batch::{self, Batch, Draw, HostTensor, Inputs};
use super::examples;
use super::seen::SeenImages;
use crate::Failure;

/// The answers of a set, and the reference's sums of their log-probabilities once these are known.
#[derive(Clone)]
pub struct ComparedAnswers {
    /// Indexed by [`AnswerSplit`]: two tables for pairs, four for judged answers.
    splits: Vec<Arc<ExampleTable>>,
    /// The images among their tokens, if there are any.
    images: Option<SeenImages>,
    scores: Arc<OnceLock<Scores>>,
    /// The baseline that judged answers are compared with.
    baseline: Arc<Mutex<f32>>,
    /// A fingerprint of answers, tokeniser and splits.
    pub mark: String,
}

/// The sum of the log-probabilities of every answer's tokens under the reference, by split and number of the example.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores(pub Vec<Vec<f32>>);

/// The split that answers belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerSplit {
    Train,
    HeldOut,
    /// Prompts of the first two splits with mismatched answers, from which the baseline of judged answers is computed.
    TrainMismatched,
    HeldOutMismatched,
}

impl AnswerSplit {
    pub const ALL: [AnswerSplit; 4] = [
        AnswerSplit::Train,
        AnswerSplit::HeldOut,
        AnswerSplit::TrainMismatched,
        AnswerSplit::HeldOutMismatched,
    ];

    /// The split with the same prompts and mismatched answers.
    pub fn mismatched(self) -> AnswerSplit {
        AnswerSplit::ALL[self as usize % 2 + 2]
    }
}

/// Pairs or judged answers that are laid out together for scoring: first fit over more of them takes long.
const LAID_OUT_AT_ONCE: usize = 1024;

impl ComparedAnswers {
    /// From the answers for training and those held out.
    pub fn new(splits: [Arc<ExampleTable>; 2], images: Option<SeenImages>, mark: String) -> ComparedAnswers {
        let longest =
            |table: &Arc<ExampleTable>| (0..table.count()).map(|i| table.len_of(i)).max().unwrap_or(0);
        let most = splits.iter().map(longest).max().unwrap_or(0);
        let is_judged = splits[0].together() == 1;
        let mismatched = splits.iter().filter(|_| is_judged).map(|table| Arc::new(table.mismatched(most)));
        let splits = splits.iter().cloned().chain(mismatched).collect();
        ComparedAnswers { splits, images, scores: Arc::default(), baseline: Arc::default(), mark }
    }

    /// Number of answers that one loss compares: 2 for pairs.
    pub fn together(&self) -> usize {
        self.splits[0].together()
    }

    /// Whether answers are judged one by one.
    pub fn is_judged(&self) -> bool {
        self.splits.len() > 2
    }

    /// Number of answers on each split.
    pub fn counts(&self) -> Vec<usize> {
        self.splits.iter().map(|table| table.count()).collect()
    }

    /// Sets the reference's scores, once, before the first update.
    pub fn give(&self, scores: Scores) {
        self.scores.set(scores).expect("the reference is known once");
    }

    pub fn scores(&self) -> Option<&Scores> {
        self.scores.get()
    }

    /// Lays out all answers for a plan that scores them, a part of a split at a time.
    pub fn parts(&self, layout: &Layout) -> impl Iterator<Item = (AnswerSplit, Vec<MicroBatch>)> {
        let of_split = move |(split, table): (AnswerSplit, &'_ Arc<ExampleTable>)| {
            let (table, layout) = (table.clone(), layout.clone());
            let starts = (0..table.units()).step_by(LAID_OUT_AT_ONCE);
            starts.map(move |start| {
                let end = (start + LAID_OUT_AT_ONCE).min(table.units());
                (split, some(&table, start..end, &layout, &[]))
            })
        };
        AnswerSplit::ALL.into_iter().zip(&self.splits).flat_map(of_split)
    }

    /// Sets the baseline of the next update or evaluation.
    pub fn give_baseline(&self, baseline: f32) {
        *self.baseline.lock().unwrap_or_else(PoisonError::into_inner) = baseline;
    }

    /// Lays out some examples of a split for a plan that scores them.
    pub fn laid_out(&self, split: AnswerSplit, numbers: &[usize], layout: &Layout) -> Vec<MicroBatch> {
        some(&self.splits[split as usize], numbers.iter().copied(), layout, &[])
    }

    /// The sums of log-probabilities that the plan `eval` computes for a micro-batch, by answer.
    pub fn sums(&self, session: &mut Session, batch: Batch) -> Result<Vec<f32>, Failure> {
        batch::write(session, &batch, Draw::default())?;
        session.run(Role::Eval)?;
        Ok(session.result(Role::Eval, ANSWER_LOGP)?)
    }

    /// A micro-batch of a split in the form that the plan of a role takes, with its images decoded.
    pub fn batch(
        &self,
        role: Role,
        split: AnswerSplit,
        mut laid_out: MicroBatch,
        inputs: &Inputs,
    ) -> Result<Batch, Failure> {
        let images = match &self.images {
            None => None,
            Some(images) => Some((images, images.rows().of(&mut laid_out)?)),
        };
        Ok(examples::batch(role, laid_out, images, Some((self, split)), inputs))
    }

    /// Those inputs of the preference loss that a plan has.
    pub fn tensors(
        &self,
        split: AnswerSplit,
        laid_out: &MicroBatch,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        let together = self.together();
        let (room, count) = (laid_out.labels.len(), laid_out.samples.len());
        let slots: Vec<usize> = (0..count).map(|number| slot(number, together, room)).collect();
        let read = inputs.has("answers");
        let answers = laid_out.answered(read);
        let answer_of = || {
            let rows = if read { laid_out.read } else { laid_out.tokens.len() };
            let of_row = |answer: &Option<u32>| answer.map_or(-1, |number| slots[number as usize] as i32);
            answers.iter().map(of_row).chain(std::iter::repeat(-1)).take(rows).collect()
        };
        let filled = |value: &dyn Fn(usize) -> f32| {
            let mut values = vec![0.0; room];
            (0..count).for_each(|number| values[slots[number]] = value(number));
            values
        };
        // The scores are absent while they are being computed.
        let scores = self.scores.get().map(|Scores(splits)| &splits[split as usize]);
        let score = |number: usize| scores.map_or(0.0, |scores| scores[laid_out.numbers[number]]);
        let wanted = |number: usize| f32::from(laid_out.labels[number] == 1);
        let baseline = *self.baseline.lock().unwrap_or_else(PoisonError::into_inner);
        let units = room / together;
        // Answers about a frame that cannot be decoded count nothing.
        let mut present = vec![0.0; units];
        answers.iter().flatten().for_each(|number| present[*number as usize / together] = 1.0);
        inputs.only([
            ("answer_of", Box::new(|| HostTensor::I32(answer_of())) as Box<dyn FnOnce() -> HostTensor>),
            ("present", Box::new(|| HostTensor::F32(present))),
            ("reference", Box::new(|| HostTensor::F32(filled(&score)))),
            ("wanted", Box::new(|| HostTensor::F32(filled(&wanted)))),
            ("baseline", Box::new(|| HostTensor::F32(vec![baseline]))),
        ])
    }

    /// Stores the scores of a micro-batch, which a plan returned by answer, under their examples.
    pub fn take(&self, split: AnswerSplit, laid_out: &MicroBatch, by_answer: &[f32], scores: &mut Scores) {
        let together = self.together();
        for (number, example) in laid_out.numbers.iter().enumerate() {
            scores.0[split as usize][*example] = by_answer[slot(number, together, laid_out.labels.len())];
        }
    }
}

/// Position of an example's answer in a plan with capacity for `room` answers: for pairs the chosen ones come first.
fn slot(number: usize, together: usize, room: usize) -> usize {
    match together {
        1 => number,
        _ => number % 2 * (room / 2) + number / 2,
    }
}
