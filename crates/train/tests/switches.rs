//! Every value of every switch for every recipe, compiled for the CPU and for a GPU on paper: the report matches the plans, and
//! settings that cannot run are refused with the table's reason. Also checks that the documentation matches the table.

use std::collections::BTreeMap;
use std::rc::Rc;

use flatout_ir::{DType, OpKind, PlanSet, Precision, Role};
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::resolve::compile::{self, Compiled, compile};
use flatout_train::switches::active;
use flatout_train::switches::{Class, Switch, TABLE};

use crate::small_recipe::{different, small, target};

/// A value of a switch and the plans compiled with it.
struct SwitchResult {
    value: &'static str,
    compiled: Rc<Result<Compiled, Failure>>,
}

impl SwitchResult {
    fn reported(&self, switch: &Switch) -> Option<&'static str> {
        let compiled = self.compiled.as_ref().as_ref().ok()?;
        let prepared = active::Prepared::settled(&compiled.settled);
        switch.active(&compiled.plans, &compiled.target, prepared)
    }

    fn plans(&self) -> Option<String> {
        let plans = &self.compiled.as_ref().as_ref().ok()?.plans;
        Some(format!("{:?}{:?}{}", plans.plans, plans.slots, plans.arena_bytes))
    }
}

/// GPUs that need not exist here. Every recipe is compiled for the CPU and for one of them in turn.
const GPUS: [&str; 2] = ["h200", "rtx3090"];

/// Every value of a switch; the value that a recipe has already reuses `base`.
fn results(
    config: &Config,
    base: &Rc<Result<Compiled, Failure>>,
    switch: &Switch,
    place: &str,
) -> Vec<SwitchResult> {
    // On paper `backend=cpu` contradicts the GPU that is planned for.
    let values =
        switch.values().iter().filter(|value| place == "cpu" || (switch.name, **value) != ("backend", "cpu"));
    let attempt = |value: &&'static str| {
        let given =
            config.with(&[format!("switches.{}={value}", switch.name)]).expect("a value of the switch");
        let compiled = match given == *config {
            true => base.clone(),
            false => Rc::new(compile(&given, &target(place, &given))),
        };
        SwitchResult { value, compiled }
    };
    values.map(attempt).collect()
}

/// Switches that a session applies beside the launches or inside a kernel: plans do not show them.
const OF_THE_SESSION: [&str; 5] =
    ["cuda_graphs", "autotune", "attention_kernel", "product_kernel", "deterministic"];

#[test]
fn what_is_reported_is_what_the_plans_hold() {
    let (mut compiled, mut refused) = (0, 0);
    for (i, (recipe, gpu)) in different().into_iter().zip(GPUS.into_iter().cycle()).enumerate() {
        let config = small(recipe, 0);
        // Most switches concern GPUs, and passes treat all CPUs alike: every third recipe tests the CPU.
        let places = if i.is_multiple_of(3) { &["cpu", gpu][..] } else { &[gpu] };
        let compiled_at = |place: &&'static str| (*place, Rc::new(compile(&config, &target(place, &config))));
        let bases: Vec<_> = places.iter().map(compiled_at).collect();
        for (switch, (place, base)) in
            TABLE.iter().flat_map(|switch| bases.iter().map(move |at| (switch, at)))
        {
            let all = results(&config, base, switch, place);
            for one in &all {
                let what = format!("{recipe} on {place}: {}={}", switch.name, one.value);
                let target = target(place, &config);
                match (one.compiled.as_ref(), switch.available(one.value, &target)) {
                    (Err(Failure::User(said)), Err(why)) => assert_eq!(said.0, why, "{what}"),
                    // The reason lies in the model instead of the machine.
                    (Err(Failure::User(said)), Ok(())) => assert!(
                        said.0.starts_with("`rope_cache=on` has nothing to cache")
                            || said.0.starts_with("`image_table=on` has nothing to keep")
                            || said.0.starts_with("`base=nf4` is for weights of layers that nothing trains")
                            || said.0.starts_with("`base=fp8` is for weights of layers that nothing trains")
                            || said.0.starts_with("`optimizer.name` is muon, which keeps no state in")
                            || said.0.starts_with("`recompute=wide` has nothing to run again")
                            || (switch.name == "compile"
                                && said.0.starts_with("`cuda_graphs=on` cannot run")),
                        "{what}: {said}"
                    ),
                    (Ok(_), Err(why)) => panic!("{what} was compiled, and {why}"),
                    (Err(failure), _) => panic!("{what}: {failure}"),
                    (Ok(_), Ok(())) => {}
                }
                refused += one.compiled.is_err() as usize;
                compiled += one.compiled.is_ok() as usize;
                let Some(reported) = one.reported(switch) else { continue };
                let harmless = match switch.name {
                    "deterministic" => reported == "on",
                    "memory_plan" => reported == "off",
                    _ => reported.starts_with("nothing "),
                };
                assert!(
                    one.value == "auto" || reported == one.value || harmless,
                    "{what} is reported {reported}"
                );
            }
            if OF_THE_SESSION.contains(&switch.name) || switch.name == "compile" {
                continue;
            }
            // Two values are reported alike exactly if they give the same plans.
            let known: Vec<_> =
                all.iter().filter_map(|one| Some((one.value, one.reported(switch)?, one.plans()?))).collect();
            for (i, (a, reported_a, plans_a)) in known.iter().enumerate() {
                for (b, reported_b, plans_b) in &known[i + 1..] {
                    assert_eq!(
                        reported_a == reported_b,
                        plans_a == plans_b,
                        "{recipe} on {place}: {}={a} is reported {reported_a}, ={b} {reported_b}",
                        switch.name
                    );
                }
            }
        }
    }
    println!("{compiled} settings compiled, {refused} refused");
    assert!(compiled > 500 && refused > 20, "{compiled}, {refused}");
}

/// Counted in the launches themselves, independently of the code that reports.
#[test]
fn turned_off_is_gone_from_the_launches() {
    let config = small("pretrain-226m", 0);
    let compiled = |setting: &str| {
        let config = config.with(&[format!("switches.{setting}")]).expect("a setting");
        compile(&config, &compile::target()).expect("plans").plans
    };
    let count = |plans: &PlanSet, role: Role, kind: OpKind| {
        plans.plan(role).expect("a plan").launches.iter().filter(|l| l.op.kind() == kind).count()
    };
    let base = compiled("backend=cpu");
    let grad = |plans: &PlanSet, kind| count(plans, Role::GRAD, kind);
    assert_eq!(
        (grad(&base, OpKind::Attention), grad(&compiled("attention=naive"), OpKind::Attention)),
        (2, 0)
    );
    assert_eq!(
        (grad(&base, OpKind::HeadLossTrain), grad(&compiled("fuse.loss=off"), OpKind::HeadLossTrain)),
        (1, 0)
    );
    assert_eq!(grad(&compiled("fuse.norm=off"), OpKind::QkNormRope), 0);
    assert_eq!(grad(&compiled("fuse.elementwise=off"), OpKind::Region), 0);
    // Merged q, k and v save two products per layer in each direction, merged gate and up one.
    let products = grad(&base, OpKind::Product);
    assert!(grad(&compiled("fuse.qkv=off"), OpKind::Product) >= products + 2 * 2 * 2);
    assert!(grad(&compiled("fuse.gate_up=off"), OpKind::Product) >= products + 2 * 2);
    assert!(grad(&compiled("recompute=full"), OpKind::Product) > products);
    assert_eq!(grad(&compiled("recompute=none"), OpKind::Product), products);
    let launches = |plans: &PlanSet| plans.plan(Role::GRAD).expect("a plan").launches.len();
    assert!(launches(&compiled("recompute=none")) < launches(&base));
    let updates = |plans: &PlanSet| count(plans, Role::Apply, OpKind::AdamW);
    assert!(updates(&compiled("fuse.optimizer=off")) > 4 * updates(&base));
    assert!(compiled("memory_plan=off").arena_bytes > base.arena_bytes);
    let narrow = |plans: &PlanSet| {
        let products = &plans.plan(Role::GRAD).expect("a plan").launches;
        products.iter().filter(|l| l.op.kind() == OpKind::Product && l.ins[0].dtype == DType::BF16).count()
    };
    assert_eq!(narrow(&base), 0);
    assert!(narrow(&compiled("precision=bf16")) > products / 2);
}

const PAGE: &str = include_str!("../../../docs/reference/switches.md");

/// The cells of a table's rows, by the first cell without its backticks.
fn documented(heading: &str) -> BTreeMap<String, Vec<String>> {
    let from = PAGE.find(heading).unwrap_or_else(|| panic!("there is a table {heading}"));
    let rows = PAGE[from..].lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split(" | ").map(|cell| cell.trim().replace('`', "")).collect()
    };
    rows.map(|line| (cells(line)[0].clone(), cells(line))).collect()
}

#[test]
fn the_page_is_the_table() {
    let rows = documented("| switch | default | values | off | class |");
    assert_eq!(rows.len(), TABLE.len());
    for switch in TABLE {
        let cells = &rows[switch.name];
        let told = [
            switch.default().unwrap_or_default().into(),
            switch.values().join(", "),
            switch.off.unwrap_or_default().into(),
            format!("{:?}", switch.class).to_lowercase(),
        ];
        assert_eq!(cells[1..5], told, "{}", switch.name);
        assert_eq!(cells[6], switch.guides_word, "{}", switch.name);
        assert!(cells[5].len() > 10, "{} is described", switch.name);
    }
    let rows = documented("| name elsewhere | tool | here |");
    let names: Vec<_> = TABLE.iter().flat_map(|switch| switch.elsewhere).collect();
    assert_eq!(rows.len(), names.len());
    for name in names {
        assert_eq!(rows[name.name][1..], [name.tool, name.here], "{}", name.name);
    }
    let rows = documented("| class | promise | in fp32 | in tf32 and bf16 |");
    for class in [Class::Bitwise, Class::Bounded, Class::Statistical] {
        let bound = |precision| match class.bound(precision) {
            0.0 => "equal bits".to_string(),
            bound => format!("{bound:e}"),
        };
        let told = [Precision::F32, Precision::BF16].map(bound);
        assert_eq!(rows[&format!("{class:?}").to_lowercase()][2..], told);
        assert_eq!(class.bound(Precision::Tf32), class.bound(Precision::BF16));
    }
}
