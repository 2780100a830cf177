//! The cases, one line each: every operation that has a gradient, every variant of its attributes, at odd sizes.
//!
//! T tokens, H heads, HK key heads, K head size, D width. Arguments are built to lie in the function's domain: `square + 0.5`
//! is positive, `Trial::x` is standard normal.

use super::{Case, Trial};
use crate::builder::{HeadLosses, Tensor};
use crate::ops::Op;
use crate::ops::attention::{self, Attend, Mask, Masking, Segments};
use crate::ops::cap::Cap;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::epilogue::{self, Epilogue};
use crate::ops::frequency::{Frequencies, Scaling};
use crate::ops::gated::Act;
use crate::ops::linear_attention::{Keys, LinearAttend, LinearMask, Rotary};
use crate::ops::norm::NormSpec;
use crate::ops::norm::NormWeight::{self, None as NoWeight, OnePlus, Plain};
use crate::ops::product::{self, Compute};
use crate::ops::reduce::Fold;
use crate::ops::rope::Pairs::{self, Half, Interleaved};
use crate::types::DType;

pub fn all() -> impl Iterator<Item = &'static Case> {
    [
        ELEMENTWISE,
        MOVEMENT,
        PRODUCT,
        NORM,
        ROPE,
        GATED,
        INDEX,
        ATTENTION,
        MERGE,
        LINEAR_ATTENTION,
        HEAD_LOSS,
        GRAPH,
    ]
    .into_iter()
    .flatten()
}

macro_rules! cases {
    ($($name:literal => $build:expr;)*) => { &[$(Case { name: $name, build: $build }),*] };
}

pub const ELEMENTWISE: &[Case] = cases! {
    "neg" => |t| map(t, E::Neg);
    "exp" => |t| map(t, E::Exp);
    "log" => |t| vec![positive(t).log()];
    "sqrt" => |t| vec![positive(t).sqrt()];
    "rsqrt" => |t| vec![positive(t).rsqrt()];
    "recip" => |t| vec![positive(t).recip()];
    "square" => |t| map(t, E::Square);
    "sin" => |t| map(t, E::Sin);
    "cos" => |t| map(t, E::Cos);
    "tanh" => |t| map(t, E::Tanh);
    "relu" => |t| map(t, E::Relu);
    "step" => |t| { let x = t.x(&[3, 5]); vec![x * x.map(E::Step)] };
    "silu" => |t| map(t, E::Silu);
    "gelu" => |t| map(t, E::Gelu);
    "gelu, exact" => |t| map(t, E::GeluExact);
    "finite" => |t| { let x = t.x(&[3, 5]); vec![x * x.map(E::Finite)] };
    "stop_gradient" => |t| { let x = t.x(&[3, 5]); vec![x * x.map(E::Step).map(E::StopGradient)] };
    "fp8_scale" => |t| { let x = t.x(&[3, 5]); vec![x * x.map(E::Fp8Scale(DType::E4M3)) * x.map(E::Fp8Scale(DType::E5M2))] };
    "cast" => |t| vec![t.x(&[3, 5]).cast(DType::BF16).square().cast(DType::F32)];
    "cast to integers and back" => |t| { let x = t.x(&[3, 5]); vec![x.cast(DType::I32).cast(DType::F32) * x] };
    "scale" => |t| map(t, E::Scale(-0.3));
    "offset" => |t| vec![t.x(&[3, 5]).offset(0.7).square()];
    "add" => |t| zip(t, E::Add);
    "sub" => |t| zip(t, E::Sub);
    "mul" => |t| zip(t, E::Mul);
    "div" => |t| { let y = positive(t); vec![t.x(&[3, 5]).div(y)] };
    "max" => |t| zip(t, E::Max);
    "min" => |t| zip(t, E::Min);
    "less" => |t| compare(t, E::Less);
    "less_equal" => |t| compare(t, E::LessEqual);
    "equal" => |t| compare(t, E::Equal);
    "select" => |t| { let x = t.x(&[3, 5]); vec![x.map(E::Step).select(t.x(&[3, 5]).square(), t.x(&[3, 5]).exp())] };
    "of both repeated" => |t| vec![t.x(&[3, 1]) * t.x(&[1, 5])];
};

pub const MOVEMENT: &[Case] = cases! {
    "reshape" => |t| vec![t.x(&[3, 5]).reshape(&[5, 1, 3]).square()];
    "transpose" => |t| vec![t.x(&[3, 5, 7]).transpose(&[2, 0, 1]).square()];
    "slice" => |t| vec![t.x(&[3, 7, 2]).slice(1, 2, 3).square()];
    "concat" => |t| vec![t.b.concat(&[t.x(&[3, 2, 3]), t.x(&[3, 5, 3]), t.x(&[3, 1, 3])], 1).square()];
    "pad" => |t| vec![t.b.op(Op::Pad { axis: 1, before: 2, after: 1 }, &[t.x(&[3, 5])]).offset(0.5).square()];
    "broadcast" => |t| vec![t.x(&[1, 5, 1]).broadcast(&[3, 5, 7]).square()];
    "sum" => |t| vec![t.x(&[3, 5, 7]).sum(1).square()];
    "mean" => |t| vec![t.x(&[3, 5, 7]).mean(2).square()];
    "max of an axis" => |t| vec![t.x(&[3, 5, 7]).reduce(0, Fold::Max).square()];
    "sum of squares" => |t| vec![t.x(&[3, 5, 7]).reduce(1, Fold::SumSquares).square()];
    "slices that tile" => |t| { let x = t.x(&[3, 7]); vec![x.slice(1, 0, 2).square(), x.slice(1, 2, 5).exp()] };
    "slices that overlap" => |t| { let x = t.x(&[3, 7]); vec![x.slice(1, 0, 4).square(), x.slice(1, 2, 3).exp()] };
    "slices that leave a gap" => |t| { let x = t.x(&[3, 7]); vec![x.slice(1, 0, 2).square(), x.slice(1, 3, 4).exp()] };
    "slices of two axes" => |t| { let x = t.x(&[3, 3]); vec![x.slice(0, 0, 2).square(), x.slice(1, 2, 1).exp()] };
};

pub const PRODUCT: &[Case] = cases! {
    "product" => |t| product(t, &[], false, false, false);
    "product, b transposed" => |t| product(t, &[], false, true, false);
    "product, a transposed" => |t| product(t, &[], true, false, false);
    "product, both transposed" => |t| product(t, &[], true, true, false);
    "product, base" => |t| product(t, &[], false, false, true);
    "product, b transposed, base" => |t| product(t, &[], false, true, true);
    "product, a transposed, base" => |t| product(t, &[], true, false, true);
    "product, both transposed, base" => |t| product(t, &[], true, true, true);
    "products" => |t| product(t, &[3, 2], false, false, false);
    "products, b transposed" => |t| product(t, &[3], false, true, false);
    "products, a transposed" => |t| product(t, &[3], true, false, false);
    "products, both transposed" => |t| product(t, &[3], true, true, false);
    "products, base" => |t| product(t, &[3], false, false, true);
    "products, b transposed, base" => |t| product(t, &[3], false, true, true);
    "products, a transposed, base" => |t| product(t, &[3], true, false, true);
    "products, both transposed, base" => |t| product(t, &[3, 2], true, true, true);
    "product, bias" => |t| with_epilogue(t, Epilogue::Bias);
    "product, relu" => |t| with_epilogue(t, Epilogue::Relu);
    "product, gelu" => |t| with_epilogue(t, Epilogue::Gelu);
    "product, bias and gelu" => |t| with_epilogue(t, Epilogue::BiasGelu);
    "product of a tensor with itself" => |t| { let x = t.x(&[3, 5]); vec![x.product(x, false, true)] };
};

pub const NORM: &[Case] = cases! {
    "rms_norm" => |t| norm(t, Plain, false);
    "rms_norm, 1 + w" => |t| norm(t, OnePlus, false);
    "rms_norm, no weight" => |t| norm(t, NoWeight, false);
    "rms_norm, residual" => |t| norm(t, Plain, true);
    "rms_norm, 1 + w, residual" => |t| norm(t, OnePlus, true);
    "rms_norm, no weight, residual" => |t| norm(t, NoWeight, true);
    "rms_norm, only h used" => |t| vec![norm(t, Plain, true)[1].square()];
    "rms_norm, only y used" => |t| vec![norm(t, Plain, true)[0].square()];
    "rms_norm, x added to itself" => |t| {
        let x = t.x(&[3, 5]);
        t.b.ops(NormSpec::rms(1e-2, NoWeight).op(true), &[x, x])
    };
    "rms_norm, bias" => |t| any_norm(t, NormSpec { bias: true, ..NormSpec::rms(1e-2, Plain) }, false);
    "layer norm" => |t| layer_norm(t, Plain, false, false);
    "layer norm, bias" => |t| layer_norm(t, Plain, true, false);
    "layer norm, bias, residual" => |t| layer_norm(t, Plain, true, true);
    "layer norm, bias, residual, only h used" => |t| vec![layer_norm(t, Plain, true, true)[1].square()];
    "layer norm, bias, residual, only y used" => |t| vec![layer_norm(t, Plain, true, true)[0].square()];
    "layer norm, no weight" => |t| layer_norm(t, NoWeight, false, true);
    "layer norm, no weight but a bias" => |t| layer_norm(t, NoWeight, true, true);
    "layer norm, 1 + w, bias" => |t| layer_norm(t, OnePlus, true, false);
    "rms_norm of a weight by itself" => |t| { let x = t.x(&[5]); vec![x.rms_norm(1e-2, Plain, Some(x))] };
};

const LINEAR: Frequencies = Frequencies { theta: 100.0, scaling: Scaling::Linear { factor: 4.0 }, runs: 1 };
const YARN: Frequencies = Frequencies {
    theta: 100.0,
    scaling: Scaling::Yarn { factor: 4.0, fast: 4.0, slow: 0.5, original: 20.0, amplitude: 1.3 },
    runs: 1,
};
const GRID: Frequencies = Frequencies { theta: 100.0, scaling: Scaling::None, runs: 2 };

pub const ROPE: &[Case] = cases! {
    "rope" => |t| rope(t, &[0, 0, 0], Half, false);
    "rope, inverse" => |t| rope(t, &[0, 0, 0], Half, true);
    "rope, interleaved" => |t| rope(t, &[0, 0, 0], Interleaved, false);
    "rope, interleaved, inverse" => |t| rope(t, &[0, 0, 0], Interleaved, true);
    "rope, three axes" => |t| rope(t, &[2, 0, 1], Half, false);
    "rope, three axes, inverse" => |t| rope(t, &[0, 1, 2], Half, true);
    "rope, three axes, interleaved" => |t| rope(t, &[0, 2, 2], Interleaved, false);
    "rope, three axes, interleaved, inverse" => |t| rope(t, &[2, 1, 0], Interleaved, true);
    "rope, linear scaling" => |t| stretched_rope(t, LINEAR, &[0, 0, 0], Half, false);
    "rope, anew for every axis" => |t| stretched_rope(t, GRID, &[0, 0, 1, 1], Half, false);
    "rope, anew for every axis, inverse" => |t| stretched_rope(t, GRID, &[0, 0, 1, 1], Half, true);
    "rope, yarn" => |t| stretched_rope(t, YARN, &[0, 0, 0], Half, false);
    "rope, yarn, inverse" => |t| stretched_rope(t, YARN, &[0, 0, 0], Interleaved, true);
    "qk_norm_rope" => |t| qk_norm_rope(t, Plain, &[0, 0, 0], Half);
    "qk_norm_rope, interleaved" => |t| qk_norm_rope(t, Plain, &[0, 0, 0], Interleaved);
    "qk_norm_rope, 1 + w" => |t| qk_norm_rope(t, OnePlus, &[0, 0, 0], Half);
    "qk_norm_rope, no weight" => |t| qk_norm_rope(t, NoWeight, &[0, 0, 0], Interleaved);
    "qk_norm_rope, three axes" => |t| qk_norm_rope(t, Plain, &[0, 2, 1], Half);
    "qk_norm_rope, two weights" => |t| qk_norm_rope_of(t, Plain, 2, &[0, 0, 0], Half);
    "qk_norm_rope, two 1 + w" => |t| qk_norm_rope_of(t, OnePlus, 1, &[0, 0, 0], Interleaved);
};

pub const GATED: &[Case] = cases! {
    "gated silu" => |t| gated(t, Act::Silu);
    "gated gelu" => |t| gated(t, Act::Gelu);
    "gated gelu, exact" => |t| gated(t, Act::GeluExact);
    "gated relu" => |t| gated(t, Act::Relu);
    "gated and dropped" => |t| gated_dropout(t, Act::Silu);
    "gated by itself" => |t| { let x = t.x(&[3, 5]); vec![t.b.op(Op::Gated { act: Act::Silu, p: 0.0 }, &[x, x])] };
};

pub const INDEX: &[Case] = cases! {
    "gather" => |t| vec![t.x(&[5, 3]).gather(t.index(&[7], &[4, 0, -1, 4, 2, 4, -1])).offset(0.5).square()];
    "gather of matrices" => |t| vec![t.x(&[3, 2, 3]).gather(t.index(&[5], &[1, -1, 1, 0, 1])).square()];
    "scatter_add" => |t| scatter_add(t, &[5, 3], &[2, 0, -1, 2, 6], false);
    "scatter_add, base" => |t| scatter_add(t, &[5, 3], &[2, 0, -1, 2, 6], true);
    "scatter_add of matrices" => |t| scatter_add(t, &[3, 3, 2], &[1, 1, -1], true);
    "dropout" => |t| vec![dropout(t, t.x(&[5, 7]).square(), 0.4)];
    "dropout of matrices" => |t| vec![dropout(t, t.x(&[5, 3, 3]).square(), 0.1).exp()];
};

const UNEVEN: Cut = Cut::Ragged { rows: 9, segments: &[[0, 3], [5, 4], [0, 0]] };

pub const ATTENTION: &[Case] = cases! {
    "attention, full" => |t| attention(t, Mask::Full, 3, 3, even(2, 3), even(2, 3));
    "attention, causal" => |t| attention(t, Mask::Causal, 3, 3, even(2, 5), even(2, 5));
    "attention, window" => |t| attention(t, Mask::Window { back: 2, ahead: 1 }, 1, 1, even(1, 7), even(1, 7));
    "attention, two intervals" => |t| attention(t, Mask::TwoIntervals, 3, 3, even(1, 7), even(1, 7));
    "attention, ragged, full" => |t| attention(t, Mask::Full, 1, 1, UNEVEN, UNEVEN);
    "attention, ragged, causal" => |t| attention(t, Mask::Causal, 1, 1, UNEVEN, UNEVEN);
    "attention, ragged, window" => |t| attention(t, Mask::Window { back: 1, ahead: 1 }, 1, 1, UNEVEN, UNEVEN);
    "attention, ragged, two intervals" => |t| attention(t, Mask::TwoIntervals, 1, 1, UNEVEN, UNEVEN);
    "attention, grouped heads, full" => |t| attention(t, Mask::Full, 6, 2, even(1, 3), even(1, 3));
    "attention, grouped heads, causal" => |t| attention(t, Mask::Causal, 3, 1, even(2, 3), even(2, 3));
    "attention, grouped heads, ragged, window" => |t| attention(t, Mask::Window { back: 2, ahead: 0 }, 3, 1, UNEVEN, UNEVEN);
    "attention, few queries, full" => |t| attention(t, Mask::Full, 3, 1, even(2, 1), even(2, 5));
    "attention, few queries, causal" => |t| attention(t, Mask::Causal, 3, 1, even(1, 3), even(1, 7));
    "attention, few queries, window" => |t| attention(t, Mask::Window { back: 2, ahead: 1 }, 1, 1, even(1, 3), even(1, 7));
    "attention, few queries, two intervals" => |t| attention(t, Mask::TwoIntervals, 1, 1, even(2, 3), even(2, 5));
    "attention, queries without keys, causal" => |t| attention(t, Mask::Causal, 1, 1, even(1, 7), even(1, 3));
    "attention, queries without keys, window" => |t| attention(t, Mask::Window { back: 0, ahead: 0 }, 1, 1, even(1, 5), even(1, 3));
    "attention, segments without keys" => |t| {
        attention(t, Mask::Full, 1, 1, UNEVEN, Cut::Ragged { rows: 3, segments: &[[0, 3], [3, 0], [0, 0]] })
    };
    "attention, even queries over ragged keys" => |t| {
        attention(t, Mask::Causal, 3, 1, even(3, 1), Cut::Ragged { rows: 11, segments: &[[0, 2], [3, 3], [7, 1]] })
    };
    "attention, ragged queries over even keys" => |t| {
        attention(t, Mask::Causal, 1, 1, Cut::Ragged { rows: 5, segments: &[[0, 3], [3, 1]] }, even(2, 3))
    };
    "attention of one tensor to itself" => |t| {
        let (x, of) = (t.x(&[5, 1, 3]), Segments::Uniform { len: 5 });
        vec![x.attention(x, x, &Attend { scale: 0.7, cap: Cap::NONE, mask: Mask::Causal, q: of, k: of }, &Masking::default())]
    };
    "attention, capped, grouped heads, window" => |t| {
        let cut = Cut::Ragged { rows: 8, segments: &[[0, 3], [3, 5]] };
        let (o, lse) = capped_attention(t, Cap(Some(0.6)), Mask::Window { back: 2, ahead: 0 }, [4, 2], [cut, cut]);
        vec![o, lse]
    };
    "attention and lse, full" => |t| attention_and_lse(t, Mask::Full, 3, 3, even(2, 3), even(2, 3));
    "attention and lse, grouped heads, causal" => |t| attention_and_lse(t, Mask::Causal, 3, 1, even(1, 3), even(1, 7));
    "attention and lse, two intervals" => |t| attention_and_lse(t, Mask::TwoIntervals, 3, 3, even(1, 7), even(1, 7));
    "attention and lse, queries without keys" => |t| attention_and_lse(t, Mask::Causal, 1, 1, even(1, 7), even(1, 3));
    "attention and lse, ragged, window" => |t| {
        attention_and_lse(t, Mask::Window { back: 1, ahead: 1 }, 1, 1, UNEVEN, UNEVEN)
    };
    "attention, lse alone" => |t| attention_and_lse(t, Mask::Causal, 3, 1, even(2, 3), even(2, 5))[1..].to_vec();
};

/// Not an operation: attention over disjoint sets of keys, merged.
pub const MERGE: &[Case] = cases! {
    "attention, merged" => |t| {
        let (o, lse) = attention::merge(&[small_attention(t, 5), small_attention(t, 3)]);
        vec![o, lse]
    };
    "attention, merged of three, some without keys" => |t| {
        let part = |start| attention_of_rows(t, Mask::Full, 1, 1, even(3, 1), Cut::Ragged {
            rows: 4, segments: if start == 0 { &[[0, 4], [4, 0], [0, 0]] } else { &[[0, 1], [1, 0], [1, 3]] },
        });
        let (o, lse) = attention::merge(&[part(0), part(1), part(0)]);
        vec![o, lse.exp()]
    };
};

pub const LINEAR_ATTENTION: &[Case] = cases! {
    "linear attention, full" => |t| linear(t, LinearMask::Full, [3, 3, 3], even(2, 3), even(2, 3));
    "linear attention, causal" => |t| linear(t, LinearMask::Causal, [3, 3, 3], even(2, 5), even(2, 5));
    "linear attention, strict" => |t| linear(t, LinearMask::Strict, [3, 3, 3], even(2, 5), even(2, 5));
    "linear attention, ragged, full" => |t| linear(t, LinearMask::Full, [1, 1, 1], UNEVEN, UNEVEN);
    "linear attention, ragged, causal" => |t| linear(t, LinearMask::Causal, [1, 1, 1], UNEVEN, UNEVEN);
    "linear attention, ragged, strict" => |t| linear(t, LinearMask::Strict, [1, 1, 1], UNEVEN, UNEVEN);
    "linear attention, heads share values" => |t| linear(t, LinearMask::Full, [3, 3, 1], even(2, 3), even(2, 3));
    "linear attention, heads share keys" => |t| linear(t, LinearMask::Strict, [6, 2, 3], even(1, 3), even(1, 3));
    "linear attention, few queries, causal" => |t| linear(t, LinearMask::Causal, [3, 1, 1], even(1, 3), even(1, 7));
    "linear attention, few queries, strict" => |t| linear(t, LinearMask::Strict, [1, 1, 1], even(2, 1), even(2, 5));
    "linear attention, queries without keys" => |t| linear(t, LinearMask::Causal, [1, 1, 1], even(1, 7), even(1, 3));
    "linear attention, even queries over ragged keys" => |t| {
        let k = Cut::Ragged { rows: 11, segments: &[[0, 2], [3, 3], [7, 1]] };
        linear(t, LinearMask::Causal, [3, 1, 3], even(3, 1), k)
    };
    "linear attention, symmetric, full" => |t| symmetric(t, LinearMask::Full, [3, 1], even(2, 5));
    "linear attention, symmetric, causal" => |t| symmetric(t, LinearMask::Causal, [3, 3], even(2, 5));
    "linear attention, symmetric, strict" => |t| symmetric(t, LinearMask::Strict, [2, 1], even(2, 5));
    "linear attention, symmetric, ragged, full" => |t| symmetric(t, LinearMask::Full, [1, 1], UNEVEN);
    "linear attention, symmetric, ragged, strict" => |t| symmetric(t, LinearMask::Strict, [3, 1], UNEVEN);
    "linear attention, rotated, full" => |t| rotated(t, LinearMask::Full, [3, 1], even(2, 5));
    "linear attention, rotated, causal" => |t| rotated(t, LinearMask::Causal, [2, 2], even(2, 5));
    "linear attention, rotated, ragged, strict" => |t| rotated(t, LinearMask::Strict, [3, 1], UNEVEN);
    "linear attention of one tensor to itself" => |t| {
        let (x, q) = (t.x(&[5, 1, 3]), Segments::Uniform { len: 5 });
        let attend = LinearAttend { scale: 0.7, mask: LinearMask::Causal, q, k: Keys::Given(q), rotary: Rotary::None };
        vec![x.linear_attention(Some(x), x, &attend, &Masking::default())]
    };
};

pub const HEAD_LOSS: &[Case] = cases! {
    "head_loss, the sum" => |t| head_loss(t)[..1].to_vec();
    "head_loss, log-probabilities" => |t| head_loss(t)[1..].to_vec();
    "head_loss, the sum and log-probabilities" => |t| head_loss(t);
    "head_loss, capped" => |t| {
        let target = t.index(&[5], &[2, -1, 6, 0, 2]);
        let loss = t.x(&[5, 3]).capped_head_loss(t.x(&[7, 3]), target, t.x(&[5]), Cap(Some(0.8)));
        vec![loss.sum, loss.logp]
    };
    "head_loss through a tied embedding" => |t| {
        let w = t.x(&[7, 3]);
        let x = w.gather(t.index(&[5], &[3, 0, 6, 3, 1]));
        vec![x.head_loss(w, t.index(&[5], &[0, 6, -1, 3, 3]), t.x(&[5])).sum]
    };
};

pub const GRAPH: &[Case] = cases! {
    "a weight used three times" => |t| {
        let (x, w) = (t.x(&[3, 5]), t.x(&[5, 5]));
        vec![x.linear(w).activate(Act::Silu).linear(w).exp() * x.product(w, false, false)]
    };
    "constants" => |t| {
        let x = t.x(&[3, 5]);
        vec![(x + t.b.iota(DType::F32, &[3, 5], 1)) * t.b.fill(0.3, DType::F32, &[3, 5])]
    };
    "a parameter nothing depends on" => |t| { t.x(&[3, 5]); vec![t.x(&[5]).square()] };
    "an output that is a parameter" => |t| vec![t.x(&[5])];
    "one output twice" => |t| { let y = t.x(&[5]).exp(); vec![y, y] };
};

fn positive(t: &Trial) -> Tensor<'_> {
    t.x(&[3, 5]).square().offset(0.5)
}

fn map(t: &Trial, f: E) -> Vec<Tensor<'_>> {
    vec![t.x(&[3, 5]).map(f)]
}

fn zip(t: &Trial, f: E) -> Vec<Tensor<'_>> {
    vec![t.x(&[3, 5]).zip(f, t.x(&[3, 5]))]
}

/// A comparison has slope 0; as a factor it must neither block nor add to the gradient of the other factor.
fn compare(t: &Trial, f: E) -> Vec<Tensor<'_>> {
    let (x, y) = (t.x(&[3, 5]), t.x(&[3, 5]));
    vec![x.zip(f, y) * (x + y)]
}

/// M 3, K 5, N 7. All outputs of a product with an epilogue.
fn with_epilogue<'g>(t: &'g Trial, epilogue: Epilogue) -> Vec<Tensor<'g>> {
    let plain = product::plain(false, true, DType::F32, Compute::Full);
    let op = epilogue::with(&plain, epilogue).expect("a plain product takes any epilogue");
    let mut ins = vec![t.x(&[5, 7]), t.x(&[3, 7])];
    ins.extend(epilogue.takes_one().then(|| t.x(&[3])));
    t.b.ops(op, &ins)
}

fn product<'g>(t: &'g Trial, batch: &[usize], ta: bool, tb: bool, base: bool) -> Vec<Tensor<'g>> {
    let matrix = |rows: usize, columns: usize, transposed: bool| {
        let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
        t.x(&[batch, &[rows, columns]].concat())
    };
    let mut ins = vec![matrix(3, 5, ta), matrix(5, 7, tb)];
    ins.extend(base.then(|| matrix(3, 7, false)));
    vec![t.b.op(
        Op::Product { ta, tb, out: DType::F32, base, compute: Compute::Full, epilogue: Epilogue::None },
        &ins,
    )]
}

fn norm(t: &Trial, weight: NormWeight, residual: bool) -> Vec<Tensor<'_>> {
    any_norm(t, NormSpec::rms(1e-2, weight), residual)
}

fn layer_norm(t: &Trial, weight: NormWeight, bias: bool, residual: bool) -> Vec<Tensor<'_>> {
    any_norm(t, NormSpec { eps: 1e-2, center: true, weight, bias }, residual)
}

fn any_norm(t: &Trial, spec: NormSpec, residual: bool) -> Vec<Tensor<'_>> {
    let mut ins = vec![t.x(&[3, 5])];
    ins.extend(residual.then(|| t.x(&[3, 5])));
    ins.extend(spec.weight.is_some().then(|| t.x(&[5])));
    ins.extend(spec.bias.then(|| t.x(&[5])));
    t.b.ops(spec.op(residual), &ins)
}

/// T 5, K 6, and one row of positions per axis.
fn positions<'g>(t: &'g Trial, axis_of_freq: &[u8]) -> Tensor<'g> {
    let axes = *axis_of_freq.iter().max().expect("frequencies") as usize + 1;
    t.index(&[axes, 5], &[0, 1, 2, 900, 3, 7, 7, 0, 1, 5, 2, 31, 4, 4, 0][..axes * 5])
}

fn rope<'g>(t: &'g Trial, axis_of_freq: &[u8], pairs: Pairs, inverse: bool) -> Vec<Tensor<'g>> {
    stretched_rope(t, 100.0.into(), axis_of_freq, pairs, inverse)
}

fn stretched_rope<'g>(
    t: &'g Trial,
    freq: Frequencies,
    axis_of_freq: &[u8],
    pairs: Pairs,
    inverse: bool,
) -> Vec<Tensor<'g>> {
    let op = Op::Rope { freq, axis_of_freq: axis_of_freq.into(), pairs, inverse, table: false };
    vec![t.b.op(op, &[t.x(&[5, 3, 2 * axis_of_freq.len()]), positions(t, axis_of_freq)])]
}

fn qk_norm_rope<'g>(t: &'g Trial, weight: NormWeight, axis_of_freq: &[u8], pairs: Pairs) -> Vec<Tensor<'g>> {
    qk_norm_rope_of(t, weight, 0, axis_of_freq, pairs)
}

fn qk_norm_rope_of<'g>(
    t: &'g Trial,
    weight: NormWeight,
    first: usize,
    axis_of_freq: &[u8],
    pairs: Pairs,
) -> Vec<Tensor<'g>> {
    let mut ins = vec![t.x(&[5, 3, 6])];
    ins.extend(weight.is_some().then(|| t.x(&[if first > 0 { 12 } else { 6 }])));
    ins.push(positions(t, axis_of_freq));
    let axis_of_freq = axis_of_freq.into();
    vec![t.b.op(
        Op::QkNormRope { eps: 1e-2, weight, first, freq: 100.0.into(), axis_of_freq, pairs, table: false },
        &ins,
    )]
}

fn gated(t: &Trial, act: Act) -> Vec<Tensor<'_>> {
    vec![t.b.op(Op::Gated { act, p: 0.0 }, &[t.x(&[3, 5]), t.x(&[3, 5])])]
}

fn gated_dropout(t: &Trial, act: Act) -> Vec<Tensor<'_>> {
    let [rng, rows] = drawn(t);
    vec![t.b.op(Op::Gated { act, p: 0.4 }, &[t.x(&[5, 7]), t.x(&[5, 7]), rng, rows])]
}

fn scatter_add<'g>(t: &'g Trial, dims: &[usize], index: &[i32], base: bool) -> Vec<Tensor<'g>> {
    let mut ins = vec![t.x(dims), t.index(&[index.len()], index)];
    ins.extend(base.then(|| t.x(&[&[7], &dims[1..]].concat())));
    vec![t.b.op(Op::ScatterAdd { rows: 7, out: DType::F32, base }, &ins).offset(0.5).square()]
}

fn dropout<'g>(t: &'g Trial, x: Tensor<'g>, p: f32) -> Tensor<'g> {
    let [rng, rows] = drawn(t);
    x.dropout(p, rng, rows)
}

/// The inputs of dropout for five tokens: rng and rows.
fn drawn(t: &Trial) -> [Tensor<'_>; 2] {
    [t.index(&[3], &[11, -5, 3]), t.index(&[5, 2], &[0, 0, 0, 1, 4, 0, 4, 1, 4, 2])]
}

/// The division of a case's tokens into segments.
#[derive(Clone, Copy)]
enum Cut {
    Even {
        segments: usize,
        len: usize,
    },
    /// Start and length of each segment.
    Ragged {
        rows: usize,
        segments: &'static [[i32; 2]],
    },
}

fn even(segments: usize, len: usize) -> Cut {
    Cut::Even { segments, len }
}

impl Cut {
    fn rows(self) -> usize {
        match self {
            Cut::Even { segments, len } => segments * len,
            Cut::Ragged { rows, .. } => rows,
        }
    }

    fn segments<'g>(self, t: &'g Trial) -> (Segments, Option<(Tensor<'g>, Tensor<'g>)>) {
        match self {
            Cut::Even { len, .. } => (Segments::Uniform { len }, None),
            Cut::Ragged { segments, .. } => {
                let (max_segments, max_len) =
                    (segments.len(), segments.iter().map(|s| s[1]).max().unwrap_or(0));
                let column =
                    |i: usize| t.index(&[max_segments], &segments.iter().map(|s| s[i]).collect::<Vec<_>>());
                let bounds = (column(0), column(1));
                (Segments::Ragged { max_segments, max_len: max_len as usize }, Some(bounds))
            }
        }
    }
}

fn attention(t: &Trial, mask: Mask, h: usize, hk: usize, q: Cut, k: Cut) -> Vec<Tensor<'_>> {
    vec![attention_of_rows(t, mask, h, hk, q, k).0]
}

/// exp(lse) is 0 where lse is minus infinity, so that differences can be taken.
fn attention_and_lse(t: &Trial, mask: Mask, h: usize, hk: usize, q: Cut, k: Cut) -> Vec<Tensor<'_>> {
    let (o, lse) = attention_of_rows(t, mask, h, hk, q, k);
    vec![o, lse.exp()]
}

/// Two queries of three heads over `keys` keys.
fn small_attention(t: &Trial, keys: usize) -> (Tensor<'_>, Tensor<'_>) {
    attention_of_rows(t, Mask::Full, 3, 1, even(1, 2), even(1, keys))
}

/// o and lse for `h` query heads and `hk` key heads, K 3.
fn attention_of_rows(t: &Trial, mask: Mask, h: usize, hk: usize, q: Cut, k: Cut) -> (Tensor<'_>, Tensor<'_>) {
    capped_attention(t, Cap::NONE, mask, [h, hk], [q, k])
}

fn capped_attention(
    t: &Trial,
    cap: Cap,
    mask: Mask,
    [h, hk]: [usize; 2],
    [q, k]: [Cut; 2],
) -> (Tensor<'_>, Tensor<'_>) {
    let (tq, tk) = (q.rows(), k.rows());
    let (queries, keys, values) = (t.x(&[tq, h, 3]), t.x(&[tk, hk, 3]), t.x(&[tk, hk, 3]));
    let ((q, q_bounds), (k, k_bounds)) = (q.segments(t), k.segments(t));
    // Disjoint, overlapping, and (row 1) empty intervals.
    let interval = |r: usize| if r == 1 { [0; 4] } else { [r % 3, r % 3 + 2, r, r + 2] };
    let intervals: Vec<i32> = (0..tq).flat_map(interval).map(|i| i.min(tk) as i32).collect();
    let intervals = (mask == Mask::TwoIntervals).then(|| t.index(&[tq, 4], &intervals));
    let attend = Attend { scale: 0.7, cap, mask, q, k };
    queries.attention_and_lse(keys, values, &attend, &Masking { q: q_bounds, k: k_bounds, intervals })
}

/// N 3, D 5; heads of queries, keys and values.
fn linear(t: &Trial, mask: LinearMask, [h, hk, hv]: [usize; 3], q: Cut, k: Cut) -> Vec<Tensor<'_>> {
    let (tq, tk) = (q.rows(), k.rows());
    let (queries, keys, values) = (t.x(&[tq, h, 3]), t.x(&[tk, hk, 3]), t.x(&[tk, hv, 5]));
    let ((q, q_bounds), (k, k_bounds)) = (q.segments(t), k.segments(t));
    let attend = LinearAttend { scale: 0.7, mask, q, k: Keys::Given(k), rotary: Rotary::None };
    let masking = Masking { q: q_bounds, k: k_bounds, intervals: None };
    vec![queries.linear_attention(Some(keys), values, &attend, &masking)]
}

fn symmetric(t: &Trial, mask: LinearMask, [h, hv]: [usize; 2], cut: Cut) -> Vec<Tensor<'_>> {
    let (r, values) = (t.x(&[cut.rows(), h, 3]), t.x(&[cut.rows(), hv, 5]));
    let (q, bounds) = cut.segments(t);
    let attend = LinearAttend { scale: 0.7, mask, q, k: Keys::Queries, rotary: Rotary::None };
    vec![r.linear_attention(None, values, &attend, &Masking { q: bounds, ..Masking::default() })]
}

fn rotated(t: &Trial, mask: LinearMask, [h, hv]: [usize; 2], cut: Cut) -> Vec<Tensor<'_>> {
    let rows = cut.rows();
    let (a, values) = (t.x(&[rows, h, 4]), t.x(&[rows, hv, 5]));
    let (q, bounds) = cut.segments(t);
    let attend = LinearAttend { scale: 0.7, mask, q, k: Keys::Queries, rotary: Rotary::Angles(YARN) };
    let places: Vec<i32> = (0..rows as i32).map(|row| 3 * row % 11).collect();
    let bounds = Masking { q: bounds, ..Masking::default() };
    let ins: Vec<_> =
        [a, values].into_iter().chain(bounds.tensors()).chain([t.index(&[1, rows], &places)]).collect();
    vec![t.b.op(attend.op(), &ins)]
}

/// R 5, D 3, V 7; every row's weight is a parameter too.
fn head_loss(t: &Trial) -> Vec<Tensor<'_>> {
    let target = t.index(&[5], &[2, -1, 6, 0, 2]);
    let HeadLosses { sum, logp, .. } = t.x(&[5, 3]).head_loss(t.x(&[7, 3]), target, t.x(&[5]));
    vec![sum, logp]
}
