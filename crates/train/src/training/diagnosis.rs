//! Finds the tensor that made an update non-finite.
//!
//! `apply` leaves such an update out on the device and clears the gradient sums with it. The host learns of it late, so finite
//! steps keep no extra state for this. Instead the step's rows are kept until it is reported, and the first of a row of bad steps
//! is computed again: micro-batch by micro-batch into the cleared sums, which are then read. On the CPU this uses the same
//! weights. On a GPU one more update may have been made by then; if the rows give finite gradients with the present weights, the
//! diagnosis says so.
//!
//! Where ranks exchange in every micro-batch, each rank computes all of its own, whatever it found. If they add gradients there,
//! the sums it reads include these ranks' samples.

use std::ops::Range;

use flatout_ir::passes::differentiate::LOSS_SUM;
use flatout_ir::passes::layout;
use flatout_ir::{Class, OpKind, Plan, TensorRange};
use flatout_runtime::{RuntimeError, Session};

use crate::run::state::{held, leaves};
use crate::tasks::batch::{Batch, Draw};
use crate::training::update::accumulate;

/// The diagnosis, as the end of a sentence. It must be called between updates: it expects clear gradient sums and leaves them
/// clear.
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

/// Whether ranks add gradients in a plan. Other exchanges in it carry weights.
fn adds_over_ranks(plan: &Plan) -> bool {
    let adds = |kind: OpKind| matches!(kind, OpKind::ReduceScatter | OpKind::AllReduce);
    plan.launches.iter().any(|launch| adds(launch.op.kind()))
}

/// Describes the first non-finite tensor after a micro-batch, if there is one. Where ranks add gradients inside the plan, the
/// sums are those of several ranks.
fn blame(
    session: &Session,
    batch: &Batch,
    weights: &[TensorRange],
    adds: bool,
) -> Result<Option<String>, RuntimeError> {
    // The backward pass goes from the last parameter to the first and carries non-finite values along, so the first parameter it
    // reached is the one to report.
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

/// Clears everything that is carried across the micro-batches of a step: sums, and the largest magnitudes of 8-bit tensors.
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

    /// The step after a diagnosis gives the bits it would have given without it.
    #[test]
    fn a_diagnosis_changes_no_state_and_clears_the_sums() {
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
