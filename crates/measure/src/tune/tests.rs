//! Tests the search on simulated machines, and once on this one.

use std::collections::HashSet;
use std::path::Path;

use super::*;
use crate::bench::Start;
use flatout_ir::Target;
use flatout_ir::random::{normal, philox};
use flatout_ir::{Precision, Recompute};
use flatout_train::device::named;
use flatout_train::recipes::resolve;
use flatout_train::switches::Autotune;
use space::Knob;

const SMALL: [&str; 7] = [
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "model.context=32",
    "eval.rows=0",
];

fn config(overrides: &[&str]) -> Config {
    let words: Vec<String> = SMALL.iter().chain(overrides).map(|word| word.to_string()).collect();
    resolve("tiny", &[], &words).expect("a config")
}

const ENDLESS: Duration = Duration::from_secs(100_000);

/// A simulated machine, different for every seed, with a true time for each setting.
struct Machine {
    seed: u64,
    /// Standard deviation of a visit's logarithm.
    noise: f64,
    visits: u64,
    seconds: f64,
    seconds_a_visit: f64,
}

impl Machine {
    fn new(seed: u64, noise: f64) -> Machine {
        Machine { seed, noise, visits: 0, seconds: 0.0, seconds_a_visit: 1.0 }
    }

    /// A number between 0 and 1 that is fixed for a machine.
    fn draw(&self, of: u32) -> f64 {
        philox([of, 0, 0, 0], [self.seed as u32, 9])[0] as f64 / u32::MAX as f64
    }

    /// The prediction with an error of up to a fifth for each micro-batch and a few percent for recomputation, and effects that
    /// are not predicted: algorithms, whose gain depends on the micro-batch, and threads.
    fn truth(&self, candidate: &Candidate) -> f64 {
        let setting = &candidate.setting;
        let rows = setting.micro_batch;
        let off = |of: usize, by: f64| 1.0 + by * (2.0 * self.draw(of as u32) - 1.0);
        let recompute =
            off(101 + setting.recompute as usize, 0.03) * off(111 + setting.precision as usize, 0.02);
        let autotune = match setting.autotune {
            Autotune::Full => 1.0 - (0.05 + 0.001 * rows as f64) * self.draw(120),
            Autotune::Off => 1.0 + 0.05 * self.draw(121),
            Autotune::Quick => 1.0,
        };
        let workers = 1.0 + 0.1 * self.draw(122) / setting.workers.unwrap_or(1) as f64;
        candidate.predicted_ms * off(rows, 0.2) * recompute * autotune * workers
    }

    fn visit(&mut self, candidate: &Candidate) -> Timed {
        let at = self.visits;
        self.visits += 1;
        self.seconds += self.seconds_a_visit;
        let drift = 1.0 + 0.1 * (at as f64 / 8.0).sin();
        let disturbed = philox([at as u32, 1, 0, 0], [self.seed as u32, 7])[0].is_multiple_of(25);
        let own = (self.noise * normal(self.seed, 1, at) as f64).exp() * if disturbed { 1.5 } else { 1.0 };
        timed(self.truth(candidate) * drift * own)
    }
}

fn timed(ms: f64) -> Timed {
    Timed {
        step_ms: vec![ms; 3],
        around_ms: vec![],
        losses: vec![6.0, 5.0],
        start: Start::default(),
        arena_bytes: 1,
        driver_bytes: 0,
        launches: 1,
        parameters: 1,
    }
}

/// A search on a simulated machine, and the settings it visited.
fn searched(space: &Space<'_>, machine: &mut Machine, budget: Duration) -> (TuneOutcome, HashSet<Setting>) {
    let machine = std::cell::RefCell::new(machine);
    let mut visited = HashSet::new();
    let mut visit = |candidate: &Candidate| {
        visited.insert(candidate.setting.clone());
        Ok(machine.borrow_mut().visit(candidate))
    };
    let mut elapsed = || Duration::from_secs_f64(machine.borrow().seconds);
    let mut watch = Watch { visit: &mut visit, elapsed: &mut elapsed, budget, say: &mut |_| {} };
    let found = search(space, &mut watch).expect("a result");
    (found, visited)
}

/// All settings that fit and are allowed.
fn everything(space: &Space<'_>) -> Vec<Candidate> {
    let batch = space.config.train.batch;
    let threads = [None, Some(1), Some(2), Some(flatout_train::machine::threads())];
    let mut all = vec![];
    for micro_batch in (1..=batch).filter(|rows| batch.is_multiple_of(*rows)) {
        for recompute in [Recompute::Cheap, Recompute::None, Recompute::Full] {
            for autotune in Autotune::ALL {
                for workers in threads {
                    let setting = Setting {
                        micro_batch,
                        recompute,
                        autotune: *autotune,
                        workers,
                        ..space.default.setting.clone()
                    };
                    all.extend(space.candidate(&setting));
                }
            }
        }
    }
    all
}

/// The choice is within 3% of the best setting on 24 of 25 machines, and within 12% on 99 of 100: one visit in 25 is disturbed,
/// and where these are the visits that decide, the search keeps the defaults. The worst of a thousand machines is random (10% to
/// 47% for different thousands).
#[test]
fn the_choice_is_within_three_percent_of_an_exhaustive_sweep() {
    let config = config(&["train.batch=32", "train.micro_batch=8"]);
    let target = named("h200", &config.switches).expect("a GPU");
    let space = Space::new(&config, &target, Class::Bounded, &[], true).expect("a space");
    let all = everything(&space);
    let (machines, mut within, mut near, mut visits, mut worst) = (1000, 0, 0, 0, 0.0f64);
    for seed in 0..machines {
        let mut machine = Machine::new(seed, 0.01);
        let (found, _) = searched(&space, &mut machine, ENDLESS);
        let best = all.iter().map(|candidate| machine.truth(candidate)).fold(f64::INFINITY, f64::min);
        let chosen = if found.verdict == Verdict::Faster { &found.choice } else { &found.default };
        let off = machine.truth(&space.candidate(&chosen.setting).expect("it fits")) / best;
        worst = worst.max(off);
        within += (off <= 1.03) as u64;
        near += (off <= 1.12) as u64;
        visits += machine.visits;
    }
    println!(
        "{within} of {machines} within 3%, {worst:.3} the worst, {} visits each of {} settings",
        visits / machines,
        all.len()
    );
    assert!(within * 25 >= machines * 24, "{within} of {machines} within 3%");
    assert!(near * 100 >= machines * 99, "{near} of {machines} within 12%");
}

/// A machine with more noise needs more visits and does not propose noise.
#[test]
fn noise_is_not_proposed() {
    let config = config(&["train.batch=32", "train.micro_batch=8"]);
    let target = named("h200", &config.switches).expect("a GPU");
    let given = ["switches.recompute", "switches.autotune"].map(String::from);
    let space = Space::new(&config, &target, Class::Bounded, &given, false).expect("a space");
    let mut proposed = 0;
    for seed in 0..100 {
        let machine = std::cell::RefCell::new(Machine::new(seed, 0.03));
        // Every setting takes the same time.
        let mut visit = |_: &Candidate| Ok(machine.borrow_mut().visit(&space.default));
        let budget = ENDLESS;
        let mut elapsed = || Duration::from_secs_f64(machine.borrow().seconds);
        let mut watch = Watch { visit: &mut visit, elapsed: &mut elapsed, budget, say: &mut |_| {} };
        let found = search(&space, &mut watch).expect("a result");
        proposed += (found.verdict == Verdict::Faster) as usize;
        assert_eq!(found.settings.is_empty(), found.verdict != Verdict::Faster);
    }
    println!("{proposed} of 100 propose noise");
    assert!(proposed <= 1, "{proposed}");
}

/// Whatever the memory, a setting that does not fit is neither visited nor proposed, and its row says what it needs.
#[test]
fn settings_that_do_not_fit_are_never_tried() {
    let config = config(&["train.batch=32", "train.micro_batch=8"]);
    let large = named("h200", &config.switches).expect("a GPU");
    let largest = Space::new(&config, &large, Class::Bounded, &[], false).expect("a space");
    let full = Setting { micro_batch: 32, recompute: Recompute::None, ..largest.default.setting.clone() };
    let full = largest.candidate(&full).expect("it fits an h200").bytes;
    let mut refused_some = 0;
    for percent in [40, 55, 70, 85, 100] {
        let least = largest.default.bytes;
        let target = Target { memory_bytes: least + (full - least) * percent / 100, ..large.clone() };
        let space = Space::new(&config, &target, Class::Bounded, &[], false).expect("a space");
        for seed in 0..10 {
            let (found, visited) =
                searched(&space, &mut Machine::new(seed, 0.005), Duration::from_secs(1000));
            for setting in &visited {
                let fits = space.candidate(setting).unwrap_or_else(|why| panic!("{setting:?}: {}", why.why));
                assert!(fits.bytes <= target.memory_bytes, "{setting:?}");
            }
            assert!(found.choice.bytes <= target.memory_bytes);
            let too_large: Vec<_> =
                found.rows.iter().filter(|row| row.fate == Fate::LeftOut(Reason::DoesNotFit)).collect();
            refused_some += !too_large.is_empty() as usize;
            for row in too_large {
                assert!(
                    row.bytes.expect("planned") > target.memory_bytes && row.step_ms.is_none(),
                    "{row:?}"
                );
                assert!(row.why.starts_with("needs ") && !visited.contains(&row.setting), "{row:?}");
            }
        }
    }
    assert!(refused_some >= 40, "{refused_some}");
    let nothing = Target { memory_bytes: 1 << 10, ..large };
    assert!(matches!(Space::new(&config, &nothing, Class::Bounded, &[], false), Err(Failure::User(_))));
}

/// Every setting that is left out has a reason, and none is tried that the user fixed or does not allow.
#[test]
fn everything_left_out_has_a_reason() {
    let config = config(&["train.batch=24", "train.micro_batch=8"]);
    let target = named("h200", &config.switches).expect("a GPU");
    for (allow, given) in [
        (Class::Bitwise, vec![]),
        (Class::Bounded, vec!["train.accumulate".to_string()]),
        (Class::Bounded, vec!["switches.compile".into(), "switches.precision".into()]),
        (Class::Statistical, vec![]),
    ] {
        let space = Space::new(&config, &target, allow, &given, true).expect("a space");
        let (found, visited) = searched(&space, &mut Machine::new(3, 0.01), Duration::from_secs(40));
        let default = &space.default.setting;
        for row in &found.rows {
            assert!(row.why.len() > 10 && !row.name.is_empty() && !row.against.is_empty(), "{row:?}");
            assert_eq!(row.over.is_some(), row.step_ms.is_some(), "{row:?}");
        }
        assert!(found.held.iter().all(|held| held.why.len() > 10), "{:?}", found.held);
        let held: Vec<&str> = found.held.iter().map(|held| held.knob).collect();
        for setting in &visited {
            assert!(space.class(setting) <= allow, "{allow:?}: {setting:?}");
            for knob in Knob::ALL.into_iter().filter(|knob| held.contains(&knob.name())) {
                assert_eq!(knob.value(setting), knob.value(default), "{held:?} {setting:?}");
            }
            // Every setting that was visited and is not the default has a row.
            let is_reported = setting == default || found.rows.iter().any(|row| row.setting == *setting);
            assert!(is_reported, "{setting:?}");
        }
        let not_allowed = |row: &&Row| row.fate == Fate::LeftOut(Reason::NotAllowed);
        match (allow, given.is_empty()) {
            (Class::Bitwise, _) => {
                assert_eq!(held, ["micro_batch", "autotune"]);
                assert!(found.rows.iter().filter(not_allowed).count() >= 2, "other precisions");
            }
            (_, false) => assert!(held.contains(&"micro_batch") || held.contains(&"autotune"), "{held:?}"),
            _ => assert!(held.is_empty(), "{held:?}"),
        }
    }
    // A batch with more divisors than a sweep takes has a row for each.
    let many = config.with(&["train.batch=240".into()]).expect("a config");
    let space = Space::new(&many, &target, Class::Bounded, &[], false).expect("a space");
    let (found, visited) = searched(&space, &mut Machine::new(5, 0.003), ENDLESS);
    let splits: HashSet<usize> = found.rows.iter().map(|row| row.setting.micro_batch).chain([8]).collect();
    let divisors = (1..=240).filter(|rows| 240usize.is_multiple_of(*rows)).count();
    assert_eq!(splits.len(), divisors);
    assert!(visited.iter().map(|s| s.micro_batch).collect::<HashSet<_>>().len() < divisors);
    assert!(found.rows.iter().any(|row| row.fate == Fate::LeftOut(Reason::FarFromTheFastest)));
}

/// On a GPU, precisions that are predicted to be much slower are not visited.
#[test]
fn hopeless_precisions_are_skipped_by_prediction() {
    let words = ["layers=8", "batch=16", "micro_batch=8"].map(String::from);
    let config = resolve("pretrain-226m", &[], &words).expect("a config");
    let target = named("h200", &config.switches).expect("a GPU");
    let space = Space::new(&config, &target, Class::Bounded, &[], false).expect("a space");
    assert_eq!(space.default.setting.precision, Precision::BF16);
    let (open, rejected) = space.phase(Phase::Split, &space.default.setting);
    assert!(open.iter().all(|candidate| candidate.setting.precision == Precision::BF16));
    let fp32 = rejected.iter().filter(|r| r.setting.precision == Precision::F32);
    let reasons: Vec<_> = fp32.map(|r| (r.reason, r.why.clone())).collect();
    assert!(reasons.len() >= 3, "{reasons:?}");
    assert!(
        reasons
            .iter()
            .all(|(reason, why)| *reason == Reason::PredictedSlower && why.starts_with("predicted to take")),
        "{reasons:?}"
    );
    // The same micro-batch with more recomputation does more of the same work.
    assert!(open.iter().all(|candidate| candidate.setting.recompute != Recompute::Full));
    let cheap = open.iter().find(|c| c.setting.micro_batch == 16 && c.setting.recompute == Recompute::Cheap);
    assert!(cheap.is_some(), "what may be faster is measured");
}

#[test]
fn losses_that_leave_the_class_are_not_proposed() {
    let config = config(&["train.batch=32", "train.micro_batch=1"]);
    let target = named("h200", &config.switches).expect("a GPU");
    let space = Space::new(&config, &target, Class::Bounded, &[], false).expect("a space");
    for (off, verdict) in
        [(1.0, Verdict::Faster), (1.0 + 1e-4, Verdict::Faster), (1.01, Verdict::LossesDiffer)]
    {
        let mut visit = |candidate: &Candidate| {
            let is_default = candidate.setting == space.default.setting;
            let (ms, factor) = if is_default { (40.0, 1.0) } else { (30.0, off) };
            Ok(Timed { losses: vec![6.0, 5.0 * factor as f32], ..timed(ms) })
        };
        let mut seconds = 0;
        let mut elapsed = || {
            seconds += 1;
            Duration::from_secs(seconds)
        };
        let budget = ENDLESS;
        let found =
            search(&space, &mut Watch { visit: &mut visit, elapsed: &mut elapsed, budget, say: &mut |_| {} })
                .unwrap();
        assert_eq!(found.verdict, verdict, "{off}");
        assert_eq!(found.settings.is_empty(), verdict != Verdict::Faster);
        let by = found.faster_by.expect("compared");
        assert!((by.ratio - 40.0 / 30.0).abs() < 1e-9 && by.low <= by.ratio && by.ratio <= by.high);
    }
}

fn report(config: &Config, found: TuneOutcome) -> Report {
    Report {
        recipe: config.recipe.clone(),
        version: "0".into(),
        device: "a \"machine\" of 2 cores".into(),
        ranks: None,
        target: "h200".into(),
        data: "tokens drawn at random".into(),
        batch: config.train.batch,
        tokens_per_update: 1,
        allow: Class::Bounded,
        seconds: 1.0,
        found,
    }
}

/// The recipe, its overrides and the preset resolve to the choice, whatever the overrides were.
#[test]
fn the_preset_resolves_to_the_choice() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut proposed = 0;
    for (seed, words) in [
        (1, vec!["train.batch=32", "train.micro_batch=8"]),
        (2, vec!["train.batch=24", "train.micro_batch=auto"]),
        (3, vec!["train.batch=16", "train.accumulate=16", "train.micro_batch=auto", "recompute=full"]),
        (4, vec!["train.batch=64", "precision=bf16", "loader.workers=1"]),
    ] {
        let words: Vec<String> = SMALL.iter().copied().chain(words).map(String::from).collect();
        let config = resolve("tiny", &[], &words).expect("a config");
        let target = named("h200", &config.switches).expect("a GPU");
        let space = Space::new(&config, &target, Class::Bounded, &[], true).expect("a space");
        let (found, _) = searched(&space, &mut Machine::new(seed, 0.002), ENDLESS);
        let path = folder.path().join(format!("{seed}.toml"));
        let report = report(&config, found);
        let text = preset::text(&report, &config);
        preset::check(&path).expect("a new file");
        preset::write(&path, &text).expect("written");
        preset::check(&path).expect("a preset of `tune` may be overwritten");
        // Overrides take precedence over a preset, so those of tuned keys are not given again.
        let tuned = |word: &&String| {
            let keys = flatout_train::config::keys_of(std::slice::from_ref(*word)).expect("a key");
            !Knob::ALL.iter().any(|knob| knob.keys().contains(&keys[0]))
        };
        let kept: Vec<String> = words.iter().filter(tuned).cloned().collect();
        let mut base = vec![folder.path().join("base.toml").display().to_string()];
        std::fs::write(&base[0], config.to_toml()).expect("a recipe");
        let with = vec![path.display().to_string()];
        let resolved = resolve(&base.remove(0), &with, &kept).expect("a config");
        let resolved = Config { recipe: config.recipe.clone(), ..resolved };
        if report.found.verdict == Verdict::Faster {
            proposed += 1;
            assert_eq!(resolved, report.found.config, "{text}");
            let own = Setting::of(
                &resolved,
                &flatout_train::resolve::compile::compile(&resolved, &target).expect("plans"),
            );
            assert_eq!(own, report.found.choice.setting, "{text}");
            let again = config.with(&report.found.settings).expect("the settings are overrides");
            assert_eq!(again, report.found.config);
        }
    }
    assert!(proposed >= 3, "{proposed}");
    let other = folder.path().join("mine.toml");
    std::fs::write(&other, "[train]\nbatch = 3\n").expect("a file");
    for (path, sentence) in [
        (other.as_path(), "exists and is not a preset of `flatout tune`"),
        (folder.path(), "is a folder"),
        (Path::new("no/such/folder/x.toml"), "there is no folder no/such/folder"),
    ] {
        assert!(preset::check(path).unwrap_err().0.contains(sentence), "{}", path.display());
    }
}

/// On this machine, where micro-batches of one row take several times as long per row as larger ones. If it is so busy that the
/// same update varies by a fifth, only what does not depend on times is checked.
#[test]
fn a_real_search_is_near_the_best_of_a_sweep() {
    let config = config(&["train.batch=64", "train.micro_batch=1", "backend=cpu", "model.context=4"]);
    let stage = Stage::open(&config).expect("a stage");
    let whole = stage.device().target(&config.switches);
    let space = Space::new(&config, &whole, Class::Bounded, &[], false).expect("a space");
    // A micro-batch of all rows does not fit, whatever is recomputed.
    let all = Setting { micro_batch: 64, recompute: Recompute::Full, ..space.default.setting.clone() };
    let memory_bytes = space.candidate(&all).expect("plans").bytes - 1;
    let target = Target { memory_bytes, ..whole.clone() };
    let space = Space::new(&config, &target, Class::Bounded, &[], false).expect("a space");
    // Time is counted in visits, so that a busy machine makes the search slower and not worse.
    let visits = std::cell::Cell::new(0);
    let mut measured = |candidate: &Candidate| {
        visits.set(visits.get() + 1);
        stage.visit(&candidate.config, 1, 6)
    };
    let mut elapsed = || Duration::from_secs(visits.get());
    let budget = Duration::from_secs(120);
    let mut watch = Watch { visit: &mut measured, elapsed: &mut elapsed, budget, say: &mut |_| {} };
    let found = search(&space, &mut watch).expect("a result");
    // The minimum over many updates estimates the time on an idle machine.
    let mut sweep = [1, 2, 4, 8, 16, 32].map(|rows| (rows, f64::INFINITY));
    for _ in 0..5 {
        for (micro_batch, least) in &mut sweep {
            let setting = Setting { micro_batch: *micro_batch, ..found.choice.setting.clone() };
            // A setting that does not fit cannot be the best.
            let Ok(candidate) = space.candidate(&setting) else { continue };
            let timed = stage.visit(&candidate.config, 0, 8).expect("a visit");
            *least = timed.step_ms.iter().copied().fold(*least, f64::min);
        }
    }
    let time = |rows: usize| sweep.iter().find(|(other, _)| *other == rows).expect("swept").1;
    let best = sweep.iter().map(|(_, least)| *least).fold(f64::INFINITY, f64::min);
    let (chosen, default) = (time(found.choice.setting.micro_batch), time(1));
    let name = found.choice.setting.unlike(&found.default.setting);
    println!(
        "{name} takes {:.2} of the best, the default {:.2}; noise {:?}",
        chosen / best,
        default / best,
        found.noise
    );
    assert!(found.choice.bytes <= memory_bytes && found.choice.setting.micro_batch < 64);
    if found.noise.is_some_and(|noise| noise < 0.2) {
        assert!(chosen <= 1.5 * best && chosen < default, "{chosen} {default} {best}: {:?}", found.rows);
    }
}
