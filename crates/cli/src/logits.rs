//! `logits`: writes the logits of given token ids to a file.

use std::process::ExitCode;

use flatout_train::Failure;
use flatout_train::infer::logits as computed;
use serde_json::json;

use crate::args::Logits;
use crate::model;
use crate::screen::{Screen, count};

pub fn logits(args: &Logits, screen: &Screen) -> Result<ExitCode, Failure> {
    let rows = computed::read_ids(&args.ids)?;
    let mut loaded = model::open(&args.model, &args.overrides)?;
    computed::check(&loaded, &rows)?;
    let device = model::device(&loaded)?;
    computed::write(&mut loaded, &device, &rows, &args.out)?;
    let tokens: usize = rows.iter().map(Vec::len).sum();
    let out = args.out.display();
    if screen.json {
        screen.object(&json!({ "out": out.to_string(), "rows": rows.len(), "tokens": tokens, "weights": loaded.weights.which() }));
    } else {
        screen.result(format!(
            "{out}: logits of {} tokens in {} rows{}",
            count(tokens as u64),
            count(rows.len() as u64),
            model::of_averages(&loaded)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
