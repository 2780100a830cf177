//! `sweep`: trains one run per combination of values, and prints which was best.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use flatout_measure::folds;
use flatout_measure::sweep::{By, Combination, SUMMARY, Summary, Sweep, SweepCommand, Trial};
use flatout_report::history::State;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::device::Device;
use flatout_train::metrics::goal::Metric;
use flatout_train::recipes;
use flatout_train::refuse;
use flatout_train::resolve::compile;
use flatout_train::run::events::Status;
use flatout_train::run::{Resume, Run, is_run, quoted};
use flatout_train::switches::compute::BACKEND;
use flatout_train::training::resume::requeued;
use flatout_train::weights::pretrained;
use serde_json::json;

use crate::args::{self, recipe_and_overrides};
use crate::launch;
use crate::runs::print_table;
use crate::screen::{Screen, bytes, duration};
use crate::start;
use crate::train::{OneOf, train_one_of};

/// A run whose config was checked and compiled.
struct Planned {
    combination: Combination,
    config: Config,
    arena_bytes: u64,
}

pub fn sweep(args: &args::Sweep, screen: &Screen) -> Result<ExitCode, Failure> {
    launch::check_alone("sweep")?;
    let (stop, starting) = start::watch(args.max_time, screen)?;
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let sweep = Sweep::parse(overrides)?;
    let combinations = match args.by {
        By::Grid => sweep.grid()?,
        By::Random => sweep.drawn(args.runs, args.seed)?,
    };
    // Every config is checked before anything is written.
    let mut configs = vec![];
    for combination in &combinations {
        configs.push(config(args, recipe, &sweep, combination).map_err(|e| of(combination, e))?);
    }
    let goal = same("eval.metric", &configs, |config| config.eval.metric)?;
    let backend = same(&BACKEND.path(), &configs, |config| config.switches.compute.backend)?;
    if let Some(dir) = &args.run {
        check_there(dir, args.resume, &combinations, &configs)?;
    }
    recipes::gpu_notes(&args.with).iter().for_each(|note| screen.note(note));
    for config in &configs {
        pretrained::check(config, &mut |file| crate::model::fetching(file, screen))?;
    }
    let device = Device::open(backend)?;
    let mut planned = vec![];
    for (combination, config) in combinations.into_iter().zip(configs) {
        let compiled = compile::compile(&config, &device.target(&config.switches));
        let arena_bytes = compiled.map_err(|e| of_failure(&combination, e))?.plans.arena_bytes as u64;
        planned.push(Planned { combination, config, arena_bytes });
    }
    if args.dry_run {
        list(&planned, goal, screen);
        return Ok(ExitCode::SUCCESS);
    }

    let name = planned[0].config.recipe.clone();
    let dir: PathBuf = match &args.run {
        Some(dir) => dir.clone(),
        None => Run::allocate(Path::new("runs"), &format!("{name}-sweep"))?.dir().to_path_buf(),
    };
    let here = std::env::current_dir().map_err(Failure::io("the folder that this was started in"))?;
    let command = SweepCommand {
        folder: here.display().to_string(),
        words: args.words.clone(),
        with: args.with.clone(),
        runs: args.runs,
        seed: args.seed,
        goal: args.goal,
    };
    let mut failed: Vec<(String, String)> = vec![];
    let summary = |failed: &[(String, String)]| {
        let trial = |planned: &Planned| {
            let mut trial = Trial::read(&dir, &planned.combination, goal);
            let why = failed.iter().find(|(name, _)| *name == trial.name);
            trial.why = why.map(|(_, sentence)| sentence.clone());
            trial
        };
        Summary::new(&name, goal, args.by, command.clone(), planned.iter().map(trial).collect())
    };
    let is_new = !dir.join(SUMMARY).exists();
    // The summary is written first, so that a sweep that is killed can be continued from its folder.
    summary(&failed).write(&dir)?;
    let count = planned.len();
    for (number, Planned { combination, config, .. }) in (1..).zip(&planned) {
        let folder = dir.join(&combination.name);
        let words = combination.words().join(" ");
        let (label, resume, is_done) = ("sweep", Resume::Auto, folds::is_done(&folder));
        let one = OneOf { label, number, count, words, folder: &folder, resume, is_done, config };
        let status = match train_one_of(&one, &device, &stop, &starting, screen) {
            // One that fails, for example because its learning rate is too high, does not affect the others.
            Err(Failure::Environment(sentence)) => {
                screen.note(format!("sweep    {} failed: {sentence}", combination.name));
                failed.push((combination.name.clone(), sentence));
                None
            }
            Err(Failure::User(error)) => {
                if is_new && !planned.iter().any(|planned| is_run(&dir.join(&planned.combination.name))) {
                    Summary::remove(&dir);
                }
                return Err(of(combination, error).into());
            }
            Ok(status) => Some(status),
        };
        summary(&failed).write(&dir)?;
        if status == Some(Status::Stopped) {
            screen.note(format!("continue the whole sweep with: flatout resume {}", quoted(&dir)));
            return Ok(ExitCode::from(3));
        }
    }
    let summary = summary(&failed);
    summary.write(&dir)?;
    show(&summary, &sweep, &dir, screen);
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The arguments of the sweep in a folder, to continue it; `None` if the folder holds no sweep.
pub fn begun(args: &args::ResumeRun) -> Result<Option<args::Sweep>, Failure> {
    if is_run(&args.run) {
        return Ok(None);
    }
    let Some((by, command)) = SweepCommand::read(&args.run)? else { return Ok(None) };
    if let Some(word) = args.overrides.first() {
        return Err(
            UserError(format!("a sweep continues with the values it began with: leave {word} out")).into()
        );
    }
    let dir = args.run.canonicalize().map_err(Failure::io(args.run.display()))?;
    let SweepCommand { folder, words, with, runs, seed, goal } = command;
    // Recipes and data may have relative paths.
    std::env::set_current_dir(&folder).map_err(Failure::io(&folder))?;
    Ok(Some(args::Sweep {
        words,
        with,
        by,
        runs,
        seed,
        goal,
        run: Some(dir),
        resume: Resume::Must,
        max_time: args.max_time,
        dry_run: false,
    }))
}

/// The config of a run.
fn config(
    args: &args::Sweep,
    recipe: &str,
    sweep: &Sweep,
    combination: &Combination,
) -> Result<Config, UserError> {
    let goal = args.goal.map(|goal| format!("eval.metric={goal}"));
    let words: Vec<String> = sweep.shared.iter().cloned().chain(combination.words()).chain(goal).collect();
    let config = recipes::resolve(recipe, &args.with, &words)?;
    config.validate_for_training()?;
    if config.train.folds.is_some() && config.train.fold.is_none() {
        refuse!("`train.folds` makes several runs of every run of the sweep: sweep over train.fold=1..N too");
    }
    Ok(config)
}

/// The value that all runs must share.
fn same<T: PartialEq + Copy>(
    key: &str,
    configs: &[Config],
    of: impl Fn(&Config) -> T,
) -> Result<T, UserError> {
    let first = of(&configs[0]);
    if configs.iter().any(|config| of(config) != first) {
        refuse!("`{key}` must be the same in all runs of a sweep: give it one value");
    }
    Ok(first)
}

/// Refuses a folder of --run that may not be used, or whose runs were begun with other settings.
fn check_there(
    dir: &Path,
    resume: Resume,
    combinations: &[Combination],
    configs: &[Config],
) -> Result<(), UserError> {
    let is_there = dir.join(SUMMARY).is_file() || combinations.iter().any(|c| is_run(&dir.join(&c.name)));
    match (is_there, resume) {
        (true, Resume::Never) => {
            refuse!(
                "{} holds a sweep already: continue it with --resume auto, or give another --run",
                dir.display()
            )
        }
        (false, Resume::Must) => refuse!("there is no sweep in {}: nothing to continue", dir.display()),
        (false, _) if is_run(dir) => refuse!("{} holds a run: give --run a folder of its own", dir.display()),
        _ => {}
    }
    for (combination, config) in combinations.iter().zip(configs) {
        let folder = dir.join(&combination.name);
        if is_run(&folder) {
            let (own, resolved) = flatout_train::run::asked_and_resolved(&folder)?;
            requeued(&own, &resolved, config).map_err(|e| of(combination, e))?;
        }
    }
    Ok(())
}

fn of(combination: &Combination, error: UserError) -> UserError {
    UserError(format!("{}: {}", combination.words().join(" "), error.0))
}

fn of_failure(combination: &Combination, failure: Failure) -> Failure {
    match failure {
        Failure::User(error) => Failure::User(of(combination, error)),
        other => other,
    }
}

/// Lists the runs that would be trained.
fn list(planned: &[Planned], goal: Metric, screen: &Screen) {
    if screen.json {
        let run = |run: &Planned| {
            let values: serde_json::Map<String, serde_json::Value> =
                run.combination.values.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
            json!({ "name": run.combination.name, "values": values, "arena_bytes": run.arena_bytes })
        };
        screen.object(&json!({ "goal": goal, "runs": planned.iter().map(run).collect::<Vec<_>>() }));
        return;
    }
    let keys = planned[0].combination.values.iter().map(|(key, _)| key.clone());
    let mut rows = vec![keys.chain(["memory".into()]).collect::<Vec<String>>()];
    for run in planned {
        let values = run.combination.values.iter().map(|(_, value)| value.clone());
        rows.push(values.chain([bytes(run.arena_bytes)]).collect());
    }
    print_table(&rows, 0..rows[0].len(), screen);
    screen.note(format!("{} runs, compared by {goal}; nothing was trained", planned.len()));
}

/// Prints the results of the runs, the best first.
fn show(summary: &Summary, sweep: &Sweep, dir: &Path, screen: &Screen) {
    if screen.json {
        screen.object(summary);
        return;
    }
    let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.4}"));
    let goal = summary.goal;
    let head =
        [format!("best {goal}"), "after step".into(), format!("last {goal}"), "steps".into(), "took".into()];
    let mut rows: Vec<Vec<String>> = vec![sweep.keys().map(String::from).chain(head).collect()];
    for trial in &summary.runs {
        let values = sweep.keys().map(|key| trial.values[key].clone());
        let state = match trial.state {
            Some(State::Done) => duration(trial.seconds),
            Some(other) => other.to_string(),
            None => "not begun".into(),
        };
        let after = trial.best_step.map_or("-".into(), |step| step.to_string());
        let results = [number(trial.best), after, number(trial.last), trial.step.to_string(), state];
        rows.push(values.chain(results).collect());
    }
    screen.result("");
    print_table(&rows, 0..rows[0].len(), screen);
    show_means(summary, screen);
    if let Some(best) = summary.runs.first().filter(|run| run.best.is_some()) {
        screen.result(format!("best     {}", dir.join(&best.name).display()));
    }
    screen.result(format!("sweep    {}", dir.join(SUMMARY).display()));
}

/// Prints the means of settings over their seeds, where there are several.
fn show_means(summary: &Summary, screen: &Screen) {
    let Some(first) = summary.means.first() else { return };
    let head =
        [format!("mean {}", summary.goal), "error".into(), "least".into(), "most".into(), "seeds".into()];
    let mut rows: Vec<Vec<String>> = vec![first.values.keys().cloned().chain(head).collect()];
    for mean in &summary.means {
        let seeds = match mean.judged == mean.runs {
            true => mean.runs.to_string(),
            false => format!("{} of {}", mean.judged, mean.runs),
        };
        let error = mean.standard_error.map_or("-".into(), |error| format!("{error:.4}"));
        let [middle, least, most] = [mean.mean, mean.least, mean.most].map(|value| format!("{value:.4}"));
        rows.push(mean.values.values().cloned().chain([middle, error, least, most, seeds]).collect());
    }
    screen.result("");
    print_table(&rows, 0..rows[0].len(), screen);
}
