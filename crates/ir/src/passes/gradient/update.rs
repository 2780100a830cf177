//! The update: lays trained parameters, gradient sums and the optimiser's state into one flat region a group, and builds
//! `apply`: norm, finite check, clip, update, clear. A region is updated by one launch.
//!
//! Where a step has several lanes, the parameters of a layer begin at a multiple of `CHUNK` elements, and the norm is taken
//! of chunks first: neither depends on how many ranks there are, nor on which of them has a chunk.

use crate::builder::{Builder, Tensor};
use crate::graph::{Class, Graph, Init, Part, Slot, SlotId};
use crate::ops::elementwise::Elementwise as E;
use crate::ops::reduce::Fold;
use crate::optimizers::{self, Group, Optimizer, Step, align, moment_path, scales_path};
use crate::passes::forward::adapter;
use crate::passes::gradient::average::{self, average_path};
use crate::passes::gradient::differentiate::{
    CARRIED_SUM, LOSS_SUM, SUM, Trained, WEIGHT_SUM, flat, gradient_path,
};
use crate::passes::gradient::recompute::layer_of;
use crate::passes::gradient::totals::Totals;
use crate::passes::input_path;
use crate::passes::options::{Options, Rule, Update};
use crate::plan::Role;
use crate::types::{DType, TensorType};

pub const UPDATES: &str = "optimizer.updates";
pub const SKIPPED: &str = "optimizer.skipped";
/// The input that carries the learning rates, one or `Update::rates` of them.
pub const LR: &str = "lr";
/// Elements whose squares are summed together where a step has several lanes. A reduction of this many elements is one piece
/// on every backend, so its bits do not depend on how many chunks there are.
pub const CHUNK: usize = 4096;

/// Whether a slot holds the gradient sums of a region.
pub(super) fn is_gradient_region(path: &str) -> bool {
    path.starts_with(REGION) && path.ends_with(GRADIENTS)
}

const REGION: &str = "region.";
const GRADIENTS: &str = ".grads";

/// The parameters of a group, side by side.
struct Region {
    group: Group,
    optimizer: &'static Optimizer,
    members: Vec<Member>,
    /// Of all members, with the room up to where the next one may start.
    elements: usize,
}

struct Member {
    weight: SlotId,
    gradient: SlotId,
    /// Its first element in the region.
    start: usize,
}

/// A range of a region's elements that is updated at once.
struct Piece<'a> {
    region: &'a Region,
    slots: Slots,
    /// The number of its first element among those of all regions.
    first: usize,
}

/// Where a piece lies.
struct Slots {
    weight: SlotId,
    gradient: SlotId,
    /// In the order of the optimiser's state.
    values: Vec<SlotId>,
    /// Of those values that have any.
    scales: Vec<SlotId>,
    average: Option<SlotId>,
}

/// Lays the regions out (slots of `trained` become parts of them) and returns the graph of `apply`.
pub fn update(trained: &mut Trained, o: &Options, fused: bool) -> (Graph, usize) {
    let how = &o.update;
    let regions = regions(&trained.graph, &trained.weights, o);
    let (mut sums, mut pieces, mut first) = (vec![], vec![], 0);
    for (i, region) in regions.iter().enumerate() {
        let (whole, members) = lay_out(&mut trained.graph, i, region, how);
        sums.push(whole.gradient);
        match fused {
            true => pieces.push(Piece { region, slots: whole, first }),
            false => pieces.extend(region.members.iter().zip(members).map(|(member, slots)| Piece {
                region,
                slots,
                first: first + member.start,
            })),
        }
        first += region.elements;
    }
    let launches = pieces.len();
    for path in [UPDATES, SKIPPED] {
        trained.graph.add_slot(slot(path, TensorType::new(DType::F32, [1]), Class::Moment));
    }
    let slots = trained.graph.slots.clone();
    (apply(Graph { slots, ..Graph::default() }, &sums, &pieces, o), launches)
}

fn slot(path: &str, ty: TensorType, class: Class) -> Slot {
    Slot { path: path.into(), ty, class, init: Init::Zeros, part: None }
}

fn regions(g: &Graph, weights: &[(SlotId, SlotId)], o: &Options) -> Vec<Region> {
    let how = &o.update;
    let layer = |member: &Member| layer_of(&g.slot(member.weight).path);
    let mut regions: Vec<Region> = vec![];
    for &(weight, gradient) in weights {
        let adapts = g.slot(weight).path.starts_with(adapter::SCOPE);
        let group = Group { adapts, rule: rule_of(g, weight, how) };
        let known = regions.iter().position(|region| region.group == group).unwrap_or_else(|| {
            let optimizer = optimizers::of(how).expect("a rule that keeps such moments");
            regions.push(Region { group, optimizer, members: vec![], elements: 0 });
            regions.len() - 1
        });
        let region = &mut regions[known];
        let own = Member { weight, gradient, start: region.elements };
        let begins = region.members.last().is_some_and(|last| layer(last) != layer(&own));
        if o.lanes > 1 && begins {
            region.elements = region.elements.next_multiple_of(CHUNK);
        }
        region.members.push(Member { start: region.elements, ..own });
        let align = align(&(region.optimizer.state)(how));
        region.elements += g.slot(weight).ty.elements().next_multiple_of(align);
    }
    if o.lanes > 1 {
        regions.iter_mut().for_each(|region| region.elements = region.elements.next_multiple_of(CHUNK));
    }
    regions
}

/// The rule of a weight; merged weights share theirs, so the first one's serves.
fn rule_of(g: &Graph, weight: SlotId, how: &Update) -> Rule {
    let first = g.slots.iter().find(|s| s.part.is_some_and(|p| p.of == weight && p.offset == 0));
    let slot = first.unwrap_or(g.slot(weight));
    how.rule(&slot.path, slot.ty.rank())
}

/// Adds the slots of the region of a number, and those of its members in them.
fn lay_out(g: &mut Graph, index: usize, region: &Region, how: &Update) -> (Slots, Vec<Slots>) {
    let state = (region.optimizer.state)(how);
    let scaled = |values: &[SlotId]| -> Vec<(SlotId, usize)> {
        state.iter().zip(values).filter_map(|(state, value)| Some((*value, state.block?))).collect()
    };
    let mut add = |name: &str, dtype: DType, class: Class| {
        g.add_slot(slot(&format!("{REGION}{index}.{name}"), flat(region.elements).with(dtype), class))
    };
    let weight = add("weights", DType::F32, Class::Weight);
    let gradient = add(&GRADIENTS[1..], DType::F32, Class::Carry);
    let values: Vec<SlotId> =
        state.iter().map(|state| add(state.of_region, state.dtype, Class::Moment)).collect();
    let average = how.average.map(|_| add("averages", DType::F32, Class::Average));
    let scales = scaled(&values).into_iter().map(|(of, block)| scales_of(g, of, block, None)).collect();
    let whole = Slots { weight, gradient, values, scales, average };
    let mut members = vec![];
    for &Member { weight, gradient, start } in &region.members {
        let lies_in = |of: SlotId| Part { of, offset: start };
        g.slot_mut(weight).part = Some(lies_in(whole.weight));
        g.slot_mut(gradient).part = Some(lies_in(whole.gradient));
        name_parts(g, weight, gradient, gradient_path);
        let of_whole = state.iter().zip(&whole.values);
        let values: Vec<SlotId> = of_whole
            .map(|(state, of)| beside(g, weight, lies_in(*of), |weight| moment_path(state.name, weight)))
            .collect();
        let blocks = scaled(&values).into_iter().zip(&whole.scales);
        let scales = blocks
            .map(|((value, block), of)| {
                scales_of(g, value, block, Some(Part { of: *of, offset: start / block }))
            })
            .collect();
        let average = whole.average.map(|of| beside(g, weight, lies_in(of), average_path));
        members.push(Slots { weight, gradient, values, scales, average });
    }
    (whole, members)
}

/// Adds what lies beside a weight in another slot of its region, named by the weight's path.
fn beside(g: &mut Graph, weight: SlotId, part: Part, path: impl Fn(&str) -> String) -> SlotId {
    let Slot { class, ref ty, .. } = *g.slot(part.of);
    let (dtype, source) = (ty.dtype, g.slot(weight).clone());
    let beside = slot(&path(&source.path), source.ty.with(dtype), class);
    let beside = g.add_slot(Slot { part: Some(part), ..beside });
    name_parts(g, weight, beside, path);
    beside
}

/// Adds the scales of a slot of state, one a block.
fn scales_of(g: &mut Graph, values: SlotId, block: usize, part: Option<Part>) -> SlotId {
    let Slot { path, ty, .. } = g.slot(values);
    let (path, blocks) = (scales_path(path), ty.elements().div_ceil(block));
    g.add_slot(Slot { part, ..slot(&path, flat(blocks), Class::Scale) })
}

/// Names the pieces of `whole` that belong to the weights merged into `weight`: checkpoints and tests know gradients
/// and moments by the names the model gives its weights.
fn name_parts(g: &mut Graph, weight: SlotId, whole: SlotId, path: impl Fn(&str) -> String) {
    for id in g.slot_ids() {
        let merged = g.slot(id).clone();
        let Some(part) = merged.part.filter(|p| p.of == weight) else { continue };
        let part = Some(Part { of: whole, offset: part.offset });
        let Slot { class, ref ty, .. } = *g.slot(whole);
        let ty = merged.ty.with(ty.dtype);
        g.add_slot(Slot { part, ..slot(&path(&merged.path), ty, class) });
    }
}

/// The graph of one update. Its results are what a step reports. The norm is taken over whole regions of gradient
/// `sums` however the update is cut, so that cutting it changes no bit.
fn apply(slots: Graph, sums: &[SlotId], pieces: &[Piece<'_>], o: &Options) -> Graph {
    let how = &o.update;
    let find = |path: &str| slots.find_slot(path).expect("laid out before");
    let (loss_sum, weight_sum) = (find(LOSS_SUM), find(WEIGHT_SUM));
    let (updates, skipped) = (find(UPDATES), find(SKIPPED));
    let named = slots.slot_ids().filter_map(|id| Some((id, slots.slot(id).path.strip_prefix(CARRIED_SUM)?)));
    let named: Vec<(SlotId, String)> = named.map(|(id, name)| (id, format!("{SUM}{name}"))).collect();
    let b = Builder::from_graph(slots);
    let rates = b.input(&input_path(Role::Apply, LR), DType::F32, &[how.rates]);
    b.scope("apply", || {
        let carried = named.iter().map(|(slot, _)| *slot);
        let small: Vec<SlotId> = [loss_sum, weight_sum].into_iter().chain(carried).collect();
        let totals = Totals::new(&b, sums, &small, o);
        let per_weight = totals.of(weight_sum).recip();
        let squares = if o.lanes > 1 { squares_by_chunks(&b, &totals, sums) } else { squares(&totals, sums) };
        let norm = squares.sqrt() * per_weight;
        let loss = totals.of(loss_sum) * per_weight;
        let is_finite = norm.map(E::Finite) * loss.map(E::Finite);
        let scale = match how.clip {
            0.0 => per_weight,
            clip => per_weight * norm.recip().scale(clip as f64).zip(E::Min, b.fill(1.0, DType::F32, &[1])),
        };
        let count = b.read(updates) + is_finite;
        b.write(updates, count);
        b.write(skipped, b.read(skipped) + (b.fill(1.0, DType::F32, &[1]) - is_finite));
        let rate = how.average.map(|decay| average::rate(decay, count, is_finite));
        for Piece { region: Region { group, optimizer, .. }, slots, first } in pieces {
            let state: Vec<SlotId> = slots.values.iter().chain(&slots.scales).copied().collect();
            let (weights, gradients) = (b.read(slots.weight), totals.of(slots.gradient));
            let kept = state.iter().map(|slot| b.read(*slot)).collect();
            let piece = optimizers::Piece { weights, gradients, state: kept, first: *first };
            // In a plan a slice is a view: the kernel reads its own rate where the host wrote it.
            let lr = if how.rates == 1 { rates } else { rates.slice(0, group.rule.rate, 1) };
            let step = Step { lr, scale, updates: count, is_finite };
            let new = (optimizer.update)(how, group, &piece, &step);
            if let (Some(slot), Some(rate)) = (slots.average, rate) {
                b.write(slot, average::moved(b.read(slot), new[0], rate));
            }
            for (slot, value) in [slots.weight].into_iter().chain(state).zip(new) {
                b.write(slot, value);
            }
        }
        b.result("loss", loss);
        b.result("grad_norm", norm);
        b.result("weight", totals.of(weight_sum).scale(1.0));
        b.result("is_finite", is_finite);
        for (slot, name) in &named {
            b.result(name, totals.of(*slot) * per_weight);
        }
        totals.give_stops();
        for slot in sums.iter().copied().chain(small) {
            let ty = b.with_graph(|g| g.slot(slot).ty.clone());
            b.write(slot, b.fill(0.0, ty.dtype, &ty.dims));
        }
    });
    b.finish()
}

/// The sum of the squares of all gradients.
fn squares<'g>(totals: &Totals<'g>, sums: &[SlotId]) -> Tensor<'g> {
    let of_regions = sums.iter().map(|sum| totals.of(*sum).reduce(0, Fold::SumSquares));
    of_regions.reduce(|a, b| a + b).expect("something is trained")
}

/// The same by chunks, in the order in which regions lay them out.
fn squares_by_chunks<'g>(b: &'g Builder, totals: &Totals<'g>, sums: &[SlotId]) -> Tensor<'g> {
    let chunks = |sum: &SlotId| {
        let gradients = totals.of(*sum);
        let count = gradients.dims()[0] / CHUNK;
        gradients.reshape(&[count, CHUNK]).reduce(1, Fold::SumSquares).reshape(&[count])
    };
    let all: Vec<Tensor<'g>> = sums.iter().map(chunks).collect();
    b.concat(&all, 0).sum(0)
}
