//! Which checkpoints stay: the newest, every K-th, and the one whose evaluation was best.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::found::numbered;
use super::{MARKER, Watch};
use crate::config::{Checkpoint, Config};
use crate::metrics::goal::Metric;
use flatout_data::durable::{self, about};

/// Beside the checkpoints: the step of the best one and its loss.
const BEST: &str = "best.json";

/// The checkpoints that are kept once one is whole. The one just saved always is.
#[derive(Clone, Debug, PartialEq)]
pub struct Retention {
    /// This many of the newest, the one just saved among them.
    pub keep: usize,
    /// And those whose step is a multiple of this; 0 for none.
    pub keep_every: u64,
    /// And this one.
    pub best: Option<Best>,
    /// Whether others are removed at all. A state saved while updates are being left out may be one to go back from.
    pub prune: bool,
}

impl Retention {
    /// The retention that a config asks for, with `skipped` updates in a row left out before the state that was saved.
    pub fn of(config: &Config, best: Option<Best>, skipped: u64) -> Retention {
        let Checkpoint { keep, keep_every, .. } = config.checkpoint;
        Retention { keep, keep_every, best, prune: skipped == 0 }
    }
}

/// The checkpoint whose evaluation was best.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub step: u64,
    /// Its held-out loss.
    pub loss: f32,
    /// The metric it was best in, where that is not the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<(Metric, f64)>,
}

impl Best {
    /// By a metric: its value here, where this was judged by it.
    pub fn value(&self, metric: Metric) -> Option<f64> {
        match self.score {
            None => (metric == Metric::Loss).then_some(self.loss as f64),
            Some((of, value)) => (of == metric).then_some(value),
        }
    }
}

/// The best checkpoint so far, where one is named and there.
pub fn best(checkpoints: &Path) -> Option<Best> {
    let text = fs::read(checkpoints.join(BEST)).ok()?;
    let best: Best = serde_json::from_slice(&text).ok()?;
    super::folder_path(checkpoints, best.step).join(MARKER).exists().then_some(best)
}

/// Names the best checkpoint and removes those that need not stay, older than the one just saved. Newer ones belong to
/// a future that was found broken; they are replaced when it is reached again.
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

/// Removes what need not stay beside the whole checkpoint of a step: a process that was killed after saving it did not.
pub fn prune(checkpoints: &Path, step: u64, kept: &Retention) -> io::Result<()> {
    if step > 0 { apply(checkpoints, step, kept, &mut |_| Ok(())) } else { Ok(()) }
}

/// Removes the checkpoints after a step: the run went back to it, and what follows will be another future.
pub fn forget_after(checkpoints: &Path, step: u64) -> io::Result<()> {
    let all = numbered(checkpoints).map_err(|error| io::Error::other(error.0))?;
    for (later, path) in all.into_iter().filter(|(later, _)| *later > step) {
        remove(checkpoints, later, &path, &mut |_| Ok(()))?;
    }
    Ok(())
}

/// Renamed first, so that a crash in the middle leaves nothing that looks like a checkpoint.
fn remove(checkpoints: &Path, step: u64, path: &PathBuf, watch: Watch) -> io::Result<()> {
    let removed = checkpoints.join(format!(".step-{step}.removed"));
    watch("take an old checkpoint away")?;
    fs::rename(path, &removed).map_err(about(path))?;
    watch("remove it")?;
    fs::remove_dir_all(&removed).map_err(about(&removed))
}
