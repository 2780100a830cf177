//! Adapters: their weights, and the paths and first values of their tensors.

use crate::graph::{Class, Graph, Init, Slot};
use crate::types::{DType, TensorType};

/// One adapter beside one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Several adapters with different names at one weight add up.
    pub name: String,
    pub weight: String,
    pub rank: usize,
    /// s = alpha / R.
    pub scale: f64,
    /// The probability with which an input element of A is dropped in training.
    pub dropout: f32,
    /// Whether rows have a trained magnitude (DoRA).
    pub dora: bool,
}

/// The prefix of the paths of all adapters' tensors.
pub const SCOPE: &str = "adapter.";
/// The name of the token embedding table for adapters.
pub const EMBED: &str = "embed.weight";
/// The name of the head that predicts tokens for adapters; its slot is the table where the two are tied.
pub const HEAD: &str = "head.weight";

/// Whether a weight is outside layers, where only weights named explicitly have adapters.
pub fn is_end(weight: &str) -> bool {
    [EMBED, HEAD].contains(&weight)
}

/// The slot of an adapter's weight.
pub fn slot_beside<'g>(g: &'g Graph, weight: &str) -> Option<&'g Slot> {
    let find = |path: &str| g.slots.iter().find(|slot| slot.path == path);
    find(weight).or_else(|| find(EMBED).filter(|_| weight == HEAD))
}

impl Adapter {
    /// Whether it adapts rows that are looked up rather than a product.
    pub fn is_lookup(&self) -> bool {
        self.weight == EMBED
    }
    /// A, [rank, in].
    pub fn a(&self) -> String {
        self.path("a")
    }
    /// B, [out, rank].
    pub fn b(&self) -> String {
        self.path("b")
    }
    /// m, [out], of DoRA.
    pub fn magnitude(&self) -> String {
        self.path("magnitude")
    }
    /// 1 / ||W + s B A|| by rows.
    pub fn inverse_norm(&self) -> String {
        self.path("inverse_norm")
    }
    fn path(&self, what: &str) -> String {
        format!("{SCOPE}{}.{}.{what}", self.name, self.weight)
    }

    /// The trained tensors of an adapter of a weight [out, in], with their first values: A as in PyTorch's linear layer,
    /// uniform within 1 / sqrt(in), or for an embedding as in PyTorch's embedding; and B zero, so that the adapted model starts
    /// equal to the base.
    pub fn parameters(&self, [out, inner]: [usize; 2]) -> Vec<Slot> {
        let slot = |path: String, dims: &[usize], init: Init| Slot {
            path,
            ty: TensorType::new(DType::F32, dims),
            class: Class::Weight,
            init,
            part: None,
        };
        let first = match self.is_lookup() {
            true => Init::Normal { std: 1.0 },
            false => Init::Uniform { bound: 1.0 / (inner as f32).sqrt() },
        };
        let mut all =
            vec![slot(self.a(), &[self.rank, inner], first), slot(self.b(), &[out, self.rank], Init::Zeros)];
        all.extend(self.dora.then(|| slot(self.magnitude(), &[out], Init::RowNorms)));
        all
    }
}

/// The weight that an adapter's tensor belongs to.
pub fn weight_beside(path: &str) -> Option<&str> {
    let (_, rest) = path.strip_prefix(SCOPE)?.split_once('.')?;
    Some(rest.rsplit_once('.')?.0)
}
