//! The plans that generate a run's text samples during training: they are compiled along with the training plans and read the
//! same weights, with a cache for one sequence.

use flatout_ir::{Program, Role};
use flatout_models::form::Form;

use crate::config::{Config, Task};

/// Tokens of a prompt that are read per run of the plan.
const CHUNK: usize = 64;
/// Upper bound of the tokens that a chat template adds to a question.
const AROUND_QUESTION: usize = 256;

/// Sizes of the plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleSizes {
    /// Tokens of prompt and text together.
    pub capacity: usize,
    /// Tokens of a prompt that are read per run of the plan.
    pub chunk: usize,
}

/// Sizes for what a config asks for, before the tokeniser is known: a text has at most as many tokens as bytes.
pub fn room(config: &Config) -> Option<SampleSizes> {
    let longest = config.samples.prompts.iter().map(String::len).max()?;
    let around = if config.data.task == Task::Text { 1 } else { AROUND_QUESTION };
    let capacity = (longest + around + config.samples.max_tokens).min(config.model.tokens());
    Some(SampleSizes { capacity, chunk: CHUNK.min(capacity) })
}

/// The programs; empty if no samples of text are asked for.
pub fn programs(config: &Config) -> Vec<Program> {
    let Some(SampleSizes { capacity, chunk }) = room(config) else { return vec![] };
    let program = |role: Role, tokens: usize| {
        let form = Form::Cached { sequences: 1, tokens, capacity, read: 1, seen: None };
        Program { role, graph: config.model.build(form) }
    };
    vec![program(Role::Prefill, chunk), program(Role::Decode, 1)]
}
