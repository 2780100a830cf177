//! Section `data.prompts`: questions for samples that have none, by the data set that they come from.

use flatout_settings::section;
use flatout_settings::{Section, Setting, ValueKind};
use serde::{Deserialize, Serialize};

section! {
    /// The question for samples of a source that have none.
    pub struct Prompt {
        /// Beginning of the source's name; the longest that fits counts, and an empty one fits every source.
        pub source: String,
        /// The question.
        pub prompt: String,
    }
}

/// A list of prompts is written as a list of tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Prompts(pub Vec<Prompt>);

impl Setting for Prompts {
    fn kind() -> ValueKind {
        ValueKind::Tables(Prompt::keys())
    }
}

/// The default system message before every question.
pub const SYSTEM: &str = "You answer questions about images and videos.";

/// The default questions by source.
const DEFAULTS: [(&str, &str); 5] = [
    ("openvid", "Write a brief caption for this video."),
    ("webvid", "Caption this clip in a few words, as an archive of footage would."),
    ("vript", "Tell what happens in this video from its beginning to its end."),
    ("sharegpt4video", "Describe this video in detail."),
    ("", "Describe this."),
];

impl Prompts {
    /// Sources with their questions: those that are given, and the defaults of other sources.
    pub fn all(&self) -> Vec<(String, String)> {
        let given = self.0.iter().map(|prompt| (prompt.source.clone(), prompt.prompt.clone()));
        let is_given = |source: &str| self.0.iter().any(|prompt| prompt.source.eq_ignore_ascii_case(source));
        let defaults = DEFAULTS.iter().filter(|(source, _)| !is_given(source));
        given.chain(defaults.map(|(source, prompt)| (source.to_string(), prompt.to_string()))).collect()
    }
}
