//! Low-rank adapters (LoRA, DoRA) beside frozen weights, as a rewrite of the model's products.
//!
//! y = x W^T becomes v = y + s (drop(x) A^T) B^T with A [R, in], B [out, R] and s = alpha / R. With DoRA it is g * v, where g =
//! m / ||W + s B A|| by rows: m [out] is trained, and the norm is a constant of the backward pass. The norm depends on
//! parameters alone, so it is read from a slot that `adapter_norms` writes once per update.
//!
//! Where there are many rows, g is folded into the weights, x (g W)^T + (drop(x) A^T) (s g B)^T: a pass over the weights, not
//! over the activations. m's gradient is then the sum of dz z / m over rows. The graph expresses this by a factor m / m with a
//! stop-gradient on the divisor: its value is 1 and its gradient is right, and `held_ratios` removes it once its gradient is in
//! the graph.
//!
//! The pass follows `merge`. Where one product serves q, k and v, their As also lie side by side and are one product, u =
//! drop(x) [Aq, Ak, Av]^T, and so are their Bs: y + u C^T, where C [out, 3 R] has each B in the rows of its weight and the
//! columns of its A. With many rows `joined_products` makes [x, u] [W, C]^T of it. Where adapters differ in rank or scale, or
//! only some of the weights have one, each B adds onto its columns of y, which is then read and written once more. The dropout
//! mask of an input is the same for all its readers, so the result does not depend on what was merged.
//!
//! The embedding table and the head of a decoder have adapters only where these are named explicitly (`ends`).

mod ends;

use std::collections::{BTreeSet, HashMap};

use crate::graph::{Class, Graph, Init, Node, NodeId, Slot, SlotId, SlotPart, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::product::{Compute, plain};
use crate::passes::forward::adapter::{Adapter, EMBED, HEAD, SCOPE, is_end, slot_beside};
use crate::passes::gradient::recompute::layer_of;
use crate::passes::input_path;
use crate::passes::options::Update;
use crate::plan::{Refusal, Role};
use crate::replay::{Replay, without_dead};
use crate::types::{DType, TensorType};

/// The suffix of the paths of all operations of adapters.
pub const NODES: &str = ".adapter";

/// Number of adapted weights, and of the products that compute the inputs of their Bs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adapted {
    pub weights: usize,
    pub products: usize,
}

/// The weights that can have an adapter, with their extents: matrices of layers that rows are multiplied by, the table of
/// tokens, and the head.
pub fn adaptable(g: &Graph) -> Vec<(&str, [usize; 2])> {
    let mut found: Vec<(&str, [usize; 2])> = vec![];
    for node in &g.nodes {
        let Some(Site { slot, weight, .. }) = Site::of(g, node) else { continue };
        let dims = &g.slot(slot).ty.dims;
        if !found.iter().any(|(known, _)| *known == weight) {
            found.push((weight, [dims[0], dims[1]]));
        }
    }
    found
}

/// A read of a weight that can have an adapter.
struct Site<'a> {
    slot: SlotId,
    /// The weight's name for adapters: a slot that serves as both table and head has two.
    weight: &'a str,
    kind: ReadKind,
}

enum ReadKind {
    /// Rows are multiplied by it.
    Product,
    /// Its rows are looked up.
    Lookup,
    /// Rows are multiplied by it and compared with targets.
    Loss,
}

impl<'a> Site<'a> {
    fn of(g: &'a Graph, node: &Node) -> Option<Site<'a>> {
        let (kind, read) = match node.op {
            Op::Product { ta: false, tb: true, base: false, .. } => (ReadKind::Product, node.ins[1]),
            Op::HeadLoss { .. } => (ReadKind::Loss, node.ins[1]),
            Op::Gather {} => (ReadKind::Lookup, node.ins[0]),
            _ => return None,
        };
        let Op::Read { slot } = g.node(read.node).op else { return None };
        let path = g.slot(slot).path.as_str();
        let weight = match kind {
            ReadKind::Lookup => (path == EMBED).then_some(EMBED)?,
            _ if is_end(path) => HEAD,
            ReadKind::Product => layer_of(path).map(|_| path)?,
            ReadKind::Loss => return None,
        };
        let is_matrix = g.slot(slot).ty.rank() == 2;
        let has_rows = matches!(kind, ReadKind::Lookup) || g.ty(node.ins[0]).rank() == 2;
        let fits = g.slot(slot).class.is_parameter() && is_matrix && has_rows;
        fits.then_some(Site { slot, weight, kind })
    }
}

#[derive(Clone, Copy)]
pub struct AdapterContext<'a> {
    pub update: &'a Update,
    pub role: Role,
    /// Whether DoRA's factors may be folded into the weights.
    pub folds: bool,
}

pub fn adapters(
    g: &Graph,
    adapters: &[Adapter],
    context: AdapterContext<'_>,
) -> Result<(Graph, Adapted), Refusal> {
    if let Some(dora) = adapters.iter().find(|adapter| adapter.dora && is_end(&adapter.weight)) {
        return Err(Refusal(format!("{} has no magnitudes: beside it an adapter is LoRA's", dora.weight)));
    }
    let replay = Replay::new(g);
    let mut pass = AdapterPass {
        replay,
        context,
        dropped: HashMap::new(),
        drawn: HashMap::new(),
        rows_inside: HashMap::new(),
        products: 0,
    };
    let mut served: BTreeSet<&str> = BTreeSet::new();
    for (id, node) in g.ids().zip(&g.nodes) {
        let site = Site::of(g, node);
        let parts = site.as_ref().map_or(vec![], |site| parts(g, site, adapters));
        served.extend(parts.iter().filter(|p| !p.adapters.is_empty()).map(|p| p.weight));
        match site.filter(|_| parts.iter().any(|p| !p.adapters.is_empty())).map(|site| site.kind) {
            Some(ReadKind::Product) => pass.product(id, &parts)?,
            Some(ReadKind::Lookup) => pass.lookup(id, &parts[0]),
            Some(ReadKind::Loss) => pass.loss(id, &parts[0])?,
            None => _ = pass.replay.copy(id),
        }
    }
    if let Some(lost) = adapters.iter().find(|a| !served.contains(a.weight.as_str())) {
        return Err(Refusal(format!("{} is no weight of a product: it cannot have an adapter", lost.weight)));
    }
    // A weight that is applied several times counts once.
    let adapted = Adapted { weights: served.len(), products: pass.products };
    Ok((without_dead(&pass.replay.finish()), adapted))
}

/// A weight inside the one that a product reads, and its adapters.
struct AdaptedWeight<'a> {
    weight: &'a str,
    rows: usize,
    adapters: Vec<&'a Adapter>,
}

/// The weights that a slot was merged from, in order, or the weight itself.
fn parts<'a>(g: &'a Graph, site: &Site<'a>, adapters: &'a [Adapter]) -> Vec<AdaptedWeight<'a>> {
    let mut inside: Vec<(usize, &Slot)> =
        g.slots.iter().filter_map(|s| Some((s.part.filter(|p| p.of == site.slot)?.offset, s))).collect();
    inside.sort_by_key(|(offset, _)| *offset);
    let of = |weight: &'a str, s: &'a Slot| AdaptedWeight {
        weight,
        rows: s.ty.dims[0],
        adapters: adapters.iter().filter(|a| a.weight == weight).collect(),
    };
    match inside.is_empty() {
        true => vec![of(site.weight, g.slot(site.slot))],
        false => inside.into_iter().map(|(_, s)| of(&s.path, s)).collect(),
    }
}

/// The factor by which DoRA multiplies the columns of a product.
#[derive(Clone, Copy)]
struct Factor {
    g: Value,
    /// The magnitudes, where they are one slot.
    m: Option<Value>,
}

/// Number of rows of an adapter's weight.
fn rows_beside(parts: &[AdaptedWeight<'_>], adapter: &Adapter) -> usize {
    parts.iter().find(|p| p.weight == adapter.weight).expect("adapters are of parts").rows
}

struct AdapterPass<'a> {
    replay: Replay<'a>,
    context: AdapterContext<'a>,
    /// Inputs after dropout, by the bits of its probability.
    dropped: HashMap<(Value, u32), Value>,
    /// Number of dropped inputs of a weight, by the bits of the probability: one per application.
    drawn: HashMap<(&'a str, u32), usize>,
    /// The row masks of each weight, by the weights' numbers of rows.
    rows_inside: HashMap<Vec<usize>, Vec<Value>>,
    /// Number of products that compute inputs of Bs.
    products: usize,
}

impl<'a> AdapterPass<'a> {
    /// Rewrites product `id` with the adapters of its weights.
    fn product(&mut self, id: NodeId, parts: &[AdaptedWeight<'a>]) -> Result<(), Refusal> {
        let x = self.replay.get(self.replay.old.node(id).ins[0]);
        let factor = self.factor(id, parts);
        let folded = match factor {
            Some(Factor { g, m: Some(_) }) if self.folds(id) => Some(match self.context.role.is_grad() {
                true => self.map(E::StopGradient, g, id),
                false => g,
            }),
            _ => None,
        };
        let y = match folded {
            Some(g) => {
                let node = self.replay.old.node(id).clone();
                let weight = self.replay.get(node.ins[1]);
                let weight = self.rows_times(weight, g, id);
                self.replay.copy_as(id, node.op, vec![x, weight]).out(0)
            }
            None => self.replay.copy(id).out(0),
        };
        let (mut z, mut apart) = (y, vec![]);
        for group in self.groups(parts) {
            let u = self.down_projection(id, x, &group)?;
            if self.is_even(&group, parts) {
                let c = self.blocks(id, &group, parts, folded);
                let thin = self.product_with_transposed(u, c, id);
                z = self.add(Op::Map { f: E::Add }, vec![z, thin], id);
            } else {
                apart.extend(self.thin_terms(id, u, &group, parts, folded));
            }
        }
        if !apart.is_empty() {
            z = self.add_to_columns(id, z, parts, &apart);
        }
        let columns = match factor {
            Some(Factor { m: Some(m), .. }) if folded.is_some() => self.context.role.is_grad().then(|| {
                let divisor = self.map(E::StopGradient, m, id);
                self.add(Op::Map { f: E::Div }, vec![m, divisor], id)
            }),
            other => other.map(|factor| factor.g),
        };
        if let Some(columns) = columns {
            let dims = self.replay.new.dims(z).to_vec();
            let row = self.add(Op::Reshape { dims: vec![1, dims[1]] }, vec![columns], id);
            let repeated = self.add(Op::Broadcast { dims }, vec![row], id);
            z = self.add(Op::Map { f: E::Mul }, vec![z, repeated], id);
        }
        self.replay.set(id.out(0), z);
        Ok(())
    }

    /// Whether the product's factors are folded into its weights. With fewer rows than the weight has columns, scaling the
    /// activations is cheaper.
    fn folds(&self, id: NodeId) -> bool {
        let old = self.replay.old;
        self.context.folds && old.node(id).outs[0].dims[0] >= old.dims(old.node(id).ins[0])[1]
    }

    /// A matrix whose rows are multiplied by a vector's elements.
    fn rows_times(&mut self, matrix: Value, by: Value, id: NodeId) -> Value {
        let dims = self.replay.new.dims(matrix).to_vec();
        let column = self.add(Op::Reshape { dims: vec![dims[0], 1] }, vec![by], id);
        let repeated = self.add(Op::Broadcast { dims }, vec![column], id);
        self.add(Op::Map { f: E::Mul }, vec![matrix, repeated], id)
    }

    fn map(&mut self, f: E, of: Value, id: NodeId) -> Value {
        self.add(Op::Map { f }, vec![of], id)
    }

    /// drop(x) A^T of a group, whose As are rows of one slot.
    fn down_projection(&mut self, id: NodeId, x: Value, group: &[&'a Adapter]) -> Result<Value, Refusal> {
        let seen = self.dropped(id, x, group[0])?;
        let whole = self.side_by_side(id, group, "a", |a| a.a());
        let a = self.add(Op::Read { slot: whole }, vec![], id);
        self.products += 1;
        Ok(self.product_with_transposed(seen, a, id))
    }

    /// Whether a group has one adapter for each weight of the product, all of one rank and scale, with Bs that have the same
    /// update rule.
    fn is_even(&self, group: &[&'a Adapter], parts: &[AdaptedWeight<'a>]) -> bool {
        let first = group[0];
        let rule = |a: &Adapter| self.context.update.rule(&a.b(), 2);
        let alike = |a: &&Adapter| a.rank == first.rank && a.scale == first.scale && rule(a) == rule(first);
        group.iter().map(|a| a.weight.as_str()).eq(parts.iter().map(|p| p.weight)) && group.iter().all(alike)
    }

    /// The right factor of u of an even group, [out, sum of ranks]: block-diagonal, every B in the rows of its weight and the
    /// columns of u that its A computes, times s and its rows of `folded`.
    fn blocks(
        &mut self,
        id: NodeId,
        group: &[&'a Adapter],
        parts: &[AdaptedWeight<'a>],
        folded: Option<Value>,
    ) -> Value {
        let slot = self.side_by_side(id, group, "b", |a| a.b());
        let b = self.add(Op::Read { slot }, vec![], id);
        let rows: Vec<usize> = parts.iter().map(|p| p.rows).collect();
        let scale = group[0].scale;
        let by = match folded {
            Some(g) => self.map(E::Scale(scale), g, id),
            None => {
                let dims = vec![rows.iter().sum()];
                self.add(Op::Fill { value: scale, dtype: DType::F32, dims }, vec![], id)
            }
        };
        let scaled = self.rows_times(b, by, id);
        if rows.len() == 1 {
            return scaled;
        }
        let blocks =
            self.rows_inside(&rows).into_iter().map(|own| self.rows_times(scaled, own, id)).collect();
        self.add(Op::Concat { axis: 1 }, blocks, id)
    }

    /// For each of several weights stacked by rows, a mask over all rows: 1 for its own, 0 elsewhere. Products of such weights
    /// share the masks.
    fn rows_inside(&mut self, rows: &[usize]) -> Vec<Value> {
        if let Some(known) = self.rows_inside.get(rows) {
            return known.clone();
        }
        let path = format!("rows{NODES}");
        let g = &mut self.replay.new;
        let map = |f: E, of: Vec<Value>, g: &mut Graph| g.add(Op::Map { f }, of, &path);
        let dims = vec![rows.iter().sum()];
        let row = g.add(Op::Iota { dtype: DType::F32, dims, axis: 0 }, vec![], &path);
        let (mut inside, mut end, mut behind_last) = (vec![], 0, None);
        for len in &rows[..rows.len() - 1] {
            end += len;
            let from_end = map(E::Offset(0.5 - end as f64), vec![row], g);
            let behind = map(E::Step, vec![from_end], g);
            inside.push(match behind_last {
                Some(last) => map(E::Sub, vec![last, behind], g),
                None => {
                    let before = map(E::Neg, vec![behind], g);
                    map(E::Offset(1.0), vec![before], g)
                }
            });
            behind_last = Some(behind);
        }
        inside.extend(behind_last);
        self.rows_inside.insert(rows.to_vec(), inside.clone());
        inside
    }

    /// s u B^T of every adapter of a group, its rows times `folded` where given.
    fn thin_terms(
        &mut self,
        id: NodeId,
        mut u: Value,
        group: &[&'a Adapter],
        parts: &[AdaptedWeight<'a>],
        folded: Option<Value>,
    ) -> Vec<(&'a Adapter, Value)> {
        let scale = group[0].scale;
        let is_one_scale = group.iter().all(|a| a.scale == scale);
        if is_one_scale && folded.is_none() {
            u = self.map(E::Scale(scale), u, id);
        }
        let factors = folded.map(|g| {
            let g = self.rows_of(g, group, parts, id);
            if is_one_scale { self.map(E::Scale(scale), g, id) } else { g }
        });
        let bs = self.b_factors(id, group, parts, factors);
        let (mut start, mut thins) = (0, vec![]);
        for (adapter, b) in group.iter().zip(bs) {
            let mut low = match group.len() {
                1 => u,
                _ => self.add(Op::Slice { axis: 1, start, len: adapter.rank }, vec![u], id),
            };
            start += adapter.rank;
            if !is_one_scale {
                low = self.map(E::Scale(adapter.scale), low, id);
            }
            thins.push((*adapter, self.product_with_transposed(low, b, id)));
        }
        thins
    }

    /// y with the output of each adapter added onto the columns of its weight.
    fn add_to_columns(
        &mut self,
        id: NodeId,
        y: Value,
        parts: &[AdaptedWeight<'a>],
        thins: &[(&'a Adapter, Value)],
    ) -> Value {
        let (mut sums, mut start) = (vec![], 0);
        for part in parts {
            let mut sum = match parts.len() {
                1 => y,
                _ => self.add(Op::Slice { axis: 1, start, len: part.rows }, vec![y], id),
            };
            start += part.rows;
            for (_, thin) in thins.iter().filter(|(of, _)| of.weight == part.weight) {
                sum = self.add(Op::Map { f: E::Add }, vec![sum, *thin], id);
            }
            sums.push(sum);
        }
        match sums[..] {
            [one] => one,
            _ => self.add(Op::Concat { axis: 1 }, sums, id),
        }
    }

    fn product_with_transposed(&mut self, a: Value, b: Value, id: NodeId) -> Value {
        self.add(plain(false, true, DType::F32, Compute::Full), vec![a, b], id)
    }

    /// Groups the adapters of a product that have the same dropout and whose As have the same update rule.
    fn groups(&self, parts: &[AdaptedWeight<'a>]) -> Vec<Vec<&'a Adapter>> {
        let mut groups: Vec<Vec<&'a Adapter>> = vec![];
        for adapter in parts.iter().flat_map(|p| &p.adapters) {
            let alike = |other: &&Adapter| {
                other.dropout == adapter.dropout
                    && self.context.update.rule(&other.a(), 2) == self.context.update.rule(&adapter.a(), 2)
            };
            match groups.iter_mut().find(|group| group.first().is_some_and(alike)) {
                Some(group) => group.push(adapter),
                None => groups.push(vec![adapter]),
            }
        }
        groups
    }

    /// B of every adapter of a group, its rows times those of `factors`. Where all are DoRA's of one rank they are rows of one
    /// slot, and scaled in one pass.
    fn b_factors(
        &mut self,
        id: NodeId,
        group: &[&'a Adapter],
        parts: &[AdaptedWeight<'a>],
        factors: Option<Value>,
    ) -> Vec<Value> {
        let rule = |a: &Adapter| self.context.update.rule(&a.b(), 2);
        let first = group[0];
        let is_one = group.iter().all(|a| a.dora && a.rank == first.rank && rule(a) == rule(first));
        let rows: Vec<usize> = group.iter().map(|a| rows_beside(parts, a)).collect();
        let whole = is_one.then(|| {
            let slot = self.side_by_side(id, group, "b", |a| a.b());
            let b = self.add(Op::Read { slot }, vec![], id);
            factors.map_or(b, |by| self.rows_times(b, by, id))
        });
        let mut start = 0;
        let mut bs = vec![];
        for (adapter, len) in group.iter().zip(rows) {
            bs.push(match (whole, factors) {
                (Some(b), _) if group.len() == 1 => b,
                (Some(b), _) => self.add(Op::Slice { axis: 0, start, len }, vec![b], id),
                (None, None) => self.read(adapter, adapter.b(), len, id),
                (None, Some(by)) => {
                    let b = self.read(adapter, adapter.b(), len, id);
                    let by = self.add(Op::Slice { axis: 0, start, len }, vec![by], id);
                    self.rows_times(b, by, id)
                }
            });
            start += len;
        }
        bs
    }

    /// The elements of a product's factors that belong to the weights of a group, in the group's order.
    fn rows_of(
        &mut self,
        factors: Value,
        group: &[&'a Adapter],
        parts: &[AdaptedWeight<'a>],
        id: NodeId,
    ) -> Value {
        let mut starts: Vec<(&str, usize, usize)> = vec![];
        let mut start = 0;
        for part in parts {
            starts.push((part.weight, start, part.rows));
            start += part.rows;
        }
        if group.iter().map(|a| a.weight.as_str()).eq(starts.iter().map(|(weight, ..)| *weight)) {
            return factors;
        }
        let mut cut = vec![];
        for adapter in group {
            let (_, start, len) =
                *starts.iter().find(|(weight, ..)| *weight == adapter.weight).expect("adapters are of parts");
            cut.push(self.add(Op::Slice { axis: 0, start, len }, vec![factors], id));
        }
        if cut.len() == 1 { cut[0] } else { self.add(Op::Concat { axis: 0 }, cut, id) }
    }

    /// The input of A: x after the adapter's dropout.
    fn dropped(&mut self, id: NodeId, x: Value, adapter: &'a Adapter) -> Result<Value, Refusal> {
        let p = adapter.dropout;
        if p == 0.0 || !self.context.role.is_grad() {
            return Ok(x);
        }
        if let Some(dropped) = self.dropped.get(&(x, p.to_bits())) {
            return Ok(*dropped);
        }
        let rng = self.input("rng", &[3], id)?;
        let which = self.draw_rows(id, x)?;
        let path = self.path(id);
        let drawn = self.drawn.entry((&adapter.weight, p.to_bits())).or_default();
        *drawn += 1;
        let key = match *drawn {
            1 => key(&format!("{} {p}", adapter.weight)),
            more => key(&format!("{} {p} {more}", adapter.weight)),
        };
        let node = self.replay.new.push_keyed(Op::Dropout { p }, vec![x, rng, which], &path, key);
        self.dropped.insert((x, p.to_bits()), node.out(0));
        Ok(node.out(0))
    }

    /// The coordinates by which dropout draws for rows of x; gathered rows have those of their source.
    fn draw_rows(&mut self, id: NodeId, x: Value) -> Result<Value, Refusal> {
        let Some(gather) = gathered_from(&self.replay.new, x) else {
            let rows = self.replay.new.dims(x)[0];
            return self.input("rows", &[rows, 2], id);
        };
        let Node { ins, .. } = self.replay.new.node(gather).clone();
        let all = self.draw_rows(id, ins[0])?;
        Ok(self.add(Op::Gather {}, vec![all, ins[1]], id))
    }

    /// An input that dropout draws by; the model's own where it exists.
    fn input(&mut self, name: &str, dims: &[usize], id: NodeId) -> Result<Value, Refusal> {
        let path = input_path(self.context.role, name);
        let ty = TensorType::new(DType::I32, dims);
        let slot = match self.replay.new.find_slot(&path) {
            Some(slot) if self.replay.new.slot(slot).ty == ty => slot,
            Some(slot) => {
                let (at, has) = (&self.replay.old.node(id).path, &self.replay.new.slot(slot).ty);
                return Err(Refusal(format!(
                    "{at}: dropout of an adapter wants {path} {ty}, and it is {has}"
                )));
            }
            None => {
                let slot = Slot { path, ty, class: Class::Input, init: Init::Zeros, part: None };
                self.replay.new.add_slot(slot)
            }
        };
        Ok(self.add(Op::Read { slot }, vec![], id))
    }

    /// g for every row of the product's weight, 1 for weights without DoRA; `None` where no weight has DoRA.
    fn factor(&mut self, id: NodeId, parts: &[AdaptedWeight<'a>]) -> Option<Factor> {
        let dora: Vec<Option<&'a Adapter>> =
            parts.iter().map(|p| p.adapters.iter().find(|a| a.dora).copied()).collect();
        let all: Vec<&'a Adapter> = dora.iter().flatten().copied().collect();
        let rule = |a: &Adapter| self.context.update.rule(&a.magnitude(), 1);
        if all.len() == parts.len() && all.iter().all(|a| rule(a) == rule(all[0])) {
            return Some(self.factor_of(id, &all));
        }
        let mut factors = vec![];
        for (part, adapter) in parts.iter().zip(&dora) {
            factors.push(match adapter {
                Some(adapter) => self.factor_of(id, &[*adapter]).g,
                None => {
                    let ones = Op::Fill { value: 1.0, dtype: DType::F32, dims: vec![part.rows] };
                    self.add(ones, vec![], id)
                }
            });
        }
        (!all.is_empty()).then(|| Factor { g: self.add(Op::Concat { axis: 0 }, factors, id), m: None })
    }

    /// m over the norm, for weights side by side.
    fn factor_of(&mut self, id: NodeId, of: &[&'a Adapter]) -> Factor {
        let m = self.side_by_side(id, of, "magnitude", |a| a.magnitude());
        let m = self.add(Op::Read { slot: m }, vec![], id);
        let inverse = self.side_by_side(id, of, "inverse_norm", |a| a.inverse_norm());
        let inverse = self.add(Op::Read { slot: inverse }, vec![], id);
        Factor { g: self.add(Op::Map { f: E::Mul }, vec![m, inverse], id), m: Some(m) }
    }

    fn read(&mut self, adapter: &Adapter, path: String, rows: usize, id: NodeId) -> Value {
        let inner = self.inner(id);
        let slot = self.slot(adapter, &path, [rows, inner]);
        self.add(Op::Read { slot }, vec![], id)
    }

    fn inner(&self, id: NodeId) -> usize {
        let old = self.replay.old;
        old.dims(old.node(id).ins[0])[1]
    }

    /// A slot that holds one tensor of several adapters, stacked along the first axis.
    fn side_by_side(
        &mut self,
        id: NodeId,
        of: &[&'a Adapter],
        what: &str,
        path: impl Fn(&Adapter) -> String,
    ) -> SlotId {
        let inner = self.inner(id);
        let rows =
            |g: &Graph, a: &Adapter| slot_beside(g, &a.weight).expect("adapters are of weights").ty.dims[0];
        let slots: Vec<SlotId> =
            of.iter().map(|a| self.slot(a, &path(a), [rows(self.replay.old, a), inner])).collect();
        let [first, _, ..] = slots[..] else { return slots[0] };
        if let Some(part) = self.replay.new.slot(first).part {
            return part.of;
        }
        let scope = of[0].weight.rfind('.').map_or("", |dot| &of[0].weight[..=dot]);
        let named = |a: &&Adapter| {
            let weight = a.weight.strip_prefix(scope).unwrap_or(&a.weight);
            if a.name == of[0].name { weight.to_string() } else { format!("{weight}@{}", a.name) }
        };
        let names: Vec<String> = of.iter().map(named).collect();
        let shape = self.replay.new.slot(first).clone();
        let mut dims = shape.ty.dims.clone();
        dims[0] = slots.iter().map(|s| self.replay.new.slot(*s).ty.dims[0]).sum();
        let whole = self.replay.new.add_slot(Slot {
            path: format!("{SCOPE}{}.{scope}{}.{what}", of[0].name, names.join("+")),
            ty: TensorType::new(shape.ty.dtype, dims),
            ..shape
        });
        let mut offset = 0;
        for slot in slots {
            let part = self.replay.new.slot_mut(slot);
            part.part = Some(SlotPart { of: whole, offset });
            offset += part.ty.elements();
        }
        whole
    }

    /// The slot at `path` for an adapter of a weight [out, in], created at its first use.
    fn slot(&mut self, adapter: &Adapter, path: &str, dims: [usize; 2]) -> SlotId {
        if let Some(slot) = self.replay.new.find_slot(path) {
            return slot;
        }
        let norm = Slot {
            path: adapter.inverse_norm(),
            ty: TensorType::new(DType::F32, [dims[0]]),
            class: Class::Derived,
            init: Init::Ones,
            part: None,
        };
        let all = adapter.parameters(dims).into_iter().chain([norm]);
        let slot = all.into_iter().find(|s| s.path == path).expect("a tensor of the adapter");
        self.replay.new.add_slot(slot)
    }

    fn add(&mut self, op: Op, ins: Vec<Value>, at: NodeId) -> Value {
        let path = self.path(at);
        self.replay.new.add(op, ins, &path)
    }

    /// The path under which adapters of a product, and their gradients, are reported.
    fn path(&self, at: NodeId) -> String {
        format!("{}{NODES}", self.replay.old.node(at).path)
    }
}

/// The operation that gathered the rows of x from another tensor of activations, traced back through operations that keep rows.
fn gathered_from(g: &Graph, x: Value) -> Option<NodeId> {
    let mut at = x;
    loop {
        let node = g.node(at.node);
        let from = *node.ins.first()?;
        match (&node.op, &g.node(from.node).op) {
            // An embedding gathers by token ids.
            (Op::Gather {}, Op::Read { .. }) => return None,
            (Op::Gather {}, _) => return Some(at.node),
            // An operation that changes the number of rows has other rows.
            _ if g.dims(from).first() != g.dims(at).first() => return None,
            _ => at = from,
        }
    }
}

/// The key of an adapter's dropout: a function of a path, so that it does not depend on how products were merged. It lies far
/// above the keys that are counted.
fn key(of: &str) -> u64 {
    let hash =
        of.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
    hash & ((1 << 48) - 1) | 1 << 48
}
