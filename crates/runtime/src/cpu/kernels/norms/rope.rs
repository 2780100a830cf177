//! Rotary positions: computes each token's cosines and sines once, then rotates the pairs of every head.
//!
//! With a table they are looked up; positions outside it, and all without a table, are computed in f64. Moves x once in, once
//! out.

use std::borrow::Cow;

use flatout_ir::ops::frequency::Frequencies;
use flatout_ir::ops::rope::Pairs;
use flatout_ir::target::Layout;
use flatout_ir::{Launch, Op, OpKind};

use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::math::vectorised;
use crate::cpu::tensor::{Rows, Tensor};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[Kernel { row: kernel_row("rope", OpKind::Rope, FLOATS, Layout::Any), run }];

/// The rotation of a token: positions, frequencies and, optionally, the table.
pub(crate) struct Rotation<'a> {
    /// [axes, T], row-major.
    positions: Vec<i32>,
    tokens: usize,
    axis_of_freq: &'a [u8],
    /// For text, where a single table row rotates the whole token.
    has_one_axis: bool,
    frequencies: Vec<f64>,
    amplitude: f64,
    /// Cosine and sine by (position, frequency).
    table: Option<Cow<'a, [f32]>>,
}

impl<'a> Rotation<'a> {
    /// # Safety
    /// The tensors' contract; positions and table overlap no output.
    pub(crate) unsafe fn new(
        freq: Frequencies,
        axis_of_freq: &'a [u8],
        positions: Tensor<'a>,
        table: Option<Tensor<'a>>,
    ) -> Self {
        let half = axis_of_freq.len();
        let (frequencies, amplitude) = (freq.turns(half), freq.amplitude());
        let tokens = positions.dims[1];
        // SAFETY: guaranteed by the caller.
        let (positions, table) = unsafe { (positions.i32s(), table.map(|table| whole(&table))) };
        let has_one_axis = axis_of_freq.iter().all(|a| *a == 0);
        Rotation { positions, tokens, axis_of_freq, has_one_axis, frequencies, amplitude, table }
    }

    /// Computes the cosines and sines of a token.
    pub(crate) fn of(&self, token: usize, cos: &mut [f32], sin: &mut [f32]) {
        let half = self.axis_of_freq.len();
        let table = self.table.as_deref().unwrap_or(&[]);
        if self.has_one_axis {
            let at = self.positions[token] as u32 as usize * 2 * half;
            if let (0.., Some(row)) = (self.positions[token], table.get(at..at + 2 * half)) {
                for ((cos, sin), pair) in cos.iter_mut().zip(sin).zip(row.as_chunks::<2>().0) {
                    (*cos, *sin) = (pair[0], pair[1]);
                }
                return;
            }
        }
        for f in 0..half {
            let position = self.positions[self.axis_of_freq[f] as usize * self.tokens + token];
            let at = (position as u32 as usize * half + f) * 2;
            if let (0.., Some(pair)) = (position, table.get(at..at + 2)) {
                (cos[f], sin[f]) = (pair[0], pair[1]);
            } else {
                let (s, c) = (position as f64 * self.frequencies[f]).sin_cos();
                (cos[f], sin[f]) = ((self.amplitude * c) as f32, (self.amplitude * s) as f32);
            }
        }
    }
}

/// All elements as f32: in place if they are dense f32, as a table normally is; otherwise converted at every launch.
///
/// # Safety
/// The tensors' contract.
unsafe fn whole<'a>(table: &Tensor<'a>) -> Cow<'a, [f32]> {
    // SAFETY: the caller guarantees the contract.
    unsafe {
        if let Some(all) = table.f32s() {
            return Cow::Borrowed(all);
        }
        let rows = table.rows();
        let mut all = vec![0.0; table.elements()];
        for (row, to) in all.chunks_exact_mut(rows.width.max(1)).enumerate() {
            rows.load(row, 0, to);
        }
        Cow::Owned(all)
    }
}

/// Rotates every head of a token; `sign` -1 rotates back.
#[inline(always)]
pub(crate) fn rotate_heads(pairs: Pairs, sign: f32, cos: &[f32], sin: &[f32], token: &mut [f32]) {
    let half = cos.len();
    let sin = &sin[..half];
    for head in token.chunks_exact_mut(2 * half) {
        match pairs {
            Pairs::Half => {
                let (low, high) = head.split_at_mut(half);
                for i in 0..half {
                    let (c, s) = (cos[i], sign * sin[i]);
                    (low[i], high[i]) = (low[i] * c - high[i] * s, high[i] * c + low[i] * s);
                }
            }
            Pairs::Interleaved => {
                for (i, pair) in head.chunks_exact_mut(2).enumerate() {
                    let (c, s) = (cos[i], sign * sin[i]);
                    (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[1] * c + pair[0] * s);
                }
            }
        }
    }
}

vectorised! {
    pub(crate) fn rotate(pairs: Pairs, sign: f32, cos: &[f32], sin: &[f32], token: &mut [f32]) {
        rotate_heads(pairs, sign, cos, sin, token);
    }
}

/// A [T, H, K] tensor that is read and written one token at a time.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    rows: Rows<'a>,
    heads: usize,
    /// Set if a token's heads are adjacent, so that the token is one run.
    whole: Option<(Tensor<'a>, usize)>,
}

impl<'a> Tokens<'a> {
    pub(crate) fn new(x: Tensor<'a>) -> Self {
        let (heads, size) = (x.dims[1], x.dims[2]);
        let is_whole = (size == 1 || x.strides[2] == 1) && (heads == 1 || x.strides[1] == size);
        Tokens { rows: x.rows(), heads, whole: is_whole.then_some((x, x.strides[0])) }
    }

    /// Elements of a token.
    pub(crate) fn width(&self) -> usize {
        self.heads * self.rows.width
    }

    /// # Safety
    /// The tensors' contract.
    pub(crate) unsafe fn load(&self, token: usize, to: &mut [f32]) {
        // SAFETY: the token's elements.
        unsafe {
            if let Some((x, pitch)) = &self.whole {
                return crate::cpu::tensor::load(x.dtype, x.at(token * pitch), 1, to);
            }
            for (head, to) in to.chunks_exact_mut(self.rows.width).enumerate() {
                self.rows.load(token * self.heads + head, 0, to);
            }
        }
    }

    /// # Safety
    /// The tensors' contract.
    pub(crate) unsafe fn store(&self, token: usize, values: &[f32]) {
        // SAFETY: the token's elements.
        unsafe {
            if let Some((x, pitch)) = &self.whole {
                return crate::cpu::tensor::store(x.dtype, x.at(token * pitch), 1, values);
            }
            for (head, values) in values.chunks_exact(self.rows.width).enumerate() {
                self.rows.store(token * self.heads + head, 0, values);
            }
        }
    }
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::Rope { freq, ref axis_of_freq, pairs, inverse, table } = launch.op else {
        unreachable!("the row is for rope")
    };
    let Some(out) = cx.output(0) else { return Ok(()) };
    let (x, to) = (Tokens::new(cx.input(0)), Tokens::new(out));
    // SAFETY: only x may overlap the output.
    let rotation = unsafe { Rotation::new(freq, axis_of_freq, cx.input(1), table.then(|| cx.input(2))) };
    let (tokens, half) = (out.dims[0], axis_of_freq.len());
    let sign = if inverse { -1.0 } else { 1.0 };
    let per_task = (8192 / x.width().max(1)).max(1);
    cx.parallel(tokens.div_ceil(per_task), 8 * per_task * x.width(), |task| {
        let (mut token, mut cos, mut sin) = (vec![0.0; x.width()], vec![0.0; half], vec![0.0; half]);
        for t in chunk(task, per_task, tokens) {
            // SAFETY: a token belongs to one task and is read before it is written.
            unsafe {
                rotation.of(t, &mut cos, &mut sin);
                x.load(t, &mut token);
                rotate(pairs, sign, &cos, &sin, &mut token);
                to.store(t, &token);
            }
        }
    });
    Ok(())
}
