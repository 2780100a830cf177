//! The resolved form of a config on one machine and one set of data: all that a resumed run must find as it was.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use flatout_data::DataError;
use flatout_data::remote::{self, location::is_of_hub};
use flatout_ir::attr::Attr;
use flatout_ir::{Codes, Recompute};

use super::{Config, Count};
use crate::UserError;
use crate::switches::Auto;
use crate::switches::data::{HeadRows, LAST_LAYER};
use crate::switches::memory::{BASE, Base};

/// How much of everything one run of a plan has room for. A task leaves at 0 what it has none of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capacities {
    /// Sequences of equal length; 1 where examples lie one after another.
    pub rows: usize,
    pub tokens: usize,
    /// Documents, examples or texts that are kept apart within the rows.
    pub segments: usize,
    /// Examples, or several behind a prefix that they share; in place of segments.
    #[serde(skip_serializing_if = "is_zero")]
    pub trees: usize,
    /// Tokens of the longest segment or tree.
    pub longest: usize,
    /// The most tokens that a token sees, by a schedule of windows; 0 where the model alone says.
    #[serde(skip_serializing_if = "is_zero")]
    pub window: usize,
    /// Rows that the loss reads; 0 where it reads every row.
    #[serde(skip_serializing_if = "is_zero")]
    pub read: usize,
    pub images: usize,
    /// Patches of images among tokens.
    #[serde(skip_serializing_if = "is_zero")]
    pub patches: usize,
    /// Patches of the largest of these images.
    #[serde(skip_serializing_if = "is_zero")]
    pub largest_image: usize,
    /// Answers that are compared.
    #[serde(skip_serializing_if = "is_zero")]
    pub answers: usize,
    /// Frames of videos among tokens, each of one of the images.
    #[serde(skip_serializing_if = "is_zero")]
    pub frames: usize,
    /// Samples that have frames.
    #[serde(skip_serializing_if = "is_zero")]
    pub videos: usize,
    /// Frames of the longest of these samples.
    #[serde(skip_serializing_if = "is_zero")]
    pub longest_video: usize,
    /// The most frames that are one image.
    #[serde(skip_serializing_if = "is_zero")]
    pub repeats: usize,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Values that were found out or chosen, beside the config that asked. A value that is `None` was given, or is not of this run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Resolved {
    /// The folder that relative paths of the config begin in: where the run was begun.
    pub folder: Option<PathBuf>,
    /// `model.from` exactly: a commit and not a branch, a step and not the newest.
    pub from: Option<String>,
    /// `model.vision.from` likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vision_from: Option<String>,
    /// Data sets of the hub at the commits that the run began with, by the words that name them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sets: BTreeMap<String, String>,
    /// Tokens of equal shares of the examples, shortest first.
    pub lengths: Option<Vec<usize>>,
    /// Learned tokens of these shares, in the mean; of the last the most of any example.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learned: Option<Vec<usize>>,
    /// Equal shares of the trees that examples with a shared prefix make, four numbers each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trees: Option<Vec<usize>>,
    /// Images and patches of the shares of examples, and four numbers of images for each of the trees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<Vec<usize>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patches: Option<Vec<usize>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree_images: Option<Vec<usize>>,
    /// Patches of the largest image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_image: Option<usize>,
    /// The classes by name, in the order of the model's outputs.
    pub classes: Option<Vec<String>>,
    /// Hashes of sizes and times of the files that images are read from.
    pub versions: Option<String>,
    /// How many images training has, their rows and columns, where they lie decoded.
    pub decoded: Option<Vec<usize>>,
    /// Rows computed at once.
    pub micro_batch: Option<usize>,
    /// Groups of rows that are summed apart; not written down where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lanes: Option<usize>,
    /// The value that `recompute=auto` resolved to, and for how many layers.
    pub recompute: Option<String>,
    pub recompute_layers: Option<usize>,
    /// The layers that run in fp8.
    pub fp8_layers: Option<Vec<String>>,
    /// Updates that the schedule spans, and of its warm-up.
    pub horizon_steps: Option<u64>,
    pub warmup_steps: Option<u64>,
    /// The state of every switch, read from the compiled plans.
    pub switches: BTreeMap<String, String>,
    /// The capacities of the plans of gradients, the largest first.
    pub capacities: Vec<Capacities>,
}

impl Resolved {
    /// The codes that the plans keep frozen weights in, if any.
    pub fn base_codes(&self) -> Option<Codes> {
        let state = self.switches.get(BASE.name)?;
        Base::ALL.iter().find(|base| base.name() == state)?.codes()
    }

    /// The config with everything that was resolved in place of what it left open.
    pub fn over(&self, asked: &Config) -> Config {
        let mut config = self.placed(asked);
        if let Some(from) = &self.from {
            *config.model.from_mut() = Some(from.clone());
        }
        if let (Some(from), Some(tower)) = (&self.vision_from, config.model.as_fovea_mut()) {
            tower.from = Some(from.clone());
        }
        let data = &mut config.data;
        data.words_mut().for_each(|word| {
            if let Some(pinned) = self.sets.get(word) {
                word.clone_from(pinned);
            }
        });
        self.lengths.iter().for_each(|lengths| data.lengths.clone_from(lengths));
        self.learned.iter().for_each(|learned| data.learned.clone_from(learned));
        self.trees.iter().for_each(|trees| data.trees.clone_from(trees));
        self.images.iter().for_each(|images| data.images.clone_from(images));
        self.patches.iter().for_each(|patches| data.patches.clone_from(patches));
        data.largest_image = self.largest_image.or(data.largest_image);
        self.tree_images.iter().for_each(|images| data.tree_images.clone_from(images));
        self.classes.iter().for_each(|classes| data.classes.clone_from(classes));
        self.decoded.iter().for_each(|decoded| data.decoded.clone_from(decoded));
        if !self.capacities.is_empty() && config.switches.data.head_rows == HeadRows::Auto {
            let reads_some = self.capacities.iter().any(|plan| plan.read > 0);
            config.switches.data.head_rows = if reads_some { HeadRows::Answers } else { HeadRows::All };
        }
        if !self.capacities.is_empty() && config.switches.data.last_layer == HeadRows::Auto {
            // Runs of before there was such a switch ran it on every row.
            let is_trimmed =
                self.switches.get(LAST_LAYER.name).is_some_and(|state| state == HeadRows::Answers.name());
            config.switches.data.last_layer = if is_trimmed { HeadRows::Answers } else { HeadRows::All };
        }
        if !self.switches.is_empty() && config.switches.memory.base == Auto::Auto {
            config.switches.memory.base = Auto::Given(self.base_codes().map_or(Base::Bf16, Base::of));
        }
        let train = &mut config.train;
        self.micro_batch.iter().for_each(|rows| train.micro_batch = Count::Given(*rows));
        self.lanes.iter().for_each(|lanes| train.lanes = Count::Given(*lanes));
        self.recompute_layers.iter().for_each(|layers| train.recompute_layers = Count::Given(*layers));
        self.fp8_layers.iter().for_each(|layers| train.fp8_layers.clone_from(layers));
        if let Some(recompute) = &self.recompute {
            let recompute = Recompute::read(recompute).expect("validated: a value of the switch");
            config.switches.memory.recompute = Auto::Given(recompute);
        }
        let schedule = &mut config.schedule;
        schedule.horizon_steps = self.horizon_steps.or(schedule.horizon_steps);
        if let Some(warmup) = self.warmup_steps {
            (schedule.warmup_steps, schedule.warmup_share) = (warmup, None);
        }
        config
    }

    /// The config with its relative paths as they are found from where the process works.
    pub fn placed(&self, asked: &Config) -> Config {
        self.elsewhere().map_or_else(|| asked.clone(), |folder| asked.based_at(folder))
    }

    /// The folder that relative paths begin in, where the process works in another one and it is still there.
    fn elsewhere(&self) -> Option<&Path> {
        let folder = self.folder.as_deref()?;
        let is_here = std::env::current_dir().is_ok_and(|here| here == folder);
        (!is_here && folder.is_dir()).then_some(folder)
    }

    /// Notes that relative paths begin in the process's folder, unless they begin in another one.
    pub fn begin_here(&mut self) {
        if self.elsewhere().is_none() {
            // A name that is no text cannot be written down.
            self.folder = std::env::current_dir().ok().filter(|folder| folder.to_str().is_some());
        }
    }

    /// Whether the config names data sets of the hub whose commits are not known yet.
    pub fn leaves_sets_open(&self, config: &Config) -> bool {
        let mut config = config.clone();
        config
            .data
            .words_mut()
            .any(|word| is_of_hub(word) && !self.sets.contains_key(word) && !self.is_pin(word))
    }

    /// Asks the hub for the commits of data sets that the config names, and writes them down.
    pub fn pin_sets(&mut self, config: &Config) -> Result<(), DataError> {
        let mut config = config.clone();
        for word in config.data.words_mut().filter(|word| is_of_hub(word)) {
            if !self.sets.contains_key(word) && !self.is_pin(word) {
                self.sets.insert(word.clone(), remote::pinned(word)?);
            }
        }
        Ok(())
    }

    fn is_pin(&self, word: &String) -> bool {
        self.sets.values().any(|pinned| pinned == word)
    }

    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("what was resolved has a TOML form")
    }

    /// Reads the text that [`Resolved::to_toml`] wrote; `path` is for sentences.
    pub fn parse(text: &str, path: &str) -> Result<Resolved, UserError> {
        let unreadable = |why: &dyn std::fmt::Display| UserError(format!("{path} does not read: {why}"));
        let resolved: Resolved = toml::from_str(text).map_err(|error| unreadable(&error))?;
        let recompute = resolved.recompute.as_deref().map(Recompute::read).transpose();
        recompute.map_err(|why| unreadable(&why))?;
        Ok(resolved)
    }
}
