//! Shards of frozen weights. Frozen weights have no region, because nothing updates them; where layers' weights are gathered as
//! they are read, they are laid out in units and divided like trained ones, so a rank holds only its share of a large base
//! beside small adapters.

use crate::graph::{Class, Graph, Slot, SlotId, SlotPart};
use crate::mesh::Axis;
use crate::passes::gradient::buckets::buckets;
use crate::passes::gradient::layout::{CHUNK, LEAST_BYTES, shares_of, slot};
use crate::passes::gradient::recompute::layer_of;
use crate::passes::gradient::shards::{Divided, shard_path};
use crate::passes::options::Options;
use crate::types::{DType, TensorType};

/// A weight starts at a multiple of this many elements, so that it is aligned like a slot.
const ALIGN: usize = 128;

/// Lays out the frozen matrices of each type in one slot and divides it. `g` is the graph whose slots all plans share.
pub(crate) fn divide(g: &mut Graph, o: &Options) -> Vec<Divided> {
    let mut divided = vec![];
    for dtype in [DType::BF16, DType::F32] {
        let is_own = |slot: &Slot| {
            slot.class == Class::Frozen
                && slot.part.is_none()
                && slot.ty.rank() >= 2
                && slot.ty.dtype == dtype
        };
        let weights: Vec<SlotId> = g.slot_ids().filter(|id| is_own(g.slot(*id))).collect();
        let bytes: usize = weights.iter().map(|id| g.slot(*id).ty.bytes()).sum();
        if bytes >= LEAST_BYTES {
            divided.push(lay_out(g, &weights, dtype, o));
        }
    }
    divided
}

fn lay_out(g: &mut Graph, weights: &[SlotId], dtype: DType, o: &Options) -> Divided {
    let (mut starts, mut members, mut end) = (vec![], vec![], 0_usize);
    for unit in units(g, weights) {
        end = end.next_multiple_of(CHUNK);
        starts.push(end);
        for weight in unit {
            members.push((weight, end));
            end += g.slot(weight).ty.elements().next_multiple_of(ALIGN);
        }
    }
    let buckets = buckets(&starts, end.next_multiple_of(CHUNK), usize::MAX, o);
    let ways = o.mesh.ways(Axis::Shard);
    let last = buckets.last().expect("there are weights");
    let ty = TensorType::new(dtype, [last.place + last.share * ways]);
    let path = format!("frozen.{}", dtype.name());
    let whole = g.add_slot(slot(&path, ty, Class::Frozen));
    for (weight, start) in members {
        let bucket = buckets.iter().rev().find(|b| b.layout.start <= start).expect("the first begins at 0");
        let offset = bucket.place + start - bucket.layout.start;
        g.slot_mut(weight).part = Some(SlotPart { of: whole, offset });
    }
    shares_of(g, whole, &shard_path(&path), &buckets, ways).1
}

/// The weights of each layer together, and every other weight by itself.
fn units(g: &Graph, weights: &[SlotId]) -> Vec<Vec<SlotId>> {
    let mut units: Vec<(&str, Vec<SlotId>)> = vec![];
    for &weight in weights {
        let path = &g.slot(weight).path;
        let unit = layer_of(path).unwrap_or(path);
        match units.iter_mut().find(|(known, _)| *known == unit) {
            Some((_, members)) => members.push(weight),
            None => units.push((unit, vec![weight])),
        }
    }
    units.into_iter().map(|(_, members)| members).collect()
}
