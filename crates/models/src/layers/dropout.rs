//! Dropout with counter-based random numbers by the rows' coordinates.

use flatout_ir::{DType, Tensor};

/// The coordinates by which dropout draws random numbers.
#[derive(Clone, Copy)]
pub struct Draw<'g> {
    /// i32 [3]
    pub rng: Tensor<'g>,
    /// The sample of each row and its index in the sample: i32 [rows, 2].
    pub rows: Tensor<'g>,
}

impl<'g> Draw<'g> {
    /// Elements of x [rows, ..] dropped with probability p.
    pub fn drop(self, x: Tensor<'g>, p: f64) -> Tensor<'g> {
        x.dropout(p as f32, self.rng, self.rows)
    }

    /// Drops the branch y [B N, D] for whole samples with probability p, and scales it for the others.
    pub fn drop_path(self, y: Tensor<'g>, p: f64) -> Tensor<'g> {
        if p == 0.0 {
            return y;
        }
        let (samples, dims) = (self.rows.dims()[0], y.dims());
        let kept = self.drop(y.b.fill(1.0, DType::F32, &[samples, 1]), p);
        let kept = kept.reshape(&[samples, 1, 1]);
        (y.reshape(&[samples, dims[0] / samples, dims[1]]) * kept).reshape(&dims)
    }

    /// The coordinates of every token, for samples [B] of N tokens each that lie one after the other: rows [B N, 2].
    pub fn of_tokens(self, tokens: usize) -> Draw<'g> {
        let (b, all) = (self.rng.b, [self.rows.dims()[0], tokens]);
        let sample = self.rows.slice(1, 0, 1).broadcast(&all).reshape(&[all[0] * tokens, 1]);
        let token = b.iota(DType::I32, &all, 1).reshape(&[all[0] * tokens, 1]);
        Draw { rng: self.rng, rows: b.concat(&[sample, token], 1) }
    }
}
