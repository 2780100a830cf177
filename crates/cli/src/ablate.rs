//! `ablate`: measures what every switch is worth on this machine, and prints tables, JSON or a page.

use std::process::ExitCode;
use std::time::Duration;

use flatout_measure::ablate::variants::{Fate, RowSelection};
use flatout_measure::ablate::{AblateProgress, Options, Report, page};
use flatout_measure::bench::Stage;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::recipes;

use crate::args::{Ablate, recipe_and_overrides};
use crate::measuring::measure;
use crate::runs::print_table;
use crate::screen::{Screen, bytes, count, duration};

pub fn ablate(args: &Ablate, screen: &Screen) -> Result<ExitCode, Failure> {
    if let Some(goal) = args.to_loss {
        return crate::to_loss::to_loss(args, goal, screen);
    }
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let config = recipes::resolve(recipe, &args.with, overrides)?;
    let options = options(args)?;
    measure(&args.meeting, &config, screen, |stage, config, screen| match stage.is_first() {
        true => first(args, config, &options, stage, screen),
        false => stage.follow().map(|()| ExitCode::SUCCESS),
    })
}

/// Runs on rank 0: chooses what to measure, measures it together with the other ranks, and reports.
fn first(
    args: &Ablate,
    config: &Config,
    options: &Options,
    stage: &Stage,
    screen: &Screen,
) -> Result<ExitCode, Failure> {
    let bar = screen.bar("{wide_bar} {pos}/{len}  {msg}", 1);
    let line = |text: String| screen.note_above(bar.as_ref(), text);
    let report = flatout_measure::ablate::ablate(config, options, stage, &mut |progress| match progress {
        AblateProgress::Ready { variants, budget, kept, visits_before } => {
            let measured = variants.iter().filter(|v| matches!(v.fate, Fate::Measured { .. })).count();
            line(format!(
                "{}: {measured} rows to measure, {} rounds, {} at most",
                config.recipe,
                options.repeats,
                duration(budget.as_secs_f64())
            ));
            match (visits_before, kept) {
                (0, Some(path)) if screen.verbose => line(format!("kept in {}", path.display())),
                (0, _) => {}
                (visits, _) => line(format!(
                    "continues an earlier call, after {} measurements; --fresh starts again",
                    count(visits as u64)
                )),
            }
        }
        AblateProgress::Visit { name, done, of } => {
            if let Some(bar) = &bar {
                bar.set_length(of as u64);
                bar.set_position(done as u64);
                bar.set_message(name.to_string());
            } else if screen.verbose {
                screen.note(format!("{done}/{of} {name}"));
            }
        }
        AblateProgress::Failed { name, why } => line(format!("{name} failed: {why}")),
        AblateProgress::NotKept { why } => line(format!("the results so far could not be saved: {why}")),
    });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let report = report?;
    let written = args.out.as_ref().map(|folder| page::write(&report, folder)).transpose()?;
    if screen.json {
        screen.object(&report);
    } else {
        print(&report, screen);
    }
    for broken in page::broken(&report) {
        screen.note(format!("promise broken: {broken}"));
    }
    if let Some(path) = written {
        screen.note(format!("written  {}", path.display()));
    }
    if !report.is_complete {
        screen.note("the budget ended before the last round: give the same command again to continue");
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads `--budget` as a duration.
pub fn budget(minutes: Option<f64>) -> Result<Option<Duration>, UserError> {
    let read = |minutes: f64| match minutes.is_finite() && minutes > 0.0 && minutes <= 1e6 {
        true => Ok(Duration::from_secs_f64(60.0 * minutes)),
        false => Err(UserError(format!("--budget is {minutes} and must be a number of minutes above 0"))),
    };
    minutes.map(read).transpose()
}

fn options(args: &Ablate) -> Result<Options, UserError> {
    Ok(Options {
        steps: args.steps as usize,
        repeats: args.repeats as usize,
        budget: budget(args.budget)?,
        wanted: RowSelection { only: args.only.clone(), models: args.model, slowed: args.control },
        fresh: args.fresh,
    })
}

fn print(report: &Report, screen: &Screen) {
    let base = &report.base;
    screen.result(format!(
        "{} on {}, {}: {} tokens an update, {} tokens/s, {}{}, {} launches",
        report.recipe,
        report.device,
        report.precision,
        count(report.tokens_per_update as u64),
        count(base.tokens_per_second as u64),
        bytes(base.arena_bytes + base.driver_bytes),
        if report.ranks.is_some() { " on each" } else { "" },
        count(base.launches as u64)
    ));
    for table in page::tables(report) {
        screen.result(format!("\n{}", table.title));
        let head = table.head.iter().map(|cell| cell.to_string()).collect();
        let rows: Vec<Vec<String>> = [head].into_iter().chain(table.rows).collect();
        print_table(&rows, 1..7, screen);
    }
    let left = page::not_measured(report);
    if !left.is_empty() {
        screen.result("\nnot measured");
        left.iter().for_each(|(names, why)| screen.result(format!("  {names}: {why}")));
    }
    screen.result(format!("\n{}", page::how(report)));
}
