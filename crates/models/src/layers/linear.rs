//! A linear layer: a product with a weight, and an optional bias.

use flatout_ir::{Builder, Init, SlotId, Tensor};

use super::weight;

#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// [out, in]
    pub weight: SlotId,
    /// [out]
    pub bias: Option<SlotId>,
}

impl Linear {
    /// Declares `name` and, with a bias, `name_bias`, which starts as zeros.
    pub fn named(b: &Builder, name: &str, [out, inner]: [usize; 2], init: Init, has_bias: bool) -> Linear {
        let weight_slot = weight(b, name, &[out, inner], init);
        let bias = has_bias.then(|| weight(b, &format!("{name}_bias"), &[out], Init::Zeros));
        Linear { weight: weight_slot, bias }
    }

    /// Declares `name.weight` and `name.bias`.
    pub fn scoped(b: &Builder, name: &str, [out, inner]: [usize; 2], init: Init, bias: Init) -> Linear {
        b.scope(name, || Linear {
            weight: weight(b, "weight", &[out, inner], init),
            bias: Some(weight(b, "bias", &[out], bias)),
        })
    }

    /// x [T, in] to [T, out].
    pub fn apply<'g>(&self, b: &'g Builder, x: Tensor<'g>) -> Tensor<'g> {
        let y = x.linear(b.read(self.weight));
        match self.bias {
            Some(bias) => y + row(b.read(bias)),
            None => y,
        }
    }
}

/// A vector [D] as [1, D].
pub fn row(vector: Tensor<'_>) -> Tensor<'_> {
    let size = vector.dims()[0];
    vector.reshape(&[1, size])
}
