//! bf16 copies of weights whose products run in 8 bits are not kept: only the update reads them in training, to quantise them,
//! and evaluation, which casts the f32 weights instead where it reads them. That saves 2 bytes a parameter, and evaluation
//! computes with the same bits.
//!
//! An update writes the copies of a whole region of parameters at once. The region's copy becomes a temporary value of the
//! update, and what else is read of it, such as the embedding, is copied from there into slots of its own.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::builder::Builder;
use crate::graph::{Class, Graph, Slot, SlotId};
use crate::ops::Op;
use crate::passes::types::copies::cast_where_read;
use crate::passes::types::fp8::{weight_name, weight_path};
use crate::passes::types::precision::copy_path;
use crate::plan::Role;
use crate::replay::{Replay, without_slots};

/// Drops the copies that only evaluation reads, and returns their number. Regions of which more would be copied than dropped
/// keep their copy.
pub(crate) fn temporary_copies(graphs: &mut [(Role, Graph)]) -> usize {
    let places = Places::new(graphs);
    let dropped: Vec<Region> = regions(graphs, &places);
    let gone: HashSet<&str> = dropped.iter().flat_map(|region| &region.gone).map(String::as_str).collect();
    for (role, g) in graphs.iter_mut() {
        if let Role::Eval = role {
            *g = without_copies(g, &gone);
        }
        for region in &dropped {
            if let Role::Apply | Role::Derive = role {
                write_parts(g, region, &places);
            }
            for part in &region.kept {
                if let Some(id) = g.find_slot(part) {
                    g.slot_mut(id).part = None;
                }
            }
        }
        let is_kept = |region: &Region, path: &str| {
            places.chain(path).any(|slot| region.kept.iter().any(|kept| kept == slot))
        };
        let is_gone = |slot: &Slot| {
            let root = places.extent(&slot.path).map(|(root, _)| root);
            let region = root.and_then(|root| dropped.iter().find(|region| region.path == root));
            region.is_some_and(|region| !is_kept(region, &slot.path))
        };
        without_slots(g, is_gone);
    }
    dropped.iter().map(|region| region.weights).sum()
}

/// A region of bf16 copies that is not kept as a whole.
struct Region {
    path: String,
    /// The copies in it that remain, each in a slot of its own.
    kept: Vec<String>,
    /// The copies that evaluation reads, to be cast from the weights there.
    gone: Vec<String>,
    /// Number of weights without a copy.
    weights: usize,
}

fn regions(graphs: &[(Role, Graph)], places: &Places) -> Vec<Region> {
    let graph = |wanted: Role| graphs.iter().find(|(role, _)| *role == wanted).map(|(_, g)| g);
    let (Some(grad), Some(apply)) = (graph(Role::GRAD), graph(Role::Apply)) else { return vec![] };
    let read = |in_role: &dyn Fn(Role) -> bool| -> Vec<&Slot> {
        let mut seen = HashSet::new();
        let graphs = graphs.iter().filter(|(role, _)| in_role(*role)).map(|(_, g)| g);
        let slots = graphs.flat_map(|g| {
            g.nodes.iter().filter_map(|node| match node.op {
                Op::Read { slot } => Some(g.slot(slot)),
                _ => None,
            })
        });
        slots.filter(|slot| slot.class == Class::Derived && seen.insert(slot.path.as_str())).collect()
    };
    let (trained, evaluated) = (read(&|role| role != Role::Eval), read(&|role| role == Role::Eval));
    // Weights with codes of which training reads nothing else.
    let has_codes = |name: &str| {
        ["rows", "columns"].iter().any(|what| grad.find_slot(&weight_path(what, name)).is_some())
    };
    let coded: Vec<&Slot> = grad
        .slots
        .iter()
        .filter(|s| s.class == Class::Derived && weight_name(s).is_some_and(has_codes))
        .collect();
    let written = apply.writes.iter().map(|(slot, _)| apply.slot(*slot));
    let regions =
        written.filter(|slot| slot.class == Class::Derived && slot.path.starts_with(&copy_path("")));
    let region = |whole: &Slot| {
        let inside = |slot: &&&Slot| places.extent(&slot.path).is_some_and(|(root, _)| root == whole.path);
        let range = |slot: &Slot| places.extent(&slot.path).expect("it lies in the region").1;
        let overlaps = |a: &Slot, b: &Slot| range(a).start < range(b).end && range(b).start < range(a).end;
        let of_training: Vec<&Slot> = trained.iter().filter(inside).copied().collect();
        let is_free = |slot: &&&Slot| !of_training.iter().any(|read| overlaps(slot, read));
        let free: Vec<&Slot> = coded.iter().filter(inside).filter(is_free).copied().collect();
        let is_castable = |slot: &&Slot| {
            let (at, weight) = (range(slot), slot.path.strip_prefix(&copy_path("")));
            free.iter().any(|free| range(free).start <= at.start && at.end <= range(free).end)
                && weight
                    .is_some_and(|weight| graph(Role::Eval).is_some_and(|g| g.find_slot(weight).is_some()))
        };
        let (gone, others): (Vec<&Slot>, Vec<&Slot>) =
            evaluated.iter().filter(inside).copied().partition(is_castable);
        let read: HashSet<&str> = of_training.iter().chain(&others).map(|slot| slot.path.as_str()).collect();
        let is_outermost =
            |slot: &&&Slot| !places.chain(&slot.path).skip(1).any(|outer| read.contains(outer));
        let mut kept: Vec<&Slot> = of_training.iter().chain(&others).filter(is_outermost).copied().collect();
        kept.sort_by_key(|slot| range(slot).start);
        kept.dedup_by_key(|slot| &slot.path);
        let is_apart = kept.windows(2).all(|pair| range(pair[0]).end <= range(pair[1]).start);
        let bytes: usize = kept.iter().map(|slot| slot.ty.bytes()).sum();
        let worth = !free.is_empty() && is_apart && 2 * bytes < whole.ty.bytes();
        let paths = |slots: &[&Slot]| slots.iter().map(|slot| slot.path.clone()).collect();
        worth.then(|| Region {
            path: whole.path.clone(),
            kept: paths(&kept),
            gone: paths(&gone),
            weights: free.len(),
        })
    };
    regions.filter_map(region).collect()
}

/// Evaluation without reads of these copies: it casts the weights.
fn without_copies(g: &Graph, gone: &HashSet<&str>) -> Graph {
    let sources: HashMap<String, SlotId> = g
        .slot_ids()
        .map(|id| (copy_path(&g.slot(id).path), id))
        .filter(|(copy, _)| gone.contains(copy.as_str()))
        .collect();
    cast_where_read(Replay::new(g), &sources, &HashMap::new())
}

/// Writes the copies that remain of a region instead of the region.
fn write_parts(g: &mut Graph, region: &Region, places: &Places) {
    let Some(whole) = g.find_slot(&region.path) else { return };
    let Some(at) = g.writes.iter().position(|(slot, _)| *slot == whole) else { return };
    let (_, value) = g.writes.remove(at);
    let elements = g.ty(value).elements();
    let b = Builder::from_graph(std::mem::take(g));
    for path in &region.kept {
        let slot = b.edit(|g| g.find_slot(path).unwrap_or_else(|| g.add_slot(places.slots[path].clone())));
        let dims = places.slots[path].ty.dims.clone();
        let (_, Range { start, end }) = places.extent(path).expect("a part of the region");
        let part = b.at_path(path, || {
            b.tensor(value).reshape(&[elements]).slice(0, start, end - start).reshape(&dims)
        });
        b.write(slot, part);
    }
    *g = b.finish();
}

/// The slots of all graphs by path, and which of them lie in others.
struct Places {
    slots: HashMap<String, Slot>,
    parts: HashMap<String, (String, usize)>,
}

impl Places {
    fn new(graphs: &[(Role, Graph)]) -> Places {
        let mut places = Places { slots: HashMap::new(), parts: HashMap::new() };
        for (g, slot) in graphs.iter().flat_map(|(_, g)| g.slots.iter().map(move |slot| (g, slot))) {
            if let Some(part) = slot.part {
                let of = (g.slot(part.of).path.clone(), part.offset);
                places.parts.entry(slot.path.clone()).or_insert(of);
            }
            places.slots.entry(slot.path.clone()).or_insert_with(|| Slot { part: None, ..slot.clone() });
        }
        places
    }

    /// A slot, the one it lies in, and so on to the root.
    fn chain<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a str> {
        std::iter::successors(Some(path), |path| self.parts.get(*path).map(|(of, _)| of.as_str()))
    }

    /// The root of a slot, and the elements of the root that it takes.
    fn extent<'a>(&'a self, path: &'a str) -> Option<(&'a str, Range<usize>)> {
        let elements = self.slots.get(path)?.ty.elements();
        let start = self.chain(path).filter_map(|path| self.parts.get(path)).map(|(_, offset)| offset).sum();
        Some((self.chain(path).last()?, start..start + elements))
    }
}
