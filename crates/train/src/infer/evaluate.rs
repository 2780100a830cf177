//! Evaluates a language model: the mean loss per token, and perplexity.

use flatout_data::Layout;
use flatout_ir::{Program, Role};
use serde::Serialize;

use crate::config::SourceKind;
use crate::device::Device;
use crate::metrics::Metrics;
use crate::tasks;
use crate::tasks::batch::{Batch, EvalSet};
use crate::tasks::capacities::{self, Capacities};
use crate::tasks::dataset::Dataset;
pub use crate::tasks::dataset::Share;
use crate::tasks::preference::{AnswerSplit, ComparedAnswers, Scores};
use crate::training::baseline;
use crate::training::evaluate::{Counted, EvalResults, evaluate_all};
use crate::training::reference;
use crate::weights::loaded::Loaded;
use crate::{Failure, UserError, refuse};

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean nats per predicted token.
    pub loss: f64,
    /// The exponential of the loss.
    pub perplexity: f64,
    /// Number of predicted tokens.
    pub tokens: u64,
    pub rows: u64,
    /// Further metrics: of text, or of answers if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics>,
}

/// The rows to evaluate on.
pub struct Rows {
    pub set: Box<dyn EvalSet>,
    pub share: Share,
    /// The layout of examples; `None` for rows of the context.
    layout: Option<Layout>,
    /// Rows of the context per batch.
    at_once: usize,
    data: Box<dyn Dataset>,
}

/// The rows to evaluate on: all documents of a path given on the command line, otherwise the held-out share of a run's own data.
pub fn rows(loaded: &mut Loaded, overrides: &[String]) -> Result<Rows, Failure> {
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
    let config = &loaded.config;
    let auto = (AUTO_TOKENS / config.model.tokens()).max(1);
    let at_once = config.eval.micro_batch.given().unwrap_or(auto).min(most).max(1);
    let layout = data.layout_alone(config, share, at_once);
    let set = data.eval_set(config, share, most, layout.as_ref())?;
    Ok(Rows { set, share, layout, at_once, data })
}

/// The reference's scores of answers: the stored ones for a run's own answers, otherwise newly computed ones.
fn scores(
    loaded: &Loaded,
    rows: &Rows,
    compared: &ComparedAnswers,
    layout: &Layout,
    device: &Device,
) -> Result<Scores, Failure> {
    let config = &loaded.config;
    if rows.share == Share::HeldOut {
        return reference::of_run(config, compared, &loaded.dir);
    }
    let Some(named) = config.preference.reference.as_ref().or(config.model.from()) else {
        return Err(Failure::User(UserError(format!(
            "{} began from random weights, which are not kept, so other answers than its own have no reference: name one with \
             preference.reference",
            loaded.dir.display()
        ))));
    };
    let mut other = reference::open_reference(config, &*rows.data, named)?;
    reference::by_model(&mut other, compared, layout, device, &mut |_| {})
}

fn needs_path(loaded: &Loaded) -> Result<(), UserError> {
    refuse!("{} comes without data: name some to evaluate on, as in data.path=book.txt", loaded.dir.display())
}

/// Tokens per batch if eval.micro_batch is not set.
const AUTO_TOKENS: usize = 4096;

/// Computes the mean loss over rows of tokens, and the metrics.
pub fn evaluate(loaded: &mut Loaded, device: &Device, rows: &Rows) -> Result<Evaluation, Failure> {
    let (config, count) = (&loaded.config, rows.set.samples());
    let at_once = rows.at_once.min(count).max(1);
    let capacities = match &rows.layout {
        None => Capacities::of_rows(config, at_once),
        Some(layout) => Capacities::of_shape(config, layout, 0),
    };
    if let (Some(compared), Some(layout)) = (reference::unscored(config, &*rows.data), &rows.layout) {
        compared.give(scores(loaded, rows, compared, layout, device)?);
    }
    let graph = capacities::texts(config, &capacities, false);
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    if let Some(compared) = rows.data.compared() {
        let split = if rows.share == Share::All { AnswerSplit::Train } else { AnswerSplit::HeldOut };
        let numbers: Vec<usize> = (0..count).collect();
        baseline::take(&mut session, compared, split, &numbers, rows.layout.as_ref())?;
    }
    let mut counted = Counted::new(None, rows.set.bytes_per_token(rows.data.vocabulary()));
    let see = &mut |_: Batch, results: &EvalResults| counted.see(results);
    let sums = evaluate_all(&mut session, &*rows.set, at_once, see)?;
    let (loss, metrics) = (sums.mean(), counted.metrics());
    Ok(Evaluation { loss, perplexity: loss.exp(), tokens: sums.weight as u64, rows: count as u64, metrics })
}
