//! Gathers: where ranks shard the weights that layers read, a layer's weights are gathered right before it reads them.
//!
//! A unit is a layer, or a weight outside layers. A visit is a sequence of launches that read one unit with no other unit read
//! in between: the forward pass visits each unit, and the backward pass visits them again from the last to the first. Each
//! visit gathers its unit, and views of the gathered buffer replace its weights. Nothing holds the buffer between visits,
//! whatever `recompute` keeps, unless `keep_gathered` merges the visits of a unit into one.
//!
//! The gathers of a visit are placed where the previous visit begins, and so overlap it: at any time a plan holds the unit that
//! it reads and the next one, but no third. Without overlap they are placed where their own visit begins, and the plan holds
//! one unit.
//!
//! 8-bit codes are quantised from the gathered buffer, by the operation that quantises them at other levels of sharding, with
//! the same bits. Evaluation gathers averages, where they are kept, in place of weights.
//!
//! The pass runs after those that fuse and recompute, which see reads of slots as on one rank.

use std::collections::HashMap;

use crate::graph::{Class, Graph, NodeId, SlotId, Value};
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::quantize::Source;
use crate::passes::gradient::layout::slot;
use crate::passes::gradient::recompute::layer_of;
use crate::passes::gradient::shards::{Divided, bucket_path, gather_op};
use crate::passes::options::Options;
use crate::passes::types::fp8::weight_path;
use crate::passes::types::precision::copy_path;
use crate::plan::Role;
use crate::replay::{Replay, without_dead};
use crate::types::{DType, TensorType};
use crate::verify::extent;

/// Gathers weights in every graph that reads sharded ones. Returns the number of gathers in each graph.
pub(crate) fn gathers(
    graphs: &mut Vec<(Role, Graph)>,
    divided: &[Divided],
    o: &Options,
) -> Vec<(Role, usize)> {
    let Some((_, apply)) = graphs.iter().find(|(role, _)| *role == Role::Apply && !divided.is_empty()) else {
        return vec![];
    };
    let shares = Shares::new(apply, divided);
    let mut counts = vec![];
    for (role, g) in graphs.iter_mut() {
        let is_made_behind_gather =
            |slot: SlotId| matches!(shares.found(&g.slot(slot).path), Some((_, WeightEncoding::Codes(_))));
        if g.writes.iter().any(|(slot, _)| is_made_behind_gather(*slot)) {
            let kept = g.writes.iter().filter(|(slot, _)| !is_made_behind_gather(*slot)).copied().collect();
            *g = without_dead(&Graph { writes: kept, ..g.clone() });
        }
        let (gathered, count) = with_gathers(g, &shares, *role, o);
        if count > 0 {
            *g = gathered;
            counts.push((*role, count));
        }
    }
    graphs.retain(|(role, g)| *role != Role::Derive || !g.writes.is_empty());
    counts
}

/// Whether a gather brings the weights of a unit, which lie in slots before the plan begins; `prefetch` must not move it.
pub(crate) fn is_of_unit(g: &Graph, id: NodeId) -> bool {
    let is_slot = |v: Value| matches!(g.node(v.node).op, Op::Read { .. });
    let node = g.node(id);
    matches!(node.op, Op::AllGather { .. }) && {
        let sent = node.ins[0];
        let cast = g.node(sent.node);
        is_slot(sent) || matches!(cast.op, Op::Map { f: E::Cast(_) }) && is_slot(cast.ins[0])
    }
}

/// The weights that a slot may hold, with their encodings.
pub(super) fn weight_in(path: &str) -> impl Iterator<Item = (&str, WeightEncoding)> {
    let codes = ["rows", "columns", "scale"].into_iter().enumerate();
    let codes = codes.filter_map(move |(out, what)| {
        let weight = path.strip_prefix(&weight_path(what, ""))?;
        Some((weight, WeightEncoding::Codes(out as u8)))
    });
    let copy = path.strip_prefix(&copy_path("")).map(|weight| (weight, WeightEncoding::Copy));
    [(path, WeightEncoding::Full)].into_iter().chain(copy).chain(codes)
}

/// The encoding of a weight in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum WeightEncoding {
    /// In the type of the parameter.
    Full,
    /// In bf16.
    Copy,
    /// An output of the operation that quantises it: its codes along rows or columns, or their scale.
    Codes(u8),
}

/// Location of a weight in the sharded slots.
struct Weight {
    divided: usize,
    bucket: usize,
    /// Index of its first element in the bucket.
    start: usize,
}

/// The sharded weights.
struct Shares<'a> {
    divided: &'a [Divided],
    /// Type and class of each sharded slot.
    kept_as: Vec<(DType, Class)>,
    /// Locations of weights, by path.
    weights: HashMap<String, Weight>,
    /// The unit of each bucket, by the indices of the sharded slot and of the bucket.
    units: HashMap<(usize, usize), String>,
    /// The sharded slot of averages for each sharded slot of weights.
    averages: HashMap<usize, usize>,
}

impl Shares<'_> {
    fn new<'a>(apply: &Graph, divided: &'a [Divided]) -> Shares<'a> {
        let find = |path: &str| apply.find_slot(path).expect("laid out before");
        let kept_as = |of: &Divided| {
            let shard = apply.slot(find(&of.shard));
            (shard.ty.dtype, shard.class)
        };
        let kept_as: Vec<(DType, Class)> = divided.iter().map(kept_as).collect();
        let numbers = |class: Class| {
            let of_class = kept_as.iter().enumerate().filter(move |(_, (_, known))| *known == class);
            of_class.map(|(number, _)| number)
        };
        let averages = numbers(Class::Weight).zip(numbers(Class::Average)).collect();
        let roots: HashMap<SlotId, usize> =
            divided.iter().enumerate().map(|(number, of)| (find(&of.whole), number)).collect();
        let (mut weights, mut firsts) = (HashMap::new(), HashMap::<(usize, usize), (usize, &str)>::new());
        for id in apply.slot_ids().filter(|id| apply.slot(*id).class.is_parameter()) {
            let (root, range) = extent(apply, id);
            let Some(&number) = roots.get(&root) else { continue };
            let buckets = &divided[number].buckets;
            let bucket = buckets.iter().rposition(|bucket| bucket.place <= range.start).expect("the first");
            let slot = apply.slot(id);
            let start = range.start - buckets[bucket].place;
            weights.insert(slot.path.clone(), Weight { divided: number, bucket, start });
            if slot.ty.rank() >= 2 {
                let first = firsts.entry((number, bucket)).or_insert((start, &slot.path));
                *first = (*first).min((start, &slot.path));
            }
        }
        let unit = |path: &str| layer_of(path).unwrap_or(path).to_string();
        let units = firsts.into_iter().map(|(bucket, (_, path))| (bucket, unit(path))).collect();
        Shares { divided, kept_as, weights, units, averages }
    }

    fn found(&self, path: &str) -> Option<(&Weight, WeightEncoding)> {
        weight_in(path).find_map(|(weight, form)| Some((self.weights.get(weight)?, form)))
    }

    fn unit(&self, weight: &Weight) -> &str {
        &self.units[&(weight.divided, weight.bucket)]
    }

    /// The bucket to gather for a weight that is read in an encoding.
    fn bucket_copy(&self, weight: &Weight, form: WeightEncoding) -> BucketCopy {
        let is_trained = self.kept_as[weight.divided].1 == Class::Weight;
        let (divided, bucket) = (weight.divided, weight.bucket);
        BucketCopy { divided, bucket, is_copy: is_trained && form != WeightEncoding::Full }
    }
}

/// A bucket to gather, and whether it is gathered in bf16 although it is stored in f32.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct BucketCopy {
    divided: usize,
    bucket: usize,
    is_copy: bool,
}

/// A sequence of launches that read one unit.
struct Visit {
    first: NodeId,
    copies: Vec<BucketCopy>,
}

/// The visits of a graph, and the visit in which each node reads each unit.
fn visits<'a>(reads: &Reads<'a>, keeps: bool) -> (Vec<Visit>, HashMap<(NodeId, &'a str), usize>) {
    let (mut visits, mut visited): (Vec<Visit>, HashMap<_, usize>) = (vec![], HashMap::new());
    let mut last: HashMap<&str, (NodeId, usize)> = HashMap::new();
    for id in reads.g.ids().filter(|id| reads.weight(id.out(0)).is_none()) {
        for (weight, form) in reads.g.node(id).ins.iter().filter_map(|v| reads.weight(*v)) {
            let unit = reads.shares.unit(weight);
            let is_left = |known: NodeId| {
                let mut others = last.iter().filter(|(other, _)| **other != unit);
                !keeps && others.any(|(_, (read, _))| *read > known && *read < id)
            };
            let visit = match last.get(unit) {
                Some((known, visit)) if !is_left(*known) => *visit,
                _ => {
                    visits.push(Visit { first: id, copies: vec![] });
                    visits.len() - 1
                }
            };
            last.insert(unit, (id, visit));
            visited.insert((id, unit), visit);
            let (copy, known) = (reads.shares.bucket_copy(weight, form), &mut visits[visit].copies);
            if !known.contains(&copy) {
                known.push(copy);
            }
        }
    }
    (visits, visited)
}

/// A graph, and the sharded weights that it reads.
struct Reads<'a> {
    g: &'a Graph,
    shares: &'a Shares<'a>,
}

impl<'a> Reads<'a> {
    /// The weight that a value is a view of.
    fn weight(&self, mut v: Value) -> Option<(&'a Weight, WeightEncoding)> {
        loop {
            let node = self.g.node(v.node);
            match node.op {
                Op::Read { slot } => return self.shares.found(&self.g.slot(slot).path),
                Op::Reshape { .. } | Op::Transpose { .. } | Op::Slice { .. } | Op::Broadcast { .. } => {
                    v = node.ins[0];
                }
                _ => return None,
            }
        }
    }

    /// The extents of a weight that is read in 8 bits.
    fn matrix(&self, name: &str) -> Vec<usize> {
        let ty = |what: &str| Some(&self.g.slot(self.g.find_slot(&weight_path(what, name))?).ty);
        match (ty("rows"), ty("columns")) {
            (Some(rows), _) => rows.dims.clone(),
            (None, Some(columns)) => vec![columns.dims[1], columns.dims[0]],
            (None, None) => unreachable!("a scale belongs to codes"),
        }
    }
}

/// The graph with its gathers, and their number.
fn with_gathers(g: &Graph, shares: &Shares<'_>, role: Role, o: &Options) -> (Graph, usize) {
    let reads = Reads { g, shares };
    let (visits, visited) = visits(&reads, o.keep_gathered);
    let mut gathering = Gathering {
        reads: &reads,
        role,
        gather: gather_op(o),
        replay: Replay::new(g),
        gathered: HashMap::new(),
        views: HashMap::new(),
        codes: HashMap::new(),
    };
    let mut due = 0;
    for id in g.ids() {
        // At the start of the previous visit; for the first visit, at the start of the plan.
        let begins = |due: usize| match due.checked_sub(o.overlap as usize) {
            Some(visit) => visits[visit].first <= id,
            None => true,
        };
        while due < visits.len() && begins(due) {
            visits[due].copies.iter().for_each(|copy| gathering.gather(due, *copy));
            due += 1;
        }
        if reads.weight(id.out(0)).is_some() {
            continue;
        }
        let node = g.node(id);
        let value = |v: &Value| match reads.weight(*v) {
            Some((weight, _)) => gathering.view(visited[&(id, shares.unit(weight))], *v),
            None => gathering.replay.get(*v),
        };
        let ins = node.ins.iter().map(value).collect();
        gathering.replay.copy_as(id, node.op.clone(), ins);
    }
    (gathering.replay.finish(), gathering.gathered.len())
}

/// A graph while its gathers are added.
struct Gathering<'a> {
    reads: &'a Reads<'a>,
    role: Role,
    gather: Op,
    replay: Replay<'a>,
    /// Gathered buckets. Here and below keys begin with the index of the visit.
    gathered: HashMap<(usize, BucketCopy), Value>,
    views: HashMap<(usize, Value), Value>,
    /// The nodes that quantise weights, by visit and weight.
    codes: HashMap<(usize, &'a str), NodeId>,
}

impl Gathering<'_> {
    /// Gathers the elements of a bucket from all ranks.
    fn gather(&mut self, visit: usize, copy: BucketCopy) {
        let BucketCopy { divided: number, bucket, is_copy } = copy;
        let shares = self.reads.shares;
        let average = shares.averages.get(&number).filter(|_| self.role == Role::Eval);
        let source = *average.unwrap_or(&number);
        let Divided { shard, buckets, .. } = &shares.divided[source];
        let shard = bucket_path(shard, bucket, buckets.len());
        let (kept, class) = shares.kept_as[source];
        // Averages have no bf16 copy, because few plans read them.
        let (path, dtype, class) = match is_copy && average.is_none() {
            true => (copy_path(&shard), DType::BF16, Class::Derived),
            false => (shard, kept, class),
        };
        let unit = &shares.units[&(number, bucket)];
        let ty = TensorType::new(dtype, [buckets[bucket].share]);
        let g = &mut self.replay.new;
        let from = g.find_slot(&path).unwrap_or_else(|| g.add_slot(slot(&path, ty, class)));
        let mut share = g.add(Op::Read { slot: from }, vec![], unit);
        if is_copy && dtype != DType::BF16 {
            share = g.add(Op::Map { f: E::Cast(DType::BF16) }, vec![share], unit);
        }
        let all = g.add(self.gather.clone(), vec![share], unit);
        self.gathered.insert((visit, copy), all);
    }

    /// The value that replaces a view of a weight in a visit.
    fn view(&mut self, visit: usize, v: Value) -> Value {
        if let Some(known) = self.views.get(&(visit, v)) {
            return *known;
        }
        let node = self.reads.g.node(v.node);
        let view = match node.op {
            Op::Read { slot } => self.weight(visit, v, slot),
            _ => {
                let from = self.view(visit, node.ins[0]);
                self.replay.new.push_keyed(node.op.clone(), vec![from], &node.path, node.key).out(0)
            }
        };
        self.views.insert((visit, v), view);
        view
    }

    /// A weight from its gathered bucket, or its 8-bit codes or scale, which one operation computes for all three.
    fn weight(&mut self, visit: usize, v: Value, slot: SlotId) -> Value {
        let (weight, form) = self.reads.weight(v).expect("a weight that ranks divide");
        let all = self.gathered[&(visit, self.reads.shares.bucket_copy(weight, form))];
        let (g, path) = (&mut self.replay.new, &self.reads.g.node(v.node).path);
        let mut cut = |dims: Vec<usize>| {
            let (start, len) = (weight.start, dims.iter().product());
            let own = g.add(Op::Slice { axis: 0, start, len }, vec![all], path);
            g.add(Op::Reshape { dims }, vec![own], path)
        };
        let WeightEncoding::Codes(out) = form else { return cut(self.reads.g.dims(v).to_vec()) };
        let found = weight_in(&self.reads.g.slot(slot).path).find(|(_, known)| *known == form);
        let (name, _) = found.expect("a weight has codes");
        let node = match self.codes.get(&(visit, name)) {
            Some(node) => *node,
            None => {
                let narrow = cut(self.reads.matrix(name));
                let op = Op::Quantize { to: DType::E4M3, current: true, of: Source::Given };
                let node = self.replay.new.push(op, vec![narrow], path);
                self.codes.insert((visit, name), node);
                node
            }
        };
        node.out(out)
    }
}
