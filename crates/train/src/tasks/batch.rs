//! A micro-batch as named host tensors, where batches come from, and how one is written into the inputs of a plan.

use std::collections::BTreeSet;

use flatout_data::{Vocabulary, Waited};
use flatout_ir::passes::input_path;
use flatout_ir::{Class, PlanSet, Role};
use flatout_runtime::{RuntimeError, Session};
use serde_json::Value;

use crate::Failure;

/// Values of one input.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    I32(Vec<i32>),
    F32(Vec<f32>),
    U8(Vec<u8>),
    /// Elements in the input's own type as they lie in a file, little-endian.
    Stored(Vec<u8>),
}

/// The inputs of one run of a plan. The loop, evaluation and measurement see nothing else of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The plan it is for.
    pub role: Role,
    /// The number of its lane among those of the rank.
    pub lane: usize,
    /// The plan's inputs by name, apart from `rng`, which the update knows.
    pub tensors: Vec<(&'static str, HostTensor)>,
    /// The global index of each sample, by which dropout draws.
    pub samples: Vec<u64>,
    /// The example of each target, where examples are evaluated by their answers; `None` where there is no target.
    pub answers: Vec<Option<u32>>,
    /// The plural of a sample, for sentences: rows, examples, images.
    pub unit: &'static str,
    /// Tokens that are learned from or read, padding apart.
    pub real_tokens: usize,
    /// Tokens that are computed.
    pub computed_tokens: usize,
    /// How many times the data has been read, after this batch.
    pub epoch: f64,
    /// How long the batch was waited for.
    pub waited: Waited,
    /// Samples that could not be used, in words; they keep their place without a label.
    pub left_out: Vec<String>,
}

impl Batch {
    /// The values of an input by name.
    #[cfg(test)]
    pub fn tensor_mut(&mut self, name: &str) -> &mut HostTensor {
        let found = self.tensors.iter_mut().find(|(own, _)| *own == name);
        &mut found.expect("an input of the plan").1
    }

    /// An integer input by name; empty where the plan has none of that name.
    pub fn i32s(&self, name: &str) -> &[i32] {
        match self.tensors.iter().find(|(own, _)| *own == name) {
            Some((_, HostTensor::I32(values))) => values,
            _ => &[],
        }
    }
}

/// The seed and the step that dropout draws by, beside the samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Draw {
    pub seed: u64,
    pub step: u64,
}

/// Writes a batch into the inputs of its plan.
pub fn write(session: &mut Session, batch: &Batch, draw: Draw) -> Result<(), RuntimeError> {
    write_tensors(session, batch.role, &batch.tensors)?;
    let rng = input_path(batch.role, "rng");
    if session.plans().slot(&rng).is_some() {
        session.write_i32(&rng, &[draw.seed as i32, (draw.seed >> 32) as i32, draw.step as i32])?;
    }
    Ok(())
}

/// Writes inputs of a plan by name.
pub fn write_tensors(
    session: &mut Session,
    role: Role,
    tensors: &[(&'static str, HostTensor)],
) -> Result<(), RuntimeError> {
    for (name, values) in tensors {
        let path = input_path(role, name);
        match values {
            HostTensor::I32(values) => session.write_i32(&path, values)?,
            HostTensor::F32(values) => session.write_f32(&path, values)?,
            HostTensor::U8(values) => session.write_u8(&path, values)?,
            HostTensor::Stored(bytes) => session.write_slot(&path, bytes)?,
        }
    }
    Ok(())
}

/// The inputs that the plans of one kind have by name. A task makes no tensor that no plan reads.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    names: BTreeSet<String>,
    /// Of a token: one, or time, height and width.
    position_axes: usize,
}

impl Inputs {
    pub fn of(plans: &PlanSet, role: Role) -> Inputs {
        let prefix = input_path(role, "");
        let inputs = plans.slots.iter().filter(|slot| slot.class == Class::Input);
        let named: Vec<_> =
            inputs.filter_map(|slot| Some((slot.path.strip_prefix(&prefix)?, &slot.ty.dims))).collect();
        let positions = named.iter().find(|(name, _)| *name == "positions");
        Inputs {
            position_axes: positions.map_or(1, |(_, dims)| dims[0]),
            names: named.into_iter().map(|(name, _)| name.to_string()).collect(),
        }
    }

    /// Positions on every axis that the plans have.
    pub fn positions(&self, positions: &[[i32; 3]]) -> HostTensor {
        let axis = |axis: usize| positions.iter().map(move |position| position[axis]);
        HostTensor::I32((0..self.position_axes.max(1)).flat_map(axis).collect())
    }

    /// Positions of text, which are the same on every axis that the plans have.
    pub fn text_positions(&self, positions: &[i32]) -> HostTensor {
        HostTensor::I32(positions.repeat(self.position_axes.max(1)))
    }

    pub fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// The tensors among these that the plans have; each is made only then.
    pub fn only<'a>(
        &self,
        tensors: impl IntoIterator<Item = (&'static str, Box<dyn FnOnce() -> HostTensor + 'a>)>,
    ) -> Vec<(&'static str, HostTensor)> {
        let wanted = tensors.into_iter().filter(|(name, _)| self.has(name));
        wanted.map(|(name, make)| (name, make())).collect()
    }
}

/// Where the batches of a run's updates come from. Batches are made while the device works: an update is begun, then its
/// batches are taken one by one.
pub trait BatchSource {
    /// Begins the next update.
    fn begin_update(&mut self);

    /// The next batch of the update, or `None` behind its last.
    fn next_batch(&mut self) -> Result<Option<Batch>, Failure>;

    /// The tokens of the update on all ranks, real ones and computed ones, where this rank's batches have `own`. Known without a
    /// word of the other ranks: every source knows the order of all samples.
    fn of_all_ranks(&self, own: [usize; 2]) -> [usize; 2] {
        own
    }

    /// The numbers of the examples of the update that was begun, of sources that have numbered examples.
    fn numbers(&self) -> Vec<usize> {
        vec![]
    }

    /// Where the update after the last whole one begins, as a checkpoint keeps it. Null stands for what this rank does not know;
    /// the ranks know all of it together.
    fn cursor(&self) -> Value;

    /// The index of the next sample in the series of all.
    fn sample(&self) -> u64;

    /// How long updates have waited for their data so far.
    fn waited(&self) -> Waited;
}

/// A sample as people see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// The batch that has its results, and its place there.
    pub batch: usize,
    pub at: usize,
    pub shown: ShownAs,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShownAs {
    Tokens(Vec<u32>),
    /// Rows and columns of an image, and three bytes a pixel.
    Pixels {
        size: [usize; 2],
        rgb: Vec<u8>,
    },
}

/// Samples that are read once and in order: what is evaluated, or asked about.
pub trait EvalSet {
    fn samples(&self) -> usize;

    /// Batches for a plan with room for `capacity` samples.
    fn batches(&self, capacity: usize) -> usize;

    fn batch(&self, number: usize, capacity: usize, inputs: &Inputs) -> Result<Batch, Failure>;

    /// A sample by its number as people see it, and where its results are among those of batches for `capacity` samples. `None`
    /// where a sample is nothing to look at by itself.
    fn shown(&self, _number: usize, _capacity: usize) -> Result<Option<Shown>, Failure> {
        Ok(None)
    }

    /// The bytes of text that a predicted token stands for in the mean, where it is text and the vocabulary tells.
    fn bytes_per_token(&self, _vocabulary: Option<&Vocabulary>) -> Option<f64> {
        None
    }
}
