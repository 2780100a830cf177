//! `runs track`: uploads to MLflow what it is missing of a run.

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
    let uploaded = mlflow::tell(&run, &config)?;
    let server = config.track.mlflow.as_deref().unwrap_or_default();
    if screen.json {
        screen.object(&json!({
            "server": server, "run_id": uploaded.run_id, "lines": uploaded.lines, "points": uploaded.points,
            "refused": uploaded.refused,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    screen.result(format!(
        "{server}: {} lines with {} points of {}, as run {}",
        count(uploaded.lines as u64),
        count(uploaded.points as u64),
        run.display(),
        uploaded.run_id
    ));
    if let Some(why) = uploaded.refused {
        screen.note(format!("note     some points were left out: {why}"));
    }
    Ok(ExitCode::SUCCESS)
}
