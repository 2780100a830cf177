//! The search space: candidate settings, and those left out before anything is measured, each with its reason: the user fixed or
//! does not allow them, they cannot run, do not fit, lead to equal plans, or are predicted to be much slower.

use std::cell::RefCell;
use std::collections::HashMap;

use flatout_ir::{Precision, Recompute, Target};
use serde::Serialize;

use crate::ablate::variants::fingerprint;
use flatout_report::words::bytes;
use flatout_train::Failure;
use flatout_train::config::{Config, Count};
use flatout_train::resolve::compile::{self, Compiled, compile_for};
use flatout_train::resolve::lanes::rows_a_lane;
use flatout_train::resolve::prediction::step_cost;
use flatout_train::switches::compile::COMPILE;
use flatout_train::switches::{Auto, Autotune, Class, compute, kernels, memory, serialize};

/// A value for each knob.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Setting {
    pub micro_batch: usize,
    #[serde(serialize_with = "serialize")]
    pub recompute: Recompute,
    #[serde(serialize_with = "serialize")]
    pub precision: Precision,
    #[serde(serialize_with = "serialize")]
    pub autotune: Autotune,
    /// Threads of the loader; `None` is its own choice.
    pub workers: Option<usize>,
}

impl Setting {
    /// The setting of a config, with `auto` resolved as it was compiled.
    pub fn of(config: &Config, compiled: &Compiled) -> Setting {
        Setting {
            micro_batch: compiled.micro_batch,
            recompute: compiled.settled.options.recompute,
            precision: compiled.settled.options.precision,
            autotune: config.switches.kernels.autotune,
            workers: config.loader.workers.given(),
        }
    }

    /// The config with this setting. A precision that the config's `auto` resolves to stays `auto`, because memory has no part in
    /// it.
    pub fn applied(&self, config: &Config, default: &Setting) -> Config {
        let mut config = config.clone();
        config.train.micro_batch = Count::Given(self.micro_batch);
        config.train.accumulate = None;
        config.switches.memory.recompute = Auto::Given(self.recompute);
        if self.precision != default.precision {
            config.switches.compute.precision = Auto::Given(self.precision);
        }
        config.switches.kernels.autotune = self.autotune;
        config.loader.workers = self.workers.map_or(Count::Auto, Count::Given);
        config
    }

    /// The differences from another setting, the current one, in words.
    pub fn unlike(&self, other: &Setting) -> String {
        let pairs = Knob::ALL.map(|knob| (knob.name(), knob.value(self), knob.value(other)));
        let differ = pairs.into_iter().filter(|(_, own, other)| own != other);
        let words: Vec<String> = differ.map(|(name, own, _)| format!("{name}={own}")).collect();
        if words.is_empty() { "the current setting".into() } else { words.join(" ") }
    }
}

/// A part of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knob {
    MicroBatch,
    Recompute,
    Precision,
    Autotune,
    Workers,
}

impl Knob {
    pub const ALL: [Knob; 5] =
        [Knob::MicroBatch, Knob::Recompute, Knob::Precision, Knob::Autotune, Knob::Workers];

    /// The keys that set it.
    pub fn keys(self) -> Vec<String> {
        match self {
            Knob::MicroBatch => vec!["train.micro_batch".into(), "train.accumulate".into()],
            Knob::Recompute => vec![memory::RECOMPUTE.path()],
            Knob::Precision => vec![compute::PRECISION.path()],
            Knob::Autotune => vec![kernels::AUTOTUNE.path(), COMPILE.path()],
            Knob::Workers => vec!["loader.workers".into()],
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Knob::MicroBatch => "micro_batch",
            Knob::Recompute => memory::RECOMPUTE.name,
            Knob::Precision => compute::PRECISION.name,
            Knob::Autotune => kernels::AUTOTUNE.name,
            Knob::Workers => "loader.workers",
        }
    }

    pub fn value(self, setting: &Setting) -> String {
        match self {
            Knob::MicroBatch => setting.micro_batch.to_string(),
            Knob::Recompute => setting.recompute.name().into(),
            Knob::Precision => setting.precision.name().into(),
            Knob::Autotune => setting.autotune.name().into(),
            Knob::Workers => setting.workers.map_or("auto".into(), |n| n.to_string()),
        }
    }

    /// The equivalence class of its other values; a precision's class depends on the value.
    fn class(self) -> Option<Class> {
        match self {
            // Sums over a batch are equal in exact arithmetic.
            Knob::MicroBatch => Some(Class::Bounded),
            Knob::Recompute => Some(memory::RECOMPUTE.class),
            Knob::Precision => None,
            Knob::Autotune => Some(kernels::AUTOTUNE.class),
            // The order of rows is the same for any number.
            Knob::Workers => Some(Class::Bitwise),
        }
    }
}

/// The equivalence class of a change of precision: one that is at least as wide rounds no more than the one it replaces.
fn precision_class(from: Precision, to: Precision) -> Class {
    if to <= from { Class::Bounded } else { Class::Statistical }
}

/// A setting to measure.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub setting: Setting,
    pub config: Config,
    /// Bytes of the arena, and of the driver and the wire besides it.
    pub bytes: u64,
    pub predicted_ms: f64,
    fingerprint: u64,
}

/// A setting that is not measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejected {
    pub setting: Setting,
    pub reason: Reason,
    pub why: String,
    pub bytes: Option<u64>,
    pub predicted_ms: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It may change numbers more than the user allows.
    NotAllowed,
    /// It cannot run here.
    Refused,
    DoesNotFit,
    /// Its plans equal those of another setting.
    Same,
    PredictedSlower,
    /// It is not next to the fastest micro-batch.
    FarFromTheFastest,
}

/// A knob that is not tuned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FixedKnob {
    pub knob: &'static str,
    pub value: String,
    pub why: String,
}

/// Groups of settings that are tuned together: those that decide memory first, then the rest one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Micro-batch, recomputation and precision: they share the memory.
    Split,
    /// Micro-batches between those that were measured, around the fastest.
    Between,
    Autotune,
    Workers,
}

impl Phase {
    pub const ALL: [Phase; 4] = [Phase::Split, Phase::Between, Phase::Autotune, Phase::Workers];
}

/// The ratio of predictions for equal times, if they are off by a quarter in opposite directions.
const HOPELESS: f64 = 1.25 / 0.75;
/// The same for equal micro-batch and precision, which run the same kernels, so that errors cancel except for recomputation.
const MORE_WORK: f64 = 1.15;
/// The most micro-batches of the first sweep; where there are more divisors, those a factor of two apart.
const SWEEP: usize = 8;

pub struct Space<'a> {
    /// The config as the user gave it.
    pub config: &'a Config,
    pub target: &'a Target,
    pub allow: Class,
    /// Full paths of the keys that the user gave on the command line.
    pub given: &'a [String],
    /// Whether there is data to load.
    pub has_data: bool,
    pub default: Candidate,
    /// The largest micro-batch: the batch, or a lane's part of it.
    rows: usize,
    /// Settings compiled so far.
    known: RefCell<HashMap<Setting, Result<Candidate, Box<Rejected>>>>,
}

impl<'a> Space<'a> {
    pub fn new(
        config: &'a Config,
        target: &'a Target,
        allow: Class,
        given: &'a [String],
        has_data: bool,
    ) -> Result<Space<'a>, Failure> {
        let compiled = compile::compile(config, target)?;
        let setting = Setting::of(config, &compiled);
        let rows = rows_a_lane(config, compiled.settled.options.lanes);
        let default = candidate(setting.applied(config, &setting), setting, &compiled);
        Ok(Space { config, target, allow, given, has_data, default, rows, known: RefCell::default() })
    }

    /// Knobs that are not tuned, and the reasons.
    pub fn held(&self) -> Vec<FixedKnob> {
        let held = |knob: Knob| {
            let why = self.why_held(knob)?;
            Some(FixedKnob { knob: knob.name(), value: knob.value(&self.default.setting), why })
        };
        Knob::ALL.into_iter().filter_map(held).collect()
    }

    fn why_held(&self, knob: Knob) -> Option<String> {
        if let Some(key) = knob.keys().iter().find(|key| self.given.contains(key)) {
            return Some(format!("{key} is given on the command line"));
        }
        match knob.class() {
            Some(class) if class > self.allow => {
                Some(format!("another value is {}, and --allow is {}", word(class), word(self.allow)))
            }
            _ if knob == Knob::Workers && !self.has_data => {
                Some("rows are drawn at random: nothing is loaded".into())
            }
            _ if knob == Knob::Autotune && self.target.name == "cpu" => {
                Some("there are no algorithms to time on the CPU".into())
            }
            _ => None,
        }
    }

    fn is_held(&self, knob: Knob) -> bool {
        self.why_held(knob).is_some()
    }

    /// The candidates that a phase measures around the choice so far, the most promising first, and the settings it leaves out.
    pub fn phase(&self, phase: Phase, choice: &Setting) -> (Vec<Candidate>, Vec<Rejected>) {
        let with = |change: &dyn Fn(&mut Setting)| {
            let mut setting = choice.clone();
            change(&mut setting);
            setting
        };
        let (settings, mut rejected) = match phase {
            Phase::Split => self.splits(choice),
            Phase::Between => self.between(choice),
            Phase::Autotune if self.is_held(Knob::Autotune) => (vec![], vec![]),
            Phase::Autotune => {
                let others = Autotune::ALL.iter().filter(|level| **level != choice.autotune);
                (others.map(|level| with(&|s| s.autotune = *level)).collect(), vec![])
            }
            Phase::Workers if self.is_held(Knob::Workers) => (vec![], vec![]),
            Phase::Workers => {
                let threads = flatout_train::machine::threads();
                let mut counts: Vec<usize> = (0..).map(|i| 1 << i).take_while(|n| *n < threads).collect();
                counts.push(threads);
                let others = counts.into_iter().filter(|n| Some(*n) != choice.workers);
                (others.map(|n| with(&|s| s.workers = Some(n))).collect(), vec![])
            }
        };
        let mut open: Vec<Candidate> = vec![];
        let incumbent = self.candidate(choice).expect("the choice so far was compiled before");
        for setting in settings {
            match self.candidate(&setting) {
                Err(why) => rejected.push(*why),
                Ok(candidate) => {
                    let is_same = |other: &&Candidate| {
                        phase != Phase::Workers && other.fingerprint == candidate.fingerprint
                    };
                    let same =
                        open.iter().chain([&incumbent]).find(is_same).map(|same| same.setting.unlike(choice));
                    match same {
                        Some(same) => {
                            let why = format!("the plans are those of {same}");
                            rejected.push(candidate.rejected(Reason::Same, why));
                        }
                        None => open.push(candidate),
                    }
                }
            }
        }
        open.sort_by(|a, b| a.predicted_ms.total_cmp(&b.predicted_ms));
        let hopeless: Vec<Option<String>> = open.iter().map(|one| hopeless(one, &open, &incumbent)).collect();
        let mut why = hopeless.into_iter();
        open.retain(|one| match why.next().flatten() {
            Some(why) => {
                rejected.push(one.rejected(Reason::PredictedSlower, why));
                false
            }
            None => true,
        });
        (open, rejected)
    }

    /// Every allowed precision with every micro-batch of the sweep and every setting of recomputation.
    fn splits(&self, choice: &Setting) -> (Vec<Setting>, Vec<Rejected>) {
        let mut rejected = vec![];
        let mut precisions = vec![choice.precision];
        let others = Precision::ALL.iter().filter(|p| **p != choice.precision);
        for precision in others.filter(|_| !self.is_held(Knob::Precision)) {
            let class = precision_class(choice.precision, *precision);
            let refusal = match compute::PRECISION.available(precision.name(), self.target) {
                Err(why) => Some((Reason::Refused, why)),
                Ok(()) if class > self.allow => Some((
                    Reason::NotAllowed,
                    format!(
                        "{} against {}: --allow {} lets it be tried",
                        word(class),
                        choice.precision.name(),
                        word(class)
                    ),
                )),
                Ok(()) => None,
            };
            match refusal {
                None => precisions.push(*precision),
                Some((reason, why)) => {
                    let setting = Setting { precision: *precision, ..choice.clone() };
                    rejected.push(Rejected { setting, reason, why, bytes: None, predicted_ms: None });
                }
            }
        }
        let rows = if self.is_held(Knob::MicroBatch) { vec![choice.micro_batch] } else { self.sweep() };
        let recompute = match self.is_held(Knob::Recompute) {
            true => vec![choice.recompute],
            // Wide lies between cheap and full in time and memory, so it is never the fastest.
            false => vec![Recompute::Cheap, Recompute::None, Recompute::Full],
        };
        let mut settings = vec![];
        for precision in precisions {
            for &micro_batch in &rows {
                for &recompute in &recompute {
                    let setting = Setting { precision, micro_batch, recompute, ..choice.clone() };
                    if setting != *choice {
                        settings.push(setting);
                    }
                }
            }
        }
        (settings, rejected)
    }

    fn divisors(&self) -> Vec<usize> {
        (1..=self.rows).rev().filter(|rows| self.rows.is_multiple_of(*rows)).collect()
    }

    /// The divisors of the rows from the largest, all or a factor of two apart, always with the default.
    fn sweep(&self) -> Vec<usize> {
        let all = self.divisors();
        if all.len() <= SWEEP {
            return all;
        }
        let mut kept: Vec<usize> = vec![];
        for rows in all {
            let is_far = kept.last().is_none_or(|last| 2 * rows <= *last);
            if is_far || rows == self.default.setting.micro_batch {
                kept.push(rows);
            }
        }
        kept
    }

    /// Micro-batches next to the fastest that the sweep skipped; the others are left out.
    fn between(&self, choice: &Setting) -> (Vec<Setting>, Vec<Rejected>) {
        let (mut settings, mut rejected) = (vec![], vec![]);
        if self.is_held(Knob::MicroBatch) {
            return (settings, rejected);
        }
        let sweep = self.sweep();
        let above =
            sweep.iter().rev().find(|rows| **rows > choice.micro_batch).copied().unwrap_or(usize::MAX);
        let below = sweep.iter().find(|rows| **rows < choice.micro_batch).copied().unwrap_or(0);
        for micro_batch in self.divisors().into_iter().filter(|rows| !sweep.contains(rows)) {
            let setting = Setting { micro_batch, ..choice.clone() };
            match below < micro_batch && micro_batch < above {
                true => settings.push(setting),
                false => rejected.push(Rejected {
                    setting,
                    reason: Reason::FarFromTheFastest,
                    why: format!("not next to {}, the fastest of a sweep", choice.micro_batch),
                    bytes: None,
                    predicted_ms: None,
                }),
            }
        }
        (settings, rejected)
    }

    /// The equivalence class of a setting.
    pub fn class(&self, setting: &Setting) -> Class {
        let default = &self.default.setting;
        let changed = Knob::ALL.into_iter().filter(|knob| knob.value(setting) != knob.value(default));
        let class =
            |knob: Knob| knob.class().unwrap_or(precision_class(default.precision, setting.precision));
        changed.map(class).max().unwrap_or(Class::Bitwise)
    }

    /// Compiles a setting, or returns why it cannot be measured.
    pub fn candidate(&self, setting: &Setting) -> Result<Candidate, Box<Rejected>> {
        if let Some(known) = self.known.borrow().get(setting) {
            return known.clone();
        }
        let compiled = self.compiled(setting);
        self.known.borrow_mut().insert(setting.clone(), compiled.clone());
        compiled
    }

    fn compiled(&self, setting: &Setting) -> Result<Candidate, Box<Rejected>> {
        let config = setting.applied(self.config, &self.default.setting);
        let rows = setting.micro_batch;
        let refused = match compile_for(&config, self.target, rows, false) {
            Ok(compiled) => return Ok(candidate(config, setting.clone(), &compiled)),
            Err(refused) => refused,
        };
        let unlimited = Target { memory_bytes: u64::MAX, ..self.target.clone() };
        Err(Box::new(match compile_for(&config, &unlimited, rows, false) {
            Ok(compiled) => {
                let planned = candidate(config, setting.clone(), &compiled);
                let why = format!(
                    "needs {} and {} has {}",
                    bytes(planned.bytes),
                    self.target.name,
                    bytes(self.target.memory_bytes)
                );
                planned.rejected(Reason::DoesNotFit, why)
            }
            Err(_) => Rejected {
                setting: setting.clone(),
                reason: Reason::Refused,
                why: refused.to_string(),
                bytes: None,
                predicted_ms: None,
            },
        }))
    }
}

impl Candidate {
    fn rejected(&self, reason: Reason, why: String) -> Rejected {
        let (bytes, predicted_ms) = (Some(self.bytes), Some(self.predicted_ms));
        Rejected { setting: self.setting.clone(), reason, why, bytes, predicted_ms }
    }
}

fn candidate(config: Config, setting: Setting, compiled: &Compiled) -> Candidate {
    Candidate {
        bytes: compiled.plans.arena_bytes as u64 + compiled.target.bytes_beside(),
        predicted_ms: 1e3 * predicted_seconds(compiled, config.train.batch),
        fingerprint: fingerprint(compiled),
        config,
        setting,
    }
}

/// The predicted time of an update.
fn predicted_seconds(compiled: &Compiled, batch: usize) -> f64 {
    step_cost(compiled, batch).predicted_seconds
}

/// The reason why a candidate is not worth a visit by its predicted time, if it is not.
fn hopeless(one: &Candidate, open: &[Candidate], incumbent: &Candidate) -> Option<String> {
    let others = || open.iter().chain([incumbent]);
    let times = |other: &Candidate| one.predicted_ms / other.predicted_ms;
    let reason = |other: &Candidate| {
        let name = other.setting.unlike(&incumbent.setting);
        format!("predicted to take {:.2} times as long as {name}", times(other))
    };
    let alike = |other: &&Candidate| {
        (other.setting.micro_batch, other.setting.precision)
            == (one.setting.micro_batch, one.setting.precision)
    };
    let least = |a: &&Candidate, b: &&Candidate| a.predicted_ms.total_cmp(&b.predicted_ms);
    let lighter = others().filter(alike).min_by(least).filter(|other| times(other) > MORE_WORK);
    let best = others().min_by(least).filter(|best| times(best) > HOPELESS);
    lighter.or(best).map(reason)
}

fn word(class: Class) -> &'static str {
    match class {
        Class::Bitwise => "bitwise",
        Class::Bounded => "bounded",
        Class::Statistical => "statistical",
    }
}
