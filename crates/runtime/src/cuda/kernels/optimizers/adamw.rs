//! AdamW in one pass over parameter, gradient and moments; the kernel is `adamw.cu`.

use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cuda::context::{Facts, Kernel};
use crate::cuda::kernels::address::{Walk, index_type, width};
use crate::cuda::kernels::stage::{
    self, Draft, PHILOX, Stage, Stages, Value, at, at_or_nothing, blocks, staged,
};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] =
    &[staged!(kernel_row("cuda.adamw", OpKind::AdamW, FLOATS, Layout::Any), stages)];

/// Blocks per multiprocessor, as guaranteed by the kernel's launch bounds.
const RESIDENT: u32 = 4;

fn stages(launch: &Launch, facts: &Facts) -> Stages {
    let Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first } = launch.op else {
        unreachable!("the row is for adamw")
    };
    let views: Vec<&View> = launch.ins[..4].iter().chain(launch.outs.iter().flatten()).collect();
    let count = views[0].elements();
    if count == 0 || launch.outs.iter().all(Option::is_none) {
        return Ok(vec![]);
    }
    // Four f32 fill an access, and four elements share a draw.
    let (vec, index) = (width(&views, 4), index_type(count));
    let is_drawn = views[2].dtype == DType::BF16;
    let [p_out, m_out, v_out] = [0, 1, 2].map(|o| launch.outs[o].as_ref());
    let p_copy = launch.outs.get(3).filter(|_| copy).and_then(Option::as_ref);
    let mut draft = Draft::new("adamw.cu")
        .define("VEC", vec)
        .define("INDEX", index)
        .dtype("T_X", views[0].dtype)
        .dtype("T_M", views[2].dtype)
        .flag("DRAWN", is_drawn)
        .flag("HAS_RANK", launch.ins.len() > 8)
        .text(if is_drawn { PHILOX } else { "" })
        .flag("HAS_P", p_out.is_some())
        .flag("HAS_M", m_out.is_some())
        .flag("HAS_V", v_out.is_some())
        .flag("HAS_COPY", p_copy.is_some());
    let ins = ["at_p", "at_g", "at_m", "at_v"].into_iter().zip(launch.ins.iter().map(Some));
    let outs =
        ["at_p_out", "at_m_out", "at_v_out", "at_p_copy"].into_iter().zip([p_out, m_out, v_out, p_copy]);
    for (name, view) in ins.chain(outs) {
        draft = draft.text(&view.map_or(String::new(), |v| Walk::of(v).function(name, index)));
    }
    let mut args: Vec<Value> = launch.ins.iter().map(at).collect();
    args.extend([p_out, m_out, v_out, p_copy].map(at_or_nothing));
    args.extend([stage::count(index, count), Value::I64(first as i64)]);
    args.extend([lr_scale, beta1, beta2, eps, weight_decay].map(Value::F32));
    args.extend([beta1, beta2].map(|beta| Value::F64((beta as f64).ln())));
    Ok(vec![Stage {
        source: draft.source(include_str!("adamw.cu")),
        entry: "adamw",
        grid: [blocks(count, 256 * vec)?.min(facts.sms.max(1) * RESIDENT), 1],
        block: 256,
        args,
    }])
}
