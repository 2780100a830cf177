//! `doctor --calibrate --gpus N`: times exchanges between ranks of this machine by kernel and size, beside their predictions.

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
            "one rank has no other to exchange with: give --gpus or --ranks 2 or more, or leave it out to time kernels".into(),
        )));
    }
    let requested = launch::Ranks::on_one_node(args.ranks, args.gpus, args.share_gpu);
    let place = match launch::start(&requested)? {
        Start::Copies(copies) => return start(copies, &requested, screen),
        Start::Rank(place) => place,
    };
    let stops = (|_: &str| signal::leave(3), drop);
    let world = match launch::join(&place, &requested, None, screen, || None, stops)? {
        Begun::Ended(code) => return Ok(code),
        Begun::Rank(world) => world,
    };
    let ranks = Ranks::connect(world)?;
    let screen = many::screen(&ranks, screen);
    let done = time(args, &ranks, &screen);
    many::end(ranks, done)
}

/// Starts the ranks, after a check that there are GPUs for them.
fn start(copies: Copies, requested: &launch::Ranks, screen: &Screen) -> Result<ExitCode, Failure> {
    if requested.gpus.is_some() {
        if !device::has_gpu() {
            return Err(Failure::User(UserError(format!(
                "--gpus needs GPUs, and {}: give --ranks to time processes on the CPU",
                kernels::gpu().sentence
            ))));
        }
        many::check_gpus(&copies, requested)?;
    }
    let command = |rank: usize| {
        let mut command = own_command()?;
        if requested.share_gpu {
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
    let progress = |kernel: &str, size: u64| {
        if screen.verbose {
            screen.note(format!("{kernel} of {}", bytes(size)));
        }
    };
    let links = links(&device, ranks.count(), args.share_gpu);
    if backend == Backend::Cuda && links.is_none() && !args.share_gpu {
        return Err(Failure::Environment(
            "the link between these GPUs is not known, and times are stored by the name of the link".into(),
        ));
    }
    screen.note("timing exchanges; other programs that run on this machine now would distort the times");
    let timed = exchanges(&device, ranks, &mut { progress })?;
    if !ranks.is_first() {
        return Ok(ExitCode::SUCCESS);
    }
    let report = Report { ranks: ranks.count(), timed, links, shares: args.share_gpu };
    let kept = keep(&device, &report);
    match screen.json {
        true => screen.object(&report.object(kept.is_ok() && args.gpus.is_some())),
        false => report.print(&device, screen),
    }
    kept.map_err(Failure::Environment)?;
    Ok(ExitCode::SUCCESS)
}

/// The links that predict exchanges between these GPUs until they are timed; `None` for CPUs and for ranks that share a GPU.
fn links(device: &Device, ranks: usize, shares: bool) -> Option<Links> {
    let Device::Cuda(_) = device else { return None };
    if shares {
        return None;
    }
    let name = device.target(&Switches::default()).name;
    device::links_of(&name, device::link_here(ranks).as_ref(), None, None, ranks).ok()
}

fn keep(device: &Device, report: &Report) -> Result<(), String> {
    let Device::Cuda(gpu) = device else { return Ok(()) };
    let over = report.links.as_ref().map_or(Over::SharedGpu, |links| Over::Link(&links.local.name));
    keep_exchanges(gpu, over, report.ranks, &points(&report.timed))
}

struct Report {
    ranks: usize,
    timed: Vec<Timed>,
    /// The links that the predictions are based on.
    links: Option<Links>,
    shares: bool,
}

impl Report {
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
                name(one),
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
                    "{} processes over sockets; the times are not kept, because exchanges on CPUs are not predicted",
                    self.ranks
                )
            }
            (_, Some(links)) => format!(
                "{} GPUs over {}; plan --gpus {} predicts with these times",
                self.ranks, links.local.name, self.ranks
            ),
            (_, None) => format!(
                "{} ranks that share a GPU, over loopback: the times are stored separately and not used for predictions",
                self.ranks
            ),
        });
    }
}

/// The name of an exchange, and whether it adds in one fixed order.
fn name(one: &Timed) -> String {
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
