//! Cases of operations that write or move elements: sources, reshapes, gathers and scatters, parts of images.

use flatout_ir::Op;
use flatout_ir::types::DType;

use super::Data;
use super::cases::{FLOATS, FP8, I32, Table, bytes, index, tensor, x};

pub(super) fn sources_and_copies(table: &mut Table) {
    for dtype in [DType::F32, DType::BF16, I32] {
        table.add(Op::Fill { value: -3.0, dtype, dims: vec![5, 7] }, vec![]);
        table.add(Op::Iota { dtype, dims: vec![3, 5, 2], axis: 1 }, vec![]);
        let whole = tensor(dtype, &[6, 4], Data::Between(-100.0, 100.0));
        table.add(Op::Reshape { dims: vec![3, 8] }, vec![whole.clone()]);
        table.add(Op::Reshape { dims: vec![4, 6] }, vec![whole]);
    }
    for dtype in FP8 {
        let codes = tensor(dtype, &[6, 4], Data::Between(-100.0, 100.0));
        table.add(Op::Reshape { dims: vec![3, 8] }, vec![codes.clone()]);
        table.add(Op::Reshape { dims: vec![4, 6] }, vec![codes]);
        table.add(Op::Reshape { dims: vec![160, 301] }, vec![x(dtype, &[301, 160])]);
    }
    for dims in [[3, 8], [4, 6]] {
        table.add(Op::Reshape { dims: dims.to_vec() }, vec![bytes(&[6, 4])]);
    }
    table.add(Op::Reshape { dims: vec![160, 301] }, vec![bytes(&[301, 160])]);
    table.add(Op::Iota { dtype: I32, dims: vec![200, 300], axis: 0 }, vec![]);
    table.add(Op::Reshape { dims: vec![301, 160] }, vec![x(DType::F32, &[301, 20, 8])]);
}

pub(super) fn indices(table: &mut Table) {
    for dtype in [DType::F32, DType::BF16, I32] {
        let x = |dims: &[usize]| tensor(dtype, dims, Data::Between(-50.0, 50.0));
        table.add(Op::Gather {}, vec![x(&[13, 7]), index(29, 13)]);
        table.add(Op::Gather {}, vec![x(&[50, 3, 17]), index(400, 50)]);
        table.add(Op::Gather {}, vec![x(&[13]), index(29, 13)]);
        // Every destination once, so that the order of replacement does not matter, and some dropped.
        let places = (0..9).map(|i| if i == 4 { -1.0 } else { (i * 5 % 13) as f64 }).collect();
        let places = tensor(I32, &[9], Data::Values(places));
        table.add(Op::RowScatter {}, vec![x(&[13, 3, 5]), x(&[9, 3, 5]), places]);
        // Several rows with one destination: the last wins.
        for rows in [64, 700] {
            let places = (0..rows).map(|i| (i * 5 % 37) as f64 - 1.0).collect();
            let places = tensor(I32, &[rows], Data::Values(places));
            table.add(Op::RowScatter {}, vec![x(&[40, 2, 8]), x(&[rows, 2, 8]), places]);
        }
    }
    for dtype in FLOATS {
        for out in FLOATS {
            for (n, rows, inner) in [(29, 13, vec![7]), (900, 37, vec![2, 24]), (5, 600, vec![40])] {
                let dims = |n: usize| [vec![n], inner.clone()].concat();
                let op = |base| Op::ScatterAdd { rows, out, base };
                table.add(op(false), vec![x(dtype, &dims(n)), index(n, rows)]);
                table.add(op(true), vec![x(dtype, &dims(n)), index(n, rows), x(out, &dims(rows))]);
            }
        }
    }
}

/// Bytes that must equal the oracle's: enlarged, reduced, mirrored, of one pixel, left out.
pub(super) fn parts_of_images(table: &mut Table) {
    for ([images, rows, columns], [height, width]) in
        [([4, 9, 11], [9, 11]), ([3, 32, 32], [32, 32]), ([2, 31, 17], [10, 7]), ([2, 5, 6], [28, 29])]
    {
        let part = |b: usize| {
            let (w, h) = (1 + 7 * b % columns, 1 + 5 * b % rows);
            let (left, top) = (3 * b % (columns - w + 1), 2 * b % (rows - h + 1));
            let whole = [b % images, 0, 0, columns, rows, b % 2];
            let cut = [b % images, left, top, w, h, b % 2];
            let numbers = if b.is_multiple_of(5) { whole } else { cut };
            numbers.map(|n| if b == 7 { -1.0 } else { n as f64 })
        };
        let numbers = Data::Values((0..21).flat_map(part).collect());
        let ins = vec![bytes(&[images, rows, columns, 3]), tensor(I32, &[21, 6], numbers)];
        table.add_within(Op::Resample { height, width }, ins, 0.0);
    }
}
