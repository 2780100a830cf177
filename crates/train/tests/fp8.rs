//! Training in 8-bit floats on the CPU, which computes them exactly: the loss curve of bf16, scales that follow the tensors, and
//! the refusals on machines and models without support.

use flatout_ir::passes::fp8::{APART, TYPES, shared_path};
use flatout_ir::passes::fp8_copies::HISTORY;
use flatout_ir::timings::{Point, Size, Timings, Units};
use flatout_ir::{DType, OpKind, Role, Target, Work};
use flatout_measure::bench;
use flatout_train::Config;
use flatout_train::device;
use flatout_train::recipes;
use flatout_train::resolve::compile::{self, Compiled, compile};
use flatout_train::resolve::fp8_layers;
use flatout_train::run::events::Event;

use crate::small_run::{config, train_in};

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

/// Codes that the backward pass makes again are those that the forward pass would have kept.
#[test]
fn codes_made_again_change_no_bit() {
    for scaling in ["delayed", "current"] {
        let scaling = format!("fp8.scaling={scaling}");
        let of = |level: &str| losses(&["precision=fp8", &scaling, level]);
        let kept = of("recompute=none");
        for level in ["recompute=cheap", "recompute=wide", "recompute=full"] {
            assert_eq!(of(level), kept, "{level}, {scaling}");
        }
    }
}

/// Any split of a step yields the same largest magnitudes, so the scales are the same.
#[test]
fn magnitudes_are_those_of_the_whole_step() {
    let first = ["train.micro_batch=8", "train.micro_batch=4", "train.micro_batch=2"].map(|split| {
        let mut bench = bench::open(&config(&["precision=fp8", split])).expect("a bench");
        let updates = bench.losses().len();
        assert!((1..HISTORY).contains(&updates), "opening makes {updates} updates");
        let session = bench.session();
        TYPES.map(|dtype| {
            let read = |what: &str| session.read_f32(&shared_path(what, dtype)).expect("a slot");
            assert!(read("amax").iter().all(|x| *x == 0.0), "an update clears what it gathered");
            let (history, scales) = (read("history"), read("scale"));
            // Newest first; entries for steps before the run are 0.
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

/// Every product of the layers, forward and both gradients; each tensor is quantised once if codes are kept, each weight in
/// `apply`.
#[test]
fn every_product_of_a_layer_is_in_eight_bits() {
    let config = config(&["precision=fp8", "recompute=none"]);
    let plans = compile(&config, &compile::target()).expect("plans").plans;
    let count = |role: Role, kind: OpKind, is: fn(DType) -> bool| {
        let launches = &plans.plan(role).expect("a plan").launches;
        launches.iter().filter(|l| l.op.kind() == kind && is(l.ins[0].dtype)).count()
    };
    let layers = config.model.decoder().layers;
    assert_eq!(count(Role::GRAD, OpKind::Product, DType::is_fp8), 3 * 4 * layers);
    assert_eq!(count(Role::GRAD, OpKind::Product, |dtype| !dtype.is_fp8()), 0);
    assert_eq!(count(Role::GRAD, OpKind::Quantize, |_| true), 2 * 4 * layers);
    assert_eq!(count(Role::Apply, OpKind::Quantize, |_| true), 4 * layers);
    assert_eq!(count(Role::Derive, OpKind::Quantize, |_| true), 4 * layers);
}

/// Training reads codes and evaluation the f32 weights, so only the embedding, which is read in bf16, has a copy. The averages
/// of `train.ema` change nothing: evaluation casts those.
#[test]
fn weights_with_codes_have_no_copy_in_bf16() {
    for averages in ["train.ema=0", "train.ema=0.99"] {
        let config = config(&["precision=fp8", "model.ffn=256", "eval.rows=8", averages]);
        let plans = compile(&config, &compile::target()).expect("plans").plans;
        let has = |copy: &str| plans.slots.iter().any(|slot| slot.path.starts_with(copy));
        assert!(has("bf16.embed.weight"), "{averages}");
        assert!(!has("bf16.layers.") && !has("bf16.region.0."), "{averages}");
        let eval = plans.plan(Role::Eval).expect("a plan");
        let products = eval.launches.iter().filter(|l| l.op.kind() == OpKind::Product);
        assert!(
            products.flat_map(|l| &l.ins[..2]).all(|view| view.dtype == DType::BF16),
            "evaluation is in bf16"
        );
    }
}

/// The same weights evaluate to the same bits from copies, which are kept for programs that generate samples.
#[test]
fn evaluation_without_copies_changes_no_bit() {
    let evaluated = |samples: &[&str]| {
        let folder = tempfile::tempdir().expect("a folder");
        let words = ["precision=fp8", "model.ffn=256", "eval.rows=8", "eval.every=10"];
        let config = config(&[&words, samples].concat());
        let plans = compile(&config, &compile::target()).expect("plans").plans;
        let copies = plans.slots.iter().filter(|slot| slot.path.starts_with("bf16.layers.")).count();
        let mut losses = vec![];
        train_in(&folder.path().join("run"), &config, |event| {
            if let Event::Eval { loss, .. } = event {
                losses.push(*loss);
            }
        });
        (copies, losses)
    };
    let (none, without) = evaluated(&[]);
    let (some, with) = evaluated(&["samples.prompts=['a']", "samples.max_tokens=2"]);
    assert!(none == 0 && some > 0, "{none} and {some} copies");
    assert!(with.len() > 2 && with == without, "{with:?} and {without:?}");
}

#[test]
fn unsupported_settings_are_refused() {
    let fp8 = config(&["precision=fp8"]);
    let target = device::named("rtx3090", &fp8.switches).expect("a GPU of the table");
    let why = compile(&fp8, &target).expect_err("a refusal").to_string();
    assert!(why.starts_with("`precision=fp8` cannot run on "), "{why}");
    assert!(why.ends_with("compute capability 8.9); use precision=bf16"), "{why}");

    let odd = config(&["precision=fp8", "model.context=31", "train.micro_batch=1"]);
    let why = compile(&odd, &compile::target()).expect_err("a refusal").to_string();
    assert!(why.contains("no product of a layer can run in fp8") && why.contains("multiples of 16"), "{why}");
}

fn pretraining(overrides: &[&str]) -> Config {
    let fixed = ["precision=fp8", "train.batch=32", "train.micro_batch=32", "eval.rows=0", "model.layers=2"];
    let words: Vec<String> = fixed.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("pretrain-226m", &[], &words).expect("a config")
}

fn h200(config: &Config) -> Target {
    device::named("h200", &config.switches).expect("a GPU of the table")
}

/// The target with timings for every launch of these plans, each a fraction of its roofline speed.
fn timed(target: &Target, plans: &[&Compiled], part: impl Fn(&Size) -> f64) -> Target {
    let launches = plans.iter().flat_map(|c| &c.plans.plans).flat_map(|plan| &plan.launches);
    let points = launches.map(|launch| {
        let size = Size::of(launch);
        Point { seconds: size.roofline_seconds(&target.rates) / part(&size), size }
    });
    Target { timings: Timings::new(points), ..target.clone() }
}

/// By the roofline all layers of `pretrain-226m` gain. At the fractions of it that kernels reach on an H200, the product of 768 x
/// 768 does not save what quantising around it costs.
#[test]
fn layers_that_would_lose_stay_in_bf16() {
    let config = pretraining(&[]);
    let target = h200(&config);
    let by_roofline = compile(&config, &target).expect("plans");
    assert_eq!(by_roofline.settled.options.fp8_layers, None);
    let said = fp8_layers::sentence(&by_roofline.plans, &by_roofline.settled).expect("a sentence");
    assert!(said.starts_with("fp8 for 24 of 24 products, attn.wk, attn.wo, attn.wq, attn.wv, ffn.down, ffn.gate, ffn.up: every layer gains (by the roofline"), "{said}");

    let bf16 = compile(&pretraining(&["precision=bf16"]), &target).expect("plans");
    let small = 2 * 65536 * 768 * 768;
    let reached = |size: &Size| match (size.work, size.units) {
        (Work::Product, Units::Fp8) if size.flops <= small => 0.42,
        (Work::Product, Units::Fp8) => 0.65,
        (Work::Product, _) => 0.7,
        _ => 0.8,
    };
    let target = timed(&target, &[&by_roofline, &bf16], reached);
    let by_time = compile(&config, &target).expect("plans");
    let said = fp8_layers::sentence(&by_time.plans, &by_time.settled).expect("a sentence");
    assert!(said.starts_with("fp8 for 18 of 24 products, attn.wk, attn.wq, attn.wv, ffn.down, ffn.gate, ffn.up: the layers that gain (by what was timed here"), "{said}");
    assert!(said.contains("without those that would lose (attn.wo +0."), "{said}");
    let cost = |c: &Compiled| {
        flatout_ir::cost::cost(c.plans.plan(Role::GRAD).expect("grad"), &target).predicted_seconds
    };
    let all = compile(&pretraining(&["train.fp8_layers=all"]), &target).expect("plans");
    assert!(
        cost(&by_time) < cost(&all) && cost(&by_time) < cost(&bf16),
        "{} {} {}",
        cost(&by_time),
        cost(&all),
        cost(&bf16)
    );

    // The choice is recorded, and other timings do not change it.
    let pinned = by_time.pinned(&config);
    assert_eq!(pinned.train.fp8_layers, ["attn.wk", "attn.wq", "attn.wv", "ffn.down", "ffn.gate", "ffn.up"]);
    let again = compile(&pinned, &h200(&config)).expect("plans");
    assert_eq!(again.settled.options, by_time.settled.options);
    // Without merged weights, the same names select the same layers.
    let apart =
        compile(&pinned.with(&["fuse.qkv=off".into()]).expect("a config"), &h200(&config)).expect("plans");
    let said = fp8_layers::sentence(&apart.plans, &apart.settled).expect("a sentence");
    assert!(said.starts_with("fp8 for 30 of 36 products, attn.wk, attn.wq, attn.wv, ffn.down,"), "{said}");
}

/// A machine without units for 8-bit floats gains nothing: all layers use them, for experiments.
#[test]
fn nothing_is_chosen_where_nothing_can_be_gained() {
    let compiled = compile(&config(&["precision=fp8"]), &compile::target()).expect("plans");
    let said = fp8_layers::sentence(&compiled.plans, &compiled.settled).expect("a sentence");
    assert!(said.ends_with("cpu has no units for 8-bit floats: nothing is to be gained"), "{said}");
    let pinned = compiled.pinned(&config(&["precision=fp8"]));
    assert_eq!(pinned.train.fp8_layers, ["all"]);
    // On a GPU with such units, small layers whose scales need a pass of their own always lose, and the sentence says so.
    let small = config(&["precision=fp8", "fp8.scaling=current"]);
    let small = compile(&small, &h200(&small)).expect("plans");
    let said = fp8_layers::sentence(&small.plans, &small.settled).expect("a sentence");
    assert!(
        said.starts_with("fp8 for 24 of 24 products") && said.contains("precision=bf16 is faster"),
        "{said}"
    );
}

#[test]
fn unknown_layer_names_are_refused() {
    let refused = |word: &str| {
        let why = compile(&config(&["precision=fp8", word]), &compile::target()).expect_err("a refusal");
        why.to_string()
    };
    assert_eq!(
        refused("train.fp8_layers=[attn.wo,ffn.dwon]"),
        "no layer that can run in fp8 is called `ffn.dwon`; there are attn.wk, attn.wo, attn.wq, attn.wv, ffn.down, ffn.gate, ffn.up"
    );
    assert!(refused("train.fp8_layers=[auto,attn.wo]").contains("`auto` or `all` among names"));
    assert!(refused("train.fp8_layers=[]").starts_with("`train.fp8_layers` is empty"));
    let some = compile(&config(&["precision=fp8", "train.fp8_layers=[ffn.down]"]), &compile::target())
        .expect("plans");
    let said = fp8_layers::sentence(&some.plans, &some.settled).expect("a sentence");
    assert_eq!(said, "fp8 for 6 of 24 products, ffn.down: train.fp8_layers names them");
}
