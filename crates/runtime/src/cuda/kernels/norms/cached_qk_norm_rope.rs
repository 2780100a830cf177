//! RMS norm of each head of q and k and their rotation, which writes keys and values to their caches; the kernel is
//! `cached_qk_norm_rope.cu`.

use flatout_ir::ops::cached_qk_norm_rope::rotated;
use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use super::norm::weight_code;
use super::rope::{RegisterBudget, Rotation, head_function};
use crate::cuda::context::Kernel;
use crate::cuda::kernels::movement::copy;
use crate::cuda::kernels::stage::{Stage, Stages, Value, at, at_or_nothing, blocks, count32, staged};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[staged!(
    kernel_row("cuda.cached_qk_norm_rope", OpKind::CachedQkNormRope, FLOATS, Layout::Rows),
    |l, _| stages(l)
)];

/// A thread holds part of one head: more blocks run at once, and tokens are few.
const ONE_HEAD: RegisterBudget = RegisterBudget { words: 0, words_of_all: 0 };

const CODE: &str = concat!(
    include_str!("rotation.cuh"),
    include_str!("head_gains.cuh"),
    include_str!("cached_qk_norm_rope.cu")
);

fn stages(launch: &Launch) -> Stages {
    let Op::CachedQkNormRope { eps, weight, first, freq, ref axis_of_freq, pairs, table } = launch.op else {
        unreachable!("the row is for cached_qk_norm_rope")
    };
    let (forward, rest) = launch.ins.split_at(rotated(&launch.op));
    let [v, cached_k, cached_v, index] = rest else { unreachable!("four inputs follow the rotation's") };
    let [q, keys, values] = [0, 1, 2].map(|out| launch.outs[out].as_ref());
    let mut stages = vec![];
    for (base, out) in [(cached_k, keys), (cached_v, values)] {
        let Some(out) = out.filter(|out| out.offset != base.offset) else { continue };
        stages.extend(copy::copy(base, out)?);
    }
    let x = &forward[0];
    let (tokens, heads, rows) = (x.dims[0], x.dims[1], cached_k.dims[0]);
    if x.elements() == 0 || (q.is_none() && keys.is_none() && values.is_none()) {
        return Ok(stages);
    }
    let w = weight.is_some().then(|| &forward[1]);
    let positions = &forward[1 + weight.is_some() as usize];
    let rotation =
        Rotation { freq, axis_of_freq, pairs, positions, table: table.then(|| &forward[forward.len() - 1]) };
    let views: Vec<&View> = [Some(x), w, Some(v), q, keys, values].into_iter().flatten().collect();
    let (mut draft, cover) = rotation.draft("cached_qk_norm_rope.cu", &views, first, ONE_HEAD);
    draft = draft
        .define("FIRST", first)
        .dtype("T_X", x.dtype)
        .dtype("T_W", w.map_or(DType::F32, |w| w.dtype))
        .define("WEIGHT", weight_code(weight));
    for (name, view) in [
        ("head_x", x),
        ("head_v", v),
        ("head_q", q.unwrap_or(x)),
        ("head_keys", keys.unwrap_or(cached_k)),
        ("head_values", values.unwrap_or(cached_v)),
    ] {
        draft = draft.text(&head_function(view, name));
    }
    let of_token = 2 * heads - first;
    count32("cached heads", rows * (heads - first))?;
    count32("heads", tokens * of_token)?;
    stages.push(Stage {
        source: draft.source(CODE),
        entry: "cached_qk_norm_rope",
        grid: [blocks(tokens * of_token, 256 / cover.lanes)?, 1],
        block: 256,
        args: vec![
            at(x),
            at_or_nothing(w),
            at(positions),
            at_or_nothing(rotation.table),
            at(v),
            at(index),
            at_or_nothing(q),
            at_or_nothing(keys),
            at_or_nothing(values),
            count32("tokens", tokens)?,
            count32("rows", rows)?,
            rotation.table_rows(),
            Value::F32(eps),
        ],
    });
    Ok(stages)
}
