//! `doctor`: this machine, and what every switch can do on it.

use std::process::ExitCode;

use flatout_train::{Failure, compile, kernels, recipes, switches};
use serde_json::json;

use crate::args::Doctor;
use crate::screen::{Screen, bytes};

pub fn doctor(args: &Doctor, screen: &Screen) -> Result<ExitCode, Failure> {
    if args.verify {
        return verify(screen);
    }
    let target = compile::target();
    let switches: Vec<Row> = switches::TABLE.iter().map(row).collect();
    if screen.json {
        screen.object(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "backend": target.name,
            "threads": target.cores,
            "memory_bytes": target.memory_bytes,
            "kernels": target.kernels.len(),
            "switches": switches,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    screen.result(format!("flatout {}", env!("CARGO_PKG_VERSION")));
    screen.result(format!("cpu      {} threads, {}", target.cores, kernels::instructions()));
    screen.result(format!("memory   {} for a run", bytes(target.memory_bytes)));
    screen.result("gpu      not used: this build computes on the CPU only");
    screen.result(format!("kernels  {}, all deterministic", target.kernels.len()));
    screen.result("\nswitch             default  values                                  here");
    for r in switches {
        let refused: Vec<String> =
            r.refused.iter().map(|(value, why)| format!("no {value}: {why}")).collect();
        let here = if refused.is_empty() { "all run".to_string() } else { refused.join("; ") };
        screen.result(format!("{:18} {:8} {:39} {here}", r.name, r.default, r.values.join(" ")));
    }
    Ok(ExitCode::SUCCESS)
}

/// Every kernel on this machine against the oracle. A kernel that disagrees is a failure.
fn verify(screen: &Screen) -> Result<ExitCode, Failure> {
    let checked = kernels::verify();
    let wrong = checked.iter().filter(|c| c.error.is_err()).count();
    if screen.json {
        let row = |c: &kernels::Checked| match &c.error {
            Ok(error) => json!({ "kernel": c.name, "error": error, "bound": c.bound }),
            Err(why) => json!({ "kernel": c.name, "failed": why, "bound": c.bound }),
        };
        screen.object(&json!({ "kernels": checked.iter().map(row).collect::<Vec<_>>(), "failed": wrong }));
    } else {
        for c in &checked {
            screen.result(match &c.error {
                Ok(error) => format!("{:58} error {error:8.1e}  bound {:7.1e}", c.name, c.bound),
                Err(why) => format!("{:58} FAILED: {why}", c.name),
            });
        }
        screen
            .result(format!("{} kernel cases agree with the oracle, {wrong} do not", checked.len() - wrong));
    }
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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

/// Each value is tried on the smallest recipe: what is refused says why in its own words.
fn row(switch: &switches::Switch) -> Row {
    let attempt = |value: &&'static str| {
        let config = recipes::resolve("tiny", &[], &[format!("{}={value}", switch.name)]);
        let compiled = config.map_err(Failure::User).and_then(|c| compile::compile(&c, &compile::target()));
        compiled.err().map(|failure| (*value, failure.to_string()))
    };
    Row {
        name: switch.name,
        default: switch.default().unwrap_or_default(),
        values: switch.values().to_vec(),
        class: switch.class,
        guides_word: switch.guides_word,
        doc: switch.doc(),
        refused: switch.values().iter().filter_map(attempt).collect(),
    }
}
