//! Norms on both sides of a residual addition are fused into one operation with equal numbers, and half of the sums need not be
//! kept.

use flatout_ir::graph::Class;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::oracle::{self, Values};
use flatout_ir::passes::fuse::double_norms::double_norms;
use flatout_ir::passes::gradient::differentiate::differentiate;
use flatout_ir::passes::gradient::recompute;
use flatout_ir::target::paper;
use flatout_ir::{Builder, DType, Graph, Init, Op, Program, Recompute, Role, compile, random};

const BLOCKS: usize = 4;
const ROWS: usize = 5;
const WIDTH: usize = 6;

/// A residual stream whose blocks norm both their input and their output.
fn stream(norms: Class) -> Graph {
    let b = Builder::new();
    let spec = NormSpec::rms(1e-3, NormWeight::OnePlus);
    let mut h = b.input("x", DType::F32, &[ROWS, WIDTH]);
    let mut out = h;
    for i in 0..BLOCKS {
        let layer = format!("layers.{i}");
        (out, h) = b.at_path(&layer, || {
            let param = |name: &str, dims: &[usize]| b.param(&format!("{layer}.{name}"), dims, Init::Zeros);
            let y = out.linear(param("w", &[WIDTH, WIDTH]));
            let n = b.op(spec.op(false), &[y, param("inner", &[WIDTH])]);
            let both = b.ops(spec.op(true), &[n, h, param("outer", &[WIDTH])]);
            (both[0], both[1])
        });
    }
    b.result("loss", (out + h).square().sum(0).sum(1).reshape(&[1]));
    b.result("weight", b.fill(1.0, DType::F32, &[1]));
    let mut g = b.finish();
    g.slots.iter_mut().filter(|s| s.ty.dims == [WIDTH]).for_each(|s| s.class = norms);
    g
}

fn values(g: &Graph) -> Values {
    let draw = |i: usize, n: usize| (0..n).map(|k| random::normal(3, i as u64, k as u64) as f64).collect();
    g.slots.iter().enumerate().map(|(i, slot)| (slot.path.clone(), draw(i, slot.ty.elements()))).collect()
}

fn writes_agree(one: &Graph, other: &Graph) {
    let values = values(one);
    let [a, b] = [one, other].map(|g| oracle::run(g, &values).writes);
    assert!(a.len() == b.len() && a.len() > BLOCKS, "{:?}", a.keys());
    for (path, want) in &a {
        let off = want.iter().zip(&b[path]).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        assert!(off < 2e-6 * want.iter().fold(1.0, |m: f64, x| m.max(x.abs())), "{path} is off by {off}");
    }
}

#[test]
fn norms_around_an_addition_are_one_pass_each_way() {
    let trained = differentiate(&stream(Class::Frozen));
    let (g, forward, joined) = double_norms(&trained.graph, trained.forward, &paper());
    assert_eq!(joined, [BLOCKS, BLOCKS]);
    assert_eq!(g.nodes.len(), trained.graph.nodes.len() - 2 * BLOCKS);
    assert_eq!(forward, trained.forward - BLOCKS);
    writes_agree(&trained.graph, &g);
    assert_eq!(g.to_string().parse::<Graph>().expect("its own text"), g);
    // From the last block back: every other sum is recomputed, and the backward pass does not read it.
    let of_sums: Vec<bool> = g
        .nodes
        .iter()
        .filter_map(|n| match n.op {
            Op::DoubleNormGrad { of_sum, .. } => Some(of_sum),
            _ => None,
        })
        .collect();
    assert_eq!(of_sums, [true, false, true, false]);
    let sums = g.ids().filter(|id| matches!(g.node(*id).op, Op::DoubleNorm { .. })).map(|id| id.out(1));
    let is_read = |sum| g.nodes[forward..].iter().any(|node| node.ins.contains(&sum));
    assert!(sums.map(is_read).eq([false, true, false, true]));
}

#[test]
fn recomputed_sums_have_the_same_gradients() {
    let trained = differentiate(&stream(Class::Frozen));
    let (g, forward, _) = double_norms(&trained.graph, trained.forward, &paper());
    for how in [Recompute::None, Recompute::Cheap, Recompute::Wide, Recompute::Full] {
        let (again, count) = recompute::recompute(&g, forward, how, None, false);
        assert_eq!(count > 0, how != Recompute::None, "{how:?}");
        writes_agree(&trained.graph, &again);
    }
}

#[test]
fn norms_that_are_trained_have_gradients_of_their_own() {
    let trained = differentiate(&stream(Class::Weight));
    let (g, forward, joined) = double_norms(&trained.graph, trained.forward, &paper());
    assert_eq!(joined, [BLOCKS, 0]);
    writes_agree(&trained.graph, &g);
    writes_agree(&trained.graph, &recompute::recompute(&g, forward, Recompute::Cheap, None, false).0);
}

#[test]
fn a_target_without_the_kernels_keeps_norms_apart() {
    let mut target = paper();
    target.kernels.retain(|row| !row.op.is_optional());
    let programs = [Program { role: Role::GRAD, graph: stream(Class::Frozen) }];
    let plans = compile(&programs, &target, &Default::default()).expect("a plan");
    assert!(plans.plans.iter().flat_map(|plan| &plan.launches).all(|launch| !launch.op.kind().is_optional()));
}
