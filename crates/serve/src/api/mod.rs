//! Requests and responses as JSON, in the formats of OpenAI's API.

pub mod chat;
pub mod completions;
pub mod error;
mod fields;
pub mod logprobs;
mod parameters;

pub use fields::Fields;
pub use parameters::{Delivery, Parameters};

use flatout_train::infer::generate::Finish;
use serde_json::{Value, json};

/// The endpoint of a request, which determines the format of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Completions,
    Chat,
}

/// The fields that all parts of a response have.
#[derive(Clone, Debug)]
pub struct Head {
    pub endpoint: Endpoint,
    pub id: String,
    /// Unix time in seconds.
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

    /// A response, or a part of one in a stream.
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

/// Tokens of prompts and completions. As in the API, every sampled token counts, including those of a stop string or token that
/// are not part of the text.
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

/// The API's word for the reason why a text ended.
pub fn finish_reason(finish: Option<&Finish>) -> Value {
    match finish {
        None => Value::Null,
        Some(Finish::Length) => "length".into(),
        Some(Finish::Token(_) | Finish::Text) => "stop".into(),
    }
}
