//! From graphs to launches: kernels, queues, views, lifetimes, offsets.

pub mod lower;
pub mod memory;
pub mod prefetch;
pub mod queues;
pub mod slots;
pub mod views;

use crate::graph::Graph;
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
    let (slots, mut persistent_bytes, mut buffers) = slots::Slots::place(&all, target.align)?;
    let inputs = slots.inputs(persistent_bytes);
    let mut landings = vec![];
    for area in 0..if inputs.is_empty() { 0 } else { target.landings } {
        let (name, offset, bytes) = (format!("landing.{area}"), persistent_bytes, inputs.len());
        buffers.push(Buffer { name, category: Category::Inputs, offset, bytes, live: None });
        landings.push(offset);
        persistent_bytes += bytes;
    }
    let (mut plans, mut transient_bytes) = (vec![], 0);
    for (role, g) in &graphs {
        let mut lowered = lower::lower(g, &slots, target, o.memory_plan)?;
        queues::join(&mut lowered, o.overlap);
        let (in_place, copies) = (lowered.in_place, lowered.copies);
        let placed = memory::place(lowered, *role, persistent_bytes, target.align, o.memory_plan);
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

fn with_plan(mut buffer: Buffer, plan: usize) -> Buffer {
    buffer.live = buffer.live.map(|(_, range)| (plan, range));
    buffer
}
