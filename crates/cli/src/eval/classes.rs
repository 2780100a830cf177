//! `eval` of a model with a head of classes: its metrics, or its predictions for new texts or images.

use std::path::Path;
use std::process::ExitCode;

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::infer::classify::{
    Classified, TextInputs, classify, predict as predict_texts, read_inputs, texts,
};
use flatout_train::infer::evaluate::Share;
use flatout_train::infer::images::{self, ImagePredictions};
use flatout_train::infer::predictions;
use flatout_train::metrics::ClassMetrics;
use flatout_train::weights::loaded::Loaded;
use serde_json::json;

use super::of_model;
use crate::args::Eval;
use crate::model;
use crate::screen::{Screen, count, one_line};

/// Evaluates on texts or images whose classes are known.
pub fn evaluate(args: &Eval, mut loaded: Loaded, screen: &Screen) -> Result<ExitCode, Failure> {
    let device = model::device(&loaded)?;
    let is_text = loaded.config.model.as_decoder().is_some();
    let (Classified { loss, texts, metrics }, share) = match is_text {
        true => {
            let (texts, share) = texts(&mut loaded, &args.overrides)?;
            (classify(&mut loaded, &device, &texts)?, share)
        }
        false => images::classify(&mut loaded, &device, &args.overrides)?,
    };
    let unit = if is_text { "text" } else { "image" };
    if screen.json {
        screen.object(&of_model(
            args,
            &loaded,
            json!({
                "on": if share == Share::All { "all" } else { "held_out" },
                "loss": loss,
                (format!("{unit}s")): texts,
                "metrics": metrics,
            }),
        ));
        return Ok(ExitCode::SUCCESS);
    }
    let on = if share == Share::All { "" } else { "held-out " };
    screen.result(format!(
        "loss {loss:.4} nats each, {}, over {} {on}{unit}s{}",
        metrics.words(),
        count(texts),
        model::of_averages(&loaded)
    ));
    table(&metrics, &loaded.config.data.classes, screen);
    Ok(ExitCode::SUCCESS)
}

/// The most classes for which the confusion matrix is printed.
const MOST_IN_TABLE: usize = 12;

/// Prints the confusion matrix, one row per class.
fn table(metrics: &ClassMetrics, names: &[String], screen: &Screen) {
    let classes = metrics.confusion.classes();
    if classes > MOST_IN_TABLE {
        return;
    }
    let name = |class: usize| {
        names.get(class).map_or(class.to_string(), |name| one_line(name).chars().take(16).collect())
    };
    let width = (0..classes).map(|class| name(class).chars().count()).max().unwrap_or(0).max(6);
    let line = |first: &str, cells: Vec<String>| {
        let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:>width$}")).collect();
        screen.result(format!("{first:>width$}  {}", cells.join("  ")).trim_end().to_string());
    };
    screen.result("confusion matrix, a row per true class and a column per predicted class");
    line("", (0..classes).map(name).collect());
    for (class, row) in metrics.confusion.0.iter().enumerate() {
        line(&name(class), row.iter().map(|texts| count(*texts)).collect());
    }
}

/// Predicts the classes of images, and writes a file like that of texts.
fn predict_images(
    args: &Eval,
    path: &str,
    out: &Path,
    mut loaded: Loaded,
    screen: &Screen,
) -> Result<ExitCode, Failure> {
    let inputs = images::read_inputs(&loaded, path)?;
    let device = model::device(&loaded)?;
    let ImagePredictions { predictions: predicted, places, classes, left_out } =
        images::predict(&mut loaded, &device, inputs)?;
    predictions::write(out, &predicted, &places, &classes)?;
    left_out.iter().for_each(|line| screen.note(format!("left out {line}")));
    if screen.json {
        let model = args.model.display().to_string();
        screen.object(&json!({
            "model": model,
            "weights": loaded.weights.which(),
            "images": predicted.len(),
            "left_out": left_out,
            "out": out.display().to_string(),
        }));
    } else {
        let images = count(predicted.len() as u64);
        let of = model::of_averages(&loaded);
        screen.result(format!("{images} images classified: {}{of}", out.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Predicts the classes of the rows of a file, and writes them to another file.
pub fn predict(args: &Eval, file: &str, out: &Path, screen: &Screen) -> Result<ExitCode, Failure> {
    predictions::check(out)?;
    let is_same = |one: &Path, other: &Path| {
        one.canonicalize().ok().is_some_and(|one| other.canonicalize().ok() == Some(one))
    };
    if is_same(Path::new(file), out) {
        let sentence = format!(
            "--out {0} is the file that --predict reads and would be overwritten: give another --out",
            out.display()
        );
        return Err(UserError(sentence).into());
    }
    let mut loaded = model::open(&args.model, &args.overrides)?;
    if loaded.config.model.image_size().is_some() {
        return predict_images(args, file, out, loaded, screen);
    }
    if loaded.config.model.classes().is_none() {
        let model = args.model.display();
        let sentence = format!("{model} has no head of classes, which --predict needs: leave --predict out");
        return Err(UserError(sentence).into());
    }
    let TextInputs { texts, places, classes } = read_inputs(&loaded, file)?;
    let device = model::device(&loaded)?;
    let predicted = predict_texts(&mut loaded, &device, &texts)?;
    predictions::write(out, &predicted, &places, &classes)?;
    if screen.json {
        let model = args.model.display().to_string();
        let (weights, out) = (loaded.weights.which(), out.display().to_string());
        screen.object(&json!({ "model": model, "weights": weights, "texts": predicted.len(), "out": out }));
    } else {
        let of = model::of_averages(&loaded);
        screen.result(format!("{} texts classified: {}{of}", count(predicted.len() as u64), out.display()));
    }
    Ok(ExitCode::SUCCESS)
}
