//! From graphs to launches: kernels, queues, views, lifetimes, offsets.

pub mod lower;
pub mod memory;
pub mod prefetch;
pub mod queues;
pub mod slots;
pub mod views;

use std::collections::{BTreeMap, BTreeSet};

use self::memory::SlotsLive;
use crate::graph::{Graph, SlotId};
use crate::ops::Op;
use crate::passes::gradient::layout::is_gradient_region;
use crate::passes::options::Options;
use crate::passes::state::Reports;
use crate::pieces::Sharded;
use crate::plan::{Buffer, Category, PlanSet, Refusal, Role};
use crate::target::Target;
use crate::verify;

/// Plans all graphs over one arena.
pub(super) fn plan(
    graphs: Vec<(Role, Graph)>,
    target: &Target,
    o: &Options,
    sharded: Vec<Sharded>,
    mut reports: Reports,
) -> Result<PlanSet, Refusal> {
    let all: Vec<&Graph> = graphs.iter().map(|(_, g)| g).collect();
    let transient = if o.memory_plan { transient_gradients(&graphs, o) } else { BTreeSet::new() };
    let (mut slots, mut persistent_bytes, mut buffers) = slots::Slots::place(&all, &transient, target.align)?;
    let inputs = slots.inputs(persistent_bytes);
    let mut landings = vec![];
    for area in 0..if inputs.is_empty() { 0 } else { target.landings } {
        let (name, offset, bytes) = (format!("landing.{area}"), persistent_bytes, inputs.len());
        buffers.push(Buffer { name, category: Category::Inputs, offset, bytes, live: None });
        landings.push(offset);
        persistent_bytes += bytes;
    }
    let (mut plans, mut transient_bytes) = (vec![], 0);
    let mut of_slots = 0..slots.place_among_transients(&transient, persistent_bytes, target.align);
    // The plan of gradients chooses their place, and every other plan follows it.
    assert!(transient.is_empty() || graphs[0].0 == Role::GRAD);
    for (role, g) in &graphs {
        let mut lowered = lower::lower(g, &slots, target, o.memory_plan)?;
        queues::join(&mut lowered, o.overlap);
        let (in_place, copies) = (lowered.in_place, lowered.copies);
        // Gradients live from when `grad` writes them to the end of `apply`.
        let slots_live = match role {
            Role::Apply => SlotsLive::Throughout,
            role if role.is_grad() => SlotsLive::FromFirstWrite,
            _ => SlotsLive::Never,
        };
        let (base, reuse) = (persistent_bytes, o.memory_plan);
        let region = memory::Transients { base, slots: of_slots.clone(), slots_live, reuse };
        let placed = memory::place(lowered, *role, &region, target.align);
        if slots_live == SlotsLive::FromFirstWrite {
            of_slots = placed.slots_start..placed.slots_start + of_slots.len();
            slots.place_among_transients(&transient, base + of_slots.start, target.align);
        }
        reports.add(*role, "memory", placed.plan.launches.len(), || {
            let launches = placed.plan.launches.len();
            format!(
                "{launches} launches, {in_place} outputs in place, {copies} copies, {} transient bytes",
                placed.bytes
            )
        });
        if cfg!(debug_assertions)
            && let Err(why) = verify::queues(&placed.plan)
        {
            panic!("after queues: {role}: {why}");
        }
        reports.add(*role, "queues", placed.plan.exchanges().len(), || {
            let (exchanges, beside) =
                (placed.plan.exchanges().len(), placed.plan.launches_beside_exchanges());
            format!("{exchanges} exchanges have a queue of their own, beside which {beside} launches may run")
        });
        transient_bytes = transient_bytes.max(placed.bytes);
        buffers.extend(placed.buffers.into_iter().map(|b| with_plan(b, plans.len())));
        plans.push(placed.plan);
    }
    let arena_bytes = persistent_bytes + transient_bytes;
    if arena_bytes as u64 + target.bytes_beside() > target.memory_bytes {
        return Err(Refusal(format!(
            "the plan needs {arena_bytes} bytes and {} has {}",
            target.name,
            target.memory_bytes.saturating_sub(target.bytes_beside())
        )));
    }
    let slots = slots.placed(&sharded);
    Ok(PlanSet {
        arena_bytes,
        persistent_bytes,
        transient_bytes,
        buffers,
        slots,
        inputs,
        landings,
        plans,
        mesh: o.mesh,
        sharded,
        done: reports.0,
    })
}

/// The regions of gradients that an update writes anew in every part, so that they need memory only from then on.
fn transient_gradients(graphs: &[(Role, Graph)], o: &Options) -> BTreeSet<String> {
    let Some((_, g)) = graphs.iter().find(|(role, _)| *role == Role::GRAD && o.one_run) else {
        return BTreeSet::new();
    };
    let mut written: BTreeMap<SlotId, usize> = BTreeMap::new();
    for (slot, _) in &g.writes {
        let (root, elements) = verify::extent(g, *slot);
        *written.entry(root).or_default() += elements.len();
    }
    let added_to: BTreeSet<SlotId> = g
        .nodes
        .iter()
        .filter_map(|node| match node.op {
            Op::Read { slot } => Some(verify::extent(g, slot).0),
            _ => None,
        })
        .collect();
    let is_whole = |(root, elements): &(SlotId, usize)| {
        let slot = g.slot(*root);
        is_gradient_region(&slot.path) && !added_to.contains(root) && *elements == slot.ty.elements()
    };
    written.into_iter().filter(is_whole).map(|(root, _)| g.slot(root).path.clone()).collect()
}

fn with_plan(mut buffer: Buffer, plan: usize) -> Buffer {
    buffer.live = buffer.live.map(|(_, range)| (plan, range));
    buffer
}
