//! Links between ranks, and the predicted time of an exchange over them.
//!
//! The model follows NCCL's tuner: an exchange takes a constant, a time for each step from rank to rank, and the bytes that a
//! rank sends over its bandwidth. The faster of two protocols counts: one for throughput, and one for low latency with a
//! quarter of the bandwidth. A ring over n ranks takes n - 1 steps, and twice as many for an all-reduce; across nodes an
//! all-reduce may use a tree of nodes instead. All results are predictions.

use crate::mesh::{Axis, Mesh};
use crate::ops::Op;
use crate::plan::Launch;

/// Number of protocols: throughput first, then low latency.
const PROTOCOLS: usize = 2;
const BASE_SECONDS: [f64; PROTOCOLS] = [8.4e-6, 6.6e-6];
/// Fraction of the bandwidth that each protocol reaches.
const BANDWIDTH_PART: [f64; PROTOCOLS] = [1.0, 0.25];
/// The least time of a step inside a node where there are several nodes.
const LEAST_STEP_SECONDS: [f64; PROTOCOLS] = [6e-6, 2e-6];

/// The link of a rank to its neighbours.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    pub name: String,
    /// Bytes that one GPU sends per second, in one direction.
    pub bytes_per_second: f64,
    /// Seconds per step from rank to rank, by protocol.
    pub step_seconds: [f64; PROTOCOLS],
}

#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// Between the ranks of a node.
    pub local: Link,
    /// Between nodes, a link for each rank.
    pub net: Link,
    pub ranks_a_node: usize,
    /// Fraction of a GPU's multiprocessors that an exchange occupies while it runs.
    pub held_part: f64,
}

/// The sizes of an exchange: its ranks, those of them on one node, and its nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Group {
    ways: usize,
    local: usize,
    nodes: usize,
}

/// The bytes of the whole tensor over all ranks, which an exchange gathers or sums.
fn whole_bytes(launch: &Launch) -> u64 {
    let view_bytes = |view: Option<&crate::plan::View>| view.map_or(0, |view| view.span_bytes() as u64);
    match launch.op {
        Op::AllGather { .. } => view_bytes(launch.outs[0].as_ref()),
        _ => view_bytes(launch.ins.first()),
    }
}

/// The axis of an exchange, and how often the whole tensor passes each rank.
fn axis_and_passes(op: &Op) -> (Axis, usize) {
    match *op {
        Op::AllGather { axis, .. } | Op::ReduceScatter { axis, .. } => (axis, 1),
        Op::AllReduce { axis, .. } => (axis, 2),
        _ => panic!("{} is no exchange", op.name()),
    }
}

/// The bytes that a rank sends in an exchange of a plan, in a ring of all ranks.
///
/// # Panics
/// If the launch is not an exchange.
pub fn sent_bytes(launch: &Launch) -> u64 {
    let ways = launch.op.ways().unwrap_or(1) as u64;
    axis_and_passes(&launch.op).1 as u64 * whole_bytes(launch) / ways * (ways - 1)
}

impl Links {
    /// The predicted time of an exchange of a plan.
    ///
    /// # Panics
    /// If the launch is not an exchange.
    pub fn seconds(&self, launch: &Launch, mesh: &Mesh) -> f64 {
        self.seconds_of(&launch.op, whole_bytes(launch), mesh)
    }

    /// The predicted time, from the bytes of the whole tensor that is gathered or summed.
    pub fn seconds_of(&self, op: &Op, bytes: u64, mesh: &Mesh) -> f64 {
        let (axis, passes) = axis_and_passes(op);
        let group @ Group { ways, local, nodes } = self.group(mesh, axis);
        if ways == 1 {
            return 0.0;
        }
        let moved = passes as f64 * bytes as f64 * (ways - 1) as f64 / ways as f64;
        let ring = self.best(group, passes * (ways - 1), passes * (nodes - 1), moved);
        if passes == 1 || nodes == 1 {
            return ring;
        }
        let levels = nodes.next_power_of_two().ilog2() as usize;
        ring.min(self.best(group, 2 * (local - 1) + 2 * levels, 2 * levels, moved))
    }

    /// Whether all ranks of an exchange are on one node, so that times measured on one node apply.
    pub fn is_on_one_node(&self, op: &Op, mesh: &Mesh) -> bool {
        op.axis().is_some_and(|axis| self.group(mesh, axis).nodes == 1)
    }

    /// The time of the faster protocol for this many steps, `between` of which go between nodes.
    fn best(&self, group: Group, steps: usize, between: usize, moved: f64) -> f64 {
        let of = |protocol: usize| {
            let is_spread = group.nodes > 1;
            let least = if is_spread { LEAST_STEP_SECONDS[protocol] } else { 0.0 };
            let step = self.local.step_seconds[protocol].max(least);
            BASE_SECONDS[protocol]
                + (steps - between) as f64 * step
                + between as f64 * self.net.step_seconds[protocol]
                + moved / (BANDWIDTH_PART[protocol] * self.bytes_per_second(group))
        };
        (0..PROTOCOLS).map(of).fold(f64::INFINITY, f64::min)
    }

    /// The bytes that a rank sends per second. Where a group has several ranks on a node, it runs that many rings, each over
    /// another link of the node.
    fn bytes_per_second(&self, Group { local, nodes, .. }: Group) -> f64 {
        let (inside, outside) = (self.local.bytes_per_second, local as f64 * self.net.bytes_per_second);
        match (local, nodes) {
            (_, 1) => inside,
            (1, _) => outside,
            _ => inside.min(outside),
        }
    }

    fn group(&self, mesh: &Mesh, axis: Axis) -> Group {
        let ways = mesh.ways(axis);
        let local = (self.ranks_a_node / mesh.stride(axis)).clamp(1, ways);
        Group { ways, local, nodes: ways.div_ceil(local) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::collective::{Combine, Order};

    fn link(gigabytes: f64, micros: [f64; 2]) -> Link {
        let step_seconds = micros.map(|us| 1e-6 * us);
        Link { name: String::new(), bytes_per_second: 1e9 * gigabytes, step_seconds }
    }

    fn h100(ranks_a_node: usize) -> Links {
        let (local, net) = (link(360.0, [3.4, 0.6]), link(48.0, [14.0, 2.7]));
        Links { local, net, ranks_a_node, held_part: 16.0 / 132.0 }
    }

    fn gather(links: &Links, mesh: Mesh, bytes: f64) -> f64 {
        let op = Op::AllGather { axis: Axis::Shard, ways: mesh.ways(Axis::Shard) };
        1e3 * links.seconds_of(&op, bytes as u64, &mesh)
    }

    fn scatter(links: &Links, mesh: Mesh, bytes: f64) -> f64 {
        let ways = mesh.ways(Axis::Shard);
        let op = Op::ReduceScatter { axis: Axis::Shard, ways, order: Order::Any, base: false };
        1e3 * links.seconds_of(&op, bytes as u64, &mesh)
    }

    fn close(got: f64, want: f64, part: f64) {
        assert!((got / want - 1.0).abs() < part, "{got:.3} ms, wanted {want}");
    }

    /// 226M parameters: sums in f32 are scattered and weights in bf16 gathered.
    #[test]
    fn exchanges_of_226m_parameters() {
        let parameters = 226e6;
        let exchange = |links: &Links, ranks: usize| {
            let mesh = Mesh::new(1, ranks);
            [scatter(links, mesh, 4.0 * parameters), gather(links, mesh, 2.0 * parameters)]
        };
        for (ranks, [scattered, gathered]) in [(8, [2.2, 1.1]), (32, [2.7, 1.4])] {
            let [s, g] = exchange(&h100(8), ranks);
            close(s, scattered, 0.03);
            close(g, gathered, 0.05);
        }
        // Four GPUs that communicate through the host.
        let host = Links { local: link(11.0, [5.7, 1.0]), ..h100(4) };
        let [s, g] = exchange(&host, 4);
        close(s, 62.0, 0.02);
        close(g, 31.0, 0.02);
    }

    /// A layer of 250M parameters in bf16. The steps of a ring grow with its ranks, so replicas of smaller shard groups are
    /// faster.
    #[test]
    fn exchanges_of_a_layer_of_8b_parameters() {
        let (parameters, links) = (250e6, h100(8));
        for (ranks, ms) in [(8, 1.2), (256, 3.2), (1024, 7.7)] {
            close(gather(&links, Mesh::new(1, ranks), 2.0 * parameters), ms, 0.05);
        }
        let mesh = Mesh::new(32, 32);
        close(gather(&links, mesh, 2.0 * parameters), 1.6, 0.05);
        let sum = Op::AllReduce { axis: Axis::Replica, ways: 32, by: Combine::Sum, order: Order::Any };
        close(1e3 * links.seconds_of(&sum, (4.0 * parameters / 32.0) as u64, &mesh), 1.6, 0.15);
    }

    #[test]
    fn small_messages_take_the_protocol_of_low_latency() {
        let links = h100(8);
        let us = |ranks: usize| 1e3 * gather(&links, Mesh::new(1, ranks), 64.0);
        close(us(8), 6.6 + 7.0 * 0.6, 0.01);
        assert_eq!(us(1), 0.0);
        close(us(16), 6.6 + 14.0 * 2.0 + 2.7, 0.01);
    }

    #[test]
    fn a_group_lies_on_as_many_nodes_as_its_ranks_do() {
        let links = h100(8);
        let group = |mesh: Mesh, axis: Axis| links.group(&mesh, axis);
        assert_eq!(group(Mesh::new(1, 8), Axis::Shard), Group { ways: 8, local: 8, nodes: 1 });
        assert_eq!(group(Mesh::new(1, 4), Axis::Shard), Group { ways: 4, local: 4, nodes: 1 });
        assert_eq!(group(Mesh::new(1, 32), Axis::Shard), Group { ways: 32, local: 8, nodes: 4 });
        assert_eq!(group(Mesh::new(4, 8), Axis::Replica), Group { ways: 4, local: 1, nodes: 4 });
        assert_eq!(group(Mesh::new(4, 4), Axis::Replica), Group { ways: 4, local: 2, nodes: 2 });
        let gather = |axis: Axis| Op::AllGather { axis, ways: 4 };
        let mesh = Mesh::new(4, 4);
        assert!(links.is_on_one_node(&gather(Axis::Shard), &mesh));
        assert!(!links.is_on_one_node(&gather(Axis::Replica), &mesh));
    }
}
