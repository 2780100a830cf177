//! The options of compilation. Most fields are one switch each.

use std::collections::{BTreeMap, BTreeSet};

use crate::attr::named;
use crate::mesh::{Axis, Mesh};
use crate::ops::collective::Order;
use crate::optimizers::Name;
use crate::passes::forward::adapter::Adapter;

named! {
    pub enum Precision {
        F32 = "fp32",
        /// As f32, except that products round their operands to 10 bits of mantissa.
        Tf32 = "tf32",
        /// Weights are kept in f32 and copied to bf16 for the products; sums and statistics stay f32.
        BF16 = "bf16",
        /// As bf16, except that linear layers multiply 8-bit floats.
        FP8 = "fp8",
    }
}

named! {
    /// The source of the scales of 8-bit tensors. Weights are always scaled by their current values.
    pub enum Scaling {
        /// The largest magnitudes of previous steps.
        Delayed = "delayed",
        /// The tensor itself, read in an extra pass.
        Current = "current",
    }
}

impl Precision {
    /// Whether activations are bf16.
    pub fn is_narrow(self) -> bool {
        matches!(self, Precision::BF16 | Precision::FP8)
    }
}

named! {
    /// The values that the backward pass recomputes instead of keeping.
    pub enum Recompute {
        /// Normed inputs, activations, rotated queries and keys: no product and no attention runs twice.
        Cheap = "cheap",
        None = "none",
        /// The values of `Cheap`, and products whose result is at least twice as wide as their input.
        Wide = "wide",
        /// Everything inside a layer except its input.
        Full = "full",
    }
}

named! {
    /// The format of moments. Weights and gradient sums stay f32.
    pub enum Moments {
        F32 = "fp32",
        /// Rounded up or down at random, so that increments below half a step are not lost.
        BF16 = "bf16",
        /// The blocks of `block8`: one byte per moment, and four for the scale of 256.
        Int8 = "int8",
    }
}

named! {
    /// The tensors that ranks along the mesh's shard axis divide among themselves.
    pub enum Shard {
        /// Only rows: every rank has all weights, gradients and moments.
        None = "none",
        /// Weights, moments and averages of large regions: a rank holds and updates a share of them, and gathers from the
        /// others the copies that layers read.
        Optimizer = "optimizer",
        /// Also sums of gradients: each micro-batch's gradients are added over ranks as they are computed, and a rank keeps the
        /// sums of its share.
        Gradients = "gradients",
        /// Also the weights that layers read, frozen ones included: a layer's weights are gathered before it reads them, and
        /// again in the backward pass.
        Parameters = "parameters",
    }
}

named! {
    /// How Muon's learning rate depends on the shape of a matrix, whose rows are its outputs.
    pub enum Adjust {
        /// Times sqrt(max(1, rows / columns)).
        Original = "original",
        /// Times 0.2 sqrt(max(rows, columns)): the root mean square of the elements' steps is then AdamW's.
        MatchRmsAdamW = "match_rms_adamw",
    }
}

/// Muon's constants (`optimizers::muon`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    pub momentum: f64,
    pub nesterov: bool,
    /// Number of Newton-Schulz steps.
    pub steps: usize,
    pub adjust: Adjust,
}

impl Default for Muon {
    fn default() -> Muon {
        Muon { momentum: 0.95, nesterov: true, steps: 5, adjust: Adjust::MatchRmsAdamW }
    }
}

/// The training constants of a parameter that differ from the defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Index of its learning rate among those that every step is given (`Update::rates`).
    pub rate: usize,
    pub lr_scale: f32,
    pub weight_decay: f32,
}

/// The optimiser's constants. Learning rates are an input of every step.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    pub name: Name,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub muon: Muon,
    /// For tensors of two axes and more; 0 for norms and biases.
    pub weight_decay: f32,
    /// The largest norm of the mean gradient; 0 disables clipping.
    pub clip: f32,
    pub moments: Moments,
    /// The decay of running averages of trained parameters; `None` keeps no averages.
    pub average: Option<f64>,
    /// Number of learning rates; a parameter's rule has the index of its own.
    pub rates: usize,
    /// Rules of parameters that differ from the defaults, by path.
    pub rules: BTreeMap<String, Rule>,
}

impl Update {
    pub fn rule(&self, path: &str, axes: usize) -> Rule {
        let by_rank = if axes >= 2 { self.weight_decay } else { 0.0 };
        self.rules.get(path).copied().unwrap_or(Rule { rate: 0, lr_scale: 1.0, weight_decay: by_rank })
    }
}

impl Default for Update {
    fn default() -> Self {
        Update {
            name: Name::AdamW,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            muon: Muon::default(),
            weight_decay: 0.1,
            clip: 1.0,
            moments: Moments::F32,
            average: None,
            rates: 1,
            rules: BTreeMap::new(),
        }
    }
}

/// The storage of frozen weights of linear layers, among those that `base::linear` lists.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Base {
    /// All in the type that products read, or else in the type that updates would keep.
    #[default]
    Full,
    /// These weights in NF4.
    Nf4(BTreeSet<String>),
    /// These weights in E4M3; the weights of a group share a scale.
    Fp8(Vec<BTreeSet<String>>),
}

impl Base {
    /// The weights that are stored as codes.
    pub fn weights(&self) -> BTreeSet<&str> {
        match self {
            Base::Full => BTreeSet::new(),
            Base::Nf4(weights) => weights.iter().map(String::as_str).collect(),
            Base::Fp8(groups) => groups.iter().flatten().map(String::as_str).collect(),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub precision: Precision,
    /// The storage of frozen weights of linear layers.
    pub base: Base,
    /// The scaling of 8-bit tensors.
    pub fp8_scaling: Scaling,
    /// The weights whose layers multiply 8-bit floats, by the names of `fp8::names`; `None` for all.
    pub fp8_layers: Option<BTreeSet<String>>,
    /// Off: scores are materialised.
    pub flash_attention: bool,
    pub fuse_qkv: bool,
    pub fuse_gate_up: bool,
    pub fuse_norm: bool,
    pub fuse_elementwise: bool,
    /// Fuses activations, gated or not, and their gradients into the products before them, where the target has kernels for it.
    pub fuse_activation: bool,
    pub fuse_loss: bool,
    pub fuse_optimizer: bool,
    pub recompute: Recompute,
    /// For `Full`: how many layers, from the first, are recomputed; the others keep what `Cheap` keeps. `None` for all.
    pub recompute_layers: Option<usize>,
    /// Off: every tensor has its own buffer, and none is reused.
    pub memory_plan: bool,
    /// Number of positions in a table of cosines and sines; `None` computes them at every use.
    pub rope_positions: Option<usize>,
    /// Paths of parameters that are not trained.
    pub freeze: BTreeSet<String>,
    /// Low-rank adapters beside frozen weights.
    pub adapters: Vec<Adapter>,
    pub update: Update,
    /// An update follows one run of one gradient plan, on one rank: gradients are written instead of added to sums.
    pub one_run: bool,
    /// The ranks that run the plans together.
    pub mesh: Mesh,
    pub shard: Shard,
    /// Gathered weights stay until the last launch that reads them, instead of being gathered again where a layer is
    /// read again.
    pub keep_gathered: bool,
    /// Maximum number of buckets in which a sharded region is exchanged; `usize::MAX` for one per layer.
    pub buckets: usize,
    /// Parts of a step that are summed separately and then added by one tree, whatever ranks compute them; 1 if bits may depend
    /// on the number of ranks.
    pub lanes: usize,
    /// The order of summation over ranks.
    pub order: Order,
    /// Off: the next launch after an exchange between ranks waits for it.
    pub overlap: bool,
    /// Exchanges between ranks also run on a single rank, with itself, so that their overhead can be measured and compared.
    pub exchange_alone: bool,
    /// Skips one pass by name, so that tests can show that reports notice.
    pub skip_pass: Option<&'static str>,
}

impl Options {
    /// Whether a pass runs, that is, no test skips it.
    pub fn runs(&self, pass: &str) -> bool {
        self.skip_pass != Some(pass)
    }

    /// The axes along which gradients are summed over ranks, the innermost first.
    pub fn exchanged_axes(&self) -> Vec<Axis> {
        let axes: Vec<Axis> = self.mesh.axes_of_rows().collect();
        if axes.is_empty() && self.exchange_alone { vec![Axis::Shard] } else { axes }
    }

    /// Whether each rank holds a share of the optimiser's state.
    pub fn shards_optimizer(&self) -> bool {
        self.shard != Shard::None && self.mesh.ways(Axis::Shard) > 1
    }

    /// Whether each rank holds a share of the sums of gradients, so that every gradient plan exchanges them.
    pub fn shards_gradients(&self) -> bool {
        matches!(self.shard, Shard::Gradients | Shard::Parameters) && self.mesh.ways(Axis::Shard) > 1
    }

    /// Whether each rank holds a share of the weights that layers read, so that every plan that reads them gathers them.
    pub fn shards_parameters(&self) -> bool {
        self.shard == Shard::Parameters && self.mesh.ways(Axis::Shard) > 1
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            precision: Precision::F32,
            base: Base::Full,
            fp8_scaling: Scaling::Delayed,
            fp8_layers: None,
            flash_attention: true,
            fuse_qkv: true,
            fuse_gate_up: true,
            fuse_norm: true,
            fuse_elementwise: true,
            fuse_activation: true,
            fuse_loss: true,
            fuse_optimizer: true,
            recompute: Recompute::Cheap,
            recompute_layers: None,
            memory_plan: true,
            rope_positions: None,
            freeze: BTreeSet::new(),
            adapters: vec![],
            update: Update::default(),
            one_run: false,
            mesh: Mesh::ONE,
            shard: Shard::None,
            keep_gathered: false,
            buckets: 1,
            lanes: 1,
            order: Order::Tree,
            overlap: true,
            exchange_alone: false,
            skip_pass: None,
        }
    }
}
