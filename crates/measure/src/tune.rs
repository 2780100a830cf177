//! Finds the fastest settings of a recipe on this machine by measuring: the micro-batch, recomputation, autotuning of products,
//! loader threads, and the precision of products where the user allows other numbers.
//! The batch is not tuned, so the update stays the same. Candidates that do not fit or are predicted to be much slower are left
//! out (`space`), the others are raced phase by phase (`contest`), and the winner is raced once more against the defaults. A
//! setting is proposed only if it is faster beyond noise and its losses stay within what the user allows.

mod contest;
pub mod preset;
pub mod space;

use std::time::{Duration, Instant};

use crate::ablate::table::{Numbers, numbers};
use crate::bench::{Stage, Timed};
use crate::statistics::Estimate;
use contest::{Clock, Outcome, Rules, contest};
use flatout_train::Failure;
use flatout_train::config::Config;
use flatout_train::device::Device;
use flatout_train::resolve::prediction;
use flatout_train::switches::Class;
use space::{Candidate, FixedKnob, Phase, Reason, Rejected, Setting, Space};

#[derive(Clone, Debug)]
pub struct Options {
    /// Time to spend; `None` takes the backend's default.
    pub budget: Option<Duration>,
    /// The equivalence class of the changes that are allowed.
    pub allow: Class,
    /// Full paths of the keys given on the command line, which are not tuned.
    pub given: Vec<String>,
}

/// Progress of a search.
pub enum TuneProgress<'a> {
    Ready {
        budget: Duration,
        device: &'a str,
    },
    /// A phase begins with `count` contestants to be raced.
    Phase {
        phase: Phase,
        count: usize,
        left_out: usize,
    },
    /// The choice is raced against the defaults.
    Last {
        choice: &'a str,
    },
    /// A visit begins.
    Visit {
        name: &'a str,
        spent: Duration,
    },
}

/// The result of `tune`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    pub recipe: String,
    pub version: String,
    pub device: String,
    /// Ranks that measured together; absent for a single process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<usize>,
    /// The target's short name: `cpu`, `h200`.
    pub target: String,
    /// The training data.
    pub data: String,
    pub batch: usize,
    pub tokens_per_update: usize,
    pub allow: Class,
    pub seconds: f64,
    #[serde(flatten)]
    pub found: TuneOutcome,
}

/// The outcome of the search.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TuneOutcome {
    pub default: Side,
    pub choice: Side,
    /// The choice's changes to the defaults; empty where nothing is proposed.
    pub settings: Vec<String>,
    pub verdict: Verdict,
    /// The last comparison; none where the defaults are the choice.
    pub faster_by: Option<Estimate>,
    /// The choice's losses against the defaults'.
    pub numbers: Option<Numbers>,
    /// Settings that were not tuned.
    pub held: Vec<FixedKnob>,
    /// All other settings that were considered.
    pub rows: Vec<Row>,
    /// Standard deviation of one ratio of times where nothing differs, from the last contest.
    pub noise: Option<f64>,
    /// Whether the budget sufficed.
    pub is_complete: bool,
    #[serde(skip)]
    pub config: Config,
}

/// One of the two settings of the final comparison.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Side {
    pub setting: Setting,
    pub step_ms: Option<f64>,
    pub predicted_ms: f64,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The choice is faster than the defaults, beyond noise.
    Faster,
    /// It looked faster, and the final comparison does not confirm it.
    WithinNoise,
    /// Nothing was faster than the defaults.
    DefaultIsFastest,
    /// It is faster, and its losses differ by more than is allowed.
    LossesDiffer,
}

/// A setting that was considered.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Row {
    pub phase: Phase,
    /// How it differs from `against`.
    pub name: String,
    /// The choice so far that it was compared with, by how that differs from the defaults.
    pub against: String,
    pub setting: Setting,
    pub fate: Fate,
    pub why: String,
    pub predicted_ms: Option<f64>,
    pub bytes: Option<u64>,
    pub step_ms: Option<f64>,
    /// Its time over that of `against`.
    pub over: Option<Estimate>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It became the choice, which a later phase may replace.
    Taken,
    Slower,
    WithinNoise,
    Failed,
    /// The budget ended first.
    Unmeasured,
    #[serde(untagged)]
    LeftOut(Reason),
}

/// Share of the budget for the search; the rest is for the final comparison.
const SEARCH_SHARE: f64 = 0.65;
const RACE: Rules = Rules { least_rounds: 3, most_rounds: 12, until: Duration::MAX };
const LAST: Rules = Rules { least_rounds: 5, most_rounds: 15, until: Duration::MAX };
/// Settings this close count as equally fast, and the one that needs the least memory is taken.
const EQUALLY_FAST: f64 = 0.005;
/// Updates whose losses are compared: in later ones the rounding of the first has grown.
const COMPARED_LOSSES: usize = 12;

/// Tunes the config that the stage was opened for. Rank 0 calls this while the other ranks run [`Stage::follow`].
pub fn tune(
    config: &Config,
    options: &Options,
    stage: &Stage,
    say: &mut dyn FnMut(TuneProgress<'_>),
) -> Result<Report, Failure> {
    let began = Instant::now();
    let target = stage.target(&config.switches);
    let space = Space::new(config, &target, options.allow, &options.given, stage.has_data())?;
    let device = stage.sentence();
    let budget = options.budget.unwrap_or(match stage.device() {
        Device::Cpu { .. } => Duration::from_secs(110),
        Device::Cuda(_) => Duration::from_secs(600),
    });
    say(TuneProgress::Ready { budget, device: &device });
    let length = Length::of(&stage.visit(&space.default.config, 0, 1)?);
    let mut measured = |candidate: &Candidate| stage.visit(&candidate.config, length.warmup, length.steps);
    let mut watch = Watch { visit: &mut measured, elapsed: &mut || began.elapsed(), budget, say };
    let found = search(&space, &mut watch)?;
    stage.dismiss()?;
    Ok(Report {
        recipe: config.recipe.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        device,
        ranks: (stage.ranks() > 1).then_some(stage.ranks()),
        target: target.name,
        data: stage.data().into(),
        batch: config.train.batch,
        tokens_per_update: prediction::tokens_per_update(config, &stage.compile(config)?),
        allow: options.allow,
        seconds: began.elapsed().as_secs_f64(),
        found,
    })
}

/// Updates per visit: enough for half a second, and few where they take long.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Length {
    warmup: usize,
    steps: usize,
}

impl Length {
    fn of(probe: &Timed) -> Length {
        let ms = probe.update_ms().max(1e-3);
        Length { warmup: if ms > 1e3 { 1 } else { 2 }, steps: (500.0 / ms).ceil().clamp(4.0, 32.0) as usize }
    }
}

/// The source of measurements, with the clock and the budget.
struct Watch<'a> {
    visit: &'a mut dyn FnMut(&Candidate) -> Result<Timed, Failure>,
    elapsed: &'a mut dyn FnMut() -> Duration,
    budget: Duration,
    say: &'a mut dyn FnMut(TuneProgress<'_>),
}

impl Watch<'_> {
    /// Races candidates, the first of which is the incumbent, and keeps their visits.
    fn race(&mut self, field: &[&Candidate], rules: Rules) -> Result<(Outcome, Vec<Vec<Timed>>), Failure> {
        let mut kept: Vec<Vec<Timed>> = vec![vec![]; field.len()];
        let elapsed = std::cell::RefCell::new(&mut self.elapsed);
        let mut visit = |i: usize| {
            let name = field[i].setting.unlike(&field[0].setting);
            (self.say)(TuneProgress::Visit { name: &name, spent: (elapsed.borrow_mut())() });
            let timed = (self.visit)(field[i])?;
            let ms = timed.update_ms();
            kept[i].push(timed);
            Ok(ms)
        };
        let clock = Clock { visit: &mut visit, elapsed: &mut || (elapsed.borrow_mut())() };
        let outcome = contest(field.len(), rules, clock)?;
        Ok((outcome, kept))
    }
}

fn search(space: &Space<'_>, watch: &mut Watch<'_>) -> Result<TuneOutcome, Failure> {
    let mut choice = space.default.clone();
    let (mut rows, mut is_complete, mut noise) = (vec![], true, None);
    for phase in Phase::ALL {
        let (open, rejected) = space.phase(phase, &choice.setting);
        (watch.say)(TuneProgress::Phase { phase, count: open.len(), left_out: rejected.len() });
        let against = choice.clone();
        let row = |candidate: &Setting| Row {
            phase,
            name: candidate.unlike(&against.setting),
            against: match against.setting == space.default.setting {
                true => "the defaults".into(),
                false => against.setting.unlike(&space.default.setting),
            },
            setting: candidate.clone(),
            fate: Fate::Unmeasured,
            why: String::new(),
            predicted_ms: None,
            bytes: None,
            step_ms: None,
            over: None,
        };
        rows.extend(rejected.into_iter().map(|rejected| {
            let Rejected { setting, reason, why, bytes, predicted_ms } = rejected;
            Row { fate: Fate::LeftOut(reason), why, bytes, predicted_ms, ..row(&setting) }
        }));
        if open.is_empty() {
            continue;
        }
        let field: Vec<&Candidate> = [&against].into_iter().chain(&open).collect();
        let until = watch.budget.mul_f64(SEARCH_SHARE);
        let (outcome, _) = watch.race(&field, Rules { until, ..RACE })?;
        is_complete &= outcome.is_decided;
        noise = outcome.deviation().or(noise);
        let winner = winner(&outcome, &field);
        for (i, candidate) in field.iter().enumerate().skip(1) {
            let standing = &outcome.standings[i];
            let (fate, why) = judged(i, winner, &outcome, &field);
            rows.push(Row {
                fate,
                why,
                predicted_ms: Some(candidate.predicted_ms),
                bytes: Some(candidate.bytes),
                step_ms: standing.step_ms,
                over: standing.over,
                ..row(&candidate.setting)
            });
        }
        choice = field[winner].clone();
    }
    last(space, choice, Searched { rows, is_complete, noise }, watch)
}

/// The candidate that needs the least memory among the fastest; 0, the incumbent, where none is faster.
fn winner(outcome: &Outcome, field: &[&Candidate]) -> usize {
    let faster = outcome.faster();
    let Some((_, best)) = faster.first() else { return 0 };
    let as_fast = faster.iter().filter(|(_, over)| over.ratio <= best.ratio * (1.0 + EQUALLY_FAST));
    as_fast.map(|(i, _)| *i).min_by_key(|i| field[*i].bytes).expect("the fastest is one")
}

/// The fate of a contestant, and the reason.
fn judged(i: usize, winner: usize, outcome: &Outcome, field: &[&Candidate]) -> (Fate, String) {
    let name = |i: usize| field[i].setting.unlike(&field[0].setting);
    let standing = &outcome.standings[i];
    if let Some(why) = &standing.failed {
        return (Fate::Failed, format!("failed: {why}"));
    }
    let Some(over) = standing.over else { return (Fate::Unmeasured, "the budget ended first".into()) };
    if i == winner {
        let faster = times_faster(over);
        return (Fate::Taken, format!("{faster} as {}", name(0)));
    }
    let best = outcome.standings[winner].over;
    let times = over.ratio / best.map_or(1.0, |best| best.ratio);
    if winner == 0 && over.is_noise() {
        return (
            Fate::WithinNoise,
            format!("within noise of {} ({:.3} to {:.3})", name(0), over.low, over.high),
        );
    }
    if times < 1.0 + EQUALLY_FAST {
        let why = format!("as fast as {}, which needs no more memory", name(winner));
        return (Fate::WithinNoise, why);
    }
    let once = if over.rounds == 1 { ", in one visit" } else { "" };
    (Fate::Slower, format!("takes {times:.2} times as long as {}{once}", name(winner)))
}

/// The speed-up in words, from a ratio of times.
fn times_faster(over: Estimate) -> String {
    format!("{:.3} times as fast ({:.3} to {:.3})", 1.0 / over.ratio, 1.0 / over.high, 1.0 / over.low)
}

/// The results of the phases, without the choice.
struct Searched {
    rows: Vec<Row>,
    is_complete: bool,
    noise: Option<f64>,
}

/// The final comparison: the defaults against the choice, in rounds of their own.
fn last(
    space: &Space<'_>,
    choice: Candidate,
    searched: Searched,
    watch: &mut Watch<'_>,
) -> Result<TuneOutcome, Failure> {
    let Searched { rows, mut is_complete, noise } = searched;
    let default = &space.default;
    let side = |candidate: &Candidate, step_ms: Option<f64>| Side {
        setting: candidate.setting.clone(),
        step_ms,
        predicted_ms: candidate.predicted_ms,
        bytes: candidate.bytes,
    };
    let held = space.held();
    if choice.setting == default.setting {
        return Ok(TuneOutcome {
            default: side(default, None),
            choice: side(default, None),
            settings: vec![],
            verdict: Verdict::DefaultIsFastest,
            faster_by: None,
            numbers: None,
            held,
            rows,
            noise,
            is_complete,
            config: default.config.clone(),
        });
    }
    let name = choice.setting.unlike(&default.setting);
    (watch.say)(TuneProgress::Last { choice: &name });
    let (outcome, kept) = watch.race(&[default, &choice], Rules { until: watch.budget, ..LAST })?;
    is_complete &= outcome.is_decided;
    let [defaults, choices] = [0, 1].map(|i| kept[i].iter().map(first_losses).collect::<Vec<_>>());
    let numbers = (!choices.is_empty()).then(|| {
        let class = space.class(&choice.setting);
        numbers(class, &refs(&choices), &refs(&defaults), default.setting.precision)
    });
    let over = outcome.standings[1].over;
    let verdict = match over {
        Some(over) if over.is_noise() || over.ratio >= 1.0 => Verdict::WithinNoise,
        None => Verdict::WithinNoise,
        Some(_) if numbers.is_some_and(|numbers| !numbers.is_kept) => Verdict::LossesDiffer,
        Some(_) => Verdict::Faster,
    };
    let is_proposed = verdict == Verdict::Faster;
    Ok(TuneOutcome {
        default: side(default, outcome.standings[0].step_ms),
        choice: side(&choice, outcome.standings[1].step_ms),
        settings: if is_proposed { preset::settings(space.config, &choice.config) } else { vec![] },
        verdict,
        faster_by: over.map(|over| Estimate {
            ratio: 1.0 / over.ratio,
            low: 1.0 / over.high,
            high: 1.0 / over.low,
            rounds: over.rounds,
        }),
        numbers,
        held,
        rows,
        noise: outcome.deviation().or(noise),
        is_complete,
        config: if is_proposed { choice.config } else { default.config.clone() },
    })
}

fn first_losses(timed: &Timed) -> Timed {
    let losses = timed.losses.iter().copied().take(COMPARED_LOSSES).collect();
    Timed { losses, ..timed.clone() }
}

fn refs(all: &[Timed]) -> Vec<&Timed> {
    all.iter().collect()
}

#[cfg(test)]
mod tests;
