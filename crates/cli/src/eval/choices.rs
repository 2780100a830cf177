//! `eval --choices`: accuracy on multiple-choice questions.

use std::process::ExitCode;

use flatout_data::examples::choices::{QuestionSet, read};
use flatout_data::formats::ReadOptions;
use flatout_train::Failure;
use flatout_train::infer::choices::{self, Accuracy};
use flatout_train::weights::loaded::Loaded;
use serde_json::json;

use super::of_model;
use crate::args::Eval;
use crate::model;
use crate::screen::{Screen, count};

pub fn ask(args: &Eval, mut loaded: Loaded, screen: &Screen) -> Result<ExitCode, Failure> {
    let data = &loaded.config.data;
    let options = ReadOptions {
        on_error: data.on_error,
        max_document_bytes: data.max_document_bytes,
        ..ReadOptions::default()
    };
    let read = |path: &String| read(path, &options);
    let sets = args.choices.iter().map(read).collect::<Result<Vec<QuestionSet>, _>>()?;
    let mut questions =
        sets.iter().map(|set| choices::tokenise(&loaded, set)).collect::<Result<Vec<_>, _>>()?;
    let device = model::device(&loaded)?;
    let mut found = vec![];
    for ((path, set), of_set) in args.choices.iter().zip(&sets).zip(&mut questions) {
        if set.skipped.total() > 0 {
            screen.note(format!("{path}: {}", set.skipped));
        }
        let accuracy = choices::choose(&mut loaded, &device, set, of_set)?;
        if !screen.json {
            screen.result(line(path, set, &accuracy, &loaded));
        }
        let mut object = json!(accuracy);
        object["file"] = json!(path);
        object["form"] = json!(set.form.to_string());
        found.push(object);
    }
    if screen.json {
        screen.object(&of_model(args, &loaded, json!({ "choices": found })));
    }
    Ok(ExitCode::SUCCESS)
}

fn line(path: &str, set: &QuestionSet, accuracy: &Accuracy, loaded: &Loaded) -> String {
    let Accuracy { questions, acc, acc_stderr, acc_norm, acc_norm_stderr } = accuracy;
    format!(
        "{path} ({}): acc {acc:.4} ± {acc_stderr:.4}, acc_norm {acc_norm:.4} ± {acc_norm_stderr:.4}, over {} questions{}",
        set.form,
        count(*questions),
        model::of_averages(loaded)
    )
}
