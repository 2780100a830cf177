//! Two layers with biases and GELU between them: the epilogues of their products, with unchanged numbers.

use std::collections::HashMap;

use flatout_ir::interpreter::Interpreter;
use flatout_ir::ops::elementwise::Elementwise;
use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::gated::Act;
use flatout_ir::passes::fuse::fused_products;
use flatout_ir::passes::gradient::differentiate::{differentiate, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::target::paper;
use flatout_ir::{
    Builder, DType, Graph, Init, Launch, Op, Options, Precision, Program, Recompute, Role, compile, oracle,
    random,
};

const TOKENS: usize = 6;
const WEIGHTS: [(&str, &[usize]); 4] = [("w1", &[16, 8]), ("b1", &[16]), ("w2", &[8, 16]), ("b2", &[8])];

/// loss = sum of squares of gelu(x w1^T + b1) w2^T + b2.
fn layers() -> Graph {
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[TOKENS, 8]);
    let [w1, b1, w2, b2] = WEIGHTS.map(|(name, dims)| b.param(name, dims, Init::Normal { std: 0.5 }));
    let h = (x.linear(w1) + b1.reshape(&[1, 16])).activate(Act::Gelu);
    let y = h.linear(w2) + b2.reshape(&[1, 8]);
    b.result("loss", y.square().sum(0).sum(1).reshape(&[1]));
    b.result("weight", b.fill(1.0, DType::F32, &[1]));
    b.finish()
}

fn values() -> HashMap<String, Vec<f64>> {
    let slots = [("x", TOKENS * 8)].into_iter().chain(WEIGHTS.map(|(n, d)| (n, d.iter().product())));
    let draw = |i: usize, n: usize| {
        (0..n).map(|k| 0.5 * random::normal(3, i as u64, k as u64) as f64).map(|x| x as f32 as f64).collect()
    };
    slots.enumerate().map(|(i, (name, n))| (name.to_string(), draw(i, n))).collect()
}

fn epilogues<'a>(launches: impl Iterator<Item = &'a Launch>) -> Vec<Epilogue> {
    let of = |l: &Launch| match l.op {
        Op::Product { epilogue, .. } => Some(epilogue),
        _ => None,
    };
    launches.filter_map(of).collect()
}

#[test]
fn a_layer_is_one_product_forward() {
    let (forward, count) = fused_products::forward(&layers());
    assert_eq!(count, 2);
    assert!(!forward.to_string().contains("f=gelu") && !forward.to_string().contains("f=add"), "{forward}");
    // Not fused if others read the product before the bias is added.
    let b = Builder::new();
    let (x, w) = (b.input("x", DType::F32, &[4, 8]), b.param("w", &[8, 8], Init::Ones));
    let product = x.linear(w);
    b.result("y", product + b.param("b", &[8], Init::Zeros).reshape(&[1, 8]));
    b.result("product", product);
    assert_eq!(fused_products::forward(&b.finish()).1, 0);
}

#[test]
fn plans_fuse_epilogues_and_keep_the_gradients() {
    let g = layers();
    let want = oracle::run(&differentiate(&g).graph, &values()).writes;
    let programs = [Program { role: Role::GRAD, graph: g }];
    let base = || Options { fuse_activation: false, ..Options::default() };
    let choices = [
        (base(), 2e-6),
        (Options { fuse_elementwise: false, ..base() }, 2e-6),
        (Options { recompute: Recompute::Full, ..base() }, 2e-6),
        (Options { precision: Precision::Tf32, ..base() }, 3e-3),
        (Options { precision: Precision::BF16, ..base() }, 4e-2),
    ];
    for (options, bound) in choices {
        let mut run = Interpreter::new(compile(&programs, &paper(), &options).expect("a plan"));
        for (path, value) in values() {
            run.set(&if path == "x" { input_path(Role::GRAD, "x") } else { path }, &value);
        }
        if run.plans.plan(Role::Derive).is_some() {
            run.run(Role::Derive);
        }
        run.run(Role::GRAD);
        for (name, _) in WEIGHTS {
            let (got, want) = (run.get(&gradient_path(name)), &want[&gradient_path(name)]);
            let size: f64 = want.iter().map(|x| x * x).sum();
            let off: f64 = got.iter().zip(want).map(|(g, w)| (g - w) * (g - w)).sum();
            assert!((off / size).sqrt() < bound, "{name} is off by {} with {options:?}", (off / size).sqrt());
        }
        let grad = run.plans.plan(Role::GRAD).expect("a plan");
        let mut found = epilogues(grad.launches.iter());
        found.sort();
        use Epilogue as E;
        let wanted = match options.fuse_elementwise {
            false => [E::None; 5],
            true => [E::None, E::None, E::Bias, E::BiasGelu, E::GeluGrad],
        };
        assert_eq!(found, wanted, "{options:?}");
        // In bf16, biases are read from copies like weights, so nothing is cast.
        let casts_bias =
            |l: &Launch| matches!(l.op, Op::Map { f: Elementwise::Cast(_) }) && l.ins[0].dims.len() == 1;
        assert!(!options.fuse_elementwise || !grad.launches.iter().any(casts_bias), "{options:?}");
    }
}

#[test]
fn slope_epilogues_are_their_formula() {
    let b = Builder::new();
    let (a, w) = (b.input("a", DType::F32, &[5, 3]), b.input("w", DType::F32, &[5, 4]));
    let (h, base) = (b.input("h", DType::F32, &[3, 4]), b.input("base", DType::F32, &[3, 4]));
    let with = |base, epilogue| {
        let compute = flatout_ir::ops::product::Compute::Full;
        Op::Product { ta: true, tb: false, out: DType::F32, base, compute, epilogue }
    };
    let plain = b.op(with(false, Epilogue::None), &[a, w]);
    let sloped = b.op(with(false, Epilogue::GeluGrad), &[a, w, h]);
    let summed = b.op(with(true, Epilogue::None), &[a, w, base]);
    for (name, t) in [("plain", plain), ("sloped", sloped), ("c", summed)] {
        b.result(name, t);
    }
    let draw = |i: u64, n: u64| (0..n).map(|k| random::normal(9, i, k) as f64).collect::<Vec<f64>>();
    let slots = [("a", 15), ("w", 20), ("h", 12), ("base", 12)];
    let values: HashMap<String, Vec<f64>> =
        slots.iter().enumerate().map(|(i, (name, n))| (name.to_string(), draw(i as u64, *n))).collect();
    let run = oracle::run(&b.finish(), &values).results;
    let slope = |x: f64| {
        let gelu = |x: f64| 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh());
        (gelu(x + 1e-6) - gelu(x - 1e-6)) / 2e-6
    };
    for e in 0..12 {
        assert!((run["sloped"][e] - run["plain"][e] * slope(values["h"][e])).abs() < 1e-5);
        assert!((run["c"][e] - run["plain"][e] - values["base"][e]).abs() < 1e-5);
    }
}
