//! The optimisers: the state each keeps beside the parameters, and the operations that update a piece of them.
//!
//! An optimiser is one file, its name and one row of `ALL`. `passes::gradient::update` lays the state out, reads and writes it,
//! and takes everything else from the row of a group. A piece is any range of a region's elements: an optimiser does not know
//! how many parameters it covers, or where the rest of the region lies. A rule that needs whole matrices gets their positions.

mod adamw;
mod adamw8;
mod matrices;
mod muon;

pub use matrices::{Matrix, Run, runs};

use crate::attr::named;
use crate::builder::Tensor;
use crate::ops::Op;
use crate::passes::forward::adapter;
use crate::passes::gradient::recompute::layer_of;
use crate::passes::options::{Moments, Options, Rule, Update};
use crate::types::DType;

named! {
    /// The update rules, as `optimizer.name` calls them.
    pub enum Name { AdamW = "adamw", Muon = "muon" }
}

impl Name {
    /// The rule that updates a parameter. Muon updates the matrices of layers, which map states to states; AdamW updates
    /// embeddings, heads, vectors, tensors of more axes, and adapters: only their product B A acts, which orthogonal factors do
    /// not make orthogonal, and B starts at zero.
    pub fn of(self, path: &str, axes: usize) -> Name {
        let is_matrix = axes == 2 && layer_of(path).is_some() && !path.starts_with(adapter::SCOPE);
        match self {
            Name::Muon if !is_matrix => Name::AdamW,
            name => name,
        }
    }

    /// Whether an update needs all elements of a matrix, so that ranks must hold whole layers.
    pub fn needs_whole_matrices(self) -> bool {
        self == Name::Muon
    }
}

/// A row of the table of optimisers.
pub struct Optimizer {
    name: Name,
    /// The moment formats it supports.
    moments: &'static [Moments],
    /// The state it keeps, in the order in which a piece carries it.
    pub state: fn(&Update) -> Vec<State>,
    /// Appends the operations of one update. Returns the new parameters, then the new state in the order of
    /// `UpdateInputs::state`.
    pub update: for<'g> fn(&Options, &Group, &UpdateInputs<'g>, &Step<'g>) -> Vec<Tensor<'g>>,
}

const ALL: [Optimizer; 3] = [adamw::ROW, adamw8::ROW, muon::ROW];

/// The optimiser of a rule with the configured format of moments; `None` where the rule does not support it.
pub fn of(name: Name, update: &Update) -> Option<&'static Optimizer> {
    ALL.iter().find(|row| row.name == name && row.moments.contains(&update.moments))
}

/// The constants of a group of parameters. Parameters with equal constants share a region.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Whether they belong to adapters, which reports count separately.
    pub adapts: bool,
    pub name: Name,
    pub rule: Rule,
}

/// One value per parameter that is kept from one update to the next.
pub struct State {
    /// Names the slot of a parameter's state, `moment_path(name, parameter)`, which is also its name in checkpoints.
    pub name: &'static str,
    /// Names the slot of a region's state: `region.INDEX.` and this.
    pub of_region: &'static str,
    pub dtype: DType,
    /// Number of neighbours that share a scale, which lies in the slot `scales_path`; `None` where values are not scaled.
    pub block: Option<usize>,
}

/// The values of a piece of a region before an update.
pub struct UpdateInputs<'g> {
    pub weights: Tensor<'g>,
    pub gradients: Tensor<'g>,
    /// The value of every `State`, then the scales of those that have any.
    pub state: Vec<Tensor<'g>>,
    /// Index of the first element among those of all regions, which seeds random rounding.
    pub first: usize,
    /// This rank's index among ranks that update adjacent shares of equal size; `first` is then that of the first rank's share.
    pub rank: Option<Tensor<'g>>,
    /// Its matrices by layer, in memory order. Weights merged into one slot are separate matrices.
    pub layers: &'g [Vec<Matrix>],
}

/// The scalars of an update, each of [1]. All pieces share them except for the learning rate.
#[derive(Clone, Copy)]
pub struct Step<'g> {
    /// The learning rate of the piece's group, before the group's `lr_scale`.
    pub lr: Tensor<'g>,
    /// The factor that turns gradient sums into the clipped mean gradient.
    pub scale: Tensor<'g>,
    /// Number of updates applied, this one included.
    pub updates: Tensor<'g>,
    /// 1 where loss and norm are finite; where it is 0 the update is skipped.
    pub is_finite: Tensor<'g>,
}

/// The alignment of parts of a region, in elements: 64 bytes of f32, or a block, which then belongs to one parameter.
pub fn align(state: &[State]) -> usize {
    state.iter().filter_map(|state| state.block).max().unwrap_or(16)
}

/// The slot of a parameter's state: `m` and `v` are the first and the second moment.
pub fn moment_path(name: &str, weight: &str) -> String {
    format!("optimizer.{name}.{weight}")
}

/// The slot that holds the scales of a slot of moments in eight bits.
pub fn scales_path(moments: &str) -> String {
    format!("{moments}.scales")
}

impl<'g> UpdateInputs<'g> {
    /// Appends an operation on weights, gradients, the state, the scalars of the step and the rank.
    fn push(&self, op: Op, step: &Step<'g>) -> Vec<Tensor<'g>> {
        let mut ins = vec![self.weights, self.gradients];
        ins.extend(&self.state);
        ins.extend([step.lr, step.scale, step.updates, step.is_finite]);
        ins.extend(self.rank);
        self.weights.b.ops(op, &ins)
    }
}
