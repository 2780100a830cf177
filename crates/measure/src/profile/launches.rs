//! The launches of an update, each with its time and its entry in the plan.

use std::borrow::Cow;
use std::collections::HashSet;

use flatout_ir::cost::{of_launch, rate};
use flatout_ir::{Launch, Op, Queue, Role, Target, TensorType, View, Work};
use flatout_runtime::LaunchTime;

use flatout_train::resolve::compile::Compiled;

/// A launch and the time of one run of it.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Timed {
    /// `grad`, one of its smaller variants or `apply`, and the launch's index in it.
    pub plan: Cow<'static, str>,
    pub launch: usize,
    /// How often an update runs it.
    pub times: u64,
    #[serde(serialize_with = "named")]
    pub work: Work,
    pub op: &'static str,
    pub kernel: &'static str,
    pub path: String,
    pub ins: Vec<String>,
    pub outs: Vec<String>,
    /// The extents of a product, M x N x K.
    pub extents: Option<String>,
    /// Whether the backward pass recomputes it.
    pub is_again: bool,
    /// Whether it moves tensors between ranks.
    #[serde(skip)]
    pub is_exchange: bool,
    pub flops: u64,
    pub bytes: u64,
    pub seconds: f64,
    pub least_seconds: f64,
    /// The least times of its arithmetic and of its memory traffic at the device's peak rates.
    pub arithmetic_seconds: f64,
    pub memory_seconds: f64,
    /// From kernels timed on this device before; none where none were.
    pub predicted_seconds: Option<f64>,
}

impl Timed {
    /// Its share of an update's time, over all its runs.
    pub fn update_seconds(&self) -> f64 {
        self.times as f64 * self.seconds
    }

    pub fn roofline_seconds(&self) -> f64 {
        self.arithmetic_seconds.max(self.memory_seconds)
    }

    /// The path with every number replaced by a star, which is the same for all layers.
    pub fn pattern(&self) -> String {
        let star = |part: &'_ str| if part.parse::<u64>().is_ok() { "*".into() } else { part.to_string() };
        self.path.split('.').map(star).collect::<Vec<String>>().join(".")
    }
}

fn named<S: serde::Serializer>(work: &Work, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(work.name())
}

/// The launches of an update in order; `times` has a vector for each plan in `runs`.
pub fn joined(compiled: &Compiled, times: &[Vec<LaunchTime>], runs: &[(Role, u64)]) -> Vec<Timed> {
    let mut all = vec![];
    for ((role, repeats), times) in runs.iter().copied().zip(times) {
        let plan = compiled.plans.plan(role).expect("an update has its plans");
        let mut seen = HashSet::new();
        for (launch, time) in plan.launches.iter().zip(times) {
            // Keys survive rewrites, and a node that is recomputed keeps the key of the one it repeats.
            let is_again = role.is_grad() && !seen.insert((launch.key, launch.op.kind()));
            all.push(timed(launch, *time, role, repeats, is_again, &compiled.target));
        }
    }
    all
}

fn timed(
    launch: &Launch,
    time: LaunchTime,
    role: Role,
    times: u64,
    is_again: bool,
    target: &Target,
) -> Timed {
    let show = |view: &View| TensorType::new(view.dtype, view.dims.clone()).to_string();
    Timed {
        plan: role.name(),
        launch: time.launch,
        times,
        work: launch.op.kind().work(),
        op: launch.op.name(),
        kernel: launch.kernel,
        path: launch.path.clone(),
        ins: launch.ins.iter().map(show).collect(),
        outs: launch.outs.iter().map(|view| view.as_ref().map_or("-".into(), show)).collect(),
        extents: extents(launch),
        is_again,
        is_exchange: launch.queue == Queue::Wire,
        flops: launch.flops,
        bytes: launch.bytes(),
        seconds: time.seconds,
        least_seconds: time.least_seconds,
        arithmetic_seconds: launch.flops as f64 / rate(launch, &target.rates),
        memory_seconds: launch.bytes() as f64 / target.rates.memory_bytes,
        predicted_seconds: (!target.timings.is_empty()).then(|| of_launch(launch, target).predicted_seconds),
    }
}

fn extents(launch: &Launch) -> Option<String> {
    let Op::Product { ta, .. } = launch.op else { return None };
    let (a, out) = (&launch.ins.first()?.dims, &launch.outs.first()?.as_ref()?.dims);
    let [.., rows, columns] = a[..] else { return None };
    let [.., m, n] = out[..] else { return None };
    Some(format!("{m}x{n}x{}", if ta { rows } else { columns }))
}
