//! Trains or continues a run on its own thread, which sends its events back one by one.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use flatout_measure::folds;
use flatout_measure::forecast::kept;
use flatout_report::sinks::Sinks;
use flatout_train::device::Device;
use flatout_train::resolve::compile::{self, Compiled};
use flatout_train::run::events::Event;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{self, Entered, RUNS, Resume, Run, asked_and_resolved};
use flatout_train::training::resume::begin_or_continue;
use flatout_train::training::trainer::{self, Notice};
use flatout_train::weights::pretrained;
use flatout_train::{Config, Failure, UserError, recipes};
use pyo3::prelude::*;

use crate::fault::raised;
use crate::process;
use crate::wait::{Reporter, wait, worker_channel};

/// Stack size of the training thread, at least that of a program's main thread.
const STACK_BYTES: usize = 16 << 20;

/// The requested run.
pub enum Begin {
    Recipe {
        recipe: String,
        presets: Vec<String>,
        overrides: Vec<String>,
        /// The next free directory under `runs` where none is given.
        run: Option<PathBuf>,
        resume: Resume,
    },
    Existing {
        run: PathBuf,
        overrides: Vec<String>,
    },
}

pub struct Order {
    pub begin: Begin,
    pub max_time: Option<Duration>,
}

/// A message from the training thread.
enum TrainMessage {
    /// The run has a directory with its settings, and is about to start.
    Begins(PathBuf),
    /// An event, as in the log.
    Event(String),
}

type TrainReporter = Reporter<TrainMessage, PathBuf>;

/// Trains a run to its end and returns its directory. `on_begin` is called with the directory, and `on_event` with
/// every event as a dictionary.
pub fn train(
    py: Python<'_>,
    order: Order,
    on_begin: &Bound<'_, PyAny>,
    on_event: &Bound<'_, PyAny>,
) -> PyResult<PathBuf> {
    let loads = py.import("json")?.getattr("loads")?;
    let deadline = order.max_time.and_then(|time| Instant::now().checked_add(time));
    let stop = StopFlag::never().with_deadline(deadline);
    let (reporter, events) = worker_channel();
    let flag = stop.clone();
    let work = move || {
        reporter.run(|reporter| carry_out(&order, &flag, reporter));
    };
    let spawned = thread::Builder::new().name("train".into()).stack_size(STACK_BYTES).spawn(work);
    spawned.map_err(|error| raised(Failure::io("the thread that trains")(error)))?;
    wait(py, events, &|| stop.interrupt(), &mut |message| {
        match message {
            TrainMessage::Begins(dir) => on_begin.call1((dir,)),
            TrainMessage::Event(line) => on_event.call1((loads.call1((line,))?,)),
        }
        .map(drop)
    })
}

fn carry_out(order: &Order, stop: &StopFlag, reporter: &TrainReporter) -> Result<PathBuf, Failure> {
    process::prepare()?;
    process::check_alone()?;
    match &order.begin {
        Begin::Recipe { recipe, presets, overrides, run, resume } => {
            let config = recipes::resolve(recipe, presets, overrides)?;
            config.validate_for_training()?;
            pretrained::check(&config, &mut |_| {})?;
            if config.train.folds.is_some() && config.train.fold.is_none() {
                return Err(refused(
                    "Python trains one run at a time, and `train.folds` asks for several: give train.fold, too",
                ));
            }
            // A run that does not fit this machine is refused before a directory is created.
            let device = Device::open(config.switches.compute.backend)?;
            let compiled = compile::compile(&config, &device.target(&config.switches))?;
            let entered = match run {
                Some(dir) => Run::enter(dir, *resume)?,
                None => Entered::Fresh(Run::allocate(Path::new(RUNS), &config.recipe)?),
            };
            let (run, is_fresh) = match entered {
                Entered::Fresh(run) => (run, true),
                Entered::Existing(run) => (run, false),
            };
            begin_or_continue(&run, is_fresh, &config, Some(compiled), |config, compiled| {
                train_entered(&run, config, compiled, &device, stop, reporter)
            })
        }
        Begin::Existing { run, overrides } => {
            let dir = run::named(run);
            if folds::begun(&dir)?.is_some() {
                return Err(refused(&format!(
                    "{} holds several runs: continue one of them, or all with `flatout resume`",
                    dir.display()
                )));
            }
            let run = Run::reopen(&dir)?;
            let (own, _) = asked_and_resolved(&dir)?;
            let config = own.resumed(overrides)?;
            let device = Device::open(config.switches.compute.backend)?;
            train_entered(&run, &config, None, &device, stop, reporter)
        }
    }
}

fn refused(sentence: &str) -> Failure {
    Failure::User(UserError(sentence.into()))
}

/// Trains an entered run, with all sinks and its plan.
fn train_entered(
    run: &Run,
    config: &Config,
    compiled: Option<Compiled>,
    device: &Device,
    stop: &StopFlag,
    reporter: &TrainReporter,
) -> Result<PathBuf, Failure> {
    trainer::train(config, compiled, run, device, stop, &mut Sinks::default().all(), &mut |notice| {
        match notice {
            Notice::Ready(ready) => {
                reporter.report(TrainMessage::Begins(ready.run.to_path_buf()));
                if let Err(error) = kept::write(ready.run, ready.config, ready.compiled) {
                    let message = format!("{} is not written: {error}", kept::PLAN);
                    reporter.report(TrainMessage::Event(Event::Warning { message }.to_json()));
                }
            }
            Notice::Event(event) => reporter.report(TrainMessage::Event(event.to_json())),
            Notice::Data(_) | Notice::Saving { .. } => {}
        }
    })?;
    Ok(run.dir().to_path_buf())
}
