//! Rotary positions: rotates pairs of a head's elements by the angle position * turn, with a turn for each frequency.
//!
//! Positions are an i32 input [axes, T]; `axis_of_freq` has the position axis of each frequency, so text (one axis), images
//! (two) and M-RoPE (three) are one operation. With `table`, a third input [P, K/2, 2] holds the cosines and sines of positions
//! 0 to P. The gradient is the inverse rotation, with the same amplitude: the transpose.

use super::{arity, expect, expect_float};
use crate::attr::named;
use crate::builder::{Builder, Tensor};
use crate::ops::elementwise::Elementwise as E;
use crate::ops::frequency::Frequencies;
use crate::ops::{Grads, Op, Vjp};
use crate::types::{DType, TensorType};

named! {
    /// The two elements that form the pair of frequency f.
    pub enum Pairs {
        /// f and f + K/2.
        Half = "half",
        /// 2f and 2f + 1.
        Interleaved = "interleaved",
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub freq: Frequencies,
    /// One entry per frequency, K/2 in total.
    pub axis_of_freq: Vec<u8>,
    pub pairs: Pairs,
}

impl RopeSpec {
    /// For text: every frequency uses the one position axis.
    pub fn text(head_size: usize, freq: Frequencies, pairs: Pairs) -> Self {
        RopeSpec { freq, axis_of_freq: vec![0; head_size / 2], pairs }
    }

    /// For images: the first half of the frequencies uses rows, the second half, which has the same frequencies, columns.
    pub fn grid(head_size: usize, theta: f64, pairs: Pairs) -> Self {
        let freq = Frequencies { runs: 2, ..Frequencies::from(theta) };
        let half = head_size / 2;
        RopeSpec { freq, axis_of_freq: (0..half).map(|f| (f >= half / 2) as u8).collect(), pairs }
    }

    /// For text with images: of every three frequencies one uses time, one height and one width; the last two only up to their
    /// `sections`, the first beyond.
    pub fn interleaved(head_size: usize, freq: Frequencies, sections: [usize; 3], pairs: Pairs) -> Self {
        let axis = |f: usize| if f < 3 * sections[f % 3] { (f % 3) as u8 } else { 0 };
        RopeSpec { freq, axis_of_freq: (0..head_size / 2).map(axis).collect(), pairs }
    }

    pub fn op(&self) -> Op {
        let RopeSpec { freq, axis_of_freq, pairs } = self.clone();
        Op::Rope { freq, axis_of_freq, pairs, inverse: false, table: false }
    }
}

pub fn infer(axis_of_freq: &[u8], table: bool, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 2 + table as usize)?;
    check(ins[0], axis_of_freq, ins[1], table.then(|| ins[2]))?;
    Ok(vec![ins[0].clone()])
}

/// Checks x, positions and table for rope and the fused norm + rope.
pub(super) fn check(
    x: &TensorType,
    axis_of_freq: &[u8],
    positions: &TensorType,
    table: Option<&TensorType>,
) -> Result<(), String> {
    if x.rank() != 3 || !x.dtype.is_float() {
        return Err(format!("x is {x}, wanted floats [tokens, heads, head size]"));
    }
    if axis_of_freq.len() * 2 != x.last() {
        return Err(format!("{} frequencies do not turn a head of {}", axis_of_freq.len(), x.last()));
    }
    let axes = axis_of_freq.iter().max().map_or(1, |&a| a as usize + 1);
    expect("positions", positions, DType::I32, &[axes, x.dims[0]])?;
    if let Some(table) = table {
        let positions = table.dims.first().copied().unwrap_or(0);
        expect_float("the rotation table", table, &[positions, x.last() / 2, 2])?;
    }
    Ok(())
}

pub fn vjp<'g>(b: &'g Builder, op: &Op, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let mut back = op.clone();
    let Op::Rope { inverse, .. } = &mut back else { unreachable!("called for rope") };
    *inverse = !*inverse;
    let mut grads = vec![None; at.ins.len()];
    grads[0] = at.d[0].map(|d| {
        let ins: Vec<_> = [d].into_iter().chain(at.ins[1..].iter().copied()).collect();
        b.op(back, &ins)
    });
    grads
}

/// Computes the angles in f64, as the tables do: an f32 angle is wrong by 1e-4 at position 2000.
pub fn expand<'g>(b: &'g Builder, spec: &RopeSpec, inverse: bool, ins: &[Tensor<'g>]) -> Tensor<'g> {
    let (x, positions) = (ins[0], ins[1]);
    let ty = x.ty();
    let (t, h, half) = (ty.dims[0], ty.dims[1], ty.dims[2] / 2);
    let turns = spec.freq.turns(half).into_iter().zip(&spec.axis_of_freq);
    let column = |(turn, axis): (f64, &u8)| {
        positions.slice(0, *axis as usize, 1).reshape(&[t, 1]).cast(DType::F64).scale(turn)
    };
    let columns: Vec<Tensor<'g>> = turns.map(column).collect();
    let angle = b.concat(&columns, 1).reshape(&[t, 1, half]);
    let wide = ty.dtype.accumulator();
    let along = |f: E| {
        let value = match spec.freq.amplitude() {
            1.0 => angle.map(f),
            amplitude => angle.map(f).scale(amplitude),
        };
        value.cast(wide).broadcast(&[t, h, half])
    };
    let (cos, sin) = (along(E::Cos), along(E::Sin));
    let sin = if inverse { -sin } else { sin };
    let x = x.cast(wide);
    let turned = match spec.pairs {
        Pairs::Half => {
            let (lo, hi) = (x.slice(2, 0, half), x.slice(2, half, half));
            b.concat(&[lo * cos - hi * sin, hi * cos + lo * sin], 2)
        }
        Pairs::Interleaved => {
            let x = x.reshape(&[t, h, half, 2]);
            let flat = |i: usize| x.slice(3, i, 1).reshape(&[t, h, half]);
            let pair = |y: Tensor<'g>| y.reshape(&[t, h, half, 1]);
            let (lo, hi) = (flat(0), flat(1));
            b.concat(&[pair(lo * cos - hi * sin), pair(hi * cos + lo * sin)], 3).reshape(&[t, h, 2 * half])
        }
    };
    turned.cast(ty.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_take_their_frequencies() {
        let grid = RopeSpec::grid(16, 1e4, Pairs::Half);
        assert_eq!((grid.axis_of_freq, grid.freq.runs), (vec![0, 0, 0, 0, 1, 1, 1, 1], 2));
        let spec =
            |size, sections| RopeSpec::interleaved(size, 5e6.into(), sections, Pairs::Half).axis_of_freq;
        assert_eq!(spec(16, [4, 2, 2]), [0, 1, 2, 0, 1, 2, 0, 0]);
        let wide = spec(128, [24, 20, 20]);
        for axis in 0..3 {
            assert_eq!(wide.iter().filter(|a| **a == axis).count(), [24, 20, 20][axis as usize]);
        }
        assert_eq!((wide[57..].to_vec(), wide.len()), (vec![0, 1, 2, 0, 0, 0, 0], 64));
    }
}
