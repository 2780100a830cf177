//! Runs one command as several ranks: starts copies of the process, or joins ranks that a launcher started.

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
    /// Start this many processes, the ranks of the run; with --nodes, this many on every node.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Start this many processes with a GPU each: rank r of a node uses the r-th visible GPU.
    #[arg(long, value_name = "N")]
    pub gpus: Option<usize>,
    /// Let ranks share a GPU, to test that a run is correct; it is never faster.
    #[arg(long)]
    pub share_gpu: bool,
    /// The number of nodes; the command is started on each of them, with its own --node.
    #[arg(long, value_name = "M")]
    nodes: Option<usize>,
    /// With --nodes, the number of this node, from 0.
    #[arg(long, value_name = "I")]
    node: Option<usize>,
    /// With --nodes, the host and port on node 0 that rank 0 listens on.
    #[arg(long, value_name = "HOST:PORT")]
    address: Option<String>,
    /// How long the ranks wait for each other at the start.
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = time_limit::parse)]
    join_timeout: Duration,
}

/// The ranks of a command that has no run, and the folder in which they find one another.
#[derive(Args)]
pub struct Meeting {
    #[command(flatten)]
    pub ranks: Ranks,
    /// A folder that all ranks share, in which they find one another where no address of rank 0 is given. With `ablate --to-loss`,
    /// the folder of its runs; the same command given again continues them.
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
}

impl Ranks {
    /// Ranks of one node, with the default time to join.
    pub fn on_one_node(ranks: Option<usize>, gpus: Option<usize>, share_gpu: bool) -> Ranks {
        let join_timeout = Timing::default().join;
        Ranks { ranks, gpus, share_gpu, nodes: None, node: None, address: None, join_timeout }
    }

    /// Whether --ranks or --gpus is given.
    pub fn are_given(&self) -> bool {
        self.ranks.is_some() || self.gpus.is_some()
    }

    /// The flags that start this many ranks again.
    pub fn flag(&self, count: usize) -> String {
        let flag = if self.gpus.is_some() { "--gpus" } else { "--ranks" };
        format!("{flag} {count}{}", if self.share_gpu { " --share-gpu" } else { "" })
    }

    /// The name of the rank's GPU in messages, where the flags give it one of its own.
    fn named_gpu(&self, place: &RankPlacement) -> Option<String> {
        let (local, _) = place.local.filter(|_| self.gpus.is_some() && !self.share_gpu)?;
        Some(format!("GPU {local}"))
    }
}

/// The state of this process after the start.
pub enum Begun {
    /// The parent of ranks that have all ended, or a rank whose failure another process reports.
    Ended(ExitCode),
    Rank(World),
}

/// Starts the ranks that were requested, or joins as one of them. In `folder`, the run's, ranks find one another where no address of
/// rank 0 is given. `advice` ends the sentence of a later failure: what was saved, and how to continue.
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
    // Errors name the flag that was given.
    let with_given_flag =
        |sentence: String| if gpus.is_some() { sentence.replace("--ranks", "--gpus") } else { sentence };
    start.map_err(|sentence| Failure::User(UserError(with_given_flag(sentence))))
}

/// Refuses to run as one of several ranks that a launcher started, for a command that uses one process.
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

/// The error for ranks of a command that uses one process; `what` is the flag or the processes to leave out.
pub fn one_process(command: &str, what: &str) -> String {
    format!("`{command}` trains one run after another in one process: leave {what} out")
}

/// Starts ranks and waits for them. `command` makes the command of a rank; `about` receives the run's directory from rank 0.
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

/// Joins the other ranks. `stop` ends the process, for the reason it is given, if a rank is asked to stop before the run begins;
/// `take_stopper` receives the handle with which this rank stops the others.
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

/// Appends the advice to a failure's sentence.
fn advised(sentence: &str, advice: Option<String>) -> String {
    match advice {
        Some(advice) => format!("{sentence}; {advice}"),
        None => sentence.into(),
    }
}
