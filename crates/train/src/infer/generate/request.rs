//! A request for text, and its progress.

use flatout_ir::Role;
use flatout_ir::ops::sample::Draw;

use super::pictures::Picture;
use super::prompt::Prompt;
use super::text::TextStream;
use crate::infer::sampling::{Adjustments, Sampling};

/// A prompt to be continued, with options.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub prompt: Prompt,
    /// The images in the prompt, indexed by the numbers it uses for them.
    pub pictures: Vec<Picture>,
    pub how: Sampling,
    /// Index among several continuations of the same prompt, each of which has its own random numbers.
    pub copy: u32,
    /// Tokens that end the text, in addition to the model's.
    pub stops: Vec<u32>,
    /// Requests text in addition to tokens. The text ends before the first of these strings.
    pub text: Option<Vec<String>>,
    /// Requests the log-probability of every token, and those of this many most likely tokens at its position.
    pub top: Option<usize>,
    /// Also requests the log-probabilities of the prompt's own tokens.
    pub echo: bool,
    pub adjustments: Adjustments,
}

impl Request {
    pub fn new(prompt: Prompt, how: Sampling) -> Request {
        Request { prompt, how, ..Request::default() }
    }
}

/// A token with its requested log-probabilities.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScoredToken {
    pub token: u32,
    /// The log-probability that the model gave it, before temperature and adjustments; `None` for the first token of a prompt.
    pub logp: Option<f32>,
    /// The most likely tokens at its position, in descending order.
    pub top: Vec<(u32, f32)>,
}

/// The reason why a text ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Finish {
    /// This token ended it, which is not part of the text.
    Token(ScoredToken),
    /// The text reached a stop string, which is not part of it.
    Text,
    /// The text reached the requested number of tokens, or the context is full.
    Length,
}

/// Progress of a request in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// The id of the request.
    pub id: u64,
    /// The prompt's own tokens, once all of them are read, if they were requested.
    pub echoed: Vec<ScoredToken>,
    /// The text of these tokens, if it was requested, as far as it is settled: a character may take several tokens.
    pub text: String,
    pub tokens: Vec<ScoredToken>,
    /// Whether a token was drawn. It is among `tokens` now or later, or ended the text alone or as part of a stop string.
    pub is_drawn: bool,
    pub finish: Option<Finish>,
}

/// A request in progress.
pub(super) struct Work {
    pub id: u64,
    pub request: Request,
    /// The tokens to be read next: at first the prompt, then the token that was drawn last.
    pub fresh: Prompt,
    /// How many of them have been read.
    pub read: usize,
    /// Whether it is to be read in this round.
    pub is_due: bool,
    pub made: Vec<u32>,
    /// The numbers of its pictures in the tower.
    pub pictures: Vec<usize>,
    /// The prompt's tokens that have been scored so far.
    pub echoed: Vec<ScoredToken>,
    pub text: Option<TextStream>,
}

impl Work {
    /// Parameters for drawing the next token on the device; `None` if its logits are requested or adjusted first, or if no token
    /// is needed.
    pub fn draw_on_device(&self) -> Option<Draw> {
        let Request { how, copy, adjustments, top, .. } = &self.request;
        let is_plain = how.max_tokens > 0 && adjustments.is_none() && top.is_none();
        is_plain.then(|| how.at(*copy, self.made.len()))
    }

    /// The plan that reads its next tokens, whatever other requests there are. If the plan for prompts contains a tower, a prompt
    /// without images uses the other one, which has none.
    pub fn plan(&self, has_tower: bool) -> Role {
        match (self.made.is_empty(), self.request.echo || has_tower && self.fresh.images.is_empty()) {
            (false, _) => Role::Decode,
            (true, false) => Role::Prefill,
            (true, true) => Role::Logits,
        }
    }
}
