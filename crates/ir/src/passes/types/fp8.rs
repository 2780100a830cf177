//! The products of linear layers in 8-bit floats: y = x w, dx = dy w and dw = x dy with x and w in E4M3, which has more
//! precision, and dy in E5M2, which has more range.
//!
//! The pass rewrites the bf16 graph. Each x and dy is quantised once, together with its transpose, because matrix units need
//! the inner extent of both operands contiguous: the rows serve one product, the columns the weight's gradient. Weights are
//! read from 8-bit copies (class `derived`) that `fp8_copies` writes after every update. Sums, outputs, master weights,
//! attention, embeddings and the head stay as they are.

use std::collections::{BTreeSet, HashMap};

use crate::graph::{Class, Graph, Init, NodeId, Slot, SlotId, SlotPart, Value};
use crate::ops::Op;
use crate::ops::epilogue::Epilogue;
use crate::ops::quantize::Source;
use crate::passes::forward::adapters;
use crate::passes::gradient::recompute::layer_of;
use crate::passes::options::Scaling;
use crate::passes::types::precision::copy_path;
use crate::replay::Replay;
use crate::types::{DType, TensorType};

/// The types, each with its own histories.
pub const TYPES: [DType; 2] = [DType::E4M3, DType::E5M2];

/// Extents of 8-bit products must be multiples of this.
const MULTIPLE: usize = 16;
/// The distance between scales, and between magnitudes, in f32 elements: cuBLASLt requires scales at multiples of 16 bytes.
pub const APART: usize = 4;

/// Number of products in 8 bits, and of all candidates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Narrowed {
    pub products: usize,
    pub of: usize,
}

/// A slot for all tensors of a type: `amax`, the largest magnitudes of this step; `scale`, the divisors; `history`, the largest
/// magnitudes of earlier steps.
pub fn shared_path(what: &str, dtype: DType) -> String {
    format!("fp8.{what}.{}", dtype.name())
}

/// A weight's 8-bit copy: `rows` in the weight's own layout, `columns` transposed, and their `scale`.
pub fn weight_path(what: &str, weight: &str) -> String {
    format!("fp8.{what}.{weight}")
}

/// Rewrites the products of the named layers, and of layers that share a tensor with them, or of all layers. `forward` is the
/// number of forward nodes; its new value is returned.
pub fn fp8(
    g: &Graph,
    forward: usize,
    scaling: Scaling,
    layers: Option<&BTreeSet<String>>,
) -> (Graph, usize, Narrowed) {
    let mut chosen = candidates(g, forward);
    let of = g.nodes.iter().filter(|n| matches!(n.op, Op::Product { .. })).count();
    if let Some(layers) = layers {
        let is_named = |unit: &Unit| !unit.names.is_disjoint(layers);
        let left = units(g, forward).into_iter().filter(|unit| !is_named(unit));
        left.flat_map(|unit| unit.products).for_each(|id| _ = chosen.remove(&id));
    }
    let mut narrowing = Narrowing {
        replay: Replay::new(g),
        quantized: HashMap::new(),
        scales: HashMap::new(),
        writes: vec![],
    };
    if scaling == Scaling::Delayed {
        narrowing.add_scales(&chosen);
    }
    let mut new_forward = 0;
    for id in g.ids() {
        if id.0 as usize == forward {
            new_forward = narrowing.replay.new.nodes.len();
        }
        match chosen.get(&id) {
            Some(operands) => narrowing.product(id, operands),
            None => _ = narrowing.replay.copy(id),
        }
    }
    let narrowed = Narrowed { products: chosen.len(), of };
    let Narrowing { replay, writes, .. } = narrowing;
    let mut new = replay.finish();
    new.writes.extend(writes);
    (new, new_forward, narrowed)
}

/// Layers that run in 8 bits together or not at all, because they share a tensor, which is quantised once for all of them.
/// Layers with equal names in different blocks of the model are one unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    /// The names of its weights inside their block.
    pub names: BTreeSet<String>,
    /// The forward products and both gradients of each.
    pub products: Vec<NodeId>,
}

/// The units of a graph, sorted by their names.
pub fn units(g: &Graph, forward: usize) -> Vec<Unit> {
    let candidates = candidates(g, forward);
    // A product joins its operands: x with w, dy with w, x with dy.
    let mut group_of: HashMap<Joined, usize> = HashMap::new();
    let mut groups: Vec<(Vec<Joined>, Vec<NodeId>)> = vec![];
    for id in g.ids().filter(|id| candidates.contains_key(id)) {
        let joined = candidates[&id].map(Joined::of);
        let [to, from] = joined.map(|operand| {
            *group_of.entry(operand).or_insert_with(|| {
                groups.push((vec![operand], vec![]));
                groups.len() - 1
            })
        });
        groups[to].1.push(id);
        if to != from {
            let (members, products) = std::mem::take(&mut groups[from]);
            members.iter().for_each(|member| _ = group_of.insert(*member, to));
            groups[to].0.extend(members);
            groups[to].1.extend(products);
        }
    }
    let mut units: Vec<Unit> = vec![];
    for (members, products) in groups.into_iter().filter(|(members, _)| !members.is_empty()) {
        let weights = members.into_iter().filter_map(|member| match member {
            Joined::Weight(slot) => Some(slot),
            Joined::Tensor(_) => None,
        });
        let names: BTreeSet<String> = weights.flat_map(|slot| names(weight_of(g, slot))).collect();
        match units.iter_mut().find(|unit| unit.names == names) {
            Some(unit) => unit.products.extend(products),
            None => units.push(Unit { names, products }),
        }
    }
    units.sort_by(|a, b| a.names.cmp(&b.names));
    units
}

/// An error message about the first name that is not a layer's.
pub fn unknown(g: &Graph, forward: usize, layers: &BTreeSet<String>) -> Option<String> {
    let known: BTreeSet<String> = units(g, forward).into_iter().flat_map(|unit| unit.names).collect();
    let unknown = layers.difference(&known).next()?;
    let known = known.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    Some(format!("no layer that can run in fp8 is called `{unknown}`; there are {known}"))
}

/// The identity of an operand, whatever its type.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Joined {
    Weight(SlotId),
    Tensor(Value),
}

impl Joined {
    fn of(operand: Operand) -> Joined {
        match operand {
            Operand::Weight(slot) => Joined::Weight(slot),
            Operand::Tensor(v, _) => Joined::Tensor(v),
        }
    }
}

/// The names of a weight inside its block, one for each part of a merged weight: `attn.wo` for `layers.3.attn.wo`, and `ffn.a`
/// and `ffn.b` for `layers.3.ffn.a+b`.
pub fn names(weight: &str) -> Vec<String> {
    let inside = layer_of(weight).map_or(weight, |block| weight[block.len()..].trim_start_matches('.'));
    let (scope, parts) = inside.rsplit_once('.').unwrap_or(("", inside));
    let dot = if scope.is_empty() { "" } else { "." };
    parts.split('+').map(|part| format!("{scope}{dot}{part}")).collect()
}

/// The weight that a slot holds in bf16.
fn weight_of(g: &Graph, copy: SlotId) -> &str {
    weight_name(g.slot(copy)).expect("a copy is named after its weight")
}

/// The products that can run in 8 bits, with their operands.
fn candidates(g: &Graph, forward: usize) -> HashMap<NodeId, [Operand; 2]> {
    g.ids().filter_map(|id| Some((id, operands(g, id, forward)?))).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operand {
    Weight(SlotId),
    /// Computed in the forward pass, or in the backward pass.
    Tensor(Value, DType),
}

/// The operands of a product that can run in 8 bits: a weight of a layer and its input or output gradient, or the two operands
/// of the weight's gradient.
fn operands(g: &Graph, id: NodeId, forward: usize) -> Option<[Operand; 2]> {
    let node = g.node(id);
    let Op::Product { ta, base: false, epilogue: Epilogue::None, .. } = node.op else { return None };
    layer_of(&node.path)?;
    // Thin products are bound by memory and not by arithmetic: 8 bits would only cost precision.
    if node.path.ends_with(adapters::NODES) {
        return None;
    }
    let operand = |v: Value| match g.node(v.node).op {
        Op::Read { slot } if is_copy(g, slot) => Operand::Weight(slot),
        _ if (v.node.0 as usize) < forward => Operand::Tensor(v, DType::E4M3),
        _ => Operand::Tensor(v, DType::E5M2),
    };
    let [a, b] = [node.ins[0], node.ins[1]].map(operand);
    let is_layer = match (a, b) {
        (Operand::Weight(_), Operand::Tensor(..)) | (Operand::Tensor(..), Operand::Weight(_)) => true,
        (Operand::Tensor(_, a), Operand::Tensor(_, b)) => a != b && node.outs[0].dtype == DType::F32,
        (Operand::Weight(_), Operand::Weight(_)) => false,
    };
    let is_narrow = node.ins[..2].iter().all(|v| g.ty(*v).dtype == DType::BF16);
    let inner = crate::ops::product::inner(ta, g.ty(node.ins[0]));
    let fits = |x: &usize| x.is_multiple_of(MULTIPLE);
    let is_matrix = node.outs[0].rank() == 2 && node.outs[0].dims.iter().chain([&inner]).all(fits);
    (is_layer && is_narrow && is_matrix).then_some([a, b])
}

/// Whether a slot is the bf16 copy of a weight, or a weight that is bf16 because it is frozen.
fn is_copy(g: &Graph, slot: SlotId) -> bool {
    matches!(g.slot(slot).class, Class::Derived | Class::Frozen)
}

/// The name of the weight that a slot holds in bf16.
pub(super) fn weight_name(slot: &Slot) -> Option<&str> {
    match slot.class {
        Class::Frozen if slot.ty.dtype == DType::BF16 => Some(&slot.path),
        _ => slot.path.strip_prefix(&copy_path("")),
    }
}

struct Narrowing<'a> {
    replay: Replay<'a>,
    /// The node that quantises each old value.
    quantized: HashMap<Value, NodeId>,
    /// The slots of each value's scale and largest magnitude, with delayed scaling.
    scales: HashMap<Value, (SlotId, SlotId)>,
    /// The writes of largest magnitudes.
    writes: Vec<(SlotId, Value)>,
}

impl Narrowing<'_> {
    /// Adds one scale and one largest magnitude per tensor, in the order of first use.
    fn add_scales(&mut self, chosen: &HashMap<NodeId, [Operand; 2]>) {
        let mut found: Vec<(Value, DType, &str)> = vec![];
        for id in self.replay.old.ids() {
            for operand in chosen.get(&id).into_iter().flatten() {
                if let Operand::Tensor(v, dtype) = *operand
                    && !found.iter().any(|(known, ..)| *known == v)
                {
                    found.push((v, dtype, &self.replay.old.node(id).path));
                }
            }
        }
        for dtype in TYPES {
            let of_type: Vec<_> = found.iter().filter(|(_, d, _)| *d == dtype).collect();
            let mut whole = |what: &str, class: Class| {
                let (path, ty) =
                    (shared_path(what, dtype), TensorType::new(DType::F32, [APART * of_type.len()]));
                self.replay.new.add_slot(Slot { path, ty, class, init: Init::Zeros, part: None })
            };
            let (scales, amaxes) = (whole("scale", Class::Derived), whole("amax", Class::Carry));
            for (i, (v, _, path)) in of_type.into_iter().enumerate() {
                let mut one = |what: &str, class: Class, of: SlotId| {
                    let path = format!("{}.{i}.{path}", shared_path(what, dtype));
                    let (ty, part) =
                        (TensorType::new(DType::F32, [1]), Some(SlotPart { of, offset: APART * i }));
                    self.replay.new.add_slot(Slot { path, ty, class, init: Init::Zeros, part })
                };
                let slots = (one("scale", Class::Derived, scales), one("amax", Class::Carry, amaxes));
                self.scales.insert(*v, slots);
            }
        }
    }

    /// Product `id` with 8-bit operands: a by its rows, b by its columns, each contiguous along the inner extent.
    fn product(&mut self, id: NodeId, operands: &[Operand; 2]) {
        let Op::Product { ta, tb, out, compute, .. } = self.replay.old.node(id).op else {
            unreachable!("chosen because it is a product")
        };
        let (a, a_scale) = self.operand(operands[0], ta, id);
        let (b, b_scale) = self.operand(operands[1], !tb, id);
        let op = Op::Product { ta: false, tb: true, out, base: false, compute, epilogue: Epilogue::None };
        self.replay.copy_as(id, op, vec![a, b, a_scale, b_scale]);
    }

    /// An operand, optionally transposed, and its scale.
    fn operand(&mut self, operand: Operand, transposed: bool, at: NodeId) -> (Value, Value) {
        match operand {
            Operand::Weight(copy) => {
                let (what, dims) =
                    (if transposed { "columns" } else { "rows" }, &self.replay.old.slot(copy).ty.dims);
                let dims = if transposed { vec![dims[1], dims[0]] } else { dims.clone() };
                let codes = self.weight(copy, what, TensorType::new(DType::E4M3, dims), at);
                (codes, self.weight(copy, "scale", TensorType::new(DType::F32, [1]), at))
            }
            Operand::Tensor(v, dtype) => {
                let node = self.quantize(v, dtype, at);
                let scale = match self.scales.get(&v) {
                    Some((scale, _)) => self.replay.add(Op::Read { slot: *scale }, vec![], at),
                    None => node.out(2),
                };
                (node.out(transposed as u8), scale)
            }
        }
    }

    fn weight(&mut self, copy: SlotId, what: &str, ty: TensorType, at: NodeId) -> Value {
        let path = weight_path(what, weight_of(self.replay.old, copy));
        let slot = self.replay.new.find_slot(&path).unwrap_or_else(|| {
            let (class, init, part) = (Class::Derived, Init::Zeros, None);
            self.replay.new.add_slot(Slot { path, ty, class, init, part })
        });
        self.replay.add(Op::Read { slot }, vec![], at)
    }

    /// The node that quantises a value, created at its first use.
    fn quantize(&mut self, v: Value, to: DType, at: NodeId) -> NodeId {
        if let Some(node) = self.quantized.get(&v) {
            return *node;
        }
        let x = self.replay.get(v);
        let path = self.replay.old.node(at).path.clone();
        let node = match self.scales.get(&v).copied() {
            Some((scale, amax)) => {
                let [s, m] = [scale, amax].map(|slot| self.replay.add(Op::Read { slot }, vec![], at));
                let node = self.replay.new.push(
                    Op::Quantize { to, current: false, of: Source::Given },
                    vec![x, s, m],
                    &path,
                );
                self.writes.push((amax, node.out(2)));
                node
            }
            None => {
                self.replay.new.push(Op::Quantize { to, current: true, of: Source::Given }, vec![x], &path)
            }
        };
        self.quantized.insert(v, node);
        node
    }
}
