//! Evaluates visits into the rows of the result table.

use std::collections::BTreeMap;

use super::stored_visits::{StoredVisits, Visit};
use super::variants::{BASE, Fate, Group, Variant};
use crate::bench::Timed;
use crate::statistics::{
    Estimate, Noise, estimate, median, nearest, noise, paired_noise, paired_ratio, scatter,
};
use flatout_ir::Precision;
use flatout_train::switches::Class;

/// Measurements of the base.
#[derive(Clone, Debug, serde::Serialize)]
pub struct BaseRow {
    /// Median over all visits in which it ran, interleaved with a variant or alone, of the median update of each.
    pub step_ms: f64,
    pub tokens_per_second: f64,
    pub visits: usize,
    pub arena_bytes: u64,
    pub driver_bytes: u64,
    pub launches: usize,
    pub parameters: u64,
    /// Seconds until the first update was done: the median over visits, and the first visit's, which may have had to fill caches
    /// that later ones hit.
    pub start_seconds: f64,
    pub first_start_seconds: f64,
    /// The loss of the last update of a visit.
    pub loss: f32,
    /// Whether the losses of every visit had the same bits.
    pub is_repeatable: bool,
}

/// A row of the table.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Row {
    pub group: Group,
    pub name: String,
    /// Its changes to the base, as overrides.
    pub settings: Vec<String>,
    pub state: RowState,
    /// The reason why nothing was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowState {
    Measured,
    /// Its plans equal those of another row.
    Same,
    /// It cannot run here.
    Refused,
    /// It ran and failed.
    Failed,
    /// The budget ended first.
    Unmeasured,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct Measured {
    /// The base's time multiplied by the ratio, so that times of different moments do not mix.
    pub step_ms: f64,
    /// The variant's time over the base's: above 1 the base is faster by this factor.
    pub base_is_faster_by: Estimate,
    pub verdict: Verdict,
    pub arena_bytes: u64,
    pub driver_bytes: u64,
    /// Its memory minus the base's.
    pub memory_difference: i64,
    pub launches: usize,
    pub parameters: u64,
    pub start_seconds: f64,
    pub first_start_seconds: f64,
    pub break_even: BreakEven,
    pub loss: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numbers: Option<Numbers>,
    /// On the ladder: the speed-up over the rung below and over the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub climb: Option<Climb>,
}

#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Climb {
    pub over_below: Estimate,
    pub over_first: Estimate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The base is faster.
    Faster,
    Slower,
    WithinNoise,
}

/// Whether and when the base's faster updates make up for a start that is slower than the variant's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BreakEven {
    /// The base starts no slower, or the difference of the updates is within noise.
    NothingToRepay,
    /// After this many updates.
    After(u64),
    /// The base starts slower and its updates are slower too.
    Never,
}

/// Differences from the base's losses.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Numbers {
    pub class: Class,
    /// The largest relative difference of any update's loss from the base's.
    pub worst: f64,
    pub same_bits: bool,
    /// The difference that the class allows: none for `bitwise`, unless the base differs from itself.
    pub bound: f64,
    pub is_kept: bool,
}

/// The results of the visits.
#[derive(Clone, Debug)]
pub struct Table {
    pub base: BaseRow,
    /// Standard deviation of the logarithm of one ratio, from comparing the base with itself.
    pub noise: f64,
    pub rows: Vec<Row>,
}

/// `None` while the base was not visited. `precision` is the base's.
pub fn table(
    variants: &[Variant],
    kept: &StoredVisits,
    precision: Precision,
    tokens: usize,
) -> Option<Table> {
    let bases: Vec<(&Visit, &Timed)> = of(kept, BASE).collect();
    let base = base_row(&bases, kept, tokens)?;
    let noise = spread(variants, kept, &bases);
    let mut rows: Vec<Row> =
        variants.iter().map(|variant| row(variant, kept, &base, &bases, noise, precision)).collect();
    climb(variants, &mut rows, kept, noise);
    Some(Table { base, noise: noise.deviation, rows })
}

/// The noise of a ratio where nothing differs: from the base compared with itself, or from the scatter between rounds where that
/// is larger.
fn spread(variants: &[Variant], kept: &StoredVisits, bases: &[(&Visit, &Timed)]) -> Noise {
    let of_base = match around(kept).next() {
        Some(_) => paired_noise(around(kept)),
        None => noise(&unbroken(bases)),
    };
    let of_row = |variant: &Variant| match &variant.fate {
        Fate::Measured { key, .. } if key != BASE => of(kept, key).filter_map(|v| ratio(&v, kept)).collect(),
        _ => vec![],
    };
    let rows: Vec<Vec<f64>> = variants.iter().map(of_row).collect();
    Noise { deviation: of_base.deviation.max(scatter(&rows)), ..of_base }
}

/// Compares every measured rung with the one below and the first, round by round.
fn climb(variants: &[Variant], rows: &mut [Row], kept: &StoredVisits, noise: Noise) {
    // Ratios to the base by round; none for the base itself, whose ratio is 1 in every round.
    let mut rungs: Vec<Option<BTreeMap<usize, f64>>> = vec![];
    for (variant, row) in variants.iter().zip(rows) {
        let (Fate::Measured { key, .. }, Some(measured)) = (&variant.fate, &mut row.measured) else {
            continue;
        };
        if variant.group != Group::Ladder {
            continue;
        }
        let own = (key != BASE)
            .then(|| of(kept, key).filter_map(|visit| Some((visit.0.round, ratio(&visit, kept)?))).collect());
        rungs.push(own);
        let (first, below, own) = (&rungs[0], &rungs[rungs.len().saturating_sub(2)], &rungs[rungs.len() - 1]);
        measured.climb = over(own, below, noise)
            .zip(over(own, first, noise))
            .map(|(over_below, over_first)| Climb { over_below, over_first });
    }
}

/// The speed-up of a rung over another one.
fn over(
    own: &Option<BTreeMap<usize, f64>>,
    other: &Option<BTreeMap<usize, f64>>,
    noise: Noise,
) -> Option<Estimate> {
    let quotients: Vec<f64> = match (own, other) {
        (Some(own), Some(other)) => {
            own.iter().filter_map(|(round, ratio)| Some(other.get(round)? / ratio)).collect()
        }
        (None, Some(other)) => other.values().copied().collect(),
        (Some(own), None) => own.values().map(|ratio| 1.0 / ratio).collect(),
        (None, None) => return None,
    };
    // A quotient of two measured ratios varies more than one ratio.
    let is_two = own.is_some() && other.is_some();
    let noise = if is_two { noise.of_two() } else { noise };
    match own == other {
        true => Some(Estimate { ratio: 1.0, low: 1.0, high: 1.0, rounds: 0 }),
        false => (!quotients.is_empty()).then(|| estimate(&quotients, noise)),
    }
}

fn of<'a>(kept: &'a StoredVisits, key: &'a str) -> impl Iterator<Item = (&'a Visit, &'a Timed)> {
    kept.visits.iter().filter(move |visit| visit.key == key).filter_map(|visit| Some((visit, visit.timed()?)))
}

fn all<T>(visits: &[(&Visit, &Timed)], value: impl Fn(&Timed) -> T) -> Vec<T> {
    visits.iter().map(|(_, timed)| value(timed)).collect()
}

/// The base's times, one list per process.
fn unbroken(bases: &[(&Visit, &Timed)]) -> Vec<Vec<f64>> {
    bases.chunk_by(|a, b| a.0.process == b.0.process).map(|visits| all(visits, Timed::update_ms)).collect()
}

/// The base's times in the visits where it was interleaved with a variant.
fn around(kept: &StoredVisits) -> impl Iterator<Item = &[f64]> {
    let around = kept.visits.iter().filter_map(Visit::timed).map(|timed| &timed.around_ms[..]);
    around.filter(|around| !around.is_empty())
}

fn base_row(bases: &[(&Visit, &Timed)], kept: &StoredVisits, tokens: usize) -> Option<BaseRow> {
    let (_, first) = bases.first()?;
    // Where the base is interleaved with variants it has a single visit of its own, which is cold.
    let beside: Vec<f64> = around(kept).map(median).collect();
    let medians = if beside.is_empty() { all(bases, Timed::update_ms) } else { beside };
    let step_ms = median(&medians);
    Some(BaseRow {
        step_ms,
        tokens_per_second: 1e3 * tokens as f64 / step_ms,
        visits: medians.len(),
        arena_bytes: first.arena_bytes,
        driver_bytes: first.driver_bytes,
        launches: first.launches,
        parameters: first.parameters,
        start_seconds: median(&all(bases, |timed| timed.start.seconds())),
        first_start_seconds: first.start.seconds(),
        loss: last_loss(first),
        is_repeatable: bases.iter().all(|(_, timed)| same_bits(&timed.losses, &first.losses)),
    })
}

fn last_loss(timed: &Timed) -> f32 {
    timed.losses.last().copied().unwrap_or(f32::NAN)
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn row(
    variant: &Variant,
    kept: &StoredVisits,
    base: &BaseRow,
    bases: &[(&Visit, &Timed)],
    noise: Noise,
    precision: Precision,
) -> Row {
    let (state, why, measured) = match &variant.fate {
        Fate::Same(why) => (RowState::Same, Some(why.clone()), None),
        Fate::Refused(why) => (RowState::Refused, Some(why.clone()), None),
        Fate::Measured { key, .. } => {
            let visits: Vec<_> = of(kept, key).collect();
            match (measure(variant, &visits, kept, base, bases, noise, precision), failure(kept, key)) {
                (_, Some(why)) => (RowState::Failed, Some(why), None),
                (Some(measured), None) => (RowState::Measured, None, Some(measured)),
                (None, None) => (RowState::Unmeasured, Some("the budget ended first".into()), None),
            }
        }
    };
    Row {
        group: variant.group,
        name: variant.name.clone(),
        settings: variant.settings.clone(),
        state,
        why,
        measured,
    }
}

/// The failure after which a variant is not visited again.
pub fn failure(kept: &StoredVisits, key: &str) -> Option<String> {
    kept.visits.iter().filter(|visit| visit.key == key).find_map(|visit| match &visit.end {
        super::stored_visits::End::Failed(why) => Some(why.clone()),
        super::stored_visits::End::Timed(_) => None,
    })
}

fn measure(
    variant: &Variant,
    visits: &[(&Visit, &Timed)],
    kept: &StoredVisits,
    base: &BaseRow,
    bases: &[(&Visit, &Timed)],
    noise: Noise,
    precision: Precision,
) -> Option<Measured> {
    let (_, first) = visits.first()?;
    let is_base = matches!(&variant.fate, Fate::Measured { key, .. } if key == BASE);
    let ratios: Vec<f64> =
        visits.iter().filter_map(|visit| ratio(visit, kept)).map(|r| r * variant.stretch).collect();
    let estimate = match is_base {
        true => Estimate { ratio: 1.0, low: 1.0, high: 1.0, rounds: 0 },
        false if ratios.is_empty() => return None,
        false => estimate(&ratios, noise),
    };
    let verdict = match estimate {
        estimate if estimate.is_noise() => Verdict::WithinNoise,
        Estimate { ratio, .. } if ratio > 1.0 => Verdict::Faster,
        _ => Verdict::Slower,
    };
    let start_seconds = median(&all(visits, |timed| timed.start.seconds()));
    let memory = |arena: u64, driver: u64| (arena + driver) as i64;
    Some(Measured {
        step_ms: base.step_ms * estimate.ratio,
        base_is_faster_by: estimate,
        verdict,
        arena_bytes: first.arena_bytes,
        driver_bytes: first.driver_bytes,
        memory_difference: memory(first.arena_bytes, first.driver_bytes)
            - memory(base.arena_bytes, base.driver_bytes),
        launches: first.launches,
        parameters: first.parameters,
        start_seconds,
        first_start_seconds: first.start.seconds(),
        break_even: break_even(base.start_seconds - start_seconds, estimate, verdict, base.step_ms),
        loss: last_loss(first),
        numbers: variant.class.map(|class| numbers(class, &timings(visits), &timings(bases), precision)),
        climb: None,
    })
}

/// The ratio of a visit's time to the base's at that moment: update by update where the two were interleaved, otherwise to the
/// median of the base's nearest visits in the same process.
fn ratio((visit, timed): &(&Visit, &Timed), kept: &StoredVisits) -> Option<f64> {
    if !timed.around_ms.is_empty() {
        return Some(paired_ratio(&timed.step_ms, &timed.around_ms));
    }
    let at = kept.visits.iter().position(|other| std::ptr::eq(other, *visit))?;
    let base = |other: &Visit| {
        let is_base = other.key == BASE && other.process == visit.process;
        is_base.then(|| other.timed().map(Timed::update_ms)).flatten()
    };
    let before = kept.visits[..at].iter().rev().filter_map(base);
    let after = kept.visits[at + 1..].iter().filter_map(base);
    Some(timed.update_ms() / nearest(before, after)?)
}

/// `slower_start` is the base's start time minus the variant's, in seconds.
fn break_even(slower_start: f64, estimate: Estimate, verdict: Verdict, base_ms: f64) -> BreakEven {
    let gain_seconds = (estimate.ratio - 1.0) * base_ms / 1e3;
    match verdict {
        _ if slower_start <= 0.0 => BreakEven::NothingToRepay,
        Verdict::WithinNoise => BreakEven::NothingToRepay,
        Verdict::Slower => BreakEven::Never,
        Verdict::Faster => BreakEven::After((slower_start / gain_seconds).ceil() as u64),
    }
}

fn timings<'a>(visits: &[(&Visit, &'a Timed)]) -> Vec<&'a Timed> {
    visits.iter().map(|(_, timed)| *timed).collect()
}

/// Compares the losses in `visits` with those of `bases`. `precision` is that of the base.
pub(crate) fn numbers(class: Class, visits: &[&Timed], bases: &[&Timed], precision: Precision) -> Numbers {
    let base = bases[0];
    let off = |(a, b): (&f32, &f32)| if a == b { 0.0 } else { ((a - b) / a).abs() as f64 };
    let worst = visits
        .iter()
        .flat_map(|timed| base.losses.iter().zip(&timed.losses).map(off))
        .fold(0.0, |worst: f64, off| if off.is_nan() { f64::INFINITY } else { worst.max(off) });
    let agree = |all: &[&Timed]| all.iter().all(|timed| same_bits(&timed.losses, &base.losses));
    let same_bits = agree(visits);
    // A base whose bits change from visit to visit cannot show that a variant keeps them.
    let checked = if class == Class::Bitwise && !agree(bases) { Class::Bounded } else { class };
    let bound = checked.bound(precision);
    let is_kept = if checked == Class::Bitwise { same_bits } else { worst <= bound };
    Numbers { class, worst, same_bits, bound, is_kept }
}
