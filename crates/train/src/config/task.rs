//! The values of `data.task`: what a task learns from, the head it needs, and the keys that it alone reads.

use std::collections::BTreeSet;

use flatout_models::config::{Head, Vision};
use flatout_settings::choice;

use super::Config;

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
        /// Answers to prompts, with images or frames where the model sees them, of which some are preferred to others.
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

/// The form in which a model is shown what stands beside its texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Images of any size among the words of a row.
    Images,
    /// Videos and still images as frames of one size, out of tar shards.
    Frames,
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

    fn reads(self, key: &str) -> bool {
        self.facts().keys.contains(&key)
    }
}

/// The keys of preferences about images, and about frames, beside those of preferences among texts. Shards have no columns by
/// which samples could be grouped.
const IMAGE_KEYS: [&str; 4] = ["image", "image_root", "image_tokens", "vision_cache"];
const FRAME_KEYS: [&str; 3] = ["system", "prompts", "still_frames"];

impl Config {
    /// How the model is shown what stands beside texts; `None` where it reads text alone. The subject of preferences depends on
    /// the model: the task says what is learned.
    pub fn sight(&self) -> Option<Sight> {
        match (self.data.task, self.model.vision()?) {
            (Task::VisualChat | Task::Preference, Vision::Qwen3Vl(_)) => Some(Sight::Images),
            (Task::Foveated | Task::Preference, Vision::Fovea(_)) => Some(Sight::Frames),
            _ => None,
        }
    }

    /// Whether the task reads a key of `data`, with the model that it has.
    pub(super) fn reads(&self, key: &str) -> bool {
        let task = self.data.task;
        match self.sight().filter(|_| task == Task::Preference) {
            Some(Sight::Images) => task.reads(key) || IMAGE_KEYS.contains(&key),
            Some(Sight::Frames) => task.reads(key) && key != "group" || FRAME_KEYS.contains(&key),
            None => task.reads(key),
        }
    }

    /// Why a key that the task does not read is in vain, and what to give.
    pub(super) fn unread(&self, key: &str, of: Task) -> String {
        let shown = [(&IMAGE_KEYS[..], "images"), (&FRAME_KEYS[..], "frames")];
        let shown = shown.into_iter().find(|(keys, _)| keys.contains(&key));
        match (self.data.task, shown) {
            (Task::Preference, Some((_, shown))) => format!(
                "`data.{key}` is given and the model is shown no {shown}: leave it out, or give a model that is in \
                 [model.vision]"
            ),
            (Task::Preference, None) if key == "group" => {
                "`data.group` is given and pairs are read from shards, which have no columns: leave it out"
                    .into()
            }
            (task, _) => format!("`data.{key}` is given but `data.task` is {task}: give data.task={of}"),
        }
    }
}
