//! Lowers a graph to launches over storages: selects kernels, and decides which values are views of others, which are written
//! in place, and which are computed directly in a slot or inside the concatenation that reads them.

use std::collections::HashMap;

use crate::graph::{Graph, NodeId, SlotId, Value};
use crate::ops::product::Compute;
use crate::ops::{Op, OpKind};
use crate::passes::place::slots::Slots;
use crate::passes::place::views;
use crate::plan::{Category, Launch, Queue, Refusal, View};
use crate::replay::users;
use crate::target::{KernelRow, Layout, Shapes, Target};
use crate::types::{DType, TensorType, contiguous_strides};
use crate::verify::extent;

/// A range of memory that holds values. The offsets of transient storages are assigned by `memory`.
pub struct Storage {
    pub name: String,
    pub category: Category,
    pub bytes: usize,
    /// The arena offset of a slot.
    pub fixed: Option<usize>,
    /// The last node that may read it.
    last_use: usize,
}

/// A tensor in a storage; `view.offset` counts from the storage's start.
#[derive(Clone, Debug)]
pub struct StorageView {
    pub storage: usize,
    pub view: View,
}

/// A launch whose views do not have arena offsets yet.
pub struct Draft {
    pub launch: Launch,
    pub ins: Vec<StorageView>,
    pub outs: Vec<Option<StorageView>>,
    pub workspace: Option<StorageView>,
}

pub struct Lowered {
    pub storages: Vec<Storage>,
    pub drafts: Vec<Draft>,
    pub results: Vec<(String, StorageView)>,
    /// Number of values that share memory with an input of their node.
    pub in_place: usize,
    /// Number of movements that needed a copy.
    pub copies: usize,
}

/// Location of a value where its readers determine it.
#[derive(Clone)]
enum Home {
    Slot(SlotId),
    /// Inside the output of a concat, with this view.
    Inside(NodeId, View),
    /// In memory of its own, with the axes in the order in which they are read.
    Permuted(View),
}

const FOREVER: usize = usize::MAX;

pub fn lower(g: &Graph, slots: &Slots, target: &Target, reuse: bool) -> Result<Lowered, Refusal> {
    let mut l = Lowering {
        g,
        slots,
        target,
        reuse,
        last: last_uses(g),
        used: g.uses(),
        homes: HashMap::new(),
        places: HashMap::new(),
        of_slot: HashMap::new(),
        constants: HashMap::new(),
        joined: HashMap::new(),
        out: Lowered { storages: vec![], drafts: vec![], results: vec![], in_place: 0, copies: 0 },
    };
    l.find_slot_homes();
    l.find_concat_homes()?;
    l.find_permuted_homes()?;
    for id in g.ids() {
        l.node(id)?;
    }
    for (slot, v) in &g.writes {
        if !matches!(l.homes.get(v), Some(Home::Slot(home)) if home == slot) {
            let to = l.slot_place(*slot);
            let from = l.places[v].clone();
            l.copy(from, to, v.node);
        }
    }
    for (name, v) in &g.results {
        let place = l.places[v].clone();
        l.out.storages[place.storage].last_use = FOREVER;
        l.out.results.push((name.clone(), place));
    }
    Ok(l.out)
}

/// The last node that reads each value, directly or through views.
fn last_uses(g: &Graph) -> HashMap<Value, usize> {
    let mut last: HashMap<Value, usize> = HashMap::new();
    for v in g.results.iter().map(|(_, v)| v).chain(g.writes.iter().map(|(_, v)| v)) {
        last.insert(*v, FOREVER);
    }
    for id in g.ids().rev() {
        let node = g.node(id);
        let mut at = id.0 as usize;
        if views::is_movement(&node.op) {
            at = at.max(last.get(&id.out(0)).copied().unwrap_or(0));
        }
        for v in &node.ins {
            let known = last.entry(*v).or_insert(at);
            *known = (*known).max(at);
        }
    }
    last
}

struct Lowering<'a> {
    g: &'a Graph,
    slots: &'a Slots,
    target: &'a Target,
    reuse: bool,
    last: HashMap<Value, usize>,
    used: Vec<Vec<u32>>,
    homes: HashMap<Value, Home>,
    places: HashMap<Value, StorageView>,
    of_slot: HashMap<SlotId, usize>,
    /// One-element storages of constants, by bits and type.
    constants: HashMap<(u64, DType), usize>,
    /// The storage of each concat that already exists.
    joined: HashMap<NodeId, StorageView>,
    out: Lowered,
}

impl Lowering<'_> {
    fn row(&self, id: NodeId) -> Result<KernelRow, Refusal> {
        let node = self.g.node(id);
        let ins = node.ins.iter().map(|v| self.g.ty(*v));
        let float = ins.chain(&node.outs).find(|t| t.dtype.is_float()).map_or(DType::I32, |t| t.dtype);
        let narrow = node.ins.iter().map(|v| self.g.ty(*v)).chain(&node.outs).find(|t| t.dtype.is_fp8());
        let has = |t: &&TensorType| node.op.kind().decodes() || self.target.dtypes.contains(&t.dtype);
        if let Some(ty) = narrow.filter(|t| !has(t)) {
            return Err(Refusal(format!("{}: {} does not compute in {ty}", node.path, self.target.name)));
        }
        if node.op.compute() == Some(Compute::Tf32) && self.target.rates.tf32_flops.is_none() {
            return Err(Refusal(format!("{}: {} does not multiply in tf32", node.path, self.target.name)));
        }
        self.row_for(node.op.kind(), float, &node.path)
    }

    fn row_for(&self, kind: OpKind, dtype: DType, path: &str) -> Result<KernelRow, Refusal> {
        self.target.kernel(kind, dtype).copied().ok_or_else(|| {
            Refusal(format!(
                "{path}: {} has no kernel for {} in {}",
                self.target.name,
                kind.name(),
                dtype.name()
            ))
        })
    }

    fn is_compute(&self, id: NodeId) -> bool {
        let op = &self.g.node(id).op;
        !matches!(op, Op::Read { .. } | Op::Fill { .. }) && !views::is_movement(op)
    }

    fn used_once(&self, v: Value) -> bool {
        self.used[v.node.0 as usize][v.out as usize] == 1
    }

    /// Finds written values that can be computed directly in their slot, with the chain of in-place sums that leads to them.
    fn find_slot_homes(&mut self) {
        for (slot, v) in &self.g.writes {
            if self.homes.contains_key(v) || !self.is_compute(v.node) {
                continue;
            }
            let mut chain = vec![*v];
            let from_slot = loop {
                let at = chain[chain.len() - 1];
                let node = self.g.node(at.node);
                let bases = || {
                    let pairs = node.op.in_place().into_iter().filter(|(_, out)| *out == at.out as usize);
                    pairs.filter_map(|(i, _)| Some((i, *node.ins.get(i)?)))
                };
                let is_slot = |(_, base): &(usize, Value)| matches!(self.g.node(base.node).op, Op::Read { slot: s } if s == *slot);
                if let Some((i, _)) = bases().find(is_slot) {
                    break Some(i);
                }
                let Some((_, base)) = bases().next() else { break None };
                let goes_on =
                    self.is_compute(base.node) && self.used_once(base) && self.g.ty(base) == self.g.ty(at);
                if !goes_on {
                    break None;
                }
                chain.push(base);
            };
            // A longer chain only helps if it starts from the slot itself, or if no value of the slot is read at all; otherwise only
            // the last node may write there.
            if from_slot.is_none() && self.reads_of(*slot).next().is_some() {
                chain.truncate(1);
            }
            if self.may_overwrite(*slot, chain[chain.len() - 1].node, from_slot) {
                chain.into_iter().for_each(|v| _ = self.homes.insert(v, Home::Slot(*slot)));
            }
        }
    }

    /// The reads of a slot, of its parts and of what it is part of.
    fn reads_of(&self, slot: SlotId) -> impl Iterator<Item = (NodeId, SlotId)> {
        let (root, range) = extent(self.g, slot);
        self.g.ids().filter_map(move |id| {
            let Op::Read { slot: other } = self.g.node(id).op else { return None };
            let (other_root, other_range) = extent(self.g, other);
            let meets = other_root == root && other_range.start < range.end && range.start < other_range.end;
            meets.then_some((id, other))
        })
    }

    /// Whether nothing reads the slot's old value after `writer`, nor in `writer` except through the input `in_place`.
    fn may_overwrite(&self, slot: SlotId, writer: NodeId, in_place: Option<usize>) -> bool {
        self.reads_of(slot).all(|(id, other)| {
            let last = self.last.get(&id.out(0)).copied().unwrap_or(0);
            let reads = &self.g.node(writer).ins;
            let here = |(i, v): (usize, &Value)| {
                let source = self.source(*v);
                source != id.out(0) || (in_place == Some(i) && *v == id.out(0) && other == slot)
            };
            last < writer.0 as usize || (last == writer.0 as usize && reads.iter().enumerate().all(here))
        })
    }

    /// The value that a chain of movements starts from.
    fn source(&self, mut v: Value) -> Value {
        while views::is_movement(&self.g.node(v.node).op) && self.g.node(v.node).ins.len() == 1 {
            v = self.g.node(v.node).ins[0];
        }
        v
    }

    /// Places the inputs of a concat, traced through reshapes, inside its output where their other readers support that layout.
    /// The output then lives as long as any of its parts, so an input that is read longer than those of half its size or more
    /// has its own memory and is copied.
    fn find_concat_homes(&mut self) -> Result<(), Refusal> {
        let users = users(self.g);
        for id in self.g.ids().filter(|id| matches!(self.g.node(*id).op, Op::Concat { .. })) {
            let whole = self.g.node(id).outs[0].elements();
            let parts = self.parts_inside(id, &users)?;
            let last = |v: Value| self.last.get(&v).copied().unwrap_or(0);
            let is_half = |v: Value| 2 * self.g.ty(v).elements() >= whole;
            let halves = parts.iter().filter(|(v, _)| is_half(*v)).map(|(v, _)| last(*v));
            let until = halves.fold(last(id.out(0)), usize::max);
            let mut short: Vec<_> = parts.into_iter().filter(|(v, _)| last(*v) <= until).collect();
            let is_sent = |reader: &NodeId| self.g.node(*reader).op.ways().is_some();
            if users.get(&id.out(0)).is_some_and(|readers| readers.iter().all(is_sent)) {
                let below = short.iter().map(|(v, view)| self.terms_below(*v, view));
                let below = below.collect::<Result<Vec<_>, Refusal>>()?;
                short.extend(below.into_iter().flatten());
            }
            self.homes.extend(short.into_iter().map(|(v, view)| (v, Home::Inside(id, view))));
        }
        Ok(())
    }

    /// The terms that are added up in place to a value and can lie where it does: a gradient of two terms, of a tied head and
    /// the embedding, then needs only the memory that it is sent from.
    fn terms_below(&self, mut v: Value, view: &View) -> Result<Vec<(Value, View)>, Refusal> {
        let mut terms = vec![];
        loop {
            let node = self.g.node(v.node);
            let pairs = node.op.in_place().into_iter().filter(|(_, out)| *out == v.out as usize);
            let Some(term) = pairs.filter_map(|(i, _)| node.ins.get(i)).next().copied() else {
                return Ok(terms);
            };
            let is_own =
                self.is_compute(term.node) && self.used_once(term) && !self.homes.contains_key(&term);
            if !is_own || self.g.ty(term) != self.g.ty(v) || !fits(self.row(term.node)?.outs, view) {
                return Ok(terms);
            }
            terms.push((term, view.clone()));
            v = term;
        }
    }

    /// The sources of a concat's inputs that can be computed inside its output, and their views of it.
    fn parts_inside(
        &self,
        concat: NodeId,
        users: &HashMap<Value, Vec<NodeId>>,
    ) -> Result<Vec<(Value, View)>, Refusal> {
        let node = self.g.node(concat);
        let Op::Concat { axis } = node.op else { unreachable!("asked for a concat") };
        let whole = View::dense(0, &node.outs[0]);
        let (mut start, mut parts) = (0, vec![]);
        for part in &node.ins {
            let len = self.g.dims(*part)[axis];
            let mut view = Some(views::slice(&whole, axis, start, len));
            start += len;
            let mut v = *part;
            while let Op::Reshape { .. } = self.g.node(v.node).op {
                v = self.g.node(v.node).ins[0];
                view = view.and_then(|view| views::reshape(&view, self.g.dims(v)));
            }
            let Some(view) = view else { continue };
            let is_free = self.is_compute(v.node) && !self.homes.contains_key(&v);
            let is_first = parts.iter().all(|(known, _)| *known != v);
            if is_free && is_first && fits(self.row(v.node)?.outs, &view) && self.reads(v, &view, users)? {
                parts.push((v, view));
            }
        }
        Ok(parts)
    }

    /// Whether all readers of a value, also those after movements, can read it in this layout.
    fn reads(&self, v: Value, view: &View, users: &HashMap<Value, Vec<NodeId>>) -> Result<bool, Refusal> {
        let readers = users.get(&v).map_or(&[][..], Vec::as_slice);
        if self.used[v.node.0 as usize][v.out as usize] as usize > readers.len() {
            return Ok(false);
        }
        for reader in readers {
            let op = &self.g.node(*reader).op;
            let reads = match views::moved(view, op) {
                Some(moved) => self.reads(reader.out(0), &moved, users)?,
                None if self.is_compute(*reader) => fits(self.row(*reader)?.ins, view),
                None => matches!(op, Op::Concat { .. } | Op::Pad { .. }),
            };
            if !reads {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes a value with its axes already permuted if all its readers transpose it alike and a reshape after that would
    /// otherwise need a copy.
    fn find_permuted_homes(&mut self) -> Result<(), Refusal> {
        let g = self.g;
        let users = users(g);
        let reads = |v: Value| users.get(&v).map_or(&[][..], Vec::as_slice);
        for id in g.ids() {
            if !self.is_compute(id) {
                continue;
            }
            for (out, ty) in g.node(id).outs.iter().enumerate() {
                let v = id.out(out as u8);
                let ends = self.used[id.0 as usize][out] as usize > reads(v).len();
                let Some(Op::Transpose { perm }) = reads(v).first().map(|id| &g.node(*id).op) else {
                    continue;
                };
                let has_same_perm = |id: &NodeId| g.node(*id).op == Op::Transpose { perm: perm.clone() };
                if ends || self.homes.contains_key(&v) || !reads(v).iter().all(has_same_perm) {
                    continue;
                }
                let dims: Vec<usize> = perm.iter().map(|&p| ty.dims[p]).collect();
                let mut view = View::dense(0, ty);
                for (&p, stride) in perm.iter().zip(contiguous_strides(&dims)) {
                    view.strides[p] = stride;
                }
                let unpermuted = views::moved(&View::dense(0, ty), &Op::Transpose { perm: perm.clone() });
                let would_copy = |id: &NodeId| match (&g.node(*id).op, &unpermuted) {
                    (Op::Reshape { dims }, Some(view)) => views::reshape(view, dims).is_none(),
                    _ => false,
                };
                let mut readers = reads(v).iter().flat_map(|id| reads(id.out(0)));
                if readers.any(would_copy) && fits(self.row(id)?.outs, &view) {
                    self.homes.insert(v, Home::Permuted(view));
                }
            }
        }
        Ok(())
    }

    fn storage(&mut self, name: &str, category: Category, bytes: usize, last_use: usize) -> usize {
        self.out.storages.push(Storage { name: name.into(), category, bytes, fixed: None, last_use });
        self.out.storages.len() - 1
    }

    fn slot_place(&mut self, slot: SlotId) -> StorageView {
        let s = self.g.slot(slot);
        let storage = *self.of_slot.entry(slot).or_insert_with(|| {
            let fixed = Some(self.slots.offset(&s.path));
            let category = crate::passes::place::slots::category(s.class);
            self.out.storages.push(Storage {
                name: s.path.clone(),
                category,
                bytes: s.ty.bytes(),
                fixed,
                last_use: FOREVER,
            });
            self.out.storages.len() - 1
        });
        StorageView { storage, view: View::dense(0, &s.ty) }
    }

    /// A new storage for a value.
    fn fresh(&mut self, v: Value, ty: &TensorType) -> StorageView {
        let path = self.g.node(v.node).path.clone();
        let last = self.last.get(&v).copied().unwrap_or(0);
        StorageView {
            storage: self.storage(&path, Category::Activations, ty.bytes(), last),
            view: View::dense(0, ty),
        }
    }

    fn node(&mut self, id: NodeId) -> Result<(), Refusal> {
        let node = self.g.node(id);
        match &node.op {
            Op::Read { slot } => {
                let place = self.slot_place(*slot);
                self.places.insert(id.out(0), place);
                Ok(())
            }
            Op::Fill { value, dtype, dims } => {
                let storage = self.constant(*value, *dtype, id)?;
                let view =
                    View { offset: 0, dtype: *dtype, dims: dims.clone(), strides: vec![0; dims.len()] };
                self.places.insert(id.out(0), StorageView { storage, view });
                Ok(())
            }
            op if views::is_movement(op) => self.movement(id),
            _ => self.compute(id),
        }
    }

    fn constant(&mut self, value: f64, dtype: DType, id: NodeId) -> Result<usize, Refusal> {
        if let Some(storage) = self.constants.get(&(value.to_bits(), dtype)) {
            return Ok(*storage);
        }
        let storage =
            self.storage(&format!("constant {value}"), Category::Activations, dtype.bytes(), FOREVER);
        self.constants.insert((value.to_bits(), dtype), storage);
        let ty = TensorType::new(dtype, [1]);
        let row = self.row_for(OpKind::Fill, dtype, &self.g.node(id).path)?;
        let to = StorageView { storage, view: View::dense(0, &ty) };
        let op = Op::Fill { value, dtype, dims: vec![1] };
        self.push(row.name, op, id, vec![], vec![Some(to)], None, 0);
        Ok(storage)
    }

    fn movement(&mut self, id: NodeId) -> Result<(), Refusal> {
        let node = self.g.node(id);
        let out = id.out(0);
        let ty = &node.outs[0];
        if let Op::Concat { axis } = node.op {
            let whole = self.joined(id);
            let mut start = 0;
            for part in &node.ins {
                let len = self.g.dims(*part)[axis];
                let inside =
                    StorageView { storage: whole.storage, view: views::slice(&whole.view, axis, start, len) };
                start += len;
                let from = self.places[part].clone();
                if (from.storage, from.view.offset) != (inside.storage, inside.view.offset) {
                    self.copy(from, inside, id);
                }
            }
            self.places.insert(out, whole);
            return Ok(());
        }
        let from = self.places[&node.ins[0]].clone();
        if let Op::Pad { axis, before, .. } = node.op {
            let to = self.fresh(out, ty);
            let zero = self.constant(0.0, ty.dtype, id)?;
            let zeros = View { strides: vec![0; ty.rank()], ..to.view.clone() };
            self.copy(StorageView { storage: zero, view: zeros }, to.clone(), id);
            let inside = views::slice(&to.view, axis, before, from.view.dims[axis]);
            self.copy(from, StorageView { storage: to.storage, view: inside }, id);
            self.places.insert(out, to);
            return Ok(());
        }
        if let Some(view) = views::moved(&from.view, &node.op) {
            let last = self.last.get(&out).copied().unwrap_or(0);
            let storage = &mut self.out.storages[from.storage];
            storage.last_use = storage.last_use.max(last);
            self.places.insert(out, StorageView { storage: from.storage, view });
            return Ok(());
        }
        let to = self.fresh(out, ty);
        self.copy(from, to.clone(), id);
        self.places.insert(out, to);
        Ok(())
    }

    /// The storage of a concat's output, allocated when the first part needs it.
    fn joined(&mut self, concat: NodeId) -> StorageView {
        if let Some(place) = self.joined.get(&concat) {
            return place.clone();
        }
        let ty = self.g.node(concat).outs[0].clone();
        let place = self.fresh(concat.out(0), &ty);
        self.joined.insert(concat, place.clone());
        place
    }

    /// Lets a concat's output reuse the memory that the node computing all its parts reads: the gradients of a merged product's
    /// slices lie where the slices did. Each part must lie exactly over an input that its kernel may overwrite.
    fn join_in_place(&mut self, id: NodeId, concat: NodeId, ins: &[StorageView]) {
        if !self.reuse || self.joined.contains_key(&concat) {
            return;
        }
        let pairs = self.g.node(id).op.in_place();
        let whole = &self.g.node(concat).outs[0];
        let (mut over, mut storage) = (vec![], None);
        let homes = self.homes.iter().filter_map(|(v, home)| match home {
            Home::Inside(c, view) if *c == concat => Some((v, view)),
            _ => None,
        });
        for (v, view) in homes {
            let under = |(i, _): &&(usize, usize)| ins.get(*i).is_some_and(|place| place.view == *view);
            let is_own = v.node == id;
            let Some((i, _)) = pairs.iter().filter(|(_, o)| is_own && *o == v.out as usize).find(under)
            else {
                return;
            };
            over.push(*i);
            if *storage.get_or_insert(ins[*i].storage) != ins[*i].storage {
                return;
            }
        }
        let Some(at) = storage.filter(|_| over.len() == self.g.node(concat).ins.len()) else { return };
        let others = ins.iter().enumerate().filter(|(i, _)| !over.contains(i));
        let taken = &self.out.storages[at];
        let is_last = taken.fixed.is_none() && taken.last_use <= id.0 as usize;
        if is_last && taken.bytes == whole.bytes() && others.into_iter().all(|(_, place)| place.storage != at)
        {
            let place = StorageView { storage: at, view: View::dense(0, whole) };
            let last = self.last.get(&concat.out(0)).copied().unwrap_or(0);
            self.out.storages[at].last_use = self.out.storages[at].last_use.max(last);
            self.out.in_place += over.len();
            self.joined.insert(concat, place);
        }
    }

    fn compute(&mut self, id: NodeId) -> Result<(), Refusal> {
        let node = self.g.node(id);
        let row = self.row(id)?;
        let mut ins = vec![];
        for v in &node.ins {
            let place = self.places[v].clone();
            ins.push(if fits(row.ins, &place.view) { place } else { self.dense_copy(place, id) });
        }
        let mut outs = vec![];
        let mut taken: Vec<usize> = vec![];
        for (out, ty) in node.outs.iter().enumerate() {
            let v = id.out(out as u8);
            if self.used[id.0 as usize][out] == 0 {
                outs.push(None);
                continue;
            }
            let place = match self.homes.get(&v).cloned() {
                Some(Home::Slot(slot)) => self.slot_place(slot),
                Some(Home::Inside(concat, view)) => {
                    self.join_in_place(id, concat, &ins);
                    let whole = self.joined(concat);
                    let last = self.last.get(&v).copied().unwrap_or(0);
                    let storage = &mut self.out.storages[whole.storage];
                    storage.last_use = storage.last_use.max(last);
                    StorageView {
                        storage: whole.storage,
                        view: View { offset: whole.view.offset + view.offset, ..view },
                    }
                }
                Some(Home::Permuted(view)) => StorageView { view, ..self.fresh(v, ty) },
                None => match self.in_place(id, out, ty, &ins, &taken) {
                    Some(place) => {
                        taken.push(place.storage);
                        self.out.in_place += 1;
                        let last = self.last.get(&v).copied().unwrap_or(0);
                        let storage = &mut self.out.storages[place.storage];
                        storage.last_use = storage.last_use.max(last);
                        place
                    }
                    None => self.fresh(v, ty),
                },
            };
            self.places.insert(v, place.clone());
            outs.push(Some(place));
        }
        let bytes = (row.workspace)(&Shapes::of(self.g, node, self.target.cores));
        let workspace = (bytes > 0).then(|| {
            let is_wire = node.op.kind().is_collective();
            let category = if is_wire { Category::Wire } else { Category::Workspace };
            let storage = self.storage(&format!("{} scratch", node.path), category, bytes, id.0 as usize);
            StorageView { storage, view: View::dense(0, &TensorType::new(DType::F32, [bytes.div_ceil(4)])) }
        });
        if let Some(place) = &workspace {
            self.out.storages[place.storage].bytes = bytes.next_multiple_of(4);
        }
        let flops = node.op.flops(node, self.g);
        self.push(row.name, node.op.clone(), id, ins, outs, workspace, flops);
        Ok(())
    }

    /// An input whose memory the output can reuse, because nothing reads it afterwards.
    fn in_place(
        &self,
        id: NodeId,
        out: usize,
        ty: &TensorType,
        ins: &[StorageView],
        taken: &[usize],
    ) -> Option<StorageView> {
        if !self.reuse {
            return None;
        }
        let pairs = self.g.node(id).op.in_place();
        pairs.into_iter().filter(|(_, o)| *o == out).find_map(|(i, _)| {
            let place = ins.get(i)?;
            let storage = &self.out.storages[place.storage];
            let is_last = match storage.fixed {
                None => storage.last_use <= id.0 as usize,
                Some(_) => self.is_cleared_sum(id, i),
            };
            let is_whole =
                place.view.is_dense() && storage.bytes == ty.bytes() && place.view.dtype == ty.dtype;
            let is_only = ins.iter().enumerate().all(|(j, other)| j == i || other.storage != place.storage);
            let is_free = is_last && is_whole && is_only && !taken.contains(&place.storage);
            is_free.then(|| StorageView { storage: place.storage, view: View::dense(0, ty) })
        })
    }

    /// Whether an input of a collective is a slot that the graph clears at the end and that nothing else reads, or the total of
    /// such a slot over another axis. The total then lies where the rank's own sum did, and gradients need no memory but their
    /// slots.
    fn is_cleared_sum(&self, id: NodeId, input: usize) -> bool {
        let node = self.g.node(id);
        let from = node.ins[input];
        let clears = |slot: SlotId| {
            let is_fill = |v: &Value| matches!(self.g.node(v.node).op, Op::Fill { .. });
            self.g.writes.iter().any(|(to, v)| *to == slot && is_fill(v))
        };
        node.op.kind().is_collective()
            && match self.g.node(from.node).op {
                Op::Read { slot } => clears(slot) && self.may_overwrite(slot, id, Some(input)),
                ref op => op.kind().is_collective() && self.used_once(from),
            }
    }

    fn dense_copy(&mut self, from: StorageView, id: NodeId) -> StorageView {
        let ty = TensorType::new(from.view.dtype, from.view.dims.clone());
        let path = self.g.node(id).path.clone();
        let storage = self.storage(&path, Category::Activations, ty.bytes(), id.0 as usize);
        let to = StorageView { storage, view: View::dense(0, &ty) };
        self.copy(from, to.clone(), id);
        to
    }

    fn copy(&mut self, from: StorageView, to: StorageView, id: NodeId) {
        let row =
            self.row_for(OpKind::Reshape, to.view.dtype, "copy").expect("every target copies its types");
        let op = Op::Reshape { dims: to.view.dims.clone() };
        self.out.copies += 1;
        self.push(row.name, op, id, vec![from], vec![Some(to)], None, 0);
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of a launch")]
    fn push(
        &mut self,
        kernel: &'static str,
        op: Op,
        id: NodeId,
        ins: Vec<StorageView>,
        outs: Vec<Option<StorageView>>,
        workspace: Option<StorageView>,
        flops: u64,
    ) {
        let node = self.g.node(id);
        let (path, key) = (node.path.clone(), node.key);
        let queue = Queue::of(&op);
        let launch = Launch {
            kernel,
            op,
            ins: vec![],
            outs: vec![],
            workspace: None,
            path,
            key,
            flops,
            queue,
            joins: None,
        };
        self.out.drafts.push(Draft { launch, ins, outs, workspace });
    }
}

fn fits(layout: Layout, view: &View) -> bool {
    match layout {
        Layout::Dense => view.is_dense(),
        Layout::Rows => view.has_dense_rows(),
        Layout::Any => true,
    }
}
