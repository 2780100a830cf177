//! The parameters that completions and chat have in common: sampling, stop conditions and delivery.

use flatout_http::random_word;
use flatout_train::infer::sampling::{Adjustments, Sampling};
use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;

/// The most continuations of one prompt.
const MOST_COPIES: u64 = 128;
/// The most stop strings, and the most bytes of one.
const MOST_STOPS: usize = 16;
const MOST_STOP_BYTES: usize = 1024;
/// The most stop tokens.
const MOST_STOP_TOKENS: usize = 64;
/// The most likeliest tokens that are reported for a token.
pub(super) const MOST_LOGPROBS: u64 = 20;
/// The most tokens with a bias.
const MOST_BIASES: usize = 1024;

/// The parameters of a request besides its prompt.
#[derive(Clone, Debug)]
pub struct Parameters {
    pub sampling: Sampling,
    /// Continuations of each prompt.
    pub copies: u32,
    pub stops: Vec<String>,
    pub stop_tokens: Vec<u32>,
    pub adjustments: Adjustments,
    pub delivery: Delivery,
}

/// Delivery of texts: as one response or as a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Whole,
    Stream { with_usage: bool },
}

/// A field that would change the response and is not supported: its name, the values that have no effect, and the reason.
type Unsupported = (&'static str, fn(&Value) -> bool, &'static str);

const UNSUPPORTED: [Unsupported; 31] = [
    ("tools", is_empty, "this server calls no tools"),
    ("functions", is_empty, "this server calls no tools"),
    ("tool_choice", |value| value == "none" || value == "auto", "this server calls no tools"),
    ("function_call", |value| value == "none" || value == "auto", "this server calls no tools"),
    ("suffix", is_empty, "texts are continued and not filled in"),
    ("response_format", |value| value["type"] == "text", "answers are text and follow no schema"),
    ("modalities", |value| *value == serde_json::json!(["text"]), "answers are text"),
    ("audio", never, "answers are text"),
    ("web_search_options", never, "this server searches nothing"),
    ("min_p", is_zero, "use top_p or top_k"),
    ("min_tokens", is_zero, "a text ends where the model ends it"),
    ("repetition_penalty", |value| value.as_f64() == Some(1.0), "use frequency_penalty or presence_penalty"),
    ("length_penalty", |value| value.as_f64() == Some(1.0), "there is no beam search"),
    ("use_beam_search", |value| *value == false, "there is no beam search"),
    ("ignore_eos", |value| *value == false, "a text ends where the model ends it"),
    ("guided_json", never, "answers follow no schema"),
    ("guided_regex", never, "answers follow no pattern"),
    ("guided_choice", never, "answers follow no pattern"),
    ("guided_grammar", never, "answers follow no grammar"),
    ("structured_outputs", never, "answers follow no schema"),
    ("prompt_logprobs", never, "use echo with logprobs"),
    ("chat_template", never, "the template is the model's own"),
    ("chat_template_kwargs", is_empty, "the template is given nothing but messages"),
    ("add_generation_prompt", |value| *value == true, "an answer begins a message of its own"),
    ("skip_special_tokens", |value| *value == true, "texts have no special tokens"),
    ("include_stop_str_in_output", |value| *value == false, "a text ends before the string that ends it"),
    ("bad_words", is_empty, "use logit_bias"),
    ("allowed_token_ids", is_empty, "use logit_bias"),
    ("truncate_prompt_tokens", never, "a prompt is read whole: shorten it yourself"),
    ("typical_p", |value| value.as_f64() == Some(1.0), "use top_p or top_k"),
    ("continue_final_message", |value| *value == false, "an answer begins a message of its own"),
];

fn never(_: &Value) -> bool {
    false
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

impl Parameters {
    /// Reads the fields. `max_tokens` has the names of the field for the most tokens of a text; where it is absent, the default
    /// is `absent`.
    pub fn read(fields: &Fields<'_>, max_tokens: &[&str], absent: usize) -> Result<Parameters, ApiError> {
        for (name, has_no_effect, why) in UNSUPPORTED {
            if fields.get(name).is_some_and(|value| !has_no_effect(value)) {
                return Err(ApiError::field(name, format!("`{name}` is not supported: {why}")));
            }
        }
        let mut most = absent;
        for name in max_tokens {
            if let Some(given) = fields.whole(name)? {
                most = given as usize;
                break;
            }
        }
        let copies = match fields.whole("n")? {
            None => 1,
            Some(copies @ 1..=MOST_COPIES) => copies as u32,
            Some(_) => return Err(ApiError::field("n", format!("`n` must be from 1 to {MOST_COPIES}"))),
        };
        if fields.whole("best_of")?.is_some_and(|best_of| best_of != u64::from(copies)) {
            return Err(ApiError::field("best_of", "`best_of` is not supported: ask for n texts and choose"));
        }
        let top_p = fields.number("top_p", [0.0, 1.0], 1.0)?;
        let seed = match fields.get("seed") {
            None => u64::from_str_radix(&random_word(8), 16).expect("16 digits"),
            Some(seed) => seed
                .as_i64()
                .map(|seed| seed as u64)
                .or(seed.as_u64())
                .ok_or_else(|| ApiError::field("seed", "`seed` must be a whole number"))?,
        };
        let sampling = Sampling {
            temperature: fields.number("temperature", [0.0, 100.0], 1.0)?,
            top_k: match fields.get("top_k").and_then(Value::as_i64) {
                // As in other servers, -1 means all.
                Some(-1) => 0,
                _ => fields.whole("top_k")?.unwrap_or(0) as usize,
            },
            // With the least value only the likeliest token remains.
            top_p: top_p.max(f64::MIN_POSITIVE),
            seed,
            max_tokens: most,
        };
        let adjustments = Adjustments {
            presence: fields.number("presence_penalty", [-2.0, 2.0], 0.0)?,
            frequency: fields.number("frequency_penalty", [-2.0, 2.0], 0.0)?,
            bias: bias(fields)?,
        };
        let delivery = match fields.flag("stream")? {
            false => Delivery::Whole,
            true => {
                let usage = fields.get("stream_options").and_then(|options| options.get("include_usage"));
                Delivery::Stream { with_usage: usage.and_then(Value::as_bool).unwrap_or(false) }
            }
        };
        let stop_list = fields.list("stop_token_ids")?.map_or(&[][..], |list| list);
        if stop_list.len() > MOST_STOP_TOKENS {
            let sentence = format!("`stop_token_ids` has more than {MOST_STOP_TOKENS} tokens");
            return Err(ApiError::field("stop_token_ids", sentence));
        }
        let stop_tokens = tokens(stop_list, "stop_token_ids")?;
        Ok(Parameters { sampling, copies, stops: stops(fields)?, stop_tokens, adjustments, delivery })
    }
}

/// Reads token ids from a list.
pub(super) fn tokens(list: &[Value], name: &str) -> Result<Vec<u32>, ApiError> {
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    let all: Option<Vec<u32>> = list.iter().map(token).collect();
    all.ok_or_else(|| {
        ApiError::field(name, format!("`{name}` must hold token ids: whole numbers of at least 0"))
    })
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let wrong = |sentence: String| Err(ApiError::field("stop", sentence));
    let all: Option<Vec<String>> = match fields.get("stop") {
        None => return Ok(vec![]),
        Some(Value::String(one)) => Some(vec![one.clone()]),
        Some(Value::Array(list)) => list.iter().map(|stop| stop.as_str().map(String::from)).collect(),
        Some(_) => None,
    };
    match all {
        None => wrong("`stop` must be a string or a list of strings".into()),
        Some(all) if all.iter().any(String::is_empty) => {
            wrong("`stop` has an empty string, which ends every text".into())
        }
        Some(all) if all.len() > MOST_STOPS => wrong(format!("`stop` has more than {MOST_STOPS} strings")),
        Some(all) if all.iter().any(|stop| stop.len() > MOST_STOP_BYTES) => {
            wrong(format!("`stop` has a string of more than {MOST_STOP_BYTES} bytes"))
        }
        Some(all) => Ok(all),
    }
}

fn bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let wrong = || {
        let sentence = "`logit_bias` must be an object of token ids, each with a number from -100 to 100";
        ApiError::field("logit_bias", sentence)
    };
    let Some(given) = fields.get("logit_bias") else { return Ok(vec![]) };
    let given = given.as_object().filter(|given| given.len() <= MOST_BIASES).ok_or_else(wrong)?;
    let pair = |(token, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias))?;
        Some((token.parse().ok()?, bias as f32))
    };
    given.iter().map(|given| pair(given).ok_or_else(wrong)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Parameters, ApiError> {
        Parameters::read(&Fields::of(&value).unwrap(), &["max_completion_tokens", "max_tokens"], 16)
    }

    #[test]
    fn fields_have_the_meanings_of_the_api() {
        let parameters = read(json!({})).unwrap();
        assert_eq!(
            (parameters.copies, parameters.sampling.max_tokens, parameters.delivery),
            (1, 16, Delivery::Whole)
        );
        assert_eq!(
            (parameters.sampling.temperature, parameters.sampling.top_p, parameters.sampling.top_k),
            (1.0, 1.0, 0)
        );
        assert_ne!(
            parameters.sampling.seed,
            read(json!({})).unwrap().sampling.seed,
            "seeds are random where none is given"
        );
        let parameters = read(json!({
            "temperature": 0, "top_p": 0.5, "top_k": -1, "seed": -1, "n": 3, "best_of": 3, "max_tokens": 0, "stop": "x", "stream": true,
            "stream_options": { "include_usage": true }, "logit_bias": { "5": -100 }, "presence_penalty": 1, "user": "somebody",
            "tools": [], "tool_choice": "auto", "suffix": null, "response_format": { "type": "text" }, "unheard_of": 7,
            "skip_special_tokens": true, "include_stop_str_in_output": false, "bad_words": [], "allowed_token_ids": null,
            "add_generation_prompt": true, "typical_p": 1.0, "stop_token_ids": vec![5; 64],
        }))
        .unwrap();
        assert_eq!(
            (parameters.copies, parameters.sampling.max_tokens, parameters.sampling.seed),
            (3, 0, u64::MAX)
        );
        assert_eq!(parameters.delivery, Delivery::Stream { with_usage: true });
        assert_eq!(
            (parameters.stops, parameters.adjustments.bias),
            (vec!["x".to_string()], vec![(5, -100.0)])
        );
        assert_eq!(
            read(json!({ "max_completion_tokens": 7, "max_tokens": 9 })).unwrap().sampling.max_tokens,
            7
        );
    }

    #[test]
    fn unsupported_fields_are_refused_by_name() {
        for (name, value) in [
            ("tools", json!([{ "type": "function" }])),
            ("tool_choice", json!("required")),
            ("suffix", json!("end")),
            ("best_of", json!(4)),
            ("response_format", json!({ "type": "json_object" })),
            ("guided_json", json!({})),
            ("repetition_penalty", json!(1.2)),
            ("min_p", json!(0.1)),
            ("n", json!(0)),
            ("n", json!(1000)),
            ("temperature", json!(-1)),
            ("temperature", json!("hot")),
            ("top_p", json!(1.5)),
            ("max_tokens", json!(-5)),
            ("stop", json!([""])),
            ("stop", json!(7)),
            ("seed", json!(1.5)),
            ("logit_bias", json!({ "x": 1 })),
            ("logit_bias", json!({ "1": 1000 })),
            ("stream", json!("yes")),
            ("presence_penalty", json!(3)),
            ("stop_token_ids", json!([-1])),
            ("stop_token_ids", json!(vec![5; 65])),
            ("stop", json!(["x".repeat(1025)])),
            ("stop", json!(vec!["x"; 17])),
            ("skip_special_tokens", json!(false)),
            ("include_stop_str_in_output", json!(true)),
            ("bad_words", json!(["no"])),
            ("allowed_token_ids", json!([5])),
            ("truncate_prompt_tokens", json!(9)),
            ("add_generation_prompt", json!(false)),
            ("typical_p", json!(0.5)),
        ] {
            let error = read(json!({ name: value })).expect_err(name);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(name)), "{error:?}");
            assert!(error.message.contains(name), "{error:?}");
        }
    }
}
