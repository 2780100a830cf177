//! `doctor`: shows this machine and which values of every switch can run on it, and verifies kernels.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use flatout_train::Failure;
use flatout_train::device::Device;
use flatout_train::device::kernels;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::switches;
use serde_json::json;

use crate::args::Doctor;
use crate::screen::{Screen, bytes, count};
use crate::{calibrate, exchanges, race, topology};

/// Time between lines of progress where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

pub fn doctor(args: &Doctor, screen: &Screen) -> Result<ExitCode, Failure> {
    if !args.assemble.is_empty() {
        return assemble(&args.assemble, &args.only, screen);
    }
    if args.verify {
        return verify(&args.only, screen);
    }
    if args.calibrate && (args.gpus.is_some() || args.ranks.is_some()) {
        return exchanges::calibrate(args, screen);
    }
    if args.calibrate {
        return calibrate::calibrate(screen);
    }
    if args.speed.is_some() {
        return race::attention(&args.only, screen);
    }
    let target = compile::target();
    let gpu = kernels::gpu();
    let count = kernels::kernels();
    let switches: Vec<Row> = switches::TABLE.iter().map(row).collect();
    if screen.json {
        let candidate = |c: &kernels::Candidate| json!({ "library": c.library, "version": c.version, "path": c.path, "verdict": c.verdict });
        screen.object(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "backend": target.name,
            "threads": target.cores,
            "memory_bytes": target.memory_bytes,
            "kernels": { "cpu": count.cpu, "cuda": count.cuda, "not_deterministic": count.not_deterministic },
            "gpu": { "usable": gpu.usable, "is": gpu.sentence },
            "gpus": kernels::gpus(),
            "links": topology::object(),
            "libraries": gpu.candidates.iter().chain(&kernels::nccl().0).map(candidate).collect::<Vec<_>>(),
            "switches": switches,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    screen.result(format!("flatout {}", env!("CARGO_PKG_VERSION")));
    screen.result(format!("cpu      {} threads, {}", target.cores, kernels::instructions()));
    screen.result(format!("memory   {} for a run", bytes(target.memory_bytes)));
    screen.result(match gpu.usable {
        Some(true) => format!("gpu      {}", gpu.sentence),
        Some(false) => format!("gpu      cannot be used: {}", gpu.sentence),
        None => format!("gpu      none: {}", gpu.sentence),
    });
    let (of_nccl, no_nccl) = kernels::nccl();
    let all = kernels::gpus();
    for (index, words) in all.iter().enumerate().filter(|_| all.len() > 1) {
        screen.result(format!("         GPU {index}: {words}"));
    }
    topology::print(screen);
    for c in gpu.candidates.iter().chain(&of_nccl) {
        screen.result(format!(
            "         {:8} {:9} {}\n                            {}",
            c.library, c.version, c.path, c.verdict
        ));
    }
    for (library, install) in gpu.missing.iter().chain(&no_nccl).filter(|_| gpu.usable.is_some()) {
        screen.result(format!("         {library:8} missing   {install}"));
    }
    screen.result(format!(
        "kernels  {} for the CPU, all deterministic; {} for CUDA, all but {} deterministic (with deterministic=on, all)",
        count.cpu,
        count.cuda,
        count.not_deterministic.join(", ")
    ));
    screen.result("\nswitch             default  values                                  here");
    for r in switches {
        let refused: Vec<String> =
            r.refused.iter().map(|(value, why)| format!("no {value}: {why}")).collect();
        let here = if refused.is_empty() { "all run".to_string() } else { refused.join("; ") };
        screen.result(format!("{:18} {:8} {:39} {here}", r.name, r.default, r.values.join(" ")));
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks every kernel of this machine, the GPU's too, against the oracle; the exit code is 1 if one disagrees.
fn verify(only: &str, screen: &Screen) -> Result<ExitCode, Failure> {
    let bar = screen.bar("{msg} {pos} of {len}", 0);
    // The stage of the last line and the time it was printed.
    let last_line = Mutex::new(("", Instant::now()));
    let see = |stage: &'static str, done: usize, of: usize| {
        let mut last_line = last_line.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = last_line.0 != stage;
        if is_new || (bar.is_none() && last_line.1.elapsed() > LINE_EVERY) {
            *last_line = (stage, Instant::now());
            let done =
                if is_new { "to do".into() } else { format!("of which {} are done", count(done as u64)) };
            screen.note_above(bar.as_ref(), format!("{stage}: {} {done}", count(of as u64)));
        }
        if let Some(bar) = &bar {
            bar.set_message(stage);
            bar.set_length(of as u64);
            bar.set_position(done as u64);
        }
    };
    let checked = kernels::verify(only, &see);
    let gpu = kernels::verify_gpu(only, &see);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let gpu = gpu.transpose().map_err(Failure::Environment)?;
    let on_gpu = gpu.iter().flat_map(|gpu| gpu.cases.iter().chain(&gpu.real));
    let wrong = checked.iter().chain(on_gpu.clone()).filter(|c| c.error.is_err()).count();
    let too_slow = gpu.iter().flat_map(|gpu| &gpu.speeds).filter(|s| s.is_err()).count();
    if screen.json {
        let row = |c: &kernels::Checked| match &c.error {
            Ok(error) => json!({ "kernel": c.name, "row": c.kernel, "error": error, "bound": c.bound }),
            Err(why) => json!({ "kernel": c.name, "row": c.kernel, "failed": why, "bound": c.bound }),
        };
        let speed = |s: &Result<kernels::Speed, String>| match s {
            Ok(s) => {
                let (gb, tf) = (s.gigabytes_a_second(), s.teraflops());
                json!({ "row": s.kernel, "case": s.case, "ms": s.ms, "gb_per_s": gb, "tflops": tf })
            }
            Err(why) => json!({ "failed": why }),
        };
        screen.object(&json!({
            "kernels": checked.iter().map(row).collect::<Vec<_>>(),
            "gpu": gpu.as_ref().map(|gpu| json!({
                "name": gpu.name,
                "kernels": gpu.cases.iter().map(row).collect::<Vec<_>>(),
                "real": gpu.real.iter().map(row).collect::<Vec<_>>(),
                "broke": gpu.broke.as_ref().map(|(case, left)| json!({ "case": case, "left_out": left })),
                "speeds": gpu.speeds.iter().map(speed).collect::<Vec<_>>(),
                "seconds": gpu.took.iter().collect::<BTreeMap<_, _>>(),
            })),
            "failed": wrong + too_slow,
        }));
    } else {
        for c in &checked {
            screen.result(match &c.error {
                Ok(error) => format!("{:58} error {error:8.1e}  bound {:7.1e}", c.name, c.bound),
                Err(why) => format!("{:58} FAILED: {why}", c.name),
            });
        }
        if let Some(gpu) = &gpu {
            show_gpu(gpu, screen);
        }
        let right = checked.len() + on_gpu.count() - wrong;
        screen.result(format!("{right} kernel cases agree with the oracle, {wrong} do not"));
    }
    Ok(if wrong + too_slow == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints one line per kernel with its worst error, every failure, and speeds relative to a copy.
fn show_gpu(gpu: &kernels::GpuChecked, screen: &Screen) {
    screen.result(format!("\n{}", gpu.name));
    let mut rows: Vec<&str> = gpu.cases.iter().map(|c| c.kernel.as_str()).collect();
    rows.sort_unstable();
    rows.dedup();
    for row in rows {
        let cases: Vec<_> = gpu.cases.iter().filter(|c| c.kernel == row).collect();
        let worst = cases.iter().filter_map(|c| c.error.as_ref().ok()).fold(0.0, |a: f64, b| a.max(*b));
        let failed = cases.iter().filter(|c| c.error.is_err()).count();
        let all = cases.len();
        screen.result(format!("{row:32} {all:4} cases  worst error {worst:8.1e}  failed {failed}"));
        for c in cases {
            if let Err(why) = &c.error {
                screen.result(format!("    {} FAILED: {why}", c.name));
            }
        }
    }
    for c in &gpu.real {
        screen.result(match &c.error {
            Ok(error) => format!("{:32} error {error:8.1e}  bound {:7.1e}  {}", c.kernel, c.bound, c.name),
            Err(why) => format!("{:32} {} FAILED: {why}", c.kernel, c.name),
        });
    }
    if let Some((case, left)) = &gpu.broke {
        screen.result(format!(
            "the GPU stopped responding after `{case}`: that case broke it, and the {left} checks after it were left out"
        ));
    }
    let took: Vec<String> = gpu.took.iter().map(|(part, s)| format!("{part} {s:.1} s")).collect();
    screen.note(format!("{} took {}", gpu.name, took.join(", ")));
    let copy = gpu.speeds.iter().flatten().next().map_or(f64::NAN, kernels::Speed::gigabytes_a_second);
    for speed in &gpu.speeds {
        screen.result(match speed {
            Ok(s) if s.is_arithmetic() => {
                format!(
                    "{:32} {:8.3} ms  {:7.1} TFLOP/s            {}",
                    s.kernel,
                    s.ms,
                    s.teraflops(),
                    s.case
                )
            }
            Ok(s) => {
                let rate = s.gigabytes_a_second();
                let share = 100.0 * rate / copy;
                format!("{:32} {:8.3} ms  {rate:7.0} GB/s  {share:4.0}% of copy  {}", s.kernel, s.ms, s.case)
            }
            Err(why) => format!("FAILED: {why}"),
        });
    }
}

/// Compiles every CUDA kernel for some architectures and prints registers and spills; the exit code is 1 if one spills.
fn assemble(archs: &[String], only: &str, screen: &Screen) -> Result<ExitCode, Failure> {
    let assembled = kernels::assemble(archs, only).map_err(Failure::Environment)?;
    let (mut kernels, mut bad) = (0, 0);
    for a in &assembled {
        match &a.kernels {
            Ok(entries) => {
                for (entry, registers, spilled) in entries {
                    kernels += 1;
                    bad += (*spilled > 0) as usize;
                    let mark = if *spilled > 0 { "SPILLS" } else { "" };
                    screen.result(format!(
                        "{:7} {entry:32} {registers:4} registers {spilled:5} bytes spilled {mark:6} {}",
                        a.arch, a.source
                    ));
                }
            }
            Err(why) => {
                bad += 1;
                screen.result(format!("{:7} FAILED: {why}", a.arch));
            }
        }
    }
    screen.result(format!("{kernels} kernels compile, {bad} fail or spill"));
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[derive(serde::Serialize)]
struct Row {
    name: &'static str,
    default: String,
    values: Vec<&'static str>,
    class: switches::Class,
    guides_word: &'static str,
    doc: &'static str,
    /// Values that cannot run here, and why.
    refused: Vec<(&'static str, String)>,
}

/// The row of a switch: each value is tried on the smallest recipe, and a value that is refused has the error as its reason.
fn row(switch: &switches::Switch) -> Row {
    let attempt = |value: &&'static str| {
        let config = recipes::resolve("tiny", &[], &[format!("{}={value}", switch.name)]);
        let compiled = config.map_err(Failure::User).and_then(|config| {
            let device = Device::open(config.switches.compute.backend)?;
            compile::compile(&config, &device.target(&config.switches))
        });
        compiled.err().map(|failure| (*value, failure.to_string()))
    };
    Row {
        name: switch.name,
        default: switch.default().unwrap_or_default().into(),
        values: switch.values().to_vec(),
        class: switch.class,
        guides_word: switch.guides_word,
        doc: switch.doc,
        refused: switch.values().iter().filter_map(attempt).collect(),
    }
}
