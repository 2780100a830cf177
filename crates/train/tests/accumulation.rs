//! A step gives the same update for any split into micro-batches, and whether documents are packed into rows or have rows of
//! their own: gradients are sums over the step's tokens, divided once by the sum of their weights.

use std::collections::BTreeMap;

use flatout_ir::optimizers::moment_path;
use flatout_ir::passes::differentiate::{LOSS_SUM, WEIGHT_SUM, differentiate, gradient_path};
use flatout_ir::passes::update::LR;
use flatout_ir::passes::{input_path, update};
use flatout_ir::{Class, DType, Init, Options, Program, Role, compile, oracle, random};
use flatout_models::config::DecoderConfig;
use flatout_models::decoder::build;
use flatout_models::form::{Documents, Form, LossForm};
use flatout_models::library::llama::weight_names;
use flatout_runtime::{Session, cpu};
use flatout_train::weights::initial;

use crate::distance::relative;

const ROWS: usize = 8;
const SPLITS: [usize; 3] = [8, 4, 1];

fn model(dropout: f64) -> DecoderConfig {
    DecoderConfig {
        width: 32,
        layers: 2,
        heads: 4,
        kv_heads: Some(2),
        ffn: 48,
        vocab: 29,
        context: 12,
        qk_norm: true,
        init_std: 0.2,
        dropout,
        ..DecoderConfig::default()
    }
}

/// Rows with all inputs of a plan. Segments are (start in the batch, length).
struct Batch {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    weights: Vec<f32>,
    positions: Vec<i32>,
    segments: Vec<(i32, i32)>,
}

/// Rows of unequal weight: some tokens have weight 0, and the weights of rows differ.
fn unequal_rows(c: &DecoderConfig) -> Batch {
    let draw = |stream: u32, i: usize| random::philox([i as u32, stream, 0, 0], [7, 0])[0];
    let token = |stream, i| (draw(stream, i) % c.vocab as u32) as i32;
    let tokens = ROWS * c.context;
    let ignored = |i: usize| draw(2, i) % 5 < (i / c.context) as u32 % 4;
    let weight = |i: usize| 0.25 + (i / c.context) as f32 * 0.5 + (draw(3, i) % 8) as f32 / 8.0;
    Batch {
        tokens: (0..tokens).map(|i| token(0, i)).collect(),
        targets: (0..tokens).map(|i| if ignored(i) { -1 } else { token(1, i) }).collect(),
        weights: (0..tokens).map(|i| if ignored(i) { 0.0 } else { weight(i) }).collect(),
        positions: (0..tokens).map(|i| (i % c.context) as i32).collect(),
        segments: vec![],
    }
}

/// Keys of dropout's random numbers: the row's index in the step and the token's in its row.
fn draw_keys(c: &DecoderConfig, from: usize, rows: usize) -> Vec<i32> {
    (from..from + rows).flat_map(|row| (0..c.context as i32).flat_map(move |t| [row as i32, t])).collect()
}

const RNG: [i32; 3] = [11, 0, 4];

/// Gradients and sums, and after one update weights and moments, by path.
type Tensors = BTreeMap<String, Vec<f32>>;

/// Runs one step of `batch` on the CPU, `rows` rows at a time.
fn step(c: &DecoderConfig, batch: &Batch, rows: usize, documents: Documents) -> (Tensors, Tensors) {
    let graph =
        build(c, Form::Loss(LossForm { documents, dropout: true, ..LossForm::rows(rows, c.context) }));
    let options = Options { rope_positions: Some(c.context), ..Options::default() };
    let plans = compile(&[Program { role: Role::GRAD, graph }], &cpu::target(2), &options).expect("plans");
    let mut session = Session::new(plans, 2).expect("a session");
    initial::write(&mut session, 3).expect("weights");
    let at = |name: &str| input_path(Role::GRAD, name);
    let capacity = rows * c.context;
    for from in (0..batch.tokens.len()).step_by(capacity) {
        let part = from..from + capacity;
        session.write_i32(&at("tokens"), &batch.tokens[part.clone()]).expect("tokens");
        session.write_i32(&at("targets"), &batch.targets[part.clone()]).expect("targets");
        session.write_i32(&at("positions"), &batch.positions[part.clone()]).expect("positions");
        session.write_f32(&at("weights"), &batch.weights[part]).expect("weights");
        if let Documents::Apart { most } = documents {
            let padded = |field: fn(&(i32, i32)) -> i32| -> Vec<i32> {
                batch.segments.iter().map(field).chain(std::iter::repeat(0)).take(most).collect()
            };
            session.write_i32(&at("segment_start"), &padded(|s| s.0)).expect("starts");
            session.write_i32(&at("segment_len"), &padded(|s| s.1)).expect("lengths");
        }
        if c.dropout > 0.0 {
            session.write_i32(&at("rng"), &RNG).expect("a seed");
            session.write_i32(&at("rows"), &draw_keys(c, from / c.context, rows)).expect("keys");
        }
        session.run(Role::GRAD).expect("gradients");
    }
    let names: Vec<String> = weight_names(c).into_iter().map(|(ours, _)| ours).collect();
    let read = |session: &Session, path: String| {
        let values = session.read_f32(&path).expect("a slot");
        (path, values)
    };
    let sums = names.iter().map(|name| gradient_path(name)).chain([LOSS_SUM.into(), WEIGHT_SUM.into()]);
    let gradients: Tensors = sums.map(|path| read(&session, path)).collect();

    session.write_f32(&input_path(Role::Apply, LR), &[1e-3]).expect("a rate");
    session.run(Role::Apply).expect("an update");
    let state = names.iter().flat_map(|n| [n.clone(), moment_path("m", n), moment_path("v", n)]);
    let updated: Tensors = state.map(|path| read(&session, path)).collect();
    assert_eq!(session.read_f32(update::UPDATES).expect("a counter"), [1.0]);
    for path in gradients.keys() {
        assert!(session.read_f32(path).expect("a sum").iter().all(|x| *x == 0.0), "{path} is cleared");
    }
    (gradients, updated)
}

fn assert_close(got: &Tensors, want: &Tensors, what: &str) {
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    let distances = want.iter().map(|(path, want)| (relative(&got[path], want), path));
    let (off, path) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("tensors");
    println!("{what}: {path} is furthest, by {off:.1e}");
    assert!(off < 1e-5, "{what}: {path} is off by {off:.1e}");
}

#[test]
fn any_split_of_a_step_gives_its_gradients_and_its_update() {
    for dropout in [0.0, 0.1] {
        let c = model(dropout);
        let batch = unequal_rows(&c);
        let steps = SPLITS.map(|rows| step(&c, &batch, rows, Documents::Joined));
        for ((gradients, updated), rows) in steps.iter().zip(SPLITS) {
            let what = format!("{} x {rows} rows, dropout {dropout}", ROWS / rows);
            assert_close(gradients, &steps[0].0, &format!("gradients of {what}"));
            assert_close(updated, &steps[0].1, &format!("the update of {what}"));
        }
    }
}

#[test]
fn dropout_and_weights_have_an_effect() {
    let sums = |dropout: f64, change: fn(&mut Batch)| {
        let c = model(dropout);
        let mut batch = unequal_rows(&c);
        change(&mut batch);
        step(&c, &batch, ROWS, Documents::Joined).0
    };
    let plain = sums(0.0, |_| {});
    for other in [sums(0.1, |_| {}), sums(0.0, |batch| batch.weights[0] += 1.0)] {
        assert!(relative(&other[LOSS_SUM], &plain[LOSS_SUM]) > 1e-3);
    }
}

#[test]
fn any_split_gives_the_same_gradients_in_f64() {
    for dropout in [0.0, 0.1] {
        let c =
            DecoderConfig { width: 12, heads: 2, kv_heads: Some(1), ffn: 10, context: 5, ..model(dropout) };
        let batch = unequal_rows(&c);
        let sums = SPLITS.map(|rows| oracle_sums(&c, &batch, rows));
        for (split, rows) in sums.iter().zip(SPLITS) {
            assert!(split.len() > 20);
            let distances = sums[0].iter().map(|(path, want)| (relative(&split[path], want), path));
            let (off, path) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("tensors");
            let what = format!("{} x {rows} rows, dropout {dropout}, f64", ROWS / rows);
            println!("{what}: {path} is furthest, by {off:.1e}");
            assert!(off < 1e-12, "{what}: {path} is off by {off:.1e}");
        }
    }
}

/// The sums of a step in f64, `rows` rows at a time.
fn oracle_sums(c: &DecoderConfig, batch: &Batch, rows: usize) -> oracle::Values {
    let graph = build(c, Form::Loss(LossForm { dropout: true, ..LossForm::rows(rows, c.context) }));
    let graph = oracle::in_f64(&differentiate(&graph).graph);
    let mut values = oracle::Values::new();
    for (stream, slot) in graph.slots.iter().enumerate().filter(|(_, slot)| slot.class == Class::Weight) {
        assert_eq!(slot.ty.dtype, DType::F64);
        let drawn = |i| f64::from(random::normal(3, stream as u64, i));
        let value = |i| match slot.init {
            Init::Normal { std } => f64::from(std) * drawn(i),
            _ => 1.0 + 0.2 * drawn(i),
        };
        values.insert(slot.path.clone(), (0..slot.ty.elements() as u64).map(value).collect());
    }
    let wide = |values: &[i32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    for from in (0..ROWS).step_by(rows) {
        let part = from * c.context..(from + rows) * c.context;
        values.insert("tokens".into(), wide(&batch.tokens[part.clone()]));
        values.insert("targets".into(), wide(&batch.targets[part.clone()]));
        values.insert("positions".into(), wide(&batch.positions[part.clone()]));
        values.insert("weights".into(), batch.weights[part].iter().map(|&x| f64::from(x)).collect());
        values.insert("rng".into(), wide(&RNG));
        values.insert("rows".into(), wide(&draw_keys(c, from, rows)));
        let carried = oracle::run(&graph, &values).writes;
        values.extend(carried);
    }
    let is_sum = |path: &String| path.starts_with("gradient.") || path.starts_with("carry.");
    values.into_iter().filter(|(path, _)| is_sum(path)).collect()
}

#[test]
fn packed_documents_give_the_gradients_of_separate_rows() {
    let c = model(0.0);
    let lengths = [5, 7, 12, 1, 8, 3, 4, 4, 4];
    let full = unequal_rows(&c);
    let packed_rows = lengths.iter().sum::<usize>() / c.context;
    let (mut packed, mut apart) = (empty(), empty());
    for len in lengths {
        let from = packed.tokens.len();
        packed.segments.push((from as i32, len as i32));
        for (batch, padding) in [(&mut packed, 0), (&mut apart, c.context - len)] {
            let part = from..from + len;
            batch.tokens.extend(full.tokens[part.clone()].iter().copied().chain(vec![0; padding]));
            batch.targets.extend(full.targets[part.clone()].iter().copied().chain(vec![-1; padding]));
            batch.weights.extend(full.weights[part].iter().copied().chain(vec![0.0; padding]));
            batch.positions.extend(0..(len + padding) as i32);
        }
    }
    assert_eq!(packed.tokens.len(), packed_rows * c.context, "documents fill the rows");
    let joined = step(&c, &packed, packed_rows, Documents::Joined);
    let masked = step(&c, &packed, packed_rows, Documents::Apart { most: lengths.len() + 3 });
    let separate = step(&c, &apart, lengths.len(), Documents::Joined);
    assert_close(&masked.0, &separate.0, "gradients of packed documents");
    assert_close(&masked.1, &separate.1, "the update of packed documents");
    assert!(relative(&joined.0[LOSS_SUM], &separate.0[LOSS_SUM]) > 1e-3, "without the mask documents meet");
}

fn empty() -> Batch {
    Batch { tokens: vec![], targets: vec![], weights: vec![], positions: vec![], segments: vec![] }
}
