//! Kinds of work: the few classes that plans and profiles add time up by.

use crate::attr::named;

named! {
    /// The kinds of work by which budgets of a step are drawn up.
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
        /// Exchanges between ranks.
        Wire = "wire",
        /// Movements that had to be copies, and constants.
        Copy = "copy",
    }
}
