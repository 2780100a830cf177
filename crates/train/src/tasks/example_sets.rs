//! The examples a config names: conversations or labelled texts, read, tokenised and split.

use std::path::{Path, PathBuf};

use flatout_data::OpenEvent;
use flatout_data::examples::{
    Date, ExampleKind, ExampleSets, ExampleSpec, TooLong as Long, TrainOn as Learned, open_reporting,
};

use crate::Failure;
use crate::config::{Config, Source, Task, TooLong, TrainOn};
use crate::run::tokenizer_path;
use crate::tasks::corpus;
use crate::weights::pretrained::BESIDE;

/// Opens them. A run's own tokeniser, where there is one, is used again. `fold` holds out a part of several instead of a
/// share. `say` is told what was left out.
pub fn example_sets(
    config: &Config,
    run: Option<&Path>,
    fold: Option<(usize, usize)>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<ExampleSets, Failure> {
    Ok(open_reporting(&ExampleSpec { fold, ..spec(config, run) }, say)?)
}

/// The config's data section as the reader of examples takes it. The task is not `text`.
pub fn spec(config: &Config, run: Option<&Path>) -> ExampleSpec {
    let data = &config.data;
    let documents = corpus::spec(config, run);
    let kept = run.map(tokenizer_path).filter(|path| path.is_file());
    let tokenizer = kept.or_else(|| data.tokenizer.as_ref().map(PathBuf::from));
    // What lay beside a model's weights is kept in a folder of the run that began from it.
    let beside = tokenizer.as_deref().and_then(Path::parent);
    let template_folders = run.into_iter().chain(beside).map(|folder| folder.join(BESIDE)).collect();
    ExampleSpec {
        task: match data.task {
            Task::Classes => ExampleKind::Classes,
            Task::Chat => ExampleKind::Chat,
            Task::Text | Task::Images => unreachable!("documents are opened as a corpus"),
        },
        source: match data.source() {
            Source::Synthetic => flatout_data::SourceKind::Synthetic,
            _ => documents.source,
        },
        path: documents.path,
        read: documents.read,
        tokenizer,
        vocab: config.model.decoder().vocab,
        template: data.template.clone(),
        template_folders,
        date: data.date.as_deref().and_then(Date::parse),
        train_on: match data.train_on {
            TrainOn::Assistant => Learned::Assistant,
            TrainOn::Last => Learned::Last,
            TrainOn::Each => Learned::Each,
            TrainOn::All => Learned::All,
        },
        max_tokens: data.max_tokens.unwrap_or(config.model.decoder().context),
        too_long: match data.too_long {
            TooLong::Cut => Long::Cut,
            TooLong::Skip => Long::Skip,
            TooLong::Fail => Long::Fail,
        },
        classes: data.classes.clone(),
        text_a: data.text_a.clone(),
        text_b: data.text_b.clone(),
        label: data.label.clone(),
        unlabelled: false,
        group: data.group.clone(),
        held_out: data.held_out,
        fold: None,
        rows: data.synthetic_rows,
        seed: config.train.seed,
        workers: documents.workers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;

    fn opened(overrides: &str) -> ExampleSets {
        let overrides: Vec<String> = overrides.split(' ').map(String::from).collect();
        let config = resolve("tiny", &[], &overrides).unwrap();
        example_sets(&config, None, None, &mut |_| {}).unwrap()
    }

    #[test]
    fn a_config_without_files_gives_the_synthetic_sets() {
        let chat = opened("data.task=chat model.vocab=400 data.synthetic_rows=200 data.max_tokens=60");
        assert_eq!(chat.description.rows, 200);
        assert!(chat.train.iter().all(|example| example.tokens.len() <= 60 && example.is_supervised()));
        let pairs = opened(
            "data.task=classes model.head=classes model.classes=2 model.vocab=300 data.synthetic_rows=200 data.held_out=0.2",
        );
        assert_eq!(pairs.classes, ["different", "same"]);
        assert!(pairs.held_out.count() > 10);
    }

    #[test]
    fn a_corpus_is_not_made_of_examples() {
        let config = resolve("tiny", &[], &["data.task=chat".into()]).unwrap();
        let Err(Failure::User(error)) = corpus::corpus(&config, None) else {
            panic!("a corpus of conversations")
        };
        assert!(error.0.contains("`data.task` is chat"), "{}", error.0);
    }
}
