//! Retention of checkpoints: the newest ones, every K-th one, and the best one stay.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::found::numbered;
use super::{MARKER, Watch};
use crate::config::{Checkpoint, Config};
use crate::metrics::goal::Metric;
use flatout_data::durable::{self, about};

/// The file beside the checkpoints with the step of the best one and its loss.
const BEST: &str = "best.json";

/// Decides which checkpoints are kept once a new one is complete. The new one always is.
#[derive(Clone, Debug, PartialEq)]
pub struct Retention {
    /// Number of the newest checkpoints to keep, including the new one.
    pub keep: usize,
    /// Checkpoints whose step is a multiple of this are also kept; 0 disables this.
    pub keep_every: u64,
    /// The best checkpoint is also kept.
    pub best: Option<Best>,
    /// Whether any are removed. They are not while updates are being left out: the run may have to roll back to one of them.
    pub prune: bool,
}

impl Retention {
    /// The retention that a config asks for, where `skipped` consecutive updates before the saved state were left out.
    pub fn of(config: &Config, best: Option<Best>, skipped: u64) -> Retention {
        let Checkpoint { keep, keep_every, .. } = config.checkpoint;
        Retention { keep, keep_every, best, prune: skipped == 0 }
    }
}

/// The checkpoint with the best evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub step: u64,
    /// Its held-out loss.
    pub loss: f32,
    /// The metric it was best in, if that is not the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<(Metric, f64)>,
}

impl Best {
    /// Its value of a metric, if it was judged by that metric.
    pub fn value(&self, metric: Metric) -> Option<f64> {
        match self.score {
            None => (metric == Metric::Loss).then_some(self.loss as f64),
            Some((of, value)) => (of == metric).then_some(value),
        }
    }
}

/// The best checkpoint so far, if one is recorded and still there.
pub fn best(checkpoints: &Path) -> Option<Best> {
    let text = fs::read(checkpoints.join(BEST)).ok()?;
    let best: Best = serde_json::from_slice(&text).ok()?;
    super::folder_path(checkpoints, best.step).join(MARKER).exists().then_some(best)
}

/// Records the best checkpoint and removes those older than `saved` that need not stay. Newer ones belong to a history that a
/// rollback discarded; they are replaced when their steps are reached again.
pub(super) fn apply(checkpoints: &Path, saved: u64, kept: &Retention, watch: Watch) -> io::Result<()> {
    if let Some(named) = kept.best.filter(|named| best(checkpoints) != Some(*named)) {
        let path = checkpoints.join(BEST);
        watch("name the best checkpoint")?;
        durable::replace(&path, &serde_json::to_vec(&named)?).map_err(about(&path))?;
    }
    if !kept.prune {
        return Ok(());
    }
    let older = numbered(checkpoints).map_err(|error| io::Error::other(error.0))?;
    let mut newest = 1;
    for (step, path) in older.into_iter().rev().filter(|(step, _)| *step < saved) {
        if path.join(MARKER).exists() {
            let milestone = kept.keep_every > 0 && step.is_multiple_of(kept.keep_every);
            let is_newest = newest < kept.keep;
            newest += usize::from(is_newest);
            if is_newest || milestone || kept.best.is_some_and(|best| best.step == step) {
                continue;
            }
        }
        remove(checkpoints, step, &path, watch)?;
    }
    Ok(())
}

/// Removes checkpoints other than the complete one of a step that need not stay, if a process was killed between saving and
/// pruning.
pub fn prune(checkpoints: &Path, step: u64, kept: &Retention) -> io::Result<()> {
    if step > 0 { apply(checkpoints, step, kept, &mut |_| Ok(())) } else { Ok(()) }
}

/// Removes the checkpoints after a step that the run was rolled back to.
pub fn forget_after(checkpoints: &Path, step: u64) -> io::Result<()> {
    let all = numbered(checkpoints).map_err(|error| io::Error::other(error.0))?;
    for (later, path) in all.into_iter().filter(|(later, _)| *later > step) {
        remove(checkpoints, later, &path, &mut |_| Ok(()))?;
    }
    Ok(())
}

/// Renames first, so that a crash in the middle leaves nothing that looks like a checkpoint.
fn remove(checkpoints: &Path, step: u64, path: &PathBuf, watch: Watch) -> io::Result<()> {
    let removed = checkpoints.join(format!(".step-{step}.removed"));
    watch("take an old checkpoint away")?;
    fs::rename(path, &removed).map_err(about(path))?;
    watch("remove it")?;
    fs::remove_dir_all(&removed).map_err(about(&removed))
}
