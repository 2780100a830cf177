//! Means of a sweep's settings over seeds, because the result of a single run may be luck.

use std::collections::BTreeMap;

use flatout_train::metrics::goal::Metric;
use serde::Serialize;

use super::{Trial, better_first};

/// The key that settings are averaged over.
const SEED: &str = "train.seed";

/// Runs that differ only in their seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mean {
    /// Their common values of the keys that differ in the sweep.
    pub values: BTreeMap<String, String>,
    pub runs: usize,
    /// The runs among these that have a result, which the following fields are computed from.
    pub judged: usize,
    pub mean: f64,
    /// The standard error of the mean, where there are two or more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standard_error: Option<f64>,
    pub least: f64,
    pub most: f64,
}

/// The means over seeds, the best first; none where all runs have the same seed. Settings without a result are left out.
pub fn means(runs: &[Trial], goal: Metric) -> Vec<Mean> {
    let seeds = |run: &Trial| run.values.get(SEED).cloned();
    if runs.windows(2).all(|pair| seeds(&pair[0]) == seeds(&pair[1])) {
        return vec![];
    }
    let mut settings: BTreeMap<BTreeMap<String, String>, Vec<Option<f64>>> = BTreeMap::new();
    for run in runs {
        let mut values = run.values.clone();
        values.remove(SEED);
        settings.entry(values).or_default().push(run.best);
    }
    let mean = |(values, bests): (BTreeMap<String, String>, Vec<Option<f64>>)| {
        let known: Vec<f64> = bests.iter().copied().flatten().collect();
        let count = known.len() as f64;
        let mean = known.iter().sum::<f64>() / count;
        let squares: f64 = known.iter().map(|best| (best - mean).powi(2)).sum();
        (!known.is_empty()).then(|| Mean {
            values,
            runs: bests.len(),
            judged: known.len(),
            mean,
            standard_error: (known.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt()),
            least: known.iter().copied().fold(f64::INFINITY, f64::min),
            most: known.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        })
    };
    let mut means: Vec<Mean> = settings.into_iter().filter_map(mean).collect();
    means.sort_by(|a, b| better_first(goal, Some(a.mean), Some(b.mean)));
    means
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(lr: &str, seed: &str, best: Option<f64>) -> Trial {
        let values = [("optimizer.lr", lr), (SEED, seed)].map(|(key, value)| (key.into(), value.into()));
        Trial {
            best,
            ..Trial::of(&super::super::Combination { name: String::new(), values: values.to_vec() })
        }
    }

    #[test]
    fn settings_are_ordered_by_their_means_over_seeds() {
        // The best single run has the setting with the worse mean.
        let runs = [
            trial("1", "1", Some(1.0)),
            trial("1", "2", Some(5.0)),
            trial("2", "1", Some(2.0)),
            trial("2", "2", Some(2.5)),
            trial("2", "3", None),
            trial("3", "1", None),
        ];
        let of_loss = means(&runs, Metric::Loss);
        let lrs: Vec<&str> = of_loss.iter().map(|mean| mean.values["optimizer.lr"].as_str()).collect();
        assert_eq!(lrs, ["2", "1"]);
        let first = &of_loss[0];
        assert_eq!((first.runs, first.judged, first.mean), (3, 2, 2.25));
        assert_eq!((first.least, first.most, first.standard_error), (2.0, 2.5, Some(0.25)));
        assert_eq!(means(&runs, Metric::Accuracy)[0].values["optimizer.lr"], "1", "higher is better there");
    }

    #[test]
    fn one_seed_has_no_means() {
        assert!(means(&[trial("1", "7", Some(1.0)), trial("2", "7", Some(2.0))], Metric::Loss).is_empty());
        let alone = means(&[trial("1", "1", Some(1.0)), trial("1", "2", None)], Metric::Loss);
        assert_eq!((alone.len(), alone[0].standard_error), (1, None));
    }
}
