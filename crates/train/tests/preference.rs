//! Compares preference losses with PyTorch in f64 and with ten steps of TRL's DPOTrainer, in every layout. `make_preference.py`
//! beside the fixtures made them.

use std::collections::BTreeMap;
use std::sync::Arc;

use flatout_data::{Example, ExampleTable, Layout, Lengths, Tree, UpdateOptions, Updates};
use flatout_ir::Role;
use flatout_ir::passes::differentiate::{LOSS_SUM, WEIGHT_SUM, gradient_path};
use flatout_models::config::{DecoderConfig, Model};
use flatout_models::library::huggingface;
use flatout_models::library::llama::weight_names;
use flatout_runtime::{Session, cpu};
use flatout_train::Config;
use flatout_train::metrics::RewardMetrics;
use flatout_train::recipes;
use flatout_train::resolve::arranged::eval_layout;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::tasks::batch::{Draw, Inputs};
use flatout_train::tasks::examples::shares_prefixes;
use flatout_train::tasks::preference::{AnswerSplit, ComparedAnswers, Scores};
use flatout_train::training::update::{accumulate, apply, collect};
use flatout_train::training::{baseline, reference};
use flatout_train::weights::initial;

use crate::distance::relative;
use crate::fixture::Fixture;

/// The largest relative L2 distance of any tensor.
const BOUND: f64 = 1e-5;
const THREADS: usize = 2;

/// All layouts of pairs: with a shared prompt, apart, in rows, all at once and one by one.
const LAYOUTS: [&[&str]; 6] = [
    &["micro_batch=4"],
    &["micro_batch=1"],
    &["shared_prefix=off", "packing=on", "micro_batch=4"],
    &["shared_prefix=off", "packing=on", "micro_batch=2", "head_rows=all"],
    &["packing=off", "length_buckets=off", "micro_batch=4"],
    &["packing=off", "micro_batch=1", "head_rows=all"],
];

const SMALL: [&str; 11] = [
    "backend=cpu",
    "precision=fp32",
    "data.task=preference",
    "train.batch=4",
    "train.steps=10",
    "schedule.warmup_steps=0",
    "eval.rows=0",
    "optimizer.betas=[0.9,0.999]",
    "optimizer.eps=1e-8",
    "optimizer.weight_decay=0",
    "optimizer.clip=0",
];

/// Pairs of a fixture: the chosen answer after its prompt, then the rejected one. Judged answers are the same answers one by one,
/// of which the chosen ones are wanted.
fn table(fixture: &mut Fixture, scope: &str, is_paired: bool) -> ExampleTable {
    let [tokens, lengths, prompts] =
        ["tokens", "lengths", "prompts"].map(|name| fixture.i32s(&format!("{scope}{name}")));
    let mut table = if is_paired { ExampleTable::of_pairs() } else { ExampleTable::default() };
    let mut start = 0;
    for (number, (length, prompt)) in lengths.iter().zip(prompts).enumerate() {
        let end = start + *length as usize;
        let tokens: Vec<u32> = tokens[start..end].iter().map(|token| *token as u32).collect();
        let weights: Vec<f32> = (0..*length).map(|at| f32::from(at >= prompt)).collect();
        let label = (!is_paired).then_some(1 - number as u32 % 2);
        table.push(Example { tokens: &tokens, weights: &weights, label, images: &[] });
        start = end;
    }
    table
}

/// A config of the fixture's model, with capacities for a table's examples.
fn config(overrides: &[&str], table: &mut ExampleTable) -> Config {
    let words: Vec<String> = SMALL.iter().chain(overrides).map(|word| word.to_string()).collect();
    let mut config = recipes::resolve("tiny", &[], &words).expect("a config");
    let described = huggingface::read(&Fixture::open("llama").json).expect("a Llama");
    config.model = Model::Decoder(DecoderConfig { context: 16, ..described.model });
    if shares_prefixes(&config) {
        table.share_prefixes();
    }
    let lengths = Lengths::of(table).expect("examples");
    config.data.lengths = lengths.shares().iter().map(|share| share.tokens).collect();
    config.data.learned = lengths.shares().iter().map(|share| share.learned).collect();
    config.data.trees = lengths.trees().iter().flat_map(Tree::numbers).collect();
    config
}

struct PairSession {
    session: Session,
    updates: Updates,
    inputs: Vec<Inputs>,
    compared: ComparedAnswers,
    compiled: Compiled,
}

/// A session with the fixture's weights, and the updates of its pairs.
fn begin(config: &Config, table: ExampleTable) -> PairSession {
    let compiled = compile(config, &cpu::target(THREADS)).expect("plans");
    let mut session = Session::new(compiled.plans.clone(), THREADS).expect("a session");
    let mut llama = Fixture::open("llama");
    for (ours, theirs) in weight_names(config.model.decoder()) {
        session.write_f32(&ours, &llama.f32s(&format!("weight.{theirs}"))).expect("a weight");
    }
    initial::write_tables(&mut session).expect("tables");
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive).expect("copies of the weights");
    }
    let arrangement = compiled.settled.arrangement.clone().expect("examples are arranged");
    let table = Arc::new(table);
    let options = UpdateOptions {
        seed: 1,
        batch: config.train.batch,
        layout: arrangement.layout,
        is_sorted: false,
        class_weights: vec![],
    };
    let none = if table.together() == 2 { ExampleTable::of_pairs() } else { ExampleTable::default() };
    let compared = ComparedAnswers::new([table.clone(), Arc::new(none)], None, "a mark".into());
    let start = Updates::start(&table, 1);
    let updates = Updates::new(table, options, start).expect("updates");
    let inputs = compiled.plans.grads().enumerate();
    let inputs = inputs.map(|(shape, _)| Inputs::of(&compiled.plans, Role::Grad(shape))).collect();
    PairSession { session, updates, inputs, compared, compiled }
}

impl PairSession {
    /// Accumulates the gradients of the next update.
    fn accumulate(&mut self, config: &Config) {
        let parts = self.updates.next_update().parts;
        let numbers: Vec<usize> = parts.iter().flat_map(|part| part.numbers.clone()).collect();
        let layout = self.layout(config);
        baseline::take(&mut self.session, &self.compared, AnswerSplit::Train, &numbers, Some(&layout))
            .expect("a baseline");
        for part in parts {
            let (role, inputs) = (Role::Grad(part.shape), &self.inputs[part.shape]);
            let batch = self.compared.batch(role, AnswerSplit::Train, part, inputs).expect("a batch");
            accumulate(&mut self.session, &batch, Draw::default()).expect("gradients");
        }
    }

    /// The layout of the plan `eval`.
    fn layout(&self, config: &Config) -> Layout {
        eval_layout(config, self.compiled.settled.arrangement.as_ref().expect("examples are arranged"))
    }

    /// Scores all answers with the session's own weights.
    fn score(&mut self, config: &Config) -> Scores {
        let layout = self.layout(config);
        reference::score(&mut self.session, &self.compared, &layout, &mut |_| {}).expect("scores")
    }
}

#[test]
fn every_loss_of_pairs_is_pytorchs_in_every_layout() {
    let losses: [(&str, &[&str]); 9] = [
        ("dpo", &["preference.loss=dpo"]),
        ("dpo-smooth", &["preference.loss=dpo", "preference.beta=0.3", "preference.label_smoothing=0.2"]),
        ("dpo-sft", &["preference.loss=dpo", "preference.sft=0.5"]),
        ("ipo", &["preference.loss=ipo"]),
        ("hinge", &["preference.loss=hinge"]),
        ("robust", &["preference.loss=robust", "preference.beta=0.3", "preference.label_smoothing=0.2"]),
        ("apo_zero", &["preference.loss=apo_zero"]),
        ("simpo", &["preference.loss=simpo"]),
        ("orpo", &["preference.loss=orpo"]),
    ];
    for (name, overrides) in losses {
        for layout in LAYOUTS {
            equals_pytorch(name, &[overrides, layout].concat(), true);
        }
    }
}

#[test]
fn the_loss_of_judged_answers_is_pytorchs() {
    for layout in LAYOUTS {
        let overrides = [&["preference.loss=kto", "train.batch=8"], layout].concat();
        equals_pytorch("kto", &overrides, false);
    }
}

fn equals_pytorch(name: &str, overrides: &[&str], is_paired: bool) {
    let mut fixture = Fixture::tensors("preference");
    let mut table = table(&mut fixture, "", is_paired);
    let config = config(overrides, &mut table);
    let units = table.units() as f32;
    let mut pairs = begin(&config, table);
    if config.has_reference() {
        // The model's log-probabilities equal PyTorch's.
        let own = pairs.score(&config).0;
        let off = relative(&own[0], &fixture.f32s("logp"));
        assert!(off < BOUND, "{overrides:?}: log-probabilities are off by {off:.1e}");
        let mismatched = if is_paired { vec![] } else { vec![fixture.f32s("kto.mismatched"), vec![]] };
        pairs.compared.give(Scores([vec![fixture.f32s("reference"), vec![]], mismatched].concat()));
    }
    pairs.accumulate(&config);
    let read = |path: &str| pairs.session.read_f32(path).expect("a sum");
    assert_eq!(read(WEIGHT_SUM), [units]);
    let off = relative(&read(LOSS_SUM), &fixture.f32s(&format!("{name}.loss")));
    assert!(off < BOUND, "{overrides:?}: the loss is off by {off:.1e}");
    let names: BTreeMap<String, String> =
        weight_names(config.model.decoder()).into_iter().map(|(ours, theirs)| (theirs, ours)).collect();
    let of_loss = format!("{name}.grad.");
    let kept: Vec<String> =
        fixture.file.entries().keys().filter(|key| key.starts_with(&of_loss)).cloned().collect();
    assert!(kept.len() >= 3);
    for key in kept {
        let got = read(&gradient_path(&names[&key[of_loss.len()..]]));
        let off = relative(&got, &fixture.f32s(&key));
        assert!(off < BOUND, "{overrides:?}: {key} is off by {off:.1e}");
    }
}

/// At the first step the reference is the model itself: the loss is log 2 and no answer is preferred yet. The following AdamW
/// steps equal TRL's.
#[test]
fn ten_steps_are_trls() {
    let mut fixture = Fixture::tensors("preference");
    let wanted = fixture.f32s("steps.loss");
    let mut rewards_of_first: Vec<RewardMetrics> = vec![];
    for layout in LAYOUTS {
        let mut table = table(&mut fixture, "steps.", true);
        let config = config(layout, &mut table);
        let mut pairs = begin(&config, table);
        let scores = pairs.score(&config);
        pairs.compared.give(scores);
        for (step, wanted) in wanted.iter().enumerate() {
            pairs.accumulate(&config);
            let posted = apply(&mut pairs.session, &[1e-3]).expect("an update");
            let results = collect(&mut pairs.session, posted).expect("results");
            let rewards = results.rewards.expect("rewards");
            if step == 0 {
                assert!((results.loss as f64 - 2f64.ln()).abs() < 1e-6, "{layout:?}: {}", results.loss);
                let is_close = rewards.reward_margin.abs() < 1e-5 && rewards.reward_chosen.abs() < 1e-5;
                assert!(is_close, "{layout:?}: {rewards:?}");
            }
            let off = (results.loss - wanted).abs();
            assert!(off < 1e-5, "{layout:?}, step {}: {} is not {wanted}", step + 1, results.loss);
            assert!(step < 3 || rewards.reward_accuracy == 1.0, "{rewards:?}");
            // Named sums do not depend on the split.
            if rewards_of_first.len() <= step {
                rewards_of_first.push(rewards);
            }
            for ((name, got), (_, first)) in rewards.named().into_iter().zip(rewards_of_first[step].named()) {
                let is_same = (got - first).abs() < 1e-4 || (step == 0 && name == "reward_accuracy");
                assert!(is_same, "{layout:?}, step {}, {name}: {got} is not {first}", step + 1);
            }
        }
    }
}
