//! A remote file: reads any range, resumes interrupted transfers, and fails where the file has changed.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use flatout_waits::{self as waits, Unit};
use ureq::http::Response;
use ureq::{Agent, Body};

use super::access::Access;
use super::cache::Cache;
use super::http::{self, ContentRange, HOPS};
use super::location::SetName;
use crate::error::DataError;

/// A connection without a byte for this long counts as broken.
const SILENCE: Duration = Duration::from_secs(30);
/// Longest wait that a server may request.
const LONGEST_WAIT: Duration = Duration::from_secs(120);
/// An attempt that transfers this much does not count as a failure, so a long file is read even over a bad connection.
const PROGRESS_BYTES: usize = 64 << 10;
/// Maximum age of a redirect: the hub redirects to signed URLs that are valid for about an hour.
const ROUTE_AGE: Duration = Duration::from_secs(10 * 60);

/// Number of attempts, and the pause before the third one, which doubles from then on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RetryPolicy {
    pub attempts: u32,
    pub pause: Duration,
    pub longest_pause: Duration,
}

impl Default for RetryPolicy {
    /// About two minutes in total.
    fn default() -> Self {
        Self { attempts: 10, pause: Duration::from_secs(1), longest_pause: Duration::from_secs(30) }
    }
}

impl RetryPolicy {
    fn pause(&self, failures: u32) -> Duration {
        match failures {
            0 | 1 => Duration::ZERO,
            more => self.longest_pause.min(self.pause.saturating_mul(1 << (more - 2).min(20))),
        }
    }
}

/// An HTTP client with the user's access to the hub.
pub(crate) struct Client {
    agent: Agent,
    pub access: Access,
    pub retries: RetryPolicy,
}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// A retry may succeed; the server may say when.
    Later(String, Option<Duration>),
    /// A retry is pointless: a sentence without a full stop.
    Never(String),
}

/// A response after redirects.
pub(crate) struct Answer {
    pub url: String,
    pub response: Response<Body>,
    /// ETag and size that the hub states for a file stored elsewhere.
    pub linked_tag: Option<String>,
    pub linked_bytes: Option<u64>,
}

impl Client {
    pub fn new(access: Access, silence: Duration, retries: RetryPolicy) -> Result<Self, DataError> {
        Ok(Self { agent: http::agent(silence)?, access, retries })
    }

    /// The client of this process, configured by the environment.
    pub fn shared() -> Result<Arc<Self>, DataError> {
        static SHARED: OnceLock<Arc<Client>> = OnceLock::new();
        if let Some(client) = SHARED.get() {
            return Ok(client.clone());
        }
        let client = Self::new(Access::from_environment(), SILENCE, RetryPolicy::default())?;
        Ok(SHARED.get_or_init(|| Arc::new(client)).clone())
    }

    /// Sends a GET request and follows redirects. The token is sent to the hub only.
    pub fn get(&self, url: &str, headers: &[(&str, String)]) -> Result<Answer, Refusal> {
        let (mut url, mut linked_tag, mut linked_bytes) = (url.to_string(), None, None);
        for _ in 0..HOPS {
            // Sizes and ranges refer to the file only without content encoding.
            let mut request = self.agent.get(&url).header("accept-encoding", "identity");
            if let Some(token) = self.access.token.as_ref().filter(|_| self.is_hub(&url)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            for (name, value) in headers {
                request = request.header(*name, value);
            }
            let response = request.call().map_err(|error| Refusal::Later(error.to_string(), None))?;
            let own = response.headers();
            linked_tag = linked_tag.or_else(|| http::tag(own, "x-linked-etag").map(String::from));
            let stated = || http::header(own, "x-linked-size").and_then(|bytes| bytes.parse().ok());
            linked_bytes = linked_bytes.or_else(stated);
            let Some(next) = http::location(&url, &response) else {
                return Ok(Answer { url, response, linked_tag, linked_bytes });
            };
            if url.starts_with("https://") && !next.starts_with("https://") {
                return Err(Refusal::Never(format!(
                    "{} redirects to a URL without encryption",
                    http::host(&url)
                )));
            }
            url = next;
        }
        Err(Refusal::Never(format!("{} redirects too often", http::host(&url))))
    }

    fn is_hub(&self, url: &str) -> bool {
        http::same_host(url, &self.access.endpoint)
    }

    /// Retries until an attempt succeeds or a retry is pointless.
    pub fn with_retries<T>(&self, mut attempt: impl FnMut() -> Result<T, Refusal>) -> Result<T, String> {
        let _wait = waits::begin("waiting for a server", Unit::Nothing, None);
        let mut failures = 0;
        loop {
            match attempt() {
                Ok(answer) => return Ok(answer),
                Err(Refusal::Never(sentence)) => return Err(sentence),
                Err(Refusal::Later(why, wait)) => {
                    failures += 1;
                    if failures >= self.retries.attempts {
                        return Err(format!("{why}, in each of {failures} attempts"));
                    }
                    std::thread::sleep(wait.unwrap_or_else(|| self.retries.pause(failures)));
                }
            }
        }
    }

    /// The refusal for an unsuccessful response; `set` is the data set of the request.
    pub fn refusal(&self, response: &Response<Body>, set: Option<&SetName>) -> Refusal {
        let endpoint = &self.access.endpoint;
        let code = http::header(response.headers(), "x-error-code").unwrap_or_default();
        let status = response.status().as_u16();
        let why =
            if self.access.token.is_some() { "the token sent may not read it" } else { "no token was sent" };
        Refusal::Never(match (status, code, set) {
            (408 | 425 | 429 | 500.., _, _) => {
                return Refusal::Later(format!("the server answered {}", response.status()), wait(response));
            }
            (401 | 403, "GatedRepo", Some(set)) | (403, _, Some(set)) => format!(
                "{set} is gated and {why}: accept its terms at {endpoint}/datasets/{} and set HF_TOKEN to a token of that \
                 account",
                set.repo
            ),
            (401, _, Some(set)) => format!(
                "{set} does not exist on {endpoint}, or it is private and {why}: check the name, or set HF_TOKEN"
            ),
            (404, "RevisionNotFound", Some(set)) => {
                format!("{} has no revision `{}` on {endpoint}", set.repo, set.revision())
            }
            (404, "RepoNotFound", Some(set)) => {
                format!("there is no data set {set} on {endpoint}: check the name")
            }
            (404, "EntryNotFound", Some(set)) => {
                format!("{set} has no such file or folder on {endpoint}: check the configuration or the path")
            }
            (401 | 403, ..) => {
                format!("the server denies access (status {status}): sign the URL, or make the file public")
            }
            (404 | 410, ..) => format!("there is no such file (status {status})"),
            _ => format!("the server answered {}", response.status()),
        })
    }
}

/// The wait that a server requests.
fn wait(response: &Response<Body>) -> Option<Duration> {
    let seconds: u64 = http::header(response.headers(), "retry-after")?.trim().parse().ok()?;
    Some(LONGEST_WAIT.min(Duration::from_secs(seconds)))
}

/// A remote file at one version.
#[derive(Clone)]
pub struct Object {
    file: Arc<File>,
    cache: Option<Arc<Cache>>,
}

struct File {
    client: Arc<Client>,
    url: String,
    bytes: u64,
    /// The version: from the hub's listing, or the ETag of the first response.
    tag: Option<String>,
    /// The data set on the hub that the file belongs to.
    set: Option<SetName>,
    route: Mutex<Route>,
}

/// State of the route to a file.
#[derive(Default)]
struct Route {
    /// The URL after redirects, and when it was obtained.
    place: Option<(String, Instant)>,
    /// A host, and the ETag it returns for the file.
    tag: Option<(String, String)>,
}

impl PartialEq for Object {
    fn eq(&self, other: &Self) -> bool {
        let of = |object: &Object| (object.file.url.clone(), object.file.bytes, object.file.tag.clone());
        of(self) == of(other)
    }
}

impl Eq for Object {}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} bytes, {:?})", self.file.url, self.file.bytes, self.file.tag)
    }
}

impl Object {
    /// A file of a data set, from the hub's listing.
    pub(crate) fn of_hub(
        client: Arc<Client>,
        url: String,
        bytes: u64,
        tag: Option<String>,
        set: SetName,
    ) -> Self {
        let file = File { client, url, bytes, tag, set: Some(set), route: Mutex::default() };
        Self { file: Arc::new(file), cache: None }
    }

    /// Any file, with its first bytes: at most `head_bytes`.
    pub(crate) fn open(
        client: Arc<Client>,
        url: &str,
        head_bytes: usize,
    ) -> Result<(Self, Vec<u8>), DataError> {
        let range = [("range", format!("bytes=0-{}", head_bytes.max(1) - 1))];
        let opened = client.with_retries(|| {
            let mut answer = client.get(url, &range)?;
            let headers = answer.response.headers();
            let tag = http::tag(headers, "etag").or(http::tag(headers, "last-modified")).map(String::from);
            match answer.response.status().as_u16() {
                206 => {
                    let range = ContentRange::of(headers).filter(|range| range.first == 0);
                    let Some(bytes) = range.and_then(|range| range.bytes) else {
                        return Err(Refusal::Never("the server does not state the size of the file".into()));
                    };
                    let mut head = Vec::new();
                    let body = answer.response.body_mut().with_config().limit(u64::MAX).reader();
                    let wanted = bytes.min(head_bytes as u64);
                    let read = body.take(wanted).read_to_end(&mut head);
                    match read {
                        Ok(_) if head.len() as u64 == wanted => Ok((bytes, tag, head)),
                        Ok(_) => Err(Refusal::Later(format!("it ended after {} bytes", head.len()), None)),
                        Err(error) => Err(Refusal::Later(error.to_string(), None)),
                    }
                }
                // An empty file has no satisfiable range.
                416 if http::header(headers, "content-range") == Some("bytes */0") => {
                    Ok((0, tag, Vec::new()))
                }
                200 => Err(Refusal::Never(NO_RANGES.into())),
                _ => Err(client.refusal(&answer.response, None)),
            }
        });
        let (bytes, tag, head) =
            opened.map_err(|why| DataError::input(format!("{} cannot be read: {why}.", shown(url))))?;
        let url = url.to_string();
        let file = File { client: client.clone(), url, bytes, tag, set: None, route: Mutex::default() };
        Ok((Self { file: Arc::new(file), cache: None }, head))
    }

    /// The same file, with a cache of its pieces.
    pub(crate) fn cached_in(&self, cache: Arc<Cache>) -> Self {
        Self { cache: Some(cache), ..self.clone() }
    }

    pub fn bytes(&self) -> u64 {
        self.file.bytes
    }

    /// The version of the file, where the server names one.
    pub(crate) fn tag(&self) -> Option<&str> {
        self.file.tag.as_deref()
    }

    pub(crate) fn url(&self) -> &str {
        &self.file.url
    }

    /// Bytes `at..at + len`, which must be inside the file.
    pub(crate) fn read(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        match &self.cache {
            Some(cache) => cache.read(self, at, len),
            None => self.fetch(at, len),
        }
    }

    /// As [`Self::read`], always from the server.
    pub(crate) fn fetch(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        assert!(at + len as u64 <= self.file.bytes, "only bytes that the file has are asked for");
        let mut got = Vec::with_capacity(len);
        if len == 0 {
            return Ok(got);
        }
        let mut counted = 0;
        let fetched = self.file.client.with_retries(|| {
            loop {
                let before = got.len();
                match self.file.receive(at, len, &mut got) {
                    Ok(()) => return Ok(()),
                    Err(Refusal::Later(..)) if got.len() - counted >= PROGRESS_BYTES => counted = got.len(),
                    // A signed URL may have expired, so the next attempt obtains a new one at once.
                    Err(Refusal::Later(_, None)) if got.len() == before && self.file.forget_place() => {}
                    Err(refusal) => return Err(refusal),
                }
            }
        });
        fetched.map(|()| got).map_err(io::Error::other)
    }
}

const NO_RANGES: &str = "the server sends the whole file when a part is requested, so it cannot be read during training: \
                         download it, and give data.path its files";
const CHANGED: &str = "the file changed on the server since the run began to read it: give the version that it began with, or \
                       begin a new run";

impl File {
    /// A single transfer, which appends the received part of the rest to `got`.
    fn receive(&self, at: u64, len: usize, got: &mut Vec<u8>) -> Result<(), Refusal> {
        let first = at + got.len() as u64;
        let last = at + len as u64 - 1;
        let mut headers = vec![("range", format!("bytes={first}-{last}"))];
        let place = self.place();
        let known = self.route.lock().expect("no reader panics").tag.clone();
        if let Some((_, tag)) = known.as_ref().filter(|(host, _)| http::host(&place) == host) {
            headers.push(("if-range", format!("\"{tag}\"")));
        }
        let answer = self.client.get(&place, &headers)?;
        let own = answer.response.headers();
        let is_linked = answer.linked_tag.is_some();
        if is_linked && self.tag.is_some() && answer.linked_tag != self.tag
            || answer.linked_bytes.is_some_and(|bytes| bytes != self.bytes)
        {
            return Err(Refusal::Never(CHANGED.into()));
        }
        let tag = http::tag(own, "etag").map(String::from);
        // Weak ETags do not identify exact bytes.
        let is_strong = http::header(own, "etag").is_some_and(|tag| tag.starts_with('"'));
        let host = http::host(&answer.url).to_string();
        let is_other = |tag: &String| match (&self.set, &self.tag, &known) {
            (None, Some(own), _) if own != tag => true,
            (_, _, Some((at, known))) => *at == host && known != tag,
            _ => false,
        };
        let status = answer.response.status().as_u16();
        if matches!(status, 200 | 206) && is_strong && tag.as_ref().is_some_and(is_other) {
            return Err(Refusal::Never(CHANGED.into()));
        }
        match status {
            206 => {
                let range = ContentRange::of(own);
                if range.is_some_and(|range| range.bytes.is_some_and(|bytes| bytes != self.bytes)) {
                    return Err(Refusal::Never(CHANGED.into()));
                }
                if !range.is_some_and(|range| range.first == first && range.last <= last) {
                    let said = http::header(own, "content-range").unwrap_or("none").to_string();
                    let why = format!("the server sent another range ({said}) than bytes {first}-{last}");
                    return Err(Refusal::Later(why, None));
                }
            }
            200 if first == 0 && last + 1 == self.bytes => {}
            200 => return Err(Refusal::Never(NO_RANGES.into())),
            412 | 416 => return Err(Refusal::Never(CHANGED.into())),
            // A signed URL may have expired.
            400 | 401 | 403 | 404 | 410 if place != self.url => {
                return Err(Refusal::Later(format!("the store answered {status}"), None));
            }
            _ => return Err(self.client.refusal(&answer.response, self.set.as_ref())),
        }
        let mut route = self.route.lock().expect("no reader panics");
        if answer.url != place {
            route.place = Some((answer.url, Instant::now()));
        }
        if let Some(tag) = tag.filter(|_| is_strong) {
            route.tag = Some((host, tag));
        }
        drop(route);
        let wanted = len - got.len();
        let body = answer.response.into_body().into_with_config().limit(u64::MAX).reader();
        match body.take(wanted as u64).read_to_end(got) {
            Ok(_) if got.len() == len => Ok(()),
            Ok(_) => Err(Refusal::Later(format!("it ended after {} of {len} bytes", got.len()), None)),
            Err(error) => Err(Refusal::Later(error.to_string(), None)),
        }
    }

    /// The URL to request: that after redirects, if it is known and recent.
    fn place(&self) -> String {
        let route = self.route.lock().expect("no reader panics");
        let recent = route.place.as_ref().filter(|(_, since)| since.elapsed() < ROUTE_AGE);
        recent.map_or_else(|| self.url.clone(), |(url, _)| url.clone())
    }

    /// Forgets the URL after redirects; false if there was none.
    fn forget_place(&self) -> bool {
        self.route.lock().expect("no reader panics").place.take().is_some()
    }
}

/// A URL without its query, which may contain a secret signature.
pub fn shown(url: &str) -> &str {
    url.split('?').next().unwrap_or(url)
}
