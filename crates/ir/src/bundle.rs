//! The body of a `Bundle`: the bodies of several regions in one graph, which share no input and may differ in shape.

use std::collections::HashMap;

use crate::graph::{Graph, SlotId, Value};
use crate::ops::Op;
use crate::region;
use crate::types::TensorType;

pub fn infer(body: &Graph, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    let outs = region::infer(body, ins)?;
    match region::sums(body).next() {
        Some(sum) => Err(format!("output {sum} is a sum over rows, which regions of a bundle do not give")),
        None => Ok(outs),
    }
}

/// One region of a bundle, and the bundle's inputs and outputs that belong to it.
#[derive(Clone, Debug, PartialEq)]
pub struct BundleRegion {
    pub body: Graph,
    pub ins: Vec<usize>,
    pub outs: Vec<usize>,
}

/// A bundle's regions, in the order of their first nodes.
pub fn parts(body: &Graph) -> Vec<BundleRegion> {
    let first = first_of_region(body);
    let mut firsts = first.clone();
    firsts.sort_unstable();
    firsts.dedup();
    firsts.into_iter().map(|of| part(body, |node| first[node] == of)).collect()
}

/// (input, output) pairs of one region each.
pub fn pairs(body: &Graph) -> Vec<(usize, usize)> {
    let first = first_of_region(body);
    let mut pairs = vec![];
    for (node, of) in body.nodes.iter().zip(&first) {
        let Op::Read { slot } = node.op else { continue };
        let outs = body.results.iter().enumerate().filter(|(_, (_, v))| first[v.node.0 as usize] == *of);
        pairs.extend(outs.map(|(out, _)| (slot.0 as usize, out)));
    }
    pairs
}

/// For each node, the first node of its region: two nodes are of one region if one reads the other or both read the same input.
fn first_of_region(body: &Graph) -> Vec<usize> {
    let mut first: Vec<usize> = vec![];
    let mut read: HashMap<SlotId, usize> = HashMap::new();
    for (i, node) in body.nodes.iter().enumerate() {
        let mut with: Vec<usize> = node.ins.iter().map(|v| first[v.node.0 as usize]).collect();
        if let Op::Read { slot } = node.op {
            with.push(first.get(*read.entry(slot).or_insert(i)).copied().unwrap_or(i));
        }
        let least = with.iter().copied().min().unwrap_or(i);
        first.push(least);
        for of in first.iter_mut().filter(|of| with.contains(of)) {
            *of = least;
        }
    }
    first
}

/// The nodes of a body for which `is_own` holds, as a body.
fn part(body: &Graph, is_own: impl Fn(usize) -> bool) -> BundleRegion {
    let mut part = BundleRegion { body: Graph::default(), ins: vec![], outs: vec![] };
    let mut made: Vec<Option<Value>> = vec![None; body.nodes.len()];
    for (i, node) in body.nodes.iter().enumerate().filter(|(i, _)| is_own(*i)) {
        let op = match node.op {
            Op::Read { slot } => {
                let known = part.ins.iter().position(|s| *s == slot.0 as usize);
                let own = known.unwrap_or_else(|| {
                    part.ins.push(slot.0 as usize);
                    part.body.add_slot(body.slot(slot).clone());
                    part.ins.len() - 1
                });
                Op::Read { slot: SlotId(own as u32) }
            }
            _ => node.op.clone(),
        };
        let args = node.ins.iter().map(|v| made[v.node.0 as usize].expect("of the same region")).collect();
        made[i] = Some(part.body.push_keyed(op, args, &node.path, node.key).out(0));
    }
    for (i, (name, v)) in body.results.iter().enumerate() {
        if let Some(own) = made[v.node.0 as usize] {
            part.body.results.push((name.clone(), own));
            part.outs.push(i);
        }
    }
    part
}
