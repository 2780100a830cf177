//! The target device as the passes know it: plain data that the runtime provides.

use crate::graph::{Graph, Node};
use crate::links::Links;
use crate::mesh::Mesh;
use crate::ops::OpKind;
use crate::timings::{Timings, Units};
use crate::types::{DType, TensorType};

/// The memory layout that a kernel accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row-major without gaps.
    Dense,
    /// The last axis without gaps, outer axes at any stride.
    Rows,
    /// Any strides, 0 included.
    Any,
}

/// One kernel of the device: the operation and types it runs, and its requirements.
#[derive(Clone, Copy, Debug)]
pub struct KernelRow {
    /// Unique; reports show it.
    pub name: &'static str,
    pub op: OpKind,
    /// Types of the first float tensor among inputs and outputs.
    pub dtypes: &'static [DType],
    pub ins: Layout,
    pub outs: Layout,
    /// An upper bound on scratch bytes, as a function of the node and the number of cores.
    pub workspace: fn(&Shapes<'_>) -> usize,
    /// Whether equal inputs always give bit-identical results.
    pub deterministic: bool,
}

/// The inputs of a workspace formula.
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

pub fn no_workspace(_: &Shapes<'_>) -> usize {
    0
}

/// The peak rates of the device: the roofline.
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
    /// Bytes read and written per second.
    pub memory_bytes: f64,
}

impl Rates {
    /// FLOP/s of these units, or of those that replace them on this device.
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
    /// Memory that the driver takes beside the arena: context, modules, graphs.
    pub driver_bytes: u64,
    /// Bytes that the collective communication library takes beside it; 0 where nothing is exchanged.
    pub wire_bytes: u64,
    pub cores: usize,
    /// Devices like this one that train together; each is a rank with rows of its own.
    pub ranks: usize,
    /// Number of ranks in a shard group, which divides weights, moments and gradients among its ranks; groups are replicas of
    /// one another. It divides `ranks`; `None` for one group of all.
    pub shards: Option<usize>,
    /// The links between ranks, where known; without them exchanges are not predicted.
    pub links: Option<Links>,
    /// Number of landing areas for inputs: a run copies the inputs from there into place, so the next ones may arrive while a
    /// plan reads these. 0 where the host writes inputs in place.
    pub landings: usize,
    pub rates: Rates,
    /// Measured times of launches; empty where nothing was measured.
    pub timings: Timings,
    pub kernels: Vec<KernelRow>,
    /// Kernels that can be requested by name but do not run on this device, and why.
    pub missing: Vec<(&'static str, String)>,
}

impl Target {
    /// Device memory that is not available to the arena.
    pub fn bytes_beside(&self) -> u64 {
        self.driver_bytes + self.wire_bytes
    }

    pub fn mesh(&self) -> Mesh {
        let shards = self.shards.unwrap_or(self.ranks);
        Mesh::new(self.ranks / shards, shards)
    }

    /// The first kernel for an operation in a type.
    pub fn kernel(&self, op: OpKind, dtype: DType) -> Option<&KernelRow> {
        self.kernels.iter().find(|k| k.op == op && k.dtypes.contains(&dtype))
    }
}

/// A target on paper: every operation has a kernel that takes any rows. Plans for it show what the passes do without a
/// device.
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
        wire_bytes: 0,
        cores: 1,
        ranks: 1,
        shards: None,
        links: None,
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
