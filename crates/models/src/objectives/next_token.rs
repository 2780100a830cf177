//! The next token: cross-entropy under a vocabulary head, or its logits.
//!
//! T tokens, R of which are read, D width, V vocabulary, S sequences.

use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::sample::{NUMBERS, SHARES};
use flatout_ir::{Builder, DType, HeadLosses, Tensor};

use super::preference;
use crate::form::{Form, LossForm};

/// Results of a scored form: the log-probability of each target, and the largest of its row.
pub const LOGP: &str = "logp";
pub const BEST_LOGP: &str = "best_logp";

/// The input `answers`: the rows at which the loss is computed, i32 [R]; -1 names none and is ignored.
pub fn answers(b: &Builder, rows: usize) -> Tensor<'_> {
    b.input("answers", DType::I32, &[rows])
}

/// The results of a form over tokens, from states x [T, D] and a head [V, D]; a form that trims its last block passes the
/// states of the rows that are read, x [R, D]. Logits are bounded by the cap.
///
/// Compared answers have the results of [`preference`]. Otherwise `loss` and `weight` are weighted sums over tokens, all or
/// those that are read, with the inputs `targets` and `weights`; `logits` are those of every token or, in a cached form, of the
/// tokens that the input `last` names, and `drawn` are the tokens sampled after these.
#[track_caller]
pub fn results<'g>(b: &'g Builder, form: Form, x: Tensor<'g>, head: Tensor<'g>, cap: Cap) {
    match form {
        Form::Loss(LossForm { read, trims_last, scored, preference: compared, .. }) => {
            let x = match read {
                Some(rows) if !trims_last => x.gather(answers(b, rows)),
                _ => x,
            };
            let t = x.dims()[0];
            let target = b.input("targets", DType::I32, &[t]);
            let weight = b.input("weights", DType::F32, &[t]);
            let HeadLosses { sum, logp, best } = x.capped_head_loss(head, target, weight, cap);
            if let Some(compared) = compared {
                return preference::results(b, &compared, logp, weight, scored);
            }
            b.result("loss", sum);
            if scored {
                b.result(LOGP, logp);
                b.result(BEST_LOGP, best);
            }
            b.result("weight", weight.sum(0));
        }
        Form::Logits { .. } => b.result("logits", cap.apply(x.linear(head))),
        Form::Cached { read, .. } => {
            let last = b.input("last", DType::I32, &[read]);
            let logits = cap.apply(x.gather(last).linear(head));
            b.result("logits", logits);
            let numbers = b.input("numbers", DType::I32, &[read, NUMBERS]);
            let shares = b.input("shares", DType::F32, &[read, SHARES]);
            b.result("drawn", logits.sample(numbers, shares));
        }
        Form::Classes { .. } | Form::Images(_) => panic!("{form:?} predicts no tokens"),
    }
}
