//! The update: builds `apply` over the regions of `layout`: norm, finite check, clip, update, clear. A region is updated by one
//! launch, or by one per bucket where ranks divide it.
//!
//! Where regions are laid out in chunks the norm is computed per chunk first, in the order of the layout, so that it depends
//! neither on the number of ranks nor on which rank holds a chunk.

use crate::builder::{Builder, Tensor};
use crate::graph::{Class, Graph, SlotId};
use crate::mesh::Axis;
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::reduce::Fold;
use crate::optimizers::{self, Matrix, Step};
use crate::passes::gradient::average;
use crate::passes::gradient::buckets::Bucket;
use crate::passes::gradient::differentiate::{CARRIED_SUM, LOSS_SUM, SUM, Trained, WEIGHT_SUM, is_written};
use crate::passes::gradient::layout::{CHUNK, Member, Region, Slots, is_chunked, lay_out, regions, slot};
use crate::passes::gradient::scatter::{Scattered, scatter};
use crate::passes::gradient::shards::{Divided, all_gather};
use crate::passes::gradient::totals::Totals;
use crate::passes::input_path;
use crate::passes::options::Options;
use crate::plan::Role;
use crate::types::{DType, TensorType};

pub const UPDATES: &str = "optimizer.updates";
pub const SKIPPED: &str = "optimizer.skipped";
/// The input with the learning rates, `Update::rates` of them.
pub const LR: &str = "lr";

/// A range of a region's elements that is updated at once.
struct UpdateRange<'a> {
    region: &'a Region,
    slots: Slots,
    /// Index of its first element among those of all regions.
    first: usize,
    /// Whether each rank updates its share of the range.
    is_shared: bool,
    /// Its matrices by layer, where the rule needs them.
    layers: Vec<Vec<Matrix>>,
}

/// The gradient sums of a region.
struct Sums {
    slot: SlotId,
    /// Whether gradients are added to them, so that they must be cleared.
    are_sums: bool,
    /// The slot of each bucket, and its number of elements in the layout, where ranks divide the region.
    buckets: Vec<(SlotId, usize)>,
}

pub(crate) struct Updated {
    pub apply: Graph,
    pub launches: usize,
    pub divided: Vec<Divided>,
}

/// Lays out the regions (slots of `trained` become parts of them) and builds the graph of `apply`.
pub(crate) fn update(trained: &mut Trained, o: &Options, fused: bool) -> Updated {
    let regions = regions(&trained.graph, &trained.weights, o);
    let (mut sums, mut pieces, mut divided, mut first) = (vec![], vec![], vec![], 0);
    let mut scattered: Vec<Scattered> = vec![];
    for (i, region) in regions.iter().enumerate() {
        let laid = lay_out(&mut trained.graph, i, region, o);
        let elements = region.buckets.iter().map(|bucket| bucket.layout.len());
        let buckets = laid.shares.iter().map(|share| share.gradient).zip(elements).collect();
        let is_sum = |member: &Member| !is_written(trained.graph.slot(member.weight), o.one_run);
        let are_sums = region.members.iter().any(is_sum);
        sums.push(Sums { slot: laid.whole.gradient, are_sums, buckets });
        let is_shared = !region.buckets.is_empty();
        let matrices = |members| region.matrices(&trained.graph, members);
        let at: Vec<(Slots, usize, Vec<Vec<Matrix>>)> = match fused {
            _ if is_shared => {
                let of_share = |(slots, bucket): (Slots, &Bucket)| {
                    (slots, bucket.layout.start, region.matrices_of_share(&trained.graph, bucket))
                };
                laid.shares.into_iter().zip(&region.buckets).map(of_share).collect()
            }
            true => vec![(laid.whole, 0, matrices(0..region.members.len()))],
            false => {
                let members = laid.members.into_iter().zip(&region.members).enumerate();
                members.map(|(i, (slots, member))| (slots, member.start, matrices(i..i + 1))).collect()
            }
        };
        let piece =
            |(slots, start, layers)| UpdateRange { region, slots, first: first + start, is_shared, layers };
        pieces.extend(at.into_iter().map(piece));
        divided.extend(laid.divided);
        scattered.extend(laid.scattered);
        first += region.elements;
    }
    if o.shards_gradients() {
        scatter(trained, &scattered, o);
    }
    let launches = pieces.len();
    for path in [UPDATES, SKIPPED] {
        trained.graph.add_slot(slot(path, TensorType::new(DType::F32, [1]), Class::Moment));
    }
    let slots = trained.graph.slots.clone();
    let apply = apply(Graph { slots, ..Graph::default() }, &sums, &pieces, o);
    Updated { apply, launches, divided }
}

/// The graph of one update. Its results are the values that a step reports. The norm is computed over whole regions of gradient
/// `sums`, so dividing the update into pieces changes no bits.
fn apply(slots: Graph, sums: &[Sums], pieces: &[UpdateRange<'_>], o: &Options) -> Graph {
    let constants = &o.update;
    let find = |path: &str| slots.find_slot(path).expect("laid out before");
    let (loss_sum, weight_sum) = (find(LOSS_SUM), find(WEIGHT_SUM));
    let (updates, skipped) = (find(UPDATES), find(SKIPPED));
    let named = slots.slot_ids().filter_map(|id| Some((id, slots.slot(id).path.strip_prefix(CARRIED_SUM)?)));
    let named: Vec<(SlotId, String)> = named.map(|(id, name)| (id, format!("{SUM}{name}"))).collect();
    let b = Builder::from_graph(slots);
    let rates = b.input(&input_path(Role::Apply, LR), DType::F32, &[constants.rates]);
    b.scope("apply", || {
        let carried = named.iter().map(|(slot, _)| *slot);
        let small: Vec<SlotId> = [loss_sum, weight_sum].into_iter().chain(carried).collect();
        let wholes: Vec<SlotId> = sums.iter().filter(|s| s.buckets.is_empty()).map(|s| s.slot).collect();
        let buckets: Vec<SlotId> = sums.iter().flat_map(|s| &s.buckets).map(|(slot, _)| *slot).collect();
        let totals = Totals::new(&b, &wholes, &buckets, &small, o);
        let per_weight = totals.of(weight_sum).recip();
        let squares = match is_chunked(o) {
            true => squares_by_chunks(&b, &totals, sums, o),
            false => squares(&totals, &wholes),
        };
        let norm = squares.sqrt() * per_weight;
        let loss = totals.of(loss_sum) * per_weight;
        let is_finite = norm.map(E::Finite) * loss.map(E::Finite);
        let scale = match constants.clip {
            0.0 => per_weight,
            clip => per_weight * norm.recip().scale(clip as f64).zip(E::Min, b.fill(1.0, DType::F32, &[1])),
        };
        let count = b.read(updates) + is_finite;
        b.write(updates, count);
        b.write(skipped, b.read(skipped) + (b.fill(1.0, DType::F32, &[1]) - is_finite));
        let rate = constants.average.map(|decay| average::rate(decay, count, is_finite));
        let rank = (!buckets.is_empty()).then(|| b.op(Op::Rank { axis: Axis::Shard }, &[]));
        for UpdateRange { region: Region { group, optimizer, .. }, slots, first, is_shared, layers } in pieces
        {
            let state: Vec<SlotId> = slots.values.iter().chain(&slots.scales).copied().collect();
            let (weights, gradients) = (b.read(slots.weight), totals.of(slots.gradient));
            let kept = state.iter().map(|slot| b.read(*slot)).collect();
            let rank = rank.filter(|_| *is_shared);
            let piece =
                optimizers::UpdateInputs { weights, gradients, state: kept, first: *first, rank, layers };
            // In a plan a slice is a view: the kernel reads the group's rate where the host wrote it.
            let lr = if constants.rates == 1 { rates } else { rates.slice(0, group.rule.rate, 1) };
            let step = Step { lr, scale, updates: count, is_finite };
            let new = (optimizer.update)(o, group, &piece, &step);
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
        totals.add_stop_results();
        // The total may overwrite the sum that is cleared, so sums are cleared in the same pieces as they are exchanged.
        let clears = |sums: &Sums| match o.shards_gradients() && !sums.buckets.is_empty() {
            true => sums.buckets.iter().map(|(slot, _)| *slot).collect(),
            false => vec![sums.slot],
        };
        let cleared = sums.iter().filter(|sums| sums.are_sums).flat_map(clears);
        for slot in cleared.chain(small) {
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

/// The same sum by chunks, in the order of the layout. A rank computes the chunks of its shares; one exchange gathers all, from
/// which each bucket's chunks are taken without padding.
fn squares_by_chunks<'g>(b: &'g Builder, totals: &Totals<'g>, sums: &[Sums], o: &Options) -> Tensor<'g> {
    let chunks = |sum: SlotId| {
        let gradients = totals.of(sum);
        let count = gradients.dims()[0] / CHUNK;
        gradients.reshape(&[count, CHUNK]).reduce(1, Fold::SumSquares).reshape(&[count])
    };
    let shares: Vec<Tensor<'g>> =
        sums.iter().flat_map(|sums| &sums.buckets).map(|(slot, _)| chunks(*slot)).collect();
    let gathered = (!shares.is_empty()).then(|| all_gather(b.concat(&shares, 0), o));
    let (mut all, mut at, mut shares) = (vec![], 0, shares.into_iter());
    for Sums { slot, buckets, .. } in sums {
        if buckets.is_empty() {
            all.push(chunks(*slot));
        }
        for (_, elements) in buckets {
            let (gathered, share) =
                (gathered.expect("there are shares"), shares.next().expect("one a bucket"));
            let (ways, own) = (o.mesh.ways(Axis::Shard), share.dims()[0]);
            let by_rank = gathered.reshape(&[ways, gathered.dims()[0] / ways]);
            all.push(by_rank.slice(1, at, own).reshape(&[ways * own]).slice(0, 0, elements / CHUNK));
            at += own;
        }
    }
    b.concat(&all, 0).sum(0)
}
