//! The HTTP server's thread, with limits on the time of headers and bodies and on the number of connections and bytes. It ends
//! when its handle is dropped.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

use crate::answer::{Answer, Content, Reply};
use crate::guard::{Credentials, Guard, Verdict};
use crate::request::Request;
use crate::write_timeout::WriteTimeout;

/// Default maximum number of connections.
const CONNECTIONS: usize = 128;
/// Maximum number of functions that run at once.
const FUNCTIONS: usize = 4;
/// Timeout for a client's headers.
const HEADERS: Duration = Duration::from_secs(10);

/// Timeout for a client's body.
const BODY: Duration = Duration::from_secs(30);
/// How long a body waits for room, and the seconds after which a client should retry.
const ROOM: Duration = Duration::from_secs(3);
const RETRY_AFTER: &str = "1";
/// The room reserved at once for a body that does not state its size.
const GROWTH_BYTES: usize = 64 << 10;
/// Timeout for a client that reads nothing of its answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// How much of a refused body is still read, and for how long.
const DISCARDED_BYTES: usize = 64 << 20;
const DISCARDING: Duration = Duration::from_secs(5);
/// How long answers in progress may take once the server is closed.
const CLOSING: Duration = Duration::from_secs(3);

/// Headers of every answer, against caching, content sniffing, framing and referrers.
const ALWAYS: [(&str, &str); 5] = [
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("x-frame-options", "DENY"),
    ("cross-origin-resource-policy", "same-origin"),
];

type Function = dyn Fn(&Request) -> Reply + Send + Sync;

/// The options of a server.
pub struct Settings {
    pub guard: Guard,
    /// The limits of POST bodies, if the server accepts any.
    pub bodies: Option<Bodies>,
    /// Cheap answers, given without a thread, so that they are available while all functions are busy.
    pub immediate: fn(&Request) -> Option<Answer>,
    /// Maximum number of connections; further ones wait.
    pub connections: usize,
    /// Builds an answer that refuses a request with a status and a sentence.
    pub refusal: fn(u16, &str) -> Answer,
}

/// The limits of bodies. Bodies must be JSON: a web page cannot send that to another server without a preflight request, which
/// is refused.
#[derive(Clone, Copy, Debug)]
pub struct Bodies {
    pub most_bytes: usize,
    /// Maximum total size of bodies in use; further bodies wait for a few seconds.
    pub all_bytes: usize,
}

impl Settings {
    /// A server without bodies.
    pub fn showing(address: SocketAddr) -> Settings {
        let refusal = |status: u16, sentence: &str| Answer::text(status, sentence);
        let guard = Guard::new(address);
        Settings { guard, bodies: None, immediate: |_| None, connections: CONNECTIONS, refusal }
    }
}

/// State that all connections share.
struct Shared {
    settings: Settings,
    function: Box<Function>,
    /// Room for bodies, in KiB.
    body_room: Arc<Semaphore>,
}

/// A server that runs until this is dropped.
pub struct Server {
    pub address: SocketAddr,
    url: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// The address to open.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Accepts no more connections, waits a few seconds for answers in progress, and ends.
    pub fn close(mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    /// Waits until the thread fails, which normally never happens.
    pub fn wait(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves a listener on a thread of its own. `function` answers the requests that the guard admits.
pub fn start(
    listener: TcpListener,
    function: impl Fn(&Request) -> Answer + Send + Sync + 'static,
) -> io::Result<Server> {
    let settings = Settings::showing(listener.local_addr()?);
    start_with(listener, settings, move |request| function(request).into())
}

/// `start` with settings, and with answers that may come later.
pub fn start_with(
    listener: TcpListener,
    settings: Settings,
    function: impl Fn(&Request) -> Reply + Send + Sync + 'static,
) -> io::Result<Server> {
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let url = settings.guard.url();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(FUNCTIONS)
        .thread_name("http")
        .build()?;
    let (stop, stopped) = oneshot::channel();
    let body_room = Arc::new(Semaphore::new(settings.bodies.map_or(0, |bodies| bodies.all_bytes >> 10)));
    let shared = Arc::new(Shared { settings, function: Box::new(function), body_room });
    let run = move || {
        runtime.block_on(async {
            let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
            let (close, closed) = watch::channel(false);
            let connections = shared.settings.connections;
            let places = Arc::new(Semaphore::new(connections));
            let taking = tokio::spawn(accept(listener, shared, Arc::clone(&places), closed));
            // A dropped handle sends nothing and does not wait for answers.
            if stopped.await.is_ok() {
                taking.abort();
                let _ = close.send(true);
                let all = places.acquire_many(connections as u32);
                let _ = timeout(CLOSING, all).await;
            }
        });
        // Functions that are still running are not awaited.
        runtime.shutdown_background();
    };
    let thread = std::thread::Builder::new().name("http".into()).spawn(run)?;
    Ok(Server { address, url, stop: Some(stop), thread: Some(thread) })
}

async fn accept(
    listener: tokio::net::TcpListener,
    shared: Arc<Shared>,
    places: Arc<Semaphore>,
    closed: watch::Receiver<bool>,
) {
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let Ok((connection, _)) = listener.accept().await else {
            // No file descriptor is left; other connections will end.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (shared, mut closed) = (Arc::clone(&shared), closed.clone());
        tokio::spawn(async move {
            // Messages of streams are small, and each should arrive immediately.
            let _ = connection.set_nodelay(true);
            let service = service_fn(move |asked| {
                let shared = Arc::clone(&shared);
                async move { Ok::<_, Infallible>(respond(asked, shared).await) }
            });
            let mut protocol = http1::Builder::new();
            protocol.timer(TokioTimer::new()).header_read_timeout(HEADERS);
            let connection = WriteTimeout::new(connection, WRITE_TIMEOUT);
            let mut served = pin!(protocol.serve_connection(TokioIo::new(connection), service));
            let mut closing = pin!(async move { closed.wait_for(|closed| *closed).await.is_ok() });
            let mut is_closing = false;
            std::future::poll_fn(|context| {
                if !is_closing && let Poll::Ready(true) = closing.as_mut().poll(context) {
                    is_closing = true;
                    served.as_mut().graceful_shutdown();
                }
                served.as_mut().poll(context).map(drop)
            })
            .await;
            drop(place);
        });
    }
}

async fn respond(asked: hyper::Request<Incoming>, shared: Arc<Shared>) -> Response<Content> {
    let is_head = asked.method() == Method::HEAD;
    let answer = match admit(asked, &shared).await {
        Err(answer) => answer,
        Ok((request, room)) => match (shared.settings.immediate)(&request) {
            Some(answer) => answer,
            None => run_function(request, room, shared).await,
        },
    };
    response(answer, is_head)
}

/// The function's answer. A body keeps its room until the function has finished with it.
async fn run_function(request: Request, room: Option<OwnedSemaphorePermit>, shared: Arc<Shared>) -> Answer {
    let refusal = shared.settings.refusal;
    let failed = || refusal(500, "the answer failed; flatout goes on");
    let run = move || {
        let reply = (shared.function)(&request);
        drop((request, room));
        reply
    };
    match tokio::task::spawn_blocking(run).await {
        Err(_) => failed(),
        Ok(Reply::Now(answer)) => answer,
        Ok(Reply::Later(waiting)) => waiting.await.unwrap_or_else(|_| failed()),
    }
}

/// The request for the function, with the room reserved for its body. A refused client's body is still read, within limits: a
/// client that is cut off while it sends does not read the refusal.
async fn admit(
    asked: hyper::Request<Incoming>,
    shared: &Shared,
) -> Result<(Request, Option<OwnedSemaphorePermit>), Answer> {
    let (head, incoming) = asked.into_parts();
    match check_head(&head, &shared.settings) {
        Err(answer) => {
            discard(incoming).await;
            Err(answer)
        }
        Ok((request, None)) => Ok((request, None)),
        Ok((request, Some(bodies))) => {
            let (bytes, room) = body(incoming, bodies, shared).await?;
            Ok((Request { body: Some(bytes), ..request }, Some(room)))
        }
    }
}

/// Checks a request by its head; returns the limits of its body if it has one.
fn check_head<'s>(head: &Parts, settings: &'s Settings) -> Result<(Request, Option<&'s Bodies>), Answer> {
    let Settings { guard, bodies, refusal, .. } = settings;
    let request = Request::new(head.uri.path(), head.uri.query().unwrap_or(""));
    let text = |name: HeaderName| head.headers.get(name).and_then(|value| value.to_str().ok());
    let given = Credentials {
        host: text(header::HOST),
        token: request.value("token"),
        cookie: text(header::COOKIE),
        authorization: text(header::AUTHORIZATION),
    };
    let verdict = guard.judge(given);
    if let Verdict::Refused(why) = verdict {
        let status = if guard.has_key() { 401 } else { 403 };
        return Err(refusal(status, why));
    }
    let taken = match (&head.method, bodies) {
        (&Method::GET | &Method::HEAD, _) => None,
        (&Method::POST, Some(bodies)) => {
            let kind = text(header::CONTENT_TYPE).unwrap_or("").split(';').next().unwrap_or("").trim();
            if !kind.eq_ignore_ascii_case("application/json") {
                return Err(refusal(
                    415,
                    "the body must be JSON: send it with content-type: application/json",
                ));
            }
            Some(bodies)
        }
        (_, Some(_)) => return Err(refusal(405, "use GET or POST").with("allow", "GET, HEAD, POST")),
        (_, None) => return Err(refusal(405, "this server only shows: use GET").with("allow", "GET, HEAD")),
    };
    match verdict {
        Verdict::Keep(cookie) => {
            Err(Answer::text(303, "").with("location", request.path.clone()).with("set-cookie", cookie))
        }
        _ => Ok((request, taken)),
    }
}

/// The reason why a body was not read.
enum BodyError {
    TooLarge,
    TooLate,
    Broken,
    NoRoom,
}

/// Reads a body within its limits of size, room and time.
async fn body(
    mut incoming: Incoming,
    bodies: &Bodies,
    shared: &Shared,
) -> Result<(Bytes, OwnedSemaphorePermit), Answer> {
    let refusal = shared.settings.refusal;
    let error = match collect(&mut incoming, bodies.most_bytes, &shared.body_room).await {
        Ok(held) => return Ok(held),
        Err(error) => error,
    };
    if matches!(error, BodyError::TooLarge | BodyError::NoRoom) {
        discard(incoming).await;
    }
    Err(match error {
        BodyError::TooLate => refusal(408, "the body took too long to arrive"),
        BodyError::Broken => refusal(400, "the body ended too early"),
        BodyError::NoRoom => refusal(503, "there is no room for the body now: send the request again later")
            .with("retry-after", RETRY_AFTER),
        BodyError::TooLarge => {
            let most = bodies.most_bytes;
            refusal(413, &format!("the body is larger than {most} bytes: send less at once"))
        }
    })
}

/// Reads all of a body and reserves room for it. The client's timeout is suspended while it waits for room.
async fn collect(
    incoming: &mut Incoming,
    most: usize,
    all_room: &Arc<Semaphore>,
) -> Result<(Bytes, OwnedSemaphorePermit), BodyError> {
    let take = |bytes: usize| {
        let kibibytes = bytes.div_ceil(1 << 10) as u32;
        let taking = timeout(ROOM, Arc::clone(all_room).acquire_many_owned(kibibytes));
        async { taking.await.ok().and_then(Result::ok).ok_or(BodyError::NoRoom) }
    };
    let stated = incoming.size_hint().exact();
    if stated.is_some_and(|bytes| bytes > most as u64) {
        return Err(BodyError::TooLarge);
    }
    let mut room = take(stated.unwrap_or(0) as usize).await?;
    let mut late = Instant::now() + BODY;
    let mut held = Vec::new();
    while let Some(frame) = timeout_at(late, incoming.frame()).await.map_err(|_| BodyError::TooLate)? {
        let data = frame.map_err(|_| BodyError::Broken)?.into_data().unwrap_or_default();
        if held.len() + data.len() > most {
            return Err(BodyError::TooLarge);
        }
        let missing = (held.len() + data.len()).saturating_sub(room.num_permits() << 10);
        if missing > 0 {
            let began = Instant::now();
            room.merge(take(missing.max(GROWTH_BYTES.min(most))).await?);
            late += began.elapsed();
        }
        held.extend_from_slice(&data);
    }
    Ok((Bytes::from(held), room))
}

/// Reads and discards the rest of a body for a while.
async fn discard(mut incoming: Incoming) {
    let reading = async {
        let mut left = DISCARDED_BYTES;
        while let Some(Ok(frame)) = incoming.frame().await
            && left > 0
        {
            left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        }
    };
    let _ = timeout(DISCARDING, reading).await;
}

fn response(answer: Answer, is_head: bool) -> Response<Content> {
    let Answer { status, content_type, headers, content } = answer;
    let content = if is_head { Content::empty() } else { content };
    let mut response = Response::new(content);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let map: &mut HeaderMap = response.headers_mut();
    map.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    for (name, value) in ALWAYS {
        map.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    for (name, value) in headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            map.insert(HeaderName::from_static(name), value);
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::Mutex;

    use super::*;

    fn ask(address: SocketAddr, text: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    fn get(address: SocketAddr, path: &str, more: &str) -> String {
        ask(address, &format!("GET {path} HTTP/1.1\r\nConnection: close\r\n{more}\r\n"))
    }

    fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").unwrap()
    }

    #[test]
    fn requests_are_checked_and_answered() {
        let server = start(listener(), |request| Answer::text(200, format!("{request:?}"))).unwrap();
        let at = server.address;
        let host = "Host: localhost\r\n";
        let answer = get(at, "/a%2e/..?x=1", host);
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("/a%2e/.."), "{answer}");
        assert!(answer.contains("x-content-type-options: nosniff"), "{answer}");
        assert!(get(at, "/", "Host: evil.example\r\n").starts_with("HTTP/1.1 403"));
        let written =
            ask(at, "POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
        assert!(written.starts_with("HTTP/1.1 405"), "{written}");
        assert!(ask(at, "rubbish\r\n\r\n").starts_with("HTTP/1.1 400"));
        let head = ask(at, "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        assert!(head.ends_with("\r\n\r\n"), "{head}");
        drop(server);
        assert!(TcpStream::connect(at).is_err(), "it is gone with its handle");
    }

    /// A server that accepts bodies of up to a hundred bytes.
    fn taking() -> Server {
        let listener = listener();
        let guard = Guard::with_key(listener.local_addr().unwrap(), None);
        let refusal = |status: u16, sentence: &str| {
            Answer::whole(status, "application/json", format!("{{{sentence}}}"))
        };
        let bodies = Some(Bodies { most_bytes: 100, all_bytes: 1 << 20 });
        let settings = Settings { guard, bodies, immediate: |_| None, connections: 8, refusal };
        start_with(listener, settings, |request| {
            let (reply, promise) = Reply::later();
            let body = request.body.clone().unwrap_or_default();
            std::thread::spawn(move || promise.keep(Answer::json(body)));
            reply
        })
        .unwrap()
    }

    #[test]
    fn bodies_are_bounded_and_of_one_kind() {
        let server = taking();
        let post = |kind: &str, head: &str, body: &str| {
            let host = "Host: localhost\r\nConnection: close\r\n";
            ask(
                server.address,
                &format!("POST /x HTTP/1.1\r\n{host}Content-Type: {kind}\r\n{head}\r\n{body}"),
            )
        };
        let json = "application/json; charset=utf-8";
        let answer = post(json, "Content-Length: 7\r\n", "{\"a\":1}");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("{\"a\":1}"), "{answer}");
        let chunked = post(json, "Transfer-Encoding: chunked\r\n", "3\r\n{\"a\r\n4\r\n\":1}\r\n0\r\n\r\n");
        assert!(chunked.ends_with("{\"a\":1}"), "{chunked}");
        assert!(post("text/plain", "Content-Length: 2\r\n", "{}").starts_with("HTTP/1.1 415"));
        let large = post(json, "Content-Length: 101\r\n", &"x".repeat(101));
        assert!(large.starts_with("HTTP/1.1 413") && large.contains("larger than 100 bytes"), "{large}");
        let growing =
            post(json, "Transfer-Encoding: chunked\r\n", &format!("80\r\n{}\r\n0\r\n\r\n", "x".repeat(128)));
        assert!(growing.starts_with("HTTP/1.1 413"), "{growing}");
        assert!(post(json, "Content-Length: -1\r\n", "").starts_with("HTTP/1.1 400"));
        let options =
            ask(server.address, "OPTIONS /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        assert!(options.starts_with("HTTP/1.1 405"), "{options}");
        server.close();
    }

    #[test]
    fn a_body_has_its_room_until_it_is_used() {
        let listener = listener();
        let guard = Guard::with_key(listener.local_addr().unwrap(), None);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (began, begun) = std::sync::mpsc::channel();
        let released = Mutex::new(released);
        let settings = Settings {
            guard,
            bodies: Some(Bodies { most_bytes: 1 << 10, all_bytes: 1 << 10 }),
            immediate: |request| (request.path == "/health").then(|| Answer::text(200, "well")),
            connections: 16,
            refusal: |status, sentence| Answer::text(status, sentence),
        };
        let server = start_with(listener, settings, move |_| {
            began.send(()).unwrap();
            let _ = released.lock().unwrap().recv();
            Answer::text(200, "used").into()
        })
        .unwrap();
        let at = server.address;
        let post = move |how: &str, body: &str| {
            let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
            ask(at, &format!("POST /x HTTP/1.1\r\n{head}{how}\r\n\r\n{body}"))
        };
        let first = std::thread::spawn(move || post("Content-Length: 2", "{}"));
        begun.recv().unwrap();
        let refused = post("Content-Length: 2", "{}");
        assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after: 1"), "{refused}");
        let chunked = post("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\n\r\n");
        assert!(chunked.starts_with("HTTP/1.1 503"), "{chunked}");
        release.send(()).unwrap();
        assert!(first.join().unwrap().ends_with("used"));
        release.send(()).unwrap();
        assert!(post("Content-Length: 2", "{}").ends_with("used"), "the room is given back");
        begun.recv().unwrap();
        // All functions are busy.
        let host = "Host: localhost\r\n";
        let busy: Vec<_> = (0..FUNCTIONS).map(|_| std::thread::spawn(move || get(at, "/", host))).collect();
        busy.iter().for_each(|_| begun.recv().unwrap());
        assert!(get(at, "/health", host).ends_with("well"));
        busy.iter().for_each(|_| release.send(()).unwrap());
        busy.into_iter().for_each(|one| assert!(one.join().unwrap().ends_with("used")));
    }

    #[test]
    fn disconnected_clients_are_detected() {
        let (told, hears) = std::sync::mpsc::channel();
        let settings = Settings::showing("127.0.0.1:1".parse().unwrap());
        let server = start_with(listener(), settings, move |_| {
            let (reply, promise) = Reply::later();
            let told = told.clone();
            std::thread::spawn(move || {
                let began = std::time::Instant::now();
                while !promise.is_closed() && began.elapsed() < Duration::from_secs(60) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                told.send(promise.is_closed()).unwrap();
            });
            reply
        })
        .unwrap();
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        drop(stream);
        assert!(hears.recv().unwrap(), "the promise is closed");
    }

    #[test]
    fn closing_a_server_finishes_answers_in_progress() {
        let server = start_with(listener(), Settings::showing("127.0.0.1:1".parse().unwrap()), |_| {
            let (answer, messages) = Answer::messages();
            std::thread::spawn(move || {
                for number in 0..20 {
                    assert!(messages.send(&number.to_string()));
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            answer.into()
        })
        .unwrap();
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut seen = vec![0; 64];
        stream.read_exact(&mut seen).unwrap();
        server.close();
        stream.read_to_end(&mut seen).unwrap();
        let seen = String::from_utf8_lossy(&seen).into_owned();
        assert!(seen.contains("data: 0\n\n") && seen.contains("data: 19\n\n"), "{seen}");
    }

    #[test]
    fn a_function_that_panics_ends_nothing() {
        let server = start(listener(), |request| match request.path.as_str() {
            "/bad" => panic!("on purpose"),
            _ => Answer::text(200, "fine"),
        })
        .unwrap();
        let host = "Host: 127.0.0.1\r\n";
        assert!(get(server.address, "/bad", host).starts_with("HTTP/1.1 500"));
        assert!(get(server.address, "/", host).ends_with("fine"));
    }

    #[test]
    fn events_go_on_until_the_writer_ends() {
        let streams: Arc<Mutex<Vec<crate::Stream>>> = Arc::default();
        let kept = Arc::clone(&streams);
        let server = start(listener(), move |_| {
            let (answer, stream) = Answer::events();
            assert!(stream.is_ready() && stream.send("first", "{\"a\":1}"));
            kept.lock().unwrap().push(stream);
            answer
        })
        .unwrap();
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut seen = vec![];
        let mut part = [0; 512];
        while !String::from_utf8_lossy(&seen).contains("data: {\"a\":1}\n\n") {
            let read = stream.read(&mut part).unwrap();
            assert!(read > 0, "it ended: {}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&part[..read]);
        }
        streams.lock().unwrap().clear();
        stream.read_to_end(&mut seen).unwrap();
        assert!(String::from_utf8_lossy(&seen).contains("content-type: text/event-stream"));
    }
}
