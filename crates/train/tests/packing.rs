//! `tiny` trained on packed rows with masked documents learns the same as from the documents one by one: compares the whole
//! gradient of a step, with the first weights and after some updates.
//!
//! One by one means a plan whose sequence is exactly the document, without padding, a neighbour or a mask, run once per document.
//! The gradients of these runs are added up here.

use std::collections::BTreeMap;

use flatout_data::{LoaderOptions, Rows, Segment};
use flatout_ir::passes::differentiate::{LOSS_SUM, WEIGHT_SUM, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::passes::update::LR;
use flatout_ir::{OpKind, Options, Program, Role, compile as compile_programs};
use flatout_models::config::DecoderConfig;
use flatout_models::decoder::build;
use flatout_models::form::{Form, LossForm};
use flatout_models::library::llama::weight_names;
use flatout_runtime::{Session, cpu};
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::tasks::text::corpus;
use flatout_train::weights::initial;

use crate::distance::relative;

/// Bound on the L2 distance of the whole gradient, and of each of its tensors.
const BOUND: f64 = 1e-5;
const UPDATES: usize = 12;
const THREADS: usize = 2;

/// Sums by path.
type Sums = BTreeMap<String, Vec<f64>>;

fn paths(model: &DecoderConfig) -> Vec<String> {
    let gradients = weight_names(model).into_iter().map(|(ours, _)| gradient_path(&ours));
    gradients.chain([LOSS_SUM.into(), WEIGHT_SUM.into()]).collect()
}

fn add_sums(session: &Session, model: &DecoderConfig, to: &mut Sums) {
    for path in paths(model) {
        let values = session.read_f32(&path).expect("a sum");
        let sum = to.entry(path).or_insert_with(|| vec![0.0; values.len()]);
        sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(x));
    }
}

/// Tokens `from..from + len` of the rows as a plan's whole input.
fn write(session: &mut Session, rows: &Rows, from: usize, len: usize) {
    let at = |name: &str| input_path(Role::GRAD, name);
    let part = from..from + len;
    session.write_i32(&at("tokens"), &rows.tokens[part.clone()]).expect("tokens");
    session.write_i32(&at("targets"), &rows.targets[part.clone()]).expect("targets");
    session.write_i32(&at("positions"), &rows.positions[part.clone()]).expect("positions");
    session.write_f32(&at("weights"), &rows.weights[part]).expect("weights");
}

/// Runs the plans of `train` with its inputs, and leaves the gradients of the rows in their sums.
fn packed(session: &mut Session, rows: &Rows, micro_batch: usize) {
    let at = |name: &str| input_path(Role::GRAD, name);
    let capacity = session.plans().slot(&at("segment_start")).expect("documents are masked").ty.elements();
    for first in (0..rows.count()).step_by(micro_batch) {
        write(session, rows, first * rows.context, micro_batch * rows.context);
        let (mut starts, mut lengths) = (vec![0; capacity], vec![0; capacity]);
        let of_rows = rows.segments[first..first + micro_batch].iter().enumerate();
        let segments = of_rows.flat_map(|(row, segments)| segments.iter().map(move |s| (row, *s)));
        for (i, (row, segment)) in segments.enumerate() {
            starts[i] = (row * rows.context) as i32 + segment.start as i32;
            lengths[i] = segment.len as i32;
        }
        session.write_i32(&at("segment_start"), &starts).expect("starts");
        session.write_i32(&at("segment_len"), &lengths).expect("lengths");
        session.run(Role::GRAD).expect("gradients");
    }
}

/// The same sums from one run per document, with the weights of session `of`.
fn one_by_one(model: &DecoderConfig, rows: &Rows, of: &Session) -> Sums {
    let mut by_length: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (row, segments) in rows.segments.iter().enumerate() {
        for segment in segments {
            let start = row * rows.context + segment.start as usize;
            by_length.entry(segment.len as usize).or_default().push(start);
        }
    }
    let mut sums = Sums::new();
    for (len, starts) in by_length {
        let model = DecoderConfig { context: len, ..model.clone() };
        let graph = build(&model, Form::Loss(LossForm { dropout: true, ..LossForm::rows(1, len) }));
        let program = Program { role: Role::GRAD, graph };
        let plans = compile_programs(&[program], &cpu::target(THREADS), &Options::default()).expect("plans");
        let mut session = Session::new(plans, THREADS).expect("a session");
        initial::write_tables(&mut session).expect("tables");
        for (path, _) in weight_names(&model) {
            session.write_f32(&path, &of.read_f32(&path).expect("a weight")).expect("a weight");
        }
        for start in starts {
            write(&mut session, rows, start, len);
            session.run(Role::GRAD).expect("gradients");
        }
        add_sums(&session, &model, &mut sums);
    }
    sums
}

fn assert_equal(got: &Sums, want: &Sums, what: &str) {
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    let whole = |sums: &Sums| -> Vec<f64> {
        let gradients = sums.iter().filter(|(path, _)| path.starts_with("gradient."));
        gradients.flat_map(|(_, values)| values.clone()).collect()
    };
    let all = relative(&whole(got), &whole(want));
    let distances = want.iter().map(|(path, want)| (relative(&got[path], want), path));
    let (off, path) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("tensors");
    println!("{what}: the whole gradient is off by {all:.1e}, {path} furthest, by {off:.1e}");
    assert!(all < BOUND && off < BOUND, "{what}: {all:.1e} of all, {path} off by {off:.1e}");
}

#[test]
fn tiny_learns_the_same_from_packed_and_single_documents() {
    let overrides = ["data.document_mask=true", "precision=fp32", "eval.rows=0"].map(String::from);
    let config = recipes::resolve("tiny", &[], &overrides).expect("a config");
    let model = config.model.decoder();
    let data = corpus(&config, None).expect("data");
    let mut loader = data.train_loader(&data.start(), LoaderOptions::default()).expect("a loader");
    let compiled = compile::compile(&config, &cpu::target(THREADS)).expect("plans");
    let micro_batch = compiled.micro_batch;
    let grad = compiled.plans.plans.iter().find(|plan| plan.role == Role::GRAD).expect("it trains");
    assert!(grad.launches.iter().any(|l| l.op.kind() == OpKind::AttentionGrad), "documents are segments");
    let begin = || {
        let mut session = Session::new(compiled.plans.clone(), THREADS).expect("a session");
        initial::write(&mut session, config.train.seed).expect("weights");
        session
    };
    let mut session = begin();

    for update in 0..=UPDATES {
        let rows = loader.next_rows(config.train.batch).expect("rows");
        packed(&mut session, &rows, micro_batch);
        if update == 0 || update == UPDATES {
            let documents: usize = rows.segments.iter().map(Vec::len).sum();
            assert!(documents > 2 * rows.count(), "{documents} documents share {} rows", rows.count());
            let mut got = Sums::new();
            add_sums(&session, model, &mut got);
            let want = one_by_one(model, &rows, &session);
            assert_equal(&got, &want, &format!("{documents} documents after {update} updates"));
            if update == 0 {
                // The comparison notices documents that attend to each other.
                let whole = Segment { start: 0, len: rows.context as u32 };
                let joined = Rows { segments: vec![vec![whole]; rows.count()], ..rows };
                let (mut session, mut other) = (begin(), Sums::new());
                packed(&mut session, &joined, micro_batch);
                add_sums(&session, model, &mut other);
                let embedding = gradient_path("embed.weight");
                assert!(relative(&other[&embedding], &want[&embedding]) > 1e-2);
            }
        }
        session.write_f32(&input_path(Role::Apply, LR), &[config.optimizer.lr as f32]).expect("a rate");
        session.run(Role::Apply).expect("an update");
    }
}
