//! The values of `data.task`: what a task learns from, the head it needs, and the keys that it alone reads.

use std::collections::BTreeSet;

use flatout_models::config::Head;
use flatout_settings::choice;

choice! {
    /// The content of the files, which decides how they are read.
    pub enum Task {
        /// Documents, trained on from end to end.
        Text = "text",
        /// Conversations and instructions, of which the answers are learned.
        Chat = "chat",
        /// Texts or pairs of texts with a class.
        Classes = "classes",
        /// Images with a class.
        Images = "images",
        /// Conversations about images, and questions about them, of which the answers are learned.
        VisualChat = "visual_chat",
        /// Answers to prompts of which some are preferred to others.
        Preference = "preference",
        /// Videos and still images with a text, looked at frame by frame.
        Foveated = "foveated",
    }
}

/// The unit of data that a task learns from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Rows that documents are cut into.
    Documents,
    /// Texts of their own lengths, one by one.
    Examples,
    Images,
}

struct Facts {
    task: Task,
    unit: Unit,
    head: Head,
    /// The keys of `data` that only some tasks read and this one does.
    keys: &'static [&'static str],
}

static TABLE: &[Facts] = &[
    Facts { task: Task::Text, unit: Unit::Documents, head: Head::Tokens, keys: &[] },
    Facts {
        task: Task::Chat,
        unit: Unit::Examples,
        head: Head::Tokens,
        keys: &["template", "date", "max_tokens", "group"],
    },
    Facts {
        task: Task::Classes,
        unit: Unit::Examples,
        head: Head::Classes,
        keys: &["max_tokens", "classes", "text_a", "text_b", "label", "group"],
    },
    Facts {
        task: Task::Images,
        unit: Unit::Images,
        head: Head::Classes,
        keys: &["classes", "label", "image", "image_root"],
    },
    Facts {
        task: Task::VisualChat,
        unit: Unit::Examples,
        head: Head::Tokens,
        keys: &[
            "template",
            "date",
            "max_tokens",
            "group",
            "image",
            "image_root",
            "image_tokens",
            "vision_cache",
            "answer_marks",
        ],
    },
    Facts {
        task: Task::Preference,
        unit: Unit::Examples,
        head: Head::Tokens,
        keys: &["template", "date", "max_tokens", "group"],
    },
    Facts {
        task: Task::Foveated,
        unit: Unit::Examples,
        head: Head::Tokens,
        keys: &["template", "date", "max_tokens", "system", "prompts", "still_frames"],
    },
];

impl Task {
    fn facts(self) -> &'static Facts {
        TABLE.iter().find(|facts| facts.task == self).expect("every task has a row")
    }

    pub fn unit(self) -> Unit {
        self.facts().unit
    }

    /// The head that the model must have.
    pub fn head(self) -> Head {
        self.facts().head
    }

    /// Whether its examples have answers that are right or wrong as a whole.
    pub fn has_answers(self) -> bool {
        matches!(self, Task::Chat | Task::VisualChat | Task::Foveated)
    }

    /// The keys that only some tasks read, each with the first task that does.
    pub(super) fn own_keys() -> impl Iterator<Item = (&'static str, Task)> {
        let mut seen = BTreeSet::new();
        let keys = TABLE.iter().flat_map(|facts| facts.keys.iter().map(|key| (*key, facts.task)));
        keys.filter(move |(key, _)| seen.insert(*key))
    }

    pub(super) fn reads(self, key: &str) -> bool {
        self.facts().keys.contains(&key)
    }
}
