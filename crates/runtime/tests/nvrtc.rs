//! Compiles every kernel for every supported architecture, without a GPU.
//!
//! Checks that kernels keep their values in registers and need no more shared memory than a card of the architecture has.
//!
//! NVRTC is found as described in `library`: `VIRTUAL_ENV=... cargo test --test nvrtc` uses the wheel `nvidia-cuda-nvrtc`. A
//! machine without it skips with a message; with FLATOUT_REQUIRE_NVRTC set, it fails.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use flatout_ir::graph::{Class, Graph, Init, Slot};
use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::collective::{Combine, Order};
use flatout_ir::ops::elementwise::Elementwise;
use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::linear_attention::{Accumulate, Keys, LinearAttend, LinearMask, Rotary};
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::product::{Compute, plain};
use flatout_ir::ops::qk_norm_rope::weights;
use flatout_ir::ops::quantize;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::ops::rope::Pairs;
use flatout_ir::ops::thin_product::Thin;
use flatout_ir::target::{KernelRow, Shapes};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Axis, Launch, Op, OpKind, View};
use flatout_runtime::cuda::library::nvrtc_alone;
use flatout_runtime::cuda::noise;
use flatout_runtime::cuda::nvrtc::{Nvrtc, Resources, arch};
use flatout_runtime::cuda::session::{clock, stand_in};
use flatout_runtime::cuda::{Facts, KERNELS, Kernel, Source, spin};
use flatout_runtime::verify::{cases, sources_with_shared};
use rayon::prelude::*;

/// A100, RTX 3090, RTX 4090, H100 and H200, B200, RTX 5090.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];

/// Sources whose headers document spills with a given define, and the maximum bytes.
const MAY_SPILL: [(&str, (&str, &str), usize); 4] = [
    ("attention/hopper/backward_queries.cu", ("MASK", "3"), 48),
    ("norm.cu", ("VEC", "1"), 20),
    ("norm.cu", ("HAS_SUM", "1"), 12),
    ("norm.cu", ("HAS_THIRD", "1"), 4),
];

/// Sources whose wgmma products are serialised with a given define, because their accumulators fill the registers.
const MAY_WAIT: [(&str, (&str, &str)); 1] = [("attention/hopper/backward_queries.cu", ("SIZE", "256"))];

/// Kernels that consist only of calls of NCCL.
const OF_NCCL: [&str; 2] = ["cuda.all_gather", "cuda.all_reduce"];

/// Whether a source's products may be serialised.
fn may_wait(source: &Source) -> bool {
    let has = |(name, value): (&str, &str)| source.defines.iter().any(|(n, v)| n == name && v == value);
    MAY_WAIT.iter().any(|&(name, define)| source.name == name && has(define))
}

/// Bytes that a source may spill.
fn most_spilled(source: &Source) -> usize {
    let has = |(name, value): (&str, &str)| source.defines.iter().any(|(n, v)| n == name && v == value);
    let of = |&(name, define, bytes): &(&str, (&str, &str), usize)| {
        (source.name == name && has(define)).then_some(bytes)
    };
    MAY_SPILL.iter().find_map(of).unwrap_or(0)
}

/// An operation with the types of its inputs.
type TypedOp = (Op, Vec<TensorType>);

/// The key that distinguishes the sources of two operations: name, epilogue, types.
type SourceKey = (&'static str, Option<Epilogue>, Vec<DType>);

/// The operations of a decoder's step at the sizes that benchmarks use.
fn real() -> Vec<TypedOp> {
    let (bf16, f32s, i32s) = (DType::BF16, DType::F32, DType::I32);
    let ty = |dtype, dims: &[usize]| TensorType::new(dtype, dims);
    let mut forms: Vec<TypedOp> = vec![];
    let weight = NormWeight::Plain;
    for (rows, d) in [(65536, 768), (16384, 2048), (16384, 4096)] {
        for dtype in [bf16, f32s] {
            let (x, w) = (ty(dtype, &[rows, d]), ty(f32s, &[d]));
            let rms = NormSpec::rms(1e-5, weight);
            forms.push((rms.op(true), vec![x.clone(), x.clone(), w.clone()]));
            let backward = vec![x.clone(), w.clone(), x.clone(), x.clone()];
            forms.push((rms.grad(true), backward.clone()));
            let layer = NormSpec { center: true, bias: true, ..rms };
            forms.push((layer.op(true), vec![x.clone(), x, w.clone(), w]));
            forms.push((layer.grad(true), backward));
        }
    }
    // Rows of one warp, of part of one, and those of 1152, which take three; their gradient is summed as well.
    for (rows, d) in [(65792, 768), (65792, 384), (33280, 192), (16384, 1152)] {
        let (x, w, eps) = (ty(bf16, &[rows, d]), ty(f32s, &[d]), 1e-5);
        let layer = NormSpec { center: true, bias: true, ..NormSpec::rms(eps, weight) };
        forms.push((layer.op(true), vec![x.clone(), x.clone(), w.clone(), w.clone()]));
        let grad =
            Op::RmsNormGrad { eps, center: true, weight, bias: true, add: true, again: true, sum: true };
        forms.push((grad, vec![x.clone(), w.clone(), x.clone(), x, w]));
    }
    // Norms that their gradient recomputes.
    for d in [768, 1024, 2048, 4096] {
        let (x, w, eps) = (ty(bf16, &[16384, d]), ty(f32s, &[d]), 1e-5);
        let grad =
            Op::RmsNormGrad { eps, center: false, weight, bias: false, add: true, again: true, sum: false };
        forms.push((grad, vec![x.clone(), w, x.clone(), x]));
    }
    let [inner, outer] = [NormSpec::rms(1e-6, NormWeight::OnePlus); 2];
    for (rows, d) in [(16384, 1152), (8192, 2560)] {
        let (x, w) = (ty(bf16, &[rows, d]), ty(f32s, &[d]));
        let ins = vec![x.clone(), x.clone(), w.clone(), w];
        forms.push((Op::DoubleNorm { inner, outer }, ins.clone()));
        let grad = Op::DoubleNormGrad { inner, outer, add: true, of_sum: false };
        forms.push((grad, [ins, vec![x.clone(), x]].concat()));
    }
    forms.extend([3072, 1152].map(summed_region));
    for (heads, k) in [(12, 64), (16, 64), (16, 128), (5, 256)] {
        for (dtype, pairs) in [(bf16, Pairs::Half), (f32s, Pairs::Half), (bf16, Pairs::Interleaved)] {
            let (freq, axis_of_freq, table) = (10_000.0.into(), vec![0; k / 2], true);
            let x = ty(dtype, &[65536, heads, k]);
            let rest = [ty(i32s, &[1, 65536]), ty(f32s, &[2048, k / 2, 2])];
            let rope = Op::Rope { freq, axis_of_freq: axis_of_freq.clone(), pairs, inverse: false, table };
            forms.push((rope, [vec![x.clone()], rest.to_vec()].concat()));
            for first in [0, heads - heads / 4] {
                let ins = [vec![x.clone(), ty(f32s, &[weights(first) * k])], rest.to_vec()].concat();
                let axes = axis_of_freq.clone();
                let fused =
                    Op::QkNormRope { eps: 1e-6, weight, first, freq, axis_of_freq: axes, pairs, table };
                forms.push((fused, ins.clone()));
                let axes = axis_of_freq.clone();
                let grad =
                    Op::QkNormRopeGrad { eps: 1e-6, weight, first, freq, axis_of_freq: axes, pairs, table };
                forms.push((grad, [ins, vec![x.clone()]].concat()));
            }
        }
    }
    for (rank, width) in [(48, 1152), (16, 1024)] {
        let (wide, thin, a) = (ty(bf16, &[16384, width]), ty(bf16, &[16384, rank]), ty(bf16, &[rank, width]));
        let drawn = [ty(i32s, &[3]), ty(i32s, &[16384, 2])];
        for (form, out, base, tensors) in [
            (Thin::Down, bf16, false, vec![wide.clone(), a.clone()]),
            (Thin::Up, bf16, false, vec![thin.clone(), a.clone()]),
            (Thin::Up, bf16, true, vec![thin.clone(), a.clone(), wide.clone()]),
            (Thin::Weight, f32s, true, vec![thin, wide, ty(f32s, &[rank, width])]),
        ] {
            forms.push((Op::ThinProduct { form, p: 0.05, out, base }, [tensors, drawn.to_vec()].concat()));
        }
    }
    for (rank, width) in [(16, 4096), (32, 24576), (48, 6144), (64, 1152)] {
        let (wide, thin) = (ty(bf16, &[16384, width]), ty(bf16, &[16384, rank]));
        for (form, factor) in [(Thin::Up, [rank, width]), (Thin::Out, [width, rank])] {
            let op = Op::ThinProduct { form, p: 0.0, out: bf16, base: true };
            forms.push((op, vec![thin.clone(), ty(bf16, &factor), wide.clone()]));
        }
    }
    let gate = ty(bf16, &[65536, 2048]);
    for act in [Act::Silu, Act::Gelu, Act::GeluExact] {
        forms.push((Op::Gated { act, p: 0.0 }, vec![gate.clone(); 2]));
        forms.push((Op::GatedGrad { act, again: true, p: 0.0 }, vec![gate.clone(); 3]));
    }
    // Products of many tiles and of few, in every layout.
    for (m, n, k) in [(65536, 768, 2048), (512, 768, 2048)] {
        for (ta, tb) in [(false, true), (false, false), (true, false), (true, true)] {
            let a = if ta { [k, m] } else { [m, k] };
            let b = if tb { [n, k] } else { [k, n] };
            forms.push((plain(ta, tb, bf16, Compute::Full), vec![ty(bf16, &a), ty(bf16, &b)]));
        }
    }
    let wide = ty(bf16, &[65536, 768]);
    for act in [Act::Silu, Act::Gelu, Act::GeluExact] {
        forms.push((Op::GatedProduct { act }, vec![wide.clone(), ty(bf16, &[4096, 768])]));
        let ins = vec![wide.clone(), ty(bf16, &[768, 2048]), gate.clone(), gate.clone()];
        forms.push((Op::GatedProductGrad { act, again: true }, ins));
    }
    for act in [Act::Gelu, Act::GeluExact] {
        let ins = vec![wide.clone(), ty(bf16, &[2048, 768]), ty(bf16, &[2048])];
        forms.push((Op::ActivatedProduct { act, tb: true, bias: true }, ins));
        let ins = vec![wide.clone(), ty(bf16, &[768, 2048]), gate.clone()];
        forms.push((Op::ActivatedProductGrad { act, tb: false, again: true, sum: true }, ins));
    }
    // Products of 8 bits and weights' gradients, which are split along the inner extent.
    let (e4m3, e5m2) = (DType::E4M3, DType::E5M2);
    for (a, b, out, base, [m, n, k]) in [
        (e4m3, e4m3, bf16, false, [65536, 4096, 768]),
        (e5m2, e4m3, bf16, false, [65536, 768, 4096]),
        (e4m3, e4m3, bf16, true, [16384, 4096, 4096]),
        (e4m3, e5m2, f32s, false, [768, 4096, 65536]),
        (e4m3, e5m2, f32s, true, [768, 4096, 65536]),
        (e5m2, e4m3, f32s, true, [4096, 12288, 16384]),
        (bf16, bf16, f32s, false, [768, 768, 65536]),
        (bf16, bf16, f32s, true, [768, 768, 65536]),
    ] {
        let (compute, epilogue, is_wide) = (Compute::Full, Epilogue::None, a == bf16);
        let op = Op::Product { ta: is_wide, tb: !is_wide, out, base, compute, epilogue };
        let (a_dims, b_dims) = if is_wide { ([k, m], [k, n]) } else { ([m, k], [n, k]) };
        let mut ins = vec![ty(a, &a_dims), ty(b, &b_dims)];
        ins.extend(base.then(|| ty(out, &[m, n])));
        ins.extend(std::iter::repeat_n(ty(f32s, &[1]), if is_wide { 0 } else { 2 }));
        forms.push((op, ins));
    }
    for act in [Act::Silu, Act::Gelu, Act::GeluExact] {
        let scalars = vec![ty(f32s, &[1]); 4];
        let ins = [vec![ty(e4m3, &[65536, 768]), ty(e4m3, &[4096, 768])], scalars].concat();
        forms.push((Op::GatedProduct { act }, ins));
    }
    let drawn = [ty(DType::I32, &[3]), ty(DType::I32, &[65536, 2])];
    for (op, tensors) in [
        (Op::Gated { act: Act::Relu, p: 0.1 }, 2),
        (Op::GatedGrad { act: Act::Relu, again: true, p: 0.1 }, 3),
    ] {
        forms.push((op, [vec![gate.clone(); tensors], drawn.to_vec()].concat()));
    }
    let scaling = [ty(f32s, &[1]), ty(f32s, &[1])];
    for (to, of) in [
        (DType::E4M3, quantize::Source::Given),
        (DType::E5M2, quantize::Source::Given),
        (DType::E4M3, quantize::Source::Gated(Act::Silu)),
        (DType::E5M2, quantize::Source::GatedGrad { act: Act::Silu, again: false }),
        (DType::E5M2, quantize::Source::GatedGrad { act: Act::Silu, again: true }),
    ] {
        let again = vec![ty(f32s, &[1]); of.makes_again() as usize];
        let ins = [vec![gate.clone(); of.tensors()], again, scaling.to_vec()].concat();
        forms.push((Op::Quantize { to, current: false, of }, ins));
    }
    for width in [256, 768, 1024] {
        let (rows, w) = (ty(bf16, &[65536, width]), ty(f32s, &[width]));
        let spec = NormSpec::rms(1e-6, NormWeight::Plain);
        let of = quantize::Source::Norm(spec, true);
        let ins = [vec![rows.clone(), rows.clone(), w.clone()], scaling.to_vec()].concat();
        forms.push((Op::Quantize { to: DType::E4M3, current: false, of }, ins));
        for again in [false, true] {
            let of = quantize::Source::NormGrad { spec, add: true, again };
            let scale = again.then(|| ty(f32s, &[1]));
            let ins = [rows.clone(), w.clone(), rows.clone(), rows.clone()].into_iter().chain(scale);
            if of.takes(width) {
                let ins = ins.chain(scaling.clone()).collect();
                forms.push((Op::Quantize { to: DType::E5M2, current: false, of }, ins));
            }
        }
    }
    let by_itself = Op::Quantize { to: DType::E4M3, current: true, of: quantize::Source::Given };
    forms.push((by_itself, vec![ty(bf16, &[4096, 768])]));
    for (to, nested) in [(bf16, true), (bf16, false), (f32s, true)] {
        let (rows, columns) = (vec![4096, 1024, 1024], 4096);
        let mut ins = vec![ty(DType::U8, &[6144, columns / 2])];
        ins.extend(nested.then(|| ty(f32s, &[256])));
        for rows in &rows {
            let blocks = rows * columns / 64;
            match nested {
                true => ins.extend([ty(DType::U8, &[blocks]), ty(f32s, &[blocks / 256]), ty(f32s, &[1])]),
                false => ins.push(ty(f32s, &[blocks])),
            }
        }
        forms.push((Op::Dequantize { rows: rows.clone(), to, nested }, ins.clone()));
        for transposed in [false, true].into_iter().filter(|_| nested && to == bf16) {
            let ins = [ins.clone(), vec![ty(f32s, &[1])]].concat();
            forms.push((Op::Requantize { rows: rows.clone(), transposed }, ins));
        }
    }
    let flat = ty(f32s, &[176_000_000]);
    let (beta1, beta2, eps, weight_decay, lr_scale, copy, first) = (0.9, 0.95, 1e-8, 0.1, 1.0, true, 0);
    let scalars = vec![ty(f32s, &[1]); 4];
    for moments in [f32s, bf16] {
        let adamw = Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first };
        let state = [vec![flat.clone(); 2], vec![flat.with(moments); 2]].concat();
        forms.push((adamw.clone(), [state.clone(), scalars.clone()].concat()));
        forms.push((adamw, [state, scalars.clone(), vec![ty(i32s, &[1])]].concat()));
    }
    let adamw8 = Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy, first };
    let codes = [DType::E4M3, DType::E4M4].map(|dtype| flat.with(dtype)).to_vec();
    let scales = vec![ty(f32s, &[176_000_000 / 256]); 2];
    let of_blocks = [vec![flat.clone(); 2], codes, scales, scalars].concat();
    forms.push((adamw8.clone(), of_blocks.clone()));
    forms.push((adamw8, [of_blocks, vec![ty(i32s, &[1])]].concat()));
    forms.push((Op::Reduce { axis: 0, by: Fold::SumSquares }, vec![flat]));
    let (axis, order, by) = (Axis::Shard, Order::Tree, Combine::Sum);
    for ways in [2, 3, 4, 7, 8, 16, 32] {
        let all = ty(f32s, &[ways << 20]);
        forms.push((Op::AllReduce { axis, ways, by, order }, vec![all.clone()]));
        let onto_base = Op::ReduceScatter { axis, ways, order, base: true };
        forms.push((onto_base, vec![all, ty(f32s, &[1 << 20])]));
    }
    let (rows, table) = (ty(bf16, &[65536, 768]), ty(f32s, &[32768, 768]));
    let index = ty(i32s, &[65536]);
    forms.push((Op::Gather {}, vec![ty(bf16, &[32768, 768]), index.clone()]));
    let cifar = [ty(DType::U8, &[45000, 32, 32, 3]), ty(i32s, &[256, 6])];
    forms.push((Op::Resample { height: 32, width: 32 }, cifar.to_vec()));
    let drawn = [ty(f32s, &[64, 151_936]), ty(i32s, &[64, 6]), ty(f32s, &[64, 2])];
    forms.push((Op::Sample {}, drawn.to_vec()));
    forms.push((
        Op::RowScatter {},
        vec![ty(bf16, &[40960, 8, 128]), ty(bf16, &[64, 8, 128]), ty(i32s, &[64])],
    ));
    let adapted = [ty(bf16, &[1024, 1152]), ty(f32s, &[16, 1152]), ty(f32s, &[1024, 16])];
    forms.push((Op::LowRankNorm { scale: 2.0 }, adapted.to_vec()));
    let sum = Op::ScatterAdd { rows: 32768, out: f32s, base: true };
    forms.push((sum, vec![rows.clone(), index, table]));
    forms.push((Op::Reduce { axis: 0, by: Fold::Sum }, vec![rows.clone()]));
    forms.push((Op::Dropout { p: 0.1 }, vec![rows, ty(i32s, &[3]), ty(i32s, &[65536, 2])]));
    forms
}

/// GELU and its gradient, which is also summed over its rows.
fn summed_region(columns: usize) -> TypedOp {
    let ty = TensorType::new(DType::BF16, [65792, columns]);
    let mut body = Graph::default();
    let [h, d] = ["in0", "in1"].map(|name| {
        let (path, ty) = (name.to_string(), ty.clone());
        let slot = body.add_slot(Slot { path, ty, class: Class::Input, init: Init::Zeros, part: None });
        body.add(Op::Read { slot }, vec![], name)
    });
    let y = body.add(Op::Map { f: Elementwise::GeluExact }, vec![h], "");
    let slope = body.add(Op::Map { f: Elementwise::GeluExactSlope }, vec![h], "");
    let dh = body.add(Op::Map { f: Elementwise::Mul }, vec![d, slope], "");
    let sum = body.add(Op::Reduce { axis: 0, by: Fold::Sum }, vec![dh], "");
    body.results = [y, dh, sum].into_iter().enumerate().map(|(i, v)| (format!("out{i}"), v)).collect();
    (Op::Region { body: Box::new(body) }, vec![ty.clone(), ty])
}

/// Attention at real sizes: heads of 64, 128 and 256, every mask, equal and packed sequences, few queries over caches, both
/// directions. All of them for every architecture would take ten minutes of a core, so each architecture takes a sixth,
/// together they cover all, and Hopper, which has its own kernels, takes a third.
fn attention(architecture: usize) -> Vec<TypedOp> {
    let is_hopper = ARCHITECTURES[architecture] == "sm_90a";
    let window = Mask::Window { back: 256, ahead: 0 };
    let mut forms = vec![];
    for (s, size) in [64, 128, 256].into_iter().enumerate() {
        let (heads, kv_heads) = (16, 4);
        for (m, mask) in [Mask::Full, Mask::Causal, window, Mask::TwoIntervals].into_iter().enumerate() {
            for (r, is_ragged) in [false, true].into_iter().enumerate() {
                if (2 * m + r + s + architecture).is_multiple_of(if is_hopper { 3 } else { 6 }) {
                    let segments = match is_ragged {
                        true => Segments::Ragged { max_segments: 325, max_len: 512 },
                        false => Segments::Uniform { len: 512 },
                    };
                    forms.extend(attend(mask, [segments; 2], [65536; 2], [heads, kv_heads, size]));
                }
            }
        }
        // Gemma-2 has heads of 256 with capped scores.
        if (s + architecture).is_multiple_of(3) || size == 256 {
            let segments = Segments::Uniform { len: 512 };
            let cap = Cap(Some(50.0));
            forms.extend(attend_within(cap, window, [segments; 2], [65536; 2], [heads, kv_heads, size]));
        }
        if (s + architecture).is_multiple_of(3) {
            let caches = Segments::Ragged { max_segments: 64, max_len: 4096 };
            let sides = [Segments::Uniform { len: 1 }, caches];
            forms.extend(attend(Mask::Causal, sides, [64, 64 * 4096], [heads, kv_heads, size]));
        }
    }
    if is_hopper {
        // Short sequences that fit in a block, and long ones.
        for (len, mask, kv_heads) in
            [(65, Mask::Full, 12), (145, Mask::Full, 12), (257, Mask::Full, 12), (2048, Mask::Causal, 4)]
        {
            let [.., backward] =
                &attend(mask, [Segments::Uniform { len }; 2], [256 * len; 2], [12, kv_heads, 64])[..]
            else {
                unreachable!("both directions are there");
            };
            forms.push(backward.clone());
        }
    }
    forms
}

/// Linear attention at the sizes of Vision-BDH, with one tile per segment and many, and with separate keys.
fn linear_attention() -> Vec<TypedOp> {
    let ty = |dtype, heads: usize, size: usize| TensorType::new(dtype, [64 * 65, heads, size]);
    let mut forms: Vec<TypedOp> = vec![];
    for (dtype, mask, len, given) in [
        (DType::BF16, LinearMask::Full, 65, false),
        (DType::BF16, LinearMask::Strict, 65, false),
        (DType::BF16, LinearMask::Full, 320, false),
        (DType::BF16, LinearMask::Strict, 320, false),
        (DType::BF16, LinearMask::Causal, 320, true),
        (DType::F32, LinearMask::Strict, 65, false),
        (DType::F32, LinearMask::Causal, 65, true),
    ] {
        let q = Segments::Uniform { len };
        let k = if given { Keys::Given(q) } else { Keys::Queries };
        let attend = LinearAttend { scale: 1.0, mask, q, k, rotary: Rotary::None };
        let keys = given.then(|| ty(dtype, 6, 1024));
        let ins: Vec<_> = [ty(dtype, 6, 1024)].into_iter().chain(keys).chain([ty(dtype, 1, 192)]).collect();
        forms.push((attend.op(), ins.clone()));
        forms.push((attend.grad(), [ins.clone(), vec![ty(dtype, 6, 192)]].concat()));
        if !given && len == 65 {
            let freq = 65536.0.into();
            for rotary in [Rotary::Table(freq), Rotary::Angles(freq)] {
                let attend = LinearAttend { rotary, ..attend };
                let positions = TensorType::new(DType::I32, [1, 64 * 65]);
                let table = rotary.has_table().then(|| TensorType::new(DType::F32, [65, 512, 2]));
                let ins = [ins.clone(), vec![positions], Vec::from_iter(table)].concat();
                forms.push((attend.op(), ins.clone()));
                forms.push((attend.grad(), [ins.clone(), vec![ty(dtype, 6, 192)]].concat()));
                // Angles are computed if no table is large enough: one accumulation mode suffices to show that it compiles.
                let bases = if rotary.has_table() {
                    &[Accumulate::Base, Accumulate::Relu][..]
                } else {
                    &[Accumulate::Relu][..]
                };
                for &accumulate in bases {
                    let ins = [ins.clone(), vec![ty(dtype, 6, 192), ty(dtype, 6, 1024)]].concat();
                    forms.push((attend.accumulating_grad(accumulate), ins));
                }
            }
        }
    }
    forms
}

/// Both directions in bf16, and once in f32.
fn attend(mask: Mask, segments: [Segments; 2], tokens: [usize; 2], heads: [usize; 3]) -> Vec<TypedOp> {
    attend_within(Cap::NONE, mask, segments, tokens, heads)
}

fn attend_within(
    cap: Cap,
    mask: Mask,
    [q, k]: [Segments; 2],
    tokens: [usize; 2],
    heads: [usize; 3],
) -> Vec<TypedOp> {
    let mut forms = vec![];
    let [heads, kv_heads, size] = heads;
    let is_usual = size == 64 && mask == Mask::Causal;
    for dtype in [DType::BF16, DType::F32].into_iter().filter(|d| *d == DType::BF16 || is_usual) {
        let of_q = TensorType::new(dtype, [tokens[0], heads, size]);
        let of_k = TensorType::new(dtype, [tokens[1], kv_heads, size]);
        let mut ins = vec![of_q.clone(), of_k.clone(), of_k];
        for side in [q, k] {
            if let Segments::Ragged { max_segments, .. } = side {
                ins.extend([(); 2].map(|()| TensorType::new(DType::I32, [max_segments])));
            }
        }
        ins.extend((mask == Mask::TwoIntervals).then(|| TensorType::new(DType::I32, [tokens[0], 4])));
        let scale = (size as f32).sqrt().recip();
        forms.push((Op::Attention { scale, cap, mask, q, k }, ins.clone()));
        let lse = TensorType::new(DType::F32, [tokens[0], heads]);
        ins.extend([of_q.clone(), lse, of_q]);
        forms.push((Op::AttentionGrad { scale, cap, mask, q, k, d_lse: false }, ins));
    }
    forms
}

fn is_attention(op: &Op) -> bool {
    matches!(op.kind(), OpKind::Attention | OpKind::AttentionGrad)
}

/// The largest verification case of each operation and epilogue in each combination of types.
fn verified() -> Vec<TypedOp> {
    let mut largest: BTreeMap<SourceKey, (usize, TypedOp)> = BTreeMap::new();
    for case in cases::all().into_iter().filter(|case| !is_attention(&case.op)) {
        let ins: Vec<TensorType> = case.ins.iter().map(|(ty, _)| ty.clone()).collect();
        let size = ins.iter().map(TensorType::elements).sum();
        let epilogue = match case.op {
            Op::Product { epilogue, .. } => Some(epilogue),
            _ => None,
        };
        let form = (case.op.clone(), ins.clone());
        let key = (case.op.name(), epilogue, form_types(&form).collect());
        let place = largest.entry(key).or_insert_with(|| (0, form));
        if size > place.0 {
            *place = (size, (case.op, ins));
        }
    }
    largest.into_values().map(|(_, form)| form).collect()
}

/// The types of a form's inputs, and the result type of a cast.
fn form_types((op, ins): &TypedOp) -> impl Iterator<Item = DType> + '_ {
    let to = match op {
        Op::Map { f: Elementwise::Cast(dtype) } | Op::Quantize { to: dtype, .. } => Some(*dtype),
        Op::Requantize { .. } => Some(DType::E4M3),
        _ => None,
    };
    ins.iter().map(|ty| ty.dtype).chain(to)
}

/// The type by which a kernel is selected: the first float's, or the first.
fn first_type(ins: &[TensorType]) -> Option<DType> {
    let mut types = ins.iter().map(|ty| ty.dtype);
    types.clone().find(|d| d.is_float()).or(types.next())
}

/// The launch of a form on a kernel, with every tensor dense and `shift` elements off alignment.
fn launch(row: &KernelRow, (op, ins): &TypedOp, sms: usize, shift: usize) -> Launch {
    let mut graph = Graph::default();
    let reads = ins.iter().enumerate().map(|(i, ty)| {
        let (path, ty) = (i.to_string(), ty.clone());
        let slot = graph.add_slot(Slot { path, ty, class: Class::Input, init: Init::Zeros, part: None });
        graph.add(Op::Read { slot }, vec![], "")
    });
    let reads: Vec<_> = reads.collect();
    let node = graph.push(op.clone(), reads, "form");
    let node = graph.node(node);
    let mut end = 0;
    let mut place = |ty: &TensorType, shift: usize| {
        let view = View::dense(end + shift * ty.dtype.bytes(), ty);
        end = (view.offset + ty.bytes()).next_multiple_of(256);
        view
    };
    let ins: Vec<View> = ins.iter().map(|ty| place(ty, shift)).collect();
    let outs = node.outs.iter().map(|ty| Some(place(ty, shift))).collect();
    let bytes = (row.workspace)(&Shapes::of(&graph, node, sms));
    let scratch = TensorType::new(DType::F32, [bytes.div_ceil(4)]);
    let workspace = (bytes > 0).then(|| place(&scratch, 0));
    let (path, key) = (op.name().into(), 7);
    Launch {
        kernel: row.name,
        op: op.clone(),
        ins,
        outs,
        workspace,
        path,
        key,
        flops: 0,
        queue: flatout_ir::Queue::Compute,
        joins: None,
    }
}

/// The kernels that a plan could use for a form: those of its operation in the type of its first float.
fn kernels_for<'a>((op, ins): &'a TypedOp) -> impl Iterator<Item = &'static Kernel> + use<'a> {
    let dtype = first_type(ins);
    KERNELS
        .iter()
        .copied()
        .flatten()
        .filter(move |k| k.row.op == op.kind() && dtype.is_none_or(|d| k.row.dtypes.contains(&d)))
}

#[test]
fn every_kernel_compiles_everywhere_without_spilling() {
    let library = match nvrtc_alone() {
        Ok(library) => library,
        Err(why) => {
            let required = std::env::var_os("FLATOUT_REQUIRE_NVRTC").is_some();
            assert!(!required, "no kernel was compiled: {why}");
            eprintln!("SKIPPED: no kernel was compiled: {why}");
            return;
        }
    };
    let nvrtc = Nvrtc::open(library).expect("NVRTC has its entry points");
    // Paired with the maximum dynamic shared memory of a launch.
    let mut jobs: HashMap<(String, Source), usize> = HashMap::new();
    let mut compiled: BTreeSet<&str> = BTreeSet::new();
    let is_whole = std::env::var_os("FLATOUT_EVERY_FORM").is_some();
    let verified = verified();
    let real_from = verified.len();
    let forms: Vec<TypedOp> = verified.into_iter().chain(real()).chain(linear_attention()).collect();
    for (architecture, name) in ARCHITECTURES.into_iter().enumerate() {
        let facts = Facts { cudnn: Some(91900), ..Facts::on_paper(name) };
        assert_eq!(arch(&facts), name);
        jobs.insert((arch(&facts), noise::source()), 0);
        jobs.insert((arch(&facts), spin::source()), 0);
        jobs.insert((arch(&facts), clock::source()), 0);
        jobs.insert((arch(&facts), stand_in::source()), 0);
        let exists = |form: &&TypedOp| {
            facts.has_fp8() || form.0.kind().decodes() || !form_types(form).any(|dtype| dtype.is_fp8())
        };
        // Each architecture compiles a share of all forms, with at least one of every kernel; Hopper also every form of the
        // benchmarked sizes. With `FLATOUT_EVERY_FORM` set each compiles all, as `doctor --verify` does on a GPU.
        let mut here: BTreeSet<&str> = BTreeSet::new();
        let attention = attention(architecture);
        for (i, form) in forms.iter().chain(&attention).enumerate().filter(|(_, form)| exists(form)) {
            let is_taken = is_whole
                || (name == "sm_90a" && i >= real_from)
                || i >= forms.len()
                || (i + architecture).is_multiple_of(ARCHITECTURES.len());
            // Unaligned tensors use different code: some forms on one architecture show that it compiles.
            let has_shift = name == "sm_90a" && !is_attention(&form.0) && (is_whole || i.is_multiple_of(3));
            let shifts: &[usize] = if has_shift { &[0, 1] } else { &[0] };
            for (kernel, &shift) in kernels_for(form).flat_map(|k| shifts.iter().map(move |s| (k, s))) {
                if !here.insert(kernel.row.name) && !is_taken {
                    continue;
                }
                let launch = launch(&kernel.row, form, facts.sms as usize, shift);
                for (source, shared) in sources_with_shared(&launch, &facts) {
                    compiled.insert(kernel.row.name);
                    let most = jobs.entry((arch(&facts), source)).or_default();
                    *most = shared.max(*most);
                }
            }
        }
    }
    let check = |((arch, source), dynamic): (&(String, Source), &usize)| match nvrtc.resources(source, arch) {
        Err(why) => vec![why.to_string()],
        Ok(entries) => {
            let most = Facts::on_paper(arch).shared_bytes as usize;
            let complain = |e: &Resources| {
                let shared = e.shared_bytes as usize + dynamic;
                let too_much =
                    (shared > most).then(|| format!("takes {shared} of {most} bytes of shared memory"));
                let spills = (e.spill_bytes as usize > most_spilled(source))
                    .then(|| format!("spills {} bytes", e.spill_bytes));
                let waits = (e.is_serialized && !may_wait(source)).then(|| "waits for every product".into());
                too_much
                    .into_iter()
                    .chain(spills)
                    .chain(waits)
                    .map(|what| format!("{arch} {source}: {} {what}", e.entry))
                    .collect()
            };
            entries.iter().flat_map(|entry| -> Vec<String> { complain(entry) }).collect()
        }
    };
    let wrong: Vec<String> = jobs.par_iter().flat_map(check).collect();
    eprintln!("{} sources compiled for {} kernels", jobs.len(), compiled.len());
    assert!(wrong.is_empty(), "{} of {} sources:\n{}", wrong.len(), jobs.len(), wrong.join("\n"));
    let names = KERNELS.iter().copied().flatten().map(|k| k.row.name);
    let has_source = |name: &&str| !OF_NCCL.contains(name);
    let without: Vec<&str> = names.filter(has_source).filter(|name| !compiled.contains(name)).collect();
    assert!(without.is_empty(), "{without:?} compiled nothing");
}
