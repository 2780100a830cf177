//! Access control of requests.
//!
//! On a loopback address every client on this machine is admitted, but only under a name of this machine: a web page whose own
//! name points here (DNS rebinding) is refused because of the `Host` header that its browser sends. On any other address a
//! request needs a token, which is drawn when the server starts and printed with its address. A browser that comes with the
//! token in the address gets a cookie and is redirected to the address without it, so that the token stays out of histories.
//!
//! A server for programs may have a key of its own instead, which every request carries as `Authorization: Bearer KEY`, also on
//! a loopback address.

use std::net::{IpAddr, SocketAddr};

/// Length of a token in bytes, long enough not to be guessed.
const TOKEN_BYTES: usize = 16;

#[derive(Clone, Debug)]
pub struct Guard {
    address: SocketAddr,
    token: Option<String>,
    /// Whether the token is a key that programs send; browsers then get no cookie.
    is_key: bool,
}

/// The parts of a request that a guard checks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Credentials<'a> {
    pub host: Option<&'a str>,
    /// The query's `token`.
    pub token: Option<&'a str>,
    pub cookie: Option<&'a str>,
    pub authorization: Option<&'a str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Admitted,
    /// The token came in the address: store it as this cookie.
    Keep(String),
    Refused(&'static str),
}

impl Guard {
    /// The guard of a server on this address, with a token if other machines can reach it.
    pub fn new(address: SocketAddr) -> Guard {
        let token = (!address.ip().is_loopback()).then(|| random_word(TOKEN_BYTES));
        Guard { address, token, is_key: false }
    }

    /// The guard of a server for programs, with an optional key. Without a key only a loopback address is safe.
    pub fn with_key(address: SocketAddr, key: Option<String>) -> Guard {
        Guard { address, token: key, is_key: true }
    }

    pub fn needs_token(&self) -> bool {
        self.token.is_some()
    }

    /// Whether programs need a key.
    pub fn has_key(&self) -> bool {
        self.is_key && self.token.is_some()
    }

    /// The address to open, including the token if there is one.
    pub fn url(&self) -> String {
        let port = self.address.port();
        let host = match self.address.ip() {
            ip if ip.is_unspecified() => own_name(),
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        match &self.token {
            Some(token) if !self.is_key => format!("http://{host}:{port}/?token={token}"),
            _ => format!("http://{host}:{port}/"),
        }
    }

    pub fn judge(&self, given: Credentials<'_>) -> Verdict {
        let Some(token) = &self.token else {
            return match given.host.is_some_and(is_own_name) {
                true => Verdict::Admitted,
                false => Verdict::Refused("this server answers to localhost only: open it under that name"),
            };
        };
        let is_token = |word: &str| is_equal(word.as_bytes(), token.as_bytes());
        let bearer = given.authorization.and_then(|word| word.strip_prefix("Bearer "));
        if self.is_key {
            return match bearer.is_some_and(is_token) {
                true => Verdict::Admitted,
                false => {
                    Verdict::Refused("the key is missing or wrong: send it as Authorization: Bearer KEY")
                }
            };
        }
        if given.token.is_some_and(is_token) {
            return Verdict::Keep(format!(
                "{}={token}; Path=/; HttpOnly; SameSite=Strict",
                self.cookie_name()
            ));
        }
        let name = self.cookie_name();
        let mut cookies =
            given.cookie.unwrap_or("").split(';').filter_map(|pair| pair.trim().split_once('='));
        match cookies.any(|(known, value)| known == name && is_token(value)) || bearer.is_some_and(is_token) {
            true => Verdict::Admitted,
            false => Verdict::Refused("the token is missing or wrong: open the address that was printed"),
        }
    }

    /// Cookies are shared between ports, so the name contains the port.
    fn cookie_name(&self) -> String {
        format!("flatout-{}", self.address.port())
    }
}

/// Whether a `Host` header names this machine. The port may differ, as behind a tunnel.
fn is_own_name(host: &str) -> bool {
    let bare = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or("", |(ip, _)| ip),
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    bare.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Takes equally long for every word of the token's length, so that timing reveals nothing.
fn is_equal(word: &[u8], token: &[u8]) -> bool {
    word.len() == token.len() && word.iter().zip(token).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// A random word of hexadecimal digits, two per byte, from the operating system.
pub fn random_word(bytes: usize) -> String {
    let mut drawn = vec![0; bytes];
    getrandom::fill(&mut drawn).expect("the operating system gives random bytes");
    drawn.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of this machine, for an unspecified address.
fn own_name() -> String {
    let named = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_plain = |name: &&str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.')
    };
    Some(named.trim()).filter(is_plain).unwrap_or("127.0.0.1").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(address: &str) -> Guard {
        Guard::new(address.parse().unwrap())
    }

    #[test]
    fn loopback_answers_to_its_own_names() {
        let guard = guard("127.0.0.1:8600");
        assert_eq!(guard.url(), "http://127.0.0.1:8600/");
        let judge = |host| guard.judge(Credentials { host, ..Credentials::default() });
        for own in ["localhost:8600", "LOCALHOST", "127.0.0.1:9", "[::1]:8600", "127.1.2.3"] {
            assert_eq!(judge(Some(own)), Verdict::Admitted, "{own}");
        }
        for other in [
            "evil.example:8600",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "[::2]",
            "[::1",
            "10.0.0.1",
        ] {
            assert!(matches!(judge(Some(other)), Verdict::Refused(_)), "{other}");
        }
        assert!(matches!(judge(None), Verdict::Refused(_)));
    }

    #[test]
    fn programs_send_their_key() {
        let guard = Guard::with_key("127.0.0.1:8000".parse().unwrap(), Some("secret".into()));
        assert_eq!(guard.url(), "http://127.0.0.1:8000/");
        let judge = |authorization| guard.judge(Credentials { authorization, ..Credentials::default() });
        assert_eq!(judge(Some("Bearer secret")), Verdict::Admitted);
        for wrong in
            [None, Some(""), Some("secret"), Some("Bearer "), Some("Bearer secre"), Some("Bearer secrets")]
        {
            assert!(matches!(judge(wrong), Verdict::Refused(_)), "{wrong:?}");
        }
        let in_address = Credentials { token: Some("secret"), ..Credentials::default() };
        assert!(matches!(guard.judge(in_address), Verdict::Refused(_)), "an address is kept in logs");
        let without = Guard::with_key("127.0.0.1:8000".parse().unwrap(), None);
        let host = |host| without.judge(Credentials { host: Some(host), ..Credentials::default() });
        assert_eq!(host("localhost:8000"), Verdict::Admitted);
        assert!(matches!(host("evil.example"), Verdict::Refused(_)));
    }

    #[test]
    fn other_addresses_need_the_token() {
        let guard = guard("0.0.0.0:8600");
        let url = guard.url();
        let token = url.split_once("?token=").unwrap().1;
        assert_eq!(token.len(), 2 * TOKEN_BYTES);
        assert_ne!(self::guard("0.0.0.0:8600").url(), url, "every server draws its own");
        let any = Credentials { host: Some("gpu7.example:8600"), ..Credentials::default() };
        assert!(matches!(guard.judge(any), Verdict::Refused(_)));
        let Verdict::Keep(cookie) = guard.judge(Credentials { token: Some(token), ..any }) else {
            panic!("the right token is refused")
        };
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
        let pair = cookie.split(';').next().unwrap();
        let with = format!("other=1; {pair}; last=2");
        assert_eq!(guard.judge(Credentials { cookie: Some(&with), ..any }), Verdict::Admitted);
        let bearer = format!("Bearer {token}");
        assert_eq!(guard.judge(Credentials { authorization: Some(&bearer), ..any }), Verdict::Admitted);
        let (shorter, longer) = (&token[1..], format!("{token}0"));
        for wrong in ["", "0", shorter, &longer, &token.replace(&token[..1], "g")] {
            assert!(matches!(guard.judge(Credentials { token: Some(wrong), ..any }), Verdict::Refused(_)));
            let cookie = format!("flatout-8600={wrong}");
            assert!(matches!(guard.judge(Credentials { cookie: Some(&cookie), ..any }), Verdict::Refused(_)));
        }
    }
}
