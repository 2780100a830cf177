//! Matrix products on the CPU, their epilogues, and the product into the loss.

mod epilogue;
pub mod head_loss;
pub mod product;
