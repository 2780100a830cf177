//! `doctor --calibrate`: times this machine's kernels, and reports how well the times predict one another.

use std::process::ExitCode;

use flatout_ir::Work;
use flatout_ir::timings::Timings;
use flatout_measure::calibrate::{CalibrateProgress, Steadiness, calibrate as measure};
use flatout_train::Failure;
use flatout_train::device::calibrations;
use flatout_train::switches::{Backend, Switches};
use serde_json::json;

use crate::runs::print_table;
use crate::screen::{Screen, count, duration};

pub fn calibrate(screen: &Screen) -> Result<ExitCode, Failure> {
    screen.note("timing kernels; other programs that run on this machine now would distort the times");
    let mut progress = |event: CalibrateProgress<'_>| match event {
        CalibrateProgress::Sample { name, done, of } if screen.verbose => {
            screen.note(format!("{done}/{of} {name}"))
        }
        CalibrateProgress::LeftOut { name, why } if screen.verbose => {
            screen.note(format!("left out {name}: {why}"))
        }
        _ => {}
    };
    let mut measured = measure(Backend::Auto, &mut progress)?;
    if measured.1.steadiness.is_disturbed() {
        screen.note(format!("{}; timing them once more", disturbed(measured.1.steadiness)));
        measured = measure(Backend::Auto, &mut progress)?;
    }
    let (device, done) = measured;
    if done.steadiness.is_disturbed() {
        return Err(Failure::Environment(format!(
            "{}, twice: no times are kept; stop other programs on this machine and calibrate again",
            disturbed(done.steadiness)
        )));
    }
    let target = device.target(&Switches::default());
    let errors = errors(&done.timings, &target.rates);
    let kept = calibrations::keep(&device, &done.timings);
    if screen.json {
        let point = |p: &flatout_ir::timings::Point| {
            json!({
                "work": p.size.work.name(),
                "kernel": p.size.kernel,
                "units": p.size.units.name(),
                "inner": p.size.inner,
                "flops": p.size.flops,
                "bytes": p.size.bytes,
                "seconds": p.seconds,
                "of_roofline": p.size.roofline_seconds(&target.rates) / p.seconds,
            })
        };
        screen.object(&json!({
            "device": target.name,
            "points": done.timings.points().iter().map(point).collect::<Vec<_>>(),
            "models": done.samples,
            "skipped": done.skipped,
            "seconds": done.seconds,
            "median_error": quantile(&errors, 0.5),
            "spread": done.steadiness.spread,
            "drift": done.steadiness.drift,
            "kept": kept.is_ok(),
        }));
    } else {
        print(&done.timings, &target.rates, screen);
        screen.result(format!(
            "{} launches of {} models on {} timed in {}{}",
            count(done.timings.points().len() as u64),
            done.samples,
            target.name,
            duration(done.seconds),
            if done.skipped > 0 { format!("; no time for {} more", done.skipped) } else { String::new() }
        ));
        screen.result(format!(
            "each predicted from the others alone: half are within {:.0}%, nine in ten within {:.0}%",
            100.0 * quantile(&errors, 0.5),
            100.0 * quantile(&errors, 0.9)
        ));
    }
    kept.map_err(Failure::Environment)?;
    Ok(ExitCode::SUCCESS)
}

fn disturbed(Steadiness { spread, drift }: Steadiness) -> String {
    format!(
        "the machine was busy with something else: kernels took {spread:.2} times their least time, and the first model took \
         {drift:.2} times as long or as short at the end"
    )
}

/// The relative errors of predicting each point from the others, sorted.
fn errors(timings: &Timings, rates: &flatout_ir::target::Rates) -> Vec<f64> {
    let off = |p: &flatout_ir::timings::Point| {
        let expected = timings.expect_unseen(&p.size, rates)?;
        Some((expected / p.seconds).ln().abs().exp() - 1.0)
    };
    let mut errors: Vec<f64> = timings.points().iter().filter_map(off).collect();
    errors.sort_by(f64::total_cmp);
    errors
}

fn quantile(sorted: &[f64], part: f64) -> f64 {
    let at = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// Prints one line per kernel: the number of sizes that were timed, and the share of the roofline that it reaches.
fn print(timings: &Timings, rates: &flatout_ir::target::Rates, screen: &Screen) {
    let head = ["kernel", "sizes", "of roofline: least", "median", "most"];
    let mut rows: Vec<Vec<String>> = vec![head.map(String::from).to_vec()];
    for work in Work::ALL {
        let mut kernels: Vec<(&str, &str)> = timings
            .points()
            .iter()
            .filter(|p| p.size.work == *work)
            .map(|p| (p.size.kernel.as_str(), p.size.units.name()))
            .collect();
        kernels.sort_unstable();
        kernels.dedup();
        for (kernel, units) in kernels {
            let of =
                timings.points().iter().filter(|p| p.size.kernel == kernel && p.size.units.name() == units);
            let mut shares: Vec<f64> = of.map(|p| p.size.roofline_seconds(rates) / p.seconds).collect();
            shares.sort_by(f64::total_cmp);
            let percent = |part: f64| format!("{:.0}%", 100.0 * quantile(&shares, part));
            let sizes = count(shares.len() as u64);
            rows.push(vec![format!("{kernel} {units}"), sizes, percent(0.0), percent(0.5), percent(1.0)]);
        }
    }
    print_table(&rows, 1..5, screen);
}
