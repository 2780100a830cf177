//! The program a backend executes: launches over views of one arena, all offsets fixed.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::attr::named;
use crate::graph::{Class, Init};
use crate::mesh::Mesh;
use crate::ops::Op;
use crate::pieces::Sharded;
use crate::types::{DType, TensorType, contiguous_strides};

/// A tensor in the arena.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Byte offset of the first element from the arena's start.
    pub offset: usize,
    pub dtype: DType,
    pub dims: Vec<usize>,
    /// In elements; stride 0 repeats.
    pub strides: Vec<usize>,
}

impl View {
    pub fn dense(offset: usize, ty: &TensorType) -> Self {
        View { offset, dtype: ty.dtype, dims: ty.dims.clone(), strides: contiguous_strides(&ty.dims) }
    }

    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// The bytes of distinct elements: an axis of stride 0 repeats its elements, which count once.
    pub fn distinct_bytes(&self) -> usize {
        let distinct = self
            .dims
            .iter()
            .zip(&self.strides)
            .map(|(n, stride)| if *stride == 0 { (*n).min(1) } else { *n });
        distinct.product::<usize>() * self.dtype.bytes()
    }

    /// Row-major without gaps; axes of extent 1 may have any stride.
    pub fn is_dense(&self) -> bool {
        let dense = contiguous_strides(&self.dims);
        (0..self.dims.len()).all(|i| self.dims[i] == 1 || self.strides[i] == dense[i])
    }

    /// The last axis has no gaps.
    pub fn has_dense_rows(&self) -> bool {
        self.dims.last().is_none_or(|&n| n == 1 || self.strides[self.dims.len() - 1] == 1)
    }

    /// The bytes from the start of the first element to the end of the last.
    pub fn span_bytes(&self) -> usize {
        if self.elements() == 0 {
            return 0;
        }
        let last: usize = self.dims.iter().zip(&self.strides).map(|(d, s)| (d - 1) * s).sum();
        (last + 1) * self.dtype.bytes()
    }
}

named! {
    /// Launches of a queue run one after the other. An exchange begins when all launches before it in the plan have
    /// ended; a compute launch waits for the compute launches before it, and for the exchanges that it joins.
    pub enum Queue {
        Compute = "compute",
        Wire = "wire",
    }
}

impl Queue {
    pub fn of(op: &Op) -> Queue {
        if op.ways().is_some() { Queue::Wire } else { Queue::Compute }
    }
}

/// One kernel call.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The name of the target's kernel row.
    pub kernel: &'static str,
    /// The operation with its attributes. A copy is `Reshape`: elements in row-major order of both views.
    pub op: Op,
    pub ins: Vec<View>,
    /// `None` where nothing reads the output: it is not computed.
    pub outs: Vec<Option<View>>,
    /// Scratch, at most the kernel's workspace ceiling.
    pub workspace: Option<View>,
    pub path: String,
    pub key: u64,
    /// For cost and reports.
    pub flops: u64,
    pub queue: Queue,
    /// A compute launch waits for every exchange up to the one at this index of the plan. The end of the plan waits for all.
    pub joins: Option<usize>,
}

impl Launch {
    /// Bytes read and written, each once. Elements repeated along an axis come from a cache after the first time.
    pub fn bytes(&self) -> u64 {
        // `Resample` reads only part of a table of images: about as many bytes as it writes.
        let table = matches!(self.op, Op::Resample { .. }).then(|| &self.ins[0]);
        if let (Some(table), Some(out)) = (table, &self.outs[0]) {
            let read = out.distinct_bytes().min(table.distinct_bytes());
            return (self.ins[1].distinct_bytes() + read + out.distinct_bytes()) as u64;
        }
        let views = self.ins.iter().chain(self.outs.iter().flatten());
        views.map(|view| view.distinct_bytes() as u64).sum()
    }
}

/// The purpose of a plan. A role that several plans of a set share carries an index: gradient plans are of the same model and
/// differ in their extents or their attention window; `Keep` and `Fold` plans differ in their level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Rebuilds derived copies after initialisation and load.
    Derive,
    /// Forward, loss, backward, accumulate; once per micro-batch. Index 0 has the largest extents where lengths vary, and
    /// the widest window under a schedule of windows.
    Grad(usize),
    /// Moves the sums of a finished lane aside, to the level of this index, and clears them.
    Keep(usize),
    /// Adds the sums kept at the level of this index to the current ones.
    Fold(usize),
    /// Norm, finite check, clip, update, clear; once per step.
    Apply,
    /// Gathers the averages that ranks hold in shards to where `eval` reads weights; `derive` restores the weights.
    Average,
    Eval,
    /// Logits of every row.
    Logits,
    Prefill,
    Decode,
}

impl Role {
    /// The first gradient plan; the only one where every micro-batch has the same extents and every update the same window.
    pub const GRAD: Role = Role::Grad(0);

    pub fn is_grad(self) -> bool {
        matches!(self, Role::Grad(_))
    }

    /// The word in the text form, and the index after it.
    fn word(self) -> (&'static str, usize) {
        match self {
            Role::Derive => ("derive", 0),
            Role::Grad(index) => ("grad", index),
            Role::Keep(level) => ("keep", level),
            Role::Fold(level) => ("fold", level),
            Role::Apply => ("apply", 0),
            Role::Average => ("average", 0),
            Role::Eval => ("eval", 0),
            Role::Logits => ("logits", 0),
            Role::Prefill => ("prefill", 0),
            Role::Decode => ("decode", 0),
        }
    }

    /// The text form: `grad`, `grad.1`, `apply`. Index 0 is left out.
    pub fn name(self) -> Cow<'static, str> {
        match self.word() {
            (word, 0) => word.into(),
            (word, index) => format!("{word}.{index}").into(),
        }
    }

    /// Parses a role's name; every role has one name.
    pub fn parse(name: &str) -> Option<Role> {
        let (word, index) = match name.split_once('.') {
            Some((word, index)) => (word, index.parse().ok()?),
            None => (name, 0),
        };
        let all = [
            Role::Derive,
            Role::Grad(index),
            Role::Keep(index),
            Role::Fold(index),
            Role::Apply,
            Role::Average,
            Role::Eval,
            Role::Logits,
            Role::Prefill,
            Role::Decode,
        ];
        all.into_iter().find(|role| role.word() == (word, index) && role.name() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub role: Role,
    pub launches: Vec<Launch>,
    pub results: Vec<(String, View)>,
}

impl Plan {
    pub fn result(&self, name: &str) -> Option<&View> {
        self.results.iter().find(|(n, _)| n == name).map(|(_, v)| v)
    }

    /// The exchanges, each with the index of its launch and the index of the launch that waits for it: the first compute launch
    /// that joins this exchange or a later one, or else the end of the plan.
    pub fn exchanges(&self) -> Vec<(usize, usize)> {
        let of = |(at, launch): (usize, &Launch)| {
            let joins = |l: &Launch| l.joins.is_some_and(|joined| joined >= at);
            let until = || self.launches[at..].iter().position(joins).map_or(self.launches.len(), |n| at + n);
            (launch.queue == Queue::Wire).then(|| (at, until()))
        };
        self.launches.iter().enumerate().filter_map(of).collect()
    }

    pub fn has_exchanges(&self) -> bool {
        self.launches.iter().any(|launch| launch.queue == Queue::Wire)
    }

    /// Number of compute launches that may overlap an exchange: those between it and the launch that waits for it.
    pub fn launches_beside_exchanges(&self) -> usize {
        let exchanges = self.exchanges();
        let is_beside = |at: &usize| exchanges.iter().any(|(from, until)| from < at && at < until);
        let is_compute = |at: &usize| self.launches[*at].queue == Queue::Compute;
        (0..self.launches.len()).filter(is_compute).filter(is_beside).count()
    }
}

named! {
    /// The category that `plan` counts a buffer under.
    pub enum Category {
        Parameters = "parameters",
        Frozen = "frozen",
        Adapters = "adapters",
        Gradients = "gradients",
        Optimizer = "optimizer",
        Average = "average",
        Activations = "activations",
        Workspace = "workspace",
        /// Where data from other ranks lands before it is added.
        Wire = "wire",
        Inputs = "inputs",
    }
}

/// A slot and its view in the arena, which is the same in every plan of the set.
#[derive(Clone, Debug)]
pub struct PlacedSlot {
    pub path: String,
    pub ty: TensorType,
    pub class: Class,
    pub init: Init,
    /// Whether other slots or pieces of tensors lie inside this one and hold its value.
    pub is_whole: bool,
    pub view: View,
}

/// A range of the arena, for reports.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub name: String,
    pub category: Category,
    pub offset: usize,
    pub bytes: usize,
    /// The plan and the launches from first write to last read; persistent buffers have none.
    pub live: Option<(usize, Range<usize>)>,
}

/// The launch of the largest plan at which most is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instant {
    pub launch: usize,
    /// Transient bytes alive there, besides the persistent ones.
    pub transient_bytes: usize,
}

/// The report of a pass: what it did, in words a user can read, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassReport {
    pub pass: &'static str,
    pub role: Role,
    pub count: usize,
    pub did: String,
}

/// All plans of a run over one arena.
#[derive(Clone, Debug)]
pub struct PlanSet {
    pub arena_bytes: usize,
    pub persistent_bytes: usize,
    pub transient_bytes: usize,
    /// Every persistent buffer, and the transient buffers of every plan.
    pub buffers: Vec<Buffer>,
    pub slots: Vec<PlacedSlot>,
    pub inputs: Range<usize>,
    /// The offsets of the areas that inputs land in, each as large as `inputs`; none where the host writes in place.
    pub landings: Vec<usize>,
    pub plans: Vec<Plan>,
    /// The ranks that run these plans together.
    pub mesh: Mesh,
    /// The tensors of which each rank holds a shard.
    pub sharded: Vec<Sharded>,
    pub done: Vec<PassReport>,
}

impl PlanSet {
    pub fn plan(&self, role: Role) -> Option<&Plan> {
        self.plans.iter().find(|p| p.role == role)
    }

    /// The gradient plans in the order of their indices: those of the largest extents first, or of the widest window.
    pub fn grads(&self) -> impl Iterator<Item = &Plan> {
        let mut grads: Vec<&Plan> = self.plans.iter().filter(|plan| plan.role.is_grad()).collect();
        grads.sort_by_key(|plan| plan.role);
        grads.into_iter()
    }

    /// The transient buffers of the plan at an index; those of other plans overlay them.
    pub fn transients(&self, plan: usize) -> impl Iterator<Item = &Buffer> {
        self.buffers.iter().filter(move |b| b.live.as_ref().is_some_and(|(of, _)| *of == plan))
    }

    /// The plan whose transient buffers need the most memory; it sets the arena's size.
    pub fn largest_plan(&self) -> usize {
        let ends = |plan: usize| self.transients(plan).map(|b| b.offset + b.bytes).max().unwrap_or(0);
        // Reversed, so that of equals the first wins.
        (0..self.plans.len()).rev().max_by_key(|plan| ends(*plan)).unwrap_or(0)
    }

    /// Bytes by category, which add up to the arena. Transient buffers overlay, so the largest plan's peak is split: the
    /// gradients that it has written by then, its largest workspace, its largest landing area of exchanges, and the rest as
    /// activations. Plans of one rank have no
    /// category for the wire.
    pub fn categories(&self) -> BTreeMap<&'static str, usize> {
        let is_counted = |c: &&Category| **c != Category::Wire || self.mesh.ranks() > 1;
        let counted = Category::ALL.iter().filter(is_counted);
        let mut sums: BTreeMap<&'static str, usize> = counted.map(|c| (c.name(), 0)).collect();
        for buffer in self.buffers.iter().filter(|b| b.live.is_none()) {
            *sums.entry(buffer.category.name()).or_default() += buffer.bytes;
        }
        let mut left = self.transient_bytes;
        let largest = self.largest_plan();
        let gradients = self.alive_bytes(largest, |b| b.category == Category::Gradients);
        for category in [Category::Gradients, Category::Workspace, Category::Wire] {
            let own = self.transients(largest).filter(|b| b.category == category);
            let most = match category {
                Category::Gradients => gradients.get(self.peak().launch).copied().unwrap_or(0),
                _ => own.map(|b| b.bytes).max().unwrap_or(0).min(left),
            };
            if let Some(sum) = sums.get_mut(category.name()) {
                *sum += most;
                left -= most;
            }
        }
        *sums.entry(Category::Activations.name()).or_default() += left;
        sums
    }

    /// Bytes alive at every launch of a plan, in the transients that `counts` selects.
    pub fn alive_bytes(&self, plan: usize, counts: impl Fn(&Buffer) -> bool) -> Vec<usize> {
        let launches = self.plans.get(plan).map_or(0, |plan| plan.launches.len());
        let mut changes = vec![0_i64; launches + 1];
        for buffer in self.transients(plan).filter(|b| counts(b)) {
            let (_, range) = buffer.live.as_ref().expect("a transient");
            changes[range.start] += buffer.bytes as i64;
            changes[range.end] -= buffer.bytes as i64;
        }
        let running = changes.iter().scan(0, |sum, change| {
            *sum += change;
            Some(*sum as usize)
        });
        running.take(launches).collect()
    }

    /// The launch of the largest plan at which the most is alive; the first of equals.
    pub fn peak(&self) -> Instant {
        let alive = self.alive_bytes(self.largest_plan(), |_| true);
        let most = alive.iter().copied().max().unwrap_or(0);
        Instant { launch: alive.iter().position(|n| *n == most).unwrap_or(0), transient_bytes: most }
    }

    pub fn slot(&self, path: &str) -> Option<&PlacedSlot> {
        self.slots.iter().find(|s| s.path == path)
    }
}

/// A plan that cannot be made on this target, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_has_one_name() {
        let roles = [
            Role::Derive,
            Role::GRAD,
            Role::Grad(1),
            Role::Grad(17),
            Role::Keep(0),
            Role::Keep(2),
            Role::Fold(1),
            Role::Apply,
            Role::Average,
        ];
        let names = ["derive", "grad", "grad.1", "grad.17", "keep", "keep.2", "fold.1", "apply", "average"];
        assert_eq!(roles.map(Role::name), names);
        assert_eq!(names.map(Role::parse), roles.map(Some));
        for wrong in ["", "grad.", "grad.0", "grad.01", "grad.-1", "grad.1.1", "eval.1", "gradient"] {
            assert_eq!(Role::parse(wrong), None, "{wrong}");
        }
        assert_eq!(format!("{:7}|", Role::Grad(1)), "grad.1 |");
    }

    #[test]
    fn repeated_elements_count_once() {
        let dense = View::dense(0, &TensorType::new(DType::BF16, [6, 4]));
        let row = View { strides: vec![0, 1], ..dense.clone() };
        let one = View { strides: vec![0, 0], ..dense.clone() };
        let none = View { dims: vec![0, 4], ..row.clone() };
        assert_eq!([&dense, &row, &one, &none].map(View::distinct_bytes), [48, 8, 2, 0]);
    }
}
