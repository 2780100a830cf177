//! Cross-validation: one config trained once per fold, each time with another part of the labelled texts held out, and the
//! results over all folds.
//!
//! A fold is a run in its own directory and is resumed like any other. Its config has `train.fold`, counted from 1. A run counts
//! with its best evaluation in `eval.metric`, which is that of the checkpoint it keeps.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use flatout_data::durable;
use flatout_report::history::{History, State};
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::Config;
use flatout_train::metrics::goal::Metric;
use flatout_train::metrics::{ClassMetrics, Metrics};
use flatout_train::refuse;
use flatout_train::run::{asked_and_resolved, is_run};

/// The folder of a fold, counted from 1.
pub fn folder(dir: &Path, fold: usize) -> PathBuf {
    dir.join(format!("fold-{fold}"))
}

/// The config of every fold.
pub fn configs(config: &Config) -> Result<Vec<Config>, UserError> {
    let folds = config.train.folds.expect("called only where there are folds");
    (1..=folds).map(|fold| config.with(&[format!("train.fold={fold}")])).collect()
}

/// The config that a directory of folds was begun with, read from its first fold; `None` where there is none.
pub fn begun(dir: &Path) -> Result<Option<Config>, UserError> {
    let first = folder(dir, 1);
    if is_run(dir) || !is_run(&first) {
        return Ok(None);
    }
    let (requested, resolved) = asked_and_resolved(&first)?;
    resolved.placed(&requested).with(&["train.fold=none".into()]).map(Some)
}

/// The result of a fold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fold {
    pub fold: usize,
    /// The step of the best evaluation, whose loss and metrics follow.
    pub step: u64,
    pub loss: f32,
    pub metrics: ClassMetrics,
    /// Updates the run made.
    pub steps: u64,
}

/// A metric over the folds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub metric: Metric,
    pub mean: f64,
    /// The sample standard deviation, with n - 1 in the denominator.
    pub deviation: f64,
    pub least: f64,
    pub most: f64,
}

/// The results of all folds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The metric by which the best evaluations were chosen.
    pub metric: Metric,
    pub folds: Vec<Fold>,
    pub spread: Vec<Spread>,
}

/// Whether a fold has been trained to its end.
pub fn is_done(dir: &Path) -> bool {
    History::read(dir).is_ok_and(|history| history.state == State::Done)
}

/// Reads the results of the folds in a directory.
pub fn summary(dir: &Path, config: &Config) -> Result<Summary, UserError> {
    let (metric, count) =
        (config.eval.metric, config.train.folds.expect("called only where there are folds"));
    let mut folds = vec![];
    for fold in 1..=count {
        let history = History::read(&folder(dir, fold))?;
        let Some(best) = best(&history, metric) else {
            refuse!("{} has no evaluation", folder(dir, fold).display());
        };
        let steps = history.last().map_or(0, |made| made.step.step);
        folds.push(Fold { fold, step: best.0, loss: best.1, metrics: best.2, steps });
    }
    Ok(Summary { metric, spread: spread(&folds), folds })
}

/// The best evaluation, the first of equals.
fn best(history: &History, metric: Metric) -> Option<(u64, f32, ClassMetrics)> {
    let (step, _) = history.best(metric)?;
    let loss = history.evals.iter().find(|(at, _)| *at == step)?.1;
    let metrics = &history.metrics.iter().find(|(at, _)| *at == step)?.1;
    Some((step, loss, metrics.classes()?.clone()))
}

fn spread(folds: &[Fold]) -> Vec<Spread> {
    let of = |metric: &Metric| {
        let values: Option<Vec<f64>> = folds
            .iter()
            .map(|fold| metric.of(fold.loss, Some(&Metrics::Classes(fold.metrics.clone()))))
            .collect();
        let values = values.filter(|values| !values.is_empty())?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
        let deviation = (squares / (values.len() - 1).max(1) as f64).sqrt();
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Some(Spread { metric: *metric, mean, deviation, least, most })
    };
    Metric::ALL.iter().filter_map(of).collect()
}

impl Summary {
    /// The chosen metric over the folds, in words.
    pub fn words(&self) -> String {
        let followed = self.spread.iter().find(|spread| spread.metric == self.metric);
        let words = followed.map_or("no number".into(), |s| {
            format!("{} {:.4} ± {:.4} ({:.4} to {:.4})", s.metric, s.mean, s.deviation, s.least, s.most)
        });
        format!("{words} over {} folds", self.folds.len())
    }

    /// Writes `folds.json` and `folds.md` into the directory of the folds.
    pub fn write(&self, dir: &Path) -> Result<(), Failure> {
        let json = serde_json::to_vec_pretty(self).expect("a summary has a JSON form");
        for (name, bytes) in [("folds.json", json), ("folds.md", self.page().into_bytes())] {
            let path = dir.join(name);
            durable::replace(&path, &bytes).map_err(Failure::io(path.display()))?;
        }
        Ok(())
    }

    fn page(&self) -> String {
        let mut out = format!(
            "# {}\n\n| metric | mean | deviation | least | most |\n|---|---|---|---|---|\n",
            self.words()
        );
        for Spread { metric, mean, deviation, least, most } in &self.spread {
            let _ = writeln!(out, "| {metric} | {mean:.4} | {deviation:.4} | {least:.4} | {most:.4} |");
        }
        out += "\n| fold | best after step | of | loss | |\n|---|---|---|---|---|\n";
        for Fold { fold, step, loss, metrics, steps } in &self.folds {
            let _ = writeln!(
                out,
                "| [{fold}](fold-{fold}/report.md) | {step} | {steps} | {loss:.4} | {} |",
                metrics.words()
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::metrics::Confusion;

    fn fold(fold: usize, right: u64) -> Fold {
        let metrics = Confusion(vec![vec![10, 0], vec![10 - right, right]]).metrics();
        Fold { fold, step: 7, loss: fold as f32, metrics, steps: 9 }
    }

    /// Recall 0.6, 0.8 and 1.0: mean 0.8, deviation 0.2.
    #[test]
    fn a_summary_has_mean_and_spread() {
        let folds = vec![fold(1, 6), fold(2, 8), fold(3, 10)];
        let summary = Summary { metric: Metric::Recall, spread: spread(&folds), folds };
        let recall = summary.spread.iter().find(|spread| spread.metric == Metric::Recall).unwrap();
        assert!((recall.mean - 0.8).abs() < 1e-12 && (recall.deviation - 0.2).abs() < 1e-12, "{recall:?}");
        assert_eq!((recall.least, recall.most), (0.6, 1.0));
        assert_eq!(summary.words(), "recall 0.8000 ± 0.2000 (0.6000 to 1.0000) over 3 folds");
        let page = summary.page();
        assert!(page.contains("| [2](fold-2/report.md) | 7 | 9 | 2.0000 |"), "{page}");
        // All metrics but the two of answers and the two of preferences.
        assert_eq!(summary.spread.len(), Metric::ALL.len() - 4);
        let folder = tempfile::tempdir().unwrap();
        summary.write(folder.path()).unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.path().join("folds.json")).unwrap()).unwrap();
        assert_eq!(json["folds"][2]["metrics"]["confusion"][1][1], 10);
    }

    #[test]
    fn every_fold_has_its_config() {
        let words = ["head=classes", "model.classes=2", "folds=3"].map(String::from);
        let all = configs(&flatout_train::recipes::resolve("tiny", &[], &words).unwrap()).unwrap();
        assert_eq!(
            all.iter().map(|config| config.train.fold).collect::<Vec<_>>(),
            [Some(1), Some(2), Some(3)]
        );
        assert_eq!(folder(Path::new("runs/x"), 2), Path::new("runs/x/fold-2"));
    }
}
