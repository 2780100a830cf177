//! Ranks of a plan: how many train together, how they are linked, and how the run scales over them.

use flatout_ir::links::Link;
use flatout_ir::{Shard, Target};
use flatout_measure::forecast::scaling::{Exchange, Refused, Scaled, exchange, scaling};
use flatout_train::Config;
use flatout_train::UserError;
use flatout_train::device;
use flatout_train::ranks::target_among;
use flatout_train::resolve::compile::Compiled;
use flatout_train::resolve::prediction;
use flatout_train::switches::Backend;
use flatout_train::switches::memory::SHARD;
use serde_json::{Value, json};

use crate::args::Plan;
use crate::runs::print_table;
use crate::screen::{Screen, bytes, count};

/// The ranks that were asked for.
pub struct World<'a> {
    pub ranks: usize,
    nodes: usize,
    args: &'a Plan,
    /// The plan is for GPUs of this machine, and no link is named.
    is_here: bool,
    /// The link that NVML tells of then.
    here: Option<Link>,
}

/// Their place, their level and their prediction, as they are told.
pub struct Told {
    ranks: usize,
    nodes: usize,
    /// Of GPUs: their links by name, inside a node and between nodes.
    links: Option<[String; 2]>,
    /// Who says how the GPUs of a node are linked.
    link_by: &'static str,
    /// Exchanges among all ranks were timed on this machine.
    is_timed: bool,
    level: &'static str,
    why: Option<String>,
    /// `None` on CPUs, whose exchanges are not predicted.
    predicted: Option<(Exchange, Vec<Result<Scaled, Refused>>)>,
}

impl<'a> World<'a> {
    /// One rank where nothing was asked for.
    pub fn of(args: &'a Plan, config: &Config, on_paper: Option<&str>) -> Result<World<'a>, UserError> {
        let is_cpu = config.switches.compute.backend == Backend::Cpu;
        let has_gpu = || on_paper.is_some() || device::has_gpu();
        match (args.gpus, args.ranks) {
            (Some(_), _) if is_cpu => Err(UserError(
                "--gpus and `backend=cpu` contradict each other: give --ranks, or leave backend=cpu out".into(),
            )),
            (Some(_), _) if !has_gpu() => Err(UserError(
                "--gpus plans for GPUs, and there is none here: name one with --gpu, as in --gpu h100 --gpus 8".into(),
            )),
            (None, Some(_)) if !is_cpu && has_gpu() => Err(UserError(
                "--ranks plans for ranks on CPUs: give --gpus for GPUs, or backend=cpu".into(),
            )),
            (gpus, ranks) => {
                let nodes = args.nodes.unwrap_or(1);
                let is_here = gpus.is_some() && on_paper.is_none() && args.link.is_none();
                let here = gpus.filter(|_| is_here).and_then(device::link_here);
                let ranks = gpus.map_or(ranks.unwrap_or(1), |gpus| gpus * nodes);
                Ok(World { ranks, nodes, args, is_here, here })
            }
        }
    }

    /// The target of one of these ranks.
    pub fn target(&self, target: Target) -> Result<Target, UserError> {
        self.target_of(self.ranks, target)
    }

    /// The same of fewer ranks, on as few nodes as have that many.
    fn target_of(&self, ranks: usize, target: Target) -> Result<Target, UserError> {
        if ranks == 1 {
            return Ok(target);
        }
        let (link, net) = (self.args.link.as_deref(), self.args.net.as_deref());
        let here = self.here.as_ref();
        let links = |gpus| device::links_of(&target.name, here, link, net, gpus);
        let links = self.args.gpus.map(links).transpose()?;
        let local = links.as_ref().map(|links| &links.local).filter(|_| self.is_here);
        let timed = local.map(device::exchanges_here).unwrap_or_default();
        let timings = target.timings.with(&timed);
        Ok(Target { links, timings, ..target_among(ranks, target) })
    }

    /// Tells of several ranks; `None` of one. `target` is the device of one that trains alone.
    pub fn told(&self, config: &Config, compiled: &Compiled, target: &Target) -> Option<Told> {
        let links = compiled.target.links.as_ref();
        let target_of = |ranks| self.target_of(ranks, target.clone()).expect("its links were found before");
        let predicted =
            links.map(|_| (exchange(compiled, config.train.batch), scaling(config, self.ranks, &target_of)));
        let settled = &compiled.settled;
        let level = if compiled.plans.sharded.is_empty() { Shard::None } else { settled.options.shard };
        (self.ranks > 1).then(|| Told {
            ranks: self.ranks,
            nodes: self.nodes,
            links: links.map(|links| [&links.local, &links.net].map(|link| link.name.clone())),
            link_by: match (&self.here, &self.args.link) {
                (Some(_), _) => "nvml",
                (None, Some(_)) => "asked",
                (None, None) => "table",
            },
            is_timed: self.nodes == 1 && compiled.target.timings.knows_exchanges(self.ranks),
            level: level.name(),
            why: settled.choice(SHARD.name).map(|chosen| chosen.why.clone()),
            predicted,
        })
    }
}

/// The lines of several ranks.
pub fn print(told: &Told, compiled: &Compiled, screen: &Screen) {
    let device = &compiled.target.name;
    let place = match (&told.links, told.nodes) {
        (None, _) => "processes that share this machine's cores".into(),
        (Some([local, _]), 1) if told.link_by == "nvml" => {
            format!("this node's {device}, linked by {local} as NVML tells")
        }
        (Some([local, _]), 1) => format!("one node of {device}, linked by {local}"),
        (Some([local, net]), nodes) => {
            format!(
                "{nodes} nodes of {} {device}, linked by {local} and between nodes by {net}",
                told.ranks / nodes
            )
        }
    };
    screen.result(format!(
        "ranks            {}: {place}; memory and arithmetic are those of one rank",
        told.ranks
    ));
    let why = told.why.as_ref().map_or(String::new(), |why| format!(" (auto: {why})"));
    screen.result(format!("shared           shard={}{why}", told.level));
    let Some((now, scaled)) = &told.predicted else {
        screen.result("exchanges        are not predicted on CPUs: flatout ranks --ranks N times them");
        return;
    };
    let Exchange { step_ms, compute_ms, wire_ms, exposed_ms, buckets } = now;
    let how = if *buckets > 1 { format!(", in {buckets} buckets") } else { String::new() };
    screen.result(format!(
        "exchanges        {wire_ms:.2} ms beside {compute_ms:.1} ms of compute{how}; {exposed_ms:.2} ms of a step of {step_ms:.1} ms are exposed"
    ));
    let by = if prediction::is_calibrated(compiled) { "by timed kernels" } else { "at best" };
    screen.result(match told.is_timed {
        true => format!("                 exchanges were timed on these GPUs (doctor --calibrate), compute is {by}"),
        false => format!("                 links are predictions by a table, compute is {by}; none of it was measured on several GPUs"),
    });
    let head = [
        "ranks",
        "nodes",
        "rows at once",
        "memory a rank",
        "compute",
        "wire",
        "exposed",
        "tokens/s",
        "of linear",
    ];
    let mut rows: Vec<Vec<String>> = vec![head.map(String::from).to_vec()];
    for one in scaled {
        rows.push(match one {
            Ok(Scaled {
                ranks,
                nodes,
                micro_batch,
                arena_bytes,
                fits,
                exchange,
                tokens_per_second,
                share_of_linear,
            }) => vec![
                format!("  {ranks}"),
                nodes.to_string(),
                micro_batch.to_string(),
                format!("{}{}", bytes(*arena_bytes as u64), if *fits { "" } else { " (does not fit)" }),
                format!("{:.1} ms", exchange.compute_ms),
                format!("{:.2} ms", exchange.wire_ms),
                format!("{:.2} ms", exchange.exposed_ms),
                count(*tokens_per_second as u64),
                format!("{:.1}%", 100.0 * share_of_linear),
            ],
            Err(Refused { ranks, .. }) => {
                let mut row = vec![format!("  {ranks}"), "cannot run (--json says why)".into()];
                row.resize(head.len(), String::new());
                row
            }
        });
    }
    screen.result("");
    print_table(&rows, 1..9, screen);
    screen.result("");
}

/// The same as JSON.
pub fn object(told: &Told, compiled: &Compiled) -> Value {
    let scaled = |one: &Result<Scaled, Refused>| match one {
        Ok(row) => json!(row),
        Err(row) => json!(row),
    };
    let is_calibrated = prediction::is_calibrated(compiled);
    json!({
        "ranks": told.ranks,
        "nodes": told.nodes,
        "link": told.links.as_ref().map(|[local, _]| local),
        "link_by": told.links.as_ref().map(|_| told.link_by),
        "exchanges_by": told.links.as_ref().map(|_| if told.is_timed { "timings" } else { "links" }),
        "net": told.links.as_ref().filter(|_| told.nodes > 1).map(|[_, net]| net),
        "shard": told.level,
        "why": told.why,
        "compute_by": if is_calibrated { "timings" } else { "roofline" },
        "exchange": told.predicted.as_ref().map(|(exchange, _)| exchange),
        "scaling": told.predicted.iter().flat_map(|(_, rows)| rows.iter().map(scaled)).collect::<Vec<_>>(),
    })
}
