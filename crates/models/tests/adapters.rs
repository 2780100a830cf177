//! Adapters on a decoder's weights, in compiled plans, against the plain decoder with the adapted weights: of V = W + s B A and
//! g = m / ||V|| by rows, a gradient dW of the plain weight g V gives dV = g dW, dA = s B^T dV, dB = s dV A^T and dm = sum(dW
//! V) / ||V||, the norm being a constant.

use std::collections::{BTreeSet, HashMap};

use flatout_ir::cost::cost;
use flatout_ir::interpreter::Interpreter;
use flatout_ir::passes::differentiate::{differentiate, gradient_path};
use flatout_ir::passes::{base, fp8_base, input_path};
use flatout_ir::target::paper;
use flatout_ir::{
    Adapter, Base, Class, Codes, Graph, Init, OpKind, Options, PlanSet, Precision, Program, Recompute, Role,
    Scaling, compile, oracle, random,
};
use flatout_models::config::DecoderConfig;
use flatout_models::decoder::build;
use flatout_models::form::{Form, LossForm};

use crate::small;

const LOSS: Form = loss(2);

/// `rows` rows of 5 tokens.
const fn loss(rows: usize) -> Form {
    Form::Loss(LossForm { dropout: true, ..LossForm::rows(rows, 5) })
}

fn adapter(weight: &str, rank: usize, dora: bool) -> Adapter {
    Adapter { name: "default".into(), weight: weight.into(), rank, scale: 1.5, dropout: 0.0, dora }
}

/// Values of a slot, drawn by its path.
fn drawn(path: &str, n: usize, std: f64) -> Vec<f64> {
    let stream = path.bytes().fold(7_u64, |h, b| h.wrapping_mul(31).wrapping_add(b as u64));
    (0..n as u64).map(|k| (random::normal(5, stream, k) as f64 * std) as f32 as f64).collect()
}

fn inputs(name: &str, n: usize) -> Vec<f64> {
    let value = |k: usize| match name {
        "tokens" => (k * 7 + 3) % 13,
        "targets" => (k * 5 + 2) % 13,
        "weights" => 1,
        "positions" => k % 5,
        "rng" => [11, 0, 4][k],
        "rows" => {
            if k.is_multiple_of(2) {
                k / 10
            } else {
                k / 2 % 5
            }
        }
        other => panic!("{other} is no input"),
    };
    (0..n).map(|k| value(k) as f64).collect()
}

/// Parameters and inputs of the plain graph, by path.
fn values(g: &Graph) -> HashMap<String, Vec<f64>> {
    let value = |slot: &flatout_ir::Slot| {
        let n = slot.ty.elements();
        match (slot.class, slot.init) {
            (Class::Input, _) => inputs(&slot.path, n),
            (_, Init::Ones) => drawn(&slot.path, n, 0.2).into_iter().map(|x| 1.0 + x).collect(),
            _ => drawn(&slot.path, n, 0.3),
        }
    };
    g.slots.iter().map(|slot| (slot.path.clone(), value(slot))).collect()
}

/// A matrix with its extents.
struct Matrix(Vec<f64>, usize, usize);

impl Matrix {
    fn times(&self, other: &Matrix, scale: f64) -> Matrix {
        let Matrix(a, m, k) = self;
        let Matrix(b, _, n) = other;
        let at = |i: usize, j: usize| (0..*k).map(|l| a[i * k + l] * b[l * n + j]).sum::<f64>() * scale;
        Matrix((0..m * n).map(|e| at(e / n, e % n)).collect(), *m, *n)
    }
    fn transposed(&self) -> Matrix {
        let Matrix(a, m, n) = self;
        Matrix((0..m * n).map(|e| a[(e % m) * n + e / m]).collect(), *n, *m)
    }
    fn rows(&self) -> impl Iterator<Item = &[f64]> {
        self.0.chunks(self.2)
    }
}

/// One weight with its adapters: A, B and m of each, V, its norms and g.
struct Adapted<'a> {
    adapters: Vec<(&'a Adapter, Matrix, Matrix)>,
    v: Matrix,
    norms: Vec<f64>,
    g: Vec<f64>,
}

impl<'a> Adapted<'a> {
    fn of(g: &Graph, values: &[f64], weight: &str, adapters: &'a [Adapter]) -> Self {
        let slot = g.slot(g.find_slot(weight).expect("a weight"));
        let [out, inner] = slot.ty.dims[..] else { panic!("a matrix") };
        let mut v = Matrix(values.to_vec(), out, inner);
        let mut beside = vec![];
        for adapter in adapters.iter().filter(|a| a.weight == weight) {
            let a = Matrix(drawn(&adapter.a(), adapter.rank * inner, 0.3), adapter.rank, inner);
            let b = Matrix(drawn(&adapter.b(), out * adapter.rank, 0.3), out, adapter.rank);
            v.0.iter_mut().zip(b.times(&a, adapter.scale).0).for_each(|(v, d)| *v += d);
            beside.push((adapter, a, b));
        }
        let norms: Vec<f64> = v.rows().map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt()).collect();
        let g = match beside.iter().find(|(a, ..)| a.dora) {
            Some((adapter, ..)) => magnitude(adapter, out).iter().zip(&norms).map(|(m, n)| m / n).collect(),
            None => vec![1.0; out],
        };
        Adapted { adapters: beside, v, norms, g }
    }

    /// g V.
    fn weight(&self) -> Vec<f64> {
        self.v.rows().zip(&self.g).flat_map(|(row, g)| row.iter().map(move |x| g * x)).collect()
    }

    /// The gradients of every tensor of the adapters.
    fn gradients(&self, dw: &[f64]) -> Vec<(String, Vec<f64>)> {
        let (m, n) = (self.v.1, self.v.2);
        let dv = Matrix((0..m * n).map(|e| self.g[e / n] * dw[e]).collect(), m, n);
        let mut all = vec![];
        for (adapter, a, b) in &self.adapters {
            all.push((adapter.a(), b.transposed().times(&dv, adapter.scale).0));
            all.push((adapter.b(), dv.times(&a.transposed(), adapter.scale).0));
            if adapter.dora {
                let dots = self
                    .v
                    .rows()
                    .zip(dw.chunks(n))
                    .map(|(v, d)| v.iter().zip(d).map(|(v, d)| v * d).sum::<f64>());
                all.push((
                    adapter.magnitude(),
                    dots.zip(&self.norms).map(|(dot, norm)| dot / norm).collect(),
                ));
            }
        }
        all
    }
}

fn magnitude(adapter: &Adapter, out: usize) -> Vec<f64> {
    drawn(&adapter.magnitude(), out, 0.2).into_iter().map(|x| 1.0 + x).collect()
}

fn frozen(g: &Graph) -> BTreeSet<String> {
    g.slots.iter().filter(|s| s.class == Class::Weight).map(|s| s.path.clone()).collect()
}

/// Compiled plans with all values set and the norms derived.
fn compiled(g: &Graph, options: &Options) -> Interpreter {
    compiled_with(g, options, &values(g))
}

/// `compiled` with these values of the plain graph.
fn compiled_with(g: &Graph, options: &Options, values: &HashMap<String, Vec<f64>>) -> Interpreter {
    let program = Program { role: Role::GRAD, graph: g.clone() };
    let mut run = Interpreter::new(compile(&[program], &paper(), options).expect("plans"));
    let inputs: Vec<_> = run.plans.slots.iter().filter(|s| s.class == Class::Input).cloned().collect();
    for slot in inputs {
        let name = slot.path.strip_prefix(&input_path(Role::GRAD, ""));
        if let Some(name) = name {
            run.set(&slot.path, &self::inputs(name, slot.ty.elements()));
        }
    }
    for (path, value) in values {
        if g.slot(g.find_slot(path).expect("a slot")).class != Class::Input {
            run.set_tensor(path, value);
        }
    }
    for adapter in &options.adapters {
        let slot = |path: String| run.plans.slot(&path).expect("a tensor of the adapter").ty.elements();
        let (a, b) = (slot(adapter.a()), slot(adapter.b()));
        run.set(&adapter.a(), &drawn(&adapter.a(), a, 0.3));
        run.set(&adapter.b(), &drawn(&adapter.b(), b, 0.3));
        if adapter.dora {
            run.set(&adapter.magnitude(), &magnitude(adapter, b / adapter.rank));
        }
    }
    if run.plans.plan(Role::Derive).is_some() {
        run.run(Role::Derive);
    }
    run
}

fn relative(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut off, mut size) = (0.0, 0.0);
    got.iter().zip(want).for_each(|(g, w)| (off, size) = (off + (g - w).powi(2), size + w * w));
    if size == 0.0 { off.sqrt() } else { (off / size).sqrt() }
}

fn compare(adapters: &[Adapter], options: Options, bound: f64) {
    compare_in(&build(&small::decoder(), LOSS), adapters, options, bound);
}

/// Compares loss and gradients of adapters with those of the plain graph with the adapted weights; returns the plans.
fn compare_in(g: &Graph, adapters: &[Adapter], options: Options, bound: f64) -> PlanSet {
    compare_with(g, &values(g), g, adapters, options, bound)
}

/// `compare_in` with another plain graph, for a table and a head that are tied in `g` and separate there.
fn compare_with(
    plain: &Graph,
    values: &HashMap<String, Vec<f64>>,
    g: &Graph,
    adapters: &[Adapter],
    options: Options,
    bound: f64,
) -> PlanSet {
    let mut made = values.clone();
    let mut weights: Vec<&str> = adapters.iter().map(|a| a.weight.as_str()).collect();
    weights.dedup();
    let adapted: Vec<(&str, Adapted<'_>)> = weights
        .into_iter()
        .map(|weight| (weight, Adapted::of(plain, &values[weight], weight, adapters)))
        .collect();
    for (weight, adapted) in &adapted {
        made.insert(weight.to_string(), adapted.weight());
    }
    let want = oracle::run(&differentiate(plain).graph, &made).writes;
    let options = Options { adapters: adapters.to_vec(), freeze: frozen(g), ..options };
    let mut run = compiled(g, &options);
    run.run(Role::GRAD);
    let loss = relative(&run.get("carry.loss"), &want["carry.loss"]);
    assert!(loss < bound, "the loss is off by {loss:e} with {options:?}");
    for (weight, adapted) in &adapted {
        for (path, wanted) in adapted.gradients(&want[&gradient_path(weight)]) {
            let off = relative(&run.get(&gradient_path(&path)), &wanted);
            assert!(off < bound, "{path} is off by {off:e} with {options:?}");
        }
    }
    // An update changes every tensor of every adapter, and the norms follow.
    run.set("apply.lr", &[1e-2]);
    run.run(Role::Apply);
    for adapter in adapters.iter().filter(|a| a.dora) {
        let after = run.get(&adapter.inverse_norm());
        run.run(Role::Derive);
        assert_eq!(after, run.get(&adapter.inverse_norm()), "{} is what derive makes of it", adapter.weight);
    }
    run.plans
}

/// Complete and partial sets of merged products, of different ranks.
fn cases(dora: bool) -> [Vec<Adapter>; 3] {
    let of =
        |weights: &[(&str, usize)]| weights.iter().map(|(w, r)| adapter(w, *r, dora)).collect::<Vec<_>>();
    [
        of(&[
            ("layers.0.attn.wq", 3),
            ("layers.0.attn.wk", 3),
            ("layers.0.attn.wv", 3),
            ("layers.0.attn.wo", 3),
        ]),
        of(&[("layers.1.attn.wq", 2), ("layers.1.attn.wv", 1), ("layers.1.ffn.gate", 2)]),
        of(&[
            ("layers.0.ffn.gate", 2),
            ("layers.0.ffn.up", 2),
            ("layers.0.ffn.down", 4),
            ("layers.1.attn.wk", 1),
        ]),
    ]
}

fn choices() -> [Options; 8] {
    let base = Options::default;
    [
        base(),
        Options { fuse_qkv: false, fuse_gate_up: false, ..base() },
        Options { fuse_elementwise: false, fuse_norm: false, ..base() },
        Options { recompute: Recompute::None, ..base() },
        Options { recompute: Recompute::Wide, ..base() },
        Options { recompute: Recompute::Full, ..base() },
        Options { memory_plan: false, fuse_optimizer: false, ..base() },
        Options { flash_attention: false, fuse_loss: false, ..base() },
    ]
}

#[test]
fn lora_has_the_gradients_of_the_adapted_weight() {
    for options in choices() {
        cases(false).iter().for_each(|adapters| compare(adapters, options.clone(), 1e-4));
    }
}

#[test]
fn dora_has_the_gradients_of_the_adapted_weight_with_a_constant_norm() {
    for options in choices() {
        cases(true).iter().for_each(|adapters| compare(adapters, options.clone(), 1e-4));
    }
}

#[test]
fn in_bf16() {
    for dora in [false, true] {
        let options = Options { precision: Precision::BF16, ..Options::default() };
        cases(dora).iter().for_each(|adapters| compare(adapters, options.clone(), 0.12));
    }
}

#[test]
fn several_adapters_of_one_weight_add_up() {
    let mut two = cases(false)[0].clone();
    two.insert(1, Adapter { name: "style".into(), rank: 2, scale: 0.5, ..two[0].clone() });
    compare(&two, Options::default(), 1e-4);
}

/// Adapters of the token table and of the head, which stay independent if both are one slot.
#[test]
fn both_ends_of_a_decoder_have_adapters() {
    let ends = [adapter("embed.weight", 3, false), adapter("layers.1.attn.wo", 2, false)];
    let head = [adapter("head.weight", 2, false)];
    let mut both = [&ends[..], &head[..]].concat();
    both.push(Adapter { name: "style".into(), rank: 4, scale: 0.5, ..head[0].clone() });
    let graph = |tied: bool| build(&DecoderConfig { tied, ..small::decoder() }, LOSS);
    let (tied, apart) = (graph(true), graph(false));
    let mut values = values(&apart);
    values.insert("head.weight".into(), values["embed.weight"].clone());
    let narrow = Options { precision: Precision::BF16, ..Options::default() };
    let bounded = choices().map(|options| (options, 1e-4)).into_iter().chain([(narrow, 0.12)]);
    for (options, bound) in bounded {
        for adapters in [&ends[..], &head[..], &both[..]] {
            compare_in(&apart, adapters, options.clone(), bound);
            compare_with(&apart, &values, &tied, adapters, options.clone(), bound);
        }
    }
}

/// With an adapter of the head, logits are still computed in chunks: no plan has all of them.
#[test]
fn a_heads_adapter_does_not_materialise_logits() {
    let g = build(&DecoderConfig { vocab: 4096, ..small::decoder() }, loss(24));
    let options = |adapters: Vec<Adapter>| Options { adapters, freeze: frozen(&g), ..Options::default() };
    let plans = |adapters: Vec<Adapter>| {
        let program = Program { role: Role::GRAD, graph: g.clone() };
        compile(&[program], &paper(), &options(adapters)).expect("plans")
    };
    let adapted = plans(vec![adapter("head.weight", 8, false)]);
    let grad = adapted.plan(Role::GRAD).expect("gradients");
    let has_logits = |dims: &[usize]| dims == [24 * 5, 4096];
    let views = grad.launches.iter().flat_map(|launch| launch.ins.iter().chain(launch.outs.iter().flatten()));
    assert!(views.clone().count() > 0 && views.into_iter().all(|view| !has_logits(&view.dims)));
}

/// A decoder whose products have many rows, and adapters of q, k, v and o of its first layer.
fn many_rows() -> (Graph, Vec<Adapter>) {
    let config = DecoderConfig { width: 16, heads: 8, head_size: Some(8), ..small::decoder() };
    let weights = ["wq", "wk", "wv", "wo"].map(|name| format!("layers.0.attn.{name}"));
    (build(&config, loss(24)), weights.map(|weight| adapter(&weight, 8, true)).into())
}

/// Number of products that also compute what adapters add to them.
fn joined(plans: &PlanSet) -> usize {
    plans.done.iter().filter(|p| p.pass == "joined_products" && p.role == Role::GRAD).map(|p| p.count).sum()
}

#[test]
fn with_many_rows_adapters_join_the_product() {
    let (g, dora) = many_rows();
    let with = |f: &dyn Fn(&mut Adapter)| {
        let mut all = dora.clone();
        all.iter_mut().for_each(f);
        all
    };
    let lora = with(&|a| a.dora = false);
    let mixed = with(&|a| a.dora = !a.weight.ends_with("wk"));
    let of_one_rank_each = with(&|a| a.rank = if a.weight.ends_with("wk") { 16 } else { 8 });
    let of_some: Vec<Adapter> = dora.iter().filter(|a| !a.weight.ends_with("wk")).cloned().collect();
    let mut two = lora.clone();
    two.push(Adapter { name: "style".into(), scale: 0.5, ..lora[0].clone() });
    // Of q, k and v, and of o. With LoRA o's frozen weight is not rewritten: copying it would cost more than the fusion saves.
    let cases = [(dora, 2), (lora, 1), (mixed, 2), (of_one_rank_each, 1), (of_some, 1), (two, 0)];
    for recompute in [Recompute::None, Recompute::Cheap, Recompute::Wide, Recompute::Full] {
        for precision in [Precision::F32, Precision::BF16] {
            for (adapters, want) in &cases {
                let options = Options { recompute, precision, ..Options::default() };
                let bound = if precision == Precision::F32 { 1e-4 } else { 0.12 };
                let times = if recompute == Recompute::Full { 2 } else { 1 };
                assert_eq!(joined(&compare_in(&g, adapters, options, bound)), times * want);
            }
        }
    }
}

/// The dropout mask does not depend on what was merged, and drops its share.
#[test]
fn dropout_draws_the_same_however_products_are_merged() {
    let g = build(&small::decoder(), LOSS);
    let dropping =
        |p: f32| cases(true)[0].iter().map(|a| Adapter { dropout: p, ..a.clone() }).collect::<Vec<_>>();
    let gradients = |p: f32, merged: bool| {
        let options = Options {
            fuse_qkv: merged,
            adapters: dropping(p),
            freeze: frozen(&g),
            recompute: if merged { Recompute::Cheap } else { Recompute::None },
            ..Options::default()
        };
        let mut run = compiled(&g, &options);
        run.run(Role::GRAD);
        let all = options.adapters.iter().flat_map(|a| run.get(&gradient_path(&a.a())));
        all.chain(run.get("carry.loss")).collect::<Vec<_>>()
    };
    assert!(relative(&gradients(0.5, true), &gradients(0.5, false)) < 1e-5);
    assert!(relative(&gradients(0.5, true), &gradients(0.0, true)) > 1e-2);
}

/// Dropout fused into an adapter's products equals separate dropout, except for rounding.
#[test]
fn thin_products_match_separate_dropout() {
    let model = DecoderConfig { width: 16, head_size: Some(8), ..small::decoder() };
    let g = build(&model, LOSS);
    let weights = ["layers.0.attn.wq", "layers.0.attn.wo", "layers.1.attn.wq", "layers.1.attn.wo"];
    let adapters: Vec<Adapter> =
        weights.iter().map(|weight| Adapter { dropout: 0.5, ..adapter(weight, 8, true) }).collect();
    let gradients = |skip_pass| {
        let precision = Precision::BF16;
        let options = Options {
            adapters: adapters.clone(),
            freeze: frozen(&g),
            precision,
            skip_pass,
            ..Options::default()
        };
        let mut run = compiled(&g, &options);
        run.run(Role::GRAD);
        let launches = &run.plans.plan(Role::GRAD).expect("a plan").launches;
        let count = |op: OpKind| launches.iter().filter(|l| l.op.kind() == op).count();
        let counts = (count(OpKind::Dropout), count(OpKind::ThinProduct));
        let all = adapters.iter().flat_map(|a| run.get(&gradient_path(&a.a()))).collect::<Vec<_>>();
        (counts, all)
    };
    // The first of them has no gradient for its input.
    let (thin, plain) = (gradients(None), gradients(Some("thin_products")));
    assert_eq!((thin.0, plain.0), ((0, 11), (11, 0)));
    assert!(relative(&thin.1, &plain.1) < 1e-2);
}

/// Nothing below the first adapter is differentiated, no frozen weight has a gradient, and frozen matrices are bf16.
#[test]
fn only_gradients_that_reach_adapters_are_computed() {
    let g = build(&small::decoder(), LOSS);
    let adapters: Vec<Adapter> = ["wq", "wk", "wv", "wo"]
        .iter()
        .map(|name| adapter(&format!("layers.1.attn.{name}"), 2, true))
        .collect();
    let options = Options {
        adapters,
        freeze: frozen(&g),
        precision: Precision::BF16,
        recompute: Recompute::None,
        ..Options::default()
    };
    let programs = [Role::GRAD, Role::Eval].map(|role| Program { role, graph: g.clone() });
    let plans = compile(&programs, &paper(), &options).expect("plans");
    let of_layer = |role: Role| {
        let launches = &plans.plan(role).expect("a plan").launches;
        launches.iter().filter(|l| l.path.starts_with("layers.0")).count()
    };
    assert_eq!(of_layer(Role::GRAD), of_layer(Role::Eval), "the first layer runs forward and no more");
    for slot in &plans.slots {
        assert!(
            !slot.path.starts_with("gradient.layers"),
            "{} is the gradient of a frozen weight",
            slot.path
        );
        let is_matrix = slot.class == Class::Frozen && slot.ty.rank() >= 2;
        assert!(!is_matrix || slot.ty.dtype == flatout_ir::DType::BF16, "{} is {}", slot.path, slot.ty);
        assert!(!slot.path.starts_with("bf16.layers"), "{} is a copy of what is bf16 already", slot.path);
    }
    let bytes = plans.categories();
    let frozen: usize = g.slots.iter().filter(|s| s.class == Class::Weight).map(|s| s.ty.elements()).sum();
    assert!(
        bytes["frozen"] >= 2 * frozen && bytes["frozen"] < 2 * frozen + 64 * 40,
        "{bytes:?}, {frozen} values"
    );
    assert_eq!(bytes["parameters"], 0, "{bytes:?}");
    assert!(bytes["adapters"] > 0 && bytes["optimizer"] > 0 && bytes["gradients"] > 0, "{bytes:?}");

    // q, k and v: one product for the inputs of their Bs, one for their Bs; norms run once per update, one launch per weight.
    let count = |role: Role, layer: &str, kernel: &str| {
        let launches = &plans.plan(role).expect("a plan").launches;
        launches.iter().filter(|l| l.path.starts_with(layer) && l.kernel == kernel).count()
    };
    let products = |layer: &str| count(Role::Eval, layer, "product");
    assert_eq!(products("layers.1.attn") - products("layers.0.attn"), 2 + 2);
    assert_eq!(count(Role::Apply, "layers.1", "low_rank_norm"), 4);
    assert_eq!(count(Role::Apply, "layers.1", "product"), 0);
}

/// Compared with LoRA, DoRA needs two more passes over the adapted outputs: the gradient of its magnitudes reads them and their
/// gradients, and its factors are in the weights. It keeps the outputs that nothing else keeps: those of attention's last
/// product.
#[test]
fn dora_moves_and_keeps_little_more_than_lora() {
    const TOKENS: usize = 1024;
    let config = DecoderConfig {
        width: 96,
        layers: 4,
        heads: 4,
        kv_heads: Some(1),
        head_size: Some(16),
        ffn: 128,
        vocab: 64,
        context: TOKENS,
        qk_norm: true,
        ..DecoderConfig::default()
    };
    let g = build(&config, Form::Loss(LossForm::rows(1, TOKENS)));
    let (inside, last) = (96, 96);
    let plans = |dora: bool| {
        let weights =
            (0..4).flat_map(|i| ["wq", "wk", "wv", "wo"].map(|name| format!("layers.{i}.attn.{name}")));
        let options = Options {
            adapters: weights.map(|weight| adapter(&weight, 4, dora)).collect(),
            freeze: frozen(&g),
            precision: Precision::BF16,
            ..Options::default()
        };
        let plans =
            compile(&[Program { role: Role::GRAD, graph: g.clone() }], &paper(), &options).expect("plans");
        let bytes = cost(plans.plan(Role::GRAD).expect("a plan"), &paper()).bytes as usize;
        (bytes, plans.categories()["activations"])
    };
    let ((lora, kept_by_lora), (dora, kept_by_dora)) = (plans(false), plans(true));
    let pass = 4 * TOKENS * (inside + last) * 2;
    let passes = (dora - lora) as f64 / pass as f64;
    assert!((1.8..2.5).contains(&passes), "{passes} passes");
    let kept = kept_by_dora as f64 - kept_by_lora as f64;
    let outputs = (4 * TOKENS * last * 2) as f64;
    assert!(kept < 1.3 * outputs, "{kept} bytes more are kept, and the last outputs are {outputs}");
}

/// A base stored as codes has the losses, gradients and updates of a base with the decoded values, to the bit.
fn computes_as_its_values(g: &Graph, codes: Codes, options: &Options) {
    let mut stored = compiled(g, options);
    let quantised: Vec<String> =
        stored.plans.held(0).into_iter().filter(|p| p.codes() == Some(codes)).map(|p| p.path).collect();
    assert_eq!(quantised.len(), 14, "seven weights a layer: {quantised:?}");
    assert!(quantised.iter().all(|path| path.starts_with("layers.")));
    let mut made = values(g);
    for path in &quantised {
        let (values, drawn) = (stored.tensor(path), &made[path]);
        assert!(relative(&values, drawn) < 0.2, "{path}");
        assert_ne!(&values, drawn, "{path}");
        made.insert(path.clone(), values);
    }
    let mut plain = compiled_with(g, &Options { base: Base::Full, ..options.clone() }, &made);
    for run in [&mut stored, &mut plain] {
        run.run(Role::GRAD);
    }
    let sums = |run: &Interpreter| -> HashMap<String, Vec<f64>> {
        let carried = run.plans.slots.iter().filter(|s| s.class == Class::Carry);
        carried.map(|s| (s.path.clone(), run.get(&s.path))).collect()
    };
    assert!(sums(&stored).len() > 2 && sums(&stored) == sums(&plain), "{options:?}");
    for run in [&mut stored, &mut plain] {
        run.set("apply.lr", &[1e-2]);
        run.run(Role::Apply);
        run.run(Role::GRAD);
    }
    assert!(sums(&stored) == sums(&plain), "after an update: {options:?}");
}

/// Freezes everything except adapters; without adapters, everything except norms.
fn frozen_beside(g: &Graph, adapters: &[Adapter]) -> BTreeSet<String> {
    let mut freeze = frozen(g);
    freeze.retain(|path| !adapters.is_empty() || !path.contains("norm"));
    freeze
}

/// For all variants of the plans, with LoRA and DoRA, and with only norms trained beside the base.
#[test]
fn an_nf4_base_computes_like_its_decoded_values() {
    let g = build(&small::decoder(), LOSS);
    let narrow = Options { precision: Precision::BF16, ..Options::default() };
    let choices = || {
        choices()
            .into_iter()
            .chain([narrow.clone(), Options { recompute: Recompute::Full, ..narrow.clone() }])
    };
    let sets = [false, true].into_iter().flat_map(cases).chain([vec![]]);
    for adapters in sets {
        for options in choices() {
            let (base, freeze) = (Base::Nf4(base::linear(&g)), frozen_beside(&g, &adapters));
            let options = Options { adapters: adapters.clone(), freeze, base, ..options };
            computes_as_its_values(&g, Codes::Nf4, &options);
        }
    }
}

/// The same where products multiply E4M3 codes of the decoded values, with the scale that these values have in a full base.
#[test]
fn an_nf4_base_computes_like_its_decoded_values_in_eight_bits() {
    let g = even_decoder();
    for adapters in [false, true].into_iter().flat_map(cases).chain([vec![]]) {
        for options in in_eight_bits() {
            let (base, freeze) = (Base::Nf4(base::linear(&g)), frozen_beside(&g, &adapters));
            let options = Options { adapters: adapters.clone(), freeze, base, ..options };
            computes_as_its_values(&g, Codes::Nf4, &options);
        }
    }
}

/// A decoder and a batch whose products can multiply 8-bit floats.
fn even_decoder() -> Graph {
    let config = DecoderConfig { width: 32, heads: 2, head_size: Some(16), ffn: 48, ..small::decoder() };
    build(&config, Form::Loss(LossForm::rows(2, 16)))
}

/// Variants of the plans in which products multiply 8-bit floats.
fn in_eight_bits() -> [Options; 4] {
    let eight = |scaling| Options { precision: Precision::FP8, fp8_scaling: scaling, ..Options::default() };
    [
        eight(Scaling::Delayed),
        eight(Scaling::Current),
        Options { fuse_qkv: false, fuse_gate_up: false, ..eight(Scaling::Current) },
        Options { recompute: Recompute::Full, ..eight(Scaling::Delayed) },
    ]
}

/// The same for an E4M3 base, whether products multiply codes or dequantised values.
#[test]
fn an_fp8_base_computes_like_its_decoded_values() {
    let g = even_decoder();
    let narrow = Options { precision: Precision::BF16, ..Options::default() };
    for adapters in [false, true].into_iter().flat_map(cases).chain([vec![]]) {
        for options in choices().into_iter().chain([narrow.clone()]).chain(in_eight_bits()) {
            let base = Base::Fp8(fp8_base::groups(&g, &base::linear(&g)));
            let freeze = frozen_beside(&g, &adapters);
            let options = Options { adapters: adapters.clone(), freeze, base, ..options };
            computes_as_its_values(&g, Codes::Fp8, &options);
        }
    }
}

/// Weights in eight bits take two bytes per value where products multiply the codes along rows and columns, one where they are
/// dequantised, and have no further copy.
#[test]
fn an_fp8_base_is_stored_once() {
    let g = even_decoder();
    let linear = base::linear(&g);
    let plans = |precision: Precision, base: Base| {
        let adapters = vec![adapter("layers.0.attn.wq", 16, false)];
        let options = Options { base, precision, adapters, freeze: frozen(&g), ..Options::default() };
        compile(&[Program { role: Role::GRAD, graph: g.clone() }], &paper(), &options).expect("plans")
    };
    let values: usize =
        linear.iter().map(|path| g.slot(g.find_slot(path).expect("a weight")).ty.elements()).sum();
    let base = || Base::Fp8(fp8_base::groups(&g, &linear));
    let eight_bits = |plans: &PlanSet| -> usize {
        let is_own = |slot: &&flatout_ir::plan::PlacedSlot| slot.ty.dtype.is_fp8() && !slot.is_whole;
        let columns = plans.slots.iter().filter(|slot| slot.path.starts_with("fp8.columns."));
        let rows = plans.slots.iter().filter(is_own).filter(|slot| slot.class == Class::Frozen);
        rows.chain(columns).map(|slot| slot.ty.elements()).sum()
    };
    let (multiplied, dequantised) = (plans(Precision::FP8, base()), plans(Precision::BF16, base()));
    // The input of the first layer's queries has no gradient, so these weights are not read along columns.
    let first: usize = g.slot(g.find_slot("layers.0.attn.wq").expect("a weight")).ty.elements();
    assert!(eight_bits(&multiplied) <= 2 * values && eight_bits(&multiplied) + 2 * first >= 2 * values);
    assert_eq!(eight_bits(&dequantised), values);
    for plans in [&multiplied, &dequantised] {
        let is_full = |slot: &&flatout_ir::plan::PlacedSlot| {
            let path = slot.path.rsplit_once('.').map_or("", |(_, end)| end);
            slot.path.starts_with("layers.")
                && slot.ty.rank() == 2
                && slot.class == Class::Frozen
                && path != "fp8"
        };
        assert_eq!(plans.slots.iter().find(is_full).map(|slot| &slot.path), None);
    }
    let in_eight_bits = |plans: &PlanSet| {
        let launches = &plans.plan(Role::GRAD).expect("gradients").launches;
        launches.iter().filter(|l| l.op.kind() == OpKind::Product && l.ins[0].dtype.is_fp8()).count()
    };
    assert_eq!(in_eight_bits(&multiplied), in_eight_bits(&plans(Precision::FP8, Base::Full)));
    assert!(in_eight_bits(&multiplied) > 10 && in_eight_bits(&dequantised) == 0);
}

/// At most one weight at a time is in memory in full, and none between the passes.
#[test]
fn an_nf4_base_has_no_full_copy() {
    let config = DecoderConfig { layers: 6, width: 64, ffn: 192, ..small::decoder() };
    let g = build(&config, LOSS);
    for precision in [Precision::F32, Precision::BF16] {
        let plans = |base: Base| {
            let adapters = vec![adapter("layers.0.attn.wq", 2, false)];
            let recompute = Recompute::Full;
            let options =
                Options { base, precision, recompute, adapters, freeze: frozen(&g), ..Options::default() };
            compile(&[Program { role: Role::GRAD, graph: g.clone() }], &paper(), &options).expect("plans")
        };
        let (small, plain) = (plans(Base::Nf4(base::linear(&g))), plans(Base::Full));
        let made: Vec<_> = small.plan(Role::GRAD).expect("gradients").launches.iter().enumerate().collect();
        let panels = made.iter().filter(|(_, l)| l.op.kind() == OpKind::Dequantize);
        let mut largest = 0;
        for (at, launch) in panels {
            let view = launch.outs[0].as_ref().expect("somebody reads it");
            largest = largest.max(view.span_bytes());
            // The next launch reads it.
            let reads = |l: &flatout_ir::Launch| l.ins.iter().any(|input| input.offset == view.offset);
            assert!(reads(made[at + 1].1), "{}", launch.path);
        }
        let bytes = if precision == Precision::F32 { 4 } else { 2 };
        assert_eq!(largest, 2 * 192 * 64 * bytes, "gate and up are read as one");
        assert!(small.transient_bytes <= plain.transient_bytes + largest);
        let linear: usize = small.held(0).iter().filter(|p| p.codes().is_some()).map(|p| p.elements()).sum();
        let [small, plain] = [&small, &plain].map(|plans| plans.categories()["frozen"]);
        let saved = linear * bytes - linear * 33 / 64;
        // Slots begin at multiples of 64 bytes, and there are five more per weight.
        assert!(plain - small <= saved && plain - small > saved - 42 * 5 * 64 - 2048, "{small} of {plain}");
    }
}

/// With products in 8 bits, the codes of at most one weight at a time are in memory, right before the product that reads them.
#[test]
fn an_nf4_base_has_no_copy_in_eight_bits() {
    let config =
        DecoderConfig { layers: 6, width: 64, heads: 4, head_size: Some(16), ffn: 192, ..small::decoder() };
    let g = build(&config, Form::Loss(LossForm::rows(2, 16)));
    let plans = |base: Base| {
        let adapters = vec![adapter("layers.0.attn.wq", 16, false)];
        let (precision, recompute) = (Precision::FP8, Recompute::Full);
        let options =
            Options { base, precision, recompute, adapters, freeze: frozen(&g), ..Options::default() };
        compile(&[Program { role: Role::GRAD, graph: g.clone() }], &paper(), &options).expect("plans")
    };
    let linear = base::linear(&g);
    let (small, plain) = (plans(Base::Nf4(linear.clone())), plans(Base::Full));
    let kept = small.slots.iter().filter(|slot| slot.ty.dtype.is_fp8() && slot.ty.rank() == 2);
    assert_eq!(kept.map(|slot| &slot.path).next(), None, "no weight has a copy in eight bits");
    let scales =
        |plans: &PlanSet| plans.slots.iter().filter(|s| s.path.starts_with("fp8.scale.layers.")).count();
    assert_eq!([scales(&small), scales(&plain)], [6 * 4; 2]);

    let launches = &small.plan(Role::GRAD).expect("gradients").launches;
    let multiplies_codes = |l: &flatout_ir::Launch| l.op.kind() == OpKind::Product && l.ins[0].dtype.is_fp8();
    let (mut made, mut largest) = (0, 0);
    for (at, launch) in launches.iter().enumerate().filter(|(_, l)| l.op.kind() == OpKind::Requantize) {
        let view = launch.outs[0].as_ref().expect("a product reads it");
        let reads = |l: &flatout_ir::Launch| l.ins.iter().any(|input| input.offset == view.offset);
        assert!(multiplies_codes(&launches[at + 1]) && reads(&launches[at + 1]), "{}", launch.path);
        (made, largest) = (made + 1, largest.max(view.span_bytes()));
    }
    assert_eq!(made, launches.iter().filter(|l| multiplies_codes(l)).count(), "one for each product");
    assert_eq!(largest, 2 * 192 * 64, "gate and up are read as one");
    assert!(small.transient_bytes <= plain.transient_bytes + largest);
}
