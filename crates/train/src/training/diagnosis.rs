//! Which tensor made an update not finite.
//!
//! `apply` leaves such an update out on the device and clears the gradient sums with it, and the host learns of it late,
//! so nothing is kept for this in steps that are well. Instead the step's rows are kept until it is reported, and the
//! first of a row of bad steps is computed again: micro-batch by micro-batch into the cleared sums, which are then read.
//! On the CPU that is with the same weights. On a GPU one more update may have been made by then, and where the rows give
//! finite gradients with the weights there are now, this says so.
//!
//! Where ranks exchange in every micro-batch, each computes all of its own, whatever it found. If they add gradients there, it
//! sees sums of these ranks' samples.

use std::ops::Range;

use flatout_ir::passes::differentiate::LOSS_SUM;
use flatout_ir::passes::layout;
use flatout_ir::{Class, OpKind, Plan, TensorRange};
use flatout_runtime::{RuntimeError, Session};

use crate::run::state::{held, leaves};
use crate::tasks::batch::{Batch, Draw};
use crate::training::update::accumulate;

/// The diagnosis, as the end of a sentence. Call it between updates: the gradient sums must be clear, and are so
/// afterwards.
pub fn diagnose(session: &mut Session, parts: &[Batch], draw: Draw) -> Result<String, RuntimeError> {
    let pieces = held(session, |class| class == Class::Weight);
    let mut found = None;
    for piece in &pieces {
        if !is_finite(session, &piece.slot, piece.within())? {
            found = Some(format!("the weight `{}` is not finite itself", piece.path));
            break;
        }
    }
    let any_plan =
        |has: fn(&Plan) -> bool| parts.iter().any(|batch| session.plans().plan(batch.role).is_some_and(has));
    let (in_step, adds) = (any_plan(Plan::has_exchanges), any_plan(adds_over_ranks));
    for batch in parts {
        if found.is_some() && !in_step {
            break;
        }
        accumulate(session, batch, draw)?;
        if found.is_none() {
            found = blame(session, batch, &pieces, adds)?;
        }
    }
    clear(session)?;
    Ok(found.unwrap_or_else(|| ALL_FINITE.into()))
}

/// Whether ranks add gradients in a plan; what else they exchange in it are weights.
fn adds_over_ranks(plan: &Plan) -> bool {
    let adds = |kind: OpKind| matches!(kind, OpKind::ReduceScatter | OpKind::AllReduce);
    plan.launches.iter().any(|launch| adds(launch.op.kind()))
}

/// The words about sums that are not finite behind a micro-batch, where there are some; of sums of several ranks, where these add
/// them in it.
fn blame(
    session: &Session,
    batch: &Batch,
    weights: &[TensorRange],
    adds: bool,
) -> Result<Option<String>, RuntimeError> {
    // The backward pass goes from the last parameter to the first, and what is not finite goes on with it: the one it reached
    // first is where to look.
    let mut bad = vec![];
    for piece in weights.iter().rev() {
        let (slot, range) = layout::gradient_of(session.plans(), piece);
        if !is_finite(session, &slot, range)? {
            bad.push(&piece.path);
        }
    }
    let is_loss_finite = is_finite(session, LOSS_SUM, 0..1)?;
    let loss = if is_loss_finite { "finite" } else { "not finite" };

    let what = batch.unit;
    let samples = match (batch.samples.iter().min(), batch.samples.iter().max()) {
        (Some(first), Some(last)) if adds => {
            format!("{what} {first} to {last} and those that other ranks had at the time")
        }
        (Some(first), Some(last)) => format!("{what} {first} to {last}"),
        _ => format!("no {what}"),
    };
    Ok(match bad.first() {
        Some(first) => Some(format!(
            "in {samples} the loss is {loss}, and the gradient of `{first}` is the first that is not, going back from \
             the loss ({} of {} are not)",
            bad.len(),
            weights.len()
        )),
        None if !is_loss_finite => {
            Some(format!("in {samples} the loss is not finite, and every gradient is"))
        }
        None => None,
    })
}

const ALL_FINITE: &str = "each of its micro-batches is finite with the weights there are now";

/// Whether a diagnosis found nothing.
pub fn is_all_finite(found: &str) -> bool {
    found == ALL_FINITE
}

fn is_finite(session: &Session, slot: &str, range: Range<usize>) -> Result<bool, RuntimeError> {
    Ok(session.read_range_f32(slot, range)?.iter().all(|value| value.is_finite()))
}

/// Everything that crosses the micro-batches of a step: sums, and the largest magnitudes of 8-bit tensors.
fn clear(session: &mut Session) -> Result<(), RuntimeError> {
    for slot in leaves(session.plans(), |class| class == Class::Carry) {
        session.write_slot(&slot.path, &vec![0; slot.ty.bytes()])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes;
    use crate::resolve::compile;
    use crate::tasks::batch::HostTensor;
    use crate::tasks::text;
    use crate::weights::initial;
    use flatout_data::LoaderOptions;
    use flatout_ir::Role;

    /// Whatever it finds, the next step finds what it would have found without it.
    #[test]
    fn looking_changes_no_state_and_leaves_clear_sums() {
        let small = ["model.width=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=24"];
        let more = ["model.context=16", "train.batch=4", "train.micro_batch=2", "eval.rows=0"];
        let words: Vec<String> = small.iter().chain(&more).map(|word| word.to_string()).collect();
        let config = recipes::resolve("tiny", &[], &words).unwrap();
        let compiled = compile::compile(&config, &compile::target()).unwrap();
        let inputs = compiled.feeding().inputs();
        let mut session = Session::new(compiled.plans, 1).unwrap();
        initial::write(&mut session, 1).unwrap();
        let corpus = text::corpus(&config, None).unwrap();
        let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default()).unwrap();
        let mut parts =
            [(); 2].map(|()| text::batch(Role::GRAD, &loader.next_rows(2).unwrap(), 0, 2, &inputs));
        let draw = Draw { seed: 0, step: 0 };
        let kept = |session: &Session| -> Vec<Vec<u8>> {
            let slots = leaves(session.plans(), |class| class.is_saved() || class == Class::Carry);
            slots.iter().map(|slot| session.read_slot(&slot.path).unwrap()).collect()
        };
        let before = kept(&session);
        let well = diagnose(&mut session, &parts, draw).unwrap();
        assert_eq!(well, "each of its micro-batches is finite with the weights there are now");
        assert!(kept(&session) == before);
        let HostTensor::F32(weights) = parts[1].tensor_mut("weights") else {
            unreachable!("weights are f32")
        };
        weights[5] = f32::NAN;
        let ill = diagnose(&mut session, &parts, draw).unwrap();
        assert!(
            ill.starts_with("in rows 2 to 3 the loss is not finite, and the gradient of `norm`"),
            "{ill}"
        );
        assert!(kept(&session) == before);

        let path = "layers.0.ffn.down";
        let mut weight = session.read_f32(path).unwrap();
        weight[3] = f32::INFINITY;
        session.write_f32(path, &weight).unwrap();
        let ill = diagnose(&mut session, &parts, draw).unwrap();
        assert_eq!(ill, "the weight `layers.0.ffn.down` is not finite itself");
    }
}
