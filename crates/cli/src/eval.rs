//! `eval`: loss and perplexity of text, metrics of classes, rewards of preferences, or accuracy on multiple-choice questions.

mod choices;
mod classes;

use std::process::ExitCode;

use flatout_train::Failure;
use flatout_train::config::Task;
use flatout_train::infer::evaluate::{self, Share};
use flatout_train::weights::loaded::Loaded;
use serde_json::{Value, json};

use crate::args::Eval;
use crate::model;
use crate::screen::{Screen, count};

pub fn eval(args: &Eval, screen: &Screen) -> Result<ExitCode, Failure> {
    if let (Some(file), Some(out)) = (&args.predict, &args.out) {
        return classes::predict(args, file, out, screen);
    }
    let mut loaded = model::open(&args.model, &args.overrides)?;
    if !args.choices.is_empty() {
        return choices::ask(args, loaded, screen);
    }
    if loaded.config.model.classes().is_some() {
        return classes::evaluate(args, loaded, screen);
    }
    let rows = evaluate::rows(&mut loaded, &args.overrides)?;
    let share = rows.share;
    let device = model::device(&loaded)?;
    let found = evaluate::evaluate(&mut loaded, &device, &rows)?;
    let is_preference = loaded.config.data.task == Task::Preference;
    if screen.json {
        let mut object = of_model(
            args,
            &loaded,
            json!({
                "on": if share == Share::All { "all" } else { "held_out" },
                "loss": found.loss,
                "rows": found.rows,
                "metrics": found.metrics,
            }),
        );
        // The loss of preferences is per pair and not per token.
        if !is_preference {
            object["perplexity"] = json!(found.perplexity);
            object["tokens"] = json!(found.tokens);
        }
        screen.object(&object);
        return Ok(ExitCode::SUCCESS);
    }
    if is_preference {
        let on = if share == Share::All { "" } else { "held-out " };
        let unit = if loaded.config.together() > 1 { "pairs" } else { "labelled answers" };
        let rewards =
            found.metrics.as_ref().map_or(String::new(), |metrics| format!(", {}", metrics.words()));
        screen.result(format!(
            "loss {:.4}{rewards}, over {} {on}{unit}{}",
            found.loss,
            count(found.rows),
            model::of_averages(&loaded)
        ));
        return Ok(ExitCode::SUCCESS);
    }
    let on = if share == Share::All { "the text" } else { "held-out text" };
    let answers = found.metrics.as_ref().map_or(String::new(), |metrics| format!(", {}", metrics.words()));
    screen.result(format!(
        "loss {:.4} nats a token, perplexity {:.3}{answers}, over {} tokens of {on} in {} rows of {}{}",
        found.loss,
        found.perplexity,
        count(found.tokens),
        count(found.rows),
        count(loaded.config.model.tokens() as u64),
        model::of_averages(&loaded)
    ));
    Ok(ExitCode::SUCCESS)
}

/// Adds the fields of the evaluated model to those of an evaluation in JSON.
fn of_model(args: &Eval, loaded: &Loaded, mut fields: Value) -> Value {
    fields["model"] = json!(args.model.display().to_string());
    fields["checkpoint"] = json!(loaded.place.display().to_string());
    fields["step"] = json!(loaded.step);
    fields["weights"] = json!(loaded.weights.which());
    fields
}
