//! Two RMS norms around a residual addition and their gradient; the kernel is `double_norm.cu`.

use flatout_ir::ops::norm::NormSpec;
use flatout_ir::target::Layout;
use flatout_ir::{Launch, Op, OpKind, View};

use super::norm::{Cover, FORWARD_ELEMENTS, ROWS_SOURCE, weight_code};
use crate::cuda::context::Kernel;
use crate::cuda::kernels::address::Walk;
use crate::cuda::kernels::stage::{Stage, Stages, Value, at, at_or_nothing, blocks, count32, staged};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    staged!(kernel_row("cuda.double_norm", OpKind::DoubleNorm, FLOATS, Layout::Rows), |l, _| stages(l)),
    staged!(
        kernel_row("cuda.double_norm_grad", OpKind::DoubleNormGrad, FLOATS, Layout::Rows),
        |l, _| stages(l)
    ),
];

/// Elements of a row per thread, for each of the four tensors that the gradient reads.
const GRAD_ELEMENTS: usize = 16;

fn stages(launch: &Launch) -> Stages {
    let outs = [launch.outs[0].as_ref(), launch.outs[1].as_ref()];
    let (inner, outer, grad) = match launch.op {
        Op::DoubleNorm { inner, outer } => (inner, outer, None),
        Op::DoubleNormGrad { inner, outer, add, of_sum } => (inner, outer, Some((add, of_sum))),
        _ => unreachable!("the rows are for double norms"),
    };
    let (y, x, weights) = (&launch.ins[0], &launch.ins[1], &launch.ins[2..4]);
    if y.elements() == 0 || outs == [None, None] {
        return Ok(vec![]);
    }
    let slopes = &launch.ins[4..];
    let rows: Vec<&View> = [y, x].into_iter().chain(slopes).chain(outs.into_iter().flatten()).collect();
    let views: Vec<&View> = rows.iter().copied().chain(weights).collect();
    let most = if grad.is_some() { GRAD_ELEMENTS } else { FORWARD_ELEMENTS };
    let cover = Cover::even(&views, most).map_or_else(|| Cover::new(&views, most), Ok)?;
    let d = y.dims[y.dims.len() - 1];
    let count = y.elements() / d;
    let NormSpec { weight, .. } = inner;
    let mut draft = cover
        .draft("double_norm.cu", d)
        .dtype("T_X", y.dtype)
        .dtype("T_W", weights[0].dtype)
        .define("WEIGHT", weight_code(weight))
        .flag("GRAD", grad.is_some());
    let names: &[&str] = match grad {
        None => &["row_out", "row_h"],
        Some(_) => &["row_dx", "row_dy"],
    };
    let walks =
        [("row_y", Some(y)), ("row_x", Some(x)), ("row_d", slopes.first()), ("row_dh", slopes.get(1))];
    for (name, view) in walks.into_iter().chain(names.iter().copied().zip(outs)) {
        draft = draft.text(&view.map_or(String::new(), |v| Walk::rows(v).function(name, "u32")));
    }
    draft = match grad {
        None => draft.flag("HAS_OUT", outs[0].is_some()).flag("HAS_H", outs[1].is_some()),
        Some((add, of_sum)) => draft
            .flag("ADD", add)
            .flag("OF_SUM", of_sum)
            .flag("HAS_DX", outs[0].is_some())
            .flag("HAS_DY", outs[1].is_some()),
    };
    let mut args = vec![at(y), at(x), at(&weights[0]), at(&weights[1])];
    if grad.is_some() {
        args.extend([at(&slopes[0]), at_or_nothing(slopes.get(1))]);
    }
    args.extend(outs.map(at_or_nothing));
    args.extend([count32("rows", count)?, Value::F32(inner.eps), Value::F32(outer.eps)]);
    let source = draft.source(&[ROWS_SOURCE, include_str!("double_norm.cu")].join("\n"));
    let entry = if grad.is_some() { "double_norm_grad" } else { "double_norm" };
    let (grid, block) = ([blocks(count, cover.rows)?, 1], cover.threads() as u32);
    Ok(vec![Stage { source, entry, grid, block, args }])
}
