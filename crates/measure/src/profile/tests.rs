use std::collections::BTreeMap;
use std::time::Duration;

use flatout_data::Waited;
use flatout_ir::timings::{Point, Size, Timings};
use flatout_ir::{Role, Work};
use flatout_runtime::LaunchTime;
use serde_json::Value;

use super::budget::{Round, launches, normalised};
use super::*;
use crate::statistics::median;
use flatout_train::recipes::resolve;
use flatout_train::resolve::compile::Compiled;

const SMALL: [&str; 8] = [
    "backend=cpu",
    "model.width=64",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=128",
    "model.context=64",
    "train.batch=8",
];

fn config(overrides: &[&str]) -> Config {
    let words: Vec<String> = SMALL.iter().chain(overrides).map(|word| word.to_string()).collect();
    resolve("tiny", &[], &words).expect("a config")
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0)
}

#[test]
fn the_marginal_cost_of_every_kernel_is_measured() {
    let options = Options { steps: 1, rounds: 1, marginal_seconds: Some(0.02) };
    let config = config(&[]);
    let stage = Stage::open(&config).expect("a stage");
    let report = profile(&config, &options, &stage, &mut |_, _| {}).expect("a report");
    let marginal = report.marginal.as_ref().expect("measured");
    assert!(marginal.step_ms > 0.0 && marginal.kernels.len() > 5, "{marginal:?}");
    // A CPU does not measure energy.
    assert!(marginal.joules.is_none() && marginal.kernels.iter().all(|row| row.added_joules.is_none()));
    let product = marginal.kernels.iter().find(|row| row.name.starts_with("product")).expect("products");
    // Next to other load so short a measurement does not show how much is added.
    assert!(product.added_ms.is_finite() && product.ms > 0.0 && product.launches > 10, "{product:?}");
    // A launch in place of its inputs would compute another value the second time. Kernels below the least share have no row and
    // are not among these.
    let mut bench = stage.bench(&config).expect("a bench");
    let in_place = |t: &&Timed| {
        let role = Role::parse(&t.plan).expect("a role");
        !bench.session().is_repeatable(role, t.launch)
    };
    let once: u64 = report.timed.iter().filter(in_place).map(|t| t.times).sum();
    let of_rows: u64 = marginal.kernels.iter().map(|row| row.launches).sum();
    assert!(once > 0 && marginal.once == once && once + of_rows <= report.launches, "{marginal:?}");
    let tables = page::tables(&report, 3);
    let table = tables.last().expect("a table");
    assert!(table.title.contains("does not measure energy") && table.rows.len() == marginal.kernels.len());
}

#[test]
fn every_table_adds_up_to_the_update_and_the_trace_to_its_kernels() {
    let options = Options { steps: 2, rounds: 3, marginal_seconds: None };
    let mut progress = vec![];
    let config = config(&["micro_batch=4"]);
    let stage = Stage::open(&config).expect("a stage");
    let report = profile(&config, &options, &stage, &mut |round, of| progress.push((round, of)));
    let report = report.expect("a report");
    assert_eq!(progress, [(0, 3), (1, 3), (2, 3)]);
    let budget = &report.budget;
    let idle: f64 = budget.idle().iter().map(|(_, ms)| ms).sum();
    assert!(near(budget.kernels_ms + idle, budget.step_ms), "{budget:?}");
    assert!(near(idle, budget.idle_ms()));
    for rows in [&report.work, &report.kernels, &report.places] {
        assert!(near(rows.iter().map(|row| row.ms).sum(), budget.kernels_ms));
        assert_eq!(rows.iter().map(|row| row.launches).sum::<u64>(), report.launches);
        assert!(rows.windows(2).all(|pair| pair[0].ms >= pair[1].ms), "the longest first");
        let shares: f64 = rows.iter().map(|row| row.share).sum::<f64>() + idle / budget.step_ms;
        assert!(near(shares, 1.0), "{shares}");
    }
    assert_eq!((report.micro_batches, report.tokens_per_update), (2, 8 * 64));
    assert!(report.work.iter().any(|row| row.name == "product" && row.bound == table::Bound::Arithmetic));
    let places: Vec<&str> = report.places.iter().map(|row| row.name.as_str()).collect();
    for place in ["layers.*.ffn product 256x256x64", "layers.*.attn qk_norm_rope, again", "apply adamw"] {
        assert!(places.contains(&place), "{place} in {places:?}");
    }
    assert!(!report.sinks.is_empty() && report.sinks.len() <= 3);
    assert!(report.sinks.windows(2).all(|pair| pair[0].lost_ms >= pair[1].lost_ms));

    let trace: Value = serde_json::from_str(&trace::trace(&report).to_string()).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let slices = |process: u64, thread: u64| -> Vec<(String, f64, f64)> {
        let is_of = |e: &&Value| e["ph"] == "X" && e["pid"] == process && e["tid"] == thread;
        let of = |e: &Value| {
            (e["name"].as_str().unwrap().to_string(), e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap())
        };
        events.iter().filter(is_of).map(of).collect()
    };
    let device = slices(2, 2);
    assert_eq!(device.len() as u64, report.launches);
    assert!((device.iter().map(|(_, _, us)| us).sum::<f64>() / 1e3 - budget.kernels_ms).abs() < 1e-6);
    assert!(device.windows(2).all(|pair| pair[0].1 + pair[0].2 <= pair[1].1 + 1e-6), "end to end");
    let plans: Vec<String> = slices(2, 1).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(plans, ["grad", "grad", "apply"]);
    let host = slices(1, 1);
    for (what, count) in [("rows", 6), ("grad", 6), ("apply", 3), ("results", 3)] {
        assert_eq!(host.iter().filter(|(name, ..)| name == what).count(), count, "{what}");
    }
    let named = events.iter().filter(|e| e["ph"] == "M").count();
    assert_eq!(named + device.len() + plans.len() + host.len(), events.len());
}

/// On the CPU an update is its kernels and little else. Other processes may disturb any round, so rounds are short and many, each
/// sum of kernels is compared with the update of its own round, and the median counts; one of three attempts must succeed.
#[test]
fn kernels_make_up_the_update() {
    let config = config(&["model.layers=1"]);
    let stage = Stage::open(&config).expect("a stage");
    let mut bench = stage.bench(&config).expect("a bench");
    let mut seen = vec![];
    for _ in 0..3 {
        let mut ratios = vec![];
        for _ in 0..25 {
            let round = budget::round(&mut bench, 1).expect("a round");
            let kernels: f64 = round.launches.iter().flatten().map(|time| time.seconds).sum();
            ratios.push(kernels / round.step);
        }
        seen.push(median(&ratios));
        if (seen.last().unwrap() - 1.0).abs() < 0.15 {
            return;
        }
    }
    panic!("kernels over updates: {seen:?}");
}

fn time(launch: usize, seconds: f64) -> LaunchTime {
    LaunchTime { launch, seconds, least_seconds: seconds }
}

#[test]
fn drift_changes_no_share() {
    // The same update on a machine that is up to three times as slow.
    let round = |slow: f64| Round {
        step: slow * 10e-3,
        data: slow * 1e-3,
        without_inputs: slow * 8e-3,
        plans: slow * 7e-3,
        launches: vec![vec![time(0, slow * 1e-3), time(1, slow * 1.5e-3)], vec![time(0, slow * 0.5e-3)]],
    };
    let rounds = normalised([1.0, 3.0, 2.0].map(round).into());
    let times = launches(&rounds);
    let seconds: Vec<f64> = times.iter().flatten().map(|time| time.seconds).collect();
    assert!(seconds.iter().zip([2e-3, 3e-3, 1e-3]).all(|(a, b)| near(*a, b)), "{seconds:?}");
    let compiled =
        flatout_train::resolve::compile::compile(&config(&[]), &flatout_train::resolve::compile::target())
            .expect("plans");
    let runs = [(Role::GRAD, 2), (Role::Apply, 1)];
    let timed = joined(&compiled, &times, &runs);
    let budget = budget::budget(&rounds, &timed, None, &runs);
    let parts = [budget.step_ms, budget.kernels_ms, budget.launch_ms, budget.synchronisation_ms];
    assert!(parts.iter().zip([20.0, 11.0, 3.0, 2.0]).all(|(a, b)| near(*a, b)), "{budget:?}");
    assert!(near(budget.copy_ms, 2.0) && near(budget.data_ms, 2.0) && budget.noise_ms < 1e-9, "{budget:?}");
}

/// A configuration on the CPU, with all launches at their roofline except one kind of work, and a budget.
struct Fixture {
    config: Config,
    stage: Stage,
    compiled: Compiled,
    active: BTreeMap<String, String>,
    budget: Budget,
    waited: Waited,
    /// The time of the slow work as a multiple of its roofline.
    slow: f64,
}

impl Fixture {
    fn new(overrides: &[&str]) -> Fixture {
        let config = config(overrides);
        let stage = Stage::open(&config).expect("a stage");
        let compiled = stage.compile(&config).expect("plans");
        let settled = flatout_train::switches::active::Prepared::settled(&compiled.settled);
        let active = flatout_train::switches::active::active(&compiled.plans, &compiled.target, settled);
        let budget = Budget {
            step_ms: 100.0,
            kernels_ms: 100.0,
            wire_ms: None,
            launch_ms: 0.0,
            synchronisation_ms: 0.0,
            copy_ms: 0.0,
            data_ms: 0.0,
            noise_ms: 0.5,
        };
        Fixture { config, stage, compiled, active, budget, waited: Waited::default(), slow: 100.0 }
    }

    /// The launches where this kind of work is slow.
    fn timed(&self, slow: Option<Work>) -> Vec<Timed> {
        let parts = self.config.train.batch / self.compiled.micro_batch;
        let mut times: Vec<Vec<LaunchTime>> = vec![];
        for role in [Role::GRAD, Role::Apply] {
            let launches = &self.compiled.plans.plan(role).expect("a plan").launches;
            times.push((0..launches.len()).map(|i| time(i, 0.0)).collect());
        }
        let mut timed = joined(&self.compiled, &times, &[(Role::GRAD, parts as u64), (Role::Apply, 1)]);
        for t in &mut timed {
            t.seconds = t.roofline_seconds() * if Some(t.work) == slow { self.slow } else { 1.0 };
            t.is_again &= slow.is_none();
        }
        timed
    }

    /// The largest sink.
    fn first(&self, slow: Option<Work>) -> Sink {
        let timed = self.timed(slow);
        let context = sinks::Context {
            config: &self.config,
            stage: &self.stage,
            compiled: &self.compiled,
            active: &self.active,
            budget: &self.budget,
            waited: self.waited,
            launches: timed.iter().map(|t| t.times as usize).sum(),
            parts: self.config.train.batch / self.compiled.micro_batch,
        };
        sinks(&context, &timed).into_iter().next().expect("a sink")
    }

    fn on_gpu(mut self, states: &[(&str, &str)]) -> Fixture {
        for (name, state) in [("backend", "cuda")].iter().chain(states) {
            self.active.insert(name.to_string(), state.to_string());
        }
        self
    }
}

#[test]
fn sinks_name_what_would_help_here() {
    let says = |sink: Sink, parts: &[&str]| {
        assert!(parts.iter().all(|part| sink.words.contains(part)), "{parts:?} in {}", sink.words);
    };
    says(
        Fixture::new(&[]).first(Some(Work::Product)),
        &["product takes", "at 1.0% of its roofline (", "no switch"],
    );
    says(
        Fixture::new(&["fuse.qkv=off"]).first(Some(Work::Product)),
        &["fuse.qkv=on makes one product of three"],
    );
    says(Fixture::new(&["fuse.optimizer=off"]).first(Some(Work::Optimizer)), &["fuse.optimizer=on updates"]);
    says(Fixture::new(&["fuse.norm=off"]).first(Some(Work::Elementwise)), &["fuse.norm=on adds"]);
    let short = Fixture { slow: 2.0, ..Fixture::new(&["micro_batch=2"]) };
    says(
        short.first(Some(Work::Elementwise)),
        &["map takes", "train.micro_batch=4 makes fewer and longer ones"],
    );
    says(
        Fixture::new(&[]).on_gpu(&[("autotune", "quick")]).first(Some(Work::Product)),
        &["precision=bf16 multiplies up to", "autotune=full times every algorithm"],
    );
    let mut hopper = Fixture::new(&["precision=bf16"]).on_gpu(&[]);
    hopper.compiled.target.rates.fp8_flops = Some(2.0 * hopper.compiled.target.rates.bf16_flops);
    says(
        hopper.first(Some(Work::Product)),
        &["precision=fp8 multiplies up to 2 times as fast (statistical)"],
    );
    says(hopper.first(Some(Work::Optimizer)), &["optimizer.state=bf16 moves fewer bytes"]);
    says(Fixture::new(&[]).on_gpu(&[]).first(Some(Work::Norm)), &["precision=bf16 moves half the bytes"]);
    // Where no kernel is slow, recomputation is the largest sink.
    says(
        Fixture::new(&[]).first(None),
        &["recomputing what was not kept", "recompute=none keeps it, in ", " more memory"],
    );

    let mut idle = Fixture::new(&["micro_batch=4"]);
    idle.budget.launch_ms = 40.0;
    let launch = idle.first(None);
    assert_eq!((launch.name.as_str(), launch.lost_ms), ("launch", 40.0));
    says(
        launch,
        &["the time between kernels (", "takes 40.0 ms, 40% of the step: train.micro_batch=8 makes fewer"],
    );
    says(
        idle.on_gpu(&[("cuda_graphs", "off")]).first(None),
        &["cuda_graphs=on replays them without the host"],
    );

    let mut starved = Fixture::new(&["loader.workers=3"]);
    starved.budget.data_ms = 30.0;
    starved.waited.packing = Duration::from_secs(1);
    says(
        starved.first(None),
        &["waiting for rows (mostly packing) takes 30.0 ms, 30%", "loader.workers=6 (now 3)"],
    );
    // A part within noise is no sink.
    let mut noisy = Fixture::new(&[]);
    (noisy.budget.copy_ms, noisy.budget.noise_ms) = (30.0, 31.0);
    assert_ne!(noisy.first(None).name, "copy");
}

#[test]
fn rows_have_predictions_once_kernels_were_timed() {
    let mut fixture = Fixture::new(&[]);
    assert!(fixture.timed(None).iter().all(|t| t.predicted_seconds.is_none()));
    let launches = fixture.compiled.plans.plans.iter().flat_map(|plan| &plan.launches);
    let rates = fixture.compiled.target.rates;
    let point = |size: Size| Point { seconds: 4.0 * size.roofline_seconds(&rates), size };
    fixture.compiled.target.timings = Timings::new(launches.map(|launch| point(Size::of(launch))));
    let timed = fixture.timed(Some(Work::Norm));
    let rows = by_work(&timed, fixture.budget.step_ms);
    let predicted = |row: &Row| row.predicted_ms.expect("all were timed") / row.roofline_ms;
    assert!(rows.iter().all(|row| near(predicted(row), 4.0)), "{rows:?}");
    let words = fixture.first(Some(Work::Norm)).words;
    assert!(words.contains("of its roofline (memory) and 25.0 times as long as predicted: "), "{words}");
}

#[test]
fn percentages_and_times_are_rounded() {
    let texts = [0.004, 0.0999, 0.31, 1.0].map(sinks::percent);
    assert_eq!(texts, ["0.4%", "10%", "31%", "100%"]);
    let texts = [0.0123, 1.234, 12.34, 123.4].map(sinks::millis);
    assert_eq!(texts, ["12 us", "1.23 ms", "12.3 ms", "123 ms"]);
}
