//! `runs`: lists runs, and compares several side by side: their differences, results, and curves on the same axes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use console::Term;
use flatout_report::history::{Axis, History, Summary, list, smoothing_span};
use flatout_report::plot::{Plot, Series, Style};
use flatout_report::report::FIRST_STEPS;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::run::events::now;
use serde_json::{Value, json};

use crate::args::{Compare, Runs, RunsCommand};
use crate::model::{self, RUNS};
use crate::screen::{Screen, bytes, complain, count, duration, one_line};
use crate::sketch::{Curve, Paper, sketch};
use crate::track::track;

pub fn runs(args: &Runs, screen: &Screen) -> Result<ExitCode, Failure> {
    match &args.compare {
        Some(RunsCommand::Compare(compared)) => compare(compared, screen),
        Some(RunsCommand::Track(tracked)) => track(tracked, screen),
        None => listing(args.dir.as_deref(), screen),
    }
}

fn listing(dir: Option<&Path>, screen: &Screen) -> Result<ExitCode, Failure> {
    let folder = dir.map_or(RUNS.into(), model::named);
    let folder = folder.as_path();
    let found = if dir.is_none() && !folder.exists() { vec![] } else { list(folder)? };
    let (mut summaries, mut images) = (vec![], vec![]);
    for (path, run) in found {
        match run {
            Ok(history) => {
                let within = path.strip_prefix(folder).ok().filter(|path| path.components().count() > 1);
                let name = within.map_or_else(|| history.name(), |path| path.display().to_string());
                let is_of_images = history.is_of_images();
                summaries.push(Summary { name, ..history.summary() });
                images.push(is_of_images);
            }
            Err(why) => complain(format!("{} is left out: {why}", path.display())),
        }
    }
    if screen.json {
        screen.object(&summaries);
        return Ok(ExitCode::SUCCESS);
    }
    if summaries.is_empty() {
        screen.result(format!("there are no runs in {}; flatout train starts one", folder.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["run", "recipe", "state", "step", "loss", "held-out", "metric", "speed", "took", "started"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(
        summaries.iter().zip(&images).map(|(summary, is_of_images)| row(summary, *is_of_images, now())),
    );
    if summaries.iter().all(|summary| summary.metric_value.is_none()) {
        rows.iter_mut().for_each(|row| drop(row.remove(METRIC)));
    }
    print_table(&rows, 3..rows[0].len() - 1, screen);
    Ok(ExitCode::SUCCESS)
}

/// The number of the column of metrics, which is dropped if no run has one.
const METRIC: usize = 6;

fn row(summary: &Summary, is_of_images: bool, now: f64) -> Vec<String> {
    let loss = |loss: Option<f32>| loss.map_or("-".into(), |loss| format!("{loss:.4}"));
    let of = summary.steps.map(|steps| format!("/{}", count(steps))).unwrap_or_default();
    let ago = |started: f64| format!("{} ago", duration((now - started).max(0.0)));
    vec![
        summary.name.clone(),
        summary.recipe.clone(),
        summary.state.to_string(),
        format!("{}{of}", count(summary.step)),
        loss(summary.loss),
        loss(summary.eval_loss),
        match (summary.metric, summary.metric_value) {
            (Some(metric), Some(value)) => format!("{metric} {value:.4}"),
            _ => "-".into(),
        },
        match is_of_images {
            true => rate(summary.samples_per_second, "images/s"),
            false => rate(summary.tokens_per_second, "tok/s"),
        },
        duration(summary.seconds),
        summary.started.map_or("-".into(), ago),
    ]
}

fn rate(rate: Option<f64>, unit: &str) -> String {
    rate.map_or("-".into(), |rate| format!("{} {unit}", count(rate as u64)))
}

/// Prints a table with columns as wide as their widest cell; the columns in `numbers` are aligned right.
pub fn print_table(rows: &[Vec<String>], numbers: std::ops::Range<usize>, screen: &Screen) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let rows: Vec<Vec<_>> = rows.iter().map(|row| row.iter().map(|cell| one_line(cell)).collect()).collect();
    let wide = |c: usize| rows.iter().filter_map(|row| row.get(c)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|c| wide(c).unwrap_or(0)).collect();
    for row in &rows {
        let cells = row.iter().enumerate().map(|(c, cell)| match numbers.contains(&c) {
            true => format!("{cell:>0$}", widths[c]),
            false => format!("{cell:<0$}", widths[c]),
        });
        screen.result(cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}

fn compare(args: &Compare, screen: &Screen) -> Result<ExitCode, Failure> {
    let mut histories = vec![];
    for path in &args.runs {
        histories.push(History::read(&model::named(path))?);
    }
    let names = names(&histories, &args.runs);
    let (differs, span) = (differences(&histories), smoothing_span(&histories));
    let plot = plot(&histories, &names, args);
    fs::write(&args.svg, plot.to_svg()).map_err(|error| {
        Failure::User(UserError(format!(
            "{} cannot be written: {error}; give another --svg",
            args.svg.display()
        )))
    })?;
    if screen.json {
        let numbers = histories.iter().zip(&names).map(|(history, name)| object(history, name, span));
        screen.object(&json!({
            "by": args.by,
            "runs": numbers.collect::<Vec<_>>(),
            "differs": differs,
            "svg": args.svg,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let head =
        |title: &str| std::iter::once(title.to_string()).chain(names.iter().cloned()).collect::<Vec<_>>();
    let mut rows = vec![head("")];
    for (name, format) in NUMBERS {
        let cells: Vec<String> = histories.iter().map(|h| format(h, span).unwrap_or("-".into())).collect();
        if cells.iter().any(|cell| cell != "-") {
            rows.push(std::iter::once(name.to_string()).chain(cells).collect());
        }
    }
    if !differs.is_empty() {
        rows.push(vec![String::new()]);
        rows.push(head("what differs"));
        for (key, values) in &differs {
            let values = values.iter().map(|value| value.clone().unwrap_or("-".into()));
            rows.push(std::iter::once(key.clone()).chain(values).collect());
        }
    }
    print_table(&rows, 1..rows[0].len(), screen);
    screen.result("");
    let curves = histories.iter().zip(&names).map(|(history, name)| {
        let points = history.smoothed_curve(args.by, |step| step.loss as f64, span);
        Curve { name: one_line(name).into_owned(), points }
    });
    let paper = Paper::of(&Term::stdout(), 14, args.log);
    for line in sketch(&curves.collect::<Vec<_>>(), paper) {
        screen.coloured(line);
    }
    screen.note(format!("loss over {}, smoothed; also in {}", unit(args.by), args.svg.display()));
    Ok(ExitCode::SUCCESS)
}

/// The names of the runs, or their paths as given if two have the same name.
fn names(histories: &[History], given: &[PathBuf]) -> Vec<String> {
    let names: Vec<String> = histories.iter().map(History::name).collect();
    let distinct: BTreeSet<&String> = names.iter().collect();
    if distinct.len() == names.len() {
        return names;
    }
    given.iter().map(|path| path.display().to_string()).collect()
}

/// The keys whose values differ between the runs, with the value in each.
fn differences(histories: &[History]) -> BTreeMap<String, Vec<Option<String>>> {
    let values: Vec<BTreeMap<String, String>> = histories.iter().map(|h| h.config.shown_values()).collect();
    let keys: BTreeSet<&String> = values.iter().flat_map(BTreeMap::keys).collect();
    let of = |key: &String| values.iter().map(|held| held.get(key).cloned()).collect::<Vec<_>>();
    let all = keys.into_iter().map(|key| (key.clone(), of(key)));
    all.filter(|(_, values)| values.windows(2).any(|pair| pair[0] != pair[1])).collect()
}

fn unit(axis: Axis) -> &'static str {
    match axis {
        Axis::Step => "steps",
        Axis::Tokens => "tokens",
        Axis::Time => "seconds of training",
    }
}

/// The plot of all runs, each in its colour: every loss faintly, the smoothed loss, and marks for held-out losses.
fn plot(histories: &[History], names: &[String], args: &Compare) -> Plot {
    let (mut series, span) = (vec![], smoothing_span(histories));
    for (colour, (history, name)) in histories.iter().zip(names).enumerate() {
        let raw = history.curve(args.by, |step| step.loss as f64);
        let mean = history.smoothed_curve(args.by, |step| step.loss as f64, span);
        let mut push = |name: &str, points, style| {
            series.push(Series { name: name.into(), points, style, colour });
        };
        push("", raw, Style::Faint);
        push(name, mean, Style::Line);
        push("", history.eval_curve(args.by), Style::Marks);
    }
    Plot {
        title: "Loss, smoothed; marks are held-out".into(),
        x: unit(args.by).into(),
        y: "nats".into(),
        log_x: args.log,
        log_y: false,
        skipped: FIRST_STEPS,
        series,
    }
}

type Format = fn(&History, f64) -> Option<String>;

/// The rows of the comparison. Each formats a figure of a run, given the tokens that losses are smoothed over.
const NUMBERS: [(&str, Format); 15] = [
    ("state", |h, _| Some(h.state.to_string())),
    ("step", |h, _| h.last().map(|made| count(made.step.step))),
    ("tokens", |h, _| h.last().filter(|_| !h.is_of_images()).map(|made| count(made.step.tokens))),
    ("images", |h, _| h.last().filter(|_| h.is_of_images()).map(|made| count(made.step.samples))),
    ("time", |h, _| h.last().map(|made| duration(made.seconds))),
    ("loss", |h, _| h.last().map(|made| format!("{:.4}", made.step.loss))),
    ("loss, smoothed", |h, span| h.smoothed_loss(span).map(|loss| format!("{loss:.4}"))),
    ("held-out loss", |h, _| h.evals.last().map(|(_, loss)| format!("{loss:.4}"))),
    ("metric", |h, _| {
        let Summary { metric, metric_value, .. } = h.summary();
        Some(format!("{} {:.4}", metric?, metric_value?))
    }),
    ("tokens a second", |h, _| {
        h.recent(|step| step.tokens_per_second).filter(|_| !h.is_of_images()).map(|rate| count(rate as u64))
    }),
    ("images a second", |h, _| {
        h.recent(|step| step.samples_per_second).filter(|_| h.is_of_images()).map(|rate| count(rate as u64))
    }),
    ("step time", |h, _| h.recent(|step| step.step_ms).map(|ms| format!("{ms:.2} ms"))),
    ("MFU", |h, _| h.recent(|step| step.mfu.unwrap_or(f64::NAN)).map(|mfu| format!("{:.1}%", 100.0 * mfu))),
    ("memory", |h, _| h.start.as_ref().map(|start| bytes(start.arena_bytes + start.driver_bytes))),
    ("device", |h, _| h.start.as_ref().map(|start| start.backend.clone())),
];

fn object(history: &History, name: &str, span: f64) -> Value {
    let mut object = json!(history.summary());
    object["name"] = json!(name);
    object["smoothed_loss"] = json!(history.smoothed_loss(span));
    object["step_ms"] = json!(history.recent(|step| step.step_ms));
    object["mfu"] = json!(history.recent(|step| step.mfu.unwrap_or(f64::NAN)));
    object["tokens"] = json!(history.last().map(|made| made.step.tokens));
    let start = history.start.as_ref();
    object["memory_bytes"] = json!(start.map(|start| start.arena_bytes + start.driver_bytes));
    object["backend"] = json!(start.map(|start| &start.backend));
    object
}
