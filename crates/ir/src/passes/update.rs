//! The optimiser: lays trained parameters, gradient sums and moments into one flat region a group, and builds
//! `apply`: norm, finite check, clip, update, clear. A region is updated by one launch.

use crate::block8::BLOCK;
use crate::builder::Builder;
use crate::graph::{Class, Graph, Init, Part, Slot, SlotId};
use crate::op::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::reduce::Fold;
use crate::passes::adapter;
use crate::passes::average::{self, average_path};
use crate::passes::differentiate::{LOSS_SUM, Trained, WEIGHT_SUM, flat, gradient_path};
use crate::passes::input_path;
use crate::passes::options::{Moments, Rule, Update};
use crate::plan::Role;
use crate::types::{DType, TensorType};

pub const UPDATES: &str = "optimizer.updates";
pub const SKIPPED: &str = "optimizer.skipped";
/// The input that carries the learning rate.
pub const LR: &str = "lr";

/// Parameters that share their constants, and where they lie.
struct Region {
    /// Whether its parameters are adapters', which are counted apart.
    adapts: bool,
    weight_decay: f32,
    lr_scale: f32,
    /// (weight, gradient sum) in the order of the region.
    members: Vec<(SlotId, SlotId)>,
}

/// Parts start at multiples of this many elements: 64 bytes of f32, or a block of moments, which is one parameter's then.
fn align(moments: Moments) -> usize {
    if moments == Moments::Int8 { BLOCK } else { 16 }
}

/// Lays the regions out (slots of `trained` become parts of them) and returns the graph of `apply`.
pub fn update(trained: &mut Trained, how: &Update, fused: bool) -> (Graph, usize) {
    let regions = regions(&trained.graph, &trained.weights, how);
    let (mut sums, mut pieces, mut first) = (vec![], vec![], 0);
    for (i, region) in regions.iter().enumerate() {
        let LaidOut { whole, members } = lay_out(&mut trained.graph, i, region, how, first);
        sums.push(whole.grad);
        first += trained.graph.slot(whole.weight).ty.elements();
        pieces.extend(if fused { vec![whole] } else { members });
    }
    let launches = pieces.len();
    for path in [UPDATES, SKIPPED] {
        trained.graph.add_slot(slot(path, TensorType::new(DType::F32, [1]), Class::Moment));
    }
    let slots = trained.graph.slots.clone();
    (apply(Graph { slots, ..Graph::default() }, &sums, &pieces, how), launches)
}

fn slot(path: &str, ty: TensorType, class: Class) -> Slot {
    Slot { path: path.into(), ty, class, init: Init::Zeros, part: None }
}

fn regions(g: &Graph, weights: &[(SlotId, SlotId)], how: &Update) -> Vec<Region> {
    let mut regions: Vec<Region> = vec![];
    for &(weight, grad) in weights {
        let Rule { lr_scale, weight_decay } = rule_of(g, weight, how);
        let adapts = g.slot(weight).path.starts_with(adapter::SCOPE);
        let of = (adapts, weight_decay, lr_scale);
        match regions.iter_mut().find(|r| (r.adapts, r.weight_decay, r.lr_scale) == of) {
            Some(region) => region.members.push((weight, grad)),
            None => regions.push(Region { adapts, weight_decay, lr_scale, members: vec![(weight, grad)] }),
        }
    }
    regions
}

/// The rule of a weight; merged weights share theirs, so the first one's serves.
fn rule_of(g: &Graph, weight: SlotId, how: &Update) -> Rule {
    let first = g.slots.iter().find(|s| s.part.is_some_and(|p| p.of == weight && p.offset == 0));
    let slot = first.unwrap_or(g.slot(weight));
    how.rule(&slot.path, slot.ty.rank())
}

/// What one AdamW works on.
struct Piece {
    weight: SlotId,
    grad: SlotId,
    m: SlotId,
    v: SlotId,
    /// Of both moments, where they are in eight bits.
    scales: Option<[SlotId; 2]>,
    average: Option<SlotId>,
    weight_decay: f32,
    lr_scale: f32,
    /// The number of its first element among those of all regions.
    first: usize,
}

struct LaidOut {
    whole: Piece,
    members: Vec<Piece>,
}

/// Lays out the region of a number, whose first element has the number `first`.
fn lay_out(g: &mut Graph, index: usize, region: &Region, how: &Update, first: usize) -> LaidOut {
    let moments = how.moments;
    let align = align(moments);
    let (m_type, v_type) = match moments {
        Moments::F32 => (DType::F32, DType::F32),
        Moments::BF16 => (DType::BF16, DType::BF16),
        Moments::Int8 => (DType::E4M3, DType::E4M4),
    };
    let offsets: Vec<usize> = region
        .members
        .iter()
        .scan(0, |end, (weight, _)| {
            let start = *end;
            *end += g.slot(*weight).ty.elements().next_multiple_of(align);
            Some(start)
        })
        .collect();
    let last = region.members.last().expect("a region has members");
    let total = offsets[offsets.len() - 1] + g.slot(last.0).ty.elements().next_multiple_of(align);
    let [weights, grads, ms, vs] = [
        ("weights", DType::F32, Class::Weight),
        ("grads", DType::F32, Class::Carry),
        ("first_moments", m_type, Class::Moment),
        ("second_moments", v_type, Class::Moment),
    ]
    .map(|(name, dtype, class)| {
        g.add_slot(slot(&format!("region.{index}.{name}"), flat(total).with(dtype), class))
    });
    let (weight_decay, lr_scale) = (region.weight_decay, region.lr_scale);
    let averages = how
        .average
        .map(|_| g.add_slot(slot(&format!("region.{index}.averages"), flat(total), Class::Average)));
    let scales = (moments == Moments::Int8).then(|| [ms, vs].map(|of| scales_of(g, of, None)));
    let mut members = vec![];
    for (&(weight, grad), &offset) in region.members.iter().zip(&offsets) {
        g.slot_mut(weight).part = Some(Part { of: weights, offset });
        g.slot_mut(grad).part = Some(Part { of: grads, offset });
        name_parts(g, weight, grad, gradient_path);
        let mut moment = |name: &str, of: SlotId| {
            let source = g.slot(weight).clone();
            let path = moment_path(name, &source.path);
            let ty = source.ty.with(g.slot(of).ty.dtype);
            let whole =
                g.add_slot(Slot { part: Some(Part { of, offset }), ..slot(&path, ty, Class::Moment) });
            name_parts(g, weight, whole, |weight| moment_path(name, weight));
            whole
        };
        let (m, v) = (moment("m", ms), moment("v", vs));
        let scales = scales.map(|[of_ms, of_vs]| {
            [(m, of_ms), (v, of_vs)]
                .map(|(moment, of)| scales_of(g, moment, Some(Part { of, offset: offset / BLOCK })))
        });
        let average = averages.map(|of| {
            let Slot { path, ty, .. } = g.slot(weight).clone();
            let part = Some(Part { of, offset });
            let whole = g.add_slot(Slot { part, ..slot(&average_path(&path), ty, Class::Average) });
            name_parts(g, weight, whole, average_path);
            whole
        });
        let first = first + offset;
        members.push(Piece { weight, grad, m, v, scales, average, weight_decay, lr_scale, first });
    }
    let (weight, grad, m, v, average) = (weights, grads, ms, vs, averages);
    let whole = Piece { weight, grad, m, v, scales, average, weight_decay, lr_scale, first };
    LaidOut { whole, members }
}

/// The slot of a parameter's first (`m`) or second (`v`) moment.
pub fn moment_path(name: &str, weight: &str) -> String {
    format!("optimizer.{name}.{weight}")
}

/// The slot that holds the scales of a slot of moments in eight bits.
pub fn scales_path(moments: &str) -> String {
    format!("{moments}.scales")
}

/// Adds the scales of a slot of moments, one a block.
fn scales_of(g: &mut Graph, moments: SlotId, part: Option<Part>) -> SlotId {
    let Slot { path, ty, .. } = g.slot(moments);
    let (path, blocks) = (scales_path(path), ty.elements().div_ceil(BLOCK));
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
fn apply(slots: Graph, sums: &[SlotId], pieces: &[Piece], how: &Update) -> Graph {
    let find = |path: &str| slots.find_slot(path).expect("laid out before");
    let (loss_sum, weight_sum) = (find(LOSS_SUM), find(WEIGHT_SUM));
    let (updates, skipped) = (find(UPDATES), find(SKIPPED));
    let b = Builder::from_graph(slots);
    let lr = b.input(&input_path(Role::Apply, LR), DType::F32, &[1]);
    b.scope("apply", || {
        let per_weight = b.read(weight_sum).recip();
        let norms = sums.iter().map(|s| b.read(*s).reduce(0, Fold::SumSquares));
        let squares = norms.reduce(|a, b| a + b).expect("something is trained");
        let norm = squares.sqrt() * per_weight;
        let loss = b.read(loss_sum) * per_weight;
        let go = norm.map(E::Finite) * loss.map(E::Finite);
        let scale = match how.clip {
            0.0 => per_weight,
            clip => per_weight * norm.recip().scale(clip as f64).zip(E::Min, b.fill(1.0, DType::F32, &[1])),
        };
        let count = b.read(updates) + go;
        b.write(updates, count);
        b.write(skipped, b.read(skipped) + (b.fill(1.0, DType::F32, &[1]) - go));
        let rate = how.average.map(|decay| average::rate(decay, count, go));
        for p in pieces {
            let (beta1, beta2, eps) = (how.beta1, how.beta2, how.eps);
            let Piece { weight_decay, lr_scale, .. } = *p;
            let (copy, first) = (false, p.first as u64);
            let op = match p.scales {
                None => Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first },
                Some(_) => Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy, first },
            };
            let state: Vec<SlotId> = [p.m, p.v].into_iter().chain(p.scales.into_iter().flatten()).collect();
            let mut ins = vec![b.read(p.weight), b.read(p.grad)];
            ins.extend(state.iter().map(|slot| b.read(*slot)));
            ins.extend([lr, scale, count, go]);
            let new = b.ops(op, &ins);
            if let (Some(slot), Some(rate)) = (p.average, rate) {
                b.write(slot, average::moved(b.read(slot), new[0], rate));
            }
            for (slot, value) in [p.weight].into_iter().chain(state).zip(new) {
                b.write(slot, value);
            }
        }
        b.result("loss", loss);
        b.result("grad_norm", norm);
        b.result("weight", b.read(weight_sum).scale(1.0));
        b.result("go", go);
        for slot in sums.iter().copied().chain([loss_sum, weight_sum]) {
            let ty = b.with_graph(|g| g.slot(slot).ty.clone());
            b.write(slot, b.fill(0.0, ty.dtype, &ty.dims));
        }
    });
    b.finish()
}
