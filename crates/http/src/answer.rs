//! An answer: a status, a type, and a body that is whole or goes on.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame};
use tokio::sync::mpsc;

pub struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    /// Headers of this answer alone.
    pub headers: Vec<(&'static str, String)>,
    pub content: Content,
}

pub enum Content {
    Whole(Full<Bytes>),
    Stream(mpsc::Receiver<Bytes>),
}

impl Answer {
    pub fn text(status: u16, sentence: impl Into<String>) -> Answer {
        Answer::whole(status, "text/plain; charset=utf-8", sentence.into())
    }

    pub fn json(body: impl Into<Bytes>) -> Answer {
        Answer::whole(200, "application/json", body)
    }

    pub fn whole(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
        Answer { status, content_type, headers: vec![], content: Content::Whole(Full::new(body.into())) }
    }

    /// Server-sent events, and where to write them. The body ends when the writer is dropped.
    pub fn events() -> (Answer, Stream) {
        let (writer, reader) = mpsc::channel(WAITING);
        let content = Content::Stream(reader);
        (Answer { status: 200, content_type: "text/event-stream", headers: vec![], content }, Stream(writer))
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Answer {
        self.headers.push((name, value.into()));
        self
    }
}

/// Messages that wait for a reader who is slower than the writer.
const WAITING: usize = 4;

/// The writing end of an answer that goes on.
pub struct Stream(mpsc::Sender<Bytes>);

impl Stream {
    /// Whether a message would be taken now. A reader that is slow gets the next state instead of every one.
    pub fn is_ready(&self) -> bool {
        self.0.capacity() > 0
    }

    /// Whether the reader is gone.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Sends one server-sent event whose data is a line of JSON; gives whether it was taken.
    pub fn send(&self, event: &str, json: &str) -> bool {
        debug_assert!(!json.contains(['\n', '\r']), "JSON of one line");
        self.0.try_send(format!("event: {event}\ndata: {json}\n\n").into()).is_ok()
    }

    /// A comment, by which a reader that is gone is noticed.
    pub fn ping(&self) {
        let _ = self.0.try_send(Bytes::from_static(b":\n\n"));
    }
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Content::Whole(body) => Pin::new(body).poll_frame(context),
            Content::Stream(reader) => {
                reader.poll_recv(context).map(|bytes| bytes.map(|b| Ok(Frame::data(b))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Content::Whole(body) => body.is_end_stream(),
            Content::Stream(_) => false,
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Content::Whole(body) => body.size_hint(),
            Content::Stream(_) => hyper::body::SizeHint::default(),
        }
    }
}
