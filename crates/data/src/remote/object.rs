//! A file on a server: any range of it, taken up again where a transfer breaks off, and an error where the file changed.

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

/// Without a byte for this long a connection counts as broken.
const SILENCE: Duration = Duration::from_secs(30);
/// The longest wait that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(120);
/// A transfer that brought this much is no failure to count: a long file over a bad line is read in the end.
const PROGRESS_BYTES: usize = 64 << 10;
/// The hub redirects to a store by an address that is signed for an hour or so: it is asked again before that.
const ROUTE_AGE: Duration = Duration::from_secs(10 * 60);

/// How often what breaks off is taken up again, and the pause before the third attempt, which doubles from then on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    pub attempts: u32,
    pub pause: Duration,
    pub longest_pause: Duration,
}

impl Default for Patience {
    /// Some two minutes altogether.
    fn default() -> Self {
        Self { attempts: 10, pause: Duration::from_secs(1), longest_pause: Duration::from_secs(30) }
    }
}

impl Patience {
    fn pause(&self, failures: u32) -> Duration {
        match failures {
            0 | 1 => Duration::ZERO,
            more => self.longest_pause.min(self.pause.saturating_mul(1 << (more - 2).min(20))),
        }
    }
}

/// Connections to servers, and who asks.
pub(crate) struct Client {
    agent: Agent,
    pub access: Access,
    pub patience: Patience,
}

/// Why an answer is not what was asked for.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It may be given later; the server may say when.
    Later(String, Option<Duration>),
    /// It will not be given: a sentence without its full stop.
    Never(String),
}

/// An answer behind redirections.
pub(crate) struct Answer {
    pub url: String,
    pub response: Response<Body>,
    /// The version and size that the hub states of a file that lies elsewhere.
    pub linked_tag: Option<String>,
    pub linked_bytes: Option<u64>,
}

impl Client {
    pub fn new(access: Access, silence: Duration, patience: Patience) -> Result<Self, DataError> {
        Ok(Self { agent: http::agent(silence)?, access, patience })
    }

    /// The client of this process, with what the environment says.
    pub fn shared() -> Result<Arc<Self>, DataError> {
        static SHARED: OnceLock<Arc<Client>> = OnceLock::new();
        if let Some(client) = SHARED.get() {
            return Ok(client.clone());
        }
        let client = Self::new(Access::from_environment(), SILENCE, Patience::default())?;
        Ok(SHARED.get_or_init(|| Arc::new(client)).clone())
    }

    /// Asks and follows redirections. The token goes to the hub alone.
    pub fn get(&self, url: &str, headers: &[(&str, String)]) -> Result<Answer, Refusal> {
        let (mut url, mut linked_tag, mut linked_bytes) = (url.to_string(), None, None);
        for _ in 0..HOPS {
            // Lengths and ranges are a file's own only where nothing was compressed on the way.
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
                    "{} redirects to an address without encryption",
                    http::host(&url)
                )));
            }
            url = next;
        }
        Err(Refusal::Never(format!("{} redirects without end", http::host(&url))))
    }

    fn is_hub(&self, url: &str) -> bool {
        http::same_host(url, &self.access.endpoint)
    }

    /// Tries until there is an answer, or none is to be expected.
    pub fn patiently<T>(&self, mut attempt: impl FnMut() -> Result<T, Refusal>) -> Result<T, String> {
        let _wait = waits::begin("waiting for a server", Unit::Nothing, None);
        let mut failures = 0;
        loop {
            match attempt() {
                Ok(answer) => return Ok(answer),
                Err(Refusal::Never(sentence)) => return Err(sentence),
                Err(Refusal::Later(why, wait)) => {
                    failures += 1;
                    if failures >= self.patience.attempts {
                        return Err(format!("{why}, and so in each of {failures} attempts"));
                    }
                    std::thread::sleep(wait.unwrap_or_else(|| self.patience.pause(failures)));
                }
            }
        }
    }

    /// The refusal of an answer that is no success; `set` is the data set it is about.
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
                format!(
                    "the server gives it only to some (status {status}): sign the address, or make it public"
                )
            }
            (404 | 410, ..) => format!("there is no such file (status {status})"),
            _ => format!("the server answered {}", response.status()),
        })
    }
}

/// How long a server asks to wait.
fn wait(response: &Response<Body>) -> Option<Duration> {
    let seconds: u64 = http::header(response.headers(), "retry-after")?.trim().parse().ok()?;
    Some(LONGEST_WAIT.min(Duration::from_secs(seconds)))
}

/// A file on a server, at one version.
#[derive(Clone)]
pub struct Object {
    file: Arc<File>,
    cache: Option<Arc<Cache>>,
}

struct File {
    client: Arc<Client>,
    url: String,
    bytes: u64,
    /// The version: that of the hub's listing, or the ETag of the first answer.
    tag: Option<String>,
    /// The data set of the hub that it is of.
    set: Option<SetName>,
    route: Mutex<Route>,
}

/// How a file is reached, found out on the way.
#[derive(Default)]
struct Route {
    /// The address behind the redirections, since when.
    place: Option<(String, Instant)>,
    /// The ETag that a host gives it.
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
    /// A file of a data set, as the hub lists it.
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

    /// Any file, and its first bytes: at most `head_bytes`.
    pub(crate) fn open(
        client: Arc<Client>,
        url: &str,
        head_bytes: usize,
    ) -> Result<(Self, Vec<u8>), DataError> {
        let range = [("range", format!("bytes=0-{}", head_bytes.max(1) - 1))];
        let opened = client.patiently(|| {
            let mut answer = client.get(url, &range)?;
            let headers = answer.response.headers();
            let tag = http::tag(headers, "etag").or(http::tag(headers, "last-modified")).map(String::from);
            match answer.response.status().as_u16() {
                206 => {
                    let range = ContentRange::of(headers).filter(|range| range.first == 0);
                    let Some(bytes) = range.and_then(|range| range.bytes) else {
                        return Err(Refusal::Never("the server does not say how large the file is".into()));
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
                // Nothing can be taken from a file without bytes.
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

    /// The same, with pieces of it kept on disk.
    pub(crate) fn kept_in(&self, cache: Arc<Cache>) -> Self {
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

    /// Bytes `at..at + len`, all of which the file has.
    pub(crate) fn read(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        match &self.cache {
            Some(cache) => cache.read(self, at, len),
            None => self.fetch(at, len),
        }
    }

    /// The same from the server.
    pub(crate) fn fetch(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        assert!(at + len as u64 <= self.file.bytes, "only bytes that the file has are asked for");
        let mut got = Vec::with_capacity(len);
        if len == 0 {
            return Ok(got);
        }
        let mut counted = 0;
        let fetched = self.file.client.patiently(|| {
            loop {
                let before = got.len();
                match self.file.receive(at, len, &mut got) {
                    Ok(()) => return Ok(()),
                    Err(Refusal::Later(..)) if got.len() - counted >= PROGRESS_BYTES => counted = got.len(),
                    // Another address may do at once: what was signed is not for ever.
                    Err(Refusal::Later(_, None)) if got.len() == before && self.file.forget_place() => {}
                    Err(refusal) => return Err(refusal),
                }
            }
        });
        fetched.map(|()| got).map_err(io::Error::other)
    }
}

const NO_RANGES: &str = "the server sends the whole file where a part is asked for, so it cannot be read as it is trained on: \
                         download it, and give data.path its files";
const CHANGED: &str = "the file changed on the server since the run began to read it: give the version that it began with, or \
                       begin a new run";

impl File {
    /// One transfer: as much as comes of the rest is added to `got`.
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
        // Weak tags do not tell versions apart byte by byte.
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
            // An address that was signed is good for a while only.
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

    /// Where it is asked for.
    fn place(&self) -> String {
        let route = self.route.lock().expect("no reader panics");
        let recent = route.place.as_ref().filter(|(_, since)| since.elapsed() < ROUTE_AGE);
        recent.map_or_else(|| self.url.clone(), |(url, _)| url.clone())
    }

    /// Asks the server itself the next time; false where that was done already.
    fn forget_place(&self) -> bool {
        self.route.lock().expect("no reader panics").place.take().is_some()
    }
}

/// An address without what is signed into it, which is a secret for as long as it is good.
pub fn shown(url: &str) -> &str {
    url.split('?').next().unwrap_or(url)
}
