//! Writes the response to a job, whole or as a stream, while its texts grow.

use std::sync::Arc;

use flatout_http::{Answer, Messages, Promise, Reply};
use flatout_train::infer::generate::{Finish, Progress, ScoredToken};
use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::logprobs::{Pieces, TextOffset};
use crate::api::{Delivery, Endpoint, Head, Usage, chat, completions};
use crate::front::Ticket;

/// The last message of a stream.
const DONE: &str = "[DONE]";

pub struct Outlet {
    pub head: Head,
    pieces: Arc<Pieces>,
    has_logprobs: bool,
    choices: Vec<Choice>,
    pub usage: Usage,
    /// Number of choices that have not ended.
    open: usize,
    channel: Option<Channel>,
    /// The reservation for its texts, released once the response is delivered and no work is left.
    ticket: Arc<Ticket>,
}

/// Properties of a job's texts that are known from the start.
pub struct Texts {
    pub prompt_tokens: usize,
    /// The text that every choice begins with: its prompt, where it is echoed, otherwise empty.
    pub echoes: Vec<String>,
    pub has_logprobs: bool,
}

struct Choice {
    text: String,
    scored: Vec<ScoredToken>,
    place: TextOffset,
    finish: Option<Finish>,
    /// Whether a part of it was sent.
    is_begun: bool,
}

enum Channel {
    Whole(Promise),
    Stream { messages: Messages, with_usage: bool },
}

impl Outlet {
    pub fn open(
        head: Head,
        texts: Texts,
        delivery: Delivery,
        pieces: Arc<Pieces>,
        ticket: Ticket,
    ) -> (Reply, Outlet) {
        let ticket = Arc::new(ticket);
        let (reply, channel) = match delivery {
            Delivery::Whole => {
                let (reply, promise) = Reply::later();
                (reply, Channel::Whole(promise))
            }
            Delivery::Stream { with_usage } => {
                let (answer, messages) = Answer::messages();
                (answer.keeping(Arc::clone(&ticket)).into(), Channel::Stream { messages, with_usage })
            }
        };
        let choice = |text| Choice {
            text,
            scored: vec![],
            place: TextOffset::default(),
            finish: None,
            is_begun: false,
        };
        let choices: Vec<Choice> = texts.echoes.into_iter().map(choice).collect();
        let usage = Usage { prompt: texts.prompt_tokens, completion: 0 };
        let open = choices.len();
        let has_logprobs = texts.has_logprobs;
        let outlet =
            Outlet { head, pieces, has_logprobs, choices, usage, open, channel: Some(channel), ticket };
        (reply, outlet)
    }

    /// Whether the client no longer waits for the response.
    pub fn is_closed(&self) -> bool {
        match &self.channel {
            None => true,
            Some(Channel::Whole(promise)) => promise.is_closed(),
            Some(Channel::Stream { messages, .. }) => messages.is_closed(),
        }
    }

    /// Processes progress of a choice; returns whether all choices have ended.
    pub fn take(&mut self, index: usize, news: Progress) -> bool {
        let Progress { echoed, text, tokens, is_drawn, finish, .. } = news;
        self.usage.completion += usize::from(is_drawn);
        let choice = &mut self.choices[index];
        choice.text += &text;
        choice.scored.extend(echoed.into_iter().chain(tokens));
        self.open -= usize::from(finish.is_some());
        choice.finish = finish;
        if let Some(Channel::Stream { messages, .. }) = &self.channel {
            let has_news = !choice.text.is_empty() || !choice.scored.is_empty() || choice.finish.is_some();
            if has_news || !choice.is_begun {
                let messages = messages.clone();
                let part = self.choice(index, true);
                if !messages.send(&self.head.answer(true, vec![part], None).to_string()) {
                    // The client does not read: close the stream.
                    self.fail(&ApiError::bad("the stream was read too slowly and is cut off"));
                }
                let choice = &mut self.choices[index];
                (choice.text, choice.scored, choice.is_begun) = (String::new(), vec![], true);
            }
        }
        if self.open == 0 {
            self.end();
        }
        self.open == 0
    }

    /// A choice, or the part of it that was not sent yet.
    fn choice(&mut self, index: usize, is_part: bool) -> Value {
        let Choice { text, scored, place, finish, is_begun } = &mut self.choices[index];
        let finish = finish.as_ref();
        let pieces = self.has_logprobs.then_some(&*self.pieces);
        match (self.head.endpoint, is_part) {
            (Endpoint::Completions, _) => {
                completions::choice(index, text, pieces.map(|pieces| (pieces, &scored[..], place)), finish)
            }
            (Endpoint::Chat, false) => {
                chat::choice(index, text, pieces.map(|pieces| (pieces, &scored[..])), finish)
            }
            (Endpoint::Chat, true) => {
                chat::part(index, text, pieces.map(|pieces| (pieces, &scored[..])), finish, !*is_begun)
            }
        }
    }

    fn end(&mut self) {
        match self.channel.take() {
            None => {}
            Some(Channel::Whole(promise)) => {
                let choices = (0..self.choices.len()).map(|index| self.choice(index, false)).collect();
                let answer = self.head.answer(false, choices, Some(self.usage)).to_string();
                promise.keep(Answer::json(answer).keeping(Arc::clone(&self.ticket)));
            }
            Some(Channel::Stream { messages, with_usage }) => {
                if with_usage {
                    messages.send(&self.head.answer(true, vec![], Some(self.usage)).to_string());
                }
                messages.end(DONE);
            }
        }
    }

    /// Ends the response with an error: as the whole response, or as the last message of a stream.
    pub fn fail(&mut self, error: &ApiError) {
        match self.channel.take() {
            None => {}
            Some(Channel::Whole(promise)) => promise.keep(error.answer()),
            Some(Channel::Stream { messages, .. }) => messages.end(&error.json()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn open(delivery: Delivery, texts: &Arc<AtomicUsize>) -> (Reply, Outlet) {
        let head = Head { endpoint: Endpoint::Completions, id: "x".into(), created: 0, model: "m".into() };
        let one = Texts { prompt_tokens: 1, echoes: vec![String::new()], has_logprobs: false };
        Outlet::open(head, one, delivery, Arc::default(), Ticket::of(texts, 1))
    }

    fn news(text: &str, finish: Option<Finish>) -> Progress {
        Progress { id: 0, echoed: vec![], text: text.into(), tokens: vec![], is_drawn: true, finish }
    }

    #[test]
    fn a_stream_that_nobody_reads_is_cut_off() {
        let (reply, mut outlet) = open(Delivery::Stream { with_usage: false }, &Arc::default());
        let long = "x".repeat(1 << 20);
        let sent = (0..100).take_while(|_| {
            outlet.take(0, news(&long, None));
            !outlet.is_closed()
        });
        assert_eq!(sent.count(), 8);
        assert!(!outlet.take(0, news("more", None)), "what comes later is left out");
        drop(reply);
    }

    #[test]
    fn reservations_last_until_texts_are_delivered() {
        for delivery in [Delivery::Whole, Delivery::Stream { with_usage: false }] {
            let texts = Arc::default();
            let (reply, mut outlet) = open(delivery, &texts);
            assert!(outlet.take(0, news("end", Some(Finish::Length))));
            drop(outlet);
            assert_eq!(texts.load(Ordering::Acquire), 1, "{delivery:?}");
            drop(reply);
            assert_eq!(texts.load(Ordering::Acquire), 0, "{delivery:?}");
        }
    }
}
