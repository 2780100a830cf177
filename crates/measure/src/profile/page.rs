//! Renders a profile as text tables.

use super::Report;
use super::exchanges::Exchange;
use super::marginal::{Added, Marginal};
use super::members::RankTimes;
use super::sinks::{millis, percent};
use super::table::Row;
use flatout_report::words::count;

/// A text table: its title, the names of its columns, its rows.
pub struct ProfileTable {
    pub title: String,
    pub head: Vec<&'static str>,
    pub rows: Vec<Vec<String>>,
    /// The index after the last numeric column; numeric columns begin with the second.
    pub numbers: usize,
}

/// The measurement in a line.
pub fn headline(report: &Report) -> String {
    format!(
        "{} on {}, {}: {} an update of {} tokens, {} tokens/s",
        report.recipe,
        report.device,
        report.precision,
        millis(report.budget.step_ms),
        count(report.tokens_per_update as u64),
        count(report.tokens_per_second as u64)
    )
}

/// The tables, each with at most `most` rows.
pub fn tables(report: &Report, most: usize) -> Vec<ProfileTable> {
    let mut tables = vec![
        budget(report),
        kernels("by kind of work", &report.work, usize::MAX),
        kernels("by kernel", &report.kernels, most),
        kernels("by place in the model, all layers together", &report.places, most),
    ];
    tables.extend(report.marginal.as_ref().map(marginal));
    if !report.ranks.is_empty() {
        tables.insert(1, exchanges(&report.exchanges));
        tables.push(ranks(&report.ranks));
    }
    tables
}

fn marginal(measured: &Marginal) -> ProfileTable {
    let joules = |joules: Option<f64>| joules.map_or("-".into(), |joules| format!("{joules:.2}"));
    let cells = |row: &Added| {
        vec![
            row.name.clone(),
            count(row.launches),
            format!("{:.3}", row.ms),
            format!("{:.3}", row.added_ms),
            joules(row.added_joules),
            percent(row.added_ms / measured.step_ms),
        ]
    };
    let energy = match (measured.joules, measured.watts) {
        (Some(joules), Some(watts)) => {
            let limit = measured.limit_watts.map_or(String::new(), |limit| format!(" of {limit:.0}"));
            format!(", {joules:.1} J, {watts:.0}{limit} W")
        }
        _ => ", and this device does not measure energy".into(),
    };
    let once = match measured.once {
        0 => String::new(),
        once => format!("; {} launches write in place over their inputs and are not repeated", count(once)),
    };
    let title = format!(
        "by what one more run adds to the update: the plain update {}{energy}{once}",
        millis(measured.step_ms)
    );
    let head = vec!["", "launches", "ms alone", "ms added", "J added", "of the update"];
    let numbers = head.len();
    ProfileTable { title, head, rows: measured.kernels.iter().map(cells).collect(), numbers }
}

fn exchanges(all: &[Exchange]) -> ProfileTable {
    let cells = |row: &Exchange| {
        vec![
            row.name.clone(),
            count(row.launches),
            format!("{:.3}", row.ms),
            format!("{:.3}", row.exposed_ms),
            format!("{:.3}", row.hidden_ms),
            format!("{:.2}", row.bytes as f64 / 1e6),
            format!("{:.2}", row.gigabytes_per_second),
        ]
    };
    let head = vec!["", "launches", "ms", "exposed ms", "hidden ms", "MB sent", "GB/s"];
    let numbers = head.len();
    ProfileTable {
        title: "exchanges with other ranks".into(),
        head,
        rows: all.iter().map(cells).collect(),
        numbers,
    }
}

fn ranks(all: &[RankTimes]) -> ProfileTable {
    let cells = |rank: &RankTimes| {
        let times = [rank.step_ms, rank.kernels_ms, rank.exposed_ms, rank.hidden_ms];
        let times = times.into_iter().map(|ms| format!("{ms:.3}"));
        [rank.name.clone()].into_iter().chain(times).collect()
    };
    let head = vec!["", "update ms", "kernels ms", "exposed ms", "hidden ms"];
    let numbers = head.len();
    ProfileTable { title: "by rank".into(), head, rows: all.iter().map(cells).collect(), numbers }
}

fn budget(report: &Report) -> ProfileTable {
    let budget = &report.budget;
    let launches: u64 = report.work.iter().map(|row| row.launches).sum();
    let mut meanings = vec![
        ("kernels", budget.kernels_ms, format!("{} launches, each timed alone", count(launches))),
        ("launch", budget.launch_ms, "between kernels: the plans as they run, minus their kernels".into()),
        ("synchronisation", budget.synchronisation_ms, "results that the host reads".into()),
        ("copy", budget.copy_ms, "inputs written and copied to the device".into()),
        ("data", budget.data_ms, "waiting for rows".into()),
    ];
    if let Some(wire_ms) = budget.wire_ms {
        meanings.insert(1, ("wire", wire_ms, "exchanges with other ranks that launches wait for".into()));
    }
    let cells = |name: &str, ms: f64, meaning: String| {
        let noise = if ms.abs() < budget.noise_ms { " (within noise)" } else { "" };
        vec![name.into(), format!("{ms:.2}"), percent(ms / budget.step_ms), meaning + noise]
    };
    let mut rows: Vec<_> = meanings.into_iter().map(|(name, ms, what)| cells(name, ms, what)).collect();
    rows.push(cells("the update", budget.step_ms, "as a run makes it".into()));
    ProfileTable { title: "where an update goes".into(), head: vec!["", "ms", "share", ""], rows, numbers: 3 }
}

fn kernels(title: &str, all: &[Row], most: usize) -> ProfileTable {
    let is_predicted = all.iter().any(|row| row.predicted_ms.is_some());
    let mut head =
        vec!["", "launches", "ms", "share", "TFLOP/s", "GB/s", "roofline ms", "of roofline", "bound by"];
    if is_predicted {
        head.insert(7, "predicted ms");
    }
    let cells = |row: &Row| {
        let mut cells = vec![
            row.name.clone(),
            count(row.launches),
            format!("{:.3}", row.ms),
            percent(row.share),
            format!("{:.3}", row.teraflops_per_second),
            format!("{:.1}", row.gigabytes_per_second),
            format!("{:.3}", row.roofline_ms),
            percent(row.of_roofline),
            row.bound.name().into(),
        ];
        if is_predicted {
            cells.insert(7, row.predicted_ms.map_or("-".into(), |ms| format!("{ms:.3}")));
        }
        cells
    };
    let rows = all.iter().take(most).map(cells).collect();
    let left = all.len().saturating_sub(most);
    let rest: f64 = all.iter().skip(most).map(|row| row.share).sum();
    let title = match left {
        0 => title.into(),
        _ => format!("{title}: the {most} longest; {left} more take {}, --all shows them", percent(rest)),
    };
    let numbers = head.len() - 1;
    ProfileTable { title, head, rows, numbers }
}

/// The method in a line, for people.
pub fn how(report: &Report) -> String {
    let predicted = match report.predicted_ms {
        Some(ms) => format!("predicted {} for its kernels", millis(ms)),
        None => "nothing predicted: flatout doctor --calibrate times this device's kernels".into(),
    };
    let noise = report.budget.noise_ms / report.budget.step_ms;
    // An idle machine stays well below this.
    let busy = match noise > 0.05 {
        true => "; other programs share this machine, and their load is in every time",
        false => "",
    };
    format!(
        "{} rounds of {} updates on {}, medians; parts below {} are noise{busy}; roofline {} an update, {predicted}",
        report.rounds,
        report.steps,
        report.data,
        percent(noise),
        millis(report.roofline_ms)
    )
}
