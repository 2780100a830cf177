//! Updates of the bf16 copies of weights: `apply` writes them after every update, and a `derive` plan rebuilds all of them bit
//! for bit after initialisation and load. Copies of sharded regions are gathered (`gradient::shards`).

use std::collections::{HashMap, HashSet};

use crate::graph::{Class, Graph, Slot, SlotId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::passes::gradient::shards::Divided;
use crate::passes::types::precision::copy_path;
use crate::plan::Role;
use crate::replay::Replay;
use crate::types::DType;
use crate::verify::extent;

/// Adds the writes to `apply`, and the program `derive` where there is anything to derive.
pub(crate) fn copies(graphs: &mut Vec<(Role, Graph)>, divided: &[Divided]) {
    let derive = derive(graphs, divided);
    if let Some((_, apply)) = graphs.iter_mut().find(|(role, _)| *role == Role::Apply) {
        let is_shard = |root: SlotId| divided.iter().any(|divided| divided.shard == apply.slot(root).path);
        let is_copied =
            |slot: SlotId| apply.slot(slot).class == Class::Weight && !is_shard(extent(apply, slot).0);
        let updated: Vec<_> = apply.writes.iter().filter(|(slot, _)| is_copied(*slot)).copied().collect();
        for (weight, value) in updated {
            let copy = copy_of(apply, weight);
            let narrow = update_with_copy(apply, value);
            apply.writes.push((copy, narrow));
        }
    }
    if !derive.writes.is_empty() {
        graphs.push((Role::Derive, derive));
    }
}

/// One cast for every copy that is not part of another in any of the graphs.
fn derive(graphs: &[(Role, Graph)], divided: &[Divided]) -> Graph {
    let is_divided = |path: &str| divided.iter().any(|divided| copy_path(&divided.whole) == path);
    let is_copy =
        |s: &&Slot| s.class == Class::Derived && s.path.starts_with(&copy_path("")) && !is_divided(&s.path);
    let derived = || graphs.iter().flat_map(|(_, g)| &g.slots).filter(is_copy);
    let parts: HashSet<&str> = derived().filter(|s| s.part.is_some()).map(|s| s.path.as_str()).collect();
    let mut derive = Graph::default();
    for copy in derived().filter(|s| !parts.contains(s.path.as_str())) {
        if derive.find_slot(&copy.path).is_some() {
            continue;
        }
        let source = graphs.iter().find_map(|(_, g)| {
            g.slots.iter().find(|s| copy_path(&s.path) == copy.path).map(|s| Slot { part: None, ..s.clone() })
        });
        let source = source.expect("a copy is named after its source");
        let (path, weight) = (source.path.clone(), derive.add_slot(source));
        let copy = derive.add_slot(copy.clone());
        let read = derive.add(Op::Read { slot: weight }, vec![], &path);
        write_cast(&mut derive, copy, read, &path);
    }
    derive
}

fn copy_of(g: &mut Graph, weight: SlotId) -> SlotId {
    let source = g.slot(weight).clone();
    let path = copy_path(&source.path);
    g.find_slot(&path).unwrap_or_else(|| {
        g.add_slot(Slot {
            path,
            ty: source.ty.with(DType::BF16),
            class: Class::Derived,
            part: None,
            ..source
        })
    })
}

/// The bf16 output of the update that computes `value`: written in the same pass, it costs 2 bytes per element where a separate
/// cast would cost 6. The same holds for a region of elementwise operations; after any other operation a cast is added.
pub(crate) fn update_with_copy(apply: &mut Graph, value: Value) -> Value {
    let node = &mut apply.nodes[value.node.0 as usize];
    match &mut node.op {
        Op::AdamW { copy, .. } | Op::AdamW8 { copy, .. } => *copy = true,
        Op::Region { body } => {
            let wide = body.results[value.out as usize].1;
            let narrow = body.add(Op::Map { f: E::Cast(DType::BF16) }, vec![wide], &node.path);
            body.results.push((format!("out{}", body.results.len()), narrow));
        }
        _ => {
            let path = node.path.clone();
            return apply.add(Op::Map { f: E::Cast(DType::BF16) }, vec![value], &path);
        }
    }
    let narrow = node.outs[value.out as usize].with(DType::BF16);
    node.outs.push(narrow);
    Value { node: value.node, out: (node.outs.len() - 1) as u8 }
}

/// Finishes a rewrite that reads no bf16 copies: reads of the copies named here become casts of these slots, and reads of the
/// other slots these values.
pub(crate) fn cast_where_read(
    mut replay: Replay<'_>,
    sources: &HashMap<String, SlotId>,
    others: &HashMap<SlotId, Value>,
) -> Graph {
    let g = replay.old;
    // A cast stands at the first use rather than at the read, so that it does not live longer than needed.
    let mut narrow: HashMap<Value, SlotId> = HashMap::new();
    for id in g.ids() {
        let node = g.node(id);
        if let Op::Read { slot } = node.op {
            if let Some(source) = sources.get(&g.slot(slot).path) {
                narrow.insert(id.out(0), *source);
                continue;
            }
            if let Some(value) = others.get(&slot) {
                replay.set(id.out(0), *value);
                continue;
            }
        }
        for v in &node.ins {
            if let Some(source) = narrow.remove(v) {
                let wide = replay.add(Op::Read { slot: source }, vec![], v.node);
                let cast = replay.add(Op::Map { f: E::Cast(g.ty(*v).dtype) }, vec![wide], v.node);
                replay.set(*v, cast);
            }
        }
        replay.copy(id);
    }
    replay.finish()
}

fn write_cast(g: &mut Graph, copy: SlotId, value: Value, path: &str) {
    let cast = g.add(Op::Map { f: E::Cast(DType::BF16) }, vec![value], path);
    g.writes.push((copy, cast));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::Builder;
    use crate::graph::Init;
    use crate::oracle;
    use crate::passes::fuse::regions::regions;

    #[test]
    fn an_update_of_plain_operations_is_followed_by_a_cast() {
        let b = Builder::new();
        let weight = b.param("w", &[4], Init::Ones);
        let slot = b.with_graph(|g| g.find_slot("w")).expect("a weight");
        b.write(slot, weight.scale(0.5));
        let mut graphs = vec![(Role::Apply, b.finish())];
        copies(&mut graphs, &[]);
        let apply = &graphs[0].1;
        let (copy, value) = apply.writes[1];
        assert_eq!(apply.slot(copy).path, copy_path("w"));
        assert_eq!(apply.node(value.node).op, Op::Map { f: E::Cast(DType::BF16) });
        assert_eq!(apply.node(value.node).ins, [apply.writes[0].1]);
    }

    #[test]
    fn an_update_of_one_region_writes_the_copy_itself() {
        let b = Builder::new();
        let weight = b.param("w", &[4], Init::Ones);
        let slot = b.with_graph(|g| g.find_slot("w")).expect("a weight");
        b.write(slot, weight.scale(0.5).offset(1.0));
        let (apply, _) = regions(&b.finish());
        let mut graphs = vec![(Role::Apply, apply)];
        copies(&mut graphs, &[]);
        let apply = &graphs[0].1;
        let [(_, wide), (copy, narrow)] = apply.writes[..] else { panic!("a weight and its copy") };
        assert_eq!(apply.slot(copy).path, copy_path("w"));
        assert_eq!((narrow.node, narrow.out), (wide.node, 1));
        let values = oracle::Values::from([("w".to_string(), vec![1.0, 0.01, 3.0, -2.0])]);
        let written = oracle::run(apply, &values).writes;
        let rounded: Vec<f64> = written["w"].iter().map(|x| DType::BF16.round(*x)).collect();
        assert!((written["w"][1] - 1.005).abs() < 1e-6 && rounded != written["w"]);
        assert_eq!(written[&copy_path("w")], rounded);
    }
}
