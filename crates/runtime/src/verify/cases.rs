//! The table of verification cases: odd sizes for every form, and per operation one that is large enough for several threads.

use flatout_ir::graph::{Class, Graph, Init, Slot};
use flatout_ir::nf4::{self, NESTED, dynamic_map};
use flatout_ir::ops::collective::{Combine, Order};
use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::quantize::Source;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::ops::thin_product::Thin;
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Axis, Op, OpKind};

use super::{Case, Data, attention, layers, linear_attention, products};

/// The output type that an operation names, if any.
pub(super) fn output_type(op: &Op) -> Option<DType> {
    match op {
        Op::Fill { dtype, .. } | Op::Iota { dtype, .. } | Op::Map { f: E::Cast(dtype) } => Some(*dtype),
        Op::Product { out, .. } | Op::ThinProduct { out, .. } | Op::ScatterAdd { out, .. } => Some(*out),
        Op::Quantize { to, .. } | Op::Dequantize { to, .. } => Some(*to),
        Op::Requantize { .. } => Some(DType::E4M3),
        Op::Rank { .. } => Some(I32),
        _ => None,
    }
}

/// Bound on the relative L2 error against the oracle. The oracle rounds to bf16 at every primitive, a fused kernel once at the
/// end. Two steps of bf16: stochastically rounded moments are within one of the oracle's.
fn bound(dtype: DType) -> f64 {
    if dtype == DType::BF16 { 1.5e-2 } else { 1e-5 }
}

pub(super) const FP8: [DType; 2] = [DType::E4M3, DType::E5M2];
pub(super) const FLOATS: [DType; 2] = [DType::F32, DType::BF16];
pub(super) const I32: DType = DType::I32;

pub(super) type Input = (TensorType, Data);

pub(super) fn tensor(dtype: DType, dims: &[usize], data: Data) -> Input {
    (TensorType::new(dtype, dims), data)
}

pub(super) fn x(dtype: DType, dims: &[usize]) -> Input {
    tensor(dtype, dims, Data::Normal(1.0))
}

/// Indices from -1, which is dropped, to the last of `rows`.
pub(super) fn index(n: usize, rows: usize) -> Input {
    tensor(I32, &[n], Data::Between(-1.0, rows as f64 - 1.0))
}

/// Collects cases and names each by operation, types and shapes.
#[derive(Default)]
pub(super) struct Table(pub(super) Vec<Case>);

impl Table {
    pub(super) fn add(&mut self, op: Op, ins: Vec<Input>) {
        let types = ins.iter().map(|(ty, _)| ty.dtype).chain(output_type(&op));
        let worst = types.map(bound).chain(products::mode_bound(&op, &ins)).fold(1e-5, f64::max);
        self.add_within(op, ins, worst);
    }

    /// As `add`, with a separate bound.
    pub(super) fn add_within(&mut self, op: Op, ins: Vec<Input>, bound: f64) {
        let attrs: Vec<String> = match op.kind() {
            OpKind::Region | OpKind::Bundle => vec![],
            _ => op.attrs().into_iter().map(|(name, value)| format!("{name}={value}")).collect(),
        };
        let types: Vec<String> = ins.iter().map(|(ty, _)| ty.to_string()).collect();
        let name = format!("{} {} ({})", op.name(), attrs.join(" "), types.join(", "));
        self.push(Case::new(name, op, ins, bound));
    }

    pub(super) fn push(&mut self, case: Case) {
        self.0.push(case);
    }
}

pub fn all() -> Vec<Case> {
    let mut table = Table::default();
    sources_and_copies(&mut table);
    maps(&mut table);
    casts(&mut table);
    pixels(&mut table);
    regions(&mut table);
    reductions(&mut table);
    products::products(&mut table);
    thin_products(&mut table);
    quantized(&mut table);
    dequantized(&mut table);
    requantized(&mut table);
    layers::norms(&mut table);
    layers::rotations(&mut table);
    layers::activations(&mut table);
    indices(&mut table);
    parts_of_images(&mut table);
    layers::samples(&mut table);
    attention::cases(&mut table);
    linear_attention::linear_attention(&mut table);
    layers::losses(&mut table);
    layers::norms_of_sums(&mut table);
    layers::updates(&mut table);
    collectives(&mut table);
    table.0
}

/// With a single rank: tests with several ranks cover real exchanges.
fn collectives(table: &mut Table) {
    let (axis, ways, order) = (Axis::Shard, 1, Order::Tree);
    table.add(Op::Rank { axis }, vec![]);
    for extent in [1, 37, 70_001] {
        for dtype in FLOATS {
            table.add(Op::AllGather { axis, ways }, vec![x(dtype, &[extent])]);
        }
        let x = || x(DType::F32, &[extent]);
        for by in [Combine::Sum, Combine::Max] {
            table.add(Op::AllReduce { axis, ways, by, order }, vec![x()]);
        }
        table.add(Op::ReduceScatter { axis, ways, order, base: false }, vec![x()]);
        table.add(Op::ReduceScatter { axis, ways, order, base: true }, vec![x(), x()]);
    }
}

fn sources_and_copies(table: &mut Table) {
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

/// NF4 weights, to the bit: one and several, with rows that end inside blocks, and large enough for several threads.
fn dequantized(table: &mut Table) {
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
fn requantized(table: &mut Table) {
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

/// Every byte value, repeated.
fn bytes(dims: &[usize]) -> Input {
    let count = dims.iter().product::<usize>();
    tensor(DType::U8, dims, Data::Values((0..count).map(|i| (i * 37 % 256) as f64).collect()))
}

/// Bytes converted to numbers, alone and before further operations: exact in every type but bf16, with eight significant bits.
fn pixels(table: &mut Table) {
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

fn maps(table: &mut Table) {
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
fn casts(table: &mut Table) {
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

/// Ranks that do and do not fill a product of 16 terms, rows and columns that do and do not fill a tile, drop probabilities on
/// both sides of a half, no dropout, and shapes for the slow kernel. The oracle rounds kept elements, which the kernels do not.
fn thin_products(table: &mut Table) {
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

/// To the bit: sizes in whole tiles and odd ones, scales that fit, saturate and are not powers of two, and non-finite values.
fn quantized(table: &mut Table) {
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

/// r = silu(a) b + c, s = r^2 in bf16, and a itself: values used twice, a cast inside, an output that is an input.
fn regions(table: &mut Table) {
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

fn reductions(table: &mut Table) {
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

fn indices(table: &mut Table) {
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
fn parts_of_images(table: &mut Table) {
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
