//! The table of verification cases, from the files of this folder: odd sizes for every form, and per operation one that is large
//! enough for several threads.

use flatout_ir::ops::collective::{Combine, Order};
use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Axis, Op, OpKind};

use super::{
    Case, Data, attention, copies, elementwise, layers, linear_attention, products, quantization, regions,
};

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

/// Every byte value, repeated.
pub(super) fn bytes(dims: &[usize]) -> Input {
    let count = dims.iter().product::<usize>();
    tensor(DType::U8, dims, Data::Values((0..count).map(|i| (i * 37 % 256) as f64).collect()))
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
    copies::sources_and_copies(&mut table);
    elementwise::maps(&mut table);
    elementwise::casts(&mut table);
    elementwise::pixels(&mut table);
    regions::regions(&mut table);
    elementwise::reductions(&mut table);
    products::products(&mut table);
    products::thin_products(&mut table);
    quantization::quantized(&mut table);
    quantization::dequantized(&mut table);
    quantization::requantized(&mut table);
    layers::norms(&mut table);
    layers::rotations(&mut table);
    layers::activations(&mut table);
    copies::indices(&mut table);
    copies::parts_of_images(&mut table);
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
