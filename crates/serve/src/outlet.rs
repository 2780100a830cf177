//! The answer to a job, whole or as a stream, as its texts grow.

use std::sync::Arc;

use flatout_http::{Answer, Messages, Promise, Reply};
use flatout_train::infer::generate::{Finish, Progress, Told};
use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::logprobs::{Pieces, Place};
use crate::api::{Delivery, Form, Head, Usage, chat, completions};

/// The last message of a stream.
const DONE: &str = "[DONE]";

pub struct Outlet {
    pub head: Head,
    pieces: Arc<Pieces>,
    has_logprobs: bool,
    choices: Vec<Choice>,
    pub usage: Usage,
    /// Choices that go on.
    open: usize,
    way: Option<Way>,
}

/// Facts about the texts of a job that are known from the start.
pub struct Texts {
    pub prompt_tokens: usize,
    /// The prompt of every choice, where it is a part of the answer.
    pub echoes: Vec<String>,
    pub has_logprobs: bool,
}

struct Choice {
    text: String,
    told: Vec<Told>,
    place: Place,
    finish: Option<Finish>,
    /// A part of it was sent.
    is_begun: bool,
}

enum Way {
    Whole(Promise),
    Stream { messages: Messages, with_usage: bool },
}

impl Outlet {
    pub fn open(head: Head, texts: Texts, delivery: Delivery, pieces: Arc<Pieces>) -> (Reply, Outlet) {
        let (reply, way) = match delivery {
            Delivery::Whole => {
                let (reply, promise) = Reply::later();
                (reply, Way::Whole(promise))
            }
            Delivery::Stream { with_usage } => {
                let (answer, messages) = Answer::messages();
                (answer.into(), Way::Stream { messages, with_usage })
            }
        };
        let choice =
            |text| Choice { text, told: vec![], place: Place::default(), finish: None, is_begun: false };
        let choices: Vec<Choice> = texts.echoes.into_iter().map(choice).collect();
        let usage = Usage { prompt: texts.prompt_tokens, completion: 0 };
        let open = choices.len();
        let outlet =
            Outlet { head, pieces, has_logprobs: texts.has_logprobs, choices, usage, open, way: Some(way) };
        (reply, outlet)
    }

    /// Whether nobody waits for the answer any more.
    pub fn is_closed(&self) -> bool {
        match &self.way {
            None => true,
            Some(Way::Whole(promise)) => promise.is_closed(),
            Some(Way::Stream { messages, .. }) => messages.is_closed(),
        }
    }

    /// Takes the news of a choice; gives whether all have ended.
    pub fn take(&mut self, index: usize, news: Progress) -> bool {
        let Progress { echoed, text, tokens, finish, .. } = news;
        self.usage.completion += tokens.len() + usize::from(matches!(finish, Some(Finish::Token(_))));
        let choice = &mut self.choices[index];
        choice.text += &text;
        choice.told.extend(echoed.into_iter().chain(tokens));
        self.open -= usize::from(finish.is_some());
        choice.finish = finish;
        if let Some(Way::Stream { messages, .. }) = &self.way {
            let has_news = !choice.text.is_empty() || !choice.told.is_empty() || choice.finish.is_some();
            if has_news || !choice.is_begun {
                let messages = messages.clone();
                let part = self.choice(index, true);
                messages.send(&self.head.answer(true, vec![part], None).to_string());
                let choice = &mut self.choices[index];
                (choice.text, choice.told, choice.is_begun) = (String::new(), vec![], true);
            }
        }
        if self.open == 0 {
            self.end();
        }
        self.open == 0
    }

    /// A choice, or what of it was not sent yet.
    fn choice(&mut self, index: usize, is_part: bool) -> Value {
        let Choice { text, told, place, finish, is_begun } = &mut self.choices[index];
        let finish = finish.as_ref();
        let pieces = self.has_logprobs.then_some(&*self.pieces);
        match (self.head.form, is_part) {
            (Form::Completions, _) => {
                completions::choice(index, text, pieces.map(|pieces| (pieces, &told[..], place)), finish)
            }
            (Form::Chat, false) => {
                chat::choice(index, text, pieces.map(|pieces| (pieces, &told[..])), finish)
            }
            (Form::Chat, true) => {
                chat::part(index, text, pieces.map(|pieces| (pieces, &told[..])), finish, !*is_begun)
            }
        }
    }

    fn end(&mut self) {
        match self.way.take() {
            None => {}
            Some(Way::Whole(promise)) => {
                let choices = (0..self.choices.len()).map(|index| self.choice(index, false)).collect();
                promise.keep(Answer::json(self.head.answer(false, choices, Some(self.usage)).to_string()));
            }
            Some(Way::Stream { messages, with_usage }) => {
                if with_usage {
                    messages.send(&self.head.answer(true, vec![], Some(self.usage)).to_string());
                }
                messages.send(DONE);
            }
        }
    }

    /// Ends it with an error: the answer, or the last message of a stream.
    pub fn fail(&mut self, error: &ApiError) {
        match self.way.take() {
            None => {}
            Some(Way::Whole(promise)) => promise.keep(error.answer()),
            Some(Way::Stream { messages, .. }) => messages.send(&error.json()),
        }
    }
}
