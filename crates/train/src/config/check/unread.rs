//! Keys that only some choices of another key read. One that the user gives and nothing reads is refused, whatever its value is.

use std::collections::BTreeMap;

use flatout_ir::optimizers::Name;
use flatout_ir::{Codes, Precision};
use flatout_models::objectives::preference::PreferenceLoss;

use crate::UserError;
use crate::config::{AdapterKind, Augmentation, Config, ScheduleName, Task, Unit, text};
use crate::refuse;
use crate::switches::Auto;

struct Reader {
    /// The key whose value decides whether the others are read.
    decider: &'static str,
    section: &'static str,
    keys: &'static [&'static str],
    is_read: fn(&Config) -> bool,
    /// A value of the decider with which they are read.
    give: &'static str,
}

static READERS: &[Reader] = &[
    Reader {
        decider: "optimizer.name",
        section: "optimizer",
        keys: &["adamw_lr", "momentum", "nesterov", "ns_steps", "muon_adjust"],
        is_read: |config| config.optimizer.name.0 == Name::Muon,
        give: "optimizer.name=muon",
    },
    Reader {
        decider: "adapter.kind",
        section: "adapter",
        keys: &["rank", "alpha", "dropout", "paths", "groups", "also_train"],
        is_read: |config| config.adapter.kind != AdapterKind::None,
        give: "adapter.kind=lora or dora",
    },
    Reader {
        decider: "data.task",
        section: "preference",
        keys: &["loss", "beta", "label_smoothing", "margin", "sft", "reference"],
        is_read: |config| config.data.task == Task::Preference,
        give: "data.task=preference",
    },
    Reader {
        decider: "preference.loss",
        section: "preference",
        keys: &["label_smoothing"],
        is_read: |config| matches!(config.preference.loss, PreferenceLoss::Dpo | PreferenceLoss::Robust),
        give: "preference.loss=dpo or robust",
    },
    Reader {
        decider: "preference.loss",
        section: "preference",
        keys: &["sft"],
        is_read: |config| !config.preference.loss.is_judged(),
        give: "a loss for pairs, such as preference.loss=dpo",
    },
    Reader {
        decider: "data.task",
        section: "data",
        keys: &["train_on"],
        is_read: |config| config.data.task.unit() == Unit::Examples && config.data.task != Task::Classes,
        give: "data.task=chat",
    },
    Reader {
        decider: "data.task",
        section: "data",
        keys: &["too_long"],
        is_read: |config| config.data.task.unit() == Unit::Examples,
        give: "data.task=chat",
    },
    Reader {
        decider: "data.task",
        section: "data",
        keys: &["filter"],
        is_read: |config| matches!(config.data.task, Task::Images | Task::Foveated | Task::Preference),
        give: "data.task=images",
    },
    Reader {
        decider: "data.task",
        section: "data",
        keys: &[
            "crop_scale",
            "crop_ratio",
            "flip",
            "augment",
            "augment_ops",
            "augment_magnitude",
            "augment_noise",
            "augment_probability",
            "erase",
            "erase_area",
            "erase_ratio",
            "erase_with",
            "centre_crop",
            "resize",
        ],
        is_read: |config| config.data.task == Task::Images,
        give: "data.task=images",
    },
    Reader {
        decider: "data.augment",
        section: "data",
        keys: &["augment_ops", "augment_magnitude", "augment_noise", "augment_probability"],
        is_read: |config| config.data.augment == Augmentation::RandAugment,
        give: "data.augment=randaugment",
    },
    Reader {
        decider: "data.erase",
        section: "data",
        keys: &["erase_area", "erase_ratio", "erase_with"],
        is_read: |config| config.data.erase > 0.0,
        give: "a probability, such as data.erase=0.25",
    },
    Reader {
        decider: "schedule.name",
        section: "schedule",
        keys: &["final_ratio"],
        is_read: |config| !matches!(config.schedule.name, ScheduleName::Constant | ScheduleName::Converge),
        give: "schedule.name=cosine, linear or wsd",
    },
    Reader {
        decider: "switches.precision",
        section: "train",
        keys: &["fp8_layers"],
        is_read: |config| match config.switches.compute.precision {
            Auto::Given(precision) => precision == Precision::FP8,
            Auto::Auto => config.switches.memory.codes() == Some(Codes::Fp8),
        },
        give: "precision=fp8",
    },
    Reader {
        decider: "samples.prompts",
        section: "samples",
        keys: &["max_tokens", "temperature"],
        is_read: |config| !config.samples.prompts.is_empty(),
        give: "samples.prompts",
    },
];

/// How a key was set.
pub(in crate::config) struct SetKey {
    /// The number of the last layer that set it.
    pub layer: usize,
    /// Whether that layer is the user's, and not a recipe of the program or a file with all keys.
    pub is_given: bool,
    /// Whether a lower layer set it to another value.
    pub changes_another: bool,
    /// Whether that layer first gave another value.
    pub changes_itself: bool,
}

impl Config {
    /// Refuses keys that the user gave and nothing reads. A key is not refused if its decider was set by a later layer or changed by
    /// words appended to a command, which turned it off, or if it takes a lower layer's value back to the default.
    pub(in crate::config) fn refuse_unread(&self, set: &BTreeMap<String, SetKey>) -> Result<(), UserError> {
        let defaults = || text::flatten(&Config { model: self.model.clone(), ..Config::default() });
        let is_default = |path: &str| text::flatten(self).get(path) == defaults().get(path);
        let is_idle = |path: &str, decider: &str| {
            let Some(key) = set.get(path).filter(|key| key.is_given) else { return false };
            let is_later = set
                .get(decider)
                .is_some_and(|decider| decider.layer + usize::from(decider.changes_itself) > key.layer);
            let is_undone = key.changes_another && is_default(path);
            !(is_later || is_undone)
        };
        for Reader { decider, section, keys, is_read, give } in READERS {
            let mut paths = keys.iter().map(|key| format!("{section}.{key}"));
            let Some(path) = paths.find(|path| !is_read(self) && is_idle(path, decider)) else { continue };
            let value = text::flatten(self).get(*decider).map(text::value);
            refuse!(
                "`{path}` is given and nothing reads it, because `{decider}` is {}: leave it out, or give {give}",
                value.unwrap_or("none".into()).trim_matches('"')
            );
        }
        for (key, of) in Task::own_keys() {
            if !self.reads(key) && is_idle(&format!("data.{key}"), "data.task") {
                return Err(UserError(self.unread(key, of)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::config::check::tests::refused;
    use crate::recipes::resolve;

    #[test]
    fn keys_that_nothing_reads_are_refused_with_their_default_too() {
        for (overrides, words) in [
            (
                "optimizer.momentum=0.95",
                "`optimizer.momentum` is given and nothing reads it, because `optimizer.name` is adamw: leave it out, or give \
                 optimizer.name=muon",
            ),
            (
                "adapter.rank=16",
                "because `adapter.kind` is none: leave it out, or give adapter.kind=lora or dora",
            ),
            ("adapter.alpha=3", "`adapter.alpha` is given and nothing reads it"),
            ("adapter.kind=none adapter.paths=layers", "`adapter.paths` is given and nothing reads it"),
            ("preference.sft=0", "because `data.task` is text: leave it out, or give data.task=preference"),
            (
                "data.task=preference preference.loss=ipo preference.label_smoothing=0",
                "because `preference.loss` is ipo",
            ),
            ("data.flip=0.5", "because `data.task` is text: leave it out, or give data.task=images"),
            ("data.train_on=assistant", "`data.train_on` is given and nothing reads it"),
            ("data.classes=[]", "`data.classes` is given but `data.task` is text: give data.task=classes"),
            ("data.still_frames=8", "`data.still_frames` is given but `data.task` is text"),
            ("schedule.name=constant final_ratio=0.1", "because `schedule.name` is constant"),
            (
                "train.fp8_layers=all",
                "because `switches.precision` is auto: leave it out, or give precision=fp8",
            ),
            ("precision=bf16 train.fp8_layers=layers.0", "because `switches.precision` is bf16"),
            ("temperature=0.8", "because `samples.prompts` is []: leave it out, or give samples.prompts"),
        ] {
            let sentence = refused(overrides);
            assert!(sentence.contains(words), "{overrides}: {sentence}");
        }
        let erased = ["data.erase_with=mean".to_string()];
        let sentence = resolve("vision-tiny", &[], &erased).unwrap_err().0;
        assert!(sentence.contains("because `data.erase` is 0.0: leave it out"), "{sentence}");
    }

    #[test]
    fn keys_of_lower_layers_may_lose_their_reader() {
        let own = |recipe: &str, overrides: &[&str]| {
            let overrides: Vec<String> = overrides.iter().map(|words| words.to_string()).collect();
            resolve(recipe, &[], &overrides)
        };
        assert!(own("qwen3-8b-lora", &["adapter.kind=none"]).is_ok(), "the recipe's rank is left over");
        assert!(own("tiny", &["schedule.name=constant"]).is_ok(), "the recipe's final ratio is left over");
        assert!(
            own("tiny", &["adapter.kind=lora", "adapter.rank=2", "adapter.kind=none"]).is_ok(),
            "appended"
        );
        let judged = ["preference.loss=kto", "preference.sft=0"];
        assert!(
            resolve("qwen3-vl-2b-dpo", &["small".into()], &judged.map(String::from)).is_ok(),
            "the recipe has 1"
        );
        let saved = own("tiny", &[]).unwrap();
        assert!(saved.to_toml().contains("momentum = 0.95"), "all keys are saved");
        assert_eq!(Config::parse(&saved.to_toml(), "config.toml").unwrap(), saved);
        assert!(saved.resumed(&["samples.temperature=0.5".into()]).is_err(), "it was not asked for prompts");
    }

    #[test]
    fn files_of_the_user_count_as_given() {
        let folder = std::env::temp_dir().join(format!("flatout-unread-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let written = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let rank = "extends = \"tiny\"\n[adapter]\nrank = 16\n";
        let refused = |recipe: &str, with: &[String], overrides: &[&str]| {
            let overrides: Vec<String> = overrides.iter().map(|words| words.to_string()).collect();
            resolve(recipe, with, &overrides).err().map_or(String::new(), |error| error.0)
        };
        let recipe = written("mine.toml", rank);
        assert!(refused(&recipe, &[], &[]).contains("`adapter.rank` is given and nothing reads it"));
        let loaded = ["adapter.kind=lora", "model.init_residual=1.0"];
        assert_eq!(refused(&recipe, &[], &loaded), "", "a later layer gives what reads it");
        let preset = [written("preset.toml", "[adapter]\nrank = 16\n")];
        assert!(refused("tiny", &preset, &[]).contains("`adapter.rank` is given and nothing reads it"));
        assert_eq!(refused("tiny", &preset, &["adapter.kind=none"]), "", "a later layer turns it off");
        let shown = written("shown.toml", &resolve("tiny", &[], &[]).unwrap().to_toml());
        assert_eq!(refused(&shown, &[], &[]), "", "`flatout recipes show` writes all keys");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
