//! Keys and values of earlier tokens, kept from one run of a graph to the next.

use flatout_ir::{Class, Init, Tensor};

#[derive(Clone, Copy)]
pub struct Cache<'g> {
    /// The row of each new token: i32 [T].
    pub places: Tensor<'g>,
    /// Number of rows of all sequences.
    pub rows: usize,
}

impl<'g> Cache<'g> {
    /// All rows so far: the new ones, x [T, H, K], scattered into the cached ones and kept for the next run.
    pub fn extend(&self, name: &str, x: Tensor<'g>) -> Tensor<'g> {
        let dims = [self.rows, x.dims()[1], x.dims()[2]];
        let slot = x.b.slot(&format!("cache.{name}"), Class::Cache, x.dtype(), &dims, Init::Zeros);
        let all = x.b.read(slot).row_scatter(x, self.places);
        x.b.write(slot, all);
        all
    }
}
