//! The readers of values: passes use them to decide whether one operation may absorb another.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::replay::users;

pub struct Readers<'a> {
    pub g: &'a Graph,
    users: HashMap<Value, Vec<NodeId>>,
    uses: Vec<Vec<u32>>,
}

impl<'a> Readers<'a> {
    pub fn new(g: &'a Graph) -> Self {
        Readers { g, users: users(g), uses: g.uses() }
    }

    /// The nodes that read a node's first output.
    pub fn of(&self, id: NodeId) -> &[NodeId] {
        self.users.get(&id.out(0)).map_or(&[], Vec::as_slice)
    }

    /// The nodes that read a value, and its number of uses: by these nodes, by writes and as a result.
    pub fn of_value(&self, v: Value) -> (&[NodeId], u32) {
        let readers = self.users.get(&v).map_or(&[][..], Vec::as_slice);
        (readers, self.uses[v.node.0 as usize][v.out as usize])
    }

    /// The node that reads a value, where it is the value's only use.
    pub fn sole(&self, v: Value) -> Option<NodeId> {
        match self.of_value(v) {
            (&[reader], 1) => Some(reader),
            _ => None,
        }
    }

    /// The elementwise node `f` that is the only reader of a node, and reads it once.
    pub fn only(&self, id: NodeId, f: E) -> Option<NodeId> {
        self.sole(id.out(0)).filter(|reader| self.g.node(*reader).op == Op::Map { f })
    }

    /// The row that is broadcast as the operand of a node other than `than`.
    pub fn repeated_row(&self, id: NodeId, than: NodeId) -> Option<Value> {
        let other = *self.g.node(id).ins.iter().find(|v| v.node != than)?;
        let Op::Broadcast { .. } = self.g.node(other.node).op else { return None };
        let row = self.g.node(other.node).ins[0];
        if self.g.dims(row)[0] != 1 {
            return None;
        }
        match self.g.node(row.node).op {
            Op::Reshape { .. } => Some(self.g.node(row.node).ins[0]),
            _ => Some(row),
        }
    }

    /// The row added to a product by the product's only reader, and that reader, where the row exists before the product.
    pub fn bias(&self, product: NodeId) -> Option<(NodeId, Value)> {
        let add = self.only(product, E::Add)?;
        let row = self.repeated_row(add, product)?;
        let columns = self.g.node(product).outs[0].dims[1];
        let exists = row.node < product || matches!(self.g.node(row.node).op, Op::Read { .. });
        (exists && self.g.dims(row).iter().product::<usize>() == columns).then_some((add, row))
    }
}
