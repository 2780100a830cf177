//! Renders a report as text tables, for the terminal and a Markdown page, and as charts.

use std::fs;
use std::path::{Path, PathBuf};

use super::table::{BreakEven, Measured, Numbers, Row, RowState, Verdict};
use super::variants::Group;
use super::{Estimate, Report};
use crate::statistics::rounds_to_resolve;
use flatout_report::plot::{Bar, Bars};
use flatout_report::words::{bytes, count, duration, milliseconds as ms, short};
use flatout_train::Failure;
use flatout_train::switches::Class;

/// A text table.
pub struct AblateTable {
    pub title: &'static str,
    pub head: Vec<&'static str>,
    pub rows: Vec<Vec<String>>,
}

/// The tables that have rows.
pub fn tables(report: &Report) -> Vec<AblateTable> {
    let alone = ["", "update", "base is faster by", "", "memory", "start", "break-even", "loss"];
    let titles = [
        (vec![Group::Control, Group::Off], "each switch off alone"),
        (vec![Group::Instead], "other values"),
        (vec![Group::Model], "other models"),
    ];
    let measured = |groups: &[Group]| -> Vec<(&Row, &Measured)> {
        let rows = report.rows.iter().filter(|row| groups.contains(&row.group));
        rows.filter_map(|row| Some((row, row.measured.as_ref()?))).collect()
    };
    let mut tables = vec![];
    for (groups, title) in titles {
        let mut rows = vec![base_cells(report)];
        rows.extend(measured(&groups).into_iter().map(|(row, m)| cells(row, m, report)));
        if rows.len() > 1 {
            tables.push(AblateTable { title, head: alone.to_vec(), rows });
        }
    }
    let rungs = measured(&[Group::Ladder]);
    if !rungs.is_empty() {
        let head =
            vec!["", "update", "tokens/s", "over the first", "over the one below", "", "memory", "loss"];
        tables.push(AblateTable {
            title: "the ladder, one more on at each rung",
            head,
            rows: ladder_cells(&rungs, report),
        });
    }
    tables
}

/// Names of rows without a measurement and the reason, grouped by reason.
pub fn not_measured(report: &Report) -> Vec<(String, String)> {
    let mut reasons: Vec<(Vec<&str>, String)> = vec![];
    for row in report.rows.iter().filter(|row| row.measured.is_none()) {
        let why = row.why.clone().unwrap_or_default();
        let why = if row.state == RowState::Failed { format!("failed: {why}") } else { why };
        match reasons.iter_mut().find(|(_, other)| *other == why) {
            Some((names, _)) => names.push(&row.name),
            None => reasons.push((vec![&row.name], why)),
        }
    }
    reasons.into_iter().map(|(names, why)| (names.join(", "), why)).collect()
}

/// Sentences about rows whose losses break the promise of their class.
pub fn broken(report: &Report) -> Vec<String> {
    let of = |row: &Row| {
        let numbers = row.measured.as_ref()?.numbers.filter(|numbers| !numbers.is_kept)?;
        let promise = match numbers.class {
            Class::Bitwise => "equal bits".to_string(),
            _ => format!("at most {:.0e}", numbers.bound),
        };
        Some(format!(
            "{}: losses differ from the base's by {:.1e}, and its class promises {promise}",
            row.name, numbers.worst
        ))
    };
    report.rows.iter().filter_map(of).collect()
}

fn base_cells(report: &Report) -> Vec<String> {
    let base = &report.base;
    let bits = if base.is_repeatable { "every time" } else { "not the same bits each time" };
    vec![
        "base".into(),
        ms(base.step_ms),
        "1".into(),
        String::new(),
        bytes(base.arena_bytes + base.driver_bytes),
        duration(base.start_seconds),
        String::new(),
        format!("{:.4}, {bits}", base.loss),
    ]
}

fn cells(row: &Row, measured: &Measured, report: &Report) -> Vec<String> {
    let name = match row.group {
        Group::Model => format!("{} ({} parameters)", row.name, short(measured.parameters)),
        _ => row.name.clone(),
    };
    vec![
        name,
        ms(measured.step_ms),
        times(measured),
        range(&measured.base_is_faster_by),
        more(measured.memory_difference),
        seconds_more(measured.start_seconds - report.base.start_seconds),
        match measured.break_even {
            BreakEven::NothingToRepay => "-".into(),
            BreakEven::After(updates) => format!("{} updates", count(updates)),
            BreakEven::Never => "never".into(),
        },
        format!("{:.4}{}", measured.loss, measured.numbers.map_or(String::new(), |n| numbers(&n))),
    ]
}

fn ladder_cells(rungs: &[(&Row, &Measured)], report: &Report) -> Vec<Vec<String>> {
    let over = |estimate: Option<Estimate>| match estimate {
        None => "-".to_string(),
        Some(estimate) if estimate.rounds == 0 => "1".into(),
        Some(estimate) if estimate.is_noise() => "within noise".into(),
        Some(estimate) => format!("{:.3}", estimate.ratio),
    };
    let cell = |(row, measured): &(&Row, &Measured)| {
        vec![
            row.name.clone(),
            ms(measured.step_ms),
            count((1e3 * report.tokens_per_update as f64 / measured.step_ms) as u64),
            over(measured.climb.map(|climb| climb.over_first)),
            over(measured.climb.map(|climb| climb.over_below)),
            measured.climb.map_or(String::new(), |climb| range(&climb.over_below)),
            bytes(measured.arena_bytes + measured.driver_bytes),
            format!("{:.4}{}", measured.loss, measured.numbers.map_or(String::new(), |n| numbers(&n))),
        ]
    };
    rungs.iter().map(cell).collect()
}

fn times(measured: &Measured) -> String {
    match measured.verdict {
        Verdict::WithinNoise => "within noise".into(),
        _ => format!("{:.3}", measured.base_is_faster_by.ratio),
    }
}

fn range(estimate: &Estimate) -> String {
    match estimate {
        Estimate { rounds: 0, .. } => String::new(),
        Estimate { low, high, .. } if high.is_finite() => format!("{low:.3} to {high:.3}"),
        _ => "no range yet".into(),
    }
}

fn more(difference: i64) -> String {
    match difference {
        0 => "same".into(),
        more if more > 0 => format!("+{}", bytes(more as u64)),
        less => format!("-{}", bytes(less.unsigned_abs())),
    }
}

fn seconds_more(seconds: f64) -> String {
    format!("{}{:.2} s", if seconds < 0.0 { "-" } else { "+" }, seconds.abs())
}

fn numbers(numbers: &Numbers) -> String {
    match numbers {
        Numbers { same_bits: true, .. } => ", equal bits".into(),
        Numbers { is_kept: false, worst, .. } => format!(", OFF by {worst:.1e}"),
        Numbers { worst, bound, .. } => format!(", off by {worst:.1e} of {bound:.0e}"),
    }
}

/// The method in sentences, for people.
pub fn how(report: &Report) -> String {
    let Report { steps, updates, repeats, noise, .. } = report;
    let measured = report.rows.iter().filter_map(|row| row.measured.as_ref());
    // The rung that is the base has no ratio.
    let rounds = measured.map(|m| m.base_is_faster_by.rounds).filter(|rounds| *rounds > 0);
    let (least, most) = rounds.fold((usize::MAX, 0), |(a, b), rounds| (a.min(rounds), b.max(rounds)));
    let rounds = match (least, most) {
        (_, 0) => "no round yet".to_string(),
        (least, most) if least == most => format!("{least} of {repeats} rounds"),
        (least, most) => format!("{least} to {most} of {repeats} rounds"),
    };
    let noise = match noise.is_finite() {
        true => {
            let enough = rounds_to_resolve(0.05, *noise);
            let hint = match enough > *repeats {
                true => format!(" (to resolve 5% takes --repeats {enough} here, or an idle machine)"),
                false => String::new(),
            };
            format!("{:.1}%{hint}", 100.0 * noise)
        }
        false => "an unknown amount".into(),
    };
    format!(
        "{rounds}, {steps} timed updates per visit. A ratio is the median over rounds, each measured against the base at \
        the same moment; its interval is three standard errors to either side, from the scatter of the rounds or from the \
        base compared with itself, whose ratios vary by {noise}. Losses are compared after each of {updates} updates \
         on {}.",
        report.data
    )
}

/// The report as a Markdown page.
pub fn markdown(report: &Report) -> String {
    let base = &report.base;
    let mut page = format!(
        "# What each switch is worth: {}\n\n{}, {}, flatout {}. The base makes an update of {} tokens in {}: {} tokens/s, {}.\n\n{}\n",
        report.recipe,
        report.device,
        report.precision,
        report.version,
        count(report.tokens_per_update as u64),
        ms(base.step_ms),
        count(base.tokens_per_second as u64),
        bytes(base.arena_bytes + base.driver_bytes),
        how(report)
    );
    for table in tables(report) {
        let title = table.title;
        page += &format!("\n## {}{}\n\n", title[..1].to_uppercase(), &title[1..]);
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        page += &line(table.head.iter().map(|cell| cell.to_string()).collect());
        page += &line(table.head.iter().map(|_| "---".to_string()).collect());
        table.rows.into_iter().for_each(|row| page += &line(row));
        if let Some(picture) = pictures(report).iter().find(|(_, of, _)| *of == title) {
            page += &format!("\n![{title}]({})\n", picture.0);
        }
    }
    let left = not_measured(report);
    if !left.is_empty() {
        page += "\n## Not measured\n\n";
        left.iter().for_each(|(names, why)| page += &format!("- {names}: {why}\n"));
    }
    page
}

/// A bar's value, range and note.
type Shown = (f64, Option<(f64, f64)>, String);

/// File name, title of the table it belongs to, and the chart.
fn pictures(report: &Report) -> Vec<(&'static str, &'static str, Bars)> {
    let bars = |groups: &[Group], shown: &dyn Fn(&Measured) -> Shown| {
        let rows = report.rows.iter().filter(|row| groups.contains(&row.group));
        let bar = |row: &Row| {
            let measured = row.measured.as_ref()?;
            let (value, range, note) = shown(measured);
            // Bars within noise are grey.
            let colour = if measured.verdict == Verdict::WithinNoise && range.is_some() { 7 } else { 0 };
            Some(Bar { name: row.name.clone(), value, range, note, colour })
        };
        rows.filter_map(bar).collect::<Vec<Bar>>()
    };
    let ratio = |m: &Measured| {
        let Estimate { ratio, low, high, .. } = m.base_is_faster_by;
        (ratio, (low > 0.0 && high.is_finite()).then_some((low, high)), times(m))
    };
    let speed = |m: &Measured| {
        let tokens = 1e3 * report.tokens_per_update as f64 / m.step_ms;
        (tokens, None, count(tokens as u64))
    };
    let worth = |title: &str, bars| Bars {
        title: title.into(),
        x: "speed of the base over the variant's".into(),
        from: 1.0,
        bars,
    };
    let mut all = vec![];
    for (file, part, groups) in [
        ("off.svg", "each switch off alone", &[Group::Control, Group::Off][..]),
        ("instead.svg", "other values", &[Group::Instead]),
        ("models.svg", "other models", &[Group::Model]),
    ] {
        let found = bars(groups, &ratio);
        if !found.is_empty() {
            all.push((file, part, worth(&format!("{}: {part}", report.recipe), found)));
        }
    }
    let rungs = bars(&[Group::Ladder], &speed);
    if !rungs.is_empty() {
        let part = "the ladder, one more on at each rung";
        let title = format!("{}: {part}", report.recipe);
        all.push(("ladder.svg", part, Bars { title, x: "tokens a second".into(), from: 0.0, bars: rungs }));
    }
    all
}

/// Writes `ablate.md`, `ablate.json` and the charts into a folder; returns the page's path.
pub fn write(report: &Report, folder: &Path) -> Result<PathBuf, Failure> {
    let put = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).map(|()| path.clone()).map_err(Failure::io(path.display()))
    };
    fs::create_dir_all(folder).map_err(Failure::io(folder.display()))?;
    for (name, _, bars) in pictures(report) {
        put(name, bars.to_svg())?;
    }
    put("ablate.json", serde_json::to_string_pretty(report).expect("a report has a JSON form") + "\n")?;
    put("ablate.md", markdown(report))
}
