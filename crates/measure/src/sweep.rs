//! Hyperparameter sweeps: a recipe is trained once per combination of values of a few keys, and the runs are compared.
//!
//! A key with several values is an axis: `lr=1e-5,3e-5`, `train.seed=1..3`, and for keys that take lists themselves
//! `betas=0.9,0.95|0.9,0.999`. A grid has a run for every combination; a random sweep draws them, and its ranges may be
//! continuous. A run's folder is named after its values, so a sweep with more values keeps the runs that are done.

mod means;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::Path;

use flatout_ir::random;
use flatout_settings::ValueKind;
use flatout_settings::choice;
use serde::{Deserialize, Serialize};

use flatout_data::durable;
use flatout_report::history::{History, State};
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::parse_override;
use flatout_train::metrics::goal::Metric;
use flatout_train::refuse;
use flatout_train::run::quoted;

pub use self::means::Mean;

/// The most runs in one sweep.
const MOST: usize = 1000;

choice! {
    /// Which combinations are trained.
    pub enum By {
        /// All of them; the last axis varies fastest.
        Grid = "grid",
        /// A given number, drawn from a seed.
        Random = "random",
    }
}

/// A key and its values.
#[derive(Clone, Debug, PartialEq)]
struct Axis {
    /// The full path.
    key: String,
    values: Values,
}

#[derive(Clone, Debug, PartialEq)]
enum Values {
    /// Values as they were written.
    List(Vec<String>),
    /// A continuous range, ends included.
    Between { least: f64, most: f64 },
}

/// The axes of a sweep, and what its runs share.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    axes: Vec<Axis>,
    /// Overrides of every run.
    pub shared: Vec<String>,
}

/// One run of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct Combination {
    /// The name of its folder.
    pub name: String,
    /// Full paths of keys, and values as they were written.
    pub values: Vec<(String, String)>,
}

impl Combination {
    /// The values as overrides.
    pub fn words(&self) -> Vec<String> {
        self.values.iter().map(|(key, value)| format!("{key}={value}")).collect()
    }
}

impl Sweep {
    /// Splits overrides into axes and those of every run.
    pub fn parse(overrides: &[String]) -> Result<Sweep, UserError> {
        let mut sweep = Sweep { axes: vec![], shared: vec![] };
        for word in overrides {
            let (found, text) = parse_override(word)?;
            match several(&found.path, &found.key.kind, text)? {
                None => sweep.shared.push(word.clone()),
                Some(_) if sweep.axes.iter().any(|axis| axis.key == found.path) => {
                    refuse!("`{}` is given several values twice: put them in one list", found.path)
                }
                Some(values) => sweep.axes.push(Axis { key: found.path, values }),
            }
        }
        if sweep.axes.is_empty() {
            refuse!(
                "no key has several values, so there is nothing to sweep over: give some, as in lr=1e-4,3e-4"
            );
        }
        Ok(sweep)
    }

    /// The keys of the axes.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.axes.iter().map(|axis| axis.key.as_str())
    }

    /// Every combination; the first axis varies slowest.
    pub fn grid(&self) -> Result<Vec<Combination>, UserError> {
        let mut all: Vec<Vec<String>> = vec![vec![]];
        for Axis { key, values } in &self.axes {
            let Values::List(list) = values else {
                refuse!(
                    "`{key}` is given a continuous range, which a grid cannot enumerate: list values, or give --by random"
                );
            };
            if all.len() * list.len() > MOST {
                refuse!(
                    "these are more than {MOST} combinations: give fewer values, or --by random --runs N"
                );
            }
            all = all
                .iter()
                .flat_map(|values| list.iter().map(|one| [&values[..], std::slice::from_ref(one)].concat()))
                .collect();
        }
        let mut grid: Vec<Combination> = all.into_iter().map(|values| self.combination(values)).collect();
        // Values may differ only in characters that folder names leave out.
        for at in 1..grid.len() {
            if grid[..at].iter().any(|before| before.name == grid[at].name) {
                grid[at].name += &format!("-{}", at + 1);
            }
        }
        Ok(grid)
    }

    /// Draws `runs` different combinations from a seed. A larger number with the same seed begins with the same combinations.
    pub fn drawn(&self, runs: usize, seed: u64) -> Result<Vec<Combination>, UserError> {
        if !(1..=MOST).contains(&runs) {
            refuse!("--runs is {runs} and must be from 1 to {MOST}");
        }
        let mut drawn: Vec<Combination> = vec![];
        // So many draws miss a combination of a small set with negligible probability only.
        for draw in 0..(100 * runs as u64).max(10_000) {
            if drawn.len() == runs {
                return Ok(drawn);
            }
            let value = |(axis, Axis { values, .. }): (usize, &Axis)| {
                let [unit, _] = random::unit_pair(seed, axis as u64, draw);
                match values {
                    Values::List(list) => list[(unit * list.len() as f64) as usize].clone(),
                    Values::Between { least, most } => between(*least, *most, unit),
                }
            };
            let combination = self.combination(self.axes.iter().enumerate().map(value).collect());
            if !drawn.iter().any(|before| before.name == combination.name) {
                drawn.push(combination);
            }
        }
        match drawn.len() == runs {
            true => Ok(drawn),
            false => refuse!(
                "there are {} combinations and --runs asks for {runs}: give more values, or leave --by random out",
                drawn.len()
            ),
        }
    }

    fn combination(&self, values: Vec<String>) -> Combination {
        let short = |key: &str| {
            let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_string();
            let is_alone = self.keys().filter(|other| last(other) == last(key)).count() == 1;
            if is_alone { last(key) } else { key.to_string() }
        };
        let part = |(axis, value): (&Axis, &String)| format!("{}={}", short(&axis.key), file_name(value));
        let name = self.axes.iter().zip(&values).map(part).collect::<Vec<_>>().join("_");
        Combination { name, values: self.keys().map(String::from).zip(values).collect() }
    }
}

/// The values written for a key, where there are several.
fn several(path: &str, kind: &ValueKind, text: &str) -> Result<Option<Values>, UserError> {
    let takes_lists =
        matches!(kind, ValueKind::List(..) | ValueKind::Tables(_) | ValueKind::WordOrNumbers(_));
    // A text with braces is a template, which has commas of its own.
    if matches!(kind, ValueKind::Text) && text.contains('{') {
        return Ok(None);
    }
    let is_whole = matches!(kind, ValueKind::Whole | ValueKind::WholeOrAuto);
    let mut list = vec![];
    for part in text.split(if takes_lists { '|' } else { ',' }).map(str::trim) {
        let Some((least, most)) =
            part.split_once("..").filter(|_| is_whole || matches!(kind, ValueKind::Number))
        else {
            list.push(part.to_string());
            continue;
        };
        let end = |end: &str| match end.parse::<f64>() {
            Ok(number) if number.is_finite() && (!is_whole || (number >= 0.0 && number.fract() == 0.0)) => {
                Ok(number)
            }
            _ => Err(UserError(format!(
                "`{path}` has the range {part}, and {end} is not a number that it takes"
            ))),
        };
        let (least, most) = (end(least)?, end(most)?);
        if least >= most {
            refuse!("`{path}` has the range {part}, which is empty: write the smaller number first");
        }
        if is_whole {
            if most - least >= MOST as f64 {
                refuse!("`{path}` has the range {part}, which is more than {MOST} values: list some");
            }
            list.extend((least as u64..=most as u64).map(|number| number.to_string()));
        } else if text == part {
            return Ok(Some(Values::Between { least, most }));
        } else {
            refuse!("`{path}` has the range {part} among other values: give one range, or a list");
        }
    }
    if list.len() < 2 {
        return Ok(None);
    }
    if let Some(twice) = list.iter().enumerate().find(|(at, value)| list[..*at].contains(value)) {
        refuse!("`{path}` has the value {} twice: leave one out", twice.1);
    }
    Ok(Some(Values::List(list)))
}

/// A number in a range, with three digits: log-uniform where the ends differ by a factor of ten or more, else uniform.
fn between(least: f64, most: f64, unit: f64) -> String {
    let number = match least > 0.0 && most / least >= 10.0 {
        true => least * (most / least).powf(unit),
        false => least + (most - least) * unit,
    };
    let rounded = format!("{number:.2e}");
    let number: f64 = rounded.parse().expect("a number");
    if number == 0.0 || (1e-3..1e4).contains(&number.abs()) { number.to_string() } else { rounded }
}

/// A value as part of a folder's name.
fn file_name(value: &str) -> String {
    let kept = |c: char| if c.is_ascii_alphanumeric() || "._+-".contains(c) { c } else { '-' };
    value.chars().map(kept).take(60).collect()
}

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    pub name: String,
    pub values: BTreeMap<String, String>,
    /// The state of the run; absent where it has not begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    pub step: u64,
    /// The metric of the best evaluation; without evaluations, the median of the last hundred losses.
    pub best: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_step: Option<u64>,
    /// The metric of the last evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<f64>,
    /// The loss of the last update.
    pub loss: Option<f32>,
    pub seconds: f64,
    /// The reason of a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The command of a sweep, with which it is resumed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SweepCommand {
    /// The working directory of the command.
    pub folder: String,
    /// The recipe and the overrides.
    pub words: Vec<String>,
    pub with: Vec<String>,
    /// The number of runs of a random sweep, and its seed.
    pub runs: usize,
    pub seed: u64,
    pub goal: Option<Metric>,
}

impl SweepCommand {
    /// Reads the command of the sweep in a folder; `None` where there is none.
    pub fn read(dir: &Path) -> Result<Option<(By, SweepCommand)>, UserError> {
        #[derive(Deserialize)]
        struct Kept {
            by: By,
            command: Option<SweepCommand>,
        }
        let path = dir.join(SUMMARY);
        let Ok(text) = std::fs::read(&path) else { return Ok(None) };
        let kept: Kept = serde_json::from_slice(&text)
            .map_err(|error| UserError(format!("{} cannot be read: {error}", path.display())))?;
        match kept.command {
            Some(command) => Ok(Some((kept.by, command))),
            None => refuse!(
                "{} was written by an earlier version and does not have the sweep's command: give that command again, \
                with --run {} --resume auto",
                path.display(),
                quoted(dir)
            ),
        }
    }
}

/// All runs of a sweep, the best first, those without a result last.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub recipe: String,
    /// The metric that runs are compared by.
    pub goal: Metric,
    pub by: By,
    pub command: SweepCommand,
    pub runs: Vec<Trial>,
    /// Means of settings over their seeds, where runs differ in these; the best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub means: Vec<Mean>,
}

/// File name of a sweep's summary.
pub const SUMMARY: &str = "sweep.json";

impl Trial {
    /// A trial that has not begun.
    fn of(combination: &Combination) -> Trial {
        Trial {
            name: combination.name.clone(),
            values: combination.values.iter().cloned().collect(),
            state: None,
            step: 0,
            best: None,
            best_step: None,
            last: None,
            loss: None,
            seconds: 0.0,
            why: None,
        }
    }

    /// Reads a run's folder.
    pub fn read(dir: &Path, combination: &Combination, goal: Metric) -> Trial {
        let folder = dir.join(&combination.name);
        let history = History::read(&folder).ok();
        let mut trial = Trial::of(combination);
        let Some(history) = history else { return trial };
        let (summary, best) = (history.summary(), history.best(goal));
        trial.state = Some(history.state);
        (trial.step, trial.loss, trial.seconds) = (summary.step, summary.loss, summary.seconds);
        trial.best_step = best.map(|(step, _)| step);
        trial.last = history.judged(goal).last().map(|(_, value)| *value);
        let unjudged = || history.recent(|step| step.loss as f64).filter(|_| goal == Metric::Loss);
        trial.best = best.map(|(_, value)| value).or_else(unjudged);
        trial
    }
}

/// The order of two results by a metric; `None` comes last.
fn better_first(goal: Metric, a: Option<f64>, b: Option<f64>) -> Ordering {
    match (a, b) {
        (Some(a), Some(b)) if goal.is_better(a, b) => Ordering::Less,
        (Some(a), Some(b)) if goal.is_better(b, a) => Ordering::Greater,
        (a, b) => b.is_some().cmp(&a.is_some()),
    }
}

impl Summary {
    pub fn new(recipe: &str, goal: Metric, by: By, command: SweepCommand, mut runs: Vec<Trial>) -> Summary {
        runs.sort_by(|a, b| better_first(goal, a.best, b.best));
        let means = means::means(&runs, goal);
        Summary { recipe: recipe.into(), goal, by, command, runs, means }
    }

    pub fn write(&self, dir: &Path) -> Result<(), Failure> {
        let path = dir.join(SUMMARY);
        let json = serde_json::to_vec_pretty(self).expect("a summary has a JSON form");
        let written = std::fs::create_dir_all(dir).and_then(|()| durable::replace(&path, &json));
        written.map_err(Failure::io(path.display()))
    }

    /// Removes the summary of a sweep that never began, and its folder where it is empty then.
    pub fn remove(dir: &Path) {
        let _ = std::fs::remove_file(dir.join(SUMMARY)).and_then(|()| std::fs::remove_dir(dir));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(words: &[&str]) -> Result<Sweep, UserError> {
        Sweep::parse(&words.iter().map(|word| word.to_string()).collect::<Vec<_>>())
    }

    fn refused(words: &[&str]) -> String {
        let sweep = sweep(words).and_then(|sweep| sweep.grid());
        sweep.expect_err("refused").0
    }

    #[test]
    fn a_grid_is_every_combination_in_the_order_given() {
        let sweep = sweep(&["lr=1e-5,3e-5", "batch=8", "train.seed=1..3"]).unwrap();
        assert_eq!(sweep.shared, ["batch=8"]);
        assert_eq!(sweep.keys().collect::<Vec<_>>(), ["optimizer.lr", "train.seed"]);
        let grid = sweep.grid().unwrap();
        let names: Vec<&str> = grid.iter().map(|run| run.name.as_str()).collect();
        let wanted = ["1e-5", "3e-5"].map(|lr| [1, 2, 3].map(|seed| format!("lr={lr}_seed={seed}"))).concat();
        assert_eq!(names, wanted);
        assert_eq!(grid[4].words(), ["optimizer.lr=3e-5", "train.seed=2"]);
    }

    #[test]
    fn lists_paths_and_templates_keep_their_commas() {
        let betas = sweep(&["betas=0.9,0.95|0.9,0.999", "data.path=a.txt,b.txt"]).unwrap();
        assert_eq!(betas.shared, ["data.path=a.txt,b.txt"]);
        assert_eq!(betas.grid().unwrap()[1].words(), ["optimizer.betas=0.9,0.999"]);
        assert_eq!(betas.grid().unwrap()[1].name, "betas=0.9-0.999");
        let template = sweep(&["data.template={{ a, b }}", "seed=1,2"]).unwrap();
        assert_eq!(template.shared, ["data.template={{ a, b }}"]);
        let alike = sweep(&["train.micro_batch=2,4", "eval.micro_batch=2,4"]).unwrap();
        let paths = sweep(&["data.tokenizer=a/b.json,a-b.json"]).unwrap().grid().unwrap();
        assert_eq!([&paths[0].name, &paths[1].name], ["tokenizer=a-b.json", "tokenizer=a-b.json-2"]);
        assert_eq!(alike.grid().unwrap()[0].name, "train.micro_batch=2_eval.micro_batch=2");
    }

    #[test]
    fn drawn_runs_lie_within_their_ranges_and_differ() {
        let sweep = sweep(&["lr=1e-5..1e-2", "clip=0.5..1.5", "layers=2,4"]).unwrap();
        let drawn = sweep.drawn(200, 1).unwrap();
        let values = |axis: usize| drawn.iter().map(move |run| run.values[axis].1.parse::<f64>().unwrap());
        assert!(values(0).all(|lr| (1e-5..=1e-2).contains(&lr)));
        let below = values(0).filter(|lr| *lr < 3.16e-4).count();
        assert!((70..130).contains(&below), "{below} of 200 below the logarithmic centre");
        let below = values(1).filter(|clip| *clip < 1.0).count();
        assert!((70..130).contains(&below), "{below} of 200 below the centre");
        assert_eq!(sweep.drawn(20, 1).unwrap(), drawn[..20], "more begin with the same");
        assert_ne!(sweep.drawn(20, 2).unwrap(), drawn[..20]);
    }

    #[test]
    fn invalid_axes_are_refused() {
        assert!(refused(&["lr=1e-3"]).contains("nothing to sweep over"));
        assert!(refused(&["lr=1e-5..1e-3"]).contains("--by random"));
        assert!(refused(&["seed=3..1"]).contains("is empty"));
        assert!(refused(&["seed=1..1e9"]).contains("more than 1000"));
        assert!(refused(&["seed=1..x"]).contains("x is not a number"));
        assert!(refused(&["lr=1e-3,1e-3"]).contains("twice"));
        assert!(refused(&["lr=1,2", "optimizer.lr=3,4"]).contains("in one list"));
        assert!(refused(&["seed=1..100", "batch=1..100"]).contains("more than 1000 combinations"));
        assert!(refused(&["learning=1,2"]).contains("there is no key"));
        let few = sweep(&["seed=1,2"]).unwrap().drawn(3, 1).expect_err("refused").0;
        assert!(few.contains("there are 2 combinations and --runs asks for 3"), "{few}");
    }

    #[test]
    fn the_best_comes_first_and_failures_last() {
        let trial = |name: &str, best: Option<f64>| Trial {
            best,
            ..Trial::of(&Combination { name: name.into(), values: vec![] })
        };
        let runs = [("none", None), ("low", Some(1.0)), ("high", Some(2.0))];
        let order = |goal| {
            let runs = runs.iter().map(|(name, best)| trial(name, *best)).collect();
            Summary::new("tiny", goal, By::Grid, SweepCommand::default(), runs)
                .runs
                .into_iter()
                .map(|run| run.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(order(Metric::Loss), ["low", "high", "none"]);
        assert_eq!(order(Metric::F1), ["high", "low", "none"]);
    }
}
