//! One block applied twice, so that both applications read its weights. The reference is the same model with two separate
//! blocks, where no slot is read twice: the gradient of a shared weight is the sum of both gradients.

use std::collections::{BTreeSet, HashMap};

use flatout_ir::graph::NodeId;
use flatout_ir::interpreter::Interpreter;
use flatout_ir::ops::attention::{Attend, Mask, Masking, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::rope::{Pairs, RopeSpec};
use flatout_ir::oracle::{self, Values};
use flatout_ir::passes::differentiate::{differentiate, gradient_path};
use flatout_ir::passes::forward::adapters::{self, AdapterContext};
use flatout_ir::passes::input_path;
use flatout_ir::target::paper;
use flatout_ir::{
    Adapter, Builder, Class, DType, Graph, Init, Op, OpKind, Options, PlanSet, Precision, Program, Recompute,
    Role, Scaling, Tensor, Update, compile, random,
};

const TOKENS: usize = 32;
const LEN: usize = 16;
const WIDTH: usize = 32;
const HEADS: usize = 2;
const SIZE: usize = 16;
const FFN: usize = 48;
/// The prefix of parameters of the first block.
const FIRST: &str = "layers.0.";
const SECOND: &str = "layers.1.";

/// The kinds of blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ModelFamily {
    /// RMS norms, norms of queries and keys, gated feed-forward.
    Llama,
    /// `Llama` with norms after both halves as well.
    Gemma,
    /// Biases, centred norms, GELU, learned scales after both halves.
    Vit,
}

const KINDS: [ModelFamily; 3] = [ModelFamily::Llama, ModelFamily::Gemma, ModelFamily::Vit];

struct Model<'g> {
    b: &'g Builder,
    kind: ModelFamily,
    positions: Tensor<'g>,
    draw: Option<[Tensor<'g>; 2]>,
}

impl<'g> Model<'g> {
    fn linear(&self, x: Tensor<'g>, name: &str, out: usize) -> Tensor<'g> {
        let y = x.linear(self.b.param(name, &[out, x.dims()[1]], Init::Normal { std: 0.15 }));
        match self.kind {
            ModelFamily::Vit => {
                y + self.b.param(&format!("{name}_bias"), &[out], Init::Zeros).reshape(&[1, out])
            }
            _ => y,
        }
    }

    fn norm(&self, x: Tensor<'g>, name: &str) -> Tensor<'g> {
        let size = *x.dims().last().expect("an axis");
        let w = self.b.param(name, &[size], Init::Ones);
        match self.kind {
            ModelFamily::Vit => {
                let bias = self.b.param(&format!("{name}_bias"), &[size], Init::Zeros);
                let spec = NormSpec { eps: 1e-5, center: true, weight: NormWeight::Plain, bias: true };
                x.norm(spec, Some(w), Some(bias))
            }
            _ => x.rms_norm(1e-5, NormWeight::Plain, Some(w)),
        }
    }

    /// The output of half a block before it is added to the residual stream.
    fn ending(&self, x: Tensor<'g>, name: &str) -> Tensor<'g> {
        let x = match self.kind {
            ModelFamily::Llama => x,
            ModelFamily::Gemma => self.norm(x, name),
            ModelFamily::Vit => x * self.b.param(name, &[WIDTH], Init::Ones).reshape(&[1, WIDTH]),
        };
        match self.draw {
            Some([rng, rows]) => x.dropout(0.1, rng, rows),
            None => x,
        }
    }

    fn heads(&self, x: Tensor<'g>, name: &str, heads: usize) -> Tensor<'g> {
        let x = self.linear(x, name, heads * SIZE).reshape(&[TOKENS, heads, SIZE]);
        match self.kind {
            ModelFamily::Llama | ModelFamily::Gemma if name != "wv" => {
                let spec = RopeSpec::text(SIZE, 100.0.into(), Pairs::Half);
                self.norm(x, &format!("{name}_norm")).rope(self.positions, &spec)
            }
            _ => x,
        }
    }

    fn block(&self, x: Tensor<'g>) -> Tensor<'g> {
        let y = self.norm(x, "attn_norm");
        let y = self.b.scope("attn", || {
            let (q, k, v) = (self.heads(y, "wq", HEADS), self.heads(y, "wk", 1), self.heads(y, "wv", 1));
            let of = Segments::Uniform { len: LEN };
            let attend = Attend { scale: 0.25, cap: Cap::NONE, mask: Mask::Causal, q: of, k: of };
            let y = q.attention(k, v, &attend, &Masking::default());
            self.linear(y.reshape(&[TOKENS, HEADS * SIZE]), "wo", WIDTH)
        });
        let x = x + self.ending(y, "attn_end");
        let y = self.norm(x, "ffn_norm");
        let y = self.b.scope("ffn", || match self.kind {
            ModelFamily::Vit => {
                let y = self.linear(y, "up", FFN).activate(Act::Gelu);
                self.linear(y, "down", WIDTH)
            }
            _ => {
                let y = self.linear(y, "gate", FFN).activate(Act::Silu) * self.linear(y, "up", FFN);
                self.linear(y, "down", WIDTH)
            }
        });
        x + self.ending(y, "ffn_end")
    }
}

/// Two blocks, each with its own weights.
fn apart(kind: ModelFamily, draws: bool) -> Graph {
    let b = Builder::new();
    let i32s = |name: &str, dims: &[usize]| b.input(name, DType::I32, dims);
    let x = b.input("x", DType::F32, &[TOKENS, WIDTH]);
    let draw = draws.then(|| [i32s("rng", &[3]), i32s("rows", &[TOKENS, 2])]);
    let model = Model { b: &b, kind, positions: i32s("positions", &[1, TOKENS]), draw };
    let mut h = x.linear(b.param("embed", &[WIDTH, WIDTH], Init::Normal { std: 0.2 }));
    for scope in [FIRST, SECOND] {
        h = b.scope(scope.trim_end_matches('.'), || model.block(h));
    }
    let h = b.scope("norm", || model.norm(h, "weight"));
    b.result("loss", (h * x).sum(1).sum(0).reshape(&[1]));
    b.result("weight", b.fill(TOKENS as f64, DType::F32, &[1]));
    b.finish()
}

/// The same model with the first block's weights in both places. The second application reads them again, or reuses the first
/// one's reads.
fn shared(apart: &Graph, reads_anew: bool) -> Graph {
    let mut g = apart.clone();
    let first_of = |slot: &str| slot.strip_prefix(SECOND).map(|name| format!("{FIRST}{name}"));
    let mut known: HashMap<String, NodeId> = HashMap::new();
    for id in apart.ids() {
        let Op::Read { slot } = apart.node(id).op else { continue };
        let path = &apart.slot(slot).path;
        known.insert(path.clone(), id);
        let Some(first) = first_of(path) else { continue };
        let slot = apart.find_slot(&first).expect("the blocks are alike");
        g.nodes[id.0 as usize].op = Op::Read { slot };
        if !reads_anew {
            let takers = g.nodes.iter_mut().flat_map(|node| &mut node.ins).filter(|v| v.node == id);
            takers.for_each(|v| v.node = known[&first]);
        }
    }
    // Slots stay in place, so that their ids remain valid; those of the second block are no longer trained.
    g.slots.iter_mut().filter(|s| s.path.starts_with(SECOND)).for_each(|s| s.class = Class::Const);
    g
}

/// Values by path; both blocks start with equal values.
fn value(path: &str, n: usize, init: Init) -> Vec<f64> {
    let path = path.replace(SECOND, FIRST);
    let stream = path.bytes().fold(7_u64, |h, b| h.wrapping_mul(31).wrapping_add(b as u64));
    let normal = |k: usize| random::normal(5, stream, k as u64) as f64;
    let one = |k: usize| match (path.as_str(), init) {
        ("positions", _) => (k % LEN) as f64,
        ("rng", _) => [11.0, 0.0, 4.0][k],
        ("rows", _) => [(k / 2 / LEN) as f64, (k / 2 % LEN) as f64][k % 2],
        ("x", _) => normal(k),
        (_, Init::Ones) => 1.0 + 0.2 * normal(k),
        _ => 0.15 * normal(k),
    };
    (0..n).map(|k| one(k) as f32 as f64).collect()
}

fn values(g: &Graph) -> Values {
    g.slots.iter().map(|s| (s.path.clone(), value(&s.path, s.ty.elements(), s.init))).collect()
}

fn compiled(g: &Graph, options: &Options) -> Interpreter {
    let program = Program { role: Role::GRAD, graph: g.clone() };
    let mut run = Interpreter::new(compile(&[program], &paper(), options).expect("plans"));
    let slots = run.plans.slots.clone();
    let is_set = |class: Class| class.is_parameter() || matches!(class, Class::Input | Class::Const);
    for slot in slots.iter().filter(|slot| is_set(slot.class) && !slot.is_whole) {
        let path = slot.path.strip_prefix(&input_path(Role::GRAD, "")).unwrap_or(&slot.path);
        if !path.starts_with("region.") && !path.starts_with("rope.") {
            run.set(&slot.path, &value(path, slot.ty.elements(), slot.init));
        }
    }
    if run.plans.plan(Role::Derive).is_some() {
        run.run(Role::Derive);
    }
    run.run(Role::GRAD);
    run
}

/// The paths and values of all gradients, those of both blocks summed.
fn summed<'a>(weights: impl Iterator<Item = &'a str>, gradient: impl Fn(&str) -> Vec<f64>) -> Values {
    let mut sums = Values::new();
    for path in weights {
        let value = gradient(path);
        let sum = sums.entry(path.replace(SECOND, FIRST)).or_insert_with(|| vec![0.0; value.len()]);
        sum.iter_mut().zip(value).for_each(|(sum, x)| *sum += x);
    }
    sums
}

/// Gradients of the unmodified graph with two blocks.
fn wanted(apart: &Graph) -> Values {
    let writes = oracle::run(&differentiate(apart).graph, &values(apart)).writes;
    let weights = apart.slots.iter().filter(|s| s.class == Class::Weight).map(|s| s.path.as_str());
    summed(weights, |path| writes[&gradient_path(path)].clone())
}

#[track_caller]
fn close(run: &Interpreter, want: &Values, bound: f64, what: &str) {
    assert!(want.len() > 4, "{what}: there are {} gradients", want.len());
    for (path, want) in want {
        let got = run.get(&gradient_path(path));
        let size = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let off = size(&mut got.iter().zip(want).map(|(a, b)| a - b)) / size(&mut want.iter().copied());
        // A vector added to every key shifts a query's scores equally: its gradient is 0 up to rounding.
        assert!(off < bound || path.ends_with("wk_bias"), "{what}: {path} is off by {off:e}");
    }
}

fn count(plans: &PlanSet, kind: OpKind) -> usize {
    plans.plan(Role::GRAD).expect("a plan").launches.iter().filter(|l| l.op.kind() == kind).count()
}

#[test]
fn gradients_of_both_applications_are_summed() {
    let base = Options::default;
    let choices = [
        base(),
        Options { rope_positions: Some(LEN), ..base() },
        Options { recompute: Recompute::None, ..base() },
        Options { recompute: Recompute::Full, ..base() },
        Options { fuse_qkv: false, fuse_gate_up: false, ..base() },
        Options { fuse_norm: false, ..base() },
        Options { fuse_elementwise: false, ..base() },
        Options { fuse_optimizer: false, ..base() },
    ];
    for kind in KINDS {
        let apart = apart(kind, true);
        let want = wanted(&apart);
        for (reads_anew, options) in [true, false].iter().flat_map(|r| choices.iter().map(move |o| (*r, o))) {
            let run = compiled(&shared(&apart, reads_anew), options);
            close(&run, &want, 3e-6, &format!("{kind:?} {reads_anew} {options:?}"));
        }
    }
}

#[test]
fn narrow_types_stay_within_their_rounding() {
    for kind in KINDS {
        let apart = apart(kind, false);
        let want = wanted(&apart);
        for (precision, bound) in [(Precision::BF16, 6e-2), (Precision::FP8, 0.3)] {
            for recompute in [Recompute::None, Recompute::Cheap, Recompute::Full] {
                let fp8_scaling = Scaling::Current;
                let options = Options { precision, fp8_scaling, recompute, ..Options::default() };
                let run = compiled(&shared(&apart, true), &options);
                close(&run, &want, bound, &format!("{kind:?} {precision:?} {recompute:?}"));
            }
        }
    }
}

/// A weight that is read twice is merged and fused like one that is read once.
#[test]
fn both_applications_take_as_many_launches_as_two_blocks() {
    for (kind, precision) in KINDS.into_iter().flat_map(|k| Precision::ALL.iter().map(move |p| (k, *p))) {
        let options = Options { precision, rope_positions: Some(LEN), ..Options::default() };
        let plans = |g: &Graph| {
            compile(&[Program { role: Role::GRAD, graph: g.clone() }], &paper(), &options).expect("plans")
        };
        let apart = apart(kind, true);
        let two = plans(&apart);
        let reports = |plans: &PlanSet| -> Vec<(&str, usize)> {
            let of_forward = ["merge", "patterns", "joint_heads", "folded_scales", "fused_products", "fp8"];
            let kept = plans.done.iter().filter(|done| of_forward.contains(&done.pass));
            kept.map(|done| (done.pass, done.count)).collect()
        };
        for reads_anew in [true, false] {
            let one = plans(&shared(&apart, reads_anew));
            assert_eq!(reports(&one), reports(&two), "{kind:?} {precision:?} {reads_anew}");
            for of in [OpKind::Product, OpKind::QkNormRope, OpKind::QkNormRopeGrad, OpKind::Attention] {
                assert_eq!(count(&one, of), count(&two, of), "{of:?} of {kind:?} {precision:?} {reads_anew}");
            }
            let merged = |path: &str| one.slots.iter().filter(|slot| slot.path == path).count();
            assert_eq!(merged("layers.0.attn.wq+wk+wv"), 1, "{kind:?} {precision:?} {reads_anew}");
        }
    }
}

/// Rows that attend to the keys and values of others only have queries: keys and values are one product, and queries, which are
/// also read without them, are not part of it.
#[test]
fn a_weight_read_without_its_siblings_is_not_merged() {
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[TOKENS, WIDTH]);
    let weight = |name: &str| {
        let init = Init::Normal { std: 0.15 };
        let dims = [WIDTH, WIDTH];
        let bias = b.slot(&format!("{name}_bias"), Class::Weight, DType::F32, &[WIDTH], Init::Zeros);
        (b.slot(name, Class::Weight, DType::F32, &dims, init), bias)
    };
    let [wq, wk, wv] = ["wq", "wk", "wv"].map(weight);
    let heads = |x: Tensor<'_>, (weight, bias)| {
        let y = x.linear(b.read(weight)) + b.read(bias).reshape(&[1, WIDTH]);
        b.tensor(y.reshape(&[TOKENS, HEADS, SIZE]).v)
    };
    let of = Segments::Uniform { len: LEN };
    let attend = Attend { scale: 0.25, cap: Cap::NONE, mask: Mask::Full, q: of, k: of };
    let (q, k, v) = (heads(x, wq), heads(x, wk), heads(x, wv));
    let seen = q.attention(k, v, &attend, &Masking::default()).reshape(&[TOKENS, WIDTH]);
    let others = heads(x.square(), wq).attention(k, v, &attend, &Masking::default());
    let y = seen + others.reshape(&[TOKENS, WIDTH]);
    b.result("loss", (y * x).sum(1).sum(0).reshape(&[1]));
    b.result("weight", b.fill(TOKENS as f64, DType::F32, &[1]));
    let g = b.finish();
    let want = wanted(&g);
    for options in [Options::default(), Options { fuse_qkv: false, ..Options::default() }] {
        let run = compiled(&g, &options);
        close(&run, &want, 3e-6, &format!("{options:?}"));
        let paths = run.plans.slots.iter().map(|slot| slot.path.as_str());
        let merged: Vec<&str> = paths.filter(|path| path.starts_with('w') && path.contains('+')).collect();
        // Each has the product of its weight's gradient as well; x has no gradient.
        let products = count(&run.plans, OpKind::Product);
        match options.fuse_qkv {
            true => assert_eq!((merged, products), (vec!["wk+wv", "wk_bias+wv_bias"], 2 * 3)),
            false => assert_eq!((merged, products), (vec![], 2 * 4)),
        }
    }
}

fn adapted(weights: &[&str], scopes: &[&str], dora: bool, dropout: f32) -> Vec<Adapter> {
    let adapter = |scope: &str, weight: &str| Adapter {
        name: "default".into(),
        weight: format!("{scope}{weight}"),
        rank: 4,
        scale: 1.5,
        dropout,
        dora,
    };
    scopes.iter().flat_map(|scope| weights.iter().map(|weight| adapter(scope, weight))).collect()
}

const ADAPTED: [&str; 6] = ["attn.wq", "attn.wk", "attn.wv", "attn.wo", "ffn.gate", "ffn.down"];

#[test]
fn adapters_of_a_shared_weight_serve_both_applications() {
    let apart = apart(ModelFamily::Llama, false);
    let freeze: BTreeSet<String> = apart.slots.iter().map(|s| s.path.clone()).collect();
    for (dora, precision, bound) in [
        (false, Precision::F32, 3e-6),
        (true, Precision::F32, 3e-6),
        (false, Precision::BF16, 6e-2),
        (true, Precision::BF16, 6e-2),
    ] {
        let options = |scopes: &[&str], precision: Precision| {
            let adapters = adapted(&ADAPTED, scopes, dora, 0.0);
            Options { precision, adapters, freeze: freeze.clone(), ..Options::default() }
        };
        let two = compiled(&apart, &options(&[FIRST, SECOND], Precision::F32));
        let trained = two.plans.slots.iter().filter(|s| s.class == Class::Weight && !s.is_whole);
        let want = summed(trained.map(|s| s.path.as_str()), |path| two.get(&gradient_path(path)));
        let one = compiled(&shared(&apart, true), &options(&[FIRST], precision));
        close(&one, &want, bound, &format!("{precision:?}, dora {dora}"));
        let said = one.plans.done.iter().find(|done| done.pass == "adapters").expect("adapters");
        assert_eq!(said.count, ADAPTED.len(), "{}", said.did);
    }
}

/// Each application draws its own dropout for the adapters' inputs.
#[test]
fn applications_draw_dropout_separately() {
    let g = shared(&apart(ModelFamily::Llama, false), true);
    let update = Update::default();
    let context = AdapterContext { update: &update, role: Role::GRAD, folds: true };
    let (g, _) =
        adapters::adapters(&g, &adapted(&["attn.wo"], &[FIRST], false, 0.5), context).expect("adapters");
    let keys: Vec<u64> =
        g.nodes.iter().filter(|n| n.op.kind() == OpKind::Dropout).map(|node| node.key).collect();
    assert!(keys.len() == 2 && keys[0] != keys[1], "{keys:?}");
}
