//! An open set of data of any task, and what plans must know to be fed from it.

use flatout_data::{Arrangement, Description, Floor, Lanes, Layout, Vocabulary};
use flatout_ir::{PlanSet, Role};
use flatout_runtime::Session;
use serde_json::Value;

use super::batch::{BatchSource, EvalSet, Inputs};
use super::preference::Compared;
use super::seen::PatchImages;
use crate::config::Config;
use crate::config::resolved::Resolved;
use crate::machine;
use crate::{Failure, UserError};

/// The plans that batches are made for.
#[derive(Clone)]
pub struct Feeding<'a> {
    pub plans: &'a PlanSet,
    /// Samples of a batch; where lengths vary, the arrangement tells.
    pub micro_batch: usize,
    pub arrangement: Option<&'a Arrangement>,
    /// The lanes that are fed, and how many there are on all ranks.
    pub lanes: Vec<usize>,
    pub of_lanes: usize,
    /// How many ranks run the plans of gradients together, because these exchange something; 1 where each runs its own.
    pub together: usize,
}

impl Feeding<'_> {
    /// The lanes that are fed of updates of `batch` samples.
    pub fn lanes(&self, batch: usize) -> Lanes {
        let Feeding { of_lanes: of, together, .. } = *self;
        Lanes { first: self.lanes[0], count: self.lanes.len(), of, together, batch }
    }

    pub fn inputs(&self) -> Inputs {
        Inputs::of(self.plans, Role::GRAD)
    }
}

/// Which samples are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Those that were kept from training, as evaluation in training reads them.
    HeldOut,
    /// Every sample of a path that was given.
    All,
}

/// Data that a task has opened.
pub trait Dataset {
    fn describe(&self) -> Description;

    /// A sentence about the data for people, where counts do not say it.
    fn sentence(&self) -> Option<String> {
        None
    }

    /// The vocabulary that text was tokenised by.
    fn vocabulary(&self) -> Option<&Vocabulary> {
        None
    }

    /// The loss that no model gets below, where it is known.
    fn floor(&self) -> Option<Floor> {
        None
    }

    /// Writes down what plans depend on and only the data tells, such as lengths and names of classes.
    fn measure(&self, _config: &Config, _resolved: &mut Resolved) {}

    /// The parts of the data that look changed since the run began, in words: what is certain is refused where data is opened.
    fn changed(&self, _resolved: &Resolved) -> Option<String> {
        None
    }

    /// Whether a model of classes finds a class of its own on every sample.
    fn check_classes(&self, config: &Config) -> Result<(), UserError>;

    /// The updates of a run over `train.epochs`.
    fn steps_of_epochs(&self, config: &Config, epochs: u64) -> Result<u64, Failure>;

    /// How batches of training are made ready, in words.
    fn loading(&self, config: &Config, feeding: Feeding<'_>) -> String;

    /// The sentence about ranks that must do some of each other's work to read the data in shares, where they must.
    fn cost_of_sharing(&self, _config: &Config, _feeding: Feeding<'_>) -> Option<String> {
        None
    }

    /// The images among its texts, where there are any, for who makes features of them before the first update.
    fn images(&mut self) -> Option<&mut PatchImages> {
        None
    }

    /// Writes what the plans keep of the data on the device, before the first update.
    fn prepare(&self, _session: &mut Session) -> Result<(), Failure> {
        Ok(())
    }

    /// The answers that are compared, which need a reference's scores before the first update.
    fn compared(&self) -> Option<&Compared> {
        None
    }

    /// The batches of updates, from the beginning or from a cursor that an earlier source of the same data gave.
    fn source(
        &self,
        config: &Config,
        feeding: Feeding<'_>,
        cursor: Option<Value>,
    ) -> Result<Box<dyn BatchSource>, Failure>;

    /// At most this many samples to evaluate on, laid out for the plan `eval`; without a layout in rows of the context.
    fn eval_set(
        &self,
        config: &Config,
        share: Share,
        most: usize,
        layout: Option<&Layout>,
    ) -> Result<Box<dyn EvalSet>, Failure>;

    /// How a share is laid out where it is evaluated by itself, at `rows` rows of the context; `None` where it is read in
    /// rows.
    fn layout_alone(&self, _config: &Config, _share: Share, _rows: usize) -> Option<Layout> {
        None
    }

    /// The updates of a whole run.
    fn total_steps(&self, config: &Config) -> Result<u64, Failure> {
        match config.train.steps {
            Some(steps) => Ok(steps),
            None => self.steps_of_epochs(config, config.train.epochs.expect("validated: steps or epochs")),
        }
    }
}

/// Threads that make batches ready beside the training.
pub fn loader_threads(config: &Config) -> usize {
    config.loader.workers.given().unwrap_or_else(|| (machine::threads() / 2).max(1))
}

/// A loader of threads in words.
pub fn loaded_by_threads(config: &Config) -> String {
    let threads = loader_threads(config);
    let plural = if threads == 1 { "" } else { "s" };
    format!("{threads} thread{plural}, {} batches ahead", config.loader.prefetch)
}

/// The updates of a number of epochs over a number of samples.
pub fn updates(config: &Config, epochs: u64, samples: u64) -> u64 {
    (epochs * samples).div_ceil(config.train.batch as u64).max(1)
}

/// A cursor as a source kept it.
pub fn read_cursor<T: serde::de::DeserializeOwned>(cursor: Option<Value>) -> Result<Option<T>, Failure> {
    let unreadable = |error| Failure::Environment(format!("the data's cursor does not read: {error}"));
    cursor.map(serde_json::from_value).transpose().map_err(unreadable)
}
