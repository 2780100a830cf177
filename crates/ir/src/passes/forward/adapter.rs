//! What an adapter is: which weight it is beside, and the tensors it has.

use crate::graph::{Class, Init, Slot};
use crate::types::{DType, TensorType};

/// One adapter beside one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Several adapters of different names beside one weight add up.
    pub name: String,
    /// The path of the weight.
    pub weight: String,
    pub rank: usize,
    /// s.
    pub scale: f64,
    /// The share of the input that A does not see in training.
    pub dropout: f32,
    /// Whether rows have a magnitude of their own (DoRA).
    pub dora: bool,
}

/// What the paths of all adapters' tensors begin with.
pub const SCOPE: &str = "adapter.";

impl Adapter {
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

    /// The trained tensors of an adapter of a weight [out, in], with their first values: A as a linear layer of
    /// PyTorch begins, which is uniform within 1 / sqrt(in), and B zero, so that the model begins as it was.
    pub fn parameters(&self, [out, inner]: [usize; 2]) -> Vec<Slot> {
        let slot = |path: String, dims: &[usize], init: Init| Slot {
            path,
            ty: TensorType::new(DType::F32, dims),
            class: Class::Weight,
            init,
            part: None,
        };
        let bound = 1.0 / (inner as f32).sqrt();
        let mut all = vec![
            slot(self.a(), &[self.rank, inner], Init::Uniform { bound }),
            slot(self.b(), &[out, self.rank], Init::Zeros),
        ];
        all.extend(self.dora.then(|| slot(self.magnitude(), &[out], Init::RowNorms)));
        all
    }
}

/// The weight that a tensor of an adapter belongs to.
pub fn weight_beside(path: &str) -> Option<&str> {
    let (_, rest) = path.strip_prefix(SCOPE)?.split_once('.')?;
    Some(rest.rsplit_once('.')?.0)
}
