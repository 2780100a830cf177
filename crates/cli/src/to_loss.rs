//! `ablate --to-loss`: compares the time and tokens that a recipe and variants of it need to reach a held-out loss, over seeds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use flatout_measure::to_loss::{self, Range, Report, Row, Trial, Variant, rows, variants};
use flatout_report::history::History;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::device::Device;
use flatout_train::metrics::goal::Metric;
use flatout_train::recipes;
use flatout_train::refuse;
use flatout_train::resolve::compile;
use flatout_train::run::events::Status;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Resume, Run, asked_and_resolved, is_run, quoted};
use flatout_train::training::resume::check_compared;
use flatout_train::weights::pretrained;

use crate::args::{Ablate, recipe_and_overrides};
use crate::launch;
use crate::runs::print_table;
use crate::screen::{Screen, duration, short};
use crate::start::{self, Starting};
use crate::train::{OneOf, train_one_of};

/// The planned run of one variant and seed.
struct Planned {
    variant: Variant,
    seed: u64,
    config: Config,
}

/// Runs that failed, by their folders, each with the reason.
type Failed = BTreeMap<PathBuf, String>;

pub fn to_loss(args: &Ablate, goal: f64, screen: &Screen) -> Result<ExitCode, Failure> {
    launch::check_alone("ablate --to-loss")?;
    check(args)?;
    let (stop, starting) = start::watch(None, screen)?;
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let base = recipes::resolve(recipe, &args.with, overrides)?;
    let variants = variants(&args.tries)?;
    let seeds: Vec<u64> = (0..args.seeds).map(|seed| base.train.seed + seed).collect();
    let device = Device::open(base.switches.compute.backend)?;
    // Every config is checked before anything is written.
    let mut planned = vec![];
    for seed in &seeds {
        for variant in &variants {
            let config =
                prepared(variant, &base, *seed, goal, &device, screen).map_err(|e| of(variant, e))?;
            planned.push(Planned { variant: variant.clone(), seed: *seed, config });
        }
    }
    let dir: PathBuf = match &args.meeting.run {
        Some(dir) => dir.clone(),
        None => Run::allocate(Path::new("runs"), &format!("{}-to-loss", base.recipe))?.dir().to_path_buf(),
    };
    check_there(&dir, &planned)?;
    let Some(failed) = train_all(&planned, &dir, goal, &device, (&stop, &starting), screen)? else {
        screen.note(format!("to continue, give the same command with --run {}", quoted(&dir)));
        return Ok(ExitCode::from(3));
    };
    let metric = base.eval.metric;
    let trial = |variant: &Variant, seed: u64| {
        let folder = variant.folder(&dir, seed);
        Trial::read(&folder, seed, metric, goal, failed.get(&folder).cloned())
    };
    let mut runs = vec![];
    for variant in &variants {
        runs.push(seeds.iter().map(|seed| trial(variant, *seed)).collect::<Result<Vec<_>, _>>()?);
    }
    let report = Report {
        recipe: base.recipe.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        device: device.sentence(),
        metric,
        goal,
        seeds,
        path: dir.display().to_string(),
        rows: rows(&variants, &runs),
    };
    if screen.json {
        screen.object(&report);
    } else {
        print(&report, screen);
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Refuses a folder whose runs were begun with other settings, because their results would be reported for these settings.
fn check_there(dir: &Path, planned: &[Planned]) -> Result<(), Failure> {
    if is_run(dir) {
        return Err(
            UserError(format!("{} holds a run: give --run a folder of its own", dir.display())).into()
        );
    }
    for Planned { variant, seed, config } in planned {
        let folder = variant.folder(dir, *seed);
        if is_run(&folder) {
            let (own, resolved) = asked_and_resolved(&folder)?;
            check_compared(&own, &resolved, config)
                .map_err(|error| UserError(format!("{}: {}", folder.display(), error.0)))?;
        }
    }
    Ok(())
}

/// Trains the runs one after another and returns those that failed; `None` if it was stopped.
fn train_all(
    planned: &[Planned],
    dir: &Path,
    goal: f64,
    device: &Device,
    (stop, starting): (&StopFlag, &Starting),
    screen: &Screen,
) -> Result<Option<Failed>, Failure> {
    let (count, mut failed) = (planned.len(), Failed::new());
    for (number, Planned { variant, seed, config }) in (1..).zip(planned) {
        let folder = variant.folder(dir, *seed);
        let words = format!("{}, seed {seed}", variant.name);
        let is_done =
            History::read(&folder).is_ok_and(|history| to_loss::is_done(&history, config.eval.metric, goal));
        let one = OneOf {
            label: "to loss",
            number,
            count,
            words: words.clone(),
            folder: &folder,
            resume: Resume::Auto,
            is_done,
            config,
        };
        match train_one_of(&one, device, stop, starting, screen) {
            // One that fails, for example because its learning rate is too high, does not affect the others.
            Err(Failure::Environment(sentence)) => {
                screen.note(format!("to loss  {words} failed: {sentence}"));
                failed.insert(folder, sentence);
            }
            Err(refused) => return Err(of(variant, refused)),
            Ok(Status::Stopped) => return Ok(None),
            Ok(_) => {}
        }
    }
    Ok(Some(failed))
}

/// Refuses options of `ablate` that apply to measured updates and not to whole runs.
fn check(args: &Ablate) -> Result<(), UserError> {
    let given = [
        ("--budget", args.budget.is_some()),
        ("--only", args.only.is_some()),
        ("--model", args.model),
        ("--control", args.control),
        ("--fresh", args.fresh),
        ("--out", args.out.is_some()),
        ("--ranks or --gpus", args.meeting.ranks.are_given()),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((name, _)) => {
            refuse!(
                "{name} is for measured updates, and --to-loss trains whole runs, each on one rank: leave it out"
            )
        }
        None => Ok(()),
    }
}

/// The config of a run, after checks that it can be trained and fits.
fn prepared(
    variant: &Variant,
    base: &Config,
    seed: u64,
    goal: f64,
    device: &Device,
    screen: &Screen,
) -> Result<Config, Failure> {
    let config = variant.config(base, seed, goal)?;
    config.validate_for_training()?;
    if config.eval.metric != base.eval.metric
        || config.switches.compute.backend != base.switches.compute.backend
    {
        return Err(UserError(
            "`eval.metric` and `backend` must be the same in all runs: leave them out".into(),
        )
        .into());
    }
    pretrained::check(&config, &mut |file| crate::model::fetching(file, screen))?;
    compile::compile(&config, &device.target(&config.switches))?;
    Ok(config)
}

fn of(variant: &Variant, failure: Failure) -> Failure {
    match failure {
        Failure::User(error) if !variant.overrides.is_empty() => {
            Failure::User(UserError(format!("--try `{}`: {}", variant.name, error.0)))
        }
        other => other,
    }
}

fn print(report: &Report, screen: &Screen) {
    let Report { metric, goal, seeds, .. } = report;
    screen.result(format!(
        "{} on {}: time and tokens of updates until a held-out {metric} of {goal}, {} seed{}",
        report.recipe,
        report.device,
        seeds.len(),
        if seeds.len() == 1 { "" } else { "s, mean (least to most)" }
    ));
    let head = ["", "time", "tokens", "time / base", "best"].map(String::from).to_vec();
    let table: Vec<Vec<String>> =
        [head].into_iter().chain(report.rows.iter().map(|row| cells(row, *metric))).collect();
    print_table(&table, 1..5, screen);
    let reached = report.rows.iter().flat_map(|row| &row.runs).filter_map(|run| run.reached);
    let early = reached.filter(|reached| reached.at_first).count();
    if early > 0 {
        screen.note(format!(
            "note     {early} run{} had reached it at the first evaluation, so that time is an upper bound: give a smaller eval.every",
            if early == 1 { "" } else { "s" }
        ));
    }
    screen.note(format!("runs     {}", report.path));
}

fn cells(row: &Row, metric: Metric) -> Vec<String> {
    let range = |range: Option<Range>, show: &dyn Fn(f64) -> String| match range {
        Some(Range { mean, least, most }) if least == most => show(mean),
        Some(Range { mean, least, most }) => format!("{} ({} to {})", show(mean), show(least), show(most)),
        None => "-".into(),
    };
    let (failed, missed): (Vec<&Trial>, Vec<&Trial>) =
        row.runs.iter().filter(|run| run.reached.is_none()).partition(|run| run.why.is_some());
    let time = match (failed.len(), missed.len()) {
        (0, 0) => range(row.seconds, &duration),
        (0, missed) => format!("not reached by {missed} of {}", row.runs.len()),
        (failed, 0) => format!("{failed} of {} failed", row.runs.len()),
        (failed, missed) => format!("{failed} of {} failed, not reached by {missed}", row.runs.len()),
    };
    let better = |one, other| if metric.is_better(other, one) { other } else { one };
    let best = row.runs.iter().filter_map(|run| run.best).reduce(better);
    vec![
        row.name.clone(),
        time,
        range(row.tokens, &|tokens| short(tokens as u64)),
        range(row.of_base, &|ratio| format!("{ratio:.2}")),
        best.map_or("-".into(), |best| format!("{best:.4}")),
    ]
}
