//! The cost of a plan: arithmetic, memory traffic, the least time that a device's rates allow, and the predicted time where its
//! kernels were timed.

use std::collections::HashMap;
use std::ops::AddAssign;

use crate::graph::{Graph, Node, Value};
use crate::ops::{Op, OpKind};
use crate::passes::place::views::is_movement;
use crate::plan::{Launch, Plan, Queue};
use crate::schedule::{SimulatedTime, play};
use crate::target::{Rates, Target};
use crate::timings::{Size, Units};
use crate::work::Work;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub launches: u64,
    pub flops: u64,
    /// Bytes of every launch's inputs and outputs, each once.
    pub bytes: u64,
    /// The sum over launches of arithmetic over its rate or bytes over bandwidth, whichever is longer.
    pub roofline_seconds: f64,
    /// Predicted from the target's timings; the roofline where it has none.
    pub predicted_seconds: f64,
    /// The part of `predicted_seconds` that is the roofline because no launch of its kind was timed.
    pub untimed_seconds: f64,
}

impl Cost {
    pub fn times(self, n: u64) -> Cost {
        Cost {
            launches: n * self.launches,
            flops: n * self.flops,
            bytes: n * self.bytes,
            ..self.scaled(n as f64)
        }
    }

    /// The cost of `f` executions on average.
    pub fn scaled(self, f: f64) -> Cost {
        let whole = |n: u64| (f * n as f64).round() as u64;
        Cost {
            launches: whole(self.launches),
            flops: whole(self.flops),
            bytes: whole(self.bytes),
            roofline_seconds: f * self.roofline_seconds,
            predicted_seconds: f * self.predicted_seconds,
            untimed_seconds: f * self.untimed_seconds,
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.launches += other.launches;
        self.flops += other.flops;
        self.bytes += other.bytes;
        self.roofline_seconds += other.roofline_seconds;
        self.predicted_seconds += other.predicted_seconds;
        self.untimed_seconds += other.untimed_seconds;
    }
}

/// The cost of a plan whose launches run one after the other.
pub fn cost(plan: &Plan, target: &Target) -> Cost {
    let mut total = Cost::default();
    by_work(plan, target).into_iter().for_each(|(_, cost)| total += cost);
    total
}

/// The cost of each kind of work, in the order of `Work`; kinds without launches are left out.
pub fn by_work(plan: &Plan, target: &Target) -> Vec<(Work, Cost)> {
    // Layers repeat the same sizes.
    let mut known: HashMap<Size, Cost> = HashMap::new();
    let mut sums: Vec<Cost> = vec![Cost::default(); Work::ALL.len()];
    for launch in &plan.launches {
        let size = Size::of(launch);
        let at = size.work as usize;
        sums[at] += match launch.queue {
            Queue::Compute => *known.entry(size).or_insert_with_key(|size| of_size(size, target)),
            Queue::Wire => of_launch(launch, target),
        };
    }
    Work::ALL.iter().copied().zip(sums).filter(|(_, cost)| cost.launches > 0).collect()
}

/// The cost of one launch. Exchanges use times measured on one node, or else predictions from the links between ranks.
pub fn of_launch(launch: &Launch, target: &Target) -> Cost {
    let cost = of_size(&Size::of(launch), target);
    match &target.links {
        Some(links) if launch.queue == Queue::Wire => {
            let seconds = links.seconds(launch, &target.mesh());
            let is_timed = cost.untimed_seconds == 0.0 && links.is_on_one_node(&launch.op, &target.mesh());
            let predicted_seconds = if is_timed { cost.predicted_seconds } else { seconds };
            Cost { roofline_seconds: seconds, predicted_seconds, untimed_seconds: 0.0, ..cost }
        }
        _ => cost,
    }
}

/// The simulated run of a plan whose queues overlap: with predicted times, and with roofline times.
pub fn played(plan: &Plan, target: &Target) -> (SimulatedTime, SimulatedTime) {
    let held_part = target.links.as_ref().map_or(0.0, |links| links.held_part);
    let mut known: HashMap<Size, Cost> = HashMap::new();
    let costs: Vec<Cost> = plan
        .launches
        .iter()
        .map(|launch| match launch.queue {
            Queue::Compute => *known.entry(Size::of(launch)).or_insert_with_key(|size| of_size(size, target)),
            Queue::Wire => of_launch(launch, target),
        })
        .collect();
    let by = |seconds: fn(&Cost) -> f64| play(plan, held_part, costs.iter().map(seconds));
    (by(|cost| cost.predicted_seconds), by(|cost| cost.roofline_seconds))
}

fn of_size(size: &Size, target: &Target) -> Cost {
    let roofline_seconds = size.roofline_seconds(&target.rates);
    let expected = target.timings.expect(size, &target.rates);
    Cost {
        launches: 1,
        flops: size.flops,
        bytes: size.bytes,
        roofline_seconds,
        predicted_seconds: expected.unwrap_or(roofline_seconds),
        untimed_seconds: if expected.is_some() { 0.0 } else { roofline_seconds },
    }
}

/// The cost of a graph before it is lowered, as if every movement were a view. It serves to choose between graphs that differ
/// in few nodes.
pub fn of_graph(g: &Graph, target: &Target) -> Cost {
    let uses = g.uses();
    let mut known: HashMap<Size, Cost> = HashMap::new();
    let mut total = Cost::default();
    for (id, node) in g.ids().zip(&g.nodes) {
        let is_used = |out: usize| uses[id.0 as usize][out] > 0;
        let works = !matches!(node.op, Op::Read { .. } | Op::Fill { .. }) && !is_movement(&node.op);
        if works && (0..node.outs.len()).any(is_used) {
            let size = Size::of_node(g, node, is_used, target);
            total += *known.entry(size).or_insert_with_key(|size| of_size(size, target));
        }
    }
    total
}

/// The arithmetic rate of a launch, by the type and mode it multiplies in.
pub fn rate(launch: &Launch, rates: &Rates) -> f64 {
    rates.of(Units::of(launch))
}

/// The operations that utilisation figures count.
const COUNTED: [OpKind; 4] = [OpKind::Product, OpKind::Attention, OpKind::LinearAttention, OpKind::HeadLoss];

/// How a parameter takes part in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trainability {
    Trained,
    /// Frozen, with something trained beside it, such as an adapter.
    Adapted,
    Frozen,
}

/// Arithmetic of products, attention and head in a training step, from its forward graph, as utilisation figures count it:
/// forward once, and backward once for each of a product's two inputs that has a gradient; for attention twice, where it has
/// one. Recomputation and adapters are not counted.
pub fn training_flops(g: &Graph, trainability: impl Fn(&str) -> Trainability) -> u64 {
    // Whether a gradient flows back through each node.
    let mut flows = vec![false; g.nodes.len()];
    let mut total = 0;
    for (id, node) in g.ids().zip(&g.nodes) {
        let reads = |node: &Node, wanted: Trainability| match node.op {
            Op::Read { slot } => {
                let slot = &g.slots[slot.0 as usize];
                slot.class.is_parameter() && trainability(&slot.path) == wanted
            }
            _ => false,
        };
        let is_adapted = |v: &Value| reads(g.node(v.node), Trainability::Adapted);
        let back = node.ins.iter().filter(|v| flows[v.node.0 as usize]).count() as u64;
        flows[id.0 as usize] =
            back > 0 || reads(node, Trainability::Trained) || node.ins.iter().any(is_adapted);
        if COUNTED.contains(&node.op.kind()) {
            let passes = match node.op.kind() {
                OpKind::Product | OpKind::HeadLoss => 1 + back.min(2),
                _ => 1 + if back > 0 { 2 } else { 0 },
            };
            total += passes * node.op.flops(node, g);
        }
    }
    total
}
