//! Cases of regions and bundles: elementwise operations that are computed in one launch.

use flatout_ir::Op;
use flatout_ir::graph::{Class, Graph, Init, Slot};
use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::types::{DType, TensorType};

use super::Data;
use super::cases::{FLOATS, FP8, I32, Table, bytes, tensor, x};

/// r = silu(a) b + c, s = r^2 in bf16, and a itself: values used twice, a cast inside, an output that is an input.
pub(super) fn regions(table: &mut Table) {
    for (dtype, dims) in [(DType::F32, vec![7, 37]), (DType::BF16, vec![7, 37]), (DType::F32, vec![40, 1030])]
    {
        let mut body = Graph::default();
        let ins: Vec<_> = (0..3)
            .map(|i| {
                let ty = TensorType::new(dtype, dims.clone());
                let slot =
                    Slot { path: i.to_string(), ty, class: Class::Input, init: Init::Zeros, part: None };
                let slot = body.add_slot(slot);
                body.add(Op::Read { slot }, vec![], "")
            })
            .collect();
        let mut map = |f: E, args: &[flatout_ir::Value]| body.add(Op::Map { f }, args.to_vec(), "");
        let a = map(E::Silu, &[ins[0]]);
        let ab = map(E::Mul, &[a, ins[1]]);
        let r = map(E::Add, &[ab, ins[2]]);
        let unused = map(E::Exp, &[r]);
        let square = map(E::Square, &[r]);
        let half = map(E::Scale(0.5), &[square]);
        let s = map(E::Cast(DType::BF16), &[half]);
        let whole = map(E::Cast(I32), &[unused]);
        let count = map(E::Offset(3.0), &[whole]);
        for (name, v) in [("r", r), ("s", s), ("a", ins[0]), ("count", count), ("half", half)] {
            body.results.push((name.into(), v));
        }
        let small = || tensor(dtype, &dims, Data::Normal(0.7));
        table.add(Op::Region { body: Box::new(body) }, vec![small(), small(), small()]);
        let region = table.0.last_mut().expect("just added");
        // s is rounded to bf16, and a value next to a rounding boundary may come out one step apart.
        region.bound = 1.5e-2;
    }
    summed_regions(table);
    bundles(table);
    // Only integers, which the row supports.
    let mut body = Graph::default();
    let ty = TensorType::new(I32, [33]);
    let slot =
        body.add_slot(Slot { path: "0".into(), ty, class: Class::Input, init: Init::Zeros, part: None });
    let read = body.add(Op::Read { slot }, vec![], "");
    let next = body.add(Op::Map { f: E::Offset(1.0) }, vec![read], "");
    body.results.push(("next".into(), next));
    table.add(Op::Region { body: Box::new(body) }, vec![tensor(I32, &[33], Data::Between(-9.0, 9.0))]);
}

/// p = x y and q = p^2 in bf16 with their sums over rows, and only the sum of an input: rows and columns that do and do not
/// fill a block's pieces and lanes, a single column, a single row, and rows whose sums cancel.
fn summed_regions(table: &mut Table) {
    for (dtype, dims) in FLOATS.into_iter().flat_map(|dtype| {
        [[7, 37], [300, 40], [130, 1030], [515, 8], [70, 1], [1, 96], [200, 48], [1111, 264]]
            .map(|d| (dtype, d))
    }) {
        let mut body = Graph::default();
        let ins = [0, 1].map(|i| {
            let (path, ty) = (format!("in{i}"), TensorType::new(dtype, dims));
            let slot = body.add_slot(Slot { path, ty, class: Class::Input, init: Init::Zeros, part: None });
            body.add(Op::Read { slot }, vec![], "")
        });
        let mut add = |op: Op, args: &[flatout_ir::Value]| body.add(op, args.to_vec(), "");
        let sum = Op::Reduce { axis: 0, by: Fold::Sum };
        let p = add(Op::Map { f: E::Mul }, &ins);
        let over_p = add(sum.clone(), &[p]);
        let square = add(Op::Map { f: E::Square }, &[p]);
        let q = add(Op::Map { f: E::Cast(DType::BF16) }, &[square]);
        let over_q = add(sum.clone(), &[q]);
        let over_x = add(sum, &[ins[0]]);
        for (name, v) in [("p", p), ("over p", over_p), ("over q", over_q), ("over x", over_x)] {
            body.results.push((name.into(), v));
        }
        let op = Op::Region { body: Box::new(body) };
        let ins = vec![x(dtype, &dims), tensor(dtype, &dims, Data::Between(0.5, 1.5))];
        // Values are exact operations rounded once, so only the order of additions differs.
        table.add_within(op, ins, 1e-5);
    }
}

/// Regions of several shapes and types in one launch: a sum, one with two outputs of which one is an input, one with the type
/// and shape of another, and one that takes several blocks.
fn bundles(table: &mut Table) {
    for dtype in FLOATS.into_iter().chain(FP8).chain([DType::U8]) {
        let (mut body, mut ins) = (Graph::default(), vec![]);
        let mut read = |body: &mut Graph, dtype: DType, dims: &[usize]| {
            let (path, ty) = (format!("in{}", ins.len()), TensorType::new(dtype, dims));
            ins.push(match dtype {
                DType::U8 => bytes(dims),
                _ => tensor(dtype, dims, Data::Between(-3.0, 3.0)),
            });
            let slot = body.add_slot(Slot { path, ty, class: Class::Input, init: Init::Zeros, part: None });
            body.add(Op::Read { slot }, vec![], "")
        };
        let mut outs = vec![];
        for dims in [&[37][..], &[5, 3], &[37], &[3, 5000]] {
            let [a, b] = [dtype, DType::F32].map(|dtype| read(&mut body, dtype, dims));
            let wide = body.add(Op::Map { f: E::Cast(DType::F32) }, vec![a], "");
            outs.push(body.add(Op::Map { f: E::Add }, vec![wide, b], ""));
        }
        let count = read(&mut body, I32, &[7]);
        outs.extend([count, body.add(Op::Map { f: E::Offset(2.0) }, vec![count], "")]);
        body.results = outs.into_iter().enumerate().map(|(i, v)| (format!("out{i}"), v)).collect();
        table.add_within(Op::Bundle { body: Box::new(body) }, ins, 1e-5);
    }
}
