//! The layout of trained parameters: parameters, gradient sums and the optimiser's state each lie in one flat region per group.
//!
//! Where a step has several lanes, or ranks hold shards, the parameters of a layer begin at a multiple of `CHUNK` elements and
//! vectors have regions of their own. The layout depends neither on the number of ranks nor on which rank holds a chunk. The
//! slots of a sharded region (`buckets`) include padding, and each slot of state has a second slot for a rank's share, which
//! alone is in memory: `shards` removes the whole ones at the end, and keeps the names of the tensors in them.

use std::ops::Range;

use crate::graph::{Class, Graph, Init, Slot, SlotId, SlotPart};
use crate::mesh::Axis;
use crate::optimizers::{self, Group, Matrix, Name, Optimizer, align, moment_path, scales_path};
use crate::passes::forward::adapter;
use crate::passes::gradient::average::average_path;
use crate::passes::gradient::buckets::{Bucket, buckets, buckets_of_layers};
use crate::passes::gradient::differentiate::{flat, gradient_path};
use crate::passes::gradient::recompute::layer_of;
use crate::passes::gradient::scatter::Scattered;
use crate::passes::gradient::shards::{self, Divided, bucket_path, shard_path};
use crate::passes::options::{Options, Rule, Update};
use crate::pieces::TensorRange;
use crate::plan::PlanSet;
use crate::types::{DType, TensorType};

/// Number of elements whose squares are summed together where a step has several lanes. Every backend reduces this many
/// elements in one piece, so the bits do not depend on the number of chunks.
pub const CHUNK: usize = 4096;

/// Regions with fewer bytes of weights are not sharded: latency would dominate the exchange of their gradients.
pub const LEAST_BYTES: usize = 64 << 10;

/// The prefix of the slots of regions.
pub const REGION: &str = "region.";
const GRADIENTS: &str = ".grads";
const WEIGHTS: &str = ".weights";

/// Whether a slot holds the gradient sums of a region, or a rank's share of them.
pub(crate) fn is_gradient_region(path: &str) -> bool {
    let is_sum = |path: &str| path.starts_with(REGION) && path.ends_with(GRADIENTS);
    is_sum(path) || shards::whole_path(path).is_some_and(is_sum)
}

/// The slot and range of elements with the gradient sums of a rank's piece of a weight.
pub fn gradient_of(plans: &PlanSet, weight: &TensorRange) -> (String, Range<usize>) {
    let path = gradient_path(&weight.path);
    match shards::whole_path(&weight.slot).and_then(|whole| whole.strip_suffix(WEIGHTS)) {
        Some(region) if plans.slot(&path).is_none() => {
            (shard_path(&format!("{region}{GRADIENTS}")), weight.within())
        }
        _ => (path, 0..weight.ty.elements()),
    }
}

/// Whether regions are laid out in chunks, for several lanes or ranks.
pub(super) fn is_chunked(o: &Options) -> bool {
    o.lanes > 1 || o.shards_optimizer()
}

/// Whether a region of this size is sharded. Those of adapters are small, and their row norms need whole matrices; vectors are
/// read in place, without a copy that could be gathered.
fn is_divided(elements: usize, of_vectors: bool, adapts: bool, o: &Options) -> bool {
    let is_large = elements * DType::F32.bytes() >= LEAST_BYTES;
    o.shards_optimizer() && is_large && !of_vectors && !adapts
}

/// Whether any trained parameters of a model will be sharded.
pub fn may_divide(model: &Graph, o: &Options) -> bool {
    let mut elements: Vec<(Rule, usize)> = vec![];
    let is_trained = |slot: &&Slot| slot.class == Class::Weight && !o.freeze.contains(&slot.path);
    for Slot { path, ty, .. } in model.slots.iter().filter(is_trained).filter(|slot| slot.ty.rank() >= 2) {
        let rule = o.update.rule(path, ty.rank());
        match elements.iter_mut().find(|(known, _)| *known == rule) {
            Some((_, sum)) => *sum += ty.elements(),
            None => elements.push((rule, ty.elements())),
        }
    }
    elements.iter().any(|(_, elements)| is_divided(*elements, false, false, o))
}

/// Whether any frozen weights of a model will be sharded, where ranks gather weights.
pub fn may_divide_frozen(model: &Graph, o: &Options) -> bool {
    let is_frozen = |slot: &&Slot| slot.class == Class::Frozen || o.freeze.contains(&slot.path);
    let frozen = model.slots.iter().filter(|slot| slot.class.is_parameter() && slot.ty.rank() >= 2);
    let elements: usize = frozen.filter(is_frozen).map(|slot| slot.ty.elements()).sum();
    let dtype = if o.precision.is_narrow() { DType::BF16 } else { DType::F32 };
    o.shards_parameters() && elements * dtype.bytes() >= LEAST_BYTES
}

/// The parameters of a group, side by side.
pub(super) struct Region {
    pub group: Group,
    pub optimizer: &'static Optimizer,
    /// Whether its parameters are vectors; only distinguished where regions are laid out in chunks.
    of_vectors: bool,
    pub members: Vec<Member>,
    /// Number of elements of all members, including alignment.
    pub elements: usize,
    /// Its division among ranks; empty if it is not sharded.
    pub buckets: Vec<Bucket>,
}

pub(super) struct Member {
    pub weight: SlotId,
    gradient: SlotId,
    /// Index of its first element in the layout of the region.
    pub start: usize,
}

/// The slots of a region, or of a part of it.
#[derive(Clone)]
pub(super) struct Slots {
    pub weight: SlotId,
    pub gradient: SlotId,
    /// In the order of the optimiser's state.
    pub values: Vec<SlotId>,
    /// For those values that have scales.
    pub scales: Vec<SlotId>,
    pub average: Option<SlotId>,
}

/// All slots of a region.
pub(super) struct RegionSlots {
    pub whole: Slots,
    /// The slots of each member.
    pub members: Vec<Slots>,
    /// The slots of a rank's share of each bucket. The gradient slot is the whole bucket's, where each rank has its own sums,
    /// or the share's, where gradients are sharded too.
    pub shares: Vec<Slots>,
    pub divided: Vec<Divided>,
    /// The buckets whose gradients are added over ranks in every micro-batch; none where each rank has its own sums.
    pub scattered: Vec<Scattered>,
}

pub(super) fn slot(path: &str, ty: TensorType, class: Class) -> Slot {
    Slot { path: path.into(), ty, class, init: Init::Zeros, part: None }
}

pub(super) fn regions(g: &Graph, weights: &[(SlotId, SlotId)], o: &Options) -> Vec<Region> {
    let update = &o.update;
    let is_chunked = is_chunked(o);
    let layer = |member: &Member| layer_of(&g.slot(member.weight).path);
    let begins = |region: &Region, member: &Member| {
        region.members.last().is_some_and(|last| layer(last) != layer(member))
    };
    let mut regions: Vec<Region> = vec![];
    for &(weight, gradient) in weights {
        let adapts = g.slot(weight).path.starts_with(adapter::SCOPE);
        let (name, rule) = rule_of(g, weight, update);
        let group = Group { adapts, name, rule };
        let of_vectors = is_chunked && g.slot(weight).ty.rank() < 2;
        let is_own = |region: &Region| region.group == group && region.of_vectors == of_vectors;
        let known = regions.iter().position(is_own).unwrap_or_else(|| {
            let optimizer = optimizers::of(name, update).expect("a rule that keeps such moments");
            regions.push(Region {
                group,
                optimizer,
                of_vectors,
                members: vec![],
                elements: 0,
                buckets: vec![],
            });
            regions.len() - 1
        });
        let region = &mut regions[known];
        let own = Member { weight, gradient, start: region.elements };
        if is_chunked && begins(region, &own) {
            region.elements = region.elements.next_multiple_of(CHUNK);
        }
        region.members.push(Member { start: region.elements, ..own });
        let align = align(&(region.optimizer.state)(update));
        region.elements += g.slot(weight).ty.elements().next_multiple_of(align);
    }
    for region in regions.iter_mut().filter(|_| is_chunked) {
        region.elements = region.elements.next_multiple_of(CHUNK);
        if is_divided(region.elements, region.of_vectors, region.group.adapts, o) {
            if region.group.name.needs_whole_matrices() {
                let layers = region.matrices(g, 0..region.members.len());
                region.buckets = buckets_of_layers(&optimizers::runs(&layers, region.elements), o.buckets, o);
                continue;
            }
            let members = &region.members;
            let is_first = |i: usize| i == 0 || layer(&members[i - 1]) != layer(&members[i]);
            let units: Vec<usize> =
                (0..members.len()).filter(|i| is_first(*i)).map(|i| members[i].start).collect();
            region.buckets = buckets(&units, region.elements, o.buckets, o);
        }
    }
    regions
}

/// The update rule of a weight with its constants, which merged weights share.
fn rule_of(g: &Graph, weight: SlotId, update: &Update) -> (Name, Rule) {
    let first = g.slots.iter().find(|s| s.part.is_some_and(|p| p.of == weight && p.offset == 0));
    let slot = first.unwrap_or(g.slot(weight));
    (update.name.of(&slot.path, slot.ty.rank()), update.rule(&slot.path, slot.ty.rank()))
}

impl Region {
    /// The bucket that a member lies in.
    fn bucket_of(&self, member: &Member) -> Option<usize> {
        self.buckets.iter().position(|bucket| bucket.layout.contains(&member.start))
    }

    /// The matrices of some members by layer, at positions relative to the first member; none unless the update needs matrices.
    pub fn matrices(&self, g: &Graph, members: Range<usize>) -> Vec<Vec<Matrix>> {
        if !self.group.name.needs_whole_matrices() {
            return vec![];
        }
        let members = &self.members[members];
        let mut layers: Vec<(Option<&str>, Vec<Matrix>)> = vec![];
        for member in members {
            let layer = layer_of(&g.slot(member.weight).path);
            let is_part = |slot: &&Slot| slot.part.is_some_and(|part| part.of == member.weight);
            let mut merged: Vec<&Slot> = g.slots.iter().filter(is_part).collect();
            merged.sort_by_key(|slot| slot.part.map(|part| part.offset));
            let matrix = |offset: usize, ty: &TensorType| Matrix {
                start: member.start - members[0].start + offset,
                rows: ty.dims[0],
                columns: ty.dims[1],
            };
            let merged: Vec<Matrix> =
                merged.iter().filter_map(|slot| Some(matrix(slot.part?.offset, &slot.ty))).collect();
            let own = match merged.is_empty() {
                true => vec![matrix(0, &g.slot(member.weight).ty)],
                false => merged,
            };
            match layers.last_mut().filter(|(known, _)| *known == layer) {
                Some((_, matrices)) => matrices.extend(own),
                None => layers.push((layer, own)),
            }
        }
        layers.into_iter().map(|(_, matrices)| matrices).collect()
    }

    /// The matrices of a rank's share of a bucket.
    pub fn matrices_of_share(&self, g: &Graph, bucket: &Bucket) -> Vec<Vec<Matrix>> {
        let layers = self.matrices(g, 0..self.members.len());
        let runs = optimizers::runs(&layers, self.elements);
        let run = runs.iter().rfind(|run| run.start <= bucket.layout.start);
        run.map_or(vec![], |run| run.layers(bucket.share / run.distance))
    }

    /// For each bucket: its gradients, with their positions in it, and the slot of a rank's share of their sums.
    fn scattered(&self, sums: &[SlotId], ways: usize) -> Vec<Scattered> {
        let of_bucket = |(bucket, sums): (&Bucket, &SlotId)| {
            let lies_in = |member: &&Member| bucket.layout.contains(&member.start);
            let members = self.members.iter().filter(lies_in);
            let gradients = members.map(|member| (member.gradient, member.start - bucket.layout.start));
            Scattered { sums: *sums, elements: bucket.share * ways, gradients: gradients.collect() }
        };
        self.buckets.iter().zip(sums).map(of_bucket).collect()
    }

    /// Number of elements of its slots, including padding.
    fn placed_elements(&self, ways: usize) -> usize {
        self.buckets.last().map_or(self.elements, |last| last.place + last.share * ways)
    }
}

/// Adds the slots of region `index`, and those of its members in them.
pub(super) fn lay_out(g: &mut Graph, index: usize, region: &Region, o: &Options) -> RegionSlots {
    let update = &o.update;
    let ways = o.mesh.ways(Axis::Shard);
    let state = (region.optimizer.state)(update);
    let scaled = |values: &[SlotId]| -> Vec<(SlotId, usize)> {
        state.iter().zip(values).filter_map(|(state, value)| Some((*value, state.block?))).collect()
    };
    let elements = region.placed_elements(ways);
    let mut add = |name: &str, dtype: DType, class: Class| {
        g.add_slot(slot(&format!("{REGION}{index}.{name}"), flat(elements).with(dtype), class))
    };
    let weight = add(&WEIGHTS[1..], DType::F32, Class::Weight);
    let gradient = add(&GRADIENTS[1..], DType::F32, Class::Carry);
    let values: Vec<SlotId> =
        state.iter().map(|state| add(state.of_region, state.dtype, Class::Moment)).collect();
    let average = update.average.map(|_| add("averages", DType::F32, Class::Average));
    let scales = scaled(&values).into_iter().map(|(of, block)| scales_of(g, of, block, None)).collect();
    let whole = Slots { weight, gradient, values, scales, average };
    let in_bucket = [weight, gradient].map(|of| parts(g, of, &region.buckets, |b| (b.place, ways * b.share)));
    let mut members = vec![];
    for member in &region.members {
        let &Member { weight, gradient, start } = member;
        let bucket = region.bucket_of(member);
        let start =
            bucket.map_or(start, |b| start - region.buckets[b].layout.start + region.buckets[b].place);
        let lies_in = |of: SlotId| SlotPart { of, offset: start };
        for (own, buckets, of) in
            [(weight, &in_bucket[0], whole.weight), (gradient, &in_bucket[1], whole.gradient)]
        {
            let inside = |b: usize| SlotPart { of: buckets[b], offset: start - region.buckets[b].place };
            g.slot_mut(own).part = Some(bucket.map_or(lies_in(of), inside));
        }
        name_parts(g, weight, gradient, gradient_path);
        let of_whole = state.iter().zip(&whole.values);
        let values: Vec<SlotId> = of_whole
            .map(|(state, of)| beside(g, weight, lies_in(*of), |weight| moment_path(state.name, weight)))
            .collect();
        let blocks = scaled(&values).into_iter().zip(&whole.scales);
        let scales = blocks
            .map(|((value, block), of)| {
                scales_of(g, value, block, Some(SlotPart { of: *of, offset: start / block }))
            })
            .collect();
        let average = whole.average.map(|of| beside(g, weight, lies_in(of), average_path));
        members.push(Slots { weight, gradient, values, scales, average });
    }
    let (mut shares, mut divided) = match region.buckets.is_empty() {
        true => (vec![], vec![]),
        false => divide(g, region, &whole, &in_bucket[1], &scaled(&whole.values), ways),
    };
    let mut scattered = vec![];
    if o.shards_gradients() && !region.buckets.is_empty() {
        let shard = shard_path(&g.slot(whole.gradient).path);
        let (sums, of) = shares_of(g, whole.gradient, &shard, &region.buckets, ways);
        divided.push(of);
        shares.iter_mut().zip(&sums).for_each(|(share, sum)| share.gradient = *sum);
        scattered = region.scattered(&sums, ways);
    }
    RegionSlots { whole, members, shares, divided, scattered }
}

/// Adds the slots of a rank's share of a region: one for each slot of state, with the shares of the buckets in it.
fn divide(
    g: &mut Graph,
    region: &Region,
    whole: &Slots,
    gradients: &[SlotId],
    scaled: &[(SlotId, usize)],
    ways: usize,
) -> (Vec<Slots>, Vec<Divided>) {
    let mut divided = vec![];
    // The share of each bucket, for a slot with one element per block.
    let mut shares_of = |g: &mut Graph, of: SlotId, shard: &str, block: usize| {
        let buckets: Vec<Bucket> = region.buckets.iter().map(|bucket| bucket.by(block)).collect();
        let (shares, of) = shares_of(g, of, shard, &buckets, ways);
        divided.push(of);
        shares
    };
    let path = |g: &Graph, of: SlotId| shard_path(&g.slot(of).path);
    let elementwise: Vec<SlotId> =
        [whole.weight].into_iter().chain(whole.values.iter().copied()).chain(whole.average).collect();
    let paths: Vec<String> = elementwise.iter().map(|of| path(g, *of)).collect();
    let own: Vec<Vec<SlotId>> =
        elementwise.iter().zip(&paths).map(|(of, shard)| shares_of(g, *of, shard, 1)).collect();
    let blocks = whole.scales.iter().zip(scaled);
    let scales: Vec<Vec<SlotId>> = blocks
        .map(|(of, (value, block))| {
            let shard = scales_path(&path(g, *value));
            shares_of(g, *of, &shard, *block)
        })
        .collect();
    let shares = (0..region.buckets.len()).map(|b| Slots {
        weight: own[0][b],
        gradient: gradients[b],
        values: own[1..=whole.values.len()].iter().map(|shares| shares[b]).collect(),
        scales: scales.iter().map(|shares| shares[b]).collect(),
        average: whole.average.map(|_| own[own.len() - 1][b]),
    });
    (shares.collect(), divided)
}

/// Adds the slot of a rank's share of the slot `of`, and the slots of its shares of buckets in it.
pub(super) fn shares_of(
    g: &mut Graph,
    of: SlotId,
    shard: &str,
    buckets: &[Bucket],
    ways: usize,
) -> (Vec<SlotId>, Divided) {
    let Slot { path, ty, class, .. } = g.slot(of).clone();
    let ty = TensorType::new(ty.dtype, [ty.elements() / ways]);
    let root = g.add_slot(slot(shard, ty, class));
    let shares = parts(g, root, buckets, |bucket| (bucket.at, bucket.share));
    (shares, Divided { whole: path, shard: shard.into(), buckets: buckets.to_vec() })
}

/// The slots of the buckets in a slot; a single bucket is the slot itself.
fn parts(
    g: &mut Graph,
    of: SlotId,
    buckets: &[Bucket],
    place: impl Fn(&Bucket) -> (usize, usize),
) -> Vec<SlotId> {
    if let [_] = buckets {
        return vec![of];
    }
    let Slot { path, ty, class, .. } = g.slot(of).clone();
    let part = |(number, bucket): (usize, &Bucket)| {
        let (offset, elements) = place(bucket);
        let path = bucket_path(&path, number, buckets.len());
        let ty = TensorType::new(ty.dtype, [elements]);
        g.add_slot(Slot { part: Some(SlotPart { of, offset }), ..slot(&path, ty, class) })
    };
    buckets.iter().enumerate().map(part).collect()
}

/// Adds the slot of a weight's state or average inside a slot of its region, named after the weight.
fn beside(g: &mut Graph, weight: SlotId, part: SlotPart, path: impl Fn(&str) -> String) -> SlotId {
    let Slot { class, ref ty, .. } = *g.slot(part.of);
    let (dtype, source) = (ty.dtype, g.slot(weight).clone());
    let beside = slot(&path(&source.path), source.ty.with(dtype), class);
    let beside = g.add_slot(Slot { part: Some(part), ..beside });
    name_parts(g, weight, beside, path);
    beside
}

/// Adds the scales of a slot of state, one per block.
fn scales_of(g: &mut Graph, values: SlotId, block: usize, part: Option<SlotPart>) -> SlotId {
    let Slot { path, ty, .. } = g.slot(values);
    let (path, blocks) = (scales_path(path), ty.elements().div_ceil(block));
    g.add_slot(Slot { part, ..slot(&path, flat(blocks), Class::Scale) })
}

/// Names the pieces of `whole` that belong to the weights merged into `weight`: checkpoints and tests identify gradients and
/// moments by the model's own names of weights.
fn name_parts(g: &mut Graph, weight: SlotId, whole: SlotId, path: impl Fn(&str) -> String) {
    for id in g.slot_ids() {
        let Some(part) = g.slot(id).part.filter(|p| p.of == weight) else { continue };
        let merged = g.slot(id).clone();
        let part = Some(SlotPart { of: whole, offset: part.offset });
        let Slot { class, ref ty, .. } = *g.slot(whole);
        let ty = merged.ty.with(ty.dtype);
        g.add_slot(Slot { part, ..slot(&path(&merged.path), ty, class) });
    }
}
