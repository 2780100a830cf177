//! The record that a run stores of the model it began from: its location, the hashes of frozen tensors, and the files beside the
//! weights, so that an export is complete even if the source is gone.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use flatout_ir::passes::adapter::SCOPE;
use flatout_ir::passes::base;
use flatout_ir::{Class, Codes, Role, TensorRange};
use flatout_runtime::Session;
use serde::{Deserialize, Serialize};

use super::hub::SMALL;
use super::{Source, Weights, exactly, open_for};
use crate::Failure;
use crate::UserError;
use crate::config::Config;
use crate::config::resolved::Resolved;
use crate::refuse;
use crate::run::BESIDE;
use crate::run::state::held;
use crate::weights::initial;
use crate::weights::peft::Peft;
use flatout_data::durable;

/// `origin.json` of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The source that `model.from` meant, pinned to a commit or a step.
    pub from: String,
    /// `model.vision.from`, pinned likewise; `None` if the tower is that of `from`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vision_from: Option<String>,
    /// Hash of every frozen tensor, by path: no checkpoint contains these.
    pub frozen: BTreeMap<String, String>,
    /// The original folder of the files beside the weights.
    #[serde(skip)]
    folder: PathBuf,
    /// A sentence about parts of the source that do not belong to the model and were not read.
    #[serde(skip)]
    pub left_out: Option<String>,
}

const RECORD: &str = "origin.json";

impl Origin {
    /// Reads the record of a run.
    pub fn of(run: &Path) -> Result<Origin, UserError> {
        let path = run.join(RECORD);
        let read = fs::read(&path).map_err(|error| error.to_string());
        let read = read.and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()));
        read.map_err(|error| UserError(format!("{} cannot be read: {error}", path.display())))
    }

    /// Writes it to a run. The record is written last: if it exists, the files are complete.
    pub fn keep(&self, run: &Path) -> Result<(), Failure> {
        let beside = run.join(BESIDE);
        // A run that began from another run copies what that one stored.
        let handed_on = self.folder.join(BESIDE);
        let folder = if handed_on.is_dir() { &handed_on } else { &self.folder };
        let keep = || -> std::io::Result<()> {
            fs::create_dir_all(&beside)?;
            for file in SMALL.iter().filter(|file| folder.join(file).is_file()) {
                durable::replace(&beside.join(file), &fs::read(folder.join(file))?)?;
            }
            durable::replace(&run.join(RECORD), &serde_json::to_vec_pretty(self)?)
        };
        keep().map_err(Failure::io(beside.display()))
    }
}

/// Records exactly what `model.from` and `model.vision.from` mean: a commit instead of a branch, a step instead of the newest.
pub fn pin(config: &Config, resolved: &mut Resolved, run: &Path) -> Result<(), UserError> {
    let Some(from) = config.model.from() else { return Ok(()) };
    (resolved.from, resolved.vision_from) = match Origin::of(run) {
        Ok(origin) => (Some(origin.from), origin.vision_from),
        Err(_) => {
            let exactly = |from: &str| exactly(&Source::parse(from)?);
            (Some(exactly(from)?), tower_from(config).map(exactly).transpose()?)
        }
    };
    Ok(())
}

/// The value of `model.vision.from`.
fn tower_from(config: &Config) -> Option<&str> {
    config.model.as_fovea().and_then(|tower| tower.from.as_deref())
}

/// Writes a new run's parameters and tables: those of `model.from`, or random ones from the seed.
pub fn begin(config: &Config, session: &mut Session) -> Result<Option<Origin>, Failure> {
    let origin = match config.model.from() {
        None => {
            initial::write(session, config.train.seed)?;
            None
        }
        Some(from) => {
            let mut pretrained = open_for(&config.model, from, &mut |_| {})?;
            pretrained.weights.draw_rest(&config.model, config.train.seed);
            let is_frozen = |piece: &TensorRange| piece.class == Class::Frozen;
            // The source's adapters are merged into its weights; those of this run begin anew, whatever their rank.
            let is_adapter = |piece: &TensorRange| piece.path.starts_with(SCOPE);
            let frozen = pretrained.weights.load(session, is_frozen)?;
            pretrained.weights.load(session, |piece| !is_frozen(piece) && !is_adapter(piece))?;
            let weights = &pretrained.weights;
            let left_out = weights.left_out().or_else(|| as_values(weights, config, &frozen));
            initial::write_adapters(session, config.train.seed, |piece| weights.piece(piece))?;
            initial::write_tables(session)?;
            let description = pretrained.description;
            // It is pinned already, as in the config of every run that begins.
            let vision_from = tower_from(config).map(String::from);
            let (from, folder) = (description.pinned, description.folder);
            Some(Origin { from, vision_from, frozen, folder, left_out })
        }
    };
    if let Some(from) = &config.adapter.from {
        Peft::open(Path::new(from), config.model.decoder())?.load(session)?;
    }
    initial::write_averages(session)?;
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive)?;
    }
    Ok(origin)
}

/// A note that 4-bit weights of the source are dequantised, and that the frozen ones could stay quantised.
fn as_values(weights: &Weights, config: &Config, frozen: &BTreeMap<String, String>) -> Option<String> {
    let count = weights.packed();
    if count == 0 || config.switches.memory.codes().is_some() {
        return None;
    }
    let linear = base::linear(&config.model.build(config.model.least()));
    let can_keep = weights.check_packed(Codes::Nf4, &linear).is_ok()
        && linear.iter().any(|name| frozen.contains_key(name));
    let advice =
        if can_keep { ": base=nf4 keeps those that are frozen in 4 bits, with the same numbers" } else { "" };
    Some(format!("{count} weights that bitsandbytes quantised are read as the values of their codes{advice}"))
}

/// The initial weights of a run; for an existing run, its frozen weights must be unchanged.
pub fn beginning(config: &Config, run: Option<&Path>) -> Result<Weights, Failure> {
    let Some(from) = config.model.from() else { return Ok(Weights::drawn(config.train.seed)) };
    let mut weights = open_for(&config.model, from, &mut |_| {})?.weights;
    weights.draw_rest(&config.model, config.train.seed);
    if let Some(origin) = run.and_then(|run| Origin::of(run).ok()) {
        weights.expect(&origin.frozen);
    }
    Ok(weights)
}

/// Writes everything that no checkpoint of a run contains: tables, and frozen parameters, which must be bit-identical to the
/// initial ones.
pub fn resume(config: &Config, session: &mut Session, run: &Path) -> Result<(), Failure> {
    let Some(from) = config.model.from() else { return Ok(initial::write(session, config.train.seed)?) };
    if !held(session, |class| class == Class::Frozen).is_empty() {
        let mut weights = open_for(&config.model, from, &mut |_| {})?.weights;
        weights.draw_rest(&config.model, config.train.seed);
        let origin = Origin::of(run)?;
        if origin.from != *from {
            named_otherwise(run, &origin.from, from)?;
        }
        if let (Some(kept), Some(named)) = (&origin.vision_from, tower_from(config))
            && kept != named
        {
            named_otherwise(run, kept, named)?;
        }
        weights.expect(&origin.frozen);
        weights.load(session, |piece| piece.class == Class::Frozen)?;
    }
    Ok(initial::write_tables(session)?)
}

fn named_otherwise(run: &Path, kept: &str, named: &str) -> Result<(), UserError> {
    refuse!(
        "{} says that the run began from {kept}, and its config.toml says {named}",
        run.join(RECORD).display()
    )
}
