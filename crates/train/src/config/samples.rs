//! Section `samples`: texts and predictions of the model that are logged at every evaluation.

use flatout_models::config::Attention;
use flatout_settings::section;

use super::Config;
use super::check::{at_least_one, at_most, within};
use crate::UserError;
use crate::refuse;

section! {
    /// Texts and predictions of the model that are logged at every evaluation.
    pub struct Samples {
        /// Prompts that the model continues, or answers as questions if it is trained on conversations.
        pub prompts: Vec<String> = Vec::new(),
        /// The most tokens that the model writes after a prompt.
        pub max_tokens: usize = 64,
        /// Temperature that tokens are sampled at; 0 takes the likeliest.
        pub temperature: f64 = 0.8,
        /// With a head of classes: held-out texts or images that are logged with their predicted class.
        pub count: usize = 0,
    }
}

/// Limits that are more than anybody reads.
const MOST_PROMPTS: usize = 64;
const MOST_EXAMPLES: usize = 256;
const MOST_TEMPERATURE: f64 = 100.0;

impl Config {
    /// Checks that the model can produce the samples.
    pub(super) fn validate_samples(&self) -> Result<(), UserError> {
        let samples = &self.samples;
        at_least_one("samples.max_tokens", samples.max_tokens)?;
        within("samples.temperature", samples.temperature, 0.0, MOST_TEMPERATURE)?;
        at_most("samples.count", samples.count, MOST_EXAMPLES)?;
        let (key, prompts) = match (samples.prompts.len(), samples.count) {
            (0, 0) => return Ok(()),
            (0, _) => ("samples.count", false),
            (prompts, _) => {
                at_most("the number of samples.prompts", prompts, MOST_PROMPTS)?;
                ("samples.prompts", true)
            }
        };
        if self.eval.rows == 0 {
            refuse!("`{key}` is given but `eval.rows` is 0: samples are taken when the run is evaluated");
        }
        let model = &self.model;
        if samples.count > 0 && model.classes().is_none() {
            refuse!(
                "`samples.count` is given, and the model predicts no classes: give samples.prompts instead"
            );
        }
        if !prompts {
            return Ok(());
        }
        if model.classes().is_some() {
            refuse!("`samples.prompts` is given, and the model predicts classes: give samples.count instead");
        }
        if model.as_decoder().is_some_and(|decoder| decoder.attention == Attention::Bidirectional) {
            refuse!(
                "`samples.prompts` is given, and the model's attention is bidirectional (model.attention), so that it cannot \
                 continue a text: leave it out"
            );
        }
        if model.as_fovea().is_some() {
            refuse!(
                "`samples.prompts` is given, and the model only answers questions about frames: leave it out"
            );
        }
        let longest = samples.prompts.iter().map(String::len).max().unwrap_or(0);
        if samples.max_tokens >= model.tokens() {
            refuse!(
                "`samples.max_tokens` = {} leaves no room for a prompt in a context of {}: lower it",
                samples.max_tokens,
                model.tokens()
            );
        }
        at_most("the bytes of the longest of samples.prompts", longest, 1 << 16)
    }
}
