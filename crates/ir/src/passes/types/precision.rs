//! Products, attention and the values between them in bf16; sums, statistics, losses and the optimiser in f32.
//!
//! Weights of two axes and more are read from bf16 copies (class `derived`) that `apply` and `derive` write. Frozen weights
//! have no f32 master and are bf16 themselves, and so are tables of rows that the host writes, and cached keys and values.
//! Every other type follows by inference; where two float types meet, the rules of `cast_inputs` decide.

use std::collections::HashSet;

use crate::graph::{Class, Graph, Node, NodeId, Slot, SlotId, SlotPart, Value};
use crate::ops::Op;
use crate::ops::attention;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::linear_attention::LinearAttend;
use crate::replay::{Replay, users};
use crate::types::DType;

/// The slot of a weight's copy.
pub fn copy_path(weight: &str) -> String {
    format!("bf16.{weight}")
}

/// Stores in bf16: frozen parameters, because no update needs more precision; inputs whose rows `reader` gathers, which are
/// used like computed states; and caches that only attention reads, which would read them in bf16 anyway.
pub fn narrow_slots(g: &mut Graph, reader: &Graph) {
    let (given, attended) = (gathered_inputs(reader), attended_caches(reader));
    let is_narrow = |s: &&mut Slot| match s.class {
        Class::Frozen => s.ty.rank() >= 2,
        Class::Input => given.contains(&s.path),
        Class::Cache => attended.contains(&s.path),
        _ => false,
    };
    g.slots.iter_mut().filter(is_narrow).for_each(|s| s.ty.dtype = DType::BF16);
}

/// Float inputs that are used only as tables of rows.
fn gathered_inputs(g: &Graph) -> HashSet<String> {
    let users = users(g);
    let ends = g.writes.iter().map(|(_, v)| v).chain(g.results.iter().map(|(_, v)| v));
    let ends: HashSet<&Value> = ends.collect();
    let is_table = |mut open: Vec<Value>| {
        while let Some(v) = open.pop() {
            if ends.contains(&v) || !users.contains_key(&v) {
                return false;
            }
            for user in users.get(&v).into_iter().flatten() {
                let node = g.node(*user);
                match node.op {
                    Op::Slice { .. } | Op::Reshape { .. } => open.push(user.out(0)),
                    Op::Gather {} if node.ins[0] == v => {}
                    _ => return false,
                }
            }
        }
        true
    };
    let inputs = g.ids().filter_map(|id| match g.node(id).op {
        Op::Read { slot } => Some((id, g.slot(slot))),
        _ => None,
    });
    let inputs = inputs.filter(|(_, slot)| slot.class == Class::Input && slot.ty.dtype == DType::F32);
    inputs.filter(|(id, _)| is_table(vec![id.out(0)])).map(|(_, slot)| slot.path.clone()).collect()
}

/// Caches of keys or values: rows are scattered into them, and only attention reads the result.
fn attended_caches(g: &Graph) -> HashSet<String> {
    let users = users(g);
    let users_of = |v: Value| users.get(&v).into_iter().flatten();
    let is_extended = |slot: SlotId, id: NodeId| {
        let mut extended = users_of(id.out(0));
        extended.all(|user| {
            let is_attended = |reader: &NodeId| {
                matches!(g.node(*reader).op, Op::Attention { .. }) && g.node(*reader).ins[0] != user.out(0)
            };
            let is_kept = g.writes.contains(&(slot, user.out(0)));
            matches!(g.node(*user).op, Op::RowScatter {})
                && g.node(*user).ins[0] == id.out(0)
                && is_kept
                && users_of(user.out(0)).all(is_attended)
        })
    };
    let reads = g.ids().filter_map(|id| match g.node(id).op {
        Op::Read { slot } if g.slot(slot).class == Class::Cache => Some((slot, id)),
        _ => None,
    });
    reads.filter(|(slot, id)| is_extended(*slot, *id)).map(|(slot, _)| g.slot(slot).path.clone()).collect()
}

/// Rewrites a graph to bf16. Also returns the new value of `forward`, the number of forward nodes, and the number of products
/// in bf16.
pub fn precision(g: &Graph, forward: usize) -> (Graph, usize, usize) {
    let wide = stays_wide(g);
    let biases = biases(g, &wide);
    let mut replay = Replay::new(g);
    narrow_slots(&mut replay.new, g);
    let (mut products, mut new_forward) = (0, 0);
    for id in g.ids() {
        if id.0 as usize == forward {
            new_forward = replay.new.nodes.len();
        }
        let node = g.node(id);
        if let Op::Read { slot } = node.op {
            let s = g.slot(slot);
            let is_copied = s.class == Class::Weight && s.ty.rank() >= 2;
            if is_copied || (s.class.is_parameter() && s.ty.rank() == 1 && biases.contains(&id)) {
                let slot = copy_slot(&mut replay.new, slot);
                replay.copy_as(id, Op::Read { slot }, vec![]);
                continue;
            }
        }
        let mut ins: Vec<Value> = node.ins.iter().map(|v| replay.get(*v)).collect();
        if scales_by_few(&replay.new, &node.op, &ins) {
            scale_by_few(&mut replay, id, &ins);
            continue;
        }
        cast_inputs(&mut replay, id, &mut ins);
        let mut op = node.op.clone();
        if let Op::Product { out, epilogue, .. } = &mut op {
            let narrow = replay.new.ty(ins[0]).dtype == DType::BF16;
            products += narrow as usize;
            if narrow && !wide.contains(&id) {
                *out = DType::BF16;
            }
            // A bias is added in the type of the result.
            if epilogue.has_bias() && replay.new.ty(ins[2]).dtype != *out {
                ins[2] = replay.add(Op::Map { f: E::Cast(*out) }, vec![ins[2]], id);
            }
        }
        replay.copy_as(id, op, ins);
    }
    if forward >= g.nodes.len() {
        new_forward = replay.new.nodes.len();
    }
    restore(&mut replay);
    (replay.finish(), new_forward, products)
}

/// Casts writes to the type of their slot, and results back to their original type.
fn restore(replay: &mut Replay<'_>) {
    let g = replay.old;
    let written = g.writes.iter().map(|(slot, v)| (*v, replay.new.slot(*slot).ty.dtype));
    let ends: Vec<(Value, DType)> =
        written.chain(g.results.iter().map(|(_, v)| (*v, g.ty(*v).dtype))).collect();
    for (v, wanted) in ends {
        let new = replay.get(v);
        if replay.new.ty(new).dtype != wanted {
            let back = replay.add(Op::Map { f: E::Cast(wanted) }, vec![new], v.node);
            replay.set(v, back);
        }
    }
}

/// The copy of a weight; where the weight is part of a larger slot, so is the copy.
fn copy_slot(g: &mut Graph, weight: SlotId) -> SlotId {
    let source = g.slot(weight).clone();
    let path = copy_path(&source.path);
    if let Some(slot) = g.find_slot(&path) {
        return slot;
    }
    let part = source.part.map(|p| SlotPart { of: copy_slot(g, p.of), offset: p.offset });
    g.add_slot(Slot { path, ty: source.ty.with(DType::BF16), class: Class::Derived, part, ..source })
}

/// Products whose result is only summed into slots or returned: weight gradients and logits.
fn stays_wide(g: &Graph) -> HashSet<NodeId> {
    let mut wide: HashSet<NodeId> = HashSet::new();
    let ends = g.writes.iter().map(|(_, v)| v.node).chain(g.results.iter().map(|(_, v)| v.node));
    let mut open: Vec<NodeId> = ends.collect();
    while let Some(id) = open.pop() {
        if !wide.insert(id) {
            continue;
        }
        let node = g.node(id);
        match node.op {
            Op::Map { f: E::Add }
            | Op::Reshape { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. } => {
                open.extend(node.ins.iter().map(|v| v.node));
            }
            // The gradient of a weight that a scale was folded into.
            Op::Map { f: E::Mul } if matches!(g.node(node.ins[1].node).op, Op::Broadcast { .. }) => {
                open.push(node.ins[0].node);
            }
            _ => {}
        }
    }
    wide
}

/// Reads of vectors that are used only as biases of products with a bf16 result.
fn biases(g: &Graph, wide: &HashSet<NodeId>) -> HashSet<NodeId> {
    let users = users(g);
    let is_bias = |id: &NodeId| {
        let adds = |user: &NodeId| {
            let node = g.node(*user);
            let has_bias = matches!(node.op, Op::Product { epilogue, .. } if epilogue.has_bias());
            has_bias && node.ins[2] == id.out(0) && !wide.contains(user)
        };
        let read = matches!(g.node(*id).op, Op::Read { .. });
        read && users.get(&id.out(0)).is_some_and(|u| !u.is_empty() && u.iter().all(adds))
    };
    g.ids().filter(is_bias).collect()
}

/// A vector of parameters broadcast over rows.
fn is_repeated_vector(g: &Graph, v: Value) -> bool {
    let node = g.node(v.node);
    match node.op {
        Op::Broadcast { .. } | Op::Reshape { .. } => is_repeated_vector(g, node.ins[0]),
        Op::Read { slot } => g.slot(slot).class.is_parameter() && g.slot(slot).ty.rank() == 1,
        _ => false,
    }
}

/// Whether an operation multiplies a bf16 tensor by few f32 values that are broadcast: a computed row, a dropout mask drawn per
/// image, or a factor for every row of a weight.
fn scales_by_few(g: &Graph, op: &Op, ins: &[Value]) -> bool {
    let is_few = |v: Value| {
        let node = g.node(v.node);
        let repeats = matches!(node.op, Op::Broadcast { .. });
        let is_row = |of: &[usize]| of[0] == 1 || (of[1..] == [1] && is_weight(g, ins[0]));
        let is_row = repeats && is_row(g.dims(node.ins[0])) && !is_repeated_vector(g, v);
        g.ty(v).dtype == DType::F32 && (is_row || (repeats && is_draw(g, node.ins[0])))
    };
    matches!(op, Op::Map { f: E::Mul }) && g.ty(ins[0]).dtype == DType::BF16 && is_few(ins[1])
}

fn is_weight(g: &Graph, v: Value) -> bool {
    let Op::Read { slot } = g.node(v.node).op else { return false };
    let class = g.slot(slot).class;
    class.is_parameter() || class == Class::Derived
}

/// A dropout mask: ones, some dropped and the others scaled.
fn is_draw(g: &Graph, v: Value) -> bool {
    let node = g.node(v.node);
    match node.op {
        Op::Reshape { .. } | Op::Broadcast { .. } => is_draw(g, node.ins[0]),
        Op::Dropout { .. } => is_constant(g, node.ins[0]),
        _ => false,
    }
}

fn is_constant(g: &Graph, v: Value) -> bool {
    let node = g.node(v.node);
    match node.op {
        Op::Reshape { .. } | Op::Broadcast { .. } => is_constant(g, node.ins[0]),
        Op::Fill { .. } => true,
        _ => false,
    }
}

/// Multiplies in f32, because the precision of the few values matters, and rounds once.
fn scale_by_few(replay: &mut Replay<'_>, id: NodeId, ins: &[Value]) {
    let wide = replay.add(Op::Map { f: E::Cast(DType::F32) }, vec![ins[0]], id);
    let scaled = replay.copy_as(id, Op::Map { f: E::Mul }, vec![wide, ins[1]]).out(0);
    let narrow = replay.add(Op::Map { f: E::Cast(DType::BF16) }, vec![scaled], id);
    replay.set(id.out(0), narrow);
}

/// Casts float inputs that must agree to one type.
fn cast_inputs(replay: &mut Replay<'_>, id: NodeId, ins: &mut [Value]) {
    let node = replay.old.node(id);
    let dtype = |replay: &Replay<'_>, v: Value| replay.new.ty(v).dtype;
    let narrow = |replay: &Replay<'_>, among: &[Value]| {
        if among.iter().any(|v| dtype(replay, *v) == DType::BF16) { DType::BF16 } else { DType::F32 }
    };
    // The inputs that must agree, and their type.
    let (agree, to): (Vec<usize>, DType) = match node.op {
        Op::Product { .. } => (vec![0, 1], narrow(replay, &ins[..2])),
        Op::Map { .. } => {
            let floats: Vec<usize> = (0..ins.len()).filter(|i| dtype(replay, ins[*i]).is_float()).collect();
            // A bias takes the type of the tensor it is added to: it is not a sum whose precision must be kept.
            let is_narrow = |i: usize| dtype(replay, ins[i]) == DType::BF16;
            let follows = |i: usize| is_narrow(i) || is_repeated_vector(&replay.new, ins[i]);
            let narrow = floats.iter().any(|i| is_narrow(*i)) && floats.iter().all(|i| follows(*i));
            (floats, if narrow { DType::BF16 } else { DType::F32 })
        }
        Op::RmsNorm { residual: true, .. } => (vec![0, 1], narrow(replay, &ins[..2])),
        Op::RmsNormGrad { weight, .. } => {
            let gradients = 1 + weight.is_some() as usize..ins.len();
            ([0].into_iter().chain(gradients).collect(), dtype(replay, ins[0]))
        }
        Op::QkNormRopeGrad { .. } => (vec![0, ins.len() - 1], dtype(replay, ins[0])),
        Op::Attention { .. } => (vec![0, 1, 2], narrow(replay, &ins[..3])),
        Op::AttentionGrad { mask, q, k, .. } => {
            let n = attention::inputs(mask, q, k);
            (vec![0, 1, 2, n, n + 2], narrow(replay, &ins[..3]))
        }
        Op::LinearAttention { .. } | Op::LinearAttentionGrad { .. } => {
            let (attend, is_grad) = LinearAttend::of(&node.op).expect("it is one of the two");
            let tensors = attend.tensors();
            // The output gradient, and the base.
            let d = if is_grad { attend.inputs()..ins.len() } else { 0..0 };
            ((0..tensors).chain(d).collect(), narrow(replay, &ins[..tensors]))
        }
        Op::HeadLoss { .. } | Op::HeadLossGrad { .. } | Op::HeadLossTrain { .. } => {
            (vec![0, 1], narrow(replay, &ins[..2]))
        }
        Op::RowScatter {} => (vec![0, 1], dtype(replay, ins[0])),
        Op::Sample {} => (vec![0], DType::F32),
        // Gradients that are added over ranks are sums whose precision must be kept.
        Op::Concat { .. } if is_summed(replay.old, id) => ((0..ins.len()).collect(), DType::F32),
        ref op if op.has_one_type() => ((0..ins.len()).collect(), narrow(replay, ins)),
        _ => return,
    };
    for i in agree {
        if dtype(replay, ins[i]) != to && dtype(replay, ins[i]).is_float() {
            ins[i] = cast(replay, ins[i], to, id);
        }
    }
}

/// Whether ranks add the concatenated values. The exchange is the next node.
fn is_summed(g: &Graph, concat: NodeId) -> bool {
    let sends = |node: &Node| node.op.ways().is_some() && node.ins[0] == concat.out(0);
    g.nodes.get(concat.0 as usize + 1).is_some_and(sends)
}

/// Casts a value where it is computed, not after operations that only lay it out: the elementwise pass that computes it then
/// stores the narrow type.
fn cast(replay: &mut Replay<'_>, v: Value, to: DType, at: NodeId) -> Value {
    let node = replay.new.node(v.node).clone();
    match node.op {
        Op::Reshape { .. } | Op::Concat { .. } if is_computed(&replay.new, v) => {
            let ins = node.ins.iter().map(|v| cast(replay, *v, to, at)).collect();
            replay.add(node.op, ins, at)
        }
        _ => replay.add(Op::Map { f: E::Cast(to) }, vec![v], at),
    }
}

/// Whether a value is elementwise, traced through reshapes and concatenations.
fn is_computed(g: &Graph, v: Value) -> bool {
    let node = g.node(v.node);
    match node.op {
        Op::Reshape { .. } | Op::Concat { .. } => is_computed(g, node.ins[0]),
        Op::Map { .. } => true,
        _ => false,
    }
}
