//! A local server that speaks the hub's protocol: listings, files by commit, redirections to a storage server, ranges, and broken
//! transfers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ring::digest;

use super::exchange::{self, Reply, Request, reply};

/// The commit of every branch.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The server's files and its misbehaviour.
#[derive(Clone, Default)]
pub struct Content {
    /// The files of `org/name`.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Number of transfers from the storage server that break off half-way.
    pub breaks: usize,
    /// Whether the storage server ignores range requests.
    pub ignores_ranges: bool,
    /// Bytes that the storage server sends beyond the size that the hub states.
    pub too_many: usize,
}

pub struct HubServer {
    pub endpoint: String,
    /// Requests as `METHOD PATH range=... auth=...`, to both the hub and the storage server.
    seen: Arc<Mutex<Vec<String>>>,
}

impl HubServer {
    /// Two listeners, because storage is on another host than the hub. They live as long as the test process.
    pub fn start(content: Content) -> HubServer {
        let (content, seen) = (Arc::new(Mutex::new(content)), Arc::new(Mutex::new(vec![])));
        let store = listen(content.clone(), seen.clone(), None);
        let endpoint = listen(content, seen.clone(), Some(store));
        HubServer { endpoint, seen }
    }

    /// The requests since the last call.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

fn listen(content: Arc<Mutex<Content>>, seen: Arc<Mutex<Vec<String>>>, store: Option<String>) -> String {
    exchange::listen(move |asked, _| {
        seen.lock().unwrap().push(asked.line());
        let mut content = content.lock().unwrap();
        match &store {
            Some(store) => of_hub(asked, &content, store),
            None => of_store(asked, &mut content),
        }
    })
}

/// Weights are on the storage server; everything else is on the hub itself.
fn is_large(file: &str) -> bool {
    file.ends_with(".safetensors")
}

fn of_hub(asked: &Request, content: &Content, store: &str) -> Reply {
    let refused = |status: u16, code: &str| reply(status, vec![("X-Error-Code", code.to_string())], b"{}");
    if let Some(rest) = asked.path.strip_prefix("/api/models/") {
        let with_token = asked.headers.contains_key("authorization");
        return match rest.split_once("/revision/") {
            Some(("org/name", revision)) if ["main", COMMIT, "side%2Fbranch"].contains(&revision) => {
                let files: Vec<_> =
                    content.files.keys().map(|name| format!("{{\"rfilename\":\"{name}\"}}")).collect();
                let text = format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", files.join(","));
                reply(200, vec![], text.as_bytes())
            }
            Some(("org/name", _)) => refused(404, "RevisionNotFound"),
            Some(("org/old", revision)) => {
                reply(307, vec![("Location", format!("/api/models/org/name/revision/{revision}"))], b"")
            }
            Some(("org/gated", _)) => refused(if with_token { 403 } else { 401 }, "GatedRepo"),
            Some(("org/private", _)) => refused(401, "RepoNotFound"),
            Some(("org/busy", _)) => refused(503, ""),
            _ => refused(404, "RepoNotFound"),
        };
    }
    let file = asked.path.strip_prefix(&format!("/org/name/resolve/{COMMIT}/"));
    if let Some(file) = asked.path.strip_prefix(&format!("/org/old/resolve/{COMMIT}/")) {
        return reply(307, vec![("Location", format!("/org/name/resolve/{COMMIT}/{file}"))], b"");
    }
    let Some((file, bytes)) = file.and_then(|file| content.files.get_key_value(file)) else {
        return refused(404, "EntryNotFound");
    };
    let commit = ("X-Repo-Commit", COMMIT.to_string());
    if is_large(file) {
        let etag = hex(digest::digest(&digest::SHA256, bytes).as_ref());
        let headers = vec![
            commit,
            ("Location", format!("{store}/blobs/{file}")),
            ("X-Linked-Etag", format!("\"{etag}\"")),
            ("X-Linked-Size", bytes.len().to_string()),
            ("ETag", "\"of the redirection\"".to_string()),
        ];
        return reply(302, headers, b"Found. Redirecting");
    }
    let framed = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    let etag = hex(digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, &framed).as_ref());
    reply(200, vec![commit, ("ETag", format!("W/\"{etag}\""))], bytes)
}

fn of_store(asked: &Request, content: &mut Content) -> Reply {
    let Some(bytes) = asked.path.strip_prefix("/blobs/").and_then(|file| content.files.get(file)) else {
        return reply(404, vec![], b"");
    };
    let range = asked.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
    let from = range.and_then(|from| from.parse::<usize>().ok()).filter(|_| !content.ignores_ranges);
    let mut made = match from {
        Some(from) if from >= bytes.len() => reply(416, vec![], b""),
        Some(from) => {
            let said = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
            reply(206, vec![("Content-Range", said)], &bytes[from..])
        }
        None => reply(200, vec![], bytes),
    };
    made.body.resize(made.body.len() + content.too_many, 7);
    made.sent = made.body.len();
    if content.breaks > 0 {
        content.breaks -= 1;
        made.sent /= 2;
    }
    made
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
