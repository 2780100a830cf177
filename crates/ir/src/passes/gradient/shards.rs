//! Shards: the ranks' shares of sharded regions, and the gathers that assemble whole regions where layers read them.
//!
//! A rank updates its share of weights, moments and averages. Layers read a derived slot with all elements, in bf16 or f32
//! according to the precision: `apply` gathers it from the shares after an update and `derive` after a load, with the same
//! bits. An evaluation of averages borrows that slot: `average` gathers their shares into it before the first batch, and
//! `derive` restores the weights after the last. So averages need no memory except their shares, and `eval` has no exchange:
//! each rank may run it for as many batches as it has.
//!
//! Where layers' weights are sharded too, `gathers` assembles them wherever a plan reads them: `apply` and `derive` write
//! copies of shares only, there is no slot with all elements, and no plan `average`.

use std::collections::{HashMap, HashSet};

use crate::builder::Tensor;
use crate::graph::{Class, Graph, Slot, SlotId};
use crate::mesh::Axis;
use crate::ops::Op;
use crate::ops::elementwise::Elementwise as E;
use crate::passes::gradient::buckets::Bucket;
use crate::passes::gradient::differentiate::flat;
use crate::passes::gradient::gathers::weight_in;
use crate::passes::gradient::layout::slot;
use crate::passes::options::Options;
use crate::passes::types::copies::update_with_copy;
use crate::passes::types::precision::copy_path;
use crate::pieces::Sharded;
use crate::plan::{Refusal, Role};
use crate::replay::without_slots;
use crate::types::DType;
use crate::verify::extent;

/// A flat slot of state that ranks divide.
#[derive(Clone, Debug)]
pub(crate) struct Divided {
    /// The slot that would hold all elements; the named tensors are parts of it.
    pub whole: String,
    /// The slot that holds a rank's share.
    pub shard: String,
    /// Positions in elements of these slots.
    pub buckets: Vec<Bucket>,
}

const SHARD: &str = ".shard";

/// The slot of a rank's share of a slot.
pub(super) fn shard_path(whole: &str) -> String {
    format!("{whole}{SHARD}")
}

/// The slot whose share the slot `shard` holds.
pub(super) fn whole_path(shard: &str) -> Option<&str> {
    shard.strip_suffix(SHARD)
}

/// The slot of bucket `number` of a slot; a single bucket is the slot itself.
pub(super) fn bucket_path(of: &str, number: usize, count: usize) -> String {
    if count == 1 { of.into() } else { format!("{of}.bucket.{number}") }
}

impl Divided {
    fn class(&self, g: &Graph) -> Class {
        g.slot(g.find_slot(&self.shard).expect("laid out before")).class
    }
}

/// Refuses options that sharded updates do not support.
pub fn check(o: &Options) -> Result<(), Refusal> {
    match o.shards_optimizer() && !o.fuse_optimizer {
        true => Err(Refusal(format!(
            "a rank updates its share of a whole region, which may end inside a parameter: \
             `shard={}` cannot run with `fuse.optimizer=off`",
            o.shard.name()
        ))),
        false => Ok(()),
    }
}

/// Gathers a flat tensor from the ranks of a shard group, side by side.
pub(super) fn all_gather<'g>(x: Tensor<'g>, o: &Options) -> Tensor<'g> {
    x.b.op(gather_op(o), &[x])
}

pub(super) fn gather_op(o: &Options) -> Op {
    Op::AllGather { axis: Axis::Shard, ways: o.mesh.ways(Axis::Shard) }
}

/// Adds the gathers to `apply` and `derive`, and the program `average` where evaluation reads averages.
pub(crate) fn gathers(graphs: &mut Vec<(Role, Graph)>, divided: &[Divided], o: &Options) {
    let Some((_, apply)) = graphs.iter().find(|(role, _)| *role == Role::Apply) else { return };
    let of_class = |class: Class| -> Vec<Divided> {
        divided.iter().filter(|divided| divided.class(apply) == class).cloned().collect()
    };
    let (weights, averages) = (of_class(Class::Weight), of_class(Class::Average));
    if weights.is_empty() {
        return;
    }
    // Layers that gather weights themselves do so from the shares, or from copies of these.
    if o.shards_parameters() && !o.precision.is_narrow() {
        return;
    }
    let has_eval = graphs.iter().any(|(role, _)| *role == Role::Eval);
    if !graphs.iter().any(|(role, _)| *role == Role::Derive) {
        graphs.push((Role::Derive, Graph::default()));
    }
    if has_eval && !averages.is_empty() && !o.shards_parameters() {
        graphs.push((Role::Average, Graph::default()));
    }
    for (role, g) in graphs {
        let sources = match role {
            Role::Apply | Role::Derive => &weights,
            Role::Average => &averages,
            _ => continue,
        };
        for (source, into) in sources.iter().zip(&weights) {
            for (number, bucket) in source.buckets.iter().enumerate() {
                let [shard, whole] =
                    [&source.shard, &into.whole].map(|of| bucket_path(of, number, source.buckets.len()));
                gather(g, *role, (&shard, bucket.share), &whole, o);
            }
        }
    }
}

/// Writes all elements of a bucket from the ranks' shares: in `apply` those just updated, otherwise those stored. Where layers
/// gather weights themselves, writes only the copy of the share.
fn gather(g: &mut Graph, role: Role, (shard, elements): (&str, usize), whole: &str, o: &Options) {
    let narrow = o.precision.is_narrow();
    let share = match role {
        Role::Apply => {
            let id = g.find_slot(shard).expect("laid out before");
            let updated = g.writes.iter().find(|(slot, _)| *slot == id).expect("it is updated").1;
            if narrow { update_with_copy(g, updated) } else { updated }
        }
        _ => {
            let class = if role == Role::Average { Class::Average } else { Class::Weight };
            let slot = g.add_slot(slot(shard, flat(elements), class));
            let read = g.add(Op::Read { slot }, vec![], shard);
            if narrow { g.add(Op::Map { f: E::Cast(DType::BF16) }, vec![read], shard) } else { read }
        }
    };
    let (all, read) = match o.shards_parameters() {
        true => (share, shard),
        false => (g.add(gather_op(o), vec![share], whole), whole),
    };
    let path = if narrow { copy_path(read) } else { read.into() };
    let ty = g.ty(all).clone();
    let into = g.find_slot(&path).unwrap_or_else(|| g.add_slot(slot(&path, ty, Class::Derived)));
    g.writes.push((into, all));
}

/// The slots inside slots that ranks divide, each with the slot that it lies in.
pub(crate) fn inside<'a>(apply: &Graph, divided: &'a [Divided]) -> HashMap<String, &'a Divided> {
    let by_root: HashMap<SlotId, &Divided> =
        divided.iter().map(|d| (apply.find_slot(&d.whole).expect("laid out before"), d)).collect();
    let lies_in = |id: SlotId| Some((apply.slot(id).path.clone(), *by_root.get(&extent(apply, id).0)?));
    apply.slot_ids().filter_map(lies_in).collect()
}

/// Removes whole slots of divided state from every graph, and returns the table of the tensors in them. In f32, layers read
/// whole weights by their names, so those slots stay as derived ones.
pub(crate) fn remove_wholes(graphs: &mut [(Role, Graph)], divided: &[Divided], o: &Options) -> Vec<Sharded> {
    let Some((_, apply)) = graphs.iter().find(|(role, _)| *role == Role::Apply && !divided.is_empty()) else {
        return vec![];
    };
    let known = inside(apply, divided);
    let mut sharded = table(apply, &known);
    let is_read = |class: Class| match class {
        Class::Weight => !o.precision.is_narrow() && !o.shards_parameters(),
        class => class == Class::Derived,
    };
    // Layers that gather weights themselves read no copy with all elements.
    let gathered = known.iter().filter(|(_, of)| o.shards_parameters() && of.class(apply).is_parameter());
    let gathered: HashSet<String> = gathered.map(|(path, _)| path.clone()).collect();
    let is_copy = |slot: &Slot| {
        slot.class == Class::Derived && weight_in(&slot.path).any(|(weight, _)| gathered.contains(weight))
    };
    let is_gone = |slot: &Slot| (known.contains_key(&slot.path) && !is_read(slot.class)) || is_copy(slot);
    let (mut seen, mut before, mut kept) = (HashSet::new(), HashMap::new(), 0);
    for slot in graphs.iter().flat_map(|(_, g)| &g.slots).filter(|slot| seen.insert(&slot.path)) {
        before.insert(slot.path.clone(), kept);
        kept += !is_gone(slot) as usize;
    }
    sharded.iter_mut().for_each(|tensor| tensor.before = before[&tensor.path]);
    sharded.sort_by_key(|tensor| tensor.before);
    for (_, g) in graphs {
        without_slots(g, is_gone);
        g.slots
            .iter_mut()
            .filter(|slot| known.contains_key(&slot.path))
            .for_each(|s| s.class = Class::Derived);
    }
    sharded
}

fn table(apply: &Graph, known: &HashMap<String, &Divided>) -> Vec<Sharded> {
    let wholes: HashSet<SlotId> = apply.slots.iter().filter_map(|slot| Some(slot.part?.of)).collect();
    // Scales are saved with their moments and lie beside them; sums of gradients do not outlive an update.
    let is_kept = |class: Class| !matches!(class, Class::Scale | Class::Carry);
    let is_named = |id: &SlotId| !wholes.contains(id) && is_kept(apply.slot(*id).class);
    let leaves = apply.slot_ids().filter(is_named);
    let sharded = leaves.filter_map(|id| {
        let divided = known.get(&apply.slot(id).path)?;
        let Slot { path, ty, class, init, .. } = apply.slot(id).clone();
        let start = extent(apply, id).1.start;
        let bucket = divided.buckets.iter().rev().find(|bucket| bucket.place <= start).expect("the first");
        let (slot, start, at, share) = (divided.shard.clone(), start - bucket.place, bucket.at, bucket.share);
        Some(Sharded { path, ty, class, init, slot, start, at, share, before: 0 })
    });
    sharded.collect()
}
