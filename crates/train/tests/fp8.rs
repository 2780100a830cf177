//! Training in 8-bit floats on the CPU, which computes them exactly: the curve of bf16, scales that follow the tensors,
//! and what a machine or a model without them is told.

mod small_run;

use flatout_ir::passes::fp8::{APART, TYPES, shared_path};
use flatout_ir::passes::fp8_copies::HISTORY;
use flatout_ir::{DType, OpKind, Role};
use flatout_train::compile::{self, compile};
use flatout_train::{device, measure};
use small_run::{config, train_in};

fn losses(overrides: &[&str]) -> Vec<f32> {
    let folder = tempfile::tempdir().expect("a folder");
    let words: Vec<&str> = ["optimizer.lr=3e-3"].iter().chain(overrides).copied().collect();
    let steps = train_in(&folder.path().join("run"), &config(&words), |_| {});
    steps.iter().map(|step| step.loss).collect()
}

/// The mean of the last losses.
fn end(losses: &[f32]) -> f32 {
    losses[losses.len() - 10..].iter().sum::<f32>() / 10.0
}

#[test]
fn the_curve_is_that_of_bf16() {
    let bf16 = losses(&["precision=bf16"]);
    assert!(end(&bf16) < 0.7 * bf16[0], "it learns: {} to {}", bf16[0], end(&bf16));
    for scaling in ["delayed", "current"] {
        let fp8 = losses(&["precision=fp8", &format!("fp8.scaling={scaling}")]);
        let off = (end(&fp8) - end(&bf16)).abs() / end(&bf16);
        println!("{scaling}: {} against {}, off by {off:.1e}", end(&fp8), end(&bf16));
        assert!(off < 1e-2, "{scaling} ends at {}, bf16 at {}", end(&fp8), end(&bf16));
        assert_ne!(fp8, bf16);
    }
}

/// Any split of a step sees the same largest magnitudes, so the scales are the same.
#[test]
fn magnitudes_are_those_of_the_whole_step() {
    let first = ["train.micro_batch=8", "train.micro_batch=4", "train.micro_batch=2"].map(|split| {
        let mut bench = measure::open(&config(&["precision=fp8", split])).expect("a bench");
        let updates = bench.losses().len();
        assert!((1..HISTORY).contains(&updates), "opening makes {updates} updates");
        let session = bench.session();
        TYPES.map(|dtype| {
            let read = |what: &str| session.read_f32(&shared_path(what, dtype)).expect("a slot");
            assert!(read("amax").iter().all(|x| *x == 0.0), "an update clears what it gathered");
            let (history, scales) = (read("history"), read("scale"));
            // Newest first; of earlier steps nothing is known.
            let row = |row: &[f32]| row.iter().step_by(APART).copied().collect();
            let rows: Vec<Vec<f32>> = history.chunks(scales.len()).map(row).collect();
            assert_eq!(rows.len(), HISTORY);
            assert!(rows[..updates].concat().iter().all(|amax| *amax > 0.0));
            assert!(rows[updates..].concat().iter().all(|amax| *amax == 0.0));
            for (i, scale) in scales.iter().step_by(APART).enumerate() {
                let amax = rows.iter().fold(0.0_f32, |top, row| top.max(row[i]));
                assert_eq!(*scale, flatout_ir::fp8::scale(dtype, amax));
            }
            rows[updates - 1].clone()
        })
    });
    assert!(first[0] == first[1] && first[0] == first[2]);
}

/// Every product of the layers, forward and both gradients; each tensor is quantised once, each weight in `apply`.
#[test]
fn every_product_of_a_layer_is_in_eight_bits() {
    let config = config(&["precision=fp8"]);
    let plans = compile(&config, &compile::target()).expect("plans").plans;
    let count = |role: Role, kind: OpKind, is: fn(DType) -> bool| {
        let launches = &plans.plan(role).expect("a plan").launches;
        launches.iter().filter(|l| l.op.kind() == kind && is(l.ins[0].dtype)).count()
    };
    let layers = config.model.layers;
    assert_eq!(count(Role::Grad, OpKind::Product, DType::is_fp8), 3 * 4 * layers);
    assert_eq!(count(Role::Grad, OpKind::Product, |dtype| !dtype.is_fp8()), 0);
    assert_eq!(count(Role::Grad, OpKind::Quantize, |_| true), 2 * 4 * layers);
    assert_eq!(count(Role::Apply, OpKind::Quantize, |_| true), 4 * layers);
    assert_eq!(count(Role::Derive, OpKind::Quantize, |_| true), 4 * layers);
}

#[test]
fn what_cannot_run_is_refused_in_a_sentence() {
    let fp8 = config(&["precision=fp8"]);
    let target = device::named("rtx3090", &fp8.switches).expect("a GPU of the table");
    let why = compile(&fp8, &target).expect_err("a refusal").to_string();
    assert!(why.starts_with("`precision=fp8` cannot run on "), "{why}");
    assert!(why.ends_with("compute capability 8.9); use precision=bf16"), "{why}");

    let odd = config(&["precision=fp8", "model.context=31", "train.micro_batch=1"]);
    let why = compile(&odd, &compile::target()).expect_err("a refusal").to_string();
    assert!(why.contains("no product of a layer can run in fp8") && why.contains("multiples of 16"), "{why}");
}
