//! A micro-batch as named host tensors, the source of batches, and writing a batch into the inputs of a plan.

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
    /// Elements in the input's own type as stored in a file, little-endian.
    Stored(Vec<u8>),
}

/// The inputs of one run of a plan. The training loop, evaluation and measurement see nothing else of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The plan it is for.
    pub role: Role,
    /// Index of its lane among those of the rank.
    pub lane: usize,
    /// The plan's inputs by name, except `rng`, which the update sets.
    pub tensors: Vec<(&'static str, HostTensor)>,
    /// The global index of each sample, which is part of the key of its dropout.
    pub samples: Vec<u64>,
    /// The example of each target, where answers are evaluated; `None` where there is no target.
    pub answers: Vec<Option<u32>>,
    /// The plural noun for samples in messages: rows, examples, images.
    pub unit: &'static str,
    /// Tokens that are learned from or read, without padding.
    pub real_tokens: usize,
    /// Tokens that are computed, padding included.
    pub computed_tokens: usize,
    /// Epochs of the data read, this batch included.
    pub epoch: f64,
    /// Time spent waiting for the batch.
    pub waited: Waited,
    /// Sentences about samples that could not be used; they keep their place without a label.
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

/// Seed and step of the random numbers of dropout.
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

/// The inputs of the plans of one kind, by name. A task makes no tensor that no plan reads.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    names: BTreeSet<String>,
    /// Axes of a token's position: one, or time, height and width.
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

    /// Positions on every axis of the plans.
    pub fn positions(&self, positions: &[[i32; 3]]) -> HostTensor {
        let axis = |axis: usize| positions.iter().map(move |position| position[axis]);
        HostTensor::I32((0..self.position_axes.max(1)).flat_map(axis).collect())
    }

    /// Positions of text, which are equal on every axis of the plans.
    pub fn text_positions(&self, positions: &[i32]) -> HostTensor {
        HostTensor::I32(positions.repeat(self.position_axes.max(1)))
    }

    pub fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Those of these tensors that the plans have; the others are not even made.
    pub fn only<'a>(
        &self,
        tensors: impl IntoIterator<Item = (&'static str, Box<dyn FnOnce() -> HostTensor + 'a>)>,
    ) -> Vec<(&'static str, HostTensor)> {
        let wanted = tensors.into_iter().filter(|(name, _)| self.has(name));
        wanted.map(|(name, make)| (name, make())).collect()
    }
}

/// The source of batches for a run's updates. Batches are prepared while the device computes: the caller begins an update, then
/// takes its batches one by one.
pub trait BatchSource {
    /// Begins the next update.
    fn begin_update(&mut self);

    /// The next batch of the update, or `None` after its last one.
    fn next_batch(&mut self) -> Result<Option<Batch>, Failure>;

    /// The real and the computed tokens of the update on all ranks, where this rank's batches have `own`. Needs no communication:
    /// every source knows the order of all samples.
    fn of_all_ranks(&self, own: [usize; 2]) -> [usize; 2] {
        own
    }

    /// The numbers of the examples in the present update, for sources with numbered examples.
    fn numbers(&self) -> Vec<usize> {
        vec![]
    }

    /// Position at which the update after the last complete one begins, in the form of a checkpoint. Null marks what this rank
    /// does not know; the cursors of all ranks together are complete.
    fn cursor(&self) -> Value;

    /// The global index of the next sample.
    fn sample(&self) -> u64;

    /// Time that updates have spent waiting for data so far.
    fn waited(&self) -> Waited;
}

/// A sample in a form that people can look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// The batch with its results, and its position there.
    pub batch: usize,
    pub at: usize,
    pub shown: ShownAs,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShownAs {
    Tokens(Vec<u32>),
    /// Rows and columns of an image, and its pixels at three bytes each.
    Pixels {
        size: [usize; 2],
        rgb: Vec<u8>,
    },
}

/// Samples that are read once and in order, for evaluation or prediction.
pub trait EvalSet {
    fn samples(&self) -> usize;

    /// Number of batches for a plan with capacity for `capacity` samples.
    fn batches(&self, capacity: usize) -> usize;

    fn batch(&self, number: usize, capacity: usize, inputs: &Inputs) -> Result<Batch, Failure>;

    /// A sample in a form that people can look at, and the position of its results among batches of `capacity` samples. `None` if
    /// a sample cannot be shown by itself.
    fn shown(&self, _number: usize, _capacity: usize) -> Result<Option<Shown>, Failure> {
        Ok(None)
    }

    /// Mean bytes of text per predicted token, where tokens are text and the vocabulary is known.
    fn bytes_per_token(&self, _vocabulary: Option<&Vocabulary>) -> Option<f64> {
        None
    }
}
