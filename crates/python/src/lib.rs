//! The native part of the Python package: runs, plans and models, with the GIL released while they work.
//!
//! This crate handles Python's calls and interrupts; runs, plans and models come from the crates below. The other part is the
//! package in `flatout/`, which converts Python values to overrides as on the command line.
#![cfg(feature = "module")]

mod array;
mod fault;
mod model;
mod process;
mod train;
mod wait;

use std::path::PathBuf;
use std::time::Duration;

use flatout_measure::plan::{self, PlanRequest};
use flatout_report::history::History;
use flatout_report::report;
use flatout_train::run::{self, Resume, events};
use flatout_train::{UserError, config, recipes, tasks};
use pyo3::prelude::*;
use serde_json::json;

use fault::{Error, raised};
use train::{Begin, Order};

#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use super::{
        array::Array, is_running, model::Model, model::Tokenizer, named, plan_json, recipes_json, resume,
        run_config, run_plot, run_steps, run_summary, schema_json, train_recipe,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        module.add("UserError", py.get_type::<fault::UserError>())?;
        module.add("Error", py.get_type::<Error>())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let prefix: PathBuf = py.import("sys")?.getattr("prefix")?.extract()?;
        flatout_train::device::look_for_libraries_under(prefix);
        Ok(())
    }
}

/// Trains a recipe and returns the directory of its run.
#[pyfunction]
#[pyo3(signature = (recipe, presets, overrides, run, resume, max_seconds, on_begin, on_event))]
#[allow(clippy::too_many_arguments)]
fn train_recipe(
    py: Python<'_>,
    recipe: String,
    presets: Vec<String>,
    overrides: Vec<String>,
    run: Option<PathBuf>,
    resume: &str,
    max_seconds: Option<f64>,
    on_begin: &Bound<'_, PyAny>,
    on_event: &Bound<'_, PyAny>,
) -> PyResult<PathBuf> {
    let resume: Resume =
        resume.parse().map_err(|why| raised(UserError(format!("resume={resume:?}: {why}")).into()))?;
    let begin = Begin::Recipe { recipe, presets, overrides, run, resume };
    train::train(py, Order { begin, max_time: time_limit(max_seconds)? }, on_begin, on_event)
}

/// Continues a run and returns its directory.
#[pyfunction]
fn resume(
    py: Python<'_>,
    run: PathBuf,
    overrides: Vec<String>,
    max_seconds: Option<f64>,
    on_begin: &Bound<'_, PyAny>,
    on_event: &Bound<'_, PyAny>,
) -> PyResult<PathBuf> {
    let begin = Begin::Existing { run, overrides };
    train::train(py, Order { begin, max_time: time_limit(max_seconds)? }, on_begin, on_event)
}

fn time_limit(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() => Ok(Some(time)),
        _ => Err(raised(
            UserError(format!("max_time is {seconds} and must be a number of seconds above 0")).into(),
        )),
    }
}

/// The plan of a recipe, as `plan --json` prints it.
#[pyfunction]
#[pyo3(signature = (recipe, presets, overrides, gpu, gpus, nodes, link, net, ranks, read_data))]
#[allow(clippy::too_many_arguments)]
fn plan_json(
    py: Python<'_>,
    recipe: &str,
    presets: Vec<String>,
    overrides: Vec<String>,
    gpu: Option<String>,
    gpus: Option<usize>,
    nodes: Option<usize>,
    link: Option<String>,
    net: Option<String>,
    ranks: Option<usize>,
    read_data: bool,
) -> PyResult<String> {
    let asked = PlanRequest { gpu, gpus, nodes, link, net, ranks, with: presets };
    let made = py.detach(|| {
        process::prepare()?;
        let mut config = recipes::resolve(recipe, &asked.with, &overrides)?;
        if read_data {
            config = tasks::measured(&config, &mut |_| {})?;
        }
        Ok(plan::object(&plan::report(&config, &asked)?).to_string())
    });
    made.map_err(raised)
}

/// The embedded recipes and presets, as `recipes --json` prints them.
#[pyfunction]
fn recipes_json() -> String {
    recipes::as_json().to_string()
}

/// Every key that can be set, as `schema --json` prints them.
#[pyfunction]
fn schema_json() -> String {
    json!(config::schema()).to_string()
}

/// The directory of a run that is given by its path or by its name under `runs`.
#[pyfunction]
fn named(run: PathBuf) -> PyResult<PathBuf> {
    let dir = run::named(&run);
    match run::is_run(&dir) {
        true => Ok(dir),
        false => Err(raised(run::no_run(&run).into())),
    }
}

/// The resolved settings of a run.
#[pyfunction]
fn run_config(dir: PathBuf) -> PyResult<String> {
    let config = run::config(&dir).map_err(|error| raised(error.into()))?;
    Ok(json!(config).to_string())
}

/// The summary of a run, as `runs --json` prints it.
#[pyfunction]
fn run_summary(py: Python<'_>, dir: PathBuf) -> PyResult<String> {
    let read = py.detach(|| History::read(&dir).map(|history| json!(history.summary()).to_string()));
    read.map_err(|error| raised(error.into()))
}

/// Whether a process is training the run now.
#[pyfunction]
fn is_running(dir: PathBuf) -> bool {
    run::is_running(&dir)
}

/// A plot of the run's report as SVG, by its name.
#[pyfunction]
fn run_plot(py: Python<'_>, dir: PathBuf, name: &str) -> PyResult<String> {
    let drawn = py.detach(|| {
        let plots = report::plots(&History::read(&dir)?);
        let names: Vec<&str> = plots.iter().map(|(name, _)| *name).collect();
        let found = plots.iter().find(|(own, _)| *own == name).map(|(_, plot)| plot.to_svg());
        found.ok_or_else(|| UserError(format!("the run has no plot `{name}`: it has {}", names.join(", "))))
    });
    drawn.map_err(|error| raised(error.into()))
}

/// The valid step events in order, without those of steps that a resumed run repeated.
#[pyfunction]
fn run_steps(py: Python<'_>, dir: PathBuf) -> PyResult<String> {
    let log = dir.join("events.jsonl");
    let read = py.detach(|| match events::read(&log) {
        Ok(all) => {
            let steps = events::steps(&all).into_iter().map(|step| events::Event::Step(step).to_json());
            Ok(format!("[{}]", steps.collect::<Vec<_>>().join(",")))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok("[]".into()),
        Err(error) => Err(UserError(format!("{} cannot be read: {error}", log.display()))),
    });
    read.map_err(|error| raised(error.into()))
}
