//! `plan`: memory to the byte, arithmetic and the least time, before anything runs.

use std::process::ExitCode;

use flatout_ir::cost::Cost;
use flatout_train::compile::{self, Compiled};
use flatout_train::device::{self, Device, gpus};
use flatout_train::fit::fit;
use flatout_train::{Config, Failure, active, prediction, recipes};
use serde_json::json;

use crate::args::{Plan, recipe_and_overrides};
use crate::screen::{Screen, bytes, count, duration, flops, short};

pub fn plan(args: &Plan, screen: &Screen) -> Result<ExitCode, Failure> {
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let config = recipes::resolve(recipe, &args.with, overrides)?;
    if let Some(gpu) = on_paper(args) {
        return plan_on_paper(&config, gpu, screen);
    }
    let device = Device::open(config.switches.backend)?;
    let compiled = compile::compile(&config, &device.target(&config.switches))?;
    let step = prediction::step_cost(&compiled, config.train.batch);
    if screen.json {
        screen.object(&object(&config, &compiled, &step))
    } else {
        print(&config, &compiled, &step, screen)
    }
    Ok(ExitCode::SUCCESS)
}

/// The GPU that is asked for by name: with --gpu, or by a preset where this machine has none.
fn on_paper(args: &Plan) -> Option<&str> {
    let preset = || args.with.iter().rev().find(|name| gpus::find(name).is_some());
    args.gpu.as_ref().or_else(|| preset().filter(|_| !device::has_gpu())).map(String::as_str)
}

/// The plan for a GPU that need not be here, and whether it fits.
fn plan_on_paper(config: &Config, gpu: &str, screen: &Screen) -> Result<ExitCode, Failure> {
    let target = device::named(gpu, &config.switches)?;
    let fit = fit(config, &target)?;
    let (compiled, step) = (&fit.compiled, prediction::step_cost(&fit.compiled, config.train.batch));
    let notes = recipes::gpu_notes(&[gpu.to_string()]);
    if screen.json {
        let mut all = object(config, compiled, &step);
        all["gpu"] = json!({
            "name": target.name,
            "memory_bytes": target.memory_bytes,
            "fits": fit.fits,
            "largest_micro_batch": fit.largest,
            "measured": gpus::find(gpu).and_then(|gpu| gpu.measured),
        });
        screen.object(&all);
        return Ok(ExitCode::SUCCESS);
    }
    print(config, compiled, &step, screen);
    let (needed, there) = (fit.bytes(), target.memory_bytes);
    let largest = match fit.largest {
        Some(rows) => format!("train.micro_batch={rows} is the largest that does"),
        None => "no micro-batch does: use a smaller model or context, or recompute=full".into(),
    };
    screen.result(match fit.fits {
        true => format!(
            "fits             yes, with {} of {} left; {largest}",
            bytes(there - needed),
            bytes(there)
        ),
        false => {
            format!("fits             no, by {} over {}; {largest}", bytes(needed - there), bytes(there))
        }
    });
    notes.iter().for_each(|note| screen.result(format!("known            {note}")));
    Ok(ExitCode::SUCCESS)
}

fn object(config: &Config, compiled: &Compiled, step: &Cost) -> serde_json::Value {
    json!({
        "recipe": config.recipe,
        "backend": compiled.target.name,
        "arena_bytes": compiled.plans.arena_bytes,
        "driver_bytes": compiled.target.driver_bytes,
        "categories": compiled.plans.categories(),
        "parameters": compiled.parameters,
        "flops_per_token": compiled.flops_per_token,
        "micro_batch": compiled.micro_batch,
        "step_flops": step.flops,
        "step_bytes": step.bytes,
        "roofline_step_ms": 1e3 * step.roofline_seconds,
        "switches": active::active(&compiled.plans, &compiled.target, active::Prepared::settled(&compiled.settled)),
        "not_deterministic": active::not_deterministic(&compiled.plans, &compiled.target),
        "auto": compiled.settled.chosen,
    })
}

fn print(config: &Config, compiled: &Compiled, step: &Cost, screen: &Screen) {
    let tokens = (config.train.batch * config.model.context) as u64;
    let target = &compiled.target;
    screen.result(match target.name.as_str() {
        "cpu" => format!("{} on cpu, {} threads", config.recipe, target.cores),
        gpu => format!("{} on {gpu}", config.recipe),
    });
    screen.result(format!(
        "parameters       {} ({})",
        short(compiled.parameters),
        count(compiled.parameters)
    ));
    screen.result(format!(
        "arithmetic       {} a token, {} a step of {} tokens",
        flops(compiled.flops_per_token as f64),
        flops(step.flops as f64),
        count(tokens)
    ));
    let seconds = step.roofline_seconds;
    screen.result(format!(
        "roofline         {:.1} ms a step at best, {} tokens/s",
        1e3 * seconds,
        count((tokens as f64 / seconds) as u64)
    ));
    if let Some(steps) = config.train.steps {
        screen.result(format!(
            "whole run        {} steps, {} at best",
            count(steps),
            duration(steps as f64 * seconds)
        ));
    }
    screen.result(format!("micro-batch      {} of {} rows", compiled.micro_batch, config.train.batch));
    screen.result(format!(
        "memory           {} bytes ({})",
        compiled.plans.arena_bytes,
        bytes(compiled.plans.arena_bytes as u64)
    ));
    for (category, size) in compiled.plans.categories().into_iter().filter(|(_, size)| *size > 0) {
        screen.result(format!("  {category:14} {size:>14}  {:>10}", bytes(size as u64)));
    }
    if compiled.target.driver_bytes > 0 {
        screen.result(format!("  beside it, the driver takes {}", bytes(compiled.target.driver_bytes)));
    }
    screen.result("switches");
    for (name, state) in
        active::active(&compiled.plans, &compiled.target, active::Prepared::settled(&compiled.settled))
    {
        let why = compiled
            .settled
            .chosen
            .iter()
            .find(|c| c.switch == name)
            .map_or(String::new(), |c| format!("  auto: {}", c.why));
        screen.result(format!("  {name:18} {state}{why}"));
    }
    let loose = active::not_deterministic(&compiled.plans, &compiled.target);
    if !loose.is_empty() {
        screen
            .result(format!("not deterministic  {} (deterministic=on takes other forms)", loose.join(", ")));
    }
    if screen.verbose {
        for report in &compiled.plans.done {
            screen.result(format!("  {:6} {:13} {}", report.role.name(), report.pass, report.did));
        }
    }
}
