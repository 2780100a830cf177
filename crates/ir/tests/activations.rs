//! Activations, gated or not, fused into the products before them: the operations, and the passes that create them.

use std::collections::HashMap;

use flatout_ir::autodiff::gradients;
use flatout_ir::check::{evaluate, within};
use flatout_ir::interpreter::Interpreter;
use flatout_ir::ops::gated::Act;
use flatout_ir::passes::gradient::differentiate::gradient_path;
use flatout_ir::passes::input_path;
use flatout_ir::target::paper;
use flatout_ir::{
    Builder, DType, Graph, Init, Op, OpKind, Options, Precision, Program, Recompute, Role, compile, random,
};

const M: usize = 3;
const K: usize = 4;
const N: usize = 5;

/// c [M, N] = a [M, K] b, as plain loops; b is [N, K] if `transposed`, else [K, N].
fn product(a: &[f64], b: &[f64], n: usize, transposed: bool) -> Vec<f64> {
    let at = |k: usize, j: usize| if transposed { b[j * K + k] } else { b[k * n + j] };
    let element = |i: usize, j: usize| (0..K).map(|k| a[i * K + k] * at(k, j)).sum::<f64>();
    (0..M * n).map(|e| element(e / n, e % n)).collect()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

pub fn gated_products_match_product_and_gate() {
    let (outs, values) = evaluate(|t| {
        let ins = [t.x(&[M, K]), t.x(&[2 * N, K])];
        t.b.ops(Op::GatedProduct { act: Act::Silu }, &ins)
    });
    let wide = product(&values["x0"], &values["x1"], 2 * N, true);
    let rows = wide.chunks(2 * N);
    let value = rows.flat_map(|row| (0..N).map(|j| silu(row[j]) * row[N + j]));
    within(1e-12, &outs[0], &wide).expect("gate and up");
    within(1e-12, &outs[1], &value.collect::<Vec<f64>>()).expect("the gate's activation times up");
}

/// Gradients of gate and up through the activation and the product after it.
pub fn gated_product_gradients_match_both_slopes() {
    let (outs, _) = evaluate(|t| {
        let (d, w) = (t.x(&[M, K]), t.x(&[K, N]));
        let (gate, up) = (t.x(&[M, N]), t.x(&[M, N]));
        let value = t.b.op(Op::Gated { act: Act::GeluExact, p: 0.0 }, &[gate, up]);
        let mut wanted = gradients(&t.b, &[(value.product(w, false, true), d)], &[gate, up]);
        wanted.push(value);
        let op = |again| Op::GatedProductGrad { act: Act::GeluExact, again };
        wanted
            .into_iter()
            .chain([true, false].into_iter().flat_map(|again| t.b.ops(op(again), &[d, w, gate, up])))
            .collect()
    });
    for (i, got) in outs[3..].iter().enumerate() {
        within(1e-12, got, &outs[i % 3]).expect("the slopes of a gated activation");
    }
}

pub fn activated_products_match_product_and_activation() {
    let (outs, values) = evaluate(|t| {
        let (x, rows, columns, bias) = (t.x(&[M, K]), t.x(&[N, K]), t.x(&[K, N]), t.x(&[N]));
        let op = |tb, bias| Op::ActivatedProduct { act: Act::Gelu, tb, bias };
        let given = t.b.ops(op(true, true), &[x, rows, bias]);
        let turned = t.b.ops(op(false, true), &[x, columns, bias]);
        [given, turned, t.b.ops(op(true, false), &[x, rows])].concat()
    });
    let [x, rows, columns, bias] = ["x0", "x1", "x2", "x3"].map(|name| &values[name]);
    let plus = |c: Vec<f64>| c.iter().enumerate().map(|(e, c)| c + bias[e % N]).collect::<Vec<f64>>();
    let wanted =
        [plus(product(x, rows, N, true)), plus(product(x, columns, N, false)), product(x, rows, N, true)];
    for (got, h) in outs.chunks(2).zip(wanted) {
        within(1e-12, &got[0], &h).expect("the product with its bias");
        let value: Vec<f64> = h.iter().map(|h| gelu_tanh(*h)).collect();
        within(1e-12, &got[1], &value).expect("its activation");
    }
}

/// Gradients of h and of its bias through the activation and the product after it, with the weight stored either way.
pub fn activated_product_gradients_match_both_slopes() {
    let (outs, _) = evaluate(|t| {
        let (d, rows, h) = (t.x(&[M, K]), t.x(&[N, K]), t.x(&[M, N]));
        let columns = t.x(&[K, N]);
        let value = h.activate(Act::GeluExact);
        let of = |y| gradients(&t.b, &[(y, d)], &[h])[0];
        let [turned, given] =
            [of(value.product(rows, false, false)), of(value.product(columns, false, true))];
        let op = |tb, again, sum| Op::ActivatedProductGrad { act: Act::GeluExact, tb, again, sum };
        let mut outs = vec![turned, value, turned.sum(0), given, value, given.sum(0)];
        outs.extend(t.b.ops(op(true, true, true), &[d, rows, h]));
        outs.extend(t.b.ops(op(false, true, true), &[d, columns, h]));
        outs.extend(t.b.ops(op(true, false, false), &[d, rows, h]));
        outs
    });
    for (i, got) in outs[6..].iter().enumerate() {
        within(1e-12, got, &outs[i % 6]).expect("the slope, the activation and the sum");
    }
}

const TOKENS: usize = 8;
const WEIGHTS: [(&str, &[usize]); 6] = [
    ("gate", &[16, 8]),
    ("up", &[16, 8]),
    ("down", &[8, 16]),
    ("w1", &[16, 8]),
    ("b1", &[16]),
    ("w2", &[8, 16]),
];

/// loss = sum of squares of a gated layer followed by one with a bias and an activation.
fn layers(act: Act) -> Graph {
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[TOKENS, 8]);
    let [gate, up, down, w1, b1, w2] =
        WEIGHTS.map(|(name, dims)| b.param(name, dims, Init::Normal { std: 0.5 }));
    let gated = (x.linear(gate).activate(Act::Silu) * x.linear(up)).linear(down);
    let h = (gated.linear(w1) + b1.reshape(&[1, 16])).activate(act);
    b.result("loss", h.linear(w2).square().sum(0).sum(1).reshape(&[1]));
    b.result("weight", b.fill(1.0, DType::F32, &[1]));
    b.finish()
}

fn values() -> HashMap<String, Vec<f64>> {
    let slots = [("x", TOKENS * 8)].into_iter().chain(WEIGHTS.map(|(n, d)| (n, d.iter().product())));
    let draw = |i: usize, n: usize| {
        (0..n).map(|k| 0.5 * random::normal(5, i as u64, k as u64) as f64).map(|x| x as f32 as f64).collect()
    };
    slots.enumerate().map(|(i, (name, n))| (name.to_string(), draw(i, n))).collect()
}

/// The gradients, and the kinds of operations in the plan.
fn run(act: Act, options: &Options) -> (HashMap<String, Vec<f64>>, Vec<OpKind>) {
    let programs = [Program { role: Role::GRAD, graph: layers(act) }];
    let mut run = Interpreter::new(compile(&programs, &paper(), options).expect("a plan"));
    for (path, value) in values() {
        run.set(&if path == "x" { input_path(Role::GRAD, "x") } else { path }, &value);
    }
    if run.plans.plan(Role::Derive).is_some() {
        run.run(Role::Derive);
    }
    run.run(Role::GRAD);
    let kinds = run.plans.plan(Role::GRAD).expect("a plan").launches.iter().map(|l| l.op.kind()).collect();
    let gradient = |name: &str| (name.to_string(), run.get(&gradient_path(name)).to_vec());
    (WEIGHTS.map(|(name, _)| gradient(name)).into(), kinds)
}

#[test]
fn products_fuse_activations_and_keep_the_gradients() {
    for act in [Act::Gelu, Act::GeluExact] {
        for recompute in [Recompute::None, Recompute::Cheap, Recompute::Wide, Recompute::Full] {
            let with = |fuse_activation, precision| Options {
                fuse_activation,
                precision,
                recompute,
                ..Options::default()
            };
            let (wanted, _) = run(act, &with(true, Precision::F32));
            let (apart, kinds) = run(act, &with(false, Precision::BF16));
            assert!(!kinds.iter().any(|kind| kind.is_optional() && *kind != OpKind::DoubleNorm), "{kinds:?}");
            let (fused, kinds) = run(act, &with(true, Precision::BF16));
            let count = |of: OpKind| kinds.iter().filter(|kind| **kind == of).count();
            assert_eq!(count(OpKind::GatedProductGrad), 1, "{act:?} {recompute:?} {kinds:?}");
            assert_eq!(count(OpKind::ActivatedProductGrad), 1, "{act:?} {recompute:?} {kinds:?}");
            assert!(count(OpKind::GatedProduct) >= 1, "{act:?} {recompute:?} {kinds:?}");
            assert!(count(OpKind::ActivatedProduct) >= 1, "{act:?} {recompute:?} {kinds:?}");
            // The sum that is the bias's gradient is fused too.
            assert_eq!(count(OpKind::Gated) + count(OpKind::GatedGrad), 0, "{act:?} {recompute:?} {kinds:?}");
            for (name, want) in &wanted {
                let off = |got: &[f64]| {
                    let size: f64 = want.iter().map(|x| x * x).sum();
                    let off: f64 = got.iter().zip(want).map(|(g, w)| (g - w) * (g - w)).sum();
                    (off / size).sqrt()
                };
                let (fused, apart) = (off(&fused[name]), off(&apart[name]));
                assert!(
                    fused < 4e-2 && fused < 2.0 * apart + 1e-3,
                    "{name} is off by {fused}, apart by {apart}"
                );
            }
        }
    }
}

#[test]
fn a_target_without_the_kernels_keeps_activations_apart() {
    let mut target = paper();
    target.kernels.retain(|row| !row.op.is_optional());
    let programs = [Program { role: Role::GRAD, graph: layers(Act::GeluExact) }];
    let options = Options { precision: Precision::BF16, ..Options::default() };
    let plans = compile(&programs, &target, &options).expect("a plan");
    assert!(plans.plans.iter().flat_map(|plan| &plan.launches).all(|launch| !launch.op.kind().is_optional()));
}
