//! `train` and `resume` on several ranks: what cannot be shared yet, how the ranks enter one run, and what a failure advises.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::device::{self, Device, kernels, links};
use flatout_train::ranks::{Ranks, target_among};
use flatout_train::resolve::compile;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Run, checkpoint, checkpoints_dir, is_run};
use flatout_train::switches::compute::Wire;
use flatout_train::switches::{Backend, Toggle};
use flatout_world::launch::own_command;
use flatout_world::{Copies, RankPlacement, Start};

use crate::launch::{self, Begun};
use crate::screen::Screen;
use crate::start::Starting;

/// The run that a failure is to be said of, once it is known.
#[derive(Clone, Default)]
pub struct Advice {
    run: Arc<Mutex<Option<PathBuf>>>,
    /// That starts as many ranks again; none where there is one.
    flag: Option<String>,
}

impl Advice {
    pub fn new(run: Option<&Path>, args: &launch::Ranks, ranks: usize) -> Advice {
        let flag = (ranks > 1).then(|| args.flag(ranks));
        Advice { run: Arc::new(Mutex::new(run.map(Path::to_path_buf))), flag }
    }

    /// The command that continues a run with as many ranks.
    pub fn resume_command(&self, run: &Run) -> String {
        match &self.flag {
            None => run.resume_command(),
            Some(flag) => format!("{} {flag}", run.resume_command()),
        }
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
        Some(format!("{newest}; continue with: {}", self.resume_command(&Run::follow(&run))))
    }
}

/// The backend that config and flags ask for: `--gpus` wants GPUs.
fn backend(config: &Config, args: &launch::Ranks) -> Result<Backend, UserError> {
    match (config.switches.compute.backend, args.gpus) {
        (Backend::Cpu, Some(_)) => Err(UserError(
            "--gpus and `backend=cpu` contradict each other: give --ranks, or leave backend=cpu out".into(),
        )),
        (_, Some(_)) if !device::has_gpu() => Err(UserError(format!(
            "--gpus wants GPUs, and {}: give --ranks to train on the CPU",
            kernels::gpu().sentence
        ))),
        (_, Some(_)) => Ok(Backend::Cuda),
        (backend, None) => Ok(backend),
    }
}

/// Refuses what several ranks cannot do yet.
fn check(config: &Config, ranks: usize) -> Result<(), UserError> {
    let refused = |sentence: &str| Err(UserError(sentence.into()));
    if ranks > 1 && config.train.folds.is_some() && config.train.fold.is_none() {
        return refused(
            "folds are trained one after another by one process so far: leave the ranks out, or give train.fold",
        );
    }
    let is_stream = |paths: &flatout_train::config::Paths| paths.0.iter().any(|path| path == "-");
    if ranks > 1 && config.data.path.as_ref().is_some_and(is_stream) {
        return refused(
            "standard input cannot be read by several ranks: write the data to a file, and name it in data.path",
        );
    }
    Ok(())
}

/// The device that this rank computes on, where the ranks can do what the config asks for.
pub fn device(config: &Config, args: &launch::Ranks, ranks: &Ranks) -> Result<Device, Failure> {
    check(config, ranks.count())?;
    let device = Device::open_local(backend(config, args)?, ranks.local_rank(), args.share_gpu)?;
    let gpu = match &device {
        Device::Cuda(gpu) => Some(gpu.pci_address().map_err(|why| Failure::Environment(why.to_string()))?),
        Device::Cpu { .. } => None,
    };
    if gpu.is_some() && (ranks.are_many() || config.switches.compute.wire == Wire::Nccl) {
        device::check_nccl()?;
        if config.switches.compute.wire_window == Toggle::On {
            device::check_windows()?;
        }
    }
    ranks.check_apart(gpu, args.share_gpu)?;
    ranks.agree_on_memory(device.target(&config.switches).memory_bytes)?;
    if ranks.are_many() && matches!(device, Device::Cuda(_)) {
        // Ranks that share a GPU are linked by nothing that a table or NVML knows.
        let link = device::link_here(ranks.locals()).filter(|_| !args.share_gpu);
        let gpu = device.target(&config.switches).name;
        let named = link.as_ref().or(links::of_gpu(&gpu)).filter(|_| !args.share_gpu);
        let timed = named.map(device::exchanges_here).unwrap_or_default();
        ranks.agree_on_link(link, timed)?;
    }
    Ok(device)
}

/// Starts copies of this process and waits for them, where their plans can be made. GPUs are the ranks' to open: here they are
/// counted.
pub fn look_after(
    copies: Copies,
    args: &launch::Ranks,
    run: Option<&Path>,
    config: &Config,
    stop: &StopFlag,
    screen: &Screen,
) -> Result<ExitCode, Failure> {
    let ranks = copies.here * copies.nodes;
    check(config, ranks)?;
    let on_gpus = match backend(config, args)? {
        Backend::Cpu => false,
        Backend::Cuda => true,
        Backend::Auto => device::has_gpu(),
    };
    match on_gpus {
        true => check_gpus(&copies, args)?,
        false => {
            let target = Device::cpu().target(&config.switches);
            compile::compile(config, &target_among(ranks, target))?;
        }
    }
    // From here on signals are the ranks' to answer.
    stop.begin_steps();
    let advice = Advice::new(run, args, ranks);
    let command = |rank: usize| {
        let mut command = own_command()?;
        if args.share_gpu {
            command.envs(apart(rank));
        }
        Ok(command)
    };
    launch::look_after(copies, &command, screen, || advice.words(), &|run| advice.about(Path::new(run)))
}

/// Refuses more ranks than there are GPUs, and GPUs without NCCL.
pub fn check_gpus(copies: &Copies, args: &launch::Ranks) -> Result<(), Failure> {
    let visible = match device::visible_gpus() {
        // The sentence about why there is none.
        0 => return Device::open(Backend::Cuda).map(drop),
        visible => visible,
    };
    if copies.here > visible && !args.share_gpu {
        let are = if visible == 1 { "1 GPU is".to_string() } else { format!("{visible} GPUs are") };
        let or = if args.gpus.is_some() { "" } else { ", or backend=cpu to train on CPUs" };
        return Err(Failure::User(UserError(format!(
            "{} ranks want a GPU each, and {are} visible: give --gpus {visible}, or --share-gpu to test with more ranks than \
             GPUs{or}",
            copies.here
        ))));
    }
    Ok(device::check_nccl()?)
}

/// Variables by which NCCL takes ranks that share a GPU for ranks of different hosts, which it refuses otherwise; those that
/// somebody has set stay.
pub fn apart(rank: usize) -> Vec<(&'static str, String)> {
    let wanted = [("NCCL_HOSTID", format!("rank-{rank}")), ("NCCL_SOCKET_IFNAME", "lo".into())];
    wanted.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect()
}

/// The copies to start, or the place that this process has among the ranks that were started. One rank is this process.
pub fn role(args: &launch::Ranks) -> Result<ProcessRole, Failure> {
    Ok(match launch::start(args)? {
        Start::Copies(copies) if copies.here * copies.nodes > 1 => ProcessRole::Parent(copies),
        Start::Rank(place) if place.ranks > 1 => ProcessRole::Rank(place),
        Start::Copies(_) | Start::Rank(_) => ProcessRole::Alone,
    })
}

pub enum ProcessRole {
    Parent(Copies),
    Rank(RankPlacement),
    Alone,
}

impl ProcessRole {
    /// How many ranks there are, where this process is one.
    pub fn ranks(&self) -> usize {
        match self {
            ProcessRole::Rank(place) => place.ranks,
            ProcessRole::Parent(_) | ProcessRole::Alone => 1,
        }
    }
}

/// Joins the other ranks; `None` where another process says why that failed.
pub fn join(
    role: &ProcessRole,
    args: &launch::Ranks,
    folder: Option<&Path>,
    starting: &Starting,
    screen: &Screen,
    advice: &Advice,
) -> Result<Option<Ranks>, Failure> {
    let ProcessRole::Rank(place) = role else { return Ok(Some(Ranks::alone())) };
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
