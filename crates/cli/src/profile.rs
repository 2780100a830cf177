//! `profile`: measures where the time of an update goes, and prints tables, JSON or a trace.

use std::process::ExitCode;

use flatout_measure::bench::Stage;
use flatout_measure::profile::{Options, Report, page, trace};
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::recipes;

use crate::args::{Profile, recipe_and_overrides};
use crate::measuring::{is_writer, measure};
use crate::runs::print_table;
use crate::screen::Screen;

/// Rounds of measurements.
const ROUNDS: usize = 8;
/// Seconds of each measurement of what one more run of a kernel adds. A GPU's clock adapts to its power within a tenth of a second.
const MARGINAL_SECONDS: f64 = 1.0;
/// Rows of a table without --all.
const SHOWN: usize = 12;

pub fn profile(args: &Profile, screen: &Screen) -> Result<ExitCode, Failure> {
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let config = recipes::resolve(recipe, &args.with, overrides)?;
    if let Some(path) = &args.trace
        && is_writer(&args.meeting)?
    {
        trace::check(path)?;
    }
    measure(&args.meeting, &config, screen, |stage, config, screen| on_stage(args, config, stage, screen))
}

/// Measures on every rank, and reports on rank 0.
fn on_stage(args: &Profile, config: &Config, stage: &Stage, screen: &Screen) -> Result<ExitCode, Failure> {
    if args.marginal && stage.ranks() > 1 {
        let why = "--marginal repeats launches of one rank: leave it out, or profile on one rank";
        return Err(Failure::User(UserError(why.into())));
    }
    let bar = screen.bar("{wide_bar} round {pos} of {len}", ROUNDS as u64);
    let marginal_seconds = args.marginal.then_some(MARGINAL_SECONDS);
    let options = Options { steps: args.steps as usize, rounds: ROUNDS, marginal_seconds };
    let mut progress = |round, of| match &bar {
        Some(bar) => {
            bar.set_length(of as u64);
            bar.set_position(round as u64 + 1);
        }
        None if screen.verbose => screen.note(format!("round {} of {of}", round + 1)),
        None => {}
    };
    let report = flatout_measure::profile::profile(config, &options, stage, &mut progress);
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let report = report?;
    if !stage.is_first() {
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(path) = &args.trace {
        trace::write(&report, path)?;
    }
    if screen.json {
        screen.object(&report);
    } else {
        print(&report, if args.all { usize::MAX } else { SHOWN }, screen);
    }
    if let Some(path) = &args.trace {
        screen.note(format!("written  {}: open it in ui.perfetto.dev", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report, most: usize, screen: &Screen) {
    screen.result(page::headline(report));
    if let Some(attention) = &report.attention {
        screen.result(format!("attention runs on {attention}"));
    }
    if let Some(products) = &report.products {
        screen.result(format!("matrix products run on: {products}"));
    }
    for table in page::tables(report, most) {
        screen.result(format!("\n{}", table.title));
        let head = table.head.iter().map(|cell| cell.to_string()).collect();
        let rows: Vec<Vec<String>> = [head].into_iter().chain(table.rows).collect();
        print_table(&rows, 1..table.numbers, screen);
    }
    screen.result("\nwhere the most is lost");
    for (i, sink) in report.sinks.iter().enumerate() {
        screen.result(format!("{}. {}", i + 1, sink.words));
    }
    screen.result(format!("\n{}", page::how(report)));
}
