//! `claims`: prints the claims of optimisation guides and the verdict on each, as a page or as JSON.

use std::process::ExitCode;

use flatout_measure::claims::{all, of, page};
use flatout_train::Failure;
use serde_json::json;

use crate::args::Claims;
use crate::screen::Screen;

pub fn claims(args: &Claims, screen: &Screen) -> Result<ExitCode, Failure> {
    let claims = all();
    let shown = match &args.guide {
        Some(guide) => of(guide)?,
        None => claims.claims.iter().collect(),
    };
    if screen.json {
        screen
            .object(&json!({ "claims": shown, "figures": claims.figures, "quantities": claims.quantities }));
    } else {
        screen.result(page::page(claims, args.guide.as_deref()).trim_end());
    }
    Ok(ExitCode::SUCCESS)
}
