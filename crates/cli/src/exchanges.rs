//! `doctor --calibrate --gpus N`: what ranks of this machine exchange, timed by kernel and size beside its prediction.

use std::process::ExitCode;

use flatout_ir::links::Links;
use flatout_ir::{Mesh, Op};
use flatout_measure::calibrate::exchanges::{Timed, exchanges, points};
use flatout_train::device::calibrations::{Over, keep_exchanges};
use flatout_train::device::{self, Device, kernels};
use flatout_train::ranks::Ranks;
use flatout_train::run::signal;
use flatout_train::switches::{Backend, Switches};
use flatout_train::{Failure, UserError};
use flatout_world::launch::own_command;
use flatout_world::{Copies, Start};
use serde_json::json;

use crate::args::Doctor;
use crate::launch::{self, Begun};
use crate::many;
use crate::runs::print_table;
use crate::screen::{Screen, bytes};

pub fn calibrate(args: &Doctor, screen: &Screen) -> Result<ExitCode, Failure> {
    if args.gpus.or(args.ranks).is_some_and(|count| count < 2) {
        return Err(Failure::User(UserError(
            "one rank exchanges with nobody: give --gpus or --ranks 2 or more, or leave it out to time kernels".into(),
        )));
    }
    let wanted = launch::Ranks::on_one_node(args.ranks, args.gpus, args.share_gpu);
    let place = match launch::start(&wanted)? {
        Start::Copies(copies) => return start(copies, &wanted, screen),
        Start::Rank(place) => place,
    };
    let stops = (|_: &str| signal::leave(3), drop);
    let world = match launch::join(&place, &wanted, None, screen, || None, stops)? {
        Begun::Ended(code) => return Ok(code),
        Begun::Rank(world) => world,
    };
    let ranks = Ranks::connect(world)?;
    let screen = many::screen(&ranks, screen);
    let done = time(args, &ranks, &screen);
    many::end(ranks, done)
}

/// Starts the ranks, where there are GPUs for them.
fn start(copies: Copies, wanted: &launch::Ranks, screen: &Screen) -> Result<ExitCode, Failure> {
    if wanted.gpus.is_some() {
        if !device::has_gpu() {
            return Err(Failure::User(UserError(format!(
                "--gpus wants GPUs, and {}: give --ranks to time processes on the CPU",
                kernels::gpu().sentence
            ))));
        }
        many::check_gpus(&copies, wanted)?;
    }
    let command = |rank: usize| {
        let mut command = own_command()?;
        if wanted.share_gpu {
            command.envs(many::shared_gpu_variables(rank));
        }
        Ok(command)
    };
    launch::look_after(copies, &command, screen, || None, &|_| {})
}

/// Times exchanges as one of the ranks; rank 0 shows and keeps them.
fn time(args: &Doctor, ranks: &Ranks, screen: &Screen) -> Result<ExitCode, Failure> {
    let backend = if args.gpus.is_some() { Backend::Cuda } else { Backend::Cpu };
    let device = Device::open_local(backend, ranks.local_rank(), args.share_gpu)?;
    let gpu = match &device {
        Device::Cuda(gpu) => Some(gpu.pci_address().map_err(|why| Failure::Environment(why.to_string()))?),
        Device::Cpu { .. } => None,
    };
    ranks.check_apart(gpu, args.share_gpu)?;
    let say = |kernel: &str, size: u64| {
        if screen.verbose {
            screen.note(format!("{kernel} of {}", bytes(size)));
        }
    };
    let links = links(&device, ranks.count(), args.share_gpu);
    if backend == Backend::Cuda && links.is_none() && !args.share_gpu {
        return Err(Failure::Environment(
            "how these GPUs are linked is not known, so their times would have no name".into(),
        ));
    }
    screen.note("timing exchanges; anything else that runs here now makes them slower than they are");
    let timed = exchanges(&device, ranks, &mut { say })?;
    if !ranks.is_first() {
        return Ok(ExitCode::SUCCESS);
    }
    let told = Told { ranks: ranks.count(), timed, links, shares: args.share_gpu };
    let kept = keep(&device, &told);
    match screen.json {
        true => screen.object(&told.object(kept.is_ok() && args.gpus.is_some())),
        false => told.print(&device, screen),
    }
    kept.map_err(Failure::Environment)?;
    Ok(ExitCode::SUCCESS)
}

/// The links of these GPUs by which exchanges are predicted where nobody has timed them. There are none of CPUs, and none of ranks
/// that share a GPU.
fn links(device: &Device, ranks: usize, shares: bool) -> Option<Links> {
    let Device::Cuda(_) = device else { return None };
    if shares {
        return None;
    }
    let name = device.target(&Switches::default()).name;
    device::links_of(&name, device::link_here(ranks).as_ref(), None, None, ranks).ok()
}

fn keep(device: &Device, told: &Told) -> Result<(), String> {
    let Device::Cuda(gpu) = device else { return Ok(()) };
    let over = told.links.as_ref().map_or(Over::SharedGpu, |links| Over::Link(&links.local.name));
    keep_exchanges(gpu, over, told.ranks, &points(&told.timed))
}

struct Told {
    ranks: usize,
    timed: Vec<Timed>,
    /// By which they were predicted.
    links: Option<Links>,
    shares: bool,
}

impl Told {
    fn predicted(&self, one: &Timed) -> Option<f64> {
        let links = self.links.as_ref()?;
        Some(links.seconds_of(&one.op, one.bytes, &Mesh::new(1, self.ranks)))
    }

    fn object(&self, kept: bool) -> serde_json::Value {
        let point = |one: &Timed| {
            json!({
                "exchange": one.op.name(),
                "kernel": one.kernel,
                "bytes": one.bytes,
                "seconds": one.seconds,
                "bus_gb_per_s": one.bus_bytes_per_second() / 1e9,
                "predicted_seconds": self.predicted(one),
            })
        };
        json!({
            "ranks": self.ranks,
            "link": self.links.as_ref().map(|links| &links.local.name),
            "shares_gpu": self.shares,
            "exchanges": self.timed.iter().map(point).collect::<Vec<_>>(),
            "kept": kept,
        })
    }

    fn print(&self, device: &Device, screen: &Screen) {
        let head = ["exchange", "size", "time", "bus bandwidth", "predicted", "of prediction"];
        let mut rows: Vec<Vec<String>> = vec![head.map(String::from).to_vec()];
        for one in &self.timed {
            let predicted = self.predicted(one);
            rows.push(vec![
                named(one),
                bytes(one.bytes),
                time_words(one.seconds),
                format!("{:.2} GB/s", one.bus_bytes_per_second() / 1e9),
                predicted.map_or("-".into(), time_words),
                predicted.map_or("-".into(), |predicted| format!("{:.0}%", 100.0 * one.seconds / predicted)),
            ]);
        }
        print_table(&rows, 1..6, screen);
        screen.result(match (device, &self.links) {
            (Device::Cpu { .. }, _) => {
                format!(
                    "{} processes over sockets; nothing is kept, for exchanges on CPUs are not predicted",
                    self.ranks
                )
            }
            (_, Some(links)) => format!(
                "{} GPUs over {}; plan --gpus {} predicts by these times",
                self.ranks, links.local.name, self.ranks
            ),
            (_, None) => format!(
                "{} ranks that share a GPU, over loopback: kept apart, and nothing is predicted by them",
                self.ranks
            ),
        });
    }
}

/// The exchange with the order of its additions, where it adds in one order.
fn named(one: &Timed) -> String {
    let ordered = match one.op {
        Op::AllGather { .. } => "",
        _ if one.kernel.ends_with("_tree") => ", one order",
        _ => "",
    };
    format!("{}{ordered}", one.op.name())
}

fn time_words(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} us", 1e6 * s),
        s if s < 1.0 => format!("{:.2} ms", 1e3 * s),
        s => format!("{s:.2} s"),
    }
}
