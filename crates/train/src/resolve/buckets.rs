//! Chooses the number of buckets in which ranks exchange sharded regions: the one with the shortest predicted update.
//!
//! Each further bucket lets an exchange overlap with the update of another, and costs an exchange's latency twice. The times are
//! read from the update in one bucket, whose exchanges and launches are divided into equal parts. Only nominal rates and links
//! count, not measured timings, so that all ranks choose alike.

use std::collections::BTreeSet;

use flatout_ir::cost::of_launch;
use flatout_ir::passes::recompute::layer_of;
use flatout_ir::plan::Launch;
use flatout_ir::schedule::play;
use flatout_ir::{Class, OpKind, Options, Plan, PlanSet, Queue, Role, Target};

/// The number of buckets of the first plans: one; or one per layer where gradients are exchanged during the backward pass, so
/// that only those of few layers are in memory at a time.
pub fn at_first(options: &Options) -> usize {
    if options.shards_gradients() { usize::MAX } else { 1 }
}

/// The number of buckets with the shortest update, for plans that were compiled with one; 1 if the links are unknown.
pub fn fastest(plans: &PlanSet, target: &Target) -> usize {
    let (Some(apply), Some(_), false) = (plans.plan(Role::Apply), &target.links, plans.sharded.is_empty())
    else {
        return 1;
    };
    let weights = plans.sharded.iter().filter(|tensor| tensor.class == Class::Weight);
    let units = weights.map(|tensor| layer_of(&tensor.path)).collect::<BTreeSet<_>>().len();
    let numbers = std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|n| *n < units).chain([units]);
    // Of equal times the first one wins, which has the fewest buckets.
    let seconds = |buckets: &usize| update_seconds(apply, *buckets, target);
    numbers.min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap_or(1)
}

/// Predicted time of an update in this many buckets: sums are scattered, shards are updated, and each bucket is gathered while
/// the next one is updated.
fn update_seconds(apply: &Plan, buckets: usize, target: &Target) -> f64 {
    let part = |launch: &Launch| cut(launch, buckets);
    let seconds = |launch: &Launch| of_launch(launch, target).roofline_seconds;
    let of_kind = |kind: OpKind| apply.launches.iter().filter(move |launch| launch.op.kind() == kind);
    let largest = |kind: OpKind| of_kind(kind).max_by_key(|launch| launch.bytes());
    let (Some(scatter), Some(update), Some(gather)) =
        (largest(OpKind::ReduceScatter), update_of_shares(apply), largest(OpKind::AllGather))
    else {
        return 0.0;
    };
    let [scatter, update, gather] = [scatter, update, gather].map(part);
    let mut launches: Vec<Launch> = vec![scatter; buckets];
    for bucket in 0..buckets {
        // The norm needs the sums of all buckets, so the first update waits for the last bucket.
        launches.push(Launch { joins: (bucket == 0).then_some(buckets - 1), ..update.clone() });
        launches.push(gather.clone());
    }
    let plan = Plan { role: Role::Apply, launches, results: vec![] };
    let held_part = target.links.as_ref().map_or(0.0, |links| links.held_part);
    play(&plan, held_part, plan.launches.iter().map(seconds)).seconds
}

/// The update of shards: the largest one whose inputs include the rank.
fn update_of_shares(apply: &Plan) -> Option<&Launch> {
    let is_update = |l: &&Launch| matches!(l.op.kind(), OpKind::AdamW | OpKind::AdamW8);
    let takes_rank = |l: &&Launch| l.ins.last().is_some_and(|view| !view.dtype.is_float());
    apply.launches.iter().filter(is_update).filter(takes_rank).max_by_key(|launch| launch.bytes())
}

/// A launch over one of equal parts of its flat tensors.
fn cut(launch: &Launch, parts: usize) -> Launch {
    let mut part = launch.clone();
    let views = part.ins.iter_mut().chain(part.outs.iter_mut().flatten());
    for view in views.filter(|view| view.dims.len() == 1 && view.dims[0] > 1) {
        view.dims[0] = view.dims[0].div_ceil(parts);
    }
    Launch { flops: launch.flops / parts as u64, joins: None, queue: Queue::of(&launch.op), ..part }
}
