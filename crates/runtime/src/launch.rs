//! Validates a launch before it may run: establishes the facts that the kernels' unsafe code relies on.

use std::borrow::Cow;

use flatout_ir::graph::{Class, Graph, Init, Node, Slot};
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::TensorType;
use flatout_ir::{Launch, Op, View, bundle};

/// Checks that
/// * every view lies in the arena, aligned to its type, and has the layout its kernel requires;
/// * the shapes and types are those the operation infers from its inputs, and the workspace holds the kernel's upper bound for
///   that many cores;
/// * no output writes an element twice, and none overlaps another output, the workspace or an input, unless it coincides with
///   an input the operation may run in place of.
pub fn check(launch: &Launch, row: &KernelRow, arena_bytes: usize, cores: usize) -> Result<(), String> {
    if launch.op.kind() != row.op {
        return Err(format!("kernel {} runs {}, not {}", row.name, row.op.name(), launch.op.name()));
    }
    let named = |what: &'static str, i: usize| format!("{what} {i}");
    for (i, view) in launch.ins.iter().enumerate() {
        check_placement(view, arena_bytes).map_err(|why| format!("{} {why}", named("input", i)))?;
        check_layout(view, row.ins).map_err(|why| format!("{} {why}", named("input", i)))?;
    }
    for (i, view) in outputs(launch) {
        check_placement(view, arena_bytes).map_err(|why| format!("{} {why}", named("output", i)))?;
        check_layout(view, row.outs).map_err(|why| format!("{} {why}", named("output", i)))?;
        if !is_injective(view) {
            return Err(format!("output {i} writes an element twice"));
        }
    }
    if let Some(view) = &launch.workspace {
        check_placement(view, arena_bytes).map_err(|why| format!("the workspace {why}"))?;
        if !view.is_dense() || !view.offset.is_multiple_of(64) {
            return Err("the workspace is not dense at a multiple of 64 bytes".into());
        }
    }
    check_types(launch, row, cores)?;
    check_aliasing(launch, row)
}

fn outputs(launch: &Launch) -> impl Iterator<Item = (usize, &View)> {
    launch.outs.iter().enumerate().filter_map(|(i, view)| Some((i, view.as_ref()?)))
}

/// Checks that a view lies in the arena, aligned to its type.
pub fn check_placement(view: &View, arena_bytes: usize) -> Result<(), String> {
    if view.dims.len() != view.strides.len() {
        return Err(format!("has {} axes and {} strides", view.dims.len(), view.strides.len()));
    }
    if !view.offset.is_multiple_of(view.dtype.bytes()) {
        return Err(format!("starts at byte {}, between two {} elements", view.offset, view.dtype.name()));
    }
    if view.elements() > 0 && view.offset.saturating_add(view.span_bytes()) > arena_bytes {
        let end = view.offset.saturating_add(view.span_bytes());
        return Err(format!("ends at byte {end} of an arena of {arena_bytes}"));
    }
    Ok(())
}

fn check_layout(view: &View, layout: Layout) -> Result<(), String> {
    let fits = match layout {
        Layout::Dense => view.is_dense(),
        Layout::Rows => view.has_dense_rows(),
        Layout::Any => true,
    };
    if fits { Ok(()) } else { Err(format!("has strides {:?}, which the kernel does not take", view.strides)) }
}

/// Whether different indices always name different elements: every stride exceeds all that the smaller ones cover.
fn is_injective(view: &View) -> bool {
    let mut axes: Vec<(usize, usize)> =
        view.strides.iter().zip(&view.dims).filter(|(_, d)| **d > 1).map(|(s, d)| (*s, *d)).collect();
    axes.sort_unstable();
    let mut covered = 1;
    axes.iter().all(|(stride, dim)| {
        let steps_over = *stride >= covered;
        covered += stride * (dim - 1);
        steps_over
    })
}

/// Checks that the views have the types the operation infers from its inputs, and that the workspace is large enough.
fn check_types(launch: &Launch, row: &KernelRow, cores: usize) -> Result<(), String> {
    let ty = |view: &View| TensorType::new(view.dtype, view.dims.clone());
    if let Op::Reshape { .. } = launch.op {
        let [from] = &launch.ins[..] else { return Err("a copy has one input".into()) };
        return match outputs(launch)
            .find(|(_, to)| to.dtype != from.dtype || to.elements() != from.elements())
        {
            Some((_, to)) => Err(format!("{} cannot be copied to {}", ty(from), ty(to))),
            None if launch.outs.len() == 1 => Ok(()),
            None => Err("a copy has one output".into()),
        };
    }
    let mut graph = Graph::default();
    let ins: Vec<_> = launch
        .ins
        .iter()
        .enumerate()
        .map(|(i, view)| {
            let path = i.to_string();
            let slot = Slot { path, ty: ty(view), class: Class::Input, init: Init::Zeros, part: None };
            let slot = graph.add_slot(slot);
            graph.add(Op::Read { slot }, vec![], "")
        })
        .collect();
    let wanted = launch.op.infer(&graph, &ins)?;
    let node = Node { op: launch.op.clone(), ins, outs: wanted.clone(), path: String::new(), key: 0 };
    let needed = (row.workspace)(&Shapes::of(&graph, &node, cores));
    let scratch = launch.workspace.as_ref().map_or(0, View::span_bytes);
    if scratch < needed {
        return Err(format!("has {scratch} bytes of workspace and needs {needed} on {cores} cores"));
    }
    if wanted.len() != launch.outs.len() {
        return Err(format!("gives {} outputs, the launch has {}", wanted.len(), launch.outs.len()));
    }
    match outputs(launch).find(|(i, view)| ty(view) != wanted[*i]) {
        Some((i, view)) => Err(format!("output {i} is {}, wanted {}", ty(view), wanted[i])),
        None => Ok(()),
    }
}

fn check_aliasing(launch: &Launch, row: &KernelRow) -> Result<(), String> {
    for (o, out) in outputs(launch) {
        for (i, input) in launch.ins.iter().enumerate().filter(|(_, input)| overlap(out, input)) {
            let is_same = input.offset == out.offset
                && input.dtype == out.dtype
                && input.dims == out.dims
                && same_strides(input, out);
            if !(is_same && launch.op.in_place().contains(&(i, o))) {
                return Err(format!("output {o} overlaps input {i}, which {} cannot run in place", row.name));
            }
        }
        if let Some((other, _)) = outputs(launch).find(|(other, view)| *other > o && overlap(out, view)) {
            return Err(format!("outputs {o} and {other} overlap"));
        }
    }
    let Some(scratch) = &launch.workspace else { return Ok(()) };
    let mut used = launch.ins.iter().chain(launch.outs.iter().flatten());
    if used.any(|view| overlap(scratch, view)) {
        Err("the workspace overlaps a tensor".into())
    } else {
        Ok(())
    }
}

/// Whether running the launch twice leaves the same result as running it once: no output overlaps an input.
pub fn is_repeatable(launch: &Launch) -> bool {
    outputs(launch).all(|(_, out)| launch.ins.iter().all(|input| !overlap(out, input)))
}

fn same_strides(a: &View, b: &View) -> bool {
    (0..a.dims.len()).all(|i| a.dims[i] == 1 || a.strides[i] == b.strides[i])
}

/// Whether two views may share a byte. Exact for whole ranges and for column slices of one buffer's rows; any other
/// interleaving counts as overlapping.
fn overlap(a: &View, b: &View) -> bool {
    let (a_bytes, b_bytes) = (a.span_bytes(), b.span_bytes());
    if a_bytes == 0 || b_bytes == 0 || a.offset + a_bytes <= b.offset || b.offset + b_bytes <= a.offset {
        return false;
    }
    let (Some((a_pitch, a_inner)), Some((b_pitch, b_inner))) = (pitch(a), pitch(b)) else { return true };
    if a_pitch != b_pitch {
        return true;
    }
    let ahead = (b.offset as isize - a.offset as isize).rem_euclid(a_pitch as isize) as usize;
    !(ahead >= a_inner && ahead + b_inner <= a_pitch)
}

/// Bytes between steps of the outermost axis, and the bytes one step spans; `None` if steps interleave.
fn pitch(view: &View) -> Option<(usize, usize)> {
    let outer = (0..view.dims.len()).filter(|&i| view.dims[i] > 1).max_by_key(|&i| view.strides[i])?;
    let bytes = view.dtype.bytes();
    let inner: usize =
        (0..view.dims.len()).filter(|&i| i != outer).map(|i| (view.dims[i] - 1) * view.strides[i]).sum();
    let (pitch, inner) = (view.strides[outer] * bytes, (inner + 1) * bytes);
    (inner <= pitch).then_some((pitch, inner))
}

/// Describes a launch for messages: path, operation, types.
pub fn describe(launch: &Launch) -> String {
    let show = |view: &View| TensorType::new(view.dtype, view.dims.clone()).to_string();
    let ins: Vec<_> = launch.ins.iter().map(show).collect();
    let outs: Vec<_> = launch.outs.iter().map(|v| v.as_ref().map_or("-".into(), show)).collect();
    format!("`{}`: {} ({}) -> ({})", launch.path, launch.op.name(), ins.join(", "), outs.join(", "))
}

/// Splits a bundle into one launch per region.
pub(crate) fn parts_of(launch: &Launch) -> Vec<Launch> {
    let Op::Bundle { body } = &launch.op else { unreachable!("the row is for bundles") };
    let of = |part: bundle::BundleRegion| Launch {
        op: Op::Region { body: Box::new(part.body) },
        ins: part.ins.iter().map(|i| launch.ins[*i].clone()).collect(),
        outs: part.outs.iter().map(|o| launch.outs[*o].clone()).collect(),
        workspace: None,
        ..launch.clone()
    };
    bundle::parts(body).into_iter().map(of).collect()
}

/// The body of an elementwise launch: that of its region, or a graph of one node for a map.
pub(crate) fn body_of(launch: &Launch) -> Cow<'_, Graph> {
    let f = match &launch.op {
        Op::Region { body } => return Cow::Borrowed(body),
        Op::Map { f } => *f,
        op => unreachable!("{} is not elementwise", op.name()),
    };
    let mut body = Graph::default();
    let args = launch.ins.iter().enumerate().map(|(i, view)| {
        let ty = TensorType::new(view.dtype, view.dims.clone());
        let slot = Slot { path: i.to_string(), ty, class: Class::Input, init: Init::Zeros, part: None };
        let slot = body.add_slot(slot);
        body.add(Op::Read { slot }, vec![], "")
    });
    let args = args.collect();
    let value = body.add(Op::Map { f }, args, "");
    body.results.push(("y".into(), value));
    Cow::Owned(body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::OpKind;
    use flatout_ir::ops::elementwise::Elementwise;
    use flatout_ir::ops::product::{Compute, plain};
    use flatout_ir::target::no_workspace;
    use flatout_ir::types::DType;

    const ROW: KernelRow = KernelRow {
        name: "map",
        op: OpKind::Map,
        dtypes: &[DType::F32],
        ins: Layout::Any,
        outs: Layout::Any,
        workspace: no_workspace,
        deterministic: true,
    };

    fn view(offset: usize, dims: &[usize], strides: &[usize]) -> View {
        View { offset, dtype: DType::F32, dims: dims.into(), strides: strides.into() }
    }

    fn add(a: View, b: View, out: View) -> Result<(), String> {
        launched(Op::Map { f: Elementwise::Add }, a, b, out)
    }

    fn multiply(a: View, b: View, out: View) -> Result<(), String> {
        launched(plain(false, false, DType::F32, Compute::Full), a, b, out)
    }

    fn launched(op: Op, a: View, b: View, out: View) -> Result<(), String> {
        let row = KernelRow { op: op.kind(), ..ROW };
        let launch = Launch {
            kernel: "map",
            op,
            ins: vec![a, b],
            outs: vec![Some(out)],
            workspace: None,
            path: "here".into(),
            key: 0,
            flops: 0,
            queue: flatout_ir::Queue::Compute,
            joins: None,
        };
        check(&launch, &row, 4096, 1)
    }

    #[test]
    fn sound_launches_pass() {
        let at = |offset| view(offset, &[4, 8], &[8, 1]);
        add(at(0), at(128), at(256)).unwrap();
        add(at(0), at(128), at(0)).unwrap();
        add(at(0), at(128), at(128)).unwrap();
        // Two column halves of one buffer's rows, with the output on the first.
        let half = |offset| view(offset, &[4, 8], &[16, 1]);
        add(half(0), half(32), half(0)).unwrap();
        add(half(0), half(0), half(32)).unwrap();
        add(view(0, &[4, 8], &[0, 1]), at(128), at(256)).unwrap();
    }

    #[test]
    fn unsound_launches_are_refused() {
        let at = |offset| view(offset, &[4, 8], &[8, 1]);
        for (launch, why) in [
            (add(at(0), at(128), at(4000)), "ends at byte 4128"),
            (add(at(2), at(128), at(256)), "between two f32 elements"),
            (multiply(at(0), view(128, &[8, 8], &[8, 1]), at(0)), "overlaps input 0"),
            (add(at(0), at(128), at(64)), "overlaps input 0"),
            (add(at(0), at(128), view(256, &[4, 8], &[0, 1])), "writes an element twice"),
            (add(at(0), at(128), view(256, &[8, 4], &[4, 1])), "output 0 is f32[8,4], wanted f32[4,8]"),
            (add(at(0), view(128, &[32], &[1]), at(256)), "must agree"),
        ] {
            let error = launch.unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
