//! Time and tokens to a held-out loss, for the base and variants of it.
//!
//! The base and every variant are trained with the same seeds, each until an evaluation is as good as the goal. Time counts
//! updates only, without evaluations, saves and the start. The point between two evaluations at which the goal was reached is
//! interpolated linearly.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

use flatout_report::history::{History, State};
use flatout_train::UserError;
use flatout_train::config::{Config, keys_of};
use flatout_train::metrics::goal::Metric;
use flatout_train::refuse;

/// The base, or a variant of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// The overrides as they were given.
    pub name: String,
    pub overrides: Vec<String>,
}

/// The most characters of a variant's name in the name of its folder.
const LONGEST_NAME: usize = 120;

/// The name of the base.
pub const BASE: &str = "as it is";

/// Keys that the command sets for every run, and how.
const GIVEN: [(&str, &str); 3] = [
    ("train.seed", "all are trained with the seeds that --seeds counts from that of the recipe"),
    ("eval.goal", "all are trained to the loss that --to-loss says"),
    ("log.every", "every update of all runs is logged, so that it is timed"),
];

/// The base, and a variant for each of `tries`, which are overrides separated by spaces.
pub fn variants(tries: &[String]) -> Result<Vec<Variant>, UserError> {
    let mut all = vec![Variant { name: BASE.into(), overrides: vec![] }];
    for words in tries {
        let overrides: Vec<String> = words.split_whitespace().map(String::from).collect();
        let name = overrides.join(" ");
        if overrides.is_empty() {
            refuse!("--try is empty: give it overrides, as in --try optimizer.name=adamw");
        }
        if all.iter().any(|variant| variant.name == name) {
            refuse!("--try `{name}` is given twice: leave one out");
        }
        all.push(Variant { name, overrides });
    }
    Ok(all)
}

impl Variant {
    /// The folder of its run with a seed, inside the folder of all runs.
    pub fn folder(&self, dir: &Path, seed: u64) -> PathBuf {
        let is_kept = |c: char| c.is_ascii_alphanumeric() || "._+=-".contains(c);
        let mut name: String =
            self.name.chars().map(|c| if is_kept(c) { c } else { '-' }).take(LONGEST_NAME).collect();
        // Variants that differ only in replaced characters, or beyond the longest name, must not share a folder.
        if !self.name.chars().all(|c| is_kept(c) || c == ' ') || self.name.chars().count() > LONGEST_NAME {
            let _ = write!(name, "-{:08x}", xxh3_64(self.name.as_bytes()) as u32);
        }
        dir.join(format!("{name}_seed={seed}"))
    }

    /// The config of its run with a seed: that of the base with its overrides.
    pub fn config(&self, base: &Config, seed: u64, goal: f64) -> Result<Config, UserError> {
        self.check_keys()?;
        let own = [format!("train.seed={seed}"), format!("eval.goal={goal}"), "log.every=1".into()];
        let config = base.with(&self.overrides.iter().cloned().chain(own).collect::<Vec<_>>())?;
        if config.train.folds.is_some() && config.train.fold.is_none() {
            refuse!(
                "--to-loss trains one run for each seed, and `train.folds` makes several of it: give train.fold=N, or train.folds=none"
            );
        }
        Ok(config)
    }

    /// Refuses overrides of keys that the command sets for every run.
    fn check_keys(&self) -> Result<(), UserError> {
        // An unknown key is refused later, as in any override.
        let keys = self.overrides.iter().filter_map(|word| keys_of(std::slice::from_ref(word)).ok());
        for key in keys.flatten() {
            if let Some((_, why)) = GIVEN.iter().find(|(given, _)| *given == key) {
                refuse!("`{key}` cannot be tried, as {why}: leave it out");
            }
        }
        Ok(())
    }
}

/// Whether a run needs no further training for a goal: it is done and, where it ended early, had reached the goal. One that ended
/// at an easier goal continues, and so does one whose patience ran out, which then ends again at once.
pub fn is_done(history: &History, metric: Metric, goal: f64) -> bool {
    let is_early = history.end.as_ref().is_some_and(|end| end.early.is_some());
    history.state == State::Done && (!is_early || reached(history, metric, goal).is_some())
}

/// When a run reached the goal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reached {
    /// Updates, with a fraction between two evaluations.
    pub step: f64,
    /// Seconds of updates alone.
    pub seconds: f64,
    pub tokens: f64,
    /// Whether its first evaluation reached it, so that the others are upper bounds.
    pub at_first: bool,
}

/// When the run of a history reached the goal; `None` where it did not.
pub fn reached(history: &History, metric: Metric, goal: f64) -> Option<Reached> {
    let evals = history.judged(metric);
    let is_there = |value: f64| value == goal || metric.is_better(value, goal);
    let at = evals.iter().position(|(_, value)| is_there(*value))?;
    let (last, value) = evals[at];
    let step = match at.checked_sub(1).map(|before| evals[before]) {
        Some((first, before)) => first as f64 + (before - goal) / (before - value) * (last - first) as f64,
        None => last as f64,
    };
    let (mut seconds, mut tokens, mut until) = (0.0, 0.0, 0.0);
    for made in &history.steps {
        let this = made.step.step as f64;
        // A logged step stands for the updates since the one before it; of the last one a part counts.
        let share = ((step - until) / (this - until)).clamp(0.0, 1.0);
        seconds += share * (this - until) * made.step.step_ms / 1e3;
        tokens += share * (made.step.tokens as f64 - tokens);
        until = this;
        if this >= step {
            break;
        }
    }
    Some(Reached { step, seconds, tokens, at_first: at == 0 })
}

/// A run of a variant.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    pub seed: u64,
    pub path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reached: Option<Reached>,
    /// The best of its evaluations, whether or not it reached the goal.
    pub best: Option<f64>,
    /// The reason why it could not continue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Trial {
    /// Reads the run in a folder; one that failed, with the reason in `why`, may not have begun.
    pub fn read(
        folder: &Path,
        seed: u64,
        metric: Metric,
        goal: f64,
        why: Option<String>,
    ) -> Result<Trial, UserError> {
        let path = folder.display().to_string();
        let history = match History::read(folder) {
            Err(_) if why.is_some() => return Ok(Trial { seed, path, reached: None, best: None, why }),
            history => history?,
        };
        let best = history.best(metric).map(|(_, value)| value);
        Ok(Trial { seed, path, reached: reached(&history, metric, goal), best, why })
    }
}

/// Mean and range of a number over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    pub mean: f64,
    pub least: f64,
    pub most: f64,
}

impl Range {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Option<Range> {
        let count = values.clone().count();
        (count > 0).then(|| Range {
            mean: values.clone().sum::<f64>() / count as f64,
            least: values.clone().fold(f64::INFINITY, f64::min),
            most: values.fold(f64::NEG_INFINITY, f64::max),
        })
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub overrides: Vec<String>,
    pub runs: Vec<Trial>,
    /// Over the seeds; absent where not all reached the goal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<Range>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Range>,
    /// Its time over the base's with the same seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_base: Option<Range>,
}

/// The result of the comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub recipe: String,
    pub version: String,
    pub device: String,
    pub metric: Metric,
    pub goal: f64,
    pub seeds: Vec<u64>,
    pub path: String,
    pub rows: Vec<Row>,
}

/// The rows of the variants, the base first, from the runs of each in the order of seeds.
pub fn rows(variants: &[Variant], runs: &[Vec<Trial>]) -> Vec<Row> {
    let seconds = |runs: &[Trial]| -> Option<Vec<f64>> {
        runs.iter().map(|run| run.reached.map(|reached| reached.seconds)).collect()
    };
    let base = runs.first().and_then(|runs| seconds(runs));
    let row = |(variant, runs): (&Variant, &Vec<Trial>)| {
        let own = seconds(runs);
        let tokens: Option<Vec<f64>> =
            runs.iter().map(|run| run.reached.map(|reached| reached.tokens)).collect();
        let ratios = own.as_ref().zip(base.as_ref()).filter(|_| !variant.overrides.is_empty());
        Row {
            name: variant.name.clone(),
            overrides: variant.overrides.clone(),
            runs: runs.clone(),
            seconds: own.as_ref().and_then(|own| Range::of(own.iter().copied())),
            tokens: tokens.and_then(|tokens| Range::of(tokens.into_iter())),
            of_base: ratios
                .and_then(|(own, base)| Range::of(own.iter().zip(base).map(|(own, base)| own / base))),
        }
    };
    variants.iter().zip(runs).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use flatout_train::recipes::resolve;
    use flatout_train::run::events::{Event, Start, Status};

    /// Ten updates of 100 ms and 50 tokens, evaluated after every second one.
    fn history(losses: [f32; 5]) -> History {
        let mut events = vec![Event::Start(Start::default())];
        for step in 1..=10 {
            let line = serde_json::json!({
                "event": "step", "step": step, "step_ms": 100.0, "tokens": 50 * step, "epoch": 0.0, "loss": 5.0,
                "grad_norm": 1.0, "lr": 0.1, "samples": step, "tokens_per_second": 500.0, "samples_per_second": 10.0,
            });
            events.push(serde_json::from_value(line).expect("an event"));
            if step % 2 == 0 {
                let loss = losses[step as usize / 2 - 1];
                events.push(Event::Eval { step, loss, metrics: None, averaged: false });
            }
        }
        History::of(Path::new("run"), resolve("tiny", &[], &[]).unwrap(), &events)
    }

    #[test]
    fn the_goal_is_reached_between_two_evaluations() {
        let of = |losses, goal| reached(&history(losses), Metric::Loss, goal);
        let falling = [5.0, 4.0, 3.0, 2.0, 1.0];
        let at = of(falling, 2.5).expect("reached");
        assert!((at.step - 7.0).abs() < 1e-9 && (at.seconds - 0.7).abs() < 1e-9, "{at:?}");
        assert!((at.tokens - 350.0).abs() < 1e-9, "{at:?}");
        let between = of(falling, 2.75).expect("reached");
        assert!((between.step - 6.5).abs() < 1e-9 && (between.tokens - 325.0).abs() < 1e-9, "{between:?}");
        // Exactly at an evaluation, and at the first one, before which nothing is known.
        assert_eq!(of(falling, 3.0).expect("reached").step, 6.0);
        let first = of(falling, 6.0).expect("reached");
        assert!(first.step == 2.0 && first.at_first && !between.at_first, "{first:?}");
        assert_eq!(of(falling, 0.5), None);
        // The first time counts, even if the loss rises again.
        assert_eq!(of([5.0, 3.0, 4.0, 3.5, 2.0], 3.0).expect("reached").step, 4.0);
    }

    #[test]
    fn times_are_compared_seed_by_seed_where_all_reached_the_goal() {
        let trial = |seed, seconds: Option<f64>| Trial {
            seed,
            path: "run".into(),
            reached: seconds.map(|seconds| Reached {
                step: 1.0,
                seconds,
                tokens: 10.0 * seconds,
                at_first: false,
            }),
            best: Some(3.0),
            why: None,
        };
        let variants = variants(&["lr=1e-3".into(), "lr=1e-2 train.batch=8".into()]).unwrap();
        assert_eq!(variants[2].overrides, ["lr=1e-2", "train.batch=8"]);
        let runs = [
            vec![trial(0, Some(2.0)), trial(1, Some(4.0))],
            vec![trial(0, Some(1.0)), trial(1, Some(3.0))],
            vec![trial(0, Some(1.0)), trial(1, None)],
        ];
        let rows = rows(&variants, &runs);
        assert_eq!(rows[0].seconds, Some(Range { mean: 3.0, least: 2.0, most: 4.0 }));
        assert_eq!(rows[0].of_base, None);
        assert_eq!(rows[1].of_base, Some(Range { mean: 0.625, least: 0.5, most: 0.75 }));
        assert_eq!(rows[1].tokens.unwrap().mean, 20.0);
        assert_eq!((rows[2].seconds, rows[2].of_base), (None, None));
    }

    #[test]
    fn a_variant_is_its_overrides_in_a_folder_of_their_name() {
        let all = variants(&["optimizer.name=muon lr=2e-3".into()]).unwrap();
        assert_eq!(all[1].folder(Path::new("d"), 3), Path::new("d/optimizer.name=muon-lr=2e-3_seed=3"));
        let long = "a=1,".repeat(50);
        let alike = variants(&["lr=1e-3|2".into(), "lr=1e-3/2".into(), long.clone(), long + "2"]).unwrap();
        let folders: BTreeSet<PathBuf> =
            alike.iter().map(|variant| variant.folder(Path::new("d"), 3)).collect();
        assert_eq!(folders.len(), 5, "{folders:?}");
        let base = resolve("tiny", &[], &[]).unwrap();
        let config = all[1].config(&base, 3, 1.5).unwrap();
        assert_eq!((config.train.seed, config.eval.goal, config.log.every), (3, Some(1.5), 1));
        assert!(variants(&["".into()]).unwrap_err().0.contains("--try is empty"));
        assert!(variants(&["lr=1".into(), " lr=1 ".into()]).unwrap_err().0.contains("given twice"));
    }

    #[test]
    fn keys_of_every_run_cannot_be_tried() {
        let refused = |base: &[&str], tried: &str| {
            let base = resolve("tiny", &[], &base.iter().map(|word| word.to_string()).collect::<Vec<_>>());
            let variant = variants(&[tried.into()]).unwrap().remove(1);
            variant.config(&base.unwrap(), 3, 1.5).expect_err(tried).0
        };
        for (tried, part) in [
            ("seed=7", "`train.seed` cannot be tried, as all are trained with the seeds"),
            ("train.seed=7", "`train.seed` cannot be tried"),
            ("lr=1e-3 goal=2", "`eval.goal` cannot be tried"),
            ("eval.goal=none", "`eval.goal` cannot be tried"),
            ("log.every=5", "`log.every` cannot be tried"),
            ("learning=1", "there is no key `learning`"),
        ] {
            let sentence = refused(&[], tried);
            assert!(sentence.contains(part), "{tried}: {sentence}");
        }
        // Folds are several runs, whether the base or the variant sets them.
        let classes = ["head=classes", "model.classes=2", "folds=3"];
        assert!(refused(&classes, "lr=1e-3").contains("give train.fold=N"));
        assert!(refused(&classes[..2], "folds=3").contains("`train.folds` makes several"));
        let base = resolve("tiny", &[], &classes.map(String::from)).unwrap();
        let one = variants(&["train.fold=2".into()]).unwrap().remove(1).config(&base, 3, 1.5).unwrap();
        assert_eq!(one.train.fold, Some(2));
    }

    #[test]
    fn a_run_that_ended_at_an_easier_goal_is_not_done() {
        let ended = |early: Option<&str>, status: Status| {
            let mut history = history([5.0, 4.0, 3.0, 2.0, 1.9]);
            let end = serde_json::json!({
                "event": "end", "status": status, "steps": 10, "loss": 1.9, "loss_floor": null, "tokens_per_second": 1.0,
                "skipped": 0, "early": early,
            });
            let Event::End(end) = serde_json::from_value(end).expect("an event") else { panic!("an end") };
            history.state = if status == Status::Done { State::Done } else { State::Stopped };
            history.end = Some(end);
            history
        };
        let early = ended(Some("loss reached 1.9000"), Status::Done);
        assert!(is_done(&early, Metric::Loss, 2.0) && is_done(&early, Metric::Loss, 3.0));
        assert!(!is_done(&early, Metric::Loss, 1.5));
        // All its updates are made, whatever the result.
        assert!(is_done(&ended(None, Status::Done), Metric::Loss, 1.5));
        assert!(!is_done(&ended(None, Status::Stopped), Metric::Loss, 3.0));
    }
}
