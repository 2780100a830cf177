//! `tune`: finds the fastest settings on this machine, and writes tables, JSON and a preset.

use std::process::ExitCode;

use flatout_measure::bench::Stage;
use flatout_measure::tune::space::Phase;
use flatout_measure::tune::{Fate, Options, Report, Row, TuneOutcome, TuneProgress, Verdict, preset};
use flatout_report::words::milliseconds;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::config;
use flatout_train::device::Device;
use flatout_train::recipes;
use flatout_train::switches::Class;
use serde_json::json;

use crate::ablate::budget;
use crate::args::{Tune, recipe_and_overrides};
use crate::measuring::measure;
use crate::runs::print_table;
use crate::screen::{Screen, bytes, count, duration};

pub fn tune(args: &Tune, screen: &Screen) -> Result<ExitCode, Failure> {
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let config = recipes::resolve(recipe, &args.with, overrides)?;
    let options = Options {
        budget: budget(args.budget)?,
        allow: match args.allow.as_str() {
            "bitwise" => Class::Bitwise,
            "statistical" => Class::Statistical,
            _ => Class::Bounded,
        },
        given: config::keys_of(overrides)?,
    };
    // Configs that cannot run and files that cannot be written are refused before anything is measured.
    args.out.as_deref().map_or(Ok(()), preset::check)?;
    measure(&args.meeting, &config, screen, |stage, config, screen| match stage.is_first() {
        true => first(args, config, &options, stage, screen),
        false => stage.follow().map(|()| ExitCode::SUCCESS),
    })
}

/// Runs on rank 0: chooses what to measure, measures it together with the other ranks, and reports.
fn first(
    args: &Tune,
    config: &Config,
    options: &Options,
    stage: &Stage,
    screen: &Screen,
) -> Result<ExitCode, Failure> {
    let target = || stage.device().target(&config.switches).name;
    let default_path = || preset::usual_path(&config.recipe, &target(), stage.ranks());
    let out = args.out.clone().unwrap_or_else(default_path);
    preset::check(&out)?;

    let bar = screen.bar("{wide_bar} {elapsed}  {msg}", 1);
    let line = |text: String| screen.note_above(bar.as_ref(), text);
    let report = flatout_measure::tune::tune(config, options, stage, &mut |progress| match progress {
        TuneProgress::Ready { budget, device } => {
            if let Some(bar) = &bar {
                bar.set_length(budget.as_secs().max(1));
            }
            line(format!("{} on {device}: {} at most", config.recipe, duration(budget.as_secs_f64())));
        }
        TuneProgress::Phase { count: 0, .. } => {}
        TuneProgress::Phase { phase, count, left_out } => {
            line(format!("{}: {count} to measure, {left_out} left out", title(phase)));
        }
        TuneProgress::Last { choice } => line(format!("comparing the defaults with {choice}")),
        TuneProgress::Visit { name, spent } => match &bar {
            Some(bar) => {
                bar.set_position(spent.as_secs());
                bar.set_message(name.to_string());
            }
            None if screen.verbose => screen.note(format!("{:.1} s  {name}", spent.as_secs_f64())),
            None => {}
        },
    });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let report = report?;
    let text = (report.found.verdict == Verdict::Faster).then(|| preset::text(&report, config));
    if let Some(text) = &text {
        preset::write(&out, text)?;
    }
    // A search that ran out of time does not overwrite an earlier result.
    let is_conclusive = text.is_some() || report.found.is_complete;
    let remember = || preset::remember(config, stage.device(), stage.ranks(), text.as_deref());
    let kept = if is_conclusive { remember() } else { Ok(None) };
    if screen.json {
        let mut all = serde_json::to_value(&report).expect("a report has a JSON form");
        all["preset"] = json!(text.is_some().then(|| out.display().to_string()));
        screen.object(&all);
        return Ok(ExitCode::SUCCESS);
    }
    print(&report, screen);
    if text.is_some() {
        screen.result(format!("written  {}", out.display()));
        let mut words = vec!["flatout train".to_string()];
        words.extend(args.words.iter().cloned());
        words.extend(args.with.iter().map(|with| format!("--with {with}")));
        words.extend((stage.ranks() > 1).then(|| args.meeting.ranks.flag(stage.ranks())));
        screen.note(format!("next     {} --with {}", words.join(" "), out.display()));
    }
    match kept {
        Ok(Some(path)) if screen.verbose => screen.note(format!("kept     {}", path.display())),
        Ok(_) => {}
        Err(why) => screen.note(format!("the result could not be saved for a later `train`: {why}")),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a line in `train` if an earlier `tune` found faster settings for this config on this machine.
pub fn mention(config: &Config, device: &Device, ranks: usize, screen: &Screen) {
    if let Some(found) = preset::remembered(config, device, ranks) {
        screen.note(format!(
            "tuned    faster settings were measured here ({}): add --with {}",
            found.settings.join(" "),
            found.path.display()
        ));
    }
}

fn title(phase: Phase) -> &'static str {
    match phase {
        Phase::Split => "micro-batch, recomputation and precision",
        Phase::Between => "micro-batches between",
        Phase::Autotune => "autotune",
        Phase::Workers => "threads of the loader",
    }
}

fn print(report: &Report, screen: &Screen) {
    let found = &report.found;
    screen.result(format!(
        "{} on {}: {} rows ({} tokens) an update, on {}",
        report.recipe,
        report.device,
        report.batch,
        count(report.tokens_per_update as u64),
        report.data
    ));
    let own = &found.default.setting;
    screen.result(format!(
        "default  micro_batch={} recompute={} precision={}, {}",
        own.micro_batch,
        own.recompute.name(),
        own.precision.name(),
        bytes(found.default.bytes)
    ));
    for phase in Phase::ALL {
        let is_measured = |row: &&Row| row.phase == phase && row.step_ms.is_some();
        let mut rows: Vec<&Row> = found.rows.iter().filter(is_measured).collect();
        rows.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
        if let Some(first) = rows.first() {
            screen.result(format!("\n{}, against {}", title(phase), first.against));
            let head =
                ["", "predicted", "memory", "update", "of its time", "", ""].map(String::from).to_vec();
            let rows: Vec<Vec<String>> = [head].into_iter().chain(rows.into_iter().map(cells)).collect();
            print_table(&rows, 1..5, screen);
        }
    }
    let left = left_out(found);
    if !left.is_empty() {
        screen.result("\nleft out");
        left.iter().for_each(|(names, why)| screen.result(format!("  {names}: {why}")));
    }
    for held in &found.held {
        screen.result(format!("  {}={} stays: {}", held.knob, held.value, held.why));
    }
    screen.result("");
    verdict(report, screen);
    if !found.is_complete {
        screen.note(
            "the budget ended before all settings could be told apart: give more minutes with --budget",
        );
    }
}

fn ratio(row: &Row) -> f64 {
    row.over.map_or(f64::INFINITY, |over| over.ratio)
}

fn cells(row: &Row) -> Vec<String> {
    let over = row.over.map_or([String::new(), String::new()], |over| {
        [format!("{:.3}", over.ratio), format!("{:.3} to {:.3}", over.low, over.high)]
    });
    let [time, range] = over;
    let taken = if row.fate == Fate::Taken { "taken: " } else { "" };
    vec![
        row.name.clone(),
        row.predicted_ms.map_or(String::new(), milliseconds),
        row.bytes.map_or(String::new(), bytes),
        row.step_ms.map_or(String::new(), milliseconds),
        time,
        range,
        format!("{taken}{}", row.why),
    ]
}

/// Settings without a measurement, grouped by the reason.
fn left_out(found: &TuneOutcome) -> Vec<(String, String)> {
    let mut reasons: Vec<(Vec<&str>, &str)> = vec![];
    for row in found.rows.iter().filter(|row| row.step_ms.is_none()) {
        match reasons.iter_mut().find(|(_, why)| *why == row.why) {
            Some((names, _)) => names.push(&row.name),
            None => reasons.push((vec![&row.name], &row.why)),
        }
    }
    reasons.into_iter().map(|(names, why)| (names.join(", "), why.to_string())).collect()
}

fn verdict(report: &Report, screen: &Screen) {
    let found = &report.found;
    let name = found.choice.setting.unlike(&found.default.setting);
    let by = found.faster_by.map_or(String::new(), |by| {
        format!("{:.3} times as fast ({:.3} to {:.3}, {} rounds)", by.ratio, by.low, by.high, by.rounds)
    });
    screen.result(match found.verdict {
        Verdict::Faster => {
            let [default, choice] =
                [&found.default, &found.choice].map(|side| side.step_ms.map_or("?".into(), milliseconds));
            let losses = found.numbers.map_or(String::new(), |numbers| match numbers.same_bits {
                true => "; the losses are the same bits".into(),
                false => format!("; losses differ by {:.0e} at most", numbers.worst),
            });
            format!(
                "choice   {name}: {by}; an update takes {choice} instead of {default}, memory is {} instead of {}{losses}",
                bytes(found.choice.bytes),
                bytes(found.default.bytes)
            )
        }
        Verdict::DefaultIsFastest => "choice   the defaults: nothing was faster beyond noise".into(),
        Verdict::WithinNoise if by.is_empty() => {
            format!("choice   the defaults: there was no time to compare {name} with them once more")
        }
        Verdict::WithinNoise => {
            format!("choice   the defaults: {name} looked faster and is, compared once more, {by}: within noise")
        }
        Verdict::LossesDiffer => {
            let worst = found.numbers.map_or(f64::NAN, |numbers| numbers.worst);
            let bound = found.numbers.map_or(f64::NAN, |numbers| numbers.bound);
            format!(
                "choice   the defaults: {name} is {by}, and its losses differ by {worst:.0e} where {bound:.0e} is allowed"
            )
        }
    });
    if let Some(noise) = found.noise {
        screen.note(format!(
            "one measurement varies by {:.1}%; all took {}",
            100.0 * noise,
            duration(report.seconds)
        ));
    }
}
