//! How well a model predicts some text: the mean loss a token, and perplexity.

use flatout_data::{Rows, max_segments};
use flatout_ir::{Program, Role};
use flatout_models::form::{Documents, Form};
use serde::Serialize;

use crate::Failure;
use crate::UserError;
use crate::config::Source;
use crate::device::Device;
use crate::refuse;
use crate::tasks::feed::{Draw, feed};
use crate::tasks::material::{Material, as_rows};
use crate::weights::pretrained::Loaded;

/// What came of it.
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

/// What is evaluated on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// The documents that were kept from training, as evaluation in training reads them.
    HeldOut,
    /// Every document of a path that was given.
    All,
}

/// Rows for `eval`: all documents of a path given on the command line, otherwise the held-out share of a run's own data.
pub fn rows(loaded: &mut Loaded, overrides: &[String]) -> Result<(Rows, Share), Failure> {
    let given = |key: &str| {
        overrides.iter().any(|word| word.split('=').next().is_some_and(|name| name.trim() == key))
    };
    let share = if given("data.path") || given("path") { Share::All } else { Share::HeldOut };
    let synthetic = loaded.config.data.source() == Source::Synthetic;
    if !loaded.is_run && synthetic {
        needs_path(loaded)?;
    }
    if share == Share::All {
        loaded.config.data.held_out = 0.0;
    }
    let material = Material::open(&loaded.config, Some(&loaded.dir), &mut |_| {})?;
    let limit = match loaded.config.eval.rows {
        rows if given("eval.rows") || given("rows") => rows,
        rows if share == Share::HeldOut && rows > 0 => rows,
        _ if synthetic => 256,
        _ => usize::MAX,
    };
    let context = loaded.config.model.tokens();
    let rows = match (&material, share) {
        (Material::Text(corpus), Share::HeldOut) => corpus.held_out_rows(limit)?,
        (Material::Text(corpus), Share::All) => corpus.rows_once(limit)?,
        (Material::Examples(examples), Share::HeldOut) => as_rows(&examples.held_out, limit, context),
        (Material::Examples(examples), Share::All) => as_rows(&examples.train, limit, context),
        (Material::Images(_), _) => unreachable!("images have classes, which are judged apart"),
    };
    Ok((rows, share))
}

fn needs_path(loaded: &Loaded) -> Result<(), UserError> {
    refuse!("{} comes without data: name some to evaluate on, as in data.path=book.txt", loaded.dir.display())
}

/// Tokens computed at once where eval.micro_batch does not say.
const AUTO_TOKENS: usize = 4096;

/// The mean loss over rows of tokens.
pub fn evaluate(loaded: &mut Loaded, device: &Device, rows: &Rows) -> Result<Evaluation, Failure> {
    let (model, len) = (&loaded.config.model, loaded.config.model.tokens());
    let at_once = loaded.config.eval.micro_batch.given().unwrap_or((AUTO_TOKENS / len).max(1));
    let at_once = at_once.min(rows.count()).max(1);
    let documents = match loaded.config.data.document_mask {
        true => Documents::Apart { most: at_once * max_segments(len) },
        false => Documents::Joined,
    };
    let graph = model.build(Form::Loss { rows: at_once, len, documents, dropout: false });
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    let (mut loss, mut weight) = (0.0, 0.0);
    for from in (0..rows.count()).step_by(at_once) {
        feed(&mut session, Role::Eval, rows, from, at_once, Draw { seed: 0, step: 0 })?;
        session.run(Role::Eval)?;
        loss += session.result(Role::Eval, "loss")?[0] as f64;
        weight += session.result(Role::Eval, "weight")?[0] as f64;
    }
    let loss = loss / weight;
    Ok(Evaluation { loss, perplexity: loss.exp(), tokens: weight as u64, rows: rows.count() as u64 })
}
