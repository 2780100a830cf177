//! A request of HTTP to a job, on the threads of the server: JSON is read, texts become tokens, and what cannot be answered is
//! refused before the worker sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use flatout_http::{Answer, Reply, Request as HttpRequest, random_word};
use flatout_train::infer::generate::{Prompt, Request};
use serde_json::{Value, json};

use crate::api::chat::Chat;
use crate::api::completions::{Completions, Prompt as TextOrTokens};
use crate::api::error::ApiError;
use crate::api::{Asked, Form, Head};
use crate::model::{Conversation, Model};
use crate::outlet::{Outlet, Texts};
use crate::worker::Job;

/// Texts that may wait or be made at once.
pub const MOST_TEXTS: usize = 256;

pub struct Front {
    model: Model,
    jobs: Sender<Job>,
    /// Texts that wait or are made.
    texts: Arc<AtomicUsize>,
    /// No new requests are taken.
    pub is_closing: AtomicBool,
}

/// Room for some texts, given back when this is dropped.
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

    /// Everything there is to ask for.
    pub fn reply(&self, request: &HttpRequest) -> Reply {
        let replied = match (request.path.as_str(), &request.body) {
            ("/health", None) => Ok(Answer::json(json!({ "status": "ok" }).to_string()).into()),
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

    /// The JSON of a body that asks for this model.
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

    /// The tokens of a text.
    fn tokenize(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let value = self.read(body)?;
        let prompt = &value["prompt"];
        let text = prompt.as_str().ok_or_else(|| ApiError::field("prompt", "`prompt` must be a string"))?;
        let tokens = self.model.tokens(&TextOrTokens::Text(text.into()))?;
        let count = tokens.len();
        let said = json!({ "tokens": tokens, "count": count, "max_model_len": self.model.capacity });
        Ok(Answer::json(said.to_string()).into())
    }

    fn completions(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let Completions { prompts, asked, top, echo } = Completions::read(&self.read(body)?)?;
        let ticket = self.ticket(prompts.len() * asked.copies as usize)?;
        let mut requests = vec![];
        let mut echoes = vec![];
        let mut read = 0;
        for prompt in &prompts {
            let tokens = self.model.tokens(prompt)?;
            read += tokens.len();
            self.check(&tokens, &asked)?;
            let text = || match prompt {
                TextOrTokens::Text(text) => text.clone(),
                TextOrTokens::Tokens(tokens) => self.model.vocabulary.decode(tokens),
            };
            let echoed = if echo { text() } else { String::new() };
            let scores = echo && top.is_some();
            for copy in 0..asked.copies {
                let plain = self.request(tokens.clone().into(), &asked, copy, top);
                requests.push(Request { echo: scores, ..plain });
                echoes.push(echoed.clone());
            }
        }
        let texts = Texts { prompt_tokens: read, echoes, has_logprobs: top.is_some() };
        self.send(Form::Completions, requests, texts, &asked, ticket)
    }

    fn chat(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let Chat { messages, asked, top } = Chat::read(&self.read(body)?, self.model.capacity)?;
        let ticket = self.ticket(asked.copies as usize)?;
        let Conversation { prompt, pictures, end } = self.model.conversation(&messages)?;
        self.check(&prompt.tokens, &asked)?;
        let request = |copy: u32| {
            let mut request = self.request(prompt.clone(), &asked, copy, top);
            request.stops.extend(end);
            Request { pictures: pictures.clone(), ..request }
        };
        let requests: Vec<Request> = (0..asked.copies).map(request).collect();
        let echoes = vec![String::new(); requests.len()];
        let texts = Texts { prompt_tokens: prompt.tokens.len(), echoes, has_logprobs: top.is_some() };
        self.send(Form::Chat, requests, texts, &asked, ticket)
    }

    fn request(&self, prompt: Prompt, asked: &Asked, copy: u32, top: Option<usize>) -> Request {
        Request {
            copy,
            top,
            stops: asked.stop_tokens.clone(),
            text: Some(asked.stops.clone()),
            adjustments: asked.adjustments.clone(),
            ..Request::new(prompt, asked.how)
        }
    }

    /// Whether there is room for a prompt, and for a token behind it where one is asked for.
    fn check(&self, tokens: &[u32], asked: &Asked) -> Result<(), ApiError> {
        let (count, capacity, size) = (tokens.len(), self.model.capacity, self.model.vocabulary.size());
        if count > capacity {
            let sentence = format!(
                "the prompt has {count} tokens, and this server reads {capacity} of a request: shorten it, or start the server with \
                 more --tokens"
            );
            return Err(ApiError::bad(sentence).with_code("context_length_exceeded"));
        }
        let biased = asked.adjustments.bias.iter().map(|(token, _)| token);
        match tokens.iter().chain(biased).find(|token| **token as usize >= size) {
            Some(token) => Err(ApiError::bad(format!("token {token} is not one of the vocabulary's {size}"))),
            None => Ok(()),
        }
    }

    /// Room for texts, where there is some.
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
        form: Form,
        requests: Vec<Request>,
        texts: Texts,
        asked: &Asked,
        ticket: Ticket,
    ) -> Result<Reply, ApiError> {
        let prefix = if form == Form::Chat { "chatcmpl-" } else { "cmpl-" };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let head = Head {
            form,
            id: format!("{prefix}{}", random_word(12)),
            created,
            model: self.model.name.clone(),
        };
        let (reply, outlet) = Outlet::open(head, texts, asked.delivery, Arc::clone(&self.model.pieces));
        let job = Job { requests, outlet, ticket, began: Instant::now() };
        let gone = |_| ApiError::with_status(503, "the server is ending");
        self.jobs.send(job).map_err(gone)?;
        Ok(reply)
    }
}
