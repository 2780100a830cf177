//! The arena over a step: bytes alive at every launch, by category, and the buffers alive at the peak.

use std::borrow::Cow;
use std::collections::BTreeMap;

use flatout_ir::plan::{Buffer, Category};
use flatout_ir::{PlanSet, Role};

use flatout_report::plot::{Area, Areas, Mark};
use flatout_report::words;

/// Buffers of one name that are alive at the peak.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Alive {
    /// `layers.0..31.ffn`: paths that differ in one number and hold as many bytes are one row.
    pub path: String,
    pub buffers: usize,
    pub bytes: usize,
}

/// A description of the peak.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Peak {
    pub role: Cow<'static, str>,
    /// Counted from 1.
    pub launch: usize,
    pub launches: usize,
    pub kernel: &'static str,
    pub path: String,
    pub bytes: usize,
    /// Transients alive there, largest first.
    pub alive: Vec<Alive>,
}

pub fn describe(plans: &PlanSet) -> Peak {
    let (at, largest) = (plans.peak(), plans.largest_plan());
    let plan = &plans.plans[largest];
    let is_alive = |b: &&Buffer| b.live.as_ref().is_some_and(|(_, range)| range.contains(&at.launch));
    // The numbers that occur, by name without its number and by size.
    let mut by_name: BTreeMap<(String, usize), Vec<Option<usize>>> = BTreeMap::new();
    for buffer in plans.transients(largest).filter(is_alive) {
        let (stem, number) = unnumbered(&buffer.name);
        by_name.entry((stem, buffer.bytes)).or_default().push(number);
    }
    let row = |((stem, bytes), mut numbers): ((String, usize), Vec<Option<usize>>)| {
        let buffers = numbers.len();
        numbers.sort_unstable();
        let numbers = match (numbers[0], numbers[buffers - 1]) {
            (Some(first), Some(last)) if first < last => format!("{first}..{last}"),
            (Some(one), _) => one.to_string(),
            (None, _) => String::new(),
        };
        Alive { path: stem.replacen('*', &numbers, 1), buffers, bytes: buffers * bytes }
    };
    let mut alive: Vec<Alive> = vec![];
    for one in by_name.into_iter().map(row) {
        match alive.iter_mut().find(|known| known.path == one.path) {
            Some(known) => {
                (known.buffers, known.bytes) = (known.buffers + one.buffers, known.bytes + one.bytes)
            }
            None => alive.push(one),
        }
    }
    alive.sort_by_key(|a| (std::cmp::Reverse(a.bytes), a.path.clone()));
    let launch = plan.launches.get(at.launch);
    Peak {
        role: plan.role.name(),
        launch: at.launch + 1,
        launches: plan.launches.len(),
        kernel: launch.map_or("", |l| l.kernel),
        path: launch.map_or(String::new(), |l| l.path.clone()),
        bytes: plans.persistent_bytes + at.transient_bytes,
        alive,
    }
}

/// A path with its first number replaced by a star, and that number.
fn unnumbered(path: &str) -> (String, Option<usize>) {
    let mut number = None;
    let parts = path.split('.').map(|part| match part.parse::<usize>() {
        Ok(n) if number.is_none() => {
            number = Some(n);
            "*"
        }
        _ => part,
    });
    let parts: Vec<&str> = parts.collect();
    (parts.join("."), number)
}

/// The arena over the plans of a step, one after another.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Timeline {
    pub launches: usize,
    /// Bytes alive at every launch, by category; categories that hold nothing are left out.
    pub areas: Vec<(&'static str, Vec<usize>)>,
    /// The launch that a plan begins with, and the plan's name.
    pub parts: Vec<(usize, String)>,
    pub peak: Peak,
    /// The launch of the peak, among all of them.
    pub peak_at: Option<usize>,
}

pub fn over_step(plans: &PlanSet, micro_batches: usize) -> Timeline {
    let is_of_step = |plan: &usize| {
        let role = plans.plans[*plan].role;
        role.is_grad() || matches!(role, Role::Keep(_) | Role::Fold(_) | Role::Apply)
    };
    let step: Vec<usize> = (0..plans.plans.len()).filter(is_of_step).collect();
    let area = |category: &Category| {
        let is_of = |b: &Buffer| b.category == *category;
        let always: usize =
            plans.buffers.iter().filter(|b| b.live.is_none() && is_of(b)).map(|b| b.bytes).sum();
        let alive = step.iter().flat_map(|plan| plans.alive_bytes(*plan, is_of));
        (category.name(), alive.map(|n| always + n).collect::<Vec<usize>>())
    };
    let areas = Category::ALL.iter().map(area).filter(|(_, bytes)| bytes.iter().any(|n| *n > 0)).collect();
    let (mut parts, mut launches, mut peak_at) = (vec![], 0, None);
    let peak = describe(plans);
    for index in step.iter().copied() {
        let plan = &plans.plans[index];
        let name = match (plan.role, micro_batches) {
            (Role::GRAD, 2..) => format!("grad, {micro_batches} times a step"),
            (role, _) => role.name().into(),
        };
        parts.push((launches, name));
        if index == plans.largest_plan() {
            peak_at = Some(launches + peak.launch - 1);
        }
        launches += plan.launches.len();
    }
    Timeline { launches, areas, parts, peak, peak_at }
}

/// A chart: launches of a step from left to right, bytes stacked by category, the peak marked.
pub fn picture(title: &str, plans: &PlanSet, micro_batches: usize) -> Areas {
    let (unit, scale) = match plans.arena_bytes {
        n if n >= 1 << 30 => ("GiB", (1u64 << 30) as f64),
        n if n >= 1 << 20 => ("MiB", (1u64 << 20) as f64),
        _ => ("KiB", 1024.0),
    };
    let Timeline { launches: all, areas, parts, peak, peak_at } = over_step(plans, micro_batches);
    let areas = areas.into_iter().map(|(name, bytes)| Area {
        name: name.into(),
        values: bytes.into_iter().map(|n| n as f64 / scale).collect(),
    });
    let mark = peak_at.map(|at| Mark {
        at,
        value: peak.bytes as f64 / scale,
        name: format!("peak {}", words::bytes(peak.bytes as u64)),
    });
    let Peak { role, launch, launches, kernel, path, alive, .. } = &peak;
    let mut notes = vec![format!(
        "The peak is at launch {launch} of {launches} of {role}: {kernel} of {path}. Besides persistent memory:"
    )];
    notes.extend(alive.iter().take(8).map(|a| {
        let many = if a.buffers > 1 { format!(" in {} buffers", a.buffers) } else { String::new() };
        format!("{}  {}{many}", words::bytes(a.bytes as u64), a.path)
    }));
    let arena = plans.arena_bytes as f64 / scale;
    Areas {
        title: title.into(),
        x: format!("{} launches", words::count(all as u64)),
        y: unit.into(),
        areas: areas.collect(),
        level: Some((arena, format!("arena {}", words::bytes(plans.arena_bytes as u64)))),
        parts,
        mark,
        notes,
    }
}
