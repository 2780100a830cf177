//! An answer: a status, a type, and a body that is whole or goes on. It is there at once or comes later.

use std::any::Any;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
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

/// The body of an answer.
pub struct Content {
    source: Source,
    /// Dropped once the body is on its way or nobody wants it any more.
    _kept: Option<Box<dyn Any + Send + Sync>>,
}

impl Content {
    pub fn empty() -> Content {
        Source::Whole(Bytes::new()).into()
    }
}

enum Source {
    Whole(Bytes),
    Stream(mpsc::Receiver<Bytes>),
    /// Every message of it arrives, and the bytes of those that are not read yet are counted.
    Messages(mpsc::UnboundedReceiver<Bytes>, Arc<AtomicUsize>),
}

impl From<Source> for Content {
    fn from(source: Source) -> Content {
        Content { source, _kept: None }
    }
}

/// Bytes of a whole body that are handed over at once, so that it is held here until its client has read most of it.
const PORTION: usize = 64 << 10;
/// Bytes of messages that may wait for their reader.
const MOST_UNREAD: usize = 8 << 20;

impl Answer {
    pub fn text(status: u16, sentence: impl Into<String>) -> Answer {
        Answer::whole(status, "text/plain; charset=utf-8", sentence.into())
    }

    pub fn json(body: impl Into<Bytes>) -> Answer {
        Answer::whole(200, "application/json", body)
    }

    pub fn whole(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
        Answer { status, content_type, headers: vec![], content: Source::Whole(body.into()).into() }
    }

    /// Server-sent events, and where to write them. The body ends when the writer is dropped.
    pub fn events() -> (Answer, Stream) {
        let (writer, reader) = mpsc::channel(WAITING);
        let content = Source::Stream(reader).into();
        (Answer { status: 200, content_type: "text/event-stream", headers: vec![], content }, Stream(writer))
    }

    /// Server-sent events of which each arrives, as long as their reader is not too far behind.
    pub fn messages() -> (Answer, Messages) {
        let (writer, reader) = mpsc::unbounded_channel();
        let unread: Arc<AtomicUsize> = Arc::default();
        let content = Source::Messages(reader, Arc::clone(&unread)).into();
        (
            Answer { status: 200, content_type: "text/event-stream", headers: vec![], content },
            Messages { writer, unread },
        )
    }

    /// Keeps a thing until the answer is on its way or nobody wants it any more.
    pub fn keeping(mut self, thing: impl Any + Send + Sync) -> Answer {
        self.content._kept = Some(Box::new(thing));
        self
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
pub struct Messages {
    writer: mpsc::UnboundedSender<Bytes>,
    /// Bytes that are not read yet.
    unread: Arc<AtomicUsize>,
}

impl Messages {
    /// Whether the reader is gone.
    pub fn is_closed(&self) -> bool {
        self.writer.is_closed()
    }

    /// Sends one server-sent event without a name, whose data is one line; gives whether it was taken. It is not where the reader
    /// is too far behind.
    pub fn send(&self, line: &str) -> bool {
        let is_taken = self.unread.load(Ordering::Acquire) <= MOST_UNREAD;
        if is_taken {
            self.write(line);
        }
        is_taken
    }

    /// Ends with a last event, which is always taken.
    pub fn end(self, line: &str) {
        self.write(line);
    }

    fn write(&self, line: &str) {
        debug_assert!(!line.contains(['\n', '\r']), "data of one line");
        let message = Bytes::from(format!("data: {line}\n\n"));
        self.unread.fetch_add(message.len(), Ordering::AcqRel);
        let _ = self.writer.send(message);
    }
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = match &mut self.source {
            Source::Whole(rest) if rest.is_empty() => Poll::Ready(None),
            Source::Whole(rest) => Poll::Ready(Some(rest.split_to(PORTION.min(rest.len())))),
            Source::Stream(reader) => reader.poll_recv(context),
            Source::Messages(reader, unread) => reader.poll_recv(context).map(|bytes| {
                bytes.inspect(|bytes| {
                    unread.fetch_sub(bytes.len(), Ordering::AcqRel);
                })
            }),
        };
        bytes.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.source, Source::Whole(rest) if rest.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Whole(rest) => SizeHint::with_exact(rest.len() as u64),
            Source::Stream(_) | Source::Messages(..) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[test]
    fn messages_that_nobody_reads_are_bounded() {
        let (mut answer, messages) = Answer::messages();
        let line = "x".repeat(1 << 20);
        let taken = (0..64).take_while(|_| messages.send(&line)).count();
        assert_eq!(taken, 8, "of eight mebibytes");
        let mut read = || {
            let mut frame = std::pin::pin!(answer.content.frame());
            let mut context = Context::from_waker(std::task::Waker::noop());
            match std::future::Future::poll(frame.as_mut(), &mut context) {
                Poll::Ready(frame) => frame.map(|frame| frame.unwrap().into_data().unwrap().len()),
                Poll::Pending => panic!("it waits"),
            }
        };
        assert!(read().is_some_and(|bytes| bytes > 1 << 20));
        assert!(messages.send(&line), "there is room for what was read");
        assert!(!messages.send(&line));
        messages.end("last");
        let rest: Vec<usize> = std::iter::from_fn(read).collect();
        assert_eq!((rest.len(), rest.last()), (9, Some(&"data: last\n\n".len())));
    }

    #[test]
    fn what_an_answer_keeps_is_dropped_with_its_body() {
        let kept = Arc::new(());
        let mut answer = Answer::json(vec![b'x'; 3 * PORTION - 1]).keeping(Arc::clone(&kept));
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut lengths = vec![];
        while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut answer.content).poll_frame(&mut context) {
            lengths.push(frame.into_data().unwrap().len());
            assert_eq!(Arc::strong_count(&kept), 2);
        }
        assert_eq!(lengths, [PORTION, PORTION, PORTION - 1]);
        drop(answer);
        assert_eq!(Arc::strong_count(&kept), 1);
    }
}
