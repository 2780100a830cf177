//! Writes `report.md`, a run on one page, and its plots. Everything in it is read back from the run's directory.

mod classes;

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::history::{Axis, History, smoothing_span};
use crate::plot::{Plot, Series, Style};
use crate::words::{bytes, count, duration, short};
use flatout_data::durable;
use flatout_train::Config;
use flatout_train::metrics::Metrics;
use flatout_train::metrics::goal::Metric;
use flatout_train::run::events::{Event, Start, Status, Step};
use flatout_train::run::quoted;
use flatout_train::switches::{Switches, TABLE};
use flatout_train::training::trainer::Sink;

/// The most warnings that are printed; of the others, only the number.
const WARNINGS: usize = 30;

/// Writes the report when a run ends, as a sink of its events.
#[derive(Default)]
pub struct AtEnd {
    run: PathBuf,
}

impl Sink for AtEnd {
    fn open(&mut self, run: &Path, _: u64, _: &Config) {
        self.run = run.into();
    }

    fn record(&mut self, event: &Event) -> Option<String> {
        match event {
            Event::End(_) => write(&self.run).err().map(|why| format!("report.md is not written: {why}")),
            _ => None,
        }
    }
}

/// Writes the report of a run and its plots.
pub fn write(dir: &Path) -> Result<(), String> {
    let history = History::read(dir).map_err(|why| why.0)?;
    let folder = dir.join("plots");
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for (name, plot) in plots(&history) {
        let path = folder.join(format!("{name}.svg"));
        durable::replace(&path, plot.to_svg().as_bytes()).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    durable::replace(&dir.join("report.md"), page(&history).as_bytes()).map_err(|e| e.to_string())
}

/// The share of a run at its start that does not extend the axis of the loss.
pub const FIRST_STEPS: f64 = 0.02;

/// The plots of a run by the names of their files.
pub fn plots(history: &History) -> Vec<(&'static str, Plot)> {
    let name = history.name();
    let curve = |of: fn(&Step) -> f64| history.curve(Axis::Step, of);
    let series = |name: &str, points: Vec<(f64, f64)>, style, colour| Series {
        name: name.into(),
        points,
        style,
        colour,
    };
    let plot = |title: &str, y: &str, series| Plot {
        title: format!("{title} of {name}"),
        x: "step".into(),
        y: y.into(),
        log_x: false,
        log_y: false,
        skipped: 0.0,
        series,
    };
    let span = smoothing_span([history]);
    let both = |of: fn(&Step) -> f64, name: &str| {
        let mean = history.smoothed_curve(Axis::Step, of, span);
        vec![series(name, curve(of), Style::Faint, 0), series(name, mean, Style::Line, 0)]
    };
    let losses = curve(|step| step.loss as f64);
    let mut loss = both(|step| step.loss as f64, "training, smoothed");
    let held_out = history.eval_curve(Axis::Step);
    if !held_out.is_empty() {
        loss.push(series("held-out", held_out, Style::Marks, 1));
    }
    if let (Some(floor), Some(first), Some(last)) =
        (history.end.as_ref().and_then(|end| end.loss_floor), losses.first(), losses.last())
    {
        loss.push(series("floor", vec![(first.0, floor), (last.0, floor)], Style::Line, 7));
    }
    let mut rates = vec![series("Learning rate", curve(|s| s.lr as f64), Style::Line, 0)];
    if let Some(named) = history.steps.last().map(|made| &made.step.lrs).filter(|lrs| !lrs.is_empty()) {
        let rate = |name: &String| {
            history.curve(Axis::Step, |step| step.lrs.get(name).copied().unwrap_or(f32::NAN) as f64)
        };
        let named = named.keys().enumerate();
        rates = named.map(|(i, name)| series(name, rate(name), Style::Line, i)).collect();
    }
    let norms =
        Plot { log_y: true, ..plot("Gradient norm", "", both(|step| step.grad_norm as f64, "smoothed")) };
    let mut plots = vec![
        ("loss", Plot { skipped: FIRST_STEPS, ..plot("Loss", "nats", loss) }),
        ("lr", plot("Learning rate", "", rates)),
        ("grad_norm", norms),
        (
            "throughput",
            match history.is_of_images() {
                true => plot("Images a second", "", both(|step| step.samples_per_second, "smoothed")),
                false => plot("Tokens a second", "", both(|step| step.tokens_per_second, "smoothed")),
            },
        ),
    ];
    if history.has_rewards() {
        for (name, title, of, metric) in [
            ("reward_accuracy", "Reward accuracy", accuracy as fn(&Step) -> f64, Metric::RewardAccuracy),
            ("reward_margin", "Reward margin", margin, Metric::RewardMargin),
        ] {
            let mut curves = both(of, "training, smoothed");
            let held_out: Vec<(f64, f64)> =
                history.judged(metric).into_iter().map(|(step, value)| (step as f64, value)).collect();
            if !held_out.is_empty() {
                curves.push(series("held-out", held_out, Style::Marks, 1));
            }
            plots.push((name, plot(title, "", curves)));
        }
    }
    plots
}

fn accuracy(step: &Step) -> f64 {
    step.metrics.as_ref().and_then(Metrics::rewards).map_or(f64::NAN, |rewards| rewards.reward_accuracy)
}

fn margin(step: &Step) -> f64 {
    step.metrics.as_ref().and_then(Metrics::rewards).map_or(f64::NAN, |rewards| rewards.reward_margin)
}

fn page(history: &History) -> String {
    let mut out = format!("# {}\n\n{}\n\n", history.name(), standing(history));
    table(&mut out, "Result", &result(history));
    if let Some(metrics) = history.metrics.last().and_then(|(_, metrics)| metrics.classes())
        && metrics.confusion.classes() <= classes::MOST_IN_TABLE
    {
        out += &classes::table(metrics, &history.config.data.classes);
    }
    out += "## Curves\n\n";
    for (name, plot) in plots(history) {
        let _ = writeln!(out, "![{}](plots/{name}.svg)\n", plot.title);
    }
    if let Some(start) = &history.start {
        table(&mut out, "Model and data", &made_of(history, start));
        table(&mut out, "Machine", &machine(start));
        out += &memory(start);
        out += &switches(history, start);
    }
    out += &warnings(history);
    let dir = quoted(&history.dir);
    let _ = writeln!(
        out,
        "## Next\n\n```\nflatout resume {dir}            continues from step {}; train.steps=N for a longer run\n\
         flatout generate {dir} --prompt \"...\"\nflatout runs compare {dir} OTHER\ntensorboard --logdir {dir}\n```\n\n\
         [config.toml](config.toml) has every key of this run, [events.jsonl](events.jsonl) every step.",
        history.saved.unwrap_or(0)
    );
    out
}

/// The state of the run in a sentence.
fn standing(history: &History) -> String {
    let (at, total) = (history.last().map_or(0, |made| made.step.step), history.total().unwrap_or(0));
    let took = duration(history.last().map_or(0.0, |made| made.seconds));
    let starts = match history.starts {
        0 | 1 => String::new(),
        n => format!(", started {n} times"),
    };
    match history.end.as_ref().map(|end| end.status) {
        Some(Status::Done) => {
            let early = history.end.as_ref().and_then(|end| end.early.as_ref());
            let early = early.map_or(String::new(), |why| format!(" It ended early: {why}."));
            format!("Done: {} steps in {took}{starts}.{early}", count(at))
        }
        Some(Status::Stopped) => {
            format!("Stopped after step {} of {}, saved, after {took}{starts}.", count(at), count(total))
        }
        Some(Status::Failed) => {
            format!("Failed after step {} of {}, after {took}{starts}.", count(at), count(total))
        }
        None => format!("At step {} of {}, after {took}{starts}.", count(at), count(total)),
    }
}

type Rows = Vec<(&'static str, String)>;

fn table(out: &mut String, title: &str, rows: &Rows) {
    let _ = writeln!(out, "## {title}\n\n| | |\n|---|---|");
    for (name, value) in rows {
        let _ = writeln!(out, "| {name} | {} |", cell(value));
    }
    out.push('\n');
}

/// Escapes text for a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn result(history: &History) -> Rows {
    let mut rows = Rows::new();
    let losses = history.curve(Axis::Step, |step| step.loss as f64);
    if let Some((_, loss)) = losses.last() {
        let mean = history.smoothed_loss(smoothing_span([history])).unwrap_or(f64::NAN);
        rows.push(("training loss", format!("{loss:.4} (smoothed {mean:.4})")));
    }
    if let Some((step, loss)) = history.evals.last() {
        rows.push(("held-out loss", format!("{loss:.4} after step {}", count(*step))));
        let best = history.evals.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((at, best)) = best.filter(|(at, _)| at != step) {
            rows.push(("best held-out loss", format!("{best:.4} after step {}", count(*at))));
        }
        if history.config.train.ema > 0.0 {
            let decay = history.config.train.ema;
            rows.push(("evaluated", format!("the running average of the weights (train.ema = {decay})")));
        }
        match history.metrics.last() {
            None => rows.push(("perplexity", format!("{:.3}", (*loss as f64).exp()))),
            Some((_, Metrics::Text(metrics))) => {
                rows.push(("perplexity", format!("{:.3}", (*loss as f64).exp())));
                rows.push(("bits per byte", format!("{:.4}", metrics.bits_per_byte)));
            }
            Some((_, Metrics::Classes(metrics))) => rows.extend(classes::rows(history, metrics)),
            Some((_, Metrics::Answers(metrics))) => {
                rows.push(("perplexity", format!("{:.3}", (*loss as f64).exp())));
                rows.push(("exact answers", format!("{:.4}", metrics.exact)));
                rows.push(("token accuracy", format!("{:.4}", metrics.token_accuracy)));
            }
            Some((_, Metrics::Rewards(metrics))) => {
                rows.push(("reward accuracy", format!("{:.4}", metrics.reward_accuracy)));
                let (chosen, rejected) = (metrics.reward_chosen, metrics.reward_rejected);
                let margin = metrics.reward_margin;
                rows.push((
                    "reward margin",
                    format!("{margin:.4} (chosen {chosen:.4}, rejected {rejected:.4})"),
                ));
            }
        }
    }
    if let Some((loss, floor)) = history.end.as_ref().and_then(|end| Some((end.loss as f64, end.loss_floor?)))
    {
        let above = 100.0 * (loss / floor - 1.0);
        rows.push(("loss floor", format!("{floor:.4}, which the run is {above:.1}% above")));
    }
    if let Some(last) = history.last() {
        let Step { tokens, samples, epoch, .. } = last.step;
        // An endless synthetic language has no epochs.
        let epochs = if epoch > 0.0 { format!(", {epoch:.2} epochs") } else { String::new() };
        let samples = count(samples);
        rows.push((
            "trained on",
            match history.is_of_images() {
                true => format!("{samples} images{epochs}"),
                false => format!("{} tokens in {samples} rows{epochs}", count(tokens)),
            },
        ));
    }
    if let Some(skipped) = history.end.as_ref().map(|end| end.skipped).filter(|skipped| *skipped > 0) {
        rows.push(("skipped updates", format!("{}, whose gradients were not finite", count(skipped))));
    }
    let mut recent = |name, of: fn(&Step) -> f64, say: fn(f64) -> String| {
        if let Some(value) = history.recent(of) {
            rows.push((name, say(value)));
        }
    };
    let share = |share: f64| format!("{:.1}%", 100.0 * share);
    match history.is_of_images() {
        true => recent("images a second in a step", |s| s.samples_per_second, |v| count(v as u64)),
        false => recent("tokens a second in a step", |s| s.tokens_per_second, |v| count(v as u64)),
    }
    recent("step", |s| s.step_ms, |v| format!("{v:.1} ms"));
    recent("MFU", |s| s.mfu.unwrap_or(f64::NAN), share);
    recent("of the predicted speed", |s| s.of_predicted.unwrap_or(f64::NAN), share);
    recent("of the roofline", |s| s.of_roofline.unwrap_or(f64::NAN), share);
    recent("waiting for data", |s| s.data_wait_ms.unwrap_or(f64::NAN) / s.step_ms, share);
    let gpu = |s: &Step| s.gpu.clone().unwrap_or_default();
    if let Some(end) = history.end.as_ref().filter(|end| end.tokens_per_second.is_finite()) {
        let last = history.last().map_or((1, 1), |made| (made.step.samples, made.step.tokens.max(1)));
        let (name, rate) = match history.is_of_images() {
            true => ("images a second of the run", end.tokens_per_second * last.0 as f64 / last.1 as f64),
            false => ("tokens a second of the run", end.tokens_per_second),
        };
        rows.push((name, format!("{}, with evaluation and saving", count(rate as u64))));
    }
    if let Some(watts) = history.recent(|s| gpu(s).power_watts.unwrap_or(f64::NAN)) {
        rows.push(("GPU power", format!("{watts:.0} W")));
    }
    let sampled: Vec<_> = history.steps.iter().filter_map(|made| made.step.gpu.as_ref()).collect();
    let throttled = sampled.iter().filter(|gpu| !gpu.throttled.is_empty()).count();
    if throttled > 0 {
        rows.push((
            "GPU throttled",
            format!("in {} of steps", share(throttled as f64 / sampled.len() as f64)),
        ));
    }
    rows
}

fn made_of(history: &History, start: &Start) -> Rows {
    let (config, data) = (&history.config, &start.data);
    let model = &config.model;
    let number = |n: Option<u64>, of: &str| n.map(|n| format!(", {} {of}", count(n))).unwrap_or_default();
    let optimizer = match &start.optimizer[..] {
        "" => {
            format!("{}, lr {} {}", config.optimizer.name, config.optimizer.lr, config.schedule.name)
        }
        recorded => recorded.to_string(),
    };
    let batch = count(config.train.batch as u64);
    let mut rows = vec![
        ("recipe", config.recipe.clone()),
        ("parameters", format!("{} ({})", short(start.parameters), count(start.parameters))),
        ("shape", model.dimensions()),
        (
            "data",
            format!(
                "{}{}{}{}{}",
                data.source,
                number(data.tokens, "tokens"),
                number(data.documents, if data.vocabulary == 0 { "images" } else { "documents" }),
                number(data.held_out_documents, "of them held out"),
                if data.vocabulary == 0 {
                    String::new()
                } else {
                    format!(", vocabulary {}", count(data.vocabulary))
                }
            ),
        ),
        (
            "a step",
            match &data.layout {
                None if history.is_of_images() => {
                    format!("{batch} images in micro-batches of {}", start.micro_batch)
                }
                None => format!(
                    "{batch} rows ({} tokens) in micro-batches of {}",
                    count((config.train.batch * model.tokens()) as u64),
                    start.micro_batch
                ),
                Some(layout) => format!("{batch} examples: {layout}"),
            },
        ),
        ("optimiser", optimizer),
        ("loader", start.loader.clone()),
        ("seed", config.train.seed.to_string()),
    ];
    // Logs of earlier versions have no loader.
    rows.retain(|(_, value)| !value.is_empty());
    rows
}

fn machine(start: &Start) -> Rows {
    let mut rows = vec![("device", start.device.clone()), ("flatout", start.version.clone())];
    let versions: Vec<String> = start.libraries.iter().map(|(name, v)| format!("{name} {v}")).collect();
    if !versions.is_empty() {
        rows.push(("libraries", versions.join(", ")));
    }
    if let Some(attention) = &start.attention {
        rows.push(("attention", attention.clone()));
    }
    if let Some(products) = &start.products {
        rows.push(("products", products.clone()));
    }
    if !start.not_deterministic.is_empty() {
        rows.push(("not deterministic", start.not_deterministic.join(", ")));
    }
    if start.predicted_ms.is_finite() {
        rows.push((
            "predicted step",
            format!(
                "{:.2} ms{}",
                start.predicted_ms,
                if start.is_calibrated {
                    ", from timings of this machine's kernels"
                } else {
                    ", a lower bound by the roofline"
                }
            ),
        ));
    }
    rows
}

fn memory(start: &Start) -> String {
    let mut out = String::from("## Memory\n\n| category | bytes | |\n|---|--:|--:|\n");
    let mut row = |name: &str, n: u64| {
        let _ = writeln!(out, "| {name} | {} | {} |", count(n), bytes(n));
    };
    start.memory.iter().filter(|(_, n)| **n > 0).for_each(|(name, n)| row(name, *n));
    row("**planned in total**", start.arena_bytes);
    if start.driver_bytes > 0 {
        row("the driver, in addition", start.driver_bytes);
    }
    out.push('\n');
    out
}

/// The active switches, with the reason for each state.
fn switches(history: &History, start: &Start) -> String {
    let mut out = String::from("## Switches\n\n| switch | active | why |\n|---|---|---|\n");
    let (set, defaults) = (&history.config.switches, Switches::default());
    // A value that `auto` chose by memory is fixed at the first start, which has the reason.
    let chosen = |name: &str| start.auto.get(name).or_else(|| history.first.as_ref()?.auto.get(name));
    for (name, state) in &start.switches {
        let row = TABLE.iter().find(|row| row.name == name);
        let is = |switches: &Switches| row.and_then(|row| row.value(switches)) == Some(state);
        let why = match chosen(name) {
            Some(why) => format!("auto: {}", cell(why)),
            None if is(&defaults) => "the default".into(),
            None if is(set) => "set by the user".into(),
            None => "as compiled".into(),
        };
        let _ = writeln!(out, "| `{name}` | {state} | {why} |");
    }
    out.push('\n');
    out
}

/// Each distinct warning with its number of occurrences.
fn warnings(history: &History) -> String {
    let mut seen: Vec<(&str, usize)> = vec![];
    for message in &history.warnings {
        match seen.iter_mut().find(|(known, _)| known == message) {
            Some((_, times)) => *times += 1,
            None => seen.push((message, 1)),
        }
    }
    if seen.is_empty() {
        return String::new();
    }
    let mut out = String::from("## Warnings\n\n");
    for (message, times) in seen.iter().take(WARNINGS) {
        let times = if *times > 1 { format!(" ({times} times)") } else { String::new() };
        let _ = writeln!(out, "- {}{times}", message.replace('\n', " "));
    }
    if let Some(more) = seen.len().checked_sub(WARNINGS).filter(|more| *more > 0) {
        let _ = writeln!(out, "- and {more} more, in [events.jsonl](events.jsonl)");
    }
    out.push('\n');
    out
}
