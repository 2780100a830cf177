//! Kinds of work: the few classes that plans and profiles add time up by.

use crate::attr::named;
use crate::op::OpKind;

named! {
    /// What an operation spends its time on, as budgets of a step are drawn up.
    pub enum Work {
        /// Matrix products with what they do as they write.
        Product = "product",
        Attention = "attention",
        /// Norms, with the residual added before them; also of queries and keys, with their rotation.
        Norm = "norm",
        /// Rotations that stand alone.
        Rope = "rope",
        /// Gated activations.
        Gated = "gated",
        /// Tensors brought to 8 bits, with the activation that makes them.
        Quantize = "quantize",
        /// Functions of elements, alone or in regions, dropout among them.
        Elementwise = "elementwise",
        /// Sums, maxima and the like along an axis.
        Reduce = "reduce",
        /// Rows read or added by index: embeddings.
        Index = "index",
        /// Head and loss.
        Loss = "loss",
        Optimizer = "optimizer",
        /// Movements that had to be copies, and constants.
        Copy = "copy",
    }
}

impl OpKind {
    /// The class that reports count an operation in.
    pub fn work(self) -> Work {
        match self {
            OpKind::Product | OpKind::ThinProduct => Work::Product,
            OpKind::Attention
            | OpKind::AttentionGrad
            | OpKind::LinearAttention
            | OpKind::LinearAttentionGrad => Work::Attention,
            OpKind::RmsNorm
            | OpKind::RmsNormGrad
            | OpKind::DoubleNorm
            | OpKind::DoubleNormGrad
            | OpKind::QkNormRope
            | OpKind::QkNormRopeGrad
            | OpKind::LowRankNorm => Work::Norm,
            OpKind::Rope => Work::Rope,
            OpKind::Gated | OpKind::GatedGrad => Work::Gated,
            OpKind::Quantize => Work::Quantize,
            OpKind::Map | OpKind::Region | OpKind::Bundle | OpKind::Dropout => Work::Elementwise,
            OpKind::Reduce => Work::Reduce,
            OpKind::Gather | OpKind::ScatterAdd | OpKind::RowScatter | OpKind::Resample => Work::Index,
            OpKind::HeadLoss | OpKind::HeadLossGrad | OpKind::HeadLossTrain => Work::Loss,
            OpKind::AdamW | OpKind::AdamW8 => Work::Optimizer,
            OpKind::Read
            | OpKind::Fill
            | OpKind::Iota
            | OpKind::Reshape
            | OpKind::Transpose
            | OpKind::Slice
            | OpKind::Concat
            | OpKind::Pad
            | OpKind::Broadcast => Work::Copy,
        }
    }
}
