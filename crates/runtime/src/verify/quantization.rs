//! Cases of quantising to 8-bit floats and of NF4, which is dequantised or requantised to 8-bit floats.

use flatout_ir::Op;
use flatout_ir::nf4::{self, NESTED, dynamic_map};
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::quantize::Source;
use flatout_ir::types::DType;

use super::Data;
use super::cases::{FLOATS, FP8, Input, Table, bytes, tensor, x};

/// To the bit: sizes in whole tiles and odd ones, scales that fit, saturate and are not powers of two, and non-finite values.
pub(super) fn quantized(table: &mut Table) {
    let scalar = |value: f64| tensor(DType::F32, &[1], Data::Values(vec![value]));
    for (to, dtype) in FP8.into_iter().flat_map(|to| FLOATS.map(|dtype| (to, dtype))) {
        let mut exact = |op: Op, ins: Vec<Input>| {
            table.add(op, ins);
            table.0.last_mut().expect("just added").bound = 0.0;
        };
        let given = Op::Quantize { to, current: false, of: Source::Given };
        for dims in [[37, 29], [16, 48], [130, 272], [200, 24], [1, 5], [33, 1]] {
            let wide = || tensor(dtype, &dims, Data::Normal(3.0));
            exact(given.clone(), vec![wide(), scalar(0.0625), scalar(0.5)]);
            exact(Op::Quantize { to, current: true, of: Source::Given }, vec![wide()]);
        }
        let small = || tensor(dtype, &[64, 96], Data::Normal(1e-6));
        exact(given.clone(), vec![small(), scalar(3e-9), scalar(7.0)]);
        exact(Op::Quantize { to, current: true, of: Source::Given }, vec![small()]);
        let mut values = vec![0.25; 128];
        (values[3], values[40], values[90]) = (f64::NAN, f64::NEG_INFINITY, -0.0);
        let edges = || tensor(dtype, &[8, 16], Data::Values(values.clone()));
        exact(given, vec![edges(), scalar(1.0), scalar(0.0)]);
        exact(Op::Quantize { to, current: true, of: Source::Given }, vec![edges()]);
        exact(
            Op::Quantize { to, current: true, of: Source::Given },
            vec![tensor(dtype, &[3, 4], Data::Values(vec![0.0; 12]))],
        );
    }
    // Tiles inside the matrix, which are read without a test of each row, beside those at its edges.
    for dims in [[700, 300], [256, 192]] {
        let many = tensor(DType::BF16, &dims, Data::Normal(2.0));
        let of = Source::Given;
        table.add(
            Op::Quantize { to: DType::E4M3, current: false, of },
            vec![many, scalar(0.0625), scalar(0.5)],
        );
    }
    // An activation's last bits may fall on either side of a rounding boundary, and the oracle rounds before it.
    for (act, dtype) in
        [Act::Silu, Act::Gelu, Act::Relu, Act::GeluExact].into_iter().zip([FLOATS, FLOATS].concat())
    {
        for dims in [[37, 29], [130, 136], [24, 64], [256, 192]] {
            for (to, of) in [
                (DType::E4M3, Source::Gated(act)),
                (DType::E5M2, Source::GatedGrad { act, again: false }),
                (DType::E5M2, Source::GatedGrad { act, again: true }),
            ] {
                let ins = (0..of.tensors()).map(|_| x(dtype, &dims));
                let ins = ins.chain(of.makes_again().then(|| scalar(0.015625)));
                let ins = ins.chain([scalar(0.0078125), scalar(0.5)]).collect();
                table.add(Op::Quantize { to, current: false, of }, ins);
                table.0.last_mut().expect("just added").bound = 4e-2;
            }
        }
    }
}

/// NF4 weights, to the bit: one and several, with rows that end inside blocks, and large enough for several threads.
pub(super) fn dequantized(table: &mut Table) {
    let shapes: [(&[usize], usize); 6] =
        [(&[1], 2), (&[7], 26), (&[5, 3, 9], 88), (&[64], 64), (&[40, 8], 704), (&[300, 100], 1024)];
    for (rows, columns) in shapes {
        for (to, nested) in FLOATS.into_iter().flat_map(|to| [(to, true), (to, false)]) {
            let op = Op::Dequantize { rows: rows.to_vec(), to, nested };
            table.add_within(op, nf4_weights(rows, columns, nested), 0.0);
        }
    }
}

/// NF4 weights as E4M3 codes, to the bit, along rows and along columns: one and several, with rows that end inside blocks and at every
/// place in a tile, and large enough for several threads. The least scale that fits, and one for which values saturate.
pub(super) fn requantized(table: &mut Table) {
    let shapes: [(&[usize], usize); 7] = [
        (&[1], 16),
        (&[7], 48),
        (&[5, 3, 9], 80),
        (&[64], 64),
        (&[40, 8], 704),
        (&[16, 128, 130], 144),
        (&[300, 100], 1024),
    ];
    for (rows, columns) in shapes {
        for (transposed, exponent) in [(false, -11), (true, -11), (false, -14), (true, -14)] {
            let scale = tensor(DType::F32, &[1], Data::Values(vec![2f64.powi(exponent)]));
            let ins = [nf4_weights(rows, columns, true), vec![scale]].concat();
            table.add_within(Op::Requantize { rows: rows.to_vec(), transposed }, ins, 0.0);
        }
    }
}

/// Weights in NF4, a part after the other, of at most 0.2137 in magnitude.
fn nf4_weights(rows: &[usize], columns: usize, nested: bool) -> Vec<Input> {
    let mut ins = vec![bytes(&[rows.iter().sum(), columns / 2])];
    if nested {
        ins.push(tensor(DType::F32, &[256], Data::Values(dynamic_map().map(f64::from).to_vec())));
    }
    for rows in rows {
        let blocks = nf4::blocks(rows * columns);
        if nested {
            ins.push(bytes(&[blocks]));
            ins.push(tensor(DType::F32, &[blocks.div_ceil(NESTED)], Data::Between(1e-4, 0.2)));
            ins.push(tensor(DType::F32, &[1], Data::Values(vec![0.0137])));
        } else {
            ins.push(tensor(DType::F32, &[blocks], Data::Between(1e-4, 0.2)));
        }
    }
    ins
}
