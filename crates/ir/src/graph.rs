//! A graph is a value: nodes in topological order, slots (named storage), writes to slots and named results.
//!
//! Nodes are only appended; a rewrite builds a new graph. Every `Read` of a slot sees the slot's value from before the run, and
//! a slot has at most one write.

use crate::attr::{Attr, named};
use crate::ops::Op;
use crate::ops::frequency::Frequencies;
use crate::types::TensorType;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// One output of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value {
    pub node: NodeId,
    pub out: u8,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub ins: Vec<Value>,
    pub outs: Vec<TensorType>,
    /// The node's place in the model, for reports and layer boundaries.
    pub path: String,
    /// Seeds the node's random numbers and survives rewrites, so a recomputed dropout draws the same ones.
    pub key: u64,
}

named! {
    /// The kind of content of a slot. It decides how the slot is saved and where `plan` counts it.
    pub enum Class {
        /// A trained parameter: checkpointed.
        Weight = "weight",
        /// Optimiser state and counters: checkpointed.
        Moment = "moment",
        /// Scales of 8-bit moments: checkpoints hold the scaled values instead.
        Scale = "scale",
        /// The running average of a trained parameter: checkpointed.
        Average = "average",
        /// A parameter that is not trained: its source holds it.
        Frozen = "frozen",
        /// A copy in another type or layout, rebuilt bit for bit by the `derive` plan.
        Derived = "derived",
        /// Sums that cross plans within a step: gradients, loss, weight. Never saved.
        Carry = "carry",
        /// Keys and values of earlier tokens, and their number.
        Cache = "cache",
        /// A table that is fixed at build time.
        Const = "const",
        /// Written by the host before each run.
        Input = "input",
    }
}

impl Class {
    pub fn is_saved(self) -> bool {
        matches!(self, Class::Weight | Class::Moment | Class::Average)
    }
    pub fn is_parameter(self) -> bool {
        matches!(self, Class::Weight | Class::Frozen)
    }
}

/// How a slot's first value is made: on the host, from counter-based random numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    Constant {
        value: f32,
    },
    Normal {
        std: f32,
    },
    /// Uniform between -bound and bound.
    Uniform {
        bound: f32,
    },
    /// Norms of the rows of the weight that the slot's adapter belongs to, computed once that weight is known.
    RowNorms,
    /// `[positions, frequencies, 2]`: cosine and sine of each angle, as `Frequencies::table` gives them.
    RopeTable {
        freq: Frequencies,
    },
    /// Depends on the data: the code that opens the data writes it.
    Data,
    /// The matrix that resamples a grid of extents `from` to `to` (`bicubic::matrix`).
    Bicubic {
        from: [usize; 2],
        to: [usize; 2],
        antialias: bool,
    },
}

/// The names of both kinds of resampling in a graph's text.
const PLAIN_BICUBIC: &str = "bicubic";
const SMOOTH_BICUBIC: &str = "bicubic_antialias";

impl Attr for Init {
    fn to_text(&self) -> String {
        match self {
            Init::Zeros => "zeros".into(),
            Init::Ones => "ones".into(),
            Init::Constant { value } => format!("constant({value})"),
            Init::Normal { std } => format!("normal({std})"),
            Init::Uniform { bound } => format!("uniform({bound})"),
            Init::RowNorms => "row_norms".into(),
            Init::Data => "data".into(),
            Init::RopeTable { freq } => format!("rope_table({})", freq.to_text()),
            Init::Bicubic { from, to, antialias } => {
                let name = if *antialias { SMOOTH_BICUBIC } else { PLAIN_BICUBIC };
                format!("{name}({}x{}:{}x{})", from[0], from[1], to[0], to[1])
            }
        }
    }
    fn read(text: &str) -> Result<Self, String> {
        let (name, argument) = match text.split_once('(') {
            Some((name, rest)) => (name, rest.strip_suffix(')').ok_or("an unclosed bracket")?),
            None => (text, ""),
        };
        match name {
            "zeros" => Ok(Init::Zeros),
            "ones" => Ok(Init::Ones),
            "constant" => Ok(Init::Constant { value: f32::read(argument)? }),
            "normal" => Ok(Init::Normal { std: f32::read(argument)? }),
            "uniform" => Ok(Init::Uniform { bound: f32::read(argument)? }),
            "row_norms" => Ok(Init::RowNorms),
            "data" => Ok(Init::Data),
            "rope_table" => Ok(Init::RopeTable { freq: Frequencies::read(argument)? }),
            PLAIN_BICUBIC | SMOOTH_BICUBIC => {
                let grid = |text: &str| match text.split_once('x') {
                    Some((rows, columns)) => Ok([usize::read(rows)?, usize::read(columns)?]),
                    None => Err(format!("`{text}` is no grid")),
                };
                let (from, to) = argument.split_once(':').ok_or("a resampling has two grids")?;
                Ok(Init::Bicubic { from: grid(from)?, to: grid(to)?, antialias: name == SMOOTH_BICUBIC })
            }
            _ => Err(format!("`{text}` is not an initial value")),
        }
    }
}

/// The position of a slot inside a larger one: merged weights and the optimiser's flat regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPart {
    pub of: SlotId,
    /// In elements.
    pub offset: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    pub path: String,
    pub ty: TensorType,
    pub class: Class,
    pub init: Init,
    pub part: Option<SlotPart>,
}

#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
    pub slots: Vec<Slot>,
    pub writes: Vec<(SlotId, Value)>,
    pub results: Vec<(String, Value)>,
    /// The key of the next new node. Rewrites continue the count, so a new node never reuses an old node's key.
    pub next_key: u64,
}

/// Two graphs with equal text are equal, so `next_key` is ignored.
impl PartialEq for Graph {
    fn eq(&self, other: &Graph) -> bool {
        let Graph { nodes, slots, writes, results, next_key: _ } = self;
        (nodes, slots, writes, results) == (&other.nodes, &other.slots, &other.writes, &other.results)
    }
}

impl Graph {
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    pub fn slot(&self, id: SlotId) -> &Slot {
        &self.slots[id.0 as usize]
    }

    pub fn slot_mut(&mut self, id: SlotId) -> &mut Slot {
        &mut self.slots[id.0 as usize]
    }

    pub fn ty(&self, v: Value) -> &TensorType {
        &self.node(v.node).outs[v.out as usize]
    }

    pub fn dims(&self, v: Value) -> &[usize] {
        &self.ty(v).dims
    }

    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    pub fn slot_ids(&self) -> impl DoubleEndedIterator<Item = SlotId> + use<> {
        (0..self.slots.len() as u32).map(SlotId)
    }

    pub fn find_slot(&self, path: &str) -> Option<SlotId> {
        self.slots.iter().position(|s| s.path == path).map(|i| SlotId(i as u32))
    }

    pub fn result(&self, name: &str) -> Option<Value> {
        self.results.iter().find(|(n, _)| n == name).map(|(_, v)| *v)
    }

    #[track_caller]
    pub fn add_slot(&mut self, slot: Slot) -> SlotId {
        assert!(self.find_slot(&slot.path).is_none(), "two slots are named `{}`", slot.path);
        self.slots.push(slot);
        SlotId(self.slots.len() as u32 - 1)
    }

    /// Appends a node with inferred types, under an explicit path and key.
    #[track_caller]
    pub fn push_keyed(&mut self, op: Op, ins: Vec<Value>, path: &str, key: u64) -> NodeId {
        let outs = match op.infer(self, &ins) {
            Ok(outs) => outs,
            // Not in a closure, which would hide the caller's line.
            Err(why) => panic!("{path}: {}: {why}", op.name()),
        };
        self.push_typed(Node { op, ins, outs, path: path.into(), key })
    }

    /// Appends a node whose output types the caller knows to be those that the operation infers.
    pub(crate) fn push_typed(&mut self, node: Node) -> NodeId {
        self.next_key = self.next_key.max(node.key + 1);
        self.nodes.push(node);
        NodeId(self.nodes.len() as u32 - 1)
    }

    /// A key above those of all nodes. `next_key` may be lower: `Builder::counted_from` gives nodes keys of another range.
    pub fn unused_key(&self) -> u64 {
        self.nodes.iter().map(|node| node.key + 1).fold(self.next_key, u64::max)
    }

    /// Appends a node under a new key.
    #[track_caller]
    pub fn push(&mut self, op: Op, ins: Vec<Value>, path: &str) -> NodeId {
        let key = self.next_key;
        self.push_keyed(op, ins, path, key)
    }

    /// `push`, returning the node's first output.
    #[track_caller]
    pub fn add(&mut self, op: Op, ins: Vec<Value>, path: &str) -> Value {
        self.push(op, ins, path).out(0)
    }

    /// Number of uses of each node's outputs, by nodes, writes and results.
    pub fn uses(&self) -> Vec<Vec<u32>> {
        let mut uses: Vec<Vec<u32>> = self.nodes.iter().map(|n| vec![0; n.outs.len()]).collect();
        let inner = self.nodes.iter().flat_map(|n| &n.ins);
        let outer = self.writes.iter().map(|(_, v)| v).chain(self.results.iter().map(|(_, v)| v));
        for v in inner.chain(outer) {
            uses[v.node.0 as usize][v.out as usize] += 1;
        }
        uses
    }
}

impl NodeId {
    pub fn out(self, out: u8) -> Value {
        Value { node: self, out }
    }
}
