//! Verification cases for operations inside a layer, sampling, losses and updates.

use flatout_ir::Op;
use flatout_ir::block8::BLOCK;
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::frequency::{Frequencies, Scaling};
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::product::Compute;
use flatout_ir::ops::qk_norm_rope::weights;
use flatout_ir::ops::quantize::Source;
use flatout_ir::ops::rope::Pairs;
use flatout_ir::types::DType;

use super::Data;
use super::cases::{FLOATS, I32, Input, Table, index, tensor, x};

pub(super) fn norms(table: &mut Table) {
    let eps = 1e-5;
    let specs = [
        NormSpec::rms(eps, NormWeight::Plain),
        NormSpec::rms(eps, NormWeight::OnePlus),
        NormSpec::rms(eps, NormWeight::None),
        NormSpec { bias: true, ..NormSpec::rms(eps, NormWeight::Plain) },
        NormSpec { eps, center: true, weight: NormWeight::Plain, bias: true },
        NormSpec { eps, center: true, weight: NormWeight::Plain, bias: false },
        NormSpec { eps, center: true, weight: NormWeight::None, bias: true },
        NormSpec { eps, center: true, weight: NormWeight::None, bias: false },
    ];
    for dtype in FLOATS {
        for spec in specs {
            for dims in [vec![67, 33], vec![3, 5, 48], vec![300, 96]] {
                let width = *dims.last().expect("a row");
                let w = || spec.weight.is_some().then(|| x(DType::F32, &[width]));
                for residual in [false, true] {
                    let bias = spec.bias.then(|| x(DType::F32, &[width]));
                    let ins = [Some(x(dtype, &dims)), residual.then(|| x(dtype, &dims)), w(), bias.clone()];
                    table.add(spec.op(residual), ins.into_iter().flatten().collect());
                    let ins = [
                        Some(x(dtype, &dims)),
                        w(),
                        Some(x(dtype, &dims)),
                        residual.then(|| x(dtype, &dims)),
                    ];
                    let ins: Vec<Input> = ins.into_iter().flatten().collect();
                    table.add(spec.grad(residual), ins.clone());
                    table.add(giving(spec.grad(residual), false, true), ins.clone());
                    let ins = ins.into_iter().chain(bias).collect();
                    table.add(giving(spec.grad(residual), true, false), ins);
                }
            }
            for dims in [[70, 192], [37, 384], [11, 1152], [5, 24], [9, 1024], [6, 2048]] {
                let w = || spec.weight.is_some().then(|| x(DType::F32, &dims[1..]));
                let (rows, bias) = (|| Some(x(dtype, &dims)), spec.bias.then(|| x(DType::F32, &dims[1..])));
                let ins = [rows(), rows(), w(), bias.clone()].into_iter().flatten().collect();
                table.add(spec.op(true), ins);
                let ins: Vec<Input> = [rows(), w(), rows(), rows()].into_iter().flatten().collect();
                table.add(giving(spec.grad(true), false, true), ins.clone());
                let ins: Vec<Input> = ins.into_iter().chain(bias).collect();
                table.add(giving(spec.grad(true), true, false), ins.clone());
                table.add(giving(spec.grad(true), true, true), ins);
            }
        }
    }
    quantized_norms(table, &specs);
    double_norms(table);
}

/// Norms around an addition, for which only GPUs have kernels: rows of one warp, of several, and with a remainder.
fn double_norms(table: &mut Table) {
    for (dtype, weight) in FLOATS.into_iter().flat_map(|x| [(x, NormWeight::Plain), (x, NormWeight::OnePlus)])
    {
        let [inner, outer] = [1e-5, 1e-6].map(|eps| NormSpec::rms(eps, weight));
        for dims in [[67, 33], [70, 192], [11, 1152], [5, 24], [300, 768]] {
            let (rows, w) = (|| x(dtype, &dims), || x(DType::F32, &dims[1..]));
            let ins = vec![rows(), rows(), w(), w()];
            table.add(Op::DoubleNorm { inner, outer }, ins.clone());
            for (add, of_sum) in [(false, false), (true, false), (true, true)] {
                let slopes = vec![rows(); 1 + add as usize];
                let op = Op::DoubleNormGrad { inner, outer, add, of_sum };
                table.add(op, [ins.clone(), slopes].concat());
            }
        }
    }
}

/// The gradient of a norm that also returns the norm again, or the sum of its rows.
fn giving(op: Op, gives_norm: bool, gives_sum: bool) -> Op {
    let Op::RmsNormGrad { eps, center, weight, bias, add, .. } = op else {
        unreachable!("{} is no norm's gradient", op.name())
    };
    Op::RmsNormGrad { eps, center, weight, bias, add, again: gives_norm, sum: gives_sum }
}

/// Norms and their gradients that also write codes: full and partial tiles of rows, rows of several widths, with the bound of
/// other operations with internal quantisation.
fn quantized_norms(table: &mut Table, specs: &[NormSpec]) {
    let scalar = |value: f64| tensor(DType::F32, &[1], Data::Values(vec![value]));
    let wide = [[70, 48], [33, 272], [40, 768], [65, 240], [37, 1024]];
    for (i, (spec, dtype)) in specs.iter().flat_map(|spec| FLOATS.map(|dtype| (*spec, dtype))).enumerate() {
        let dims = wide[i % wide.len()];
        let w = || spec.weight.is_some().then(|| x(DType::F32, &[dims[1]]));
        for adds in [false, true] {
            let bias = spec.bias.then(|| x(DType::F32, &[dims[1]]));
            let norm = [Some(x(dtype, &dims)), adds.then(|| x(dtype, &dims)), w(), bias];
            let grad = [Some(x(dtype, &dims)), w(), Some(x(dtype, &dims)), adds.then(|| x(dtype, &dims))];
            let norm_grad = |again: bool| Source::NormGrad { spec, add: adds, again };
            for (to, of, ins) in [
                (DType::E4M3, Source::Norm(spec, adds), norm),
                (DType::E5M2, norm_grad(false), grad.clone()),
                (DType::E5M2, norm_grad(true), grad),
            ] {
                if !of.takes(dims[1]) {
                    continue;
                }
                let ins = ins.into_iter().flatten().chain(of.makes_again().then(|| scalar(0.015625)));
                let ins = ins.chain([scalar(0.0078125), scalar(0.5)]);
                table.add(Op::Quantize { to, current: false, of }, ins.collect());
                table.0.last_mut().expect("just added").bound = 4e-2;
            }
        }
    }
}

/// The table of the first positions, as `Init::RopeTable` fills it.
pub(super) fn rope_table(positions: usize, half: usize, freq: Frequencies) -> Input {
    tensor(DType::F32, &[positions, half, 2], Data::Values(freq.table(positions, half).collect()))
}

pub(super) fn rotations(table: &mut Table) {
    let plain = Frequencies::from(10_000.0);
    // An amplitude, and frequencies of three kinds: kept, mixed, stretched.
    let scaling = Scaling::Yarn { factor: 4.0, fast: 8.0, slow: 1.0, original: 64.0, amplitude: 1.25 };
    let yarn = Frequencies { scaling, ..plain };
    let grid = Frequencies { runs: 2, ..plain };
    for dtype in FLOATS {
        for pairs in [Pairs::Half, Pairs::Interleaved] {
            for (tokens, heads, half, axes, freq) in [
                (23, 3, 5, 1, plain),
                (200, 8, 16, 1, plain),
                (11, 2, 6, 2, plain),
                (19, 2, 8, 1, yarn),
                (13, 5, 36, 2, grid),
                (17, 2, 8, 3, plain),
            ] {
                let axis = |f: usize| if freq.runs > 1 { f * axes / half } else { f % axes };
                let axis_of_freq: Vec<u8> = (0..half).map(|f| axis(f) as u8).collect();
                let dims = [tokens, heads, 2 * half];
                // Some positions lie past the table of 40.
                let positions = || tensor(I32, &[axes, tokens], Data::Between(0.0, 50.0));
                for has_table in [false, true] {
                    let rotation = || has_table.then(|| rope_table(40, half, freq));
                    for inverse in [false, true] {
                        let axis_of_freq = axis_of_freq.clone();
                        let op = Op::Rope { freq, axis_of_freq, pairs, inverse, table: has_table };
                        let ins = [Some(x(dtype, &dims)), Some(positions()), rotation()];
                        table.add(op, ins.into_iter().flatten().collect());
                    }
                    let kinds = [
                        (NormWeight::Plain, 0),
                        (NormWeight::Plain, heads - 1),
                        (NormWeight::OnePlus, 0),
                        (NormWeight::OnePlus, 1),
                        (NormWeight::None, 0),
                    ];
                    for (weight, first) in kinds {
                        let eps = 1e-6;
                        let size = weights(first) * 2 * half;
                        let w = || weight.is_some().then(|| x(DType::F32, &[size]));
                        let forward = || [Some(x(dtype, &dims)), w(), Some(positions()), rotation()];
                        macro_rules! op {
                            ($kind:ident) => {{
                                let (axis_of_freq, table) = (axis_of_freq.clone(), has_table);
                                Op::$kind { eps, weight, first, freq, axis_of_freq, pairs, table }
                            }};
                        }
                        table.add(op!(QkNormRope), forward().into_iter().flatten().collect());
                        table.add(
                            op!(QkNormRopeGrad),
                            forward().into_iter().flatten().chain([x(dtype, &dims)]).collect(),
                        );
                        if first == 0 {
                            continue;
                        }
                        // Some tokens are not cached, and of many some have the same row, which the last keeps.
                        let rows = (0..tokens).map(|i| (i * 5 % 37) as f64 - 1.0).collect();
                        let rows = tensor(I32, &[tokens], Data::Values(rows));
                        let heads = |rows: usize| x(dtype, &[rows, dims[1] - first, dims[2]]);
                        let cached = [heads(tokens), heads(40), heads(40), rows];
                        table.add(
                            op!(CachedQkNormRope),
                            forward().into_iter().flatten().chain(cached).collect(),
                        );
                    }
                }
            }
        }
    }
}

pub(super) fn activations(table: &mut Table) {
    for dtype in FLOATS {
        for act in Act::ALL.iter().copied() {
            for dims in [vec![37, 29], vec![100, 260]] {
                let x = || tensor(dtype, &dims, Data::Normal(2.0));
                table.add(Op::Gated { act, p: 0.0 }, vec![x(), x()]);
                for again in [false, true] {
                    table.add(Op::GatedGrad { act, again, p: 0.0 }, vec![x(), x(), x()]);
                }
            }
        }
        for dims in [vec![31, 7], vec![150, 5, 26], vec![40]] {
            let rng = tensor(I32, &[3], Data::Values(vec![12_345.0, -7.0, 99.0]));
            let rows = tensor(I32, &[dims[0], 2], Data::Between(0.0, 1000.0));
            for p in [0.0, 0.25] {
                table.add(Op::Dropout { p }, vec![x(dtype, &dims), rng.clone(), rows.clone()]);
            }
        }
        for dims in [vec![31, 7], vec![37, 48], vec![20, 3, 64]] {
            let (act, p) = (Act::Relu, 0.25);
            let x = || tensor(dtype, &dims, Data::Normal(2.0));
            let drawn = || {
                let rng = tensor(I32, &[3], Data::Values(vec![12_345.0, -7.0, 99.0]));
                [rng, tensor(I32, &[dims[0], 2], Data::Between(0.0, 1000.0))]
            };
            table.add(Op::Gated { act, p }, [x(), x()].into_iter().chain(drawn()).collect());
            for again in [false, true] {
                let ins = [x(), x(), x()].into_iter().chain(drawn()).collect();
                table.add(Op::GatedGrad { act, again, p }, ins);
            }
        }
    }
}

/// Tokens that must equal the oracle's, for every sampling mode, with vocabularies of one and of many iterations per block.
pub(super) fn samples(table: &mut Table) {
    for (vocab, spread) in [(5, 3.0), (1000, 4.0), (50_257, 8.0), (151_936, 12.0)] {
        sample_rows(table, vocab, |_| Data::Between(-spread, spread));
    }
    // Many equally likely tokens: rows of one, three and five different logits, of which the last have no mass.
    let (vocab, logits) = (30_011, [0.5, 0.0, -1.5, 3.0, f64::NEG_INFINITY]);
    let logit = |i: usize| logits[i % vocab * 7919 % (1 + i / vocab % 3 * 2)];
    sample_rows(table, vocab, |elements| Data::Values((0..elements).map(logit).collect()));
}

/// Draws from rows of logits in every way.
fn sample_rows(table: &mut Table, vocab: usize, logits: impl Fn(usize) -> Data) {
    let ways = [
        (0, 1.0, 1.0),
        (0, 0.0, 1.0),
        (40, 0.8, 1.0),
        (0, 1.0, 0.9),
        (50, 1.3, 0.95),
        (1, 1.0, 1.0),
        (3, 5.0, 0.5),
    ];
    let rows = 3 * ways.len();
    let numbers = |s: usize| {
        // One row draws from a subset of the tokens, one from none.
        let size = if s == 1 {
            vocab / 2
        } else if s == 9 {
            0
        } else {
            vocab
        };
        [size, ways[s % ways.len()].0, 77, 5, s, 11 * s].map(|n| n as f64)
    };
    let shares = |s: usize| [ways[s % ways.len()].1, ways[s % ways.len()].2];
    let ins = vec![
        tensor(DType::F32, &[rows, vocab], logits(rows * vocab)),
        tensor(I32, &[rows, 6], Data::Values((0..rows).flat_map(numbers).collect())),
        tensor(DType::F32, &[rows, 2], Data::Values((0..rows).flat_map(shares).collect())),
    ];
    table.add_within(Op::Sample {}, ins, 1e-6);
}

pub(super) fn norms_of_sums(table: &mut Table) {
    for dtype in FLOATS {
        for (rows, columns, rank) in [(1, 1, 1), (9, 131, 3), (24, 514, 16), (61, 1152, 48)] {
            let w = tensor(dtype, &[rows, columns], Data::Normal(1.0));
            let low = [x(DType::F32, &[rank, columns]), x(DType::F32, &[rows, rank])];
            table.add_within(Op::LowRankNorm { scale: 0.7 }, [vec![w], low.to_vec()].concat(), 1e-5);
        }
    }
}

pub(super) fn losses(table: &mut Table) {
    let modes = [(DType::F32, Compute::Full), (DType::F32, Compute::Tf32), (DType::BF16, Compute::Full)];
    for (dtype, compute) in modes {
        let none = Cap::NONE;
        // The third is a head of two classes, the last has logits beyond its cap.
        for (rows, width, words, cap) in [
            (37, 24, 61, none),
            (130, 32, 304, none),
            (8, 48, 2, none),
            (37, 24, 61, Cap(Some(1.5))),
            (37, 24, 64, Cap(Some(1.5))),
        ] {
            let x = || tensor(dtype, &[rows, width], Data::Normal(0.5));
            let w = || tensor(dtype, &[words, width], Data::Normal(0.5));
            let target = || index(rows, words);
            let weight = || tensor(DType::F32, &[rows], Data::Between(0.0, 2.0));
            let dw = || tensor(DType::F32, &[words, width], Data::Normal(1.0));
            table.add(Op::HeadLoss { compute, cap }, vec![x(), w(), target(), weight()]);
            // The gradient takes the forward pass's lse; the gradient of each row stands in for its weight.
            let lse = || {
                let of = Data::Of { op: Op::HeadLoss { compute, cap }, ins: vec![0, 1, 2, 4], out: 2 };
                tensor(DType::F32, &[rows], of)
            };
            for base in [false, true] {
                let ins = [x(), w(), target(), weight()].into_iter().chain(base.then(dw));
                table.add(Op::HeadLossTrain { base, compute, cap }, ins.collect());
                let ins = [x(), w(), target(), lse(), weight()].into_iter().chain(base.then(dw));
                table.add(Op::HeadLossGrad { base, kept: false, compute, cap }, ins.collect());
                if words % 8 != 0 {
                    continue;
                }
                let of = Data::Of { op: Op::HeadLoss { compute, cap }, ins: vec![0, 1, 2, 4], out: 4 };
                let logits = tensor(dtype, &[rows, words], of);
                let ins = [x(), w(), target(), lse(), weight(), logits].into_iter().chain(base.then(dw));
                table.add(Op::HeadLossGrad { base, kept: true, compute, cap }, ins.collect());
            }
        }
    }
}

pub(super) fn updates(table: &mut Table) {
    let (f32s, bf16) = (DType::F32, DType::BF16);
    for (dtype, moments, copy) in
        [(f32s, f32s, false), (f32s, f32s, true), (f32s, bf16, true), (bf16, bf16, false)]
    {
        // Element numbers beyond 32 bits.
        let first = if moments == dtype { 0 } else { (5 << 32) + 8 };
        let (beta1, beta2, eps, weight_decay, lr_scale) = (0.9, 0.95, 1e-8, 0.1, 0.5);
        let op = Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first };
        for (is_finite, updates, dims) in
            [(1.0, 1.0, vec![67]), (1.0, 20.0, vec![110, 150]), (0.0, 3.0, vec![9, 5])]
        {
            let one = |value: f64| tensor(dtype, &[1], Data::Values(vec![value]));
            let mut ins = vec![x(dtype, &dims), x(dtype, &dims), x(moments, &dims)];
            ins.push(tensor(moments, &dims, Data::Between(0.01, 1.0)));
            ins.extend([one(0.1), one(0.5), one(updates), one(is_finite)]);
            table.add(op.clone(), ins.clone());
            if updates > 1.0 {
                table.add(op.clone(), [ins, vec![rank_of_shares()]].concat());
            }
        }
    }
    updates_of_blocks(table);
}

/// The input that gives the share that a rank updates.
fn rank_of_shares() -> Input {
    tensor(DType::I32, &[1], Data::Values(vec![3.0]))
}

/// 8-bit moments: codes may differ by one step from the oracle's, which is at most an eighth; weights and scales must equal it.
fn updates_of_blocks(table: &mut Table) {
    let (beta1, beta2, eps, weight_decay, lr_scale, first) = (0.9, 0.95, 1e-8, 0.1, 0.5, (5 << 32) + 8);
    for (copy, is_finite, updates, dims) in [
        (false, 1.0, 1.0, vec![67]),
        (true, 1.0, 20.0, vec![110, 150]),
        (true, 1.0, 7.0, vec![64, 256]),
        (false, 0.0, 3.0, vec![9, 50]),
    ] {
        let blocks = dims.iter().product::<usize>().div_ceil(BLOCK);
        let one = |value: f64| tensor(DType::F32, &[1], Data::Values(vec![value]));
        // Powers of two, like real scales.
        let scales = |power: i32| {
            let values = (0..blocks).map(|b| 2f64.powi(power - (b % 5) as i32)).collect();
            tensor(DType::F32, &[blocks], Data::Values(values))
        };
        let mut ins = vec![x(DType::F32, &dims), x(DType::F32, &dims)];
        ins.push(tensor(DType::E4M3, &dims, Data::Normal(40.0)));
        ins.push(tensor(DType::E4M4, &dims, Data::Between(1.0, 250.0)));
        ins.extend([scales(-6), scales(-8), one(0.1), one(0.5), one(updates), one(is_finite)]);
        let op = Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy, first };
        table.add_within(op.clone(), ins.clone(), 0.125);
        if copy {
            table.add_within(op, [ins, vec![rank_of_shares()]].concat(), 0.125);
        }
    }
}
