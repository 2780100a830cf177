//! Checks of keys about classes, metrics, folds and early stopping, and of head against task.

use flatout_models::config::{Attention, Head, Model, Vision};

use super::{Config, Task, Unit};
use crate::UserError;
use crate::config::class_weights::ClassWeights;
use crate::refuse;

impl Config {
    pub(super) fn validate_classes(&self) -> Result<(), UserError> {
        let (train, metric) = (&self.train, self.eval.metric);
        let Some(classes) = self.model.classes() else {
            if metric.is_of_classes() {
                refuse!(
                    "`eval.metric` is {metric} and `model.head` is tokens: only a head of classes has it"
                );
            }
            if metric.is_of_answers() && !self.data.task.has_answers() {
                refuse!(
                    "`eval.metric` is {metric} and `data.task` is {}: only conversations have answers",
                    self.data.task
                );
            }
            if metric.is_of_rewards() && self.data.task != Task::Preference {
                refuse!(
                    "`eval.metric` is {metric} and `data.task` is {}: only preferences have rewards",
                    self.data.task
                );
            }
            if train.class_weights != ClassWeights::None {
                refuse!(
                    "`train.class_weights` is given and `model.head` is tokens: only a head of classes has classes"
                );
            }
            if train.folds.is_some() {
                refuse!("`train.folds` is given and `model.head` is tokens: folds are for labelled texts");
            }
            return self.validate_folds();
        };
        if metric.is_of_answers() || metric.is_of_rewards() {
            refuse!("`eval.metric` is {metric} and `model.head` is classes: only conversations have answers");
        }
        train.class_weights.validate(classes)?;
        if metric.is_of_positive() && classes != 2 {
            refuse!(
                "`eval.metric` is {metric}, which is for two classes, and `model.classes` is {classes}: give \
                 eval.metric=macro_{metric}"
            );
        }
        self.validate_folds()
    }

    fn validate_folds(&self) -> Result<(), UserError> {
        let train = &self.train;
        if train.folds.is_some_and(|folds| !(2..=100).contains(&folds)) {
            refuse!("`train.folds` must be from 2 to 100");
        }
        match (train.fold, train.folds) {
            (Some(_), None) => {
                refuse!("`train.fold` is given and `train.folds` is not: give the number of folds too")
            }
            (Some(fold), Some(folds)) if !(1..=folds).contains(&fold) => {
                refuse!("`train.fold` is {fold} and must be from 1 to `train.folds` = {folds}")
            }
            (_, Some(_)) if self.eval.rows == 0 => {
                refuse!("`train.folds` is given and `eval.rows` is 0: folds need evaluation")
            }
            _ => {}
        }
        self.validate_patience()
    }

    fn validate_patience(&self) -> Result<(), UserError> {
        let (train, eval) = (&self.train, &self.eval);
        if let Some(every) = eval.every_epochs {
            if !every.is_finite() || every <= 0.0 {
                refuse!("`eval.every_epochs` is {every} and must be a number above 0");
            }
            if train.epochs.is_none() {
                refuse!(
                    "`eval.every_epochs` is given and `train.epochs` is not: give the length of the run in epochs too"
                );
            }
        }
        let has_evaluations = eval.rows > 0 && (eval.every > 0 || eval.every_epochs.is_some());
        match eval.goal {
            Some(goal) if !goal.is_finite() => refuse!("`eval.goal` is {goal} and must be a number"),
            Some(_) if !has_evaluations => refuse!(
                "`eval.goal` is compared with evaluations and there are none during the run: give eval.every and eval.rows"
            ),
            _ => {}
        }
        match train.patience {
            None => Ok(()),
            Some(0) => refuse!("`train.patience` is 0 and must be at least 1"),
            Some(_) if !has_evaluations => refuse!(
                "`train.patience` counts evaluations and there are none during the run: give eval.every and eval.rows"
            ),
            Some(_) => Ok(()),
        }
    }

    /// Checks that model, head and task fit together. Bidirectional attention with a head of tokens is refused, because a token would see
    /// the one it has to predict.
    pub(super) fn validate_head_and_data(&self) -> Result<(), UserError> {
        let (task, kind) = (self.data.task, self.model.kind());
        let model = match (&self.model, task.unit()) {
            (model, Unit::Images) if model.image_size().is_some() => return Ok(()),
            (_, Unit::Images) => {
                refuse!("`data.task` is images and the model ({kind}) reads text: give another model")
            }
            (model, _) if model.image_size().is_some() => {
                refuse!(
                    "`model.kind` is {kind}, which reads images, and `data.task` is {task}: give data.task=images"
                )
            }
            (Model::Decoder(decoder), _) => decoder,
            (_, Unit::Documents) => return Ok(()),
            _ => refuse!(
                "`data.task` is {task} and `model.kind` is {kind}: only a decoder learns from examples"
            ),
        };
        match &model.vision {
            None if task == Task::VisualChat => refuse!(
                "`data.task` is visual_chat and the model sees no images: give a model that does with model.from, or a tower \
                 in [model.vision]"
            ),
            Some(Vision::Fovea(_)) if task == Task::VisualChat => refuse!(
                "`data.task` is visual_chat and `model.vision.kind` is fovea, which looks at frames of videos: give \
                 data.task=foveated, or model.vision.kind=qwen3_vl"
            ),
            vision if task == Task::Foveated && !matches!(vision, Some(Vision::Fovea(_))) => refuse!(
                "`data.task` is foveated and the model has no tower that looks at frames: give model.vision.kind=fovea"
            ),
            _ => {}
        }
        match (model.head, task.head()) {
            (Head::Classes, Head::Tokens) => {
                refuse!("`model.head` is classes and `data.task` is {task}: give data.task=classes")
            }
            (Head::Tokens, Head::Classes) => {
                refuse!("`data.task` is {task} and `model.head` is tokens: give model.head=classes")
            }
            _ => {}
        }
        if model.attention == Attention::Bidirectional && model.head == Head::Tokens {
            refuse!(
                "`model.attention` is bidirectional and `model.head` is tokens: every token would see the one it has to predict; \
                 give model.attention=causal or model.head=classes"
            );
        }
        Ok(())
    }

    /// The part of the labelled texts that this run holds out, counted from 0, and the number of parts; `None` if it is no fold.
    pub fn held_out_fold(&self) -> Option<(usize, usize)> {
        Some((self.train.fold? - 1, self.train.folds?))
    }

    /// Whether the checkpoint of the best evaluation is kept: with `checkpoint.best`, or with early stopping.
    pub fn keeps_best(&self) -> bool {
        self.checkpoint.best || self.train.patience.is_some()
    }

    /// Updates between evaluations of a run of `steps` updates; 0 for none during the run.
    pub fn eval_every(&self, steps: u64) -> u64 {
        match (self.eval.every_epochs, self.train.epochs) {
            (Some(every), Some(epochs)) => ((steps as f64 / epochs as f64 * every).round() as u64).max(1),
            _ => self.eval.every,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::recipes::resolve;

    fn words(overrides: &str) -> Vec<String> {
        overrides.split(' ').map(String::from).collect()
    }

    #[test]
    fn contradicting_values_are_refused() {
        let cases = [
            ("eval.metric=f1", "only a head of classes has it"),
            ("train.class_weights=balanced", "only a head of classes has classes"),
            ("train.folds=5", "folds are for labelled texts"),
            ("head=classes", "`model.classes` is missing"),
            ("head=classes model.classes=3 eval.metric=f1", "eval.metric=macro_f1"),
            ("head=classes model.classes=2 train.class_weights=1,2,3", "has 3 numbers"),
            ("head=classes model.classes=2 train.folds=1", "from 2 to 100"),
            ("head=classes model.classes=2 train.fold=1", "`train.folds` is not"),
            ("head=classes model.classes=2 folds=3 train.fold=4", "from 1 to `train.folds` = 3"),
            ("head=classes model.classes=2 folds=3 eval.rows=0", "folds need evaluation"),
            ("patience=0", "`train.patience` is 0"),
            ("patience=3 eval.every=0", "there are none during the run"),
            ("patience=3 eval.rows=0", "there are none during the run"),
            ("eval.goal=1.5 eval.every=0", "`eval.goal` is compared with evaluations and there are none"),
            ("eval.goal=inf", "must be a number"),
            ("every_epochs=1", "`train.epochs` is not"),
            ("epochs=2 every_epochs=-1", "must be a number above 0"),
            ("train.class_weights=often", "must be one of none, balanced, or a list of numbers"),
        ];
        for (overrides, expected) in cases {
            let sentence = resolve("tiny", &[], &words(overrides)).expect_err(overrides).0;
            assert!(sentence.contains(expected), "{overrides}: {sentence:?} lacks {expected:?}");
        }
        let both = resolve("tiny", &[], &words("model.attention=bidirectional")).unwrap();
        for (overrides, expected) in [
            ("head=classes model.classes=2", "`data.task` is text: give data.task=classes"),
            ("data.task=classes", "give model.head=classes"),
        ] {
            let config = resolve("tiny", &[], &words(overrides)).unwrap();
            let sentence = config.validate_for_training().unwrap_err().0;
            assert!(sentence.contains(expected), "{overrides}: {sentence}");
        }
        let sentence = both.validate_for_training().unwrap_err().0;
        assert!(sentence.contains("would see the one it has to predict"), "{sentence}");
    }

    #[test]
    fn evaluations_may_be_counted_in_epochs() {
        let config = resolve("tiny", &[], &words("epochs=10 every_epochs=0.5")).unwrap();
        assert_eq!([config.eval_every(1000), config.eval_every(3)], [50, 1]);
        let again = config.with_file(&config.to_toml(), "config.toml").unwrap();
        assert_eq!(again.eval, config.eval, "what is saved reads back");
        assert_eq!(config.with(&words("eval.every=7")).unwrap().eval_every(1000), 7);
        let both = resolve("tiny", &[], &words("epochs=10 every_epochs=1 eval.every=7")).unwrap_err().0;
        assert!(both.contains("are both given"), "{both}");
        let config = resolve("tiny", &[], &words("eval.every=7 patience=2")).unwrap();
        assert_eq!(config.eval_every(1000), 7);
        assert!(config.keeps_best());
    }

    #[test]
    fn class_weights_are_a_word_or_numbers() {
        use crate::config::class_weights::ClassWeights;
        let weights = |given: &str| {
            let config =
                resolve("tiny", &[], &words(&format!("head=classes model.classes=2 class_weights={given}")))
                    .unwrap();
            let again =
                resolve("tiny", &[], &[]).unwrap().with_file(&config.to_toml(), "config.toml").unwrap();
            assert_eq!(again.train.class_weights, config.train.class_weights);
            config.train.class_weights
        };
        assert_eq!(weights("balanced"), ClassWeights::Balanced);
        assert_eq!(weights("[1,2.5]"), ClassWeights::Given(vec![1.0, 2.5]));
        assert_eq!(weights("none"), ClassWeights::None);
    }
}
