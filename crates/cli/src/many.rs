//! `train` and `resume` on several ranks: what cannot be shared yet, how the ranks enter one run, and what a failure advises.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use flatout_ir::Target;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::device::Device;
use flatout_train::ranks::Ranks;
use flatout_train::resolve::compile;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Run, checkpoint, checkpoints_dir, is_run};
use flatout_train::switches::Backend;
use flatout_world::{Copies, Place, Start};

use crate::launch::{self, Begun};
use crate::screen::Screen;
use crate::start::Starting;

/// The run that a failure is to be said of, once it is known.
#[derive(Clone)]
pub struct Advice {
    run: Arc<Mutex<Option<PathBuf>>>,
    ranks: usize,
}

impl Advice {
    pub fn new(run: Option<&Path>, ranks: usize) -> Advice {
        Advice { run: Arc::new(Mutex::new(run.map(Path::to_path_buf))), ranks }
    }

    fn about(&self, run: &Path) {
        *self.run.lock().unwrap_or_else(PoisonError::into_inner) = Some(run.to_path_buf());
    }

    /// Says what was saved, and how to go on.
    pub fn words(&self) -> Option<String> {
        let run = self.run.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        if !is_run(&run) {
            return None;
        }
        let newest = match checkpoint::newest_finished(&checkpoints_dir(&run)) {
            Some(step) => format!("the newest whole checkpoint is step {step}"),
            None => "there is no checkpoint yet".into(),
        };
        Some(format!("{newest}; continue with: {}", resume_command(&Run::follow(&run), self.ranks)))
    }
}

/// The command that continues a run with as many ranks.
pub fn resume_command(run: &Run, ranks: usize) -> String {
    match ranks {
        1 => run.resume_command(),
        ranks => format!("{} --ranks {ranks}", run.resume_command()),
    }
}

/// Refuses what several ranks cannot do yet. Gives the device that each computes on.
pub fn check(config: &Config, ranks: usize) -> Result<Device, Failure> {
    if ranks == 1 {
        return Device::open(config.switches.compute.backend);
    }
    let refused = |sentence: &str| Err(Failure::User(UserError(sentence.into())));
    if config.train.folds.is_some() && config.train.fold.is_none() {
        return refused(
            "folds are trained one after another by one process so far: leave the ranks out, or give train.fold",
        );
    }
    let is_stream = |paths: &flatout_train::config::Paths| paths.0.iter().any(|path| path == "-");
    if config.data.path.as_ref().is_some_and(is_stream) {
        return refused(
            "standard input cannot be read by several ranks: write the data to a file, and name it in data.path",
        );
    }
    let device = match config.switches.compute.backend {
        Backend::Cuda => None,
        backend => Some(Device::open(backend)?),
    };
    match device {
        Some(device @ Device::Cpu { .. }) => Ok(device),
        _ => refused(
            "several ranks compute on CPUs so far: give backend=cpu, or train on one GPU without ranks",
        ),
    }
}

/// Starts copies of this process and waits for them, where their plans can be made.
pub fn look_after(
    copies: Copies,
    run: Option<&Path>,
    config: &Config,
    stop: &StopFlag,
    screen: &Screen,
) -> Result<ExitCode, Failure> {
    let ranks = copies.here * copies.nodes;
    let target = check(config, ranks)?.target(&config.switches);
    compile::compile(config, &Target { ranks, ..target })?;
    // From here on signals are the ranks' to answer.
    stop.begin_steps();
    let advice = Advice::new(run, ranks);
    launch::look_after(copies, screen, || advice.words(), &|run| advice.about(Path::new(run)))
}

/// The copies to start, or the place that this process has among the ranks that were started. One rank is this process.
pub fn part(args: &launch::Ranks) -> Result<Part, Failure> {
    Ok(match launch::start(args)? {
        Start::Copies(copies) if copies.here * copies.nodes > 1 => Part::Parent(copies),
        Start::Rank(place) if place.ranks > 1 => Part::Rank(place),
        Start::Copies(_) | Start::Rank(_) => Part::Alone,
    })
}

pub enum Part {
    Parent(Copies),
    Rank(Place),
    Alone,
}

impl Part {
    /// How many ranks there are, where this process is one.
    pub fn ranks(&self) -> usize {
        match self {
            Part::Rank(place) => place.ranks,
            Part::Parent(_) | Part::Alone => 1,
        }
    }
}

/// Joins the other ranks; `None` where another process says why that failed.
pub fn join(
    part: &Part,
    args: &launch::Ranks,
    folder: Option<&Path>,
    starting: &Starting,
    screen: &Screen,
    advice: &Advice,
) -> Result<Option<Ranks>, Failure> {
    let Part::Rank(place) = part else { return Ok(Some(Ranks::alone())) };
    starting.is_rank(place.rank);
    let advice = advice.clone();
    let stops = (starting.leave_with_others(), starting.stop_others());
    match launch::join(place, args, folder, screen, move || advice.words(), stops)? {
        Begun::Ended(_) => Ok(None),
        Begun::Rank(world) => Ranks::connect(world).map(Some),
    }
}

/// The screen of a rank: rank 0 alone shows anything.
pub fn screen(ranks: &Ranks, screen: &Screen) -> Screen {
    match ranks.is_first() {
        true => *screen,
        false => Screen { json: false, quiet: true, live: false, ..*screen },
    }
}

/// Rank 0's settings on every rank.
pub fn settings(ranks: &Ranks, own: Config) -> Result<Config, Failure> {
    if !ranks.are_many() {
        return Ok(own);
    }
    let text = ranks.of_first(own.to_toml())?;
    Ok(if ranks.is_first() { own } else { Config::parse(&text, "the settings of rank 0")? })
}

/// Enters a run on every rank: rank 0 as `make` says, the others behind it. The second is whether it is a new one.
pub fn enter(
    ranks: &Ranks,
    starting: &Starting,
    make: impl FnOnce() -> Result<Entered, UserError>,
    advice: &Advice,
) -> Result<(Arc<Run>, bool), Failure> {
    let own = match ranks.is_first() {
        true => Some(starting.enter(make)?),
        false => None,
    };
    let told = own.as_ref().map(|(run, is_fresh)| (run.dir().to_path_buf(), *is_fresh));
    let (dir, is_fresh) = ranks.of_first(told)?.expect("rank 0 has a run");
    advice.about(&dir);
    ranks.tell_parent(&dir.to_string_lossy());
    let run = own.map_or_else(|| Arc::new(Run::follow(&dir)), |(run, _)| run);
    if !ranks.is_first() {
        // Rank 0 has written its number there.
        ranks.sees(&run.lock_path(), &ranks.first_process().to_string())?;
    }
    let met = ranks.meet();
    if met.is_err() {
        run.discard();
    }
    met.map(|()| (run, is_fresh))
}

/// The exit code of a rank as its part ended. A failure is rank 0's to say, whose code counts on its own node.
pub fn end(ranks: Ranks, result: Result<ExitCode, Failure>) -> Result<ExitCode, Failure> {
    let refused = if ranks.is_on_first_node() { ExitCode::SUCCESS } else { ExitCode::from(2) };
    Ok(ranks.conclude(result)?.unwrap_or(refused))
}
