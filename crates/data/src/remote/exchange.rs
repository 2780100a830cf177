//! A minimal HTTP server for tests: one request per connection, with replies that may break off anywhere.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

pub struct Request {
    pub method: String,
    pub path: String,
    /// Header values by lower-case name.
    pub headers: BTreeMap<String, String>,
}

impl Request {
    fn read(stream: &TcpStream) -> Option<Request> {
        let mut lines = BufReader::new(stream).lines();
        let first = lines.next()?.ok()?;
        let mut words = first.split(' ').map(String::from);
        let (method, path) = (words.next()?, words.next()?);
        let mut headers = BTreeMap::new();
        for line in lines {
            let line = line.ok()?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_string());
        }
        Some(Request { method, path, headers })
    }

    /// `METHOD PATH range=... auth=...`.
    pub fn line(&self) -> String {
        let header = |name: &str| self.headers.get(name).map_or("-", String::as_str);
        format!("{} {} range={} auth={}", self.method, self.path, header("range"), header("authorization"))
    }
}

pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Number of bytes of the body that are sent before the connection breaks.
    pub sent: usize,
}

pub fn reply(status: u16, headers: Vec<(&'static str, String)>, body: &[u8]) -> Reply {
    Reply { status, headers, body: body.to_vec(), sent: body.len() }
}

impl Reply {
    fn write(&self, mut stream: &TcpStream, to: &Request) {
        let Reply { status, headers, body, sent } = self;
        let mut head =
            format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
        headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
        let body = if to.method == "HEAD" { &[][..] } else { &body[..*sent] };
        // Sending fails only where the client is gone.
        let _ = stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(b"\r\n"))
            .and_then(|()| stream.write_all(body));
    }
}

/// Answers every request on a thread of its own until the process ends. Returns the server's address, which `answer` receives
/// too.
pub fn listen(answer: impl Fn(&Request, &str) -> Reply + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let (answer, own) = (Arc::new(answer), address.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (answer, own) = (answer.clone(), own.clone());
            std::thread::spawn(move || {
                if let Some(request) = Request::read(&stream) {
                    answer(&request, &own).write(&stream, &request);
                }
            });
        }
    });
    address
}
