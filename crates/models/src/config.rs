//! The keys of models: choices that several models share.

pub(crate) mod bounds;

pub use crate::bdh::{BdhConfig, BdhInit, BdhResidual};
pub use crate::decoder::{
    Attention, Bias, ClassLayer, DecoderConfig, Norm, NormWeights, Positions, QkNormOver, RopePairs,
    RopeScaling,
};
pub use crate::registry::{Model, ModelKind};
pub use crate::vision::{FoveaConfig, Look, Qwen3VlConfig, Tower, Vision};
pub use crate::vit::{FinalNorm, VitConfig, VitLibrary};
use flatout_settings::choice;

choice! {
    /// The head on the last hidden states: logits of the next token, or of the class of the whole text.
    pub enum Head { Tokens = "tokens", Classes = "classes" }
}

choice! {
    /// How the hidden states of a text or an image become one: their mean, the first, the last, the largest of every
    /// element, or the first beside the mean of the others.
    pub enum Pooling { Mean = "mean", Cls = "cls", Last = "last", Max = "max", ClsMean = "cls_mean" }
}

choice! {
    /// The feed-forward's non-linearity. `swiglu`, `geglu` and `geglu_exact` have a gate beside the up projection. GELU is its
    /// tanh form (`gelu_new` and `gelu_pytorch_tanh` elsewhere) in `gelu_tanh` and `geglu`, x sigmoid(1.702 x) in `quick_gelu`, and
    /// exact in the others.
    pub enum Activation {
        Swiglu = "swiglu",
        Geglu = "geglu",
        GeluTanh = "gelu_tanh",
        GeluExact = "gelu_exact",
        Relu2 = "relu2",
        GegluExact = "geglu_exact",
        QuickGelu = "quick_gelu",
    }
}

impl Activation {
    pub fn gated(self) -> bool {
        matches!(self, Activation::Swiglu | Activation::Geglu | Activation::GegluExact)
    }
}
