//! Matrix products on the GPU: through cuBLASLt, with epilogues, through adapters, and into the loss.

mod epilogue;
pub mod head_loss;
pub mod lt;
pub mod product;
pub mod thin_product;
