//! Totals over ranks: each rank sums gradients, losses and weights of its own rows, and an update uses the sums of all ranks.
//!
//! A region of gradients is exchanged in place, because concatenating regions first would take another copy of all gradients; a
//! sharded region is exchanged bucket by bucket, and each rank gets the total of its share. Small values are exchanged
//! together: losses, weights, named sums and the flags with which ranks ask one another to stop.

use std::collections::HashMap;

use crate::builder::{Builder, Tensor};
use crate::graph::SlotId;
use crate::mesh::Axis;
use crate::ops::Op;
use crate::ops::collective::Combine;
use crate::passes::gradient::lanes::sum_in_step;
use crate::passes::input_path;
use crate::passes::options::Options;
use crate::plan::Role;
use crate::types::DType;

/// The input of `apply` with a number for each of `STOP_FLAGS`: nonzero where this rank requests that kind of stop.
pub const STOP: &str = "stop";
/// Each is also a result of `apply`, under `stop_path`: the sum of the flag over ranks, so that all ranks stop after the same
/// step.
pub const STOP_FLAGS: [&str; 5] = ["interrupt", "terminate", "user", "hangup", "time"];

/// The result that holds the sum of a flag.
pub fn stop_path(flag: &str) -> String {
    format!("{STOP}.{flag}")
}

/// The sum, or the maximum, of a flat tensor over all ranks that have rows of their own.
pub fn total<'g>(x: Tensor<'g>, by: Combine, o: &Options) -> Tensor<'g> {
    total_over(o.exchanged_axes(), x, by, o)
}

fn total_over<'g>(axes: Vec<Axis>, x: Tensor<'g>, by: Combine, o: &Options) -> Tensor<'g> {
    let over = |x: Tensor<'g>, axis| {
        x.b.op(Op::AllReduce { axis, ways: o.mesh.ways(axis), by, order: o.order }, &[x])
    };
    axes.into_iter().fold(x, over)
}

/// The total of unsharded sums, over the shard group only if `scatter` does not already add them in every micro-batch.
fn total_of_sums<'g>(x: Tensor<'g>, o: &Options) -> Tensor<'g> {
    let is_left = |axis: &Axis| *axis != Axis::Shard || !sum_in_step(o);
    total_over(o.exchanged_axes().into_iter().filter(is_left).collect(), x, Combine::Sum, o)
}

/// The total of which each rank of a shard group gets its share, summed by the same tree, with the same bits. Gradient shares
/// that were added over the group in every micro-batch are only added over the other groups.
fn scattered<'g>(x: Tensor<'g>, o: &Options) -> Tensor<'g> {
    let over = |x: Tensor<'g>, axis| {
        let (ways, order) = (o.mesh.ways(axis), o.order);
        let op = match axis {
            Axis::Shard if o.shards_gradients() => return x,
            Axis::Shard => Op::ReduceScatter { axis, ways, order, base: false },
            _ => Op::AllReduce { axis, ways, by: Combine::Sum, order },
        };
        x.b.op(op, &[x])
    };
    o.exchanged_axes().into_iter().fold(x, over)
}

/// The sums of a step over all ranks, by the slots that hold those of one rank.
pub(super) struct Totals<'g> {
    b: &'g Builder,
    /// Empty where nothing is exchanged: the slots then hold the totals.
    by_slot: HashMap<SlotId, Tensor<'g>>,
    /// The sums of the flags.
    stops: Vec<Tensor<'g>>,
}

impl<'g> Totals<'g> {
    /// Of each bucket a rank gets the total of its share only.
    pub fn new(
        b: &'g Builder,
        gradients: &[SlotId],
        buckets: &[SlotId],
        small: &[SlotId],
        o: &Options,
    ) -> Totals<'g> {
        let mut totals = Totals { b, by_slot: HashMap::new(), stops: vec![] };
        if o.exchanged_axes().is_empty() {
            return totals;
        }
        let flags = b.input(&input_path(Role::Apply, STOP), DType::F32, &[STOP_FLAGS.len()]);
        let own: Vec<Tensor<'g>> = small.iter().map(|slot| flat(b.read(*slot))).collect();
        let all = match sum_in_step(o) {
            true => {
                let sums = total_of_sums(b.concat(&own, 0), o);
                b.concat(&[sums, total(flags, Combine::Sum, o)], 0)
            }
            false => total(b.concat(&[&own[..], &[flags]].concat(), 0), Combine::Sum, o),
        };
        let mut at = 0;
        for (slot, own) in small.iter().zip(&own) {
            let (dims, extent) = (b.with_graph(|g| g.slot(*slot).ty.dims.clone()), own.dims()[0]);
            totals.by_slot.insert(*slot, all.slice(0, at, extent).reshape(&dims));
            at += extent;
        }
        totals.stops = (0..STOP_FLAGS.len()).map(|flag| all.slice(0, at + flag, 1)).collect();
        for slot in gradients {
            totals.by_slot.insert(*slot, total_of_sums(b.read(*slot), o));
        }
        for slot in buckets {
            totals.by_slot.insert(*slot, scattered(b.read(*slot), o));
        }
        totals
    }

    /// The total of a slot's sums, or of a part of such a slot.
    pub fn of(&self, slot: SlotId) -> Tensor<'g> {
        if let Some(total) = self.by_slot.get(&slot) {
            return *total;
        }
        let (ty, part) = self.b.with_graph(|g| (g.slot(slot).ty.clone(), g.slot(slot).part));
        match part.and_then(|part| Some((self.by_slot.get(&part.of)?, part.offset))) {
            Some((whole, offset)) => whole.slice(0, offset, ty.elements()).reshape(&ty.dims),
            None => self.b.read(slot),
        }
    }

    /// Makes the sums of the flags results.
    pub fn add_stop_results(&self) {
        for (flag, sum) in STOP_FLAGS.iter().zip(&self.stops) {
            self.b.result(&stop_path(flag), *sum);
        }
    }
}

fn flat(x: Tensor<'_>) -> Tensor<'_> {
    x.reshape(&[x.ty().elements()])
}
