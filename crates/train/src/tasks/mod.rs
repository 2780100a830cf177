//! The tasks: one row for each, with the data it opens and the graphs it trains.
//!
//! The training loop, evaluation and measurement use batches of named tensors and know no kinds of data: a task is its file and
//! its row.

pub mod augmentation;
pub mod batch;
pub mod capacities;
pub mod dataset;
pub mod examples;
pub mod image_table;
pub mod images;
mod lane_batches;
mod mixing;
pub mod preference;
pub mod seen;
pub mod text;

use std::path::Path;

use flatout_data::OpenEvent;
use flatout_data::examples::class_names;
use flatout_ir::Graph;

use crate::Failure;
use crate::config::resolved::Resolved;
use crate::config::{Config, Task};
use capacities::Capacities;
use dataset::Dataset;

/// Opens the data of a config; the listener receives notes about slow work and about samples that were left out.
type Open = fn(&Config, Option<&Path>, &mut dyn FnMut(OpenEvent)) -> Result<Box<dyn Dataset>, Failure>;

/// A task.
pub struct TaskRow {
    /// The value of `data.task`.
    pub task: Task,
    pub open: Open,
    /// The forward graph with its loss at given capacities; the flag is true for training and false for evaluation.
    pub graph: fn(&Config, &Capacities, bool) -> Graph,
}

/// One row per task.
pub static TABLE: &[TaskRow] = &[
    TaskRow { task: Task::Text, open: text::open, graph: capacities::texts },
    TaskRow { task: Task::Chat, open: examples::open, graph: capacities::texts },
    TaskRow { task: Task::Classes, open: examples::open, graph: capacities::texts },
    TaskRow { task: Task::Images, open: images::open, graph: capacities::of_images },
    TaskRow { task: Task::VisualChat, open: examples::open, graph: capacities::texts },
    TaskRow { task: Task::Preference, open: examples::open, graph: capacities::texts },
    TaskRow { task: Task::Foveated, open: examples::open, graph: capacities::texts },
];

/// The row of the config's task.
pub fn of(config: &Config) -> &'static TaskRow {
    TABLE.iter().find(|row| row.task == config.data.task).expect("every task has a row")
}

/// Opens the data that a config names.
pub fn open(
    config: &Config,
    run: Option<&Path>,
    say: &mut dyn FnMut(OpenEvent),
) -> Result<Box<dyn Dataset>, Failure> {
    (of(config).open)(config, run, say)
}

/// The config of a run on its data, with the lengths and classes of the examples: what is planned from it is what such a run
/// plans. The listener is that of [`open`].
pub fn measured(config: &Config, say: &mut dyn FnMut(OpenEvent)) -> Result<Config, Failure> {
    let mut resolved = Resolved::default();
    if resolved.leaves_sets_open(config) {
        resolved.pin_sets(config)?;
    }
    let data = open(&resolved.over(config), None, say)?;
    data.measure(config, &mut resolved);
    Ok(resolved.over(config))
}

/// Number of classes in the data of a config, where the data can be read more than once.
pub fn classes(config: &Config) -> Result<Option<usize>, Failure> {
    let data = &config.data;
    let is_stream = data.path.as_ref().is_some_and(|paths| paths.0.iter().any(|path| path == "-"));
    match data.task {
        _ if is_stream => Ok(None),
        _ if !data.classes.is_empty() => Ok(Some(data.classes.len())),
        Task::Classes => Ok(Some(class_names(&examples::spec(config, None))?.len())),
        Task::Images => Ok(Some(images::sets(config, &mut |_| {})?.classes.len())),
        Task::Text | Task::Chat | Task::VisualChat | Task::Preference | Task::Foveated => Ok(None),
    }
}

/// The forward graph of a config at given capacities, with its loss.
pub fn graph(config: &Config, capacities: &Capacities, training: bool) -> Graph {
    (of(config).graph)(config, capacities, training)
}
