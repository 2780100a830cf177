//! The values of `data.task`: the unit of data of each task, the head it needs, and the keys that only it reads.

use std::collections::BTreeSet;

use flatout_models::config::{Head, Vision};
use flatout_settings::choice;

use super::Config;

choice! {
    /// The content of the files, which decides how they are read.
    pub enum Task {
        /// Documents, trained on from end to end.
        Text = "text",
        /// Conversations and instructions, whose answers are trained on.
        Chat = "chat",
        /// Texts or pairs of texts with a class.
        Classes = "classes",
        /// Images with a class.
        Images = "images",
        /// Conversations and questions about images, whose answers are trained on.
        VisualChat = "visual_chat",
        /// Preferred and rejected answers to prompts, with images or frames if the model sees them.
        Preference = "preference",
        /// Videos and still images with a text, processed frame by frame.
        Foveated = "foveated",
    }
}

/// The unit of data that a task is trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Rows that documents are cut into.
    Documents,
    /// Separate texts of unequal lengths.
    Examples,
    Images,
}

/// The form in which a model gets images beside its texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Images of any size among the words of a row.
    Images,
    /// Videos and still images as frames of one size, from tar shards.
    Frames,
}

struct TaskRow {
    task: Task,
    unit: Unit,
    head: Head,
    /// The keys of `data` that this task reads and not all tasks do.
    keys: &'static [&'static str],
}

static TABLE: &[TaskRow] = &[
    TaskRow { task: Task::Text, unit: Unit::Documents, head: Head::Tokens, keys: &[] },
    TaskRow {
        task: Task::Chat,
        unit: Unit::Examples,
        head: Head::Tokens,
        keys: &["template", "date", "max_tokens", "group"],
    },
    TaskRow {
        task: Task::Classes,
        unit: Unit::Examples,
        head: Head::Classes,
        keys: &["max_tokens", "classes", "text_a", "text_b", "label", "group"],
    },
    TaskRow {
        task: Task::Images,
        unit: Unit::Images,
        head: Head::Classes,
        keys: &["classes", "label", "image", "image_root"],
    },
    TaskRow {
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
    TaskRow {
        task: Task::Preference,
        unit: Unit::Examples,
        head: Head::Tokens,
        keys: &["template", "date", "max_tokens", "group"],
    },
    TaskRow {
        task: Task::Foveated,
        unit: Unit::Examples,
        head: Head::Tokens,
        keys: &["template", "date", "max_tokens", "system", "prompts", "still_frames"],
    },
];

impl Task {
    fn row(self) -> &'static TaskRow {
        TABLE.iter().find(|row| row.task == self).expect("every task has a row")
    }

    pub fn unit(self) -> Unit {
        self.row().unit
    }

    /// The head that the model must have.
    pub fn head(self) -> Head {
        self.row().head
    }

    /// Whether its examples have answers that are right or wrong as a whole.
    pub fn has_answers(self) -> bool {
        matches!(self, Task::Chat | Task::VisualChat | Task::Foveated)
    }

    /// The keys that only some tasks read, each with the first task that does.
    pub(super) fn own_keys() -> impl Iterator<Item = (&'static str, Task)> {
        let mut seen = BTreeSet::new();
        let keys = TABLE.iter().flat_map(|row| row.keys.iter().map(|key| (*key, row.task)));
        keys.filter(move |(key, _)| seen.insert(*key))
    }

    fn reads(self, key: &str) -> bool {
        self.row().keys.contains(&key)
    }
}

/// The keys that preferences about images, or about frames, read in addition to those about texts. With frames `group` is not read,
/// because shards have no columns.
const IMAGE_KEYS: [&str; 4] = ["image", "image_root", "image_tokens", "vision_cache"];
const FRAME_KEYS: [&str; 3] = ["system", "prompts", "still_frames"];

impl Config {
    /// The form in which the model gets images beside texts; `None` if it reads text only. For preferences it depends on the model.
    pub fn sight(&self) -> Option<Sight> {
        match (self.data.task, self.model.vision()?) {
            (Task::VisualChat | Task::Preference, Vision::Qwen3Vl(_)) => Some(Sight::Images),
            (Task::Foveated | Task::Preference, Vision::Fovea(_)) => Some(Sight::Frames),
            _ => None,
        }
    }

    /// Whether the task, with this model, reads a key of `data`.
    pub(super) fn reads(&self, key: &str) -> bool {
        let task = self.data.task;
        match self.sight().filter(|_| task == Task::Preference) {
            Some(Sight::Images) => task.reads(key) || IMAGE_KEYS.contains(&key),
            Some(Sight::Frames) => task.reads(key) && key != "group" || FRAME_KEYS.contains(&key),
            None => task.reads(key),
        }
    }

    /// The error for a key that the task does not read; `of` is a task that does.
    pub(super) fn unread(&self, key: &str, of: Task) -> String {
        let shown = [(&IMAGE_KEYS[..], "images"), (&FRAME_KEYS[..], "frames")];
        let shown = shown.into_iter().find(|(keys, _)| keys.contains(&key));
        match (self.data.task, shown) {
            (Task::Preference, Some((_, shown))) => format!(
                "`data.{key}` is given and the model is shown no {shown}: leave it out, or give a model that is, with \
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
