//! Adapters at the ends of a decoder: at the token embedding table and at the head.
//!
//! With W [V, D], A [R, D] and B [V, R], a token looks up W[t] + s B[t] A, one row of the adapted table. PEFT names the same
//! tensors otherwise: its `lora_embedding_A` is B transposed, and `lora_embedding_B` A transposed. There is no dropout here.
//!
//! The head's loss never holds all logits in memory. x W^T + s u B^T with u = drop(x) A^T is one product of concatenated
//! operands, [x, s u] [W, B]^T, so that the loss is still computed in chunks. It costs a copy of W per application, and the
//! gradient of all of [W, B], of which only the columns of B are read.
//!
//! A slot that serves as both table and head may have adapters in each role, which are independent.

use super::{AdaptedWeight, AdapterPass};
use crate::graph::{NodeId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::product::{Compute, plain};
use crate::plan::Refusal;
use crate::types::DType;

impl<'a> AdapterPass<'a> {
    /// The rows that `id` looks up, plus the adapters of their table.
    pub(super) fn lookup(&mut self, id: NodeId, table: &AdaptedWeight<'a>) {
        let index = self.replay.get(self.replay.old.node(id).ins[1]);
        let mut sum = self.replay.copy(id).out(0);
        for adapter in &table.adapters {
            let b = self.read(adapter, adapter.b(), table.rows, id);
            let rows = self.add(Op::Gather {}, vec![b, index], id);
            let rows = self.map(E::Scale(adapter.scale), rows, id);
            let a = self.read(adapter, adapter.a(), table.rows, id);
            let thin = self.add(plain(false, false, DType::F32, Compute::Full), vec![rows, a], id);
            self.products += 1;
            sum = self.add(Op::Map { f: E::Add }, vec![sum, thin], id);
        }
        self.replay.set(id.out(0), sum);
    }

    /// The loss `id` with a head and its adapters.
    pub(super) fn loss(&mut self, id: NodeId, head: &AdaptedWeight<'a>) -> Result<(), Refusal> {
        let node = self.replay.old.node(id).clone();
        let mut ins: Vec<Value> = node.ins.iter().map(|v| self.replay.get(*v)).collect();
        let (mut inputs, mut weights) = (vec![ins[0]], vec![ins[1]]);
        for adapter in &head.adapters {
            let u = self.down_projection(id, ins[0], &[*adapter])?;
            inputs.push(self.map(E::Scale(adapter.scale), u, id));
            weights.push(self.read(adapter, adapter.b(), head.rows, id));
        }
        ins[0] = self.add(Op::Concat { axis: 1 }, inputs, id);
        ins[1] = self.add(Op::Concat { axis: 1 }, weights, id);
        self.replay.copy_as(id, node.op, ins);
        Ok(())
    }
}
