//! The device that computes a run: the CPU or a GPU, chosen once from the `backend` switch and what the machine has.

pub mod calibrations;
pub mod kernels;
mod wire;

pub use wire::{check as check_nccl, check_windows};

use std::collections::BTreeMap;
use std::path::PathBuf;

use flatout_ir::links::{Link, Links};
use flatout_ir::timings::Timings;
use flatout_ir::{Op, PlanSet, Target};
pub use flatout_runtime::cuda::context::Facts;
use flatout_runtime::cuda::device::{self as gpu, Gpu, probe};
use flatout_runtime::cuda::nccl;
use flatout_runtime::cuda::session::Options;
pub use flatout_runtime::cuda::topology::{Attachment, Between, End, Meet, Pcie, Topology};
pub use flatout_runtime::cuda::{gpus, links};
use flatout_runtime::{Laps, Session, cpu, cuda};

use crate::Failure;
use crate::UserError;
use crate::config::suggestion;
use crate::machine;
use crate::ranks::Ranks;
use crate::refuse;
use crate::switches::compute::Wire;
use crate::switches::{Backend, Settled, Switches, Toggle};

/// Starts the thread pool that everything shares. A command that cannot start it ends here and not in its middle.
pub fn start_threads() -> Result<(), Failure> {
    let started = rayon::ThreadPoolBuilder::new().build_global();
    started.map_err(|error| {
        Failure::Environment(format!(
            "the threads that work is shared among cannot be started ({error}): allow more processes or memory \
             (ulimit -u, ulimit -v), or set RAYON_NUM_THREADS to fewer"
        ))
    })
}

/// Adds the wheels of a Python environment to the places where NVIDIA's libraries are searched. Must be called before any device
/// is opened.
pub fn look_for_libraries_under(prefix: PathBuf) {
    cuda::library::look_under(prefix);
}

/// An open device.
#[derive(Clone)]
pub enum Device {
    Cpu { threads: usize },
    Cuda(cuda::device::Device),
}

impl Device {
    /// Opens the device that the switch asks for. `auto` takes a GPU if there is one; a GPU that cannot be used is an error
    /// instead of a silent fallback to the CPU.
    pub fn open(backend: Backend) -> Result<Device, Failure> {
        Device::open_local(backend, 0, false)
    }

    /// The same for one of the ranks of a host: opens the GPU of its number, or the only one that it sees. Ranks that share GPUs
    /// are distributed over them in turn.
    pub fn open_local(backend: Backend, local_rank: usize, shares: bool) -> Result<Device, Failure> {
        if backend == Backend::Cpu {
            return Ok(Device::cpu());
        }
        match (&probe().gpu, backend) {
            (Gpu::Usable(_), _) => {
                let index = wire::gpu_of(local_rank, visible_gpus(), shares)?;
                let opened = gpu::Device::open(index);
                Ok(Device::Cuda(opened.map_err(|why| Failure::Environment(why.to_string()))?))
            }
            (Gpu::Unusable(why), _) => Ok(refused(why)?),
            (Gpu::None(why), Backend::Cuda) => Ok(absent(why)?),
            (Gpu::None(_), _) => Ok(Device::cpu()),
        }
    }

    pub fn cpu() -> Device {
        Device::Cpu { threads: machine::threads() }
    }

    /// The device as the compiler sees it with these switches, including measured times of its kernels.
    pub fn target(&self, switches: &Switches) -> Target {
        let target = match self {
            Device::Cpu { threads } => {
                Target { memory_bytes: machine::memory_bytes(), ..cpu::target(*threads) }
            }
            Device::Cuda(device) => gpu::target(device, switches.kernels.deterministic == Toggle::On),
        };
        Target { timings: calibrations::recall(self), wire_bytes: wire_ceiling(switches), ..target }
    }

    /// The properties that the kernels use; `None` for the CPU.
    pub fn facts(&self) -> Option<Facts> {
        match self {
            Device::Cpu { .. } => None,
            Device::Cuda(device) => Some(device.facts(Options::default())),
        }
    }

    /// The time that opening the device took, with the clock running.
    pub fn laps(&self) -> Laps {
        let mut laps = Laps::begin();
        if let Device::Cuda(device) = self {
            laps.take(device.laps());
        }
        laps
    }

    /// Its description for people: the GPU with its driver, or the processor and its threads.
    pub fn sentence(&self) -> String {
        match self {
            Device::Cpu { threads } => machine::processor(*threads),
            Device::Cuda(_) => kernels::gpu().sentence,
        }
    }

    /// A session for plans that were compiled for this device.
    pub fn session(&self, plans: PlanSet, settled: &Settled) -> Result<Session, Failure> {
        self.session_among(plans, settled, &Ranks::alone())
    }

    /// The same as one of several ranks, all of which call this.
    pub fn session_among(
        &self,
        plans: PlanSet,
        settled: &Settled,
        ranks: &Ranks,
    ) -> Result<Session, Failure> {
        self.session_with(plans, session_options(settled), ranks)
    }

    /// The same with explicit options of a GPU session, for plans that were not compiled from a config.
    pub fn session_with(&self, plans: PlanSet, options: Options, ranks: &Ranks) -> Result<Session, Failure> {
        Ok(match self {
            Device::Cpu { threads } => Session::among(plans, *threads, ranks.wire())?,
            Device::Cuda(device) => {
                if let Some(why) = cuda::attention::refusal(&plans, &device.facts(options)) {
                    return Err(Failure::User(UserError(why)));
                }
                wire::session(plans, device, options, ranks)?
            }
        })
    }
}

/// The options of a GPU session, from the settled switches.
pub fn session_options(settled: &Settled) -> Options {
    let Settled { cuda_graphs, autotune, deterministic, window, attention_kernel, product_kernel, .. } =
        *settled;
    Options {
        graphs: cuda_graphs,
        deterministic,
        autotune,
        check_each_launch: false,
        attention: attention_kernel,
        product: product_kernel,
        window,
    }
}

/// A GPU by name, as the compiler sees it, whether or not this machine has one.
pub fn named(gpu: &str, switches: &Switches) -> Result<Target, UserError> {
    let Some(found) = gpus::find(gpu) else {
        let names: Vec<&str> = gpus::named().iter().map(|gpu| gpu.name).collect();
        let all = format!("there is {}", names.join(", "));
        if let Some(why) = gpus::absent(gpu) {
            refuse!("the {gpu} {why}; {all}");
        }
        refuse!("there is no GPU `{gpu}` in the table; {}", suggestion(gpu, &names).unwrap_or(all));
    };
    if switches.compute.backend == Backend::Cpu {
        refuse!("a plan for the {gpu} and `backend=cpu` contradict each other: leave one of them out");
    }
    let target = gpus::target(found, switches.kernels.deterministic == Toggle::On);
    Ok(Target { timings: calibrations::recall_named(gpu), wire_bytes: wire_ceiling(switches), ..target })
}

/// Memory that the plans of a single rank leave to NCCL: none unless the rank exchanges with itself.
fn wire_ceiling(switches: &Switches) -> u64 {
    if switches.compute.wire == Wire::Nccl { nccl::CEILING_BYTES } else { 0 }
}

/// The links between this machine's GPUs, or the reason why they are unknown.
pub fn topology() -> Result<&'static Topology, String> {
    gpu::topology().map_err(|why| why.to_string())
}

/// The link used to predict exchanges among a number of this machine's GPUs: the slowest that NVML reports. `None` if there is
/// one GPU, or NVML reports nothing.
pub fn link_here(gpus: usize) -> Option<Link> {
    topology().ok().and_then(|topology| topology.link(gpus))
}

/// The stored times of exchanges between this machine's GPUs over a link, which NVML or the table names; empty if there is one
/// GPU.
pub fn exchanges_here(link: &Link) -> Timings {
    if visible_gpus() > 1 { calibrations::recall_exchanges(&link.name) } else { Timings::default() }
}

/// The links between GPUs of a name, in a node and between nodes: those of this machine, of the table, or named explicitly.
pub fn links_of(
    gpu: &str,
    here: Option<&Link>,
    local: Option<&str>,
    net: Option<&str>,
    ranks_a_node: usize,
) -> Result<Links, UserError> {
    let find = |name: &str, option: &str| {
        links::find(name).ok_or_else(|| {
            let names: Vec<&str> = links::named().map(|link| link.name.as_str()).collect();
            let all = format!("there is {}", names.join(", "));
            let advice = suggestion(name, &names).unwrap_or(all);
            UserError(format!("{option} names the link `{name}`, which is not in the table; {advice}"))
        })
    };
    let local = match (local, here) {
        (Some(name), _) => find(name, "--link")?,
        (None, Some(link)) => link,
        (None, None) => links::of_gpu(gpu).ok_or_else(|| {
            UserError(format!("how GPUs like the {gpu} are linked is not in the table: name it with --link"))
        })?,
    };
    Ok(links::between(local, find(net.unwrap_or(links::NET), "--net")?, ranks_a_node))
}

/// The kernels that can run the attention of `grad` on a GPU, by direction: `autotune` takes the fastest of several.
pub fn attention_kernels(
    plans: &PlanSet,
    facts: &Facts,
    settled: &Settled,
) -> BTreeMap<&'static str, Vec<&'static str>> {
    let facts = Facts { deterministic: settled.deterministic, ..facts.clone() };
    let mut serving: BTreeMap<&'static str, Vec<&'static str>> = BTreeMap::new();
    for launch in plans.grads().flat_map(|plan| &plan.launches) {
        let direction = match launch.op {
            Op::Attention { .. } => "forward",
            Op::AttentionGrad { .. } => "backward",
            _ => continue,
        };
        let kernels: Vec<_> = cuda::attention::choice::serving(launch, &facts)
            .into_iter()
            .map(|kernel| kernel.name())
            .collect();
        // Keeps the kernels that serve every launch.
        let all = serving.entry(direction).or_insert_with(|| kernels.clone());
        all.retain(|kernel| kernels.contains(kernel));
    }
    serving
}

/// Number of GPUs that this process sees; 0 if the first cannot be used.
pub fn visible_gpus() -> usize {
    gpu::all().len()
}

/// Whether this machine has an NVIDIA GPU, usable or not.
pub fn has_gpu() -> bool {
    !matches!(probe().gpu, Gpu::None(_))
}

fn refused(why: &str) -> Result<Device, UserError> {
    refuse!("{why}; or give backend=cpu to train on the CPU")
}

fn absent(why: &str) -> Result<Device, UserError> {
    refuse!("`backend=cuda` cannot run: {why}; leave it out to train on the CPU")
}
