//! The feed-forward half of a block: up, a non-linearity with or without a gate, and down.

use flatout_ir::ops::gated::Act;
use flatout_ir::{Builder, Init, Tensor};

use super::Linear;
use crate::config::Activation;

/// Quick GELU, x sigmoid(1.702 x), is SiLU with its argument scaled by this factor.
const QUICK: f64 = 1.702;

#[derive(Clone, Debug)]
pub struct FeedForward {
    activation: Activation,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// Declares `gate` if the activation has one, `up` and `down`; `outward` initialises `down`, which writes to the residual
    /// stream.
    pub fn declare(
        b: &Builder,
        [width, inner]: [usize; 2],
        activation: Activation,
        has_bias: bool,
        [inward, outward]: [Init; 2],
    ) -> FeedForward {
        let into = |name: &str| Linear::named(b, name, [inner, width], inward, has_bias);
        FeedForward {
            activation,
            gate: activation.gated().then(|| into("gate")),
            up: into("up"),
            down: Linear::named(b, "down", [width, inner], outward, has_bias),
        }
    }

    /// x [T, D] to [T, D].
    pub fn apply<'g>(&self, b: &'g Builder, x: Tensor<'g>) -> Tensor<'g> {
        let gate = self.gate.map(|gate| gate.apply(b, x));
        let up = self.up.apply(b, x);
        let inner = match (self.activation, gate) {
            (Activation::Swiglu, Some(gate)) => gate.activate(Act::Silu) * up,
            (Activation::Geglu, Some(gate)) => gate.activate(Act::Gelu) * up,
            (Activation::GegluExact, Some(gate)) => gate.activate(Act::GeluExact) * up,
            (Activation::GeluTanh, _) => up.activate(Act::Gelu),
            (Activation::GeluExact, _) => up.activate(Act::GeluExact),
            (Activation::QuickGelu, _) => up.scale(QUICK).activate(Act::Silu).scale(1.0 / QUICK),
            (Activation::Relu2, _) => up.activate(Act::Relu).square(),
            (Activation::Swiglu | Activation::Geglu | Activation::GegluExact, None) => {
                unreachable!("declared with a gate")
            }
        };
        self.down.apply(b, inner)
    }
}
