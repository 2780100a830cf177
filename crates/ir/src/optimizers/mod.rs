//! The optimisers: the state each keeps beside the parameters, and the operations that update a piece of them.
//!
//! An optimiser is one file, its name and one row of `ALL`. `passes::gradient::update` lays the state out, reads and writes it, and asks the
//! row of a group for everything else. A piece is any range of a region's elements: nothing here knows how many
//! parameters it covers, or where the rest of the region lies. A rule that needs whole matrices is told where they lie.

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
    /// The rule that updates a parameter. Muon takes the matrices of layers, which map states to states; embeddings, heads, vectors
    /// and tensors of more axes are AdamW's. So are adapters: of B A it is the product that acts, which orthogonal factors do
    /// not make orthogonal, and B is zero at first.
    pub fn of(self, path: &str, axes: usize) -> Name {
        let is_matrix = axes == 2 && layer_of(path).is_some() && !path.starts_with(adapter::SCOPE);
        match self {
            Name::Muon if !is_matrix => Name::AdamW,
            name => name,
        }
    }

    /// Whether an update needs all elements of a matrix, so that ranks cannot divide it anywhere: they have whole layers.
    pub fn needs_whole_matrices(self) -> bool {
        self == Name::Muon
    }
}

/// A row of the table of optimisers.
pub struct Optimizer {
    name: Name,
    /// The types it keeps its state in.
    moments: &'static [Moments],
    /// The state it keeps, in the order in which a piece carries it.
    pub state: fn(&Update) -> Vec<State>,
    /// Pushes the operations of one update. Gives the new parameters, then the new state in the order of `UpdateInputs::state`.
    pub update: for<'g> fn(&Options, &Group, &UpdateInputs<'g>, &Step<'g>) -> Vec<Tensor<'g>>,
}

const ALL: [Optimizer; 3] = [adamw::ROW, adamw8::ROW, muon::ROW];

/// The optimiser of a rule with the state that the options ask for; `None` where the rule keeps no such state.
pub fn of(name: Name, how: &Update) -> Option<&'static Optimizer> {
    ALL.iter().find(|row| row.name == name && row.moments.contains(&how.moments))
}

/// The constants that parameters share. Those that share all of them lie in one region.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Whether they belong to adapters, which are counted apart.
    pub adapts: bool,
    pub name: Name,
    pub rule: Rule,
}

/// A number for every parameter, kept from one update to the next.
pub struct State {
    /// The slot of one parameter's is `moment_path(name, parameter)`; checkpoints know it by that.
    pub name: &'static str,
    /// The slot of a region's is `region.INDEX.` and this.
    pub of_region: &'static str,
    pub dtype: DType,
    /// Neighbours that share a scale, which lies in the slot `scales_path`; `None` where the numbers stand for themselves.
    pub block: Option<usize>,
}

/// The values of a piece of a region before an update.
pub struct UpdateInputs<'g> {
    pub weights: Tensor<'g>,
    pub gradients: Tensor<'g>,
    /// Every `State`, then the scales of those that have any.
    pub state: Vec<Tensor<'g>>,
    /// The number of the first element among those of all regions: random rounding draws by it.
    pub first: usize,
    /// Which of the ranks that update shares of equal size side by side this is; `first` is then that of the first one's.
    pub rank: Option<Tensor<'g>>,
    /// Its matrices, layer by layer in the order in which they lie. Weights that share a slot are matrices of their own.
    pub layers: &'g [Vec<Matrix>],
}

/// The numbers of an update, each of [1]. All pieces share them but for the learning rate.
#[derive(Clone, Copy)]
pub struct Step<'g> {
    /// The learning rate of the piece's group, before the group's `lr_scale`.
    pub lr: Tensor<'g>,
    /// Gradient sums times this are what the optimiser sees: the mean, clipped.
    pub scale: Tensor<'g>,
    /// Updates that were applied, this one included.
    pub updates: Tensor<'g>,
    /// 1 where loss and norm are finite; where it is 0 the update is left out.
    pub is_finite: Tensor<'g>,
}

/// Parts of a region start at multiples of this many elements: 64 bytes of f32, or a block, which is one parameter's then.
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
    /// Pushes an operation that takes weights, gradients, the state, the numbers of the step and the rank.
    fn push(&self, op: Op, step: &Step<'g>) -> Vec<Tensor<'g>> {
        let mut ins = vec![self.weights, self.gradients];
        ins.extend(&self.state);
        ins.extend([step.lr, step.scale, step.updates, step.is_finite]);
        ins.extend(self.rank);
        self.weights.b.ops(op, &ins)
    }
}
