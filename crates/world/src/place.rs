//! The placement of this process among the ranks of its run, from flags and environment.
//!
//! Nothing here opens or reads files, so that recorded environments of every launcher can be tested. The first row of
//! `STARTERS` whose variables are set wins; flags together with a launcher's variables are refused, because they contradict
//! each other.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64;

use crate::hosts;

/// Number of ports after the first that rank 0 tries: torchrun's agent occupies `MASTER_PORT` itself.
const PORTS: u16 = 16;
/// torchrun's default port.
const MASTER_PORT: u16 = 29500;
/// The first port for SLURM steps, and their number.
const STEP_PORTS: u16 = 20000;

/// Variables through which a parent process tells a copy of itself its rank. `FLATOUT_PARENT` is the parent's process id: a
/// process that merely inherited the variables has a different parent.
pub const RANK: &str = "FLATOUT_RANK";
pub const RANKS: &str = "FLATOUT_RANKS";
pub const LOCAL_RANK: &str = "FLATOUT_LOCAL_RANK";
pub const LOCALS: &str = "FLATOUT_LOCALS";
pub const NODE: &str = "FLATOUT_NODE";
pub const PARENT: &str = "FLATOUT_PARENT";
/// A secret that all ranks of a run share, set by the user or the parent.
pub const SECRET: &str = "FLATOUT_SECRET";

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Flags {
    /// `--ranks`: processes on this node.
    pub ranks: Option<usize>,
    /// `--nodes`.
    pub nodes: Option<usize>,
    /// `--node`: this node's number.
    pub node: Option<usize>,
    /// `--address`: host and port at which rank 0 listens.
    pub address: Option<String>,
}

/// The role of this process.
#[derive(Debug, Clone, PartialEq)]
pub enum Start {
    /// It starts copies of itself and supervises them.
    Copies(Copies),
    Rank(RankPlacement),
}

/// The ranks that a parent process starts on its node.
#[derive(Debug, Clone, PartialEq)]
pub struct Copies {
    /// Number of ranks on this node, and on every other.
    pub here: usize,
    pub node: usize,
    pub nodes: usize,
}

/// The placement of a rank before it has joined.
#[derive(Debug, Clone, PartialEq)]
pub struct RankPlacement {
    pub rank: usize,
    pub ranks: usize,
    /// Its number among the ranks of this host, and their number, if the launcher provides them.
    pub local: Option<(usize, usize)>,
    /// Number of its node, if the launcher provides one; otherwise nodes are distinguished by host.
    pub node: Option<usize>,
    /// Whether standard input is the channel to a parent process that started this one.
    pub has_parent: bool,
    pub meeting: Meeting,
}

/// The address of rank 0, and how other ranks find it.
#[derive(Debug, Clone, PartialEq)]
pub enum Meeting {
    /// There is one rank, and no connection is opened.
    Alone,
    /// A free port of loopback, which the parent passes on.
    Parent,
    /// The first free one of these ports. The label distinguishes runs on one host.
    Address { host: String, ports: Range<u16>, label: String },
    /// A free port, which a file in the run's folder names.
    Folder,
}

impl RankPlacement {
    pub fn alone() -> RankPlacement {
        let meeting = Meeting::Alone;
        RankPlacement { rank: 0, ranks: 1, local: Some((0, 1)), node: Some(0), has_parent: false, meeting }
    }
}

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A launcher, and the function that reads a placement from its variables; `None` if they are not set.
struct Starter {
    name: &'static str,
    size: &'static str,
    place: fn(Env) -> Result<Option<RankPlacement>, String>,
}

/// From the innermost to the outermost: `srun` may start `torchrun` or `mpirun`, which start ranks.
const STARTERS: [Starter; 4] = [
    Starter { name: "torchrun", size: "WORLD_SIZE", place: torchrun },
    Starter { name: "Open MPI", size: "OMPI_COMM_WORLD_SIZE", place: open_mpi },
    Starter { name: "MPI", size: "PMI_SIZE", place: pmi },
    Starter { name: "SLURM", size: "SLURM_STEP_NUM_TASKS", place: slurm },
];

/// The role of this process. `parent` is the id of its parent process. The error is a sentence for the user.
pub fn place(flags: &Flags, env: Env, parent: u32) -> Result<Start, String> {
    if number(env, PARENT)? == Some(parent as usize) {
        return copy(flags, env).map(Start::Rank);
    }
    let mut found: Vec<(&Starter, RankPlacement)> = vec![];
    for starter in &STARTERS {
        if let Some(place) = (starter.place)(env)? {
            if place.rank >= place.ranks {
                let (rank, ranks) = (place.rank, place.ranks);
                return Err(format!(
                    "{} says that this is rank {rank} of {ranks}: ranks count from 0",
                    starter.name
                ));
            }
            found.push((starter, place));
        }
    }
    if let Some(copies) = copies(flags)? {
        let is_one_a_node = |place: &RankPlacement| place.ranks == copies.nodes;
        return match found.iter().find(|(_, place)| place.ranks > 1 && !is_one_a_node(place)) {
            None => Ok(Start::Copies(copies)),
            Some((starter, place)) => Err(format!(
                "--ranks starts processes, and {} has started {} already ({}): leave one of the two out",
                starter.name, place.ranks, starter.size
            )),
        };
    }
    // An outer launcher has at most as many ranks as one inside it; otherwise the variables of one are left over from
    // elsewhere.
    if let Some((first, place)) = found.first()
        && let Some((outer, other)) = found.iter().find(|(_, other)| other.ranks > place.ranks)
    {
        return Err(format!(
            "{}={} and {}={} contradict each other: unset the variables of the one that did not start this process",
            first.size, place.ranks, outer.size, other.ranks
        ));
    }
    // Equal placements come from one launcher: `srun --mpi=pmi2` also sets the variables of MPI, and SLURM's name the host of
    // rank 0.
    let first = found.first().map(|(_, place)| (place.rank, place.ranks));
    let is_same = |place: &RankPlacement| Some((place.rank, place.ranks)) == first;
    let known = found.iter().position(|(_, place)| is_same(place) && place.meeting != Meeting::Folder);
    Ok(Start::Rank(match found.into_iter().nth(known.unwrap_or(0)) {
        Some((_, place)) if place.ranks > 1 => place,
        _ => RankPlacement::alone(),
    }))
}

/// The copies that flags request, if any.
fn copies(flags: &Flags) -> Result<Option<Copies>, String> {
    let Flags { ranks, nodes, node, address } = flags;
    if let (None, Some(flag)) = (ranks, of_nodes(flags)) {
        return Err(format!("{flag} needs --ranks, the number of processes on every node"));
    }
    let Some(here) = *ranks else { return Ok(None) };
    if here == 0 {
        return Err("--ranks 0 starts nothing: give 1 or more".into());
    }
    let Some(nodes) = *nodes else {
        return match of_nodes(flags) {
            Some(flag) => Err(format!("{flag} needs --nodes, the number of nodes")),
            // One process on one node is a run without ranks.
            None if here == 1 => Ok(None),
            None => Ok(Some(Copies { here, node: 0, nodes: 1 })),
        };
    };
    let Some(node) = *node else {
        return Err(format!("--nodes {nodes} needs --node, the number of this node from 0"));
    };
    if node >= nodes {
        return Err(format!("--node {node} is not below --nodes {nodes}: nodes count from 0"));
    }
    match address {
        Some(address) => host_and_port(address).map(drop)?,
        None => {
            return Err(format!(
                "--nodes {nodes} needs --address HOST:PORT, at which rank 0 listens on node 0"
            ));
        }
    }
    Ok((here * nodes > 1).then_some(Copies { here, node, nodes }))
}

fn of_nodes(flags: &Flags) -> Option<&'static str> {
    let given = [
        (flags.nodes.is_some(), "--nodes"),
        (flags.node.is_some(), "--node"),
        (flags.address.is_some(), "--address"),
    ];
    given.into_iter().find(|(is_given, _)| *is_given).map(|(_, flag)| flag)
}

fn host_and_port(address: &str) -> Result<(String, u16), String> {
    let wrong = || format!("--address {address} is not HOST:PORT, as in gpu-a:29500 or [fd00::1]:29500");
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match port.parse() {
        Ok(port) if port > 0 && !host.is_empty() => Ok((host.into(), port)),
        _ => Err(wrong()),
    }
}

/// The placement of a copy that a parent started.
fn copy(flags: &Flags, env: Env) -> Result<RankPlacement, String> {
    let own = |name: &str| number(env, name)?.ok_or(format!("{PARENT} is set and {name} is not"));
    let meeting = match &flags.address {
        Some(address) => {
            let (host, port) = host_and_port(address)?;
            Meeting::Address { host, ports: port..port.saturating_add(1), label: String::new() }
        }
        None => Meeting::Parent,
    };
    Ok(RankPlacement {
        rank: own(RANK)?,
        ranks: own(RANKS)?,
        local: Some((own(LOCAL_RANK)?, own(LOCALS)?)),
        node: Some(own(NODE)?),
        has_parent: true,
        meeting,
    })
}

fn torchrun(env: Env) -> Result<Option<RankPlacement>, String> {
    let Some((rank, ranks)) = pair(env, "RANK", "WORLD_SIZE")? else { return Ok(None) };
    let meeting = match (ranks, master(env)?) {
        (1, _) => Meeting::Alone,
        (_, Some(meeting)) => meeting,
        (_, None) => {
            let sentence = "RANK and WORLD_SIZE are set and MASTER_ADDR is not: set it to the host of rank 0";
            return Err(sentence.into());
        }
    };
    let local = pair(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE")?;
    let node = number(env, "GROUP_RANK")?;
    Ok(Some(RankPlacement { rank, ranks, local, node, has_parent: false, meeting }))
}

fn open_mpi(env: Env) -> Result<Option<RankPlacement>, String> {
    let local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
    mpi(env, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), local)
}

fn pmi(env: Env) -> Result<Option<RankPlacement>, String> {
    mpi(env, ("PMI_RANK", "PMI_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
}

fn mpi(env: Env, world: (&str, &str), local: (&str, &str)) -> Result<Option<RankPlacement>, String> {
    let Some((rank, ranks)) = pair(env, world.0, world.1)? else { return Ok(None) };
    let meeting = if ranks == 1 { Meeting::Alone } else { master(env)?.unwrap_or(Meeting::Folder) };
    Ok(Some(RankPlacement {
        rank,
        ranks,
        local: pair(env, local.0, local.1)?,
        node: None,
        has_parent: false,
        meeting,
    }))
}

/// A task of a SLURM step. `SLURM_NTASKS` refers to the job rather than the step, and is also set in batch scripts that `srun`
/// did not start.
fn slurm(env: Env) -> Result<Option<RankPlacement>, String> {
    let Some(step) = env("SLURM_STEP_ID") else { return Ok(None) };
    let (Some(rank), Some(ranks)) = (number(env, "SLURM_PROCID")?, number(env, "SLURM_STEP_NUM_TASKS")?)
    else {
        return Ok(None);
    };
    let node = number(env, "SLURM_NODEID")?;
    let local = match (number(env, "SLURM_LOCALID")?, env("SLURM_STEP_TASKS_PER_NODE"), node) {
        (Some(local), Some(tasks), Some(node)) => tasks_of(&tasks, node)?.map(|locals| (local, locals)),
        _ => None,
    };
    let meeting = match ranks {
        1 => Meeting::Alone,
        _ => {
            let list = env("SLURM_STEP_NODELIST")
                .ok_or("SLURM_STEP_ID is set and SLURM_STEP_NODELIST is not: start the ranks with srun")?;
            let first =
                hosts::expand(&list).map_err(|why| format!("SLURM_STEP_NODELIST: {why}"))?.swap_remove(0);
            let label = format!("slurm {}.{step}", env("SLURM_JOB_ID").unwrap_or_default());
            let port = STEP_PORTS + (xxh3_64(label.as_bytes()) % u64::from(STEP_PORTS)) as u16;
            Meeting::Address { host: first, ports: port..port + PORTS, label }
        }
    };
    Ok(Some(RankPlacement { rank, ranks, local, node, has_parent: false, meeting }))
}

/// Number of tasks on a node in SLURM's short form: `4(x2),1` means 4, 4 and 1.
fn tasks_of(list: &str, node: usize) -> Result<Option<usize>, String> {
    let wrong = || format!("SLURM_STEP_TASKS_PER_NODE={list} is not what SLURM writes");
    let mut passed = 0usize;
    for part in list.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')').ok_or_else(wrong)?),
            None => (part, "1"),
        };
        let tasks: usize = tasks.parse().map_err(|_| wrong())?;
        passed = passed.saturating_add(times.parse::<usize>().map_err(|_| wrong())?);
        if node < passed {
            return Ok(Some(tasks));
        }
    }
    Ok(None)
}

/// Rank 0 at `MASTER_ADDR`, if set.
fn master(env: Env) -> Result<Option<Meeting>, String> {
    let Some(host) = env("MASTER_ADDR").filter(|host| !host.is_empty()) else { return Ok(None) };
    let port = match number(env, "MASTER_PORT")? {
        None => MASTER_PORT,
        Some(port) => u16::try_from(port)
            .ok()
            .filter(|port| *port > 0)
            .ok_or(format!("MASTER_PORT={port} is not a port: give 1 to 65535"))?,
    };
    let label = ["TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID"].into_iter().find_map(env);
    let ports = port..port.saturating_add(PORTS);
    Ok(Some(Meeting::Address { host, ports, label: label.unwrap_or_default() }))
}

/// Two variables that are only meaningful together. A rank without a size belongs to another program, and a size of one is
/// harmless.
fn pair(env: Env, rank: &str, size: &str) -> Result<Option<(usize, usize)>, String> {
    let Some(size_value) = number(env, size)? else { return Ok(None) };
    match number(env, rank)? {
        Some(rank) => Ok(Some((rank, size_value))),
        None if size_value > 1 => {
            Err(format!("{size}={size_value} is set and {rank} is not: set both or neither"))
        }
        None => Ok(None),
    }
}

fn number(env: Env, name: &str) -> Result<Option<usize>, String> {
    let Some(value) = env(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    value.parse().map(Some).map_err(|_| format!("{name}={value} is not a number"))
}

#[cfg(test)]
mod tests;
