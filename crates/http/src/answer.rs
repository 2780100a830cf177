//! An answer: a status, a content type, and a body that is complete or streamed. It may be available immediately or later.

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
    /// The answer comes from elsewhere. If the client disconnects first, the promise is closed.
    Later(oneshot::Receiver<Answer>),
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Reply {
        Reply::Now(answer)
    }
}

/// The sending side of an answer that a client waits for.
pub struct Promise(oneshot::Sender<Answer>);

impl Promise {
    /// Whether the client no longer waits.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    pub fn keep(self, answer: Answer) {
        let _ = self.0.send(answer);
    }
}

impl Reply {
    /// A reply whose answer comes later, and the promise of that answer.
    pub fn later() -> (Reply, Promise) {
        let (promise, waiting) = oneshot::channel();
        (Reply::Later(waiting), Promise(promise))
    }
}

pub struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    /// Additional headers of this answer.
    pub headers: Vec<(&'static str, String)>,
    pub content: Content,
}

/// The body of an answer.
pub struct Content {
    source: Source,
    /// Dropped once the body is sent or no longer wanted.
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
    /// No message is dropped, and the bytes not yet read are counted.
    Messages(mpsc::UnboundedReceiver<Bytes>, Arc<AtomicUsize>),
}

impl From<Source> for Content {
    fn from(source: Source) -> Content {
        Content { source, _kept: None }
    }
}

/// Number of bytes of a complete body handed over at once, so that the rest stays here until the client has read most of it.
const PORTION: usize = 64 << 10;
/// Maximum number of unread bytes of messages.
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

    /// Server-sent events, and their writer. The body ends when the writer is dropped.
    pub fn events() -> (Answer, Stream) {
        let (writer, reader) = mpsc::channel(WAITING);
        let content = Source::Stream(reader).into();
        (Answer { status: 200, content_type: "text/event-stream", headers: vec![], content }, Stream(writer))
    }

    /// Server-sent events of which none is dropped, as long as the reader is not too far behind.
    pub fn messages() -> (Answer, Messages) {
        let (writer, reader) = mpsc::unbounded_channel();
        let unread: Arc<AtomicUsize> = Arc::default();
        let content = Source::Messages(reader, Arc::clone(&unread)).into();
        (
            Answer { status: 200, content_type: "text/event-stream", headers: vec![], content },
            Messages { writer, unread },
        )
    }

    /// Keeps a value alive until the answer is sent or no longer wanted.
    pub fn keeping(mut self, thing: impl Any + Send + Sync) -> Answer {
        self.content._kept = Some(Box::new(thing));
        self
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Answer {
        self.headers.push((name, value.into()));
        self
    }
}

/// Number of messages that may wait for a slow reader.
const WAITING: usize = 4;

/// The writing end of a streamed answer.
pub struct Stream(mpsc::Sender<Bytes>);

impl Stream {
    /// Whether a message would be accepted now. A slow reader gets the next state instead of every one.
    pub fn is_ready(&self) -> bool {
        self.0.capacity() > 0
    }

    /// Whether the reader is gone.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Sends a server-sent event whose data is one line of JSON; returns whether it was accepted.
    pub fn send(&self, event: &str, json: &str) -> bool {
        debug_assert!(!json.contains(['\n', '\r']), "JSON of one line");
        self.0.try_send(format!("event: {event}\ndata: {json}\n\n").into()).is_ok()
    }

    /// Sends a comment, which reveals that a reader is gone.
    pub fn ping(&self) {
        let _ = self.0.try_send(Bytes::from_static(b":\n\n"));
    }
}

/// The writing end of a streamed answer that drops no message.
#[derive(Clone)]
pub struct Messages {
    writer: mpsc::UnboundedSender<Bytes>,
    /// Number of bytes not yet read.
    unread: Arc<AtomicUsize>,
}

impl Messages {
    /// Whether the reader is gone.
    pub fn is_closed(&self) -> bool {
        self.writer.is_closed()
    }

    /// Sends an unnamed server-sent event whose data is one line; returns whether it was accepted. It is not if the reader is
    /// too far behind.
    pub fn send(&self, line: &str) -> bool {
        let is_taken = self.unread.load(Ordering::Acquire) <= MOST_UNREAD;
        if is_taken {
            self.write(line);
        }
        is_taken
    }

    /// Ends with a last event, which is always accepted.
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
    fn kept_values_are_dropped_with_the_body() {
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
