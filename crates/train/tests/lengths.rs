//! Examples of unequal length, packed, in buckets and padded: an update is the same in every layout, runs resume exactly, and
//! reports match what was computed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use flatout_data::{UpdateOptions, Updates, drawn_examples};
use flatout_ir::passes::differentiate::{LOSS_SUM, WEIGHT_SUM, gradient_path};
use flatout_ir::{Class, PlanSet, Role};
use flatout_measure::bench;
use flatout_models::library::llama::weight_names;
use flatout_runtime::{Session, cpu};
use flatout_train::Config;
use flatout_train::config::resolved::Resolved;
use flatout_train::device::Device;
use flatout_train::recipes;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::run;
use flatout_train::run::events::{Event, Start, Step};
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::switches::data::HeadRows;
use flatout_train::switches::{Choose, active};
use flatout_train::tasks::batch::{Draw, Inputs};
use flatout_train::tasks::examples;
use flatout_train::training::trainer::{Notice, train};
use flatout_train::training::update::accumulate;
use flatout_train::weights::initial;

use crate::distance::relative;

/// Bound on the L2 distance of every tensor of the gradient.
const BOUND: f64 = 1e-5;
const THREADS: usize = 2;

const SMALL: [&str; 12] = [
    "backend=cpu",
    "precision=fp32",
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "model.context=48",
    "data.mean_tokens=16",
    "train.batch=12",
    "train.steps=6",
    "schedule.warmup_steps=2",
];

fn config(overrides: &[&str]) -> Config {
    let words: Vec<String> = SMALL.iter().chain(overrides).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &words).expect("a config")
}

/// All kinds of layouts, several of each. In the first one the loss covers every row, in the others only the rows that `auto`
/// selects, the learned ones, to which the last layer is trimmed there.
const LAYOUTS: [&[&str]; 9] = [
    &["packing=off", "length_buckets=off", "micro_batch=4", "head_rows=all"],
    &["packing=off", "micro_batch=4"],
    &["packing=off", "micro_batch=12"],
    &["packing=on", "micro_batch=12"],
    &["packing=on", "micro_batch=2"],
    &["packing=on", "length_buckets=off", "micro_batch=1"],
    &["packing=off", "length_buckets=off", "micro_batch=4", "head_rows=answers"],
    &["packing=on", "micro_batch=12", "head_rows=all"],
    &["packing=on", "micro_batch=12", "head_rows=answers", "last_layer=all"],
];

fn compiled(config: &Config) -> Compiled {
    compile(config, &cpu::target(THREADS)).expect("plans")
}

/// The sums after four updates of forty examples, and the plan of each of their micro-batches.
fn sums(config: &Config) -> (BTreeMap<String, Vec<f32>>, Vec<usize>) {
    sums_of(config, 40)
}

/// The sums after four updates of `count` examples.
fn sums_of(config: &Config, count: usize) -> (BTreeMap<String, Vec<f32>>, Vec<usize>) {
    let compiled = compiled(config);
    let arrangement = compiled.settled.arrangement.expect("examples are arranged");
    let mut session = Session::new(compiled.plans, THREADS).expect("a session");
    initial::write(&mut session, 3).expect("weights");
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive).expect("copies of the weights");
    }
    let (seed, vocab) = (config.train.seed, config.model.decoder().vocab);
    let lengths = examples::lengths(config).expect("examples have lengths");
    let mut table = drawn_examples(&lengths, [count, 0], seed, vocab).expect("examples").train;
    if config.switches.data.shared_prefix == Choose::On {
        table.share_prefixes();
    }
    let table = Arc::new(table);
    let reading = UpdateOptions {
        seed,
        batch: config.train.batch,
        layout: arrangement.layout,
        is_sorted: false,
        class_weights: vec![],
    };
    let start = Updates::start(&table, seed);
    let mut updates = Updates::new(table, reading, start).expect("updates");
    let mut shapes = vec![];
    let inputs = Inputs::of(session.plans(), Role::GRAD);
    // The second update has examples from the end of one epoch and the beginning of the next in turn.
    for step in 0..4 {
        for part in updates.next_update().parts {
            shapes.push(part.shape);
            let batch = examples::batch(Role::Grad(part.shape), part, None, None, &inputs);
            accumulate(&mut session, &batch, Draw { seed, step }).expect("gradients");
        }
    }
    let paths = weight_names(config.model.decoder()).into_iter().map(|(ours, _)| gradient_path(&ours));
    let paths = paths.chain([LOSS_SUM.to_string(), WEIGHT_SUM.to_string()]);
    (paths.map(|path| (path.clone(), session.read_f32(&path).expect("a sum"))).collect(), shapes)
}

#[test]
fn every_layout_gives_the_same_gradients() {
    for more in
        [&["model.dropout=0"][..], &["model.dropout=0.1"], &["positions=learned", "model.dropout=0.1"]]
    {
        let of = |layout: &[&str]| sums(&config(&[layout, more].concat()));
        let (want, naive) = of(LAYOUTS[0]);
        assert_eq!(naive, [0; 12], "three micro-batches an update, of one length");
        assert!(want[WEIGHT_SUM][0] > 100.0 && want[WEIGHT_SUM][0].fract() == 0.0);
        let mut used = vec![];
        for layout in &LAYOUTS[1..] {
            let (got, shapes) = of(layout);
            assert_eq!(got[WEIGHT_SUM], want[WEIGHT_SUM]);
            let distances = want.iter().map(|(path, want)| (relative(&got[path], want), path));
            let (off, path) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("tensors");
            println!("{layout:?} {more:?}: {path} is furthest, by {off:.1e}; plans {shapes:?}");
            assert!(off < BOUND, "{layout:?} {more:?}: {path} is off by {off:.1e}");
            used.extend(shapes);
        }
        assert!(used.iter().any(|shape| *shape > 1), "smaller plans were used");
    }
    let loss = |dropout: &str| sums(&config(&["packing=on", dropout])).0[LOSS_SUM][0];
    assert!((loss("model.dropout=0") / loss("model.dropout=0.1") - 1.0).abs() > 1e-4, "dropout drops");
}

#[test]
fn the_last_layer_is_trimmed_where_the_head_reads_answers() {
    let state = |overrides: &[&str]| {
        let compiled = compiled(&config(overrides));
        let prepared = active::Prepared::settled(&compiled.settled);
        let said = compiled.settled.choice("last_layer").map(|choice| choice.value.clone());
        let active = active::active(&compiled.plans, &compiled.target, prepared);
        (active["last_layer"].clone(), said, compiled)
    };
    let many = ["train.batch=48", "micro_batch=48"];
    let (trimmed, said, answers) = state(&many);
    assert_eq!((trimmed.as_str(), said.as_deref()), ("answers", Some("answers")));
    let (whole, said, all) = state(&[&many[..], &["last_layer=all"]].concat());
    assert_eq!((whole.as_str(), said), ("all", None));
    // The FLOPs of attention's output and the feed-forward for the trimmed rows, once forward and twice backward.
    assert_eq!(all.capacities, answers.capacities);
    let largest = all.capacities[0];
    let behind = 32 * 32 + 3 * 32 * 48;
    let saved = 6 * (largest.tokens - largest.read) * behind / largest.tokens;
    let fewer = all.flops_per_token - answers.flops_per_token;
    assert!(
        saved > 0 && fewer.abs_diff(saved as u64) <= 1,
        "{fewer} fewer operations a token, and not {saved}"
    );
    for asked in [&["head_rows=all"][..], &["head_rows=all", "last_layer=answers"]] {
        let (none, ..) = state(&[&many[..], asked].concat());
        assert!(none.starts_with("nothing to leave out"), "{none}");
    }
    // A resumed run keeps the trimming it began with, and a run from before the switch existed does not trim.
    let asked = config(&many);
    let of = |resolved: &Resolved| resolved.over(&asked).switches.data.last_layer;
    let mut resolved = Resolved::default();
    answers.pin(&asked, &mut resolved);
    assert_eq!(of(&resolved), HeadRows::Answers);
    resolved.switches.remove("last_layer");
    assert_eq!(of(&resolved), HeadRows::All);
}

/// Trees of five examples after 34 tokens, of nine after 33, and a single example.
const TREES: &str = "data.trees=[5,34,40,15, 1,0,20,10, 9,33,90,30]";

#[test]
fn examples_that_share_a_prefix_give_the_gradients_they_give_alone() {
    // Four updates are an epoch: the order of examples differs, the sum over all of them does not.
    let of = |more: &[&str]| sums_of(&config(&[&[TREES, "model.dropout=0"], more].concat()), 48);
    let (want, _) = of(&["shared_prefix=off", "packing=off", "length_buckets=off", "micro_batch=4"]);
    for layout in [
        &["micro_batch=12"][..],
        &["micro_batch=12", "head_rows=all"],
        &["micro_batch=12", "last_layer=all"],
        // Plans that hold two examples: trees are split, and each part contains the prefix.
        &["micro_batch=2"],
        &["micro_batch=2", "positions=learned"],
    ] {
        let want = match layout.contains(&"positions=learned") {
            true => of(&["shared_prefix=off", "packing=off", "positions=learned", "micro_batch=4"]).0,
            false => want.clone(),
        };
        let (got, shapes) = of(&[&["shared_prefix=on"], layout].concat());
        assert_eq!(got[WEIGHT_SUM], want[WEIGHT_SUM]);
        let distances = want.iter().map(|(path, want)| (relative(&got[path], want), path));
        let (off, path) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("tensors");
        println!("{layout:?}: {path} is furthest, by {off:.1e}; plans {shapes:?}");
        assert!(off < BOUND, "{layout:?}: {path} is off by {off:.1e}");
    }
    let arrangement = compiled(&config(&[TREES, "shared_prefix=on", "micro_batch=12"])).settled.arrangement;
    let arrangement = arrangement.expect("examples are arranged");
    assert!(arrangement.shared > 0.5, "{}", arrangement.words());
    assert!(arrangement.words().contains("% of the tokens shared"), "{}", arrangement.words());
}

#[test]
fn every_precision_has_plans_of_several_extents_over_the_same_slots() {
    for precision in ["precision=bf16", "precision=fp8"] {
        let of = |layout: &[&str]| sums(&config(&[layout, &[precision, "model.dropout=0.1"]].concat())).0;
        let want = of(LAYOUTS[0]);
        for layout in [LAYOUTS[1], LAYOUTS[3], LAYOUTS[4]] {
            let got = of(layout);
            let off = relative(&got[LOSS_SUM], &want[LOSS_SUM]);
            println!("{precision} {layout:?}: the loss is off by {off:.1e}");
            assert!(off < 1e-3, "{precision} {layout:?}: the loss is off by {off:.1e}");
        }
    }
}

#[test]
fn plans_share_everything_but_their_inputs() {
    let several = compiled(&config(&["packing=on", "micro_batch=12"])).plans;
    let one = compiled(&config(&["packing=on", "length_buckets=off", "micro_batch=12"])).plans;
    let grads: Vec<Role> = several.grads().map(|plan| plan.role).collect();
    assert!(grads.len() > 1 && grads.iter().copied().eq((0..grads.len()).map(Role::Grad)), "{grads:?}");
    assert_eq!(one.grads().count(), 1);
    let persistent = |plans: &PlanSet| -> usize {
        let of = |class| plans.slots.iter().filter(move |s| s.class == class && !s.is_whole);
        [Class::Weight, Class::Moment, Class::Carry, Class::Const]
            .into_iter()
            .flat_map(of)
            .map(|s| s.ty.bytes())
            .sum()
    };
    assert_eq!(persistent(&several), persistent(&one));
    assert_eq!(several.transient_bytes, one.transient_bytes, "the largest decides, the others lie over it");
    assert!(several.plans.iter().filter(|plan| plan.role == Role::Apply).count() == 1);
    let launches = |role| several.plan(role).expect("a plan").launches.len();
    assert_eq!(launches(Role::GRAD), launches(Role::Grad(1)));
}

struct Trained {
    start: Start,
    steps: Vec<Step>,
    evals: Vec<f32>,
}

fn train_in(config: &Config, dir: &Path, resume: Resume) -> Trained {
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(dir, resume).expect("a run");
    let (mut start, mut steps, mut evals) = (None, vec![], vec![]);
    train(config, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |notice| match notice {
        Notice::Event(Event::Step(step)) => steps.push(step.clone()),
        Notice::Event(Event::Start(said)) => start = Some(said.clone()),
        Notice::Event(Event::Eval { loss, .. }) => evals.push(*loss),
        _ => {}
    })
    .expect("a run to its end");
    Trained { start: start.expect("a start"), steps, evals }
}

#[test]
fn every_layout_trains_alike_and_reports_what_it_computed() {
    let folder = tempfile::tempdir().expect("a folder");
    let trained: Vec<Trained> = LAYOUTS
        .iter()
        .enumerate()
        .map(|(i, layout)| {
            let config = config(&[*layout, &["model.dropout=0.1", "eval.rows=20"]].concat());
            train_in(&config, &folder.path().join(i.to_string()), Resume::Never)
        })
        .collect();
    let naive = &trained[0];
    for (one, layout) in trained.iter().zip(LAYOUTS) {
        assert_eq!(one.steps.len(), 6);
        for (step, want) in one.steps.iter().zip(&naive.steps) {
            assert!((step.loss / want.loss - 1.0).abs() < 1e-5, "{layout:?}: {} {}", step.loss, want.loss);
            assert_eq!((step.tokens, step.samples), (want.tokens, want.samples), "padding is not counted");
        }
        assert!((one.evals[0] / naive.evals[0] - 1.0).abs() < 1e-5, "{layout:?}");
    }
    let padding = |one: &Trained| -> f64 {
        one.steps.iter().map(|step| step.padding.expect("lengths vary")).sum::<f64>() / 6.0
    };
    let [padded, bucketed, packed] = [naive, &trained[1], &trained[3]].map(padding);
    assert!(padded > 0.6 && bucketed < 0.5 && packed < 0.35, "{padded} {bucketed} {packed}");
    let tokens = naive.steps[5].tokens as f64;
    assert!((100.0..300.0).contains(&(tokens / 6.0)), "twelve examples of sixteen tokens, about: {tokens}");
    let switch = |one: &Trained, name: &str| one.start.switches[name].clone();
    let switches = |one: &Trained| [switch(one, "packing"), switch(one, "length_buckets")];
    assert_eq!(switches(naive), ["off", "off"]);
    assert_eq!(switches(&trained[1]), ["off", "within updates"]);
    assert_eq!(switches(&trained[3]), ["on", "within updates"]);
    assert_eq!(switches(&trained[5]), ["on", "off"]);
    assert!(trained[3].start.data.layout.as_ref().expect("words").contains("padding instead of"));
}

#[test]
fn a_run_on_examples_resumes_exactly() {
    let layouts =
        [&["packing=auto"][..], &["length_buckets=on", "micro_batch=4"], &[TREES, "shared_prefix=on"]];
    for layout in layouts {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |more: &[&str]| config(&[layout, &["model.dropout=0.1", "eval.rows=0"], more].concat());
        let whole = train_in(&of(&[]), &folder.path().join("whole"), Resume::Never);
        let cut = folder.path().join("cut");
        let first = train_in(&of(&["train.steps=3", "schedule.horizon_steps=6"]), &cut, Resume::Never);
        let config = of(&["schedule.horizon_steps=6"]);
        let second = train_in(&config, &cut, Resume::Must);
        let bits = |all: &[&Trained]| -> Vec<(u64, u32, u64)> {
            let steps = all.iter().flat_map(|one| &one.steps);
            steps.map(|s| (s.step, s.loss.to_bits(), s.tokens)).collect()
        };
        assert_eq!(bits(&[&whole]), bits(&[&first, &second]), "{layout:?}");
    }
}

/// Conversations and labelled pairs in complete runs: measured, arranged, trained in two layouts and resumed.
#[test]
fn conversations_and_classes_are_trained_in_any_layout() {
    let chat = ["data.task=chat", "model.vocab=400", "model.context=96"];
    let classes = ["data.task=classes", "model.vocab=300", "model.context=64", "model.head=classes"];
    for task in [&chat[..], &[&classes[..], &["model.classes=2"]].concat()] {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |more: &[&str]| {
            let rest = ["data.synthetic_rows=200", "eval.rows=20", "model.dropout=0.1", "train.steps=4"];
            let base: Vec<&str> = SMALL.iter().filter(|w| !w.starts_with("data.mean")).copied().collect();
            let words = [&base, task, &rest, more].concat();
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            recipes::resolve("tiny", &[], &words).expect("a config")
        };
        let at = |name: &str| folder.path().join(name);
        let packed = train_in(&of(&["packing=on"]), &at("packed"), Resume::Never);
        let padded = train_in(&of(&["packing=off", "micro_batch=4"]), &at("padded"), Resume::Never);
        for (a, b) in packed.steps.iter().zip(&padded.steps) {
            assert!((a.loss / b.loss - 1.0).abs() < 1e-4, "{task:?}: {} {}", a.loss, b.loss);
            assert_eq!(a.tokens, b.tokens);
        }
        assert!((packed.evals[0] / padded.evals[0] - 1.0).abs() < 1e-4);
        let kept = run::config(&at("packed")).expect("a config");
        assert!(!kept.data.lengths.is_empty(), "the run knows how long its examples are");
        let first = train_in(&of(&["steps=2", "schedule.horizon_steps=4"]), &at("cut"), Resume::Never);
        let mut config = run::config(&at("cut")).expect("a config");
        config.train.steps = Some(4);
        let second = train_in(&config, &at("cut"), Resume::Must);
        let whole = train_in(&of(&[]), &at("whole"), Resume::Never);
        let bits = |all: &[&Trained]| -> Vec<u32> {
            all.iter().flat_map(|one| &one.steps).map(|step| step.loss.to_bits()).collect()
        };
        assert_eq!(bits(&[&first, &second]), bits(&[&whole]), "{task:?}");
    }
}

#[test]
fn a_measurement_makes_the_updates_of_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(&["packing=on", "eval.rows=0"]);
    let trained = train_in(&config, &folder.path().join("run"), Resume::Never);
    let mut bench = bench::open(&config).expect("a bench");
    bench.steps(5).expect("updates");
    let losses: Vec<f32> = trained.steps.iter().map(|step| step.loss).collect();
    assert_eq!(bench.losses(), losses);
    let mean = trained.steps[5].tokens as f64 / 6.0;
    assert!((bench.tokens_per_update() as f64 / mean - 1.0).abs() < 0.3, "{}", bench.tokens_per_update());
}

#[test]
fn auto_packs_unequal_lengths_and_not_equal_ones() {
    let chosen = |config: &Config, switch: &str| {
        let compiled = compiled(config);
        let prepared = active::Prepared::settled(&compiled.settled);
        let said = compiled.settled.chosen.iter().find(|c| c.switch == switch).map(|c| c.why.clone());
        let active = active::active(&compiled.plans, &compiled.target, prepared);
        (active[switch].clone(), said.unwrap_or_default())
    };
    let unequal = config(&["micro_batch=12"]);
    let (packing, why) = chosen(&unequal, "packing");
    assert_eq!(packing, "on");
    assert!(why.contains("padding instead of"), "{why}");
    assert_eq!(chosen(&unequal, "length_buckets").0, "within updates");
    let mut equal = unequal.clone();
    equal.data.mean_tokens = None;
    equal.data.lengths = vec![48];
    let (packing, why) = chosen(&equal, "packing");
    assert_eq!(packing, "off");
    assert!(why.starts_with("examples are about equally long: 1 plan of 48 tokens a row"), "{why}");
    assert_eq!(chosen(&equal, "length_buckets").0, "off");
    // Updates with examples of similar lengths are used only on request.
    assert_eq!(chosen(&config(&["length_buckets=on"]), "length_buckets").0, "on");
    assert_eq!(chosen(&config(&["length_buckets=on"]), "packing").0, "off");
}

#[test]
fn unsupported_layouts_are_refused() {
    let refused = |overrides: &[&str]| {
        let words: Vec<String> = SMALL.iter().chain(overrides).map(|word| word.to_string()).collect();
        let resolved = recipes::resolve("tiny", &[], &words).map_err(|error| error.to_string());
        let made = resolved.and_then(|c| compile(&c, &cpu::target(1)).map_err(|error| error.to_string()));
        made.expect_err("a refusal")
    };
    for (overrides, said) in [
        (&["packing=on", "length_buckets=on"][..], "`length_buckets=on` has no effect with `packing=on`"),
        (&["data.mean_tokens=49"], "`data.mean_tokens` is 49 and must be from 2 to `model.context` = 48"),
        (&["data.mean_tokens=1"], "`data.mean_tokens` is 1 and must be"),
        (&["data.lengths=[5,0]"], "`data.lengths` has 0, and each must be from 1"),
        (&["shared_prefix=on", "packing=off"], "`shared_prefix=on` lays examples one after another"),
        (
            &["shared_prefix=on", "model.window=8"],
            "`shared_prefix=on` needs layers that see every earlier token",
        ),
        (&["data.trees=[2,30,1,1]"], "`data.trees` must have four numbers per tree"),
        (&["data.trees=[2,30,9]"], "`data.trees` must have four numbers per tree"),
        (&["data.path=a.txt"], "`data.mean_tokens` is for synthetic examples, and data.path is given"),
    ] {
        let got = refused(overrides);
        assert!(got.starts_with(said), "{overrides:?}: {got}");
    }
    let rows = recipes::resolve("tiny", &[], &["data.lengths=[5,9]".into()]).expect_err("rows of text");
    assert!(rows.to_string().starts_with("`data.lengths` is for examples, and rows of text"), "{rows}");
}
