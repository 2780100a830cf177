//! What the passes know of a device: plain data, handed in by the runtime.

use crate::bundle;
use crate::graph::{Graph, Node};
use crate::op::{Op, OpKind};
use crate::ops::linear_attention::{LinearAttend, Onto};
use crate::timings::{Timings, Units};
use crate::types::{DType, TensorType};

/// How a kernel wants its tensors in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row-major without gaps.
    Dense,
    /// The last axis without gaps, outer axes at any stride.
    Rows,
    /// Any strides, 0 included.
    Any,
}

/// One kernel of the device: which operation it runs, on what, and what it needs.
#[derive(Clone, Copy, Debug)]
pub struct KernelRow {
    /// Unique, and what reports call it.
    pub name: &'static str,
    pub op: OpKind,
    /// Types of the first float tensor among inputs and outputs.
    pub dtypes: &'static [DType],
    pub ins: Layout,
    pub outs: Layout,
    /// (input, output) pairs that may share memory exactly.
    pub in_place: &'static [(usize, usize)],
    /// A ceiling on scratch bytes, as a function of the node and the number of cores.
    pub workspace: fn(&Shapes<'_>) -> usize,
    /// Whether equal inputs always give equal bits.
    pub deterministic: bool,
}

impl KernelRow {
    /// The pairs that hold for an operation: a product's third input makes room only where it is the base, and where the
    /// largest magnitude and what else makes room stand among a quantisation's inputs depends on what is quantised. The base
    /// of linear attention's gradient stands last. The regions of a bundle run side by side, and what one of them reads makes room
    /// for what it gives alone.
    pub fn in_place_for(&self, op: &Op) -> impl Iterator<Item = (usize, usize)> + use<> {
        let own = match op {
            Op::Bundle { body } if !self.in_place.is_empty() => bundle::pairs(body),
            _ => vec![],
        };
        let (none, quantised) = match op {
            Op::Bundle { .. } => (true, None),
            Op::Product { base, .. } | Op::ThinProduct { base, .. } => (!base, None),
            Op::LinearAttentionGrad { onto, .. } => (*onto == Onto::Nothing, None),
            Op::Quantize { current, of, .. } => (*current, Some(*of)),
            _ => (false, None),
        };
        let base = LinearAttend::of(op).map(|(attend, _)| attend.inputs() + 1);
        let pairs: &[(usize, usize)] = if none { &[] } else { self.in_place };
        let is_base = move |pair: &(usize, usize)| base.is_none_or(|base| pair.0 == base);
        let holds = move |(input, output): &(usize, usize)| match (quantised, output) {
            (None, _) => true,
            (Some(of), 3) => of.makes_room(*input),
            (Some(of), _) => *input == of.inputs() + 1,
        };
        pairs.iter().copied().filter(is_base).filter(holds).chain(own)
    }
}

/// Every pair that may hold for a quantisation, whatever is quantised.
pub const QUANTIZE_IN_PLACE: &[(usize, usize)] =
    &[(2, 2), (3, 2), (4, 2), (5, 2), (0, 3), (1, 3), (2, 3), (3, 3)];

/// Every pair that may hold for linear attention's gradient: its base, behind tensors, segments, positions and table.
pub const LINEAR_ATTENTION_GRAD_IN_PLACE: &[(usize, usize)] = &[(3, 0), (4, 0), (5, 0)];

/// What a workspace formula may look at.
pub struct Shapes<'a> {
    pub node: &'a Node,
    pub ins: Vec<&'a TensorType>,
    pub outs: &'a [TensorType],
    pub cores: usize,
}

impl<'a> Shapes<'a> {
    pub fn of(g: &'a Graph, node: &'a Node, cores: usize) -> Self {
        Shapes { node, ins: node.ins.iter().map(|v| g.ty(*v)).collect(), outs: &node.outs, cores }
    }
}

/// No scratch.
pub fn no_workspace(_: &Shapes<'_>) -> usize {
    0
}

/// What the device can do at best: the roofline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Products in f32, FLOP/s.
    pub f32_flops: f64,
    /// Products of f32 in TF32, FLOP/s; `None` where the device has no such mode.
    pub tf32_flops: Option<f64>,
    /// Products in bf16, FLOP/s.
    pub bf16_flops: f64,
    /// Products of 8-bit floats, FLOP/s; `None` where the device has none.
    pub fp8_flops: Option<f64>,
    /// Bytes read and written a second.
    pub memory_bytes: f64,
}

impl Rates {
    /// FLOP/s of some units; of those the device has not, what it does instead.
    pub fn of(&self, units: Units) -> f64 {
        match units {
            Units::F32 => self.f32_flops,
            Units::Tf32 => self.tf32_flops.unwrap_or(self.f32_flops),
            Units::Bf16 => self.bf16_flops,
            Units::Fp8 => self.fp8_flops.unwrap_or(self.f32_flops),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Target {
    /// `cpu`, or the name of a GPU.
    pub name: String,
    pub dtypes: Vec<DType>,
    /// Buffers start at multiples of this.
    pub align: usize,
    pub memory_bytes: u64,
    /// What the driver takes beside the arena: context, modules, graphs.
    pub driver_bytes: u64,
    pub cores: usize,
    /// Areas that inputs land in before a run copies them into place, so that the next may arrive while a plan reads
    /// these; 0 where the host writes inputs in place.
    pub landings: usize,
    pub rates: Rates,
    /// What launches were measured to take; empty where nobody did.
    pub timings: Timings,
    pub kernels: Vec<KernelRow>,
    /// Kernels that may be asked for by name and that this device does not run, and why.
    pub missing: Vec<(&'static str, String)>,
}

impl Target {
    /// The first kernel for an operation in a type.
    pub fn kernel(&self, op: OpKind, dtype: DType) -> Option<&KernelRow> {
        self.kernels.iter().find(|k| k.op == op && k.dtypes.contains(&dtype))
    }
}

/// A target on paper: every operation has a kernel that takes any rows and works in place wherever that makes sense.
/// Plans for it show what the passes do without a device.
pub fn paper() -> Target {
    let row = |op: &OpKind| KernelRow {
        name: op.name(),
        op: *op,
        dtypes: &DType::ALL,
        ins: if matches!(
            op,
            OpKind::Reshape | OpKind::Map | OpKind::Region | OpKind::Bundle | OpKind::Product
        ) {
            Layout::Any
        } else {
            Layout::Rows
        },
        outs: if matches!(op, OpKind::Reshape) { Layout::Any } else { Layout::Rows },
        in_place: match op {
            OpKind::Map
            | OpKind::RmsNorm
            | OpKind::RmsNormGrad
            | OpKind::DoubleNorm
            | OpKind::DoubleNormGrad
            | OpKind::Bundle
            | OpKind::Gated
            | OpKind::Rope
            | OpKind::Dropout => &[(0, 0)],
            OpKind::Region => &[(0, 0), (1, 1)],
            OpKind::GatedGrad => &[(0, 0), (1, 1), (2, 2)],
            OpKind::Product | OpKind::ThinProduct | OpKind::ScatterAdd => &[(2, 0)],
            OpKind::Quantize => QUANTIZE_IN_PLACE,
            OpKind::LinearAttentionGrad => LINEAR_ATTENTION_GRAD_IN_PLACE,
            OpKind::HeadLossGrad => &[(5, 1)],
            OpKind::HeadLossTrain => &[(4, 4)],
            OpKind::RowScatter => &[(0, 0)],
            OpKind::AdamW => &[(0, 0), (2, 1), (3, 2)],
            OpKind::AdamW8 => &[(0, 0), (2, 1), (3, 2), (4, 3), (5, 4)],
            _ => &[],
        },
        workspace: |s| {
            if matches!(s.node.op.kind(), OpKind::Attention | OpKind::AttentionGrad) { 256 } else { 0 }
        },
        deterministic: true,
    };
    Target {
        name: "paper".into(),
        dtypes: vec![DType::F32, DType::BF16, DType::E4M3, DType::E5M2, DType::I32, DType::U8],
        align: 64,
        memory_bytes: 1 << 40,
        driver_bytes: 0,
        cores: 1,
        landings: 0,
        rates: Rates {
            f32_flops: 1e12,
            tf32_flops: Some(1.5e12),
            bf16_flops: 2e12,
            fp8_flops: Some(4e12),
            memory_bytes: 1e12,
        },
        timings: Timings::default(),
        kernels: OpKind::ALL.iter().map(row).collect(),
        missing: vec![],
    }
}
