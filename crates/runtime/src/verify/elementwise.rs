//! Cases of elementwise functions, casts and reductions.

use flatout_ir::Op;
use flatout_ir::graph::{Class, Graph, Init, Slot};
use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::types::{DType, TensorType};

use super::Data;
use super::cases::{FLOATS, I32, Table, bytes, tensor, x};

pub(super) fn maps(table: &mut Table) {
    let unary = [
        E::Neg,
        E::Exp,
        E::Square,
        E::Sin,
        E::Cos,
        E::Relu,
        E::Step,
        E::Silu,
        E::SiluSlope,
        E::Gelu,
        E::GeluSlope,
        E::Tanh,
        E::GeluExact,
        E::GeluExactSlope,
        E::Finite,
        E::StopGradient,
        E::Fp8Scale(DType::E4M3),
        E::Fp8Scale(DType::E5M2),
        E::Scale(0.3),
        E::Offset(-1.7),
    ];
    let positive = [E::Log, E::Sqrt, E::Rsqrt, E::Recip];
    let binary = [E::Add, E::Sub, E::Mul, E::Div, E::Max, E::Min, E::Less, E::LessEqual, E::Equal];
    for dtype in FLOATS {
        let dims = [9, 131];
        for f in unary {
            table.add(Op::Map { f }, vec![tensor(dtype, &dims, Data::Normal(3.0))]);
        }
        for f in positive {
            table.add(Op::Map { f }, vec![tensor(dtype, &dims, Data::Between(0.01, 4.0))]);
        }
        for f in binary {
            table.add(Op::Map { f }, vec![x(dtype, &dims), tensor(dtype, &dims, Data::Between(0.5, 2.0))]);
        }
        let condition = tensor(dtype, &dims, Data::Values((0..9 * 131).map(|i| (i % 3) as f64).collect()));
        table.add(Op::Map { f: E::Select }, vec![condition, x(dtype, &dims), x(dtype, &dims)]);
        for to in [DType::F32, DType::BF16, I32] {
            table.add(Op::Map { f: E::Cast(to) }, vec![tensor(dtype, &dims, Data::Normal(20.0))]);
        }
    }
    let whole = || tensor(I32, &[300], Data::Between(-70_000.0, 70_000.0));
    for f in [E::Neg, E::Square, E::Scale(3.0), E::Offset(-5.0), E::Cast(DType::F32), E::Relu] {
        let small = tensor(I32, &[300], Data::Between(-40_000.0, 40_000.0));
        table.add(Op::Map { f }, vec![small]);
    }
    for f in [E::Add, E::Sub, E::Max, E::Less, E::Equal] {
        table.add(Op::Map { f }, vec![whole(), whole()]);
    }
    table.add(Op::Map { f: E::Add }, vec![x(DType::F32, &[50_001]), x(DType::F32, &[50_001])]);
    table.add(
        Op::Map { f: E::Finite },
        vec![tensor(DType::F32, &[3], Data::Values(vec![1.0, f64::NAN, f64::INFINITY]))],
    );
    let edges = vec![f64::NEG_INFINITY, f64::INFINITY, f64::NAN, 0.0, -1000.0];
    table.add(Op::Map { f: E::Exp }, vec![tensor(DType::F32, &[5], Data::Values(edges))]);
}

/// Casts to and from 8-bit floats: every code, and values between, below and beyond them.
pub(super) fn casts(table: &mut Table) {
    for (dtype, max) in [(DType::E4M3, 448.0), (DType::E5M2, 57_344.0)] {
        let edges = [0.0, -0.0, max, -max, 1.04 * max, -1e30, f64::INFINITY, f64::NAN, 1e-9, 0.0009765625];
        let values = edges.into_iter().chain((0..1014).map(|i| {
            let size = 2f64.powf((i % 507) as f64 / 507.0 * 34.0 - 18.0);
            if i < 507 { size } else { -size }
        }));
        let values = Data::Values(values.collect());
        for wide in FLOATS {
            table.add(Op::Map { f: E::Cast(dtype) }, vec![tensor(wide, &[8, 128], values.clone())]);
            table.add(Op::Map { f: E::Cast(wide) }, vec![tensor(dtype, &[8, 128], values.clone())]);
            table.add(Op::Map { f: E::Cast(dtype) }, vec![x(wide, &[9, 131])]);
        }
        let mut body = Graph::default();
        let ty = TensorType::new(dtype, [7, 45]);
        let slot = Slot { path: "in0".into(), ty, class: Class::Input, init: Init::Zeros, part: None };
        let slot = body.add_slot(slot);
        let mut v = body.add(Op::Read { slot }, vec![], "in0");
        for f in [E::Cast(DType::F32), E::Scale(3.0), E::Cast(dtype)] {
            v = body.add(Op::Map { f }, vec![v], "");
        }
        body.results = vec![("out0".into(), v)];
        table.add(Op::Region { body: Box::new(body) }, vec![x(dtype, &[7, 45])]);
        FLOATS.into_iter().for_each(|wide| dequantizing_region(table, dtype, wide));
    }
}

/// Codes times their scale, as frozen 8-bit weights are read.
fn dequantizing_region(table: &mut Table, codes: DType, wide: DType) {
    let dims = [40, 136];
    let mut body = Graph::default();
    let ins = [codes, DType::F32].map(|dtype| {
        let (path, ty) = (dtype.name().to_string(), TensorType::new(dtype, dims));
        let slot = body.add_slot(Slot { path, ty, class: Class::Input, init: Init::Zeros, part: None });
        body.add(Op::Read { slot }, vec![], "")
    });
    let mut map = |f: E, args: &[flatout_ir::Value]| body.add(Op::Map { f }, args.to_vec(), "");
    let values = map(E::Cast(DType::F32), &ins[..1]);
    let scaled = map(E::Mul, &[values, ins[1]]);
    let out = if wide == DType::F32 { scaled } else { map(E::Cast(wide), &[scaled]) };
    body.results = vec![("out0".into(), out)];
    let scale = tensor(DType::F32, &dims, Data::Values(vec![0.0078125; 40 * 136]));
    table.add(Op::Region { body: Box::new(body) }, vec![x(codes, &dims), scale]);
}

/// Bytes converted to numbers, alone and before further operations: exact in every type but bf16, with eight significant bits.
pub(super) fn pixels(table: &mut Table) {
    for to in [DType::F32, DType::BF16, I32] {
        table.add(Op::Map { f: E::Cast(to) }, vec![bytes(&[9, 131])]);
    }
    for to in FLOATS {
        let mut body = Graph::default();
        let ty = TensorType::new(DType::U8, [7, 45, 3]);
        let slot = Slot { path: "in0".into(), ty, class: Class::Input, init: Init::Zeros, part: None };
        let slot = body.add_slot(slot);
        let mut v = body.add(Op::Read { slot }, vec![], "in0");
        for f in [E::Cast(to), E::Scale(2.0 / 255.0), E::Offset(-1.0)] {
            v = body.add(Op::Map { f }, vec![v], "");
        }
        body.results = vec![("out0".into(), v)];
        table.add(Op::Region { body: Box::new(body) }, vec![bytes(&[7, 45, 3])]);
    }
}

pub(super) fn reductions(table: &mut Table) {
    for by in [Fold::Sum, Fold::Max, Fold::SumSquares] {
        for dtype in FLOATS {
            for axis in 0..3 {
                table.add(Op::Reduce { axis, by }, vec![x(dtype, &[5, 67, 9])]);
            }
        }
        table.add(Op::Reduce { axis: 0, by }, vec![tensor(DType::F32, &[40_000], Data::Between(0.0, 1.0))]);
        table.add(Op::Reduce { axis: 0, by }, vec![tensor(DType::F32, &[700, 65], Data::Between(0.0, 1.0))]);
        table.add(Op::Reduce { axis: 1, by }, vec![tensor(I32, &[4, 5, 3], Data::Between(-9.0, 9.0))]);
    }
}
