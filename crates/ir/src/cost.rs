//! What a plan costs: arithmetic, memory traffic, and the least time a device's rates allow.

use crate::graph::Graph;
use crate::op::OpKind;
use crate::ops::product::Compute;
use crate::plan::{Launch, Plan};
use crate::target::Rates;
use crate::types::DType;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub flops: u64,
    /// Every launch's inputs and outputs once.
    pub bytes: u64,
    /// Launch by launch, arithmetic over its rate or bytes over bandwidth, whichever is longer.
    pub roofline_seconds: f64,
}

pub fn cost(plan: &Plan, rates: &Rates) -> Cost {
    let mut total = Cost::default();
    for launch in &plan.launches {
        let rate = rate(launch, rates);
        total.flops += launch.flops;
        total.bytes += launch.bytes();
        total.roofline_seconds +=
            (launch.flops as f64 / rate).max(launch.bytes() as f64 / rates.memory_bytes);
    }
    total
}

/// The arithmetic rate of a launch, by the type and mode it multiplies in.
pub fn rate(launch: &Launch, rates: &Rates) -> f64 {
    match (launch.ins.first().map(|v| v.dtype), launch.op.compute()) {
        (Some(DType::BF16), _) => rates.bf16_flops,
        (Some(DType::E4M3 | DType::E5M2), _) => rates.fp8_flops.unwrap_or(rates.f32_flops),
        (Some(DType::F32), Some(Compute::Tf32)) => rates.tf32_flops.unwrap_or(rates.f32_flops),
        _ => rates.f32_flops,
    }
}

/// Arithmetic of products, attention and head in a forward graph: what utilisation figures count. Training takes three
/// times this, recomputation not counted.
pub fn forward_flops(g: &Graph) -> u64 {
    let counted = [OpKind::Product, OpKind::Attention, OpKind::LinearAttention, OpKind::HeadLoss];
    g.nodes.iter().filter(|n| counted.contains(&n.op.kind())).map(|n| n.op.flops(n, g)).sum()
}
