//! Sums launches by kind of work, by kernel, and by place in the model.

use std::collections::BTreeMap;

use super::launches::Timed;

/// The sum of several launches. Times are of one update.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Row {
    pub name: String,
    pub launches: u64,
    pub ms: f64,
    /// Share of the update as it runs.
    pub share: f64,
    pub flops: u64,
    pub bytes: u64,
    pub teraflops_per_second: f64,
    pub gigabytes_per_second: f64,
    pub roofline_ms: f64,
    /// The roofline over the time: 1 is the device's peak.
    pub of_roofline: f64,
    pub bound: Bound,
    pub predicted_ms: Option<f64>,
}

/// The resource that sets the roofline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    Arithmetic,
    Memory,
}

impl Bound {
    pub fn name(self) -> &'static str {
        match self {
            Bound::Arithmetic => "arithmetic",
            Bound::Memory => "memory",
        }
    }
}

/// A row per kind of work, the longest first.
pub fn by_work(timed: &[Timed], step_ms: f64) -> Vec<Row> {
    grouped(timed, step_ms, |t| t.work.name().into())
}

/// A row per operation and kernel.
pub fn by_kernel(timed: &[Timed], step_ms: f64) -> Vec<Row> {
    grouped(timed, step_ms, kernel)
}

/// The kernel's name, with the operation's where the two differ.
pub fn kernel(t: &Timed) -> String {
    let name = t.kernel.split_once('.').map_or(t.kernel, |(_, name)| name);
    if name == t.op { t.kernel.into() } else { format!("{} ({})", t.op, t.kernel) }
}

/// One row per path, with its layers together, per operation and, for products, per extents. Operations that the backward
/// pass recomputes have rows of their own.
pub fn by_place(timed: &[Timed], step_ms: f64) -> Vec<Row> {
    grouped(timed, step_ms, |t| {
        let extents = t.extents.as_ref().map_or(String::new(), |extents| format!(" {extents}"));
        let again = if t.is_again { ", again" } else { "" };
        format!("{} {}{extents}{again}", t.pattern(), t.op)
    })
}

/// A row per name, the longest first, and in order of names where times are equal.
pub fn grouped(timed: &[Timed], step_ms: f64, name: impl Fn(&Timed) -> String) -> Vec<Row> {
    let mut groups: BTreeMap<String, Vec<&Timed>> = BTreeMap::new();
    for launch in timed {
        groups.entry(name(launch)).or_default().push(launch);
    }
    let mut rows: Vec<Row> = groups.into_iter().map(|(name, of)| row(name, &of, step_ms)).collect();
    rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    rows
}

/// The sum of these launches.
pub fn row(name: String, of: &[&Timed], step_ms: f64) -> Row {
    let seconds = |one: &dyn Fn(&Timed) -> f64| of.iter().map(|t| t.times as f64 * one(t)).sum::<f64>();
    let count = |one: &dyn Fn(&Timed) -> u64| of.iter().map(|t| t.times * one(t)).sum::<u64>();
    let ms = 1e3 * seconds(&|t| t.seconds);
    let (flops, bytes) = (count(&|t| t.flops), count(&|t| t.bytes));
    let roofline_ms = 1e3 * seconds(&Timed::roofline_seconds);
    let is_arithmetic = seconds(&|t| t.arithmetic_seconds) > seconds(&|t| t.memory_seconds);
    let is_predicted = of.iter().all(|t| t.predicted_seconds.is_some());
    // Without measured time there is no rate.
    let per_ms = |amount: f64| if ms > 0.0 { amount / ms } else { 0.0 };
    Row {
        name,
        launches: count(&|_| 1),
        ms,
        share: ms / step_ms,
        flops,
        bytes,
        teraflops_per_second: per_ms(flops as f64 / 1e9),
        gigabytes_per_second: per_ms(bytes as f64 / 1e6),
        roofline_ms,
        of_roofline: per_ms(roofline_ms),
        bound: if is_arithmetic { Bound::Arithmetic } else { Bound::Memory },
        predicted_ms: is_predicted.then(|| 1e3 * seconds(&|t| t.predicted_seconds.unwrap_or(0.0))),
    }
}
