//! An open data set of any task, and what it must know of the plans to feed them.

use flatout_data::{Arrangement, Description, Floor, Lanes, Layout, Vocabulary};
use flatout_ir::{PlanSet, Role};
use flatout_runtime::Session;
use serde_json::Value;

use super::batch::{BatchSource, EvalSet, Inputs};
use super::preference::ComparedAnswers;
use super::seen::PatchImages;
use crate::config::Config;
use crate::config::resolved::Resolved;
use crate::machine;
use crate::{Failure, UserError};

/// The plans that batches are made for.
#[derive(Clone)]
pub struct Feeding<'a> {
    pub plans: &'a PlanSet,
    /// Samples per batch; if lengths vary, the arrangement decides instead.
    pub micro_batch: usize,
    pub arrangement: Option<&'a Arrangement>,
    /// The lanes that are fed, and the number of lanes on all ranks.
    pub lanes: Vec<usize>,
    pub of_lanes: usize,
    /// Number of ranks that run the gradient plans in step, because these exchange something; 1 if each rank runs its own.
    pub together: usize,
}

impl Feeding<'_> {
    /// The lanes that are fed, for updates of `batch` samples.
    pub fn lanes(&self, batch: usize) -> Lanes {
        let Feeding { of_lanes: of, together, .. } = *self;
        Lanes { first: self.lanes[0], count: self.lanes.len(), of, together, batch }
    }

    pub fn inputs(&self) -> Inputs {
        Inputs::of(self.plans, Role::GRAD)
    }
}

/// The samples that are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Those held out from training, as evaluation during training reads them.
    HeldOut,
    /// Every sample of the given path.
    All,
}

/// Data that a task has opened.
pub trait Dataset {
    fn describe(&self) -> Description;

    /// A sentence about the data for people, for what counts do not show.
    fn sentence(&self) -> Option<String> {
        None
    }

    /// The vocabulary that text was tokenised with.
    fn vocabulary(&self) -> Option<&Vocabulary> {
        None
    }

    /// The lowest loss that any model can reach, if it is known.
    fn floor(&self) -> Option<Floor> {
        None
    }

    /// Records what plans depend on and only the data tells, such as lengths and names of classes.
    fn measure(&self, _config: &Config, _resolved: &mut Resolved) {}

    /// A warning about parts of the data that seem to have changed since the run began. Certain changes are refused when the data
    /// is opened.
    fn changed(&self, _resolved: &Resolved) -> Option<String> {
        None
    }

    /// Checks that a model of classes has an output for the class of every sample.
    fn check_classes(&self, config: &Config) -> Result<(), UserError>;

    /// Number of updates in this many epochs.
    fn steps_of_epochs(&self, config: &Config, epochs: u64) -> Result<u64, Failure>;

    /// How training batches are prepared, in words.
    fn loading(&self, config: &Config, feeding: Feeding<'_>) -> String;

    /// A warning if ranks must do some of each other's work to read their parts of the data.
    fn cost_of_sharing(&self, _config: &Config, _feeding: Feeding<'_>) -> Option<String> {
        None
    }

    /// The images among its texts, if there are any, for computing their features before the first update.
    fn images(&mut self) -> Option<&mut PatchImages> {
        None
    }

    /// Writes the data that the plans keep on the device, before the first update.
    fn prepare(&self, _session: &mut Session) -> Result<(), Failure> {
        Ok(())
    }

    /// The answers that are compared, which need a reference's scores before the first update.
    fn compared(&self) -> Option<&ComparedAnswers> {
        None
    }

    /// The batches of updates, from the beginning or from a cursor that an earlier source of the same data returned.
    fn source(
        &self,
        config: &Config,
        feeding: Feeding<'_>,
        cursor: Option<Value>,
    ) -> Result<Box<dyn BatchSource>, Failure>;

    /// At most this many samples for evaluation, laid out for the plan `eval`; without a layout in rows of the context.
    fn eval_set(
        &self,
        config: &Config,
        share: Share,
        most: usize,
        layout: Option<&Layout>,
    ) -> Result<Box<dyn EvalSet>, Failure>;

    /// The layout of a share that is evaluated by itself, with capacity for `rows` rows of the context; `None` if it is read in
    /// rows.
    fn layout_alone(&self, _config: &Config, _share: Share, _rows: usize) -> Option<Layout> {
        None
    }

    /// Number of updates in the whole run.
    fn total_steps(&self, config: &Config) -> Result<u64, Failure> {
        match config.train.steps {
            Some(steps) => Ok(steps),
            None => self.steps_of_epochs(config, config.train.epochs.expect("validated: steps or epochs")),
        }
    }
}

/// Number of threads that prepare batches in the background.
pub fn loader_threads(config: &Config) -> usize {
    config.loader.workers.given().unwrap_or_else(|| (machine::threads() / 2).max(1))
}

/// Describes a loader that uses threads.
pub fn loaded_by_threads(config: &Config) -> String {
    let threads = loader_threads(config);
    let plural = if threads == 1 { "" } else { "s" };
    format!("{threads} thread{plural}, {} batches ahead", config.loader.prefetch)
}

/// Number of updates in `epochs` epochs of `samples` samples.
pub fn updates(config: &Config, epochs: u64, samples: u64) -> u64 {
    (epochs * samples).div_ceil(config.train.batch as u64).max(1)
}

/// Parses a cursor that a source returned.
pub fn read_cursor<T: serde::de::DeserializeOwned>(cursor: Option<Value>) -> Result<Option<T>, Failure> {
    let unreadable = |error| Failure::Environment(format!("the data's cursor does not read: {error}"));
    cursor.map(serde_json::from_value).transpose().map_err(unreadable)
}
