//! The plans by which a run writes samples of text while it trains: they stand beside those of training and read the same weights, over
//! a cache of one sequence.

use flatout_ir::{Program, Role};
use flatout_models::form::Form;

use crate::config::{Config, Task};

/// Tokens of a prompt that are read at once.
const CHUNK: usize = 64;
/// Tokens that a chat template may put around a question.
const AROUND_QUESTION: usize = 256;

/// How much the plans hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Tokens of prompt and text together.
    pub capacity: usize,
    /// Tokens of a prompt that are read at once.
    pub chunk: usize,
}

/// Room for what a config asks for, before any tokeniser is there: a text has at most as many tokens as bytes.
pub fn room(config: &Config) -> Option<Room> {
    let longest = config.samples.prompts.iter().map(String::len).max()?;
    let around = if config.data.task == Task::Text { 1 } else { AROUND_QUESTION };
    let capacity = (longest + around + config.samples.max_tokens).min(config.model.tokens());
    Some(Room { capacity, chunk: CHUNK.min(capacity) })
}

/// The programs; none where no samples of text are asked for.
pub fn programs(config: &Config) -> Vec<Program> {
    let Some(Room { capacity, chunk }) = room(config) else { return vec![] };
    let program = |role: Role, tokens: usize| {
        let form = Form::Cached { sequences: 1, tokens, capacity, read: 1, seen: None };
        Program { role, graph: config.model.build(form) }
    };
    vec![program(Role::Prefill, chunk), program(Role::Decode, 1)]
}
