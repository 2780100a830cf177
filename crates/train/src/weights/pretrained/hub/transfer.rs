//! Transfers files from the hub over HTTP: lists them, requests them by commit, resumes broken transfers, and checks hashes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use flatout_waits::{self as waits, Unit};
use ring::digest;
use ureq::http::{HeaderMap, Response};
use ureq::{Agent, Body};

use super::{Fetching, Hub, Name, Watch, cannot_write, is_commit, parse_listing};
use crate::UserError;
use crate::refuse;
use flatout_data::durable;
use flatout_data::remote::http::{self, ContentRange, HOPS, header as text, location, same_host};

/// Attempts per file, the first one included.
const ATTEMPTS: u32 = 6;
/// Bytes per read, and between two progress reports.
const CHUNK_BYTES: usize = 1 << 20;
const REPORT_BYTES: u64 = 64 << 20;
/// The most bytes of a file whose size the hub does not state.
const UNSTATED_BYTES: u64 = 1 << 30;
/// A connection counts as broken after this long without a byte.
const SILENCE: Duration = Duration::from_secs(60);

/// Transfers of one model into its folder of the cache.
pub struct Transfer<'a> {
    hub: &'a Hub,
    name: &'a Name,
    folder: &'a Path,
    agent: Agent,
}

/// The hub's answer about a file before sending it.
struct Head {
    etag: String,
    bytes: Option<u64>,
}

impl<'a> Transfer<'a> {
    pub fn new(hub: &'a Hub, name: &'a Name, folder: &'a Path) -> Result<Transfer<'a>, UserError> {
        let agent = http::agent(SILENCE).map_err(|error| UserError(error.to_string()))?;
        Ok(Transfer { hub, name, folder, agent })
    }

    /// The present commit of the revision, and its files.
    pub fn listing(&self) -> Result<(String, Vec<String>), UserError> {
        let (repo, revision) = (&self.name.repo, self.name.revision().replace('/', "%2F"));
        let url = format!("{}/api/models/{repo}/revision/{revision}", self.hub.endpoint);
        let mut response = self.ask("GET", &url, None)?;
        self.accept(&response, "")?;
        let text = response.body_mut().read_to_string().unwrap_or_default();
        match parse_listing(&text) {
            Some(listing) => Ok(listing),
            None => refuse!(
                "{} does not answer as the hub does: HF_ENDPOINT names another place",
                self.hub.endpoint
            ),
        }
    }

    /// Downloads one file of a commit into the cache and links it to `place`.
    pub fn fetch(&self, commit: &str, file: &str, place: &Path, watch: Watch<'_>) -> Result<(), UserError> {
        let url = format!("{}/{}/resolve/{commit}/{file}", self.hub.endpoint, self.name.repo);
        let head = self.head(&url, commit, file)?;
        let blobs = self.folder.join("blobs");
        let made = fs::create_dir_all(&blobs)
            .and_then(|()| fs::create_dir_all(place.parent().expect("in a folder")));
        made.map_err(|error| cannot_write(&blobs, error))?;
        let blob = blobs.join(&head.etag);
        // One process at a time downloads a file; the next one finds it there. The lock file is that of the hub's own tools.
        let _lock = self.lock(&head.etag)?;
        if !blob.is_file() {
            self.bring(&url, file, &head, &blob, watch)?;
        }
        link(&head.etag, place).map_err(|error| cannot_write(place, error))
    }

    fn lock(&self, etag: &str) -> Result<File, UserError> {
        let of_model = self.folder.file_name().expect("a model's folder has a name");
        let folder = self.hub.cache.join(".locks").join(of_model);
        let path = folder.join(format!("{etag}.lock"));
        let opened = fs::create_dir_all(&folder).and_then(|()| File::create(&path));
        let locked = opened.and_then(|file| file.lock().map(|()| file));
        locked.map_err(|error| cannot_write(&path, error))
    }

    fn head(&self, url: &str, commit: &str, file: &str) -> Result<Head, UserError> {
        // The first answer, before any redirection to a storage server, has the hub's own fields.
        let mut url = url.to_string();
        let mut response = self.send("HEAD", &url, None)?;
        for _ in 0..HOPS {
            match location(&url, &response) {
                // The model was renamed: the hub redirects within itself.
                Some(next) if same_host(&url, &next) && !response.headers().contains_key("x-linked-etag") => {
                    url = next;
                    response = self.send("HEAD", &url, None)?;
                }
                _ => break,
            }
        }
        let redirected = response.status().is_redirection();
        if !redirected {
            self.accept(&response, file)?;
        }
        let headers = response.headers();
        if let Some(other) = text(headers, "x-repo-commit").filter(|sent| is_commit(sent) && *sent != commit)
        {
            refuse!(
                "{} answered with commit {other} when asked for {commit} of {}",
                self.hub.endpoint,
                self.name
            );
        }
        let etag = text(headers, "x-linked-etag").or(text(headers, "etag")).unwrap_or_default();
        let etag = etag.trim_start_matches("W/").trim_matches('"').to_string();
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if etag.is_empty() || !etag.chars().all(is_name) {
            refuse!("{} gave no usable ETag for {file} of {}", self.hub.endpoint, self.name);
        }
        let own_length = (!redirected).then(|| text(headers, "content-length")).flatten();
        let bytes = text(headers, "x-linked-size").or(own_length).and_then(|n| n.parse().ok());
        Ok(Head { etag, bytes })
    }

    /// Downloads to `blob`, continuing an earlier partial download.
    fn bring(
        &self,
        url: &str,
        file: &str,
        head: &Head,
        blob: &Path,
        watch: Watch<'_>,
    ) -> Result<(), UserError> {
        let partial = PathBuf::from(format!("{}.incomplete", blob.display()));
        let mut broke = String::new();
        for attempt in 0..ATTEMPTS {
            // The first retry follows immediately, later ones after 1, 2, 4 ... seconds.
            if attempt > 1 {
                std::thread::sleep(Duration::from_secs(1 << (attempt - 2)));
            }
            match self.receive(url, file, head, &partial, watch)? {
                Received::Whole => {
                    if !is_right(&partial, &head.etag).map_err(|error| cannot_write(&partial, error))? {
                        fs::remove_file(&partial).map_err(|error| cannot_write(&partial, error))?;
                        broke = "what came is not what the hub says the file is".into();
                        continue;
                    }
                    let moved = fs::rename(&partial, blob);
                    let moved =
                        moved.and_then(|()| durable::sync_folder(blob.parent().expect("in a folder")));
                    return moved.map_err(|error| cannot_write(blob, error));
                }
                Received::Broken(why) => broke = why,
            }
        }
        refuse!(
            "{file} of {} could not be downloaded from {} in {ATTEMPTS} attempts: {broke}; the same command takes it up \
             where it broke off",
            self.name,
            self.hub.endpoint
        )
    }

    fn receive(
        &self,
        url: &str,
        file: &str,
        head: &Head,
        partial: &Path,
        watch: Watch<'_>,
    ) -> Result<Received, UserError> {
        let cannot = |error: io::Error| cannot_write(partial, error);
        let mut out = OpenOptions::new().create(true).append(true).open(partial).map_err(cannot)?;
        let mut done_bytes = out.metadata().map_err(cannot)?.len();
        if head.bytes.is_some_and(|bytes| done_bytes > bytes) {
            out.set_len(0).map_err(cannot)?;
            done_bytes = 0;
        }
        watch(&Fetching { file, done_bytes, total_bytes: head.bytes });
        let wait = waits::begin(format!("fetching {file}"), Unit::Bytes, head.bytes);
        if head.bytes == Some(done_bytes) {
            return Ok(Received::Whole);
        }
        let response = match self.ask("GET", url, (done_bytes > 0).then_some(done_bytes)) {
            Ok(response) => response,
            Err(UserError(sentence)) => return Ok(Received::Broken(sentence)),
        };
        match response.status().as_u16() {
            206 if begins_at(response.headers(), done_bytes) => {}
            500.. | 416 | 429 | 206 => {
                out.set_len(0).map_err(cannot)?;
                return Ok(Received::Broken(format!("the server answered {}", response.status())));
            }
            _ => {
                self.accept(&response, file)?;
                out.set_len(0).map_err(cannot)?;
                done_bytes = 0;
            }
        }
        let most_bytes = head.bytes.unwrap_or(UNSTATED_BYTES);
        let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut reported = done_bytes;
        let broke = loop {
            match body.read(&mut buffer) {
                Ok(0) => break None,
                Ok(count) if done_bytes + count as u64 > most_bytes => {
                    fs::remove_file(partial).map_err(cannot)?;
                    let limit = match head.bytes {
                        Some(bytes) => format!("the {bytes} bytes it says there are"),
                        None => format!("{most_bytes} bytes without saying how many there are"),
                    };
                    refuse!(
                        "{} sends more of {file} of {} than {limit}: it is not downloaded",
                        self.hub.endpoint,
                        self.name
                    );
                }
                Ok(count) => {
                    out.write_all(&buffer[..count]).map_err(cannot)?;
                    done_bytes += count as u64;
                    wait.set(done_bytes);
                    if done_bytes >= reported + REPORT_BYTES {
                        reported = done_bytes;
                        watch(&Fetching { file, done_bytes, total_bytes: head.bytes });
                    }
                }
                Err(error) => break Some(error.to_string()),
            }
        };
        out.sync_all().map_err(cannot)?;
        if head.bytes.map_or(broke.is_none(), |bytes| done_bytes == bytes) {
            watch(&Fetching { file, done_bytes, total_bytes: head.bytes });
            return Ok(Received::Whole);
        }
        let why = broke.unwrap_or_else(|| format!("it ended after {done_bytes} bytes"));
        Ok(Received::Broken(why))
    }

    /// Sends a request and follows redirections. The user's token is sent only to the hub.
    fn ask(&self, method: &str, url: &str, from_byte: Option<u64>) -> Result<Response<Body>, UserError> {
        let mut url = url.to_string();
        for _ in 0..HOPS {
            let response = self.send(method, &url, from_byte)?;
            match location(&url, &response) {
                Some(next) => url = next,
                None => return Ok(response),
            }
        }
        refuse!("{} redirects without end", self.hub.endpoint)
    }

    fn send(&self, method: &str, url: &str, from_byte: Option<u64>) -> Result<Response<Body>, UserError> {
        let mut request = if method == "HEAD" { self.agent.head(url) } else { self.agent.get(url) };
        // The length belongs to the file only if the transfer is not compressed.
        request = request.header("accept-encoding", "identity");
        if let Some(token) = self.hub.token.as_ref().filter(|_| same_host(url, &self.hub.endpoint)) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if let Some(from) = from_byte {
            request = request.header("range", format!("bytes={from}-"));
        }
        request.call().map_err(|error| {
            UserError(format!(
                "{} cannot be reached for {}: {error}; where there is no network, give a folder or set HF_HUB_OFFLINE=1 \
                 to use what is in the cache",
                self.hub.endpoint, self.name
            ))
        })
    }

    /// Accepts an answer that has the requested content; otherwise the error explains the hub's answer.
    fn accept(&self, response: &Response<Body>, file: &str) -> Result<(), UserError> {
        let (name, endpoint) = (self.name, &self.hub.endpoint);
        let code = text(response.headers(), "x-error-code").unwrap_or_default();
        let status = response.status().as_u16();
        let why =
            if self.hub.token.is_some() { "the token sent may not read it" } else { "no token was sent" };
        match (status, code) {
            (200..300, _) => Ok(()),
            (401 | 403, "GatedRepo") | (403, _) => refuse!(
                "{name} is gated and {why}: accept its terms at {endpoint}/{} and set HF_TOKEN to a token of \
                 that account",
                name.repo
            ),
            (401, "" | "RepoNotFound") => refuse!(
                "{name} does not exist on {endpoint}, or it is private and {why}: check the name, or set HF_TOKEN"
            ),
            (404, "RevisionNotFound") => {
                refuse!("{} has no revision `{}` on {endpoint}", name.repo, name.revision())
            }
            (404, _) if !file.is_empty() => refuse!("{name} has no {file} on {endpoint}"),
            (404, _) => refuse!("there is no model {name} on {endpoint}: check the name"),
            (status, _) => refuse!("{endpoint} answered {status} for {name}: try again later"),
        }
    }
}

enum Received {
    Whole,
    Broken(String),
}

/// Whether a partial answer begins at the requested offset: `bytes 5-9/10` at 5.
fn begins_at(headers: &HeaderMap, first: u64) -> bool {
    ContentRange::of(headers).is_some_and(|range| range.first == first)
}

/// Atomically links a path in a snapshot to a blob.
fn link(etag: &str, place: &Path) -> io::Result<()> {
    let partial = place.with_file_name(format!(".{etag}.{}.link", std::process::id()));
    let _ = fs::remove_file(&partial);
    std::os::unix::fs::symlink(Path::new("../../blobs").join(etag), &partial)?;
    fs::rename(&partial, place)
}

/// Whether a file matches its ETag: the hub uses a SHA-256 for large files and git's SHA-1 of a blob for small ones. ETags of
/// other servers cannot be checked.
fn is_right(path: &Path, etag: &str) -> io::Result<bool> {
    let algorithm = match etag.len() {
        64 => &digest::SHA256,
        40 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
        _ => return Ok(true),
    };
    if !etag.chars().all(|c| c.is_ascii_hexdigit()) {
        return Ok(true);
    }
    let mut file = File::open(path)?;
    let mut context = digest::Context::new(algorithm);
    if etag.len() == 40 {
        context.update(format!("blob {}\0", file.metadata()?.len()).as_bytes());
    }
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => context.update(&buffer[..count]),
        }
    }
    let hex: String = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(hex.eq_ignore_ascii_case(etag))
}
