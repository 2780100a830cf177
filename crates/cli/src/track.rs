//! `runs track`: tells a tracker what it was not told of a run.

use std::process::ExitCode;

use flatout_report::mlflow;
use flatout_train::Failure;
use flatout_train::run::asked_and_resolved;
use serde_json::json;

use crate::args::Track;
use crate::model;
use crate::screen::{Screen, count};

pub fn track(args: &Track, screen: &Screen) -> Result<ExitCode, Failure> {
    let run = model::named(&args.run);
    let (own, _) = asked_and_resolved(&run)?;
    let config = own.resumed(&args.overrides)?;
    let told = mlflow::tell(&run, &config)?;
    let server = config.track.mlflow.as_deref().unwrap_or_default();
    if screen.json {
        screen.object(&json!({
            "server": server, "run_id": told.run_id, "lines": told.lines, "points": told.points, "refused": told.refused,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    screen.result(format!(
        "{server}: {} lines with {} points of {}, as run {}",
        count(told.lines as u64),
        count(told.points as u64),
        run.display(),
        told.run_id
    ));
    if let Some(why) = told.refused {
        screen.note(format!("note     some points were left out: {why}"));
    }
    Ok(ExitCode::SUCCESS)
}
