//! Preferences: how much more likely a model makes preferred answers, compared with a reference model.
//!
//! R rows that are read, A answers, P pairs: answer p is the chosen one of pair p and answer P + p the rejected one. For an
//! answer, a is the sum of its tokens' log-probabilities, a0 that of the reference, n its number of tokens.

use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::{Builder, DType, Op, Tensor};
use flatout_settings::choice;

/// The result of a scored form: a for each answer.
pub const ANSWER_LOGP: &str = "answer_logp";
/// The prefix of results that are summed over samples and normalised like the loss.
pub const SUM: &str = flatout_ir::passes::differentiate::SUM;

choice! {
    /// The loss to minimise, with d = (a - a0 of the chosen) - (a - a0 of the rejected) and s the logistic function.
    pub enum PreferenceLoss {
        /// -(1 - e) log s(beta d) - e log s(-beta d).
        Dpo = "dpo",
        /// The square of: the difference of (a - a0) / n, less 1 / (2 beta).
        Ipo = "ipo",
        /// max(0, 1 - beta d).
        Hinge = "hinge",
        /// The terms of dpo with the weights 1 - e and -e, divided by 1 - 2 e.
        Robust = "robust",
        /// 1 - s(beta (a - a0)) of the chosen, and s(beta (a - a0)) of the rejected.
        ApoZero = "apo_zero",
        /// -log s(beta (a / n of the chosen - a / n of the rejected) - margin).
        Simpo = "simpo",
        /// -a / n of the chosen - beta log s(o), o the log-odds of the chosen less those of the rejected.
        Orpo = "orpo",
        /// 1 - s(beta (a - a0 - z)) of a wanted answer, 1 - s(beta (z - a + a0)) of an unwanted one.
        Kto = "kto",
    }
}

impl PreferenceLoss {
    /// Whether answers are judged one by one rather than compared in pairs.
    pub fn is_judged(self) -> bool {
        self == PreferenceLoss::Kto
    }

    /// Whether it uses a reference model.
    pub fn has_reference(self) -> bool {
        !matches!(self, PreferenceLoss::Simpo | PreferenceLoss::Orpo)
    }
}

/// The loss of compared answers, with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preference {
    pub loss: PreferenceLoss,
    pub beta: f64,
    /// Fraction of pairs assumed to be labelled the wrong way round, e.
    pub label_smoothing: f64,
    pub margin: f64,
    /// The weight of the chosen answer's mean loss, which is added.
    pub sft: f64,
    /// The capacity for answers, A.
    pub answers: usize,
}

/// Results `loss` and `weight`, sums over pairs or judged answers, and sums for monitoring. The input `answer_of`, i32 [R], has
/// the answer of each row, or -1; `present` is 1 for each actual pair or answer, `reference` is a0. Judged answers have the
/// inputs `wanted`, 1 or 0, and `baseline`, z. With `scored` also [`ANSWER_LOGP`] [A].
pub fn results<'g>(b: &'g Builder, of: &Preference, logp: Tensor<'g>, weight: Tensor<'g>, scored: bool) {
    let (rows, answers) = (logp.dims()[0], of.answers);
    let answer_of = b.input("answer_of", DType::I32, &[rows]);
    let wide = logp.dtype();
    let by_answer = |values: Tensor<'g>| {
        let sum = Op::ScatterAdd { rows: answers, out: wide, base: false };
        b.op(sum, &[values.reshape(&[rows, 1]), answer_of]).reshape(&[answers])
    };
    let a = by_answer(weight * logp);
    // An absent answer has no tokens; the maximum avoids a division by 0.
    let n = by_answer(weight).zip(E::Max, b.fill(1.0, wide, &[answers]));
    let reference = of.loss.has_reference().then(|| b.input("reference", wide, &[answers]));
    let gain = reference.map_or(a, |reference| a - reference);
    match of.loss.is_judged() {
        true => judged(b, of, gain),
        false => compared(b, of, a, gain, n),
    }
    if scored {
        b.result(ANSWER_LOGP, a);
    }
}

fn compared<'g>(b: &'g Builder, of: &Preference, a: Tensor<'g>, gain: Tensor<'g>, n: Tensor<'g>) {
    let pairs = of.answers / 2;
    let halves = |x: Tensor<'g>| [x.slice(0, 0, pairs), x.slice(0, pairs, pairs)];
    let present = b.input("present", a.dtype(), &[pairs]);
    let [mean_chosen, mean_rejected] = halves(a.div(n));
    let [gain_chosen, gain_rejected] = halves(gain);
    let (beta, smoothing) = (of.beta, of.label_smoothing);
    let x = (gain_chosen - gain_rejected).scale(beta);
    let terms = |right: f64, wrong: f64| {
        let right = log_sigmoid(x).scale(-right);
        if wrong == 0.0 { right } else { right + log_sigmoid(-x).scale(-wrong) }
    };
    let loss = match of.loss {
        PreferenceLoss::Dpo => terms(1.0 - smoothing, smoothing),
        PreferenceLoss::Robust => {
            let over = 1.0 - 2.0 * smoothing;
            terms((1.0 - smoothing) / over, -smoothing / over)
        }
        PreferenceLoss::Ipo => {
            let [chosen, rejected] = halves(gain.div(n));
            (chosen - rejected).offset(-0.5 / beta).square()
        }
        PreferenceLoss::Hinge => x.scale(-1.0).offset(1.0).map(E::Relu),
        PreferenceLoss::ApoZero => {
            let s = |gain: Tensor<'g>| log_sigmoid(gain.scale(beta)).exp();
            s(gain_rejected) - s(gain_chosen).offset(-1.0)
        }
        PreferenceLoss::Simpo => -log_sigmoid((mean_chosen - mean_rejected).scale(beta).offset(-of.margin)),
        PreferenceLoss::Orpo => {
            // An absent pair would have means of 0, whose odds are infinite.
            let absent = present.offset(-1.0);
            let odds = log_odds(b, mean_chosen + absent) - log_odds(b, mean_rejected + absent);
            -(mean_chosen + log_sigmoid(odds).scale(beta))
        }
        PreferenceLoss::Kto => unreachable!("judged answers are no pairs"),
    };
    let loss = if of.sft == 0.0 { loss } else { loss - mean_chosen.scale(of.sft) };
    let sum = |value: Tensor<'g>| (present * value).sum(0);
    b.result("loss", sum(loss));
    b.result("weight", present.sum(0));
    // Without a reference an answer's reward is its mean log-probability per token.
    let rewards =
        if of.loss.has_reference() { [gain_chosen, gain_rejected] } else { [mean_chosen, mean_rejected] };
    let [chosen, rejected] = rewards.map(|reward| reward.scale(beta));
    let [logp_chosen, logp_rejected] = halves(a);
    for (name, value) in [
        ("reward_accuracy", (chosen - rejected).map(E::Step)),
        ("reward_margin", chosen - rejected),
        ("reward_chosen", chosen),
        ("reward_rejected", rejected),
        ("logp_chosen", logp_chosen),
        ("logp_rejected", logp_rejected),
    ] {
        b.result(&format!("{SUM}{name}"), sum(value));
    }
}

fn judged<'g>(b: &'g Builder, of: &Preference, gain: Tensor<'g>) {
    let (answers, wide) = (of.answers, gain.dtype());
    let present = b.input("present", wide, &[answers]);
    let wanted = b.input("wanted", wide, &[answers]);
    let baseline = b.input("baseline", wide, &[1]).broadcast(&[answers]);
    let reward = gain.scale(of.beta);
    let above = (gain - baseline).scale(of.beta);
    let sign = wanted.scale(2.0).offset(-1.0);
    let loss = log_sigmoid(above * sign).exp().scale(-1.0).offset(1.0);
    let sum = |value: Tensor<'g>| (present * value).sum(0);
    b.result("loss", sum(loss));
    b.result("weight", present.sum(0));
    let unwanted = wanted.scale(-1.0).offset(1.0);
    for (name, value) in [
        ("reward_accuracy", (above * sign).map(E::Step)),
        ("reward_chosen", wanted * reward),
        ("reward_rejected", unwanted * reward),
        ("wanted", wanted),
    ] {
        b.result(&format!("{SUM}{name}"), sum(value));
    }
}

/// log s(x) = -log(1 + exp(-x)), shifted so that no exponential overflows. Its gradient is exact everywhere, including 0, where
/// training starts.
fn log_sigmoid(x: Tensor<'_>) -> Tensor<'_> {
    let shift = (-x).map(E::Relu).map(E::StopGradient);
    -(shift + ((-shift).exp() + (-x - shift).exp()).log())
}

/// m - log(1 - exp(m)) for a mean log-probability m.
fn log_odds<'g>(b: &'g Builder, m: Tensor<'g>) -> Tensor<'g> {
    // Unless it is 0, 1 - exp(m) is at least the spacing of 32-bit floats below 1.
    let least = b.fill(2f64.powi(-24), m.dtype(), &m.dims());
    m - m.exp().scale(-1.0).offset(1.0).zip(E::Max, least).log()
}
