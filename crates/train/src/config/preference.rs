//! Section `preference`: the loss that compares answers, its constants, and the reference model.

use flatout_models::objectives::preference::{Preference as PreferenceObjective, PreferenceLoss};
use flatout_settings::section;

use super::check::within;
use super::{Config, Sight, Task};
use crate::UserError;
use crate::refuse;

section! {
    /// How answers are compared if data.task is preference.
    pub struct Preference {
        /// Loss: dpo, ipo, hinge, robust, apo_zero, simpo and orpo compare the answers of a pair; kto takes single answers that are labelled good or bad.
        pub loss: PreferenceLoss = PreferenceLoss::Dpo,
        /// Beta of the loss, as in its paper and in TRL; defaults to 0.1, with simpo to 2.
        pub beta: Option<f64>,
        /// With dpo and robust: share of the pairs that are taken to be labelled the wrong way round.
        pub label_smoothing: f64 = 0.0,
        /// With simpo: margin by which the chosen answer should lead; defaults to 1.
        pub margin: Option<f64>,
        /// With pairs: factor on the chosen answer's mean loss, which is added.
        pub sft: f64 = 0.0,
        /// A run or a folder with the reference model; defaults to the model as training begins.
        pub reference: Option<String>,
    }
}

impl Preference {
    pub fn beta(&self) -> f64 {
        self.beta.unwrap_or(if self.loss == PreferenceLoss::Simpo { 2.0 } else { 0.1 })
    }

    /// The loss with its constants, for `answers` answers at once.
    pub fn form(&self, answers: usize) -> PreferenceObjective {
        let (loss, beta, label_smoothing, sft) = (self.loss, self.beta(), self.label_smoothing, self.sft);
        PreferenceObjective { loss, beta, label_smoothing, margin: self.margin.unwrap_or(1.0), sft, answers }
    }
}

impl Config {
    /// Examples per unit of the loss: 2 for pairs, else 1. `train.batch` and `eval.rows` count such units.
    pub fn together(&self) -> usize {
        1 + usize::from(self.data.task == Task::Preference && !self.preference.loss.is_judged())
    }

    /// Whether answers are compared with a reference.
    pub fn has_reference(&self) -> bool {
        self.data.task == Task::Preference && self.preference.loss.has_reference()
    }

    pub(super) fn validate_preference(&self) -> Result<(), UserError> {
        let own = &self.preference;
        if self.data.task != Task::Preference {
            if *own != Preference::default() {
                refuse!(
                    "`preference` is given but `data.task` is {}: give data.task=preference",
                    self.data.task
                );
            }
            return Ok(());
        }
        let loss = own.loss;
        if !(own.beta() > 0.0 && own.beta().is_finite()) {
            refuse!("`preference.beta` is {} and must be a number above 0", own.beta());
        }
        within("preference.label_smoothing", own.label_smoothing, 0.0, 0.5)?;
        let smooths = matches!(loss, PreferenceLoss::Dpo | PreferenceLoss::Robust);
        if own.label_smoothing != 0.0 && !smooths {
            refuse!(
                "`preference.label_smoothing` is given but the loss is {loss}: only dpo and robust have it"
            );
        }
        if loss == PreferenceLoss::Robust && own.label_smoothing == 0.5 {
            refuse!("`preference.label_smoothing` is 0.5, which leaves robust nothing to learn: lower it");
        }
        if own.margin.is_some() && loss != PreferenceLoss::Simpo {
            refuse!("`preference.margin` is given but the loss is {loss}: only simpo has it");
        }
        within("preference.margin", own.margin.unwrap_or(0.0), 0.0, f64::MAX)?;
        within("preference.sft", own.sft, 0.0, f64::MAX)?;
        if own.sft != 0.0 && loss.is_judged() {
            refuse!(
                "`preference.sft` is given but the loss is {loss}, which has no chosen answers: leave it out"
            );
        }
        if loss.is_judged() && self.train.ema > 0.0 {
            refuse!(
                "`train.ema` is given and evaluation reads the average, by which kto would also judge what is trained: leave \
                 one out"
            );
        }
        if loss.is_judged() && self.sight() == Some(Sight::Frames) {
            refuse!(
                "`preference.loss` is {loss}, which is for labelled answers, and samples with frames are pairs: give a loss for \
                 pairs, such as preference.loss=dpo"
            );
        }
        if own.reference.is_some() && self.data.vision_cache.is_some() {
            refuse!(
                "`preference.reference` names another model, and `data.vision_cache` keeps the output of this model's tower: leave \
                 one out"
            );
        }
        if own.reference.is_some() && !loss.has_reference() {
            refuse!(
                "`preference.reference` is given but the loss is {loss}, which compares with none: leave it out"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::recipes::resolve;

    #[test]
    fn contradicting_values_are_refused() {
        let cases = [
            ("preference.beta=0.2", "`data.task` is text: give data.task=preference"),
            ("data.task=preference preference.beta=0", "must be a number above 0"),
            ("data.task=preference preference.label_smoothing=0.6", "from 0 to 0.5"),
            (
                "data.task=preference preference.loss=ipo preference.label_smoothing=0.1",
                "only dpo and robust",
            ),
            (
                "data.task=preference preference.loss=robust preference.label_smoothing=0.5",
                "nothing to learn",
            ),
            ("data.task=preference preference.margin=1", "only simpo has it"),
            ("data.task=preference preference.loss=kto preference.sft=1", "no chosen answers"),
            ("data.task=preference preference.loss=kto train.ema=0.9", "`train.ema` is given"),
            ("data.task=preference preference.loss=orpo preference.reference=x", "compares with none"),
            ("data.task=preference preference.loss=ppo", "preference.loss"),
            ("eval.metric=reward_accuracy", "only preferences have rewards"),
            ("data.task=preference eval.metric=exact", "only conversations have answers"),
        ];
        for (overrides, words) in cases {
            let overrides: Vec<String> = overrides.split(' ').map(String::from).collect();
            let sentence = resolve("tiny", &[], &overrides).expect_err(words).0;
            assert!(sentence.contains(words), "{overrides:?}: {sentence:?} lacks {words:?}");
        }
    }

    #[test]
    fn keys_of_images_and_frames_depend_on_the_model() {
        let refused = |recipe: &str, overrides: &str| {
            let overrides: Vec<String> = overrides.split(' ').map(String::from).collect();
            resolve(recipe, &[], &overrides).expect_err(overrides[0].as_str()).0
        };
        for (recipe, overrides, words) in [
            (
                "preference-tiny",
                "data.image_tokens=[4,8]",
                "`data.image_tokens` is given and the model is shown no images",
            ),
            (
                "preference-tiny",
                "data.still_frames=4",
                "`data.still_frames` is given and the model is shown no frames",
            ),
            ("qwen3-vl-2b-dpo", "data.system=x", "the model is shown no frames"),
            ("fvlm-135m-dpo", "data.image_root=x", "the model is shown no images"),
            ("fvlm-135m-dpo", "data.group=x", "which have no columns"),
            ("fvlm-135m-dpo", "preference.loss=kto", "samples with frames are pairs"),
            (
                "qwen3-vl-2b-dpo",
                "preference.reference=x data.vision_cache=y",
                "the output of this model's tower",
            ),
            ("qwen3-vl-2b-dpo", "data.answer_marks=[\"a\",\"b\"]", "give data.task=visual_chat"),
        ] {
            let sentence = refused(recipe, overrides);
            assert!(sentence.contains(words), "{recipe} {overrides}: {sentence:?} lacks {words:?}");
        }
        for (recipe, overrides) in [
            (
                "qwen3-vl-2b-dpo",
                "data.image_tokens=[4,8] data.image_root=x data.group=y preference.loss=kto shared_prefix=off",
            ),
            (
                "fvlm-135m-dpo",
                "data.still_frames=4 data.system=x shared_prefix=on data.mix=[{path=\"a\",weight=1.0}]",
            ),
        ] {
            let overrides: Vec<String> = overrides.split(' ').map(String::from).collect();
            assert!(resolve(recipe, &[], &overrides).is_ok(), "{:?}", resolve(recipe, &[], &overrides).err());
        }
    }

    #[test]
    fn defaults_are_those_of_the_loss() {
        let of = |loss: &str| {
            let overrides = ["data.task=preference".to_string(), format!("preference.loss={loss}")];
            let config = resolve("tiny", &[], &overrides).unwrap();
            let form = config.preference.form(4);
            (form.beta, form.margin, config.together(), config.has_reference())
        };
        assert_eq!(of("dpo"), (0.1, 1.0, 2, true));
        assert_eq!(of("simpo"), (2.0, 1.0, 2, false));
        assert_eq!(of("orpo"), (0.1, 1.0, 2, false));
        assert_eq!(of("kto"), (0.1, 1.0, 1, true));
    }
}
