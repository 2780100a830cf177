//! Describes where the most time is lost, with advice on what would help here.
//! Lost time is the time above the roofline: a kernel that runs as fast as the device allows loses nothing, however long it
//! takes. All time between kernels counts as lost, and so does recomputation. Advice is given only where this configuration and
//! this device allow it.

use std::collections::BTreeMap;

use flatout_data::Waited;
use flatout_ir::{Moments, Precision, Recompute, Shard, Work};

use super::budget::Budget;
use super::launches::Timed;
use super::table::{Row, grouped, kernel, row};
use crate::bench::Stage;
use flatout_report::words;
use flatout_train::config::{Config, Count, SourceKind};
use flatout_train::resolve::compile::Compiled;
use flatout_train::resolve::lanes::rows_a_lane;
use flatout_train::switches::{
    AttentionKernel, Auto, Backend, Named, Switch, Toggle, attention, compute, fuse, kernels, memory,
};

/// A place where time is lost.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Sink {
    pub name: String,
    pub ms: f64,
    pub share: f64,
    /// The largest possible gain.
    pub lost_ms: f64,
    pub words: String,
}

/// The facts that advice depends on.
pub struct Context<'a> {
    pub config: &'a Config,
    pub stage: &'a Stage,
    pub compiled: &'a Compiled,
    /// The state of every switch.
    pub active: &'a BTreeMap<String, String>,
    pub budget: &'a Budget,
    pub waited: Waited,
    /// Launches and micro-batches per update.
    pub launches: usize,
    pub parts: usize,
}

impl Context<'_> {
    fn state(&self, switch: &Switch) -> &str {
        self.active.get(switch.name).map_or("", String::as_str)
    }

    fn on_gpu(&self) -> bool {
        self.state(&compute::BACKEND) == Backend::Cuda.name()
    }
}

/// The number of sinks that are reported.
const REPORTED: usize = 3;
/// Launches that are shorter than this on average do not fill a device.
const SHORT_MS: f64 = 0.02;
/// A kernel this close to its roofline has little left to gain.
const CLOSE: f64 = 0.75;

/// A kernel that takes this multiple of its predicted time is reported as slower than predicted.
const SLOWER: f64 = 1.5;

/// The largest sinks by lost time.
pub fn sinks(context: &Context<'_>, timed: &[Timed]) -> Vec<Sink> {
    let step_ms = context.budget.step_ms;
    let mut all: Vec<Sink> = grouped(timed, step_ms, kernel)
        .into_iter()
        .map(|row| {
            let of = timed.iter().find(|t| kernel(t) == row.name).expect("a row has launches");
            of_kernel(context, of.work, &row)
        })
        .collect();
    let idle = context.budget.idle().into_iter().filter(|(_, ms)| *ms > context.budget.noise_ms);
    all.extend(idle.map(|(name, ms)| of_idle(context, name, ms)));
    let again: Vec<&Timed> = timed.iter().filter(|t| t.is_again).collect();
    if !again.is_empty() {
        all.push(of_recomputing(context, &row("recomputation".into(), &again, step_ms)));
    }
    all.retain(|sink| sink.lost_ms > 0.0);
    all.sort_by(|a, b| b.lost_ms.total_cmp(&a.lost_ms));
    all.truncate(REPORTED);
    all
}

fn of_kernel(context: &Context<'_>, work: Work, row: &Row) -> Sink {
    let lost_ms = (row.ms - row.roofline_ms).max(0.0);
    let slower = row.predicted_ms.map(|predicted| row.ms / predicted).filter(|times| *times >= SLOWER);
    let slower = slower.map_or(String::new(), |times| format!(" and {times:.1} times as long as predicted"));
    let words = format!(
        "{} takes {}, {} of the step, at {} of its roofline ({}){slower}: {}",
        row.name,
        millis(row.ms),
        percent(row.share),
        percent(row.of_roofline),
        row.bound.name(),
        help(context, work, row)
    );
    Sink { name: row.name.clone(), ms: row.ms, share: row.share, lost_ms, words }
}

/// A switch in a state that costs time, the value to set instead, the work that it slows down, and what the other value does.
struct Lever {
    switch: Switch,
    state: &'static str,
    instead: &'static str,
    works: &'static [Work],
    does: &'static str,
}

const LEVERS: &[Lever] = &[
    Lever {
        switch: attention::ATTENTION,
        state: "naive",
        instead: "flash",
        works: &[Work::Product, Work::Elementwise, Work::Reduce, Work::Copy],
        does: "stores no scores",
    },
    Lever {
        switch: fuse::LOSS,
        state: "off",
        instead: "on",
        works: &[Work::Product, Work::Elementwise, Work::Reduce, Work::Index, Work::Copy],
        does: "keeps the logits out of memory",
    },
    Lever {
        switch: fuse::NORM,
        state: "off",
        instead: "on",
        works: &[Work::Norm, Work::Rope, Work::Elementwise, Work::Reduce],
        does: "adds, norms and rotates in one pass over memory",
    },
    Lever {
        switch: fuse::ELEMENTWISE,
        state: "off",
        instead: "on",
        works: &[Work::Elementwise],
        does: "runs chains in one pass over memory",
    },
    Lever {
        switch: fuse::QKV,
        state: "off",
        instead: "on",
        works: &[Work::Product],
        does: "makes one product of three",
    },
    Lever {
        switch: fuse::GATE_UP,
        state: "off",
        instead: "on",
        works: &[Work::Product],
        does: "makes one product of two",
    },
    Lever {
        switch: fuse::OPTIMIZER,
        state: "off",
        instead: "on",
        works: &[Work::Optimizer, Work::Copy],
        does: "updates whole regions of parameters in one launch",
    },
    Lever {
        switch: kernels::ROPE_CACHE,
        state: "off",
        instead: "on",
        works: &[Work::Rope, Work::Norm],
        does: "reads angles from a table",
    },
    Lever {
        switch: kernels::AUTOTUNE,
        state: "off",
        instead: "quick",
        works: &[Work::Product, Work::Attention],
        does: "takes the fastest of several kernels",
    },
    Lever {
        switch: kernels::AUTOTUNE,
        state: "quick",
        instead: "full",
        works: &[Work::Product],
        does: "times every algorithm of a product, not eight",
    },
];

/// Advice that makes this kernel faster here.
fn help(context: &Context<'_>, work: Work, row: &Row) -> String {
    let rates = &context.compiled.target.rates;
    let on_gpu = context.on_gpu();
    let deterministic = on_gpu && context.config.switches.kernels.deterministic == Toggle::On;
    let precision = Precision::named(context.state(&compute::PRECISION));
    let mut ways: Vec<String> = vec![];
    let is_multiplied = [Work::Product, Work::Attention, Work::Loss].contains(&work);
    let now = match precision {
        Some(Precision::Tf32) => rates.tf32_flops,
        Some(Precision::F32) => Some(rates.f32_flops),
        _ => None,
    };
    if on_gpu && let Some(now) = now {
        ways.push(match is_multiplied {
            true => format!("precision=bf16 multiplies up to {:.0} times as fast", rates.bf16_flops / now),
            false => "precision=bf16 moves half the bytes".into(),
        });
    }
    // Only linear layers are multiplied in 8 bits.
    if on_gpu && let (Some(Precision::BF16), Work::Product, Some(fp8)) = (precision, work, rates.fp8_flops) {
        let times = fp8 / rates.bf16_flops;
        ways.push(format!("precision=fp8 multiplies up to {times:.0} times as fast (statistical)"));
    }
    if on_gpu && work == Work::Optimizer && context.state(&memory::OPTIMIZER_STATE) == Moments::F32.name() {
        ways.push("optimizer.state=bf16 moves fewer bytes (statistical)".into());
    }
    if deterministic && [Work::Product, Work::Attention, Work::Index].contains(&work) {
        ways.push("deterministic=off lets the fastest kernels be taken".into());
    }
    if work == Work::Attention && context.config.switches.attention.kernel != AttentionKernel::Auto {
        ways.push("attention_kernel=auto takes the fastest that was timed".into());
    }
    let levers = LEVERS
        .iter()
        .filter(|lever| context.state(&lever.switch) == lever.state && lever.works.contains(&work));
    let levers = levers.filter(|lever| !(lever.switch.name == kernels::AUTOTUNE.name && deterministic));
    ways.extend(levers.map(|lever| format!("{}={} {}", lever.switch.name, lever.instead, lever.does)));
    let each_ms = row.ms / row.launches.max(1) as f64;
    if each_ms < SHORT_MS
        && let Some(rows) = larger(context)
    {
        ways.push(format!(
            "its launches take {:.0} us each, and train.micro_batch={rows} makes fewer and longer ones",
            1e3 * each_ms
        ));
    }
    if !ways.is_empty() {
        return ways.join("; ");
    }
    match row.of_roofline >= CLOSE {
        true => "it is close to what the device can do, and only less work would help".into(),
        false if each_ms < SHORT_MS => {
            format!(
                "its launches take {:.0} us each, too short to fill the device: no switch changes that",
                1e3 * each_ms
            )
        }
        false => "no switch makes it faster, so the kernel itself is what to improve".into(),
    }
}

fn of_idle(context: &Context<'_>, name: &str, ms: f64) -> Sink {
    let on_gpu = context.on_gpu();
    let replays = context.state(&kernels::CUDA_GRAPHS) == Toggle::On.name();
    let (share, launches) = (ms / context.budget.step_ms, context.launches);
    let each =
        format!("{} launches, {:.1} us each", words::count(launches as u64), 1e3 * ms / launches as f64);
    let fewer = || match larger(context) {
        Some(rows) => format!("train.micro_batch={rows} makes fewer of them"),
        None => "no switch makes fewer of them".into(),
    };
    let (what, help) = match name {
        "launch" if on_gpu && !replays => (
            format!("the time between kernels ({each})"),
            "cuda_graphs=on replays them without the host".to_string(),
        ),
        "launch" => (format!("the time between kernels ({each})"), fewer()),
        "wire" => ("waiting for exchanges with other ranks".into(), wire_help(context)),
        "synchronisation" => (
            "reading results".into(),
            "it comes once an update, so a larger train.batch has it less often".to_string(),
        ),
        "copy" => (
            format!("writing the inputs of {} micro-batches", context.parts),
            match larger(context) {
                Some(rows) => format!("train.micro_batch={rows} writes them in fewer parts"),
                None => "no switch changes it".into(),
            },
        ),
        _ => data_help(context),
    };
    let words = format!("{what} takes {}, {} of the step: {help}", millis(ms), percent(share));
    Sink { name: name.into(), ms, share, lost_ms: ms, words }
}

/// Advice that shortens the wait for exchanges.
fn wire_help(context: &Context<'_>) -> String {
    if context.on_gpu() && context.state(&kernels::OVERLAP) == Toggle::Off.name() {
        return "overlap=on overlaps launches with them".into();
    }
    let shard = context.state(&memory::SHARD);
    if [Shard::Gradients, Shard::Parameters].iter().any(|level| level.name() == shard) {
        return match larger(context) {
            Some(rows) => format!("they come with every micro-batch, and train.micro_batch={rows} has fewer"),
            None if shard == Shard::Parameters.name()
                && context.state(&memory::SHARD_KEEP) == Toggle::Off.name() =>
            {
                "shard_keep=on gathers every layer once, where memory suffices".into()
            }
            None => "shard=optimizer exchanges once an update, where memory suffices".into(),
        };
    }
    "they come once an update, so a larger train.batch has them less often".into()
}

/// The cause of waits for rows, and the ways to shorten them.
fn data_help(context: &Context<'_>) -> (String, String) {
    let cause = context.waited.cause();
    let workers = context
        .config
        .loader
        .workers
        .given()
        .unwrap_or_else(|| (flatout_train::machine::threads() / 2).max(1));
    let more = format!("loader.workers={} (now {workers})", 2 * workers);
    let help = match cause {
        Some("tokenising") if context.config.data.source() != SourceKind::Synthetic => {
            format!("flatout data prepare tokenises once and for all; or {more}")
        }
        Some("busy cores") => {
            format!(
                "its threads did not get to run: fewer other programs, or loader.prefetch={}",
                2 * context.config.loader.prefetch
            )
        }
        Some("reading") => format!("{more}, or a faster disk"),
        _ => more,
    };
    (format!("waiting for rows (mostly {})", cause.unwrap_or("nothing")), help)
}

fn of_recomputing(context: &Context<'_>, row: &Row) -> Sink {
    let less = |recompute: Recompute| {
        let mut config = context.config.clone();
        config.switches.memory.recompute = Auto::Given(recompute);
        config.train.micro_batch = Count::Given(context.compiled.micro_batch);
        config.train.accumulate = None;
        let plans = context.stage.compile(&config).ok()?.plans;
        let more = plans.arena_bytes.saturating_sub(context.compiled.plans.arena_bytes);
        Some(format!("recompute={} keeps it, in {} more memory", recompute.name(), words::bytes(more as u64)))
    };
    let is_full = context.state(&memory::RECOMPUTE) == Recompute::Full.name();
    let help = less(Recompute::None).or_else(|| less(Recompute::Cheap).filter(|_| is_full));
    let help = help.unwrap_or_else(|| "keeping it does not fit the memory".into());
    let words = format!(
        "recomputing what was not kept takes {}, {} of the step: {help}",
        millis(row.ms),
        percent(row.share)
    );
    Sink { name: row.name.clone(), ms: row.ms, share: row.share, lost_ms: row.ms, words }
}

/// The next larger micro-batch that divides the batch, or a lane's part of it, where it fits the memory.
fn larger(context: &Context<'_>) -> Option<usize> {
    let batch = rows_a_lane(context.config, context.compiled.settled.options.lanes);
    let now = context.compiled.micro_batch;
    let rows = (now + 1..=batch).find(|rows| batch.is_multiple_of(*rows))?;
    let mut config = context.config.clone();
    config.train.micro_batch = Count::Given(rows);
    config.train.accumulate = None;
    context.stage.compile(&config).ok().map(|_| rows)
}

/// Formats a share as a percentage.
pub fn percent(share: f64) -> String {
    match 100.0 * share {
        p if p.abs() < 9.95 => format!("{p:.1}%"),
        p => format!("{p:.0}%"),
    }
}

/// Formats milliseconds with three significant digits.
pub fn millis(ms: f64) -> String {
    match ms.abs() {
        m if m >= 99.95 => format!("{ms:.0} ms"),
        m if m >= 9.995 => format!("{ms:.1} ms"),
        m if m >= 0.9995 => format!("{ms:.2} ms"),
        _ => format!("{:.0} us", 1e3 * ms),
    }
}
