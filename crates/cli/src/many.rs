//! `train` and `resume` on several ranks: refuses what is not supported, enters the run on all ranks, and advises after a failure.

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

/// The advice at the end of a failure's sentence: the newest checkpoint of the run, once the run is known, and how to continue.
#[derive(Clone, Default)]
pub struct Advice {
    run: Arc<Mutex<Option<PathBuf>>>,
    /// The flags that start as many ranks again; none for a single rank.
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

    /// The advice as the end of a sentence: what was saved, and how to continue.
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

/// The backend that config and flags request: `--gpus` needs GPUs.
fn backend(config: &Config, args: &launch::Ranks) -> Result<Backend, UserError> {
    match (config.switches.compute.backend, args.gpus) {
        (Backend::Cpu, Some(_)) => Err(UserError(
            "--gpus and `backend=cpu` contradict each other: give --ranks, or leave backend=cpu out".into(),
        )),
        (_, Some(_)) if !device::has_gpu() => Err(UserError(format!(
            "--gpus needs GPUs, and {}: give --ranks to train on the CPU",
            kernels::gpu().sentence
        ))),
        (_, Some(_)) => Ok(Backend::Cuda),
        (backend, None) => Ok(backend),
    }
}

/// Refuses what several ranks cannot do.
fn check(config: &Config, ranks: usize) -> Result<(), UserError> {
    let refused = |sentence: &str| Err(UserError(sentence.into()));
    if ranks > 1 && config.train.folds.is_some() && config.train.fold.is_none() {
        return refused(
            "folds are trained one after another by one process: leave the ranks out, or give train.fold",
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

/// Opens the device of this rank; an error if the ranks cannot do what the config requests.
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
        // Neither a table nor NVML knows the link of ranks that share a GPU.
        let link = device::link_here(ranks.locals()).filter(|_| !args.share_gpu);
        let gpu = device.target(&config.switches).name;
        let named = link.as_ref().or(links::of_gpu(&gpu)).filter(|_| !args.share_gpu);
        let timed = named.map(device::exchanges_here).unwrap_or_default();
        ranks.agree_on_link(link, timed)?;
    }
    Ok(device)
}

/// Starts copies of this process and waits for them. Before that it compiles their plans as a check, or on GPUs only counts the
/// devices, because the ranks open them.
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
    // From here on the ranks handle signals.
    stop.begin_steps();
    let advice = Advice::new(run, args, ranks);
    let command = |rank: usize| {
        let mut command = own_command()?;
        if args.share_gpu {
            command.envs(shared_gpu_variables(rank));
        }
        Ok(command)
    };
    launch::look_after(copies, &command, screen, || advice.words(), &|run| advice.about(Path::new(run)))
}

/// Refuses more ranks than there are GPUs, and GPUs without NCCL.
pub fn check_gpus(copies: &Copies, args: &launch::Ranks) -> Result<(), Failure> {
    let visible = match device::visible_gpus() {
        // Opening one gives the error that says why there is none.
        0 => return Device::open(Backend::Cuda).map(drop),
        visible => visible,
    };
    if copies.here > visible && !args.share_gpu {
        let are = if visible == 1 { "1 GPU is".to_string() } else { format!("{visible} GPUs are") };
        let or = if args.gpus.is_some() { "" } else { ", or backend=cpu to train on CPUs" };
        return Err(Failure::User(UserError(format!(
            "{} ranks need a GPU each, and {are} visible: give --gpus {visible}, or --share-gpu to test with more ranks than \
             GPUs{or}",
            copies.here
        ))));
    }
    Ok(device::check_nccl()?)
}

/// Environment variables that make NCCL treat ranks that share a GPU as ranks of different hosts; it refuses to run them otherwise.
/// Variables that are set already are left out.
pub fn shared_gpu_variables(rank: usize) -> Vec<(&'static str, String)> {
    let variables = [("NCCL_HOSTID", format!("rank-{rank}")), ("NCCL_SOCKET_IFNAME", "lo".into())];
    variables.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect()
}

/// The role of this process: to start copies, to be one of several ranks that were started, or to run alone.
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
    /// The number of ranks if this process is one of several, else 1.
    pub fn ranks(&self) -> usize {
        match self {
            ProcessRole::Rank(place) => place.ranks,
            ProcessRole::Parent(_) | ProcessRole::Alone => 1,
        }
    }
}

/// Joins the other ranks; `None` if that failed and another process reports why.
pub fn join(
    role: &ProcessRole,
    args: &launch::Ranks,
    folder: Option<&Path>,
    starting: &Starting,
    screen: &Screen,
    advice: &Advice,
) -> Result<Option<Ranks>, Failure> {
    let ProcessRole::Rank(place) = role else { return Ok(Some(Ranks::alone())) };
    starting.set_rank(place.rank);
    let advice = advice.clone();
    let stops = (starting.leave_with_others(), starting.stop_others());
    match launch::join(place, args, folder, screen, move || advice.words(), stops)? {
        Begun::Ended(_) => Ok(None),
        Begun::Rank(world) => Ranks::connect(world).map(Some),
    }
}

/// The screen of a rank: only rank 0 prints.
pub fn screen(ranks: &Ranks, screen: &Screen) -> Screen {
    match ranks.is_first() {
        true => *screen,
        false => Screen { json: false, quiet: true, live: false, ..*screen },
    }
}

/// The config of rank 0, on every rank.
pub fn settings(ranks: &Ranks, own: Config) -> Result<Config, Failure> {
    if !ranks.are_many() {
        return Ok(own);
    }
    let text = ranks.of_first(own.to_toml())?;
    Ok(if ranks.is_first() { own } else { Config::parse(&text, "the settings of rank 0")? })
}

/// Enters a run on every rank: rank 0 with `make`, then the others. The second value says whether the run is new.
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
    let entered = own.as_ref().map(|(run, is_fresh)| (run.dir().to_path_buf(), *is_fresh));
    let (dir, is_fresh) = ranks.of_first(entered)?.expect("rank 0 has a run");
    advice.about(&dir);
    ranks.tell_parent(&dir.to_string_lossy());
    let run = own.map_or_else(|| Arc::new(Run::follow(&dir)), |(run, _)| run);
    if !ranks.is_first() {
        // Rank 0 has written its process number there.
        ranks.sees(&run.lock_path(), &ranks.first_process().to_string())?;
    }
    let met = ranks.meet();
    if met.is_err() {
        run.discard();
    }
    met.map(|()| (run, is_fresh))
}

/// The exit code of a rank. Rank 0 reports a failure, and on its node its exit code is the one that counts.
pub fn end(ranks: Ranks, result: Result<ExitCode, Failure>) -> Result<ExitCode, Failure> {
    let refused = if ranks.is_on_first_node() { ExitCode::SUCCESS } else { ExitCode::from(2) };
    Ok(ranks.conclude(result)?.unwrap_or(refused))
}
