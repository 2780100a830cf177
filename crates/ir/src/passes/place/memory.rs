//! The memory planner: assigns offsets to storages by their lifetimes.
//!
//! Storages that live at the same time do not overlap. The largest is placed first, each at the lowest offset that is free for
//! its whole life. A storage that an exchange touches lives until a compute launch joins the exchange.

use std::ops::Range;

use crate::passes::place::lower::{Lowered, Storage, StorageView};
use crate::passes::place::queues::held_until;
use crate::plan::{Buffer, Category, Launch, Plan, Queue, Role, View};

/// A plan with offsets in the transient region, and the number of bytes it needs there.
pub struct Placed {
    pub plan: Plan,
    pub bytes: usize,
    pub buffers: Vec<Buffer>,
    /// Where the slots in the region begin, from the region's start.
    pub slots_start: usize,
}

/// The region of transient tensors, which the plans of a run share.
pub struct Transients {
    /// The offset at which it begins.
    pub base: usize,
    /// The bytes in it that belong to slots. The plan of gradients chooses their start.
    pub slots: Range<usize>,
    pub slots_live: SlotsLive,
    /// Whether tensors may share memory.
    pub reuse: bool,
}

/// When slots in the transient region hold values that a plan must preserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotsLive {
    Never,
    /// Each part of a slot from the launch that first touches it to the end; this plan chooses the place.
    FromFirstWrite,
    Throughout,
}

/// Gives every transient storage an offset in the region and turns drafts into launches.
pub fn place(lowered: Lowered, role: Role, region: &Transients, align: usize) -> Placed {
    let Transients { base, reuse, .. } = *region;
    let Lowered { storages, drafts, results, .. } = lowered;
    let mut life: Vec<Option<Lifetime>> = vec![None; storages.len()];
    for (at, draft) in drafts.iter().enumerate() {
        let places = draft.ins.iter().chain(draft.outs.iter().flatten()).chain(&draft.workspace);
        let is_exchange = draft.launch.queue == Queue::Wire;
        let until = if is_exchange { held_until(&drafts, at) } else { at + 1 };
        for place in places {
            let life = life[place.storage].get_or_insert_with(|| Lifetime::beginning(at));
            life.touched.end = at + 1;
            life.held_until = life.held_until.max(until);
            life.computed_from = life.computed_from.min(if is_exchange { usize::MAX } else { at });
        }
    }
    for (_, place) in &results {
        if let Some(life) = &mut life[place.storage] {
            (life.touched.end, life.held_until) = (drafts.len(), drafts.len());
        }
    }

    let mut order: Vec<usize> =
        (0..storages.len()).filter(|i| storages[*i].fixed.is_none() && life[*i].is_some()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(storages[*i].bytes), *i));
    let mut offsets: Vec<usize> = storages.iter().map(|s| s.fixed.unwrap_or(0)).collect();
    let buffer = |name: &str, category: Category, of: &Occupied| Buffer {
        name: name.into(),
        category,
        offset: base + of.start,
        bytes: of.end - of.start,
        live: Some((0, of.live.held())),
    };
    let (mut bytes, mut buffers, mut occupied) = (0, vec![], Vec::<Occupied>::new());
    let mut slots_start = region.slots.start;
    let mut slots = Some(region.occupied_by_slots(&storages, &life, drafts.len())).filter(|s| !s.is_empty());
    let sizes = order.iter().map(|i| (Some(*i), storages[*i].bytes.next_multiple_of(align)));
    for (storage, size) in sizes.chain([(None, 0)]) {
        // Slots are placed as one, in the order of sizes like any other, or at their given place before all others.
        let is_turn = region.slots_live == SlotsLive::Throughout || region.slots.len() >= size;
        if let Some(slots) = slots.take_if(|_| is_turn) {
            if region.slots_live == SlotsLive::FromFirstWrite {
                slots_start = lowest_of_parts(&occupied, &slots, align);
            }
            bytes = bytes.max(slots_start + region.slots.len());
            for (name, part) in slots {
                let of = part.moved(slots_start);
                buffers.push(buffer(&name, Category::Gradients, &of));
                insert(&mut occupied, of);
            }
        }
        let Some(i) = storage else { break };
        let live = life[i].clone().expect("filtered");
        let start = if reuse { lowest(&occupied, &live, size, align) } else { bytes };
        offsets[i] = base + start;
        bytes = bytes.max(start + size);
        let of = Occupied { start, end: start + size, live };
        buffers.push(buffer(&storages[i].name, storages[i].category, &of));
        insert(&mut occupied, of);
    }
    let is_in_region = |storage: &Storage| storage.fixed.is_some_and(|fixed| fixed >= base);
    for (offset, _) in offsets.iter_mut().zip(&storages).filter(|(_, storage)| is_in_region(storage)) {
        *offset += slots_start - region.slots.start;
    }

    let view = |p: StorageView| View { offset: offsets[p.storage] + p.view.offset, ..p.view };
    let launches = drafts
        .into_iter()
        .map(|d| Launch {
            ins: d.ins.into_iter().map(view).collect(),
            outs: d.outs.into_iter().map(|o| o.map(view)).collect(),
            workspace: d.workspace.map(view),
            ..d.launch
        })
        .collect();
    let results = results.into_iter().map(|(name, p)| (name, view(p))).collect();
    Placed { plan: Plan { role, launches, results }, bytes, buffers, slots_start }
}

impl Transients {
    /// The places that slots occupy, from where they begin, each with a name.
    fn occupied_by_slots(
        &self,
        storages: &[Storage],
        life: &[Option<Lifetime>],
        launches: usize,
    ) -> Vec<(String, Occupied)> {
        let until_end =
            |from: usize| Lifetime { touched: from..launches, held_until: launches, computed_from: from };
        match self.slots_live {
            _ if self.slots.is_empty() => vec![],
            SlotsLive::Never => vec![],
            SlotsLive::Throughout => {
                vec![("gradients".into(), Occupied { start: 0, end: self.slots.len(), live: until_end(0) })]
            }
            SlotsLive::FromFirstWrite => {
                let part = |(storage, life): (&Storage, &Option<Lifetime>)| {
                    let start = storage.fixed?.checked_sub(self.base + self.slots.start)?;
                    let first = life.as_ref()?.touched.start;
                    let of = Occupied { start, end: start + storage.bytes, live: until_end(first) };
                    Some((storage.name.clone(), of))
                };
                storages.iter().zip(life).filter_map(part).collect()
            }
        }
    }
}

/// The launches between which a storage is in use.
#[derive(Clone)]
struct Lifetime {
    /// From the first launch that touches it to after the last.
    touched: Range<usize>,
    /// All launches that touch it have ended before the compute launch at this index.
    held_until: usize,
    /// The first compute launch that touches it; `usize::MAX` where only exchanges do.
    computed_from: usize,
}

impl Lifetime {
    fn beginning(at: usize) -> Lifetime {
        Lifetime { touched: at..at + 1, held_until: at + 1, computed_from: usize::MAX }
    }

    fn held(&self) -> Range<usize> {
        self.touched.start..self.held_until
    }

    /// Whether the two may not share memory. An exchange may reuse memory of earlier launches, which have ended when it begins;
    /// a compute launch only memory that no exchange holds.
    fn conflicts_with(&self, other: &Lifetime) -> bool {
        let (first, second) =
            if self.touched.start <= other.touched.start { (self, other) } else { (other, self) };
        second.touched.start < first.touched.end || second.computed_from < first.held_until
    }
}

struct Occupied {
    start: usize,
    end: usize,
    live: Lifetime,
}

impl Occupied {
    fn moved(self, by: usize) -> Occupied {
        Occupied { start: self.start + by, end: self.end + by, live: self.live }
    }
}

/// Inserts by start.
fn insert(occupied: &mut Vec<Occupied>, of: Occupied) {
    occupied.insert(occupied.partition_point(|s| s.start < of.start), of);
}

/// The lowest offset at which all parts, which keep their distances, are free for their own lives.
fn lowest_of_parts(occupied: &[Occupied], parts: &[(String, Occupied)], align: usize) -> usize {
    let mut start = 0;
    loop {
        let in_the_way = |part: &Occupied| {
            let meets = |s: &&Occupied| s.start < part.end + start && part.start + start < s.end;
            let ends = occupied.iter().filter(meets).filter(|s| s.live.conflicts_with(&part.live));
            ends.map(|s| (s.end - part.start).next_multiple_of(align)).max()
        };
        match parts.iter().filter_map(|(_, part)| in_the_way(part)).max() {
            None => return start,
            Some(next) => start = next,
        }
    }
}

/// The lowest offset with `size` free bytes among storages, sorted by start, that live at the same time.
fn lowest(occupied: &[Occupied], live: &Lifetime, size: usize, align: usize) -> usize {
    let mut start = 0;
    for s in occupied.iter().filter(|s| s.live.conflicts_with(live)) {
        if s.start >= start + size {
            break;
        }
        start = start.max(s.end.next_multiple_of(align));
    }
    start
}
