use flatout_ir::{Launch, Target};

use super::*;
use flatout_train::device;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::resolve::prediction::step_cost;

/// The true time of a launch on an imaginary GPU: a fixed cost, better occupancy for large work, and wide heads and rows that are
/// faster than narrow ones.
fn truth(launch: &Launch, target: &Target) -> f64 {
    let size = Size::of(launch);
    let filled = 1.0 - (-(size.flops as f64) / 4e9).exp();
    let wide = (size.inner as f64 / 64.0).powf(0.25).clamp(0.7, 1.3);
    let share = if size.work == flatout_ir::Work::Attention { 0.35 } else { 0.65 };
    let arithmetic = size.flops as f64 / (target.rates.of(size.units) * (0.05 + share * filled * wide));
    let memory = size.bytes as f64 / (0.8 * target.rates.memory_bytes);
    3e-6 + arithmetic.max(memory)
}

/// Timings of all samples of a list by [`truth`].
fn calibrated(samples: &[Sample], target_for: &dyn Fn(&Config) -> Target) -> Timings {
    let mut points = vec![];
    for sample in samples {
        let config = config(sample, Backend::Auto).expect("a sample is a config");
        let target = target_for(&config);
        let compiled = compile(&config, &target).expect("a sample that fits");
        assert_eq!(compiled.micro_batch, sample.rows);
        for launch in compiled.plans.plans.iter().flat_map(|plan| &plan.launches) {
            points.push(Point { size: Size::of(launch), seconds: truth(launch, &target) });
        }
    }
    Timings::new(points)
}

fn real_seconds(compiled: &Compiled, parts: usize) -> f64 {
    let of = |role| {
        let launches = &compiled.plans.plan(role).expect("a plan").launches;
        launches.iter().map(|l| truth(l, &compiled.target)).sum::<f64>()
    };
    parts as f64 * of(Role::GRAD) + of(Role::Apply)
}

/// The samples cover the launches of recipes: a step of other sizes is predicted from them, and none of its launches is of a kind
/// that was not timed.
#[test]
fn samples_span_the_recipes() {
    let paper = |config: &Config| device::named("h200", &config.switches).expect("in the table");
    let timings = calibrated(GPU, &paper);
    let settings =
        ["", "precision=tf32", "precision=fp32", "recompute=full", "fuse.norm=off", "fuse.loss=off"];
    let steps = [("pretrain-226m", 8), ("pretrain-226m", 32), ("smollm2-360m", 8), ("gpt2-124m", 32)];
    let mut checked = 0;
    for (recipe, rows) in steps {
        for setting in settings {
            let words = [
                format!("train.batch={}", 2 * rows),
                format!("train.micro_batch={rows}"),
                "layers=2".into(),
                "eval.rows=0".into(),
                if setting.is_empty() { "precision=auto".into() } else { setting.to_string() },
            ];
            let config = recipes::resolve(recipe, &[], &words).expect("a config");
            let target = Target { timings: timings.clone(), ..paper(&config) };
            let compiled = compile(&config, &target).expect("plans");
            let cost = step_cost(&compiled, config.train.batch);
            let ratio = cost.predicted_seconds / real_seconds(&compiled, 2);
            let what = format!("{recipe} of {rows} rows {setting}: {ratio:.3}");
            assert!(cost.untimed_seconds < 1e-3 * cost.predicted_seconds, "{what}: {}", cost.untimed_seconds);
            assert!((0.8..1.25).contains(&ratio), "{what}");
            assert!(cost.predicted_seconds > 1.1 * cost.roofline_seconds, "{what}");
            checked += 1;
        }
    }
    assert_eq!(checked, 24);
}

#[test]
fn samples_of_a_cpu_span_tiny() {
    let cpu = |_: &Config| flatout_train::resolve::compile::target();
    let timings = calibrated(CPU, &cpu);
    for setting in ["batch=8", "micro_batch=2", "precision=bf16", "width=192", "context=256", "layers=6"] {
        let config = recipes::resolve("tiny", &[], &[setting.into()]).expect("a config");
        let target = Target { timings: timings.clone(), ..cpu(&config) };
        let compiled = compile(&config, &target).expect("plans");
        let cost = step_cost(&compiled, config.train.batch);
        let ratio =
            cost.predicted_seconds / real_seconds(&compiled, config.train.batch / compiled.micro_batch);
        assert!(
            (0.8..1.25).contains(&ratio) && cost.untimed_seconds < 1e-3 * cost.predicted_seconds,
            "{setting}: {ratio}"
        );
    }
}

/// On this machine with the real clock: a model's launches predict a deeper model and a larger batch. Uses the minimum of several
/// passes, which other processes disturb little.
#[test]
fn a_step_is_predicted_from_another_model() {
    let stage = Stage::open(&recipes::resolve(DECODER, &[], &["backend=cpu".into()]).unwrap()).unwrap();
    let timed = |words: &str| {
        let fixed =
            "width=64 heads=2 kv_heads=1 head_size=32 ffn=160 context=64 vocab=256 eval.rows=0 backend=cpu";
        let words: Vec<String> = words.split(' ').chain(fixed.split(' ')).map(String::from).collect();
        let config = recipes::resolve(DECODER, &[], &words).expect("a config");
        let mut bench = stage.bench(&config).expect("a bench");
        let roles = [Role::GRAD, Role::Apply];
        let times = bench.session().time(&roles, 12).expect("times");
        let compiled = bench.compiled().clone();
        let mut points = vec![];
        for (role, times) in roles.into_iter().zip(times) {
            let launches = &compiled.plans.plan(role).expect("a plan").launches;
            let point = |t: &flatout_runtime::LaunchTime| Point {
                size: Size::of(&launches[t.launch]),
                seconds: t.least_seconds,
            };
            points.extend(times.iter().map(point));
        }
        (compiled, config.train.batch, points)
    };
    let (_, _, points) = timed("layers=1 train.batch=8 train.micro_batch=8");
    let timings = Timings::new(points);
    for words in
        ["layers=3 train.batch=8 train.micro_batch=8", "layers=2 train.batch=16 train.micro_batch=16"]
    {
        let (mut compiled, batch, points) = timed(words);
        compiled.target.timings = timings.clone();
        let expected = step_cost(&compiled, batch).predicted_seconds;
        let measured: f64 = points.iter().map(|p| p.seconds).sum();
        let ratio = expected / measured;
        println!("{words}: expected over measured {ratio:.2}");
        assert!((0.4..2.5).contains(&ratio), "{words}: {ratio}");
    }
}

#[test]
fn a_disturbed_machine_is_noticed() {
    let idle = Steadiness { spread: 1.06, drift: 1.03 };
    assert!(!idle.is_disturbed());
    assert!(Steadiness { spread: 1.9, ..idle }.is_disturbed(), "another process takes turns with ours");
    assert!(Steadiness { drift: 1.6, ..idle }.is_disturbed(), "one that began or ended meanwhile");
}
