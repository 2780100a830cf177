//! Measures what each switch is worth on this machine and model: the base is compared with each switch turned off alone, with
//! its other values, and with the guides' ladder of optimisations from plain FP32.
//!
//! A visit is one trial: it opens a configuration, warms it up and times some updates. On the CPU the base is open as well and
//! updates of the two are interleaved, because other tenants of a virtual machine take its cores for tenths of a second. On a
//! GPU, which is quieter and where the host runs ahead of the updates, the base is visited after each variant instead. A round
//! visits every variant once, and every second round runs in reverse order, so that drift affects base and variants alike.
//! `statistics` evaluates the times. With several ranks, rank 0 runs all of this and every rank makes the visits
//! (`bench::together`).

pub mod page;
pub mod stored_visits;
pub mod table;
pub mod variants;

use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use crate::statistics::Estimate;

use crate::bench::{Stage, Timed};
use flatout_train::Failure;
use flatout_train::config::Config;
use flatout_train::device::Device;
use flatout_train::machine::cache_folder;
use flatout_train::resolve::prediction::tokens_per_update;
use stored_visits::{End, StoredVisits};
use table::{BaseRow, Row, failure, table};
use variants::{BASE, Base, Fate, RowSelection, Variant, variants};

/// Warm-up updates after the first.
pub const WARMUP: usize = 2;

#[derive(Clone, Debug)]
pub struct Options {
    /// Timed updates per visit.
    pub steps: usize,
    /// Rounds over all variants.
    pub repeats: usize,
    /// Time to spend; the next call continues from the kept visits. `None` takes the backend's default.
    pub budget: Option<Duration>,
    pub wanted: RowSelection,
    /// Discard the visits that an earlier call kept.
    pub fresh: bool,
}

impl Options {
    /// Enough for `tiny` on two cores, or for a model of some hundred million parameters on a GPU.
    pub fn budget(&self, device: &Device) -> Duration {
        self.budget.unwrap_or(match device {
            Device::Cpu { .. } => Duration::from_secs(110),
            Device::Cuda(_) => Duration::from_secs(600),
        })
    }
}

/// Progress of an ablation.
pub enum AblateProgress<'a> {
    Ready {
        variants: &'a [Variant],
        budget: Duration,
        kept: Option<PathBuf>,
        visits_before: usize,
    },
    /// A visit begins.
    Visit {
        name: &'a str,
        done: usize,
        of: usize,
    },
    /// A variant failed.
    Failed {
        name: &'a str,
        why: &'a str,
    },
    /// Results so far could not be kept on disk.
    NotKept {
        why: &'a str,
    },
}

/// The result of an ablation.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    pub recipe: String,
    pub version: String,
    pub device: String,
    /// Ranks that measured together; absent for a single process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<usize>,
    pub precision: String,
    /// The training data.
    pub data: String,
    pub tokens_per_update: usize,
    /// Updates timed in a visit, and updates in all, after which the losses are compared.
    pub steps: usize,
    pub updates: usize,
    /// Requested rounds.
    pub repeats: usize,
    /// Whether every row has all its rounds; otherwise the same command continues.
    pub is_complete: bool,
    /// Standard deviation of the logarithm of one ratio, from comparing the base with itself.
    pub noise: f64,
    pub base: BaseRow,
    pub rows: Vec<Row>,
}

/// Ablates the config that the stage was opened for. Rank 0 calls this while the other ranks run [`Stage::follow`].
pub fn ablate(
    config: &Config,
    options: &Options,
    stage: &Stage,
    say: &mut dyn FnMut(AblateProgress<'_>),
) -> Result<Report, Failure> {
    let began = Instant::now();
    let base = Base::new(config, stage)?;
    let variants = variants(&base, stage, &options.wanted)?;
    let device = stage.sentence();
    let version = env!("CARGO_PKG_VERSION").to_string();
    let identity = format!("{version}\n{device}\n{}\n{}", options.steps, base.config.to_toml());
    let mut kept = match cache_folder() {
        Some(folder) => match StoredVisits::open(&folder.join("ablate"), &identity) {
            Err(Failure::Environment(why)) => StoredVisits::nowhere(Some(why)),
            opened => opened?,
        },
        None => StoredVisits::nowhere(Some("there is no folder for a cache".into())),
    };
    if options.fresh {
        kept.clear()?;
    }
    let budget = options.budget(stage.device());
    let visits_before = kept.visits.len();
    let place = kept.path().map(PathBuf::from);
    say(AblateProgress::Ready { variants: &variants, budget, kept: place, visits_before });
    let is_interleaved = matches!(stage.device(), Device::Cpu { .. });
    let plan =
        Plan { variants: &variants, base: &base.config, repeats: options.repeats, budget, is_interleaved };
    let mut visit = |config: &Config, subject: Subject| match subject {
        Subject::Variant if is_interleaved => {
            stage.visit_interleaved(&base.config, config, WARMUP, options.steps)
        }
        _ => stage.visit(config, WARMUP, options.steps),
    };
    let is_complete = rounds(&plan, &mut kept, &mut visit, &mut || began.elapsed(), say)?;
    stage.dismiss()?;
    let precision = base.compiled.settled.options.precision;
    let tokens_per_update = tokens_per_update(config, &stage.compile(config)?);
    let table = table(&variants, &kept, precision, tokens_per_update).expect("the base was visited");
    if let Some(why) = &kept.trouble {
        say(AblateProgress::NotKept { why });
    }
    if is_complete && let Err(why) = kept.finish() {
        say(AblateProgress::NotKept { why: &why.to_string() });
    }
    Ok(Report {
        recipe: config.recipe.clone(),
        version,
        device,
        ranks: (stage.ranks() > 1).then_some(stage.ranks()),
        precision: precision.name().into(),
        data: stage.data().into(),
        tokens_per_update,
        steps: options.steps,
        updates: 1 + WARMUP + options.steps,
        repeats: options.repeats,
        is_complete,
        noise: table.noise,
        base: table.base,
        rows: table.rows,
    })
}

/// Whether a visit is of the base or of a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Base,
    Variant,
}

/// Visits a configuration. Where a variant's visit includes no times of the base, the base is visited before and after it.
type Visiting<'a> = dyn FnMut(&Config, Subject) -> Result<Timed, Failure> + 'a;

/// The configurations that the rounds go through, and their limits.
struct Plan<'a> {
    variants: &'a [Variant],
    base: &'a Config,
    repeats: usize,
    budget: Duration,
    /// Whether updates of the base are interleaved with each variant's, so that it needs no visits of its own.
    is_interleaved: bool,
}

/// Makes the visits that are not kept yet, round by round. False if the budget ended first.
fn rounds(
    plan: &Plan<'_>,
    kept: &mut StoredVisits,
    visit: &mut Visiting<'_>,
    elapsed: &mut dyn FnMut() -> Duration,
    say: &mut dyn FnMut(AblateProgress<'_>),
) -> Result<bool, Failure> {
    let work = distinct(plan.variants);
    let of = plan.repeats * work.len() * if plan.is_interleaved { 1 } else { 2 } + 1;
    let longest = Duration::ZERO;
    let mut round_of = Rounds { plan, kept, visit, elapsed, say, last_failed: None, visited: 0, of, longest };
    if !round_of.kept.visits.iter().any(|visit| visit.key == BASE) {
        round_of.base(0)?;
    }
    for round in 0..plan.repeats {
        let is_todo = |key: &str, kept: &StoredVisits| {
            let is_done = kept.visits.iter().any(|visit| visit.key == key && visit.round == round);
            !is_done && failure(kept, key).is_none()
        };
        let mut todo: Vec<_> = work.iter().filter(|(key, ..)| is_todo(key, round_of.kept)).collect();
        if !round.is_multiple_of(2) {
            todo.reverse();
        }
        for (key, name, config) in todo {
            if (round_of.elapsed)() + 2 * round_of.longest > plan.budget {
                return Ok(false);
            }
            if round_of.visited == 0 {
                round_of.base(round)?;
            }
            if !round_of.variant(key, name, config, round) {
                round_of.base(round)?;
            }
        }
    }
    Ok(true)
}

/// The distinct configurations that rows measure, each with its key and the name of its first row.
fn distinct(variants: &[Variant]) -> Vec<(&str, &str, &Config)> {
    let mut work: Vec<(&str, &str, &Config)> = vec![];
    for variant in variants {
        if let Fate::Measured { key, config } = &variant.fate
            && key != BASE
            && !work.iter().any(|(other, ..)| other == key)
        {
            work.push((key, &variant.name, config));
        }
    }
    work
}

struct Rounds<'a> {
    plan: &'a Plan<'a>,
    kept: &'a mut StoredVisits,
    visit: &'a mut Visiting<'a>,
    elapsed: &'a mut dyn FnMut() -> Duration,
    say: &'a mut dyn FnMut(AblateProgress<'_>),
    last_failed: Option<String>,
    /// Visits made by this process, and the most it may have to make.
    visited: usize,
    of: usize,
    /// The longest visit so far, which estimates the next one.
    longest: Duration,
}

impl Rounds<'_> {
    fn visited(&mut self, name: &str, config: &Config, subject: Subject) -> Result<Timed, Failure> {
        (self.say)(AblateProgress::Visit { name, done: self.visited, of: self.of });
        self.visited += 1;
        let began = (self.elapsed)();
        let timed = (self.visit)(config, subject);
        self.longest = self.longest.max((self.elapsed)() - began);
        timed
    }

    fn base(&mut self, round: usize) -> Result<(), Failure> {
        match (self.visited(BASE, self.plan.base, Subject::Base), &self.last_failed) {
            (Ok(timed), _) => {
                self.kept.push(BASE, round, End::Timed(timed));
                Ok(())
            }
            (Err(why), Some(name)) => Err(Failure::Environment(format!(
                "the base ran before `{name}` failed and fails now: {why}; run the same command again to \
                continue without that variant"
            ))),
            (Err(why), None) => Err(why),
        }
    }

    /// Visits a variant. True where the base was timed in the same visit.
    fn variant(&mut self, key: &str, name: &str, config: &Config, round: usize) -> bool {
        let visited = self.visited(name, config, Subject::Variant);
        let is_interleaved = visited.as_ref().is_ok_and(|timed| !timed.around_ms.is_empty());
        let end = match visited {
            Ok(timed) => End::Timed(timed),
            Err(why) => {
                let why = why.to_string();
                (self.say)(AblateProgress::Failed { name, why: &why });
                self.last_failed = Some(name.to_string());
                End::Failed(why)
            }
        };
        self.kept.push(key, round, end);
        is_interleaved
    }
}

#[cfg(test)]
mod tests;
