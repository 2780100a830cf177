//! Ranks from a CPU session's view: the mesh its plans were compiled for and the wire that connects them.

use std::sync::Arc;

use flatout_ir::{Axis, Launch, Mesh, PlanSet};
use flatout_world::Wire;

use crate::{RuntimeError, launch};

/// The wire between all ranks of a mesh. A collective exchanges data within the group along its axis; every rank takes part in
/// every exchange, with empty messages to ranks outside its group.
pub struct Ranks {
    mesh: Mesh,
    wire: Option<Arc<dyn Wire>>,
}

/// Checks that the plans fit the number of connected ranks. Plans without collectives need no other ranks.
pub fn check(plans: &PlanSet, connected: Option<usize>) -> Result<(), RuntimeError> {
    let mesh = plans.mesh;
    let launches = plans.plans.iter().flat_map(|plan| &plan.launches);
    let collectives: Vec<&Launch> = launches.filter(|l| l.op.kind().is_collective()).collect();
    for launch in &collectives {
        let axis = launch.op.axis().expect("a collective has an axis");
        if launch.op.ways().is_some_and(|ways| ways != mesh.ways(axis)) {
            let what = launch::describe(launch);
            return Err(RuntimeError::Unsound(format!("{what}: the mesh is {mesh}")));
        }
    }
    let ranks = mesh.ranks();
    match connected {
        None if ranks > 1 && !collectives.is_empty() => Err(RuntimeError::Wire(format!(
            "these plans are for {ranks} ranks, and the session was opened without a wire to the others"
        ))),
        Some(connected) if connected != ranks => Err(RuntimeError::Wire(format!(
            "these plans are for {ranks} ranks, and the wire connects {connected}"
        ))),
        _ => Ok(()),
    }
}

/// A single rank without a wire.
pub static ALONE: Ranks = Ranks { mesh: Mesh::ONE, wire: None };

impl Ranks {
    /// Checks that the plans can run over the wire. Plans without collectives need none.
    pub fn new(plans: &PlanSet, wire: Option<Arc<dyn Wire>>) -> Result<Ranks, RuntimeError> {
        check(plans, wire.as_ref().map(|wire| wire.ranks()))?;
        Ok(Ranks { mesh: plans.mesh, wire })
    }

    pub fn coordinate(&self, axis: Axis) -> usize {
        self.mesh.coordinate(self.rank(), axis)
    }

    /// This rank's number; 0 without a wire.
    pub fn rank(&self) -> usize {
        self.wire.as_ref().map_or(0, |wire| wire.rank())
    }

    /// Sends the i-th slice to the i-th rank of the group along an axis, and fills the i-th buffer from that rank.
    pub fn exchange(&self, axis: Axis, send: &[&[u8]], receive: Vec<&mut [u8]>) -> Result<(), String> {
        let Some(wire) = &self.wire else { return Err("there is no wire to the other ranks".into()) };
        let mut to: Vec<&[u8]> = vec![&[]; wire.ranks()];
        let mut from: Vec<&mut [u8]> = to.iter().map(|_| <&mut [u8]>::default()).collect();
        for ((rank, send), receive) in self.mesh.group(self.rank(), axis).into_iter().zip(send).zip(receive) {
            (to[rank], from[rank]) = (send, receive);
        }
        wire.exchange(&to, &mut from).map_err(|why| why.to_string())
    }
}
