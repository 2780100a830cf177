//! `/v1/completions`: requests and responses of text completion.

use flatout_train::infer::generate::{Finish, ScoredToken};
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::finish_reason;
use super::logprobs::{Pieces, TextOffset, of_completion};
use super::parameters::{MOST_LOGPROBS, Parameters, tokens};

/// A completion request.
#[derive(Clone, Debug)]
pub struct Completions {
    pub prompts: Vec<Prompt>,
    pub parameters: Parameters,
    /// Where log-probabilities are requested: how many of the likeliest tokens each has.
    pub top: Option<usize>,
    /// Whether the response begins with the prompt.
    pub echo: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// The default of `max_tokens`.
const MAX_TOKENS: usize = 16;

impl Completions {
    pub fn read(body: &Value) -> Result<Completions, ApiError> {
        let fields = Fields::of(body)?;
        let parameters = Parameters::read(&fields, &["max_tokens"], MAX_TOKENS)?;
        let top = match fields.whole("logprobs")? {
            Some(top) if top > MOST_LOGPROBS => {
                return Err(ApiError::field(
                    "logprobs",
                    format!("`logprobs` must be at most {MOST_LOGPROBS}"),
                ));
            }
            top => top.map(|top| top as usize),
        };
        Ok(Completions { prompts: prompts(&fields)?, parameters, top, echo: fields.flag("echo")? })
    }
}

/// A text, token ids, or a list of either.
fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || {
        let sentence =
            "`prompt` must be a string, a list of strings, a list of token ids, or a list of such lists";
        ApiError::field("prompt", sentence)
    };
    let list = match fields.get("prompt") {
        None => return Err(ApiError::field("prompt", "`prompt` is missing: give a text to continue")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(_) => return Err(wrong()),
    };
    if list.iter().all(Value::is_number) {
        return Ok(vec![Prompt::Tokens(tokens(list, "prompt")?)]);
    }
    let one = |value: &Value| match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(list) => Ok(Prompt::Tokens(tokens(list, "prompt")?)),
        _ => Err(wrong()),
    };
    list.iter().map(one).collect()
}

/// A choice of a response, or a part of one in a stream.
pub fn choice(
    index: usize,
    text: &str,
    scored: Option<(&Pieces, &[ScoredToken], &mut TextOffset)>,
    finish: Option<&Finish>,
) -> Value {
    let logprobs = scored.map(|(pieces, scored, place)| {
        // The token that ended a text was sampled too, and is in these lists.
        let ended = match finish {
            Some(Finish::Token(ended)) => Some(ended),
            _ => None,
        };
        of_completion(pieces, &scored.iter().chain(ended).collect::<Vec<_>>(), place)
    });
    json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(finish) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_come_in_four_forms() {
        let read = |prompt: Value| Completions::read(&json!({ "prompt": prompt })).map(|read| read.prompts);
        let [text, tokens] = [Prompt::Text("a".into()), Prompt::Tokens(vec![1, 2])];
        assert_eq!(read(json!("a")), Ok(vec![text.clone()]));
        assert_eq!(read(json!(["a", "a"])), Ok(vec![text.clone(), text.clone()]));
        assert_eq!(read(json!([1, 2])), Ok(vec![tokens.clone()]));
        assert_eq!(read(json!([[1, 2], [1, 2]])), Ok(vec![tokens.clone(), tokens]));
        for wrong in [json!(null), json!(7), json!([]), json!([1, "a"]), json!([-1]), json!([1.5]), json!({})]
        {
            let error = read(wrong.clone()).expect_err("no prompt");
            assert_eq!(error.param.as_deref(), Some("prompt"), "{wrong}: {error:?}");
        }
        let error = Completions::read(&json!({ "prompt": "a", "logprobs": 21 })).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("logprobs"));
    }
}
