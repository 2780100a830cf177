//! Training on several ranks, run launch by launch with the oracle on one arena per rank, against the unmodified graph over all
//! rows and AdamW written as formulas.

use std::collections::HashMap;
use std::panic::catch_unwind;

use flatout_ir::interpreter::Interpreter;
use flatout_ir::optimizers::Name;
use flatout_ir::passes::differentiate::{LOSS_SUM, WEIGHT_SUM, differentiate, gradient_path};
use flatout_ir::passes::lanes::{lanes_a_rank, lanes_of, roles_after};
use flatout_ir::passes::totals::{STOP, STOP_FLAGS, stop_path};
use flatout_ir::passes::{adapter, input_path, update};
use flatout_ir::target::paper;
use flatout_ir::verify::queues;
use flatout_ir::{
    Adapter, Class, Graph, Init, Mesh, Moments, OpKind, Options, Plan, PlanSet, Precision, Program, Role,
    Shard, TensorRange, Update, compile, oracle, random,
};
use flatout_models::config::DecoderConfig;
use flatout_models::decoder::build;
use flatout_models::form::{Form, LossForm};

use crate::small;

const UPDATES: usize = 2;
const LR: f64 = 0.02;

fn config() -> DecoderConfig {
    DecoderConfig { dropout: 0.1, ..small::decoder() }
}

fn graph(c: &DecoderConfig, rows: usize) -> Graph {
    build(c, Form::Loss(LossForm { dropout: c.dropout > 0.0, ..LossForm::rows(rows, c.context) }))
}

/// The values of an input for the tokens of one row of an update.
fn input(c: &DecoderConfig, name: &str, update: usize, row: usize) -> Vec<f64> {
    let at = |t: usize| (update * 31 + row) * c.context + t;
    let of_token = |t: usize| -> Vec<f64> {
        match name {
            "tokens" => vec![((at(t) * 7 + 3) % 13) as f64],
            "targets" => vec![if at(t) % 4 == 1 { -1.0 } else { ((at(t) * 5 + 2) % 13) as f64 }],
            "weights" => vec![if at(t) % 4 == 1 { 0.0 } else { 1.0 + 0.25 * (at(t) % 3) as f64 }],
            "positions" => vec![t as f64],
            "rows" => vec![row as f64, t as f64],
            _ => unreachable!("an input `{name}`"),
        }
    };
    (0..c.context).flat_map(of_token).collect()
}

/// All inputs of some rows of an update.
fn inputs(c: &DecoderConfig, g: &Graph, update: usize, rows: &[usize]) -> Vec<(String, Vec<f64>)> {
    let of_slot = |path: &str| match path {
        "rng" => vec![11.0, 0.0, update as f64],
        name => rows.iter().flat_map(|row| input(c, name, update, *row)).collect(),
    };
    let slots = g.slots.iter().filter(|slot| slot.class == Class::Input);
    slots.map(|slot| (slot.path.clone(), of_slot(&slot.path))).collect()
}

fn weights(g: &Graph) -> HashMap<String, Vec<f64>> {
    let slots = g.slots.iter().enumerate().filter(|(_, slot)| slot.class == Class::Weight);
    let drawn = |(i, slot): (usize, &flatout_ir::Slot)| {
        let draw = |k: usize| random::normal(5, i as u64, k as u64);
        let value = |k: usize| match slot.init {
            Init::Normal { std } => draw(k) * std,
            _ => 1.0 + 0.2 * draw(k),
        };
        (slot.path.clone(), (0..slot.ty.elements()).map(|k| value(k) as f64).collect())
    };
    slots.map(drawn).collect()
}

/// The tensors of plans besides the model's weights.
fn adapters(plans: &PlanSet) -> HashMap<String, Vec<f64>> {
    let beside = plans.held(0).into_iter().filter(|piece| piece.class == Class::Weight);
    let beside = beside.filter(|piece| piece.path.starts_with(adapter::SCOPE)).enumerate();
    let drawn = |(i, piece): (usize, TensorRange)| {
        let draw = |k: usize| 0.1 * random::normal(6, i as u64, k as u64) as f64;
        let around = if piece.ty.rank() == 1 { 1.0 } else { 0.0 };
        (piece.path, (0..piece.ty.elements()).map(|k| around + draw(k)).collect())
    };
    beside.map(drawn).collect()
}

/// The final state of training, and loss and norm of every update.
#[derive(Debug, PartialEq)]
struct Trained {
    told: Vec<[f64; 2]>,
    weights: HashMap<String, Vec<f64>>,
}

/// The reference without passes: gradients of all rows at once by the oracle, then the formula.
fn plain(c: &DecoderConfig, rows: usize, how: &Update) -> Trained {
    let g = graph(c, rows);
    let all: Vec<usize> = (0..rows).collect();
    let gradients = differentiate(&g).graph;
    let mut weights = weights(&g);
    let zeros = |of: &HashMap<String, Vec<f64>>| -> HashMap<String, Vec<f64>> {
        of.iter().map(|(path, x)| (path.clone(), vec![0.0; x.len()])).collect()
    };
    let (mut m, mut v, mut told) = (zeros(&weights), zeros(&weights), vec![]);
    for update in 0..UPDATES {
        let mut values = weights.clone();
        values.extend(inputs(c, &g, update, &all));
        let sums = oracle::run(&gradients, &values).writes;
        let weight = sums[WEIGHT_SUM][0];
        let squares = |path: &String| sums[&gradient_path(path)].iter().map(|x| x * x).sum::<f64>();
        let norm = weights.keys().map(squares).sum::<f64>().sqrt() / weight;
        told.push([sums[LOSS_SUM][0] / weight, norm]);
        let scale = (how.clip as f64 / norm).min(1.0) / weight;
        let (b1, b2, t) = (how.beta1 as f64, how.beta2 as f64, (update + 1) as i32);
        for (path, w) in &mut weights {
            let axes = g.slot(g.find_slot(path).expect("a weight")).ty.rank();
            let decay = how.rule(path, axes).weight_decay as f64;
            let (m, v) = (m.get_mut(path).expect("a moment"), v.get_mut(path).expect("a moment"));
            for (i, sum) in sums[&gradient_path(path)].iter().enumerate() {
                let g = sum * scale;
                m[i] = b1 * m[i] + (1.0 - b1) * g;
                v[i] = b2 * v[i] + (1.0 - b2) * g * g;
                let step = m[i] / (1.0 - b1.powi(t)) / ((v[i] / (1.0 - b2.powi(t))).sqrt() + how.eps as f64);
                w[i] -= LR * (step + decay * w[i]);
            }
        }
    }
    Trained { told, weights }
}

/// Trains with compiled plans, one row per micro-batch, each rank with the rows of its lanes. Exchanges at their place in the
/// plan give the same bits as exchanges at the last moment that a join allows.
fn on_ranks(c: &DecoderConfig, rows: usize, options: &Options) -> Trained {
    let program = Program { role: Role::GRAD, graph: graph(c, 1) };
    let plans = compile(&[program], &paper(), options).expect("plans");
    let eager = interpreted(c, rows, options, Interpreter::new(plans.clone()));
    if options.mesh.ranks() > 1 {
        let late = interpreted(c, rows, options, Interpreter::late(plans));
        assert_eq!(late, eager, "{}, {} buckets: late exchanges", options.mesh, options.buckets);
    }
    eager
}

fn interpreted(c: &DecoderConfig, rows: usize, options: &Options, mut run: Interpreter) -> Trained {
    let g = graph(c, 1);
    let beside = adapters(&run.plans);
    let names: Vec<String> = weights(&g).into_keys().chain(beside.keys().cloned()).collect();
    let is_share = |path: &str| {
        let of = path.strip_prefix("bf16.").unwrap_or(path);
        run.plans.sharded.iter().any(|tensor| of.starts_with(&tensor.slot))
    };
    let kept = run.plans.slots.iter().filter(|slot| slot.class.is_saved() || slot.class == Class::Derived);
    let kept: Vec<String> = kept.map(|slot| slot.path.clone()).filter(|path| !is_share(path)).collect();
    weights(&g).iter().chain(&beside).for_each(|(path, values)| run.set_tensor(path, values));
    if run.plans.plan(Role::Derive).is_some() {
        run.run(Role::Derive);
    }
    let (ranks, each) = (options.mesh.ranks(), lanes_a_rank(options));
    // Without separate lanes, each rank is one lane.
    let lanes = each * ranks;
    let rows_a_lane = rows / lanes;
    assert_eq!(rows_a_lane * lanes, rows);
    let mut told = vec![];
    for update in 0..UPDATES {
        for lane in 0..each {
            for turn in 0..rows_a_lane {
                for rank in 0..ranks {
                    let own = lanes_of(rank, options)[lane];
                    for (name, values) in inputs(c, &g, update, &[turn * lanes + own]) {
                        run.set_at(rank, &input_path(Role::GRAD, &name), &values);
                    }
                }
                run.run(Role::GRAD);
            }
            roles_after(lane, each).into_iter().for_each(|role| run.run(role));
        }
        run.set(&input_path(Role::Apply, update::LR), &[LR]);
        if ranks > 1 {
            // The last rank is asked to stop by the second flag.
            let mut flags = vec![0.0; STOP_FLAGS.len()];
            run.set(&input_path(Role::Apply, STOP), &flags);
            flags[1] = 1.0;
            run.set_at(ranks - 1, &input_path(Role::Apply, STOP), &flags);
        }
        run.run(Role::Apply);
        let told_by =
            |rank: usize| ["loss", "grad_norm"].map(|name| run.result_at(rank, Role::Apply, name)[0]);
        told.push(told_by(0));
        for rank in 1..ranks {
            assert_eq!(told_by(rank), told_by(0), "rank {rank}");
            let stops = STOP_FLAGS.map(|flag| run.result_at(rank, Role::Apply, &stop_path(flag))[0]);
            assert_eq!(stops, [0.0, 1.0, 0.0, 0.0, 0.0]);
        }
        for rank in 0..ranks {
            let sums = ["region.0.grads.shard", "region.0.grads"];
            let sums =
                sums.into_iter().find(|path| run.plans.slot(path).is_some()).expect("sums of gradients");
            assert!(run.get_at(rank, sums).iter().all(|x| *x == 0.0), "sums are cleared");
        }
    }
    for (rank, path) in (1..ranks).flat_map(|rank| kept.iter().map(move |path| (rank, path))) {
        assert_eq!(run.get_at(rank, path), run.get(path), "replicas do not drift: `{path}` of rank {rank}");
    }
    let weights = names.into_iter().map(|path| (path.clone(), run.tensor(&path))).collect();
    Trained { told, weights }
}

fn close(got: &Trained, want: &Trained, bound: f64, what: &str) {
    for (got, want) in got.told.iter().zip(&want.told) {
        for (got, want) in got.iter().zip(want) {
            assert!((got / want - 1.0).abs() < bound, "{what}: {got}, wanted {want}");
        }
    }
    let size = |x: f64| x * x;
    let (mut off, mut all) = (0.0, 0.0);
    for (path, want) in &want.weights {
        off += got.weights[path].iter().zip(want).map(|(g, w)| size(g - w)).sum::<f64>();
        all += want.iter().map(|w| size(*w)).sum::<f64>();
    }
    let off: f64 = (off / all).sqrt();
    assert!(off < bound, "{what}: weights are off by {off:.1e}");
}

fn options(mesh: Mesh, lanes: usize) -> Options {
    Options { mesh, lanes, ..Options::default() }
}

#[test]
fn ranks_compute_the_update_of_all_rows() {
    let (c, how) = (&config(), Update::default());
    for (ranks, rows) in [(2, 4), (3, 6), (4, 4), (8, 8)] {
        let want = plain(c, rows, &how);
        let mesh = Mesh::new(1, ranks);
        for options in [options(mesh, ranks), options(mesh, 1)] {
            close(
                &on_ranks(c, rows, &options),
                &want,
                1e-5,
                &format!("{ranks} ranks, {} lanes", options.lanes),
            );
        }
        let apart = Options { fuse_optimizer: false, fuse_elementwise: false, ..options(mesh, ranks) };
        close(&on_ranks(c, rows, &apart), &want, 1e-5, &format!("{ranks} ranks, parameter by parameter"));
    }
    let bf16 = Options { precision: Precision::BF16, ..options(Mesh::new(1, 2), 2) };
    close(&on_ranks(c, 4, &bf16), &plain(c, 4, &how), 5e-2, "2 ranks in bf16");
}

/// Magnitudes of 8-bit tensors are maxima over all ranks, so every rank computes the same scales, and the update equals that of
/// all rows within the rounding of 8 bits.
#[test]
fn ranks_share_the_scales_of_8_bit_floats() {
    let c = &DecoderConfig {
        width: 32,
        head_size: Some(16),
        ffn: 48,
        context: 16,
        init_std: 0.1,
        ..small::decoder()
    };
    let want = plain(c, 2, &Update::default());
    let of = |mesh: Mesh, lanes: usize| {
        on_ranks(c, 2, &Options { precision: Precision::FP8, ..options(mesh, lanes) })
    };
    let (one, two) = (of(Mesh::ONE, 2), of(Mesh::new(1, 2), 2));
    close(&two, &want, 0.1, "2 ranks in fp8");
    assert_eq!(one, two, "two lanes on one rank");
}

/// The same bits for every number of ranks that divides the lanes, and for every mesh of them.
#[test]
fn bits_do_not_depend_on_the_number_of_ranks() {
    let c = &config();
    let one = on_ranks(c, 8, &options(Mesh::ONE, 8));
    close(&one, &plain(c, 8, &Update::default()), 1e-5, "eight lanes on one rank");
    for mesh in [Mesh::new(1, 2), Mesh::new(1, 4), Mesh::new(2, 2), Mesh::new(1, 8), Mesh::new(2, 4)] {
        assert_eq!(on_ranks(c, 8, &options(mesh, 8)), one, "{mesh}");
    }
}

/// A decoder large enough for its matrices to be sharded, with three units: embedding and two layers.
fn dividable() -> DecoderConfig {
    DecoderConfig { width: 32, head_size: Some(8), ffn: 80, context: 4, dropout: 0.1, ..small::decoder() }
}

fn shared(mesh: Mesh, lanes: usize, buckets: usize) -> Options {
    Options { shard: Shard::Optimizer, buckets, ..options(mesh, lanes) }
}

/// The levels of sharding.
const LEVELS: [Shard; 3] = [Shard::Optimizer, Shard::Gradients, Shard::Parameters];

fn plans_of(c: &DecoderConfig, options: &Options) -> PlanSet {
    let eval = LossForm { dropout: false, ..LossForm::rows(1, c.context) };
    let programs = [(Role::GRAD, graph(c, 1)), (Role::Eval, build(c, Form::Loss(eval)))];
    compile(&programs.map(|(role, graph)| Program { role, graph }), &paper(), options).expect("plans")
}

/// Sharded ranks compute the update of all rows, at every level, with any number of buckets and on any mesh; with one
/// micro-batch per rank, all levels have the same bits.
#[test]
fn sharded_ranks_compute_the_update_of_all_rows() {
    let (c, how) = (&dividable(), Update::default());
    for (mesh, rows) in [
        (Mesh::new(1, 2), 4),
        (Mesh::new(1, 3), 3),
        (Mesh::new(1, 4), 4),
        (Mesh::new(2, 2), 4),
        (Mesh::new(1, 8), 8),
    ] {
        let want = plain(c, rows, &how);
        let ranks = mesh.ranks();
        let whole = on_ranks(c, rows, &options(mesh, ranks));
        let [optimizer, gradients, parameters] = LEVELS;
        let mut cases = vec![
            (optimizer, 1),
            (optimizer, 2),
            (optimizer, usize::MAX),
            (gradients, usize::MAX),
            (parameters, usize::MAX),
        ];
        // Layers that are gathered together.
        cases.extend((ranks == 2).then_some((parameters, 2)));
        for (shard, buckets) in cases {
            let what = format!("{mesh}, {}, {buckets} buckets", shard.name());
            let got = on_ranks(c, rows, &Options { shard, ..shared(mesh, ranks, buckets) });
            close(&got, &want, 1e-5, &what);
            if shard == Shard::Optimizer || rows == ranks {
                assert_eq!(got, whole, "{what}: the bits of ranks that have everything");
            }
        }
        close(&on_ranks(c, rows, &shared(mesh, 1, 2)), &want, 1e-5, &format!("{mesh}, one lane"));
    }
    let two = Mesh::new(1, 2);
    for change in [
        |o: Options| Options { precision: Precision::BF16, ..o },
        |o: Options| Options { update: Update { moments: Moments::Int8, ..Update::default() }, ..o },
        |o: Options| Options { fuse_elementwise: false, fuse_loss: false, flash_attention: false, ..o },
    ] {
        let whole = on_ranks(c, 2, &change(options(two, 2)));
        for shard in LEVELS {
            let got = on_ranks(c, 2, &change(Options { shard, ..shared(two, 2, 2) }));
            assert_eq!(got, whole, "{}", shard.name());
            close(&got, &plain(c, 2, &how), 5e-2, "rounded");
        }
    }
}

/// Muon's matrices are divided by layer: sharded ranks have the same bits as one rank, whether there are as many layers as
/// ranks, more, or fewer, and whether weights are merged or not.
#[test]
fn ranks_have_whole_layers_of_matrices() {
    let c = &DecoderConfig { layers: 3, ..dividable() };
    let two = || vec![Mesh::new(1, 2)];
    type Change = fn(Options) -> Options;
    let cases: [(Change, Vec<Mesh>); 3] = [
        (|o| o, vec![Mesh::new(1, 4), Mesh::new(2, 2)]),
        (|o| Options { precision: Precision::BF16, ..o }, two()),
        (|o| Options { fuse_qkv: false, fuse_gate_up: false, ..o }, two()),
    ];
    for (change, meshes) in cases {
        let update = || Update { name: Name::Muon, average: Some(0.9), ..Update::default() };
        let muon = |o: Options| change(Options { update: update(), ..o });
        let one = on_ranks(c, 4, &muon(options(Mesh::ONE, 4)));
        for mesh in meshes {
            assert!(on_ranks(c, 4, &muon(options(mesh, 4))) == one, "{mesh}: bits of one rank");
            for (shard, buckets) in LEVELS.into_iter().zip([1, usize::MAX, usize::MAX]) {
                let shared = muon(Options { shard, ..shared(mesh, 4, buckets) });
                let what = format!("{mesh}, {}, {buckets} buckets", shard.name());
                let momentum = "optimizer.momentum.layers.1.attn.wk";
                assert!(plans_of(c, &shared).sharded.iter().any(|tensor| tensor.path == momentum), "{what}");
                assert!(on_ranks(c, 4, &shared) == one, "{what}");
            }
        }
    }
}

/// A table of learned values that two layers read is sharded like others: the sum of both gradients has the bits of one rank.
#[test]
fn tables_shared_by_two_layers_are_divided() {
    // With fewer tokens the table would be too small to be sharded.
    let c = &DecoderConfig { value_embeddings: 1, tied: false, vocab: 2048, ..dividable() };
    let two = Mesh::new(1, 2);
    for name in [Name::AdamW, Name::Muon] {
        let with = |o: Options| Options { update: Update { name, ..Update::default() }, ..o };
        let one = on_ranks(c, 4, &with(options(Mesh::ONE, 4)));
        assert!(on_ranks(c, 4, &with(options(two, 4))) == one, "{name:?}: bits of one rank");
        for (shard, buckets) in LEVELS.into_iter().zip([1, usize::MAX, usize::MAX]) {
            let shared = with(Options { shard, ..shared(two, 4, buckets) });
            let is_table = |path: &str| path == "value_embed_0.weight";
            assert!(
                plans_of(c, &shared).sharded.iter().any(|tensor| is_table(&tensor.path)),
                "{}",
                shard.name()
            );
            assert!(on_ranks(c, 4, &shared) == one, "{name:?}, {}", shard.name());
        }
    }
}

/// Where ranks add their gradients in every micro-batch, they compute neighbouring lanes at the same time: the same bits as one
/// rank, for every number of ranks and every mesh.
#[test]
fn ranks_that_sum_every_batch_have_the_bits_of_one_rank() {
    let c = &dividable();
    let one = on_ranks(c, 8, &options(Mesh::ONE, 8));
    for mesh in [Mesh::new(1, 2), Mesh::new(1, 4), Mesh::new(2, 2), Mesh::new(1, 8), Mesh::new(4, 2)] {
        for shard in [Shard::Gradients, Shard::Parameters] {
            let shared = Options { shard, ..shared(mesh, 8, usize::MAX) };
            assert!(on_ranks(c, 8, &shared) == one, "{mesh}, {}", shard.name());
        }
    }
}

/// 8-bit copies of weights are quantised from gathered weights.
#[test]
fn sharded_ranks_quantise_gathered_weights() {
    let c = &DecoderConfig {
        width: 32,
        head_size: Some(16),
        ffn: 96,
        context: 16,
        init_std: 0.1,
        ..small::decoder()
    };
    let fp8 = |o: Options| Options { precision: Precision::FP8, ..o };
    let two = Mesh::new(1, 2);
    let whole = on_ranks(c, 2, &fp8(options(two, 2)));
    for (shard, buckets) in LEVELS.into_iter().flat_map(|shard| [1, usize::MAX].map(|b| (shard, b))) {
        let options = Options { shard, ..fp8(shared(two, 2, buckets)) };
        assert!(!plans_of(c, &options).sharded.is_empty());
        assert_eq!(on_ranks(c, 2, &options), whole, "{}, {buckets} buckets", shard.name());
    }
}

/// Each rank has its share of a frozen base, which layers gather like trained weights; plans compute norms of adapted rows from
/// gathered weights.
#[test]
fn a_frozen_base_is_divided_beside_adapters() {
    let wide = DecoderConfig {
        width: 32,
        head_size: Some(16),
        ffn: 160,
        context: 16,
        init_std: 0.1,
        ..small::decoder()
    };
    let narrow = DecoderConfig { ffn: 160, ..dividable() };
    let cases = [
        (narrow.clone(), Precision::F32, false),
        (narrow.clone(), Precision::BF16, true),
        (narrow, Precision::F32, true),
        (wide, Precision::FP8, false),
    ];
    for (c, precision, dora) in &cases {
        let g = graph(c, 1);
        let all = || g.slots.iter().filter(|slot| slot.class == Class::Weight);
        let adapted = all().filter(|slot| slot.ty.rank() == 2 && slot.path.starts_with("layers."));
        let beside = |weight: String| {
            let (name, rank, scale, dropout) = ("own".to_string(), 2, 0.5, 0.0);
            Adapter { name, weight, rank, scale, dropout, dora: *dora }
        };
        let mut adapters: Vec<Adapter> = adapted.map(|slot| beside(slot.path.clone())).collect();
        // The table is also the head.
        let ends = ["embed.weight", "head.weight"].map(String::from);
        adapters.extend(ends.into_iter().filter(|_| !dora).map(beside));
        let freeze: std::collections::BTreeSet<String> = all().map(|slot| slot.path.clone()).collect();
        let (update, precision) = (Update { average: Some(0.9), ..Update::default() }, *precision);
        let change = |o: Options| {
            let (adapters, freeze, update) = (adapters.clone(), freeze.clone(), update.clone());
            Options { adapters, freeze, update, precision, ..o }
        };
        let two = Mesh::new(1, 2);
        let cut = change(Options { shard: Shard::Parameters, ..shared(two, 2, usize::MAX) });
        let what = format!("{precision:?}, rows with lengths: {dora}");
        assert_eq!(on_ranks(c, 2, &cut), on_ranks(c, 2, &change(options(two, 2))), "{what}");
        let plans = plans_of(c, &cut);
        let is_cut = |path: &str| plans.sharded.iter().any(|tensor| tensor.path == path);
        let slots = adapters.iter().filter_map(|beside| adapter::slot_beside(&g, &beside.weight));
        assert!(slots.into_iter().all(|slot| is_cut(&slot.path)), "{what}");
    }
}

/// Bytes per trained parameter and rank, by category.
#[test]
fn shards_divide_the_memory() {
    let c =
        &DecoderConfig { width: 512, head_size: Some(64), ffn: 1024, layers: 3, vocab: 512, ..dividable() };
    let parameters: usize =
        graph(c, 1).slots.iter().filter(|s| s.class == Class::Weight).map(|s| s.ty.elements()).sum();
    let bytes = |o: &Options| {
        let plans = plans_of(c, o);
        let of = |category: &str| plans.categories()[category] as f64 / parameters as f64;
        ["parameters", "gradients", "optimizer", "average"].map(of)
    };
    let average = Update { average: Some(0.9), ..Update::default() };
    let in_step = |mesh: Mesh, shard: Shard| Options { shard, ..shared(mesh, mesh.ranks(), usize::MAX) };
    for (precision, copy) in [(Precision::F32, 4.0), (Precision::BF16, 2.0)] {
        for ranks in [2, 4, 8] {
            let n = ranks as f64;
            let change = |o: Options| Options { precision, update: average.clone(), ..o };
            let mesh = Mesh::new(1, ranks);
            let whole = if precision == Precision::F32 { 4.0 } else { 6.0 };
            for (got, want) in [
                (bytes(&change(options(mesh, ranks))), [whole, 4.0, 8.0, 4.0]),
                (bytes(&change(shared(mesh, ranks, 1))), [4.0 / n + copy, 4.0, 8.0 / n, 4.0 / n]),
                (
                    bytes(&change(in_step(mesh, Shard::Gradients))),
                    [4.0 / n + copy, 4.0 / n, 8.0 / n, 4.0 / n],
                ),
                (bytes(&change(in_step(mesh, Shard::Parameters))), [whole / n, 4.0 / n, 8.0 / n, 4.0 / n]),
            ] {
                for (got, want) in got.iter().zip(want) {
                    // Vectors and padding.
                    assert!((got / want - 1.0).abs() < 0.1, "{ranks} ranks: {got} bytes, wanted {want}");
                }
            }
        }
    }
}

/// A decoder in which one layer is small compared with all of them.
fn eight_layers(tied: bool) -> DecoderConfig {
    DecoderConfig { width: 256, head_size: Some(64), ffn: 512, layers: 8, vocab: 512, tied, ..dividable() }
}

/// Gradients that are added in every micro-batch take the memory of few layers, and are computed in the buffers that they are
/// sent from.
#[test]
fn scattered_gradients_are_computed_in_the_send_buffer() {
    for tied in [false, true] {
        let c = &eight_layers(tied);
        for precision in [Precision::F32, Precision::BF16] {
            let mesh = Mesh::new(1, 4);
            let of = |shard: Shard| plans_of(c, &Options { shard, precision, ..shared(mesh, 4, usize::MAX) });
            let (apart, in_step) = (of(Shard::Optimizer), of(Shard::Gradients));
            let grad = in_step.plan(Role::GRAD).expect("gradients");
            let sent = grad.launches.iter().filter(|launch| launch.op.kind() == OpKind::ReduceScatter);
            let sizes: Vec<usize> = sent.map(|launch| launch.ins[0].span_bytes()).collect();
            let largest = sizes.iter().max().expect("buckets");
            let bytes = |plans: &PlanSet| plans.categories()["activations"];
            let more = bytes(&in_step).saturating_sub(bytes(&apart));
            let copies = grad
                .launches
                .iter()
                .filter(|l| l.path.contains(".grads.shard") && l.op.kind() == OpKind::Reshape);
            let copied: usize =
                copies.map(|launch| launch.outs[0].as_ref().expect("a copy").span_bytes()).sum();
            assert!(more <= 2 * largest, "{more} bytes for buckets of {largest}");
            assert_eq!(copied, 0, "no gradient is made elsewhere");
        }
    }
}

/// Layers' weights are gathered for the forward pass and again for the backward pass, each while the previous layer runs, and a
/// plan holds the gathered weights of at most two layers.
#[test]
fn weight_gathers_overlap_the_previous_layer() {
    for (precision, element) in [(Precision::F32, 4), (Precision::BF16, 2)] {
        let c = &eight_layers(true);
        let mesh = Mesh::new(1, 4);
        let of = |keep_gathered: bool, shard: Shard| {
            plans_of(c, &Options { shard, precision, keep_gathered, ..shared(mesh, 4, usize::MAX) })
        };
        let plans = of(false, Shard::Parameters);
        let gathers = |plans: &PlanSet, role: Role| -> Vec<(usize, usize, usize)> {
            let plan = plans.plan(role).unwrap_or_else(|| panic!("a plan {role}"));
            let is_gather = |at: usize| plan.launches[at].op.kind() == OpKind::AllGather;
            let exchanges = plan.exchanges().into_iter().filter(|(at, _)| is_gather(*at));
            exchanges
                .map(|(at, until)| (at, until, plan.launches[at].outs[0].as_ref().expect("all").span_bytes()))
                .collect()
        };
        // Eight layers each way, and the embedding twice: as a head it is read by one pass that also computes its gradient.
        assert_eq!(gathers(&plans, Role::GRAD).len(), 2 * c.layers + 2);
        assert_eq!(gathers(&plans, Role::Eval).len(), c.layers + 2);
        assert_eq!(gathers(&plans, Role::Apply).len(), 1, "chunks of the norm");
        assert_eq!(gathers(&of(true, Shard::Parameters), Role::GRAD).len(), c.layers + 1);
        let grad = plans.plan(Role::GRAD).expect("gradients");
        let is_product = |at: usize| grad.launches[at].op.kind() == OpKind::Product;
        let beside =
            gathers(&plans, Role::GRAD).into_iter().filter(|(at, until, _)| (*at..*until).any(is_product));
        assert!(beside.count() >= 2 * c.layers - 2, "each but the first and those around the head");
        let layer = gathers(&plans, Role::GRAD).iter().map(|(.., bytes)| *bytes).max().expect("a layer");
        let matrices: usize = graph(c, 1)
            .slots
            .iter()
            .filter(|slot| {
                slot.class == Class::Weight && slot.path.starts_with("layers.3.") && slot.ty.rank() == 2
            })
            .map(|slot| slot.ty.elements())
            .sum();
        assert!(layer >= element * matrices && layer < element * matrices + element * 4 * 4096);
        // Compared with gradients exchanged in every micro-batch, a plan has two more layers in memory.
        let bytes = |plans: &PlanSet| plans.transient_bytes;
        let [gathered, whole] =
            [of(false, Shard::Parameters), of(false, Shard::Gradients)].map(|p| bytes(&p));
        assert!(
            gathered <= whole + 2 * layer + 4096,
            "{gathered} bytes, and {whole} without gathers of {layer}"
        );
    }
}

/// A rank that exchanges with itself computes the update of one that does not, to the bit; without that option there is no
/// exchange.
#[test]
fn a_rank_exchanging_with_itself_has_the_same_bits() {
    let c = &config();
    for precision in [Precision::F32, Precision::BF16] {
        let plain = Options { precision, ..options(Mesh::ONE, 1) };
        let alone = Options { exchange_alone: true, ..plain.clone() };
        let exchanges = |o: &Options| {
            let plans = plans_of(c, o);
            let launches = plans.plans.iter().flat_map(|plan| &plan.launches);
            launches.filter(|launch| launch.op.kind() == OpKind::AllReduce).count()
        };
        assert_eq!(exchanges(&plain), 0);
        assert!(exchanges(&alone) > 1);
        assert_eq!(on_ranks(c, 4, &alone), on_ranks(c, 4, &plain));
    }
}

/// The exchanges of each plan; without shards there are none of them.
#[test]
fn shards_are_exchanged_by_updates_and_gathered_by_readers() {
    let c = &dividable();
    let average = |o: Options| Options { update: Update { average: Some(0.9), ..Update::default() }, ..o };
    let mesh = Mesh::new(1, 4);
    for buckets in [1, 2, usize::MAX] {
        let plans = plans_of(c, &average(shared(mesh, 4, buckets)));
        let count = |role: Role, kind: OpKind| {
            let plan = plans.plan(role).unwrap_or_else(|| panic!("a plan {role}"));
            plan.launches.iter().filter(|launch| launch.op.kind() == kind).count()
        };
        let cut = buckets.min(3);
        let exchanges = [OpKind::ReduceScatter, OpKind::AllGather, OpKind::AllReduce];
        // Chunks of the norm are gathered too; small values and the region of vectors are added on every rank.
        assert_eq!(exchanges.map(|kind| count(Role::Apply, kind)), [cut, cut + 1, 2]);
        for role in [Role::Derive, Role::Average] {
            assert_eq!(exchanges.map(|kind| count(role, kind)), [0, cut, 0]);
        }
        for role in [Role::GRAD, Role::Eval] {
            assert_eq!(exchanges.map(|kind| count(role, kind)), [0; 3]);
        }
        assert_eq!(count(Role::Apply, OpKind::AdamW), cut + 1);
    }
    for (mesh, replicas) in [(mesh, 0), (Mesh::new(2, 2), 3)] {
        let plans = plans_of(c, &average(Options { shard: Shard::Gradients, ..shared(mesh, 4, usize::MAX) }));
        let count = |role: Role| {
            let plan = plans.plan(role).unwrap_or_else(|| panic!("a plan {role}"));
            [OpKind::ReduceScatter, OpKind::AllGather, OpKind::AllReduce]
                .map(|kind| plan.launches.iter().filter(|launch| launch.op.kind() == kind).count())
        };
        assert_eq!(count(Role::GRAD), [3, 0, 0]);
        // Groups add their shares of buckets; small values and vectors are added over both axes.
        assert_eq!(count(Role::Apply), [0, 4, if replicas == 0 { 2 } else { 4 + replicas }]);
        let grad = plans.plan(Role::GRAD).expect("gradients");
        let is_product = |at: usize| grad.launches[at].op.kind() == OpKind::Product;
        let mut exchanges = grad.exchanges().into_iter();
        assert!(exchanges.any(|(at, until)| (at..until).any(is_product)), "beside the layer before");
    }
    let none = plans_of(c, &average(options(mesh, 4)));
    assert!(none.sharded.is_empty() && none.plan(Role::Average).is_none());
    let one = |o: Options| plans_of(c, &average(o)).to_string();
    assert_eq!(one(shared(Mesh::ONE, 1, 1)), one(options(Mesh::ONE, 1)));
    let tiny = plans_of(&config(), &shared(mesh, 4, 1));
    assert!(tiny.sharded.is_empty(), "regions below 64 KiB stay whole");
    let apart = Options { fuse_optimizer: false, ..shared(mesh, 4, 1) };
    let program = Program { role: Role::GRAD, graph: graph(c, 1) };
    let refused = compile(&[program], &paper(), &apart).expect_err("parameter by parameter").to_string();
    assert!(refused.contains("`shard=optimizer` cannot run with `fuse.optimizer=off`"), "{refused}");
}

/// Evaluation reads gathered averages, and training continues with the weights that `derive` restores.
#[test]
fn averages_are_gathered_for_evaluation_and_weights_restored() {
    let c = &dividable();
    for precision in [Precision::F32, Precision::BF16] {
        let how = Update { average: Some(0.9), ..Update::default() };
        let two = Mesh::new(1, 2);
        let gathered = Options { shard: Shard::Parameters, ..shared(two, 2, usize::MAX) };
        let told = [options(two, 2), shared(two, 2, 2), gathered].map(|o| {
            let o = Options { precision, update: how.clone(), ..o };
            let mut run = Interpreter::new(plans_of(c, &o));
            let g = graph(c, 1);
            for (path, values) in &weights(&g) {
                run.set_tensor(path, values);
                let other: Vec<f64> = values.iter().map(|x| 0.5 * x).collect();
                run.set_tensor(&format!("average.{path}"), &other);
            }
            let derives = run.plans.plan(Role::Derive).is_some();
            if derives {
                run.run(Role::Derive);
            }
            for role in [Role::GRAD, Role::Eval] {
                for (name, values) in inputs(c, &g, 0, &[0]) {
                    let path = input_path(role, &name);
                    if run.plans.slot(&path).is_some() {
                        run.set(&path, &values);
                    }
                }
            }
            let gathers = run.plans.plan(Role::Average).is_some();
            if gathers {
                run.run(Role::Average);
            }
            run.run(Role::Eval);
            let loss = run.result(Role::Eval, "loss");
            if gathers {
                run.run(Role::Derive);
            }
            run.run(Role::GRAD);
            let gradients =
                |path: &str| -> Vec<Vec<f64>> { [0, 1].map(|rank| run.get_at(rank, path)).into() };
            // Both ranks have the same row, so their sum is twice that of one.
            let gradients = match run.plans.slot("region.0.grads.shard") {
                Some(_) => gradients("region.0.grads.shard").concat().iter().map(|x| 0.5 * x).collect(),
                None => gradients("region.0.grads").swap_remove(0),
            };
            (loss, gradients.iter().map(|x| x.abs()).sum::<f64>())
        });
        for of in &told[1..] {
            assert_eq!(told[0].0, of.0, "{precision:?}: the loss of averages");
            assert!((told[0].1 / of.1 - 1.0).abs() < 1e-9, "{precision:?}: the gradients of weights");
        }
    }
}

/// Joins are needed: without one, the plan check fails and late exchanges give other results.
#[test]
fn a_missing_join_is_detected() {
    let c = &dividable();
    let options = shared(Mesh::new(1, 2), 2, 2);
    let program = Program { role: Role::GRAD, graph: graph(c, 1) };
    let plans = compile(&[program], &paper(), &options).expect("plans");
    let want = interpreted(c, 2, &options, Interpreter::new(plans.clone()));
    let of_apply = plans.plans.iter().position(|plan| plan.role == Role::Apply).expect("an update");
    let launches = &plans.plans[of_apply].launches;
    let joins: Vec<usize> = (0..launches.len()).filter(|at| launches[*at].joins.is_some()).collect();
    assert!(joins.len() >= 4, "totals, chunks of the norm, updates and clearing wait: {joins:?}");
    for at in joins {
        let mut damaged = plans.clone();
        damaged.plans[of_apply].launches[at].joins = None;
        let why = queues(&damaged.plans[of_apply]).expect_err("a launch that waits for nothing");
        assert!(why.starts_with(&format!("launch {at},")) && why.contains("runs beside"), "{why}");
        let late = catch_unwind(|| interpreted(c, 2, &options, Interpreter::late(damaged)));
        assert!(late.is_err() || late.is_ok_and(|late| late != want), "launch {at} did not need its join");
    }
}

/// Without overlap the next compute launch joins every exchange, with the same bits; with overlap, a bucket is gathered while
/// the next is updated.
#[test]
fn exchanges_overlap_launches_that_do_not_join_them() {
    let c = &dividable();
    for (mesh, rows) in
        [(Mesh::new(1, 2), 2), (Mesh::new(1, 4), 4), (Mesh::new(2, 2), 4), (Mesh::new(1, 8), 8)]
    {
        for options in [shared(mesh, mesh.ranks(), usize::MAX), options(mesh, mesh.ranks())] {
            let apart = Options { overlap: false, ..options.clone() };
            let apply = |o: &Options| plans_of(c, o).plan(Role::Apply).expect("an update").clone();
            let (on, off) = (apply(&options), apply(&apart));
            assert_eq!(off.launches_beside_exchanges(), 0, "{mesh}");
            let order =
                |plan: &Plan| plan.launches.iter().map(|l| (l.path.clone(), l.key)).collect::<Vec<_>>();
            assert_eq!(order(&on), order(&off), "the order is the same");
            if mesh.ranks() == 2 {
                assert_eq!(on_ranks(c, rows, &options), on_ranks(c, rows, &apart), "{mesh}");
            }
            if options.shard == Shard::Optimizer {
                let updates = |at: usize| on.launches[at].op.kind() == OpKind::AdamW;
                let gathers = |at: usize| on.launches[at].op.kind() == OpKind::AllGather;
                let beside = on.exchanges().into_iter().filter(|(at, _)| gathers(*at));
                let hidden = beside.filter(|(at, until)| (*at..*until).any(updates)).count();
                assert!(hidden >= 2, "{mesh}: {hidden} of three buckets are gathered beside an update");
            }
        }
    }
}
