//! Frozen weights in E4M3. With `precision=fp8` products multiply the codes themselves: the stored rows, and the columns that
//! `derive` writes (`fp8_copies`). For any other reader the weight is dequantised.
//!
//! A product has one scale for its weight, so weights that could be merged into one product share a scale, whether they are
//! merged or not. Scales are powers of two: decoded values are exact in bf16, and a scale coarser than a weight needs only
//! costs precision of values below a 2^15th of the largest.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::builder::Builder;
use crate::fp8;
use crate::graph::{Class, Graph, Init, NodeId, Slot, SlotId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::passes::types::base::{self, Codes, Replaced, parts, slot_of};
use crate::passes::types::fp8::weight_path;
use crate::pieces::TensorRange;
use crate::plan::PlanSet;
use crate::replay::Replay;
use crate::types::{DType, TensorType};

/// The suffix of the slots of scales; the rest of the path is the joined paths of the weights.
const SCALE: &str = ".fp8.scale";
const JOINT: char = '+';

/// The slot of the scale of a group of weights.
fn scale_path(group: &BTreeSet<String>) -> String {
    let weights: Vec<&str> = group.iter().map(String::as_str).collect();
    format!("{}{SCALE}", weights.join(&JOINT.to_string()))
}

/// The weights whose scale a slot holds.
pub fn weights_of_scale(path: &str) -> Option<impl Iterator<Item = &str>> {
    Some(path.strip_suffix(SCALE)?.split(JOINT))
}

/// Groups these weights: those that multiply the same input share a scale.
pub fn groups(model: &Graph, weights: &BTreeSet<String>) -> Vec<BTreeSet<String>> {
    type Group = (HashSet<Value>, BTreeSet<String>);
    let mut groups: Vec<Group> = vec![];
    for node in model.nodes.iter().filter(|node| matches!(node.op, Op::Product { .. })) {
        let (input, Op::Read { slot }) = (node.ins[0], &model.node(node.ins[1].node).op) else { continue };
        let path = &model.slot(*slot).path;
        if !weights.contains(path) {
            continue;
        }
        let joins = |(inputs, weights): &Group| inputs.contains(&input) || weights.contains(path);
        let (joined, mut others): (Vec<Group>, Vec<Group>) = groups.into_iter().partition(joins);
        let mut group: Group = ([input].into(), [path.clone()].into());
        for (inputs, weights) in joined {
            group.0.extend(inputs);
            group.1.extend(weights);
        }
        others.push(group);
        groups = others;
    }
    groups.into_iter().map(|(_, weights)| weights).collect()
}

/// The least scale that fits all values of a group, given the largest magnitude of each weight.
pub fn scale(amaxes: impl IntoIterator<Item = f32>) -> f32 {
    fp8::scale(DType::E4M3, amaxes.into_iter().fold(0.0, f32::max))
}

/// The graph with E4M3 codes for the weights in these slots, also where 8-bit products read them.
pub(super) fn coded(g: &Graph, chosen: &HashSet<SlotId>, groups: &[BTreeSet<String>]) -> Graph {
    let scale_of = |slot: SlotId| {
        let weight = &g.slot(parts(g, slot)[0]).path;
        let group = groups.iter().find(|group| group.contains(weight)).expect("a weight of the base");
        assert!(
            parts(g, slot).into_iter().all(|part| group.contains(&g.slot(part).path)),
            "one product, one scale"
        );
        let ty = TensorType::new(DType::F32, [1]);
        Slot { path: scale_path(group), ty, class: Class::Frozen, init: Init::Data, part: None }
    };
    // The slots that replace those that `fp8` reads: the rows of a weight are its codes.
    let mut instead = HashMap::new();
    for slot in chosen.iter().copied() {
        let Slot { path, ty, .. } = g.slot(slot);
        let codes = Slot { path: Codes::Fp8.path(path), ty: Codes::Fp8.ty(ty), ..g.slot(slot).clone() };
        for (what, slot) in [("rows", codes), ("scale", scale_of(slot))] {
            instead.extend(g.find_slot(&weight_path(what, path)).map(|copy| (copy, slot)));
        }
    }
    let dequantized = |replay: &mut Replay<'_>, slot: SlotId, at: NodeId| {
        let scale = slot_of(&mut replay.new, &scale_of(slot));
        dequantized(replay, [slot, scale], at)
    };
    let replaced = Replaced { slots: &instead, computed: chosen, compute: dequantized };
    base::coded(g, chosen, Codes::Fp8, &replaced)
}

/// Decoded values times their scale, in the weight's type, as one launch.
fn dequantized(replay: &mut Replay<'_>, [codes, scale]: [SlotId; 2], at: NodeId) -> Value {
    let TensorType { dtype, dims } = replay.old.slot(codes).ty.clone();
    let codes = replay.add(Op::Read { slot: codes }, vec![], at);
    let scale = replay.add(Op::Read { slot: scale }, vec![], at);
    let scale = replay.add(Op::Reshape { dims: vec![1, 1] }, vec![scale], at);
    let scale = replay.add(Op::Broadcast { dims: dims.clone() }, vec![scale], at);
    let b = Builder::new();
    let input = |path: &str, dtype: DType| {
        let ty = TensorType::new(dtype, dims.clone());
        let (class, init, part) = (Class::Input, Init::Zeros, None);
        b.read(b.edit(|g| g.add_slot(Slot { path: path.into(), ty, class, init, part })))
    };
    let [x, by] = [input("in0", DType::E4M3), input("in1", DType::F32)];
    b.result("out0", x.cast(DType::F32).zip(E::Mul, by).cast(dtype));
    replay.add(Op::Region { body: Box::new(b.finish()) }, vec![codes, scale], at)
}

/// Weights that wait for the others of their group, which share a scale.
#[derive(Debug)]
pub struct Waiting<T> {
    groups: HashMap<String, Vec<(TensorRange, T)>>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Waiting { groups: HashMap::new() }
    }
}

impl<T> Waiting<T> {
    /// Adds a weight. Returns its whole group, with the slot of their scale, if it was the last of them.
    pub fn add(
        &mut self,
        plans: &PlanSet,
        piece: TensorRange,
        values: T,
    ) -> Option<(String, Vec<(TensorRange, T)>)> {
        let scale = scale_of(plans, &piece.path);
        let count = weights_of_scale(&scale).expect("a scale").count();
        let group = self.groups.entry(scale.clone()).or_default();
        group.push((piece, values));
        (group.len() == count)
            .then(|| (scale.clone(), self.groups.remove(&scale).expect("it was just there")))
    }

    /// A weight that still waits for others.
    pub fn first(&self) -> Option<&str> {
        self.groups.values().flatten().map(|(piece, _)| piece.path.as_str()).min()
    }
}

pub fn scale_of(plans: &PlanSet, weight: &str) -> String {
    let has =
        |path: &&String| weights_of_scale(path).is_some_and(|mut weights| weights.any(|name| name == weight));
    let path = plans.slots.iter().map(|slot| &slot.path).find(has);
    path.unwrap_or_else(|| panic!("{weight} has no scale")).clone()
}
