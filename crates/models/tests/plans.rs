//! Plans of the decoder, run launch by launch with the oracle, against the oracle on the unmodified graph.

use std::collections::HashMap;

use flatout_ir::cost::{Trainability, training_flops};
use flatout_ir::interpreter::Interpreter;
use flatout_ir::optimizers;
use flatout_ir::passes::differentiate::{differentiate, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::target::paper;
use flatout_ir::{
    Class, Graph, Init, Options, Precision, Program, Recompute, Role, Scaling, compile, oracle, random,
};
use flatout_models::config::{
    Activation, Attention, Bias, DecoderConfig, Head, Norm, NormWeights, Pooling, Positions, RopeScaling,
};
use flatout_models::decoder::build;
use flatout_models::form::{Documents, Form, LossForm};

use crate::small;

fn small() -> DecoderConfig {
    DecoderConfig { dropout: 0.1, ..small::decoder() }
}

/// Biases, centred norms, learned positions: the opposite choices.
fn gpt2() -> DecoderConfig {
    DecoderConfig {
        kv_heads: None,
        qk_norm: false,
        norm: Norm::Layer,
        norm_bias: true,
        bias: Bias::All,
        activation: Activation::GeluTanh,
        positions: Positions::Learned,
        ..small()
    }
}

/// Local and global layers, norms on both sides, two thetas.
fn gemma() -> DecoderConfig {
    DecoderConfig {
        activation: Activation::Geglu,
        norm_weight: NormWeights::OnePlus,
        post_norms: true,
        window: Some(3),
        global_every: Some(2),
        rope_local_theta: Some(100.0),
        embed_scale: 3.5,
        ..small()
    }
}

const ROWS: usize = 2;
/// Three texts, with capacity for four, and a token outside texts between them.
const CLASSES: Form = Form::Classes { tokens: 10, texts: 4, longest: 5, dropout: true };
const LOSS: Form = Form::Loss(LossForm { dropout: true, ..LossForm::rows(ROWS, 5) });

/// The loss at four of ten tokens.
const ANSWERS: Form = Form::Loss(LossForm { read: Some(4), dropout: true, ..LossForm::rows(ROWS, 5) });

/// The loss at four of ten tokens, with the last block only at these tokens after its attention.
const TRIMMED: Form =
    Form::Loss(LossForm { read: Some(4), trims_last: true, dropout: true, ..LossForm::rows(ROWS, 5) });

/// Values for every parameter and input of a graph, by path.
fn values(g: &Graph) -> HashMap<String, Vec<f64>> {
    let mut values = HashMap::new();
    for (i, slot) in g.slots.iter().enumerate() {
        let n = slot.ty.elements();
        let draw = |k: usize| random::normal(5, i as u64, k as u64) as f64;
        let value: Vec<f64> = match (slot.path.as_str(), slot.init) {
            ("tokens", _) => (0..n).map(|k| ((k * 7 + 3) % 13) as f64).collect(),
            ("targets", _) => {
                (0..n).map(|k| if k % 4 == 1 { -1.0 } else { ((k * 5 + 2) % 13) as f64 }).collect()
            }
            ("weights", _) => {
                (0..n).map(|k| if k % 4 == 1 { 0.0 } else { 1.0 + 0.25 * (k % 3) as f64 }).collect()
            }
            ("answers", _) => vec![1.0, 4.0, -1.0, 8.0],
            ("positions", _) => (0..n).map(|k| (k % 5) as f64).collect(),
            ("rng", _) => vec![11.0, 0.0, 4.0],
            ("rows", _) => {
                (0..n).map(|k| if k % 2 == 0 { (k / 10) as f64 } else { (k / 2 % 5) as f64 }).collect()
            }
            ("labels", _) => vec![1.0, 0.0, 2.0, -1.0],
            ("label_weights", _) => vec![1.0, 0.5, 2.0, 0.0],
            ("segment_start", _) => vec![0.0, 2.0, 5.0, 0.0],
            ("segment_len", _) => vec![2.0, 3.0, 5.0, 0.0],
            (_, Init::Normal { std }) => (0..n).map(|k| (draw(k) * std as f64) as f32 as f64).collect(),
            (_, Init::Ones) => (0..n).map(|k| (1.0 + 0.2 * draw(k)) as f32 as f64).collect(),
            _ => vec![0.0; n],
        };
        values.insert(slot.path.clone(), value);
    }
    values
}

/// Sums of gradients and loss of the plain graph.
fn expected(g: &Graph) -> HashMap<String, Vec<f64>> {
    oracle::run(&differentiate(g).graph, &values(g)).writes
}

fn compiled(g: &Graph, options: &Options) -> Interpreter {
    let plans =
        compile(&[Program { role: Role::GRAD, graph: g.clone() }], &paper(), options).expect("a plan");
    let mut run = Interpreter::new(plans);
    for (path, value) in values(g) {
        let class = g.slot(g.find_slot(&path).expect("a slot")).class;
        run.set(&if class == Class::Input { input_path(Role::GRAD, &path) } else { path }, &value);
    }
    fill_tables(&mut run);
    if run.plans.plan(Role::Derive).is_some() {
        run.run(Role::Derive);
    }
    run
}

fn fill_tables(run: &mut Interpreter) {
    let tables: Vec<_> = run.plans.slots.iter().filter(|s| s.class == Class::Const).cloned().collect();
    for slot in tables {
        run.set(&slot.path, &vec![0.0; slot.ty.elements()]);
    }
}

fn relative(got: &[f64], want: &[f64]) -> f64 {
    let (mut off, mut size) = (0.0, 0.0);
    for (g, w) in got.iter().zip(want) {
        off += (g - w) * (g - w);
        size += w * w;
    }
    if size == 0.0 { off.sqrt() } else { (off / size).sqrt() }
}

/// Every gradient and the loss of a compiled plan, relative to the plain graph's.
fn compare(config: &DecoderConfig, form: Form, options: &Options, bound: f64) {
    let g = build(config, form);
    let want = expected(&g);
    let mut run = compiled(&g, options);
    run.run(Role::GRAD);
    for (path, value) in &want {
        let mut off = relative(&run.get(path), value);
        // A vector added to every key shifts a query's scores equally: without rotation its gradient is 0 up to rounding, which
        // is compared with the gradient of the queries' vector.
        if path.ends_with("wk_bias") && config.positions != Positions::Rope {
            let size = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            off = size(&run.get(path)) / size(&want[&path.replace("wk_bias", "wq_bias")]);
        }
        assert!(off < bound, "{path} is off by {off:e} with {options:?}");
    }
    assert!(want.contains_key(&gradient_path("layers.1.attn.wq")) && want.len() > 10);
}

/// Options that each leave out or change one pass; `layers` is a number of layers that are recomputed.
pub fn choices_of_passes(layers: usize) -> Vec<Options> {
    let base = Options::default;
    vec![
        base(),
        Options { fuse_qkv: false, ..base() },
        Options { fuse_gate_up: false, ..base() },
        Options { fuse_norm: false, ..base() },
        Options { fuse_elementwise: false, ..base() },
        Options { fuse_loss: false, ..base() },
        Options { fuse_optimizer: false, ..base() },
        Options { flash_attention: false, ..base() },
        Options { recompute: Recompute::None, ..base() },
        Options { recompute: Recompute::Wide, ..base() },
        Options { recompute: Recompute::Full, ..base() },
        Options { recompute: Recompute::Full, recompute_layers: Some(layers), ..base() },
        Options { memory_plan: false, ..base() },
    ]
}

#[test]
fn every_choice_of_passes_gives_the_gradients_of_the_plain_graph() {
    let choices = [choices_of_passes(1), vec![Options { rope_positions: Some(8), ..Options::default() }]];
    for options in choices.concat() {
        compare(&small(), LOSS, &options, 2e-6);
        compare(&gpt2(), LOSS, &options, 2e-6);
        compare(&gemma(), LOSS, &options, 2e-6);
        let classes = DecoderConfig { head: Head::Classes, classes: Some(3), head_dropout: 0.2, ..gemma() };
        compare(&classes, CLASSES, &options, 2e-6);
        compare(&small(), TRIMMED, &options, 2e-6);
        compare(&gemma(), TRIMMED, &options, 2e-6);
    }
}

#[test]
fn every_option_of_the_model_compiles_to_its_gradients() {
    let models = [
        DecoderConfig { qk_norm: false, tied: false, ..small() },
        DecoderConfig { norm: Norm::Layer, positions: Positions::Learned, ..small() },
        DecoderConfig { activation: Activation::GeluTanh, positions: Positions::None, ..small() },
        DecoderConfig { activation: Activation::Relu2, embed_scale: 1.5, ..small() },
        DecoderConfig { bias: Bias::Qkv, norm_bias: true, activation: Activation::GeluExact, ..small() },
        DecoderConfig { bias: Bias::Attention, activation: Activation::Geglu, ..small() },
        DecoderConfig { bias: Bias::All, ..small() },
        DecoderConfig {
            rope_scaling: RopeScaling::Yarn,
            rope_factor: Some(4.0),
            rope_original_context: Some(16),
            rope_beta_fast: 2.0,
            ..small()
        },
        DecoderConfig { value_embeddings: 1, tied: false, ..small() },
        gpt2(),
        DecoderConfig { attention: Attention::Bidirectional, score_size: Some(9), ..gemma() },
        DecoderConfig { norm: Norm::Layer, norm_bias: true, qk_norm: false, global_every: None, ..gemma() },
    ];
    for config in models {
        compare(&config, LOSS, &Options::default(), 2e-6);
    }
    for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Max] {
        let attention = Attention::Bidirectional;
        let classes = DecoderConfig { head: Head::Classes, classes: Some(3), pooling, attention, ..small() };
        compare(&classes, CLASSES, &Options::default(), 2e-6);
    }
    let apart = Form::Loss(LossForm { documents: Documents::Apart { most: 4 }, ..LossForm::rows(ROWS, 5) });
    compare(&small(), apart, &Options::default(), 2e-6);
    for config in [small(), gpt2(), gemma()] {
        compare(&config, ANSWERS, &Options::default(), 2e-6);
    }
}

/// In f64, with dropout: a trimmed last block does not change the model.
#[test]
fn a_trimmed_last_block_has_the_same_gradients() {
    for config in [small(), gpt2(), gemma(), DecoderConfig { layers: 1, ..small() }] {
        let [whole, trimmed] = [ANSWERS, TRIMMED].map(|form| build(&config, form));
        // Their slots are in another order, by which values are drawn; and the row that is -1 is ignored.
        let mut values = values(&whole);
        values.get_mut("weights").expect("an input")[2] = 0.0;
        values.get_mut("targets").expect("an input")[2] = -1.0;
        let [want, got] =
            [&whole, &trimmed].map(|graph| oracle::run(&differentiate(graph).graph, &values).writes);
        assert_eq!(want.len(), got.len());
        for (path, want) in &want {
            let off = relative(&got[path], want);
            // Without rotation the gradient of a vector that all keys share is only rounding.
            let is_zero = want.iter().all(|x| x.abs() < 1e-12);
            assert!(off < 1e-12 || is_zero, "{path} is off by {off:e}");
        }
        let flops = |g: &Graph| training_flops(g, |_| Trainability::Trained);
        let (d, f) = (config.width, config.ffn);
        let gates = if config.activation.gated() { 2 } else { 1 };
        let behind = config.heads * config.head_size() * d + (gates + 1) * d * f;
        assert_eq!(flops(&whole) - flops(&trimmed), (6 * (ROWS * 5 - 4) * behind) as u64);
    }
}

#[test]
fn bf16_stays_within_its_rounding() {
    for recompute in [Recompute::None, Recompute::Cheap, Recompute::Wide, Recompute::Full] {
        let options = Options { precision: Precision::BF16, recompute, ..Options::default() };
        for config in [small(), gpt2(), gemma()] {
            let form = Form::Loss(LossForm::rows(ROWS, 5));
            compare(&config, form, &options, 6e-2);
        }
        let read = Form::Loss(LossForm { read: Some(4), trims_last: true, ..LossForm::rows(ROWS, 5) });
        compare(&small(), read, &options, 6e-2);
        for pooling in [Pooling::Mean, Pooling::Last] {
            let classes = DecoderConfig { head: Head::Classes, classes: Some(3), pooling, ..gemma() };
            // Three texts average out less than ten tokens.
            compare(&classes, CLASSES, &options, 0.15);
        }
    }
}

/// Extents that 8-bit products support: multiples of 16.
fn even(config: DecoderConfig) -> DecoderConfig {
    let kv_heads = config.kv_heads.map(|_| 1);
    DecoderConfig {
        width: 32,
        heads: 2,
        kv_heads,
        head_size: Some(16),
        ffn: 48,
        context: 8,
        init_std: 0.1,
        ..config
    }
}

/// Rounding to 3 bits of mantissa has an error of 3% on average, to 2 bits of 6%, and every product of the two layers has two
/// such operands.
#[test]
fn fp8_stays_within_its_rounding() {
    let form = Form::Loss(LossForm::rows(ROWS, 8));
    for scaling in [Scaling::Delayed, Scaling::Current] {
        for recompute in [Recompute::None, Recompute::Cheap, Recompute::Wide, Recompute::Full] {
            for config in [small(), gpt2()].map(even) {
                let precision = Precision::FP8;
                let options = Options { precision, fp8_scaling: scaling, recompute, ..Options::default() };
                compare(&config, form, &options, 0.3);
            }
        }
    }
}

#[test]
fn recomputing_more_keeps_less() {
    let deep = DecoderConfig { layers: 8, context: 64, width: 32, ffn: 96, dropout: 0.0, ..small() };
    let g = build(&deep, Form::Loss(LossForm::rows(4, deep.context)));
    let of_layers = |recompute: Recompute, recompute_layers: Option<usize>| {
        let options = Options { recompute, recompute_layers, ..Options::default() };
        compile(&[Program { role: Role::GRAD, graph: g.clone() }], &paper(), &options)
            .expect("a plan")
            .transient_bytes
    };
    let transient = |recompute| of_layers(recompute, None);
    let [none, cheap, wide, full] =
        [Recompute::None, Recompute::Cheap, Recompute::Wide, Recompute::Full].map(transient);
    assert!(cheap * 10 < none * 8, "cheap keeps {cheap} of {none} bytes");
    assert!(full * 10 < none * 5, "full keeps {full} of {none} bytes");
    assert!(full < wide && wide < cheap, "{full}, {wide}, {cheap}");
    // Layer by layer from one to the other.
    assert_eq!(of_layers(Recompute::Full, Some(8)), full);
    let steps: Vec<usize> = (0..8).map(|layers| of_layers(Recompute::Wide, Some(layers))).collect();
    assert!(steps[0] == cheap && steps.is_sorted_by(|more, less| more > less), "{steps:?}");
    // The last layer's values are read immediately, so recomputing it frees nothing.
    let steps: Vec<usize> = (0..8).map(|layers| of_layers(Recompute::Full, Some(layers))).collect();
    assert!(steps[0] == cheap && steps[7] <= full);
    assert!(steps.is_sorted_by(|more, less| more > less), "{steps:?}");
}

/// Inputs are contiguous, and every landing area has their size and is counted in the arena.
#[test]
fn landings_are_planned_memory() {
    let programs = [
        Program { role: Role::GRAD, graph: build(&small(), LOSS) },
        Program { role: Role::Eval, graph: build(&small(), LOSS) },
    ];
    let plan = |landings: usize| {
        let target = flatout_ir::Target { landings, ..paper() };
        compile(&programs, &target, &Options::default()).expect("a plan")
    };
    let (in_place, landing) = (plan(0), plan(2));
    let inputs = landing.inputs.clone();
    for slot in &landing.slots {
        let lies_inside =
            inputs.start <= slot.view.offset && slot.view.offset + slot.view.span_bytes() <= inputs.end;
        assert_eq!(lies_inside, slot.class == Class::Input, "{}", slot.path);
    }
    assert_eq!(landing.landings, [inputs.end, inputs.end + inputs.len()]);
    assert_eq!(landing.persistent_bytes, inputs.end + 2 * inputs.len());
    assert_eq!(landing.arena_bytes, in_place.arena_bytes + 2 * inputs.len());
    assert_eq!(landing.categories().values().sum::<usize>(), landing.arena_bytes);
    assert!(in_place.landings.is_empty());
}

/// Tables of learned values are embeddings: two layers read each, and Muon leaves them to AdamW.
#[test]
fn value_tables_belong_to_no_layer() {
    let graph = build(&DecoderConfig { value_embeddings: 1, tied: false, ..small() }, LOSS);
    let tables: Vec<_> = graph.slots.iter().filter(|slot| slot.path.starts_with("value_embed")).collect();
    assert_eq!(tables.len(), 1);
    for table in tables {
        let rule = optimizers::Name::Muon.of(&table.path, table.ty.rank());
        assert_eq!(rule, optimizers::Name::AdamW, "{}", table.path);
    }
}
