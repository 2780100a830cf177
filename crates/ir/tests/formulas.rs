//! The expansions of the fused operations against their formulas, written as plain loops: these tests catch a forward function
//! that is smooth but wrong, which finite differences cannot.

use std::collections::BTreeSet;

use flatout_ir::check::{cases, draw, within};
use flatout_ir::graph::{Graph, Node, Value};
use flatout_ir::ops::attention::{Attend, Mask, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::frequency::Frequencies;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::linear_attention::{LinearAttend, LinearMask};
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::rope::Pairs;
use flatout_ir::ops::{Op, OpKind};
use flatout_ir::oracle::{self, Values, in_f64};
use flatout_ir::types::DType;
use flatout_ir::{Builder, Init};

/// A tensor with its values.
#[derive(Clone)]
struct Data {
    dims: Vec<usize>,
    x: Vec<f64>,
}

#[test]
fn expansions_are_their_formulas() {
    let mut proven = BTreeSet::new();
    for case in cases::all() {
        let (forward, values) = case.forward();
        let mut graph = in_f64(&forward);
        let all: Vec<Value> =
            graph.ids().flat_map(|id| (0..graph.node(id).outs.len() as u8).map(move |o| id.out(o))).collect();
        graph.results = all.iter().map(|v| (v.to_string(), *v)).collect();
        let run = oracle::run(&graph, &values);
        let data = |v: &Value| Data { dims: graph.dims(*v).to_vec(), x: run.results[&v.to_string()].clone() };
        for id in graph.ids() {
            let node = graph.node(id);
            let ins: Vec<Data> = node.ins.iter().map(data).collect();
            let Some(wanted) = formula(&node.op, &ins) else { continue };
            proven.insert(node.op.kind());
            for (out, wanted) in wanted.iter().enumerate() {
                within(1e-12, &data(&id.out(out as u8)).x, wanted)
                    .unwrap_or_else(|why| panic!("{}: {} output {out}: {why}", case.name, node.op.name()));
            }
        }
    }
    let fused: BTreeSet<OpKind> = cases::all().flat_map(|case| fused(&case.forward().0)).collect();
    assert_eq!(proven, fused, "a formula for every operation that expands");
}

/// The operations of a graph that have expansions.
fn fused(graph: &Graph) -> Vec<OpKind> {
    let b = Builder::from_graph(graph.clone());
    let expands = |node: &&Node| {
        let ins: Vec<_> = node.ins.iter().map(|v| b.tensor(*v)).collect();
        node.op.expand(&b, node.key, &ins).is_some()
    };
    graph.nodes.iter().filter(expands).map(|n| n.op.kind()).collect()
}

fn formula(op: &Op, ins: &[Data]) -> Option<Vec<Vec<f64>>> {
    Some(match op {
        Op::Product { ta, tb, base: true, .. } => vec![product(*ta, *tb, ins)],
        Op::Product { ta, tb, epilogue, .. } if *epilogue != Epilogue::None => {
            layer(*ta, *tb, *epilogue, ins)
        }
        Op::ScatterAdd { base: true, .. } => vec![scatter_add(ins)],
        Op::RmsNorm { .. } => {
            let (spec, residual) = NormSpec::of(op).unwrap();
            norm(spec, residual, ins)
        }
        Op::Rope { freq, axis_of_freq, pairs, inverse, .. } => {
            vec![rope(*freq, axis_of_freq, *pairs, *inverse, &ins[0], &ins[1])]
        }
        Op::QkNormRope { eps, weight, first, freq, axis_of_freq, pairs, .. } => {
            let positions = &ins[ins.len() - 1];
            let x = match first {
                0 => norm(NormSpec::rms(*eps, *weight), false, &ins[..ins.len() - 1]).remove(0),
                _ => two_norms(NormSpec::rms(*eps, *weight), *first, &ins[0], &ins[1]),
            };
            let x = Data { dims: ins[0].dims.clone(), x };
            vec![rope(*freq, axis_of_freq, *pairs, false, &x, positions)]
        }
        Op::Gated { act, p: 0.0 } => {
            vec![ins[0].x.iter().zip(&ins[1].x).map(|(gate, up)| activate(*act, *gate) * up).collect()]
        }
        Op::Attention { scale, cap, mask, q, k } => {
            attention(&Attend { scale: *scale, cap: *cap, mask: *mask, q: *q, k: *k }, ins)
        }
        Op::LinearAttention { .. } => {
            let at = LinearAttend::of(op).unwrap().0;
            let mut ins = ins.to_vec();
            if let Some(freq) = at.rotary.freq() {
                let axes = vec![0; ins[0].dims[2] / 2];
                ins[0].x = rope(freq, &axes, Pairs::Interleaved, false, &ins[0], &ins[at.positions()]);
            }
            vec![linear_attention(&at, &ins)]
        }
        Op::HeadLoss { cap, .. } => head_loss(*cap, ins),
        _ => return None,
    })
}

/// The norm of every head, with the first of two weights for the first `first` heads and the second for the others.
fn two_norms(spec: NormSpec, first: usize, x: &Data, w: &Data) -> Vec<f64> {
    let (heads, size) = (x.dims[1], x.dims[2]);
    let head = |(i, head): (usize, &[f64])| {
        let w = if i % heads < first { &w.x[..size] } else { &w.x[size..] };
        let [x, w] = [(vec![1, size], head), (vec![size], w)].map(|(dims, x)| Data { dims, x: x.to_vec() });
        norm(spec, false, &[x, w]).remove(0)
    };
    x.x.chunks(size).enumerate().flat_map(head).collect()
}

/// A product with a bias in every row, and its GELU.
fn layer(ta: bool, tb: bool, epilogue: Epilogue, ins: &[Data]) -> Vec<Vec<f64>> {
    let (m, n) = (ins[0].dims[ta as usize], ins[1].dims[!tb as usize]);
    let bias = |j: usize| if epilogue.has_bias() { ins[2].x[j] } else { 0.0 };
    let base = Data { dims: vec![m, n], x: (0..m * n).map(|e| bias(e % n)).collect() };
    let [a, b] = [0, 1].map(|i| Data { dims: ins[i].dims.clone(), x: ins[i].x.clone() });
    let h = product(ta, tb, &[a, b, base]);
    if epilogue == Epilogue::Relu {
        return vec![h.into_iter().map(|h| h.max(0.0)).collect()];
    }
    if !epilogue.has_gelu() {
        return vec![h];
    }
    vec![h.iter().map(|x| activate(Act::Gelu, *x)).collect(), h]
}

fn product(ta: bool, tb: bool, ins: &[Data]) -> Vec<f64> {
    let (a, b, mut c) = (&ins[0], &ins[1], ins[2].x.clone());
    let rank = a.dims.len();
    let (m, n) = (ins[2].dims[rank - 2], ins[2].dims[rank - 1]);
    let k = a.dims[rank - 1] * a.dims[rank - 2] / m;
    for s in 0..c.len() / (m * n) {
        for (i, j, l) in (0..m).flat_map(|i| (0..n).flat_map(move |j| (0..k).map(move |l| (i, j, l)))) {
            let x = a.x[s * m * k + if ta { l * m + i } else { i * k + l }];
            let y = b.x[s * k * n + if tb { j * k + l } else { l * n + j }];
            c[s * m * n + i * n + j] += x * y;
        }
    }
    c
}

fn scatter_add(ins: &[Data]) -> Vec<f64> {
    let (rows, index, mut out) = (&ins[0], &ins[1], ins[2].x.clone());
    let width = rows.x.len() / rows.dims[0];
    for (r, &to) in index.x.iter().enumerate().filter(|(_, to)| **to >= 0.0) {
        (0..width).for_each(|c| out[to as usize * width + c] += rows.x[r * width + c]);
    }
    out
}

fn norm(spec: NormSpec, residual: bool, ins: &[Data]) -> Vec<Vec<f64>> {
    let width = *ins[0].dims.last().unwrap();
    let mut h = ins[0].x.clone();
    if residual {
        h.iter_mut().zip(&ins[1].x).for_each(|(h, r)| *h += r);
    }
    let factor = |c: usize| match spec.weight {
        NormWeight::Plain => ins[1 + residual as usize].x[c],
        NormWeight::OnePlus => 1.0 + ins[1 + residual as usize].x[c],
        NormWeight::None => 1.0,
    };
    let term = |c: usize| if spec.bias { ins[ins.len() - 1].x[c] } else { 0.0 };
    let mut y = vec![];
    for row in h.chunks(width) {
        let mean = if spec.center { row.iter().sum::<f64>() / width as f64 } else { 0.0 };
        let mean_square = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / width as f64;
        let root = (mean_square + spec.eps as f64).sqrt();
        y.extend(row.iter().enumerate().map(|(c, x)| (x - mean) / root * factor(c) + term(c)));
    }
    if residual { vec![y, h] } else { vec![y] }
}

fn rope(
    freq: Frequencies,
    axis_of_freq: &[u8],
    pairs: Pairs,
    inverse: bool,
    x: &Data,
    positions: &Data,
) -> Vec<f64> {
    let (tokens, heads, size) = (x.dims[0], x.dims[1], x.dims[2]);
    let (turns, a) = (freq.turns(size / 2), freq.amplitude());
    let mut y = x.x.clone();
    for (t, h, f) in
        (0..tokens).flat_map(|t| (0..heads).flat_map(move |h| (0..size / 2).map(move |f| (t, h, f))))
    {
        let position = positions.x[axis_of_freq[f] as usize * tokens + t];
        let angle = position * turns[f] * if inverse { -1.0 } else { 1.0 };
        let head = (t * heads + h) * size;
        let (i, j) = match pairs {
            Pairs::Half => (head + f, head + f + size / 2),
            Pairs::Interleaved => (head + 2 * f, head + 2 * f + 1),
        };
        y[i] = a * (x.x[i] * angle.cos() - x.x[j] * angle.sin());
        y[j] = a * (x.x[i] * angle.sin() + x.x[j] * angle.cos());
    }
    y
}

fn activate(act: Act, x: f64) -> f64 {
    match act {
        Act::Silu => x / (1.0 + (-x).exp()),
        Act::Gelu => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Act::GeluExact => x * share_below(x),
        Act::Relu => x.max(0.0),
    }
}

/// The standard normal distribution function at x, by Simpson's rule over the density from where it is negligible.
fn share_below(x: f64) -> f64 {
    let (from, steps) = (-12.0, 20_000);
    let width = (x - from) / steps as f64;
    let density = |i: usize| (-0.5 * (from + i as f64 * width).powi(2)).exp();
    let inner = (1..steps).map(|i| density(i) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum::<f64>();
    (density(0) + inner + density(steps)) * width / 3.0 / (2.0 * std::f64::consts::PI).sqrt()
}

fn attention(attend: &Attend, ins: &[Data]) -> Vec<Vec<f64>> {
    let Attend { scale, cap, mask, q: q_cut, k: k_cut } = *attend;
    let (q, k, v) = (&ins[0], &ins[1], &ins[2]);
    let (tq, h, n) = (q.dims[0], q.dims[1], q.dims[2]);
    let (tk, hk) = (k.dims[0], k.dims[1]);
    let mut next = 3;
    let mut bounds = |cut: Segments, tokens: usize| -> Vec<(i64, i64)> {
        match cut {
            Segments::Uniform { len } => {
                (0..tokens / len).map(|s| ((s * len) as i64, ((s + 1) * len) as i64)).collect()
            }
            Segments::Ragged { .. } => {
                let (start, len) = (&ins[next].x, &ins[next + 1].x);
                next += 2;
                start.iter().zip(len).map(|(s, l)| (*s as i64, (s + l) as i64)).collect()
            }
        }
    };
    let (q_bounds, k_bounds) = (bounds(q_cut, tq), bounds(k_cut, tk));
    let sees = |i: i64, j: i64| {
        q_bounds.iter().zip(&k_bounds).any(|(&(q0, q1), &(k0, k1))| {
            let stand = i + k1 - q1;
            let interval = |at: usize| {
                let edges = &ins[ins.len() - 1].x[4 * i as usize + at..];
                edges[0] as i64 <= j && j < edges[1] as i64
            };
            (q0..q1).contains(&i)
                && (k0..k1).contains(&j)
                && match mask {
                    Mask::Full => true,
                    Mask::Causal => j <= stand,
                    Mask::Window { back, ahead } => stand - back as i64 <= j && j <= stand + ahead as i64,
                    Mask::TwoIntervals => interval(0) || interval(2),
                }
        })
    };
    let (mut o, mut lse) = (vec![0.0; q.x.len()], vec![]);
    for (i, head) in (0..tq).flat_map(|i| (0..h).map(move |head| (i, head))) {
        let at = |j: usize| (j * hk + head * hk / h) * n;
        let row = (i * h + head) * n;
        let seen: Vec<usize> = (0..tk).filter(|&j| sees(i as i64, j as i64)).collect();
        let score = |j: usize| {
            let dot: f64 = (0..n).map(|c| q.x[row + c] * k.x[at(j) + c]).sum();
            capped(cap, scale as f64 * dot)
        };
        let total: f64 = seen.iter().map(|&j| score(j).exp()).sum();
        lse.push(total.ln());
        for &j in &seen {
            (0..n).for_each(|c| o[row + c] += score(j).exp() / total * v.x[at(j) + c]);
        }
    }
    vec![o, lse]
}

fn linear_attention(at: &LinearAttend, ins: &[Data]) -> Vec<f64> {
    let (q, k, v) = (&ins[0], &ins[at.tensors() - 2], &ins[at.tensors() - 1]);
    let (tq, h, n) = (q.dims[0], q.dims[1], q.dims[2]);
    let (hk, hv, d) = (k.dims[1], v.dims[1], v.dims[2]);
    let bounds = |cut: Segments, tokens: usize, from: usize| -> Vec<(i64, i64)> {
        match cut {
            Segments::Uniform { len } => {
                (0..tokens / len).map(|s| ((s * len) as i64, ((s + 1) * len) as i64)).collect()
            }
            Segments::Ragged { .. } => {
                ins[from].x.iter().zip(&ins[from + 1].x).map(|(s, l)| (*s as i64, (s + l) as i64)).collect()
            }
        }
    };
    let [of_q, of_k] = at.bounds();
    let (q_bounds, k_bounds) = (bounds(at.q, tq, of_q), bounds(at.k_segments(), k.dims[0], of_k));
    let mut o = vec![0.0; tq * h * d];
    for (&(q0, q1), &(k0, k1)) in q_bounds.iter().zip(&k_bounds) {
        for (i, j) in (q0..q1).flat_map(|i| (k0..k1).map(move |j| (i, j))) {
            let stand = i + k1 - q1;
            let sees = match at.mask {
                LinearMask::Full => true,
                LinearMask::Causal => j <= stand,
                LinearMask::Strict => j < stand,
            };
            for head in (0..h).filter(|_| sees) {
                let (row, key) = (i as usize * h + head, j as usize * hk + head * hk / h);
                let value = j as usize * hv + head * hv / h;
                let score: f64 = (0..n).map(|c| q.x[row * n + c] * k.x[key * n + c]).sum();
                (0..d).for_each(|c| o[row * d + c] += at.scale as f64 * score * v.x[value * d + c]);
            }
        }
    }
    o
}

fn capped(cap: Cap, x: f64) -> f64 {
    cap.0.map_or(x, |cap| cap as f64 * (x / cap as f64).tanh())
}

fn head_loss(cap: Cap, ins: &[Data]) -> Vec<Vec<f64>> {
    let (x, w, target, weight) = (&ins[0], &ins[1], &ins[2], &ins[3]);
    let (rows, width, vocabulary) = (x.dims[0], x.dims[1], w.dims[0]);
    let (mut sum, mut logp, mut lse, mut best) = (0.0, vec![], vec![], vec![]);
    for r in 0..rows {
        let logit =
            |v: usize| capped(cap, (0..width).map(|c| x.x[r * width + c] * w.x[v * width + c]).sum::<f64>());
        lse.push((0..vocabulary).map(|v| logit(v).exp()).sum::<f64>().ln());
        logp.push(if target.x[r] < 0.0 { 0.0 } else { logit(target.x[r] as usize) - lse[r] });
        best.push((0..vocabulary).map(logit).fold(f64::NEG_INFINITY, f64::max) - lse[r]);
        sum -= weight.x[r] * logp[r];
    }
    vec![vec![sum], logp, lse, best]
}

/// Six updates of one parameter, the fourth one skipped by `is_finite`, against the published recurrence.
#[test]
fn adamw_is_its_recurrence() {
    let (beta1, beta2, eps, decay, lr_scale) = (0.9f32, 0.95f32, 1e-4f32, 0.1f32, 0.5f32);
    let b = Builder::new();
    let slots = ["p", "g", "m", "v"].map(|name| b.param(name, &[3, 5], Init::Zeros));
    let scalars = ["lr", "scale", "updates", "is_finite"].map(|name| b.input(name, DType::F32, &[1]));
    let op = Op::AdamW { beta1, beta2, eps, weight_decay: decay, lr_scale, copy: false, first: 0 };
    let outs = b.ops(op, &[slots, scalars].concat());
    for (name, y) in ["p", "m", "v"].iter().zip(outs) {
        b.result(name, y);
    }
    let graph = in_f64(&b.finish());

    let (b1, b2, eps, decay) = (beta1 as f64, beta2 as f64, eps as f64, decay as f64);
    let mut values = Values::from([("p".into(), draw("p", 15))]);
    values.insert("m".into(), vec![0.0; 15]);
    values.insert("v".into(), vec![0.0; 15]);
    let (mut p, mut m, mut v) = (values["p"].clone(), vec![0.0; 15], vec![0.0; 15]);
    let mut updates = 0;
    for step in 0..6 {
        let is_finite = step != 3;
        let (lr, scale, g) = (0.01 * (step + 1) as f64, 0.25, draw(&format!("g{step}"), 15));
        let tried = updates + 1;
        if is_finite {
            updates = tried;
            for i in 0..15 {
                let g = scale * g[i];
                m[i] = b1 * m[i] + (1.0 - b1) * g;
                v[i] = b2 * v[i] + (1.0 - b2) * g * g;
                let (m_hat, v_hat) = (m[i] / (1.0 - b1.powi(updates)), v[i] / (1.0 - b2.powi(updates)));
                p[i] -= lr * lr_scale as f64 * (m_hat / (v_hat.sqrt() + eps) + decay * p[i]);
            }
        }
        // A skipped step may have NaN gradients: they must not affect anything.
        values.insert("g".into(), if is_finite { g } else { vec![f64::NAN; 15] });
        for (name, x) in
            [("lr", lr), ("scale", scale), ("updates", tried as f64), ("is_finite", is_finite as u8 as f64)]
        {
            values.insert(name.into(), vec![x]);
        }
        values.extend(oracle::run(&graph, &values).results);
        for (name, wanted) in [("p", &p), ("m", &m), ("v", &v)] {
            within(1e-12, &values[name], wanted).unwrap_or_else(|why| panic!("step {step}: {name}: {why}"));
        }
    }
}
