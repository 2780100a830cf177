//! A norm over the last axis with its learned vectors.

use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::{Builder, Init, SlotId, Tensor};

use super::weight;

#[derive(Clone, Copy, Debug)]
pub struct Norm {
    spec: NormSpec,
    weight: SlotId,
    bias: Option<SlotId>,
}

impl Norm {
    /// Declares `name`, a weight with an effective factor of 1, and `name_bias` if the norm has one.
    pub fn declare(b: &Builder, name: &str, size: usize, spec: NormSpec) -> Norm {
        let init = if spec.weight == NormWeight::OnePlus { Init::Zeros } else { Init::Ones };
        let weight_slot = weight(b, name, &[size], init);
        let bias = spec.bias.then(|| weight(b, &format!("{name}_bias"), &[size], Init::Zeros));
        Norm { spec, weight: weight_slot, bias }
    }

    pub fn apply<'g>(&self, b: &'g Builder, x: Tensor<'g>) -> Tensor<'g> {
        let weight = b.read(self.weight);
        let bias = self.bias.map(|bias| b.read(bias));
        x.norm(self.spec, Some(weight), bias)
    }
}
