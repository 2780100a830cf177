//! Kinds of work: the classes by which plans and profiles add up time.

use crate::attr::named;

named! {
    /// The kinds of work that a step's time is divided into.
    pub enum Work {
        /// Matrix products with their epilogues.
        Product = "product",
        Attention = "attention",
        /// Norms, with the residual addition before them; also norms of queries and keys, with their rotation.
        Norm = "norm",
        /// Rotary embeddings outside other kernels.
        Rope = "rope",
        Gated = "gated",
        /// Quantisation to 8 bits, with the activation that produces the tensor.
        Quantize = "quantize",
        /// Elementwise functions, alone or in regions, and dropout.
        Elementwise = "elementwise",
        /// Reductions along an axis: sums, maxima and the like.
        Reduce = "reduce",
        /// Rows read or added by index: embeddings.
        Index = "index",
        /// Head and loss.
        Loss = "loss",
        Optimizer = "optimizer",
        Wire = "wire",
        /// Movements that need a copy, and constants.
        Copy = "copy",
    }
}
