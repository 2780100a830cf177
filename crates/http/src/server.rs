//! The thread that listens. It reads headers for a while and no longer, takes a number of connections and no more, and
//! ends when its handle is dropped.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Semaphore, oneshot};

use crate::answer::{Answer, Content};
use crate::guard::{Credentials, Guard, Verdict};
use crate::request::Request;

/// Connections at once; more wait.
const CONNECTIONS: usize = 128;
/// Functions at once.
const FUNCTIONS: usize = 4;
/// How long a client may take for its headers.
const HEADERS: Duration = Duration::from_secs(10);

/// Sent with every answer: nothing is kept, guessed, framed or told to others.
const ALWAYS: [(&str, &str); 5] = [
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("x-frame-options", "DENY"),
    ("cross-origin-resource-policy", "same-origin"),
];

type Function = dyn Fn(&Request) -> Answer + Send + Sync;

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

    /// Waits for ever, or until the thread has failed.
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

/// Serves a listener on a thread of its own. `function` answers what the guard admits.
pub fn start(
    listener: TcpListener,
    function: impl Fn(&Request) -> Answer + Send + Sync + 'static,
) -> io::Result<Server> {
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let guard = Arc::new(Guard::new(address));
    let url = guard.url();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(FUNCTIONS)
        .thread_name("http")
        .build()?;
    let (stop, stopped) = oneshot::channel();
    let function: Arc<Function> = Arc::new(function);
    let run = move || {
        runtime.block_on(async {
            let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
            tokio::spawn(async move { accept(&listener, &guard, &function).await });
            let _ = stopped.await;
        });
        // Functions that still run are not waited for.
        runtime.shutdown_background();
    };
    let thread = std::thread::Builder::new().name("http".into()).spawn(run)?;
    Ok(Server { address, url, stop: Some(stop), thread: Some(thread) })
}

async fn accept(listener: &tokio::net::TcpListener, guard: &Arc<Guard>, function: &Arc<Function>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let Ok((connection, _)) = listener.accept().await else {
            // No file is left for another connection: others will end.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (guard, function) = (Arc::clone(guard), Arc::clone(function));
        tokio::spawn(async move {
            let service = service_fn(move |asked| {
                let (guard, function) = (Arc::clone(&guard), Arc::clone(&function));
                async move { Ok::<_, Infallible>(respond(asked, &guard, function).await) }
            });
            let mut protocol = http1::Builder::new();
            protocol.timer(TokioTimer::new()).header_read_timeout(HEADERS);
            let _ = protocol.serve_connection(TokioIo::new(connection), service).await;
            drop(place);
        });
    }
}

async fn respond(
    asked: hyper::Request<Incoming>,
    guard: &Guard,
    function: Arc<Function>,
) -> Response<Content> {
    let is_head = asked.method() == Method::HEAD;
    let request = Request::new(asked.uri().path(), asked.uri().query().unwrap_or(""));
    let text = |name: HeaderName| asked.headers().get(name).and_then(|value| value.to_str().ok());
    let given = Credentials {
        host: text(header::HOST),
        token: request.value("token"),
        cookie: text(header::COOKIE),
        authorization: text(header::AUTHORIZATION),
    };
    let answer = match guard.judge(given) {
        Verdict::Refused(why) => Answer::text(403, why),
        _ if !is_head && asked.method() != Method::GET => {
            Answer::text(405, "this server only shows: use GET").with("allow", "GET, HEAD")
        }
        Verdict::Keep(cookie) => {
            Answer::text(303, "").with("location", request.path.clone()).with("set-cookie", cookie)
        }
        Verdict::Admitted => {
            let answered = tokio::task::spawn_blocking(move || function(&request)).await;
            answered.unwrap_or_else(|_| Answer::text(500, "the answer failed; flatout goes on"))
        }
    };
    response(answer, is_head)
}

fn response(answer: Answer, is_head: bool) -> Response<Content> {
    let Answer { status, content_type, headers, content } = answer;
    let content = if is_head { Content::Whole(Default::default()) } else { content };
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
