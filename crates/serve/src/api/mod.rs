//! Requests and answers as JSON, in the forms of OpenAI's API.

pub mod chat;
pub mod completions;
pub mod error;
mod fields;
pub mod logprobs;
mod parameters;

pub use fields::Fields;
pub use parameters::{Asked, Delivery};

use flatout_train::infer::generate::Finish;
use serde_json::{Value, json};

/// What a request asked for, in whose shape the answer is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Completions,
    Chat,
}

/// The fields that all parts of an answer begin with.
#[derive(Clone, Debug)]
pub struct Head {
    pub endpoint: Endpoint,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

impl Head {
    fn object(&self, is_part: bool) -> &'static str {
        match (self.endpoint, is_part) {
            (Endpoint::Completions, _) => "text_completion",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Chat, true) => "chat.completion.chunk",
        }
    }

    /// An answer, or a part of one that is a stream.
    pub fn answer(&self, is_part: bool, choices: Vec<Value>, usage: Option<Usage>) -> Value {
        let mut answer = json!({
            "id": self.id, "object": self.object(is_part), "created": self.created, "model": self.model, "choices": choices,
        });
        if let Some(usage) = usage {
            answer["usage"] = usage.json();
        }
        answer
    }
}

/// Tokens that were read and made. As the API has it, every token that was drawn counts, also those of the string or the token that
/// ended a text and that the text is without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: usize,
    pub completion: usize,
}

impl Usage {
    fn json(self) -> Value {
        let Usage { prompt, completion } = self;
        json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion })
    }
}

/// The word for why a text ended.
pub fn finish_reason(finish: Option<&Finish>) -> Value {
    match finish {
        None => Value::Null,
        Some(Finish::Length) => "length".into(),
        Some(Finish::Token(_) | Finish::Text) => "stop".into(),
    }
}
