//! Tests the method on simulated clocks, with noise, drift and disturbances of known size.

use super::*;
use crate::ablate::stored_visits::tests::timed;
use crate::ablate::table::{BreakEven, Measured, RowState, Table, Verdict};
use crate::ablate::variants::Group;
use crate::bench::guarded;
use crate::bench::{Start, Timed};
use flatout_ir::Precision;
use flatout_ir::random::{normal, philox};
use flatout_train::recipes::resolve;
use flatout_train::switches::{Class, TABLE};

/// A simulated machine: every visit of a variant takes its true time with noise.
struct Machine {
    seed: u64,
    visits: u64,
    /// Elapsed seconds.
    clock: f64,
}

impl Machine {
    fn new(seed: u64) -> Machine {
        Machine { seed, visits: 0, clock: 0.0 }
    }

    /// Eight updates of `true_ms`: 2% of noise for each update, 1% for the visit, a drift of 20% over fifty visits, and one visit
    /// in 25 that another tenant makes 1.5 times as slow.
    fn visit(&mut self, true_ms: f64) -> Timed {
        let at = self.visits;
        self.visits += 1;
        let drift = 1.0 + 0.1 * (at as f64 / 8.0).sin();
        let own = (0.01 * normal(self.seed, 1, at) as f64).exp();
        let disturbed = philox([at as u32, 0, 0, 0], [self.seed as u32, 7])[0].is_multiple_of(25);
        let level = true_ms * drift * own * if disturbed { 1.5 } else { 1.0 };
        let step = |i: u64| level * (0.02 * normal(self.seed, 2 + at, i) as f64).exp();
        let step_ms: Vec<f64> = (0..8).map(step).collect();
        self.clock += 0.1 + step_ms.iter().sum::<f64>() / 1e3;
        Timed { step_ms, ..timed() }
    }
}

/// A variant. The config's seed identifies it to the simulated machine.
fn variant(base: &Config, name: &str, number: u64, class: Class) -> Variant {
    let mut config = base.clone();
    config.train.seed = number;
    let fate = Fate::Measured { key: name.into(), config: Box::new(config) };
    let settings = vec![format!("switches.{name}=off")];
    Variant {
        group: Group::Off,
        name: name.into(),
        about: "x",
        settings,
        class: Some(class),
        stretch: 1.0,
        fate,
    }
}

fn base() -> Config {
    resolve("tiny", &[], &[]).expect("a config")
}

const BASE_MS: f64 = 30.0;

/// Measures variants of these true ratios on a simulated machine, in `repeats` rounds.
fn measured(seed: u64, ratios: &[f64], repeats: usize) -> Table {
    let base = base();
    let row = |(i, _): (usize, &f64)| variant(&base, &format!("v{i}"), 1 + i as u64, Class::Bitwise);
    let variants: Vec<Variant> = ratios.iter().enumerate().map(row).collect();
    let mut machine = Machine::new(seed);
    let plan =
        Plan { variants: &variants, base: &base, repeats, budget: Duration::MAX, is_interleaved: false };
    let mut kept = StoredVisits::nowhere(None);
    let mut visit = |config: &Config, _: Subject| {
        let ratio = if config.train.seed == 0 { 1.0 } else { ratios[config.train.seed as usize - 1] };
        Ok(machine.visit(BASE_MS * ratio))
    };
    let complete = rounds(&plan, &mut kept, &mut visit, &mut || Duration::ZERO, &mut |_| {});
    assert_eq!(complete, Ok(true));
    table(&variants, &kept, Precision::F32, 1024).expect("a table")
}

fn row(table: &Table, i: usize) -> &Measured {
    table.rows[i].measured.as_ref().expect("measured")
}

/// A table of twenty dummies, on fifty machines.
#[test]
fn a_switch_that_does_nothing_is_within_noise() {
    let (mut wrong, mut all) = (0, 0);
    for seed in 0..50 {
        let table = measured(seed, &[1.0; 20], 5);
        wrong += (0..20).filter(|i| row(&table, *i).verdict != Verdict::WithinNoise).count();
        all += 20;
    }
    println!("{wrong} of {all} dummies look like something");
    assert!(wrong * 100 <= all, "{wrong} of {all}");
    // After one round a dummy that was disturbed looks like something only where the base never was.
    let after_one = |seed| measured(seed, &[1.0; 20], 1);
    let wrong = |table: &Table| (0..20).filter(|i| row(table, *i).verdict != Verdict::WithinNoise).count();
    let wrong: usize = (0..50).map(|seed| wrong(&after_one(seed))).sum();
    println!("{wrong} of {all} after one round");
    assert!(wrong * 100 <= 3 * all, "{wrong} of {all}");
}

/// Cores shared with other tenants: correlated noise of 10% that lasts for about five updates, and 2% for each update.
struct Shared {
    seed: u64,
    updates: u64,
    level: f64,
}

impl Shared {
    fn update(&mut self, true_ms: f64) -> f64 {
        let draw = |stream| normal(self.seed, stream, self.updates) as f64;
        let stays = 0.8f64;
        self.level = stays * self.level + (1.0 - stays * stays).sqrt() * 0.1 * draw(1);
        let ms = true_ms * (self.level + 0.02 * draw(2)).exp();
        self.updates += 1;
        ms
    }

    /// As `visit_interleaved` does it.
    fn beside(&mut self, true_ms: f64) -> Timed {
        let mut around_ms = vec![self.update(BASE_MS)];
        let mut step_ms = vec![];
        for _ in 0..8 {
            step_ms.push(self.update(true_ms));
            around_ms.push(self.update(BASE_MS));
        }
        Timed { step_ms, around_ms, ..timed() }
    }
}

#[test]
fn interleaving_finds_a_tenth_on_shared_cores() {
    let ratios = [1.0, 1.1, 1.0, 0.9, 1.0];
    let base = base();
    let row_of = |i: usize| variant(&base, &format!("v{i}"), 1 + i as u64, Class::Bitwise);
    let variants: Vec<Variant> = (0..ratios.len()).map(row_of).collect();
    let (mut found, mut wrong, mut base_visits) = (0, 0, 0);
    for seed in 0..100 {
        let mut machine = Shared { seed, updates: 0, level: 0.0 };
        let mut visit = |config: &Config, subject: Subject| {
            base_visits += (subject == Subject::Base) as usize;
            Ok(match subject {
                // The base's own visit is the first of all, and cold.
                Subject::Base => Timed { step_ms: vec![1.8 * BASE_MS; 8], ..timed() },
                Subject::Variant => machine.beside(BASE_MS * ratios[config.train.seed as usize - 1]),
            })
        };
        let plan = Plan {
            variants: &variants,
            base: &base,
            repeats: 4,
            budget: Duration::MAX,
            is_interleaved: false,
        };
        let mut kept = StoredVisits::nowhere(None);
        rounds(&plan, &mut kept, &mut visit, &mut || Duration::ZERO, &mut |_| {}).expect("rounds");
        let table = table(&variants, &kept, Precision::F32, 1024).expect("a table");
        assert!((table.base.step_ms / BASE_MS - 1.0).abs() < 0.2, "{}", table.base.step_ms);
        assert!(row(&table, 1).step_ms > table.base.step_ms && row(&table, 3).step_ms < table.base.step_ms);
        found += (row(&table, 1).verdict == Verdict::Faster) as usize;
        found += (row(&table, 3).verdict == Verdict::Slower) as usize;
        wrong += [0, 2, 4].iter().filter(|i| row(&table, **i).verdict != Verdict::WithinNoise).count();
    }
    println!("{found} of 200 found, {wrong} of 300 dummies look like something");
    assert!(found >= 195 && wrong <= 6, "{found}, {wrong}");
    assert_eq!(base_visits, 100, "once: it is interleaved with the others");
}

#[test]
fn a_difference_of_a_tenth_is_found_with_its_size() {
    let (mut found, mut inside) = (0, 0);
    for seed in 0..100 {
        let table = measured(seed, &[1.0, 1.1, 1.0, 0.9], 5);
        let (slow, fast) = (row(&table, 1), row(&table, 3));
        found += (slow.verdict == Verdict::Faster && fast.verdict == Verdict::Slower) as usize;
        let holds =
            |m: &Measured, truth: f64| m.base_is_faster_by.low <= truth && truth <= m.base_is_faster_by.high;
        inside += (holds(slow, 1.1) && holds(fast, 0.9)) as usize;
    }
    println!("{found} of 100 found, {inside} with the truth in their range");
    assert!(found >= 95 && inside >= 95, "{found}, {inside}");
}

/// Five repetitions of the command: the intervals of a row overlap.
#[test]
fn repeated_commands_agree_within_their_intervals() {
    let ratios = [1.0, 1.02, 1.05, 1.1, 1.3, 0.95];
    let mut apart = 0;
    for call in 0..20 {
        let five: Vec<Table> = (0..5).map(|i| measured(1000 + 5 * call + i, &ratios, 5)).collect();
        for i in 0..ratios.len() {
            let ranges = || five.iter().map(|table| row(table, i).base_is_faster_by);
            let low = ranges().map(|r| r.low).fold(0.0, f64::max);
            let high = ranges().map(|r| r.high).fold(f64::MAX, f64::min);
            apart += (low > high) as usize;
        }
    }
    println!("{apart} of {} rows have intervals that do not overlap", 20 * ratios.len());
    assert!(apart <= 2, "{apart}");
}

#[test]
fn rungs_are_compared_with_the_one_below() {
    let base = base();
    let on_ladder =
        |name: &str, number| Variant { group: Group::Ladder, ..variant(&base, name, number, Class::Bounded) };
    let top = Fate::Measured { key: BASE.into(), config: Box::new(base.clone()) };
    let variants =
        [on_ladder("plain", 1), on_ladder("better", 2), Variant { fate: top, ..on_ladder("base", 0) }];
    let mut kept = StoredVisits::nowhere(None);
    let mut machine = Machine::new(3);
    let mut visit = |config: &Config, _: Subject| {
        Ok(machine.visit(BASE_MS * [1.0, 3.0, 1.5][config.train.seed as usize]))
    };
    let plan =
        Plan { variants: &variants, base: &base, repeats: 5, budget: Duration::MAX, is_interleaved: false };
    rounds(&plan, &mut kept, &mut visit, &mut || Duration::ZERO, &mut |_| {}).expect("rounds");
    let table = table(&variants, &kept, Precision::F32, 1024).expect("a table");
    let climbs: Vec<_> = (0..3).map(|i| row(&table, i).climb.expect("a rung")).collect();
    assert_eq!((climbs[0].over_below.ratio, climbs[0].over_first.ratio), (1.0, 1.0));
    for (estimate, truth) in
        [(climbs[1].over_below, 2.0), (climbs[2].over_below, 1.5), (climbs[2].over_first, 3.0)]
    {
        assert!(
            estimate.low < truth && truth < estimate.high && estimate.low > 0.8 * truth,
            "{truth}: {estimate:?}"
        );
    }
}

/// A start of 1.5 s against 0.5 s, with updates of 30 ms against 33.
#[test]
fn a_slower_start_is_repaid_by_faster_updates() {
    let base = base();
    let variants = [variant(&base, "slow", 1, Class::Bitwise), variant(&base, "quick", 2, Class::Bitwise)];
    let mut kept = StoredVisits::nowhere(None);
    let plan =
        Plan { variants: &variants, base: &base, repeats: 3, budget: Duration::MAX, is_interleaved: false };
    let mut visit = |config: &Config, _: Subject| {
        let (ms, start) = [(30.0, 1.5), (33.0, 0.5), (27.0, 0.5)][config.train.seed as usize];
        let mut timed = Timed { step_ms: vec![ms; 8], ..timed() };
        timed.start = Start { session_seconds: start, ..Start::default() };
        timed.arena_bytes = 100 + config.train.seed;
        Ok(timed)
    };
    rounds(&plan, &mut kept, &mut visit, &mut || Duration::ZERO, &mut |_| {}).expect("rounds");
    let table = table(&variants, &kept, Precision::F32, 1024).expect("a table");
    let (slow, quick) = (row(&table, 0), row(&table, 1));
    assert_eq!(slow.break_even, BreakEven::After(334), "a second at 3 ms an update");
    assert_eq!(quick.break_even, BreakEven::Never, "it starts faster and is faster");
    assert!(slow.memory_difference == 1 && (slow.step_ms - 33.0).abs() < 1e-9);
    assert!((slow.base_is_faster_by.ratio - 1.1).abs() < 1e-12);
}

#[test]
fn losses_are_checked_against_the_class() {
    let base = base();
    let classes = [Class::Bitwise, Class::Bounded, Class::Statistical];
    let variants: Vec<Variant> = [0.0, 5e-6, 5e-3, 2e-2, f32::NAN]
        .iter()
        .enumerate()
        .flat_map(|(off, _)| classes.map(|class| (off, class)))
        .map(|(off, class)| variant(&base, &format!("{off}{class:?}"), 1 + off as u64, class))
        .collect();
    let kept_in = |loose_base: bool| {
        let mut kept = StoredVisits::nowhere(None);
        let mut visits = 0;
        let mut visit = |config: &Config, _: Subject| {
            visits += 1;
            let off = [0.0, 0.0, 5e-6, 5e-3, 2e-2, f32::NAN][config.train.seed as usize];
            let shift = if loose_base && config.train.seed == 0 && visits > 1 { 1e-6 } else { 0.0 };
            Ok(Timed { losses: vec![6.0, 5.0 * (1.0 + off + shift)], ..timed() })
        };
        let plan = Plan {
            variants: &variants,
            base: &base,
            repeats: 1,
            budget: Duration::MAX,
            is_interleaved: false,
        };
        rounds(&plan, &mut kept, &mut visit, &mut || Duration::ZERO, &mut |_| {}).expect("rounds");
        let table = table(&variants, &kept, Precision::F32, 1024).expect("a table");
        let kept: Vec<bool> = (0..variants.len()).map(|i| row(&table, i).numbers.unwrap().is_kept).collect();
        (table.base.is_repeatable, kept)
    };
    let (yes, no) = (true, false);
    let strict = [yes, yes, yes, no, yes, yes, no, no, yes, no, no, no, no, no, no];
    assert_eq!(kept_in(false), (true, strict.to_vec()));
    // Where the base's own bits change, a bitwise switch is only held to the bound of rounding.
    let mut loose = strict;
    loose[3] = yes;
    assert_eq!(kept_in(true), (false, loose.to_vec()));
}

#[test]
fn a_failing_variant_is_a_row_and_the_rest_is_measured() {
    let base = base();
    let variants = [1, 2, 3].map(|number| variant(&base, &format!("v{number}"), number, Class::Bitwise));
    let mut kept = StoredVisits::nowhere(None);
    let mut visited = vec![];
    let mut visit = |config: &Config, _: Subject| {
        visited.push(config.train.seed);
        match config.train.seed {
            2 => guarded(|| panic!("an invariant of {}", "ours")),
            _ => Ok(timed()),
        }
    };
    let plan =
        Plan { variants: &variants, base: &base, repeats: 3, budget: Duration::MAX, is_interleaved: false };
    let complete = rounds(&plan, &mut kept, &mut visit, &mut || Duration::ZERO, &mut |_| {});
    assert_eq!(complete, Ok(true));
    assert_eq!(
        visited,
        [0, 1, 0, 2, 0, 3, 0, 3, 0, 1, 0, 1, 0, 3, 0],
        "once, and every second round backwards"
    );
    let table = table(&variants, &kept, Precision::F32, 1024).expect("a table");
    let states: Vec<RowState> = table.rows.iter().map(|row| row.state).collect();
    assert_eq!(states, [RowState::Measured, RowState::Failed, RowState::Measured]);
    assert!(table.rows[1].why.as_ref().unwrap().contains("an invariant of ours"));
}

#[test]
fn a_variant_that_breaks_the_base_is_named() {
    let base = base();
    let variants = [variant(&base, "breaker", 1, Class::Bitwise)];
    let mut broken = false;
    let mut visit = |config: &Config, _: Subject| {
        broken |= config.train.seed == 1;
        if broken { Err(Failure::Environment("the device is gone".into())) } else { Ok(timed()) }
    };
    let plan =
        Plan { variants: &variants, base: &base, repeats: 3, budget: Duration::MAX, is_interleaved: false };
    let mut kept = StoredVisits::nowhere(None);
    let failed = rounds(&plan, &mut kept, &mut visit, &mut || Duration::ZERO, &mut |_| {}).unwrap_err();
    assert!(failed.to_string().contains("the base ran before `breaker` failed"), "{failed}");
    // Continuing leaves it out.
    kept.process += 1;
    let mut working = |_: &Config, _: Subject| Ok(timed());
    assert_eq!(rounds(&plan, &mut kept, &mut working, &mut || Duration::ZERO, &mut |_| {}), Ok(true));
}

#[test]
fn a_budget_ends_between_visits_and_the_next_call_continues() {
    let base = base();
    let variants = [1, 2, 3, 4].map(|number| variant(&base, &format!("v{number}"), number, Class::Bitwise));
    let folder = tempfile::tempdir().expect("a folder");
    let plan = Plan {
        variants: &variants,
        base: &base,
        repeats: 2,
        budget: Duration::from_secs(10),
        is_interleaved: false,
    };
    let mut calls = 0;
    loop {
        calls += 1;
        let mut kept = StoredVisits::open(folder.path(), "the same").expect("a file");
        let seconds = std::cell::Cell::new(0);
        let mut visit = |_: &Config, _: Subject| {
            seconds.set(seconds.get() + 1);
            Ok(timed())
        };
        let mut elapsed = || Duration::from_secs(seconds.get());
        let is_complete = rounds(&plan, &mut kept, &mut visit, &mut elapsed, &mut |_| {}).expect("rounds");
        assert!(seconds.get() <= 10, "{} seconds", seconds.get());
        let of = |key: &str| kept.visits.iter().filter(|visit| visit.key == key).count();
        if is_complete {
            assert_eq!(["v1", "v2", "v3", "v4"].map(of), [2; 4]);
            kept.finish().expect("removed");
            break;
        }
        let table = table(&variants, &kept, Precision::F32, 1024).expect("a table");
        assert!(
            table.rows.iter().any(|row| row.measured.as_ref().is_none_or(|m| m.base_is_faster_by.rounds < 2))
        );
    }
    assert_eq!(calls, 2);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// On a real model every switch that can be off is a row, the ladder ends in the base, and variants that cannot run here have a
/// reason.
#[test]
fn every_switch_is_a_row_and_the_ladder_climbs_to_the_base() {
    let small = [
        "model.width=32",
        "model.layers=2",
        "model.heads=2",
        "model.kv_heads=1",
        "model.ffn=48",
        "backend=cpu",
    ];
    let config = resolve("tiny", &[], &small.map(String::from)).expect("a config");
    let stage = Stage::open(&config).expect("a stage");
    let base = Base::new(&config, &stage).expect("a base");
    let all =
        variants(&base, &stage, &RowSelection { models: true, slowed: true, only: None }).expect("variants");
    let of = |group: Group| all.iter().filter(|v| v.group == group).collect::<Vec<_>>();
    let off: Vec<&str> = of(Group::Off).iter().map(|v| v.about).collect();
    let can_be_off: Vec<&str> = TABLE.iter().filter(|s| s.off.is_some()).map(|s| s.name).collect();
    assert_eq!(off, can_be_off);
    let fate = |name: &str| &all.iter().find(|v| v.name == name).unwrap_or_else(|| panic!("{name}")).fate;
    for name in [
        "fuse.qkv=off",
        "attention=naive",
        "recompute=none",
        "memory_plan=off",
        "compile=off",
        "recompute=full",
        "precision=bf16",
        "norm=layer",
        "kv_heads=2",
        "tied=false",
    ] {
        assert!(matches!(fate(name), Fate::Measured { .. }), "{name}: {:?}", fate(name));
    }
    for (name, why) in [
        ("precision=tf32", "cannot run on the CPU"),
        ("cuda_graphs=on", "cannot run on the CPU"),
        ("attention_kernel=fma", "cannot run on the CPU"),
    ] {
        assert!(
            matches!(fate(name), Fate::Refused(reason) if reason.contains(why)),
            "{name}: {:?}",
            fate(name)
        );
    }
    for name in ["precision=fp32", "cuda_graphs=off", "deterministic=off", "autotune=full"] {
        assert!(matches!(fate(name), Fate::Same(_)), "{name}: {:?}", fate(name));
    }
    let rungs = of(Group::Ladder);
    let climbed: Vec<&str> =
        rungs.iter().filter(|v| matches!(v.fate, Fate::Measured { .. })).map(|v| v.name.as_str()).collect();
    assert_eq!(climbed[..2], ["plain FP32", "flash attention"]);
    let last = rungs.iter().rev().find_map(|v| match &v.fate {
        Fate::Measured { key, .. } => Some(key.as_str()),
        _ => None,
    });
    assert_eq!(last, Some(BASE));
    assert!(matches!(fate("BF16"), Fate::Refused(why) if why == "the base computes in fp32"));

    let only = |only: &str| {
        variants(&base, &stage, &RowSelection { only: Some(only.into()), ..RowSelection::default() })
    };
    let rows: Vec<String> = only("fuse.norm").unwrap().into_iter().map(|v| v.name).collect();
    assert_eq!(rows, ["the base again", "fuse.norm=off"]);
    assert!(only("fuse.nrm").unwrap_err().to_string().contains("did you mean `fuse.norm`?"));
}

/// A variant is compared with the base on the same micro-batches, whatever `auto` would choose for it.
#[test]
fn variants_do_the_work_of_the_base() {
    let config = resolve("tiny", &[], &["train.batch=64".into(), "backend=cpu".into()]).expect("a config");
    let stage = Stage::open(&config).expect("a stage");
    let base = Base::new(&config, &stage).expect("a base");
    assert_eq!(base.config.train.micro_batch(), Some(base.compiled.micro_batch));
    assert!(base.compiled.micro_batch < 64);
    for variant in variants(&base, &stage, &RowSelection::default()).expect("variants") {
        if let Fate::Measured { config, .. } = variant.fate {
            assert_eq!(config.train.micro_batch, base.config.train.micro_batch, "{}", variant.name);
        }
    }
}
