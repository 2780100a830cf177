//! The persistent part of the arena: one table of slots for all plans, identified by path, at the same offset in each.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;

use crate::graph::{Class, Graph, Slot, SlotPart};
use crate::passes::forward::adapter::SCOPE;
use crate::passes::types::precision::copy_path;
use crate::pieces::Sharded;
use crate::plan::{Buffer, Category, PlacedSlot, Refusal, View};
use crate::types::TensorType;

/// All slots of a set of graphs; a part names its whole by path.
pub struct Slots {
    order: Vec<String>,
    by_path: HashMap<String, Entry>,
}

struct Entry {
    slot: Slot,
    part: Option<(String, usize)>,
    offset: usize,
}

pub fn category(class: Class) -> Category {
    match class {
        Class::Weight | Class::Derived => Category::Parameters,
        Class::Moment | Class::Scale => Category::Optimizer,
        Class::Average => Category::Average,
        Class::Frozen => Category::Frozen,
        Class::Carry => Category::Gradients,
        Class::Cache => Category::Activations,
        Class::Const | Class::Input => Category::Inputs,
    }
}

impl Slots {
    /// Merges the graphs' slots by path and assigns offsets, ordered by category, with inputs last. Those that lie among
    /// transient tensors have their place in `place_among_transients`.
    pub fn place(
        graphs: &[&Graph],
        transient: &BTreeSet<String>,
        align: usize,
    ) -> Result<(Slots, usize, Vec<Buffer>), Refusal> {
        let mut slots = Slots { order: vec![], by_path: HashMap::new() };
        for g in graphs {
            g.slots.iter().try_for_each(|slot| slots.join(g, slot))?;
        }
        let adapters = slots.adapters();
        let category = |path: &str, class: Class| match adapters.contains(path) {
            true => Category::Adapters,
            false => category(class),
        };
        let is_persistent =
            |path: &&String| slots.by_path[*path].part.is_none() && !transient.contains(*path);
        let mut roots: Vec<String> = slots.order.iter().filter(is_persistent).cloned().collect();
        // Inputs come last, in one range.
        let is_input = |class: Class| class == Class::Input;
        roots.sort_by_key(|p| {
            let class = slots.by_path[p].slot.class;
            (category(p, class), is_input(class))
        });
        let (mut end, mut buffers) = (0, vec![]);
        for path in roots {
            let entry = slots.by_path.get_mut(&path).expect("listed");
            let bytes = entry.slot.ty.bytes();
            entry.offset = end;
            let category = category(&path, entry.slot.class);
            buffers.push(Buffer {
                name: path,
                category,
                offset: end,
                bytes: bytes.next_multiple_of(align),
                live: None,
            });
            end += bytes.next_multiple_of(align);
        }
        slots.resolve_all();
        Ok((slots, end, buffers))
    }

    /// Assigns offsets from `start` to slots that lie among transient tensors. Returns the number of bytes.
    pub fn place_among_transients(&mut self, paths: &BTreeSet<String>, start: usize, align: usize) -> usize {
        let mut end = start;
        for path in paths {
            let entry = self.by_path.get_mut(path).expect("a slot of the plans");
            entry.offset = end;
            end += entry.slot.ty.bytes().next_multiple_of(align);
        }
        self.resolve_all();
        end - start
    }

    /// Gives parts the offsets that follow from those of their wholes.
    fn resolve_all(&mut self) {
        for at in 0..self.order.len() {
            let offset = self.resolve(&self.order[at]);
            self.by_path.get_mut(&self.order[at]).expect("listed").offset = offset;
        }
    }

    fn join(&mut self, g: &Graph, slot: &Slot) -> Result<(), Refusal> {
        let part = slot.part.map(|SlotPart { of, offset }| (g.slot(of).path.clone(), offset));
        match self.by_path.get_mut(&slot.path) {
            Some(known) if known.slot.ty != slot.ty => {
                let (a, b) = (&known.slot.ty, &slot.ty);
                Err(Refusal(format!("{} is {a} in one program and {b} in another", slot.path)))
            }
            Some(known) => {
                known.part = known.part.take().or(part);
                Ok(())
            }
            None => {
                self.order.push(slot.path.clone());
                self.by_path.insert(slot.path.clone(), Entry { slot: slot.clone(), part, offset: 0 });
                Ok(())
            }
        }
    }

    /// The slots that hold only parameters of adapters, their copies and norms.
    fn adapters(&self) -> HashSet<String> {
        let is_adapters = |path: &str, entry: &Entry| {
            let path = path.strip_prefix(&copy_path("")).unwrap_or(path);
            path.starts_with(SCOPE) && matches!(entry.slot.class, Class::Weight | Class::Derived)
        };
        let found = self.by_path.iter().filter(|(path, entry)| is_adapters(path, entry));
        let roots: HashSet<&str> = found.map(|(path, _)| self.root(path)).collect();
        // The copy of a region of vectors is listed even though nothing reads parts of it.
        roots.into_iter().flat_map(|root| [root.to_string(), copy_path(root)]).collect()
    }

    /// The outermost slot that this one lies in.
    fn root<'a>(&'a self, path: &'a str) -> &'a str {
        match &self.by_path[path].part {
            Some((of, _)) => self.root(of),
            None => path,
        }
    }

    /// The range that holds every input; empty, at `end`, where there is none.
    pub fn inputs(&self, end: usize) -> Range<usize> {
        let roots = self.by_path.values().filter(|e| e.part.is_none() && e.slot.class == Class::Input);
        roots.map(|e| e.offset).min().unwrap_or(end)..end
    }

    fn resolve(&self, path: &str) -> usize {
        let entry = &self.by_path[path];
        match &entry.part {
            Some((of, offset)) => self.resolve(of) + offset * entry.slot.ty.dtype.bytes(),
            None => entry.offset,
        }
    }

    pub fn offset(&self, path: &str) -> usize {
        self.by_path[path].offset
    }

    pub fn placed(&self, sharded: &[Sharded]) -> Vec<PlacedSlot> {
        let shards: HashSet<&str> = sharded.iter().map(|tensor| tensor.slot.as_str()).collect();
        let wholes: HashSet<&str> =
            self.by_path.values().filter_map(|e| e.part.as_ref().map(|(of, _)| of.as_str())).collect();
        let place = |path: &String| {
            let Entry { slot, offset, .. } = &self.by_path[path];
            PlacedSlot {
                path: path.clone(),
                ty: slot.ty.clone(),
                class: slot.class,
                init: slot.init,
                is_whole: wholes.contains(path.as_str()) || shards.contains(self.root(path)),
                view: View::dense(*offset, &TensorType::clone(&slot.ty)),
            }
        };
        self.order.iter().map(place).collect()
    }
}
