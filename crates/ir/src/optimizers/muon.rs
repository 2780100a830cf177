//! Muon: momentum whose matrices are orthogonalised approximately before weights move by them.
//!
//! g' = scale g; m' = m + (1 - mu)(g' - m); u = m', or with Nesterov's momentum u = m' + (1 - mu)(g' - m'). For every matrix of
//! u, with X = u / max(|u|, eps) in the Frobenius norm, each Newton-Schulz step replaces X by (a + b A + c A A) X with A = X
//! X^T, or by X (a + b A + c A A) with A = X^T X where rows are more than columns. This brings every singular value near 1.
//! Then p' = p - lr (k X + decay p), where k adjusts the rate to the shape. Where `is_finite` is 0 nothing changes.
//!
//! Products multiply in the precision of the run and sum in f32: bf16 where layers do. Matrices of one shape are one stack, so
//! that a step of Newton-Schulz is three products and one elementwise launch per shape. A stack is read by views where layers
//! lie at equal distances, and otherwise matrix by matrix. Momentum in bf16 is rounded to nearest: at 0.95 an increment is
//! seldom below half a step.

use super::{Group, Matrix, Name, Optimizer, Run, State, Step, UpdateInputs, runs};
use crate::builder::{Builder, Tensor};
use crate::ops::elementwise::Elementwise as E;
use crate::ops::product::{Compute, plain};
use crate::ops::reduce::Fold;
use crate::passes::options::{Adjust, Moments, Muon, Options, Precision};
use crate::types::DType;

pub(super) const ROW: Optimizer = Optimizer {
    name: Name::Muon,
    moments: &[Moments::F32, Moments::BF16],
    state: |update| {
        let dtype = if update.moments == Moments::BF16 { DType::BF16 } else { DType::F32 };
        vec![State { name: "momentum", of_region: "momenta", dtype, block: None }]
    },
    update,
};

fn update<'g>(o: &Options, group: &Group, piece: &UpdateInputs<'g>, step: &Step<'g>) -> Vec<Tensor<'g>> {
    let muon = &o.update.muon;
    let dims = piece.weights.dims();
    let elements = piece.weights.ty().elements();
    let [p, g, kept] = [piece.weights, piece.gradients, piece.state[0]].map(|x| x.reshape(&[elements]));
    let everywhere = |x: Tensor<'g>| x.broadcast(&[elements]);
    // These come first, so that everything after Newton-Schulz can fuse into one launch.
    let is_finite = everywhere(step.is_finite);
    let lr = everywhere(step.lr.scale(group.rule.lr_scale as f64));
    let g = g * everywhere(step.scale);
    let m = kept.cast(DType::F32);
    let rest = 1.0 - muon.momentum;
    let moved = m + (g - m).scale(rest);
    let u = if muon.nesterov { moved - (moved - g).scale(rest) } else { moved };
    let direction = orthogonal(u, piece, muon, Products::of(o)).cast(DType::F32);
    let new = p - lr * (direction + p.scale(group.rule.weight_decay as f64));
    let momentum = is_finite.select(moved, m).cast(kept.dtype());
    vec![is_finite.select(new, p).reshape(&dims), momentum.reshape(&dims)]
}

/// The coefficients of the polynomial: steep at 0, so that five steps are enough. Singular values end within 0.3 of 1.
const POLYNOMIAL: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// The lower bound on the norm that a matrix is divided by.
const LEAST_NORM: f64 = 1e-7;

/// The precision of matrix products.
#[derive(Clone, Copy)]
struct Products {
    dtype: DType,
    compute: Compute,
}

impl Products {
    fn of(o: &Options) -> Products {
        Products {
            dtype: if o.precision.is_narrow() { DType::BF16 } else { DType::F32 },
            compute: if o.precision == Precision::Tf32 { Compute::Tf32 } else { Compute::Full },
        }
    }

    /// `a b`; the flags say that an operand is stored transposed.
    fn product<'g>(self, a: Tensor<'g>, b: Tensor<'g>, [ta, tb]: [bool; 2], out: DType) -> Tensor<'g> {
        a.b.op(plain(ta, tb, out, self.compute), &[a, b])
    }
}

/// The factor on the learning rate of a matrix.
fn adjusted(adjust: Adjust, rows: usize, columns: usize) -> f64 {
    match adjust {
        Adjust::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
        Adjust::MatchRmsAdamW => 0.2 * (rows.max(columns) as f64).sqrt(),
    }
}

/// All matrices of one shape, [N, rows, columns].
struct Stack<'g> {
    rows: usize,
    columns: usize,
    /// For each run and matrix of its layer, that matrix of all layers.
    parts: Vec<Tensor<'g>>,
    count: usize,
}

/// Location of a run's matrices in the stacks: the index of the stack, and of the run's first matrix in it.
struct MatrixLocation {
    stack: usize,
    first: usize,
}

/// Flat `u` with every matrix orthogonalised approximately and scaled by its rate factor; zeros between matrices.
fn orthogonal<'g>(u: Tensor<'g>, piece: &UpdateInputs<'g>, muon: &Muon, products: Products) -> Tensor<'g> {
    let b = u.b;
    let elements = u.dims()[0];
    let u = u.cast(products.dtype);
    let runs = runs(piece.layers, elements);
    let (mut stacks, mut places): (Vec<Stack<'g>>, Vec<Vec<MatrixLocation>>) = (vec![], vec![]);
    for run in &runs {
        let of_run = u.slice(0, run.start, run.count * run.distance).reshape(&[run.count, run.distance]);
        let place = |own: &Matrix| {
            let Matrix { start, rows, columns } = *own;
            let at = of_run.slice(1, start - run.start, rows * columns);
            let is_own = |stack: &Stack<'_>| (stack.rows, stack.columns) == (rows, columns);
            let number = stacks.iter().position(is_own).unwrap_or_else(|| {
                stacks.push(Stack { rows, columns, parts: vec![], count: 0 });
                stacks.len() - 1
            });
            let stack = &mut stacks[number];
            let first = stack.count;
            stack.parts.push(normalized(at).reshape(&[run.count, rows, columns]));
            stack.count += run.count;
            MatrixLocation { stack: number, first }
        };
        places.push(run.matrices.iter().map(place).collect());
    }
    let done = |stack: &Stack<'g>| {
        let factor = adjusted(muon.adjust, stack.rows, stack.columns);
        newton_schulz(joined(b, &stack.parts, 0), muon.steps, factor, products)
    };
    let done: Vec<Tensor<'g>> = stacks.iter().map(done).collect();
    let of_run = |(run, places): (&Run<'_>, &Vec<MatrixLocation>)| {
        let (mut parts, mut end) = (vec![], 0);
        let zeros = |extent: usize| b.fill(0.0, products.dtype, &[run.count, extent]);
        for (own, place) in run.matrices.iter().zip(places) {
            let (start, extent) = (own.start - run.start, own.rows * own.columns);
            if start > end {
                parts.push(zeros(start - end));
            }
            let own = done[place.stack].slice(0, place.first, run.count);
            parts.push(own.reshape(&[run.count, extent]));
            end = start + extent;
        }
        if run.distance > end {
            parts.push(zeros(run.distance - end));
        }
        joined(b, &parts, 1).reshape(&[run.count * run.distance])
    };
    joined(b, &runs.iter().zip(&places).map(of_run).collect::<Vec<_>>(), 0)
}

fn joined<'g>(b: &'g Builder, parts: &[Tensor<'g>], axis: usize) -> Tensor<'g> {
    if let [part] = parts { *part } else { b.concat(parts, axis) }
}

/// Rows divided by their norms.
fn normalized(rows: Tensor<'_>) -> Tensor<'_> {
    let norms = rows.reduce(1, Fold::SumSquares).sqrt();
    let norms = norms.zip(E::Max, norms.b.fill(LEAST_NORM, DType::F32, &norms.dims()));
    rows.cast(DType::F32).div(norms).cast(rows.dtype())
}

/// Applies the polynomial `steps` times to each matrix of a stack; the last time scaled by `factor`, before rounding.
fn newton_schulz(stack: Tensor<'_>, steps: usize, factor: f64, products: Products) -> Tensor<'_> {
    let [count, rows, columns] = stack.dims()[..] else { unreachable!("a stack of matrices") };
    let is_tall = rows > columns;
    let inner = rows.min(columns);
    let [a, b, c] = POLYNOMIAL;
    let place = |axis: usize| stack.b.iota(DType::F32, &[1, inner, inner], axis);
    let identity = place(1).equal(place(2)).scale(a).broadcast(&[count, inner, inner]);
    let mut x = stack;
    for step in 1..=steps {
        let gram = products.product(x, x, [is_tall, !is_tall], products.dtype);
        let square = products.product(gram, gram, [false, false], DType::F32);
        let sum = gram.cast(DType::F32).scale(b) + square.scale(c) + identity;
        let sum = if step == steps { sum.scale(factor) } else { sum }.cast(products.dtype);
        let [left, right] = if is_tall { [x, sum] } else { [sum, x] };
        x = products.product(left, right, [false, false], products.dtype);
    }
    x
}
