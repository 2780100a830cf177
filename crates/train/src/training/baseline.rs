//! The baseline that judged answers are compared with: the mean gain of an update's prompts with mismatched answers.

use flatout_data::{Layout, MicroBatch};
use flatout_ir::Role;
use flatout_runtime::Session;

use crate::Failure;
use crate::ranks::Ranks;
use crate::tasks::batch::Inputs;
use crate::tasks::preference::{AnswerSplit, ComparedAnswers, Scores};
use crate::training::shared_eval::run_for_others;

/// Runs the plan `eval` over the prompts of judged answers, each with the answer of another prompt. The baseline is the mean gain
/// of these pairs over the reference, or 0 where that is negative. It covers the whole update or evaluation, however it is split.
/// Does nothing where answers are compared in pairs.
pub fn take(
    session: &mut Session,
    compared: &ComparedAnswers,
    split: AnswerSplit,
    numbers: &[usize],
    layout: Option<&Layout>,
) -> Result<(), Failure> {
    take_among(&Ranks::alone(), session, compared, (split, numbers), layout)
}

/// The same as [`take`] on several ranks: each scores its share of the micro-batches, and all add the gains up in one order, so
/// that the bits do not depend on the number of ranks. The number of gains of a rank follows from the layout.
pub fn take_among(
    ranks: &Ranks,
    session: &mut Session,
    compared: &ComparedAnswers,
    (split, numbers): (AnswerSplit, &[usize]),
    layout: Option<&Layout>,
) -> Result<(), Failure> {
    let Some(layout) = layout.filter(|_| compared.is_judged() && !numbers.is_empty()) else { return Ok(()) };
    let split = split.mismatched();
    let parts = compared.laid_out(split, numbers, layout);
    let of_rank = |rank: usize| parts.iter().skip(rank).step_by(ranks.count());
    let inputs = Inputs::of(session.plans(), Role::Eval);
    let mut own = vec![];
    for part in of_rank(ranks.rank()) {
        own.extend(gained(session, compared, split, part, &inputs)?);
    }
    if of_rank(ranks.rank()).count() < parts.len().div_ceil(ranks.count()) {
        run_for_others(session)?;
    }
    let bytes: Vec<u8> = own.into_iter().flat_map(f32::to_le_bytes).collect();
    let count = |rank: usize| of_rank(rank).map(|part| part.numbers.len()).sum::<usize>();
    let lengths: Vec<usize> = (0..ranks.count()).map(|rank| size_of::<f32>() * count(rank)).collect();
    let all = ranks.exchange_bytes(&bytes, &lengths)?;
    let mut of_ranks: Vec<_> = all.iter().map(|bytes| bytes.chunks_exact(size_of::<f32>())).collect();
    let mut gain = 0.0;
    for (part, rank) in parts.iter().zip((0..ranks.count()).cycle()) {
        for bytes in of_ranks[rank].by_ref().take(part.numbers.len()) {
            gain += f32::from_le_bytes(bytes.try_into().expect("four bytes")) as f64;
        }
    }
    compared.give_baseline((gain / numbers.len() as f64).max(0.0) as f32);
    Ok(())
}

/// Log-probability of each answer of a micro-batch minus that under the reference.
fn gained(
    session: &mut Session,
    compared: &ComparedAnswers,
    split: AnswerSplit,
    part: &MicroBatch,
    inputs: &Inputs,
) -> Result<Vec<f32>, Failure> {
    let sums = compared.sums(session, compared.batch(Role::Eval, split, part.clone(), inputs)?)?;
    let known = compared.scores().map(|Scores(splits)| &splits[split as usize]);
    let gain = |(number, example): (usize, &usize)| sums[number] - known.map_or(0.0, |known| known[*example]);
    Ok(part.numbers.iter().enumerate().map(gain).collect())
}
