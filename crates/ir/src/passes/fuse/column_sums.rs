//! Sums over rows are computed by the operation that computes the rows. The gradient of a bias is the sum over rows of a
//! gradient that an elementwise region, or the gradient of a norm, has just written: that operation has every element in
//! registers, whereas a separate sum reads them all again. A value that is only summed is not written at all.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, Value};
use crate::ops::Op;
use crate::ops::reduce::Fold;
use crate::passes::fuse::regions;
use crate::passes::readers::Readers;
use crate::region;
use crate::replay::Replay;

/// With fewer rows a sum takes the time of a launch in any form.
const LEAST_ROWS: usize = 256;

/// Fuses sums with the operations that compute their rows; returns their number.
pub fn column_sums(g: &Graph) -> (Graph, usize) {
    let find = Readers::new(g);
    let (mut replay, mut joined) = (Replay::new(g), 0);
    for (id, node) in g.ids().zip(&g.nodes) {
        // A fused sum is already computed with its rows.
        if matches!(node.op, Op::Reduce { .. }) && replay.has(id.out(0)) {
            continue;
        }
        let sums = sums_of(&find, id);
        match &node.op {
            Op::Map { .. } | Op::Region { .. } if !sums.is_empty() => {
                joined += sums.len();
                elementwise(&mut replay, &find, id, &sums);
            }
            &Op::RmsNormGrad { eps, center, weight, bias, add, again, sum: false }
                if sums.contains_key(&0) =>
            {
                let op = Op::RmsNormGrad { eps, center, weight, bias, add, again, sum: true };
                let ins = node.ins.iter().map(|v| replay.get(*v)).collect();
                let new = replay.copy_as(id, op, ins);
                let sum = sums[&0].out(0);
                let dims = g.dims(sum).to_vec();
                let row = replay.add(Op::Reshape { dims }, vec![new.out(node.outs.len() as u8)], sum.node);
                replay.set(sum, row);
                joined += 1;
            }
            _ => _ = replay.copy(id),
        }
    }
    (replay.finish(), joined)
}

/// The sums over rows of a node's outputs, by output.
fn sums_of(find: &Readers<'_>, id: NodeId) -> HashMap<usize, NodeId> {
    let is_sum = |of: &&NodeId| matches!(find.g.node(**of).op, Op::Reduce { axis: 0, by: Fold::Sum });
    let outs = find.g.node(id).outs.iter().enumerate();
    let outs = outs.filter(|(_, ty)| region::is_summed(ty) && ty.dims[0] >= LEAST_ROWS);
    outs.filter_map(|(i, _)| Some((i, *find.of_value(id.out(i as u8)).0.iter().find(is_sum)?))).collect()
}

/// The node `id` as a region that also computes the sums.
fn elementwise(replay: &mut Replay<'_>, find: &Readers<'_>, id: NodeId, sums: &HashMap<usize, NodeId>) {
    let (g, node) = (find.g, find.g.node(id));
    let (mut body, ins) = match &node.op {
        Op::Region { body } => ((**body).clone(), node.ins.clone()),
        _ => regions::body(g, &[id], &[id.out(0)]),
    };
    let mut outs: Vec<(Value, Value)> = vec![];
    for (i, (_, made)) in std::mem::take(&mut body.results).into_iter().enumerate() {
        let v = id.out(i as u8);
        // A value with other readers besides its sum stays an output.
        if !sums.contains_key(&i) || find.of_value(v).1 > 1 {
            outs.push((v, made));
        }
        if let Some(of) = sums.get(&i) {
            let sum = g.node(*of);
            let sum = body.push_keyed(sum.op.clone(), vec![made], &sum.path, sum.key);
            outs.push((of.out(0), sum.out(0)));
        }
    }
    body.results = outs.iter().enumerate().map(|(i, (_, made))| (format!("out{i}"), *made)).collect();
    let ins = ins.iter().map(|v| replay.get(*v)).collect();
    let region = replay.new.push_keyed(Op::Region { body: Box::new(body) }, ins, &node.path, node.key);
    for (i, (v, _)) in outs.iter().enumerate() {
        replay.set(*v, region.out(i as u8));
    }
}
