//! A local server for tests that speaks the hub's protocol for data sets: cards, paginated listings, files by commit, redirects
//! to a store, range requests, and faults.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::exchange::{self, Reply, Request, reply};

/// The commit of `main` when a server starts.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A fault of the store, which occurs once.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// Sends half of the body, then closes the connection.
    Short,
    /// Sends another range than requested.
    OtherRange,
    /// Sends the whole file in place of a range.
    Whole,
    /// Another status, with a header `Retry-After` where a number is given.
    Status(u16, Option<u64>),
    /// Sends nothing for a while.
    Hang(Duration),
    /// Sends another ETag.
    OtherTag,
}

/// The content of the server.
#[derive(Clone, Default)]
pub struct Content {
    /// The commit of `main`.
    pub main: String,
    /// Files of `org/set` by commit and path.
    pub commits: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// The configurations of the card, as JSON.
    pub configs: String,
    /// Faults of the store, in the order of requests.
    pub faults: VecDeque<Fault>,
}

impl Content {
    pub fn of(files: BTreeMap<String, Vec<u8>>) -> Self {
        let commits = BTreeMap::from([(COMMIT.to_string(), files)]);
        Self { main: COMMIT.into(), commits, configs: "null".into(), faults: VecDeque::new() }
    }
}

pub struct SetServer {
    pub endpoint: String,
    store: String,
    content: Arc<Mutex<Content>>,
    /// `METHOD PATH range=... auth=...`, of both the hub and the store.
    seen: Arc<Mutex<Vec<String>>>,
}

impl SetServer {
    /// Starts two listeners, because hub and store are different hosts. They live until the process ends.
    pub fn start(content: Content) -> Self {
        let (content, seen) = (Arc::new(Mutex::new(content)), Arc::new(Mutex::new(vec![])));
        let store = listen(content.clone(), seen.clone(), None);
        let endpoint = listen(content.clone(), seen.clone(), Some(store.clone()));
        Self { endpoint, store, content, seen }
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }

    pub fn change(&self, change: impl FnOnce(&mut Content)) {
        change(&mut self.content.lock().unwrap());
    }

    /// The URL of a file in the store, for use without the hub.
    pub fn address(&self, file: &str) -> String {
        format!("{}/{COMMIT}/{file}", self.store)
    }
}

fn listen(content: Arc<Mutex<Content>>, seen: Arc<Mutex<Vec<String>>>, store: Option<String>) -> String {
    exchange::listen(move |request, own| {
        seen.lock().unwrap().push(request.line());
        match &store {
            Some(store) => of_hub(request, &content.lock().unwrap(), own, store),
            None => of_store(request, &content),
        }
    })
}

/// Files per page of a listing.
const PAGE: usize = 2;

fn of_hub(request: &Request, content: &Content, own: &str, store: &str) -> Reply {
    let refused = |status: u16, code: &str| reply(status, vec![("X-Error-Code", code.to_string())], b"{}");
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    if let Some(rest) = path.strip_prefix("/api/datasets/org/set/revision/") {
        let commit = if rest == "main" { content.main.as_str() } else { rest };
        if !content.commits.contains_key(commit) {
            return refused(404, "RevisionNotFound");
        }
        let text = format!("{{\"sha\":\"{commit}\",\"cardData\":{{\"configs\":{}}}}}", content.configs);
        return reply(200, vec![], text.as_bytes());
    }
    if let Some(rest) = path.strip_prefix("/api/datasets/org/set/tree/") {
        let (commit, folder) = rest.split_once('/').unwrap_or((rest, ""));
        let Some(files) = content.commits.get(commit) else { return refused(404, "RevisionNotFound") };
        let below = |path: &&String| folder.is_empty() || path.starts_with(&format!("{folder}/"));
        let all: Vec<&String> = files.keys().filter(below).collect();
        let from = query.split("cursor=").nth(1).and_then(|from| from.parse().ok()).unwrap_or(0);
        let entry = |path: &&String| {
            let bytes = files[*path].len();
            let lfs = format!("{{\"oid\":\"{}\",\"size\":{bytes}}}", tag(&files[*path]));
            format!(
                "{{\"type\":\"file\",\"path\":\"{path}\",\"size\":{bytes},\"oid\":\"git\",\"lfs\":{lfs}}}"
            )
        };
        let page: Vec<String> = all.iter().skip(from).take(PAGE).map(entry).collect();
        let mut headers = vec![];
        if from + PAGE < all.len() {
            let next = format!("<{own}{path}?recursive=true&cursor={}>; rel=\"next\"", from + PAGE);
            headers.push(("Link", next));
        }
        return reply(200, headers, format!("[{}]", page.join(",")).as_bytes());
    }
    if let Some(rest) = path.strip_prefix("/datasets/org/set/resolve/") {
        let found = rest.split_once('/').and_then(|(commit, path)| content.commits.get(commit)?.get(path));
        let Some(bytes) = found else { return refused(404, "EntryNotFound") };
        let headers = vec![
            ("Location", format!("{store}/{rest}?signed=1")),
            ("X-Linked-Etag", format!("\"{}\"", tag(bytes))),
            ("X-Linked-Size", bytes.len().to_string()),
        ];
        return reply(302, headers, b"Found. Redirecting");
    }
    match path {
        _ if path.contains("/org/gated/") => {
            let has_token = request.headers.contains_key("authorization");
            refused(if has_token { 403 } else { 401 }, "GatedRepo")
        }
        _ if path.contains("/org/private/") => refused(401, "RepoNotFound"),
        _ => refused(404, "RepoNotFound"),
    }
}

fn of_store(request: &Request, content: &Mutex<Content>) -> Reply {
    let path = request.path.split('?').next().unwrap_or_default().trim_start_matches('/');
    let (found, fault) = {
        let mut content = content.lock().unwrap();
        let found = path.split_once('/').and_then(|(commit, path)| content.commits.get(commit)?.get(path));
        let found = found.cloned();
        (found, content.faults.pop_front())
    };
    let Some(bytes) = found else { return reply(404, vec![], b"") };
    let mut etag = format!("\"{}\"", tag(&bytes));
    match &fault {
        Some(Fault::Status(status, wait)) => {
            let wait = wait.map(|wait| ("Retry-After", wait.to_string()));
            return reply(*status, wait.into_iter().collect(), b"");
        }
        Some(Fault::Hang(time)) => std::thread::sleep(*time),
        Some(Fault::OtherTag) => etag = "\"other\"".into(),
        _ => {}
    }
    let range = request.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let range =
        range.and_then(|(first, last)| Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?)));
    let is_other = request.headers.get("if-range").is_some_and(|tag| *tag != etag);
    let tagged = ("ETag", etag);
    let (first, last) = match range.filter(|_| !is_other && fault != Some(Fault::Whole)) {
        Some((first, last)) => (first, last.min(bytes.len().saturating_sub(1))),
        None => return reply(200, vec![tagged], &bytes),
    };
    if first >= bytes.len() {
        return reply(416, vec![("Content-Range", format!("bytes */{}", bytes.len()))], b"");
    }
    let said = match fault {
        Some(Fault::OtherRange) => format!("bytes {}-{last}/{}", first + 1, bytes.len()),
        _ => format!("bytes {first}-{last}/{}", bytes.len()),
    };
    let mut made = reply(206, vec![("Content-Range", said), tagged], &bytes[first..=last]);
    if fault == Some(Fault::Short) {
        made.sent /= 2;
    }
    made
}

/// An ETag for a content.
pub fn tag(bytes: &[u8]) -> String {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix))
}
