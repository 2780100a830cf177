//! The text form of a set of plans: every slot, buffer, launch and result with its place in the arena.
//!
//! ```text
//! arena 4096 persistent 1024 transient 3072
//! mesh shard 4
//! inputs 896..1024
//! slot embed.weight f32[8,8] weight normal(0.02) at 0
//! sharded embed.weight f32[8,8] weight normal(0.02) from 0 of shares of 16 at 0 of region.0.weights.shard
//! buffer grad.%3 activations 1024+256 live 1:2..5
//! plan grad
//! cpu.product product{ta=false, tb=true} f32[4,8]@1024 f32[8,8]@0 -> f32[4,8]@1280 work 64@2048 @layers.0.wq #1f flops 512
//! result loss f32[1]@2112
//! pass merge grad 3 weights are one product ...
//! ```
//!
//! Plans of one rank have no line for the mesh or for sharded tensors. With several ranks, the line of an exchange ends in
//! `queue wire`, and that of a launch that waits for an exchange in `joins` with the exchange's index in the plan. Equal text
//! means equal plans, which shows that a change keeps them. It does not parse: a kernel is a row of a target's table, which
//! the text does not carry.

use std::fmt;

use crate::attr::Attr;
use crate::pieces::Sharded;
use crate::plan::{Launch, PlanSet, Queue, View};
use crate::types::{TensorType, contiguous_strides};

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", TensorType::new(self.dtype, self.dims.clone()), self.offset)?;
        if self.strides != contiguous_strides(&self.dims) {
            write!(f, "/{}", self.strides.to_text())?;
        }
        Ok(())
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attrs: Vec<String> = self.op.attrs().into_iter().map(|(n, v)| format!("{n}={v}")).collect();
        write!(f, "{} {}{{{}}}", self.kernel, self.op.name(), attrs.join(", "))?;
        self.ins.iter().try_for_each(|view| write!(f, " {view}"))?;
        write!(f, " ->")?;
        for out in &self.outs {
            match out {
                Some(view) => write!(f, " {view}")?,
                None => write!(f, " _")?,
            }
        }
        if let Some(scratch) = &self.workspace {
            write!(f, " work {}@{}", scratch.span_bytes(), scratch.offset)?;
        }
        write!(f, " @{} #{:x} flops {}", self.path, self.key, self.flops)?;
        if self.queue != Queue::Compute {
            write!(f, " queue {}", self.queue.name())?;
        }
        self.joins.map_or(Ok(()), |exchange| write!(f, " joins {exchange}"))
    }
}

impl fmt::Display for PlanSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanSet { arena_bytes, persistent_bytes, transient_bytes, .. } = self;
        writeln!(f, "arena {arena_bytes} persistent {persistent_bytes} transient {transient_bytes}")?;
        if self.mesh.ranks() > 1 {
            writeln!(f, "mesh {}", self.mesh)?;
        }
        writeln!(f, "inputs {}..{}", self.inputs.start, self.inputs.end)?;
        self.landings.iter().try_for_each(|landing| writeln!(f, "landing {landing}"))?;
        for slot in &self.slots {
            write!(f, "slot {} {} {} {}", slot.path, slot.ty, slot.class.to_text(), slot.init.to_text())?;
            writeln!(f, " at {}{}", slot.view.offset, if slot.is_whole { " whole" } else { "" })?;
        }
        for Sharded { path, ty, class, init, slot, start, at, share, .. } in &self.sharded {
            write!(f, "sharded {path} {ty} {} {}", class.to_text(), init.to_text())?;
            writeln!(f, " from {start} of shares of {share} at {at} of {slot}")?;
        }
        for buffer in &self.buffers {
            write!(f, "buffer {} {} {}", buffer.name, buffer.category.name(), buffer.offset)?;
            match &buffer.live {
                Some((plan, launches)) => {
                    writeln!(f, "+{} live {plan}:{}..{}", buffer.bytes, launches.start, launches.end)?;
                }
                None => writeln!(f, "+{}", buffer.bytes)?,
            }
        }
        for plan in &self.plans {
            writeln!(f, "plan {}", plan.role.name())?;
            plan.launches.iter().try_for_each(|launch| writeln!(f, "{launch}"))?;
            plan.results.iter().try_for_each(|(name, view)| writeln!(f, "result {name} {view}"))?;
        }
        self.done.iter().try_for_each(|said| {
            writeln!(f, "pass {} {} {} {}", said.pass, said.role.name(), said.count, said.did)
        })
    }
}
