//! Answers that are compared, as plans take them, and what a reference makes of each: the task `preference`.

use std::sync::{Arc, OnceLock};

use flatout_data::{ExampleTable, Layout, MicroBatch, some};
use flatout_ir::Role;

use super::batch::{Batch, HostTensor, Inputs};
use super::examples;

/// The answers of a set, and the reference's sums of their log-probabilities, once these are known.
#[derive(Clone)]
pub struct Compared {
    /// Both sides.
    sides: [Arc<ExampleTable>; 2],
    /// Of each side, by the number of the example.
    scores: Arc<OnceLock<Scores>>,
    /// Another one where answers, tokeniser or sides are other ones.
    pub mark: String,
}

/// The sum of the log-probabilities of every answer's tokens under the reference: of those that are trained on, and of those
/// that are held out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores(pub [Vec<f32>; 2]);

/// The side that answers are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Train,
    HeldOut,
}

/// Pairs or judged answers that are laid out at once where all of them are scored: first fit over more takes long.
const LAID_OUT_AT_ONCE: usize = 1024;

impl Compared {
    pub fn new(sides: [Arc<ExampleTable>; 2], mark: String) -> Compared {
        Compared { sides, scores: Arc::default(), mark }
    }

    /// Answers that one loss compares: 2 of pairs.
    pub fn together(&self) -> usize {
        self.sides[0].together()
    }

    /// Answers of each side.
    pub fn counts(&self) -> [usize; 2] {
        [0, 1].map(|side| self.sides[side].count())
    }

    /// Takes the reference's scores. They are given once, before the first update.
    pub fn give(&self, scores: Scores) {
        self.scores.set(scores).expect("the reference is known once");
    }

    pub fn scores(&self) -> Option<&Scores> {
        self.scores.get()
    }

    /// Lays out all answers for a plan that scores them, a part of a side at a time.
    pub fn parts(&self, layout: &Layout) -> impl Iterator<Item = (Side, Vec<MicroBatch>)> {
        let of_side = move |(side, table): (Side, &'_ Arc<ExampleTable>)| {
            let (table, layout) = (table.clone(), layout.clone());
            let starts = (0..table.units()).step_by(LAID_OUT_AT_ONCE);
            starts.map(move |start| {
                let end = (start + LAID_OUT_AT_ONCE).min(table.units());
                (side, some(&table, start..end, &layout, &[]))
            })
        };
        [Side::Train, Side::HeldOut].into_iter().zip(&self.sides).flat_map(of_side)
    }

    /// A micro-batch of a side as the plan of a role takes it.
    pub fn batch(&self, role: Role, side: Side, laid_out: MicroBatch, inputs: &Inputs) -> Batch {
        let own = self.tensors(side, &laid_out, inputs);
        let mut batch = examples::batch(role, laid_out, inputs);
        batch.tensors.extend(own);
        batch
    }

    /// The inputs of the loss that compares, of those that a plan has.
    pub fn tensors(
        &self,
        side: Side,
        laid_out: &MicroBatch,
        inputs: &Inputs,
    ) -> Vec<(&'static str, HostTensor)> {
        let together = self.together();
        let (room, count) = (laid_out.labels.len(), laid_out.samples.len());
        let slots: Vec<usize> = (0..count).map(|number| slot(number, together, room)).collect();
        let answer_of = || {
            let read = inputs.has("answers");
            let rows = if read { laid_out.read } else { laid_out.tokens.len() };
            let answers = laid_out.answered(read);
            let of_row = |answer: &Option<u32>| answer.map_or(-1, |number| slots[number as usize] as i32);
            answers.iter().map(of_row).chain(std::iter::repeat(-1)).take(rows).collect()
        };
        let filled = |value: &dyn Fn(usize) -> f32| {
            let mut values = vec![0.0; room];
            (0..count).for_each(|number| values[slots[number]] = value(number));
            values
        };
        // Where the scores are not known yet, they are what is being computed.
        let scores = self.scores.get().map(|Scores(sides)| &sides[side as usize]);
        let score = |number: usize| scores.map_or(0.0, |scores| scores[laid_out.numbers[number]]);
        let wanted = |number: usize| f32::from(laid_out.labels[number] == 1);
        let units = room / together;
        let present = (0..units).map(|unit| f32::from(unit < count / together)).collect();
        inputs.only([
            ("answer_of", Box::new(|| HostTensor::I32(answer_of())) as Box<dyn FnOnce() -> HostTensor>),
            ("present", Box::new(|| HostTensor::F32(present))),
            ("reference", Box::new(|| HostTensor::F32(filled(&score)))),
            ("wanted", Box::new(|| HostTensor::F32(filled(&wanted)))),
        ])
    }

    /// Writes the scores of a micro-batch, which a plan gave by answer, to their examples.
    pub fn take(&self, side: Side, laid_out: &MicroBatch, by_answer: &[f32], scores: &mut Scores) {
        let together = self.together();
        for (number, example) in laid_out.numbers.iter().enumerate() {
            scores.0[side as usize][*example] = by_answer[slot(number, together, laid_out.labels.len())];
        }
    }
}

/// Where the answer of a micro-batch's example lies among `room`: of pairs the chosen ones come first.
fn slot(number: usize, together: usize, room: usize) -> usize {
    match together {
        1 => number,
        _ => number % 2 * (room / 2) + number / 2,
    }
}
