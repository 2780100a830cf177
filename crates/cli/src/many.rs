//! `train` and `resume` on several ranks: what cannot be shared yet, how the ranks enter one run, and what a failure advises.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::device::Device;
use flatout_train::ranks::Ranks;
use flatout_train::resolve::compile;
use flatout_train::run::{Entered, Run, checkpoint, is_run};
use flatout_train::switches::Backend;
use flatout_world::{Copies, Place};

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

    /// What was saved, and how to go on.
    pub fn words(&self) -> Option<String> {
        let run = self.run.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        if !is_run(&run) {
            return None;
        }
        let found = checkpoint::latest(&run.join("checkpoints")).ok()?;
        let newest = match found.whole {
            Some(whole) => format!("the newest whole checkpoint is step {}", whole.step),
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

/// Refuses what several ranks cannot do yet, and settings that their plans cannot be made of.
pub fn check(config: &Config, ranks: usize) -> Result<(), Failure> {
    if ranks == 1 {
        return Ok(());
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
    let Some(device @ Device::Cpu { .. }) = device else {
        return refused(
            "several ranks compute on CPUs so far: give backend=cpu, or train on one GPU without ranks",
        );
    };
    let target = flatout_ir::Target { ranks, ..device.target(&config.switches) };
    compile::compile(config, &target).map(drop)
}

/// How many ranks a parent starts on all nodes.
pub fn count(copies: &Copies) -> usize {
    copies.here * copies.nodes
}

/// Joins the other ranks; `None` where another process says why that failed.
pub fn join(
    place: &Place,
    args: &launch::Ranks,
    folder: Option<&Path>,
    screen: &Screen,
    advice: &Advice,
) -> Result<Option<Ranks>, Failure> {
    if place.ranks == 1 {
        return Ok(Some(Ranks::alone()));
    }
    let advice = advice.clone();
    match launch::join(place, args, folder, screen, move || advice.words())? {
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
