//! Several processes of one command: starts copies of it, or joins those that someone else started.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::run::signal;
use flatout_world::launch::{GRACE, own_command};
use flatout_world::place::SECRET;
use flatout_world::{Copies, Flags, Joining, Launch, RankPlacement, Start, Stopper, Timing, World};

use crate::screen::{Screen, complain};
use crate::time_limit;

#[derive(Args)]
pub struct Ranks {
    /// Start this number of processes, the ranks of the run; with --nodes, on every node.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Start this number of processes with a GPU each: rank r of a node takes the r-th visible GPU.
    #[arg(long, value_name = "N")]
    pub gpus: Option<usize>,
    /// Let ranks share a GPU: to see that a run is right, never for speed.
    #[arg(long)]
    pub share_gpu: bool,
    /// The number of nodes, on each of which this command is given with its own --node.
    #[arg(long, value_name = "M")]
    nodes: Option<usize>,
    /// With --nodes: the number of this node, from 0.
    #[arg(long, value_name = "I")]
    node: Option<usize>,
    /// With --nodes: the host and port of node 0 at which rank 0 listens.
    #[arg(long, value_name = "HOST:PORT")]
    address: Option<String>,
    /// How long the ranks wait for one another at the start.
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = time_limit::parse)]
    join_timeout: Duration,
}

/// Ranks that have no run's folder to meet by.
#[derive(Args)]
pub struct Meeting {
    #[command(flatten)]
    pub ranks: Ranks,
    /// A folder that all ranks share, by which they meet where nothing names the address of rank 0; of `ablate --to-loss` the folder of its
    /// runs, in which the same command goes on.
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
}

impl Ranks {
    /// Ranks of one node, which wait for one another as long as they do where nothing else is asked for.
    pub fn on_one_node(ranks: Option<usize>, gpus: Option<usize>, share_gpu: bool) -> Ranks {
        let join_timeout = Timing::default().join;
        Ranks { ranks, gpus, share_gpu, nodes: None, node: None, address: None, join_timeout }
    }

    /// Whether the command names how many ranks there are.
    pub fn are_given(&self) -> bool {
        self.ranks.is_some() || self.gpus.is_some()
    }

    /// The flag that starts as many ranks again.
    pub fn flag(&self, count: usize) -> String {
        let flag = if self.gpus.is_some() { "--gpus" } else { "--ranks" };
        format!("{flag} {count}{}", if self.share_gpu { " --share-gpu" } else { "" })
    }

    /// The GPU of a rank in sentences, where flags say that it has one of its own.
    fn named_gpu(&self, place: &RankPlacement) -> Option<String> {
        let (local, _) = place.local.filter(|_| self.gpus.is_some() && !self.share_gpu)?;
        Some(format!("GPU {local}"))
    }
}

/// The part that this process has.
pub enum Begun {
    /// The parent of ranks that have all ended, or a rank whose failure another process says.
    Ended(ExitCode),
    Rank(World),
}

/// Starts the ranks that are asked for, or joins as one. `folder` is the run's, by which ranks meet where nothing names rank 0's address.
/// `advice` ends the sentence of a later failure: what was saved, and how to go on.
pub fn begin(
    ranks: &Ranks,
    folder: Option<&Path>,
    screen: &Screen,
    advice: impl Fn() -> Option<String> + Send + Sync + 'static,
) -> Result<Begun, Failure> {
    match start(ranks)? {
        Start::Copies(copies) => {
            look_after(copies, &|_| own_command(), screen, advice, &|_| {}).map(Begun::Ended)
        }
        Start::Rank(place) => join(&place, ranks, folder, screen, advice, (|_| signal::leave(3), drop)),
    }
}

/// Whether this process starts ranks or is one.
pub fn start(ranks: &Ranks) -> Result<Start, Failure> {
    let Ranks { ranks, gpus, nodes, node, address, .. } = ranks;
    if gpus.is_some() && ranks.is_some() {
        return Err(Failure::User(UserError(
            "--gpus and --ranks both say how many processes to start: give one of them".into(),
        )));
    }
    let flags = Flags { ranks: gpus.or(*ranks), nodes: *nodes, node: *node, address: address.clone() };
    let env = |name: &str| std::env::var(name).ok();
    let start = flatout_world::place(&flags, &env, std::os::unix::process::parent_id());
    // The flag that was given.
    let said =
        |sentence: String| if gpus.is_some() { sentence.replace("--ranks", "--gpus") } else { sentence };
    start.map_err(|sentence| Failure::User(UserError(said(sentence))))
}

/// Refuses to be one of several ranks that someone started, for a command that one process runs.
pub fn check_alone(command: &str) -> Result<(), UserError> {
    let env = |name: &str| std::env::var(name).ok();
    match flatout_world::place(&Flags::default(), &env, std::os::unix::process::parent_id()) {
        Ok(Start::Rank(place)) if place.ranks > 1 => Err(UserError(one_process(
            command,
            &format!("{} of the {} processes", place.ranks - 1, place.ranks),
        ))),
        _ => Ok(()),
    }
}

/// The sentence about ranks of a command that one process runs.
pub fn one_process(command: &str, what: &str) -> String {
    format!("`{command}` trains one run after another in one process so far: leave {what} out")
}

/// Starts ranks and waits for them. `command` is what a rank runs; `about` takes what rank 0 tells of the run.
pub fn look_after(
    copies: Copies,
    command: &dyn Fn(usize) -> std::io::Result<Command>,
    screen: &Screen,
    advice: impl Fn() -> Option<String>,
    about: &dyn Fn(&str),
) -> Result<ExitCode, Failure> {
    let say = |sentence: &str| complain(advised(sentence, advice()));
    let (shows_all, grace) = (screen.verbose, GRACE);
    let launch = Launch { copies, command, shows_all, grace, say: &say, about };
    flatout_world::launch(&launch).map(ExitCode::from).map_err(Failure::Environment)
}

/// Joins the other ranks. `stop` ends the process where a rank was asked to stop before the run began, with the reason;
/// `take_stopper` takes the handle by which this rank asks the others to.
pub fn join(
    place: &RankPlacement,
    ranks: &Ranks,
    folder: Option<&Path>,
    screen: &Screen,
    advice: impl Fn() -> Option<String> + Send + Sync + 'static,
    (stop, take_stopper): (impl Fn(&str) + Send + Sync + 'static, impl Fn(Stopper) + Send + Sync + 'static),
) -> Result<Begun, Failure> {
    let build = flatout_world::program::hash().map_err(Failure::io("the program's own file"))?;
    let screen = *screen;
    let joining = Joining {
        version: format!("{} (build {build:016x})", env!("CARGO_PKG_VERSION")),
        secret: std::env::var(SECRET).ok(),
        device: ranks.named_gpu(place),
        folder,
        timing: Timing { join: ranks.join_timeout, ..Timing::default() },
        note: Arc::new(move |line| screen.note(line)),
        leave: Arc::new(move |failure| {
            if failure.is_mine_to_say {
                complain(advised(&failure.sentence, advice()));
            }
            signal::leave(1)
        }),
        stop: Arc::new(stop),
        take_stopper: Arc::new(take_stopper),
    };
    match World::join(place, joining) {
        Ok(world) => Ok(Begun::Rank(world)),
        Err(failure) if failure.is_mine_to_say => Err(Failure::Environment(failure.sentence)),
        Err(_) => Ok(Begun::Ended(ExitCode::FAILURE)),
    }
}

/// A sentence about a failure, with what to do about it.
fn advised(sentence: &str, advice: Option<String>) -> String {
    match advice {
        Some(advice) => format!("{sentence}; {advice}"),
        None => sentence.into(),
    }
}
