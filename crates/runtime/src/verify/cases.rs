//! The table of cases: odd sizes for every form, and per operation one large enough for several threads.

use flatout_ir::block8::BLOCK;
use flatout_ir::graph::{Class, Graph, Init, Slot};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::collective::{Combine, Order};
use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::frequency::{Frequencies, Scaling};
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::product::Compute;
use flatout_ir::ops::qk_norm_rope::weights;
use flatout_ir::ops::quantize::Source;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::ops::rope::Pairs;
use flatout_ir::ops::thin_product::Thin;
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Axis, Op, OpKind};

use super::{Case, Data, attention, linear_attention, products};

/// The type an operation names for its output.
pub(super) fn output_type(op: &Op) -> Option<DType> {
    match op {
        Op::Fill { dtype, .. } | Op::Iota { dtype, .. } | Op::Map { f: E::Cast(dtype) } => Some(*dtype),
        Op::Product { out, .. } | Op::ThinProduct { out, .. } | Op::ScatterAdd { out, .. } => Some(*out),
        Op::Quantize { to, .. } => Some(*to),
        Op::Rank { .. } => Some(I32),
        _ => None,
    }
}

/// Relative L2 against the oracle. The oracle rounds to bf16 at every primitive, a fused kernel once at the end. Two
/// steps of bf16: moments that are rounded at random are within one of the oracle's.
fn bound(dtype: DType) -> f64 {
    if dtype == DType::BF16 { 1.5e-2 } else { 1e-5 }
}

pub(super) const FP8: [DType; 2] = [DType::E4M3, DType::E5M2];
pub(super) const FLOATS: [DType; 2] = [DType::F32, DType::BF16];
const I32: DType = DType::I32;

pub(super) type Input = (TensorType, Data);

pub(super) fn tensor(dtype: DType, dims: &[usize], data: Data) -> Input {
    (TensorType::new(dtype, dims), data)
}

pub(super) fn x(dtype: DType, dims: &[usize]) -> Input {
    tensor(dtype, dims, Data::Normal(1.0))
}

/// Indices from -1, which is dropped, to the last of `rows`.
fn index(n: usize, rows: usize) -> Input {
    tensor(I32, &[n], Data::Between(-1.0, rows as f64 - 1.0))
}

/// Collects cases, naming each by operation, types and shapes.
#[derive(Default)]
pub(super) struct Table(Vec<Case>);

impl Table {
    pub(super) fn add(&mut self, op: Op, ins: Vec<Input>) {
        let types = ins.iter().map(|(ty, _)| ty.dtype).chain(output_type(&op));
        let worst = types.map(bound).chain(products::mode_bound(&op, &ins)).fold(1e-5, f64::max);
        self.add_within(op, ins, worst);
    }

    /// With a bound of its own.
    fn add_within(&mut self, op: Op, ins: Vec<Input>, bound: f64) {
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
    norms(&mut table);
    rotations(&mut table);
    activations(&mut table);
    indices(&mut table);
    parts_of_images(&mut table);
    samples(&mut table);
    attention::cases(&mut table);
    linear_attention::linear_attention(&mut table);
    losses(&mut table);
    norms_of_sums(&mut table);
    updates(&mut table);
    collectives(&mut table);
    table.0
}

/// With one way: exchanges between several ranks are shown by tests that have several.
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

/// Every byte there is, over and over.
fn bytes(dims: &[usize]) -> Input {
    let count = dims.iter().product::<usize>();
    tensor(DType::U8, dims, Data::Values((0..count).map(|i| (i * 37 % 256) as f64).collect()))
}

/// Bytes become numbers, alone and on the way to others: exact in every type but bf16, which has eight digits.
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

/// r = silu(a) b + c, s = r^2 in bf16, and a itself: values used twice, a cast inside, an output that is an input.
/// Casts to and from the 8-bit floats: every code, and values between, below and beyond them.
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
    }
}

/// Ranks that fill a product of 16 terms and that do not, rows and columns that fill a tile and that do not, shares on both
/// sides of a half, and what the fast kernels are not written for. The oracle rounds what is kept, which the kernels do not.
fn thin_products(table: &mut Table) {
    let (bf16, out) = (DType::BF16, |form| if form == Thin::Weight { DType::F32 } else { DType::BF16 });
    for (m, rank, width, p) in
        [(37, 12, 20, 0.25), (333, 24, 200, 0.6), (1100, 48, 136, 0.05), (70, 64, 192, 0.1)]
    {
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
    }
}

/// Bit by bit: sizes that kernels take in whole tiles and at odd ones, scales that fit, saturate and are no powers of two,
/// and what is not finite.
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
    let many = tensor(DType::BF16, &[700, 300], Data::Normal(2.0));
    let of = Source::Given;
    table.add(Op::Quantize { to: DType::E4M3, current: false, of }, vec![many, scalar(0.0625), scalar(0.5)]);
    // An activation's last bits may fall on either side of a rounding, and the oracle rounds on the way to it.
    for (act, dtype) in
        [Act::Silu, Act::Gelu, Act::Relu, Act::GeluExact].into_iter().zip([FLOATS, FLOATS].concat())
    {
        for dims in [[37, 29], [130, 136], [24, 64]] {
            for (to, of) in [(DType::E4M3, Source::Gated(act)), (DType::E5M2, Source::GatedGrad(act))] {
                let ins = (0..of.inputs()).map(|_| x(dtype, &dims)).chain([scalar(0.0078125), scalar(0.5)]);
                table.add(Op::Quantize { to, current: false, of }, ins.collect());
                table.0.last_mut().expect("just added").bound = 4e-2;
            }
        }
    }
}

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
        // s is rounded to bf16, and a whole number next to a rounding boundary may come out one apart.
        region.bound = 1.5e-2;
    }
    summed_regions(table);
    bundles(table);
    // Integers alone: the row takes them.
    let mut body = Graph::default();
    let ty = TensorType::new(I32, [33]);
    let slot =
        body.add_slot(Slot { path: "0".into(), ty, class: Class::Input, init: Init::Zeros, part: None });
    let read = body.add(Op::Read { slot }, vec![], "");
    let next = body.add(Op::Map { f: E::Offset(1.0) }, vec![read], "");
    body.results.push(("next".into(), next));
    table.add(Op::Region { body: Box::new(body) }, vec![tensor(I32, &[33], Data::Between(-9.0, 9.0))]);
}

/// p = x y and q = p^2 in bf16 with their sums over rows, and the sum alone of what is read: rows and columns that fill a block's
/// pieces and lanes and that do not, a column, a row, and rows whose sums cancel.
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
        // Values are exact operations rounded once, so that nothing but the order of additions differs.
        table.add_within(op, ins, 1e-5);
    }
}

/// Regions of several shapes and types in one launch: a sum, one that gives two values of which one is its input, one of equal
/// type and shape as another, and one that several blocks take.
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

fn norms(table: &mut Table) {
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

/// Norms around an addition, which only a GPU has kernels for, by rows of a warp, of several and with an end of their own.
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

/// The gradient of a norm that also gives the norm again, or its own sum over rows.
fn giving(op: Op, gives_norm: bool, gives_sum: bool) -> Op {
    let Op::RmsNormGrad { eps, center, weight, bias, add, .. } = op else {
        unreachable!("{} is no norm's gradient", op.name())
    };
    Op::RmsNormGrad { eps, center, weight, bias, add, again: gives_norm, sum: gives_sum }
}

/// Norms and their gradients that write codes as well: tiles of rows that are full and that are not, rows of several widths,
/// with the bound of other operations that are quantised on the way.
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
            for (to, of, ins) in [
                (DType::E4M3, Source::Norm(spec, adds), norm),
                (DType::E5M2, Source::NormGrad(spec, adds), grad),
            ] {
                if !of.takes(dims[1]) {
                    continue;
                }
                let ins = ins.into_iter().flatten().chain([scalar(0.0078125), scalar(0.5)]);
                table.add(Op::Quantize { to, current: false, of }, ins.collect());
                table.0.last_mut().expect("just added").bound = 4e-2;
            }
        }
    }
}

/// The table of the first positions, as `Init::RopeTable` makes it.
pub(super) fn rope_table(positions: usize, half: usize, freq: Frequencies) -> Input {
    tensor(DType::F32, &[positions, half, 2], Data::Values(freq.table(positions, half).collect()))
}

fn rotations(table: &mut Table) {
    let plain = Frequencies::from(10_000.0);
    // An amplitude and frequencies of three kinds: kept, mixed, stretched.
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
                // Some positions lie behind the table of 40.
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
                        let axes = axis_of_freq.clone();
                        let op = Op::QkNormRope {
                            eps,
                            weight,
                            first,
                            freq,
                            axis_of_freq: axes,
                            pairs,
                            table: has_table,
                        };
                        table.add(op, forward().into_iter().flatten().collect());
                        let axes = axis_of_freq.clone();
                        let op = Op::QkNormRopeGrad {
                            eps,
                            weight,
                            first,
                            freq,
                            axis_of_freq: axes,
                            pairs,
                            table: has_table,
                        };
                        table.add(op, forward().into_iter().flatten().chain([x(dtype, &dims)]).collect());
                    }
                }
            }
        }
    }
}

fn activations(table: &mut Table) {
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
        // Places that several rows are for: the last wins.
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

/// Bytes that must be the oracle's own: enlarged, made smaller, mirrored, of one pixel, left out.
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

/// Tokens that must be the oracle's own, over every way of drawing, of vocabularies that one block takes in one go and in many.
fn samples(table: &mut Table) {
    for (vocab, spread) in [(5, 3.0), (1000, 4.0), (50_257, 8.0), (151_936, 12.0)] {
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
            // One row draws from a part of the tokens, one from none.
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
            tensor(DType::F32, &[rows, vocab], Data::Between(-spread, spread)),
            tensor(I32, &[rows, 6], Data::Values((0..rows).flat_map(numbers).collect())),
            tensor(DType::F32, &[rows, 2], Data::Values((0..rows).flat_map(shares).collect())),
        ];
        table.add_within(Op::Sample {}, ins, 1e-6);
    }
}

fn norms_of_sums(table: &mut Table) {
    for dtype in FLOATS {
        for (rows, columns, rank) in [(1, 1, 1), (9, 131, 3), (24, 514, 16), (61, 1152, 48)] {
            let w = tensor(dtype, &[rows, columns], Data::Normal(1.0));
            let low = [x(DType::F32, &[rank, columns]), x(DType::F32, &[rows, rank])];
            table.add_within(Op::LowRankNorm { scale: 0.7 }, [vec![w], low.to_vec()].concat(), 1e-5);
        }
    }
}

fn losses(table: &mut Table) {
    let modes = [(DType::F32, Compute::Full), (DType::F32, Compute::Tf32), (DType::BF16, Compute::Full)];
    for (dtype, compute) in modes {
        let none = Cap::NONE;
        // The third is a head of two classes, the last has logits beyond its cap.
        for (rows, width, words, cap) in
            [(37, 24, 61, none), (130, 32, 300, none), (8, 48, 2, none), (37, 24, 61, Cap(Some(1.5)))]
        {
            let x = || tensor(dtype, &[rows, width], Data::Normal(0.5));
            let w = || tensor(dtype, &[words, width], Data::Normal(0.5));
            let target = || index(rows, words);
            let weight = || tensor(DType::F32, &[rows], Data::Between(0.0, 2.0));
            let dw = || tensor(DType::F32, &[words, width], Data::Normal(1.0));
            table.add(Op::HeadLoss { compute, cap }, vec![x(), w(), target(), weight()]);
            // The gradient's lse is the forward's, for which the rows' gradient stands in as their weight.
            let lse = || {
                let of = Data::Of { op: Op::HeadLoss { compute, cap }, ins: vec![0, 1, 2, 4], out: 2 };
                tensor(DType::F32, &[rows], of)
            };
            for base in [false, true] {
                let ins = [x(), w(), target(), weight()].into_iter().chain(base.then(dw));
                table.add(Op::HeadLossTrain { base, compute, cap }, ins.collect());
                let ins = [x(), w(), target(), lse(), weight()].into_iter().chain(base.then(dw));
                table.add(Op::HeadLossGrad { base, compute, cap }, ins.collect());
            }
        }
    }
}

fn updates(table: &mut Table) {
    let (f32s, bf16) = (DType::F32, DType::BF16);
    for (dtype, moments, copy) in
        [(f32s, f32s, false), (f32s, f32s, true), (f32s, bf16, true), (bf16, bf16, false)]
    {
        // Numbers beyond 32 bits draw too.
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

/// The input that says which of several shares a rank updates.
fn rank_of_shares() -> Input {
    tensor(DType::I32, &[1], Data::Values(vec![3.0]))
}

/// Moments in eight bits: codes are next to the oracle's, a step of an eighth at most; weights and scales are its own.
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
        // Powers of two, as scales are.
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
