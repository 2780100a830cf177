//! Effects of switches and passes on numbers, memory and reports: fifty losses with every value of every switch, a disabled pass
//! that the report of active switches must notice, and regions whose inner values take no memory.

use std::collections::{BTreeMap, BTreeSet};

use flatout_ir::{Op, Options, PlanSet, Precision, Program, Recompute, Role, compile as compile_programs};
use flatout_measure::bench;
use flatout_models::decoder::build;
use flatout_models::form::{Form, LossForm};
use flatout_runtime::cpu;
use flatout_train::resolve::compile;
use flatout_train::switches::active;
use flatout_train::switches::data::VisualTokens;
use flatout_train::switches::{AttentionKernel, Autotune, Class, Switch, TABLE};

use crate::small_run::{STEPS, config, train_in};

/// The model of the fifty losses: with dropout, so that recomputation must draw the same numbers again, and a learning rate at
/// which rounding errors are not amplified.
const MODEL: [&str; 3] = ["model.dropout=0.1", "train.micro_batch=4", "optimizer.lr=1e-3"];

/// Every value of a switch that runs here and gives other plans, except precision.
const SETTINGS: [&str; 15] = [
    "attention=naive",
    "fuse.qkv=off",
    "fuse.gate_up=off",
    "fuse.norm=off",
    "fuse.elementwise=off",
    "fuse.loss=off",
    "fuse.optimizer=off",
    "optimizer.state=bf16",
    "optimizer.state=int8",
    "recompute=none",
    "recompute=wide",
    "recompute=full",
    "memory_plan=off",
    "rope_cache=off",
    "compile=off",
];

fn losses(setting: Option<&str>) -> Vec<f32> {
    let folder = tempfile::tempdir().expect("a folder");
    let overrides: Vec<&str> = MODEL.into_iter().chain(setting).collect();
    let steps = train_in(&folder.path().join("run"), &config(&overrides), |_| {});
    assert_eq!(steps.len(), STEPS as usize);
    steps.iter().map(|step| step.loss).collect()
}

/// The active switches with a setting; `None` if it cannot run here.
fn compiled(setting: Option<&str>) -> Option<BTreeMap<String, String>> {
    let overrides: Vec<&str> = MODEL.into_iter().chain(setting).collect();
    let compiled = compile::compile(&config(&overrides), &compile::target()).ok()?;
    Some(active::active(&compiled.plans, &compiled.target, active::Prepared::settled(&compiled.settled)))
}

#[test]
fn every_switch_keeps_fifty_losses_within_its_equivalence_class() {
    let default = compiled(None).expect("the default runs");
    let base = losses(None);
    assert!(
        base[STEPS as usize - 1] < 0.9 * base[0],
        "it learns: {} to {}",
        base[0],
        base[STEPS as usize - 1]
    );
    println!("losses {} to {}", base[0], base[STEPS as usize - 1]);
    let mut compared = BTreeSet::new();
    for switch in TABLE {
        let Switch { name, class, .. } = switch;
        for value in switch.values() {
            let setting = format!("switches.{name}={value}");
            // A setting that cannot run or does not change the plans is skipped.
            if compiled(Some(&setting)).is_none_or(|active| active == default) {
                continue;
            }
            let other = losses(Some(&setting));
            let off = base.iter().zip(&other).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f32::max);
            println!("{setting}: {class:?}, worst of {STEPS} losses off by {off:.1e}");
            match class {
                Class::Bitwise => assert!(same_bits(&base, &other), "{setting} is off by {off:.1e}"),
                _ => assert!((off as f64) < class.bound(Precision::F32), "{setting} is off by {off:.1e}"),
            }
            compared.insert(format!("{name}={value}"));
        }
    }
    let wanted = ["precision=bf16", "precision=fp8"].into_iter().chain(SETTINGS).map(String::from).collect();
    assert_eq!(compared, wanted);
}

/// In bf16 rounding errors are larger, and so is the bound. Twenty updates, as in measurements.
#[test]
fn every_switch_keeps_the_losses_of_a_bf16_run() {
    let bench = |setting: Option<&str>| {
        let words: Vec<&str> = MODEL.into_iter().chain(["precision=bf16"]).chain(setting).collect();
        let mut bench = bench::open(&config(&words)).expect("a bench");
        bench.steps(19).expect("updates");
        bench.losses().to_vec()
    };
    let base = bench(None);
    for setting in SETTINGS {
        let (name, _) = setting.split_once('=').expect("a setting");
        let class = TABLE.iter().find(|switch| switch.name == name).expect("a switch").class;
        let other = bench(Some(setting));
        let off = base.iter().zip(&other).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f32::max);
        println!("{setting}: {class:?}, off by {off:.1e}");
        match class {
            Class::Bitwise => assert!(same_bits(&base, &other), "{setting} is off by {off:.1e}"),
            _ => assert!((off as f64) < class.bound(Precision::BF16), "{setting} is off by {off:.1e}"),
        }
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The plans of a small decoder with elementwise chains of its own.
const NOT_PREPARED: active::Prepared = active::Prepared {
    cuda_graphs: false,
    autotune: Autotune::Off,
    window: false,
    attention_kernel: AttentionKernel::Auto,
    product_kernel: flatout_train::switches::ProductKernel::Auto,
    visual_tokens: VisualTokens::All,
    lengths: None,
    decoded: false,
};

fn plans(options: &Options) -> PlanSet {
    let model = config(&["model.dropout=0.1", "model.positions=learned", "model.embed_scale=1.5"])
        .model
        .decoder()
        .clone();
    let form = Form::Loss(LossForm { dropout: true, ..LossForm::rows(4, model.context) });
    let programs = [Program { role: Role::GRAD, graph: build(&model, form) }];
    compile_programs(&programs, &cpu::target(2), options).expect("plans")
}

#[test]
fn a_pass_that_did_not_run_is_noticed() {
    let target = cpu::target(2);
    let options = Options { rope_positions: Some(32), ..Options::default() };
    let whole = active::active(&plans(&options), &target, NOT_PREPARED);
    let cases = [
        ("merge", "fuse.qkv", "on", "off"),
        ("merge", "fuse.gate_up", "on", "off"),
        ("patterns", "fuse.norm", "on", "off"),
        ("regions", "fuse.elementwise", "on", "off"),
        ("one_pass_loss", "fuse.loss", "on", "off"),
        ("update", "fuse.optimizer", "on", "off"),
        ("recompute", "recompute", "cheap", "none"),
    ];
    for (pass, switch, with, without) in cases {
        assert_eq!(whole[switch], with, "{switch} with every pass");
        // Patterns also remove what merging leaves behind, so without them nothing is merged.
        let merges = pass != "patterns";
        let sabotaged = plans(&Options {
            skip_pass: Some(pass),
            fuse_qkv: merges,
            fuse_gate_up: merges,
            ..options.clone()
        });
        assert_eq!(
            active::active(&sabotaged, &target, NOT_PREPARED)[switch],
            without,
            "{switch} without the pass `{pass}`"
        );
    }
}

#[test]
fn every_model_compiles_to_its_switches() {
    let models = [
        "norm=rms",
        "norm=layer",
        "norm=layer positions=none qk_norm=false",
        "positions=learned qk_norm=false tied=false",
        "positions=none activation=gelu_tanh",
        "activation=relu2 norm=layer",
        "activation=geglu rope_pairs=interleaved",
        "dropout=0.1",
        "dropout=0.1 document_mask=true eval.rows=8",
        "layers=1 kv_heads=2",
        "dropout=0.1 qk_norm=false activation=gelu_tanh norm=layer",
    ];
    let others = [
        "seed=0",
        "precision=bf16",
        "compile=off attention=naive",
        "compile=off recompute=none",
        "micro_batch=1",
    ];
    let settings: Vec<&str> = SETTINGS.into_iter().chain(others).collect();
    let mut refused = vec![];
    for (model, setting) in models.iter().flat_map(|m| settings.iter().map(move |s| (m, s))) {
        let overrides: Vec<&str> = model.split(' ').chain(setting.split(' ')).collect();
        // Compiling ends with a check of the report against the request.
        if let Err(failure) = compile::compile(&config(&overrides), &compile::target()) {
            refused.push(format!("{model} {setting}: {failure}"));
        }
    }
    assert!(
        refused.is_empty(),
        "{} of {}:\n{}",
        refused.len(),
        models.len() * settings.len(),
        refused.join("\n")
    );
}

#[test]
fn the_insides_of_regions_own_no_memory() {
    let options = Options { recompute: Recompute::None, memory_plan: false, ..Options::default() };
    let (with, without) = (plans(&options), plans(&Options { skip_pass: Some("regions"), ..options }));
    let grad = with.plan(Role::GRAD).expect("a plan");
    let (mut regions, mut inside) = (0, BTreeSet::new());
    for launch in &grad.launches {
        let Op::Region { body } = &launch.op else { continue };
        assert_eq!(launch.outs.len(), body.results.len(), "{}: only results have a place", launch.path);
        let results: BTreeSet<_> = body.results.iter().map(|(_, value)| value.node).collect();
        let computed = body.ids().filter(|id| !matches!(body.node(*id).op, Op::Read { .. }));
        inside.extend(computed.filter(|id| !results.contains(id)).map(|id| body.node(id).key));
        regions += 1;
    }
    println!("{regions} regions with {} values inside", inside.len());
    assert!(regions > 0 && !inside.is_empty());

    // Each of these values has a buffer if regions are left out, and no other buffer is added.
    let transient = |plans: &PlanSet| plans.transients(plans.largest_plan()).count();
    assert_eq!(transient(&without) - transient(&with), inside.len());
    let writes = |plans: &PlanSet, key: u64| {
        let launches = &plans.plan(Role::GRAD).expect("a plan").launches;
        launches.iter().filter(|l| l.key == key && matches!(l.op, Op::Map { .. })).count()
    };
    for key in inside {
        assert_eq!((writes(&with, key), writes(&without, key)), (0, 1));
    }
}
