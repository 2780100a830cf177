//! Verification cases for matrix products: types, modes and layouts, at sizes that suit tensor cores and at odd ones.

use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::product::{Compute, plain};
use flatout_ir::ops::thin_product::Thin;
use flatout_ir::types::DType;
use flatout_ir::{Op, OpKind};

use super::Data;
use super::cases::{FLOATS, I32, Input, Table, tensor, x};

/// The relative L2 error that a mode allows in addition to the types. In TF32 an operand is off by at most a relative 2^-10,
/// however the device reduces it to 10 bits (the oracle rounds, some devices truncate), so a term is off by 2^-9; the loss
/// chains two such products.
///
/// Tensor cores accumulate 8-bit terms with fewer bits than f32, and add the sum to f32 every few terms.
pub(super) fn mode_bound(op: &Op, ins: &[Input]) -> Option<f64> {
    match (op.compute()?, op.kind()) {
        (_, OpKind::Product) if ins[0].0.dtype.is_fp8() => Some(2e-3),
        (Compute::Full, _) => None,
        (Compute::Tf32, OpKind::Product) => Some(2e-3),
        (Compute::Tf32, _) => Some(4e-3),
    }
}

const TRANSPOSED: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

/// The stored extents of an operand, with its axes swapped if it is transposed.
fn stored(transposed: bool, rows: usize, columns: usize) -> [usize; 2] {
    if transposed { [columns, rows] } else { [rows, columns] }
}

pub(super) fn products(table: &mut Table) {
    let compute = Compute::Full;
    for dtype in FLOATS {
        for (ta, tb) in TRANSPOSED {
            for (m, n, k) in [(37, 29, 19), (1, 33, 40), (33, 1, 40), (130, 70, 67)] {
                let (a, b) = (stored(ta, m, k), stored(tb, k, n));
                for out in FLOATS {
                    let op = |base| Op::Product { ta, tb, out, base, compute, epilogue: Epilogue::None };
                    table.add(op(false), vec![x(dtype, &a), x(dtype, &b)]);
                    table.add(op(true), vec![x(dtype, &a), x(dtype, &b), x(out, &[m, n])]);
                }
            }
        }
        let op = plain(false, true, dtype, compute);
        table.add(op, vec![x(dtype, &[3, 2, 17, 8]), x(dtype, &[3, 2, 5, 8])]);
    }
    // Several threads within one product, with k in several blocks, and over a batch.
    let op = |ta, tb, base| Op::Product { ta, tb, out: DType::F32, base, compute, epilogue: Epilogue::None };
    table.add(
        op(true, false, true),
        vec![x(DType::F32, &[1500, 40]), x(DType::F32, &[1500, 48]), x(DType::F32, &[40, 48])],
    );
    table.add(op(false, true, false), vec![x(DType::F32, &[333, 64]), x(DType::F32, &[96, 64])]);
    table.add(op(false, false, false), vec![x(DType::F32, &[12, 40, 33]), x(DType::F32, &[12, 33, 40])]);
    tf32(table);
    epilogues(table);
    fp8(table);
    of_matrix_units(table);
    of_many_tiles(table);
    gated(table);
    gated_codes(table);
    activated(table);
}

/// For tiled kernels: extents that do and do not fill tiles, in rows of multiples of 16 bytes, and several matrices at once.
fn of_matrix_units(table: &mut Table) {
    let (bf16, compute) = (DType::BF16, Compute::Full);
    for (ta, tb) in TRANSPOSED {
        let op = || plain(ta, tb, bf16, compute);
        for (m, n, k) in [(128, 64, 64), (136, 72, 200), (328, 520, 104), (1032, 136, 328)] {
            table.add(op(), vec![x(bf16, &stored(ta, m, k)), x(bf16, &stored(tb, k, n))]);
        }
        // Weights' gradients: in f32, onto those so far, with a long inner extent that our kernel splits.
        for (m, n, k) in [(136, 72, 200), (328, 264, 104), (128, 64, 1032)] {
            for base in [false, true] {
                let (out, epilogue) = (DType::F32, Epilogue::None);
                let op = Op::Product { ta, tb, out, base, compute, epilogue };
                let ins = [x(bf16, &stored(ta, m, k)), x(bf16, &stored(tb, k, n))];
                table.add(op, ins.into_iter().chain(base.then(|| x(out, &[m, n]))).collect());
            }
        }
        let [[a0, a1], [b0, b1]] = [stored(ta, 136, 72), stored(tb, 72, 264)];
        table.add(op(), vec![x(bf16, &[3, a0, a1]), x(bf16, &[3, b0, b1])]);
    }
}

/// For kernels whose tiles depend on how many there are: a tile of 128 by 128, or of 256 by 128, for each multiprocessor of any
/// GPU, and thread blocks that take several. Each layout of an operand occurs with both.
fn of_many_tiles(table: &mut Table) {
    let (bf16, act) = (DType::BF16, Act::GeluExact);
    let mut add = |op: Op, ins: Vec<Input>| {
        table.add(op, ins);
        table.0.last_mut().expect("added").brief = true;
    };
    for (m, n, layouts) in
        [(1544, 1800, [(false, false), (true, true)]), (2568, 2048, [(false, true), (true, false)])]
    {
        for (ta, tb) in layouts {
            let ins = vec![x(bf16, &stored(ta, m, 136)), x(bf16, &stored(tb, 136, n))];
            add(plain(ta, tb, bf16, Compute::Full), ins);
        }
        let k = 72;
        let [x_mk, side] = [x(bf16, &[m, k]), x(bf16, &[m, n])];
        let w = |dims: &[usize]| tensor(bf16, dims, Data::Normal(0.2));
        add(Op::GatedProduct { act: Act::Silu }, vec![x_mk.clone(), w(&[n, k])]);
        let ins = vec![x_mk.clone(), w(&[k, n]), side.clone(), side.clone()];
        add(Op::GatedProductGrad { act: Act::Silu, again: true }, ins);
        let ins = vec![x_mk.clone(), w(&[n, k]), x(DType::F32, &[n])];
        add(Op::ActivatedProduct { act, tb: true, bias: true }, ins);
        let op = Op::ActivatedProductGrad { act, tb: false, again: true, sum: true };
        add(op, vec![x_mk, w(&[k, n]), side]);
    }
}

/// Products followed by gated activations, and by their gradients: less than one tile, and several tiles.
fn gated(table: &mut Table) {
    let bf16 = DType::BF16;
    let sizes = [(37, 24, 40), (130, 72, 64), (300, 136, 72), (520, 328, 200)];
    for (m, f, k) in sizes {
        for &act in Act::ALL {
            let (x_mk, gate) = (x(bf16, &[m, k]), x(bf16, &[m, f]));
            let wide = tensor(bf16, &[2 * f, k], Data::Normal(0.2));
            table.add(Op::GatedProduct { act }, vec![x_mk.clone(), wide]);
            let down = tensor(bf16, &[k, f], Data::Normal(0.2));
            for again in [false, true] {
                let ins = vec![x_mk.clone(), down.clone(), gate.clone(), x(bf16, &[m, f])];
                table.add(Op::GatedProductGrad { act, again }, ins);
            }
        }
    }
}

/// Products of 8-bit operands followed by gated activations in 8 bits: less than one tile, several tiles, and sizes that our
/// kernel leaves to others. The bound allows for sums that fall on either side of a rounding boundary of 8 bits.
fn gated_codes(table: &mut Table) {
    let e4m3 = DType::E4M3;
    let scalar = |value: f64| tensor(DType::F32, &[1], Data::Values(vec![value]));
    for (m, f, k) in [(37, 24, 40), (130, 80, 64), (300, 144, 208), (520, 336, 400)] {
        for &act in Act::ALL {
            let wide = tensor(e4m3, &[2 * f, k], Data::Normal(0.5));
            let scales = [0.25, 0.5, 0.0625, 0.5].map(scalar);
            let ins = [vec![x(e4m3, &[m, k]), wide], scales.to_vec()].concat();
            table.add_within(Op::GatedProduct { act }, ins, 2e-2);
        }
    }
}

/// Products followed by activations, and by their derivatives: with either type of bias and without, either layout of the
/// weight.
fn activated(table: &mut Table) {
    let bf16 = DType::BF16;
    let sizes = [(37, 24, 40), (130, 72, 64), (300, 136, 72), (520, 328, 200)];
    for (m, n, k) in sizes {
        for act in [Act::Gelu, Act::GeluExact] {
            for tb in [true, false] {
                let w = tensor(bf16, &stored(tb, k, n), Data::Normal(0.2));
                let ins = vec![x(bf16, &[m, k]), w];
                table.add(Op::ActivatedProduct { act, tb, bias: false }, ins.clone());
                for bias in FLOATS {
                    let ins = ins.iter().cloned().chain([x(bias, &[n])]).collect();
                    table.add(Op::ActivatedProduct { act, tb, bias: true }, ins);
                }
                let ins: Vec<Input> = ins.into_iter().chain([x(bf16, &[m, n])]).collect();
                for (again, sum) in [(false, false), (false, true), (true, false), (true, true)] {
                    table.add(Op::ActivatedProductGrad { act, tb, again, sum }, ins.clone());
                }
            }
        }
    }
}

/// Both layouts and unaligned, where our kernel runs, as tensor cores support them, and less than a tile, several tiles, and an
/// inner extent that is long enough to be split for Hopper's kernel.
fn fp8(table: &mut Table) {
    let (e4m3, e5m2) = (DType::E4M3, DType::E5M2);
    let scale = |value: f64| tensor(DType::F32, &[1], Data::Values(vec![value]));
    for (a, b) in [(e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2), (e5m2, e5m2)] {
        for out in FLOATS {
            let op = |ta, tb, base| {
                let (compute, epilogue) = (Compute::Full, Epilogue::None);
                Op::Product { ta, tb, out, base, compute, epilogue }
            };
            let scaled = |ins: Vec<Input>| ins.into_iter().chain([scale(0.5), scale(0.03125)]).collect();
            let sizes =
                [(37, 29, 19), (17, 32, 48), (96, 64, 128), (128, 64, 64), (328, 528, 208), (136, 80, 2064)];
            for (m, n, k) in sizes {
                let ins = vec![x(a, &[m, k]), x(b, &[n, k])];
                table.add(op(false, true, false), scaled(ins.clone()));
                table.add(op(false, true, true), scaled([ins, vec![x(out, &[m, n])]].concat()));
            }
            table.add(op(true, false, false), scaled(vec![x(a, &[48, 32]), x(b, &[48, 64])]));
            table.add(op(false, true, false), scaled(vec![x(a, &[3, 16, 32]), x(b, &[3, 48, 32])]));
            table.add(op(false, true, false), scaled(vec![x(a, &[2, 136, 80]), x(b, &[2, 64, 80])]));
        }
    }
}

/// At sizes for which cuBLASLt fuses the epilogue, and at others, for which our kernel applies it.
fn epilogues(table: &mut Table) {
    use DType::{BF16, F32};
    let full = Compute::Full;
    let types = [(F32, F32, full), (F32, F32, Compute::Tf32), (BF16, BF16, full), (BF16, F32, full)];
    for (dtype, out, compute) in types {
        for (m, n, k) in [(37, 29, 19), (48, 40, 24), (1, 64, 32), (96, 128, 64)] {
            let with = |ta, tb, base, epilogue| Op::Product { ta, tb, out, base, compute, epilogue };
            for (tb, b) in [(true, [n, k]), (false, [k, n])] {
                let ab = || vec![x(dtype, &[m, k]), x(dtype, &b)];
                let and = |extra| ab().into_iter().chain([extra]).collect::<Vec<_>>();
                table.add(with(false, tb, false, Epilogue::Relu), ab());
                table.add(with(false, tb, false, Epilogue::Gelu), ab());
                table.add(with(false, tb, false, Epilogue::GeluGrad), and(x(out, &[m, n])));
                for epilogue in [Epilogue::Bias, Epilogue::BiasGelu] {
                    table.add(with(false, tb, false, epilogue), and(x(out, &[n])));
                }
            }
        }
    }
    // A bias in a wider type than the result.
    let op = |epilogue| Op::Product { ta: false, tb: true, out: BF16, base: false, compute: full, epilogue };
    for epilogue in [Epilogue::Bias, Epilogue::BiasGelu] {
        table.add(op(epilogue), vec![x(BF16, &[48, 24]), x(BF16, &[40, 24]), x(F32, &[40])]);
    }
}

fn tf32(table: &mut Table) {
    let (out, compute) = (DType::F32, Compute::Tf32);
    for (ta, tb) in TRANSPOSED {
        for (m, n, k) in [(37, 29, 19), (128, 96, 64), (160, 192, 256)] {
            let op = |base| Op::Product { ta, tb, out, base, compute, epilogue: Epilogue::None };
            let ins = vec![x(out, &stored(ta, m, k)), x(out, &stored(tb, k, n))];
            table.add(op(false), ins.clone());
            table.add(op(true), ins.into_iter().chain([x(out, &[m, n])]).collect());
        }
    }
    let op = plain(false, true, out, compute);
    table.add(op, vec![x(out, &[3, 2, 32, 48]), x(out, &[3, 2, 64, 48])]);
}

/// Ranks that do and do not fill a product of 16 terms, rows and columns that do and do not fill a tile, drop probabilities on
/// both sides of a half, no dropout, and shapes for the slow kernel. The oracle rounds kept elements, which the kernels do not.
pub(super) fn thin_products(table: &mut Table) {
    let (bf16, out) = (DType::BF16, |form| if form == Thin::Weight { DType::F32 } else { DType::BF16 });
    for (m, rank, width, p) in [
        (37, 12, 20, 0.25),
        (333, 24, 200, 0.6),
        (1100, 48, 136, 0.05),
        (70, 64, 192, 0.1),
        (517, 32, 640, 0.5),
    ] {
        let (wide, thin, a) = (x(bf16, &[m, width]), x(bf16, &[m, rank]), x(bf16, &[rank, width]));
        let rng = tensor(I32, &[3], Data::Values(vec![12_345.0, -7.0, 99.0]));
        let rows = tensor(I32, &[m, 2], Data::Between(0.0, 1000.0));
        for (form, base, tensors) in [
            (Thin::Down, false, vec![wide.clone(), a.clone()]),
            (Thin::Up, false, vec![thin.clone(), a.clone()]),
            (Thin::Up, true, vec![thin.clone(), a, wide.clone()]),
            (Thin::Weight, false, vec![thin.clone(), wide.clone()]),
            (Thin::Weight, true, vec![thin, wide, x(DType::F32, &[rank, width])]),
        ] {
            let op = Op::ThinProduct { form, p, out: out(form), base };
            table.add(op, [tensors, vec![rng.clone(), rows.clone()]].concat());
        }
        let (wide, thin) = (x(bf16, &[m, width]), x(bf16, &[m, rank]));
        for (form, factor) in [(Thin::Up, [rank, width]), (Thin::Out, [width, rank])] {
            let op = Op::ThinProduct { form, p: 0.0, out: bf16, base: true };
            table.add(op, vec![thin.clone(), x(bf16, &factor), wide.clone()]);
        }
    }
}
