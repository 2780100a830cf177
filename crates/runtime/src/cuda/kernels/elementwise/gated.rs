//! Gated activations and their gradient; the kernel is `gated.cu`.

use flatout_ir::ops::gated::Act;
use flatout_ir::target::Layout;
use flatout_ir::{Launch, Op, OpKind, View};

use super::dropout;
use crate::cuda::context::Kernel;
use crate::cuda::kernels::address::{Walk, index_type, most, width, widths};
use crate::cuda::kernels::ahead::{AHEAD, FEW_ROWS};
use crate::cuda::kernels::stage::{
    self, Draft, PHILOX, Stage, Stages, Value, at, at_or_nothing, blocks, staged,
};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    staged!(kernel_row("cuda.gated", OpKind::Gated, FLOATS, Layout::Any), |l, _| stages(l)),
    staged!(kernel_row("cuda.gated_grad", OpKind::GatedGrad, FLOATS, Layout::Any), |l, _| stages(l)),
];

/// The number that selects an activation in the sources.
pub(in crate::cuda::kernels) fn code(act: Act) -> u8 {
    match act {
        Act::Silu => 0,
        Act::Gelu => 1,
        Act::Relu => 2,
        Act::GeluExact => 3,
    }
}
pub(super) const ACTIVATION: &str = include_str!("activation.cuh");

pub(in crate::cuda::kernels) fn stages(launch: &Launch) -> Stages {
    let (act, p, is_grad) = match launch.op {
        Op::Gated { act, p } => (act, p, false),
        Op::GatedGrad { act, p, .. } => (act, p, true),
        _ => unreachable!("the rows are for gated and its gradient"),
    };
    let (tensors, drawn) = launch.ins.split_at(if is_grad { 3 } else { 2 });
    let views: Vec<&View> = tensors.iter().chain(launch.outs.iter().flatten()).collect();
    let count = views[0].elements();
    if count == 0 || launch.outs.iter().all(Option::is_none) {
        return Ok(vec![]);
    }
    let (index, a_token) = (index_type(count), count / views[0].dims[0].max(1));
    let in_token = |vec: &usize| drawn.is_empty() || a_token.is_multiple_of(*vec);
    let vec = widths(width(&views, most(&views))).find(in_token).unwrap_or(1);
    let is_few = !is_grad && views[0].dims[0] <= FEW_ROWS;
    let mut draft = Draft::new("gated.cu")
        .flag("GRAD", is_grad)
        .flag("FEW", is_few)
        .text(if is_few { AHEAD } else { "" })
        .define("ACT", code(act))
        .text(ACTIVATION)
        .define("VEC", vec)
        .define("INDEX", index)
        .flag("DROP", !drawn.is_empty())
        .dtype("T_X", views[0].dtype);
    if let [rng, rows] = drawn {
        draft = draft
            .define("WIDTH", format!("{a_token}u"))
            .text(PHILOX)
            .text(&Walk::of(rng).function("rng_at", index))
            .text(&Walk::of(rows).function("row_at", index));
    }
    if is_grad {
        let has = |output: usize| launch.outs.get(output).is_some_and(Option::is_some);
        draft = draft.flag("HAS_D_GATE", has(0)).flag("HAS_D_UP", has(1)).flag("HAS_Y", has(2));
    }
    let names: &[&str] = if is_grad {
        &["at_gate", "at_up", "at_dy", "at_d_gate", "at_d_up", "at_y"]
    } else {
        &["at_gate", "at_up", "at_y"]
    };
    let all = tensors.iter().map(Some).chain(launch.outs.iter().map(Option::as_ref));
    for (name, view) in names.iter().zip(all.clone()) {
        draft = draft.text(&view.map_or(String::new(), |v| Walk::of(v).function(name, index)));
    }
    let mut args: Vec<Value> = tensors.iter().map(at).collect();
    let outs = if is_grad { 3 } else { 1 };
    args.extend((0..outs).map(|out| at_or_nothing(launch.outs.get(out).and_then(Option::as_ref))));
    args.push(stage::count(index, count));
    if !drawn.is_empty() {
        args.extend(drawn.iter().map(at));
        args.extend(dropout::drawing(p, launch.key));
    }
    args.extend(is_few.then_some(Value::NextWeight));
    Ok(vec![Stage {
        source: draft.source(include_str!("gated.cu")),
        entry: if is_grad { "gated_grad" } else { "gated" },
        grid: [blocks(count, 256 * vec)?, 1],
        block: 256,
        args,
    }])
}
