//! The HTTP connection pool, redirects, and the headers of range requests.

use std::path::PathBuf;
use std::time::Duration;

use ureq::http::{HeaderMap, Response};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::error::DataError;

/// Limit on redirects.
pub const HOPS: usize = 8;

/// Idle connections per host: slightly more than the number of concurrent readers.
const CONNECTIONS: usize = 16;

/// A client whose connections fail after `silence` without a byte sent or received. Redirects are left to the caller, who knows
/// which hosts may see the token. Responses of any status are not errors.
pub fn agent(silence: Duration) -> Result<Agent, DataError> {
    let tls = TlsConfig::builder().root_certs(root_certificates()?).build();
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_idle_connections(2 * CONNECTIONS)
        .max_idle_connections_per_host(CONNECTIONS)
        .timeout_connect(Some(Duration::from_secs(20)))
        .timeout_recv_response(Some(silence))
        .timeout_per_read(Some(silence))
        .timeout_per_write(Some(silence))
        .user_agent(concat!("flatout/", env!("CARGO_PKG_VERSION")))
        .tls_config(tls)
        .build();
    Ok(Agent::new_with_config(config))
}

/// Root certificates: the built-in ones, or those of a file that the user names, as networks with intercepting proxies need.
fn root_certificates() -> Result<RootCerts, DataError> {
    let named = |name: &&str| std::env::var_os(name).is_some_and(|path| !path.is_empty());
    let Some(name) = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"].into_iter().find(named) else {
        return Ok(RootCerts::WebPki);
    };
    let path = PathBuf::from(std::env::var_os(name).expect("the variable was just found"));
    let text = std::fs::read(&path).map_err(|error| {
        DataError::input(format!("{name} names {}, which cannot be read: {error}", path.display()))
    })?;
    let certificates: Vec<Certificate<'static>> = parse_pem(&text)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        let said = format!("{name} names {}, which has no certificates", path.display());
        return Err(DataError::input(said));
    }
    Ok(RootCerts::new_with_certs(&certificates))
}

pub fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// A header with a version of a file (an ETag or a date), without `W/` and quotes.
pub fn tag<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let tag = header(headers, name)?.trim_start_matches("W/").trim_matches('"');
    (!tag.is_empty()).then_some(tag)
}

/// The range of a partial response: `bytes 5-9/10`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentRange {
    pub first: u64,
    pub last: u64,
    /// Size of the whole file, where the server states it.
    pub bytes: Option<u64>,
}

impl ContentRange {
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        Self::parse(header(headers, "content-range")?)
    }

    fn parse(text: &str) -> Option<Self> {
        let (range, bytes) = text.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last).then_some(Self { first, last, bytes: bytes.parse().ok() })
    }
}

/// The target of a redirect.
pub fn location(url: &str, response: &Response<Body>) -> Option<String> {
    if !response.status().is_redirection() {
        return None;
    }
    let next = header(response.headers(), "location")?;
    if next.contains("://") {
        return Some(next.to_string());
    }
    next.starts_with('/').then(|| format!("{}{next}", host(url)))
}

/// The part of a URL before its path.
pub fn host(url: &str) -> &str {
    let after = url.find("://").map_or(0, |at| at + 3);
    url[after..].find('/').map_or(url, |slash| &url[..after + slash])
}

pub fn same_host(one: &str, other: &str) -> bool {
    host(one) == host(other)
}

/// The next page of a paginated listing: `<https://...>; rel="next"`.
pub fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = header(headers, "link")?.split(',');
    let mut next = links.filter(|link| link.contains("rel=\"next\""));
    next.next()?.split_once('<')?.1.split_once('>').map(|(url, _)| url.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The system buffers a few megabytes for a server that does not read; after that the sender would wait for ever.
    #[test]
    fn a_server_that_reads_nothing_is_a_broken_connection() {
        let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", deaf.local_addr().unwrap());
        let began = std::time::Instant::now();
        let sent = agent(Duration::from_millis(200)).unwrap().post(address).send(vec![0u8; 64 << 20]);
        assert!(matches!(sent, Err(ureq::Error::Timeout(_))), "{sent:?}");
        assert!(began.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn ranges_that_make_no_sense_are_not_read() {
        let range = |text| ContentRange::parse(text).map(|range| (range.first, range.last, range.bytes));
        assert_eq!(range("bytes 5-9/10"), Some((5, 9, Some(10))));
        assert_eq!(range("bytes 5-9/*"), Some((5, 9, None)));
        for wrong in ["", "bytes */10", "5-9/10", "bytes 9-5/10", "bytes x-9/10", "bytes 5-9"] {
            assert_eq!(range(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn hosts_end_where_paths_begin() {
        assert_eq!(host("http://a:1/b/c"), "http://a:1");
        assert_eq!(host("http://a"), "http://a");
        assert!(!same_host("http://a/x", "http://a.evil/x"));
        assert!(!same_host("https://a/x", "http://a/x"));
    }

    #[test]
    fn the_next_page_is_the_one_with_that_name() {
        let mut headers = HeaderMap::new();
        headers.insert("link", "<http://a/1>; rel=\"prev\", <http://a/2?x=3>; rel=\"next\"".parse().unwrap());
        assert_eq!(next_page(&headers).as_deref(), Some("http://a/2?x=3"));
        headers.insert("link", "<http://a/1>; rel=\"prev\"".parse().unwrap());
        assert_eq!(next_page(&headers), None);
    }
}
