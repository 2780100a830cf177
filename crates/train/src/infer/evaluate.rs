//! How well a model predicts some text: the mean loss a token, and perplexity.

use flatout_ir::{Program, Role};
use serde::Serialize;

use crate::config::SourceKind;
use crate::device::Device;
use crate::tasks;
use crate::tasks::batch::EvalSet;
use crate::tasks::capacities::{self, Capacities};
pub use crate::tasks::dataset::Share;
use crate::training::evaluate::evaluate_all;
use crate::weights::loaded::Loaded;
use crate::{Failure, UserError, refuse};

/// The outcome.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean nats a predicted token.
    pub loss: f64,
    /// The exponential of it.
    pub perplexity: f64,
    /// Tokens that were predicted.
    pub tokens: u64,
    pub rows: u64,
}

/// The rows to evaluate on: all documents of a path given on the command line, otherwise the held-out share of a run's own
/// data.
pub fn rows(loaded: &mut Loaded, overrides: &[String]) -> Result<(Box<dyn EvalSet>, Share), Failure> {
    let given = |key: &str| {
        overrides.iter().any(|word| word.split('=').next().is_some_and(|name| name.trim() == key))
    };
    let share = if given("data.path") || given("path") { Share::All } else { Share::HeldOut };
    let synthetic = loaded.config.data.source() == SourceKind::Synthetic;
    if !loaded.is_run && synthetic {
        needs_path(loaded)?;
    }
    if share == Share::All {
        (loaded.config.data.held_out, loaded.config.data.held_out_path) = (0.0, None);
    }
    let data = tasks::open(&loaded.config, Some(&loaded.dir), &mut |_| {})?;
    let most = match loaded.config.eval.rows {
        rows if given("eval.rows") || given("rows") => rows,
        rows if share == Share::HeldOut && rows > 0 => rows,
        _ if synthetic => 256,
        _ => usize::MAX,
    };
    Ok((data.eval_set(&loaded.config, share, most, None)?, share))
}

fn needs_path(loaded: &Loaded) -> Result<(), UserError> {
    refuse!("{} comes without data: name some to evaluate on, as in data.path=book.txt", loaded.dir.display())
}

/// Tokens computed at once where eval.micro_batch does not say.
const AUTO_TOKENS: usize = 4096;

/// The mean loss over rows of tokens.
pub fn evaluate(loaded: &mut Loaded, device: &Device, rows: &dyn EvalSet) -> Result<Evaluation, Failure> {
    let config = &loaded.config;
    let count = rows.samples();
    let at_once = config.eval.micro_batch.given().unwrap_or((AUTO_TOKENS / config.model.tokens()).max(1));
    let at_once = at_once.min(count).max(1);
    let graph = capacities::texts(config, &Capacities::of_rows(config, at_once), false);
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    let sums = evaluate_all(&mut session, rows, at_once, &mut |_, _| {})?;
    let loss = sums.mean();
    Ok(Evaluation { loss, perplexity: loss.exp(), tokens: sums.weight as u64, rows: count as u64 })
}
