//! Replaces operations by their expansions: all down to primitives for the oracle, or one kind where its fused form is switched
//! off.

use std::collections::HashMap;

use crate::builder::{Builder, Tensor};
use crate::graph::{Graph, Node, NodeId, Value};
use crate::ops::epilogue::Epilogue;
use crate::ops::{Op, OpKind as K};

/// The graph with every operation expanded until only primitives are left.
pub fn to_primitives(graph: &Graph) -> Graph {
    expand(graph, |_| true)
}

/// The graph with the operations for which `choose` holds expanded, recursively.
pub fn expand(graph: &Graph, choose: impl Fn(&Op) -> bool) -> Graph {
    let b = Builder::from_graph(Graph {
        slots: graph.slots.clone(),
        next_key: graph.unused_key(),
        ..Graph::default()
    });
    let mut map: HashMap<Value, Value> = HashMap::new();
    for (id, node) in graph.ids().zip(&graph.nodes) {
        let ins: Vec<Tensor<'_>> = node.ins.iter().map(|v| b.tensor(map[v])).collect();
        let outs = b.at_path(&node.path, || expanded(&b, node, &ins, &choose));
        for (out, t) in outs.into_iter().enumerate() {
            map.insert(id.out(out as u8), t.v);
        }
    }
    let mut out = b.finish();
    out.writes = graph.writes.iter().map(|(s, v)| (*s, map[v])).collect();
    out.results = graph.results.iter().map(|(n, v)| (n.clone(), map[v])).collect();
    out
}

fn expanded<'g>(
    b: &'g Builder,
    node: &Node,
    ins: &[Tensor<'g>],
    choose: &impl Fn(&Op) -> bool,
) -> Vec<Tensor<'g>> {
    let before = b.with_graph(|g| g.nodes.len());
    let simpler = if choose(&node.op) { node.op.expand(b, node.key, ins) } else { None };
    let Some(outs) = simpler else {
        let ids = ins.iter().map(|t| t.v).collect();
        let id = b.edit(|g| g.push_keyed(node.op.clone(), ids, &node.path, node.key));
        return b.outputs(id);
    };
    // An expansion may itself contain operations to expand: its nodes are taken out again and expanded in turn.
    let nested = b.with_graph(|g| g.nodes[before..].iter().any(|n| choose(&n.op) && !is_primitive(&n.op)));
    if !nested {
        return outs;
    }
    let fresh: Vec<Node> = b.edit(|g| g.nodes.split_off(before));
    let mut map: HashMap<Value, Tensor<'g>> = HashMap::new();
    let find = |map: &HashMap<Value, Tensor<'g>>, v: Value| {
        if (v.node.0 as usize) < before { b.tensor(v) } else { map[&v] }
    };
    for (i, node) in fresh.iter().enumerate() {
        let ins: Vec<_> = node.ins.iter().map(|v| find(&map, *v)).collect();
        for (out, t) in expanded(b, node, &ins, choose).into_iter().enumerate() {
            map.insert(NodeId((before + i) as u32).out(out as u8), t);
        }
    }
    outs.into_iter().map(|t| find(&map, t.v)).collect()
}

fn is_primitive(op: &Op) -> bool {
    match op {
        Op::Product { base, epilogue, .. } => !base && *epilogue == Epilogue::None,
        Op::ScatterAdd { base, .. } => !base,
        Op::AllGather { ways, .. } | Op::AllReduce { ways, .. } => *ways > 1,
        Op::ReduceScatter { ways, base, .. } => *ways > 1 && !base,
        _ => matches!(
            op.kind(),
            K::Read
                | K::Fill
                | K::Iota
                | K::Map
                | K::Reshape
                | K::Transpose
                | K::Slice
                | K::Concat
                | K::Pad
                | K::Broadcast
                | K::Reduce
                | K::Dropout
                | K::Gather
                | K::RowScatter
                | K::Resample
                | K::Sample
                | K::Dequantize
                | K::Rank
        ),
    }
}
