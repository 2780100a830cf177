//! An answer: a status, a type, and a body that is whole or goes on. It is there at once or comes later.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame};
use tokio::sync::{mpsc, oneshot};

/// The reply of a function to a request.
pub enum Reply {
    Now(Answer),
    /// Where somebody else is to give the answer. Who asked may be gone before: then the promise is closed.
    Later(oneshot::Receiver<Answer>),
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Reply {
        Reply::Now(answer)
    }
}

/// The answer that somebody waits for.
pub struct Promise(oneshot::Sender<Answer>);

impl Promise {
    /// Whether nobody waits any more.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    pub fn keep(self, answer: Answer) {
        let _ = self.0.send(answer);
    }
}

impl Reply {
    /// An answer that comes later, and what gives it.
    pub fn later() -> (Reply, Promise) {
        let (promise, waiting) = oneshot::channel();
        (Reply::Later(waiting), Promise(promise))
    }
}

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
    /// Every message of it arrives, however slowly it is read.
    Messages(mpsc::UnboundedReceiver<Bytes>),
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

    /// Server-sent events of which each arrives. Who writes them bounds how many there are.
    pub fn messages() -> (Answer, Messages) {
        let (writer, reader) = mpsc::unbounded_channel();
        let content = Content::Messages(reader);
        (
            Answer { status: 200, content_type: "text/event-stream", headers: vec![], content },
            Messages(writer),
        )
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

/// The writing end of an answer of which each message arrives.
#[derive(Clone)]
pub struct Messages(mpsc::UnboundedSender<Bytes>);

impl Messages {
    /// Whether the reader is gone.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Sends one server-sent event without a name, whose data is one line.
    pub fn send(&self, line: &str) {
        debug_assert!(!line.contains(['\n', '\r']), "data of one line");
        let _ = self.0.send(format!("data: {line}\n\n").into());
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
            Content::Messages(reader) => {
                reader.poll_recv(context).map(|bytes| bytes.map(|b| Ok(Frame::data(b))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Content::Whole(body) => body.is_end_stream(),
            Content::Stream(_) | Content::Messages(_) => false,
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Content::Whole(body) => body.size_hint(),
            Content::Stream(_) | Content::Messages(_) => hyper::body::SizeHint::default(),
        }
    }
}
