//! A request for text, and what comes of it.

use flatout_ir::Role;
use flatout_ir::ops::sample::Draw;

use super::pictures::Picture;
use super::prompt::Prompt;
use super::text::TextStream;
use crate::infer::sampling::{Adjustments, Sampling};

/// A prompt to be continued, and how.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub prompt: Prompt,
    /// The images in the prompt, by the numbers that it names them with.
    pub pictures: Vec<Picture>,
    pub how: Sampling,
    /// Which of several continuations of the same prompt this is: each is drawn by itself.
    pub copy: u32,
    /// Tokens that end the text, beside those of the model.
    pub stops: Vec<u32>,
    /// Asks for text beside tokens. It ends before the first of these strings.
    pub text: Option<Vec<String>>,
    /// Asks for the log-probability of every token, and for those of this many of the likeliest in its place.
    pub top: Option<usize>,
    /// Asks for the log-probabilities of the prompt's own tokens too.
    pub echo: bool,
    pub adjustments: Adjustments,
}

impl Request {
    pub fn new(prompt: Prompt, how: Sampling) -> Request {
        Request { prompt, how, ..Request::default() }
    }
}

/// A token with what was asked about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    pub token: u32,
    /// The log-probability that the model gave it, before temperature and adjustments; of the first token of a prompt there is none.
    pub logp: Option<f32>,
    /// The likeliest tokens in its place, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// Why a text ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Finish {
    /// With this token, which is no part of the text.
    Token(Told),
    /// Before a string that ends it.
    Text,
    /// With as many tokens as were asked for, or with a full context.
    Length,
}

/// News of a request after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// The number that the request was given.
    pub id: u64,
    /// The prompt's own tokens, where they were asked for and are all read now.
    pub echoed: Vec<Told>,
    /// The text of these tokens, as far as it was asked for and is settled: a character may take several tokens.
    pub text: String,
    pub tokens: Vec<Told>,
    /// A token was drawn. It is among `tokens` now or later, or ended the text alone or as a part of a string.
    pub is_drawn: bool,
    pub finish: Option<Finish>,
}

/// A request that is worked on.
pub(super) struct Work {
    pub id: u64,
    pub request: Request,
    /// The tokens to be read next: at first the prompt, then the token that was drawn last.
    pub fresh: Prompt,
    /// Of these, how many are read.
    pub read: usize,
    /// It is to be read in this round.
    pub is_due: bool,
    pub made: Vec<u32>,
    /// The numbers that its pictures have in the tower.
    pub pictures: Vec<usize>,
    /// The prompt's tokens that were scored so far.
    pub echoed: Vec<Told>,
    pub text: Option<TextStream>,
}

impl Work {
    /// How the device draws the next token; `None` where its logits are asked for or changed first, or where no token is wanted.
    pub fn draw_on_device(&self) -> Option<Draw> {
        let Request { how, copy, adjustments, top, .. } = &self.request;
        let is_plain = how.max_tokens > 0 && adjustments.is_none() && top.is_none();
        is_plain.then(|| how.at(*copy, self.made.len()))
    }

    /// The plan that reads its next tokens, whoever else is there. Where the one for prompts has a tower, a prompt without images
    /// goes by the other one, which has none.
    pub fn plan(&self, has_tower: bool) -> Role {
        match (self.made.is_empty(), self.request.echo || has_tower && self.fresh.images.is_empty()) {
            (false, _) => Role::Decode,
            (true, false) => Role::Prefill,
            (true, true) => Role::Logits,
        }
    }
}
