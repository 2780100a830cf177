//! Memory by layer: the bytes of every block's weights, gradients, moments and activations. Together they are the arena.

use std::collections::{BTreeMap, BTreeSet};

use flatout_ir::passes::adapter::SCOPE;
use flatout_ir::plan::{Buffer, Category, PlacedSlot};
use flatout_ir::{Class, PlanSet};

/// Memory outside the model: inputs, tables, counters, padding for alignment.
const OTHER: &str = "other";
/// Gaps between transient buffers, each of which keeps its place for its whole life.
const GAPS: &str = "gaps";

/// Consecutive blocks of equal size.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Layers {
    /// `layers.0..31`, or the path of a single block.
    pub path: String,
    pub count: usize,
    /// The bytes of one block.
    pub each: Bytes,
}

/// Bytes of one layer. Activations and scratch count what is alive at the peak of the largest plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Bytes {
    pub parameters: usize,
    pub gradients: usize,
    pub optimizer: usize,
    pub activations: usize,
    /// Inputs, tables and everything else.
    pub other: usize,
}

impl Bytes {
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.optimizer + self.activations + self.other
    }

    fn add(&mut self, category: Category, bytes: usize) {
        *match category {
            Category::Parameters | Category::Frozen | Category::Adapters => &mut self.parameters,
            Category::Gradients => &mut self.gradients,
            Category::Optimizer | Category::Average => &mut self.optimizer,
            Category::Activations | Category::Workspace | Category::Wire => &mut self.activations,
            Category::Inputs => &mut self.other,
        } += bytes;
    }
}

/// Rows in the order of the model, memory outside the layers last. The totals times the counts sum to `arena_bytes`.
pub fn layers(plans: &PlanSet) -> Vec<Layers> {
    let mut rows: Vec<(String, Bytes)> = vec![];
    let mut add = |path: &str, category: Category, bytes: usize| {
        let at = rows.iter().position(|(known, _)| known == path).unwrap_or_else(|| {
            rows.push((path.into(), Bytes::default()));
            rows.len() - 1
        });
        rows[at].1.add(category, bytes);
    };
    let parameters = plans.slots.iter().filter(|slot| slot.class.is_parameter() && !slot.is_whole);
    // Adapters belong to the layers of their weights.
    let of_model = parameters.filter(|slot| !slot.path.starts_with(SCOPE)).map(|slot| layer_of(&slot.path));
    let of_model: BTreeSet<String> = of_model.collect();
    let mut persistent: BTreeMap<Category, usize> = BTreeMap::new();
    for buffer in plans.buffers.iter().filter(|b| b.live.is_none()) {
        *persistent.entry(buffer.category).or_default() += buffer.bytes;
    }
    let starts: BTreeMap<usize, Category> =
        plans.buffers.iter().filter(|b| b.live.is_none()).map(|b| (b.offset, b.category)).collect();
    for slot in innermost(plans) {
        let layer = layer_within(&slot.path, &of_model);
        let is_persistent = slot.view.offset < plans.persistent_bytes;
        if let Some(layer) = layer.filter(|_| slot.class != Class::Input && is_persistent) {
            let (_, &category) =
                starts.range(..=slot.view.offset).next_back().expect("a slot lies in a buffer");
            let bytes = slot.ty.bytes();
            add(&layer, category, bytes);
            *persistent.entry(category).or_default() -= bytes;
        }
    }
    let (at, largest) = (plans.peak(), plans.largest_plan());
    let is_alive = |b: &&Buffer| b.live.as_ref().is_some_and(|(_, range)| range.contains(&at.launch));
    for buffer in plans.transients(largest).filter(is_alive) {
        let path = buffer.name.strip_suffix(" scratch").unwrap_or(&buffer.name);
        let layer = match buffer.category {
            Category::Gradients => layer_within(path, &of_model),
            _ => None,
        };
        add(&layer.unwrap_or_else(|| layer_of(path)), buffer.category, buffer.bytes);
    }
    for (category, bytes) in persistent {
        add(OTHER, category, bytes);
    }
    add(GAPS, Category::Activations, plans.transient_bytes - at.transient_bytes);
    rows.retain(|(_, bytes)| bytes.total() > 0);
    fold(rows)
}

/// The slots of the model that contain no others, each region once.
fn innermost(plans: &PlanSet) -> impl Iterator<Item = &PlacedSlot> {
    let mut seen: BTreeSet<(usize, usize)> = BTreeSet::new();
    let is_model = |slot: &&PlacedSlot| {
        let is_beside = matches!(slot.class, Class::Derived | Class::Carry | Class::Moment | Class::Average);
        slot.class.is_parameter() || is_beside
    };
    let leaves = plans.slots.iter().filter(|slot| !slot.is_whole).filter(is_model);
    leaves.filter(move |slot| seen.insert((slot.view.offset, slot.ty.bytes())))
}

/// The layer of a tensor that belongs to a weight and has its path in its own: `gradient.`, `optimizer.m.`, a copy in another
/// type.
fn layer_within(path: &str, of_model: &BTreeSet<String>) -> Option<String> {
    let starts = [0].into_iter().chain(path.match_indices('.').map(|(dot, _)| dot + 1));
    starts.map(|start| layer_of(&path[start..])).find(|layer| of_model.contains(layer))
}

/// The path up to its first number: `layers.3` of `layers.3.attn.wq`; the first name where there is none.
fn layer_of(path: &str) -> String {
    let mut kept: Vec<&str> = vec![];
    for part in path.split('.') {
        kept.push(part);
        if part.parse::<usize>().is_ok() {
            return kept.join(".");
        }
    }
    kept[0].into()
}

/// Merges neighbours whose numbers are consecutive and whose bytes are equal into one row.
fn fold(rows: Vec<(String, Bytes)>) -> Vec<Layers> {
    struct Run {
        stem: String,
        first: usize,
        layers: Layers,
    }
    let numbered = |path: &str| {
        let (stem, number) = path.rsplit_once('.')?;
        Some((stem.to_string(), number.parse::<usize>().ok()?))
    };
    let mut runs: Vec<Run> = vec![];
    for (path, each) in rows {
        let (stem, first) = numbered(&path).unwrap_or((String::new(), 0));
        match runs.iter_mut().find(|run| {
            !stem.is_empty()
                && run.stem == stem
                && run.first + run.layers.count == first
                && run.layers.each == each
        }) {
            Some(run) => {
                run.layers.count += 1;
                run.layers.path = format!("{stem}.{}..{first}", run.first);
            }
            None => runs.push(Run { stem, first, layers: Layers { path, count: 1, each } }),
        }
    }
    runs.into_iter().map(|run| run.layers).collect()
}
