//! Turns HTTP requests into jobs, on the threads of the server: parses JSON, tokenises texts, and refuses what cannot be answered
//! before the worker sees it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use flatout_http::{Answer, Reply, Request as HttpRequest, random_word};
use flatout_train::infer::generate::{Prompt, Request};
use serde_json::{Value, json};

use crate::api::chat::{Chat, Message};
use crate::api::completions::{Completions, Prompt as TextOrTokens};
use crate::api::error::ApiError;
use crate::api::{Delivery, Endpoint, Head, Parameters};
use crate::model::{Conversation, Model};
use crate::outlet::{Outlet, Texts};
use crate::worker::Job;

/// The most texts that may wait or be generated at once.
pub const MOST_TEXTS: usize = 256;
/// The most log-probabilities in a response that is not streamed.
const MOST_NUMBERS: usize = 1 << 21;
/// The most image tokens over all texts of a request with several: each text reads the images by itself, although they are held
/// once.
const MOST_IMAGE_TOKENS: usize = 1 << 16;

pub struct Front {
    model: Model,
    jobs: Sender<Job>,
    /// Number of texts that wait or are generated.
    texts: Arc<AtomicUsize>,
    /// Whether new requests are refused because the server is ending.
    pub is_closing: AtomicBool,
}

/// The health check, which is answered without a worker thread.
pub fn health(request: &HttpRequest) -> Option<Answer> {
    let is_asked = request.path == "/health" && request.body.is_none();
    is_asked.then(|| Answer::json(json!({ "status": "ok" }).to_string()))
}

/// A reservation for some texts, released when this is dropped.
pub struct Ticket {
    texts: Arc<AtomicUsize>,
    count: usize,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.texts.fetch_sub(self.count, Ordering::AcqRel);
    }
}

impl Front {
    pub fn new(model: Model, jobs: Sender<Job>) -> Front {
        Front { model, jobs, texts: Arc::default(), is_closing: AtomicBool::new(false) }
    }

    /// Routes a request.
    pub fn reply(&self, request: &HttpRequest) -> Reply {
        let replied = match (request.path.as_str(), &request.body) {
            ("/v1/models", None) => Ok(Answer::json(self.models().to_string()).into()),
            ("/v1/completions", Some(body)) => self.completions(body),
            ("/v1/chat/completions", Some(body)) => self.chat(body),
            ("/tokenize", Some(body)) => self.tokenize(body),
            ("/v1/completions" | "/v1/chat/completions" | "/tokenize", None) => {
                Err(ApiError::with_status(405, "use POST here"))
            }
            ("/health" | "/v1/models", Some(_)) => Err(ApiError::with_status(405, "use GET here")),
            (path, _) => match path.strip_prefix("/v1/models/") {
                Some(name) if name == self.model.name => {
                    Ok(Answer::json(self.described().to_string()).into())
                }
                Some(name) => Err(self.unknown(name)),
                None => Err(ApiError::with_status(
                    404,
                    "there is nothing here: this server has /v1/models, /v1/completions and /v1/chat/completions",
                )),
            },
        };
        replied.unwrap_or_else(|error: ApiError| error.answer().into())
    }

    fn described(&self) -> Value {
        let Model { name, created, capacity, .. } = &self.model;
        json!({ "id": name, "object": "model", "created": created, "owned_by": "flatout", "max_model_len": capacity })
    }

    fn models(&self) -> Value {
        json!({ "object": "list", "data": [self.described()] })
    }

    fn unknown(&self, name: &str) -> ApiError {
        let sentence = format!("there is no model {name:?} here: this server has {:?}", self.model.name);
        ApiError { param: Some("model".into()), ..ApiError::with_status(404, sentence) }
            .with_code("model_not_found")
    }

    /// Parses a body and checks that it names this model, or none.
    fn read(&self, body: &[u8]) -> Result<Value, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad(format!("the body is not JSON: {error}")))?;
        match &value["model"] {
            Value::Null => Ok(value),
            Value::String(name) if *name == self.model.name => Ok(value),
            Value::String(name) => Err(self.unknown(name)),
            _ => Err(ApiError::field("model", "`model` must be a string")),
        }
    }

    /// Responds with the tokens of a text.
    fn tokenize(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let value = self.read(body)?;
        let prompt = &value["prompt"];
        let text = prompt.as_str().ok_or_else(|| ApiError::field("prompt", "`prompt` must be a string"))?;
        self.check_bytes(text.len())?;
        let tokens = self.model.tokens(&TextOrTokens::Text(text.into()))?;
        let count = tokens.len();
        let response = json!({ "tokens": tokens, "count": count, "max_model_len": self.model.capacity });
        Ok(Answer::json(response.to_string()).into())
    }

    fn completions(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let Completions { prompts, parameters, top, echo } = Completions::read(&self.read(body)?)?;
        let ticket = self.ticket(prompts.len() * parameters.copies as usize)?;
        let mut requests = vec![];
        let mut echoes = vec![];
        let mut read = 0;
        let mut numbers = 0;
        // Equal prompts continue the numbering of copies, so that their texts differ like those of one prompt.
        let mut seen: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
        for prompt in &prompts {
            if let TextOrTokens::Text(text) = prompt {
                self.check_bytes(text.len())?;
            }
            let tokens = self.model.tokens(prompt)?;
            read += tokens.len();
            self.check(&tokens, &parameters)?;
            let text = || match prompt {
                TextOrTokens::Text(text) => text.clone(),
                TextOrTokens::Tokens(tokens) => self.model.vocabulary.decode(tokens),
            };
            let echoed = if echo { text() } else { String::new() };
            let scores = echo && top.is_some();
            numbers += self.numbers(&tokens, &parameters, top, scores);
            let first = seen.entry(tokens.clone()).or_default();
            let copies = *first..*first + parameters.copies;
            *first = copies.end;
            for copy in copies {
                let plain = self.request(tokens.clone().into(), &parameters, copy, top);
                requests.push(Request { echo: scores, ..plain });
                echoes.push(echoed.clone());
            }
        }
        check_numbers(numbers, &parameters)?;
        let texts = Texts { prompt_tokens: read, echoes, has_logprobs: top.is_some() };
        self.send(Endpoint::Completions, requests, texts, &parameters, ticket)
    }

    fn chat(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let Chat { messages, parameters, top } = Chat::read(&self.read(body)?, self.model.capacity)?;
        let ticket = self.ticket(parameters.copies as usize)?;
        self.check_bytes(messages.iter().map(Message::text_bytes).sum())?;
        let Conversation { prompt, pictures, image_tokens, end } = self.model.conversation(&messages)?;
        self.check(&prompt.tokens, &parameters)?;
        check_numbers(self.numbers(&prompt.tokens, &parameters, top, false), &parameters)?;
        let copies = parameters.copies as usize;
        if copies > 1 && copies * image_tokens > MOST_IMAGE_TOKENS {
            let sentence = format!(
                "{copies} texts about images of {image_tokens} tokens are too many at once: ask for a smaller n, or show less"
            );
            return Err(ApiError::field("n", sentence));
        }
        let request = |copy: u32| {
            let mut request = self.request(prompt.clone(), &parameters, copy, top);
            request.stops.extend(end);
            Request { pictures: pictures.clone(), ..request }
        };
        let requests: Vec<Request> = (0..parameters.copies).map(request).collect();
        let echoes = vec![String::new(); requests.len()];
        let texts = Texts { prompt_tokens: prompt.tokens.len(), echoes, has_logprobs: top.is_some() };
        self.send(Endpoint::Chat, requests, texts, &parameters, ticket)
    }

    fn request(&self, prompt: Prompt, parameters: &Parameters, copy: u32, top: Option<usize>) -> Request {
        Request {
            copy,
            top,
            stops: parameters.stop_tokens.clone(),
            text: Some(parameters.stops.clone()),
            adjustments: parameters.adjustments.clone(),
            ..Request::new(prompt, parameters.sampling)
        }
    }

    /// Refuses a text that is too long for any tokenisation, before it is tokenised.
    fn check_bytes(&self, bytes: usize) -> Result<(), ApiError> {
        let Model { capacity, most_bytes, .. } = self.model;
        if bytes <= most_bytes {
            return Ok(());
        }
        let sentence = format!(
            "the prompt has {bytes} bytes, and the {capacity} tokens that this server reads of a request have at most {most_bytes}: \
             shorten it, or start the server with more --tokens"
        );
        Err(ApiError::bad(sentence).with_code("context_length_exceeded"))
    }

    /// The most log-probabilities that the response for a prompt may have.
    fn numbers(&self, prompt: &[u32], parameters: &Parameters, top: Option<usize>, scores: bool) -> usize {
        let made = parameters.sampling.max_tokens.min(self.model.capacity.saturating_sub(prompt.len()) + 1);
        let positions = made + if scores { prompt.len() } else { 0 };
        top.map_or(0, |top| parameters.copies as usize * positions * (1 + top))
    }

    /// Checks that a prompt fits the context, and that its tokens and those with a bias are in the vocabulary.
    fn check(&self, tokens: &[u32], parameters: &Parameters) -> Result<(), ApiError> {
        let (count, capacity, size) = (tokens.len(), self.model.capacity, self.model.vocabulary.size());
        if count > capacity {
            let sentence = format!(
                "the prompt has {count} tokens, and this server reads {capacity} of a request: shorten it, or start the server with \
                 more --tokens"
            );
            return Err(ApiError::bad(sentence).with_code("context_length_exceeded"));
        }
        let biased = parameters.adjustments.bias.iter().map(|(token, _)| token);
        match tokens.iter().chain(biased).find(|token| **token as usize >= size) {
            Some(token) => Err(ApiError::bad(format!("token {token} is not one of the vocabulary's {size}"))),
            None => Ok(()),
        }
    }

    /// Reserves a number of texts, or refuses when the queue is full.
    fn ticket(&self, count: usize) -> Result<Ticket, ApiError> {
        if self.is_closing.load(Ordering::Acquire) {
            return Err(ApiError::with_status(503, "the server is ending"));
        }
        if count > MOST_TEXTS {
            return Err(ApiError::bad(format!(
                "the request asks for {count} texts, and at most {MOST_TEXTS} are made: send several"
            )));
        }
        let ticket = Ticket { texts: Arc::clone(&self.texts), count };
        match self.texts.fetch_add(count, Ordering::AcqRel) + count > MOST_TEXTS {
            true => {
                Err(ApiError::with_status(429, "too many requests wait already: send this one again later"))
            }
            false => Ok(ticket),
        }
    }

    fn send(
        &self,
        endpoint: Endpoint,
        requests: Vec<Request>,
        texts: Texts,
        parameters: &Parameters,
        ticket: Ticket,
    ) -> Result<Reply, ApiError> {
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl-" } else { "cmpl-" };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let head = Head {
            endpoint,
            id: format!("{prefix}{}", random_word(12)),
            created,
            model: self.model.name.clone(),
        };
        let pieces = Arc::clone(&self.model.pieces);
        let (reply, outlet) = Outlet::open(head, texts, parameters.delivery, pieces, ticket);
        let job = Job { requests, outlet, began: Instant::now() };
        let gone = |_| ApiError::with_status(503, "the server is ending");
        self.jobs.send(job).map_err(gone)?;
        Ok(reply)
    }
}

/// Refuses a response that would be too large to be held until it is complete.
fn check_numbers(numbers: usize, parameters: &Parameters) -> Result<(), ApiError> {
    match parameters.delivery == Delivery::Whole && numbers > MOST_NUMBERS {
        true => Err(ApiError::bad(format!(
            "the answer may have {numbers} log-probabilities, and at most {MOST_NUMBERS} are held: ask for fewer texts, tokens or \
             logprobs, or for a stream"
        ))),
        false => Ok(()),
    }
}

#[cfg(test)]
impl Ticket {
    /// A reservation with its own counter, for tests.
    pub fn of(texts: &Arc<AtomicUsize>, count: usize) -> Ticket {
        texts.fetch_add(count, Ordering::AcqRel);
        Ticket { texts: Arc::clone(texts), count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Fields;

    #[test]
    fn only_a_stream_may_have_any_number_of_log_probabilities() {
        let parameters =
            |value: Value| Parameters::read(&Fields::of(&value).unwrap(), &["max_tokens"], 16).unwrap();
        let (whole, stream) = (parameters(json!({})), parameters(json!({ "stream": true })));
        assert_eq!(check_numbers(MOST_NUMBERS, &whole), Ok(()));
        assert_eq!(check_numbers(MOST_NUMBERS + 1, &stream), Ok(()));
        let error = check_numbers(MOST_NUMBERS + 1, &whole).unwrap_err();
        assert!(error.status == 400 && error.message.contains("2097153 log-probabilities"), "{error:?}");
    }
}
