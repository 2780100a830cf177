//! `plan`: prints memory to the byte, arithmetic and predicted time of a recipe, without running it.

mod launches;
mod world;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use flatout_data::OpenEvent;
use flatout_measure::forecast::{Layers, Outcome, timeline};
use flatout_measure::plan::{self, OnPaper, PlanReport, PlanRequest};
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::recipes;
use flatout_train::resolve::fp8_layers;
use flatout_train::resolve::prediction;
use flatout_train::switches::active;
use flatout_train::tasks::{self, examples};
use flatout_train::training::host::HostMemory;

use crate::args::{Plan, recipe_and_overrides};
use crate::runs::print_table;
use crate::screen::{Screen, bytes, count, duration, flops, short};

pub fn plan(args: &Plan, screen: &Screen) -> Result<ExitCode, Failure> {
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let mut config = recipes::resolve(recipe, &args.with, overrides)?;
    if args.read_data {
        config = tasks::measured(&config, &mut |event| {
            let (OpenEvent::Note(note) | OpenEvent::LeftOut(note)) = event;
            screen.note(note);
        })?;
    }
    let plan = plan::report(&config, &devices(args))?;
    let drawn = args.out.as_ref().map(|folder| draw(&plan, folder)).transpose()?;
    if let Some(path) = &args.text {
        write(path, &plan.compiled.plans.to_string(), "--text")?;
    }
    if screen.json {
        screen.object(&plan::object(&plan));
    } else {
        print(&plan, screen);
        if args.launches {
            launches::print(&plan.compiled.plans, &plan.compiled.target, screen);
        }
    }
    for path in drawn.iter().chain(&args.text) {
        screen.note(format!("written  {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// The devices that the plan is made for.
fn devices(args: &Plan) -> PlanRequest {
    let Plan { gpu, gpus, nodes, link, net, ranks, with, .. } = args;
    PlanRequest {
        gpu: gpu.clone(),
        gpus: *gpus,
        nodes: *nodes,
        link: link.clone(),
        net: net.clone(),
        ranks: *ranks,
        with: with.clone(),
    }
}

/// Writes a plot of the arena over the step.
fn draw(plan: &PlanReport<'_>, folder: &Path) -> Result<PathBuf, Failure> {
    let PlanReport { config, compiled, .. } = plan;
    let title = format!("The arena of {} on {} over a step", config.recipe, compiled.target.name);
    let picture = timeline::picture(&title, &compiled.plans, config.train.batch / compiled.micro_batch);
    let path = folder.join("arena.svg");
    write(&path, &picture.to_svg(), "--out")?;
    Ok(path)
}

/// Writes a file that an option names, and creates its folder.
fn write(path: &Path, content: &str, option: &str) -> Result<(), UserError> {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    let refused =
        |why| UserError(format!("{} cannot be written: {why}; give another {option}", path.display()));
    folder.and_then(|()| fs::write(path, content)).map_err(refused)
}

fn print(plan: &PlanReport<'_>, screen: &Screen) {
    let PlanReport { config, compiled, .. } = plan;
    let target = &compiled.target;
    screen.result(match target.name.as_str() {
        "cpu" => format!("{} on cpu, {} threads", config.recipe, target.cores),
        gpu => format!("{} on {gpu}", config.recipe),
    });
    if let Some(world) = &plan.world {
        world::print(world, compiled, screen);
    }
    time(plan, screen);
    screen.result(format!("micro-batch      {} of {} rows", compiled.micro_batch, config.train.batch));
    if let Some(arrangement) = &compiled.settled.arrangement {
        screen.result(format!("lengths          {}", arrangement.words()));
    } else if examples::has_unread_lengths(config) {
        let tokens = count(config.model.tokens() as u64);
        screen.result(format!(
            "lengths          unknown: every example counts {tokens} tokens; --read-data reads the data first"
        ));
    }
    for (line, name) in plan.features.iter().flat_map(|f| f.words()).zip(["vision cache", ""]) {
        screen.result(format!("{name:16} {line}"));
    }
    memory(plan, screen);
    work(plan, screen);
    largest(plan, screen);
    switches(plan, screen);
    alternatives(plan, screen);
    for (direction, kernels) in &plan.attention {
        screen.result(format!("attention {direction:8} may run on {}", kernels.join(", ")));
    }
    let loose = active::not_deterministic(&compiled.plans, target);
    if !loose.is_empty() {
        screen.result(format!("not deterministic  {} (deterministic=on uses others)", loose.join(", ")));
    }
    if let Some(on_paper) = &plan.on_paper {
        fits(on_paper, target.memory_bytes, screen);
    }
    if screen.verbose {
        for report in &compiled.plans.done {
            screen.result(format!("  {:6} {:13} {}", report.role.name(), report.pass, report.did));
        }
    }
}

/// Prints parameters, arithmetic, and the time of a step by the roofline and by measured kernels.
fn time(plan: &PlanReport<'_>, screen: &Screen) {
    let PlanReport { config, compiled, forecast, .. } = plan;
    let tokens = prediction::tokens_per_update(config, compiled) as u64;
    let step = &forecast.step;
    screen.result(format!(
        "parameters       {} ({}){}",
        short(compiled.parameters),
        count(compiled.parameters),
        match compiled.trained() {
            all if all == compiled.parameters => String::new(),
            some => format!(", {} of them trained ({})", short(some), count(some)),
        }
    ));
    screen.result(format!(
        "arithmetic       {} a token, {} {}a step of {} tokens",
        flops(compiled.flops_per_token as f64),
        flops(step.flops as f64),
        if plan.world.is_some() { "per rank in " } else { "" },
        count(tokens)
    ));
    let rate = |seconds: f64| count((tokens as f64 / seconds) as u64);
    screen.result(format!(
        "roofline         {} a step at best, {} tokens/s",
        milliseconds(step.roofline_seconds),
        rate(step.roofline_seconds)
    ));
    let is_calibrated = prediction::is_calibrated(compiled);
    screen.result(match is_calibrated {
        true => format!(
            "predicted        {} a step, {} tokens/s, {:.0}% of the roofline, by {} kernels timed on this {}",
            milliseconds(step.predicted_seconds),
            rate(step.predicted_seconds),
            100.0 * step.roofline_seconds / step.predicted_seconds,
            count(compiled.target.timings.points().len() as u64),
            if compiled.target.name == "cpu" { "CPU" } else { "GPU" },
        ),
        false if plan.on_paper.is_some() => {
            "predicted        not available: no kernels were timed on such a GPU on this machine".into()
        }
        false => {
            "predicted        not available: run flatout doctor --calibrate once, which times the kernels"
                .into()
        }
    });
    if step.untimed_seconds > 0.01 * step.predicted_seconds && is_calibrated {
        let share = 100.0 * step.untimed_seconds / step.predicted_seconds;
        screen.result(format!(
            "                 {share:.0}% of it is work without timings, counted at its roofline"
        ));
    }
    if let Some(steps) = config.train.steps {
        let whole = |seconds: f64| duration(steps as f64 * seconds);
        let predicted =
            if is_calibrated { format!("{}, ", whole(step.predicted_seconds)) } else { String::new() };
        screen.result(format!(
            "whole run        {} steps, {predicted}{} at best",
            count(steps),
            whole(step.roofline_seconds)
        ));
    }
}

fn milliseconds(seconds: f64) -> String {
    let ms = 1e3 * seconds;
    if ms < 10.0 { format!("{ms:.2} ms") } else { format!("{ms:.1} ms") }
}

/// Prints memory by category and by layer, and the launch at which most is in use.
fn memory(plan: &PlanReport<'_>, screen: &Screen) {
    let PlanReport { config, compiled, forecast, .. } = plan;
    screen.result(format!(
        "memory           {} bytes ({})",
        compiled.plans.arena_bytes,
        bytes(compiled.plans.arena_bytes as u64)
    ));
    for (category, size) in compiled.plans.categories().into_iter().filter(|(_, size)| *size > 0) {
        screen.result(format!("  {category:14} {size:>14}  {:>10}", bytes(size as u64)));
    }
    if compiled.target.driver_bytes > 0 {
        screen.result(format!("  besides, the driver takes {}", bytes(compiled.target.driver_bytes)));
    }
    if compiled.target.wire_bytes > 0 {
        screen.result(format!("  and NCCL takes at most {}", bytes(compiled.target.wire_bytes)));
    }
    let beside = HostMemory::of(config, compiled);
    screen.result(format!(
        "  besides, on the host: {} while a checkpoint is written, {} for batches",
        bytes(beside.copy),
        bytes(beside.batches)
    ));
    let peak = &forecast.peak;
    let most: Vec<String> =
        peak.alive.iter().take(3).map(|a| format!("{} {}", a.path, bytes(a.bytes as u64))).collect();
    screen.result(format!(
        "  peak in launch {} of {} of {}: {} of {}",
        count(peak.launch as u64),
        count(peak.launches as u64),
        peak.role,
        peak.kernel,
        peak.path
    ));
    let more = if peak.alive.len() > 3 { " ..." } else { "" };
    screen.result(format!("  in use there   {}{more}", most.join(", ")));
    screen.result("");
    let head = ["by layer", "", "parameters", "gradients", "optimizer", "activations", "all"];
    let cell = |size: usize| if size == 0 { String::new() } else { bytes(size as u64) };
    let row = |Layers { path, count, each }: &Layers| {
        let times = if *count > 1 { format!("{count} x") } else { String::new() };
        let cells = [each.parameters, each.gradients, each.optimizer, each.activations, each.total()];
        [format!("  {path}"), times].into_iter().chain(cells.map(cell)).collect::<Vec<_>>()
    };
    let rows: Vec<Vec<String>> =
        [head.map(String::from).to_vec()].into_iter().chain(forecast.layers.iter().map(row)).collect();
    print_table(&rows, 1..7, screen);
}

/// Prints the step by kind of work.
fn work(plan: &PlanReport<'_>, screen: &Screen) {
    let PlanReport { compiled, forecast, .. } = plan;
    let is_calibrated = prediction::is_calibrated(compiled);
    let mut head = vec!["by work", "launches", "arithmetic", "traffic", "roofline"];
    head.extend(is_calibrated.then_some("predicted"));
    head.push("share");
    let mut rows: Vec<Vec<String>> = vec![head.into_iter().map(String::from).collect()];
    let mut sorted = forecast.work.clone();
    sorted.sort_by(|a, b| b.1.predicted_seconds.total_cmp(&a.1.predicted_seconds));
    for (work, cost) in sorted {
        let mut row = vec![
            format!("  {}", work.name()),
            count(cost.launches),
            flops(cost.flops as f64),
            bytes(cost.bytes),
            milliseconds(cost.roofline_seconds),
        ];
        row.extend(is_calibrated.then(|| milliseconds(cost.predicted_seconds)));
        row.push(format!("{:.0}%", 100.0 * cost.predicted_seconds / forecast.step.predicted_seconds));
        rows.push(row);
    }
    screen.result("");
    print_table(&rows, 1..7, screen);
}

fn largest(plan: &PlanReport<'_>, screen: &Screen) {
    let PlanReport { config, compiled, forecast, .. } = plan;
    let by = if prediction::is_calibrated(compiled) { "tokens/s predicted" } else { "tokens/s at best" };
    let head = ["most rows at once", "rows", "of this batch", "memory", by];
    let mut rows: Vec<Vec<String>> = vec![head.map(String::from).to_vec()];
    for one in &forecast.largest {
        let number = |n: Option<usize>| n.map_or("none".into(), |n| count(n as u64));
        rows.push(vec![
            format!("  recompute={}", one.recompute),
            number(one.rows),
            format!("{} of {}", number(one.of_batch), count(config.train.batch as u64)),
            one.arena_bytes.map_or(String::new(), |size| bytes(size as u64)),
            one.tokens_per_second.map_or(String::new(), |rate| count(rate as u64)),
        ]);
    }
    screen.result("");
    print_table(&rows, 1..5, screen);
}

fn switches(plan: &PlanReport<'_>, screen: &Screen) {
    let compiled = &plan.compiled;
    screen.result("\nswitches");
    for (name, state) in
        active::active(&compiled.plans, &compiled.target, active::Prepared::settled(&compiled.settled))
    {
        let chosen = compiled.settled.choice(&name);
        let why = chosen.map_or(String::new(), |chosen| format!("  auto: {}", chosen.why));
        screen.result(format!("  {name:18} {state}{why}"));
    }
    if let Some(layers) = fp8_layers::sentence(&compiled.plans, &compiled.settled) {
        screen.result(format!("  {layers}"));
    }
}

/// Prints how memory and step time would change with other values of each switch.
fn alternatives(plan: &PlanReport<'_>, screen: &Screen) {
    let PlanReport { compiled, forecast, .. } = plan;
    let step = forecast.step.predicted_seconds;
    let by = if prediction::is_calibrated(compiled) { "predicted" } else { "roofline" };
    let mut rows: Vec<Vec<String>> = vec![["instead", "memory", by, ""].map(String::from).to_vec()];
    let (mut same, mut refused) = (vec![], vec![]);
    for one in &forecast.alternatives {
        let name = format!("{}={}", one.switch, one.value);
        match &one.outcome {
            Outcome::Refused(_) => refused.push(name),
            _ if one.is_same(step) => same.push(name),
            Outcome::Plans { more_bytes, predicted_seconds, fits, .. } => {
                let memory = match *more_bytes {
                    0 => "same".into(),
                    more if more < 0 => format!("-{}", bytes(more.unsigned_abs())),
                    more => format!("+{}", bytes(more as u64)),
                };
                let time = match predicted_seconds / step {
                    ratio if ratio < 2.0 => format!("{:+.1}%", 100.0 * (ratio - 1.0)),
                    ratio => format!("{ratio:.1} x"),
                };
                let note = if *fits { "" } else { "does not fit" };
                rows.push(vec![format!("  {name}"), memory, time, note.into()]);
            }
        }
    }
    screen.result("");
    print_table(&rows, 1..3, screen);
    for (names, label) in
        [(same, "the same memory and time, by this estimate"), (refused, "cannot run (--json says why)")]
    {
        if !names.is_empty() {
            screen.result(format!("  {label}: {}", names.join(", ")));
        }
    }
}

/// Prints whether the plan fits on the GPU it was made for, and the largest micro-batch that does.
fn fits(on_paper: &OnPaper, available: u64, screen: &Screen) {
    let needed = on_paper.bytes;
    let largest = match on_paper.largest {
        Some(rows) => format!("train.micro_batch={rows} is the largest that does"),
        None => "no micro-batch does: use a smaller model or context, or recompute=full".into(),
    };
    screen.result(match on_paper.fits {
        true => format!(
            "fits             yes, with {} of {} left; {largest}",
            bytes(available - needed),
            bytes(available)
        ),
        false => {
            format!(
                "fits             no, it is {} over {}; {largest}",
                bytes(needed - available),
                bytes(available)
            )
        }
    });
    let notes = recipes::gpu_notes(std::slice::from_ref(&on_paper.name));
    notes.iter().for_each(|note| screen.result(format!("known from       {note}")));
}
