//! Ranks of a plan: their number, the links between them, and the scaling of the run over them.

use flatout_ir::links::Link;
use flatout_ir::{Shard, Target};
use flatout_train::Config;
use flatout_train::UserError;
use flatout_train::device;
use flatout_train::ranks::target_among;
use flatout_train::resolve::compile::Compiled;
use flatout_train::resolve::prediction;
use flatout_train::switches::Backend;
use flatout_train::switches::memory::SHARD;
use serde_json::{Value, json};

use super::PlanRequest;
use crate::forecast::scaling::{Exchange, Refused, Scaled, exchange, scaling};

/// The requested ranks.
pub(super) struct World<'a> {
    ranks: usize,
    nodes: usize,
    request: &'a PlanRequest,
    /// Whether the plan is for GPUs of this machine and no link is named.
    is_here: bool,
    /// The link that NVML reports in that case.
    here: Option<Link>,
}

/// The report about several ranks: placement, links, sharding and predictions.
pub struct RanksReport {
    pub ranks: usize,
    pub nodes: usize,
    /// Names of the links between GPUs, within a node and between nodes.
    pub links: Option<[String; 2]>,
    /// The source of the GPUs' links within a node.
    pub link_by: &'static str,
    /// Whether exchanges among all ranks were timed on this machine.
    pub is_timed: bool,
    pub level: &'static str,
    pub why: Option<String>,
    /// `None` on CPUs, whose exchanges are not predicted.
    pub predicted: Option<(Exchange, Vec<Result<Scaled, Refused>>)>,
}

impl<'a> World<'a> {
    /// A single rank if none are requested.
    pub(super) fn of(
        request: &'a PlanRequest,
        config: &Config,
        on_paper: Option<&str>,
    ) -> Result<World<'a>, UserError> {
        let is_cpu = config.switches.compute.backend == Backend::Cpu;
        let has_gpu = || on_paper.is_some() || device::has_gpu();
        match (request.gpus, request.ranks) {
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
                let nodes = request.nodes.unwrap_or(1);
                let is_here = gpus.is_some() && on_paper.is_none() && request.link.is_none();
                let here = gpus.filter(|_| is_here).and_then(device::link_here);
                let ranks = gpus.map_or(ranks.unwrap_or(1), |gpus| gpus * nodes);
                Ok(World { ranks, nodes, request, is_here, here })
            }
        }
    }

    /// The target of one of these ranks.
    pub(super) fn target(&self, target: Target) -> Result<Target, UserError> {
        self.target_of(self.ranks, target)
    }

    /// The target of one of fewer ranks, on as few nodes as hold them.
    fn target_of(&self, ranks: usize, target: Target) -> Result<Target, UserError> {
        if ranks == 1 {
            return Ok(target);
        }
        let (link, net) = (self.request.link.as_deref(), self.request.net.as_deref());
        let here = self.here.as_ref();
        let links = |gpus| device::links_of(&target.name, here, link, net, gpus);
        let links = self.request.gpus.map(links).transpose()?;
        let local = links.as_ref().map(|links| &links.local).filter(|_| self.is_here);
        let timed = local.map(device::exchanges_here).unwrap_or_default();
        let timings = target.timings.with(&timed);
        Ok(Target { links, timings, ..target_among(ranks, target) })
    }

    /// Reports on several ranks; `None` for one. `target` is that of a device that trains alone.
    pub(super) fn told(&self, config: &Config, compiled: &Compiled, target: &Target) -> Option<RanksReport> {
        let links = compiled.target.links.as_ref();
        let target_of = |ranks| self.target_of(ranks, target.clone()).expect("its links were found before");
        let predicted =
            links.map(|_| (exchange(compiled, config.train.batch), scaling(config, self.ranks, &target_of)));
        let settled = &compiled.settled;
        let level = if compiled.plans.sharded.is_empty() { Shard::None } else { settled.options.shard };
        (self.ranks > 1).then(|| RanksReport {
            ranks: self.ranks,
            nodes: self.nodes,
            links: links.map(|links| [&links.local, &links.net].map(|link| link.name.clone())),
            link_by: match (&self.here, &self.request.link) {
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

/// The report on several ranks as JSON.
pub(super) fn object(report: &RanksReport, compiled: &Compiled) -> Value {
    let scaled = |one: &Result<Scaled, Refused>| match one {
        Ok(row) => json!(row),
        Err(row) => json!(row),
    };
    let is_calibrated = prediction::is_calibrated(compiled);
    json!({
        "ranks": report.ranks,
        "nodes": report.nodes,
        "link": report.links.as_ref().map(|[local, _]| local),
        "link_by": report.links.as_ref().map(|_| report.link_by),
        "exchanges_by": report.links.as_ref().map(|_| if report.is_timed { "timings" } else { "links" }),
        "net": report.links.as_ref().filter(|_| report.nodes > 1).map(|[_, net]| net),
        "shard": report.level,
        "why": report.why,
        "compute_by": if is_calibrated { "timings" } else { "roofline" },
        "exchange": report.predicted.as_ref().map(|(exchange, _)| exchange),
        "scaling": report.predicted.iter().flat_map(|(_, rows)| rows.iter().map(scaled)).collect::<Vec<_>>(),
    })
}
