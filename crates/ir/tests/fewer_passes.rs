//! Rewrites that save memory passes keep the numbers: scales in weights, ReLU and dropout in producers, slopes beside their
//! activation, products in the order of axes that is read, sums over rows with the rows.

use flatout_ir::graph::{Class, Slot};
use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::oracle::{self, Values};
use flatout_ir::passes::forward::adapter::Adapter;
use flatout_ir::passes::forward::adapters;
use flatout_ir::passes::forward::folded_scales;
use flatout_ir::passes::forward::merge;
use flatout_ir::passes::forward::patterns;
use flatout_ir::passes::fuse::bundles;
use flatout_ir::passes::fuse::column_sums;
use flatout_ir::passes::fuse::fused_products;
use flatout_ir::passes::fuse::regions;
use flatout_ir::passes::gradient::differentiate::{self, Trained};
use flatout_ir::passes::gradient::held_ratios;
use flatout_ir::passes::options::Update;
use flatout_ir::target::paper;
use flatout_ir::types::TensorType;
use flatout_ir::{Builder, DType, Graph, Init, Op, OpKind, Options, Program, Role, Tensor, compile, random};

/// Values of all inputs and parameters, drawn by their index.
fn values(g: &Graph) -> Values {
    let draw = |i: usize, n: usize| (0..n).map(|k| random::normal(5, i as u64, k as u64) as f64).collect();
    let slots = g.slots.iter().enumerate().filter(|(_, slot)| slot.ty.dtype == DType::F32);
    slots.map(|(i, slot)| (slot.path.clone(), draw(i, slot.ty.elements()))).collect()
}

/// All values that the gradients of both graphs write are equal, up to the rounding of f32.
fn gradients_agree(one: &Graph, other: &Graph, values: &Values) {
    let [one, other] = [one, other].map(|g| differentiate::differentiate(g).graph);
    writes_agree(&one, &other, values);
}

fn writes_agree(one: &Graph, other: &Graph, values: &Values) {
    let [a, b] = [one, other].map(|g| oracle::run(g, values).writes);
    assert!(a.len() == b.len() && a.len() > 2, "{:?}", a.keys());
    for (path, want) in &a {
        let off = want.iter().zip(&b[path]).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        assert!(off < 2e-6 * want.iter().fold(1.0, |m: f64, x| m.max(x.abs())), "{path} is off by {off}");
    }
}

fn finish(b: &Builder, y: Tensor<'_>) {
    b.result("loss", y.square().sum(0).sum(1).reshape(&[1]));
    b.result("weight", b.fill(1.0, DType::F32, &[1]));
}

/// ((x w^T + bias) scale)^2 with `rows` rows.
fn scaled(rows: usize, has_bias: bool) -> Graph {
    let b = Builder::new();
    let (x, w) = (b.input("x", DType::F32, &[rows, 6]), b.param("w", &[4, 6], Init::Zeros));
    let mut y = x.linear(w);
    if has_bias {
        y = y + b.param("bias", &[4], Init::Zeros).reshape(&[1, 4]);
    }
    finish(&b, y * b.param("scale", &[4], Init::Zeros).reshape(&[1, 4]));
    b.finish()
}

#[test]
fn scales_fold_into_the_weight_before_them() {
    for has_bias in [false, true] {
        let g = scaled(9, has_bias);
        let (folded, count) = folded_scales::folded_scales(&g);
        assert_eq!(count, 1);
        let over_rows = |n: &&flatout_ir::Node| n.op.kind() == OpKind::Map && n.outs[0].dims[0] == 9;
        // The bias's addition and the square.
        assert_eq!(folded.nodes.iter().filter(over_rows).count(), 1 + has_bias as usize, "{folded}");
        gradients_agree(&g, &folded, &values(&g));
    }
    // Here the pass over the weight would be the longer one.
    assert_eq!(folded_scales::folded_scales(&scaled(5, true)).1, 0);
}

/// q, k and v of `rows` inputs, frozen, in one product.
fn queries_keys_values(rows: usize) -> Graph {
    let b = Builder::new();
    let x = b.param("x", &[rows, 6], Init::Zeros);
    let parts = [("wq", 4), ("wk", 2), ("wv", 2)].map(|(name, out)| {
        let path = format!("layers.0.attn.{name}");
        let w = b.param(&path, &[out, 6], Init::Zeros);
        b.at_path("layers.0.attn", || x.linear(w)).square()
    });
    finish(&b, b.concat(&parts, 1));
    let mut g = b.finish();
    differentiate::freeze(&mut g, &["wq", "wk", "wv"].map(|w| format!("layers.0.attn.{w}")).into());
    let (g, merged) = merge::merge(&g, true, true, &Update::default());
    assert_eq!(merged.qkv + merged.gate_up, 1);
    g
}

fn adapted(g: &Graph, scales: [f64; 3], folds: bool) -> Trained {
    let beside = |(name, scale): (&str, f64)| Adapter {
        name: "default".into(),
        weight: format!("layers.0.attn.{name}"),
        rank: 2,
        scale,
        dropout: 0.0,
        dora: true,
    };
    let all: Vec<Adapter> = ["wq", "wk", "wv"].into_iter().zip(scales).map(beside).collect();
    let update = Update::default();
    let context = adapters::AdapterContext { update: &update, role: Role::GRAD, folds };
    differentiate::differentiate(&adapters::adapters(g, &all, context).expect("adapters").0)
}

#[test]
fn dora_factors_fold_into_the_weights() {
    let (few, many) = (queries_keys_values(5), queries_keys_values(9));
    for scales in [[2.0; 3], [2.0, 3.0, 2.0]] {
        let apart = adapted(&many, scales, false);
        let (folded, ones) = held_ratios::held_ratios(&adapted(&many, scales, true));
        // z and its gradient.
        assert_eq!((held_ratios::held_ratios(&apart).1, ones), (0, 2));
        // Besides the square's gradient, the only multiplication over rows is the one that m's gradient sums.
        let over_rows = |t: &Trained| {
            let times = |n: &&flatout_ir::Node| n.op == Op::Map { f: E::Mul } && n.outs[0].dims == [9, 8];
            t.graph.nodes.iter().filter(times).count()
        };
        assert_eq!((over_rows(&apart), over_rows(&folded)), (4, 2), "{}", folded.graph);
        let is_forward = |v: flatout_ir::Value| (v.node.0 as usize) < folded.forward;
        let loss = folded.graph.writes.last().expect("the weight").1;
        assert!(!is_forward(loss) && is_forward(folded.graph.node(loss.node).ins[1]));
        writes_agree(&apart.graph, &folded.graph, &values(&apart.graph));
    }
    // Here the pass over the weights would be the longer one.
    assert_eq!(held_ratios::held_ratios(&adapted(&few, [2.0; 3], true)).1, 0);
}

/// Parts of a concatenation lie in place even if others read them, except for a small part that is read longer than the rest.
#[test]
fn joined_values_that_others_read_lie_in_place() {
    let copies = |late: &str| {
        let b = Builder::new();
        let h = b.input("x", DType::F32, &[8, 6]).square();
        let u = h.linear(b.param("a", &[2, 6], Init::Zeros));
        let y = b.concat(&[h, u], 1).linear(b.param("w", &[4, 8], Init::Zeros));
        let read = if late == "u" { u } else { h };
        b.result("y", y.linear(b.param("v", &[read.dims()[1], 4], Init::Zeros)) + read);
        let program = Program { role: Role::Eval, graph: b.finish() };
        let plans = compile(&[program], &paper(), &Options::default()).expect("plans");
        let launches = &plans.plan(Role::Eval).expect("a plan").launches;
        launches.iter().filter(|l| l.op.kind() == OpKind::Reshape).count()
    };
    assert_eq!((copies("h"), copies("u")), (0, 1));
}

#[test]
fn relu_is_applied_as_a_product_writes() {
    let b = Builder::new();
    let (x, w) = (b.input("x", DType::F32, &[5, 6]), b.param("w", &[4, 6], Init::Zeros));
    let y = x.linear(w).activate(Act::Relu) * b.param("s", &[4], Init::Zeros).reshape(&[1, 4]);
    finish(&b, y * b.param("t", &[4], Init::Zeros).reshape(&[1, 4]));
    let g = b.finish();
    let (fused, count) = fused_products::forward(&g);
    let is_relu = |n: &flatout_ir::Node| matches!(n.op, Op::Product { epilogue: Epilogue::Relu, .. });
    assert!(count == 1 && fused.nodes.iter().any(is_relu), "{fused}");
    gradients_agree(&g, &fused, &values(&g));
}

#[test]
fn dropout_in_a_gated_activation_draws_by_its_own_key() {
    let build = |draws_first: bool| {
        let b = Builder::new();
        let [gate, up] = ["gate", "up"].map(|name| b.param(name, &[5, 8], Init::Zeros));
        let rows = |b: &Builder| {
            let tokens = b.iota(DType::I32, &[5, 2], 0);
            b.result("rows", tokens);
            tokens.v
        };
        let first = draws_first.then(|| rows(&b));
        let gated = gate.activate(Act::Relu) * up;
        let rows = b.tensor(first.unwrap_or_else(|| rows(&b)));
        let rng = b.input("rng", DType::I32, &[3]);
        finish(&b, gated.dropout(0.3, rng, rows) * b.param("s", &[8], Init::Zeros).reshape(&[1, 8]));
        b.finish()
    };
    let g = build(true);
    let (fused, joined) = patterns::patterns(&g, true, true);
    assert_eq!(joined.gated, 1);
    let key = |g: &Graph, kind: OpKind| g.nodes.iter().find(|n| n.op.kind() == kind).map(|n| n.key);
    assert_eq!(key(&fused, OpKind::Dropout), None);
    assert_eq!(key(&fused, OpKind::Gated), key(&g, OpKind::Dropout));
    let mut values = values(&g);
    values.insert("rng".into(), vec![3.0, 4.0, 5.0]);
    gradients_agree(&g, &fused, &values);
    // The dropout's inputs are computed later: the two stay separate.
    let (apart, joined) = patterns::patterns(&build(false), true, true);
    assert!(joined.gated == 1 && key(&apart, OpKind::Dropout).is_some(), "{apart}");
}

/// gelu(h), `products_between` products, and d gelu'(h).
fn activated(products_between: usize) -> Graph {
    let b = Builder::new();
    let [h, d] = ["h", "d"].map(|name| b.input(name, DType::F32, &[6, 6]));
    let mut y = h.activate(Act::GeluExact);
    for _ in 0..products_between {
        y = y.product(d, false, false);
    }
    b.result("y", y);
    b.result("dh", d * h.map(Act::GeluExact.slope()));
    b.finish()
}

#[test]
fn nearby_activations_and_slopes_share_a_region() {
    let (g, gathered) = regions::regions(&activated(1));
    assert_eq!((gathered.regions, gathered.nodes), (1, 3), "{g}");
    let (_, gathered) = regions::regions(&activated(9));
    assert_eq!((gathered.regions, gathered.nodes, gathered.single), (1, 2, 1));
}

/// d gelu'(h) of `rows` rows with its sum over them, and the sum of h d alone.
fn summed(rows: usize) -> Graph {
    let b = Builder::new();
    let [h, d] = ["h", "d"].map(|name| b.input(name, DType::F32, &[rows, 6]));
    let dh = d * h.map(Act::GeluExact.slope());
    b.result("dh", dh);
    b.result("bias", dh.sum(0));
    b.result("scale", (h * d).sum(0));
    b.finish()
}

fn results_agree(one: &Graph, other: &Graph) {
    let values = values(one);
    assert_eq!(oracle::run(one, &values).results, oracle::run(other, &values).results);
}

fn kinds(g: &Graph) -> Vec<OpKind> {
    g.nodes.iter().map(|n| n.op.kind()).filter(|kind| *kind != OpKind::Read).collect()
}

#[test]
fn a_region_sums_what_it_computes_over_rows() {
    let g = summed(300);
    let (apart, _) = regions::regions(&g);
    assert_eq!(kinds(&apart), [OpKind::Region, OpKind::Reduce, OpKind::Map, OpKind::Reduce]);
    let (joined, sums) = column_sums::column_sums(&apart);
    assert_eq!((sums, kinds(&joined)), (2, vec![OpKind::Region; 2]), "{joined}");
    let outs = joined.nodes.iter().filter(|n| n.op.kind() == OpKind::Region).map(|n| n.outs.len());
    assert!(outs.eq([2, 1]), "what is only summed is no output: {joined}");
    results_agree(&g, &joined);
    assert_eq!(joined.to_string().parse::<Graph>().expect("its own text"), joined);
    // For few rows a separate launch is as good.
    assert_eq!(column_sums::column_sums(&regions::regions(&summed(255)).0).1, 0);
}

#[test]
fn the_gradient_of_a_norm_is_summed_where_it_is_written() {
    for spec in [
        NormSpec::rms(1e-5, NormWeight::None),
        NormSpec { eps: 1e-5, center: true, weight: NormWeight::Plain, bias: true },
    ] {
        let b = Builder::new();
        let [h, dy, dh] = ["h", "dy", "dh"].map(|name| b.input(name, DType::F32, &[300, 6]));
        let w = spec.weight.is_some().then(|| b.param("w", &[6], Init::Zeros));
        let ins: Vec<Tensor<'_>> = [Some(h), w, Some(dy), Some(dh)].into_iter().flatten().collect();
        let outs = b.ops(spec.grad(true), &ins);
        b.result("bias", outs[0].sum(0));
        for (i, out) in outs.into_iter().enumerate() {
            b.result(&format!("out{i}"), out);
        }
        let g = b.finish();
        let (joined, sums) = column_sums::column_sums(&g);
        assert_eq!((sums, kinds(&joined)), (1, vec![OpKind::RmsNormGrad, OpKind::Reshape]), "{joined}");
        results_agree(&g, &joined);
    }
}

#[test]
fn plans_have_no_separate_sums_over_rows() {
    let programs = [Program { role: Role::Eval, graph: summed(300) }];
    let launches = |options: &Options| {
        let plans = compile(&programs, &paper(), options).expect("a plan");
        plans.plans[0].launches.iter().map(|l| l.op.kind()).collect::<Vec<OpKind>>()
    };
    assert_eq!(launches(&Options::default()), [OpKind::Region; 2]);
    let apart = launches(&Options { skip_pass: Some("column_sums"), ..Options::default() });
    assert_eq!(apart.iter().filter(|kind| **kind == OpKind::Reduce).count(), 2);
    let off = launches(&Options { fuse_elementwise: false, ..Options::default() });
    assert!(off.contains(&OpKind::Reduce) && !off.contains(&OpKind::Region));
}

/// A graph that adds vectors to slots, one of them by two nodes, a wide tensor, and a vector with another reader.
fn ending() -> Graph {
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[300, 6]);
    let slot = |name: &str, dims: &[usize]| {
        let ty = TensorType::new(DType::F32, dims);
        let (path, class, init, part) = (name.to_string(), Class::Carry, Init::Zeros, None);
        b.edit(|g| g.add_slot(Slot { path, ty, class, init, part }))
    };
    let sum = x.sum(0).reshape(&[6]);
    for (name, v) in [("a", sum), ("b", sum.exp() * sum), ("c", x.sum(1).reshape(&[300]))] {
        let slot = slot(name, &v.dims());
        let added = b.read(slot) + v;
        b.edit(|g| g.writes.push((slot, added.v)));
    }
    let wide = slot("wide", &[300, 200]);
    let rows = x.product(b.input("w", DType::F32, &[6, 200]), false, false);
    let added = b.read(wide) + rows.exp();
    b.edit(|g| g.writes.push((wide, added.v)));
    b.result("y", sum.scale(3.0).reshape(&[1, 6]).linear(b.input("v", DType::F32, &[6, 6])));
    b.finish()
}

#[test]
fn unit_axes_do_not_separate_small_neighbours() {
    let build = |columns: usize| {
        let b = Builder::new();
        let [x, y] = ["x", "y"].map(|name| b.input(name, DType::F32, &[1, columns]));
        let z = b.input("z", DType::F32, &[columns]);
        b.result("sum", (x * y).exp().reshape(&[columns]) + z);
        b.result("again", (x + y).reshape(&[columns, 1]).exp() * (x - y).reshape(&[columns, 1]));
        b.finish()
    };
    let g = build(8);
    let (joined, gathered) = regions::regions(&g);
    assert_eq!((gathered.regions, gathered.nodes, gathered.single), (2, 7, 0), "{joined}");
    results_agree(&g, &joined);
    // Where the value is no longer small, the reshape stays in place.
    let (_, apart) = regions::regions(&build(40_000));
    assert_eq!((apart.regions, apart.nodes), (1, 2));
}

#[test]
fn small_ends_of_a_plan_are_one_launch() {
    let (g, _) = regions::regions(&ending());
    let (joined, bundled) = bundles::bundles(&g);
    assert_eq!((bundled.bundles, bundled.nodes), (1, 3), "{joined}");
    assert_eq!(kinds(&joined).last(), Some(&OpKind::Bundle));
    let values = values(&g);
    let [one, other] = [&g, &joined].map(|g| oracle::run(g, &values));
    assert_eq!((&one.writes, &one.results), (&other.writes, &other.results));
    assert_eq!(joined.to_string().parse::<Graph>().expect("its own text"), joined);
    // Every sum stays in its slot.
    let programs = [Program { role: Role::Eval, graph: ending() }];
    let plans = compile(&programs, &paper(), &Options::default()).expect("a plan");
    let bundle = plans.plans[0].launches.iter().find(|l| l.op.kind() == OpKind::Bundle).expect("one");
    for out in bundle.outs.iter().flatten() {
        assert!(bundle.ins.iter().any(|input| input.offset == out.offset), "{bundle:?}");
    }
}

#[test]
fn groups_that_meet_are_merged() {
    let b = Builder::new();
    let [x, y, a] = ["x", "y", "a"].map(|name| b.input(name, DType::F32, &[3, 4]));
    let sum = x + y;
    b.result("dx", sum * a.map(Act::Relu.slope()));
    let (_, gathered) = regions::regions(&b.finish());
    assert_eq!((gathered.regions, gathered.nodes, gathered.single), (1, 3, 0));
}

#[test]
fn a_product_is_written_in_the_order_of_axes_that_is_read() {
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[2, 5, 3]);
    let y = x.product(b.input("w", DType::F32, &[2, 3, 4]), false, false);
    b.result("y", y.transpose(&[1, 0, 2]).reshape(&[5, 8]).exp());
    let programs = [Program { role: Role::Eval, graph: b.finish() }];
    let plans = compile(&programs, &paper(), &Options::default()).expect("a plan");
    let launches = &plans.plans[0].launches;
    let kinds: Vec<OpKind> = launches.iter().map(|l| l.op.kind()).collect();
    assert_eq!(kinds, [OpKind::Product, OpKind::Map], "no copy");
    assert_eq!(launches[0].outs[0].as_ref().expect("read").strides, [4, 8, 1]);
}
