//! The reference evaluator: primitives in f64, rounded to each node's type. It is slow and plain on purpose; all fast code is
//! checked against it.

use std::collections::HashMap;

use crate::expand;
use crate::graph::{Graph, Node, Slot, Value};
use crate::mesh::Mesh;
use crate::nf4;
use crate::ops::Op;
use crate::ops::collective;
use crate::ops::dequantize::{inputs_before_parts, inputs_of_a_part, parts};
use crate::ops::elementwise::Elementwise;
use crate::ops::product::{Compute, round_tf32};
use crate::ops::reduce::Fold;
use crate::ops::resample::{ImageCrop, PART, resample};
use crate::ops::sample::{NUMBERS, SHARES, sample};
use crate::random::{RowDraw, drop_below};
use crate::types::{DType, TensorType, contiguous_strides};

/// Values by slot path, in f64 whatever the slot's type.
pub type Values = HashMap<String, Vec<f64>>;

/// The results and writes of a graph's run.
pub struct Evaluated {
    pub results: HashMap<String, Vec<f64>>,
    /// The written slots' new values.
    pub writes: Values,
}

/// Runs a graph on the given slot values. Missing slots are zeros.
pub fn run(graph: &Graph, slots: &Values) -> Evaluated {
    run_world(graph, &Mesh::ONE, std::slice::from_ref(slots)).remove(0)
}

/// Runs a graph on every rank of a mesh, node by node, each rank with its own slot values: a collective reads the values of its
/// whole group.
pub fn run_world(graph: &Graph, mesh: &Mesh, slots: &[Values]) -> Vec<Evaluated> {
    assert_eq!(mesh.ranks(), slots.len(), "values for every rank of {mesh}");
    let graph = expand::to_primitives(graph);
    let nodes = graph.nodes.len();
    let mut values: Vec<Vec<Vec<f64>>> = slots.iter().map(|_| Vec::with_capacity(nodes)).collect();
    for node in &graph.nodes {
        let ty = &node.outs[0];
        let made: Vec<Vec<f64>> = (0..slots.len())
            .map(|rank| {
                let mut out = match &node.op {
                    Op::Read { slot } => {
                        let slot = graph.slot(*slot);
                        slots[rank].get(&slot.path).cloned().unwrap_or_else(|| vec![0.0; slot.ty.elements()])
                    }
                    op if op.kind().is_collective() => exchanged(node, mesh, rank, &values),
                    _ => evaluate(node, &operands(&graph, node, &values[rank])),
                };
                assert_eq!(out.len(), ty.elements(), "{} at `{}` gives {ty}", node.op.name(), node.path);
                out.iter_mut().for_each(|x| *x = ty.dtype.round(*x));
                out
            })
            .collect();
        values.iter_mut().zip(made).for_each(|(own, out)| own.push(out));
    }
    let evaluated = |own: &Vec<Vec<f64>>| {
        let value = |v: &Value| own[v.node.0 as usize].clone();
        Evaluated {
            results: graph.results.iter().map(|(name, v)| (name.clone(), value(v))).collect(),
            writes: graph.writes.iter().map(|(slot, v)| (graph.slot(*slot).path.clone(), value(v))).collect(),
        }
    };
    values.iter().map(evaluated).collect()
}

/// The inputs of a node among the values of one rank. Primitives have one output each.
fn operands<'a>(graph: &'a Graph, node: &Node, values: &'a [Vec<f64>]) -> Vec<Operand<'a>> {
    node.ins.iter().map(|v| Operand { ty: graph.ty(*v), data: &values[v.node.0 as usize] }).collect()
}

/// The value of a collective on one rank, from the values of all ranks.
fn exchanged(node: &Node, mesh: &Mesh, rank: usize, values: &[Vec<Vec<f64>>]) -> Vec<f64> {
    let axis = node.op.axis().expect("a collective has an axis");
    let group = mesh.group(rank, axis);
    assert!(node.op.ways().is_none_or(|ways| ways == group.len()), "{} in {mesh}", node.op.name());
    let term = |of: &usize| node.ins.first().map(|v| values[*of][v.node.0 as usize].as_slice());
    let terms: Vec<&[f64]> = group.iter().filter_map(term).collect();
    let dtype = node.outs[0].dtype;
    collective::evaluate(&node.op, mesh.coordinate(rank, axis), &terms, |x| dtype.round(x))
}

struct Operand<'a> {
    ty: &'a TensorType,
    data: &'a [f64],
}

fn evaluate(node: &Node, ins: &[Operand<'_>]) -> Vec<f64> {
    let out = &node.outs[0];
    match &node.op {
        Op::Fill { value, .. } => vec![*value; out.elements()],
        Op::Iota { axis, .. } => each_index(&out.dims, |index| index[*axis] as f64),
        Op::Map { f } => map(*f, ins),
        Op::Reshape { .. } => ins[0].data.to_vec(),
        Op::Transpose { perm } => {
            let strides = contiguous_strides(&ins[0].ty.dims);
            each_index(&out.dims, |index| {
                ins[0].data[index.iter().zip(perm).map(|(i, p)| i * strides[*p]).sum::<usize>()]
            })
        }
        Op::Slice { axis, start, .. } => {
            let strides = contiguous_strides(&ins[0].ty.dims);
            let offset = start * strides[*axis];
            each_index(&out.dims, |index| ins[0].data[offset + dot(index, &strides)])
        }
        Op::Pad { axis, before, .. } => {
            let (strides, len) = (contiguous_strides(&ins[0].ty.dims), ins[0].ty.dims[*axis]);
            each_index(&out.dims, |index| {
                if index[*axis] < *before || index[*axis] >= before + len {
                    return 0.0;
                }
                ins[0].data[dot(index, &strides) - before * strides[*axis]]
            })
        }
        Op::Concat { axis } => each_index(&out.dims, |index| {
            let mut index = index.to_vec();
            let part = ins.iter().find(|part| {
                let inside = index[*axis] < part.ty.dims[*axis];
                if !inside {
                    index[*axis] -= part.ty.dims[*axis];
                }
                inside
            });
            let part = part.expect("the parts cover the axis");
            part.data[dot(&index, &contiguous_strides(&part.ty.dims))]
        }),
        Op::Broadcast { .. } => {
            let x = &ins[0];
            let mut strides = contiguous_strides(&x.ty.dims);
            (0..x.ty.rank()).filter(|&i| x.ty.dims[i] == 1).for_each(|i| strides[i] = 0);
            each_index(&out.dims, |index| x.data[dot(index, &strides)])
        }
        Op::Reduce { axis, by } => reduce(*axis, *by, &ins[0]),
        Op::Product { ta, tb, compute: Compute::Tf32, .. } if ins[0].ty.dtype == DType::F32 => {
            let round = |x: &Operand<'_>| -> Vec<f64> {
                x.data.iter().map(|x| round_tf32(*x as f32) as f64).collect()
            };
            let (a, b) = (round(&ins[0]), round(&ins[1]));
            let [a, b] = [(&ins[0], &a), (&ins[1], &b)].map(|(x, data)| Operand { ty: x.ty, data });
            product(*ta, *tb, &a, &b, out)
        }
        Op::Product { ta, tb, .. } => product(*ta, *tb, &ins[0], &ins[1], out),
        Op::Dropout { p } => dropout(*p, node.key, ins),
        Op::Gather {} => {
            let width = ins[0].ty.elements() / ins[0].ty.dims[0].max(1);
            let row = |i: &f64| {
                let row = *i as i64;
                (0..width).map(move |c| if row < 0 { 0.0 } else { ins[0].data[row as usize * width + c] })
            };
            ins[1].data.iter().flat_map(row).collect()
        }
        Op::Resample { height, width } => resampled([*height, *width], ins),
        Op::Sample {} => sampled(ins),
        Op::Dequantize { rows, nested, .. } => dequantized(rows, *nested, ins),
        Op::ScatterAdd { .. } | Op::RowScatter {} => {
            let is_sum = matches!(node.op, Op::ScatterAdd { .. });
            let (mut to, rows, index) = if is_sum {
                (vec![0.0; out.elements()], &ins[0], &ins[1])
            } else {
                (ins[0].data.to_vec(), &ins[1], &ins[2])
            };
            let width = out.elements() / out.dims[0].max(1);
            for (r, &i) in index.data.iter().enumerate().filter(|(_, i)| **i >= 0.0) {
                for c in 0..width {
                    let (to, x) = (&mut to[i as usize * width + c], rows.data[r * width + c]);
                    *to = if is_sum { *to + x } else { x };
                }
            }
            to
        }
        op => unreachable!("{} is not a primitive", op.name()),
    }
}

fn sampled(ins: &[Operand<'_>]) -> Vec<f64> {
    let vocab = ins[0].ty.dims[1];
    let f32s = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let row = |s: usize| {
        let numbers: Vec<i32> = ins[1].data[s * NUMBERS..][..NUMBERS].iter().map(|x| *x as i32).collect();
        sample(
            &f32s(&ins[0].data[s * vocab..][..vocab]),
            &numbers,
            &f32s(&ins[2].data[s * SHARES..][..SHARES]),
        )
    };
    (0..ins[0].ty.dims[0]).flat_map(row).collect()
}

fn map(f: Elementwise, ins: &[Operand<'_>]) -> Vec<f64> {
    let mut arguments = vec![0.0; ins.len()];
    (0..ins[0].data.len())
        .map(|i| {
            arguments.iter_mut().zip(ins).for_each(|(a, x)| *a = x.data[i]);
            f.eval(&arguments)
        })
        .collect()
}

fn reduce(axis: usize, by: Fold, x: &Operand<'_>) -> Vec<f64> {
    let inner: usize = x.ty.dims[axis + 1..].iter().product();
    let (outer, n) = (x.ty.dims[..axis].iter().product::<usize>(), x.ty.dims[axis]);
    let mut out = Vec::with_capacity(outer * inner);
    for o in 0..outer {
        for i in 0..inner {
            let along = (0..n).map(|a| x.data[(o * n + a) * inner + i]);
            out.push(match by {
                Fold::Sum => along.sum(),
                Fold::SumSquares => along.map(|x| x * x).sum(),
                Fold::Max => along.fold(f64::NEG_INFINITY, f64::max),
            });
        }
    }
    out
}

fn product(ta: bool, tb: bool, a: &Operand<'_>, b: &Operand<'_>, out: &TensorType) -> Vec<f64> {
    let rank = out.rank();
    let (m, n) = (out.dims[rank - 2], out.dims[rank - 1]);
    let k = crate::ops::product::inner(ta, a.ty);
    let batches: usize = out.dims[..rank - 2].iter().product();
    let mut c = vec![0.0; out.elements()];
    // Each row of the result is a sum of rows of b, so that the innermost loop walks memory in order.
    for (batch, c) in c.chunks_exact_mut((m * n).max(1)).enumerate().take(batches) {
        let (a, b) = (&a.data[batch * m * k..], &b.data[batch * k * n..][..k * n]);
        let turned: Vec<f64>;
        let b = if tb {
            turned = (0..k * n).map(|at| b[at % n * k + at / n]).collect();
            &turned[..]
        } else {
            b
        };
        for (i, row) in c.chunks_exact_mut(n.max(1)).enumerate() {
            for (l, of_b) in b.chunks_exact(n.max(1)).enumerate() {
                let x = if ta { a[l * m + i] } else { a[i * k + l] };
                for (sum, y) in row.iter_mut().zip(of_b) {
                    *sum += x * y;
                }
            }
        }
    }
    c
}

fn dropout(p: f32, key: u64, ins: &[Operand<'_>]) -> Vec<f64> {
    let rng = [ins[1].data[0] as i32, ins[1].data[1] as i32, ins[1].data[2] as i32];
    let tokens = ins[0].ty.dims[0];
    let width = ins[0].ty.elements() / tokens.max(1);
    let keep = 1.0 / (1.0 - p as f64);
    let mut out = Vec::with_capacity(ins[0].data.len());
    for t in 0..tokens {
        let draw = RowDraw::new(rng, key, ins[2].data[2 * t] as i32, ins[2].data[2 * t + 1] as i32);
        for c in 0..width {
            let kept = draw.of(c) >= drop_below(p);
            out.push(if kept { ins[0].data[t * width + c] * keep } else { 0.0 });
        }
    }
    out
}

fn resampled(size: [usize; 2], ins: &[Operand<'_>]) -> Vec<f64> {
    let dims = &ins[0].ty.dims;
    let (image, channels) = (dims[1..].iter().product::<usize>(), dims[3]);
    let table: Vec<u8> = ins[0].data.iter().map(|x| *x as u8).collect();
    let of_one = |numbers: &[f64]| {
        let numbers: Vec<i32> = numbers.iter().map(|x| *x as i32).collect();
        let mut out = vec![0; size[0] * size[1] * channels];
        if let Some(part) = ImageCrop::of(&numbers, dims).expect("parts lie in their images") {
            resample(&table[part.image * image..][..image], dims[2], part, size, &mut out);
        }
        out
    };
    ins[1].data.chunks(PART).flat_map(of_one).map(f64::from).collect()
}

/// Computes in f32, as the format defines its values; they are rounded further where they are stored.
fn dequantized(rows: &[usize], nested: bool, ins: &[Operand<'_>]) -> Vec<f64> {
    let codes: Vec<u8> = ins[0].data.iter().map(|x| *x as u8).collect();
    let bytes = ins[0].ty.last();
    let mut values = vec![];
    let of_parts = ins[inputs_before_parts(nested)..].chunks(inputs_of_a_part(nested));
    for (rows, of) in parts(rows).zip(of_parts) {
        let mut part = vec![0.0; 2 * bytes * rows.len()];
        let magnitude = |block: usize| match nested {
            false => of[0].data[block] as f32,
            true => {
                let value = ins[1].data[of[0].data[block] as usize] as f32;
                nf4::magnitude(value, of[1].data[block / nf4::NESTED] as f32, of[2].data[0] as f32)
            }
        };
        nf4::dequantize(&codes[bytes * rows.start..bytes * rows.end], magnitude, f64::from, 0, &mut part);
        values.extend(part);
    }
    values
}

fn dot(index: &[usize], strides: &[usize]) -> usize {
    index.iter().zip(strides).map(|(i, s)| i * s).sum()
}

/// Evaluates `value` for each index of `dims`, in row-major order.
fn each_index(dims: &[usize], mut value: impl FnMut(&[usize]) -> f64) -> Vec<f64> {
    let count: usize = dims.iter().product();
    let mut index = vec![0; dims.len()];
    let mut out = Vec::with_capacity(count);
    for _ in 0..count {
        out.push(value(&index));
        for axis in (0..dims.len()).rev() {
            index[axis] += 1;
            if index[axis] < dims[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    out
}

/// The same graph in f64 throughout, for checking gradients against finite differences.
pub fn in_f64(graph: &Graph) -> Graph {
    let wide = |d: DType| if d.is_float() { DType::F64 } else { d };
    let slots = graph.slots.iter().map(|s| Slot { ty: s.ty.with(wide(s.ty.dtype)), ..s.clone() }).collect();
    let mut out = Graph {
        slots,
        writes: graph.writes.clone(),
        results: graph.results.clone(),
        next_key: graph.unused_key(),
        nodes: vec![],
    };
    for node in &graph.nodes {
        let mut op = node.op.clone();
        match &mut op {
            Op::Fill { dtype, .. } | Op::Iota { dtype, .. } => *dtype = wide(*dtype),
            Op::Product { out, .. } | Op::ThinProduct { out, .. } | Op::ScatterAdd { out, .. } => {
                *out = wide(*out)
            }
            Op::Map { f: Elementwise::Cast(dtype) } => *dtype = wide(*dtype),
            Op::Region { body } | Op::Bundle { body } => **body = in_f64(body),
            _ => {}
        }
        out.push_keyed(op, node.ins.clone(), &node.path, node.key);
    }
    out
}
